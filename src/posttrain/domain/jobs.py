"""The contract between the control side and a job process: what it is told, what it answers, how it is observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from posttrain.domain.errors import FailureClass, InputError

ORDER_SCHEMA = 1


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
    """`job.json`: everything a job needs. It reaches nothing but its attempt folder and the artifact store."""

    name: str  # deterministic external name: <run>-<stage>-<attempt>
    kind: str  # sft | grpo | evaluate | init_model
    seed: int
    params: Mapping[str, Any]
    inputs: Mapping[str, InputBlob]
    store_url: str
    cache_dir: str  # where trees are materialised by digest; shared, safe to delete
    resume: str | None = None  # digest of the checkpoint tree to resume from
    tokens_inherited: int = 0  # already counted in that checkpoint
    token_allowance: int | None = None  # tokens this attempt's lineage may spend in all
    deadline: float | None = None  # seconds since the epoch
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
        return cls(**{**value, "inputs": inputs})


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What an executor launches: a module name as a string, never an import."""

    name: str
    module: str  # run as `python -m MODULE ATTEMPT_DIR`
    attempt_dir: str
    environment: Mapping[str, str] = field(default_factory=dict)


class JobState(StrEnum):
    """What an executor can see of a job from outside."""

    UNKNOWN = "unknown"  # no job of that name
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"  # with an exit code
    LOST = "lost"  # gone without one


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a job."""

    state: JobState
    exit_code: int | None = None
    detail: str = ""


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
class JobResult:
    """`result.json`: written last and atomically, so its presence means that the job ended by itself."""

    status: str  # succeeded | failed | stopped
    outputs: Mapping[str, Output] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0  # spent by this attempt's lineage
    seconds: float = 0.0
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobResult:
        raw = value.get("failure")
        failure = Failure(FailureClass(raw["kind"]), raw["message"], raw["signature"]) if raw else None
        outputs = {name: Output(**output) for name, output in value["outputs"].items()}
        return cls(**{**value, "outputs": outputs, "failure": failure})
