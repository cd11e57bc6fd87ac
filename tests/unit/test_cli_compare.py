"""`posttrain compare`: a paired table of runs and evaluate stages, through the command line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cli_world
import numpy as np
import pytest
from cli_world import BAD_REWARD, GOOD_REWARD, RUN, World, make_world

from posttrain.control.comparison import Subject, _cells, _metrics, _settings
from posttrain.decision.gates import Evidence
from posttrain.domain.kinds import RATE

EVALUATE = "  evaluate: {kind: evaluate, model: grpo, suites: {heldout: {data: heldout}}}\n"
BASE = "  base-eval: {kind: evaluate, model: base, suites: {heldout: {data: heldout}}}\n"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str, str]]:
    """A good run and a spoiled one."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("compare"), patch)
        world.prepare()
        world.write("run.yaml", RUN.replace(EVALUATE, BASE + EVALUATE))
        world.ok("run", "run.yaml")
        good = world.newest()
        world.ok("asset", "add", "reward:sort", world.write("reward_v2.py", BAD_REWARD))
        assert world("run", "run.yaml").exit_code == 3
        yield world, good, world.newest()


@pytest.mark.slow
def test_two_runs_are_paired_item_by_item(story: tuple[World, str, str]) -> None:
    world, good, bad = story
    found = world.json("compare", good, bad)
    assert [one["label"] for one in found["subjects"]] == ["A", "B"]
    assert [one["stages"] for one in found["subjects"]] == [["evaluate"], ["evaluate"]], "the released model's"
    (row,) = found["metrics"]
    assert (row["metric"], row["better"]) == ("heldout/accuracy", "higher")
    a, b = row["values"]["A"], row["values"]["B"]
    assert (a["value"], a["difference"], b["value"]) == (0.98, None, 0.3)
    gap = b["difference"]
    assert (gap["higher"], gap["lower"], gap["same"], gap["items"]) == (0, 136, 64, 200)
    assert gap["low"] < gap["value"] < gap["high"] < 0
    (reward,) = [one for one in found["parameters"] if one["path"] == "stages.grpo.inputs.reward"]
    assert reward["values"] == {"A": "reward:sort@1", "B": "reward:sort@2"}
    text = world.ok("compare", good, bad)
    assert "won  lost  tied" in text
    assert "0   136    64" in text
    assert "-0.68 [-0.7" in text
    assert "exact McNemar" in text
    assert "parameters that differ" in text


def test_audit_33_one_seed_of_each_is_warned_of(story: tuple[World, str, str]) -> None:
    world, good, bad = story
    (warning,) = world.json("compare", good, bad)["warnings"]
    assert warning.startswith("only 1 seed of each setting is compared")
    assert f"warning: {warning}" in " ".join(world.ok("compare", good, bad, "--html", "page.html").split())
    assert warning.partition(" (")[0] in (world.root / "page.html").read_text()


def test_audit_33_three_seeds_of_each_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    world.ok("sweep", "run.yaml", "--set", "grpo.steps=4,6", "--seeds", "3")
    runs = [run["id"] for run in world.json("ls")["runs"]]
    assert world.json("compare", *runs)["warnings"] == []
    assert world.json("compare", *runs[1:])["warnings"][0].startswith("only 2 seeds of each")
    assert world.json("compare", *runs[:3])["warnings"] == [], "seeds of one setting"


def test_stages_of_one_run_are_compared_and_many_at_once(story: tuple[World, str, str]) -> None:
    world, good, bad = story
    found = world.json("compare", f"{good}/base-eval", good, f"{bad}/evaluate", f"{bad}/baseline-evaluate")
    values = found["metrics"][0]["values"]
    assert [values[label]["value"] for label in "ABCD"] == [0.1, 0.98, 0.3, 0.98]
    assert values["B"]["difference"]["higher"] == 176
    assert [one["model"] for one in found["subjects"]] == [
        "base model:tiny@1",
        "stage grpo",
        "stage grpo",
        "channel prod",
    ]
    assert len(found["parameters"][0]["values"]) == 4
    alone = world.ok("compare", f"{good}/base-eval", good)
    assert "parameters" not in alone, "one run has one set"


def test_other_items_are_not_paired_and_said_so(story: tuple[World, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    world, good, _ = story
    monkeypatch.setattr(cli_world, "metrics_table", partial(cli_world.metrics_table, first=1))
    world.ok("asset", "add", "reward:sort", world.write("reward_v4.py", GOOD_REWARD.replace("1.0", "0.95")))
    world.write("other.yaml", RUN.replace("name: sort", "name: other"))
    world("run", "other.yaml")
    found = world.json("compare", good, "other")
    cell = found["metrics"][0]["values"]["B"]
    assert cell["difference"] is None
    assert cell["unpaired"] == "measured on other items (199 of 200 and 200 are shared)"
    assert "not paired: measured on other items (199 of 200 and 200 are shared)" in world.ok("compare", good, "other")


def test_settings_that_numbers_depend_on_are_noted(story: tuple[World, str, str]) -> None:
    world, good, _ = story
    world.ok("asset", "add", "reward:sort", world.write("reward_v3.py", GOOD_REWARD.replace("1.0", "0.9")))
    shorter = EVALUATE.replace("{data: heldout}", "{data: heldout, max_new_tokens: 5}")
    world.write("short.yaml", RUN.replace("name: sort", "name: short").replace(EVALUATE, shorter))
    world("run", "short.yaml")
    (note,) = world.json("compare", good, "short")["notes"]
    assert "max_new_tokens 64 → 5" in note
    assert "note: suite heldout: the settings of B differ from those of A" in world.ok("compare", good, "short")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{good}"], "name 2 to 26"),
        (["{good}", "{good}"], "was named several times"),
        (["{good}", "{good}/evaluate"], "was named several times"),
        (["{good}/sft", "{bad}"], "must be an evaluate stage, got 'sft'"),
        (["{good}/evalute", "{bad}"], "did you mean 'evaluate'"),
        (["{good}", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_compared_ends_in_one_line(story: tuple[World, str, str], words: list[str], told: str) -> None:
    world, good, bad = story
    result = world("compare", *(word.format(good=good, bad=bad) for word in words))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert told in result.stderr


def test_a_run_without_an_evaluation_is_refused(story: tuple[World, str, str]) -> None:
    world, good, _ = story
    lines = [line for line in RUN.splitlines() if not line.lstrip().startswith(("evaluate", "gates", "- {", "release"))]
    world.write("bare.yaml", "\n".join(lines).replace("name: sort", "name: bare"))
    world.ok("run", "bare.yaml")
    result = world("compare", good, "bare")
    assert result.exit_code == 2
    assert "has no evaluation" in result.stderr


def scored(label: str, identities: dict[str, tuple[str, str]], **suites: Any) -> Subject:
    """A subject with one evaluation: metric → data and reward that it was measured with."""
    evidence = {name: Evidence(("a", "b", "c"), np.array([1.0, 0.0, 1.0]), RATE) for name in identities}
    stage = SimpleNamespace(params={"suites": suites}, trainer="native")
    measured: Any = SimpleNamespace(evidence=evidence, identity=identities.__getitem__, stage=stage)
    manifest: Any = SimpleNamespace(code={"native": "c"})
    run: Any = SimpleNamespace(id=f"run-{label}")
    return Subject(label, run, manifest, {}, (measured,))


def test_audit_24_a_metric_is_told_once_and_its_first_owner_counts() -> None:
    first = scored("A", {"s/accuracy": ("data", "accuracy")})
    renamed = scored("B", {"t/accuracy": ("data", "accuracy")})
    changed = scored("C", {"s/accuracy": ("other", "accuracy")})
    found = _metrics([first, renamed, changed])
    assert list(found) == ["s/accuracy"]
    assert found["s/accuracy"] is first.evaluations[0]


def test_audit_24_why_a_value_is_not_paired_is_its_own_reason() -> None:
    empty = scored("A", {})
    one = scored("B", {"s/reward": ("data", "reward r1")})
    two = scored("C", {"s/reward": ("data", "reward r2")})
    owner = one.evaluations[0]
    assert [cell.unpaired for cell in _cells([empty, one], "s/reward", owner)] == ["", "A did not measure it"]
    cells = _cells([one, two], "s/reward", owner)
    assert [cell.unpaired for cell in cells] == ["", "its reward differs from that of B"]
    same = _cells([one, scored("D", {"s/reward": ("data", "reward r1")})], "s/reward", owner)
    assert same[1].paired is not None


def test_audit_24_settings_of_sampling_are_compared_where_both_sampled() -> None:
    greedy, sampled = scored("A", {}, s={}), scored("B", {}, s={"samples": 4, "temperature": 1.0})
    hotter = scored("C", {}, s={"samples": 4, "temperature": 1.5})
    assert _settings(greedy, sampled) == _settings(sampled, greedy) == []
    assert _settings(sampled, hotter) == ["suite s: the settings of C differ from those of B: temperature 1.0 → 1.5"]
