"""Launch of jobs: executor, folders and channels of attempts, their requests, and the code that decides results.

Whoever only reads what jobs left takes the folders and no executor. Nothing here names a concrete back-end.

The request of an attempt is written once into its folder, and submitted as written by whoever gets to it.

The code that decides results is the trainer's, and that of a kind which an installed package brought. A manifest's
`code` names both: `{"native": "sha256:…", "kind:words": "sha256:…"}`. Posttrain's own kinds are part of their trainer's
code and are not named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.kinds import installed_kind
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import AttemptRecord
from posttrain.domain.requests import RUN, STAGE, WORKSPACE, Job, JobRequest, PodGroup
from posttrain.execution.ports import Executor, Trainer
from posttrain.store.atomic import create_json, read_json
from posttrain.store.attempts import AttemptFolder
from posttrain.store.hosts import Hosts

_KIND = "kind:"
_FILE = "request.json"
_OVERTIME_SECONDS = 120.0  # beyond what the budget leaves: the job ends by itself, or its driver ends it, before


def code_of(stages: Iterable[tuple[str, str]], trainers: Mapping[str, Trainer]) -> dict[str, str]:
    """What a manifest's `code` holds.

    Args:
        stages: kind and trainer of each.
    """
    written = list(stages)
    named = [name for _, name in written] + [f"{_KIND}{kind}" for kind, _ in written if installed_kind(kind)]
    return {name: present_code(name, trainers) for name in sorted(set(named))}


def present_code(name: str, trainers: Mapping[str, Trainer]) -> str:
    """The digest that a name of `code` has now.

    Raises:
        InputError: there is no such trainer or kind any more, or its package is broken.
    """
    if name.startswith(_KIND):
        kind = name.removeprefix(_KIND)
        found = installed_kind(kind)
        if found is None:
            raise InputError(f"kind {kind!r} must be installed; install the package that it came from")
        return found.code_digest()
    return trainer_of(name, trainers).code_digest()


def trainer_of(name: str, trainers: Mapping[str, Trainer]) -> Trainer:
    """A trainer that a manifest names.

    Raises:
        InputError: it is not installed any more, or its package is broken.
    """
    if name not in trainers:
        known = ", ".join(sorted(trainers))
        raise InputError(
            f"trainer {name!r} must be installed, there is only {known}; install the package that it came from"
        )
    return trainers[name]


def names_of(manifest: Manifest, stage: StageManifest) -> list[str]:
    """What of the manifest's `code` decides a stage's result."""
    return [stage.trainer, *(name for name in (f"{_KIND}{stage.kind}",) if name in manifest.code)]


def deciding_code(manifest: Manifest, stage: StageManifest) -> Any:
    """The part of a stage's cache key that its code is."""
    found = [manifest.code[name] for name in names_of(manifest, stage)]
    return found[0] if len(found) == 1 else found


def called(name: str) -> str:
    """A name of `code` in an error."""
    return f"kind {name.removeprefix(_KIND)!r}" if name.startswith(_KIND) else f"trainer {name!r}"


@dataclass(frozen=True, slots=True)
class AttemptFolders:
    """Where the attempts of one workspace are."""

    root: Path  # the workspace folder
    channels: Callable[[], str] = lambda: ""  # URL below which new attempts have their channels; empty: their folders

    def path(self, run_id: str, stage: str, number: int) -> Path:
        """Where attempt `number` lives."""
        return self.root / "runs" / run_id / stage / f"{number:03d}"

    def of(self, attempt: AttemptRecord) -> AttemptFolder:
        """The attempt's folder."""
        return AttemptFolder(self.root / attempt.folder, self.known(attempt), otherwise=self.channel(attempt))

    def known(self, attempt: AttemptRecord) -> str | None:
        """URL of an attempt's channel, empty: its folder, by what its job cannot have written.

        None: a release before planned it, and only its order says whether its channel is in a store.
        """
        return "" if attempt.channel is None and not self.channels() else attempt.channel

    def channel(self, attempt: AttemptRecord) -> str:
        """URL of the channel that an attempt gets with its order; empty: its folder."""
        if attempt.channel is not None:
            return attempt.channel
        return self.channel_of(attempt.run_id, attempt.stage, attempt.number)

    def channel_of(self, run_id: str, stage: str, number: int) -> str:
        """URL of the channel that an attempt gets when it is planned; empty: its folder."""
        base = self.channels()
        return f"{base}/{run_id}/{stage}/{number:03d}" if base else ""


class Access(Protocol):
    """Lets the jobs of a server read what they need, and nothing else."""

    def give(self, attempt: AttemptRecord, folder: Path, *, boxed: bool = False) -> None:
        """Write into an attempt's folder what lets its job in, until the attempt ends.

        Args:
            boxed: the job runs in an image, without a network.
        """


@dataclass(frozen=True, slots=True)
class Jobs:
    """Executor, trainers and attempt folders of one control plane, and what its jobs may."""

    executor: Executor
    trainers: Mapping[str, Trainer]
    folders: AttemptFolders
    slots: int = 1  # jobs of this host at a time, whatever their runs and projects
    beside: int = 0  # threads for what takes long; none: whoever decides does it
    trust_rewards: bool = False  # rewards may run where the kernel cannot confine them
    workspace: Callable[[], str] = lambda: ""  # what tells it from others and from its copies, on its jobs
    hosts: Hosts | None = None  # that share the ledger; None: it has one
    access: Access | None = None  # how jobs reach their inputs; None: by the store, with the user's own rights

    @property
    def host(self) -> str | None:
        """Whose drivers alone can reach these jobs; None: the ledger has one host."""
        return self.hosts.id if self.hosts else None

    def elsewhere(self, attempt: AttemptRecord) -> bool:
        """Whether an attempt's job and folder are on another host.

        An attempt of a release that knew no hosts is of the one that has its folder.
        """
        if attempt.host is None and self.hosts is not None and attempt.state == AttemptState.LAUNCHED:
            return not (self.folders.root / attempt.folder).is_dir()
        return attempt.host not in (None, self.host)

    def trainer(self, name: str) -> Trainer:
        """A trainer that a manifest names.

        Raises:
            InputError: it is not installed any more, or its package is broken.
        """
        return trainer_of(name, self.trainers)


def job_of(folders: AttemptFolders, attempt: AttemptRecord) -> Job:
    """What finds an attempt's job."""
    return Job(attempt.name, str(folders.of(attempt).path), folders.known(attempt))


def secrets_of_rewards(plan: StageManifest) -> frozenset[str]:
    """The names of variables that a stage's rewards get."""
    return frozenset(str(name) for ref in plan.inputs.values() for name in ref.meta.get("secrets", ()))


def request_of(
    jobs: Jobs, attempt: AttemptRecord, order: JobOrder, trainer: Trainer, of_rewards: frozenset[str]
) -> JobRequest:
    """The attempt's request; of several processes that write one at once, the first's.

    Args:
        of_rewards: the secrets that its manifest names. A job of the same run can write into the folder.

    Raises:
        InputError: it asks for something malformed, or another version wrote it.
        IntegrityError: what was written cannot be read, or names other secrets than its manifest and its trainer.
        WorkspaceError: the disk is full or read-only.
    """
    folder = jobs.folders.of(attempt)
    path = folder.path / _FILE
    spec = trainer.compile(order, folder.path)
    if not path.exists():
        allowed = order.seconds_allowance
        request = JobRequest(
            attempt.name,
            spec.module,
            str(folder.path),
            dict(spec.environment),
            gang=(PodGroup(gpus=spec.devices),),
            image=order.image,
            secrets=(*spec.secrets, *sorted(of_rewards - set(spec.secrets))),
            max_seconds=None if allowed is None else max(0.0, allowed) + _OVERTIME_SECONDS,
            labels={WORKSPACE: jobs.workspace(), RUN: attempt.run_id, STAGE: attempt.stage},
            epoch=attempt.number,
        )
        create_json(path, request.to_json())
    try:
        found = JobRequest.from_json(read_json(path), str(folder.path))
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} cannot be read: {error!r}; it is damaged: posttrain retry makes another"
        ) from error
    other = set(found.secrets) - of_rewards - set(spec.secrets)
    if other:
        raise IntegrityError(
            f"{path} names secrets that its run does not: {', '.join(sorted(other))[:200]!a}; somebody else wrote it: "
            "posttrain retry makes another"
        )
    return found
