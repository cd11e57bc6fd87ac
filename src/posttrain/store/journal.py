"""The journal of a transaction: its events, the row changes that they record, and the objects it schedules.

Events are buffered, and written together before the transaction commits. An event consists of an envelope that is kept
permanently, and words that may be erased. The envelope contains states, numbers, digests and pseudonymous ids. Free
text and personal data are the event's *words*: a separate payload, which the envelope names by a salted digest. A
change of the envelope or the words is detected, and an erased payload cannot be guessed from its digest. An event's
leaf is the RFC 6962 hash of its canonical envelope. The sealer assigns the sequence number later.

The event log records the columns of every table whose rows it can rebuild. A change of rows is recorded as
`[sign, table, key, values]`: `+` a new row (columns with their empty value are left out), `~` changed columns, `-` a
deleted row. Columns of free text are recorded in the event's words instead, in the same order. The first events of a
log record the initial rows of a ledger.

A transaction that creates work for an object also schedules (wakes) the object in the work queue.
"""

import functools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    String,
    Table,
    TextClause,
    bindparam,
    delete,
    exc,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.domain.ids import DRIVER
from posttrain.domain.ports import Clock
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store import schema
from posttrain.store.schema import JsonText, keyed, principals, projects, watches, work
from posttrain.store.scope import Scope
from posttrain.store.trees import leaf_hash

RUN, STAGE, SWEEP = "run", "stage", "sweep"  # kinds of work
_INTO = "INSERT INTO work (project, kind, object, due_at, priority, wanted_version, failures, error, traceback) "
_THERE = (
    " ON CONFLICT (project, kind, object) DO UPDATE SET wanted_version = work.wanted_version + 1, "
    "due_at = CASE WHEN work.due_at < excluded.due_at THEN work.due_at ELSE excluded.due_at END"
)
_WAKE = text(f"{_INTO}VALUES (:project, :what, :object, :due, 0, 1, 0, '', ''){_THERE}")
CREATED = "ledger.created"  # the first event of a log
ERASED = "words.erased"  # the event of an erasure; its field `erased` has the digests of the deleted payloads
RETAINED = "run"  # retention class of words that are kept as long as their run, asset or channel
SALT = 16  # bytes
FIELDS = ("project", "kind", "subject", "principal", "auth", "request", "at", "audited", "words")
_EXACT = 2**53  # JSON readers may read larger whole numbers inexactly
ADDED, CHANGED, REMOVED = "+", "~", "-"
Entropy = Callable[[int], bytes]  # number → random bytes
_PRINCIPAL_BYTES, _REQUEST_BYTES = 8, 16
# Another process may have erased the name of a cached principal. In this rare case no row has the id with the name, and
# the NOT NULL column rejects the event, so no extra statement is needed.
_STILL = "(SELECT id FROM principals WHERE id = {0}author AND name = coalesce({0}called, name))"
_ENVELOPE = "project, kind, subject, principal, auth, request, at, audited, words, leaf"
_BESIDE = "retention, salt, body, woken"  # the words of an event, and the run that it wakes
# An event, its words, its row for the sealer and the run that it wakes are one statement instead of four. SQLite cannot
# write to several tables in one statement, so a trigger in each connection writes them.
_GIVEN = "{0}project, {0}kind, {0}subject, " + _STILL + ", {0}auth, {0}request, {0}at, {0}audited, {0}words, {0}leaf"
_NAMES = _ENVELOPE.replace("principal", "author, called") + f", {_BESIDE}"


def waking(project: str, run: str) -> str:
    """Return SQL that wakes a run as a part of a larger statement; it wakes no run if `run` is NULL.

    Args:
        project, run: SQL expressions.
    """
    return f"{_INTO}SELECT {project}, '{RUN}', {run}, 0.0, 0, 1, 0, '', '' WHERE {run} IS NOT NULL{_THERE}"


def wake(connection: Connection, project: str, kind: str, names: Collection[str], due: float = 0.0) -> None:
    """Schedule objects to be observed from `due` (seconds since the epoch) on, in the transaction of `connection`."""
    if names:
        connection.execute(
            _WAKE, [{"project": project, "what": kind, "object": name, "due": due} for name in sorted(names)]
        )


def settle_at(connection: Connection, project: str, run_id: str, host: str | None) -> None:
    """Restrict a run to the drivers of the host that has its job; None: drivers of any host may observe it."""
    connection.execute(update(work).where(*keyed(work, project=project, kind=RUN, object=run_id)).values(affinity=host))


def settle(connection: Connection, project: str, names: Collection[str]) -> None:
    """Delete the queue rows of these runs and their stages, which end in the transaction of `connection`."""
    for name in sorted(names):
        connection.execute(delete(work).where(work.c.project == project, _with_stages(name)))
        connection.execute(Scope(project).delete(watches).where(watches.c.run_id == name))


def revive(connection: Connection, project: str, run_id: str) -> None:
    """Schedule a run, and the stages of the run that were set aside or wait for another try."""
    values = {"dead_at": None, "due_at": 0.0, "failures": 0, "failed_since": None}
    connection.execute(update(work).where(work.c.project == project, _with_stages(run_id)).values(values))


def _with_stages(run_id: str) -> ColumnElement[bool]:
    return or_(work.c.object == run_id, func.substr(work.c.object, 1, len(run_id) + 1) == f"{run_id}/")


TRIGGER = (
    f"CREATE TEMP VIEW telling AS SELECT {', '.join(f'NULL AS {name}' for name in _NAMES.split(', '))}",
    "CREATE TEMP TRIGGER telling_events INSTEAD OF INSERT ON telling BEGIN "
    f"INSERT INTO events ({_ENVELOPE}) VALUES ({_GIVEN.format('NEW.')}); "
    "INSERT INTO unsealed (event) VALUES (last_insert_rowid()); "  # the key is the event's, so the rowid stays the same
    "INSERT INTO payloads (event, retention, salt, body) "
    "SELECT last_insert_rowid(), NEW.retention, NEW.salt, NEW.body WHERE NEW.words IS NOT NULL; "
    f"{waking('NEW.project', 'NEW.woken')}; END",
)


_ROWS = f"({_NAMES}) VALUES ({', '.join(f':{name}' for name in _NAMES.split(', '))})"


_TELLING = {
    "sqlite": f"INSERT INTO telling {_ROWS}",
    "postgresql": f"WITH told AS (INSERT INTO events ({_ENVELOPE}) VALUES ({_GIVEN.format(':')}) RETURNING id), "
    "said AS (INSERT INTO payloads (event, retention, salt, body) "
    "SELECT id, :retention, :salt, :body FROM told WHERE :words IS NOT NULL), "
    f"waiting AS (INSERT INTO unsealed (event) SELECT id FROM told) {waking(':project', 'CAST(:woken AS VARCHAR)')}",
}


@functools.cache
def _telling(dialect: str) -> TextClause:
    """Return the statement that writes one event with its words, its row for the sealer and its wake-up."""
    return text(_TELLING[dialect]).bindparams(
        bindparam("audited", type_=JsonText),
        bindparam("body", type_=JsonText),
        bindparam("words", type_=String),
        bindparam("salt", type_=LargeBinary),
        bindparam("leaf", type_=LargeBinary),
        bindparam("retention", type_=String),
    )


@dataclass(frozen=True, slots=True)
class Payload:
    """The words of an event."""

    retention: str
    salt: bytes
    body: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The digest in the envelope: SHA-256 of the salt and the canonical `[retention, body]`."""
        return digest_bytes(self.salt + canonical_json([self.retention, self.body]))


def envelope_leaf(envelope: Mapping[str, Any]) -> bytes:
    """Return the leaf of an envelope: a mapping of `FIELDS`.

    Raises:
        InputError: the envelope contains a value that canonical JSON cannot hold.
    """
    return leaf_hash(canonical_json({name: envelope[name] for name in FIELDS}))


def auditable(value: Any) -> Any:
    """Return `value` for canonical JSON: numbers outside its range become strings, tuples become lists."""
    if isinstance(value, Mapping):
        return {str(key): auditable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [auditable(item) for item in value]
    # RFC 8785 writes a whole float beyond 2^53 like an integer, but readers may not parse it as one
    inexact = isinstance(value, (int, float)) and not abs(value) < _EXACT  # true for NaN
    return str(value) if inexact else value


@dataclass(frozen=True)
class AuditColumns:
    """The rules by which events record one table."""

    table: Table
    title: str  # format of a row's name, with the row's columns
    words: frozenset[str] = frozenset()  # free text and personal data

    @functools.cached_property
    def key(self) -> tuple[str, ...]:
        """The columns of the primary key."""
        return tuple(column.name for column in self.table.primary_key)

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """All columns, which events record."""
        return tuple(column.name for column in self.table.columns)

    def name(self, row: Mapping[str, Any]) -> str:
        """Return the human-readable name of a row."""
        return self.title.format(**row)

    @functools.cached_property
    def empty(self) -> Mapping[str, Any]:
        """The empty value of every column, which a new row's event leaves out."""
        return {name: _empty(self.table, name) for name in self.columns}


def _empty(table: Table, name: str) -> Any:
    column = table.c[name]
    if column.nullable:
        return None
    if isinstance(column.type, schema.JsonText):
        return {}
    return "" if column.type.python_type is str else 0


_SAID = frozenset({"message", "next_action"})


TABLES: Mapping[str, AuditColumns] = {
    str(one.table.name): one
    for one in (
        AuditColumns(schema.projects, "project {id}"),
        AuditColumns(schema.principals, "principal {id}", frozenset({"name"})),
        AuditColumns(schema.roles, "role of {principal} in {project}"),
        AuditColumns(schema.tokens, "token {id}"),
        AuditColumns(schema.runs, "run {id}", _SAID | {"owner"}),
        AuditColumns(schema.stages, "stage {run_id}/{name}", _SAID),
        AuditColumns(
            schema.attempts,
            "attempt {run_id}/{stage}/{number}",
            frozenset({"message", "failure_signature", "folder", "handle"}),
        ),
        AuditColumns(schema.signals, "signal {name} of run {run_id}", frozenset({"reason"})),
        AuditColumns(schema.notes, "note {number} of run {run_id}", frozenset({"text"})),
        AuditColumns(schema.assets, "asset {kind}:{name}@{version}", frozenset({"meta"})),
        AuditColumns(schema.asset_status, "status of asset {kind}:{name}@{version}", frozenset({"reason"})),
        AuditColumns(schema.releases, "release {sequence} of channel {channel}"),
        AuditColumns(schema.channels, "channel {name}"),
        AuditColumns(schema.deployments, "{role} deployment of channel {channel}"),
        AuditColumns(schema.quarantine, "quarantine of {model_digest} on channel {channel}", frozenset({"reason"})),
        AuditColumns(schema.approval_requests, "approval request {digest}"),
        AuditColumns(schema.approvals, "approval of {request} by {principal}", frozenset({"reason"})),
        AuditColumns(schema.looks, "look {number} of channel {channel}", frozenset({"owner"})),
        AuditColumns(schema.stage_cache, "cache entry {cache_key}"),
        AuditColumns(schema.artifacts, "artifact {digest}"),
        AuditColumns(schema.edges, "edge {producer} → {consumer} {slot}"),
        AuditColumns(schema.holds, "hold of {holder} on {digest}", frozenset({"reason"})),
        AuditColumns(schema.sinks, "sink {name}", frozenset({"settings", "rules"})),
    )
}


@dataclass(frozen=True, slots=True)
class Change:
    """One changed row that an event records."""

    sign: str
    table: str
    key: Mapping[str, Any]
    values: Mapping[str, Any]  # all columns of a new row; the changed columns of a changed row; none of a removed row

    def told(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the part for the envelope, and the part for the words."""
        spec = TABLES[self.table]
        empty = spec.empty if self.sign == ADDED else {}
        kept = {
            name: auditable(value)
            for name, value in self.values.items()
            if name not in spec.key and not (name in empty and value == empty[name])
        }
        words = {name: kept.pop(name) for name in sorted(spec.words & kept.keys())}
        return [self.sign, f"{self.table}", [self.key[name] for name in spec.key], kept], words


@dataclass(frozen=True, slots=True)
class Author:
    """The author of a transaction, and the method of authentication."""

    name: str  # `user:ann`, `service:driver`
    request: str  # id of the transaction, by which its commit can be checked afterwards
    auth: str = "os"
    entropy: Entropy = os.urandom
    known: Mapping[str, str] = field(default_factory=dict)  # name → principal of earlier authors; may be outdated


def new_request(entropy: Entropy) -> str:
    """Return the id of one transaction: 32 hexadecimal digits."""
    return entropy(_REQUEST_BYTES).hex()


class Journal:
    """The events that a transaction will write."""

    def __init__(self, connection: Connection, author: Author, clock: Clock, project: str) -> None:
        self._connection, self._clock, self._project = connection, clock, project
        self.author = author
        self._rows: list[dict[str, Any]] = []
        self._payloads: list[Payload | None] = []
        self.found: dict[str, str] = {}  # name → principal, read or created by this transaction

    def tell(
        self,
        kind: str,
        subject: str,
        *changes: Change,
        facts: Mapping[str, Any] | None = None,
        said: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an event with changed rows and other facts (states, numbers, digests). Text in `said` is erasable.

        Raises:
            InputError: the event contains a value that canonical JSON cannot hold.
        """
        audited = dict(auditable(facts or {}))
        told = [change.told() for change in changes]
        words = [words for _, words in told]
        if told:
            audited["rows"] = [row for row, _ in told]
        body: dict[str, Any] = {"rows": words} if any(words) else {}
        body |= {"said": auditable(said)} if said else {}
        payload = Payload(RETAINED, self.author.entropy(SALT), body) if body else None
        envelope = {
            "project": self._project,
            "kind": kind,
            "subject": subject,
            "principal": self.own,
            "auth": self.author.auth,
            "request": self.author.request,
            "at": self._clock.now(),
            "audited": audited,
            "words": payload.digest if payload else None,
        }
        self._rows.append({**envelope, "leaf": envelope_leaf(envelope)})
        self._payloads.append(payload)

    def flush(self, woken: Collection[str] = ()) -> None:
        """Write the events and wake these runs, in the same order in all transactions, which prevents deadlocks."""
        rows, said = self._rows, self._payloads
        self._rows, self._payloads = [], []
        names = sorted(woken)
        last = names.pop() if names and rows else None
        wake(self._connection, self._project, RUN, names)
        if rows:
            told = [self._whole(row, payload) for row, payload in zip(rows, said, strict=True)]
            told[0]["woken"] = last
            self._connection.execute(_telling(self._connection.dialect.name), told)

    def _whole(self, row: Mapping[str, Any], payload: Payload | None) -> dict[str, Any]:
        """Return the parameters of the statement of `_telling`, which checks a cached id of the author."""
        name = self.author.name
        signed = {**row, "author": row["principal"], "called": None if name in self.found else name, "woken": None}
        del signed["principal"]
        words = Payload(RETAINED, b"", {}) if payload is None else payload
        return {**signed, "retention": words.retention, "salt": words.salt, "body": words.body}

    @property
    def own(self) -> str:
        """The author's principal."""
        return self.principal(self.author.name)

    def principal(self, name: str) -> str:
        """Return the pseudonymous id of the principal `name`, read or created at the first use in this transaction."""
        found = self.found.get(name) or (self.author.known.get(name) if name == self.author.name else None)
        if found is None:
            found = self.found[name] = self._read_principal(name) or self._make_principal(name)
        return found

    def _read_principal(self, name: str) -> str | None:
        return self._connection.execute(select(principals.c.id).where(principals.c.name == name)).scalar()

    def _make_principal(self, name: str) -> str:
        columns: dict[str, Any] = {
            "id": self.author.entropy(_PRINCIPAL_BYTES).hex(),
            "kind": "user" if name.startswith("user:") else "service",
            "name": name,
            "created_at": self._clock.now(),
        }
        try:
            with self._connection.begin_nested():
                self._connection.execute(insert(principals).values(**columns))
        except exc.IntegrityError:  # another process has just created it
            there = self._read_principal(name)
            if there is None:
                raise
            return there
        self.found[name] = str(columns["id"])
        self.tell("principal.added", self.found[name], Change(ADDED, "principals", {"id": columns["id"]}, columns))
        return self.found[name]


def tell_rows(connection: Connection, clock: Clock, entropy: Entropy) -> None:
    """Record every row of a newly created ledger."""
    actor = entropy(8).hex()
    connection.execute(insert(principals).values(id=actor, kind="service", name=DRIVER, created_at=clock.now()))
    author = Author(DRIVER, new_request(entropy), entropy=entropy, known={DRIVER: actor})
    journal = Journal(connection, author, clock, DEFAULT_PROJECT)
    journal.tell(CREATED, "ledger", facts={"from": None})
    for table in (projects, principals):
        spec = TABLES[table.name]
        rows = connection.execute(select(table)).mappings()
        changes = [Change(ADDED, table.name, {name: row[name] for name in spec.key}, dict(row)) for row in rows]
        journal.tell("ledger.baseline", table.name, *changes)
    journal.flush()
