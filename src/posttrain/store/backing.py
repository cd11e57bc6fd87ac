"""A backup of a ledger and of every artifact that it needs, in a folder, and the way back.

::

    FOLDER/
        backup.json         written last: names the ledger's copy, its digest, and every blob that it needs
        ledger-0a1b2c.db    the ledger at one moment
        blobs/              an artifact store of its own

The ledger is copied first, in one snapshot; then what that copy needs. Whoever does it holds the store's lock shared,
so that nothing is deleted in between; nobody else waits. A backup into a folder that holds one adds what is new, and
the one before stays good until `backup.json` names the next.
"""

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.ports import crashpoint
from posttrain.store.atomic import make_folder, read_json, sync_folder, unwritable, write_json
from posttrain.store.audit import verify_rows
from posttrain.store.blobs import ObjectBlobs, open_blobs
from posttrain.store.database import Database
from posttrain.store.hosts import Ledger
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.sweeping import Marker
from posttrain.store.trees import file_digest, scratch

RECORD, BLOBS = "backup.json", "blobs"
_OURS = ("ledger-", ".copy-")  # what a backup that was killed leaves begins so
_FORMAT = "posttrain.backup/1"


@dataclass(frozen=True, slots=True)
class BackedUp:
    """What a backup holds."""

    folder: Path
    at: float
    ledger: Path
    blobs: tuple[str, ...]
    bytes: int  # of the blobs
    added: int  # blobs that were not there before
    events: int  # sealed
    settings: Mapping[str, Any]  # of workspace.json


def copy_ledger(ledger: Path, kept: Path) -> None:
    """Copy a SQLite ledger as it is at one moment; the copy is whole or not there.

    Raises:
        WorkspaceError: it cannot be copied.
    """
    half = kept.with_suffix(".part")
    try:
        half.unlink(missing_ok=True)
        os.close(os.open(half, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(ledger)) as reader:
            reader.execute("VACUUM INTO ?", (str(half),))
        sync_folder(half)  # the copy, then its name
        half.rename(kept)
        sync_folder(kept.parent)
    except sqlite3.Error as error:
        raise WorkspaceError(f"cannot copy the ledger {ledger} to {kept}: {error}; nothing was changed") from error
    except OSError as error:
        raise unwritable(kept, error) from error


def back_up(ledger: Ledger, source: ObjectBlobs, folder: Path, settings: Mapping[str, Any]) -> BackedUp:
    """Copy a ledger in a SQLite file and what it needs into `folder`, and verify the copy.

    Args:
        settings: of the workspace.

    Raises:
        InputError: the folder holds something else.
        IntegrityError: the ledger's log does not hold, or something that it needs is missing or corrupt.
        WorkspaceError: the folder cannot be written.
    """
    known = read_json(folder / RECORD) if folder.is_dir() else None
    if (
        known is None
        and folder.is_dir()
        and any(not one.name.startswith(_OURS) and one.name != BLOBS for one in folder.iterdir())
    ):
        raise InputError(f"{folder}: must be empty, or hold a backup, got other files; name another folder")
    make_folder(folder)
    seal(ledger)
    target = open_blobs(folder / BLOBS)
    with source.holding():
        fresh = folder / "ledger-new.db"
        fresh.unlink(missing_ok=True)
        copy_ledger(Path(ledger.database.place), fresh)
        named = fresh.with_name(f"ledger-{file_digest(fresh).removeprefix(DIGEST_PREFIX)[:12]}.db")
        fresh.rename(named)
        crashpoint("backup.after_ledger")
        needed, events = _needed(named, source)
        there = {blob.digest for blob in source.stored()} & needed
        added = sum(_copied(source, target, digest, folder) for digest in sorted(there))
    size = sum(_checked(source, target, digest, folder) for digest in sorted(there))
    now = ledger.clock.now()
    record = {
        "format": _FORMAT,
        "at": now,
        "ledger": named.name,
        "digest": file_digest(named),
        "events": events,
        "bytes": size,
        "settings": dict(settings),
        "blobs": sorted(there),
    }
    crashpoint("backup.before_record")
    write_json(folder / RECORD, record)
    for old in folder.glob("ledger-*"):
        if old != named:
            old.unlink()
    return BackedUp(folder, now, named, tuple(sorted(there)), size, added, events, settings)


def read_backup(folder: Path) -> BackedUp:
    """A backup, every byte of which is what it was.

    Raises:
        InputError: there is none.
        IntegrityError: something of it was altered or is gone; names it.
    """
    record = read_json(folder / RECORD)
    if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
        raise InputError(f"{folder}: holds no whole backup (backup.json); name the folder of one")
    ledger, blobs = folder / str(record["ledger"]), open_blobs(folder / BLOBS)
    if not ledger.is_file() or file_digest(ledger) != record["digest"]:
        raise IntegrityError(f"{ledger}: is not the ledger that was backed up; back up again, or take another copy")
    size = 0
    for digest in record["blobs"]:
        try:
            size += blobs.check(digest)
        except (NotFoundError, IntegrityError) as error:
            raise IntegrityError(f"{folder}: {error}; back up again, or take another copy") from error
    return BackedUp(
        folder, record["at"], ledger, tuple(record["blobs"]), size, 0, record["events"], dict(record["settings"])
    )


def fill(found: BackedUp, ledger: Path, blobs: ObjectBlobs) -> None:
    """Bring a backup's ledger and blobs to where a workspace has them."""
    source = open_blobs(found.folder / BLOBS)
    shutil.copyfile(found.ledger, ledger)
    ledger.chmod(0o600)
    for digest in found.blobs:
        _copied(source, blobs, digest, ledger.parent)


def _needed(ledger: Path, source: ObjectBlobs) -> tuple[frozenset[str], int]:
    """What a copy of a ledger needs, and how many events prove it."""
    copy = Ledger(Database(ledger, create=False))
    try:
        report = verify_chain(copy)
        verify_rows(copy)
        return Marker(copy, source).mark().needed, report.sealed
    finally:
        copy.close()


def _copied(source: ObjectBlobs, target: ObjectBlobs, digest: str, folder: Path) -> bool:
    """Copy a blob that is not there yet."""
    if target.has(digest) and target.size(digest) == source.size(digest):
        return False
    with scratch(folder, ".copy-") as work:
        source.fetch(digest, work / "blob")
        target.put_file(work / "blob")
    return True


def _checked(source: ObjectBlobs, target: ObjectBlobs, digest: str, folder: Path) -> int:
    """Read a copy back; one that was damaged since an earlier backup is copied again."""
    try:
        return target.check(digest)
    except IntegrityError:
        target.delete(digest)
        _copied(source, target, digest, folder)
        return target.check(digest)
