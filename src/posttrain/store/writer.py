"""The base of write transactions, and the writing of access rights, sinks, channels and approvals.

Each added or changed row is recorded in an event. Events about access identify principals by their ids, and tokens by
the digests of their secrets. Events about sinks record the sinks' rows; cursors are written by the delivering process
(`store/work.py`).

A channel records the live release, the models that may become live, and the inputs of every gate. Every change of a
channel is a compare-and-set on the channel's row: a release to a channel and a change of the channel's policy always
conflict, on every database.

An approval records the requested action and the answers of people.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, delete, exc, insert, select, update

from posttrain.domain.approvals import Approval, ApprovalRequest
from posttrain.domain.errors import (
    ChannelClosedError,
    ConflictError,
    InputError,
    NotFoundError,
    PolicyError,
    QuarantinedError,
    StaleWriteError,
)
from posttrain.domain.ids import FORM, Role, is_principal
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import Clock
from posttrain.domain.records import Artifact, ChannelRecord, Quarantine, ReleaseEntry, Token
from posttrain.domain.sinks import SinkRecord
from posttrain.store.edges import EdgeWriter, addition
from posttrain.store.journal import ADDED, CHANGED, REMOVED, Author, Change, Journal, settle
from posttrain.store.rows import LIVE, SINK_ADDED, plain, to_columns
from posttrain.store.schema import (
    approval_requests,
    approvals,
    channels,
    cursors,
    deployments,
    keyed,
    projects,
    quarantine,
    releases,
    roles,
    sinks,
    tokens,
)
from posttrain.store.snapshot import Snapshot

_MOST_IMAGES = 256  # maximum images of a project
SINK_PAUSED, SINK_RESUMED, SINK_REMOVED = "sink.paused", "sink.resumed", "sink.removed"
FRESH: dict[str, Any] = {"failures": 0, "error": "", "failed_since": None, "not_before": None}
FREE: dict[str, Any] = {"lease_owner": None, "lease_until": None}
POLICY_SET = "channel.policy_set"  # the event of a policy that is set or removed
_SHOWN = 19  # characters of a digest in an error


class Writing:
    """One open write transaction, and the events that it will append."""

    def __init__(self, connection: Connection, author: Author, clock: Clock, project: str) -> None:
        self._connection = connection
        self._clock = clock
        self._project = project
        self._woken: set[str] = set()  # runs that a driver has to observe
        self._ended: set[str] = set()  # runs that no driver has to observe again
        self.written: list[Any] = []  # new records of runs, stages and attempts, in the order of changes
        self._journal = Journal(connection, author, clock, project)
        self._edges = EdgeWriter(connection, project)
        self.snapshot = Snapshot(connection, project)  # reads that see this transaction's own rows

    @property
    def principals(self) -> Mapping[str, str]:
        """The ids of the principals that this transaction named for the first time, by name."""
        return self._journal.found

    def flush(self) -> None:
        """Write the events of all changes so far, schedule the runs whose rows changed, and release ended runs."""
        self._journal.flush(self._woken)
        settle(self._connection, self._project, self._ended)
        self._woken.clear()
        self._ended.clear()

    def _owned(self, record: Any, field: str) -> dict[str, Any]:
        """Return the record's columns, with the project, and with the name in `field` as a principal id."""
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
        """Add a row, together with the rows that `noted` writes, in one event."""
        self._journal.tell(kind, subject, self._added(table, columns, what), *noted(), facts=facts)

    def _added(self, table: Table, columns: Mapping[str, Any], what: str) -> Change:
        """Add a row and return the change for its event. If the row's key exists, the transaction stays usable.

        Raises:
            ConflictError: the key, or a unique name or number, exists; or the row references a row that does not exist,
                which ends the transaction.
        """
        try:
            added = (
                self._connection.execute(addition(self._connection.dialect.name, table), dict(columns)).first()
                is not None
            )
        except exc.IntegrityError as error:  # the row references a row that does not exist
            said = " ".join(str(error.orig).split())
            raise ConflictError(f"{what} cannot be added: {said}; read the current rows and decide again") from error
        if not added:
            raise ConflictError(
                f"{what} cannot be added: its key or its name is in use; read the current rows and decide again"
            )
        return Change(ADDED, table.name, {column.name: columns[column.name] for column in table.primary_key}, columns)

    def _change(self, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], kind: str, subject: str) -> bool:
        """Set columns of a row without a generation and record the change; return False if there is no such row."""
        if not self._connection.execute(update(table).where(*keyed(table, **key)).values(**values)).rowcount:
            return False
        self._journal.tell(kind, subject, Change(CHANGED, table.name, key, values))
        return True

    def _moved(self, table: Table, key: Mapping[str, Any], was: int, values: Mapping[str, Any]) -> Change | None:
        """Set columns of a row if its generation is `was`; return the change for its event, or None if it differs."""
        values = {**values, "generation": was + 1}
        moved = update(table).where(*keyed(table, **key, generation=was)).values(**values)
        return Change(CHANGED, table.name, key, values) if self._connection.execute(moved).rowcount else None


class GrantWriting(Writing):
    """The part of a transaction that writes access rights."""

    def add_project(self) -> None:
        """Create this transaction's project, with the author as its admin.

        Raises:
            ConflictError: a project with this name exists.
        """
        self._insert(projects, {"id": self._project, "created_at": self._clock.now()}, f"project {self._project}",
            "project.added", self._project)  # fmt: skip
        self.set_role(self._journal.author.name, Role.ADMIN)

    def allow_image(self, rule: str) -> None:
        """Allow runs of this project to name an image (`domain.jobspec`); a repeated call has no effect.

        Raises:
            InputError: the project already allows the maximum number of images.
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
        """Forbid new runs of this project to name an image.

        Raises:
            NotFoundError: the project does not allow this image.
        """
        _lock(self._connection, self._project)
        known = self.snapshot.images()
        if known is None or rule not in known:
            raise NotFoundError(
                f"project {self._project}: does not allow image {rule[:120]!a}; posttrain project images shows the "
                "allowed images"
            )
        self._set_images([one for one in known if one != rule])

    def _set_images(self, images: list[str]) -> None:
        self._change(projects, {"id": self._project}, {"images": sorted(images)}, "project.images", self._project)

    def set_role(self, name: str, role: Role | None) -> None:
        """Assign a principal a role in this project, or change or withdraw (None) the principal's role.

        The author of the first assignment becomes an admin, because until then everyone who could open the ledger was
        an admin.

        Raises:
            ConflictError: the project would no longer have an admin.
            InputError: the name is not in the form that a policy can contain.
        """
        if role is not None and not is_principal(name):
            raise InputError(f"role {role}: must be for {FORM}, got {name!a}")
        _lock(self._connection, self._project)
        known, own = self.snapshot.roles(), self._journal.author.name
        after: dict[str, Role | None] = {**(known or {own: Role.ADMIN}), name: role}
        if Role.ADMIN not in after.values():
            raise ConflictError(
                f"project {self._project}: must have an admin, and {name} is the last one; name another admin first"
            )
        for one, wanted in after.items():
            if known.get(one) != wanted:
                self._set_role(self._journal.principal(one), wanted)

    def _set_role(self, principal: str, role: Role | None) -> None:
        self._woken |= set(self.snapshot.runs_that_wait_for_approval())  # the set of valid approvers changes
        key = {"project": self._project, "principal": principal}
        if role is None:
            self._connection.execute(delete(roles).where(*keyed(roles, **key)))
            self._journal.tell("role.withdrawn", principal, Change(REMOVED, "roles", key, {}))
        elif not self._change(roles, key, {"role": str(role)}, "role.granted", principal):
            self._insert(roles, {**key, "role": str(role)}, f"role of {principal}", "role.granted", principal)

    def add_token(self, token: Token, secret_digest: str) -> None:
        """Add an issued token; the ledger stores only the digest of its secret."""
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
        """Revoke a token; return False if it was already revoked, or the project has no such token."""
        if all(one.id != token_id for one in self.snapshot.tokens()):
            return False
        live = select(tokens.c.id).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        if self._connection.execute(live.with_for_update()).first() is None:
            return False
        return self._change(tokens, {"id": token_id}, {"revoked_at": self._clock.now()}, "token.revoked", token_id)


def end_access(connection: Connection, author: Author, clock: Clock, principal: str) -> None:
    """Withdraw all roles of a principal, in every project, and revoke the principal's tokens.

    Raises:
        ConflictError: a project would no longer have an admin.
    """
    held = connection.execute(select(roles.c.project, roles.c.role).where(roles.c.principal == principal)).all()
    for project, role in sorted((str(row[0]), Role(row[1])) for row in held):
        _lock(connection, project)
        key = {"project": project, "principal": principal}
        others = select(roles.c.role).where(roles.c.project == project, roles.c.principal != principal)
        if role is Role.ADMIN and Role.ADMIN not in connection.execute(others).scalars().all():
            raise ConflictError(
                f"project {project}: must have an admin, and this is the last one; name another admin first"
            )
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
    """Lock a project's roles and channels until the end of the transaction, so that new approvals wait."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer at a time
        connection.execute(select(projects.c.id).where(projects.c.id == project).with_for_update())
        connection.execute(
            select(channels.c.name).where(channels.c.project == project).order_by(channels.c.name).with_for_update()
        )


class SinkWriting(Writing):
    """The part of a transaction that writes sinks."""

    def add_sink(self, sink: SinkRecord, after: int) -> SinkRecord:
        """Add a sink.

        Args:
            after: position in the log; the sink receives the events after it.

        Raises:
            ConflictError: a sink with this name exists.
        """
        columns = {
            "project": self._project,
            "principal": self._journal.own,
            "name": sink.name,
            "kind": sink.kind,
            "settings": plain(sink.settings),
            "rules": {
                str(number): rule.to_json() for number, rule in enumerate(sink.rules, 1)
            },  # an erasure removes whole rules
            "created_at": self._clock.now(),
            "paused": "",
        }
        self._insert(sinks, columns, f"sink {sink.name}", SINK_ADDED, sink.name)
        self._connection.execute(delete(cursors).where(*self._cursor(sink.name)))  # an earlier sink's cursor
        self._connection.execute(
            insert(cursors).values(project=self._project, sink=sink.name, sequence=after, **FRESH, at=None, **FREE)
        )
        return replace(sink, created_at=columns["created_at"], actor=self._journal.author.name)

    def pause_sink(self, name: str, why: str, facts: dict[str, Any] | None = None, error: str = "") -> bool:
        """Stop deliveries to a sink; return False if it was already paused, or removed.

        Args:
            why: person | failing.
            error: the message of the failed delivery.
        """
        key = {"project": self._project, "name": name}
        here = keyed(sinks, **key, paused="")
        if not self._connection.execute(update(sinks).where(*here).values(paused=why)).rowcount:
            return False
        change = Change(CHANGED, "sinks", key, {"paused": why})
        self._journal.tell(SINK_PAUSED, name, change, facts=facts, said={"error": error} if error else None)
        return True

    def resume_sink(self, name: str, skip_to: int | None = None) -> None:
        """Resume deliveries immediately.

        Args:
            skip_to: continue after this position in the log; None: continue at the cursor.
        """
        key = {"project": self._project, "name": name}
        here = (sinks.c.project == self._project, sinks.c.name == name, sinks.c.paused != "")
        if self._connection.execute(update(sinks).where(*here).values(paused="")).rowcount:
            change = Change(CHANGED, "sinks", key, {"paused": ""})
            self._journal.tell(SINK_RESUMED, name, change, facts={} if skip_to is None else {"skipped_to": skip_to})
        moved = {} if skip_to is None else {"sequence": skip_to, **FREE}
        self._connection.execute(update(cursors).where(*self._cursor(name)).values(**FRESH, **moved))

    def remove_sink(self, name: str) -> None:
        """Remove a sink and its cursor."""
        key = {"project": self._project, "name": name}
        if self._connection.execute(delete(sinks).where(*keyed(sinks, **key))).rowcount:
            self._journal.tell(SINK_REMOVED, name, Change(REMOVED, "sinks", key, {}))
        self._connection.execute(delete(cursors).where(*self._cursor(name)))

    def _cursor(self, name: str) -> tuple[Any, ...]:
        return cursors.c.project == self._project, cursors.c.sink == name


class ReleaseWriting(Writing):
    """The part of a transaction that writes channels."""

    def append_release(
        self,
        channel: str,
        model_digest: str,
        run_id: str | None,
        action: str,
        expected: int,
        report_digest: str | None = None,
        lift: str = "",
        policy: str | None = None,
        generation: int | None = None,
        approved: str = "",
        why: str = "",
        requested_by: str = "",
    ) -> ReleaseEntry:
        """Move a channel to another model, by a compare-and-set on the live release, and append to the history.

        A rollback quarantines the model that it removes from the channel. A promotion to a protected channel requires
        an approval.

        Args:
            action: `promote` or `rollback`; the event is `channel.<action>`.
            expected: sequence of the release that the caller read as live; 0 for an empty channel.
            lift: the reason for bringing back a quarantined model.
            policy: digest of the policy under which a promotion was judged; None: no policy.
            generation: generation of the channel's row when the rollback was decided; None: not checked.
            approved: digest of the approved request, if one was needed.
            why: the reason, as text that may be erased.
            requested_by: the requester of the release, if it is not the author of this transaction.

        Raises:
            QuarantinedError: the model was rolled back from this channel, and `lift` is empty.
            ChannelClosedError: the channel is frozen, or is protected and a quarantine would be lifted without
                approval.
            PolicyError: the channel's policy has changed.
            ConflictError: a different release is live, or the row has a different generation.
            StaleWriteError: the channel is protected, and the promotion has no approval.
        """
        record, live = self._as_it_was_seen(channel, action, expected, policy, generation)
        if action == "promote" and record.protected and not approved:
            raise StaleWriteError(f"channel {channel} was protected since it was read; check it and decide again")
        sequence = self.snapshot.last_release(channel) + 1
        self._pass_quarantine(record, model_digest, lift, approved)
        if action == "rollback" and live is not None:
            self._quarantine(channel, live.model_digest, sequence)
        by = requested_by or self._journal.author.name
        entry = ReleaseEntry(sequence, channel, model_digest, run_id, action, by, self._clock.now(), report_digest)
        what = f"release {sequence} of channel {channel}"
        touched = self._touched(record)  # first, so that a concurrent writer waits here
        previous = live.model_digest if live else None
        changes = [self._added(releases, self._owned(entry, "actor"), what), self._serve(entry), touched]
        noted = self._edges.release(entry, previous)
        facts = {"previous": previous} | ({"approved": approved} if approved else {})
        self._journal.tell(
            f"channel.{action}", channel, *changes, *noted, facts=facts, said={"why": plain(why)} if why else None
        )
        return entry

    def _as_it_was_seen(
        self, channel: str, action: str, expected: int, policy: str | None, generation: int | None
    ) -> tuple[ChannelRecord, ReleaseEntry | None]:
        """Return a channel and its live release, if they are unchanged since the caller read them.

        Errors: see `append_release`.
        """
        record, live = self.snapshot.channel_record(channel), self.snapshot.channel(channel)
        found = live.sequence if live else 0
        if found != expected:
            raise ConflictError(
                f"channel {channel} moved: expected {_release(expected)} live, found {_release(found)}; "
                "check it and decide again"
            )
        if generation is not None and record.generation != generation:
            raise ConflictError(f"channel {channel} has changed since it was read; check it and decide again")
        pass_freeze(record, action)
        if action == "promote" and record.policy not in (None, policy):
            raise PolicyError(
                f"channel {channel}: the policy is {str(record.policy)[:_SHOWN]}…, but the run was judged "
                f"{f'under {policy[:_SHOWN]}…' if policy else 'without a policy'}; judge it again: "
                "posttrain run RUN.yaml"
            )
        return record, live

    def set_channel(
        self,
        record: ChannelRecord,
        kind: str,
        said: str = "",
        size: int | None = None,
        approved: str = "",
        **columns: Any,
    ) -> ChannelRecord:
        """Change the settings of a channel, unless it was moved or changed since `record` was read.

        Args:
            kind: kind of the event.
            said: the reason, as text that may be erased.
            size: bytes of a policy that is set.
            approved: digest of the approved request, if one was needed.
            columns: fields of `ChannelRecord` to set.

        Raises:
            ConflictError: the channel was moved or changed.
        """
        revision = record.revision + int(bool({"policy", "protected"} & columns.keys()))
        new = replace(record, **columns, revision=revision, generation=record.generation + 1)
        policy = columns.get("policy")
        found = [Artifact(policy, "file", size, "policy", self._clock.now())] if policy else []
        facts = {"set": columns, "was": {name: getattr(record, name) for name in columns}}
        self._journal.tell(
            kind,
            record.name,
            self._touched(record, new),
            *self._edges.note(found),
            facts=facts | ({"approved": approved} if approved else {}),
            said={"why": plain(said)} if said else None,
        )
        return new

    def _touched(self, record: ChannelRecord, new: ChannelRecord | None = None) -> Change:
        """Advance the channel's row by one generation; the first use of a channel creates the row."""
        columns = {"policy": (new or record).policy, "protected": int((new or record).protected)}
        columns |= {"frozen": (new or record).frozen, "revision": (new or record).revision}
        key = {"project": self._project, "name": record.name}
        if record.generation:
            change = self._moved(channels, key, record.generation, columns if new else {})
        else:
            change = self._added(channels, {**key, **columns, "generation": 1}, f"channel {record.name}")
        if change is None:
            raise ConflictError(
                f"channel {record.name}: another user moved or changed the channel; check it and decide again"
            )
        # the approvals of these runs are obsolete; read after the write, as a run that starts to wait needs the lock
        self._woken |= set(self.snapshot.runs_that_wait_for_approval(record.name))
        return change

    def _serve(self, entry: ReleaseEntry) -> Change:
        """Route all traffic of a channel to a release."""
        served = {one.role: one for one in self.snapshot.deployments(entry.channel)}
        key = {"project": self._project, "channel": entry.channel, "role": LIVE}
        values = {"release_sequence": entry.sequence, "weight": 1.0}
        if LIVE not in served:
            return self._added(
                deployments, {**key, **values, "generation": 1}, f"the deployment of channel {entry.channel}"
            )
        change = self._moved(deployments, key, served[LIVE].generation, values)
        if change is None:
            raise ConflictError(f"channel {entry.channel}: another user moved the channel; check it and decide again")
        return change

    def _pass_quarantine(self, record: ChannelRecord, model: str, lift: str, approved: str) -> None:
        channel = record.name
        barred = next((one for one in self.snapshot.quarantine(channel) if one.model_digest == model), None)
        if barred is None:
            return
        if not lift:
            raise quarantined(barred)
        if not approved:
            refuse_protected(record, f"lifting the quarantine of {model[:_SHOWN]}…")
        key = {"project": self._project, "channel": channel, "model_digest": model}
        values = {"lifted_at": self._clock.now(), "reason": lift, "principal": self._journal.own}
        self._change(quarantine, key, values, "channel.quarantine_lifted", channel)

    def _quarantine(self, channel: str, model: str, sequence: int) -> None:
        key: Mapping[str, Any] = {"project": self._project, "channel": channel, "model_digest": model}
        values = {"release": sequence, "since": self._clock.now(), "lifted_at": None, "reason": ""}
        values |= {"principal": self._journal.own}
        if not self._change(quarantine, key, values, "channel.quarantined", channel):
            self._insert(
                quarantine,
                {**key, **values},
                f"quarantine of {model} on channel {channel}",
                "channel.quarantined",
                channel,
            )


def quarantined(barred: Quarantine, lifts: str = "promote --lift-quarantine REASON") -> QuarantinedError:
    """Return the error for bringing back a quarantined model without a reason.

    Args:
        lifts: the command that brings back the model.
    """
    return QuarantinedError(
        f"channel {barred.channel}: {barred.model_digest[:_SHOWN]}… was rolled back by release {barred.release} and "
        f"is quarantined; {lifts} brings it back"
    )


def refuse_protected(record: ChannelRecord, what: str) -> None:
    """Reject an action that a protected channel allows only by approval, if no other person could approve the action.

    Raises:
        ChannelClosedError: the channel is protected.
    """
    if record.protected:
        raise ChannelClosedError(
            f"channel {record.name}: is protected, so {what} needs an approval, and no other user can give it; "
            f"run posttrain channel unprotect {record.name} first"
        )


def pass_freeze(record: ChannelRecord, action: str) -> None:
    """Reject moves of a frozen channel.

    Raises:
        ChannelClosedError: the channel is frozen for this action.
    """
    if record.frozen == "all" or (record.frozen and action == "promote"):
        still = "" if record.frozen == "all" else " (rollbacks are allowed)"
        raise ChannelClosedError(
            f"channel {record.name}: is frozen{still}; posttrain channel unfreeze {record.name} lifts the freeze"
        )


def _release(sequence: int) -> str:
    return f"release {sequence}" if sequence else "nothing"


class ApprovalWriting(Writing):
    """The part of a transaction that writes approvals."""

    def lock_channel(self, name: str) -> None:
        """Lock a channel's row until the end of this transaction; no approval is added while approvals are counted."""
        if self._connection.dialect.name == "postgresql":  # SQLite has one writer at a time
            row = (channels.c.project == self._project) & (channels.c.name == name)
            self._connection.execute(select(channels.c.name).where(row).with_for_update())

    def ask_approval(self, request: ApprovalRequest) -> None:
        """Request approvals. A repeated request has no effect.

        Raises:
            ConflictError: another process adds the same request at the same time.
        """
        if self.snapshot.approval_requests(prefix=request.digest):
            return
        subject = request.run_id or request.channel
        self._insert(
            approval_requests,
            self._owned(request, "actor"),
            f"approval request {request.digest}",
            "approval.requested",
            subject,
        )

    def say_approval(self, request: ApprovalRequest, verdict: str, reason: str = "") -> Approval:
        """Approve or reject an approval request, or replace an earlier answer; schedule the run that waits.

        Raises:
            ConflictError: a concurrent request by the same person also answers the approval request.
        """
        said = Approval(request.digest, self._journal.author.name, verdict, self._clock.now(), plain(reason))
        columns, subject = self._owned(said, "actor"), request.run_id or request.channel
        key = {column.name: columns.pop(column.name) for column in approvals.primary_key}
        kind = f"approval.{verdict}"
        if not self._change(approvals, key, columns, kind, subject):
            self._insert(approvals, {**key, **columns}, f"approval of {request.digest}", kind, subject)
        if request.run_id is not None and not is_final("run", self.snapshot.run(request.run_id).state):
            self._woken.add(request.run_id)
        return said
