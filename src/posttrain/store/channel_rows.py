"""Reading channels: what is live, what was, what may not come back; and how often items were evaluated.

Reading approvals, and which runs wait for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, func, select

from posttrain.domain.approvals import Approval, ApprovalRequest
from posttrain.domain.errors import IntegrityError
from posttrain.domain.lifecycle import Reason, StageState
from posttrain.domain.records import ChannelRecord, Deployment, Look, Measured, Quarantine, ReleaseEntry, stage_of
from posttrain.store.rows import Record, to_record, to_records
from posttrain.store.schema import (
    approval_requests,
    approvals,
    channels,
    deployments,
    edges,
    events,
    principals,
    quarantine,
    releases,
    runs,
    stages,
)

_BATCH = 500  # runs in one statement
LIVE = "live"  # the role of what a channel points at
_RELEASES = select(releases, principals.c.name.label("actor")).join(principals, principals.c.id == releases.c.principal)
_ASKED = select(approval_requests, principals.c.name.label("actor")).join(
    principals, principals.c.id == approval_requests.c.principal
)
_SAID = select(approvals, principals.c.name.label("actor")).join(principals, principals.c.id == approvals.c.principal)


class ChannelReading:
    """The part of a snapshot that is about channels."""

    _connection: Connection
    _project: str

    def channel(self, name: str) -> ReleaseEntry | None:
        """What is live on a channel; None for a channel that nothing was ever released to."""
        here = (deployments.c.project == releases.c.project) & (deployments.c.channel == releases.c.channel)
        here &= (deployments.c.release_sequence == releases.c.sequence) & (deployments.c.role == LIVE)
        query = self._releases().join(deployments, here).where(releases.c.channel == name)
        return next(iter(self._all(ReleaseEntry, query)), None)

    def channel_record(self, name: str) -> ChannelRecord:
        """What holds for a channel; one that nobody has used yet has generation 0."""
        query = select(channels).where(channels.c.project == self._project, channels.c.name == name)
        return next(iter(self._all(ChannelRecord, query)), ChannelRecord(name))

    def channel_records(self) -> list[ChannelRecord]:
        """Every channel that has a release, a policy or a lock, by name."""
        mine = channels.c.project == self._project
        return self._all(ChannelRecord, select(channels).where(mine).order_by(channels.c.name))

    def deployments(self, name: str) -> list[Deployment]:
        """What a channel serves, by role."""
        query = select(deployments).where(deployments.c.project == self._project, deployments.c.channel == name)
        return self._all(Deployment, query.order_by(deployments.c.role))

    def history(self, name: str) -> list[ReleaseEntry]:
        """Every release of a channel, oldest first; `channel` has the one that is live."""
        query = self._releases().where(releases.c.channel == name).order_by(releases.c.sequence)
        return self._all(ReleaseEntry, query)

    def last_release(self, name: str) -> int:
        """The highest sequence of a channel's entries, whatever their action; 0: it has none."""
        query = select(func.max(releases.c.sequence)).where(releases.c.project == self._project)
        return int(self._connection.execute(query.where(releases.c.channel == name)).scalar() or 0)

    def released(self, *run_ids: str) -> dict[str, str]:
        """The last release of each of these runs that has one: `channel@sequence`."""
        query = select(releases.c.run_id, releases.c.channel, releases.c.sequence).order_by(releases.c.at)
        query = query.where(releases.c.project == self._project)
        found: dict[str, str] = {}
        for start in range(0, len(run_ids), _BATCH):
            part = query.where(releases.c.run_id.in_(run_ids[start : start + _BATCH]))
            found |= {run: f"{name}@{number}" for run, name, number in self._connection.execute(part)}
        return found

    def quarantine(self, name: str) -> list[Quarantine]:
        """Models that may not be promoted to a channel again, the newest first."""
        query = select(quarantine, principals.c.name.label("actor"))
        query = query.join(principals, principals.c.id == quarantine.c.principal)
        mine = (quarantine.c.project == self._project) & (quarantine.c.channel == name)
        query = query.where(mine, quarantine.c.lifted_at.is_(None))
        return self._all(Quarantine, query.order_by(quarantine.c.release.desc(), quarantine.c.model_digest))

    def looks(self, items: str) -> list[Look]:
        """Stages that computed something from these items, oldest first; what the stage cache answered is none.

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
            .where(runs.c.project == self._project)
        )
        query = query.where(stages.c.started_at.is_not(None), stages.c.cached_from.is_(None))
        found: list[Look] = []
        for start in range(0, len(ids), _BATCH):
            found += self._all(Look, query.where(stages.c.run_id.in_(ids[start : start + _BATCH])))
        mine = [look for look in found if (look.run_id, look.stage) in ends]
        return sorted(mine, key=lambda look: (look.at, look.run_id, look.stage))

    def measured(self, slots: str, output: str) -> list[Measured]:
        """What stages measured on data: every file that they left for a set of items and its slot.

        Args:
            slots: how the slots of the data begin.
            output: of those stages, with the measurements.
        """
        # distinct, so that it is read once: joined to itself, SQLite reads every edge of the project for each result
        left = select(edges.c.producer, edges.c.digest).where(edges.c.project == self._project).distinct()
        made = left.where(edges.c.consumer == "", edges.c.output == output).subquery("made")
        query = select(edges.c.digest.label("items"), edges.c.slot, made.c.digest.label("results")).distinct()
        query = query.join(made, made.c.producer == edges.c.consumer)
        query = query.where(edges.c.project == self._project, edges.c.slot.startswith(slots, autoescape=True))
        query = query.where(edges.c.consumer != "")
        return self._all(Measured, query.order_by("items", edges.c.slot, "results"))

    def channels(self) -> list[str]:
        """The names of channels with a history."""
        query = select(releases.c.channel).where(releases.c.project == self._project).distinct()
        query = query.order_by(releases.c.channel)
        return list(self._connection.execute(query).scalars())

    def _releases(self) -> Select[Any]:
        return _RELEASES.where(releases.c.project == self._project)

    def _all(self, kind: type[Record], query: Select[Any], values: Mapping[str, Any] | None = None) -> list[Record]:
        return to_records(kind, self._connection.execute(query, values))


class ApprovalReading:
    """The part of a snapshot that is about approvals."""

    _connection: Connection
    _project: str

    def approval_requests(
        self, channel: str | None = None, run_id: str | None = None, prefix: str | None = None
    ) -> list[ApprovalRequest]:
        """What was asked for, oldest first: of a channel, for a run, or of which the digest begins like this."""
        query = _ASKED.where(approval_requests.c.project == self._project)
        if channel is not None:
            query = query.where(approval_requests.c.channel == channel)
        if run_id is not None:
            query = query.where(approval_requests.c.run_id == run_id)
        if prefix is not None:
            query = query.where(func.substr(approval_requests.c.digest, 1, len(prefix)) == prefix)
        query = query.order_by(approval_requests.c.at, approval_requests.c.digest)
        return [to_record(ApprovalRequest, row) for row in self._connection.execute(query)]

    def approvals(self, request: str) -> list[Approval]:
        """What was said of a request, oldest first."""
        query = _SAID.where(approvals.c.project == self._project, approvals.c.request == request)
        query = query.order_by(approvals.c.at, approvals.c.principal)
        return [to_record(Approval, row) for row in self._connection.execute(query)]

    def submitter(self, run_id: str) -> str:
        """Who submitted a run, by the event of its submission.

        Raises:
            IntegrityError: no event tells.
        """
        found = self.known_submitter(run_id)
        if found is None:
            raise IntegrityError(f"run {run_id}: no event tells who submitted it; restore the ledger from a copy")
        return found

    def known_submitter(self, run_id: str) -> str | None:
        """Who submitted a run; None: a version without such events recorded it."""
        told = select(principals.c.name).join(events, events.c.principal == principals.c.id)
        told = told.where(events.c.project == self._project, events.c.subject == run_id, events.c.kind == "run.pending")
        found = self._connection.execute(told.order_by(events.c.id).limit(1)).scalar()
        return None if found is None else str(found)

    def runs_that_wait_for_approval(self, channel: str | None = None) -> Sequence[str]:
        """Ids of runs whose release, to this channel or any, waits for an approval."""
        query = select(stages.c.run_id).join(approval_requests, approval_requests.c.run_id == stages.c.run_id)
        query = query.where(approval_requests.c.project == self._project)
        if channel is not None:
            query = query.where(approval_requests.c.channel == channel)
        query = query.where(stages.c.state == StageState.READY, stages.c.reason == Reason.WAITING_FOR_APPROVAL)
        return list(self._connection.execute(query.distinct()).scalars())
