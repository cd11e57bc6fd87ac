"""Backing up a workspace, and making a workspace of a backup."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from posttrain.app.workspace import Workspace, find_workspace
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import ConflictError, InputError
from posttrain.domain.lifecycle import is_final
from posttrain.store.atomic import make_folder, sync_folder, write_json
from posttrain.store.audit import verify_rows
from posttrain.store.backing import BackedUp, back_up, fill, read_backup
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import verify_chain
from posttrain.store.work import let_go
from posttrain.workspace.settings import FILE, FOLDER, KEY, OWN_STORE, SETTINGS, VARIABLE


@dataclass(frozen=True, slots=True)
class Restored:
    """What a backup became."""

    root: Path
    found: BackedUp
    runs: int
    under_way: tuple[str, ...]  # runs that had not ended


def backup(folder: Path) -> BackedUp:
    """Back up the nearest workspace.

    Raises:
        InputError: its ledger is in PostgreSQL.
    """
    workspace = Workspace(find_workspace())
    try:
        if workspace.ledger_address:
            raise InputError(
                "backup: the ledger is in PostgreSQL, which pg_dump copies: the database first, then the store "
                "(docs/howto/backup.md says how)"
            )
        blobs = open_blobs(workspace.blobs.url, workspace.lock)
        return back_up(workspace.ledger, blobs, folder.resolve(), workspace.settings)
    finally:
        workspace.close()


def restore(folder: Path) -> Restored:
    """Make a workspace here of a backup: everything, or nothing.

    Raises:
        ConflictError: there is a workspace here.
        InputError: no backup. IntegrityError: it was altered.
    """
    named = os.environ.get(VARIABLE)
    root = (Path(named) if named else Path.cwd() / FOLDER).resolve()
    if root.exists() and any(root.iterdir()):
        raise ConflictError(f"{root}: must not be there yet, got a folder with files; restore elsewhere")
    found = read_backup(folder.resolve())
    half = root.with_name(f"{root.name}.part")  # of a restore that was killed: it begins again
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
    """A ledger that holds, in which nobody drives anything; how many runs it has, and which go on."""
    ledger = Ledger(Database(place, create=False))
    try:
        verify_chain(ledger)
        verify_rows(ledger)
        let_go(ledger.database)
        with ledger.snapshot() as now:
            projects = now.projects()
        every = [run for project in projects for run in Ledger(ledger.database, project=project).runs()]
        return len(every), tuple(run.id for run in every if not is_final("run", run.state))
    finally:
        ledger.close()
