"""People, jobs and crashes in any order: what the product says is what a reference model says (`control_model`).

`make chaos` tries more of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import control_model
import pytest
from control_bench import RUN, ManualClock, evaluate, fail, resolve, train
from control_model import ENDED, JOBS, RefusedError
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from posttrain.api.handles import Channel, Run
from posttrain.app.control import control_of
from posttrain.app.workspace import Workspace
from posttrain.control import actions, channels
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler
from posttrain.domain import ports
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import FailureClass, PosttrainError
from posttrain.domain.jobs import JobResult
from posttrain.domain.policies import parse_policy
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.store.attempts import AttemptFolder
from posttrain.store.audit import verify_rows
from posttrain.store.sealer import seal, verify_chain

CHANNELS = ("prod", "beta")
POLICY = {
    "gates": [{"name": "floor", "metric": "heldout/accuracy", "at_least": 0.6}],
    "suites": {"heldout": {"data": "dataset:heldout@1", "digest": digest_json("dataset:heldout"), "evaluators": "any"}},
}
ASKING = {**POLICY, "approvers": ["user:bob"]}
DEADLY = (
    "submit.before_commit", "submit.after_commit", "attempt.after_intent", "attempt.after_launch",
    "attempt.after_handle", "collect.before_publish", "collect.after_publish", "collect.after_commit",
    "gate.before_commit", "gate.after_commit", "promote.before_commit", "promote.after_commit", "sealer.before_commit",
)  # fmt: skip
WHICH = st.integers(0, 7)


class Died(BaseException):
    """The process is gone where it stood."""


class People(RuleBasedStateMachine):
    """Whatever they do, the product and the model say the same."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=folder))
        shutil.copytree(folder / "empty", self.root, dirs_exist_ok=True)
        self.clock = ManualClock()
        self.executor = FakeExecutor(now=self.clock.now)
        self.processes = 0
        self.doom = ""
        self.runs: dict[str, control_model.Run] = {}
        self.manifests: dict[str, Any] = {}
        self.models: dict[str, str] = {}  # digest → what the model calls it
        self.channels = {name: control_model.Channel() for name in CHANNELS}
        self.open()

    def open(self) -> None:
        """A new process."""
        self.processes += 1
        owner = f"host:{self.processes}:0"
        self.workspace = Workspace(self.root, actor="user:ada")
        self.workspace.ledger.clock = self.clock
        stores = self.workspace.stores = replace(self.workspace.stores, clock=self.clock)
        jobs = self.workspace.jobs = replace(
            self.workspace.jobs, executor=self.executor, slots=16, beside=0, workspace=lambda: "this one"
        )
        self.workspace.reconciler = Reconciler(stores, jobs, owner, lambda other: other == owner)

    def teardown(self) -> None:
        """What it left holds."""
        self.verify()
        self.workspace.close()
        shutil.rmtree(self.root)

    # --- what people do

    @initialize(
        first=st.lists(st.sampled_from(CHANNELS), min_size=1, max_size=4),
        point=st.sampled_from(DEADLY),
        asked=st.sampled_from(CHANNELS),
    )
    def begins(self, first: list[str], point: str, asked: str) -> None:
        """With some releases, a channel that asks somebody, and a process that dies."""
        self.doom = point
        for channel in first:
            self.submits(channel, True)
            self.goes_through(-1)
        self.sets_policy(asked, ASKING)
        self.submits(CHANNELS[0], True)
        self.all_are_driven()

    @precondition(lambda self: len(self.runs) < 7)
    @rule(channel=st.sampled_from(CHANNELS), good=st.booleans())
    def submits(self, channel: str, good: bool) -> None:
        """A new run."""
        kept = self.channels[channel].policy
        number, stores = len(self.runs), self.workspace.stores
        raw = {**RUN, "seed": number, "gates": RUN["gates"][:1], "release": {"channel": channel, "model": "sft"}}
        spec = parse_run_spec({**raw, "budget": {"attempts": control_model.ATTEMPTS}}, "run.yaml")
        pinned = channels.policy_of(stores, channel)
        manifest = plan_run(spec, "run.yaml", resolve, self.workspace.jobs.trainers, policy=pinned).manifest
        run_id = self.act(lambda: submit(self.workspace.stores, manifest).run.id)
        model = f"model {number}"
        self.runs[run_id] = control_model.Run(model, good, self.channels[channel], kept)
        self.manifests[run_id] = manifest

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, again=st.booleans())
    def submits_the_same(self, which: int, again: bool) -> None:
        """Attached to, unless another one is asked for: of what was computed before nothing is computed again."""
        run_id = self.pick(which)
        run, manifest = self.runs[run_id], self.manifests[run_id]
        again = again and run.done == len(JOBS) and len(self.runs) < 9
        found = submit(self.workspace.stores, manifest, again=again)
        assert found.attached == (not again)
        if again:
            self.runs[found.run.id] = replace_run(run)
            self.manifests[found.run.id] = manifest
        else:
            assert self.manifests[found.run.id] is manifest

    @precondition(lambda self: any(not run.stopping for run in self.runs.values()))
    @rule(which=WHICH)
    def stops(self, which: int) -> None:
        """A run that has not ended."""
        run_id = self.pick(which)
        self.same(self.runs[run_id].stop, lambda: Run(control_of(self.workspace), run_id).stop())

    @precondition(lambda self: self.runs)
    @rule(which=WHICH)
    def retries(self, which: int) -> None:
        """A run that was stopped, or failed."""
        run_id = self.pick(which)
        self.same(self.runs[run_id].retry, lambda: Run(control_of(self.workspace), run_id).retry())

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, lift=st.booleans())
    def promotes(self, which: int, lift: bool) -> None:
        """A run's model, to its channel."""
        run_id = self.pick(which)
        run = self.runs[run_id]
        name = next(name for name, channel in self.channels.items() if channel is run.channel)
        reason = "it is better than nothing" if lift else ""
        self.same(
            lambda: run.promote(lift),
            lambda: Run(control_of(self.workspace), run_id).promote(name, lift_quarantine=reason),
        )

    @rule(name=st.sampled_from(CHANNELS))
    def rolls_back(self, name: str) -> None:
        """To the model before."""
        self.same(self.channels[name].rollback, lambda: Channel(control_of(self.workspace), name).rollback())

    @rule(name=st.sampled_from(CHANNELS), frozen=st.sampled_from(("", "", "releases", "all")))
    def freezes(self, name: str, frozen: str) -> None:
        """A channel, or lets it move again."""
        at = Channel(control_of(self.workspace), name)
        does = at.unfreeze if not frozen else lambda: at.freeze(rollbacks=frozen == "all")
        self.same(lambda: self.channels[name].change(frozen=frozen), does)

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, verdict=st.sampled_from(("approved", "approved", "rejected")))
    def says(self, which: int, verdict: str) -> None:
        """The approver of a run's channel, of its release."""
        run_id, stores = self.pick(which), replace(self.workspace.stores, actor="user:bob")
        does = lambda: actions.say(stores, actions.find_release(stores, run_id, None), verdict)  # noqa: E731
        self.same(lambda: self.runs[run_id].say(verdict), does)

    @rule(name=st.sampled_from(CHANNELS), which=st.sampled_from((None, POLICY, ASKING, ASKING)))
    def sets_policy(self, name: str, which: dict[str, Any] | None) -> None:
        """Or takes it away."""
        policy = parse_policy(which, "policy") if which else None
        self.same(
            lambda: self.channels[name].change(policy=policy.digest if policy else None, asks=which is ASKING),
            lambda: channels.set_policy(self.workspace.stores, name, policy),
        )

    # --- what happens

    @precondition(lambda self: any(run.job == "lives" for run in self.runs.values()))
    @rule(which=WHICH, how=st.sampled_from(("succeeds", "succeeds", "succeeds", "vanishes", "breaks", "heeds")))
    def a_job_ends(self, which: int, how: str) -> None:
        """By itself, or for somebody told it to."""
        living = [run_id for run_id, run in self.runs.items() if run.job == "lives"]
        run_id = living[which % len(living)]
        if how != "heeds" or self.runs[run_id].told is not None:
            self.end(run_id, how)

    def end(self, run_id: str, how: str) -> None:
        """A run's job ends like this."""
        run = self.runs[run_id]
        stage = JOBS[run.done]
        request = [one for one in self.executor.launched if one.labels["run"] == run_id][-1]
        assert request.labels["stage"] == stage
        succeeds = train(run.model) if stage == "sft" else evaluate(190 if run.good else 140)
        scripts: dict[str, Callable[[AttemptFolder], int | None]] = {
            "succeeds": succeeds,
            "vanishes": lambda folder: -9,
            "breaks": fail(FailureClass.BUG),
            "heeds": lambda folder: folder.write_result(JobResult("stopped")),
        }
        code = scripts[how](AttemptFolder(request.folder))
        self.executor.finish(request.name, code or 0)
        run.job = how

    @rule(seconds=st.sampled_from((0.4, 3.0, 40.0, 100_000.0)))
    def time_passes(self, seconds: float) -> None:
        """Back-offs and leases run out."""
        self.clock.sleep(seconds)

    @precondition(lambda self: not self.doom)
    @rule(point=st.sampled_from(DEADLY))
    def the_process_will_die(self, point: str) -> None:
        """Whoever acts next dies where this point is reached; another process is asked the same again."""
        self.doom = point

    @rule()
    def the_process_dies(self) -> None:
        """Between two commands."""
        self.open()

    @precondition(lambda self: self.runs)
    @rule()
    def all_are_driven(self) -> None:
        """As far as they get."""
        for run_id, run in self.runs.items():
            if run.state not in ENDED:
                self.is_driven(run_id)

    @precondition(lambda self: any(run.state not in ENDED for run in self.runs.values()))
    @rule(which=WHICH)
    def goes_through(self, which: int) -> None:
        """A run, without an accident."""
        open_ones = [run_id for run_id, run in self.runs.items() if run.state not in ENDED]
        run_id = open_ones[which % len(open_ones)]
        self.is_driven(run_id)
        while self.runs[run_id].job == "lives":
            self.end(run_id, "succeeds")
            self.is_driven(run_id)

    def is_driven(self, run_id: str) -> None:
        """As far as it gets."""
        self.act(lambda: self.drive(run_id))
        self.runs[run_id].drive(self.clock.now())

    # --- what must hold

    @invariant()
    def lists_runs(self) -> None:
        """`ls` and `get`."""
        ledger = self.workspace.ledger
        found = {run.id: run.state for run in ledger.runs()}
        assert found == {run_id: run.state for run_id, run in self.runs.items()}
        for run_id, run in self.runs.items():
            attempts = [attempt.stage for attempt in ledger.attempts(run_id)]
            assert {name: attempts.count(name) for name in JOBS} == run.made

    @invariant()
    def shows_channels(self) -> None:
        """The history of a channel, what is live, and what holds."""
        for name, expected in self.channels.items():
            at = Channel(control_of(self.workspace), name)
            history = [(entry.action, self.called(entry.model_digest)) for entry in at.history]
            assert history == expected.history
            live, record = at.live, at.record
            assert (self.called(live.model_digest) if live else None) == expected.live
            assert (live.sequence if live else 0) == len(history)
            barred = {self.called(one.model_digest) for one in self.workspace.ledger.quarantine(name)}
            assert barred == expected.quarantined
            assert (record.frozen, record.policy) == (expected.frozen, expected.policy)

    def verify(self) -> None:
        """`verify`: the chain holds, and says what the rows say."""
        self.act(lambda: seal(self.workspace.ledger))
        assert verify_chain(self.workspace.ledger).pending == 0
        verify_rows(self.workspace.ledger)

    # --- how

    def pick(self, which: int) -> str:
        """One of the runs."""
        return list(self.runs)[which % len(self.runs)]

    def called(self, digest: str) -> str:
        """What the model calls a model."""
        if digest not in self.models:
            for run_id, run in self.runs.items():
                made = next(one for one in self.workspace.ledger.stages(run_id) if one.name == "sft").outputs
                if made:
                    self.models[made["model"]["digest"]] = run.model
        return self.models[digest]

    def same(self, expected: Callable[[], object], does: Callable[[], object]) -> None:
        """The product does what the model says, or refuses as it says."""
        answers = []
        for way in (expected, does):
            try:
                way()
                answers.append("")
            except RefusedError as refused:
                answers.append(str(refused))
            except PosttrainError as error:
                answers.append(type(error).__name__)
        assert answers[0] == answers[1]

    def act(self, does: Callable[[], Any]) -> Any:
        """Do something; by a second process where the first dies of it."""
        if not self.doom:
            return does()
        ports._reached.clear()
        with patch.dict(os.environ, {"POSTTRAIN_CRASHPOINT": self.doom}), patch("os.kill", die):
            try:
                return does()
            except Died:
                self.doom = ""
                self.open()
        return does()

    def drive(self, run_id: str) -> None:
        """Until nothing changes at this moment."""
        for _ in range(100):
            tick = self.workspace.reconciler.tick(run_id)
            assert tick is not None
            if not tick.changed:
                return
        raise AssertionError(f"{run_id} never comes to rest")


def die(*_: object) -> None:
    """Instead of a signal to the process that all of this runs in."""
    raise Died


def replace_run(run: control_model.Run) -> control_model.Run:
    """Another run of the same manifest, whose jobs need not run again."""
    return control_model.Run(run.model, run.good, run.channel, run.policy, done=len(JOBS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "histories",
    [int(os.environ["SEEDS"])] if os.environ.get("SEEDS") else [4, pytest.param(12, marks=pytest.mark.slow)],
)
def test_people_get_what_the_model_says(histories: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    Workspace(tmp_path / "empty", create=True).close()
    run_state_machine_as_test(
        lambda: People(tmp_path),
        settings=settings(
            max_examples=histories,
            stateful_step_count=30,
            derandomize=True,
            phases=list(Phase) if os.environ.get("SEEDS") else [Phase.generate],  # the shortest history takes long
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
