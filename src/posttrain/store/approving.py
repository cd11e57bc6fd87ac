"""Writing approvals: what is asked for, and what people say of it."""

from __future__ import annotations

from sqlalchemy import select

from posttrain.domain.approvals import Approval, ApprovalRequest
from posttrain.domain.lifecycle import is_final
from posttrain.store.rows import plain
from posttrain.store.schema import approval_requests, approvals, channels
from posttrain.store.writing import Writing


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
        what = f"approval request {request.digest}"
        self._insert(approval_requests, self._owned(request, "actor"), what, "approval.requested", subject)

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
