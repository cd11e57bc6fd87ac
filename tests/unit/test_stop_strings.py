"""What a run file's stop strings and draws come to: identity, what `plan` warns of, what `get` and `why` say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN as FILE, World, make_world
from hypothesis import given, strategies as st
from test_control_planning import RUN, manifest

from posttrain.control.launch import cache_key
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import InputBlob
from posttrain.domain.manifest import Manifest
from posttrain.engine.config import InitModelConfig
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.files import ModelSource, character_tokenizer, initial_model, save_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.rollout.worker import RolloutWorker


def stopping(grpo: list[str], suite: list[str]) -> Manifest:
    raw: Any = copy.deepcopy(RUN)
    raw["stages"]["grpo"]["stop"] = grpo
    raw["stages"]["evaluate"]["suites"]["heldout"]["stop"] = suite
    return manifest(raw)


def keys(planned: Manifest) -> list[str]:
    made = {"data": InputBlob("sha256:" + "0" * 64, "file", {})}
    return [cache_key(planned, planned.stage(name), made) for name in ("grpo", "evaluate")]


@pytest.mark.slow
@given(
    stop=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=4), max_size=5
    ),
    data=st.data(),
)
def test_order_and_doubles_of_stop_strings_decide_nothing(stop: list[str], data: st.DataObject) -> None:
    again = data.draw(st.permutations(stop + stop[:2]))
    one, other = stopping(stop, stop), stopping(again, again)
    assert one.digest == other.digest
    assert keys(one) == keys(other)
    more = stopping([*stop, "another string"], stop)
    assert more.digest != one.digest
    assert keys(more)[0] != keys(one)[0]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def written(world: World, grpo: str, suite: str) -> str:
    text = FILE.replace("reward: exact,", f"reward: exact, {grpo}").replace(
        "{data: heldout}}}", f"{{data: heldout{suite}}}}}}}"
    )
    return world.write("stops.yaml", text)


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        (
            "",
            "responses to suite heldout end at no strings, but responses in the training of grpo end at '</a>' or "
            "'</b>'",
        ),
        (
            ', stop: ["</a>"]',
            "responses to suite heldout end at '</a>', but responses in the training of grpo end at '</a>' or '</b>'",
        ),
        (', stop: ["</b>", "</a>"]', None),
    ],
    ids=["none", "others", "the same"],
)
def test_plan_warns_of_a_suite_that_ends_responses_otherwise(world: World, suite: str, said: str | None) -> None:
    name = written(world, 'stop: ["</a>", "</b>"],', suite)
    warnings = [line for line in world.json("plan", name)["warnings"] if "end at" in line]
    assert warnings == (
        [] if said is None else [f"evaluate: {said}; add stop: ['</a>', '</b>'] to the suite, unless this is intended"]
    )
    shown = " ".join(world.ok("plan", name).split())
    assert (said is not None) == ("to the suite, unless this is intended" in shown)


def test_plan_warns_of_no_stage_that_was_trained_without(world: World) -> None:
    assert "end at" not in world.ok("plan", written(world, "", ', stop: ["</a>"]'))


def test_get_and_why_say_how_responses_were_drawn(world: World) -> None:
    drawn = ', samples: 4, temperature: 0.7, top_p: 0.9, stop: ["</b>", "</a>"]'
    world.ok("run", written(world, "", drawn))
    said = (
        "heldout: 1 greedy response and 4 sampled responses (temperature 0.7, top_p 0.9) to each item, "
        "each ends at the stop string '</a>' or '</b>'"
    )
    for command in ("get", "why"):
        shown = " ".join(word for word in world.ok(command, world.newest()).split() if word != "│")
        assert said in shown
        stages = {stage["name"]: stage for stage in world.json(command, world.newest())["stages"]}
        assert stages["evaluate"]["drawn"] == [said]
        assert "drawn" not in stages["grpo"]


def test_get_says_nothing_of_greedy_responses(world: World) -> None:
    world.ok("run", written(world, "", ""))
    assert "greedy" not in world.ok("get", world.newest())


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_does_not_load_ends_the_opening(tmp_path: Path, file: str) -> None:
    sizes = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1, context_length=16)
    tokenizer = character_tokenizer(sizes.characters)
    save_model(adopt_module(initial_model(sizes, tokenizer, 0)), tokenizer, tmp_path)
    source = ModelSource(tmp_path)
    RolloutWorker(RankContext(), source, reads_text=True)
    (tmp_path / file).write_text("{")
    RolloutWorker(RankContext(), source)  # who ends at no strings reads no text
    said = "^rollout rank 0 needs a tokenizer to end responses at strings: tokenizer in .* cannot be loaded: .*json$"
    with pytest.raises(InputError, match=said):
        RolloutWorker(RankContext(), source, reads_text=True)
