"""Specs of jobs, and references to container images.

A spec describes a job with its pods, its limits and its owner.

A run names the image of its jobs by digest, `registry.example.org/team/train@sha256:…`, so exactly the planned
image runs. A project lists the images that its runs may name: an entry is such a reference, or
`registry.example.org/team/train@*` for every digest of that repository.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from posttrain.domain.errors import InputError

SPEC_SCHEMA = 1
WORKSPACE, RUN, STAGE = "workspace", "run", "stage"  # labels that every spec has
SHORTEST_SECRET = 8  # minimum number of characters, after whitespace is collapsed
SECRET_NAME = re.compile(  # names of variables whose values are never written; TOKENIZERS_PARALLELISM does not match
    r"(TOKENS?|SECRETS?|PASSW(OR)?D|PASSPHRASE|CREDENTIALS?|AUTHORIZATION|KEYS?)(_|$)|(^|_)(PAT|AUTH|PASS)(_|$)",
    re.IGNORECASE,
)
ANY = "*"
_HOST = r"(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+)(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_HOST}(?:/{_PART})+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 400  # characters of a reference
_SHOWN = 120
_WHERE = "REGISTRY/NAME@sha256:…"


@dataclass(frozen=True, slots=True)
class JobRef:
    """A reference to a job, without its spec."""

    name: str  # the deterministic external name, RUN-STAGE-ATTEMPT
    mailbox: str  # URL of the attempt's mailbox: its folder (file://…/RUN/STAGE/001), or s3://…/RUN/STAGE/001

    @property
    def folder(self) -> Path | None:
        """The attempt's folder, if the mailbox is in it."""
        return Path(unquote(urlsplit(self.mailbox).path)) if self.mailbox.startswith("file:") else None

    def folder_below(self, runs: Path) -> Path:
        """Return the attempt's folder on this machine: the mailbox, or RUN/STAGE/NUMBER below `runs`."""
        return self.folder or runs.joinpath(*self.mailbox.rsplit("/", 3)[1:])


def external_name(job: JobRef) -> str:
    """Return a job's name on a cluster that several workspaces share: that of its attempt, and of its mailbox."""
    return f"{job.name}.pt-{hashlib.sha256(job.mailbox.encode()).hexdigest()[:12]}"


def secret_fault(name: str) -> str:
    """Return why a variable of this process's environment is not usable as a reward's secret; empty: it is usable.

    A short value could not be distinguished from ordinary text in a reward's output.
    """
    got = len(" ".join(os.environ.get(name, "").split()))
    found = f"got {got}, too few to remove it from logs; use a longer one" if got else "but it is not set; export it"
    needed = f"the driver's environment must contain it, with {SHORTEST_SECRET} characters or more"
    return "" if got >= SHORTEST_SECRET else f"secrets: {name}: {needed}, {found}"


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Equal pods: `PodGroup("main", gpus=2)`. An executor rejects a group that it cannot provide."""

    name: str = "main"
    min: int = 1  # pods that must start together
    max: int = 1
    cpus: int = 0  # of each pod; 0: unspecified
    memory: int = 0  # bytes of each pod; 0: unspecified
    gpus: int = 0  # exclusive to each pod
    kind: str = ""  # the kind of GPU, in the cluster's terms; empty: any
    topology: str = ""  # the topology level that its pods must share, in the cluster's terms (a rack); empty: none
    reclaimable: bool = False  # whether pods beyond `min` may be removed while the job runs

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise InputError(
                f"gang: group {self.name!r} must have 0 <= min <= max, max >= 1, got {self.min}, {self.max}"
            )


@dataclass(frozen=True, slots=True)
class JobSpec(JobRef):
    """A job as submitted: `python -m MODULE ATTEMPT_DIR`, in each pod of its gang.

    The spec is stored with its attempt before the submission, and every process submits the stored spec. It contains no
    values of secrets, and only those variables of the submitter's environment that are in `environment`.

    Raises:
        InputError: two groups have the same name, or a variable has the name of a secret.
    """

    module: str
    environment: Mapping[str, str] = field(default_factory=dict)  # variables, in addition to the executor's own
    gang: tuple[PodGroup, ...] = (PodGroup(),)
    image: str = ""  # NAME@sha256:…; empty: an environment like the submitter's, whose digest is in the order
    secrets: tuple[str, ...] = ()  # names of variables whose values the executor provides
    max_seconds: float | None = None  # counted from the job's start; then the executor ends the job
    grace_seconds: float = 10.0  # between SIGTERM and SIGKILL
    labels: Mapping[str, str] = field(default_factory=dict)  # its owner: workspace, run, stage
    epoch: int = 0  # number that grows with each attempt of a stage
    options: Mapping[str, str] = field(default_factory=dict)  # words of the cluster's queue: {"partition": "gpu"}
    python: tuple[str, ...] = ()  # words that run Python on a node; empty: the executor's
    avoid: tuple[str, ...] = ()  # nodes on which the job must not run
    time_limit: float | None = None  # seconds of one start on these nodes; reaching it is a preemption
    bootstrap: str = field(default="", repr=False)  # POSTTRAIN_BOOTSTRAP of the agent of a server's job; never stored

    def __post_init__(self) -> None:
        names = [group.name for group in self.gang]
        if not names or len(set(names)) < len(names):
            raise InputError(f"gang: must have groups with unique names, got {', '.join(names) or 'none'}")
        for name in self.environment:
            if SECRET_NAME.search(name):
                raise InputError(f"environment: {name} must not be in plain text; name it in secrets")

    @property
    def pods(self) -> list[str]:
        """The names of all possible pods of the job: `main-0`, `rollout-0`, `rollout-1`."""
        return [f"{group.name}-{number}" for group in self.gang for number in range(group.max)]

    @property
    def devices(self) -> int:
        """The number of accelerators that are allocated exclusively to the job."""
        return sum(group.gpus * group.max for group in self.gang)

    def to_json(self) -> dict[str, Any]:
        """Return the stored fields: not the mailbox, because the workspace may be moved, and no secret."""
        stored = {key: item for key, item in asdict(self).items() if key not in ("mailbox", "bootstrap")}
        return {"schema": SPEC_SCHEMA, **stored}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], mailbox: str) -> JobSpec:
        """Return the inverse of `to_json`.

        Raises:
            InputError: another version of Posttrain wrote the value.
            KeyError: the value lacks a field.
            TypeError: a field of the value has the wrong type.
        """
        if value["schema"] != SPEC_SCHEMA:
            raise InputError(
                f"job spec must be of schema {SPEC_SCHEMA}, got {value['schema']!r}; "
                "drive the run with the version of Posttrain that wrote it"
            )
        known = {key: item for key, item in value.items() if key != "schema"}
        gang = tuple(PodGroup(**group) for group in known.pop("gang"))
        words = {name: tuple(known.get(name, ())) for name in ("secrets", "python", "avoid")}
        return cls(**{**known, "mailbox": mailbox, "gang": gang, **words})


@dataclass(frozen=True, slots=True)
class Listed:
    """A job that an executor has: its name, and the labels and epoch of its spec."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0


def image_reference(text: str) -> str:
    """Return the text if it is a reference to one image, pinned by digest.

    Raises:
        ValueError: the text is not such a reference; the message is one line.
    """
    name, _, digest = text.partition("@")
    if _DIGEST.fullmatch(digest) and _named(name):
        return text
    if _named(name) or _named(name.rpartition(":")[0]):
        raise ValueError(
            f"must be pinned by digest, {_WHERE}, since the image of a tag may change, got {text[:_SHOWN]!a}; "
            "podman image inspect --format '{{.Digest}}' shows it"
        )
    raise ValueError(f"must be a full reference, {_WHERE} with its registry's host, got {text[:_SHOWN]!a}")


def image_digest(reference: str) -> str:
    """Return the digest of a reference, which identifies the image."""
    return reference.rpartition("@")[2]


def image_rule(text: str) -> str:
    """Return the text if it is an entry in a project's list of images: one image by its digest, or `NAME@*`.

    Raises:
        InputError: the text is neither.
    """
    name, _, digest = text.partition("@")
    if digest == ANY and _named(name):
        return text
    try:
        return image_reference(text)
    except ValueError as error:
        raise InputError(f"image {error}; or allow every digest of a repository: REGISTRY/NAME@{ANY}") from error


def allows(rules: Collection[str], reference: str) -> bool:
    """Return whether a project's rules allow this image."""
    return reference in rules or f"{reference.partition('@')[0]}@{ANY}" in rules


def _named(name: str) -> bool:
    return len(name) <= _LONGEST and bool(_NAME.fullmatch(name))
