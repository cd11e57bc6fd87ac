"""The contract between the control side and a job process: what it is told, what it answers, how it is observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from posttrain.domain.errors import FailureClass, InputError, IntegrityError
from posttrain.domain.facts import count, duration, real, text

ORDER_SCHEMA = 1
CHECKPOINT_FORMAT = "posttrain.checkpoint/1"
PHASE_SECONDS = 30.0  # after which a job tells the end of a phase by itself: a step of a large model takes hours
_STATUSES = ("succeeded", "failed", "stopped")
_PATH = 1024  # characters
NO_MEMORY, NO_SPACE = 71, 74  # exit codes of a job that could not leave a result for that (EX_OSERR, EX_IOERR)
ANOTHER_RUNS = 73  # exit code of a job whose attempt another process began, or nobody may (EX_CANTCREAT)


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
