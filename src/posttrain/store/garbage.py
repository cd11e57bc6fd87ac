"""The sweep of the artifact store, which marks the needed blobs and deletes old unmarked blobs.

A process that records blobs holds the store's lock shared from the put (or the check that a blob exists) to the record
(`store.atomic`). A sweep takes the lock alone for one batch at a time. In each batch, the sweep marks again if anything
was recorded since the last marks, checks the age of each blob again, records the deletions in the ledger, and deletes.
Therefore a blob that is recorded under the lock is never lost, whatever the grace period; a blob that is recorded
later, as after an upload, is safe within the grace period. A sweep that is killed at any point leaves blobs that the
next sweep deletes.

A blob is needed if a row, or a needed document or tree, names it. In doubt a blob is kept: every digest in any column
of any project's rows counts, with these exceptions: the table `artifacts` (which lists all blobs that exist),
checkpoints from which attempts of succeeded or rejected runs resumed, and digests that only erased versions name.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Text, delete, exists, func, not_, select, type_coerce

from posttrain.domain.errors import IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.kinds import REPORT
from posttrain.domain.lifecycle import RunState
from posttrain.domain.ports import BlobStore, crashpoint
from posttrain.domain.records import MANIFEST
from posttrain.store.atomic import StoreLock
from posttrain.store.blobs import ObjectBlobs, StoredBlob
from posttrain.store.database import schema_version
from posttrain.store.journal import ERASED, REMOVED, TABLES, Author, Change, Journal, new_request
from posttrain.store.ledger import Ledger
from posttrain.store.schema import (
    SCHEMA_VERSION,
    artifacts,
    assets,
    attempts,
    channels,
    edges,
    events,
    requests,
    runs,
    stages,
)
from posttrain.store.trees import tree_listing
from posttrain.store.writer import POLICY_SET

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_AT_ONCE = 1000
_LOOKED_INTO = 16 << 20  # maximum bytes of a blob of unknown kind that is searched for digests
_OF_VERSIONS = (assets.name, edges.name)
_DOCUMENTS = (MANIFEST, "record")  # kinds of artifacts that name other artifacts
_NO_BLOBS = ("cache_key", "secret_digest")  # columns with digests of values that are in no store
ENDED = (RunState.SUCCEEDED, RunState.REJECTED)  # states of runs that cannot be retried
SWEPT = "gc.swept"
_DONE = "done"  # the state of an answered request
_BATCH = 200
PATIENCE = 600.0  # seconds to wait for a process that stores a large model


@dataclass(frozen=True, slots=True)
class Marks:
    """The needed digests at one moment."""

    needed: frozenset[str]
    erased: Mapping[str, float]  # digest that only erased versions name → time of the erasure
    moment: tuple[int, int]  # (newest event, number of events); every change of rows is an event


@dataclass
class _Roots:
    """The digests that the rows contain."""

    named: set[str] = field(default_factory=set)
    erased: dict[str, float] = field(default_factory=dict)
    trees: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # digests whose kind a row records
    moment: tuple[int, int] = (0, 0)


class Marker:
    """Marks the needed digests; repeated calls read the content of each blob once."""

    def __init__(self, ledger: Ledger, blobs: BlobStore) -> None:
        self._ledger, self._blobs = ledger, blobs
        self._inside: dict[str, frozenset[str]] = {}

    def mark(self) -> Marks:
        """Return the needed digests.

        Raises:
            IntegrityError: a needed tree or document is missing or corrupt, so the digests in it are unknown.
            WorkspaceError: the ledger is of a newer version of Posttrain, whose tables may name more digests.
        """
        with self._ledger.database.read(across="garbage of every project") as connection:
            roots = _roots(connection)
        needed = self._closure(roots, roots.named, strict=True)
        gone: dict[str, float] = {}
        for digest, at in roots.erased.items():
            for one in self._closure(roots, {digest}, strict=False) - needed:
                gone[one] = max(at, gone.get(one, 0.0))
        return Marks(frozenset(needed), gone, roots.moment)

    def moment(self) -> tuple[int, int]:
        """Return the current moment, which differs from the moment of earlier marks if anything has changed since."""
        with self._ledger.database.read(across="garbage of every project") as connection:
            return _moment(connection)

    def _closure(self, roots: _Roots, begin: Iterable[str], *, strict: bool) -> set[str]:
        found, todo = set(begin), list(begin)
        while todo:
            digest = todo.pop()
            if digest not in self._inside:
                try:
                    self._inside[digest] = frozenset(self._named_in(digest, roots))
                except (NotFoundError, IntegrityError) as error:
                    if strict:
                        raise IntegrityError(
                            f"{error}; gc must read it to find the artifacts that it needs: restore it "
                            "from a backup, then run posttrain gc again"
                        ) from error
                    continue
            todo += self._inside[digest] - found
            found |= self._inside[digest]
        return found

    def _named_in(self, digest: str, roots: _Roots) -> Iterator[str]:
        if digest in roots.trees:
            listing = tree_listing(self._blobs, digest)
            yield from (file.digest for file in listing.values())
            self._inside.update(dict.fromkeys((file.digest for file in listing.values()), frozenset()))
        elif digest in roots.documents:
            yield from _DIGEST.findall(self._blobs.get(digest).decode("utf-8", "replace"))
        elif digest not in roots.known and self._blobs.has(digest) and self._blobs.size(digest) <= _LOOKED_INTO:
            data = self._blobs.get(digest)
            yield from _DIGEST.findall(data.decode("utf-8", "replace")) if data[:1] == b"{" else ()


def erased_versions(connection: Connection, project: str = "") -> dict[tuple[str, str], float]:
    """Return the times of erasure of asset versions, in one project or all, by (project, `dataset:NAME@VERSION`)."""
    told = select(events.c.project, events.c.subject, events.c.at).where(events.c.kind == ERASED)
    told = told.where(events.c.project == project) if project else told
    return {
        (row.project, row.subject): row.at for row in connection.execute(told.where(events.c.subject.contains("@")))
    }


def ended_runs(ledger: Ledger, before: float) -> list[str]:
    """Return the runs of every project that no retry can restart and that ended before this moment."""
    query = select(runs.c.id).where(runs.c.state.in_(ENDED), runs.c.finished_at < before).order_by(runs.c.id)
    with ledger.database.read(across="garbage of every project") as connection:
        return list(connection.execute(query).scalars())


def adoptable(ledger: Ledger) -> frozenset[str]:
    """Return the names of attempts, of every project, whose staged files a driver may still adopt.

    These are the last attempts of the stages of runs that can be continued: each of them may be the one that a retry
    resumes, and an attempt that has a successor was adopted before its successor began.
    """
    later = attempts.alias()
    newer = exists().where(
        later.c.run_id == attempts.c.run_id, later.c.stage == attempts.c.stage, later.c.number > attempts.c.number
    )
    query = select(attempts.c.name).join(runs, runs.c.id == attempts.c.run_id)
    with ledger.database.read(across="garbage of every project") as connection:
        return frozenset(connection.execute(query.where(runs.c.state.not_in(ENDED), not_(newer))).scalars())


def _moment(connection: Connection) -> tuple[int, int]:
    newest, count = connection.execute(select(func.max(events.c.id), func.count())).one()
    return int(newest or 0), int(count)


def _roots(connection: Connection) -> _Roots:
    schema = schema_version(connection)
    if schema is not None and schema > SCHEMA_VERSION:
        raise WorkspaceError(
            f"the ledger has schema {schema}, and this Posttrain ({SCHEMA_VERSION}) cannot read all of its tables; "
            "run gc with the newer version of Posttrain"
        )
    roots = _Roots(moment=_moment(connection))
    erased = erased_versions(connection)
    ended = set(connection.execute(select(runs.c.id).where(runs.c.state.in_(ENDED))).scalars())
    for name, spec in TABLES.items():
        if name == artifacts.name:
            continue
        columns = [type_coerce(one, Text).label(one.name) for one in spec.table.columns if one.name not in _NO_BLOBS]
        for row in connection.execute(select(*columns).execution_options(yield_per=_AT_ONCE)).mappings():
            named = set(_DIGEST.findall(" ".join(str(value) for value in row.values() if value is not None)))
            gone = erased.get((row["project"], _version_of(name, row))) if name in _OF_VERSIONS else None
            if gone is not None:
                roots.erased |= dict.fromkeys(named, gone)
            elif not (name == attempts.name and row["run_id"] in ended):
                roots.named |= named
    _say_what_they_are(connection, roots)
    return roots


def _version_of(table: str, row: Mapping[Any, Any]) -> str:
    """Return the asset version that a row describes; for an edge, its consumer or, without a consumer, its producer."""
    if table == assets.name:
        return f"{row['kind']}:{row['name']}@{row['version']}"
    return str(row["producer"] if not row["consumer"] else row["consumer"])


def _say_what_they_are(connection: Connection, roots: _Roots) -> None:
    query = select(artifacts.c.digest, artifacts.c.form, artifacts.c["class"])
    for digest, form, kind in connection.execute(query.execution_options(yield_per=_AT_ONCE)):
        roots.known.add(digest)
        if form == "tree":
            roots.trees.add(digest)
        elif kind in _DOCUMENTS:
            roots.documents.add(digest)
    roots.documents |= set(connection.execute(select(runs.c.manifest_digest)).scalars())
    roots.documents |= set(
        connection.execute(select(channels.c.policy).where(channels.c.policy.is_not(None))).scalars()
    )
    for outputs in connection.execute(select(stages.c.outputs)).scalars():
        report = outputs.get(REPORT) if isinstance(outputs, Mapping) else None
        if isinstance(report, Mapping):
            roots.documents.add(str(report.get("digest")))
    told = select(type_coerce(events.c.audited, Text)).where(events.c.kind == POLICY_SET)
    for audited in connection.execute(told).scalars():  # includes replaced policies
        rows = [row[3] for row in json.loads(audited).get("rows", ()) if row[1] == channels.name]
        policies = {str(row["policy"]) for row in rows if row.get("policy")}
        roots.named |= policies
        roots.documents |= policies


@dataclass(frozen=True, slots=True)
class SweptBlobs:
    """The blobs that a sweep found and deleted."""

    deleted: int = 0
    deleted_bytes: int = 0
    needed: int = 0
    needed_bytes: int = 0
    young: int = 0  # not needed, but too young to delete
    young_bytes: int = 0


def sweep(
    ledger: Ledger, blobs: ObjectBlobs, lock: StoreLock, actor: str, *, older_than: float, dry_run: bool = False
) -> SweptBlobs:
    """Delete every blob that no row of any project needs and that is older than `older_than` seconds.

    Args:
        lock: the store's lock, which every process holds while it records stored blobs.
        dry_run: delete nothing, and return what a sweep would delete.

    Raises:
        IntegrityError: the needed blobs cannot be determined, because a tree or a document is missing or corrupt.
        WorkspaceError: the ledger is of a newer version of Posttrain.
        DeadlineError: a process stored artifacts for longer than ten minutes; earlier batches stay deleted.
    """
    marker = Marker(ledger, blobs)
    before = time.time() - older_than  # by the store's clock, not the ledger's
    found = list(blobs.stored())  # listed first, so that later blobs are not considered
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
        done = replace(
            done, deleted=done.deleted + len(gone), deleted_bytes=done.deleted_bytes + sum(blob.bytes for blob in gone)
        )
    return done


def forget_answers(ledger: Ledger, before: float, *, dry_run: bool = False) -> int:
    """Delete the answers to requests sent before this moment, which no client repeats; return the number of answers."""
    old = (requests.c.state == _DONE) & (requests.c.at < before)
    if dry_run:
        with ledger.database.read(across="garbage of every project") as connection:
            return int(connection.execute(select(func.count()).select_from(requests).where(old)).scalar_one())
    with ledger.database.write(across="garbage of every project") as connection:
        return connection.execute(delete(requests).where(old)).rowcount


def _kept(modified: float, digest: str, marks: Marks, before: float) -> bool:
    """Return whether a blob is too young to delete, or was put again after its erasure and may be in use."""
    return modified >= min(before, marks.erased.get(digest, before))


def _still(blobs: ObjectBlobs, blob: StoredBlob, marks: Marks, before: float) -> bool:
    """Return whether a blob may still be deleted, checked under the lock."""
    try:
        modified = blobs.modified(blob.digest)
    except NotFoundError:  # another sweep has deleted it
        return False
    return blob.digest not in marks.needed and not _kept(modified, blob.digest, marks, before)


def _tell(ledger: Ledger, actor: str, gone: Sequence[StoredBlob]) -> None:
    """Remove blobs from `artifacts` and record their deletion, before the blobs are deleted."""
    if not gone:
        return
    sizes = {blob.digest: blob.bytes for blob in gone}
    with ledger.database.write(across="garbage of every project") as connection:
        author = Author(actor, new_request(ledger.entropy), ledger.auth, ledger.entropy)
        listed = _unlist(connection, sizes)
        facts = {"blobs": len(gone), "bytes": sum(sizes.values())}
        for project in sorted({*listed, ledger.project}):
            journal = Journal(connection, author, ledger.clock, project)
            journal.tell(SWEPT, "store", *listed.get(project, ()), facts=facts if project == ledger.project else {})
            journal.flush()


def _unlist(connection: Connection, digests: dict[str, int]) -> dict[str, list[Change]]:
    """Delete the rows of these digests in `artifacts`; return the changes by project."""
    here = artifacts.c.digest.in_(sorted(digests))
    rows = connection.execute(select(artifacts.c.project, artifacts.c.digest).where(here)).mappings().all()
    connection.execute(delete(artifacts).where(here))
    found: dict[str, list[Change]] = {}
    for row in rows:
        found.setdefault(row["project"], []).append(Change(REMOVED, artifacts.name, dict(row), {}))
    return found


def _batches(whole: Sequence[StoredBlob]) -> Iterator[Sequence[StoredBlob]]:
    yield from (whole[place : place + _BATCH] for place in range(0, len(whole), _BATCH))
