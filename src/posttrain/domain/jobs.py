"""The contract between the control side and a job process: orders, results, and facts that it reports meanwhile.

Facts are values, streamed as JSON lines into the attempt folder's event segments. The engine makes them and imports
neither store nor telemetry; whoever reads them back gets the same values. A value is read as the dataclass declares it,
and a value of any other type raises.
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

MOST_NUMBER = 1 << 53  # that anything counts: sums of them still fit a database
_LARGE = 1 << 63  # beyond it no database holds a whole number
MOST_TEXT = 1 << 14  # characters of what is kept in rows
T = TypeVar("T")
ORDER_SCHEMA = 1
CHECKPOINT_FORMAT = "posttrain.checkpoint/1"
PHASE_SECONDS = 30.0  # after which a job tells the end of a phase by itself: a step of a large model takes hours
_STATUSES = ("succeeded", "failed", "stopped")
_PATH = 1024  # characters
NO_MEMORY, NO_SPACE = 71, 74  # exit codes of a job that could not leave a result for that (EX_OSERR, EX_IOERR)
ANOTHER_RUNS = 73  # exit code of a job whose attempt another process began, or nobody may (EX_CANTCREAT)


def shaped(form: Callable[..., T], raw: Mapping[str, Any]) -> T:
    """A dataclass of these fields. Elements of lists are not looked at: there may be millions.

    Raises:
        TypeError, ValueError: a field is missing, unknown, or of another type.
    """
    known = _checks(form)
    for name, value in raw.items():
        if name in known and not known[name](value):
            raise TypeError(f"{name} must be of type {_types(form)[name]}, got {repr(value)[:60]}")
    return form(**raw)


def count(value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        TypeError: it is none.
    """
    if not _is_int(value) or not 0 <= value <= MOST_NUMBER:
        raise TypeError(f"must be a whole number from 0 to {MOST_NUMBER}, got {repr(value)[:60]}")
    return int(value)


def duration(value: Any) -> float:
    """Seconds: a number from 0 on, neither infinite nor NaN.

    Raises:
        TypeError: it is none.
    """
    if not _is_number(value) or not 0 <= value < math.inf:
        raise TypeError(f"must be seconds, got {repr(value)[:60]}")
    return float(value)


def real(value: Any) -> float:
    """A number, which may be NaN.

    Raises:
        TypeError: it is none.
    """
    if not _is_number(value):
        raise TypeError(f"must be a number, got {repr(value)[:60]}")
    return value  # type: ignore[no-any-return]


def text(value: Any, most: int = MOST_TEXT) -> str:
    """Text that every database takes: no NUL, no half of a surrogate pair, cut where it is too long.

    Raises:
        TypeError: it is none.
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
    """Numbers of one step, e.g. `Metric(step=12, values={"reward/mean": 0.41}, at=1.7e9)`."""

    step: int
    values: Mapping[str, float]
    at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is. `step` is the liveness counter: it grows while the job lives, whatever the clocks say.

    `tokens` is what a budget meters, counted by one rule for every kind of job:

    * a prompt's tokens, once each time the prompt is read to be answered: samples of one prompt share that reading;
    * every generated token;
    * every token of a document trained on, prompt and response, once per optimiser step that it is part of.

    So supervised fine-tuning counts what it trains on, an evaluation what it reads and writes, and GRPO both: responses
    of groups with signal are generated and then trained on. Passes that neither answer nor train (the frozen reference
    of a KL penalty) are not counted.
    """

    step: int
    total: int
    phase: str  # "sft", "grpo", "evaluate" …
    tokens: int  # spent so far by this attempt's lineage
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
    """One line for a person: a warning, or what is going on."""

    message: str
    at: float
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Sample:
    """One response's whole way through a step, from the prompt to the update that consumed it.

    Sequences are per response token, 0 at those that were observed, or empty where the role is absent or nothing was
    trained on it.
    """

    id: str  # "<step>.<prompt's position in the data stream>.<sample>", e.g. "12.388.3"; steps count from 0
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
    status: str = "ok"  # the reward's: ok | timeout | error | none
    advantages: Sequence[float] = ()
    logprobs: Sequence[float] = ()  # of the policy as the update found it
    ratios: Sequence[float] = ()  # exp(logprobs - old), the old being what the loss divides by
    clipped: Sequence[bool] = ()
    reference_logprobs: Sequence[float] = ()
    values: Sequence[float] = ()
    returns: Sequence[float] = ()
    earned: Sequence[float] = ()  # what of the reward stands where; empty: all of it at the end
    observed: Sequence[bool] = ()  # whether the policy did not sample it; empty: it sampled all
    temperature: float | None = None  # that it was sampled at, and that its log-probabilities are of; None: not known


Fact = Metric | Progress | Span | Note | Sample


FactSink = Callable[[Fact], None]


_KINDS: dict[str, type[Any]] = {"metric": Metric, "progress": Progress, "span": Span, "note": Note, "sample": Sample}


_NAMES = {kind: name for name, kind in _KINDS.items()}


_ARRAYS = {"Sequence[int]": "i", "Sequence[float]": "f", "Sequence[bool]": "b"}


_CODES = {f.name: _ARRAYS[str(f.type)] for f in fields(Sample) if str(f.type) in _ARRAYS}


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """A JSON object whose `type` names the fact. A sample's numbers are bytes in base64, by their type code.

    That takes a fifth of the time of decimal numbers, and half of the bytes.
    """
    said = {f.name: getattr(fact, f.name) for f in fields(fact)}  # not asdict, which copies every list
    if isinstance(fact, Sample):
        said |= {name: _packed(code, said[name]) for name, code in _CODES.items() if len(said[name])}
    return {"type": _NAMES[type(fact)], **said}


def _packed(code: str, numbers: Sequence[float]) -> dict[str, str]:
    return {code: b64encode(array(code, numbers).tobytes()).decode("ascii")}


def _unpacked(given: Any) -> Any:
    """The numbers of `_packed`; what a release before it wrote is a list already."""
    if not isinstance(given, Mapping):
        return given
    [(code, text)] = given.items()
    numbers = array(code)
    numbers.frombytes(b64decode(text, validate=True))
    if code == "f":
        return [float(f"{value:.7g}") for value in numbers]  # seven digits: what float32 holds
    return list(map(bool, numbers)) if code == "b" else numbers.tolist()


def fact_from_json(value: Mapping[str, Any]) -> Fact:
    """The inverse of `fact_to_json`.

    Raises:
        IntegrityError: an unknown `type` or a missing field.
    """
    try:
        given = {key: item for key, item in value.items() if key != "type"}
        if value["type"] == "sample":
            given |= {name: _unpacked(given[name]) for name in _CODES.keys() & given.keys()}
        fact: Fact = shaped(_KINDS[value["type"]], given)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"event segment holds a fact that cannot be read: {error}; the job's version differs"
        ) from error
    return fact


@dataclass(frozen=True, slots=True)
class InputBlob:
    """One resolved input of a job: `slot` of the stage, `digest` in the artifact store.

    `form` is `file` (a single blob) or `tree` (a folder, addressed by the digest of its listing).
    """

    digest: str
    form: str
    name: str = ""  # human name: dataset:sort-train@1
    meta: Mapping[str, Any] = field(default_factory=dict)  # a reward's {"entry": "score", "dialect": "auto"}


@dataclass(frozen=True, slots=True)
class JobOrder:
    """`job.json`: everything a job needs. It reaches nothing but its attempt folder and the artifact store.

    A job of a server names no store: it reads its inputs from there, as `access.json` in its folder lets it.
    """

    name: str  # deterministic external name: <run>-<stage>-<attempt>
    kind: str  # of the stage
    seed: int
    params: Mapping[str, Any]
    inputs: Mapping[str, InputBlob]
    store_url: str
    cache_dir: str  # where trees are materialised by digest; shared, safe to delete
    resume: str | None = None  # digest of the checkpoint tree to resume from
    resumed_from: str = ""  # run/stage that wrote it
    resumed_step: int = 0  # steps done in it
    tokens_inherited: int = 0  # already counted in that checkpoint
    token_allowance: int | None = None  # tokens this attempt's lineage may spend in all
    seconds_allowance: float | None = None  # how long it may run; time in a queue does not count
    tokens_declared: int | None = None  # budget.tokens, of which the allowance is what was left
    seconds_declared: float | None = None  # budget.wall_clock
    environment: str = ""  # digest of what the run's first job could import; empty: nobody compares
    trust_rewards: bool = False  # the workspace says that its rewards may run where the kernel cannot confine them
    epoch: int = 0  # of the attempt: later ones of its stage have larger numbers
    channel: str = ""  # URL of the attempt's channel, without credentials; empty: its folder
    phase_seconds: float = PHASE_SECONDS  # after the last word, when the end of a phase is told by itself
    served: bool = False  # its inputs come from the server that access.json names; `store_url` is empty
    image: str = ""  # that it runs in, by digest; empty: in none
    log_head: str = ""  # of the ledger's event log when the job was launched: shows whether the log was cut since
    schema: int = ORDER_SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobOrder:
        """The inverse of `to_json`.

        Raises:
            InputError: another version of Posttrain wrote it, in a form that this one does not know.
        """
        if value["schema"] != ORDER_SCHEMA:
            raise InputError(
                f"job order must be of schema {ORDER_SCHEMA}, got {value['schema']!r}; run the job with the version of "
                "Posttrain that wrote it"
            )
        inputs = {slot: InputBlob(**blob) for slot, blob in value["inputs"].items()}
        known = {key: item for key, item in value.items() if key != "deadline"}  # of orders before 0.2
        return cls(**{**known, "inputs": inputs})


def tokens_short(coming: str, worst: int, spent: int, allowed: int, declared: int | None) -> str:
    """One sentence: what comes next may exceed the token budget.

    Args:
        coming: "the next step".
        worst: tokens that it may take.
        spent: by the lineage so far.
        allowed: the lineage in all; less than what was declared where other stages spent of it.
        declared: `budget.tokens`; None: not known.
    """
    of = "" if declared is None else f" (budget.tokens: {declared})"
    return f"token budget must cover {coming} (at most {worst} tokens): spent {spent} of {allowed} left for it{of}"


def seconds_short(allowed: float | None, declared: float | None) -> str:
    """One sentence's beginning: the time that a job was given is over."""
    of = "" if declared is None else f" of budget.wall_clock: {declared:g} s"
    return "deadline passed" + ("" if allowed is None else f" ({max(allowed, 0.0):.0f} s were left{of})")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a trainer compiles an order to: a module name as a string, never an import."""

    name: str
    module: str  # run as `python -m MODULE ATTEMPT_DIR`
    attempt_dir: str
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 0  # accelerators that it has for itself, where the executor deals them out
    secrets: tuple[str, ...] = ()  # names of variables that it needs, whose values stay out of everything written


@dataclass(frozen=True, slots=True)
class Capacity:
    """The devices that an executor deals out to jobs: `Capacity(2, {"1": "sort-1f3a-sft-1 of ada"})`.

    Without any (no GPU, or a scheduler of its own behind it) no job waits for one.
    """

    devices: int = 0
    held: Mapping[str, str] = field(default_factory=dict)  # device → who has it

    def lack(self, wanted: int) -> str:
        """Why a job cannot have `wanted` devices now, in one line; empty where it can.

        Raises:
            InputError: it never can.
        """
        free = self.devices - len(self.held)
        if not self.devices or wanted <= free:
            return ""
        if wanted > self.devices:
            raise InputError(
                f"placement: asks for {wanted} devices, this machine has {self.devices}; ask for fewer, or go elsewhere"
            )
        who = "; ".join(f"{name} is held by {holder}" for name, holder in self.held.items())
        return f"needs {wanted} of {self.devices} devices, {free} free: {who}"


class JobState(StrEnum):
    """What an executor can see of a job from outside."""

    UNKNOWN = "unknown"  # no job of that name is seen; `Observation.absent` says what that proves
    STARTING = "starting"  # it has it: queued, pulling an image, starting
    RUNNING = "running"
    EXITED = "exited"  # with an exit code
    LOST = "lost"  # gone without one


class Absence(StrEnum):
    """What it proves that no job of a name is seen."""

    AUTHORITATIVE = "authoritative"  # there is none
    NOT_VISIBLE_YET = "not_visible_yet"  # one that was submitted may still appear


class Cause(StrEnum):
    """Why a job ended, where the executor knows better than the exit code."""

    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PREEMPTED = "preempted"
    DRAINED = "drained"  # its node is being emptied
    NODE_LOST = "node_lost"
    OVERTIME = "overtime"  # its maximum runtime was over


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One look at one pod of a job."""

    name: str  # its group and its number in it: main-0
    state: JobState
    exit_code: int | None = None
    cause: Cause | None = None
    incarnation: int = 0
    node: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than it should."""
        return self.state is JobState.LOST or (self.state is JobState.EXITED and self.exit_code != 0)

    def __str__(self) -> str:
        code = "no exit code" if self.exit_code is None else f"exit code {self.exit_code}"
        ended = self.cause.replace("_", " ") if self.cause else code
        return f"pod {self.name}{f' on {self.node}' if self.node else ''}: {ended}"


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a job. Two are equal when they say the same of its fate."""

    state: JobState
    exit_code: int | None = None
    detail: str = ""
    absent: Absence = Absence.AUTHORITATIVE  # of UNKNOWN
    cause: Cause | None = None
    incarnation: int = 0  # how often the executor itself has started it anew; the attempt stays the same
    handle: str = field(default="", compare=False)  # what the executor calls it
    node: str = field(default="", compare=False)
    # how long it has run, by the executor's own record: from when it started to run until now or its end, over all
    # incarnations. Time before (in a queue, say) does not count, nor time in which nobody noticed its end. None: never
    seconds: float | None = field(default=None, compare=False)
    # of a gang of several, the one that failed first before all; of one pod the rest says it
    pods: tuple[PodSeen, ...] = field(default=(), compare=False)

    @property
    def why(self) -> str:
        """Why it is gone, in words; of a gang, by the pod that failed."""
        if self.state is JobState.UNKNOWN:
            return "the executor has no job of that name any more"
        culprit = next((str(pod) for pod in self.pods if pod.failed), "")
        code = "its process is gone" if self.exit_code is None else f"exit code {self.exit_code}"
        return culprit or self.detail or code

    @property
    def live(self) -> bool:
        """Whether it runs or may start to."""
        return self.state in (JobState.STARTING, JobState.RUNNING)

    @property
    def hidden(self) -> bool:
        """Whether nothing can be said: it may be anything."""
        return self.state is JobState.UNKNOWN and self.absent is Absence.NOT_VISIBLE_YET

    @property
    def gone(self) -> bool:
        """Whether it is proven that nothing of it runs, nor will."""
        return not self.live and not self.hidden


@dataclass(frozen=True, slots=True)
class Accepted:
    """The executor has a new job."""

    handle: str


@dataclass(frozen=True, slots=True)
class Exists:
    """The executor has had a job of that name already, running or ended; nothing was started."""

    handle: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can say whether the executor has the job: a time-out proves nothing. Observe; do not submit anew."""

    detail: str


Submission = Accepted | Exists | Unknown


class Signal(StrEnum):
    """What a job is asked for, not made to do."""

    STOP = "stop"  # checkpoint, and end
    CHECKPOINT = "checkpoint"  # and go on


@dataclass(frozen=True, slots=True)
class LogPage:
    """A piece of what a job printed, and where the next begins."""

    text: str
    cursor: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, in one line; `signature` is equal when the same thing happens again."""

    kind: FailureClass
    message: str
    signature: str


@dataclass(frozen=True, slots=True)
class Output:
    """A file or folder a job leaves, relative to its attempt folder."""

    path: str
    form: str  # file | tree


@dataclass(frozen=True, slots=True)
class CheckpointCommit:
    """A checkpoint's `COMMIT`, its last file: `CheckpointCommit(120, {"model.safetensors": "sha256:…", …})`.

    A checkpoint folder is whole when every shard named here is there with its digest; without this file it does not
    exist for anybody.
    """

    step: int  # steps completed
    shards: Mapping[str, str]  # file name → digest

    def to_json(self) -> dict[str, Any]:
        return {"format": CHECKPOINT_FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> CheckpointCommit:
        """The inverse of `to_json`.

        Raises:
            IntegrityError: something else, another format, or no shards.
        """
        try:
            if value["format"] != CHECKPOINT_FORMAT:
                raise IntegrityError(f"a COMMIT must be of format {CHECKPOINT_FORMAT}, got {value['format']!r}")
            commit = cls(count(value["step"]), {text(name): text(digest) for name, digest in value["shards"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"a COMMIT must have format, step and shards: {error!r}; it is damaged") from error
        if any(part in ("", ".", "..") for name in commit.shards for part in name.split("/")):
            raise IntegrityError("a COMMIT must name files below its folder, got others; it is damaged")
        if not commit.shards:
            raise IntegrityError(f"a COMMIT must name at least one shard, got none at step {commit.step}")
        return commit


@dataclass(frozen=True, slots=True)
class JobResult:
    """`result.json`: written last, once and atomically, so its presence means that the job ended by itself."""

    status: str  # succeeded | failed | stopped
    outputs: Mapping[str, Output] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0  # spent by this attempt's lineage
    seconds: float = 0.0
    failure: Failure | None = None
    message: str = ""  # what a person should know of how it ended well

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobResult:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else; a job wrote it.
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


def _output(path: str, form: str) -> Output:
    if form not in ("file", "tree"):
        raise ValueError(f"an output must be a file or a tree, got {repr(form)[:60]}")
    if not path or path != text(path, _PATH):
        raise ValueError(f"an output's path must be text of at most {_PATH} characters, got {repr(path)[:60]}")
    return Output(path, form)
