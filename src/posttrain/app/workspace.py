"""A workspace, connected to the local back-ends, and its backup.

A workspace is one folder with a ledger, blobs, attempt folders and a cache.

Trackers that the command line names are checked here, before a workspace or a run records them.

A backup is a folder from which `restore` creates a workspace.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.access.authenticators.system import SystemUser
from posttrain.access.ports import OS
from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.data.assets import ModelLimits, model_limits
from posttrain.data.catalog import Catalog, inspect_dataset
from posttrain.domain.errors import ConflictError, InputError, NotFoundError, WorkspaceError, nearest
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import RunState, is_final
from posttrain.domain.placement import Cluster, ExecutorSettings
from posttrain.domain.ports import crashpoint
from posttrain.domain.runspec import parse_run_spec
from posttrain.domain.validation import validated
from posttrain.execution.executors.local import containers
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.executors.ray import RayExecutor
from posttrain.execution.executors.slurm import SlurmExecutor
from posttrain.execution.installed import InstalledExecutor, Trainers
from posttrain.execution.machine import local_devices
from posttrain.execution.ports import Executor
from posttrain.execution.processes import of_a_server
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.foreign.settings import Draft as Draft, read_settings
from posttrain.foreign.trl import from_trl
from posttrain.foreign.verl import from_verl
from posttrain.store.atomic import (
    LOCK,
    FileLock,
    StoreLock,
    make_folder,
    read_json,
    sync_folder,
    unwritable,
    write_json,
)
from posttrain.store.audit import verify_rows
from posttrain.store.backup import BackedUp, back_up, fill, read_backup
from posttrain.store.blobs import USERS, ObjectBlobs, blobs_url, open_blobs
from posttrain.store.database import Database, SystemClock
from posttrain.store.grants import Granting, Grants
from posttrain.store.ledger import Hosts, Ledger, LedgerLock, Stores
from posttrain.store.mailboxes.objects import checked_url
from posttrain.store.sealer import verify_chain
from posttrain.store.work import let_go
from posttrain.trackers.choice import (
    check_trackers,
    describe,
    of_workspace,
    parse_trackers,
    read_choice as read_choice,
    resolved,
)
from posttrain.workspace.served import PLACE
from posttrain.workspace.settings import (
    CHANNEL,
    CLUSTER,
    EXECUTOR,
    FILE,
    FOLDER,
    KEY,
    LIMITS,
    LOCAL,
    OWN_EXECUTORS,
    OWN_STORE,
    PODMAN,
    SETTINGS,
    STORE_VARIABLE,
    VARIABLE,
    VARIABLES,
    OpenWorkspace,
    bind,
    holds_runs,
    host_name,
    ledger_place,
    record_places,
    record_setting,
    record_variables,
    recorded,
)

_MAKERS: Mapping[str, Callable[[str, ExecutorSettings], Executor]] = {"slurm": SlurmExecutor, "ray": RayExecutor}
_BESIDE = 4  # threads that hash, upload and judge while runs are driven
RUN_FILE = "run.yaml"


class Workspace(OpenWorkspace):
    """A workspace that is opened or created, with the back-ends that its settings name.

    Raises:
        WorkspaceError: there is no workspace; the workspace is read-only or has a newer schema; the disk is full; the
            PostgreSQL server is unreachable; or POSTTRAIN_STORE or POSTTRAIN_LEDGER differs from the recorded place.
        UnavailableError: the store of a new workspace cannot be used; no workspace is created.
    """

    def __init__(
        self,
        root: Path,
        *,
        create: bool = False,
        actor: str | None = None,
        rewards: str | None = None,
        trackers: Mapping[str, Any] | None = None,
        ledger: str | None = None,
        channel: str | None = None,
    ) -> None:
        self.root = root.resolve()
        if not create and not has_ledger(self.root):
            raise WorkspaceError(f"{self.root}: is not a workspace; run `posttrain init`, or set {VARIABLE} to one")
        clock = SystemClock()
        self.actor = actor or SystemUser().authenticate().principal
        store = _store(self.root)
        place = ledger_place(self.root, read_json(self.root / SETTINGS), ledger)
        # checked first, because an unreachable server or store must not leave an incomplete workspace
        if create and read_json(self.root / SETTINGS) is None and store != blobs_url(self.root / OWN_STORE):
            open_blobs(store).probe()
        database = None if isinstance(place, Path) else Database(place, create=create and not holds_runs(self.root))
        channel = _channel(self.root, channel)
        own = self.root / LOCK  # locks this folder's own store, or the store that all hosts of a ledger share
        self.lock: StoreLock = FileLock(own) if database is None else LedgerLock(own, database)
        self.blobs = blobs = open_blobs(store, self.lock)
        if create:
            if database is None:
                _refuse_lost_ledger(self.root)
            _make(self.root)
            record_places(self.root, self.blobs.url, place, rewards, trackers, channel)
        self.settings = read_json(self.root / SETTINGS) or {}
        self.ledger = Ledger(database or Database(place, create=create), clock)
        if database is not None:
            shared = "" if blobs.url == blobs_url(self.root / OWN_STORE) else blobs.url
            bind(self.ledger, self.root, self.identity(), self.actor, shared)
            self.hosts = Hosts(database, clock, self.identity(), host_name(self.root))
            if create:
                self.hosts.beat()
        if create:
            join_store(self, blobs)
        self.stores = Stores(self.ledger, self.blobs, clock, self.actor)
        self.jobs = Jobs(
            executor=_executor(self.root, self.settings),
            trainers=Trainers([NativeTrainer()]),
            folders=AttemptFolders(self.root, lambda: self.channels, self._is_remote, blobs.url),
            declared=_Declared(self.root),
            slots=max(1, os.cpu_count() or 1),
            beside=_BESIDE,
            trust_rewards=self.trusts_rewards,
            workspace=self.place,
            hosts=self.hosts,
        )
        self.catalog = Catalog(self.ledger, self.blobs, self.actor, ModelLimits(**self.settings.get(LIMITS, {})))

    def _is_remote(self, name: str) -> bool:
        found = self.jobs.others.get(name, self.jobs.executor)
        return name == found.name and found.remote


def find_workspace(start: Path | None = None) -> Path:
    """Return `$POSTTRAIN_WORKSPACE`, or the nearest `.posttrain` at or above `start`.

    Raises:
        WorkspaceError: there is no workspace.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if has_ledger(folder / FOLDER):
            return folder / FOLDER
    raise WorkspaceError(f"{here}: no workspace here or above; run `posttrain init`")


def workspace_above(folder: Path | None) -> Path | None:
    """Return the nearest workspace above `folder` (None: the current folder), before `init` creates one in `folder`.

    Returns None if there is no workspace above, or if `folder` already contains a workspace.

    Raises:
        InputError: there is a workspace above, and no folder was named; an accidental second workspace would hide the
            existing one.
    """
    here = (folder or Path.cwd()).resolve()
    if has_ledger(here / FOLDER) or (folder is None and os.environ.get(VARIABLE)):
        return None
    above = None
    with suppress(WorkspaceError):  # an unreadable workspace belongs to another user
        above = next((one / FOLDER for one in here.parents if has_ledger(one / FOLDER)), None)
    if folder is None and above is not None:
        raise InputError(
            f"init: commands here use the workspace {above} already; continue with the next command, change its "
            f"settings in {above.parent}, or create another here: posttrain init ."
        )
    return above


def open_workspace(path: Path | None = None) -> Workspace:
    """Open the workspace at `path` (`.posttrain` or the folder that contains it), or the nearest workspace."""
    if path is None:
        return Workspace(find_workspace())
    return Workspace(path if has_ledger(path) else path / FOLDER)


def has_ledger(root: Path) -> bool:
    """Return whether a folder is a workspace: whether it contains a ledger or the address of a ledger.

    Raises:
        WorkspaceError: the folder may not be read.
    """
    try:
        return (root / FILE).exists() or recorded(root, read_json(root / SETTINGS)) is not None
    except OSError as error:
        raise WorkspaceError(
            f"{root}: cannot be read: {error.strerror}; only the owner of a workspace can read it by default"
        ) from error


def init_workspace(
    path: Path | None = None,
    *,
    rewards: str | None = None,
    trackers: Mapping[str, Any] | None = None,
    ledger: str | None = None,
    executor: str | None = None,
    channel: str | None = None,
    job_variables: Collection[str] | None = None,
    limits: Sequence[str] | None = None,
) -> Workspace:
    """Create a workspace below `path` (default: the current folder). A repeated call changes only the given settings.

    Args:
        rewards: `trusted`: rewards may run where the kernel cannot confine them; `confined` revokes that permission.
        trackers: the trackers of every run whose file names none; they replace the earlier trackers.
        ledger: address of the PostgreSQL database for the ledger of a new workspace.
        executor: the executor of the workspace's jobs: `local`; `podman`, which runs jobs that name an image in a
            container; or an executor of an installed package.
        channel: URL below which a new workspace has the mailboxes between jobs and drivers; None: in its folder.
        limits: limits of a model folder (`data.assets.model_limits`); they replace the earlier limits.
        job_variables: names of variables that jobs get from the server's environment; they replace the earlier names.

    Raises:
        InputError: the executor is unknown or broken, podman is missing, a variable is one that no job may get, or
            there cannot be mailboxes below the URL.
        ConflictError: the executor would change while runs have jobs or will start some.
    """
    named = os.environ.get(VARIABLE)
    root = path / FOLDER if path else Path(named) if named else Path.cwd() / FOLDER
    chosen = None if limits is None else model_limits(limits)
    if executor == PODMAN:  # checked first, so no workspace is created without podman
        if why := containers.trouble():
            raise InputError(f"init: --executor {PODMAN} needs podman: {why}")
    elif executor not in (None, LOCAL):
        made = InstalledExecutor(executor, OWN_EXECUTORS, root / "runs")
        made.load()
        if made.remote:
            refuse_unreachable(root, executor, channel)
    workspace = Workspace(root, create=True, rewards=rewards, trackers=trackers, ledger=ledger, channel=channel)
    other = executor not in (None, workspace.settings.get(EXECUTOR, LOCAL))
    if not other and job_variables is None and chosen is None:
        return workspace
    try:
        if chosen is not None:
            record_setting(root, LIMITS, chosen)
        if job_variables is not None:
            record_variables(root, job_variables)
        if executor is not None and other:
            _record_executor(workspace, executor)
    finally:
        workspace.close()
    return Workspace(root)


def serve_jobs(workspace: Workspace) -> Granting:
    """Give a workspace's jobs the environment of a server's jobs: access to the server, and the machine's variables.

    An executor of an installed package selects the variables of its jobs itself.
    """
    executor = workspace.jobs.executor
    if isinstance(executor, LocalExecutor):
        keep = partial(of_a_server, named=tuple(workspace.settings.get(VARIABLES, ())))
        executor = LocalExecutor(
            "posttrain.jobs.preload", local_devices, workspace.root / "runs", keep, images=executor.images
        )
    grants, hosts = Grants(workspace.ledger.database, workspace.ledger.clock), workspace.hosts
    peers = hosts.all if hosts is not None else tuple
    granting = Granting(workspace.root, workspace.root / PLACE, grants, workspace.jobs.host, peers)
    workspace.jobs = replace(workspace.jobs, executor=executor, access=granting)
    return granting


def join_store(workspace: OpenWorkspace, blobs: ObjectBlobs) -> None:
    """Register this workspace in its artifact store, if the store is outside the workspace's folder.

    Garbage collection needs the list of all workspaces whose ledgers refer to the store.
    """
    if blobs.url != blobs_url(workspace.root / OWN_STORE):
        blobs.note(f"{USERS}/{workspace.identity()}", str(workspace.root))


def _store(root: Path) -> str:
    """Return the URL of a workspace's artifact store, which is recorded when the workspace is made.

    Raises:
        WorkspaceError: POSTTRAIN_STORE names another store.
        InputError: the URL contains credentials.
    """
    own = blobs_url(root / OWN_STORE)
    wanted = blobs_url(os.environ[STORE_VARIABLE]) if os.environ.get(STORE_VARIABLE) else None
    record = read_json(root / SETTINGS)
    if record is None:
        return wanted or own
    try:
        found = own if record["store"] == OWN_STORE else str(record["store"])
    except (KeyError, TypeError) as error:
        raise WorkspaceError(f"{root / SETTINGS}: must name the artifact store as `store`, got {record!r}") from error
    if wanted not in (None, found):
        raise WorkspaceError(
            f"{root}: its artifacts are in {found}, but {STORE_VARIABLE} names {wanted}; unset it or create "
            "another workspace"
        )
    return found


def _channel(root: Path, asked: str | None) -> str:
    """Return the URL of new attempts' mailboxes, recorded when the workspace is created; "": in the attempts' folders.

    Raises:
        WorkspaceError: the workspace was created with another URL.
        InputError: there cannot be mailboxes below the requested URL.
        InfrastructureError: the place at the URL cannot be used.
    """
    record = read_json(root / SETTINGS)
    if record is None:
        return checked_url(asked) if asked else ""
    found = str(record.get(CHANNEL, ""))
    if asked and asked.rstrip("/") != found:
        raise WorkspaceError(
            f"{root}: its mailboxes are in {found or 'its folder'}, but --mailboxes names another place; "
            "leave the option out or create another workspace"
        )
    return found


def refuse_unreachable(root: Path, executor: str, channel: str | None) -> None:
    """Refuse an executor whose jobs would reach neither mailboxes nor artifacts.

    Raises:
        InputError: the mailboxes or the artifacts are in a folder of this machine.
    """
    if not _channel(root, channel) or not _store(root).startswith("s3://"):
        raise InputError(
            f"executor {executor} runs jobs on other machines, which reach this workspace only through an object "
            "store; create a workspace with --mailboxes s3://… and POSTTRAIN_STORE=s3://…"
        )


class _Declared:
    """The executors and flavours that a workspace declares, read again after each change of its settings."""

    def __init__(self, root: Path) -> None:
        self._place, self._stamp = root / SETTINGS, (-1, -1)
        self._found: tuple[Cluster, dict[str, Executor]] = (Cluster(), {})

    def __call__(self) -> tuple[Cluster, Mapping[str, Executor]]:
        try:
            about = self._place.stat()
        except FileNotFoundError:  # a workspace of an older version, or one that was deleted
            return self._found
        if (stamp := (about.st_mtime_ns, about.st_ino)) != self._stamp:
            cluster, (before, made) = declared(read_json(self._place) or {}, self._place), self._found
            kept = {name: made[name] for name, one in cluster.executors.items() if before.executors.get(name) == one}
            new = {name: one for name, one in cluster.executors.items() if name not in kept}
            self._found = cluster, {**kept, **{name: _MAKERS[one.kind](name, one) for name, one in new.items()}}
            self._stamp = stamp
        return self._found


def declared(settings: Mapping[str, Any], source: Path) -> Cluster:
    """Return the executors and flavours that a workspace declares.

    Raises:
        InputError: the value is invalid.
    """
    found = validated(Cluster, settings.get(CLUSTER, {}), str(source))
    for name, one in found.executors.items():
        if one.kind not in _MAKERS:
            near = nearest(one.kind, _MAKERS)
            raise InputError(f"{source}: executors.{name}: kind must be {', '.join(_MAKERS)}, got {one.kind!r}{near}")
        if name in (*OWN_EXECUTORS, settings.get(EXECUTOR)):
            raise InputError(
                f"{source}: executors.{name}: the workspace has another executor {name}; choose another name"
            )
    return found


def _executor(root: Path, settings: Mapping[str, Any]) -> Executor:
    name = str(settings.get(EXECUTOR, LOCAL))
    if name in OWN_EXECUTORS:
        return LocalExecutor("posttrain.jobs.preload", local_devices, root / "runs", images=name == PODMAN)
    return InstalledExecutor(name, OWN_EXECUTORS, root / "runs")


def _record_executor(workspace: Workspace, name: str) -> None:
    """Record the executor. A job can be observed only by the executor to which it was submitted.

    Raises:
        ConflictError: a run has jobs, or will start some.
    """
    held = list(runs_with_jobs(workspace))
    if held:
        raise ConflictError(
            f"executor must remain {workspace.jobs.executor.name} while runs have jobs or may start some "
            f"({', '.join(held)}), got {name}; wait until these runs end, or stop them: posttrain stop {held[0]}"
        )
    record_setting(workspace.root, EXECUTOR, "" if name == LOCAL else name)


def runs_with_jobs(workspace: Workspace) -> Iterator[str]:
    """Yield runs of any project that will start a job; a run that only waits for a release will start none."""
    for project in workspace.ledger.projects():
        ledger = workspace.seen_by(workspace.actor, project, OS).ledger
        for run in [run for state in RunState if not is_final("run", state) for run in ledger.runs(state=state)]:
            to_come = [stage for stage in ledger.stages(run.id) if not is_final("stage", stage.state)]
            if any(kind_of(stage.kind).driver is Driver.JOB for stage in to_come):
                yield run.id


def _make(root: Path) -> None:
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root, root / "runs", root / "cache"):
            make_folder(folder)
    except OSError as error:
        raise WorkspaceError(
            f"{root}: cannot be created: {error.strerror}; choose a folder that you can write to"
        ) from error


def _refuse_lost_ledger(root: Path) -> None:
    """Refuse to create a new ledger next to existing runs, because it would not contain their records."""
    ledger = root / FILE
    if not (ledger.exists() and ledger.stat().st_size) and holds_runs(root):
        what = "is empty" if ledger.exists() else "is missing"
        raise WorkspaceError(f"{root}: contains runs, but its ledger {what}; restore ledger.db from a copy")


def refuse_unwritable_choice(chosen: dict[str, Any], folder: Path | None) -> None:
    """Reject trackers that cannot be written, before they are recorded.

    Raises:
        InputError: a package is missing, or a tracker's place cannot be written.
    """
    root = (folder or Path.cwd()).resolve()
    check_trackers(resolved(parse_trackers(chosen, "--tracker"), root, root), "--tracker")


def chosen_places(workspace: Workspace) -> list[tuple[str, str]]:
    """Return the kind and the place of each of the workspace's trackers, which runs without `trackers` use."""
    return list(describe(of_workspace(workspace)))


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `restore`."""

    root: Path
    found: BackedUp
    runs: int
    under_way: tuple[str, ...]  # runs that had not ended


def backup(folder: Path) -> BackedUp:
    """Back up the nearest workspace.

    Raises:
        InputError: the workspace's ledger is in PostgreSQL.
    """
    workspace = Workspace(find_workspace())
    try:
        if workspace.ledger_address:
            raise InputError(
                "backup: the ledger is in PostgreSQL; copy the database with pg_dump first, then the store "
                "(see docs/howto/backup.md)"
            )
        blobs = open_blobs(workspace.blobs.url, workspace.lock)
        return back_up(workspace.ledger, blobs, folder.resolve(), workspace.settings)
    finally:
        workspace.close()


def restore(folder: Path) -> Restored:
    """Create a workspace here from a backup, completely or not at all.

    Raises:
        ConflictError: there is a workspace here.
        InputError: the folder is not a backup.
        IntegrityError: the backup was altered.
    """
    named = os.environ.get(VARIABLE)
    root = (Path(named) if named else Path.cwd() / FOLDER).resolve()
    if root.exists() and any(root.iterdir()):
        raise ConflictError(f"{root}: must not exist yet, got a folder that contains files; restore to a new folder")
    found = read_backup(folder.resolve())
    half = root.with_name(f"{root.name}.part")  # a killed restore may have left this folder
    shutil.rmtree(half, ignore_errors=True)
    for made in (half, half / "runs", half / "cache"):
        make_folder(made)
    fill(found, half / FILE, open_blobs(half / OWN_STORE))
    kept = {key: value for key, value in found.settings.items() if key != KEY}
    write_json(half / SETTINGS, {**kept, "store": OWN_STORE})
    runs, under_way = _proved(half / FILE)
    crashpoint("restore.before_rename")
    if root.is_dir():
        root.rmdir()
    half.rename(root)
    sync_folder(root.parent)
    return Restored(root, found, runs, under_way)


def _proved(place: Path) -> tuple[int, tuple[str, ...]]:
    """Verify a ledger and release its leases; return the number of runs, and the ids of unfinished runs."""
    ledger = Ledger(Database(place, create=False))
    try:
        verify_chain(ledger)
        verify_rows(ledger)
        let_go(ledger.database)
        every = [run for project in ledger.projects() for run in Ledger(ledger.database, project=project).runs()]
        return len(every), tuple(run.id for run in every if not is_final("run", run.state))
    finally:
        ledger.close()


class Trainer(StrEnum):
    """The program whose configuration is converted."""

    TRL = "trl"
    VERL = "verl"


_READERS = {Trainer.TRL: from_trl, Trainer.VERL: from_verl}


def adopt(trainer: Trainer, source: Path, target: Path) -> Draft:
    """Write a run file for the training that `source` configures; return a draft with a note on each setting.

    The source is never executed.

    Args:
        source: a TRL script, configuration or command; verl's YAML or a script with its overrides.
        target: the run file, which must not exist.

    Raises:
        InputError: the source cannot be read or converted, or `target` exists.
        WorkspaceError: `target` cannot be written.
    """
    draft = _READERS[trainer](read_settings(source), None)
    place, rows = _rows(draft, target.absolute().parent)
    if rows is not None:
        draft = _READERS[trainer](read_settings(source), rows)
        draft.run["data"] = {"train": place}
    model = Path(draft.run["model"]).expanduser()
    if model.is_dir() and not model.is_absolute():
        draft.run["model"] = _seen_from(target.absolute().parent, model)
    parse_run_spec(draft.run, str(target))  # the result must be a valid run file
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(draft.text())
    except FileExistsError as error:
        raise InputError(f"{target}: exists already; move it away, or continue with posttrain plan {target}") from error
    except OSError as error:
        raise unwritable(target, error) from error
    return draft


def _rows(draft: Draft, folder: Path) -> tuple[str, int | None]:
    """Return the training data's path in the run file, and the number of rows; None: the data is not available here."""
    named = str(draft.run["data"]["train"])
    path = Path(named).expanduser()
    if named.startswith("dataset:") or not path.exists():
        return named, None
    try:
        rows = int(inspect_dataset(path)["rows"])
    except (InputError, NotFoundError):  # `plan` reports the error
        return named, None
    return _seen_from(folder, path), rows


def _seen_from(folder: Path, path: Path) -> str:
    """Return a path in the form that a run file in `folder` uses."""
    relative = os.path.relpath(path.absolute(), folder)
    return relative if relative.startswith(".") else f"./{relative}"
