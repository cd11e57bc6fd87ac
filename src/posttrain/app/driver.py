"""Drives runs: the one loop of a command that waits, of a background driver and of a server's.

Loops and who unblocks whom::

    whoever wants runs driven ──▶ `Wanted` tells which, by project
                                    │
    driving thread: a pass over each run that is worth one, one after the other; looks after trackers, seals, looks
      which sinks have something to do; rests; ends when `Wanted` says so
      ├ a thread for each sink delivers (`events.bus`)
      ├ a process for each run writes its trackers (`trackers.following`)
      └ a thread for each project keeps its leases

It may be killed at any line: the ledger says what is to be done, the jobs go on, and whoever drives next goes on from
there. What no sink was told of waits behind the cursors.
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
from posttrain.control.pulse import one_line
from posttrain.domain.errors import DeadlineError, NotFoundError, PosttrainError
from posttrain.domain.ids import DRIVER
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import RunRecord
from posttrain.domain.waits import waiting
from posttrain.drivers.requests import forget_request
from posttrain.events.bus import LEAVE, Deliverer
from posttrain.trackers.following import Scribe
from posttrain.workspace.settings import OpenWorkspace

AUTH = "server"  # how a server's driver is known
REPORTING = ("posttrain.views.reporting", "posttrain.app.queries")
_JUDGING = (
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "pyarrow.vendored.version",
    "scipy.optimize",
    "scipy.special",
    "scipy.stats",
)  # what gates import when they judge
_PAUSE, _MOST_PAUSE = 0.1, 1.5  # seconds between passes that change nothing
_SHARE = 8.0  # times as long as a pass took it rests
_TRACKERS = 1.0  # seconds between two looks at who writes the trackers
_SEAL = 2.0  # seconds between two looks for events to seal
_SINKS = 5.0  # seconds between two looks for projects that have sinks
_BACKOFF = (0.5, 2.0, 8.0, 30.0, 60.0)  # seconds before a run that raised is looked at again
_PATIENCE = 3600.0  # seconds of trouble with a run before it is given up
_UNEXPECTED = 5  # times that a bug may be tried again


class Wanted(Protocol):
    """Tells which runs are to be driven, and is told what became of them."""

    def wanted(self) -> Mapping[str, Sequence[str]]:
        """Project → the runs to drive, in the order in which they are looked at."""

    def over(self) -> bool:
        """Whether the driver is to end; asked after every pass."""

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Be done with a run, if it is over still: somebody may have let it go on meanwhile."""

    def give_up(self, run_id: str, trouble: str) -> None:
        """Leave a run to a person."""


@dataclass(slots=True)
class _Known:
    """What a driver knows of one run."""

    workspace: OpenWorkspace
    scribe: Scribe
    loading: Iterator[Any] = field(default_factory=lambda: iter(()))  # of modules that its end needs
    said: dict[str, str] = field(default_factory=dict)  # run and stages → state last told
    troubled_since: float | None = None
    tries: int = 0
    again_at: float = 0.0
    trouble: str = ""


class Driver:
    """Drives every run that is wanted, one pass after the other.

    Args:
        say: told what happens, a line at a time.
        watch: of somebody who waits: called after each look with the run. What goes wrong with a run is raised to them,
            and they write its report; else a run that fails is tried again, and its report is written here.
        reports: whether a report is asked for when a run has ended: what that needs is loaded at its beginning.
        served: over every project of a served workspace, and their sinks; else over the workspace's own.
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
        self._leases = ExitStack()  # kept also while one run takes long
        self._away = ""  # why the ledger cannot be used, as last told
        self.told: int | None = None  # the signal that ended it

    def end(self, number: int, _: object = None) -> None:
        """End after this pass, for a signal."""
        self.told = number

    def drive(self) -> None:
        """Drive until nothing is wanted, or somebody says so; give the leases back. Jobs go on.

        What is left for sinks is delivered for a few seconds, unless a person interrupts.
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
        except PosttrainError:  # sinks hear why a run stands
            seconds = LEAVE
            raise
        finally:
            self._leave(seconds)

    def look(self) -> bool:
        """One pass over each run that is wanted and worth one; whether anything changed."""
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
        """The workspace as this driver sees a project of it."""
        if project not in self._seen:
            own = self._workspace
            self._seen[project] = seen = own.seen_by(DRIVER, project, AUTH) if self._served else own
            self._leases.enter_context(seen.reconciler.kept())
        return self._seen[project]

    def _look_after(self) -> None:
        """What is due beside the runs; a ledger that is away is looked at again a second later."""
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
            if self._watch is None and self._away != str(error):  # who waits is told by the run
                self._away = str(error)
                self._say(f"the ledger cannot be used: {error}")

    def _find_sinks(self) -> None:
        with self._workspace.ledger.snapshot() as now:
            wanted = now.projects_with_sinks()
        if not self._served:
            wanted &= {self._workspace.ledger.project}
        for project in self._deliverers.keys() - wanted:
            self._deliverers.pop(project).close(0.0)  # nobody waits for one that hangs
        for project in wanted - self._deliverers.keys():
            self._deliverers[project] = deliverer(self._of(project), served=self._served)

    def _leave(self, seconds: float) -> None:
        """Give the leases back, so that the next driver need not wait; deliver what is left for so long."""
        self._loader.shutdown(wait=False)
        self._drop(set(self._known))
        self._leases.close()
        with suppress(PosttrainError):
            self._workspace.seal()
        until = time.monotonic() + seconds
        with suppress(KeyboardInterrupt):  # it ends the wait for sinks, not what the command has to answer
            for one in self._deliverers.values():
                one.finish(until - time.monotonic())
        if seconds and self._deliverers and not self._served:
            with suppress(PosttrainError):
                for sink in sinks(self._workspace):
                    if sink.behind and not sink.paused:
                        self._say(
                            f"sink {sink.name}: {sink.behind} event{'s' * (sink.behind > 1)} wait for the next driver; "
                            f"posttrain sink ls shows why, posttrain sink resume {sink.name} delivers"
                        )

    def _drop(self, run_ids: Collection[str]) -> None:
        """What is not wanted any more is somebody else's."""
        for run_id in run_ids:
            with suppress(PosttrainError):
                self._known[run_id].workspace.reconciler.release(run_id)
            del self._known[run_id]

    def _rest(self, seconds: float) -> None:
        seen = list(self._seen.values()) or [self._workspace]
        for _ in range(round(seconds / _PAUSE)):
            if self.told is not None or any(one.reconciler.rest(_PAUSE / len(seen)) for one in seen):
                return  # work beside is to be collected

    def _look(self, seen: OpenWorkspace, run_id: str) -> bool:
        """One pass over a run; whether anything changed. What it raises stops no other run."""
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
        except NotFoundError as error:  # of a workspace whose ledger was put back
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
        """Tell what a pass found: who waits every time, else where it may be another state."""
        for _ in known.loading:  # sources and libraries may be replaced under a driver of days
            pass
        if known.troubled_since is not None:
            known.troubled_since, known.tries, known.trouble = None, 0, ""
            self._say(f"run {run.id}: goes on")
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
        """The run has ended: seal, report, let go."""
        with suppress(PosttrainError):  # a ledger that may only be read has no lease to give back
            seen.reconciler.release(run_id)
        seen.seal()
        if self._watch is None:
            from posttrain.views.reporting import write_report  # loaded ahead

            try:
                self._say(f"run {run_id}: report: {write_report(seen, run_id).report}")
            except PosttrainError as error:  # the outcome stands, whatever becomes of its picture
                self._say(f"run {run_id}: no report: {error}")
            crashpoint("driver.before_done")
        self._wanted.done(run_id, lambda: is_final("run", seen.ledger.run(run_id).state))
        self._known.pop(run_id, None)

    def _met(self, seen: OpenWorkspace, run_id: str, error: Exception) -> None:
        """Trouble with one run: told, tried again, at last left to a person."""
        now = time.monotonic()
        known = self._known.get(run_id) or self._known.setdefault(run_id, _Known(seen, Scribe(seen, run_id)))
        known.troubled_since = now if known.troubled_since is None else known.troubled_since
        known.tries += 1
        expected, line = isinstance(error, PosttrainError | OSError), one_line(error)
        if now - known.troubled_since >= _PATIENCE or (not expected and known.tries >= _UNEXPECTED):
            self._say(f"run {run_id}: given up: {line}; posttrain attach {run_id} drives it on")
            with suppress(PosttrainError):
                self._wanted.give_up(run_id, line)  # and the next pass drops it
            return
        known.again_at = now + _BACKOFF[min(known.tries, len(_BACKOFF)) - 1]
        if known.trouble != line:
            known.trouble = line
            self._say(f"run {run_id}: {line}; tried again")


class _One:
    """The run that somebody waits for."""

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
        """See `Wanted.give_up`: never, what goes wrong is raised."""


@answers(Control.drive)
def drive(
    workspace: OpenWorkspace,
    run_id: str,
    *,
    timeout: float | None = None,
    watch: Callable[[RunRecord], None] | None = None,
    report: bool = False,
) -> RunRecord:
    """Drive a run in this process until it ends (or watch, while another process drives it).

    Args:
        timeout: seconds; None: as long as it takes. Only a `wall_clock` budget bounds the jobs then.
        watch: called about ten times a second with the run.
        report: load what its report will need while its first job starts.

    Raises:
        DeadlineError: `timeout` passed; the run is not stopped by that.
        InfrastructureError: what is left of the run was set aside: it failed again and again.
    """
    ledger = workspace.ledger
    until = None if timeout is None else ledger.clock.now() + timeout

    def look(run: RunRecord) -> None:
        if watch:
            watch(run)
        if until is not None and ledger.clock.now() >= until and not is_final("run", run.state):
            waits = "".join(f"; stage {one.name} {one.message}" for one in ledger.stages(run_id) if waiting(one))
            raise DeadlineError(
                f"run {run_id}: still {run.state} after {timeout:g} s{waits}; "
                f"wait again or look: posttrain why {run_id}"
            )

    Driver(workspace, _One(workspace, run_id), logging.getLogger("posttrain").warning, look, reports=report).drive()
    return ledger.run(run_id)
