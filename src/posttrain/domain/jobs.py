"""The contract between the control side and a job process: orders, results, and facts that the job reports.

Facts are values, streamed as JSON lines into the attempt folder's event segments. The engine creates facts without
importing store or telemetry; a reader gets the same values back. A value must have the type that the dataclass
declares; any other type raises.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from posttrain.domain.errors import FailureClass, InputError, IntegrityError

MOST_NUMBER = 1 << 53  # maximum of any count; sums of such counts still fit in a database column
_LARGE = 1 << 63  # a database can store only smaller whole numbers
MOST_TEXT = 1 << 14  # characters of a text stored in rows
T = TypeVar("T")
ORDER_SCHEMA = 1
CHECKPOINT_FORMAT = "posttrain.checkpoint/1"
PHASE_SECONDS = 30.0  # a job reports the end of a phase after this silence, since a step of a large model takes hours
_STATUSES = ("succeeded", "failed", "stopped")
_PATH = 1024  # characters
NO_MEMORY, NO_SPACE = 71, 74  # exit codes of a job without memory or disk space for its result (EX_OSERR, EX_IOERR)
FIXED_LOGPROBS = "posttrain.logprobs"  # metadata of an evaluation's items: log-probabilities of fixed texts
ANOTHER_RUNS = 73  # exit code if another process began the attempt, or none may begin it (EX_CANTCREAT)


GANG = "POSTTRAIN_GANG"  # variable of an agent's job: address of a Ray cluster over its nodes; empty: it has one node
NODE_FAILED = 75  # exit code of an agent that could not run its job because of its node or store (EX_TEMPFAIL)


def shaped(form: Callable[..., T], raw: Mapping[str, Any]) -> T:
    """Return the dataclass `form` with these fields. Elements of lists are not checked, since there may be millions.

    Raises:
        TypeError: a field is missing, unknown, or of another type.
        ValueError: a field's value is invalid.
    """
    known = _checks(form)
    for name, value in raw.items():
        if name in known and not known[name](value):
            raise TypeError(f"{name} must be of type {_types(form)[name]}, got {repr(value)[:60]}")
    return form(**raw)


def count(value: Any) -> int:
    """Return the value if it is a whole number from 0 to `MOST_NUMBER`.

    Raises:
        TypeError: the value is not such a number.
    """
    if not _is_int(value) or not 0 <= value <= MOST_NUMBER:
        raise TypeError(f"must be a whole number from 0 to {MOST_NUMBER}, got {repr(value)[:60]}")
    return int(value)


def duration(value: Any) -> float:
    """Return the value as seconds if it is a finite number and at least 0.

    Raises:
        TypeError: the value is not such a number.
    """
    if not _is_number(value) or not 0 <= value < math.inf:
        raise TypeError(f"must be a finite number of seconds, at least 0, got {repr(value)[:60]}")
    return float(value)


def real(value: Any) -> float:
    """Return the value if it is a number, including NaN.

    Raises:
        TypeError: the value is not a number.
    """
    if not _is_number(value):
        raise TypeError(f"must be a number, got {repr(value)[:60]}")
    return value  # type: ignore[no-any-return]


def text(value: Any, most: int = MOST_TEXT) -> str:
    """Return text that every database accepts: without NUL or lone surrogates, and at most `most` characters.

    Raises:
        TypeError: the value is not text.
    """
    if not isinstance(value, str):
        raise TypeError(f"must be text, got {repr(value)[:60]}")
    return value[:most].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGE


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


_READERS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, Any]": lambda value: isinstance(value, Mapping),
    "Mapping[str, float]": lambda value: isinstance(value, Mapping) and all(map(_is_number, value.values())),
    **{f"Sequence[{one}]": lambda value: isinstance(value, list | tuple) for one in ("int", "float", "str", "bool")},
}


@cache
def _types(form: Any) -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(form)}


@cache
def _checks(form: Any) -> dict[str, Callable[[Any], bool]]:
    return {name: _READERS[kind] for name, kind in _types(form).items()}


@dataclass(frozen=True, slots=True)
class Metric:
    """Numbers of one step: `Metric(step=12, values={"reward/mean": 0.41}, at=1.7e9)`."""

    step: int
    values: Mapping[str, float]
    at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job. `step` is the liveness counter, which grows independently of clocks while the job lives.

    `tokens` is the quantity that a budget meters, counted by one rule for every kind of job:

    * a prompt's tokens, once per prefill, which the samples of one prompt share;
    * every generated token;
    * every token of a document trained on, prompt and response, once per optimiser step that it is part of.

    So supervised fine-tuning counts the tokens that it trains on, an evaluation counts the tokens of prompts and
    responses, and GRPO counts the sum, since responses of groups with signal are generated and then trained on. Passes
    that neither generate nor train (such as those of the frozen reference for a KL penalty) are not counted.
    """

    step: int
    total: int
    phase: str  # "sft", "grpo", "evaluate" …
    tokens: int  # spent so far by the attempt's lineage
    at: float


@dataclass(frozen=True, slots=True)
class Span:
    """A timed hand-off: `[started, started + seconds)`."""

    name: str
    step: int
    started: float
    seconds: float
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """One line of text for users: a warning, or a report of progress."""

    message: str
    at: float
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Sample:
    """The history of one response in a step, from the prompt to the update that consumed it.

    A sequence has one value per response token, 0 at observed tokens. It is empty if the role that computes it is
    absent, or if the response was not trained on.
    """

    id: str  # "<step>.<prompt's position in the data stream>.<sample>", such as "12.388.3"; steps count from 0
    step: int
    prompt: str
    response: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    behaviour_logprobs: Sequence[float]
    truncated: bool
    versions: Sequence[str]  # policy versions that sampled it, "<incarnation>.<step>"
    reward: float | None
    fate: str  # "update 12, mini-batch 0" | "dropped: no score" | "dropped: group without signal", or another reason
    components: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"  # status of the reward: ok | timeout | error | none
    advantages: Sequence[float] = ()
    logprobs: Sequence[float] = ()  # log-probabilities under the policy before the update
    ratios: Sequence[float] = ()  # exp(logprobs - old), with the old log-probabilities of the loss
    clipped: Sequence[bool] = ()
    reference_logprobs: Sequence[float] = ()
    values: Sequence[float] = ()
    returns: Sequence[float] = ()
    earned: Sequence[float] = ()  # the reward earned at each token; empty: all of it at the end
    observed: Sequence[bool] = ()  # for each token, whether the policy did not sample it; empty: all were sampled
    temperature: float | None = None  # temperature of sampling and of the log-probabilities; None: unknown


Fact = Metric | Progress | Span | Note | Sample


FactSink = Callable[[Fact], None]


_KINDS: dict[str, type[Any]] = {"metric": Metric, "progress": Progress, "span": Span, "note": Note, "sample": Sample}


_NAMES = {kind: name for name, kind in _KINDS.items()}


_ARRAYS = {"Sequence[int]": "i", "Sequence[float]": "f", "Sequence[bool]": "b"}


_CODES = {f.name: _ARRAYS[str(f.type)] for f in fields(Sample) if str(f.type) in _ARRAYS}


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """Return a JSON object whose `type` names the fact. A sample's numbers are base64 bytes under their type code.

    The encoding takes a fifth of the time and half of the bytes of decimal numbers.
    """
    said = {f.name: getattr(fact, f.name) for f in fields(fact)}  # not asdict, which copies every list
    if isinstance(fact, Sample):
        said |= {name: _packed(code, said[name]) for name, code in _CODES.items() if len(said[name])}
    return {"type": _NAMES[type(fact)], **said}


def _packed(code: str, numbers: Sequence[float]) -> dict[str, str]:
    return {code: b64encode(array(code, numbers).tobytes()).decode("ascii")}


def _unpacked(given: Any) -> Any:
    """Return the numbers of `_packed`; a list, which an older version wrote, is returned unchanged."""
    if not isinstance(given, Mapping):
        return given
    [(code, text)] = given.items()
    numbers = array(code)
    numbers.frombytes(b64decode(text, validate=True))
    if code == "f":
        return [float(f"{value:.7g}") for value in numbers]  # float32 holds seven digits
    return list(map(bool, numbers)) if code == "b" else numbers.tolist()


def fact_from_json(value: Mapping[str, Any]) -> Fact:
    """Return the fact of a JSON object; the inverse of `fact_to_json`.

    Raises:
        IntegrityError: the `type` is unknown, or a field is missing.
    """
    try:
        given = {key: item for key, item in value.items() if key != "type"}
        if value["type"] == "sample":
            given |= {name: _unpacked(given[name]) for name in _CODES.keys() & given.keys()}
        fact: Fact = shaped(_KINDS[value["type"]], given)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"event segment contains a fact that cannot be read: {error}; run job and driver with the same Posttrain"
        ) from error
    return fact


@dataclass(frozen=True, slots=True)
class InputBlob:
    """One resolved input of a job: an artifact in the store, identified by its digest.

    `form` is `file` (a single blob) or `tree` (a folder, addressed by the digest of its listing).
    """

    digest: str
    form: str
    name: str = ""  # readable name: dataset:sort-train@1
    meta: Mapping[str, Any] = field(default_factory=dict)  # a reward's {"entry": "score", "dialect": "auto"}


@dataclass(frozen=True, slots=True)
class JobOrder:
    """`job.json`: everything that a job needs. A job can reach only its attempt folder and the artifact store.

    The order of a server's job names no store: the job reads its inputs from the server that `access.json` names.
    """

    name: str  # deterministic external name: <run>-<stage>-<attempt>
    kind: str  # the kind of the stage
    seed: int
    params: Mapping[str, Any]
    inputs: Mapping[str, InputBlob]
    store_url: str
    cache_dir: str  # where trees are materialised by digest; shared, safe to delete
    resume: str | None = None  # digest of the checkpoint tree to resume from
    resumed_from: str = ""  # the run/stage that wrote the checkpoint
    resumed_step: int = 0  # steps completed in the checkpoint
    tokens_inherited: int = 0  # tokens already counted in the checkpoint
    token_allowance: int | None = None  # total tokens that this attempt's lineage may spend
    seconds_allowance: float | None = None  # the attempt's maximum running time, without time in a queue
    tokens_declared: int | None = None  # budget.tokens; the allowance is its unspent part
    seconds_declared: float | None = None  # budget.wall_clock
    environment: str = ""  # digest of the run's first environment; empty: not compared
    trust_rewards: bool = False  # the workspace allows rewards to run unconfined
    epoch: int = 0  # number that grows with each attempt of a stage
    channel: str = ""  # URL of the mailbox, without credentials; empty: the attempt folder
    phase_seconds: float = PHASE_SECONDS  # silence after which the job reports the end of a phase
    served: bool = False  # the inputs come from the server that access.json names; `store_url` is empty
    image: str = ""  # the container image, by digest; empty: no container
    code: Mapping[str, str] = field(default_factory=dict)  # digests of the code that decides results, if not compared
    log_head: str = ""  # head of the ledger's event log at launch, which reveals a later truncation
    schema: int = ORDER_SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobOrder:
        """Return the inverse of `to_json`.

        Raises:
            InputError: another version of Posttrain wrote the order, in an unsupported schema.
        """
        if value["schema"] != ORDER_SCHEMA:
            raise InputError(
                f"job order must be of schema {ORDER_SCHEMA}, got {value['schema']!r}; run the job with the version of "
                "Posttrain that wrote it"
            )
        inputs = {slot: InputBlob(**blob) for slot, blob in value["inputs"].items()}
        known = {key: item for key, item in value.items() if key != "deadline"}  # in orders before 0.2
        return cls(**{**known, "inputs": inputs})


def tokens_short(coming: str, worst: int, spent: int, allowed: int, declared: int | None) -> str:
    """Return the message that the next piece of work may exceed the token budget.

    Args:
        coming: the next piece of work, such as "the next step".
        worst: the maximum number of tokens that the work may take.
        spent: tokens of the lineage so far.
        allowed: total tokens that the lineage may spend; less than `declared` if other stages spent some.
        declared: `budget.tokens`; None: unknown.
    """
    of = "" if declared is None else f" (budget.tokens: {declared})"
    used = f"{spent} of the stage's {allowed} tokens are spent{of}"
    return f"token budget must cover {coming} (at most {worst} tokens): {used}"


def seconds_short(allowed: float | None, declared: float | None) -> str:
    """Return the beginning of the message that the time allowance of the job is spent."""
    of = "" if declared is None else f" of budget.wall_clock: {declared:g} s"
    if allowed is None:
        return "deadline passed"
    return f"deadline passed (when the attempt began, {max(allowed, 0.0):.0f} s were left{of})"


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The result of a trainer's compilation of an order: a module name as a string, never an import."""

    module: str  # run as `python -m MODULE ATTEMPT_DIR`
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 0  # accelerators that the executor allocates exclusively to the job, if it allocates any
    secrets: tuple[str, ...] = ()  # names of variables that the job needs; their values are never written


@dataclass(frozen=True, slots=True)
class Capacity:
    """The devices that an executor allocates to jobs: `Capacity(2, {"1": "sort-1f3a-sft-1 of ada"})`.

    With 0 devices (there is no GPU, or a cluster scheduler allocates the GPUs), no job waits for a device.
    """

    devices: int = 0
    held: Mapping[str, str] = field(default_factory=dict)  # device → its holder

    def lack(self, wanted: int) -> str:
        """Return in one line why `wanted` devices are not available now; empty if they are.

        Raises:
            InputError: the machine has fewer devices.
        """
        free = self.devices - len(self.held)
        if not self.devices or wanted <= free:
            return ""
        if wanted > self.devices:
            raise InputError(
                f"placement: the job requests {wanted} devices, but this machine has {self.devices}; request fewer, "
                "or use another machine"
            )
        who = "; ".join(f"{name} is held by {holder}" for name, holder in self.held.items())
        there = f"only {free} are" if free > 1 else "only 1 is" if free else "none is"
        return f"needs {wanted} of {self.devices} devices, but {there} free: {who}"


class JobState(StrEnum):
    """The state of a job as its executor observes it."""

    UNKNOWN = "unknown"  # no job with this name is visible; see `Observation.absent`
    STARTING = "starting"  # accepted: queued, pulling an image, starting
    RUNNING = "running"
    EXITED = "exited"  # with an exit code
    LOST = "lost"  # ended without an exit code


class Absence(StrEnum):
    """The meaning of an observation that finds no job with the name."""

    AUTHORITATIVE = "authoritative"  # the job does not exist
    NOT_VISIBLE_YET = "not_visible_yet"  # a submitted job may still appear


class Cause(StrEnum):
    """Why a job ended, if the executor reports more than the exit code."""

    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PREEMPTED = "preempted"
    DRAINED = "drained"  # its node is being emptied
    NODE_LOST = "node_lost"
    OVERTIME = "overtime"  # it exceeded its maximum running time


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One observation of one pod of a job."""

    name: str  # group, and number in the group: main-0
    state: JobState
    exit_code: int | None = None
    cause: Cause | None = None
    incarnation: int = 0
    node: str = ""

    @property
    def failed(self) -> bool:
        """Whether the pod was lost or ended with an exit code other than 0."""
        return self.state is JobState.LOST or (self.state is JobState.EXITED and self.exit_code != 0)

    def __str__(self) -> str:
        code = "no exit code" if self.exit_code is None else f"exit code {self.exit_code}"
        ended = self.cause.replace("_", " ") if self.cause else code
        return f"pod {self.name}{f' on {self.node}' if self.node else ''}: {ended}"


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of a job. Comparisons for equality ignore `handle`, `node`, `seconds` and `pods`."""

    state: JobState
    exit_code: int | None = None
    detail: str = ""
    absent: Absence = Absence.AUTHORITATIVE  # the meaning of UNKNOWN
    cause: Cause | None = None
    incarnation: int = 0  # restarts by the executor itself, within the same attempt
    handle: str = field(default="", compare=False)  # the executor's name for the job
    node: str = field(default="", compare=False)
    # running time in seconds by the executor's record, from the start until now or the end, over all incarnations. Time
    # in a queue and time after an unnoticed end do not count. None: the job never ran
    seconds: float | None = field(default=None, compare=False)
    # the pods of a gang, beginning with the pod that failed first; empty for a single pod
    pods: tuple[PodSeen, ...] = field(default=(), compare=False)

    @property
    def why(self) -> str:
        """Why the job ended, as text; for a gang, why the failed pod ended."""
        if self.state is JobState.UNKNOWN:
            return "the executor no longer has a job with this name"
        culprit = next((str(pod) for pod in self.pods if pod.failed), "")
        code = "its process has ended" if self.exit_code is None else f"exit code {self.exit_code}"
        return culprit or self.detail or code

    @property
    def live(self) -> bool:
        """Whether the job runs or may still start."""
        return self.state in (JobState.STARTING, JobState.RUNNING)

    @property
    def hidden(self) -> bool:
        """Whether the state is undetermined: the job may exist, run or have ended."""
        return self.state is JobState.UNKNOWN and self.absent is Absence.NOT_VISIBLE_YET

    @property
    def gone(self) -> bool:
        """Whether it is certain that no process of the job runs or will run."""
        return not self.live and not self.hidden


@dataclass(frozen=True, slots=True)
class Accepted:
    """The executor accepted a new job."""

    handle: str


@dataclass(frozen=True, slots=True)
class Exists:
    """The executor already has a job with this name, running or ended; no job was started."""

    handle: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """It is unknown whether the executor has the job (after a time-out). Observe the job; do not submit it again."""

    detail: str


Submission = Accepted | Exists | Unknown


@dataclass(frozen=True, slots=True)
class LogPage:
    """A piece of a job's output, and the cursor of the next piece."""

    text: str
    cursor: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, in one line; equal failures have equal `signature`s."""

    kind: FailureClass
    message: str
    signature: str


@dataclass(frozen=True, slots=True)
class Output:
    """A file or folder that a job produced, relative to its attempt folder."""

    path: str
    form: str  # file | tree
    over: str = ""  # input of the stage, a model, whose files the output extends by those of an adapter


@dataclass(frozen=True, slots=True)
class CheckpointCommit:
    """A checkpoint's `COMMIT`, its last file: `CheckpointCommit(120, {"model.safetensors": "sha256:…", …})`.

    A checkpoint folder is complete if every shard named here exists with its digest. No process reads a folder without
    this file.
    """

    step: int  # steps completed
    shards: Mapping[str, str]  # file name → digest

    def to_json(self) -> dict[str, Any]:
        return {"format": CHECKPOINT_FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> CheckpointCommit:
        """Return the inverse of `to_json`.

        Raises:
            IntegrityError: the value has a different shape or format, or names no shards.
        """
        try:
            if value["format"] != CHECKPOINT_FORMAT:
                raise IntegrityError(f"a COMMIT must be of format {CHECKPOINT_FORMAT}, got {value['format']!r}")
            commit = cls(count(value["step"]), {text(name): text(digest) for name, digest in value["shards"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"a COMMIT must have format, step and shards: {error!r}; it is damaged") from error
        if any(part in ("", ".", "..") for name in commit.shards for part in name.split("/")):
            raise IntegrityError(
                "a COMMIT must name only files below its folder, got a path outside; the checkpoint is damaged"
            )
        if not commit.shards:
            raise IntegrityError(f"a COMMIT must name at least one shard, got none at step {commit.step}")
        return commit


@dataclass(frozen=True, slots=True)
class JobResult:
    """`result.json`, which is written last, once and atomically; its presence means that the job ended by itself."""

    status: str  # succeeded | failed | stopped
    outputs: Mapping[str, Output] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0  # spent by the attempt's lineage
    seconds: float = 0.0
    failure: Failure | None = None
    message: str = ""  # for people, if the job did not fail

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobResult:
        """Return the inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the value has a different shape.
        """
        if value["status"] not in _STATUSES:
            raise ValueError(f"status must be one of {', '.join(_STATUSES)}, got {repr(value['status'])[:60]}")
        raw = value.get("failure")
        why = Failure(FailureClass(raw["kind"]), text(raw["message"]), text(raw["signature"])) if raw else None
        known = {
            "outputs": {text(name): _output(**output) for name, output in value["outputs"].items()},
            "metrics": {text(name): real(one) for name, one in value.get("metrics", {}).items()},
            "tokens": count(value.get("tokens", 0)),
            "seconds": duration(value.get("seconds", 0.0)),
            "failure": why,
            "message": text(value.get("message", "")),
        }
        return cls(**{**value, **known})


def _output(path: str, form: str, over: str = "") -> Output:
    if form not in ("file", "tree"):
        raise ValueError(f"an output must be a file or a tree, got {repr(form)[:60]}")
    if not path or path != text(path, _PATH):
        raise ValueError(f"an output's path must be text of at most {_PATH} characters, got {repr(path)[:60]}")
    return Output(path, form, text(over))
