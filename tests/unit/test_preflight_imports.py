"""Rewards, judges and dataflows are imported in their cells before a run is submitted, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_world import GOOD_REWARD, World, make_world

from posttrain.preflight import confinement
from posttrain.preflight.confinement import Confinement

ANSWER = confinement._answer  # the real one, which a world puts away
WHOLE = confinement.confinement().whole
STAGES = """name: t
owner: ada
seed: 1
model: model:tiny
data: {train: dataset:train, heldout: dataset:heldout}
rewards: {exact: reward.py, judge: judge.py}
stages:
  first: {kind: sft, data: train, steps: 2}
  own: {kind: dataflow, recipe: "flow:Flow", model: first, data: train, reward: exact, steps: 1, prompts_per_step: 2,
        group_size: 2, max_new_tokens: 4}
  evaluate: {kind: evaluate, model: own, suites: {heldout: {data: heldout, reward: judge, max_new_tokens: 4}}}
"""
FLOW = "from json import dumps\n\n\nclass Flow:\n    def __init__(self, config):\n        pass\n"

pytestmark = pytest.mark.skipif(not WHOLE, reason="this machine gives no whole cell, so nothing is imported")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    monkeypatch.setattr(confinement, "_answer", ANSWER)
    for name in ("reward.py", "judge.py"):
        made.write(name, GOOD_REWARD)
    made.write("flow.py", FLOW)
    made.write("t.yaml", STAGES)
    return made


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "reward.py",
            "stages.own: reward reward.py: reward.py:1 raised ModuleNotFoundError: No module named 'gone_away'",
        ),
        pytest.param(
            "judge.py",
            "stages.evaluate: reward judge.py: judge.py:1 raised ModuleNotFoundError",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flow.py",
            "stages.own: recipe flow.py:1 raised ModuleNotFoundError: No module named 'gone_away'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_audit_22_what_cannot_be_imported_is_refused_before_anything_is_submitted(
    world: World, name: str, line: str
) -> None:
    world.write(name, f"import gone_away\n{Path(name).read_text()}")
    for verb in ("plan", "run"):
        found = world(verb, "t.yaml")
        assert found.exit_code == 2, (found.stdout, found.stderr)
        assert f"error: t.yaml: {line}" in found.stderr.replace("\n", " ")
    assert json.loads(world.ok("ls", "-o", "json"))["runs"] == []


@pytest.mark.slow
def test_a_class_that_does_not_fit_the_turns_is_refused_before_anything_is_submitted(world: World) -> None:
    world.write(
        "t.yaml",
        STAGES.replace("max_new_tokens: 4}\n  ev", "turns: 2, observation_tokens: 3, max_new_tokens: 4}\n  ev"),
    )
    found = world("plan", "t.yaml")
    line = "stages.own: recipe flow.py: Flow has turns 2, but has no method observe(row, responses); define it"
    assert found.exit_code == 2
    assert f"error: t.yaml: {line}" in " ".join(found.stderr.split())
    world.write("flow.py", FLOW + "\n    def observe(self, row, responses):\n        return None\n")
    world.ok("plan", "t.yaml")
    world.write("t.yaml", STAGES)
    found = world("plan", "t.yaml")
    assert "Flow has turns 1, but has an observe method; set turns" in " ".join(found.stderr.split())


def test_audit_22_imports_reach_nothing_outside_of_their_cell_and_are_asked_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f'try:\n    open({str(world.root / "ran")!r}, "w")\nexcept OSError:\n    pass\n'
    world.write("reward.py", mark + GOOD_REWARD)
    world.write("flow.py", f'open({str(world.root / "ran")!r}, "w")\n' + FLOW)  # which the job itself may well do
    world.ok("plan", "t.yaml")
    assert not (world.root / "ran").exists()
    monkeypatch.setattr(confinement, "_answer", lambda *_: pytest.fail("asked again"))
    world.ok("plan", "t.yaml")


def test_audit_22_without_a_whole_cell_nothing_is_imported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ok("init", "--rewards", "trusted")
    monkeypatch.setattr(confinement, "confinement", lambda cache=None: Confinement(False, ("no namespaces",)))
    monkeypatch.setattr(confinement, "_answer", lambda *_: pytest.fail("asked"))
    world.ok("plan", "t.yaml")
