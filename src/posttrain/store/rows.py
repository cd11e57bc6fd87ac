"""Conversion between ledger rows and the values of `domain.records`, and reads of parts of the ledger.

The reads cover access (roles in the project, and tokens for it); sinks, their cursors, and the sealed events that they
receive; channels (live release, history, quarantine) and how often items were evaluated; approvals, and the runs that
wait for an approval.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Result, Row, Select, Table, bindparam, func, select

from posttrain.domain.approvals import Approval, ApprovalRequest
from posttrain.domain.errors import IntegrityError, NotFoundError, nearest
from posttrain.domain.ids import Role
from posttrain.domain.lifecycle import Reason, StageState
from posttrain.domain.records import (
    Asset,
    ChannelRecord,
    Deployment,
    Event,
    Look,
    Measured,
    Quarantine,
    ReleaseEntry,
    Token,
    stage_of,
)
from posttrain.domain.sinks import Cursor, Envelope, Rule, SinkRecord
from posttrain.store.journal import CHANGED, TABLES
from posttrain.store.schema import (
    approval_requests,
    approvals,
    channels,
    cursors,
    deployments,
    edges,
    events,
    keyed,
    leaves,
    payloads,
    principals,
    projects,
    quarantine,
    releases,
    roles,
    runs,
    sessions,
    sinks,
    stages,
    tokens,
    tree_head,
)
from posttrain.store.scope import Scope, across

Record = TypeVar("Record")
_ROLES = select(principals.c.name, roles.c.role).join(principals, principals.c.id == roles.c.principal)
_ROLES = _ROLES.where(roles.c.project == bindparam("of_project")).order_by(principals.c.name)
SINK_ADDED = "sink.added"  # the event of an added sink
_NAMES = 500  # names per statement
LIVE = "live"  # the role of a channel's live release


def acted(table: Table, *columns: Any, called: str = "actor") -> Select[Any]:
    """Select rows of a table, and further columns, with the name of each row's principal."""
    named = select(table, principals.c.name.label(called), *columns)
    return named.join(principals, principals.c.id == table.c.principal)


_TOKENS, _SINKS, _RELEASES = acted(tokens), acted(sinks), acted(releases)
_ASKED, _SAID = acted(approval_requests), acted(approvals)


def names_of(record: Any) -> tuple[str, ...]:
    """Return the names of the fields of a record, or of a kind of record."""
    return tuple(record.__dataclass_fields__)


def to_record(kind: type[Record], row: Row[*tuple[Any, ...]]) -> Record:
    """Return the row as a `kind`, whose fields have the columns' names."""
    found = row._mapping
    values = {name: found[name] for name in names_of(kind)}
    if kind is Asset:
        values["parents"] = tuple(values["parents"])
    if kind is ChannelRecord:
        values["protected"] = bool(values["protected"])
    return kind(**values)


def to_records(kind: type[Record], found: Result[*tuple[Any, ...]]) -> list[Record]:
    """Return all rows of a result, each as `to_record` returns it; the positions of columns are looked up once."""
    if kind in (Asset, ChannelRecord):
        return [to_record(kind, row) for row in found]
    columns = list(found.keys())
    picked = operator.itemgetter(*(columns.index(name) for name in names_of(kind)))
    return [kind(*picked(row)) for row in found]


def to_event(row: Row[*tuple[Any, ...]]) -> Event:
    """Return an envelope with its words, sequence and actor's name, as an `Event`; `payload["changes"]`: changes."""
    values = dict(row._mapping)
    audited = dict(values["audited"])
    body = values["body"] or {}
    told, words = audited.pop("rows", []), body.get("rows", [])
    if told and told[0][0] == CHANGED:
        changes = {**told[0][3], **(words[0] if words else {})}
        changes.pop("state", None)
        if "generation" in changes:
            audited["generation"] = changes.pop("generation")
        audited["changes"] = changes
    elif told:
        key = zip(TABLES[told[0][1]].key, told[0][2], strict=True)
        audited = {**dict(key), **told[0][3], **(words[0] if words else {}), **audited}
    values |= {"payload": {**audited, **body.get("said", {})}, "leaf": values["leaf"].hex()}
    return Event(**{name: values[name] for name in names_of(Event)})


def to_columns(record: Any) -> dict[str, Any]:
    """Return the record's fields as column values."""
    return {name: plain(getattr(record, name)) for name in names_of(type(record))}


def plain(value: Any) -> Any:
    """Return mappings and tuples as the dictionaries and lists of JSON, so that a round trip keeps values equal.

    A job may report any text: NUL, which PostgreSQL rejects, becomes U+FFFD, and half a surrogate pair becomes `?`.
    """
    if type(value) is str:
        whole = value if value.isascii() else value.encode("utf-8", "replace").decode()
        return whole.replace("\0", "\ufffd") if "\0" in whole else whole
    if hasattr(value, "items"):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield each name once, in batches that fit one statement."""
    whole = list(dict.fromkeys(names))
    yield from (whole[start : start + _NAMES] for start in range(0, len(whole), _NAMES))


class Reading:
    """Reads of one project over one connection."""

    def __init__(self, connection: Connection, project: str) -> None:
        self._connection, self._project, self.scope = connection, project, Scope(project)

    def _all(self, kind: type[Record], query: Select[Any], values: Mapping[str, Any] | None = None) -> list[Record]:
        return to_records(kind, self._connection.execute(query, values))

    def _one(self, kind: type[Record], query: Select[Any]) -> Record | None:
        """Return the first row; None if there is no row."""
        return next(iter(self._all(kind, query)), None)

    def _each(
        self,
        kind: type[Record],
        query: Select[Any],
        column: ColumnElement[Any],
        names: Sequence[str],
        values: Mapping[str, Any] | None = None,
    ) -> list[Record]:
        """Return the rows whose column has one of these values, read in batches."""
        return [one for part in batches(names) for one in self._all(kind, query.where(column.in_(part)), values)]


class PrincipalReading(Reading):
    """The part of a snapshot that reads access rights."""

    def roles(self) -> dict[str, Role]:
        """Return each principal's role in this project; empty if no role was ever assigned."""
        return {name: Role(role) for name, role in self._connection.execute(_ROLES, {"of_project": self._project})}

    def people(self) -> set[str]:
        """Return the principals who have a role in this project or wrote an event in it. Reads all events."""
        wrote = select(events.c.principal).where(events.c.project == self._project).distinct()
        named = self._connection.execute(select(principals.c.name).where(principals.c.id.in_(wrote)))
        return {*named.scalars(), *self.roles()}

    def principal_of(self, name: str) -> str | None:
        """Return the pseudonymous id of the principal with this name, or None."""
        return self._connection.execute(select(principals.c.id).where(principals.c.name == name)).scalar()

    def projects(self) -> list[str]:
        """Return every project of the ledger, by name."""
        return list(self._connection.execute(select(projects.c.id).order_by(projects.c.id)).scalars())

    def images(self) -> list[str] | None:
        """Return the images that runs of this project may name; None if the images were never set."""
        return self._connection.execute(select(projects.c.images).where(projects.c.id == self._project)).scalar()

    def roles_of(self, name: str) -> dict[str, Role]:
        """Return the role of a principal in each project."""
        query = select(roles.c.project, roles.c.role).join(principals, principals.c.id == roles.c.principal)
        query = query.where(principals.c.name == name).order_by(roles.c.project)
        found = self._connection.execute(across(query, "a principal has roles in several projects"))
        return {project: Role(role) for project, role in found}

    def tokens(self) -> list[Token]:
        """Return every token for this project, oldest first."""
        every = self._all(Token, _TOKENS.order_by(tokens.c.created_at, tokens.c.id))
        return [one for one in every if self._project in one.scopes]

    def token_behind(self, session: str, moment: float) -> Token | None:
        """Return a browser session's token, by the session's digest; None if the session is unknown or has expired."""
        query = _TOKENS.join(sessions, sessions.c.token == tokens.c.id)
        return self._one(Token, query.where(sessions.c.digest == session, sessions.c.expires_at > moment))

    def token_of(self, secret_digest: str) -> Token | None:
        """Return the token whose secret has this digest, or None."""
        return self._one(Token, _TOKENS.where(tokens.c.secret_digest == secret_digest))


class SinkReading(Reading):
    """The part of a snapshot that reads sinks."""

    def sinks(self) -> list[SinkRecord]:
        """Return every sink, by name."""
        return [_sink(row) for row in self._connection.execute(self._my_sinks().order_by(sinks.c.name))]

    def sink(self, name: str) -> SinkRecord:
        """Return the sink with this name.

        Raises:
            NotFoundError: the sink does not exist.
        """
        row = self._connection.execute(self._my_sinks().where(sinks.c.name == name)).one_or_none()
        if row is None:
            known = [one.name for one in self.sinks()]
            raise NotFoundError(f"there is no sink {name!r}{nearest(name, known)}; posttrain sink ls shows the sinks")
        return _sink(row)

    def cursors(self) -> dict[str, Cursor]:
        """Return the cursor of each sink that has one."""
        return {one.sink: one for one in self._all(Cursor, select(cursors).where(cursors.c.project == self._project))}

    def sink_counts(self) -> list[tuple[SinkRecord, Cursor | None, int]]:
        """Return every sink with its cursor and the number of sealed events, in one statement."""
        columns = [cursors.c[name] for name in Cursor.__dataclass_fields__]
        here = (cursors.c.project == sinks.c.project) & (cursors.c.sink == sinks.c.name)
        query = self._my_sinks().add_columns(*columns, select(tree_head.c.size).scalar_subquery().label("size"))
        rows = self._connection.execute(query.outerjoin(cursors, here).order_by(sinks.c.name)).all()
        return [(_sink(row), None if row.sink is None else to_record(Cursor, row), int(row.size)) for row in rows]

    def projects_with_sinks(self) -> set[str]:
        """Return the projects with a sink that is not paused."""
        query = select(sinks.c.project).where(sinks.c.paused == "").distinct()
        return set(self._connection.execute(across(query, "one driver delivers for every project")).scalars())

    def sealed(self) -> int:
        """Return the number of sealed events."""
        return int(self._connection.execute(select(tree_head.c.size)).scalar_one())

    def events_after(self, after: int) -> tuple[int, float | None]:
        """Return the number of sealed events of this project after a position, and the time of the first such event."""
        count, first = self._connection.execute(
            select(func.count(), func.min(leaves.c.sequence))
            .select_from(leaves)
            .join(events, events.c.id == leaves.c.event)
            .where(leaves.c.sequence > after, events.c.project == self._project)
        ).one()
        if not count:
            return 0, None
        told = select(events.c.at).join(leaves, leaves.c.event == events.c.id).where(leaves.c.sequence == first)
        return int(count), float(self._connection.execute(told.where(events.c.project == self._project)).scalar_one())

    def envelopes(self, after: int, limit: int, *, words: bool) -> list[Envelope]:
        """Return the sealed events with `sequence > after`, in order.

        Args:
            words: whether to include the free text of the events, unless it was erased.
        """
        query: Select[Any] = select(events, leaves.c.sequence).join(leaves, leaves.c.event == events.c.id)
        if words:
            query = query.add_columns(payloads.c.body).outerjoin(payloads, payloads.c.event == events.c.id)
        query = query.where(events.c.project == self._project, leaves.c.sequence > after)
        rows = self._connection.execute(query.order_by(leaves.c.sequence).limit(limit))
        return [_envelope(row, words) for row in rows]

    def run_facts(self, run_id: str) -> tuple[str, str]:
        """Return the name and the owner of a run; two empty strings if there is no such run."""
        query = select(runs.c.name, runs.c.owner).where(runs.c.project == self._project, runs.c.id == run_id)
        row = self._connection.execute(query).one_or_none()
        return ("", "") if row is None else (str(row.name), str(row.owner))

    def sink_added_at(self, name: str) -> int:
        """Return the position in the log at which a sink was last added; 0 if that event is not sealed."""
        query = select(func.max(leaves.c.sequence)).join(events, events.c.id == leaves.c.event)
        mine = (events.c.project == self._project, events.c.kind == SINK_ADDED, events.c.subject == name)
        return int(self._connection.execute(query.where(*mine)).scalar() or 0)

    def _my_sinks(self) -> Select[Any]:
        return _SINKS.where(sinks.c.project == self._project)


def _sink(row: Row[*tuple[Any, ...]]) -> SinkRecord:
    rules = tuple(Rule.of(rule) for _, rule in sorted(row.rules.items()))
    return SinkRecord(row.name, row.kind, row.settings, rules, row.created_at, row.actor, row.paused)


def _envelope(row: Row[*tuple[Any, ...]], words: bool) -> Envelope:
    found = row._mapping
    values = {name: found[name] for name in Envelope.__dataclass_fields__ if name not in ("leaf", "words")}
    return Envelope(**values, leaf=found["leaf"].hex(), words=(found["body"] or {}) if words else {})


class ChannelReading(Reading):
    """The part of a snapshot that reads channels."""

    def channel(self, name: str) -> ReleaseEntry | None:
        """Return the live release of a channel; None if the channel never had a release."""
        here = (deployments.c.project == releases.c.project) & (deployments.c.channel == releases.c.channel)
        here &= (deployments.c.release_sequence == releases.c.sequence) & (deployments.c.role == LIVE)
        return self._one(ReleaseEntry, self._releases().join(deployments, here).where(releases.c.channel == name))

    def channel_record(self, name: str) -> ChannelRecord:
        """Return the settings of a channel; an unused channel has generation 0."""
        query = select(channels).where(channels.c.project == self._project, channels.c.name == name)
        return self._one(ChannelRecord, query) or ChannelRecord(name)

    def channel_records(self) -> list[ChannelRecord]:
        """Return every channel that has a release, a policy or a lock, by name."""
        return self._all(
            ChannelRecord, select(channels).where(channels.c.project == self._project).order_by(channels.c.name)
        )

    def deployments(self, name: str) -> list[Deployment]:
        """Return the deployments of a channel, by role."""
        query = select(deployments).where(deployments.c.project == self._project, deployments.c.channel == name)
        return self._all(Deployment, query.order_by(deployments.c.role))

    def history(self, name: str) -> list[ReleaseEntry]:
        """Return every release of a channel, oldest first; `channel` returns the live release."""
        return self._all(ReleaseEntry, self._releases().where(releases.c.channel == name).order_by(releases.c.sequence))

    def last_release(self, name: str) -> int:
        """Return the highest sequence of a channel's entries, whatever their action; 0: no entries."""
        query = select(func.max(releases.c.sequence)).where(releases.c.project == self._project)
        return int(self._connection.execute(query.where(releases.c.channel == name)).scalar() or 0)

    def released(self, *run_ids: str) -> dict[str, str]:
        """Return the last release, `channel@sequence`, of each of these runs that has a release."""
        query = (
            select(releases.c.run_id, releases.c.channel, releases.c.sequence)
            .order_by(releases.c.at)
            .where(releases.c.project == self._project)
        )
        found: dict[str, str] = {}
        for part in batches(run_ids):
            rows = self._connection.execute(query.where(releases.c.run_id.in_(part)))
            found |= {run: f"{name}@{number}" for run, name, number in rows}
        return found

    def quarantine(self, name: str) -> list[Quarantine]:
        """Return the models that must not be promoted to a channel again, newest first."""
        query = acted(quarantine).where(
            *keyed(quarantine, project=self._project, channel=name), quarantine.c.lifted_at.is_(None)
        )
        return self._all(Quarantine, query.order_by(quarantine.c.release.desc(), quarantine.c.model_digest))

    def looks(self, items: str) -> list[Look]:
        """Return the stages that measured these items, oldest first; cached stages do not count.

        Args:
            items: digest of a data set.
        """
        used = select(edges.c.consumer).where(edges.c.project == self._project, edges.c.digest == items)
        ends = {stage_of(end) for end in self._connection.execute(used.distinct()).scalars()}
        ids = sorted({end[0] for end in ends if end})
        moments = (stages.c.started_at.label("at"), stages.c.finished_at.label("ended"))
        query = (
            select(stages.c.run_id, stages.c.name.label("stage"), stages.c.kind, *moments)
            .join(runs, runs.c.id == stages.c.run_id)
            .where(runs.c.project == self._project, stages.c.started_at.is_not(None), stages.c.cached_from.is_(None))
        )
        mine = [look for look in self._each(Look, query, stages.c.run_id, ids) if (look.run_id, look.stage) in ends]
        return sorted(mine, key=lambda look: (look.at, look.run_id, look.stage))

    def measured(self, slots: str, output: str) -> list[Measured]:
        """Return the measurements of stages on data: every result file with its set of items and slot.

        Args:
            slots: prefix of the slots of the data.
            output: name of the stages' output that has the measurements.
        """
        # With DISTINCT, SQLite reads the subquery once; a self-join would read every edge of the project per result
        left = select(edges.c.producer, edges.c.digest).where(edges.c.project == self._project).distinct()
        made = left.where(edges.c.consumer == "", edges.c.output == output).subquery("made")
        of_slots = edges.c.slot.startswith(slots, autoescape=True)
        query = (
            select(edges.c.digest.label("items"), edges.c.slot, made.c.digest.label("results"))
            .distinct()
            .join(made, made.c.producer == edges.c.consumer)
            .where(edges.c.project == self._project, of_slots, edges.c.consumer != "")
        )
        return self._all(Measured, query.order_by("items", edges.c.slot, "results"))

    def channels(self) -> list[str]:
        """Return the names of channels with a release."""
        query = select(releases.c.channel).where(releases.c.project == self._project).distinct()
        return list(self._connection.execute(query.order_by(releases.c.channel)).scalars())

    def _releases(self) -> Select[Any]:
        return _RELEASES.where(releases.c.project == self._project)


class ApprovalReading(Reading):
    """The part of a snapshot that reads approvals."""

    def approval_requests(
        self, channel: str | None = None, run_id: str | None = None, prefix: str | None = None
    ) -> list[ApprovalRequest]:
        """Return approval requests, oldest first: for a channel, for a run, or with this digest prefix."""
        known = {"project": self._project, "channel": channel, "run_id": run_id}
        wanted = {name: value for name, value in known.items() if value is not None}
        query = _ASKED.where(*keyed(approval_requests, **wanted))
        if prefix is not None:
            query = query.where(func.substr(approval_requests.c.digest, 1, len(prefix)) == prefix)
        return self._all(ApprovalRequest, query.order_by(approval_requests.c.at, approval_requests.c.digest))

    def approvals(self, request: str) -> list[Approval]:
        """Return the answers to a request, oldest first."""
        query = _SAID.where(approvals.c.project == self._project, approvals.c.request == request)
        return self._all(Approval, query.order_by(approvals.c.at, approvals.c.principal))

    def submitter(self, run_id: str) -> str:
        """Return the submitter of a run, from the event of its submission.

        Raises:
            IntegrityError: no event records the submission.
        """
        found = self.known_submitter(run_id)
        if found is None:
            raise IntegrityError(f"run {run_id}: no event records who submitted it; restore the ledger from a copy")
        return found

    def known_submitter(self, run_id: str) -> str | None:
        """Return the submitter of a run; None if a version of Posttrain without such events recorded the run."""
        told = select(principals.c.name).join(events, events.c.principal == principals.c.id)
        told = told.where(events.c.project == self._project, events.c.subject == run_id, events.c.kind == "run.pending")
        return self._connection.execute(told.order_by(events.c.id).limit(1)).scalar()

    def runs_that_wait_for_approval(self, channel: str | None = None) -> Sequence[str]:
        """Return the ids of runs whose release, to this channel or (None) to any channel, waits for an approval."""
        waits = keyed(stages, state=StageState.READY, reason=Reason.WAITING_FOR_APPROVAL)
        query = select(stages.c.run_id).join(approval_requests, approval_requests.c.run_id == stages.c.run_id)
        query = query.where(approval_requests.c.project == self._project, *waits)
        if channel is not None:
            query = query.where(approval_requests.c.channel == channel)
        return list(self._connection.execute(query.distinct()).scalars())
