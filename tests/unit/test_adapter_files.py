"""What peft stores of an adapter, and models with adapters as trees over their bases."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.domain.adapters import CONFIG, FOLDER, WEIGHTS, SavedAdapter, base_files, extended
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
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', since only plain LoRA is supported, got 'IA3'"),
        ({"bias": "all"}, "bias must be 'none'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern must be {}"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save may name score only, got \['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 changes the base's weights"),
        ({"r": 0}, "r must be from 1 to 4096 and lora_alpha above 0, got 0 and 16; save"),
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
