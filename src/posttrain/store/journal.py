"""The events of one transaction: gathered, and written together before it commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, LargeBinary, String, bindparam, insert, select, text
from sqlalchemy.exc import IntegrityError as ConstraintError

from posttrain.domain.ports import Clock
from posttrain.store.audited import ADDED, Change
from posttrain.store.envelopes import RETAINED, SALT, Payload, auditable, envelope_leaf
from posttrain.store.schema import JsonText, events, payloads, principals, unsealed
from posttrain.store.waking import RUN, WAKE, wake, waking

Entropy = Callable[[int], bytes]  # so many random bytes
# Of a remembered principal another process may have erased the name since. Then none has this id and this name, and the
# column, which may not be NULL, refuses the event: no statement more for what hardly ever happens.
_STILL = "(SELECT id FROM principals WHERE id = :author AND name = coalesce(:called, name))"
_EVENT = insert(events).values(principal=text(_STILL))
_PAYLOAD, _UNSEALED = insert(payloads), insert(unsealed)
_EVENTS = insert(events).returning(events.c.id, sort_by_parameter_order=True)
_PRINCIPAL_BYTES, _REQUEST_BYTES = 8, 16
# An event of one run, as most are, in one question to the server instead of four: each is a way there and back.
_AT_ONCE = text(
    "WITH told AS (INSERT INTO events (project, kind, subject, principal, auth, request, at, audited, words, leaf) "
    f"VALUES (:project, :kind, :subject, {_STILL}, :auth, :request, :at, :audited, :words, :leaf) RETURNING id), "
    "said AS (INSERT INTO payloads (event, retention, salt, body) "
    "SELECT id, :retention, :salt, :body FROM told WHERE :words IS NOT NULL), "
    f"waiting AS (INSERT INTO unsealed (event) SELECT id FROM told) {WAKE}"
).bindparams(
    bindparam("audited", type_=JsonText),
    bindparam("body", type_=JsonText),
    bindparam("words", type_=String),
    bindparam("salt", type_=LargeBinary),
    bindparam("leaf", type_=LargeBinary),
    bindparam("retention", type_=String),
)


@dataclass(frozen=True, slots=True)
class Author:
    """Who writes, and how that is known."""

    name: str  # `user:ann`, `service:driver`
    request: str  # of this transaction; tells afterwards whether it was committed
    auth: str = "os"
    entropy: Entropy = os.urandom
    known: Mapping[str, str] = field(default_factory=dict)  # name → principal, of authors of before; may be outdated


def new_request(entropy: Entropy) -> str:
    """The id of one transaction: 32 hexadecimal digits."""
    return entropy(_REQUEST_BYTES).hex()


def _at_once(row: Mapping[str, Any], payload: Payload | None, run_id: str) -> dict[str, Any]:
    """The values of `_AT_ONCE`."""
    said = Payload(RETAINED, b"", {}) if payload is None else payload
    words = {"retention": said.retention, "salt": said.salt, "body": said.body}
    return {**row, **words, **waking(str(row["project"]), RUN, run_id)}


class Journal:
    """What a transaction will tell."""

    def __init__(self, connection: Connection, author: Author, clock: Clock, project: str) -> None:
        self._connection, self._clock, self._project = connection, clock, project
        self.author = author
        self._rows: list[dict[str, Any]] = []
        self._payloads: list[Payload | None] = []
        self.found: dict[str, str] = {}  # name → principal, of those that this transaction read or made

    def tell(
        self,
        kind: str,
        subject: str,
        *changes: Change,
        facts: Mapping[str, Any] | None = None,
        said: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell of changed rows and of other facts: states, numbers, digests. What is `said` may be erased later.

        Raises:
            InputError: what canonical JSON cannot hold.
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
        """Write what was told, and wake these runs."""
        rows, said = self._rows, self._payloads
        self._rows, self._payloads = [], []
        if self._connection.dialect.name == "postgresql" and len(rows) == len(woken) == 1:
            self._connection.execute(_AT_ONCE, self._signed(_at_once(rows[0], said[0], next(iter(woken)))))
            return
        wake(self._connection, self._project, RUN, woken)
        if not rows:
            return
        key = self._connection.execute(_EVENT, self._signed(rows[0])).inserted_primary_key
        assert key is not None
        ids = [key.id, *(self._connection.execute(_EVENTS, rows[1:]).scalars() if rows[1:] else ())]
        told = [
            {"event": event, "retention": payload.retention, "salt": payload.salt, "body": payload.body}
            for event, payload in zip(ids, said, strict=True)
            if payload is not None
        ]
        if told:
            self._connection.execute(_PAYLOAD, told)
        self._connection.execute(_UNSEALED, [{"event": event} for event in ids])

    def _signed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """An event, whose author must still be called so where that was not read in this transaction."""
        name = self.author.name
        signed = {**row, "author": row["principal"], "called": None if name in self.found else name}
        del signed["principal"]
        return signed

    @property
    def own(self) -> str:
        """The author's principal."""
        return self.principal(self.author.name)

    def principal(self, name: str) -> str:
        """The pseudonymous id of whoever is called `name`, read or made when this transaction first names them."""
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
        except ConstraintError:  # somebody else made it a moment ago
            there = self._read_principal(name)
            if there is None:
                raise
            return there
        self.found[name] = str(columns["id"])
        self.tell("principal.added", self.found[name], Change(ADDED, "principals", {"id": columns["id"]}, columns))
        return self.found[name]
