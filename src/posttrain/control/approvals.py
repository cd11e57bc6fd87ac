"""Approvals: what a channel's policy leaves to people is asked for, approved or rejected, and counted when it is done.

A request is known by the digest of what it would touch (`domain.approvals`). Whoever does the action works the same
digest out again, from what holds then, and counts what was said of that; so nothing that was said of something else
counts, whoever asks and however it is asked. The last count is in the transaction that acts, with the channel's row
locked: no rejection is committed between the count and the act.
"""

from typing import Any

from posttrain.control.stores import Stores
from posttrain.decision.releases import live_before, moves
from posttrain.domain.approvals import Action, ApprovalRequest, Standing, Terms, request_of, weigh
from posttrain.domain.errors import ApprovalError, ConflictError, StaleWriteError
from posttrain.domain.ids import DRIVER, NOBODY, Role, canonical, meant
from posttrain.domain.lifecycle import Reason
from posttrain.domain.policies import PinnedPolicy
from posttrain.domain.records import ChannelRecord, RunRecord, StageRecord
from posttrain.store.snapshot import Snapshot
from posttrain.store.transaction import Transaction
from posttrain.store.writing import pass_freeze, quarantined, refuse_protected


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
    """The request for a release; None where neither the channel's protection nor its policy asks for approvals.

    Args:
        report: digest of the gate report.
        live: sequence of the release that was live when the gate looked.
        lift: the model is quarantined, and is to come back.
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
    """The request for a change of a protected channel; None where nobody is asked.

    A workspace without roles that has a single principal asks nobody: nobody could ever approve.
    """
    with stores.ledger.snapshot() as now:
        asked = terms(now, record, pinned, stores.actor)
        if asked is None or not (asked.others(stores.actor) or asked.self_approval or now.roles()):
            return None
    policy = pinned.digest if pinned else None
    bound |= {"project": stores.ledger.project, "policy": policy, "revision": record.revision}
    return request_of(action, record.name, stores.actor, stores.clock.now(), **bound)


def terms(now: Snapshot, record: ChannelRecord, pinned: PinnedPolicy | None, actor: str = "") -> Terms | None:
    """Who must approve a release to a channel, or a change of a protected one; None: nobody is asked.

    The approvers are those that the policy names. A protected channel whose policy names none asks the approvers and
    admins of the project; a workspace without roles, where everybody may act, whoever acted in it.

    Args:
        pinned: the channel's policy.
        actor: who acts now, and may have done nothing here before.
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


def standing(now: Snapshot, request: ApprovalRequest, pinned: PinnedPolicy | None, actor: str = "") -> Standing | None:
    """Where a request stands; None: the channel asks for no approval any more.

    Args:
        pinned: the policy that it names.
        actor: who acts now.
    """
    asked = terms(now, now.channel_record(request.channel), pinned, actor)
    if asked is None:
        return None
    known = next(iter(now.approval_requests(prefix=request.digest)), request)  # whose it is, was said first
    own, done = owners(now, known, asked), _done(now, known)
    return weigh(known, asked, own, now.approvals(request.digest), outdated(now, known), done)


def owners(now: Snapshot, request: ApprovalRequest, asked: Terms) -> set[str]:
    """Canonical names of those whose request it is: who submitted the run, and whom its run file names as its owner."""
    if asked.self_approval:
        return set()
    named = meant(now.run(request.run_id).owner or NOBODY) if request.run_id else set()
    return {canonical(request.actor)} | named


def outdated(now: Snapshot, request: ApprovalRequest) -> str:
    """Why nothing that was said of a request counts any more; empty: it counts, or what was asked for is done."""
    if _done(now, request):
        return ""
    record, live = now.channel_record(request.channel), now.channel(request.channel)
    return request.outdated(
        {"policy": record.policy, "live": live.sequence if live else 0, "revision": record.revision}
    )


def _done(now: Snapshot, request: ApprovalRequest) -> bool:
    """Whether the channel made the move that was asked for, however often it moved since."""
    model, history = request.asked.get("model"), now.history(request.channel)
    moved = (one for one in moves(history) if one.model_digest == model)
    return any(live_before(history, one.sequence) == int(request.asked["live"]) for one in moved)


# --- what is to be done -----------------------------------------------------------------------------------------------


def await_release(stores: Stores, stage: StageRecord, request: ApprovalRequest, pinned: PinnedPolicy | None) -> bool:
    """Whether a release stage may go on; else it says what it waits for.

    Raises:
        ApprovalError: somebody rejected it.
        ChannelClosedError, QuarantinedError: approvals would not help.
        StaleWriteError: the channel changed meanwhile; decide again.
    """
    with stores.ledger.snapshot() as now:
        found = _may_come(now, request, pinned)
    if not found.missing:
        return True
    action = request.command
    if (stage.reason, stage.message, stage.next_action) == (Reason.WAITING_FOR_APPROVAL, found.words, action):
        return False
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_channel(request.channel)  # whoever asks for the same, or moves it, comes before or after
        found = _may_come(transaction.snapshot, request, pinned)
        if not found.missing:
            return True
        transaction.ask_approval(request)
        transaction.update_stage(stage, reason=Reason.WAITING_FOR_APPROVAL, message=found.words, next_action=action)
    return False


def _may_come(now: Snapshot, request: ApprovalRequest, pinned: PinnedPolicy | None) -> Standing:
    """Where a release stands that approvals would let happen.

    Raises:
        StaleWriteError: the channel has changed since the request was made of it.
        ApprovalError, ChannelClosedError, QuarantinedError: as `await_release`.
    """
    refuse_closed(now, request.channel, str(request.asked["model"]))
    found = standing(now, request, pinned)
    if found is None:
        raise StaleWriteError(f"channel {request.channel}: asks for no approval any more; look at it and decide again")
    if found.outdated:
        raise StaleWriteError(f"channel {request.channel}: {found.outdated}; look at it and decide again")
    if found.refusal is not None:
        raise _refused(found)
    return found


def require(stores: Stores, request: ApprovalRequest | None, pinned: PinnedPolicy | None) -> None:
    """Refuse what is not approved yet, and write down that it was asked for.

    Raises:
        ApprovalError: approvals are missing, or somebody rejected it.
    """
    if request is None:
        return
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_channel(request.channel)
        found = standing(transaction.snapshot, request, pinned, stores.actor)
        if found is None or not (found.refusal or found.missing):
            return
        transaction.ask_approval(request)
    raise _refused(found)


def count(transaction: Transaction, request: ApprovalRequest | None, pinned: PinnedPolicy | None) -> str:
    """The digest of a request that is approved, counted once more in the transaction that acts; empty: none is needed.

    Raises:
        ApprovalError: it is not approved any more.
    """
    if request is None:
        return ""
    transaction.lock_channel(request.channel)
    found = standing(transaction.snapshot, request, pinned)
    if found is None:
        raise ConflictError(f"channel {request.channel} was changed meanwhile; look at it and decide again")
    if found.refusal or found.missing:
        raise _refused(found)
    return request.digest


def refuse_closed(now: Snapshot, channel: str, model: str, lift: str = "") -> bool:
    """Whether a model is quarantined; refuse a release that no approval would let happen.

    Args:
        lift: why a model that was rolled back may come back.

    Raises:
        ChannelClosedError: the channel is frozen.
        QuarantinedError: the model was rolled back from it, and `lift` says nothing.
    """
    pass_freeze(now.channel_record(channel), "promote")
    barred = next((one for one in now.quarantine(channel) if one.model_digest == model), None)
    if barred is not None and not lift:
        raise quarantined(barred)
    return barred is not None


def lift_request(
    stores: Stores, record: ChannelRecord, pinned: PinnedPolicy | None, model: str, live: int
) -> ApprovalRequest | None:
    """The request for a rollback to a quarantined model, where channel or policy leave that to approvals.

    Raises:
        ChannelClosedError: they do, and name nobody who could approve.
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


def _refused(found: Standing) -> ApprovalError:
    request = found.request
    what = f"channel {request.channel}: {request.words}"
    if found.refusal is not None:
        erased = found.refusal.actor.startswith(NOBODY)
        undo = request.anew if erased else f"{found.refusal.actor} may take that back: {request.command}"
        return ApprovalError(f"{what} was {found.refusal.words}; {undo}")
    return ApprovalError(f"{what} {found.words}: {request.command}")
