"""Decisions are functions of rows, sights and time: they import nothing that could act, and hold on any rows."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_bench import RUN, resolve
from hypothesis import given, strategies as st

import posttrain.control.decide as decide_module
from posttrain.control import effects
from posttrain.control.decide import STOP_GRACE_SECONDS, JobStatus, View, decide_run, decide_stage, settle
from posttrain.control.plan import plan_run
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Absence, Cause, Failure, JobResult, JobState, Observation
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import (
    RUN as RUN_TABLE,
    STAGE as STAGE_TABLE,
    AttemptState,
    Reason,
    RunState,
    StageState,
    is_final,
)
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, RunRecord, Signal, StageRecord, Watch
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.trainers.native import NativeTrainer

_PURE = {
    "posttrain.control.budgets", "posttrain.control.effects", "posttrain.control.decide",
}  # fmt: skip
LIVE = (AttemptState.PLANNED, AttemptState.LAUNCHED)


def manifest_of(**changes: Any) -> Manifest:
    spec = parse_run_spec({**RUN, **changes}, "run.yaml")
    return plan_run(spec, "run.yaml", resolve, {"native": NativeTrainer()}).manifest


MANIFEST, LIMITED = manifest_of(), manifest_of(budget={"tokens": 1000, "wall_clock": 100})
PAUSES = {
    "night": {"kind": "wait", "for": 60, "after": "sft"},
    "approval": {"kind": "wait", "for": 30, "signal": "go", "within": 90, "after": "gate"},
}
PAUSED = manifest_of(stages={**RUN["stages"], **PAUSES}, release={**RUN["release"], "after": "approval"})


@pytest.mark.parametrize("name", ["decide", "effects", "budgets"])
def test_who_decides_imports_nothing_that_acts(name: str) -> None:
    source = Path(str(decide_module.__file__)).with_name(f"{name}.py").read_text()
    found = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    ours = {module if module != "posttrain.control" else "posttrain.control.budgets" for module in found}
    ours = {module for module in ours if module.startswith("posttrain.") and not module.startswith("posttrain.domain.")}
    assert ours <= _PURE, "rows, values and other pure functions"
    assert not {"time", "random", "os", "pathlib"} & set(found)


observations = st.builds(
    Observation,
    state=st.sampled_from(JobState),
    exit_code=st.sampled_from([None, 0, 1, -9, 73]),
    absent=st.sampled_from(Absence),
    cause=st.sampled_from([None, *Cause]),
    incarnation=st.integers(0, 2),
    handle=st.just("h"),
    seconds=st.sampled_from([None, 0.0, 50.0, 1e6]),
)
failures = st.builds(Failure, st.sampled_from(FailureClass), st.just("it broke"), st.sampled_from(["", "s"]))
words = st.one_of(
    st.none(),
    st.builds(JobResult, st.sampled_from(["succeeded", "stopped"]), seconds=st.sampled_from([0.0, 5.0])),
    st.builds(lambda f: JobResult("failed", failure=f), failures),
)
sights = st.builds(
    JobStatus,
    job=observations,
    ordered=st.booleans(),
    word=words,
    unreadable=st.sampled_from(["", "it is cut short"]),
    another_runs=st.booleans(),
    unheeded=st.just(""),
    progress=st.sampled_from([None, "step 1 of 3", "step 2 of 3"]),
)


@st.composite
def views(draw: Any) -> View:
    """A run in any state that its tables allow, with attempts that fit its stages."""
    manifest = draw(st.sampled_from([MANIFEST, LIMITED, PAUSED]))
    run_state = draw(st.sampled_from(RunState))
    desired = draw(st.sampled_from(["running", "stopped"]))
    run = RunRecord("r", "r", manifest.digest, run_state, "ada", 0.0, desired=desired)
    stages, attempts = [], []
    for position, plan in enumerate(manifest.stages):
        state = draw(st.sampled_from(StageState))
        if state == StageState.RUNNING and kind_of(plan.kind).driver is not Driver.JOB:
            state = StageState.READY
        not_before = draw(st.sampled_from([None, 90.0, 110.0]))
        began = draw(st.sampled_from([None, 5.0, 50.0]))
        stage = StageRecord("r", plan.name, position, plan.kind, state, not_before=not_before, started_at=began)
        stages.append(stage)
        ended = draw(st.lists(st.sampled_from([AttemptState.LOST, AttemptState.FAILED]), max_size=3))
        states = [*ended, *([draw(st.sampled_from(LIVE))] if state == StageState.RUNNING else [])]
        for number, attempt_state in enumerate(states, 1):
            asked = draw(st.sampled_from([None, 10.0, 95.0]))
            signature = draw(st.sampled_from([None, "s"]))
            attempts.append(
                AttemptRecord(
                    "r", plan.name, number, f"r-{plan.name}-{number}", "f", attempt_state, launched_at=50.0,
                    reason=draw(st.sampled_from([Reason.LAUNCHED, Reason.STALLED])),
                    stop_requested_at=asked, failure_signature=signature, seconds=draw(st.sampled_from([0.0, 70.0])),
                )
            )  # fmt: skip
    signals = draw(st.sampled_from([(), (Signal("r", "go", "ada", 60.0),), (Signal("r", "stop", "ada", 60.0),)]))
    watches = [
        Watch(one.name, "r", "step 1 of 3", draw(st.sampled_from([0.0, 7200.0])), draw(st.sampled_from([60.0, 9e6])))
        for one in attempts
        if one.state == AttemptState.LAUNCHED and draw(st.booleans())
    ]
    return View(run, manifest, tuple(stages), tuple(attempts), signals, tuple(watches))


@pytest.mark.slow
@given(views(), sights, st.sampled_from([100.0, 1e7]))
def test_whatever_is_decided_is_allowed_and_decided_again(view: View, job_status: JobStatus, now: float) -> None:
    for effect in decide_run(view):
        assert isinstance(effect, effects.MoveRun)
        assert effect.state in RUN_TABLE[view.run.state]
    for stage in view.stages:
        seen = job_status if stage.state == StageState.RUNNING else None
        effect = decide_stage(view, stage.name, seen, now)
        assert effect == decide_stage(view, stage.name, seen, now)
        if effect is not None:
            assert not is_final("stage", stage.state)
            assert not is_final("run", view.run.state), "another driver ended it"
            _allowed(view, stage, job_status, effect, now)
    end = settle(view)
    if end is not None:
        assert not is_final("run", view.run.state)
        assert end.state in {*RUN_TABLE[view.run.state], RunState.SUCCEEDED, RunState.REJECTED}
        assert not any(stage.state == StageState.RUNNING for stage in view.stages)
        if end.state == RunState.STOPPED:
            assert all(is_final("stage", stage.state) for stage in view.stages), "one would wait in a run that is over"


def _allowed(view: View, stage: StageRecord, job_status: JobStatus, effect: effects.Effect, now: float) -> None:
    match effect:
        case effects.Launch():
            assert not (job_status.ordered and job_status.job.hidden), "what nobody can tell of is not submitted anew"
            assert not (job_status.ordered and job_status.job.state is not JobState.UNKNOWN)
            assert view.run.state != RunState.STOPPING
        case effects.Start() | effects.Judge() | effects.Release() | effects.Bind():
            assert isinstance(effect, effects.Bind) or kind_of(stage.kind).driver is not Driver.WAIT
            assert view.run.state != RunState.STOPPING
            assert not any(other.state == StageState.FAILED for other in view.stages)
        case effects.Collect() | effects.TryAgain():
            assert job_status.job.gone, "what it holds, the next would find taken"
            assert not (job_status.another_runs and job_status.word is None and not job_status.unreadable)
        case effects.End(attempt=attempt) if attempt.state == AttemptState.LAUNCHED:
            assert job_status.job.gone or job_status.unreadable
        case effects.Kill(attempt=attempt):
            asked, watch = attempt.stop_requested_at, view.watch(attempt)
            over = asked is not None and now >= asked + STOP_GRACE_SECONDS
            asleep = attempt.reason == Reason.STALLED and watch is not None and watch.progress == job_status.progress
            assert (
                job_status.word is not None
                or job_status.unreadable
                or over
                or (asleep and watch and watch.quiet >= 7200.0)
            )
        case effects.EndWait(state=state):
            assert kind_of(stage.kind).driver is Driver.WAIT
            assert view.run.state != RunState.STOPPING
            assert state in STAGE_TABLE[stage.state]
            missed = stage.name == "approval" and not any(signal.name == "go" for signal in view.signals)
            early = stage.not_before is not None and now < stage.not_before
            assert (state == StageState.FAILED) == missed
            assert missed or not early
            assert not missed or (stage.started_at is not None and now >= stage.started_at + 90)
        case effects.StopStage():
            assert StageState.STOPPED in STAGE_TABLE[stage.state]
        case _:
            pass


@pytest.mark.slow
@given(views(), sights)
def test_a_job_that_may_be_anything_is_never_ended_nor_followed(view: View, job_status: JobStatus) -> None:
    hidden = Observation(JobState.UNKNOWN, absent=Absence.NOT_VISIBLE_YET)
    blind = replace(job_status, job=hidden, ordered=True, word=None, unreadable="")
    for stage in view.stages:
        if stage.state == StageState.RUNNING:
            effect = decide_stage(view, stage.name, blind, 100.0)
            ends = effects.Collect | effects.TryAgain | effects.End
            assert not isinstance(effect, ends | effects.Launch | effects.RecordLaunch)
