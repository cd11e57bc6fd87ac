"""What people say of what was asked for: they approve it, or reject it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.control.actions import judged_report
from posttrain.control.approvals import outdated, owners, release_request, standing, terms
from posttrain.control.channels import policy_of, unknown_channel
from posttrain.control.judging import read_report, refuse_unmet
from posttrain.control.stores import Stores
from posttrain.decision.releases import judged_at, promotion
from posttrain.domain.approvals import APPROVED, WITHDRAWN, ApprovalRequest, Standing, Terms, one_of
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import AccessError, ConflictError, InputError, NotFoundError
from posttrain.domain.policies import PinnedPolicy
from posttrain.domain.principals import canonical

_SHORTEST = len(DIGEST_PREFIX) + 8  # of a digest that names a request


def find_request(stores: Stores, digest: str) -> ApprovalRequest:
    """The request whose digest begins like this.

    Raises:
        InputError, NotFoundError: too short, or none, or several.
    """
    if len(digest) < _SHORTEST:
        raise InputError(f"approval request {digest!r}: must have at least 8 digits, as get CHANNEL shows them")
    with stores.ledger.snapshot() as now:
        found = now.approval_requests(prefix=digest.rstrip("…"))
    if not found:
        raise NotFoundError(f"there is no approval request {digest!r}; posttrain get CHANNEL shows those of a channel")
    if len(found) > 1:
        raise InputError(f"approval request {digest!r} is ambiguous; write more of its digest")
    return found[0]


def asked_policy(stores: Stores, channel: str, digest: str) -> PinnedPolicy:
    """The policy that a request asks for.

    Raises:
        InputError: it is a request for something else, or of another channel.
    """
    request = find_request(stores, digest)
    wanted = request.asked.get("set")
    if request.channel != channel or wanted is None:
        raise InputError(f"approval request {digest}: must ask for a policy of channel {channel}, got {request.words}")
    found = policy_of(stores, channel, str(wanted))
    assert found is not None
    return found


def find_release(stores: Stores, run_id: str, channel: str | None) -> ApprovalRequest:
    """The request for the release of a run's model, whether it was asked for yet or not.

    Args:
        channel: by default the one that its run file names.

    Raises:
        InputError: the run has no gate report, no channel, or is live; or nobody is asked on that channel.
        NotFoundError: a channel that neither exists nor is the one the run file names.
        GateRejectedError, GateInconclusiveError: its gates do not pass.
        ConflictError: the channel moved since the gate looked, or has another policy.
    """
    run = stores.ledger.run(run_id)
    manifest = stores.manifest(run)
    digest = judged_report(stores, run, "approve")
    name = channel or (manifest.release.channel if manifest.release else "")
    if not name:
        raise InputError(f"approve {run_id}: its run file names no channel; say which with --channel")
    known = [record.name for record in stores.ledger.channel_records()]
    if name not in known and (manifest.release is None or manifest.release.channel != name):
        raise unknown_channel(name, known)
    report = read_report(stores.blobs, digest)
    live, judged = stores.ledger.channel(name), judged_at(report, name, stores.ledger.history(name))
    if not promotion(live, judged, report.candidate, report):
        raise InputError(f"run {run_id}: its model is live on channel {name} already, so nothing is left to approve")
    pinned = refuse_unmet(stores, run, manifest, report, name)
    bound: dict[str, Any] = {"model": report.candidate, "report": digest, "live": judged}
    request = release_request(stores, run, name, pinned, **bound)
    if request is None:
        raise InputError(
            f"channel {name}: no approvals are asked for: it is not protected, and no policy of it names approvers"
        )
    with stores.ledger.snapshot() as now:
        if any(one.model_digest == report.candidate for one in now.quarantine(name)):
            raise InputError(
                f"run {run_id}: its model is quarantined on channel {name}; posttrain promote {run_id} "
                f"--channel {name} --lift-quarantine REASON asks for an approval of that, by its digest"
            )
    return request


def say(stores: Stores, request: ApprovalRequest, verdict: str, reason: str = "") -> Standing:
    """Approve or reject what was asked for, as the present actor; saying the same again changes nothing.

    Whoever rejected it and may not approve it, since it is theirs, takes the rejection back by approving.

    Args:
        verdict: `approved` or `rejected`.

    Returns:
        Where it stands afterwards.

    Raises:
        AccessError: the channel's policy does not name the actor, or the request is the actor's own.
        ConflictError: what it is about has changed since it was asked for.
        InputError: it is done.
    """
    pinned, channel = policy_of(stores, request.channel), request.channel
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_channel(channel)
        now = transaction.snapshot
        why, record = outdated(now, request), now.channel_record(channel)
        if not why and record.policy != (pinned.digest if pinned else None):
            why = "the policy is another now"
        asked = terms(now, record, pinned, stores.actor)
        found = standing(now, request, pinned, stores.actor)
        if why or asked is None or found is None:
            raise ConflictError(
                f"channel {channel}: {request.words}: {why or 'no approval is needed any more'}; ask for it again"
            )
        before = next((one for one in now.approvals(request.digest) if one.actor == stores.actor), None)
        own = owners(now, found.request, asked)
        if verdict == APPROVED and before and before.verdict != APPROVED and canonical(stores.actor) in own:
            verdict = WITHDRAWN
        _refuse_done(found)
        _refuse_stranger(stores.actor, found, asked, own, verdict)
        transaction.ask_approval(request)
        if before is None or before.verdict != verdict or (reason and before.reason != reason):
            transaction.say_approval(request, verdict, reason)
        after = standing(now, request, pinned, stores.actor)
        assert after is not None
        return replace(after, said=verdict)


def _refuse_done(found: Standing) -> None:
    if found.done:
        channel = found.request.channel
        raise InputError(
            f"channel {channel}: {found.request.words} is done, so nothing is left to say of it; posttrain rollback "
            f"{channel} takes the model off"
        )


def _refuse_stranger(actor: str, found: Standing, asked: Terms, own: set[str], verdict: str) -> None:
    channel, named = found.request.channel, asked.approvers
    if actor not in named:
        raise AccessError(
            f"channel {channel}: only its approvers may approve or reject, got {actor}; they are {', '.join(named)}"
        )
    if verdict == APPROVED and found.ownerless:
        raise AccessError(
            f"channel {channel}: {found.request.words}: nobody may approve it, since the name of its owner was erased; "
            f"{found.request.anew}"
        )
    if verdict == APPROVED and canonical(actor) in own:
        raise AccessError(
            f"channel {channel}: {found.request.words} must be approved by somebody else than whose it is, got "
            f"{actor}; {one_of(found.may) or 'nobody else'} may"
        )
