"""Settings of a workspace (`workspace.json`), where its ledger is, and the workspace that is open.

The settings are written once, when the workspace is made, or later as a person asks:

::

    {"format": …, "store": …, "ledger": …, "id": …, "rewards": …, "trackers": …, "executor": …, "channel": …,
     "job_variables": …, "model_limits": …}

The ledger is the file `ledger.db` in the workspace's folder, or a database in PostgreSQL. The choice is made when the
workspace is made and recorded in workspace.json, so that no later command can look elsewhere. A password is never
recorded: libpq finds it in PGPASSWORD or ~/.pgpass.

An open workspace is one folder with a ledger, blobs, attempt folders and a cache, and what works on them.
`app.workspace` opens it and chooses its back-ends; whoever is given it does not know which they are.
"""

from __future__ import annotations

import copy
import functools
import os
import socket
import uuid
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from posttrain.control.jobs import Jobs
from posttrain.control.owners import process_alive, process_name
from posttrain.control.stores import Stores
from posttrain.data.assets import ModelLimits
from posttrain.data.catalog import Catalog
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, InputError, PosttrainError, WorkspaceError
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord
from posttrain.execution.executors.installed import InstalledExecutor
from posttrain.execution.processes import NEVER
from posttrain.store.atomic import held, read_json, write_json
from posttrain.store.blobs import ObjectBlobs, blobs_url
from posttrain.store.hosts import GONE_SECONDS, Hosts, Ledger
from posttrain.store.postgres import checked_address
from posttrain.store.sealer import Lost, accept_loss, find_lost, keep_head, seal
from posttrain.store.snapshot import Snapshot
from posttrain.workspace.served import is_served

if TYPE_CHECKING:
    from posttrain.control.reconciler import Reconciler

LEDGER_VARIABLE = "POSTTRAIN_LEDGER"
KEY = "ledger"  # of workspace.json; absent: the file
FILE = "ledger.db"
_SUBJECT = "workspace"  # of the event by which a database belongs to one workspace
FOLDER = ".posttrain"
VARIABLE = "POSTTRAIN_WORKSPACE"
STORE_VARIABLE = "POSTTRAIN_STORE"
SETTINGS = "workspace.json"
TRUSTED = "trusted"
LOCAL, PODMAN = "local", "podman"
OWN_EXECUTORS = (LOCAL, PODMAN)
EXECUTOR = "executor"  # the key of one that is not local
VARIABLES = "job_variables"  # the key of names of variables that jobs of a server get besides
LIMITS = "model_limits"  # the key of what a model folder may hold (`data.assets.ModelLimits`)
CHANNEL = "channel"  # the key of a URL below which attempts have their channels; absent: in their folders
_FORMAT = "posttrain.workspace/1"
OWN_STORE = "blobs"  # below the workspace, which can then be moved as a whole
_PLACE_DIGITS = 32
_MOST_MANIFESTS = 1024  # that are kept


def ledger_place(root: Path, record: Any, asked: str | None = None) -> Path | str:
    """The path or the address of a workspace's ledger.

    Args:
        record: what workspace.json holds; None without one.
        asked: an address that was asked for; $POSTTRAIN_LEDGER asks, too.

    Raises:
        WorkspaceError: it has another ledger than the one that was asked for.
        InputError: what was asked for is no address of a PostgreSQL database, or holds a password.
    """
    own = root / FILE
    word = asked or os.environ.get(LEDGER_VARIABLE) or None
    wanted = checked_address(word) if word else None
    if record is None and not own.exists():
        return wanted or own
    found = recorded(root, record) or own
    if wanted not in (None, found):
        who = "--ledger" if asked else LEDGER_VARIABLE
        raise WorkspaceError(
            f"{root}: its ledger is {found}, {who} names {wanted}; leave it out or make another workspace"
        )
    return found


def recorded(root: Path, record: Any) -> str | None:
    """The address that workspace.json names; None where the ledger is the file.

    Raises:
        WorkspaceError: it names no address.
    """
    address = record.get(KEY) if isinstance(record, Mapping) else None
    if address is not None and not isinstance(address, str):
        raise WorkspaceError(f"{root}: workspace.json must name the ledger by its address, got {address!r}")
    return checked_address(address) if address else None


def holds_runs(root: Path) -> bool:
    """Whether runs were made in this folder."""
    return (root / "runs").is_dir() and any((root / "runs").iterdir())


def host_name(root: Path) -> str:
    """What people call a workspace folder among others of its ledger: HOSTNAME:FOLDER."""
    return f"{socket.gethostname()}:{root}"


def bind(ledger: Ledger, root: Path, identity: str, actor: str, store: str = "") -> None:
    """Let a workspace folder be one of the hosts of a database; all of them keep their artifacts in one store.

    Args:
        identity: what tells the workspace from others; a folder that was moved keeps it.
        store: URL of the store that others reach, too; empty: it lies in this folder.

    Raises:
        WorkspaceError: it is that of a workspace with another store, or this folder is a copy of one that has it.
    """
    mine, where = f"{_SUBJECT}/{identity}", host_name(root)
    place = ledger.database.place
    with ledger.snapshot() as now:
        if _bound(now, mine, place)[-1:] == [(where, store)]:
            return
    with ledger.database.alone(), ledger.transaction(actor) as transaction:
        own = [folder for folder, _ in _bound(transaction.snapshot, mine, place)]
        known = _bound(transaction.snapshot, _SUBJECT, place)
        if not own and known and where not in dict(known):  # the folder itself may have lost its workspace.json
            _refuse_other_store(root, place, known[-1], store)
        if own and own[-1] != where and _still_there(own[-1], identity):
            raise WorkspaceError(
                f"{root}: is a copy of the workspace {own[-1]}, which has the ledger {ledger.database.place}; "
                "use that one, or move it away first"
            )
        _refuse_twin(ledger, identity, where)
        transaction.append_event("workspace.bound", mine, {}, {"folder": where, "ledger": place, "store": store})


def _refuse_twin(ledger: Ledger, identity: str, where: str) -> None:
    """A copy on another machine would take the jobs of the folder that it was made of for its own.

    Raises:
        WorkspaceError: that one was heard of a moment ago.
    """
    known = next(
        (one for one in Hosts(ledger.database, ledger.clock, identity, where).all() if one.id == identity), None
    )
    elsewhere = known is not None and known.name.partition(":")[0] != where.partition(":")[0]  # else it was looked at
    if known is not None and elsewhere and not known.gone:
        raise WorkspaceError(
            f"{where}: is a copy of {known.name}, which was heard of {known.silent:.0f} s ago and has the same id; use "
            f"that one; if this one was moved, try again in {GONE_SECONDS:.0f} s; for a host of its own, make another "
            "with posttrain init in an empty folder"
        )


def _refuse_other_store(root: Path, place: str, known: tuple[str, str], store: str) -> None:
    """What one host made, every other one must be able to read.

    Raises:
        WorkspaceError: they keep their artifacts in different stores.
    """
    holder, theirs = known
    if not store or theirs != store:
        raise WorkspaceError(
            f"{root}: the ledger {place} is that of the workspace {holder}, whose artifacts are in "
            f"{theirs or 'its own folder'}, not in {store or 'this folder'}; name another ledger, or one store "
            "(POSTTRAIN_STORE) for both when they are made"
        )


def _bound(now: Snapshot, subject: str, place: str) -> list[tuple[str, str]]:
    """Where the workspaces of a ledger are or were, as `host:folder`, with their shared stores, the last one last.

    What was said at another address was said of another database, which this one is a copy of.
    """
    known = [event.payload for event in [*now.events(subject_prefix=subject), *now.pending_events(subject)]]
    return [(str(one.get("folder")), str(one.get("store", ""))) for one in known if one.get("ledger", place) == place]


def _still_there(where: str, identity: str) -> bool:
    """Whether a workspace of this id is in another folder of this machine."""
    host, _, folder = where.partition(":")
    record = read_json(Path(folder) / "workspace.json") if host == socket.gethostname() else None
    return isinstance(record, Mapping) and record.get("id") == identity


def record_places(
    root: Path, url: str, place: Path | str, rewards: str | None, trackers: Mapping[str, Any] | None, channel: str = ""
) -> None:
    """Where artifacts, ledger and channels of a new workspace are, and what a person says of rewards and trackers."""
    with settings_lock(root):
        known = read_json(root / SETTINGS)
        places = ({} if isinstance(place, Path) else {KEY: place}) | ({CHANNEL: channel} if channel else {})
        record = known or fresh_record(root, url) | places
        if rewards is not None:
            record = {key: value for key, value in record.items() if key != "rewards"}
            record |= {"rewards": TRUSTED} if rewards == TRUSTED else {}
        if trackers is not None:
            record = {key: value for key, value in record.items() if key != "trackers"}
            record |= {"trackers": dict(trackers)} if trackers else {}
        if record != known:
            write_json(root / SETTINGS, record)


def fresh_record(root: Path, url: str) -> dict[str, Any]:
    """Of a workspace that says nothing else."""
    return {"format": _FORMAT, "store": OWN_STORE if url == blobs_url(root / OWN_STORE) else url}


def record_variables(root: Path, names: Collection[str]) -> None:
    """Which variables of a server's environment its jobs get besides those that a machine needs; none: no others.

    Raises:
        InputError: a name that is none, or of a variable that no job of a server gets.
    """
    for name in names:
        if not name.isidentifier() or name.startswith(NEVER):
            raise InputError(
                f"init: --job-variable must be the name of a variable, and none of {', '.join(NEVER[:4])}…, which are "
                f"the server's own; got {name[:80]!a}"
            )
    record_setting(root, VARIABLES, sorted(set(names)))


def record_setting(root: Path, key: str, value: Any) -> None:
    """What workspace.json says under a key, in place of what was recorded before; nothing where the value is empty."""
    with settings_lock(root):
        others = {name: said for name, said in read_json(root / SETTINGS).items() if name != key}
        write_json(root / SETTINGS, others | ({key: value} if value else {}))


def settings_lock(root: Path) -> AbstractContextManager[None]:
    """One process at a time reads and writes workspace.json; the folder itself is locked, for nothing to be left."""
    return held(root, make=False)


class OpenWorkspace:
    """The control plane over one folder."""

    root: Path
    actor: str  # who acts, as the audit log names it
    settings: Mapping[str, Any]  # of workspace.json
    ledger: Ledger
    blobs: ObjectBlobs
    stores: Stores
    jobs: Jobs
    catalog: Catalog
    hosts: Hosts | None = None  # of its ledger; None where it is this folder's alone

    @property
    def served(self) -> bool:
        """Whether a server has it, which goes by the settings that it read when it began."""
        return is_served(self.root)

    @property
    def trusts_rewards(self) -> bool:
        """Whether rewards may run where the kernel cannot confine them."""
        return self.settings.get("rewards") == TRUSTED

    def manifest_or_trouble(self, run: RunRecord) -> tuple[Manifest | None, str]:
        """A run's manifest, or one line that says why it cannot be read: a look at many runs survives a bad one."""
        known = self._manifests.get(run.manifest_digest)
        if known is not None:
            return known, ""
        try:
            found = self.stores.manifest(run)
            if len(self._manifests) < _MOST_MANIFESTS:  # bytes by their digest: they never change
                self._manifests[run.manifest_digest] = found
            return found, ""
        except (PosttrainError, ValueError) as error:  # bytes gone or corrupt, or a manifest of another version
            return None, f"manifest unreadable: {str(error).splitlines()[0]}"

    @functools.cached_property
    def reconciler(self) -> Reconciler:
        """This process as a reconciler."""
        from posttrain.control.reconciler import Reconciler  # here: it loads numpy and pyarrow, which `ls` does without

        return Reconciler(self.stores, self.jobs, process_name(), process_alive)

    @functools.cached_property
    def _manifests(self) -> dict[str, Manifest]:
        """Digest → manifest, of those that were read."""
        return {}

    @property
    def ledger_address(self) -> str | None:
        """The address of its ledger in PostgreSQL; None where it is a file of its own."""
        return recorded(self.root, self.settings)

    @functools.cached_property
    def channels(self) -> str:
        """The URL below which new attempts have their channels; empty: in their folders. Copies have another."""
        url = str(self.settings.get(CHANNEL, ""))
        return f"{url}/{self.place()}" if url else ""

    @property
    def channel_address(self) -> str | None:
        """Where jobs and drivers talk, where that is not the attempts' folders."""
        return self.settings.get(CHANNEL)

    @property
    def read_only(self) -> bool:
        """Whether it may only be read: another user's, or on a read-only mount."""
        return self.ledger.database.read_only

    def identity(self) -> str:
        """What tells this workspace from others, also moved or copied: 32 random hexadecimal digits in workspace.json.

        Raises:
            WorkspaceError: it has none yet and cannot be written.
        """
        path = self.root / SETTINGS
        with settings_lock(self.root):  # the writers of several runs may ask at once
            record = read_json(path) or fresh_record(self.root, self.blobs.url)
            if not record.get("id"):
                record = {**record, "id": uuid.uuid4().hex}
                write_json(path, record)
        return str(record["id"])

    def refuse_missing_executor(self) -> None:
        """Before anything is submitted.

        Raises:
            InputError: the package of its executor is not installed any more, or broken.
        """
        if isinstance(self.jobs.executor, InstalledExecutor):
            self.jobs.executor.load()

    @property
    def own_jobs(self) -> bool:
        """Whether jobs are started in this environment; those of an installed executor may be anywhere."""
        return not isinstance(self.jobs.executor, InstalledExecutor)

    def place(self) -> str:
        """What tells its jobs from those of other workspaces: a digest of its identity and of where it is.

        A copy has another, so it never ends the jobs of what it was copied from; so has one that was moved.

        Raises:
            WorkspaceError: as `identity`.
        """
        return digest_json([self.identity(), socket.gethostname(), str(self.root)]).partition(":")[2][:_PLACE_DIGITS]

    @functools.cached_property
    def log(self) -> str:
        """What tells the event log from others that keep heads in the same store; a store in the folder has one."""
        if self.ledger_address is not None:
            return digest_json([self.ledger.database.place]).partition(":")[2][:_PLACE_DIGITS]
        return "own" if self.blobs.url == blobs_url(self.root / OWN_STORE) else self.place()

    def lost(self, run_id: str = "*") -> Lost:
        """What is kept outside the ledger and missing in it: of the log, and of one run's folder or of all."""
        return find_lost(self.ledger, self.blobs, self.log, self.root, run_id)

    def accept_loss(self, reason: str) -> Lost:
        """See `store.heads.accept_loss`; what was accepted."""
        lost = accept_loss(self.ledger, self.blobs, self.log, self.root, self.actor, reason)
        self.seal()
        return lost

    def seal(self, *, keep: bool = True) -> None:
        """Chain the events committed so far; whoever may only read leaves that to the next who writes.

        Args:
            keep: also keep the head in the store. Loops that seal every few seconds leave that to what ends runs.
        """
        if self.read_only:
            return
        seal(self.ledger)
        if keep and self.root.is_dir():  # where a folder was removed or moved, a store in it is not made again
            with suppress(InfrastructureError, WorkspaceError):  # what was done stands; the next one keeps a newer head
                keep_head(self.ledger, self.blobs, self.log)

    def seen_by(self, actor: str, project: str, auth: str, request: str = "") -> Self:
        """The same workspace as another principal sees it, in another project perhaps; this one closes its database.

        Args:
            auth: how it was made sure who that is, as events say it.
            request: what they ask, by which events tell its transactions.
        """
        other = copy.copy(self)
        for cached in ("reconciler", "channels"):
            other.__dict__.pop(cached, None)
        other.actor = actor
        mine = self.ledger
        other.ledger = Ledger(
            mine.database, mine.clock, project=project, entropy=mine.entropy, auth=auth, request=request
        )
        other.stores = Stores(other.ledger, self.blobs, other.ledger.clock, actor)
        other.catalog = Catalog(other.ledger, self.blobs, actor, ModelLimits(**self.settings.get(LIMITS, {})))
        return other

    def close(self) -> None:
        """Close the database."""
        self.ledger.close()
