"""Actions of people, and their approvals and rejections of requests.

The actions are: stop a run, send it a signal, add a note, retry it, promote its model, and roll back a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from posttrain.control import approvals, jobs as environments
from posttrain.control.approvals import approval_status, outdated, owners, release_request, terms
from posttrain.control.channels import policy_of, refuse_lift, refuse_recalled, refuse_release, unknown_channel
from posttrain.control.jobs import AttemptFolders
from posttrain.control.verdicts import check_weights, read_report, refuse_unmet
from posttrain.decision.releases import judged_at, moves, promotion, rollback_target
from posttrain.domain.approvals import APPROVED, WITHDRAWN, ApprovalRequest, ApprovalStatus, Terms, one_of
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import AccessError, ConflictError, InputError, NotFoundError, StaleWriteError, nearest
from posttrain.domain.ids import canonical
from posttrain.domain.kinds import REPORT, kind_of
from posttrain.domain.lifecycle import Reason, RunState, StageState, is_final
from posttrain.domain.policies import PinnedPolicy
from posttrain.domain.records import ChannelRecord, Quarantine, ReleaseEntry, RunNote, RunRecord, Signal
from posttrain.domain.waits import signals_of
from posttrain.store.ledger import Stores
from posttrain.store.writer import quarantined

_DIGITS = 8  # minimum number of hex digits that name a model; fewer decimal digits are a release number
_GOES_ON = (RunState.STOPPED, RunState.FAILED)  # states of a run that a retry continues
_TRIES = 20  # tries of a compare-and-set that competes with a reconciler, which ticks ten times a second
_MOST_LETTERS, _MOST_NOTES, _MOST_TAGS = 1000, 100, 8  # maximum letters in a text, texts of a run, tags of a run
_SHORTEST = len(DIGEST_PREFIX) + 8  # minimum characters of a digest prefix that names a request


def stop(stores: Stores, run_id: str) -> RunRecord:
    """Request that a run stop: its jobs write checkpoints and end. The run's driver carries out the request.

    Raises:
        InputError: the run has already ended.
    """
    for _ in range(_TRIES):
        run = stores.ledger.run(run_id)
        if is_final("run", run.state):
            raise InputError(f"run {run.id}: has already ended ({run.state}), so it cannot be stopped")
        try:
            with stores.ledger.transaction(stores.actor) as transaction:
                transaction.look_again(run.id)
                return transaction.update_run(run, desired="stopped", reason=Reason.STOP_REQUESTED)
        except StaleWriteError:
            stores.clock.sleep(0.02)
    raise ConflictError(
        f"run {run_id}: the stop failed because other processes changed the run at the same time; try again"
    )


def send_signal(stores: Stores, run_id: str, name: str, reason: str = "") -> tuple[Signal, bool]:
    """Send a signal that a stage of a run waits for, or will wait for, and notify the run's driver.

    Returns:
        The signal, and whether this call sent it: a second call returns the first signal.

    Raises:
        InputError: the run has ended, or no stage waits for such a signal.
        ConflictError: concurrent changes prevented the call.
    """
    run = stores.ledger.run(run_id)
    known = signals_of(stores.manifest(run))
    if name not in known:
        has = nearest(name, known) or "; its stages wait for no signal"
        raise InputError(f"run {run.id}: no stage of the run waits for signal {name!r}{has}")
    for _ in range(_TRIES):
        with suppress(ConflictError), stores.ledger.transaction(stores.actor) as transaction:
            now = transaction.snapshot.run(run_id)
            if is_final("run", now.state) and not any(s.name == name for s in transaction.snapshot.signals(run_id)):
                again = f"; posttrain retry {run_id} first" if now.state in _GOES_ON else ""
                raise InputError(f"run {run_id}: has already ended ({now.state}), so it receives no signal{again}")
            new = transaction.send_signal(run_id, name, reason)
            return next(s for s in transaction.snapshot.signals(run_id) if s.name == name), new
    raise ConflictError(f"run {run_id}: another process is sending signal {name}; see posttrain get {run_id}")


def note(
    stores: Stores, run_id: str, text: str = "", tags: Sequence[str] = (), untag: Sequence[str] = ()
) -> list[RunNote]:
    """Add a note and tags to a run, and remove tags. Adding an existing note or tag changes nothing.

    Returns:
        The run's tags, and its newest note.

    Raises:
        InputError: there is nothing to change, the note is too long, there are too many notes or tags, a tag is both
            added and removed, or the run does not have a tag that is to be removed.
    """
    check_note(text, tags)
    both = next((tag for tag in tags if tag in untag), None)
    if both is not None:
        raise InputError(f"note: --tag and --untag both name {both!r}; leave one of them out")
    if not (text.strip() or tags or untag):
        raise InputError(f"note: nothing to record on run {run_id}; give a text, --tag TAG or --untag TAG")
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.snapshot.run(run_id)
        transaction.lock_run(run_id)
        there = transaction.snapshot.notes(run_id)
        known, texts = {one.tag: one for one in there if one.tag}, [one.text for one in there if not one.tag]
        missing = next((tag for tag in untag if tag not in known), None)
        if missing is not None:
            has = ", ".join(known) or "none"
            raise InputError(f"note: run {run_id} has no tag {missing!r} to remove; its tags: {has}")
        wanted = [tag for tag in dict.fromkeys(tags) if tag not in known]
        _refuse_many("tags", len(known) + len(wanted) - len(set(untag)), _MOST_TAGS, "remove some: --untag TAG")
        for tag in dict.fromkeys(untag):
            transaction.untag(known[tag])
        for tag in wanted:
            transaction.note(run_id, tag=tag)
        if text.strip() and texts[-1:] != [text.strip()]:
            _refuse_many("notes", len(texts) + 1, _MOST_NOTES, "keep further notes in a file")
            transaction.note(run_id, text.strip())
        found = transaction.snapshot.notes(run_id)
    return [*(one for one in found if one.tag), *[one for one in found if not one.tag][-1:]]


def check_note(text: str, tags: Sequence[str]) -> None:
    """Reject an invalid note.

    Raises:
        InputError: the text is too long, or there are too many tags.
    """
    if len(text) > _MOST_LETTERS:
        raise InputError(f"note: the text must be at most {_MOST_LETTERS} characters, got {len(text)}; shorten it")
    _refuse_many("tags", len(set(tags)), _MOST_TAGS, "leave some out")


def _refuse_many(what: str, count: int, most: int, remedy: str) -> None:
    if count > most:
        raise InputError(f"note: a run must have at most {most} {what}, got {count}; {remedy}")


def retry(stores: Stores, folders: AttemptFolders, run_id: str) -> RunRecord:
    """Continue a stopped or failed run: its stopped and failed stages become pending, and resume from checkpoints.

    Raises:
        InputError: the run is not stopped or failed, or one of its inputs was recalled.
    """
    run = stores.ledger.run(run_id)
    if run.state not in (RunState.STOPPED, RunState.FAILED):
        hint = "submit it with --again for another run" if is_final("run", run.state) else "it has not ended"
        raise InputError(f"run {run.id}: retry needs a stopped or failed run, got {run.state}; {hint}")
    attempts, manifest = stores.ledger.attempts(run.id), stores.manifest(run)
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_recalls()
        transaction.lock_run(run.id)
        refuse_recalled(transaction.snapshot, manifest, f"run {run.id}")
        environments.accept(folders, run.id)  # before a driver may read the run
        transaction.look_again(run.id)
        for stage in stores.ledger.stages(run.id):
            if stage.state in (StageState.FAILED, StageState.STOPPED):
                transaction.update_stage(
                    stage,
                    state=StageState.PENDING,
                    reason=Reason.RETRIED,
                    message="waiting to continue",
                    next_action="",
                    not_before=None,
                    retried_after=sum(attempt.stage == stage.name for attempt in attempts),
                )
            elif stage.reason == Reason.NOT_REACHED:
                transaction.update_stage(
                    stage, reason=Reason.WAITING_FOR_INPUTS, message="waiting for its turn", next_action="none needed"
                )
        return transaction.update_run(
            run, state=RunState.RUNNING, desired="running", reason=Reason.RETRIED, message="continuing", next_action=""
        )


def _way_back(stores: Stores, channel: str, history: Sequence[ReleaseEntry], model: str) -> str:
    """Return the command that makes the last release of a model live again; "" if it never was."""
    last = next((entry.sequence for entry in reversed(history) if entry.model_digest == model), None)
    if last is None:
        return ""
    with stores.ledger.snapshot() as now:
        barred = any(one.model_digest == model for one in now.quarantine(channel))
    return f"posttrain rollback {channel} --to {last}{' --lift-quarantine REASON' if barred else ''}"


def promote(stores: Stores, run_id: str, channel: str, lift_quarantine: str = "") -> ReleaseEntry:
    """Point a channel at a run's judged model. The report must be PASS, and the channel must not have moved since.

    Args:
        lift_quarantine: the reason for lifting the quarantine of a model that was rolled back from this channel.

    Raises:
        InputError: the run has no gate report.
        QuarantinedError: the run's model was rolled back from this channel, and `lift_quarantine` is empty.
        NotFoundError: the channel neither exists nor is named in the run file.
        GateRejectedError, GateInconclusiveError: the report's result is not PASS.
        ConflictError: the channel moved since the gate ran, even if it moved back.
        PolicyError: the channel's policy differs from the policy under which the run was judged.
        ApprovalError: the channel is protected or its policy names approvers, and an approval is missing; this call
            requests the approval.
        ChannelClosedError: the channel is frozen, or the quarantine must not be lifted.
        RecalledError: the model, or an input from which the model was made, was recalled.
        IntegrityError: the model's bytes are missing or corrupt.
    """
    run, manifest = stores.ledger.run(run_id), stores.manifest(stores.ledger.run(run_id))
    report_digest = judged_report(stores, run, "promote")
    report, known = (
        read_report(stores.blobs, report_digest),
        [record.name for record in stores.ledger.channel_records()],
    )
    if channel not in known and (manifest.release is None or manifest.release.channel != channel):
        raise unknown_channel(channel, known)
    history = stores.ledger.history(channel)
    live, judged = stores.ledger.channel(channel), judged_at(report, channel, history)
    back = _way_back(stores, channel, history, report.candidate)
    moves, request, pinned = promotion(live, judged, report.candidate, report, back), None, None
    if moves:
        pinned = refuse_unmet(stores, run, manifest, report, channel)
        refuse_lift(stores.ledger, channel, report.candidate, pinned)
        with stores.ledger.snapshot() as now:
            lift = approvals.refuse_closed(now, channel, report.candidate, lift_quarantine)
        request = approvals.release_request(
            stores, run, channel, pinned, lift=lift, model=report.candidate, report=report_digest, live=judged
        )
        approvals.require(stores, request, pinned)
    check_weights(stores.blobs, report.candidate, f"channel {channel} does not move")
    if not moves and live is not None:
        return live  # a repeated call makes no second release
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_recalls()
        refuse_release(transaction.snapshot, channel, report.candidate)
        approved = approvals.count(transaction, request, pinned)
        return transaction.append_release(
            channel,
            report.candidate,
            run.id,
            "promote",
            expected=judged,
            report_digest=report_digest,
            lift=lift_quarantine,
            policy=report.policy,
            approved=approved,
            why=lift_quarantine,
        )


def judged_report(stores: Stores, run: RunRecord, verb: str) -> str:
    """Return the digest of a run's gate report.

    Args:
        verb: the action that needs the report, for the error.

    Raises:
        InputError: the run has no gate report.
    """
    gate = next((stage for stage in stores.ledger.stages(run.id) if kind_of(stage.kind).judges), None)
    if gate is None or REPORT not in gate.outputs:
        raise InputError(f"run {run.id}: {verb} needs a gate report, got none; its gates have not been judged")
    return str(gate.outputs[REPORT]["digest"])


def rollback(
    stores: Stores,
    channel: str,
    to: str | None = None,
    *,
    since: int | None = None,
    reason: str = "",
    lift_quarantine: str = "",
) -> ReleaseEntry:
    """Point a channel back at an earlier model, without judging gates; return the release.

    Args:
        to: a model digest prefix, a run id, or a release number in the channel's history; None: the newest release
            that is not quarantined. If the model named by `to` is already live, the call changes nothing.
        since: the release that must be live now; with `since`, a repeated rollback without `to` cannot go back twice.
        reason: an erasable text.
        lift_quarantine: the reason for lifting the quarantine of the model that `to` names.

    Raises:
        InputError: `lift_quarantine` is given without `to`, or a protected channel is rolled back without a reason.
        NotFoundError: the channel is unknown, or has no earlier model.
        ConflictError: the live release is not `since`, or the channel moved since it was read.
        QuarantinedError: the model that `to` names is quarantined, and `lift_quarantine` is empty.
        ChannelClosedError: the channel is frozen even for rollbacks, or its policy never lifts a quarantine.
        ApprovalError: lifting the quarantine needs an approval that is missing.
        RecalledError: the earlier model was recalled, or made from recalled bytes.
        IntegrityError: bytes of the earlier model are missing or corrupt.
    """
    if lift_quarantine and to is None:
        raise InputError(f"rollback {channel}: --lift-quarantine must come with --to; name the release to bring back")
    history, live = stores.ledger.history(channel), _live_release(stores, channel, since)
    named = _release_named(history, to)
    if named == live.model_digest:
        check_weights(stores.blobs, named, f"channel {channel} stays at release {live.sequence}")
        return live
    seen = stores.ledger.channel_record(channel)  # read before the policy, so a change of the policy is a conflict
    pinned = policy_of(stores, channel)
    barred = {one.model_digest: one for one in stores.ledger.quarantine(channel)}
    digest = rollback_target(history, live, barred, named)
    refuse_lift(stores.ledger, channel, digest, pinned)
    _refuse_unsaid(seen, to, barred.get(digest), reason, lift_quarantine)
    check_weights(stores.blobs, digest, f"channel {channel} stays at release {live.sequence}")
    request = approvals.lift_request(stores, seen, pinned, digest, live.sequence)
    approvals.require(stores, request, pinned)
    target = next(entry for entry in reversed(moves(history)) if entry.model_digest == digest)
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_recalls()
        refuse_release(transaction.snapshot, channel, digest)
        return transaction.append_release(
            channel,
            digest,
            target.run_id,
            "rollback",
            expected=live.sequence,
            report_digest=target.report_digest,
            generation=seen.generation,
            lift=lift_quarantine,
            approved=approvals.count(transaction, request, pinned),
            why=reason or lift_quarantine,
        )


def _refuse_unsaid(channel: ChannelRecord, to: str | None, barred: Quarantine | None, reason: str, lift: str) -> None:
    """Raise InputError for a rollback without the reason that a quarantined model or a protected channel requires."""
    if barred is not None and not lift:
        raise quarantined(barred, f"posttrain rollback {channel.name} --to {to} --lift-quarantine REASON")
    if channel.protected and not (reason.strip() or lift.strip()):
        raise InputError(f"rollback {channel.name}: --reason is required on a protected channel, got none; add it")


def _live_release(stores: Stores, channel: str, since: int | None) -> ReleaseEntry:
    """Return the release at which a channel points.

    Raises:
        NotFoundError: the channel is unknown or has no release.
        ConflictError: the live release is not `since`.
    """
    live = stores.ledger.channel(channel)
    if live is None:
        if stores.ledger.channel_record(channel).generation:
            raise NotFoundError(f"channel {channel} has no release yet, so no earlier model exists")
        raise unknown_channel(channel, [record.name for record in stores.ledger.channel_records()])
    if since is not None and live.sequence != since:
        raise ConflictError(f"channel {channel}: release {since} must be live, got {live.sequence}; see posttrain ls")
    return live


def _release_named(history: Sequence[ReleaseEntry], to: str | None) -> str | None:
    """Return the model digest for a release number, else for a run id or its prefix, else for a digest prefix.

    Raises:
        NotFoundError: no release in the history matches.
        InputError: several models match.
    """
    if to is None:
        return None
    if to.isdecimal() and len(to) < _DIGITS:
        found = {e.model_digest for e in history if e.sequence == int(to)}
    else:
        found = {e.model_digest for e in history if e.run_id == to}
        found = found or {e.model_digest for e in history if (e.run_id or "").startswith(to)}
        bare = to.removeprefix("sha256:")
        if not found and len(bare) >= _DIGITS:
            found = {e.model_digest for e in history if e.model_digest.removeprefix("sha256:").startswith(bare)}
    channel = history[-1].channel
    if not found:
        raise NotFoundError(f"channel {channel}: {to!r} was never live there; see posttrain get {channel}")
    if len(found) > 1:
        raise InputError(f"channel {channel}: {to!r} names {len(found)} models; name one by its release number")
    return found.pop()


def find_request(stores: Stores, digest: str) -> ApprovalRequest:
    """Return the request whose digest has this prefix.

    Raises:
        InputError: the prefix is too short or ambiguous.
        NotFoundError: no request has this prefix.
    """
    if len(digest) < _SHORTEST:
        raise InputError(
            f"approval request {digest!r}: must have at least the 8 digits that posttrain get CHANNEL shows"
        )
    with stores.ledger.snapshot() as now:
        found = now.approval_requests(prefix=digest.rstrip("…"))
    if not found:
        raise NotFoundError(
            f"approval request {digest!r} does not exist; posttrain get CHANNEL lists those of a channel"
        )
    if len(found) > 1:
        raise InputError(f"approval request {digest!r} is ambiguous; give more digits of its digest")
    return found[0]


def asked_policy(stores: Stores, channel: str, digest: str) -> PinnedPolicy:
    """Return the policy that a request would set.

    Raises:
        InputError: the request is for another action or another channel.
    """
    request = find_request(stores, digest)
    wanted = request.asked.get("set")
    if request.channel != channel or wanted is None:
        raise InputError(f"approval request {digest}: must propose a policy of channel {channel}, got {request.words}")
    found = policy_of(stores, channel, str(wanted))
    assert found is not None
    return found


def find_release(stores: Stores, run_id: str, channel: str | None) -> ApprovalRequest:
    """Return the request for the release of a run's model, recorded or not.

    Args:
        channel: the channel; None: the channel that the run file names.

    Raises:
        InputError: the run has no gate report or no channel, its model is already live, or the channel requires no
            approval.
        NotFoundError: the channel neither exists nor is named in the run file.
        GateRejectedError, GateInconclusiveError: the run's gates do not pass.
        ConflictError: the channel moved since the gate ran, or has a different policy.
    """
    run = stores.ledger.run(run_id)
    manifest = stores.manifest(run)
    digest = judged_report(stores, run, "approve")
    name = channel or (manifest.release.channel if manifest.release else "")
    if not name:
        raise InputError(f"approve {run_id}: its run file names no channel; name one with --channel")
    known = [record.name for record in stores.ledger.channel_records()]
    if name not in known and (manifest.release is None or manifest.release.channel != name):
        raise unknown_channel(name, known)
    report = read_report(stores.blobs, digest)
    live, judged = stores.ledger.channel(name), judged_at(report, name, stores.ledger.history(name))
    if not promotion(live, judged, report.candidate, report):
        raise InputError(f"run {run_id}: its model is already live on channel {name}, so there is nothing to approve")
    pinned = refuse_unmet(stores, run, manifest, report, name)
    request = release_request(stores, run, name, pinned, model=report.candidate, report=digest, live=judged)
    if request is None:
        raise InputError(f"channel {name} requires no approval: it is not protected, and its policy names no approvers")
    with stores.ledger.snapshot() as now:
        if any(one.model_digest == report.candidate for one in now.quarantine(name)):
            raise InputError(
                f"run {run_id}: its model is quarantined on channel {name}; posttrain promote {run_id} "
                f"--channel {name} --lift-quarantine REASON requests an approval; approve that by its digest"
            )
    return request


def say(stores: Stores, request: ApprovalRequest, verdict: str, reason: str = "") -> ApprovalStatus:
    """Approve or reject a request as the current actor; the same verdict again changes nothing.

    An owner of the request may reject it but not approve it; approving after a rejection withdraws the rejection.

    Args:
        verdict: `approved` or `rejected`.

    Returns:
        The status of the request afterwards.

    Raises:
        AccessError: the actor is not an approver of the channel, or tries to approve the actor's own request.
        ConflictError: the channel has changed since the request was made.
        InputError: the requested action is already done.
    """
    pinned, channel = policy_of(stores, request.channel), request.channel
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_channel(channel)
        now = transaction.snapshot
        why, record = outdated(now, request), now.channel_record(channel)
        if not why and record.policy != (pinned.digest if pinned else None):
            why = "the policy has changed"
        asked = terms(now, record, pinned, stores.actor)
        found = approval_status(now, request, pinned, stores.actor)
        if why or asked is None or found is None:
            raise ConflictError(
                f"channel {channel}: {request.words}: {why or 'no approval is required now'}; request it again"
            )
        before = next((one for one in now.approvals(request.digest) if one.actor == stores.actor), None)
        own = owners(now, found.request, asked)
        if verdict == APPROVED and before and before.verdict != APPROVED and canonical(stores.actor) in own:
            verdict = WITHDRAWN
        if found.done:
            raise InputError(
                f"channel {channel}: {found.request.words} is already done, so it cannot be approved or "
                f"rejected; posttrain rollback {channel} withdraws the model"
            )
        _refuse_stranger(stores.actor, found, asked, own, verdict)
        transaction.ask_approval(request)
        if before is None or before.verdict != verdict or (reason and before.reason != reason):
            transaction.say_approval(request, verdict, reason)
        after = approval_status(now, request, pinned, stores.actor)
        assert after is not None
        return replace(after, said=verdict)


def _refuse_stranger(actor: str, found: ApprovalStatus, asked: Terms, own: set[str], verdict: str) -> None:
    channel, named = found.request.channel, asked.approvers
    if actor not in named:
        raise AccessError(
            f"channel {channel}: only its approvers may approve or reject, got {actor}; they are {', '.join(named)}"
        )
    if verdict == APPROVED and found.ownerless:
        raise AccessError(
            f"channel {channel}: {found.request.words}: no one may approve it, since the name of its owner was erased; "
            f"{found.request.anew}"
        )
    if verdict == APPROVED and canonical(actor) in own:
        raise AccessError(
            f"channel {channel}: {found.request.words} must be approved by a user other than its owner, got "
            f"{actor}; {one_of(found.may) or 'no one else'} may approve it"
        )
