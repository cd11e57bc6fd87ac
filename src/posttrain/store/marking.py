"""Which blobs are needed: whatever a row names, what those documents and trees name, and so on.

It errs on the side of keeping. Every digest in any column of any project's rows counts, with these exceptions: what
`artifacts` lists (it lists what there is), checkpoints that attempts of runs resumed from which have succeeded or were
rejected, and what only versions name that were erased.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Text, func, select, type_coerce

from posttrain.domain.contracts import REPORT
from posttrain.domain.edges import MANIFEST
from posttrain.domain.errors import IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.lifecycle import RunState
from posttrain.domain.ports import BlobStore
from posttrain.store.audited import TABLES
from posttrain.store.database import schema_version
from posttrain.store.envelopes import ERASED
from posttrain.store.ledger import Ledger
from posttrain.store.releasing import POLICY_SET
from posttrain.store.schema import SCHEMA_VERSION, artifacts, assets, attempts, channels, edges, events, runs, stages
from posttrain.store.trees import tree_listing

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BATCH = 1000
_LOOKED_INTO = 16 << 20  # bytes of a blob of which no row says what it is
_OF_VERSIONS = (assets.name, edges.name)
_DOCUMENTS = (MANIFEST, "record")  # classes of artifacts that name others
_NO_BLOBS = ("cache_key", "secret_digest")  # digests of what lies in no store
ENDED = (RunState.SUCCEEDED, RunState.REJECTED)  # which no retry brings back


@dataclass(frozen=True, slots=True)
class Marks:
    """What is needed, at one moment."""

    needed: frozenset[str]
    erased: Mapping[str, float]  # what only erased versions name → when they were erased
    moment: tuple[int, int]  # newest event, and how many there are: every change of rows is an event


@dataclass
class _Roots:
    """What the rows say."""

    named: set[str] = field(default_factory=set)
    erased: dict[str, float] = field(default_factory=dict)
    trees: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # of which a row says what it is
    moment: tuple[int, int] = (0, 0)


class Marker:
    """Marks what is needed, again and again: what stands in a blob is read once."""

    def __init__(self, ledger: Ledger, blobs: BlobStore) -> None:
        self._ledger, self._blobs = ledger, blobs
        self._inside: dict[str, frozenset[str]] = {}

    def mark(self) -> Marks:
        """What is needed now.

        Raises:
            IntegrityError: a tree or a document that is needed is missing or corrupt: nobody can say what it names.
            WorkspaceError: a newer release upgraded the ledger, whose tables may name more.
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
        """Whether anything was changed since some marks were made: their moment is another."""
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
                            f"{error}; while it cannot be read, nobody can say which artifacts it needs: restore it "
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
    """Versions of assets whose words were erased, of one project or all: (project, `dataset:NAME@VERSION`) → when."""
    told = select(events.c.project, events.c.subject, events.c.at).where(events.c.kind == ERASED)
    told = told.where(events.c.project == project) if project else told
    found = connection.execute(told.where(events.c.subject.contains("@")))
    return {(row.project, row.subject): row.at for row in found}


def ended_runs(ledger: Ledger, before: float) -> list[str]:
    """Runs of every project that no retry brings back, and that ended before this moment."""
    query = select(runs.c.id).where(runs.c.state.in_(ENDED), runs.c.finished_at < before).order_by(runs.c.id)
    with ledger.database.read(across="garbage of every project") as connection:
        return list(connection.execute(query).scalars())


def _moment(connection: Connection) -> tuple[int, int]:
    newest, count = connection.execute(select(func.max(events.c.id), func.count())).one()
    return int(newest or 0), int(count)


def _roots(connection: Connection) -> _Roots:
    schema = schema_version(connection)
    if schema is not None and schema > SCHEMA_VERSION:
        raise WorkspaceError(
            f"the ledger has schema {schema}, and this Posttrain ({SCHEMA_VERSION}) does not know all that its tables "
            "name; run gc with the release that upgraded it"
        )
    roots = _Roots(moment=_moment(connection))
    erased = erased_versions(connection)
    ended = set(connection.execute(select(runs.c.id).where(runs.c.state.in_(ENDED))).scalars())
    for name, spec in TABLES.items():
        if name == artifacts.name:
            continue
        columns = [type_coerce(one, Text).label(one.name) for one in spec.table.columns if one.name not in _NO_BLOBS]
        for row in connection.execute(select(*columns).execution_options(yield_per=_BATCH)).mappings():
            named = set(_DIGEST.findall(" ".join(str(value) for value in row.values() if value is not None)))
            gone = erased.get((row["project"], _version_of(name, row))) if name in _OF_VERSIONS else None
            if gone is not None:
                roots.erased |= dict.fromkeys(named, gone)
            elif not (name == attempts.name and row["run_id"] in ended):
                roots.named |= named
    _say_what_they_are(connection, roots)
    return roots


def _version_of(table: str, row: Mapping[Any, Any]) -> str:
    """The version of an asset that a row is of, in as far as nobody used it."""
    if table == assets.name:
        return f"{row['kind']}:{row['name']}@{row['version']}"
    return str(row["producer"] if not row["consumer"] else row["consumer"])


def _say_what_they_are(connection: Connection, roots: _Roots) -> None:
    query = select(artifacts.c.digest, artifacts.c.form, artifacts.c["class"])
    for digest, form, kind in connection.execute(query.execution_options(yield_per=_BATCH)):
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
    for audited in connection.execute(told).scalars():  # also policies that another took the place of
        rows = [row[3] for row in json.loads(audited).get("rows", ()) if row[1] == channels.name]
        policies = {str(row["policy"]) for row in rows if row.get("policy")}
        roots.named |= policies
        roots.documents |= policies
