"""`--set PATH=VALUE`: what it reads, where it writes, what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.domain.overrides import (
    overridden,
    parse_override,
    parse_overrides,
    setting_words,
    settings,
    single,
    written,
)

RAW: dict[str, Any] = {
    "name": "x",
    "model": "base",
    "stages": {"sft": {"kind": "sft", "steps": 1}, "model": {"kind": "sft"}},
    "release": None,
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("sft.steps=1,2", (1, 2)),
        ("sft.steps=1", (1,)),
        ("a=0.5,null,true", (0.5, None, True)),
        ("a=[1, 2],[3]", ([1, 2], [3])),
        ("a={b: 1}", ({"b": 1},)),
        ("a='x,y',z", ("x,y", "z")),
        ("a=reward:sort@1,reward:sort@2", ("reward:sort@1", "reward:sort@2")),
        ("a=x=y", ("x=y",)),
        ("a=1e-4,3E+2,1.e5", (1e-4, 300.0, 1e5)),
    ],
)
def test_values_are_yaml(text: str, values: tuple[Any, ...]) -> None:
    assert parse_override(text).values == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps", "must be PATH=VALUE"),
        ("=1", "must be PATH=VALUE"),
        ("a..b=1", "must be PATH=VALUE"),
        (".a=1", "must be PATH=VALUE"),
        ("a=", "a: must have a value after the =, got none; a=null removes the key"),
        ("a=1,1", "values must differ, got 1 twice"),
        ("a=[1", "values must be YAML"),
        ("a=]", "values must be YAML"),
        ("a=" + ",".join(map(str, range(1001))), "must have 1 to 1000 values"),
        ("a= ", "must have a value after the ="),
    ],
)
def test_what_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_override(text)


def test_a_path_comes_once_and_a_run_takes_one_value() -> None:
    with pytest.raises(InputError, match=r"sft\.steps: must be given once"):
        parse_overrides(["sft.steps=1", "stages.sft.steps=2"])
    with pytest.raises(InputError, match="must have one value, got 2; posttrain sweep"):
        single(["a=1,2"])
    assert single(["a=1", "b=x"]) == (("a", 1), ("b", "x"))


def test_every_combination_once_the_last_changing_fastest() -> None:
    found = list(settings(parse_overrides(["a=1,2", "b=x,y"])))
    assert found == [(("a", a), ("b", b)) for a in (1, 2) for b in ("x", "y")]
    assert list(settings(())) == [()]
    assert setting_words(found[0]) == "a 1, b x"
    assert setting_words(()) == "as written"


def test_stages_may_be_left_out_and_maps_may_be_missing() -> None:
    before = copy.deepcopy(RAW)
    assert overridden(RAW, (("sft.steps", 9),))["stages"]["sft"]["steps"] == 9
    assert overridden(RAW, (("stages.sft.steps", 9),))["stages"]["sft"]["steps"] == 9
    nested = overridden(RAW, (("sft.optimizer.learning_rate", 1e-3),))
    assert nested["stages"]["sft"]["optimizer"] == {"learning_rate": 1e-3}
    assert overridden(RAW, (("release.channel", "dev"),))["release"] == {"channel": "dev"}
    assert overridden(RAW, (("model", "other"),))["model"] == "other", "a key of the file comes before a stage's name"
    assert overridden(RAW, (("stages.model.steps", 3),))["stages"]["model"]["steps"] == 3
    assert before == RAW, "the file's own content is not touched"


def test_a_path_through_a_value_or_to_an_unknown_stage_is_refused() -> None:
    with pytest.raises(InputError, match=r"no stage 'grppo' \(did you mean 'grpo'\?\); it has sft, grpo"):
        overridden({"stages": {"sft": {}, "grpo": {}}}, (("stages.grppo.steps", 1),))
    with pytest.raises(InputError, match=r"sft\.steps\.deep: stages\.sft\.steps must be a map, got 1"):
        overridden(RAW, (("sft.steps.deep", 1),))
    with pytest.raises(InputError, match=r"no stage 'dpo'; it has sft, model"):
        overridden(RAW, (("stages.dpo.steps", 1),))
    with pytest.raises(InputError, match=r"--set sfx\.steps: the run file has no stage 'sfx' \(did you mean 'sft'\?\)"):
        overridden(RAW, (("sfx.steps", 1),), ("release", "seed"))
    assert overridden(RAW, (("seed.of", 1),), ("release", "seed"))["seed"] == {"of": 1}, "a key of run files"
    with pytest.raises(InputError, match=r"gates must be a map, got a list; change it in the run file"):
        overridden({"gates": [{"name": "accuracy"}]}, (("gates.accuracy.at_least", 1),))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
)
def test_what_is_written_out_is_read_back(value: Any) -> None:
    assert parse_override(f"a={written(value)}").values == (value,)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 3), min_size=1))
def test_what_is_set_is_what_is_read_back(values: dict[str, int]) -> None:
    found = overridden({}, tuple((f"top.{key}", value) for key, value in values.items()))
    assert found == {"top": values}
