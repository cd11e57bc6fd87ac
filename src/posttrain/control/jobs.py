"""The launch of jobs: executor, attempt folders and mailboxes, specs, the code that decides results, environments.

Code that only reads the outputs of jobs needs the folders but no executor. Nothing here names a concrete back-end.

The spec of an attempt is written once into its folder, and every driver submits it as written.

Results depend on the code of the trainer and of kinds from installed packages. A manifest's `code` contains the digests
of that code: `{"native": "sha256:…", "kind:words": "sha256:…"}`. Posttrain's own kinds are part of the trainer's code
and are not named.

The environment from which a run's jobs import is pinned when the first job starts, and compared before every other job.
The environment includes the installed packages that jobs of the run can import: Posttrain, the imports of the run's
rewards and dataflows, packages that extend any of these through entry points, and the requirements of all these
packages.
"""

import ast
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.domain.engines import engine_plugin, engines_in
from posttrain.domain.errors import InfrastructureError, IntegrityError, PosttrainError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.jobspec import RUN, STAGE, WORKSPACE, JobRef, JobSpec, PodGroup
from posttrain.domain.kinds import installed_kind
from posttrain.domain.manifest import KIND, InputRef, Manifest, StageManifest
from posttrain.domain.placement import Cluster, Flavour
from posttrain.domain.records import AttemptRecord
from posttrain.domain.roles import keys_of_servers
from posttrain.domain.sinks import RUN_ENVIRONMENT
from posttrain.execution.environment import normalised, pin, pinned, read_environment
from posttrain.execution.ports import Executor, Trainer, present_code, trainer_of
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.store.attempts import AttemptFolder
from posttrain.store.ledger import Hosts, Stores
from posttrain.store.mailbox import REQUEST
from posttrain.store.trees import tree_listing

_OVERTIME_SECONDS = 120.0  # added to the rest of the budget; normally the job or its driver ends the job earlier
_RECORD = "environment.json"  # in a run's folder: {"digest"}
_CODE = ("reward", "recipe")  # slots; if there are several rewards with weights, their slots are `rewards.NAME`


def code_of(stages: Iterable[StageManifest], trainers: Mapping[str, Trainer]) -> dict[str, str]:
    """Return the `code` of a manifest with these stages."""
    named = set[str]()
    for stage in stages:
        named |= {stage.trainer, *([f"{KIND}{stage.kind}"] if installed_kind(stage.kind) else [])}
        named |= {name for name in engines_in(stage.params) if engine_plugin(name)}
    return {name: present_code(name, trainers) for name in sorted(named)}


@dataclass(frozen=True, slots=True)
class AttemptFolders:
    """The folders and mailboxes of a workspace's attempts."""

    root: Path  # the workspace folder
    mailboxes: Callable[[], str] = lambda: ""  # base URL of new attempts' mailboxes; empty: their folders
    remote: Callable[[str], bool] = lambda executor: False  # whether jobs of an executor share no disk with this host
    store: str = ""  # URL of the artifact store, in which such jobs stage their files

    def path(self, run_id: str, stage: str, number: int) -> Path:
        """Return the path of attempt `number`."""
        return self.root / "runs" / run_id / stage / f"{number:03d}"

    def of(self, attempt: AttemptRecord) -> AttemptFolder:
        """Return the attempt's folder."""
        path, channel = self.root / attempt.folder, attempt.channel or ""
        if not channel or not self.remote(attempt.executor):
            return AttemptFolder(path, channel)
        from posttrain.store.staging import StagedAttempt  # loads the object store

        return StagedAttempt(path, channel, attempt.name, self.store)

    def job(self, attempt: AttemptRecord) -> JobRef:
        """Return the reference of an attempt's job."""
        return JobRef(attempt.name, attempt.channel or (self.root / attempt.folder).absolute().as_uri())

    def mailbox_of(self, run_id: str, stage: str, number: int) -> str:
        """Return the URL of a newly planned attempt's mailbox; empty: the attempt's folder."""
        base = self.mailboxes()
        return f"{base}/{run_id}/{stage}/{number:03d}" if base else ""


class Access(Protocol):
    """Restricts jobs of a server to their own inputs, mailboxes and staged files."""

    def bootstrap(self, attempt: AttemptRecord) -> str:
        """Return what the agent of an attempt's job on another machine needs to redeem credentials at its start."""

    def give(self, attempt: AttemptRecord, folder: Path, *, boxed: bool = False) -> None:
        """Write credentials into an attempt's folder, valid until the attempt ends.

        Args:
            boxed: whether the job runs in an image, without a network.
        """


@dataclass(frozen=True, slots=True)
class Jobs:
    """Executor, trainers and attempt folders of one control plane, and the permissions of its jobs."""

    executor: Executor  # of stages without a flavour
    trainers: Mapping[str, Trainer]
    folders: AttemptFolders
    slots: int = 1  # maximum jobs of this host at a time, over all runs and projects
    beside: int = 0  # number of threads for long work; 0: the deciding thread does the work
    trust_rewards: bool = False  # rewards may run even if the kernel cannot confine them
    workspace: Callable[[], str] = lambda: ""  # identifies the workspace, as opposed to its copies, in labels of jobs
    hosts: Hosts | None = None  # the hosts that share the ledger; None: the ledger has one host
    access: Access | None = None  # how jobs read their inputs; None: from the store, with the user's own rights
    # the declared executors and flavours, and the executors by name, as they are now: users declare more at any time
    declared: Callable[[], tuple[Cluster, Mapping[str, Executor]]] = lambda: (Cluster(), {})

    @property
    def cluster(self) -> Cluster:
        """The declared executors and flavours."""
        return self.declared()[0]

    @property
    def others(self) -> Mapping[str, Executor]:
        """The declared executors, by name."""
        return self.declared()[1]

    @property
    def executors(self) -> list[Executor]:
        """All executors of the workspace; the one of stages without a flavour is first."""
        return [self.executor, *(one for name, one in self.others.items() if name != self.executor.name)]

    def executor_of(self, attempt: AttemptRecord) -> Executor:
        """Return the executor to which an attempt was or will be submitted.

        Raises:
            InfrastructureError: this workspace does not have the executor.
        """
        found = self.others.get(attempt.executor, self.executor)
        if attempt.executor != found.name:
            raise InfrastructureError(
                f"{attempt.name} was submitted to executor {attempt.executor}, but this process uses "
                f"{', '.join(one.name for one in self.executors)}; drive its run with {attempt.executor}"
            )
        return found

    def flavour_of(self, plan: StageManifest) -> tuple[str, Flavour | None]:
        """Return the name and the flavour of the nodes on which a stage runs; None: it has no flavour.

        Raises:
            InputError: the placement names several flavours.
        """
        name = self.cluster.flavour_of(plan.name, plan.params)
        return name, self.cluster.flavours.get(name)

    def executor_for(self, plan: StageManifest) -> Executor:
        """Return the executor to which new attempts of a stage are submitted.

        Raises:
            InputError: the placement names several flavours.
        """
        flavour = self.flavour_of(plan)[1]
        return self.executor if flavour is None else self.others[flavour.executor]

    @property
    def near(self) -> list[str]:
        """The names of the executors whose jobs take slots of this host."""
        return [one.name for one in self.executors if not one.remote]

    @property
    def host(self) -> str | None:
        """The only host whose drivers can reach these jobs; None: the ledger has one host."""
        return self.hosts.id if self.hosts else None

    def elsewhere(self, attempt: AttemptRecord) -> bool:
        """Return whether only another host can reach an attempt's job and folder."""
        return attempt.host not in (None, self.host)

    def trainer(self, name: str) -> Trainer:
        """Return the trainer of this name.

        Raises:
            InputError: the trainer is not installed, or its package is broken.
        """
        return trainer_of(name, self.trainers)


def secrets_of_stage(plan: StageManifest) -> frozenset[str]:
    """Return the names of the secrets that a stage's rewards get, and of the keys of the servers that it names."""
    named = (str(name) for ref in plan.inputs.values() for name in ref.meta.get("secrets", ()))
    return frozenset(named) | keys_of_servers(plan.params)


def spec_of(
    jobs: Jobs,
    attempt: AttemptRecord,
    order: JobOrder,
    trainer: Trainer,
    plan: StageManifest,
    avoid: tuple[str, ...] = (),
) -> JobSpec:
    """Write the attempt's spec unless it exists, and return it; of concurrent writers, the first one succeeds.

    The secrets in the spec are compared with those of the plan, because a job of the same run can write into the
    folder.

    Raises:
        InputError: the spec is malformed, another version wrote it, or the stage's flavour lacks what the job needs.
        IntegrityError: the file cannot be read, or names secrets that neither the manifest nor the trainer names.
        WorkspaceError: the disk is full or read-only.
    """
    mailbox, job = jobs.folders.of(attempt).mailbox, jobs.folders.job(attempt)
    compiled, (name, flavour) = trainer.compile(order), jobs.flavour_of(plan)
    named, stored = secrets_of_stage(plan), mailbox.document(REQUEST)
    if stored is None:
        allowed = order.seconds_allowance
        spec = JobSpec(
            *(job.name, job.mailbox, compiled.module),
            dict(compiled.environment),
            gang=(flavour.gang(name, compiled.devices, plan.params) if flavour else PodGroup(gpus=compiled.devices),),
            image=order.image or (flavour.image if flavour else None) or "",
            secrets=(*compiled.secrets, *sorted(named - set(compiled.secrets))),
            max_seconds=None if allowed is None else max(0.0, allowed) + _OVERTIME_SECONDS,
            labels={WORKSPACE: jobs.workspace(), RUN: attempt.run_id, STAGE: attempt.stage},
            epoch=attempt.number,
            options=flavour.options() if flavour else {},
            avoid=avoid if jobs.executor_of(attempt).avoids else (),
            python=(flavour.python if flavour else None) or (),
            time_limit=flavour.time_limit if flavour else None,
        )
        stored = mailbox.once(REQUEST, spec.to_json())
    path = f"{mailbox.place}/{REQUEST}"
    try:
        found = JobSpec.from_json(stored, job.mailbox)
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} cannot be read: {error!r}; it is damaged; posttrain retry writes a new file"
        ) from error
    other = set(found.secrets) - named - set(compiled.secrets)
    if other:
        raise IntegrityError(
            f"{path} names secrets that its run does not declare: {', '.join(sorted(other))[:200]!a}; another process "
            "wrote the file; posttrain retry writes a new file"
        )
    return found


def differs(stores: Stores, jobs: Jobs, manifest: Manifest, run_id: str) -> str:
    """Return how the current environment differs from the run's; empty: no difference.

    The first call for a run pins the environment. Only executors that attest compare it.
    """
    cache, record = jobs.folders.root / "cache", _record(jobs.folders, run_id)
    known = read_json(record)
    before = pinned(str(known["digest"]), cache) if known else None
    imported = {} if before else imported_by(stores, manifest)
    packages = (
        before.packages if before else tuple(sorted(closure({name for own in imported.values() for name in own})))
    )
    # this takes seconds, in which the workspace may be deleted
    present = read_environment(packages=packages, known=before.files if before else ())
    make_folder(cache, within=jobs.folders.root)
    if known is None:
        pin(present, cache)
        make_folder(record.parent, within=jobs.folders.root)
        told = stores.ledger.events_about(run_id, RUN_ENVIRONMENT)  # a driver may have died before it wrote the record
        if not told or told[-1].payload["digest"] != present.digest:
            payload = {"digest": present.digest, "packages": _versions(imported)}
            with stores.ledger.transaction(stores.actor) as transaction:
                transaction.append_event(RUN_ENVIRONMENT, run_id, payload)
        write_json(record, {"digest": present.digest})
        return ""
    if present.digest == known["digest"]:
        pin(present, cache)  # the cache may be emptied at any time
        return ""
    what = present.differs(before) if before else "the digests differ"
    return f"the environment differs from the one with which the run began: {what}"


def imported_by(stores: Stores, manifest: Manifest) -> dict[str, set[str]]:
    """Return, by reward or dataflow of a run, the names of the installed packages that its sources import."""
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
    """Return the normalised names of Posttrain, these packages, and all packages that extend or are required by them.

    A package extends another through entry points. Extras count if a requirement names them.
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
        return  # the job reports the missing blob


def _modules(source: bytes) -> Iterator[str]:
    """Yield the top-level names of all modules that a source imports, including imports inside functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def ordered(folders: AttemptFolders, run_id: str) -> str:
    """Return the environment digest that an attesting executor's job of the run must find; empty: none is pinned."""
    known = read_json(_record(folders, run_id))
    return str(known["digest"]) if known else ""


def accept(folders: AttemptFolders, run_id: str) -> None:
    """Accept environment changes for a retried run: the run's next job pins the environment again."""
    _record(folders, run_id).unlink(missing_ok=True)


def _record(folders: AttemptFolders, run_id: str) -> Path:
    return folders.root / "runs" / run_id / _RECORD
