"""Approvals of the actions for which a channel's policy requires people's consent: requests, verdicts and counts.

A request is identified by the digest of everything that its action touches (`domain.approvals`). The process that acts
recomputes the digest from the current state and counts only approvals of that digest. The last count happens in the
transaction that acts, with the channel's row locked: no rejection is committed between the count and the action.
"""

from typing import Any

from posttrain.decision.releases import live_before, moves
from posttrain.domain.approvals import Action, ApprovalRequest, ApprovalStatus, Terms, request_of, weigh
from posttrain.domain.errors import ApprovalError, ConflictError, StaleWriteError
from posttrain.domain.ids import DRIVER, NOBODY, Role, canonical, meant
from posttrain.domain.lifecycle import Reason
from posttrain.domain.policies import PinnedPolicy
from posttrain.domain.records import ChannelRecord, RunRecord, StageRecord
from posttrain.store.ledger import Stores
from posttrain.store.snapshot import Snapshot
from posttrain.store.transaction import Transaction
from posttrain.store.writer import pass_freeze, quarantined, refuse_protected


def release_request(
    stores: Stores,
    run: RunRecord,
    channel: str,
    pinned: PinnedPolicy | None,
    *,
    model: str,
    report: str,
    live: int,
    lift: bool = False,
) -> ApprovalRequest | None:
    """Return the request for a release; None if neither the channel's protection nor its policy requires approvals.

    Args:
        report: digest of the gate report.
        live: sequence of the release that was live when the gate ran.
        lift: whether the model is quarantined and the release lifts the quarantine.
    """
    with stores.ledger.snapshot() as now:
        if terms(now, now.channel_record(channel), pinned) is None:
            return None
        owner = now.submitter(run.id)
    action = Action.LIFT if lift else Action.RELEASE
    bound = {"project": stores.ledger.project, "model": model, "report": report, "live": live}
    bound |= {"policy": pinned.digest if pinned else None}
    return request_of(action, channel, owner, stores.clock.now(), run.id, **bound)


def change_request(
    stores: Stores, record: ChannelRecord, pinned: PinnedPolicy | None, action: Action, **bound: Any
) -> ApprovalRequest | None:
    """Return the request for a change of a protected channel; None if no approval is required.

    In a workspace without roles and with a single principal, no approval is required, because no other person could
    approve.
    """
    with stores.ledger.snapshot() as now:
        asked = terms(now, record, pinned, stores.actor)
        if asked is None or not (asked.others(stores.actor) or asked.self_approval or now.roles()):
            return None
    policy = pinned.digest if pinned else None
    bound |= {"project": stores.ledger.project, "policy": policy, "revision": record.revision}
    return request_of(action, record.name, stores.actor, stores.clock.now(), **bound)


def terms(now: Snapshot, record: ChannelRecord, pinned: PinnedPolicy | None, actor: str = "") -> Terms | None:
    """Return the principals who must approve a release to, or a change of, a channel; None: no approval is required.

    The policy names the approvers. If the policy names no approvers, a protected channel accepts the project's
    approvers and admins; in a workspace without roles, where everyone may act, the channel accepts every principal
    that has acted in the workspace.

    Args:
        pinned: the channel's policy.
        actor: the principal that acts now, which possibly has no events in this project yet.
    """
    policy, roles = pinned.policy if pinned else None, now.roles()
    able = {name for name, role in roles.items() if role.covers(Role.APPROVER)}
    if policy is not None and policy.approvers:
        own = bool(policy.self_approval) and not record.protected
        roleless = tuple(name for name in policy.approvers if roles and name not in able)
        return Terms(policy.approvers, policy.needed, own, roleless)
    if not record.protected:
        return None
    return Terms(tuple(sorted(able if roles else (now.people() | {actor}) - {DRIVER, ""})), 1)


def approval_status(
    now: Snapshot, request: ApprovalRequest, pinned: PinnedPolicy | None, actor: str = ""
) -> ApprovalStatus | None:
    """Return the status of a request; None: the channel no longer requires approvals.

    Args:
        pinned: the policy that the request names.
        actor: the principal that acts now.
    """
    asked = terms(now, now.channel_record(request.channel), pinned, actor)
    if asked is None:
        return None
    known = next(iter(now.approval_requests(prefix=request.digest)), request)  # the first request names the requester
    own, done = owners(now, known, asked), _done(now, known)
    return weigh(known, asked, own, now.approvals(request.digest), outdated(now, known), done)


def owners(now: Snapshot, request: ApprovalRequest, asked: Terms) -> set[str]:
    """Return the canonical names of a request's owners: the run's submitter and the owner that the run file names."""
    if asked.self_approval:
        return set()
    named = meant(now.run(request.run_id).owner or NOBODY) if request.run_id else set()
    return {canonical(request.actor)} | named


def outdated(now: Snapshot, request: ApprovalRequest) -> str:
    """Return why the approvals of a request no longer count; empty: the approvals count, or the action is done."""
    if _done(now, request):
        return ""
    record, live = now.channel_record(request.channel), now.channel(request.channel)
    return request.outdated(
        {"policy": record.policy, "live": live.sequence if live else 0, "revision": record.revision}
    )


def _done(now: Snapshot, request: ApprovalRequest) -> bool:
    """Return whether the channel made the requested move, even if it moved again since."""
    model, history = request.asked.get("model"), now.history(request.channel)
    moved = (one for one in moves(history) if one.model_digest == model)
    return any(live_before(history, one.sequence) == int(request.asked["live"]) for one in moved)


# --- actions ----------------------------------------------------------------------------------------------------------


def await_release(stores: Stores, stage: StageRecord, request: ApprovalRequest, pinned: PinnedPolicy | None) -> bool:
    """Return whether a release stage may continue; if not, record the missing approvals in the stage's row.

    Raises:
        ApprovalError: an approver rejected the release.
        ChannelClosedError: the channel is frozen.
        QuarantinedError: the model is quarantined, and the release does not lift the quarantine.
        StaleWriteError: the channel changed since it was read; decide again.
    """
    with stores.ledger.snapshot() as now:
        found = _may_come(now, request, pinned)
    if not found.missing:
        return True
    action = request.command
    if (stage.reason, stage.message, stage.next_action) == (Reason.WAITING_FOR_APPROVAL, found.words, action):
        return False
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_channel(request.channel)  # serialises this with equal requests and with moves of the channel
        found = _may_come(transaction.snapshot, request, pinned)
        if not found.missing:
            return True
        transaction.ask_approval(request)
        transaction.update_stage(stage, reason=Reason.WAITING_FOR_APPROVAL, message=found.words, next_action=action)
    return False


def _may_come(now: Snapshot, request: ApprovalRequest, pinned: PinnedPolicy | None) -> ApprovalStatus:
    """Return the status of a release that approvals can allow.

    Raises:
        StaleWriteError: the channel has changed since the request was made.
        ApprovalError: an approver rejected the release.
        ChannelClosedError: the channel is frozen.
        QuarantinedError: the model is quarantined, and the release does not lift the quarantine.
    """
    refuse_closed(now, request.channel, str(request.asked["model"]))
    found = approval_status(now, request, pinned)
    if found is None:
        raise StaleWriteError(f"channel {request.channel} no longer requires an approval; check it and decide again")
    if found.outdated:
        raise StaleWriteError(f"channel {request.channel}: {found.outdated}; check the channel and decide again")
    if found.refusal is not None:
        raise _refused(found)
    return found


def require(stores: Stores, request: ApprovalRequest | None, pinned: PinnedPolicy | None) -> None:
    """Record a request that is not approved yet, and raise an error, which prevents the action.

    Raises:
        ApprovalError: approvals are missing, or an approver rejected the request.
    """
    if request is None:
        return
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_channel(request.channel)
        found = approval_status(transaction.snapshot, request, pinned, stores.actor)
        if found is None or not (found.refusal or found.missing):
            return
        transaction.ask_approval(request)
    raise _refused(found)


def count(transaction: Transaction, request: ApprovalRequest | None, pinned: PinnedPolicy | None) -> str:
    """Count a request's approvals again in the transaction that acts; return the digest of the request, if any.

    Raises:
        ApprovalError: the request is no longer approved.
        ConflictError: the channel no longer requires approvals.
    """
    if request is None:
        return ""
    transaction.lock_channel(request.channel)
    found = approval_status(transaction.snapshot, request, pinned)
    if found is None:
        raise ConflictError(f"channel {request.channel} has changed since it was read; check it and decide again")
    if found.refusal or found.missing:
        raise _refused(found)
    return request.digest


def refuse_closed(now: Snapshot, channel: str, model: str, lift: str = "") -> bool:
    """Raise an error for a release that no approval can allow; return whether the model is quarantined.

    Args:
        lift: the reason for lifting the quarantine.

    Raises:
        ChannelClosedError: the channel is frozen.
        QuarantinedError: the model was rolled back from the channel, and `lift` is empty.
    """
    pass_freeze(now.channel_record(channel), "promote")
    barred = next((one for one in now.quarantine(channel) if one.model_digest == model), None)
    if barred is not None and not lift:
        raise quarantined(barred)
    return barred is not None


def lift_request(
    stores: Stores, record: ChannelRecord, pinned: PinnedPolicy | None, model: str, live: int
) -> ApprovalRequest | None:
    """Return the request for a rollback to a quarantined model; None if neither channel nor policy requires approvals.

    Raises:
        ChannelClosedError: approvals are required, but no one can approve.
    """
    by_policy = pinned is not None and pinned.policy.quarantine.lift == "approval"
    if not (record.protected or by_policy) or all(
        one.model_digest != model for one in stores.ledger.quarantine(record.name)
    ):
        return None
    request = change_request(stores, record, pinned, Action.ROLLBACK, model=model, live=live)
    if request is None:
        refuse_protected(record, f"lifting the quarantine of {model[:19]}…")
    return request


def _refused(found: ApprovalStatus) -> ApprovalError:
    request = found.request
    what = f"channel {request.channel}: {request.words}"
    if found.refusal is not None:
        erased = found.refusal.actor.startswith(NOBODY)
        undo = request.anew if erased else f"{found.refusal.actor} may withdraw the rejection: {request.command}"
        return ApprovalError(f"{what} was {found.refusal.words}; {undo}")
    return ApprovalError(f"{what} {found.words}: {request.command}")
