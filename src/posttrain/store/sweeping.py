"""Deleting from the artifact store what nobody needs: mark, and sweep what is not marked and has lain there for long.

Whoever records what they put, or found, holds the store's lock shared from the one to the other (`store.holding`). A
sweep takes it alone for one batch at a time, marks again if anything was told since, looks at the age of each blob
again, tells in the ledger what it is about to delete, and deletes. So nothing is lost that is recorded in the same
breath, whatever the grace; and nothing that is recorded later, as after an upload, within the grace. Killed anywhere it
leaves blobs that the next sweep deletes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, delete, func, select

from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import NotFoundError
from posttrain.store.audited import REMOVED, Change
from posttrain.store.blobs import ObjectBlobs, StoredBlob
from posttrain.store.holding import StoreLock
from posttrain.store.journal import Author, Journal, new_request
from posttrain.store.ledger import Ledger
from posttrain.store.marking import Marker, Marks
from posttrain.store.schema import artifacts, requests

SWEPT = "gc.swept"
_DONE = "done"  # of a request that was answered
_BATCH = 200
PATIENCE = 600.0  # seconds to wait for somebody who stores a large model


@dataclass(frozen=True, slots=True)
class SweptBlobs:
    """What a sweep found and deleted."""

    deleted: int = 0
    deleted_bytes: int = 0
    needed: int = 0
    needed_bytes: int = 0
    young: int = 0  # not needed, but not old enough either
    young_bytes: int = 0


def sweep(
    ledger: Ledger, blobs: ObjectBlobs, lock: StoreLock, actor: str, *, older_than: float, dry_run: bool = False
) -> SweptBlobs:
    """Delete every blob that no row of any project needs and that is older than `older_than` seconds.

    Args:
        lock: of the store; everybody who records what lies in it holds it.
        dry_run: delete nothing, and say what would be.

    Raises:
        IntegrityError: what is needed cannot be told, since a tree or a document is missing or corrupt.
        WorkspaceError: a newer release upgraded the ledger.
        DeadlineError: somebody stored artifacts for longer than ten minutes; what was deleted so far is gone.
    """
    marker = Marker(ledger, blobs)
    before = time.time() - older_than  # as the store counts, whatever clock the ledger has
    found = list(blobs.stored())  # first: what comes later is not looked at
    marks = marker.mark()
    done, old = SweptBlobs(), []
    for blob in found:
        if blob.digest in marks.needed:
            done = replace(done, needed=done.needed + 1, needed_bytes=done.needed_bytes + blob.bytes)
        elif _kept(blob.modified, blob.digest, marks, before):
            done = replace(done, young=done.young + 1, young_bytes=done.young_bytes + blob.bytes)
        else:
            old.append(blob)
    for batch in _batches(old):
        gone: Sequence[StoredBlob] = batch
        if not dry_run:
            with lock.alone(PATIENCE):
                if marker.moment() != marks.moment:
                    marks = marker.mark()
                gone = [blob for blob in batch if _still(blobs, blob, marks, before)]
                _tell(ledger, actor, gone)
                for blob in gone:
                    crashpoint("gc.before_delete")
                    blobs.delete(blob.digest)
        size = done.deleted_bytes + sum(blob.bytes for blob in gone)
        done = replace(done, deleted=done.deleted + len(gone), deleted_bytes=size)
    return done


def forget_answers(ledger: Ledger, before: float, *, dry_run: bool = False) -> int:
    """Delete answers to requests of before this moment, which nobody repeats any more; how many they are."""
    old = (requests.c.state == _DONE) & (requests.c.at < before)
    if dry_run:
        with ledger.database.read(across="garbage of every project") as connection:
            return int(connection.execute(select(func.count()).select_from(requests).where(old)).scalar_one())
    with ledger.database.write(across="garbage of every project") as connection:
        return connection.execute(delete(requests).where(old)).rowcount


def _kept(modified: float, digest: str, marks: Marks, before: float) -> bool:
    """Whether it is too young: what was put again after it was erased is somebody's again."""
    return modified >= min(before, marks.erased.get(digest, before))


def _still(blobs: ObjectBlobs, blob: StoredBlob, marks: Marks, before: float) -> bool:
    """Whether it may be deleted, looked at under the lock."""
    try:
        modified = blobs.modified(blob.digest)
    except NotFoundError:  # another sweep was faster
        return False
    return blob.digest not in marks.needed and not _kept(modified, blob.digest, marks, before)


def _tell(ledger: Ledger, actor: str, gone: Sequence[StoredBlob]) -> None:
    """Take them off the list of what there is, and say so, before they are gone."""
    if not gone:
        return
    sizes = {blob.digest: blob.bytes for blob in gone}
    with ledger.database.write(across="garbage of every project") as connection:
        author = Author(actor, new_request(ledger.entropy), ledger.auth, ledger.entropy)
        listed = _unlist(connection, sizes)
        facts = {"blobs": len(gone), "bytes": sum(sizes.values())}
        for project in sorted({*listed, ledger.project}):
            journal = Journal(connection, author, ledger.clock, project)
            own = facts if project == ledger.project else {}
            journal.tell(SWEPT, "store", *listed.get(project, ()), facts=own)
            journal.flush()


def _unlist(connection: Connection, digests: dict[str, int]) -> dict[str, list[Change]]:
    """Delete their rows of `artifacts`; the changes by project."""
    here = artifacts.c.digest.in_(sorted(digests))
    rows = connection.execute(select(artifacts.c.project, artifacts.c.digest).where(here)).mappings().all()
    connection.execute(delete(artifacts).where(here))
    found: dict[str, list[Change]] = {}
    for row in rows:
        found.setdefault(row["project"], []).append(Change(REMOVED, artifacts.name, dict(row), {}))
    return found


def _batches(whole: Sequence[StoredBlob]) -> Iterator[Sequence[StoredBlob]]:
    for place in range(0, len(whole), _BATCH):
        yield whole[place : place + _BATCH]
