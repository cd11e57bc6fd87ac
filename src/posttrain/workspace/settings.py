"""Settings of a workspace (`workspace.json`), and where its ledger is.

The settings are written once, when the workspace is made, or later as a person asks:

::

    {"format": …, "store": …, "ledger": …, "id": …, "rewards": …, "trackers": …, "executor": …, "channel": …,
     "job_variables": …, "model_limits": …}

The ledger is the file `ledger.db` in the workspace's folder, or a database in PostgreSQL. The choice is made when the
workspace is made and recorded in workspace.json, so that no later command can look elsewhere. A password is never
recorded: libpq finds it in PGPASSWORD or ~/.pgpass.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, WorkspaceError
from posttrain.execution.processes import NEVER
from posttrain.store.atomic import held, read_json, write_json
from posttrain.store.blobs import blobs_url
from posttrain.store.hosts import GONE_SECONDS, Hosts
from posttrain.store.hosts import Ledger
from posttrain.store.postgres import checked_address
from posttrain.store.snapshot import Snapshot

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
