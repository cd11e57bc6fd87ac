"""Writing of channels and of approvals.

A channel records what is live, what may become it, and what every judgement counts. Whatever touches a channel is a
compare-and-set on its row: a release and a change of its policy never pass each other unseen, on no database.

An approval records what is asked for, and what people answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from posttrain.domain.approvals import Approval, ApprovalRequest
from posttrain.domain.errors import ChannelClosedError, ConflictError, PolicyError, QuarantinedError, StaleWriteError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import Artifact, ChannelRecord, Quarantine, ReleaseEntry
from posttrain.store.journal import Change
from posttrain.store.rows import LIVE, plain
from posttrain.store.schema import approval_requests, approvals, channels, deployments, quarantine, releases
from posttrain.store.writing import Writing

POLICY_SET = "channel.policy_set"  # the event of a policy that is set or removed
_SHOWN = 19  # characters of a digest in an error


class ReleaseWriting(Writing):
    """The part of a transaction that is about channels."""

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
        """Move a channel to another model: compare-and-set against the release that is live, appended to its history.

        A rollback quarantines the model that it takes off the channel. No promotion of a protected channel is written
        without an approval.

        Args:
            action: `promote` or `rollback`; the event is `channel.<action>`.
            expected: sequence of the release that the caller saw live; 0 for a channel that was empty.
            lift: why a model that is quarantined comes back.
            policy: digest of the policy that a promotion was judged under; None: under none.
            generation: of the channel's row when it was decided that the model may come back; None: nobody asked that.
            approved: digest of the request that was approved, where one was needed.
            why: in words that may be erased.
            requested_by: who wants the release, where that is somebody else than the author of this transaction.

        Raises:
            QuarantinedError: the model was rolled back from this channel, and `lift` is empty.
            ChannelClosedError: it is frozen, or protected and a quarantine would be lifted without approval.
            PolicyError: the channel has another policy now.
            ConflictError: something else is live.
            StaleWriteError: the channel is protected, and the promotion carries no approval.
        """
        record, live = self._as_it_was_seen(channel, action, expected, policy, generation)
        if action == "promote" and record.protected and not approved:
            raise StaleWriteError(f"channel {channel} was protected meanwhile; look at it and decide again")
        sequence = self.snapshot.last_release(channel) + 1
        self._pass_quarantine(record, model_digest, lift, approved)
        if action == "rollback" and live is not None:
            self._quarantine(channel, live.model_digest, sequence)
        by = requested_by or self._journal.author.name
        entry = ReleaseEntry(sequence, channel, model_digest, run_id, action, by, self._clock.now(), report_digest)
        what = f"release {sequence} of channel {channel}"
        touched = self._touched(record)  # first: whoever comes second waits here
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
        """A channel and what is live on it, which are what the caller saw. Raises as `append_release`."""
        record, live = self.snapshot.channel_record(channel), self.snapshot.channel(channel)
        found = live.sequence if live else 0
        if found != expected:
            raise ConflictError(
                f"channel {channel} moved: expected {_release(expected)} live, found {_release(found)}; "
                "look at it and decide again"
            )
        if generation is not None and record.generation != generation:
            raise ConflictError(f"channel {channel} was changed meanwhile; look at it and decide again")
        pass_freeze(record, action)
        if action == "promote" and record.policy not in (None, policy):
            raise PolicyError(
                f"channel {channel}: its policy is {str(record.policy)[:_SHOWN]}…, and this was judged under "
                f"{f'{policy[:_SHOWN]}…' if policy else 'none'}; run its file again: posttrain run RUN.yaml"
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
        """Change what holds for a channel, if nobody moved or changed it since `record` was read.

        Args:
            kind: of the event.
            said: why, in words that may be erased.
            size: bytes of a policy that is set.
            approved: digest of the request that was approved, where one was needed.
            columns: fields of `ChannelRecord` to set.

        Raises:
            ConflictError: somebody did.
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
        """The channel's row one generation further; made when it is used for the first time."""
        columns = {"policy": (new or record).policy, "protected": int((new or record).protected)}
        columns |= {"frozen": (new or record).frozen, "revision": (new or record).revision}
        key = {"project": self._project, "name": record.name}
        if record.generation:
            change = self._moved(channels, key, record.generation, columns if new else {})
        else:
            change = self._added(channels, {**key, **columns, "generation": 1}, f"channel {record.name}")
        if change is None:
            raise ConflictError(f"channel {record.name}: somebody moved or changed it meanwhile; look at it again")
        # what they wait for is moot; read after the row is written, for whose lock who begins to wait waits
        self._woken |= set(self.snapshot.runs_that_wait_for_approval(record.name))
        return change

    def _serve(self, entry: ReleaseEntry) -> Change:
        """Let the whole traffic of a channel go to a release."""
        served = {one.role: one for one in self.snapshot.deployments(entry.channel)}
        key = {"project": self._project, "channel": entry.channel, "role": LIVE}
        values = {"release_sequence": entry.sequence, "weight": 1.0}
        if LIVE not in served:
            return self._added(deployments, {**key, **values, "generation": 1}, f"what channel {entry.channel} serves")
        change = self._moved(deployments, key, served[LIVE].generation, values)
        if change is None:
            raise ConflictError(f"channel {entry.channel}: somebody moved it meanwhile; look at it again")
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
    """The error of whoever brings a quarantined model back without a reason.

    Args:
        lifts: the command that brings it back.
    """
    return QuarantinedError(
        f"channel {barred.channel}: {barred.model_digest[:_SHOWN]}… was taken off it by release {barred.release} and "
        f"is quarantined; {lifts} brings it back"
    )


def refuse_protected(record: ChannelRecord, what: str) -> None:
    """Refuse what a protected channel allows by approval only, where nobody else could approve it.

    Raises:
        ChannelClosedError: it is protected.
    """
    if record.protected:
        raise ChannelClosedError(
            f"channel {record.name}: is protected, so {what} needs an approval, and nobody else could give it; "
            f"posttrain channel unprotect {record.name} comes first"
        )


def pass_freeze(record: ChannelRecord, action: str) -> None:
    """Refuse to move a channel that is frozen.

    Raises:
        ChannelClosedError: it is.
    """
    if record.frozen == "all" or (record.frozen and action == "promote"):
        still = "" if record.frozen == "all" else " (rollbacks go on)"
        raise ChannelClosedError(
            f"channel {record.name}: is frozen{still}; posttrain channel unfreeze {record.name} opens it again"
        )


def _release(sequence: int) -> str:
    return f"release {sequence}" if sequence else "nothing"


class ApprovalWriting(Writing):
    """The part of a transaction that is about approvals."""

    def lock_channel(self, name: str) -> None:
        """Lock a channel's row until the end of this transaction: no approval is said while a release counts them."""
        if self._connection.dialect.name == "postgresql":  # on SQLite one writes at a time
            row = (channels.c.project == self._project) & (channels.c.name == name)
            self._connection.execute(select(channels.c.name).where(row).with_for_update())

    def ask_approval(self, request: ApprovalRequest) -> None:
        """Ask for approvals. Asking again changes nothing.

        Raises:
            ConflictError: somebody asks for the same at this very moment.
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
        """Approve or reject a request, or say something else of it than before; wakes the run that waits for it.

        Raises:
            ConflictError: the same person says something of it at this very moment.
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
