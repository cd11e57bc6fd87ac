"""The loop that drives runs, in a command that waits, in a background driver or in a server.

Loops and what each one starts::

    the caller ──▶ `Wanted` returns the runs to drive, by project
                                    │
    driving thread: makes a pass over each run that is due, in turn; checks trackers; seals; checks which sinks have
      work; sleeps; ends when `Wanted.over` returns True
      ├ a thread for each sink delivers (`events.bus`)
      ├ a process for each run writes its trackers (`trackers.writer`)
      └ a thread for each project renews its leases

The driver may be killed at any line: the ledger contains the work to do, jobs continue, and the next driver continues
from there. Events that a sink has not received wait behind its cursor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from posttrain.api.control import Control
from posttrain.api.verbs import answers
from posttrain.app.sinks import deliverer, sinks
from posttrain.control.wakeups import one_line
from posttrain.domain.errors import DeadlineError, NotFoundError, PosttrainError
from posttrain.domain.ids import DRIVER
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import RunRecord
from posttrain.domain.waits import waiting
from posttrain.events.bus import LEAVE, Deliverer
from posttrain.trackers.writer import Scribe
from posttrain.workspace.background import forget_request
from posttrain.workspace.settings import OpenWorkspace

AUTH = "server"  # a server's driver in the field `auth` of events
REPORTING = ("posttrain.views.report", "posttrain.app.queries")
_JUDGING = (
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "pyarrow.vendored.version",
    "scipy.optimize",
    "scipy.special",
    "scipy.stats",
)  # modules that the judging of gates imports
_PAUSE, _MOST_PAUSE = 0.1, 1.5  # seconds between passes that change nothing
_SHARE = 8.0  # the pause after a pass, as a multiple of the pass's duration
_TRACKERS = 1.0  # seconds between two checks of the processes that write trackers
_SEAL = 2.0  # seconds between two checks for events to seal
_SINKS = 5.0  # seconds between two checks for projects that have sinks
_BACKOFF = (0.5, 2.0, 8.0, 30.0, 60.0)  # seconds before the next pass over a run that raised
_PATIENCE = 3600.0  # seconds of consecutive errors before a run is given up
_UNEXPECTED = 5  # tries after an unexpected error


class Wanted(Protocol):
    """Decides which runs are driven, and receives their outcomes."""

    def wanted(self) -> Mapping[str, Sequence[str]]:
        """Return project → runs to drive; the driver makes its passes in this order."""

    def over(self) -> bool:
        """Return whether the driver is to end; called after every pass."""

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Remove a run if `over` still returns True; a user may have resumed the run."""

    def give_up(self, run_id: str, trouble: str) -> None:
        """Stop driving a run and leave it to a person."""


@dataclass(slots=True)
class _Known:
    """A driver's record of one run."""

    workspace: OpenWorkspace
    scribe: Scribe
    loading: Iterator[Any] = field(default_factory=lambda: iter(()))  # imports of modules that the end of the run needs
    said: dict[str, str] = field(default_factory=dict)  # label of the run or a stage → state last reported
    troubled_since: float | None = None
    tries: int = 0
    again_at: float = 0.0
    trouble: str = ""


class Driver:
    """Drives every wanted run, one pass after the other.

    Args:
        say: receives the driver's messages, one line at a time.
        watch: the callback of a waiting caller, which receives the run after each pass. If it is given, errors are
            raised and the caller writes the report; otherwise the driver tries again after an error and writes the
            report itself.
        reports: whether a report is written at the end of a run; if so, the modules that the report needs are loaded
            ahead.
        served: whether to drive every project of a served workspace and deliver to the projects' sinks; otherwise only
            the workspace's own project is driven.
    """

    def __init__(
        self,
        workspace: OpenWorkspace,
        wanted: Wanted,
        say: Callable[[str], None],
        watch: Callable[[RunRecord], None] | None = None,
        *,
        reports: bool = True,
        served: bool = False,
    ) -> None:
        self._workspace, self._wanted, self._say = workspace, wanted, say
        self._watch, self._served = watch, served
        self._ahead = REPORTING if reports else ()
        self._loader = ThreadPoolExecutor(1, "load-ahead")
        self._known: dict[str, _Known] = {}
        self._seen: dict[str, OpenWorkspace] = {}  # by project
        self._deliverers: dict[str, Deliverer] = {}  # by project
        self._sealed = self._asked = self._kept = self._stepped = 0.0
        self._leases = ExitStack()  # renewed even during a long pass
        self._away = ""  # the last reported reason why the ledger cannot be used
        self.told: int | None = None  # the number of the signal that ended the driver

    def end(self, number: int, _: object = None) -> None:
        """Record the signal, which ends the driver after the current pass."""
        self.told = number

    def drive(self) -> None:
        """Drive until no run is wanted or `end` is called; then release the leases. Jobs continue.

        Pending events are delivered to sinks for a few seconds, unless a person interrupts the delivery.
        """
        seconds, most = 0.0, _MOST_PAUSE if self._watch is None else _PAUSE
        try:
            while self.told is None:
                began = time.monotonic()
                changed = self.look()
                if self._wanted.over():
                    break
                if not changed:
                    self._rest(min(max(_PAUSE, _SHARE * (time.monotonic() - began)), most))
            seconds = LEAVE
        except PosttrainError:  # sinks receive the reason why a run failed
            seconds = LEAVE
            raise
        finally:
            self._leave(seconds)

    def look(self) -> bool:
        """Make one pass over each wanted run that is due; return whether anything changed."""
        self._look_after()
        changed, wanted = False, self._wanted.wanted()
        self._drop(self._known.keys() - {run_id for runs in wanted.values() for run_id in runs})
        for project, runs in wanted.items():
            seen = self._of(project)
            for run_id in runs if self._watch else seen.reconciler.worth(runs):
                changed = self._look(seen, run_id) or changed
                if self.told is not None:
                    return changed
        return changed

    def _of(self, project: str) -> OpenWorkspace:
        """Return the workspace scoped to a project."""
        if project not in self._seen:
            own = self._workspace
            self._seen[project] = seen = own.seen_by(DRIVER, project, AUTH) if self._served else own
            self._leases.enter_context(seen.reconciler.kept())
        return self._seen[project]

    def _look_after(self) -> None:
        """Do the periodic work other than driving runs; if the ledger is unreachable, try again a second later."""
        now = time.monotonic()
        if now - self._kept >= _TRACKERS:
            self._kept = now
            for known in self._known.values():
                known.scribe.keep()
        if now < self._stepped or self._workspace.read_only:
            return
        try:
            if self._workspace.hosts is not None:
                self._workspace.hosts.beat()
            if now - self._asked >= _SINKS:
                self._asked = now
                self._find_sinks()
            if now - self._sealed >= _SEAL and (self._served or self._deliverers):
                self._sealed = now
                self._workspace.seal(keep=False)
            self._stepped = now + min([one.step() for one in self._deliverers.values()], default=0.0)
            self._away = ""
        except PosttrainError as error:
            self._stepped = now + 1.0
            if self._watch is None and self._away != str(error):  # a waiting caller gets the error from the run
                self._away = str(error)
                self._say(f"the ledger cannot be used: {error}")

    def _find_sinks(self) -> None:
        with self._workspace.ledger.snapshot() as now:
            wanted = now.projects_with_sinks()
        if not self._served:
            wanted &= {self._workspace.ledger.project}
        for project in self._deliverers.keys() - wanted:
            self._deliverers.pop(project).close(0.0)  # does not wait for a delivery that hangs
        for project in wanted - self._deliverers.keys():
            self._deliverers[project] = deliverer(self._of(project), served=self._served)

    def _leave(self, seconds: float) -> None:
        """Release the leases, so the next driver need not wait; then deliver pending events for `seconds`."""
        self._loader.shutdown(wait=False)
        self._drop(set(self._known))
        self._leases.close()
        with suppress(PosttrainError):
            self._workspace.seal()
        until = time.monotonic() + seconds
        with suppress(KeyboardInterrupt):  # an interrupt ends the wait for sinks, not the command
            for one in self._deliverers.values():
                one.finish(until - time.monotonic())
        if seconds and self._deliverers and not self._served:
            with suppress(PosttrainError):
                for sink in sinks(self._workspace):
                    if sink.behind and not sink.paused:
                        wait = "events that were not delivered wait"
                        if sink.behind == 1:
                            wait = "event that was not delivered waits"
                        self._say(
                            f"sink {sink.name}: {sink.behind} {wait} for the next driver; "
                            f"posttrain sink ls shows why, posttrain sink resume {sink.name} delivers them"
                        )

    def _drop(self, run_ids: Collection[str]) -> None:
        """Release runs that are no longer wanted."""
        for run_id in run_ids:
            with suppress(PosttrainError):
                self._known[run_id].workspace.reconciler.release(run_id)
            del self._known[run_id]

    def _rest(self, seconds: float) -> None:
        seen = list(self._seen.values()) or [self._workspace]
        for _ in range(round(seconds / _PAUSE)):
            if self.told is not None or any(one.reconciler.rest(_PAUSE / len(seen)) for one in seen):
                return  # background work has results to process

    def _look(self, seen: OpenWorkspace, run_id: str) -> bool:
        """Make one pass over a run; return whether anything changed. An error of the run does not affect other runs."""
        known = self._known.get(run_id)
        if known is not None and time.monotonic() < known.again_at:
            return False
        try:
            known = known or self._meet(seen, run_id)
            tick = seen.reconciler.step(run_id)
            final = is_final("run", tick.run.state)
            self._goes_on(tick.run, known, tell=tick.changed or not known.said or final)
            if final:
                self._finish(seen, run_id)
            return tick.changed or final
        except NotFoundError as error:  # the ledger was restored from an older backup
            if self._watch:
                raise
            self._say(f"run {run_id}: dropped: {error}")
            self._wanted.done(run_id, lambda: True)
            return True
        except Exception as error:
            if self._watch:
                raise
            self._met(seen, run_id, error)
            return False

    def _meet(self, seen: OpenWorkspace, run_id: str) -> _Known:
        judges = any(kind_of(stage.kind).judges for stage in seen.ledger.stages(run_id))
        loading = self._loader.map(import_module, (*self._ahead, *(_JUDGING if judges else ())))
        return self._known.setdefault(run_id, _Known(seen, Scribe(seen, run_id), loading))

    def _goes_on(self, run: RunRecord, known: _Known, *, tell: bool) -> None:
        """Report the result of a pass: a waiting caller receives every result, the log only changed states."""
        for _ in known.loading:  # loads now: files may be replaced while a driver runs for days
            pass
        if known.troubled_since is not None:
            known.troubled_since, known.tries, known.trouble = None, 0, ""
            self._say(f"run {run.id}: continues")
        if self._watch is not None:
            self._watch(run)
        if self._watch is not None or not tell:
            return
        states = {f"stage {stage.name} ": str(stage.state) for stage in known.workspace.ledger.stages(run.id)}
        for name, state in (states | {"": str(run.state)}).items():
            if known.said.get(name) != state:
                known.said[name] = state
                self._say(f"run {run.id}: {name}{state}")

    def _finish(self, seen: OpenWorkspace, run_id: str) -> None:
        """Finish a run that has ended: seal its events, write its report and remove the run."""
        with suppress(PosttrainError):  # a read-only ledger has no lease to release
            seen.reconciler.release(run_id)
        seen.seal()
        if self._watch is None:
            from posttrain.views.report import write_report  # loaded ahead

            try:
                self._say(f"run {run_id}: report: {write_report(seen, run_id).report}")
            except PosttrainError as error:  # the run's outcome does not depend on the report
                self._say(f"run {run_id}: no report: {error}")
            crashpoint("driver.before_done")
        self._wanted.done(run_id, lambda: is_final("run", seen.ledger.run(run_id).state))
        self._known.pop(run_id, None)

    def _met(self, seen: OpenWorkspace, run_id: str, error: Exception) -> None:
        """Handle an error of one run: report it, and try again later or, after repeated errors, give the run up."""
        now = time.monotonic()
        known = self._known.get(run_id) or self._known.setdefault(run_id, _Known(seen, Scribe(seen, run_id)))
        known.troubled_since = now if known.troubled_since is None else known.troubled_since
        known.tries += 1
        expected, line = isinstance(error, PosttrainError | OSError), one_line(error)
        if now - known.troubled_since >= _PATIENCE or (not expected and known.tries >= _UNEXPECTED):
            self._say(f"run {run_id}: given up: {line}; posttrain attach {run_id} resumes it")
            with suppress(PosttrainError):
                self._wanted.give_up(run_id, line)  # the next pass drops the run
            return
        known.again_at = now + _BACKOFF[min(known.tries, len(_BACKOFF)) - 1]
        if known.trouble != line:
            known.trouble = line
            self._say(f"run {run_id}: {line}; trying again")


class _One:
    """The run that a caller waits for."""

    def __init__(self, workspace: OpenWorkspace, run_id: str) -> None:
        self._workspace, self._id, self._over = workspace, run_id, False

    def wanted(self) -> dict[str, list[str]]:
        """See `Wanted.wanted`."""
        return {self._workspace.ledger.project: [self._id]}

    def over(self) -> bool:
        """See `Wanted.over`."""
        return self._over

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """See `Wanted.done`."""
        self._over = True
        forget_request(self._workspace.root, run_id)

    def give_up(self, run_id: str, trouble: str) -> None:
        """See `Wanted.give_up`. Never called: errors are raised."""


@answers(Control.drive)
def drive(
    workspace: OpenWorkspace,
    run_id: str,
    *,
    timeout: float | None = None,
    watch: Callable[[RunRecord], None] | None = None,
    report: bool = False,
) -> RunRecord:
    """Drive a run in this process until it ends, or watch it while another process drives it.

    Args:
        timeout: seconds; None: no limit, except for a `wall_clock` budget, which limits the jobs.
        watch: receives the run about ten times a second.
        report: whether to load the modules that the run's report needs while the run's first job starts.

    Raises:
        DeadlineError: `timeout` passed; the run continues.
        InfrastructureError: the rest of the run was set aside after repeated failures.
    """
    ledger = workspace.ledger
    until = None if timeout is None else ledger.clock.now() + timeout

    def look(run: RunRecord) -> None:
        if watch:
            watch(run)
        if until is not None and ledger.clock.now() >= until and not is_final("run", run.state):
            waits = "".join(f"; stage {one.name} {one.message}" for one in ledger.stages(run_id) if waiting(one))
            raise DeadlineError(
                f"run {run_id}: still {run.state} after {timeout:g} s{waits}; posttrain why {run_id} shows the cause"
            )

    Driver(workspace, _One(workspace, run_id), logging.getLogger("posttrain").warning, look, reports=report).drive()
    return ledger.run(run_id)
