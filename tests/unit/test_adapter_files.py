"""What peft stores of an adapter, and models with adapters as trees over their bases."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from posttrain.data.assets import inspect_adapter
from posttrain.domain.adapters import CONFIG, FOLDER, WEIGHTS, AdapterSize, SavedAdapter, base_files, extended
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.settings import LoraConfig
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import TreeFile, put_extended, put_listing, tree_listing

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"],
    "bias": "none", "use_dora": False, "rank_pattern": {}, "modules_to_save": None, "init_lora_weights": True,
}  # fmt: skip
OWN = (f"{FOLDER}/{CONFIG}", f"{FOLDER}/{WEIGHTS}")


def test_a_configuration_of_peft_is_read_and_written() -> None:
    saved = SavedAdapter.from_json(PLAIN, "a.json")
    assert saved == SavedAdapter(8, 16.0, ("q_proj", "v_proj"))
    assert saved.scale == 2.0
    judge = SavedAdapter.from_json({**PLAIN, "modules_to_save": ["score"], "use_rslora": True}, "a.json")
    assert judge.scores
    assert judge.scale == pytest.approx(16 / 8**0.5)
    for one in (saved, judge):
        assert SavedAdapter.from_json(one.to_json(), "a.json") == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, since only plain LoRA is supported, got 'IA3'"),
        ({"bias": "all"}, "bias must be none"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern must be unset"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save may name score only, got \['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 changes the base's weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights lora_ga changes the base's weights"),
        ({"kasa_config": {"a": 1}}, "kasa_config must be unset, since only plain LoRA is supported"),
        ({"a_later_variant": True}, "a_later_variant must be unset"),
        (
            {"r": 0},
            "r must be from 1 to 4096, lora_alpha above 0 and at most 1e.06, and use_rslora true or false, got 0",
        ),
        ({"lora_alpha": 10**400}, "lora_alpha above 0 and at most"),
        ({"use_rslora": "false"}, "use_rslora true or false, got 8, 16 and 'false'"),
        ({"r": True}, "r must be from 1 to 4096"),
        ({"target_modules": []}, r"target_modules must name linear layers, got \[\]"),
    ],
)
def test_more_than_plain_lora_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SavedAdapter.from_json({**PLAIN, **change}, "a.json")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(anything | st.fixed_dictionaries({}, optional=dict.fromkeys(PLAIN, anything)))
def test_a_hostile_configuration_is_refused_or_read(value: Any) -> None:
    with suppress(InputError):
        assert 1 <= SavedAdapter.from_json(value, "a.json").rank <= 4096


@pytest.mark.parametrize(
    ("lora", "word"),
    [({"rank": 4}, "rank 8"), ({"alpha": 8.0}, "alpha 16"), ({"rslora": True}, "rslora false"),
     ({"targets": ("k_proj",)}, r"targets \[q_proj, v_proj\]")],
)  # fmt: skip
def test_a_stage_continues_the_same_adapter_only(lora: dict[str, Any], word: str) -> None:
    saved = SavedAdapter.from_json(PLAIN, "a.json")
    saved.refuse_other(LoraConfig(rank=8, alpha=16.0).described(), "sft")
    with pytest.raises(InputError, match=f"model sft has an adapter of {word}"):
        saved.refuse_other(LoraConfig(**{"rank": 8, "alpha": 16.0, **lora}).described(), "sft")


def test_the_size_of_an_adapter_counts_a_named_layer_in_every_decoder_layer() -> None:
    layer = {"q_proj": (8, 4), "v_proj": (2, 4)}
    for targets in (("q_proj",), ("model.layers.0.self_attn.q_proj",)):
        assert AdapterSize(3, targets).parameters(layer, 2) == 2 * 3 * (8 + 4)
    assert AdapterSize(3).parameters(layer, 2) == 2 * 3 * (12 + 6)


def test_a_message_names_an_adapter_that_the_stage_can_declare() -> None:
    saved = SavedAdapter(4, 1 / 3, ("q_proj",))
    declared = yaml.safe_load(saved.written)["adapter"]["lora"]
    saved.refuse_other(LoraConfig(**declared).described(), "sft")


SHAPES = {
    "model.embed_tokens.weight": [32, 8],
    **{f"model.layers.{n}.self_attn.{name}.weight": [8, 8] for n in range(2) for name in ("q_proj", "v_proj")},
    "model.layers.0.mlp.experts.0.up_proj.weight": [16, 8],
    "model.layers.0.input_layernorm.weight": [8],
}
Q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def adapter_folder(path: Path, config: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A folder of peft; `changed`: tensor → another array, or None for none."""
    path.mkdir()
    tensors = {
        Q.format(n, part): np.ones((4, 8) if part == "A" else (8, 4), np.float32) for n in (0, 1) for part in "AB"
    }
    tensors = {name: value for name, value in {**tensors, **changed}.items() if value is not None}
    save_file(tensors, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps({**PLAIN, "r": 4, "target_modules": ["q_proj"], **(config or {})}))
    return path


@pytest.mark.parametrize(
    ("targets", "resolved"),
    [
        (["q_proj"], ("q_proj",)),
        (r".*\.q_proj", ("q_proj",)),
        ("all-linear", ("q_proj",)),
        ("([a-z._0-9]+)+!", ("q_proj",)),  # which would take for ever to match
    ],
)
def test_targets_of_an_added_adapter_are_the_layers_that_it_has(targets: Any, resolved: Any, tmp_path: Path) -> None:
    saved, meta = inspect_adapter(
        adapter_folder(tmp_path / "a", {"target_modules": targets}), "base", "sha256:x", SHAPES
    )
    assert saved.targets == resolved
    assert meta["parameters"] == 4 * 4 * 8


def test_a_pattern_of_some_layers_becomes_their_names(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a", {"target_modules": "x"}, **{Q.format(1, "A"): None, Q.format(1, "B"): None})
    saved, _ = inspect_adapter(folder, "base", "sha256:x", SHAPES)
    assert saved.targets == ("model.layers.0.self_attn.q_proj",)


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({}, {Q.format(0, "A"): None}, "q_proj.lora_A.weight has shape none, expected .4, 8."),
        ({}, {Q.format(0, "A"): np.ones((), np.float32)}, r"has shape none, expected \[4, 8\]"),
        ({}, {Q.format(0, "A"): np.ones(4, np.float32)}, r"has shape \[4\], expected \[4, 8\]"),
        ({"r": 8}, {}, r"has shape \[4, 8\], expected \[8, 8\]"),
        ({}, {"hello": np.ones(2, np.float32)}, r"hello has shape \[2\], expected none"),
        ({"target_modules": ["q_proj", "v_proj"]}, {}, r"v_proj.lora_A.weight has shape none"),
        ({"target_modules": ["nichts"]}, {}, r"q_proj.lora_A.weight has shape \[4, 8\], expected none"),
        ({"modules_to_save": ["score"]}, {}, "score.weight has shape none"),
        ({}, {Q.format(0, "A"): np.ones((4, 8), np.int8)}, "must have one of the types F64, F32, F16, BF16, got I8"),
        ({}, {Q.format(1, "B"): np.full((8, 4), np.nan, np.float16)}, "must be finite, got NaN or infinity"),
        ({}, {Q.format(1, "B"): np.full((8, 4), -np.inf)}, "must be finite, got NaN or infinity"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_not_registered(
    config: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        inspect_adapter(adapter_folder(tmp_path / "a", config, **changed), "base", "sha256:x", SHAPES)
    assert "\n" not in str(refused.value)


names = st.text("abc/.", min_size=1, max_size=6)


@given(st.dictionaries(names, st.integers()), st.dictionaries(st.sampled_from(OWN), st.integers(), max_size=2))
def test_an_adapter_replaces_only_an_adapter(base: dict[str, int], added: dict[str, int]) -> None:
    if added.keys() != set(OWN):
        with pytest.raises(IntegrityError, match="an adapter must consist of"):
            extended(base, added)
        return
    found = extended({**base, f"{FOLDER}/old": 1, OWN[0]: 2}, added)
    assert found == {**base_files(base), **added}
    assert base_files(found) == base_files(base)


def test_a_tree_with_an_adapter_names_the_blobs_of_its_base() -> None:
    blobs = open_blobs("memory://adapters")
    file = {name: TreeFile(blobs.put(name.encode()), len(name)) for name in ("config.json", "m.safetensors", *OWN)}
    base = put_listing(blobs, {name: file[name] for name in ("config.json", "m.safetensors")})
    adapter = put_listing(blobs, {name: file[name] for name in OWN})
    made = put_extended(blobs, base, adapter)
    assert tree_listing(blobs, made) == file
    assert put_extended(blobs, made, adapter) == made, "an adapter over an adapter is over the base"
    with pytest.raises(IntegrityError, match=r"got config\.json, m\.safetensors"):
        put_extended(blobs, base, base)
