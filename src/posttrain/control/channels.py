"""Settings of channels, the check of a manifest against its channel's policy, and recalls.

A person sets a channel's policy, and protects or freezes the channel. `approval_statuses` returns the state of every
request for a channel or a run; it only reads, and imports no gate code.

A manifest is checked against the policy: gates, suites, evaluators, and which stage measures which model. The check
runs on the plan and again before the release: a user can edit a locked manifest, and a policy may change during a run.

A recall applies to bytes, and to everything that stages made from them, directly or indirectly, under any name. Models
that were only compared with recalled bytes or measured on them are not affected. No run starts from recalled bytes or
from anything made from them, and no channel is pointed at such a model.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from posttrain.control import approvals
from posttrain.control.approvals import approval_status
from posttrain.control.release_plan import BASELINE, EVIDENCE
from posttrain.decision.releases import refuse_weaker
from posttrain.domain.approvals import Action, ApprovalRequest, ApprovalStatus
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import (
    ChannelClosedError,
    ConflictError,
    InputError,
    IntegrityError,
    NotFoundError,
    RecalledError,
    nearest,
)
from posttrain.domain.gates import CHANNEL
from posttrain.domain.kinds import MODEL, better, kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest, measured_suites, model_output, suite_evaluator
from posttrain.domain.policies import ChannelPolicy, PinnedPolicy, parse_policy, suite_of
from posttrain.domain.records import Asset, AssetStatus, ChannelRecord
from posttrain.store.ledger import Ledger, Stores
from posttrain.store.snapshot import Snapshot
from posttrain.store.writer import POLICY_SET, refuse_protected

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")  # the form of `release.channel` in a run file
_SHOWN = 19  # characters of a digest in an error


RELEASES, EVERYTHING = "releases", "all"  # the moves that a freeze prevents


def policy_of(stores: Stores, channel: str, digest: str | None = None) -> PinnedPolicy | None:
    """Return a channel's policy; None if the channel has no policy.

    Args:
        digest: the digest of an earlier policy; None: the current policy.

    Raises:
        IntegrityError: the document of the policy is missing, corrupt, or from another version of Posttrain.
    """
    wanted = digest or stores.ledger.channel_record(channel).policy
    if wanted is None:
        return None
    try:
        policy = parse_policy(json.loads(stores.blobs.get(wanted)), "policy")
    except (IntegrityError, NotFoundError, InputError, ValueError) as error:
        raise IntegrityError(
            f"channel {channel}: its policy {wanted[:19]}… cannot be read ({error}); set it again: posttrain channel "
            f"set-policy {channel} POLICY.yaml"
        ) from error
    return PinnedPolicy(channel, wanted, policy)


def set_policy(stores: Stores, channel: str, policy: ChannelPolicy | None) -> ChannelRecord:
    """Set a channel's policy; None removes it.

    Args:
        policy: the policy, with the digests of its suites' data.

    Raises:
        InputError: the channel name is not valid in a run file.
        NotFoundError: the policy of a channel that was never used cannot be removed.
        ApprovalError: the channel is protected, and its approvers have not approved the change yet.
        ChannelClosedError: the channel is protected and has no approver.
        ConflictError: another process moved or changed the channel.
    """
    record = _record(stores.ledger, channel) if policy else _used(stores.ledger, channel)
    changes = (policy.digest if policy else None) != record.policy
    written = canonical_json(policy.to_json()) if policy else b""
    digest = stores.blobs.put(written) if policy else None  # put even if unchanged, to restore a lost document
    if not changes:
        return record
    action, bound = (Action.SET_POLICY, {"set": digest}) if policy else (Action.REMOVE_POLICY, {})
    asked = _asked(stores, record, action, **bound)
    if asked is None:
        refuse_protected(record, "a change of its policy")
    return _set(stores, record, POLICY_SET, asked=asked, size=len(written), policy=digest)


def protect(stores: Stores, channel: str, *, protected: bool, why: str = "") -> ChannelRecord:
    """Require an approval for releases to a channel and changes of its policy and quarantine, or stop requiring it.

    Raises:
        InputError: the actor is the only possible approver.
        ApprovalError: removing the protection is not approved yet.
        NotFoundError: no run or user has used the channel yet; after a typo, the intended channel would be unprotected.
        ConflictError: another process moved or changed the channel.
    """
    record = _used(stores.ledger, channel)
    if record.protected == protected:
        return record
    if protected:
        _refuse_alone(stores, record)
    kind = "channel.protected" if protected else "channel.unprotected"
    return _set(stores, record, kind, why, _asked(stores, record, Action.UNPROTECT), protected=protected)


def _refuse_alone(stores: Stores, record: ChannelRecord) -> None:
    """Raise InputError if no other principal of the project could approve actions on the channel."""
    pinned = policy_of(stores, record.name)
    with stores.ledger.snapshot() as now:
        asked = approvals.terms(now, replace(record, protected=True), pinned, stores.actor)
        known = now.people()  # a name that appears only in the policy may be a typo
    if asked is None or not known.intersection(asked.others(stores.actor)):
        raise InputError(
            f"channel {record.name}: cannot be protected, because no principal other than {stores.actor} could approve"
            "; give another user the role approver (posttrain member set) and serve the workspace (posttrain serve), "
            "so that this user can log in"
        )


def freeze(stores: Stores, channel: str, frozen: str, why: str = "") -> ChannelRecord:
    """Freeze or unfreeze a channel.

    Args:
        frozen: `releases`: only rollbacks may move the channel; `all`: no action may move it; empty: unfrozen.

    Raises:
        NotFoundError: no run or user has used the channel yet.
        ConflictError: another process moved or changed the channel.
    """
    record = _used(stores.ledger, channel)
    if record.frozen == frozen:
        return record
    return _set(stores, record, "channel.frozen" if frozen else "channel.unfrozen", why, frozen=frozen)


def refuse_lift(ledger: Ledger, channel: str, model: str, policy: PinnedPolicy | None) -> None:
    """Reject lifting a model's quarantine if the channel's policy never allows that.

    Raises:
        ChannelClosedError: the model is quarantined and `quarantine.lift` is `never`.
    """
    lift = policy.policy.quarantine.lift if policy else "reason"
    if lift != "never" or all(one.model_digest != model for one in ledger.quarantine(channel)):
        return
    raise ChannelClosedError(
        f"channel {channel}: {model[:19]}… is quarantined, and its policy never lifts a quarantine (quarantine.lift: "
        f"{lift}); set another policy to allow it"
    )


def unknown_channel(channel: str, known: Iterable[str]) -> NotFoundError:
    """Return the error for an unused channel; its next action is the same for every command."""
    hint = nearest(channel, known) or " (no channel exists yet)"
    return NotFoundError(
        f"channel {channel!r} is unknown{hint}; the first release of a run whose run file names it creates it, or "
        f"posttrain channel set-policy does"
    )


def _record(ledger: Ledger, channel: str) -> ChannelRecord:
    if not NAME.fullmatch(channel):
        raise InputError(f"channel {channel!r}: must be 1-63 of a-z 0-9 _ - and begin with a letter or digit")
    return ledger.channel_record(channel)


def _used(ledger: Ledger, channel: str) -> ChannelRecord:
    record = _record(ledger, channel)
    if not record.generation:
        raise unknown_channel(channel, [other.name for other in ledger.channel_records()])
    return record


def _asked(
    stores: Stores, record: ChannelRecord, action: Action, **bound: object
) -> tuple[ApprovalRequest, PinnedPolicy | None] | None:
    """Return the approved request for a change of a protected channel; None if no approval is required.

    Raises:
        ApprovalError: the change is not approved yet; the request is recorded.
    """
    if not record.protected:
        return None
    pinned = policy_of(stores, record.name)
    request = approvals.change_request(stores, record, pinned, action, **bound)
    approvals.require(stores, request, pinned)
    return (request, pinned) if request else None


def _set(
    stores: Stores,
    record: ChannelRecord,
    kind: str,
    why: str = "",
    asked: tuple[ApprovalRequest, PinnedPolicy | None] | None = None,
    size: int | None = None,
    **columns: object,
) -> ChannelRecord:
    with stores.ledger.transaction(stores.actor) as transaction:
        return transaction.set_channel(
            record, kind, why, size, approvals.count(transaction, *asked) if asked else "", **columns
        )


def approval_statuses(
    stores: Stores, *, channel: str | None = None, run_id: str | None = None
) -> tuple[ApprovalStatus, ...]:
    """Return the status of every request for a channel or a run, oldest first."""
    with stores.ledger.snapshot() as now:
        return tuple(_each(stores, now, now.approval_requests(channel, run_id)))


def _each(stores: Stores, now: Snapshot, requests: list[ApprovalRequest]) -> Iterator[ApprovalStatus]:
    for request in requests:
        try:
            asked = request.asked["policy"]
            pinned = policy_of(stores, request.channel, asked) if asked else None
        except IntegrityError:  # an earlier policy's document is lost; the current policy's loss is reported elsewhere
            continue
        found = approval_status(now, request, pinned)
        if found is not None:
            yield found


def check_suites(stages: Iterable[StageManifest], code: Mapping[str, str], pinned: PinnedPolicy) -> None:
    """Check that evaluations meet a policy.

    Args:
        stages: the stages that measure the released model.
        code: the `code` of the manifest.

    Raises:
        InputError: a suite is missing, or has different data or a different evaluator; the message names the field.
    """
    found = {suite: (stage, data) for stage in stages for suite, data in measured_suites(stage)}
    whose = f"the policy of channel {pinned.channel}"
    for name, wanted in pinned.policy.suites.items():
        if name not in found:
            has = f"got {', '.join(sorted(found))}" if found else "got none"
            raise InputError(
                f"stages: {whose} requires suite {name!r} ({wanted.data}) measured on the released model, {has}; add "
                "the suite to an evaluate stage of that model"
            )
        stage, data = found[name]
        field = f"stages.{stage.name}.suites.{name}"
        if data.digest != wanted.digest:
            raise InputError(
                f"{field}.data: {whose} requires {wanted.data} ({str(wanted.digest)[:_SHOWN]}…), got {data.name} "
                f"({str(data.digest)[:_SHOWN]}…); use the data set of the policy"
            )
        evaluator = suite_evaluator(stage, code, name)
        if wanted.evaluators != "any" and evaluator not in wanted.evaluators:
            raise InputError(
                f"{field}: {whose} requires evaluator {_listed(wanted.evaluators)}, got {evaluator[:_SHOWN]}… (its "
                "code, settings and rewards); use the evaluator of the policy, or add this one to the policy"
            )


def check_manifest(manifest: Manifest, pinned: PinnedPolicy) -> None:
    """Reject a manifest that was not planned under this policy, or was edited afterwards.

    Raises:
        InputError: the manifest violates the policy.
    """
    if manifest.policy != pinned.digest:
        planned = f"under {manifest.policy[:_SHOWN]}…" if manifest.policy else "without one"
        raise InputError(
            f"the policy of channel {pinned.channel} is {pinned.digest[:_SHOWN]}…, and this manifest was planned "
            f"{planned}; plan the run file again"
        )
    gate = _gate(manifest)
    if gate is None:
        raise InputError(
            f"stages: the policy of channel {pinned.channel} requires a gate, got none; plan the run file again"
        )
    own = {rule.name: rule for rule in manifest.gates}
    for rule in pinned.policy.gates:
        if rule.name not in own:
            raise InputError(
                f"gates: the policy of channel {pinned.channel} requires {rule.name!r}; plan the run file again"
            )
        refuse_weaker(own[rule.name], rule, pinned)
    evaluators = list(_evaluators(manifest, gate))
    check_suites(evaluators, manifest.code, pinned)
    if any(rule.meets_channel for rule in pinned.policy.gates):
        _check_baselines(manifest, gate, evaluators, pinned)


def released_evaluators(manifest: Manifest) -> list[StageManifest]:
    """Return the stages that measure the released model for its gates; empty if the run has no gate."""
    gate = _gate(manifest)
    return list(_evaluators(manifest, gate)) if gate else []


def unguarded(manifest: Manifest) -> Iterator[str]:
    """Yield a suggested gate if no gate compares the released model with another model."""
    maker = manifest.stage(model_output(manifest.release.model)[0]) if manifest.release else None
    if maker is None or MODEL not in maker.inputs or any(rule.needs_baseline for rule in manifest.gates):
        return
    suites = [f"{suite}/accuracy" for stage in released_evaluators(manifest) for suite, _ in measured_suites(stage)]
    gated = [rule.metric for rule in manifest.gates if better(rule.metric)]
    for metric in [*gated, *suites][:1]:
        lower = "direction: lower, " if better(metric) == "lower" else ""
        yield (
            "no gate compares with another model, so a model that training made worse may be released; add "
            f"{{name: no-regression, metric: {metric}, {lower}not_worse_than: base, margin: 0.02}}"
        )


def _gate(manifest: Manifest) -> StageManifest | None:
    return next((stage for stage in manifest.stages if kind_of(stage.kind).judges), None)


def _evaluators(manifest: Manifest, gate: StageManifest) -> Iterator[StageManifest]:
    """Yield the stages whose measurements of the candidate the gate reads."""
    candidate = gate.inputs.get("candidate")
    for slot, ref in gate.inputs.items():
        if not slot.startswith(EVIDENCE):
            continue
        stage = manifest.stage(ref.name) if ref.source == "stage" else None
        if stage is None or not stage.measures or stage.inputs[MODEL] != candidate:
            raise InputError(f"stages.{gate.name}.{slot}: must measure the released model, got {ref.name}; plan again")
        yield stage


def _check_baselines(
    manifest: Manifest, gate: StageManifest, evaluators: Iterable[StageManifest], pinned: PinnedPolicy
) -> None:
    """Check that the policy's baselines are the channel's current model, measured by the same evaluators."""
    live = InputRef(source="channel", name=pinned.channel)
    wanted = {suite_of(rule.metric) for rule in pinned.policy.gates if rule.meets_channel}
    for stage in evaluators:
        if not wanted & {suite for suite, _ in measured_suites(stage)}:
            continue
        ref = gate.inputs.get(BASELINE + stage.name)
        other = manifest.stage(ref.name) if ref is not None and ref.source == "stage" else None
        same = stage.model_copy(update={"name": other.name, "inputs": {**stage.inputs, MODEL: live}}) if other else None
        if gate.inputs.get(CHANNEL) != live or other is None or other != same:
            raise InputError(
                f"stages.{gate.name}.{BASELINE}{stage.name}: must be the same measurement of the model that channel "
                f"{pinned.channel} points at; plan the run file again"
            )


def _listed(evaluators: Iterable[str]) -> str:
    return " or ".join(f"{one[:_SHOWN]}…" for one in evaluators)


APPROVED, RECALLED = "approved", "recalled"


def set_status(stores: Stores, asset: Asset, status: str, reason: str = "") -> AssetStatus | None:
    """Set the status of an asset version. Setting the same status again changes nothing.

    Args:
        status: `approved`, `recalled`, or empty, which clears the status.

    Returns:
        The current status; None: the version has never had a status.

    Raises:
        ConflictError: the version is recalled and must be restored before it is approved, or another process set a
            status at the same time.
    """
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_recalls(exclusive=True)
        known = next((said for said, _ in transaction.snapshot.asset_status() if _of(said) == _of(asset)), None)
        before = known.status if known else ""
        if (before, status) == (RECALLED, APPROVED):
            raise ConflictError(f"{_of(asset)}: is {known and known.words}; posttrain asset restore {_of(asset)} first")
        if before == status and not (reason and known and known.reason != reason):
            return known
        return transaction.set_asset_status(asset, status, reason)


def recalled(ledger: Ledger, digests: Collection[str]) -> dict[str, AssetStatus]:
    """Return, by digest, the recall's status for digests whose bytes were recalled or made from recalled bytes."""
    with ledger.snapshot() as now:
        return _recalled(now, digests)


def recall_of(now: Snapshot, manifest: Manifest) -> str:
    """Return a message about a manifest's input that was recalled or made from recalled bytes; empty: no input was."""
    used = {
        str(ref.digest): (stage.name, slot, ref.name)
        for stage in manifest.stages
        for slot, ref in stage.inputs.items()
        if ref.digest
    }
    for digest, said in sorted(_recalled(now, used).items()):
        stage, slot, name = used[digest]
        return (
            f"stages.{stage}.{slot}: {name} {_how(now, said, digest, name)}; use another version, or posttrain asset "
            f"restore {_of(said)}"
        )
    return ""


def refuse_recalled(now: Snapshot, manifest: Manifest, source: str) -> None:
    """Reject a run if one of its inputs was recalled or was made from recalled bytes.

    Args:
        now: the snapshot of the transaction that starts the run, so no recall happens in between.

    Raises:
        InputError: an input was recalled; the message names the stage, the slot and the recall.
    """
    found = recall_of(now, manifest)
    if found:
        raise InputError(f"{source}: {found}")


def refuse_release(now: Snapshot, channel: str, model: str) -> None:
    """Reject a move of a channel to a model that was recalled or was made from recalled bytes.

    Args:
        now: the snapshot of the transaction that moves the channel.

    Raises:
        RecalledError: the model was recalled or made from recalled bytes.
    """
    for digest, said in _recalled(now, [model]).items():
        raise RecalledError(
            f"channel {channel}: {model[:19]}… {_how(now, said, digest, '')}; train it again from another version, or "
            f"posttrain asset restore {_of(said)}"
        )


def _recalled(now: Snapshot, digests: Collection[str]) -> dict[str, AssetStatus]:
    barred = {digest: said for said, digest in reversed(now.asset_status(RECALLED))}
    return {digest: said for digest, said in _below(now, barred) if digest in digests} if barred else {}


def _below(now: Snapshot, barred: Mapping[str, AssetStatus]) -> Iterator[tuple[str, AssetStatus]]:
    """Yield the recalled bytes and the outputs that stages made from them, breadth first.

    Reports and tables of metrics are included, but have no descendants, since no model is made from them.
    """
    found, new = dict(barred), dict(barred)
    while new:
        yield from new.items()
        by: dict[str, AssetStatus] = {}  # consumer → recall
        for edge in now.uses_of_bytes(*new):
            by.setdefault(edge.consumer, new[edge.digest])
        new = {}
        for edge in now.made(*by):
            if edge.digest not in found:
                new[edge.digest] = found[edge.digest] = by[edge.producer]


def _of(one: Asset | AssetStatus) -> str:
    return f"{one.kind}:{one.name}@{one.version}"


def _how(now: Snapshot, said: AssetStatus, digest: str, name: str) -> str:
    if _of(said) == name:
        return f"was {said.words}"
    same = now.asset(said.kind, said.name, said.version).digest == digest
    return f"{'has the bytes of' if same else 'comes from'} {_of(said)}, {said.words}"
