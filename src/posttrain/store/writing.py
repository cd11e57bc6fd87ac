"""The base of write transactions, and the writing of access rights and sinks.

Rows are added and changed, and each change is recorded. Events about access name principals by their ids, and tokens by
the digests of their secrets. Events about sinks record their rows; a cursor belongs to whoever delivers
(`store/work.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, delete, exc, insert, select, update

from posttrain.domain.errors import ConflictError, InputError, NotFoundError
from posttrain.domain.ids import FORM, Role, is_principal
from posttrain.domain.ports import Clock
from posttrain.domain.records import Token
from posttrain.domain.sinks import SinkRecord
from posttrain.store.edges import EdgeWriter, addition
from posttrain.store.journal import ADDED, CHANGED, REMOVED, Author, Change, Journal, settle
from posttrain.store.rows import SINK_ADDED, plain, to_columns
from posttrain.store.schema import channels, cursors, keyed, projects, roles, sinks, tokens
from posttrain.store.snapshot import Snapshot

_MOST_IMAGES = 256  # that a project allows
SINK_PAUSED, SINK_RESUMED, SINK_REMOVED = "sink.paused", "sink.resumed", "sink.removed"
FRESH: dict[str, Any] = {"failures": 0, "error": "", "failed_since": None, "not_before": None}
FREE: dict[str, Any] = {"lease_owner": None, "lease_until": None}


class Writing:
    """One open write transaction, and the events that it will tell."""

    def __init__(self, connection: Connection, author: Author, clock: Clock, project: str) -> None:
        self._connection = connection
        self._clock = clock
        self._project = project
        self._woken: set[str] = set()  # runs that somebody has to look at
        self._ended: set[str] = set()  # runs that nobody has to look at any more
        self.written: list[Any] = []  # records of runs, stages and attempts as they are now, in the order of changes
        self._journal = Journal(connection, author, clock, project)
        self._edges = EdgeWriter(connection, project)
        self.snapshot = Snapshot(connection, project)  # reads that see this transaction's own rows

    @property
    def principals(self) -> Mapping[str, str]:
        """Name → id of whoever this transaction named for the first time."""
        return self._journal.found

    def flush(self) -> None:
        """Write the events of what was changed so far, and wake the runs whose rows changed, or let go of them."""
        self._journal.flush(self._woken)
        settle(self._connection, self._project, self._ended)
        self._woken.clear()
        self._ended.clear()

    def _owned(self, record: Any, field: str) -> dict[str, Any]:
        """The record's columns: its project, and who is named in `field` as a principal."""
        columns = to_columns(record)
        return {"project": self._project, "principal": self._journal.principal(columns.pop(field)), **columns}

    def _insert(
        self,
        table: Table,
        columns: Mapping[str, Any],
        what: str,
        kind: str,
        subject: str,
        noted: Callable[[], list[Change]] = list,
        **facts: Any,
    ) -> None:
        """Add a row, and what `noted` writes beside it, in one event."""
        self._journal.tell(kind, subject, self._added(table, columns, what), *noted(), facts=facts)

    def _added(self, table: Table, columns: Mapping[str, Any], what: str) -> Change:
        """Add a row and return the change for its event. If its key is taken, the transaction stays usable.

        Raises:
            ConflictError: its key, or a name or number that it must have for itself, is taken; or it names a row that
                is not there, which ends the transaction.
        """
        try:
            added = (
                self._connection.execute(addition(self._connection.dialect.name, table), dict(columns)).first()
                is not None
            )
        except exc.IntegrityError as error:  # it names a row that is not there
            said = " ".join(str(error.orig).split())
            raise ConflictError(f"{what} cannot be added: {said}; read what is there and decide again") from error
        if not added:
            raise ConflictError(f"{what} cannot be added: its key or its name is taken; read it and decide again")
        return Change(ADDED, table.name, {column.name: columns[column.name] for column in table.primary_key}, columns)

    def _change(self, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], kind: str, subject: str) -> bool:
        """Set columns of a row without a generation, and tell; False: there is no such row."""
        if not self._connection.execute(update(table).where(*keyed(table, **key)).values(**values)).rowcount:
            return False
        self._journal.tell(kind, subject, Change(CHANGED, table.name, key, values))
        return True

    def _moved(self, table: Table, key: Mapping[str, Any], was: int, values: Mapping[str, Any]) -> Change | None:
        """Set columns of a row that is still of generation `was`; what an event is to tell of it. None: it is not."""
        values = {**values, "generation": was + 1}
        moved = update(table).where(*keyed(table, **key, generation=was)).values(**values)
        return Change(CHANGED, table.name, key, values) if self._connection.execute(moved).rowcount else None


class GrantWriting(Writing):
    """The part of a transaction that is about access."""

    def add_project(self) -> None:
        """Make this transaction's project, with whoever makes it as its admin.

        Raises:
            ConflictError: there is one of that name.
        """
        self._insert(projects, {"id": self._project, "created_at": self._clock.now()}, f"project {self._project}",
            "project.added", self._project)  # fmt: skip
        self.set_role(self._journal.author.name, Role.ADMIN)

    def allow_image(self, rule: str) -> None:
        """Let runs of this project name an image (`domain.requests`); saying it again changes nothing.

        Raises:
            InputError: the project allows as many as it may.
        """
        _lock(self._connection, self._project)
        known = self.snapshot.images() or []
        if rule in known:
            return
        if len(known) >= _MOST_IMAGES:
            raise InputError(
                f"project {self._project}: may allow at most {_MOST_IMAGES} images, got {len(known) + 1}; remove one "
                "with posttrain project remove-image, or allow a repository: NAME@*"
            )
        self._set_images([*known, rule])

    def remove_image(self, rule: str) -> None:
        """Let no new run of this project name an image any more.

        Raises:
            NotFoundError: it allows others, and not this one.
        """
        _lock(self._connection, self._project)
        known = self.snapshot.images()
        if known is None or rule not in known:
            raise NotFoundError(
                f"project {self._project}: does not allow image {rule[:120]!a}; posttrain project images shows those "
                "that it does"
            )
        self._set_images([one for one in known if one != rule])

    def _set_images(self, images: list[str]) -> None:
        self._change(projects, {"id": self._project}, {"images": sorted(images)}, "project.images", self._project)

    def set_role(self, name: str, role: Role | None) -> None:
        """Give a principal a role in this project, another one, or none.

        Whoever gives the first one becomes an admin: until then everybody who could open the ledger was.

        Raises:
            ConflictError: nobody would be an admin any more.
            InputError: a name that no policy could name either.
        """
        if role is not None and not is_principal(name):
            raise InputError(f"role {role}: must be of {FORM}, got {name!a}")
        _lock(self._connection, self._project)
        known, own = self.snapshot.roles(), self._journal.author.name
        after: dict[str, Role | None] = {**(known or {own: Role.ADMIN}), name: role}
        if Role.ADMIN not in after.values():
            raise ConflictError(f"project {self._project}: must have an admin, got {name} as the last; name another")
        for one, wanted in after.items():
            if known.get(one) != wanted:
                self._set_role(self._journal.principal(one), wanted)

    def _set_role(self, principal: str, role: Role | None) -> None:
        self._woken |= set(self.snapshot.runs_that_wait_for_approval())  # whose approvals count is another now
        key = {"project": self._project, "principal": principal}
        if role is None:
            self._connection.execute(delete(roles).where(*keyed(roles, **key)))
            self._journal.tell("role.withdrawn", principal, Change(REMOVED, "roles", key, {}))
        elif not self._change(roles, key, {"role": str(role)}, "role.granted", principal):
            self._insert(roles, {**key, "role": str(role)}, f"role of {principal}", "role.granted", principal)

    def add_token(self, token: Token, secret_digest: str) -> None:
        """A token that was issued; of its secret nothing but the digest is known here."""
        columns = {
            "id": token.id,
            "principal": self._journal.principal(token.actor),
            "secret_digest": secret_digest,
            "scopes": dict(token.scopes),
            "created_at": token.created_at,
            "expires_at": token.expires_at,
            "revoked_at": None,
            "replaces": token.replaces,
        }
        self._insert(tokens, columns, f"token {token.id}", "token.issued", token.id)

    def revoke_token(self, token_id: str) -> bool:
        """Let a token be good for nothing from now on; False: it was revoked before, or the project has none."""
        if all(one.id != token_id for one in self.snapshot.tokens()):
            return False
        live = select(tokens.c.id).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        if self._connection.execute(live.with_for_update()).first() is None:
            return False
        return self._change(tokens, {"id": token_id}, {"revoked_at": self._clock.now()}, "token.revoked", token_id)


def end_access(connection: Connection, author: Author, clock: Clock, principal: str) -> None:
    """Take every role from a principal, in every project, and revoke their tokens.

    Raises:
        ConflictError: a project would have no admin any more.
    """
    held = connection.execute(select(roles.c.project, roles.c.role).where(roles.c.principal == principal)).all()
    for project, role in sorted((str(row[0]), Role(row[1])) for row in held):
        _lock(connection, project)
        key = {"project": project, "principal": principal}
        others = select(roles.c.role).where(roles.c.project == project, roles.c.principal != principal)
        if role is Role.ADMIN and Role.ADMIN not in connection.execute(others).scalars().all():
            raise ConflictError(f"project {project}: must have an admin, and this is the last; name another first")
        connection.execute(delete(roles).where(*keyed(roles, **key)))
        journal = Journal(connection, author, clock, project)
        journal.tell("role.withdrawn", principal, Change(REMOVED, "roles", key, {}))
        journal.flush(Snapshot(connection, project).runs_that_wait_for_approval())
    live = select(tokens.c.id, tokens.c.scopes).where(tokens.c.principal == principal, tokens.c.revoked_at.is_(None))
    for token, scopes in connection.execute(live.with_for_update()).all():
        now = {"revoked_at": clock.now()}
        connection.execute(update(tokens).where(tokens.c.id == token).values(**now))
        journal = Journal(connection, author, clock, next(iter(scopes)))
        journal.tell("token.revoked", str(token), Change(CHANGED, "tokens", {"id": token}, now))
        journal.flush()


def _lock(connection: Connection, project: str) -> None:
    """Lock a project's roles until the end of the transaction, and who begins to wait for an approval meanwhile."""
    if connection.dialect.name == "postgresql":  # on SQLite one writes at a time
        connection.execute(select(projects.c.id).where(projects.c.id == project).with_for_update())
        connection.execute(
            select(channels.c.name).where(channels.c.project == project).order_by(channels.c.name).with_for_update()
        )


class SinkWriting(Writing):
    """The part of a transaction that is about sinks."""

    def add_sink(self, sink: SinkRecord, after: int) -> SinkRecord:
        """A new sink.

        Args:
            after: it is told of events after this place in the log.

        Raises:
            ConflictError: there is one of this name.
        """
        columns = {
            "project": self._project,
            "principal": self._journal.own,
            "name": sink.name,
            "kind": sink.kind,
            "settings": plain(sink.settings),
            "rules": {
                str(number): rule.to_json() for number, rule in enumerate(sink.rules, 1)
            },  # an erasure takes whole ones
            "created_at": self._clock.now(),
            "paused": "",
        }
        self._insert(sinks, columns, f"sink {sink.name}", SINK_ADDED, sink.name)
        self._connection.execute(delete(cursors).where(*self._cursor(sink.name)))  # of one of that name of before
        self._connection.execute(
            insert(cursors).values(project=self._project, sink=sink.name, sequence=after, **FRESH, at=None, **FREE)
        )
        return replace(sink, created_at=columns["created_at"], actor=self._journal.author.name)

    def pause_sink(self, name: str, why: str, facts: dict[str, Any] | None = None, error: str = "") -> bool:
        """Deliver nothing to a sink any more; False: it was paused before, or is gone.

        Args:
            why: person | failing.
            error: what stood in the way, in words.
        """
        key = {"project": self._project, "name": name}
        here = keyed(sinks, **key, paused="")
        if not self._connection.execute(update(sinks).where(*here).values(paused=why)).rowcount:
            return False
        change = Change(CHANGED, "sinks", key, {"paused": why})
        self._journal.tell(SINK_PAUSED, name, change, facts=facts, said={"error": error} if error else None)
        return True

    def resume_sink(self, name: str, skip_to: int | None = None) -> None:
        """Deliver again, at once.

        Args:
            skip_to: from after this place in the log on; None: from where it stands.
        """
        key = {"project": self._project, "name": name}
        here = (sinks.c.project == self._project, sinks.c.name == name, sinks.c.paused != "")
        if self._connection.execute(update(sinks).where(*here).values(paused="")).rowcount:
            change = Change(CHANGED, "sinks", key, {"paused": ""})
            self._journal.tell(SINK_RESUMED, name, change, facts={} if skip_to is None else {"skipped_to": skip_to})
        moved = {} if skip_to is None else {"sequence": skip_to, **FREE}
        self._connection.execute(update(cursors).where(*self._cursor(name)).values(**FRESH, **moved))

    def remove_sink(self, name: str) -> None:
        """Forget a sink."""
        key = {"project": self._project, "name": name}
        if self._connection.execute(delete(sinks).where(*keyed(sinks, **key))).rowcount:
            self._journal.tell(SINK_REMOVED, name, Change(REMOVED, "sinks", key, {}))
        self._connection.execute(delete(cursors).where(*self._cursor(name)))

    def _cursor(self, name: str) -> tuple[Any, ...]:
        return cursors.c.project == self._project, cursors.c.sink == name
