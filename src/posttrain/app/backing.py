"""Backing up a workspace, and making a workspace of a backup."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from posttrain.app.workspace import Workspace, find_workspace
from posttrain.data.catalog import inspect_dataset
from posttrain.domain.errors import ConflictError, InputError, NotFoundError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.domain.runspec import parse_run_spec
from posttrain.foreign.settings import Draft as Draft
from posttrain.foreign.settings import read_settings
from posttrain.foreign.trl import from_trl
from posttrain.foreign.verl import from_verl
from posttrain.store.atomic import make_folder, sync_folder, unwritable, write_json
from posttrain.store.audit import verify_rows
from posttrain.store.backing import BackedUp, back_up, fill, read_backup
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.hosts import Ledger
from posttrain.store.sealer import verify_chain
from posttrain.store.work import let_go
from posttrain.workspace.settings import FILE, FOLDER, KEY, OWN_STORE, SETTINGS, VARIABLE

RUN_FILE = "run.yaml"


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
        every = [run for project in ledger.projects() for run in Ledger(ledger.database, project=project).runs()]
        return len(every), tuple(run.id for run in every if not is_final("run", run.state))
    finally:
        ledger.close()


class Trainer(StrEnum):
    """Whose file it is."""

    TRL = "trl"
    VERL = "verl"


_READERS = {Trainer.TRL: from_trl, Trainer.VERL: from_verl}


def adopt(trainer: Trainer, source: Path, target: Path) -> Draft:
    """Write a run file that asks for the training which `source` asks `trainer` for; what became of its settings.

    Nothing of the source is executed.

    Args:
        source: a TRL script, configuration or command; verl's YAML or a script with its overrides.
        target: the run file; must not be there.

    Raises:
        InputError: the source cannot be read, has no counterpart here, or something is at `target`.
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
    parse_run_spec(draft.run, str(target))  # whatever it says, it is a run file
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(draft.text())
    except FileExistsError as error:
        raise InputError(f"{target}: is there already; move it away, or go on with posttrain plan {target}") from error
    except OSError as error:
        raise unwritable(target, error) from error
    return draft


def _rows(draft: Draft, folder: Path) -> tuple[str, int | None]:
    """Where the training data lie, seen from the run file, and how many rows they have; None: not here."""
    named = str(draft.run["data"]["train"])
    path = Path(named).expanduser()
    if named.startswith("dataset:") or not path.exists():
        return named, None
    try:
        rows = int(inspect_dataset(path)["rows"])
    except (InputError, NotFoundError):  # `plan` says what is wrong with them
        return named, None
    return _seen_from(folder, path), rows


def _seen_from(folder: Path, path: Path) -> str:
    """A path as a run file in `folder` writes it."""
    relative = os.path.relpath(path.absolute(), folder)
    return relative if relative.startswith(".") else f"./{relative}"
