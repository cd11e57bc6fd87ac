"""Backup of a ledger, with every artifact that it needs, to a folder, and restoration from the folder.

::

    FOLDER/
        backup.json         written last: the name and digest of the ledger's copy, and every blob that it needs
        ledger-0a1b2c.db    the ledger at one moment
        blobs/              a separate artifact store

        The ledger is copied first, in one snapshot; then the blobs that this copy needs are copied. The backup holds
        the store's lock shared, so no blob is deleted in between and no writer waits. A backup into the folder of an
        earlier backup adds the new blobs; the earlier backup stays valid until `backup.json` names the new ledger.
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
from posttrain.store.garbage import Marker
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.trees import file_digest, scratch

RECORD, BLOBS = "backup.json", "blobs"
_OURS = ("ledger-", ".copy-")  # prefixes of files that a killed backup leaves
_FORMAT = "posttrain.backup/1"


@dataclass(frozen=True, slots=True)
class BackedUp:
    """The contents of a backup."""

    folder: Path
    at: float
    ledger: Path
    blobs: tuple[str, ...]
    bytes: int  # total size of the blobs
    added: int  # number of blobs that this backup added
    events: int  # number of sealed events
    settings: Mapping[str, Any]  # content of workspace.json


def copy_ledger(ledger: Path, kept: Path) -> None:
    """Copy a SQLite ledger at one moment; the copy is complete or does not exist.

    Raises:
        WorkspaceError: the ledger cannot be copied.
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
    """Copy a SQLite ledger, and the blobs that it needs, into `folder`, and verify the copy.

    Args:
        settings: the workspace's settings.

    Raises:
        InputError: the folder contains other files.
        IntegrityError: the ledger's log is not valid, or a blob that the ledger needs is missing or corrupt.
        WorkspaceError: the folder cannot be written.
    """
    known = read_json(folder / RECORD) if folder.is_dir() else None
    if (
        known is None
        and folder.is_dir()
        and any(not one.name.startswith(_OURS) and one.name != BLOBS for one in folder.iterdir())
    ):
        raise InputError(f"{folder}: must be empty, or contain a backup, got other files; name another folder")
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
    """Return a backup after verifying every byte.

    Raises:
        InputError: the folder has no complete backup.
        IntegrityError: the ledger or a blob was altered or deleted. The error names the ledger or the blob.
    """
    record = read_json(folder / RECORD)
    if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
        raise InputError(f"{folder}: contains no complete backup (backup.json); name the folder of a backup")
    ledger, blobs = folder / str(record["ledger"]), open_blobs(folder / BLOBS)
    if not ledger.is_file() or file_digest(ledger) != record["digest"]:
        raise IntegrityError(f"{ledger}: is not the ledger that was backed up; back up again, or use another copy")
    size = 0
    for digest in record["blobs"]:
        try:
            size += blobs.check(digest)
        except (NotFoundError, IntegrityError) as error:
            raise IntegrityError(f"{folder}: {error}; back up again, or use another copy") from error
    return BackedUp(
        folder, record["at"], ledger, tuple(record["blobs"]), size, 0, record["events"], dict(record["settings"])
    )


def fill(found: BackedUp, ledger: Path, blobs: ObjectBlobs) -> None:
    """Copy a backup's ledger and blobs to the ledger file and the artifact store of a workspace."""
    source = open_blobs(found.folder / BLOBS)
    shutil.copyfile(found.ledger, ledger)
    ledger.chmod(0o600)
    for digest in found.blobs:
        _copied(source, blobs, digest, ledger.parent)


def _needed(ledger: Path, source: ObjectBlobs) -> tuple[frozenset[str], int]:
    """Verify a copy of a ledger; return the digests that it needs, and the number of its sealed events."""
    copy = Ledger(Database(ledger, create=False))
    try:
        report = verify_chain(copy)
        verify_rows(copy)
        return Marker(copy, source).mark().needed, report.sealed
    finally:
        copy.close()


def _copied(source: ObjectBlobs, target: ObjectBlobs, digest: str, folder: Path) -> bool:
    """Copy a blob unless the target has it; return whether the blob was copied."""
    if target.has(digest) and target.size(digest) == source.size(digest):
        return False
    with scratch(folder, ".copy-") as work:
        source.fetch(digest, work / "blob")
        target.put_file(work / "blob")
    return True


def _checked(source: ObjectBlobs, target: ObjectBlobs, digest: str, folder: Path) -> int:
    """Verify a copied blob and return its size; copy it again if it was damaged since an earlier backup."""
    try:
        return target.check(digest)
    except IntegrityError:
        target.delete(digest)
        _copied(source, target, digest, folder)
        return target.check(digest)
