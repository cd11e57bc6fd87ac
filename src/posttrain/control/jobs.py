"""Launch of jobs: executor, folders and channels of attempts, requests, the code that decides results, environments.

Whoever only reads what jobs left takes the folders and no executor. Nothing here names a concrete back-end.

The request of an attempt is written once into its folder, and submitted as written by whoever gets to it.

The code that decides results is the trainer's, and that of a kind which an installed package brought. A manifest's
`code` names both: `{"native": "sha256:…", "kind:words": "sha256:…"}`. Posttrain's own kinds are part of their trainer's
code and are not named.

The environment that a run's jobs import from is pinned when its first job starts, and compared before every other. Of
the installed packages those count that jobs of the run can import: Posttrain, what its rewards and dataflows import,
packages that add to one of these by entry points, and what all of them require.
"""

import ast
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.control.stores import Stores
from posttrain.domain.errors import InputError, IntegrityError, PosttrainError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.kinds import installed_kind
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.records import AttemptRecord
from posttrain.domain.requests import RUN, STAGE, WORKSPACE, Job, JobRequest, PodGroup
from posttrain.domain.sinks import RUN_ENVIRONMENT
from posttrain.execution.environment import normalised, pin, pinned, read_environment
from posttrain.execution.ports import Executor, Trainer
from posttrain.store.atomic import create_json, make_folder, read_json, write_json
from posttrain.store.attempts import AttemptFolder
from posttrain.store.hosts import Hosts
from posttrain.store.trees import tree_listing

_KIND = "kind:"
_FILE = "request.json"
_OVERTIME_SECONDS = 120.0  # beyond what the budget leaves: the job ends by itself, or its driver ends it, before
_RECORD = "environment.json"  # in a run's folder: {"digest"}
_CODE = ("reward", "recipe")  # slots; a run's rewards with weights are `rewards.NAME`


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


def differs(stores: Stores, jobs: Jobs, manifest: Manifest, run_id: str) -> str:
    """How the present environment differs from the run's, in one line; empty where it does not, or nobody compares."""
    if not jobs.executor.attests:
        return ""
    cache, record = jobs.folders.root / "cache", _record(jobs.folders, run_id)
    known = read_json(record)
    before = pinned(str(known["digest"]), cache) if known else None
    imported = imported_by(stores, manifest)
    packages = (
        before.packages if before else tuple(sorted(closure({name for own in imported.values() for name in own})))
    )
    # takes seconds: the workspace may be gone
    present = read_environment(packages=packages, known=before.files if before else ())
    make_folder(cache, within=jobs.folders.root)
    if known is None:
        pin(present, cache)
        make_folder(record.parent, within=jobs.folders.root)
        told = stores.ledger.events_about(run_id, RUN_ENVIRONMENT)  # by a driver that died before it wrote the record
        if not told or told[-1].payload["digest"] != present.digest:
            payload = {"digest": present.digest, "packages": _versions(imported)}
            with stores.ledger.transaction(stores.actor) as transaction:
                transaction.append_event(RUN_ENVIRONMENT, run_id, payload)
        write_json(record, {"digest": present.digest})
        return ""
    if present.digest == known["digest"]:
        pin(present, cache)  # the cache may be emptied at any time
        return ""
    what = present.differs(before) if before else "another one"
    return f"the environment must be the one that the run began with, got {what}"


def imported_by(stores: Stores, manifest: Manifest) -> dict[str, set[str]]:
    """Each reward and dataflow of a run → names of the installed packages that its sources import."""
    owners = importlib.metadata.packages_distributions()
    found: dict[str, set[str]] = {}
    for _, slot, ref in manifest.assets():
        if slot.partition(".")[0].rstrip("s") in _CODE:
            for source in _sources(stores, ref):
                own = (owner for module in _modules(source) for owner in owners.get(module, ()))
                found.setdefault(ref.name, set()).update(own)
    return found


def _versions(imported: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    return {
        name: [f"{package} {importlib.metadata.version(package)}" for package in sorted(packages)]
        for name, packages in imported.items()
        if packages
    }


def closure(names: set[str]) -> set[str]:
    """Normalised names of Posttrain, of these packages, of those that add to one of them by entry points, and of
    everything that they require here. Extras count where they are asked for.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    adding: dict[str, set[str]] = {}  # the first word of an entry point's group → packages that have one
    for package in importlib.metadata.distributions():
        for group in {entry.group for entry in package.entry_points}:
            adding.setdefault(normalised(group.partition(".")[0]), set()).add(package.name)
    waiting, seen = [("posttrain", "ray"), *((name, "") for name in ("posttrain", *names))], set[tuple[str, str]]()
    while waiting:
        name, extra = waiting.pop()
        if (normalised(name), extra) in seen:
            continue
        seen.add((normalised(name), extra))
        waiting += [(other, "") for other in adding.get(normalised(name), ())]
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in required:
            try:
                one = Requirement(text)
            except InvalidRequirement:
                continue
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(one.name, wanted) for wanted in ("", *one.extras)]
    return {name for name, _ in seen}


def _sources(stores: Stores, ref: InputRef) -> Iterator[bytes]:
    try:
        if ref.form == "file":
            yield stores.blobs.get(str(ref.digest))
            return
        for name, file in tree_listing(stores.blobs, str(ref.digest)).items():
            if name.endswith(".py"):
                yield stores.blobs.get(file.digest)
    except PosttrainError:
        return  # whoever runs it says what is missing


def _modules(source: bytes) -> Iterator[str]:
    """First words of the modules that a source names in its imports, also inside functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def ordered(jobs: Jobs, run_id: str) -> str:
    """The digest that a job of the run must find; empty: it need not compare."""
    known = read_json(_record(jobs.folders, run_id)) if jobs.executor.attests else None
    return str(known["digest"]) if known else ""


def accept(folders: AttemptFolders, run_id: str) -> None:
    """A person lets the run go on: the next job pins what is there then."""
    _record(folders, run_id).unlink(missing_ok=True)


def _record(folders: AttemptFolders, run_id: str) -> Path:
    return folders.root / "runs" / run_id / _RECORD
