"""Where the ledger of a workspace is: the file `ledger.db` in its folder, or a database in PostgreSQL.

Which one is said when the workspace is made and recorded in workspace.json, so that no later command can look
elsewhere. A password is never recorded: libpq finds it in PGPASSWORD or ~/.pgpass.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import read_json
from posttrain.store.ledger import Ledger
from posttrain.store.postgres import checked_address
from posttrain.store.snapshot import Snapshot

LEDGER_VARIABLE = "POSTTRAIN_LEDGER"
KEY = "ledger"  # of workspace.json; absent: the file
FILE = "ledger.db"
_SUBJECT = "workspace"  # of the event by which a database belongs to one workspace


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


def bind(ledger: Ledger, root: Path, identity: str, actor: str) -> None:
    """Make a database this workspace's own: two folders of jobs in one ledger would lose each other's attempts.

    Args:
        identity: what tells the workspace from others; a folder that was moved keeps it.

    Raises:
        WorkspaceError: it is another workspace's, or this folder is a copy of the one that has it.
    """
    mine, where = f"{_SUBJECT}/{identity}", f"{socket.gethostname()}:{root}"
    place = ledger.database.place
    with ledger.snapshot() as now:
        if _folders(now, mine, place)[-1:] == [where]:
            return
    with ledger.database.alone(), ledger.transaction(actor) as transaction:
        own = _folders(transaction.snapshot, mine, place)
        known = _folders(transaction.snapshot, _SUBJECT, place)
        if not own and known and where not in known:  # the folder itself may have lost its workspace.json
            raise WorkspaceError(
                f"{root}: the ledger {ledger.database.place} is that of the workspace {known[-1]}; name another one"
            )
        if own and _still_there(own[-1], identity):
            raise WorkspaceError(
                f"{root}: is a copy of the workspace {own[-1]}, which has the ledger {ledger.database.place}; "
                "use that one, or move it away first"
            )
        transaction.append_event("workspace.bound", mine, {}, {"folder": where, "ledger": place})


def _folders(now: Snapshot, subject: str, place: str) -> list[str]:
    """Where the workspaces of a ledger are or were, as `host:folder`, the last one last.

    What was said at another address was said of another database, which this one is a copy of.
    """
    known = [*now.events(subject_prefix=subject), *now.pending_events(subject)]
    return [str(event.payload.get("folder")) for event in known if event.payload.get("ledger", place) == place]


def _still_there(where: str, identity: str) -> bool:
    """Whether a workspace of this id is in another folder of this machine."""
    host, _, folder = where.partition(":")
    record = read_json(Path(folder) / "workspace.json") if host == socket.gethostname() else None
    return isinstance(record, Mapping) and record.get("id") == identity
