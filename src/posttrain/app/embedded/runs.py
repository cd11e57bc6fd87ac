"""Submitting runs, telling them something, looking at them. What a verb needs is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.values import Locked, RunDiff, Why
from posttrain.data.confining import refuse_afar

if TYPE_CHECKING:
    from posttrain.api.control import Vigil as AnyVigil
    from posttrain.api.values import Submitted
    from posttrain.app.workspace import Workspace
    from posttrain.control.comparing import Comparison
    from posttrain.control.scores import Scores
    from posttrain.domain.errors import PosttrainError
    from posttrain.domain.manifest import Manifest
    from posttrain.domain.overrides import Setting
    from posttrain.domain.records import RunRecord, Signal
    from posttrain.drivers.requests import RunDriver
    from posttrain.trackers.tracking import TrackerState
    from posttrain.views.logs import LogFile
    from posttrain.views.plans import PlanView
    from posttrain.views.reporting import Written
    from posttrain.views.status import RunStatus, RunSummary, RunWatcher
    from posttrain.views.tracing import RecordedSample, WrittenTrace
    from posttrain.views.vigil import Vigil
    from posttrain.web.report import ComparePage, RunReport


class Submissions:
    """See `api.control.Submissions`."""

    workspace: Workspace

    def plan(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> PlanView:
        """See `Submissions.plan`."""
        from posttrain.app.runs import view_plan

        return view_plan(path, self.workspace, seed=seed, setting=setting)

    def lock(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> Locked:
        """See `Submissions.lock`."""
        from posttrain.app.runs import plan
        from posttrain.preflight.locks import lock_path

        planned = plan(path, self.workspace, seed=seed, setting=setting)
        return Locked(planned.manifest, planned.warnings, planned.changes, lock_path(path))

    def submit(self, path: Path, *, again: bool = False, seed: int | None = None, setting: Setting = ()) -> Submitted:
        """See `Submissions.submit`."""
        from posttrain.app.runs import submit

        return submit(path, self.workspace, again=again, seed=seed, setting=setting)

    def evaluate(
        self,
        model: str,
        suites: Sequence[str],
        *,
        settings: Mapping[str, Any],
        runtime: Mapping[str, Any],
        reward: Mapping[str, Any] | None,
        seed: int,
        again: bool,
    ) -> Submitted:
        """See `Submissions.evaluate`."""
        from posttrain.app.evaluating import submit_evaluation

        return submit_evaluation(
            self.workspace, model, suites, settings=settings, runtime=runtime, reward=reward, seed=seed, again=again
        )

    def drive(
        self,
        run_id: str,
        *,
        timeout: float | None = None,
        watch: Callable[[RunRecord], None] | None = None,
        report: bool = False,
    ) -> RunRecord:
        """See `Submissions.drive`."""
        from posttrain.app.runs import REPORTING, drive_run

        return drive_run(self.workspace, run_id, timeout, watch, ahead=REPORTING if report else ())

    def detach(self, run_id: str) -> RunDriver:
        """See `Submissions.detach`."""
        from posttrain.drivers.detaching import detach

        return detach(self.workspace, run_id)

    def signal(self, run_id: str, name: str, reason: str) -> tuple[Signal, bool]:
        """See `Submissions.signal`."""
        from posttrain.control.actions import send_signal

        return send_signal(self.workspace.stores, run_id, name, reason)

    def stop(self, run_id: str) -> RunRecord:
        """See `Submissions.stop`."""
        from posttrain.control.actions import stop

        return stop(self.workspace.stores, run_id)

    def retry(self, run_id: str) -> RunRecord:
        """See `Submissions.retry`."""
        from posttrain.control.actions import retry

        retry(self.workspace.stores, self.workspace.jobs.folders, run_id)
        return self.workspace.ledger.run(run_id)


class Runs:
    """See `api.control.Runs`."""

    workspace: Workspace

    def ids(self, limit: int, before: str | None = None) -> list[str]:
        """See `Runs.ids`."""
        with self.workspace.ledger.snapshot() as now:
            return [run.id for run in now.runs(limit, before=before)]

    def run(self, words: str) -> RunRecord:
        """See `Runs.run`."""
        return self.workspace.ledger.find_run(words)

    def manifest(self, run_id: str) -> Manifest:
        """See `Runs.manifest`."""
        return self.workspace.stores.manifest(self.workspace.ledger.run(run_id))

    def ls(self, limit: int, before: str | None = None) -> list[RunSummary]:
        """See `Runs.ls`."""
        from posttrain.views.status import read_newest

        return read_newest(self.workspace, limit, before)

    def queue(self, limit: int) -> list[RunSummary]:
        """See `Runs.queue`."""
        from posttrain.views.status import read_unfinished

        return read_unfinished(self.workspace, limit)

    def status(self, run_id: str) -> RunStatus:
        """See `Runs.status`."""
        from posttrain.views.status import read_status

        return read_status(self.workspace, run_id)

    def scores(self, status: RunStatus) -> Scores:
        """See `Runs.scores`."""
        from posttrain.views.status import run_scores

        return run_scores(self.workspace, status)

    def outcome(self, status: RunStatus) -> PosttrainError | None:
        """See `Runs.outcome`."""
        from posttrain.control.explain import outcome_error

        return outcome_error(status.run, tuple(stage.record for stage in status.stages))

    def driver(self, run_id: str) -> RunDriver | None:
        """See `Runs.driver`."""
        from posttrain.drivers.requests import run_driver

        ledger = self.workspace.ledger
        return run_driver(self.workspace.root, ledger.run(run_id), ledger.clock.now())

    def why(self, run_id: str) -> Why:
        """See `Runs.why`."""
        from posttrain.control.explain import explain_run
        from posttrain.views.status import baseline_run, read_status, run_scores

        found, status = explain_run(self.workspace.stores, run_id), read_status(self.workspace, run_id)
        scores, other = (
            run_scores(self.workspace, status),
            baseline_run(self.workspace, self.manifest(run_id), found.report),
        )
        action = status.next_action
        if action.startswith("posttrain why"):
            action = f"posttrain diff {other} {run_id}" if other else f"posttrain get {run_id} --report"
        return Why(status, found.report, found.lost, scores, other, action, tuple(self.trackers(run_id)))

    def diff(self, first: str, second: str) -> RunDiff:
        """See `Runs.diff`."""
        from posttrain.control.comparing import compare

        one, two = self.run(first).id, self.run(second).id
        manifest = self.manifest(one)
        differences = compare(self.workspace.ledger, manifest, self.manifest(two))
        measured = frozenset(stage.name for stage in manifest.stages if stage.measures)
        return RunDiff(one, two, tuple(differences), (self._metrics(one), self._metrics(two)), measured)

    def _metrics(self, run_id: str) -> dict[str, float]:
        stages = self.workspace.ledger.stages(run_id)
        return {f"{stage.name}/{name}": value for stage in stages for name, value in stage.metrics.items()}

    def compare(self, words: Sequence[str], page: Path | None = None) -> Comparison:
        """See `Runs.compare`."""
        from posttrain.app.naming import measured_word
        from posttrain.views.comparing import compare_runs, write_comparison

        found = compare_runs(self.workspace, [measured_word(self.workspace, word) for word in words])
        if page is not None:
            write_comparison(self.workspace, found, page)
        return found

    def comparison(self, words: Sequence[str]) -> ComparePage:
        """See `Runs.comparison`."""
        from posttrain.views.comparing import compare_runs, comparison

        return comparison(self.workspace, compare_runs(self.workspace, words))

    def watcher(self, run_id: str) -> RunWatcher:
        """See `Runs.watcher`."""
        from posttrain.views.status import RunWatcher

        return RunWatcher(self.workspace, run_id)

    def vigil(self, run_id: str, say: Callable[[str], None], timeout: float | None) -> Vigil:
        """See `Runs.vigil`."""
        from posttrain.views.vigil import Vigil

        return Vigil(self.workspace, run_id, say, timeout)

    def logs(self, run_id: str, stage: str | None, follow: AnyVigil | None = None) -> Iterator[tuple[LogFile, str]]:
        """See `Runs.logs`."""
        from posttrain.views import logs

        if follow is None:
            return logs.read_all(self.workspace, run_id, stage)
        return logs.follow(self.workspace, run_id, stage, follow.look)

    def report(self, run_id: str) -> RunReport:
        """See `Runs.report`."""
        from posttrain.views.reporting import read_report

        return read_report(self.workspace, run_id)

    def write_report(self, run_id: str) -> Written:
        """See `Runs.write_report`."""
        from posttrain.views.reporting import write_report

        return write_report(self.workspace, run_id)

    def write_trace(self, run_id: str, stage: str | None, folder: Path) -> WrittenTrace:
        """See `Runs.write_trace`."""
        from posttrain.views.tracing import write_trace

        return write_trace(self.workspace, run_id, stage, folder)

    def samples(
        self, run_id: str, stage: str | None, step: int | None, say: Callable[[str], None]
    ) -> Sequence[RecordedSample]:
        """See `Runs.samples`."""
        from posttrain.views.tracing import recorded_samples

        return recorded_samples(self.workspace, run_id, stage, step, say)

    def sample(self, run_id: str, sample: str, stage: str | None) -> RecordedSample:
        """See `Runs.sample`."""
        from posttrain.views.tracing import recorded_sample

        return recorded_sample(self.workspace, run_id, sample, stage)

    def trackers(self, run_id: str, wait: float = 0.0) -> list[TrackerState]:
        """See `Runs.trackers`."""
        if not wait:
            from posttrain.trackers.tracking import states

            return states(self.workspace, self.workspace.ledger.run(run_id))
        from posttrain.trackers.following import settled

        return settled(self.workspace, run_id, wait)

    def track(self, run_id: str, chosen: Mapping[str, Any]) -> list[TrackerState]:
        """See `Runs.track`."""
        if chosen:
            refuse_afar("track: a server writes the trackers of its workspace; choose none")
            from posttrain.trackers.adding import track_more

            return track_more(self.workspace, run_id, chosen)
        from posttrain.trackers.following import track

        return track(self.workspace, run_id)

    def follow(self, run_id: str) -> None:
        """See `Runs.follow`."""
        from functools import partial

        from posttrain.app.workspace import open_workspace
        from posttrain.trackers.following import follow

        self.workspace.close()  # one of each thread's own takes its place
        follow(partial(open_workspace, self.workspace.root), run_id)
