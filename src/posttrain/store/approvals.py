"""Reading approvals, and which runs wait for one."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from posttrain.domain.approvals import Approval, ApprovalRequest
from posttrain.domain.errors import IntegrityError
from posttrain.domain.lifecycle import StageState
from posttrain.domain.reasons import Reason
from posttrain.store.rows import to_record
from posttrain.store.schema import approval_requests, approvals, events, principals, stages

_ASKED = select(approval_requests, principals.c.name.label("actor")).join(
    principals, principals.c.id == approval_requests.c.principal
)
_SAID = select(approvals, principals.c.name.label("actor")).join(principals, principals.c.id == approvals.c.principal)


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
