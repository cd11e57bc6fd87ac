"""Settings of a workspace (`workspace.json`), the place of its ledger, and the open workspace.

The settings are written once, when the workspace is made, or later by explicit commands:

::

    {"format": …, "store": …, "ledger": …, "id": …, "rewards": …, "trackers": …, "executor": …, "cluster": …,
     "channel": …, "job_variables": …, "model_limits": …}

The ledger is the file `ledger.db` in the workspace's folder, or a database in PostgreSQL. The choice is recorded in
workspace.json when the workspace is made, and every later command uses this ledger. A password is never recorded: libpq
reads passwords from PGPASSWORD or ~/.pgpass.

An open workspace is one folder with a ledger, blobs, attempt folders and a cache, and the components that work on them.
`app.workspace` opens a workspace and chooses the back-ends; other code does not depend on the choice.
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
from posttrain.data.assets import ModelLimits
from posttrain.data.catalog import Catalog
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, InputError, PosttrainError, WorkspaceError
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord
from posttrain.execution.installed import InstalledExecutor
from posttrain.execution.processes import NEVER, process_alive, process_name
from posttrain.store.atomic import held, read_json, write_json
from posttrain.store.blobs import ObjectBlobs, blobs_url
from posttrain.store.ledger import GONE_SECONDS, Hosts, Ledger, Stores
from posttrain.store.postgres import checked_address
from posttrain.store.sealer import Lost, accept_loss, find_lost, keep_head, seal
from posttrain.store.snapshot import Snapshot
from posttrain.workspace.served import is_served

if TYPE_CHECKING:
    from posttrain.control.reconciler import Reconciler

LEDGER_VARIABLE = "POSTTRAIN_LEDGER"
KEY = "ledger"  # the key in workspace.json; absent: the ledger is the file
FILE = "ledger.db"
_SUBJECT = "workspace"  # the subject of the event that binds a workspace to a database
PROVEN = "proven.json"  # flavour → digest of what its last probe proved
FOLDER = ".posttrain"
VARIABLE = "POSTTRAIN_WORKSPACE"
STORE_VARIABLE = "POSTTRAIN_STORE"
SETTINGS = "workspace.json"
TRUSTED = "trusted"
LOCAL, PODMAN = "local", "podman"
OWN_EXECUTORS = (LOCAL, PODMAN)
EXECUTOR = "executor"  # the key of an executor that is not local
CLUSTER = "cluster"  # the key of declared executors and flavours (`domain.placement`)
VARIABLES = "job_variables"  # the key of names of additional variables that jobs of a server get
LIMITS = "model_limits"  # the key of the limits of a model folder (`data.assets.ModelLimits`)
CHANNEL = "channel"  # the key of a URL below which attempts have their mailboxes; absent: in their folders
_FORMAT = "posttrain.workspace/1"
OWN_STORE = "blobs"  # a store in the workspace's folder, which can be moved with it
_PLACE_DIGITS = 32
_MOST_MANIFESTS = 1024  # manifests cached in memory


def ledger_place(root: Path, record: Any, asked: str | None = None) -> Path | str:
    """Return the path or the address of a workspace's ledger.

    Args:
        record: the content of workspace.json; None without one.
        asked: a requested address; $POSTTRAIN_LEDGER also requests an address.

    Raises:
        WorkspaceError: the workspace has a ledger other than the requested one.
        InputError: the requested address is not a PostgreSQL database, or contains a password.
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
            f"{root}: its ledger is {found}, but {who} names {wanted}; remove --ledger (or unset {LEDGER_VARIABLE}), "
            "or create another workspace"
        )
    return found


def recorded(root: Path, record: Any) -> str | None:
    """Return the address in workspace.json; None: the ledger is the file.

    Raises:
        WorkspaceError: the value is not an address.
    """
    address = record.get(KEY) if isinstance(record, Mapping) else None
    if address is not None and not isinstance(address, str):
        raise WorkspaceError(f"{root}: workspace.json must name the ledger by its address, got {address!r}")
    return checked_address(address) if address else None


def holds_runs(root: Path) -> bool:
    """Return whether this folder contains runs."""
    return (root / "runs").is_dir() and any((root / "runs").iterdir())


def host_name(root: Path) -> str:
    """Return the name of a workspace folder among the hosts of its ledger: HOSTNAME:FOLDER."""
    return f"{socket.gethostname()}:{root}"


def bind(ledger: Ledger, root: Path, identity: str, actor: str, store: str = "") -> None:
    """Bind a workspace folder to a database as one of its hosts, all of which store their artifacts in one store.

    Args:
        identity: the workspace's unique id, which a moved folder retains.
        store: URL of the store that other hosts can reach too; empty: the store is in this folder.

    Raises:
        WorkspaceError: the database is bound to a workspace with another store, or this folder is a host's copy.
    """
    mine, where = f"{_SUBJECT}/{identity}", host_name(root)
    place = ledger.database.place
    with ledger.snapshot() as now:
        if _bound(now, mine, place)[-1:] == [(where, store)]:
            return
    with ledger.database.alone(), ledger.transaction(actor) as transaction:
        own = [folder for folder, _ in _bound(transaction.snapshot, mine, place)]
        known = _bound(transaction.snapshot, _SUBJECT, place)
        if not own and known and where not in dict(known):  # the folder may have lost its workspace.json
            _refuse_other_store(root, place, known[-1], store)
        if own and own[-1] != where and _still_there(own[-1], identity):
            raise WorkspaceError(
                f"{root}: is a copy of the workspace {own[-1]}, which has the ledger {ledger.database.place}; use "
                "that workspace, or move it away first"
            )
        _refuse_twin(ledger, identity, where)
        transaction.append_event("workspace.bound", mine, {}, {"folder": where, "ledger": place, "store": store})


def _refuse_twin(ledger: Ledger, identity: str, where: str) -> None:
    """Reject a copy on another machine, which would treat the original folder's jobs as its own.

    Raises:
        WorkspaceError: the original was active a moment ago.
    """
    known = next(
        (one for one in Hosts(ledger.database, ledger.clock, identity, where).all() if one.id == identity), None
    )
    elsewhere = known is not None and known.name.partition(":")[0] != where.partition(":")[0]  # else checked earlier
    if known is not None and elsewhere and not known.gone:
        raise WorkspaceError(
            f"{where}: is a copy of {known.name}, which reported {known.silent:.0f} s ago and has the same id; use "
            f"{known.name}; if this folder was moved, try again in {GONE_SECONDS:.0f} s; for a separate host, create "
            "a workspace with posttrain init in an empty folder"
        )


def _refuse_other_store(root: Path, place: str, known: tuple[str, str], store: str) -> None:
    """Reject a different store, since every host must be able to read the artifacts of all hosts.

    Raises:
        WorkspaceError: the hosts would store their artifacts in different stores.
    """
    holder, theirs = known
    if not store or theirs != store:
        raise WorkspaceError(
            f"{root}: the ledger {place} is that of the workspace {holder}, whose artifacts are in "
            f"{theirs or 'its own folder'}, not in {store or 'this folder'}; name another ledger, or one store "
            "(POSTTRAIN_STORE) for both when you create them"
        )


def _bound(now: Snapshot, subject: str, place: str) -> list[tuple[str, str]]:
    """Return current and former places of a ledger's workspaces as (`host:folder`, shared store), newest last.

    Events that were recorded at a different address are omitted: they concern the database of which this one is a copy.
    """
    known = [event.payload for event in [*now.events(subject_prefix=subject), *now.pending_events(subject)]]
    return [(str(one.get("folder")), str(one.get("store", ""))) for one in known if one.get("ledger", place) == place]


def _still_there(where: str, identity: str) -> bool:
    """Return whether a workspace with this id is in another folder of this machine."""
    host, _, folder = where.partition(":")
    record = read_json(Path(folder) / "workspace.json") if host == socket.gethostname() else None
    return isinstance(record, Mapping) and record.get("id") == identity


def record_places(
    root: Path, url: str, place: Path | str, rewards: str | None, trackers: Mapping[str, Any] | None, channel: str = ""
) -> None:
    """Record where a new workspace has its artifacts, ledger and mailboxes, and its choice of rewards and trackers."""
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
    """Return the record of a workspace without other settings."""
    return {"format": _FORMAT, "store": OWN_STORE if url == blobs_url(root / OWN_STORE) else url}


def record_variables(root: Path, names: Collection[str]) -> None:
    """Record the names of additional variables of a server's environment that its jobs get.

    Raises:
        InputError: a name is invalid, or is the name of a variable that no job of a server gets.
    """
    for name in names:
        if not name.isidentifier() or name.startswith(NEVER):
            raise InputError(
                f"init: --job-variable must name a variable that does not begin with {', '.join(NEVER[:4])}… (the "
                f"server's own variables), got {name[:80]!a}; name another variable"
            )
    record_setting(root, VARIABLES, sorted(set(names)))


def record_setting(root: Path, key: str, value: Any) -> None:
    """Replace the value of a key in workspace.json; an empty value removes the key."""
    with settings_lock(root):
        others = {name: said for name, said in read_json(root / SETTINGS).items() if name != key}
        write_json(root / SETTINGS, others | ({key: value} if value else {}))


def settings_lock(root: Path) -> AbstractContextManager[None]:
    """Lock workspace.json for one process at a time; the lock is on the folder itself, so no lock file remains."""
    return held(root, make=False)


class OpenWorkspace:
    """An open workspace, the control plane over one folder."""

    root: Path
    actor: str  # the principal in the audit log
    settings: Mapping[str, Any]  # the settings in workspace.json
    ledger: Ledger
    blobs: ObjectBlobs
    stores: Stores
    jobs: Jobs
    catalog: Catalog
    hosts: Hosts | None = None  # the hosts of its ledger; None: only this folder uses the ledger

    @property
    def served(self) -> bool:
        """Whether a server serves the workspace, with the settings that it read at its start."""
        return is_served(self.root)

    @property
    def trusts_rewards(self) -> bool:
        """Whether rewards may run where the kernel cannot confine them."""
        return self.settings.get("rewards") == TRUSTED

    def manifest_or_trouble(self, run: RunRecord) -> tuple[Manifest | None, str]:
        """Return a run's manifest, or a one-line reason why it cannot be read: a bad manifest must not fail a list."""
        known = self._manifests.get(run.manifest_digest)
        if known is not None:
            return known, ""
        try:
            found = self.stores.manifest(run)
            if len(self._manifests) < _MOST_MANIFESTS:  # cached forever: bytes never change under their digest
                self._manifests[run.manifest_digest] = found
            return found, ""
        except (PosttrainError, ValueError) as error:  # missing or corrupt bytes, or a manifest of another version
            return None, f"manifest unreadable: {str(error).splitlines()[0]}"

    @functools.cached_property
    def reconciler(self) -> Reconciler:
        """This process as a reconciler."""
        from posttrain.control.reconciler import Reconciler  # late: loads numpy and pyarrow, which `ls` does not need

        return Reconciler(self.stores, self.jobs, process_name(), process_alive)

    @functools.cached_property
    def _manifests(self) -> dict[str, Manifest]:
        """The manifests that were read, by digest."""
        return {}

    @property
    def ledger_address(self) -> str | None:
        """The address of the ledger in PostgreSQL; None: the ledger is a file."""
        return recorded(self.root, self.settings)

    @functools.cached_property
    def channels(self) -> str:
        """The URL below which new attempts have their mailboxes; empty: in their folders. A copy has its own."""
        url = str(self.settings.get(CHANNEL, ""))
        return f"{url}/{self.place()}" if url else ""

    @property
    def channel_address(self) -> str | None:
        """The URL of the mailboxes between jobs and drivers; None: the attempts' folders."""
        return self.settings.get(CHANNEL)

    @property
    def read_only(self) -> bool:
        """Whether the workspace is read-only, because another user owns it or it is on a read-only mount."""
        return self.ledger.database.read_only

    def identity(self) -> str:
        """Return the unique id of this workspace, 32 random hexadecimal digits, which moves and copies retain.

        Raises:
            WorkspaceError: the workspace has no id yet and cannot be written.
        """
        path = self.root / SETTINGS
        with settings_lock(self.root):  # the writers of several runs may call this at the same time
            record = read_json(path) or fresh_record(self.root, self.blobs.url)
            if not record.get("id"):
                record = {**record, "id": uuid.uuid4().hex}
                write_json(path, record)
        return str(record["id"])

    def refuse_missing_executor(self) -> None:
        """Check that the executor is available, before anything is submitted.

        Raises:
            InputError: the package of the executor is broken or no longer installed.
        """
        if isinstance(self.jobs.executor, InstalledExecutor):
            self.jobs.executor.load()

    def proof(self, flavour: str) -> str:
        """Return the digest of what a probe of a flavour's nodes proves: its declaration, and this Posttrain's code."""
        cluster, trainers = self.jobs.cluster, self.jobs.trainers
        found = cluster.flavours[flavour]
        declared = [found.model_dump(mode="json"), cluster.executors[found.executor].model_dump(mode="json")]
        return digest_json([*declared, {name: trainers[name].code_digest() for name in sorted(trainers)}])

    def is_proven(self, flavour: str) -> bool:
        """Return whether a probe job has succeeded on a flavour's nodes, with the present declaration and code."""
        return (read_json(self.root / PROVEN) or {}).get(flavour) == self.proof(flavour)

    def record_proof(self, flavour: str, *, succeeded: bool) -> None:
        """Record the result of a probe job."""
        with settings_lock(self.root):
            known = {name: one for name, one in (read_json(self.root / PROVEN) or {}).items() if name != flavour}
            write_json(self.root / PROVEN, known | ({flavour: self.proof(flavour)} if succeeded else {}))

    @property
    def own_jobs(self) -> bool:
        """Whether jobs are started in this environment; jobs of an installed executor may be anywhere."""
        return not isinstance(self.jobs.executor, InstalledExecutor)

    def place(self) -> str:
        """Return the digest of id, machine and folder, which separates this workspace's jobs from other workspaces'.

        The digest of a copy differs, so a copy never ends the original's jobs; a moved workspace's digest also differs.

        Raises:
            WorkspaceError: the workspace has no id yet and cannot be written.
        """
        return digest_json([self.identity(), socket.gethostname(), str(self.root)]).partition(":")[2][:_PLACE_DIGITS]

    @functools.cached_property
    def log(self) -> str:
        """The id of the event log among the logs with heads in the same store; a store in the folder has one log."""
        if self.ledger_address is not None:
            return digest_json([self.ledger.database.place]).partition(":")[2][:_PLACE_DIGITS]
        return "own" if self.blobs.url == blobs_url(self.root / OWN_STORE) else self.place()

    def lost(self, run_id: str = "*") -> Lost:
        """Return records outside the ledger that the ledger lacks: heads of the log, and attempts of one run or all."""
        return find_lost(self.ledger, self.blobs, self.log, self.root, run_id)

    def accept_loss(self, reason: str) -> Lost:
        """See `store.sealer.accept_loss`; return the accepted loss."""
        lost = accept_loss(self.ledger, self.blobs, self.log, self.root, self.actor, reason)
        self.seal()
        return lost

    def seal(self, *, keep: bool = True) -> None:
        """Seal the events committed so far; in a read-only process the call has no effect.

        Args:
            keep: whether to also put the head into the store. Loops that seal every few seconds do so only at the end
                of a run.
        """
        if self.read_only:
            return
        seal(self.ledger)
        if keep and self.root.is_dir():  # a store must not recreate a removed folder
            with suppress(InfrastructureError, WorkspaceError):  # the seal is valid; the next one stores a newer head
                keep_head(self.ledger, self.blobs, self.log)

    def seen_by(self, actor: str, project: str, auth: str, request: str = "") -> Self:
        """Return this workspace for another principal or project; closing the original closes the database of both.

        Args:
            auth: the authenticator of the principal, for events.
            request: id of the request, from which the ids of its transactions are formed.
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
