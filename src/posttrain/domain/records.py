"""Rows of the ledger as frozen values, and the outcome of a run as an error.

Times are seconds since the epoch; digests are `sha256:<hex>`. The outcome of an ended run maps to the error that a
command or a caller gets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import (
    ApprovalError,
    BudgetExceededError,
    ChannelClosedError,
    ConflictError,
    FailureClass,
    GateInconclusiveError,
    GateRejectedError,
    InfrastructureError,
    IntegrityError,
    JobFailedError,
    PolicyError,
    PosttrainError,
    QuarantinedError,
    RecalledError,
    StoppedError,
)
from posttrain.domain.kinds import BEST
from posttrain.domain.lifecycle import Reason, RunState, StageState

DEFAULT_PROJECT = "default"
MANIFEST: Final = "manifest"  # a slot outside stages: a run's manifest
PARENT: Final = "parent"  # the source of an asset
IMPORT: Final = "import"  # the record of the external run from which an asset was imported
ORIGIN: Final = "origin"  # the run or stage that made an asset
REUSED: Final = "reused"  # the stage whose results another stage reused from the stage cache
IMPORTED: Final = "imported"  # in an asset's meta: the digest of the import record
_LONGEST = 512  # maximum characters of a name, because the size of index entries is limited
_REJECTED: Mapping[str, type[PosttrainError]] = {
    Reason.GATE_INCONCLUSIVE: GateInconclusiveError,
    Reason.CHANNEL_MOVED: ConflictError,
    Reason.POLICY_NOT_MET: PolicyError,
    Reason.CHANNEL_FROZEN: ChannelClosedError,
    Reason.RECALLED: RecalledError,
    Reason.QUARANTINED: QuarantinedError,
    Reason.APPROVAL_REJECTED: ApprovalError,
}
_FAILED: Mapping[str, type[PosttrainError]] = {
    Reason.ATTEMPTS_EXHAUSTED: InfrastructureError,
    Reason.CIRCUIT_OPEN: InfrastructureError,
    Reason.CORRUPT: IntegrityError,
    Reason.BUDGET_EXCEEDED: BudgetExceededError,
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A version of an asset: `Asset("dataset", "sort-train", 1, "sha256:…", "file", …)`."""

    kind: str  # dataset | model | reward | history
    name: str
    version: int
    digest: str
    form: str  # file | tree
    created_at: float
    created_by: str
    meta: Mapping[str, Any] = field(default_factory=dict)  # rows, columns, guideline, entry point, source file …
    parents: tuple[str, ...] = ()  # digests of its sources

    @property
    def ref(self) -> str:
        """`kind:name@version`."""
        return f"{self.kind}:{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run: one submitted manifest."""

    id: str
    name: str
    manifest_digest: str
    state: str
    owner: str
    created_at: float
    generation: int = 0
    reason: str = ""  # machine-readable, CamelCase: WaitingForInputs, GateFailed …
    message: str = ""  # one sentence for a person
    next_action: str = ""
    lease_owner: str | None = None  # `host:pid:start` of its driver, in the work queue
    lease_expires: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    desired: str = "running"  # the requested state: running | stopped
    project: str = DEFAULT_PROJECT
    repeat: int = 1  # 1, 2, …: the number of this run among the runs of its manifest


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of a run."""

    run_id: str
    name: str
    position: int  # topological order
    kind: str
    state: str
    generation: int = 0
    reason: str = ""
    message: str = ""
    next_action: str = ""
    cache_key: str | None = None
    cached_from: str | None = None  # "<run>/<stage>" whose outputs are reused
    inputs: Mapping[str, Any] = field(
        default_factory=dict
    )  # slot → InputBlob fields, bound when the stage becomes ready
    outputs: Mapping[str, Any] = field(default_factory=dict)  # name → {"digest", "form"}
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0  # spent, over all attempts
    started_at: float | None = None  # the first launch; for a waiting stage, the beginning of the wait
    finished_at: float | None = None
    not_before: float | None = None  # back-off: the earliest launch; for a waiting stage, the end of the wait
    retried_after: int = 0  # number of attempts before the last `retry`; these no longer count against the limit


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that a run received; a stage that waits for the signal continues."""

    run_id: str
    name: str
    actor: str  # the sender
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunNote:
    """A user's note on a run: a text, or a tag that filters lists."""

    run_id: str
    number: int  # within the run, from 1
    actor: str
    at: float
    text: str  # empty: a tag
    tag: str = ""


@dataclass(frozen=True, slots=True)
class AssetStatus:
    """People's assessment of an asset version, which may change although the version cannot."""

    kind: str
    name: str
    version: int
    status: str  # approved | recalled; empty: neither
    actor: str  # the principal that set the status
    at: float
    reason: str = ""

    @property
    def words(self) -> str:
        """The status as text: `recalled by user:ann: a licence ran out`."""
        return f"{self.status} by {self.actor}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One try to compute a stage; each attempt has its own folder."""

    run_id: str
    stage: str
    number: int  # 1, 2, …
    name: str  # deterministic external name
    folder: str
    state: str
    generation: int = 0
    executor: str = "local"
    handle: str | None = None
    resume: str | None = None  # digest of the checkpoint tree that it resumed from
    reason: str = ""
    message: str = ""
    failure_signature: str | None = None
    stop_requested_at: float | None = None  # when the job was requested to end; a grace period follows
    tokens: int = 0
    created_at: float = 0.0
    launched_at: float | None = None
    finished_at: float | None = None  # when the end of the job was observed
    seconds: float = 0.0  # running time of its job, which is billed to the wall-clock budget
    host: str | None = None  # the only host whose drivers can reach the job; None: the ledger has one host
    # the job may rewrite its order, so values that the control side needs later are stored here before the job starts
    # and are not changed afterwards. None: an older version planned the attempt, and wrote them only into the order
    channel: str | None = None  # URL of its mailbox; empty: the mailbox is in the folder
    resumed_from: str | None = None  # run/stage that wrote the checkpoint `resume`
    resumed_step: int | None = None  # steps completed in that checkpoint
    resumed_tokens: int | None = None  # spent by the checkpoint's lineage, and not billed again
    # the part of the run's budget that is reserved for the attempt while it lives. None: the budget has no such limit
    reserved_tokens: int | None = None
    reserved_seconds: float | None = None
    stop_cause: str | None = None  # `domain.lifecycle.StopCause`: why its job was stopped; None: it was not stopped


@dataclass(frozen=True, slots=True)
class Watch:
    """How long a job has been observed without progress."""

    attempt: str  # name of the attempt
    run_id: str
    progress: str  # the last progress report; unchanged while the job makes no progress
    quiet: float  # seconds of observed silence
    at: float  # the last observation


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of one run in one snapshot."""

    run: RunRecord
    stages: tuple[StageRecord, ...]  # by position
    attempts: tuple[AttemptRecord, ...]  # by stage and number
    watches: tuple[Watch, ...]  # of its live attempts
    head: tuple[int, bytes]  # size and root of the sealed event log


@dataclass(frozen=True, slots=True)
class ReleaseEntry:
    """One entry in a channel's append-only history; the channel's deployments name the live entry."""

    sequence: int
    channel: str
    model_digest: str
    run_id: str | None
    action: str  # promote | rollback
    actor: str  # the principal that requested the move: for a run's release stage, the run's submitter
    at: float
    report_digest: str | None = None


@dataclass(frozen=True, slots=True)
class ChannelRecord:
    """The settings of a release channel, which apply to all its moves."""

    name: str
    policy: str | None = None  # digest of the policy that every release must pass; None: only the run's own gates
    protected: bool = False  # releases and changes of policy and quarantine need approval
    frozen: str = ""  # the forbidden moves: releases | all (rollbacks too); empty: none
    revision: int = 0  # number of changes of its policy or protection
    generation: int = 0  # 0: the channel has not been used yet


@dataclass(frozen=True, slots=True)
class Deployment:
    """A release that a channel points at."""

    channel: str
    role: str  # live
    release_sequence: int
    weight: float  # share of the traffic
    generation: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A model that was rolled back from a channel."""

    channel: str
    model_digest: str
    release: int  # the number of the rollback
    since: float
    actor: str  # the principal that rolled back, or lifted the quarantine
    lifted_at: float | None = None
    reason: str = ""  # the reason for lifting


CALLS = "calls:"  # beginning of the scope of a key, which only calls the served model of a channel


@dataclass(frozen=True, slots=True)
class Token:
    """The ledger's record of a token."""

    id: str
    actor: str  # its owner
    scopes: Mapping[str, str]  # project → the highest role that the token permits there, or `CALLS` and a channel
    created_at: float
    expires_at: float
    revoked_at: float | None = None
    replaces: str | None = None  # the token that it replaced


@dataclass(frozen=True, slots=True)
class Look:
    """One evaluation of a set of items. The more often the same items are evaluated, the less a pass proves."""

    run_id: str
    stage: str
    kind: str
    at: float  # when its first attempt was launched
    ended: float | None  # None: it has not ended


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one evaluation of a set of items."""

    items: str  # digest of the data set
    slot: str  # the evaluation's slot: `suites.NAME`
    results: str  # digest of its `metrics.parquet`


@dataclass(frozen=True, slots=True)
class Artifact:
    """Bytes in the store that a project has recorded."""

    digest: str
    form: str  # file | tree
    bytes: int | None  # size; for a tree, of its listing and files; None: recorded by an older version
    kind: str  # the kind of its first record: asset | input | output | manifest | policy | record (of an import)
    created_at: float


@dataclass(frozen=True, slots=True)
class Edge:
    """The use or production of an artifact: `Edge("run:sort-1/sft", "model", "run:sort-1/grpo", "model", "sha256:…")`.

    `run_end`, `stage_end` and `release_end` return the names of its ends.
    """

    producer: str  # empty: unknown
    output: str  # the name of the producer's output; empty: its only output
    consumer: str  # empty: the production itself, without a consumer
    slot: str  # the consumer's input slot
    digest: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold: bytes that must not be deleted, and the holder that needs them."""

    digest: str
    holder: str  # channel:prod
    reason: str
    at: float
    released_at: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the event log. The sealer assigns `sequence`; an unsealed event has no number."""

    id: int  # in the order of insertion; may have gaps
    kind: str  # run.running, stage.succeeded, channel.promote …
    subject: str  # run id, run/stage, run/stage/attempt, channel name, asset ref
    actor: str  # the principal's name
    at: float
    payload: Mapping[str, Any]  # audited values and free text; for a change: from, to, generation, changes
    project: str
    principal: str  # pseudonymous id
    auth: str  # how the principal was authenticated
    request: str  # id of the transaction that wrote the event
    leaf: str  # hash of the canonical envelope, 64 hexadecimal digits
    sequence: int | None = None


def run_end(run_id: str) -> str:
    """Return `run:RUN`."""
    return f"run:{run_id}"


def stage_end(run_id: str, stage: str) -> str:
    """Return `run:RUN/STAGE`."""
    return f"run:{run_id}/{stage}"


def stage_of(end: str) -> tuple[str, str] | None:
    """Return run and stage of `run:RUN/STAGE`; None for any other end."""
    head, _, rest = end.partition(":")
    run_id, mark, stage = rest.partition("/")
    return (run_id, stage) if head == "run" and mark else None


def release_end(channel: str, sequence: int) -> str:
    """Return `channel:NAME@RELEASE`."""
    return f"channel:{channel}@{sequence}"


def release_of(end: str) -> tuple[str, int] | None:
    """Return channel and number of `channel:NAME@RELEASE`; None for any other end."""
    head, _, rest = end.partition(":")
    channel, mark, sequence = rest.rpartition("@")
    return (channel, int(sequence)) if head == "channel" and mark and sequence.isdecimal() else None


def source_of(name: str) -> tuple[str, str]:
    """Return the producer and output that a stage's input names: `RUN/sft`, `run:RUN/grpo/best`, `dataset:train@1`.

    The output is empty if the name does not contain it.
    """
    head, colon, rest = name.partition(":")
    run_id, mark, word = (rest if colon and head == "run" else name if not colon else "").partition("/")
    if not mark or not word:
        return named(name), ""
    stage, _, output = word.partition("/")
    return stage_end(run_id, stage), output if output == BEST else ""


def named(name: str) -> str:
    """Return `name`, or its beginning and digest if it is too long."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{digest_bytes(name.encode())}"


def outcome_error(run: RunRecord, stages: Iterable[StageRecord]) -> PosttrainError | None:
    """Return the error (and so the exit code) of a final run; None: the run succeeded."""
    message = f"run {run.id}: {run.message}" + (
        f"; next: {run.next_action}" if run.next_action and run.next_action not in run.message else ""
    )
    if run.state == RunState.STOPPED:
        return StoppedError(message)
    if run.state == RunState.REJECTED:
        return _REJECTED.get(run.reason, GateRejectedError)(message)
    if run.state != RunState.FAILED:
        return None
    reason = next((stage.reason for stage in stages if stage.state == StageState.FAILED), run.reason)
    kind = reason.partition(":")[2]
    return (FailureClass(kind).error if kind else _FAILED.get(reason, JobFailedError))(message)
