"""The status of runs: their ledger rows, joined with the facts that their jobs have reported. Read-only.

`get`, the live display and the report show the status of one run. The rows of several runs are read together, so a list
of runs needs as many ledger statements as one run.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from posttrain.control.budgets import spending
from posttrain.control.channels import approval_statuses, recall_of
from posttrain.control.launch import trained_elsewhere
from posttrain.control.release_plan import ADDED, choice_warnings, selection_words
from posttrain.domain.approvals import ApprovalStatus
from posttrain.domain.errors import PosttrainError
from posttrain.domain.gates import GateReport
from posttrain.domain.kinds import BEST, MODEL, Driver, kind_of
from posttrain.domain.lifecycle import HELD_UP, Reason, RunState, StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, RunNote, RunRecord, Signal, StageRecord, outcome_error
from posttrain.domain.waits import waiting
from posttrain.store.ledger import Host
from posttrain.store.snapshot import Snapshot
from posttrain.telemetry.symptoms import Finding, StageFacts, findings
from posttrain.telemetry.tracker import StageProgress, StageWatcher
from posttrain.views.logs import as_they_stand, asks, ended_unseen, on_another_host, stage_words, waiting_for
from posttrain.workspace.background import DriverKind, RunDriver, run_driver
from posttrain.workspace.settings import OpenWorkspace

if TYPE_CHECKING:
    from posttrain.control.scores import Scores

_OPEN = (RunState.PENDING, RunState.RUNNING, RunState.STOPPING)  # states of a run that has not ended
STARTING = "starting"  # the shown state of a stage whose job has not reported yet
_MOST, _FRAME = 1024, 600  # maximum JSON bytes of a summary, and of a summary without texts
_SCORES, _NUMBER = 4, 30  # maximum number of scores in a summary; JSON bytes of each without its name
_SENTENCE, _ASIDE = 202, 64  # maximum JSON bytes of a summary's sentence, and of each short text
_QUOTED, _REST = 4, 7  # JSON bytes around a tag in a list, and of the mark for omitted tags
_LOOKED_AT = 10  # maximum number of listed runs that request an action and get up-to-date texts
_WAITS: Mapping[str, str] = {  # the shown state of a run without a running job
    Reason.WAITING_FOR_APPROVAL: "waits for approval",
    Reason.WAITING_FOR_SIGNAL: "waits for a signal",
    Reason.WAITING_FOR_TIME: "waits",
}


class Rows:
    """The rows that a list of runs shows, read in a constant number of statements.

    Args:
        ledger: a snapshot of the ledger, from which everything is read here.
        runs: the runs, in the order of display.
        hosts: returns the hosts of the ledger; called at most once.
    """

    def __init__(self, ledger: Snapshot, runs: Sequence[RunRecord], hosts: Callable[[], Sequence[Host]]) -> None:
        self.runs = list(runs)
        self.hosts = functools.cache(hosts)
        ids = [run.id for run in runs]
        self.released = ledger.released(*ids) if ids else {}
        self.stages: dict[str, list[StageRecord]] = {run_id: [] for run_id in ids}
        self.live: dict[tuple[str, str], list[AttemptRecord]] = {}
        self.tags: dict[str, list[str]] = {run_id: [] for run_id in ids}
        for note in ledger.notes(*ids, tags=True) if ids else ():
            self.tags[note.run_id].append(note.tag)
        for stage in ledger.stages_in_brief(*ids) if ids else ():
            self.stages[stage.run_id].append(stage)
        for attempt in ledger.attempts_of(*ids, live=True) if ids else ():
            self.live.setdefault((attempt.run_id, attempt.stage), []).append(attempt)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The human-readable status of one stage."""

    record: StageRecord
    attempts: tuple[AttemptRecord, ...]
    progress: StageProgress
    seconds: float  # running time of the stage's jobs, over all attempts
    reason: str  # why the stage is in its state; never empty for a stage that is not running
    next_action: str
    changed_at: float | None = None  # time of the last change in the ledger; None in a list of runs
    begun: str = ""  # "steps 1-40 were trained in RUN/STAGE", if another stage's checkpoint was resumed
    unanswered: bool = False  # whether the job is on another host or ended without a driver; see `reason`
    drawn: tuple[str, ...] = ()  # how responses are sampled, for suites that are not purely greedy

    @property
    def held_up(self) -> bool:
        """Whether the stage is running but waits; see `reason`."""
        return self.unanswered or self.record.reason in HELD_UP

    @property
    def standing(self) -> str:
        """The state of the stage; `starting` if the stage is running and its job has not reported yet."""
        silent = self.progress.at is None or self.progress.stale
        by_job = kind_of(self.record.kind).driver is Driver.JOB and not self.unanswered
        return STARTING if self.record.state == StageState.RUNNING and by_job and silent else str(self.record.state)

    @property
    def tokens(self) -> int:
        """Tokens of the stage's attempts: the billed tokens, and those that a live attempt has reported."""
        live = self.attempts[-1] if self.attempts else None
        if live is None or is_final("attempt", live.state) or self.progress.stale:
            return self.record.tokens
        return self.record.tokens + max(0, self.progress.tokens - (live.resumed_tokens or 0))

    @property
    def output(self) -> str | None:
        """The digest of the stage's last model; for a stage without a model, that of its first output."""
        made = self.record.outputs
        return next((made[name]["digest"] for name in (MODEL, *made) if name in made), None)

    @property
    def selection(self) -> str:
        """The decision by the stage's probe, as text; "" without a decision."""
        return selection_words(self.record.metrics)

    @property
    def best(self) -> str | None:
        """The digest of the best model by the stage's probe; None if this is the last model or there is none."""
        found = self.record.outputs.get(BEST, {}).get("digest")
        return found if found != self.output else None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        row, progress = self.record, self.progress
        return {
            "name": row.name,
            "kind": row.kind,
            "state": row.state,
            "standing": self.standing,
            "reason": row.reason,
            "message": self.reason,
            "next_action": self.next_action,
            "not_before": row.not_before,
            "cached_from": row.cached_from,
            **({"drawn": list(self.drawn)} if self.drawn else {}),
            "begun": self.begun,
            "attempts": [{key: getattr(attempt, key) for key in _SHOWN} for attempt in self.attempts],
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "step": progress.step,
            "steps": progress.total,
            "metrics": dict(row.metrics) or dict(progress.latest),
            "outputs": dict(row.outputs),
        }


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run for people."""

    run: RunRecord
    stages: tuple[StageStatus, ...]
    seconds: float  # from the start of the run to its end or now
    driver: RunDriver | None  # None: the run has ended
    next_action: str
    trouble: str = ""  # one line if a part of the run cannot be read
    warnings: tuple[str, ...] = ()  # the last warnings of each stage's jobs, and warnings about the run
    signals: tuple[Signal, ...] = ()  # signals sent to the run
    approvals: tuple[ApprovalStatus, ...] = ()  # statuses of the run's approval requests
    image: str = ""  # image of the run's jobs, except those that measure; "" without an image
    notes: tuple[RunNote, ...] = ()  # texts and tags by people

    @property
    def tags(self) -> tuple[str, ...]:
        """The run's tags, by which lists can be filtered, in alphabetical order."""
        return tuple(sorted(note.tag for note in self.notes if note.tag))

    @property
    def outcome(self) -> PosttrainError | None:
        """The error with which the run ended; None if the run succeeded or continues."""
        return outcome_error(self.run, (stage.record for stage in self.stages))

    @property
    def why(self) -> str:
        """One line on why the run is in its state, what it waits for, or which stage has a job that hangs."""
        under_way = [stage for stage in self.stages if stage.record.state == StageState.RUNNING]
        if is_final("run", self.run.state) or under_way:
            hung = [f"stage {s.record.name}: {s.reason}" for s in under_way if s.held_up]
            return "; ".join(hung) or self.run.message
        waits = [f"stage {stage.record.name} {stage.reason}" for stage in self.stages if waiting(stage.record)]
        return "; ".join(waits) or self.run.message

    @property
    def standing(self) -> str:
        """The state of the run; for a running run, possibly `starting` or the kind of its wait."""
        if self.run.state != RunState.RUNNING:
            return str(self.run.state)
        at_work = [stage.standing for stage in self.stages if stage.record.state == StageState.RUNNING]
        if at_work:
            return STARTING if all(one == STARTING for one in at_work) else str(self.run.state)
        return _WAITS.get(self.reason, str(self.run.state))

    @property
    def reason(self) -> str:
        """The reason of the run's state; without a running stage, the reason of its first waiting stage."""
        at_work = any(stage.record.state == StageState.RUNNING for stage in self.stages)
        waits = [] if at_work else [stage.record.reason for stage in self.stages if waiting(stage.record)]
        return waits[0] if waits and self.run.state == RunState.RUNNING else self.run.reason

    @property
    def metrics(self) -> dict[str, float]:
        """`stage/metric` → value, of every ended stage."""
        return {f"{one.record.name}/{key}": value for one in self.stages for key, value in one.record.metrics.items()}

    @property
    def under_way(self) -> str:
        """The reported progress of the run's jobs, such as `train 12/40, evaluate 3/8`; "" if no job runs."""
        running = [one for one in self.stages if one.record.state == StageState.RUNNING and one.progress.total]
        return ", ".join(f"{one.record.name} {one.progress.step}/{one.progress.total}" for one in running)

    @property
    def tokens(self) -> int:
        """Tokens of this run's attempts, including live attempts; a cached stage costs no tokens."""
        return sum(stage.tokens for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        run = self.run
        return {
            "id": run.id,
            "name": run.name,
            "state": run.state,
            "standing": self.standing,
            "reason": run.reason,
            "message": run.message,
            "next_action": self.next_action,
            "trouble": self.trouble,
            "warnings": list(self.warnings),
            "driven": self.driver is not None and self.driver.kind is not DriverKind.NONE,
            "driver": self.driver.to_json() if self.driver else None,
            "owner": run.owner,
            "manifest": run.manifest_digest,
            "image": self.image or None,
            "created_at": run.created_at,
            "started_at": run.started_at,
            "finished_at": run.finished_at,
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "tags": list(self.tags),
            "notes": [{"at": one.at, "by": one.actor, "text": one.text} for one in self.notes if not one.tag],
            "signals": [asdict(signal) for signal in self.signals],
            "approvals": [one.to_json() for one in self.approvals],
            "stages": [stage.to_json() for stage in self.stages],
        }


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of a run in a list, of at most a kilobyte; long texts are truncated. `get` shows the rest."""

    id: str
    name: str
    state: str
    standing: str  # see `RunStatus.standing`
    reason: str  # see `RunStatus.reason`
    message: str  # why the run is in its state
    next_action: str
    owner: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    seconds: float  # from the start of the run to its end or now
    tokens: int
    driver: RunDriver | None  # None: the run has ended
    stages: Mapping[str, int]  # state → number of stages
    under_way: str  # progress of the run's jobs, such as `train 12/40`; "" if no job runs
    score: Mapping[str, float]  # of the gate, then of the last evaluation; at most four, or one if space is short
    release: str  # the run's last release, such as `prod@3`; "" without a release
    tags: tuple[str, ...] = ()  # as many as fit, then `…`

    @classmethod
    def of(cls, status: RunStatus, release: str = "", tags: Sequence[str] = ()) -> RunSummary:
        """Return the summary of a run from its status."""
        run, driver = status.run, status.driver
        scores: dict[str, float] = {}
        for name, value in _score(status.stages).items():
            scores.setdefault(_cut(name, _ASIDE), value)  # two long names may begin with the same text
        brief = cls(
            id=run.id,
            name=run.name,
            state=run.state,
            standing=status.standing,
            reason=status.reason,
            message="",
            next_action=_cut(status.next_action, _SENTENCE // 2),
            owner=_cut(run.owner, _ASIDE),
            created_at=run.created_at,
            started_at=run.started_at,
            finished_at=run.finished_at,
            seconds=round(status.seconds, 3),
            tokens=status.tokens,
            driver=driver and replace(driver, trouble=_cut(driver.trouble, _ASIDE)),
            stages=dict(Counter(stage.record.state for stage in status.stages)),
            under_way=_cut(status.under_way, _ASIDE),
            score=dict([*scores.items()][:1]),
            release=release,
            tags=(),
        )
        words = _cut(status.trouble or status.why, _SENTENCE)
        said = [
            *(brief.id, brief.name, brief.standing, brief.reason, brief.next_action, brief.owner, brief.under_way),
            *(brief.release, *scores),
            *((brief.driver.log, brief.driver.host, brief.driver.trouble) if brief.driver else ()),
        ]
        least = _FRAME + _SENTENCE + sum(map(_size, said)) + sum(len(tag) + _QUOTED for tag in tags)
        if least + _NUMBER * len(scores) <= _MOST:  # everything certainly fits
            return replace(brief, message=words, score=scores, tags=tuple(sorted(tags)))
        taken = len(json.dumps(asdict(brief), ensure_ascii=False).encode("utf-8", "surrogatepass"))
        more = sum(map(_size, scores)) + _NUMBER * len(scores)
        if taken + more + _size(words) + (_REST if tags else 0) + sum(len(tag) + _QUOTED for tag in tags) <= _MOST:
            brief, taken = replace(brief, score=scores), taken + more
        left = _MOST - taken - (_REST if tags else 0)
        words = _cut(words, max(_ASIDE, min(_SENTENCE, left)))
        return replace(brief, message=words, tags=_fitting(sorted(tags), left - _size(words)))

    @property
    def at_work(self) -> bool:
        """Whether a stage is running."""
        return StageState.RUNNING in self.stages


def _fitting(tags: Sequence[str], room: int) -> tuple[str, ...]:
    """Return as many tags as fit into `room` bytes of JSON, followed by `…` if tags are omitted."""
    kept = sum(size <= room for size in itertools.accumulate(len(tag) + _QUOTED for tag in tags))
    return (*tags[:kept], *(["…"] if kept < len(tags) else ()))


def _cut(words: str, most: int) -> str:
    """Return a text, cut to at most `most` bytes of JSON including the mark `…`."""
    if _size(words) <= most:
        return words
    taken = list(itertools.accumulate(map(_size, words[:most])))
    return words[: bisect.bisect_right(taken, most - _size("…"))] + "…"


def _size(words: str) -> int:
    """Return the size of a text in JSON bytes. A file name in an error may contain a lone surrogate."""
    return len(encode_basestring(words).encode("utf-8", "surrogatepass")) - 2


def _score(stages: Sequence[StageStatus]) -> dict[str, float]:
    rows = [stage.record for stage in stages if stage.record.metrics and not stage.record.name.startswith(ADDED)]
    judged = [row for row in rows if kind_of(row.kind).judges]
    measured = [row for row in rows if kind_of(row.kind).measures]
    found = [item for row in judged[-1:] for item in [*row.metrics.items()][:1]]
    found += [item for row in measured[-1:] for item in row.metrics.items() if item[0] not in dict(found)]
    return dict(found[:_SCORES])


class RunWatcher:
    """Reads one run repeatedly; each event segment is read once.

    Args:
        run_id: the exact id.
        cached: whether to also read the facts of reused stages, from the runs that computed them (for curves).
        brief: whether to read only the jobs' summaries, which contain the progress, instead of all facts.
    """

    def __init__(self, workspace: OpenWorkspace, run_id: str, *, cached: bool = False, brief: bool = False) -> None:
        self._workspace, self._run_id, self._cached, self._brief = workspace, run_id, cached, brief
        self._watchers: dict[str, StageWatcher] = {}
        self._manifest: Manifest | None = None
        self._trouble = ""
        self._changed: dict[str, tuple[int, float | None]] = {}  # stage → generation of its row, and its time
        self._begun: dict[str, str] = {}
        self._hosts: Callable[[], Sequence[Host]] = workspace.hosts.all if workspace.hosts else list[Host]
        self._listed = False  # whether to read only the given rows

    def read(self) -> RunStatus:
        """Return the current status of the run.

        Raises:
            NotFoundError: the run does not exist.
        """
        with self._workspace.ledger.snapshot() as ledger:
            found, notes = self._found(ledger), tuple(ledger.notes(self._run_id))
        return replace(self._told(*found), notes=notes)

    def of(self, run: RunRecord, rows: Rows) -> RunStatus:
        """Return the status from rows that were already read, without reading the manifest."""
        self._hosts, self._listed, stages = rows.hosts, True, rows.stages[run.id]
        return self._told(run, stages, (), [rows.live.get((run.id, row.name), []) for row in stages])

    def _found(
        self, ledger: Snapshot
    ) -> tuple[RunRecord, list[StageRecord], tuple[Signal, ...], list[list[AttemptRecord]]]:
        found = ledger.rows_of(self._run_id)
        run, rows = found.run, list(found.stages)
        waits = any(kind_of(row.kind).driver is Driver.WAIT for row in rows)
        signals = tuple(ledger.signals(run.id)) if waits else ()
        attempts = [self._attempts(ledger, row, found.attempts) for row in rows]
        changed = [row for row in rows if self._changed.get(row.name, (-1, None))[0] != row.generation]
        said = ledger.last_said(*(f"{row.run_id}/{row.name}" for row in changed))
        self._changed |= {row.name: (row.generation, said.get(f"{row.run_id}/{row.name}")) for row in changed}
        return run, rows, signals, attempts

    def _told(
        self,
        run: RunRecord,
        rows: list[StageRecord],
        signals: tuple[Signal, ...],
        attempts: Sequence[list[AttemptRecord]],
    ) -> RunStatus:
        now = self._workspace.ledger.clock.now()
        asked = () if self._listed else self._asked(run.id, rows)
        if self._manifest is None and not self._trouble and not self._listed:
            self._manifest, self._trouble = self._workspace.manifest_or_trouble(run)
        if self._manifest is not None and any(asks(row) for row in rows):
            with self._workspace.ledger.snapshot() as ledger:
                run, rows = as_they_stand(ledger, run, self._manifest, rows, asked, signals, self._workspace.actor)
        above = waiting_for(self._manifest, rows) if self._manifest else {}
        driver = run_driver(self._workspace.root, run, now)
        alone = driver is not None and driver.nobody
        stages = tuple(
            self._stage(run, row, own, above.get(row.name, ""), now, alone)
            for row, own in zip(rows, attempts, strict=True)
        )
        seconds = (run.finished_at or now) - run.started_at if run.started_at else 0.0
        action = f"posttrain verify {run.id}" if self._trouble else _run_action(run, driver, stages)
        metrics = {row.name: row.metrics for row in rows}
        warnings = [*_job_warnings(stages), *(choice_warnings(self._manifest, metrics) if self._manifest else ())]
        if self._manifest and not (self._brief or is_final("run", run.state)):
            warnings += _policy_moved(self._workspace, self._manifest)
        if self._manifest and not self._brief:
            with self._workspace.ledger.snapshot() as ledger:
                warnings += filter(None, [recall_of(ledger, self._manifest)])
        image = (self._manifest and self._manifest.image) or ""
        return RunStatus(
            run, stages, max(0.0, seconds), driver, action, self._trouble, tuple(warnings), signals, asked, image
        )

    def _asked(self, run_id: str, rows: Sequence[StageRecord]) -> tuple[ApprovalStatus, ...]:
        waits = any(row.reason in (Reason.WAITING_FOR_APPROVAL, Reason.APPROVAL_REJECTED) for row in rows)
        judged = any(kind_of(row.kind).ships and row.state != StageState.PENDING for row in rows)
        return approval_statuses(self._workspace.stores, run_id=run_id) if waits or (judged and not self._brief) else ()

    def findings(self, status: RunStatus) -> list[Finding]:
        """Return the symptoms of the stages whose facts `read` has read; see `telemetry.symptoms`."""
        planned = {one.name: one.params for one in self._manifest.stages} if self._manifest else {}
        found: list[Finding] = []
        for stage in status.stages:
            name = stage.record.name
            facts = StageFacts(self.watcher(name).curves, stage.attempts, planned.get(name, {}))
            found += findings(name, facts)
        return found

    def watcher(self, stage: str) -> StageWatcher:
        """Return the reader of one stage's facts."""
        return self._watchers.setdefault(stage, StageWatcher(self._workspace.root))

    def _progress(self, row: StageRecord, attempts: list[AttemptRecord]) -> StageProgress:
        if not self._brief:
            return self.watcher(row.name).read(attempts)
        said = self._workspace.jobs.folders.of(attempts[-1]).mailbox.summary()
        return StageProgress(said.step, said.total, said.tokens, at=said.at) if said else StageProgress()

    def _attempts(self, ledger: Snapshot, row: StageRecord, own: Sequence[AttemptRecord]) -> list[AttemptRecord]:
        if self._cached and row.cached_from:
            origin, _, name = row.cached_from.rpartition("/")
            return ledger.attempts(origin, name)
        return [attempt for attempt in own if attempt.stage == row.name]

    def _stage(
        self, run: RunRecord, row: StageRecord, attempts: list[AttemptRecord], above: str, now: float, alone: bool
    ) -> StageStatus:
        own = tuple(attempt for attempt in attempts if attempt.run_id == row.run_id)
        progress = self._progress(row, attempts) if attempts else StageProgress()
        live = [attempt.launched_at for attempt in own if attempt.launched_at and attempt.finished_at is None]
        running = sum(max(0.0, now - launched) for launched in live)
        seconds = spending((), own, running=running).seconds  # the seconds that the budget is or will be billed
        words = (
            on_another_host(self._workspace, own, self._hosts) or (alone and ended_unseen(self._workspace, own)) or None
        )
        reason, action = words or stage_words(run, row, above, now)
        if attempts and not self._listed and not self._begun.get(row.name):
            self._begun[row.name] = trained_elsewhere(self._workspace.stores, self._workspace.jobs.folders, attempts)
        changed, begun = self._changed.get(row.name, (0, None))[1], self._begun.get(row.name, "")
        planned = [one for one in self._manifest.stages if one.name == row.name] if self._manifest else []
        drawn = drawn_words(planned[0].params) if planned else ()
        return StageStatus(row, own, progress, seconds, reason, action, changed, begun, words is not None, drawn)


def read_status(workspace: OpenWorkspace, run_id: str, *, brief: bool = False) -> RunStatus:
    """Return the status of a run; see `RunWatcher`."""
    return RunWatcher(workspace, run_id, brief=brief).read()


def read_newest(
    workspace: OpenWorkspace, limit: int, before: str | None = None, tag: str | None = None
) -> list[RunSummary]:
    """Return the newest runs, in a constant number of statements.

    Args:
        before: the id of a run; only older runs are returned.
        tag: if given, only runs with this tag are returned.
    """
    with workspace.ledger.snapshot() as ledger:
        rows = _rows(workspace, ledger, ledger.runs(limit, before=before, tag=tag))
    return _summaries(workspace, rows)


def read_unfinished(workspace: OpenWorkspace, limit: int) -> list[RunSummary]:
    """Return unfinished runs by state, pending runs first, and newest first; at most `limit` runs of each state."""
    with workspace.ledger.snapshot() as ledger:
        rows = _rows(workspace, ledger, [run for state in _OPEN for run in ledger.runs(limit, state)])
    return _summaries(workspace, rows)


def _rows(workspace: OpenWorkspace, ledger: Snapshot, runs: Sequence[RunRecord]) -> Rows:
    return Rows(ledger, runs, workspace.hosts.all if workspace.hosts else list[Host])


def _summaries(workspace: OpenWorkspace, rows: Rows) -> list[RunSummary]:
    """Return summaries of runs.

    A requested action may have been done since its row was written. Therefore the first runs that request an action are
    read in full; the next action of further such runs refers to `why`.
    """
    asking = [run.id for run in rows.runs if any(asks(row) for row in rows.stages[run.id])]
    looked_at, sent_on, found = set(asking[:_LOOKED_AT]), set(asking[_LOOKED_AT:]), []
    for run in rows.runs:
        watcher = RunWatcher(workspace, run.id, brief=True)
        status = watcher.read() if run.id in looked_at else watcher.of(run, rows)
        if run.id in sent_on:
            status = replace(status, next_action=f"posttrain why {run.id}")
        found.append(RunSummary.of(status, rows.released.get(run.id, ""), rows.tags[run.id]))
    return found


def run_scores(workspace: OpenWorkspace, status: RunStatus) -> Scores:
    """Return the scores of the run; no scores if its manifest cannot be read, which `trouble` reports."""
    from posttrain.control import scores  # imported here: it needs numpy, which `ls` must not load

    manifest, _ = workspace.manifest_or_trouble(status.run)
    if manifest is None:
        return scores.Scores()
    rows = {stage.record.name: stage.record for stage in status.stages}
    return scores.run_scores(workspace.blobs, manifest, rows)


def baseline_run(workspace: OpenWorkspace, manifest: Manifest, report: GateReport | None) -> str | None:
    """Return the run that made the baseline of a gate report; None if there is no such run."""
    if manifest.release is None or report is None or report.baseline is None:
        return None
    history = workspace.ledger.history(manifest.release.channel)
    return next((e.run_id for e in reversed(history) if e.model_digest == report.baseline and e.run_id), None)


def _run_action(run: RunRecord, driver: RunDriver | None, stages: Sequence[StageStatus]) -> str:
    if run.state == RunState.SUCCEEDED:
        return f"posttrain lineage {run.id} shows what it was made from"
    if driver is None:
        return run.next_action or f"posttrain why {run.id}"
    if run.reason == Reason.SET_ASIDE:
        return run.next_action
    if any(stage.unanswered for stage in stages):
        return next(stage.next_action for stage in stages if stage.unanswered)
    if driver.kind is not DriverKind.NONE:
        rows = [stage.record for stage in stages if waiting(stage.record)]
        asked = [row.next_action for row in rows if "posttrain " in row.next_action]
        return asked[0] if asked else f"posttrain get {run.id} --watch"
    return f"posttrain attach {run.id} continues it (no process drives it)"


def _policy_moved(workspace: OpenWorkspace, manifest: Manifest) -> Iterator[str]:
    """Yield a warning if the channel's policy differs from the policy under which the run was planned."""
    channel = manifest.release.channel if manifest.release else None
    if channel and workspace.ledger.channel_record(channel).policy != manifest.policy:
        yield (
            f"the policy of channel {channel} was changed after this run was planned, so the run's release will be "
            "rejected; posttrain run RUN.yaml plans a run under the current policy and reuses finished stages"
        )


def _job_warnings(stages: Sequence[StageStatus]) -> Iterator[str]:
    """Yield the warnings of jobs, each line once."""
    told = (
        (stage.record.name, note.message)
        for stage in stages
        for note in stage.progress.notes
        if note.level == "warning"
    )
    yield from dict.fromkeys(f"{name}: {message}" for name, message in told)


_SHOWN = (
    *("number", "state", "reason", "message", "stop_cause", "tokens", "seconds", "reserved_tokens"),
    *("reserved_seconds", "resume", "folder"),
)


def sampling_words(suite: Mapping[str, Any]) -> str:
    """Return how a suite's responses were sampled, from the suite's parameters or, if missing, their defaults."""
    words = ["1 greedy response to each item"] if suite else []
    if samples := suite.get("samples"):
        drawn = [f"temperature {suite.get('temperature', 1.0):g}"]
        drawn += [f"{name} {suite[name]:g}" for name in ("top_k", "top_p", "min_p") if name in suite]
        sampled = f"{samples} sampled response{'s' if samples != 1 else ''} ({', '.join(drawn)})"
        words = [f"1 greedy response and {sampled} to each item"]
    if suite.get("stop"):
        words.append("each ends at the stop string " + " or ".join(repr(one) for one in suite["stop"]))
    return ", ".join(words)


def drawn_words(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line for each of a stage's suites that is sampled or has stop strings."""
    suites = params.get("suites")  # in a stage of another kind, this parameter may have any type
    asked = (
        {name: one for name, one in suites.items() if isinstance(one, Mapping)} if isinstance(suites, Mapping) else {}
    )
    chosen = {name: one for name, one in asked.items() if one.get("samples") or one.get("stop")}
    return tuple(f"{name}: {sampling_words(one)}" for name, one in chosen.items())
