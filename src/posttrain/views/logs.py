"""The logs of jobs, the watch over a run, the actions that a run's rows request, and the moves of a channel.

The states of stages and the next actions are those at the time of reading. Since a row was written, a person may have
done the action that the row requests: a driver records the cause of a wait when it observes the stage, and no process
observes a run that has ended.

The texts report jobs that ended while no process drove the run, the hosts of jobs that run elsewhere, and the reason
why a stage is in its state, with the next action for a person.

Moves of a channel are listed newest first, each with its state, requester, reason and approvers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

from posttrain.decision.releases import moves as moving
from posttrain.domain.approvals import APPROVED, Action, ApprovalStatus, one_of
from posttrain.domain.errors import DeadlineError, InputError, NotFoundError, PosttrainError, nearest
from posttrain.domain.ids import DRIVER, canonical
from posttrain.domain.jobspec import JobRef
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import Reason, ReleaseState, StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, ReleaseEntry, RunRecord, Signal, StageRecord
from posttrain.domain.waits import Wait, span, told, waiting, waits
from posttrain.execution.ports import Executor
from posttrain.store.atomic import read_json
from posttrain.store.attempts import AttemptFolder
from posttrain.store.ledger import Host, Ledger
from posttrain.store.snapshot import Snapshot
from posttrain.workspace.background import DriverKind, run_driver
from posttrain.workspace.settings import OpenWorkspace

NOTHING = "none needed"  # the next action if no action is needed
DONE = (StageState.SUCCEEDED, StageState.SKIPPED)
_ALONE = 5.0  # seconds without a driver before this is reported; a change of drivers takes less
_DIGITS = 18  # the maximum length of a release number
_KINDS = ("channel.promote", "channel.rollback")


def as_they_stand(
    now: Snapshot,
    run: RunRecord,
    manifest: Manifest,
    rows: Sequence[StageRecord],
    asked: Sequence[ApprovalStatus],
    signals: Sequence[Signal],
    reader: str,
) -> tuple[RunRecord, list[StageRecord]]:
    """Return a run and its stages with current messages.

    Args:
        asked: the statuses of all approval requests of the run.
        signals: the signals that were sent to the run.
        reader: the person for whom the messages are; only an approver gets the command that approves.
    """
    release, sent = manifest.release, {signal.name: signal for signal in signals}
    own = [one for one in asked if release and one.request.channel == release.channel]
    of_release = [one for one in own if one.request.action == Action.RELEASE]
    params = dict(waits(manifest)) if sent else {}
    rows = [_waits(row, of_release, sent, params.get(row.name), reader) for row in rows]
    turned_away = next((row for row in rows if row.state == StageState.REJECTED and row.reason == run.reason), None)
    if release is None or turned_away is None:
        return run, rows
    action = _left_to_do(now, run, release.channel, of_release, reader)
    if not action:
        return run, rows
    return replace(run, next_action=action), [
        replace(row, next_action=action) if row is turned_away else row for row in rows
    ]


def _waits(
    row: StageRecord, asked: Sequence[ApprovalStatus], sent: Mapping[str, Signal], wait: Wait | None, reader: str
) -> StageRecord:
    """Return a waiting stage, updated with approvals or a signal that arrived after its row was written."""
    if not waiting(row):
        return row
    if row.reason == Reason.WAITING_FOR_APPROVAL:
        found = asked[-1] if asked else None
        if found is None:
            return row
        return replace(row, message=found.words, next_action=asks_of(reader, found) if found.missing else NOTHING)
    came = sent.get(wait.signal) if wait is not None and wait.signal is not None else None
    if wait is None or came is None:
        return row
    if row.not_before is None:
        return replace(row, message=f"signal {wait.signal} was sent, so the wait has ended", next_action=NOTHING)
    _, message, action = told(row, wait, came)
    return replace(row, message=message, next_action=action)


def _left_to_do(now: Snapshot, run: RunRecord, channel: str, asked: Sequence[ApprovalStatus], reader: str) -> str:
    """Return the next action for a run whose release was rejected; "" if the recorded action remains."""
    live = now.channel(channel)
    if live is not None and live.run_id == run.id:
        return f"posttrain get {channel}"  # the run was promoted since
    promote = f"posttrain promote {run.id}"
    if run.reason == Reason.CHANNEL_FROZEN and not now.channel_record(channel).frozen:
        return promote
    found = asked[-1] if asked else None
    if run.reason != Reason.APPROVAL_REJECTED or found is None or found.refusal or found.outdated:
        return ""
    return asks_of(reader, found) if found.missing else promote


def asks_of(reader: str, found: ApprovalStatus) -> str:
    """Return the next action if approvals are missing: the command, and who may run it if `reader` may not."""
    command = found.request.command
    if not found.may:
        return f"posttrain channel policy {found.request.channel}"
    if canonical(reader) in map(canonical, found.may):
        return command
    return f"{one_of(found.may)} may run: {command}"


def ended_unseen(workspace: OpenWorkspace, attempts: Sequence[AttemptRecord]) -> tuple[str, str] | None:
    """Return the message and next action for a stage whose job has ended while no process drives the run.

    Only jobs on this machine are covered, because their supervisors record their ends.

    Args:
        attempts: the stage's attempts, oldest first.

    Returns:
        None if no such end is recorded.
    """
    last = attempts[-1] if attempts else None
    if last is None or is_final("attempt", last.state) or workspace.jobs.elsewhere(last):
        return None
    record = None
    with suppress(PosttrainError, OSError):  # the next driver reports a damaged record
        record = read_json(workspace.jobs.folders.of(last).path / "exit.json")
    code = record.get("exit_code") if isinstance(record, dict) else None
    if not isinstance(code, int):
        return None
    how = f"was ended by {Signals(-code).name}" if -code in set(Signals) else f"ended with {code}"
    return (
        f"the job of attempt {last.number} {how}, and no process drives the run to record this",
        f"posttrain attach {last.run_id} records it and continues the run",
    )


def on_another_host(
    workspace: OpenWorkspace, attempts: Sequence[AttemptRecord], hosts: Callable[[], Sequence[Host]]
) -> tuple[str, str] | None:
    """Return the message and next action for a stage whose live attempt runs on another host.

    Args:
        attempts: the stage's attempts, oldest first.
        hosts: returns the hosts of the ledger.

    Returns:
        None if the live attempt is not on another host.
    """
    last = attempts[-1] if attempts else None
    if last is None or is_final("attempt", last.state) or not workspace.jobs.elsewhere(last) or not workspace.hosts:
        return None
    host = next((one for one in hosts() if one.id == last.host), None)
    if host is not None and not host.gone:
        return f"attempt {last.number} is on host {named(host)}", "none needed"
    silent = f"last reported {span(host.silent)} ago" if host else "never reported"
    return (
        f"host {named(host) if host else last.host}, which runs attempt {last.number}, {silent}",
        f"restart its server; if the host is lost permanently: posttrain dead {last.run_id}/{last.stage} --assume-dead",
    )


def stage_attempts(
    workspace: OpenWorkspace, run_id: str, stage: str | None = None
) -> Iterator[tuple[str, AttemptRecord, AttemptFolder]]:
    """Yield the attempts of one or all stages of a run, in order; for a reused stage, those that computed its result.

    Raises:
        NotFoundError: the run or stage does not exist.
    """
    with workspace.ledger.snapshot() as now:
        rows = now.stages(now.run(run_id).id)
    if stage is not None and stage not in {row.name for row in rows}:
        raise NotFoundError(f"run {run_id} has no stage {stage!r}{nearest(stage, [row.name for row in rows])}")
    for row in rows:
        if stage in (None, row.name):
            origin, _, name = (row.cached_from or f"{run_id}/{row.name}").rpartition("/")
            for attempt in workspace.ledger.attempts(origin, name):
                yield row.name, attempt, workspace.jobs.folders.of(attempt)


def named(host: Host) -> str:
    """Return a host's name and URL as `HOSTNAME:FOLDER (URL)`."""
    return f"{host.name} ({host.url})" if host.url else host.name


def asks(row: StageRecord) -> bool:
    """Return whether a stage's row requests an action by a person, which may have been done since."""
    return waiting(row) or (row.state == StageState.REJECTED and kind_of(row.kind).ships)


def waiting_for(manifest: Manifest, rows: Sequence[StageRecord]) -> dict[str, str]:
    """Return stage → names of the unfinished stages for which it waits, as text."""
    undone = {row.name for row in rows if row.state not in DONE}
    return {stage.name: ", ".join(sorted(stage.upstream() & undone)) for stage in manifest.stages}


def stage_words(run: RunRecord, row: StageRecord, above: str, now: float) -> tuple[str, str]:
    """Return why a stage is in its state, and the next action for a person."""
    if row.state in DONE:  # the action that the row requested before is obsolete
        return row.message or row.state, "none needed"
    if row.state == StageState.RUNNING:
        return row.message or row.state, row.next_action or "none needed"
    if row.state in (StageState.PENDING, StageState.READY):
        if is_final("run", run.state):
            return f"not started before the run ended ({run.state})", run.next_action or f"posttrain why {run.id}"
        told = row.message if row.state == StageState.READY else ""
        if waiting(row) and row.not_before is not None and row.not_before > now:
            told += f" (in {span(row.not_before - now)})"
        return told or (f"waits for {above}" if above else "starts next"), row.next_action or "none needed"
    return row.message or row.state, row.next_action or f"posttrain why {run.id}"


@dataclass(frozen=True, slots=True)
class LogFile:
    """One attempt's log."""

    run_id: str
    stage: str
    attempt: int
    path: Path
    job: JobRef
    executor: Executor
    elsewhere: str = ""  # the reason why the log cannot be read on this host

    def read(self, start: int = 0) -> tuple[str, int]:
        """Return the text from byte `start`, and the next `start`. A log that does not exist yet is empty."""
        if self.elsewhere:
            return ("", start) if start else (f"{self.elsewhere}\n", 1)
        page = self.executor.logs(self.job, start)
        return page.text, page.cursor


def log_files(workspace: OpenWorkspace, run_id: str, stage: str | None = None) -> list[LogFile]:
    """Return the logs of a run's attempts in order; for a reused stage, those from the run that computed its result.

    Raises:
        NotFoundError: the run has no such stage.
    """
    found: list[LogFile] = []
    known: dict[str, Host] = {}
    for _, attempt, folder in stage_attempts(workspace, run_id, stage):
        job, why = workspace.jobs.folders.job(attempt), ""
        if workspace.hosts is not None and workspace.jobs.elsewhere(attempt):
            known = known or {one.id: one for one in workspace.hosts.all()}
            why = not_here(attempt, known.get(str(attempt.host)))
        place = (attempt.run_id, attempt.stage, attempt.number)
        found.append(LogFile(*place, folder.log, job, workspace.jobs.executor_of(attempt), why))
    return found


def not_here(attempt: AttemptRecord, host: Host | None) -> str:
    """Return a line that names the host of an attempt on another host."""
    place = named(host) if host else attempt.host
    return f"attempt {attempt.number} of {attempt.stage} is on host {place}: read its log there"


def read_all(workspace: OpenWorkspace, run_id: str, stage: str | None) -> Iterator[tuple[LogFile, str]]:
    """Yield the output so far, piece by piece."""
    for log in log_files(workspace, run_id, stage):
        start = 0
        while True:
            text, start = log.read(start)
            if not text:
                break
            yield log, text


def follow(
    workspace: OpenWorkspace, run_id: str, stage: str | None, look: Callable[[], RunRecord], interval: float = 0.3
) -> Iterator[tuple[LogFile, str]]:
    """Yield pieces of logs as they appear, until the run has ended and everything was read.

    Args:
        look: returns the run, as `RunWatch.look` does; its exceptions propagate.
    """
    read: dict[Path, int] = {}
    while True:
        over = is_final("run", look().state)
        quiet = True
        for log in log_files(workspace, run_id, stage):
            text, read[log.path] = log.read(read.get(log.path, 0))
            if text:
                quiet = False
                yield log, text
        if over and quiet:
            return
        if quiet:
            workspace.ledger.clock.sleep(interval)


class RunWatch:
    """Waits for a run that another process drives; reports if no process drives the run, and ends at a deadline.

    Args:
        say: called with one line each time that the run has lost its driver.
        timeout: seconds; None: no deadline.
    """

    def __init__(
        self, workspace: OpenWorkspace, run_id: str, say: Callable[[str], None], timeout: float | None
    ) -> None:
        self._workspace, self._run_id, self._say, self._timeout = workspace, run_id, say, timeout
        self._started = self._driven_at = workspace.ledger.clock.now()
        self._told = False

    def look(self) -> RunRecord:
        """Return the current run.

        Raises:
            DeadlineError: the deadline passed, and the run has not ended.
        """
        run, now = self._workspace.ledger.run(self._run_id), self._workspace.ledger.clock.now()
        if is_final("run", run.state):
            return run
        driver = run_driver(self._workspace.root, run, now)
        if driver is not None and driver.kind is not DriverKind.NONE:
            self._driven_at, self._told = now, False
        elif not self._told and now - self._driven_at >= _ALONE:
            self._told = True
            self._say(
                f"no process drives this run ({run.state}); posttrain attach {run.id} continues it; still waiting"
            )
        if self._timeout is not None and now - self._started >= self._timeout:
            raise DeadlineError(
                f"run {run.id}: still {run.state} after {self._timeout:g} s of watching; see posttrain why {run.id}"
            )
        return run

    def rest(self, seconds: float) -> None:
        """Sleep until the next check."""
        self._workspace.ledger.clock.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a channel. Exactly one move, the last, is live; an earlier move may have the same model."""

    entry: ReleaseEntry
    state: ReleaseState  # the state of the move, not of its model
    why: str = ""
    approved_by: tuple[str, ...] = ()  # empty if no approval was needed

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**asdict(self.entry), "state": self.state, "why": self.why, "approved_by": list(self.approved_by)}


def moves(ledger: Ledger, name: str, limit: int | None = None, before: str | None = None) -> list[Move]:
    """Return the newest `limit` moves of a channel.

    Args:
        before: the number of a release; only older moves are returned.

    Raises:
        InputError: `before` is not a number.
    """
    if before is not None and not (before.isdecimal() and len(before) <= _DIGITS):
        raise InputError(f"channel {name}: before must be the number of a release, got {before[:80]!r}")
    with ledger.snapshot() as now:
        history = moving(now.history(name))
        events = [event for kind in _KINDS for event in now.events_about(name, kind)]
        told = {event.payload.get("sequence"): event.payload for event in events}
        ended = {"rollback": ReleaseState.ROLLED_BACK}  # action of the next move → state
        states = [ended.get(follower.action, ReleaseState.SUPERSEDED) for follower in history[1:]]
        states += [ReleaseState.LIVE] * bool(history)
        moved = zip(history, states, strict=True)
        rows = [(one, state) for one, state in moved if before is None or one.sequence < int(before)]
        return [
            Move(_requested(now, one), state, str(said.get("why") or ""), _approvers(now, said.get("approved")))
            for one, state in rows[::-1][:limit]
            for said in [told.get(one.sequence, {})]
        ]


def _requested(now: Snapshot, one: ReleaseEntry) -> ReleaseEntry:
    """Return a release with its requester, because entries by older versions name the server's driver instead."""
    if one.actor != DRIVER or one.run_id is None:
        return one
    return replace(one, actor=now.known_submitter(one.run_id) or one.actor)


def _approvers(now: Snapshot, request: Any) -> tuple[str, ...]:
    if not request:
        return ()
    last = {said.actor: said.verdict for said in now.approvals(str(request))}
    return tuple(sorted(actor for actor, verdict in last.items() if verdict == APPROVED))
