"""Pure rules of release channels: when a channel may move, the target of a rollback, and the gates of a run.

`control` does the compare-and-set. The append-only history numbers releases; the channel's deployment names the live
release. A rollback quarantines the model that it takes off the channel. A rollback without a target goes to the newest
release that is not quarantined, so a second rollback goes further back and never returns to a model that was taken off.

The policy of the channel constrains a run's gates: a run may add gates and make gates stricter, but never weaker.
"""

from collections.abc import Collection, Sequence

from posttrain.domain.errors import ConflictError, GateInconclusiveError, GateRejectedError, InputError, NotFoundError
from posttrain.domain.gates import GateReport, GateRule, Outcome
from posttrain.domain.lifecycle import ReleaseState, check_transition
from posttrain.domain.policies import PinnedPolicy
from posttrain.domain.records import ReleaseEntry

MOVES = ("promote", "rollback")  # entries that made a model live; others (a canary's) did not
_BOUNDS = ("at_least", "at_most", "not_worse_than", "better_than")
_AMOUNT = {"not_worse_than": "margin", "better_than": "by"}  # the key with the bound of a relative form


def moves(history: Sequence[ReleaseEntry]) -> list[ReleaseEntry]:
    """Return the entries of a history that made a model live, in the order of the history."""
    return [entry for entry in history if entry.action in MOVES]


def live_before(history: Sequence[ReleaseEntry], sequence: int) -> int:
    """Return the sequence of the release that was live before this release; 0 if no release was live."""
    return max((entry.sequence for entry in moves(history) if entry.sequence < sequence), default=0)


def judged_at(report: GateReport, channel: str, history: Sequence[ReleaseEntry]) -> int:
    """Return the sequence of the channel's release with which a report compared; 0 for an empty channel.

    A report of an older version, or about another channel, names no release of this channel. Such a report is current
    only if the model with which it compared was live exactly once.

    Args:
        history: the channel's entries, oldest first.

    Raises:
        ConflictError: the release cannot be determined; judge again.
    """
    if report.channel == channel and report.release is not None:
        return report.release
    if report.baseline is None:
        return 0
    found = [entry.sequence for entry in moves(history) if entry.model_digest == report.baseline]
    if len(found) == 1:
        return found[0]
    raise ConflictError(
        f"promotion: the gates compared with {report.baseline}, which was live in channel {channel} {len(found)} "
        "times, and the report does not record at which release; judge again: posttrain run RUN.yaml --again"
    )


def promotion(live: ReleaseEntry | None, judged: int, candidate: str, report: GateReport, back: str = "") -> bool:
    """Return whether to move the channel to `candidate`, which requires a PASS on exactly this candidate.

    Args:
        live: the channel's live release; None: the channel is empty.
        judged: sequence of the release that was live when the gates judged.
        candidate: digest of the model to release.
        report: the report of the gates.
        back: the command that makes an earlier release of the candidate live again; "": there is none.

    Returns:
        True: move the channel. False: the candidate is already live (the call repeats a promotion).

    Raises:
        GateRejectedError: the outcome is FAIL or ERROR, or the report is about another model.
        GateInconclusiveError: the outcome is INCONCLUSIVE.
        ConflictError: the channel has moved since the gates judged, so the comparison is out of date, even if the same
            model is live again.
    """
    if report.candidate != candidate:
        raise GateRejectedError(
            f"promotion: the gate report must be about {candidate}, got a report about {report.candidate}; judge "
            "this model"
        )
    _check_outcome(report)
    if live is not None and live.model_digest == candidate:
        return False
    current = live.sequence if live else 0
    if current != judged:
        raise ConflictError(
            f"promotion: the channel must still point at {_shown(judged)}, with which the gates compared, got "
            f"{_shown(current)}; {_next(back)}"
        )
    if report.baseline != (live.model_digest if live else None):
        raise ConflictError(
            f"promotion: the gates compared with {report.baseline or 'nothing'}, which is not the model of "
            f"{_shown(current)}; {_next(back)}"
        )
    return True


def _next(back: str) -> str:
    again = "judge again: posttrain run RUN.yaml --again"
    return f"it was live before: {back} brings it back; or {again}" if back else again


def rollback_target(
    history: Sequence[ReleaseEntry], live: ReleaseEntry, quarantined: Collection[str], to: str | None = None
) -> str:
    """Return the digest of the model that a rollback makes live again.

    Args:
        history: the channel's entries, oldest first.
        live: the live entry.
        quarantined: digests of models that a rollback without a target skips.
        to: digest of a model that was live before; None: the model of the newest release that is not quarantined.

    Raises:
        NotFoundError: there is no other model, every other release is quarantined, or `to` was never live.
        InputError: `to` is live already.
    """
    channel, served = live.channel, moves(history)
    if to is None:
        others = [entry.model_digest for entry in reversed(served) if entry.model_digest != live.model_digest]
        if not others:
            raise NotFoundError(
                f"rollback: channel {channel} has released no other model; it stays at {live.model_digest}"
            )
        found = next((digest for digest in others if digest not in quarantined), None)
        if found is None:
            raise NotFoundError(
                f"rollback: channel {channel} has no other release that is not quarantined; posttrain rollback "
                f"{channel} --to RELEASE --lift-quarantine REASON brings one back"
            )
        return found
    if to == live.model_digest:
        raise InputError(f"rollback: {to} is live in channel {channel} already; nothing to do")
    if all(entry.model_digest != to for entry in served):
        raise NotFoundError(f"rollback: {to} was never live in channel {channel}; see its history with `posttrain get`")
    return to


def release_states(history: Sequence[ReleaseEntry]) -> dict[str, ReleaseState]:
    """Return release states by model digest, from a replay of the history through the release state machine.

    Args:
        history: one channel's entries, oldest first.

    Raises:
        ConflictError: the history has a move that the state machine lacks, such as a model promoted over itself.
    """
    states: dict[str, ReleaseState] = {}
    live: str | None = None
    for entry in moves(history):
        if live is not None:
            left = ReleaseState.SUPERSEDED if entry.action == "promote" else ReleaseState.ROLLED_BACK
            check_transition("release", states[live], left)
            states[live] = left
        check_transition("release", states.get(entry.model_digest, ReleaseState.PROPOSED), ReleaseState.LIVE)
        live = entry.model_digest
        states[live] = ReleaseState.LIVE
    return states


def _check_outcome(report: GateReport) -> None:
    if report.outcome is Outcome.PASS:
        return
    first = report.decisive[0] if report.decisive else None
    said = (
        f"the outcome of gate {first.gate} is {first.outcome}: {first.reason}"
        if first
        else "no gate was judged; declare one"
    )
    error = GateInconclusiveError if report.outcome is Outcome.INCONCLUSIVE else GateRejectedError
    raise error(f"promotion: {said}")


def _shown(sequence: int) -> str:
    return f"release {sequence}" if sequence else "no release"


def under_policy(gates: Sequence[GateRule], pinned: PinnedPolicy) -> tuple[GateRule, ...]:
    """Return the gates of a run, and the policy's gates that the run does not have.

    Raises:
        InputError: a gate has the name of a gate of the policy and is weaker; the message names the key.
    """
    own = {gate.name: gate for gate in gates}
    for rule in pinned.policy.gates:
        if rule.name in own:
            refuse_weaker(own[rule.name], rule, pinned)
    return (*gates, *(rule for rule in pinned.policy.gates if rule.name not in own))


def refuse_weaker(own: GateRule, rule: GateRule, pinned: PinnedPolicy) -> None:
    """Reject a gate of a run that is weaker than the policy's gate of that name.

    Raises:
        InputError: the gate is weaker; the message contains the key, the policy's value and the gate's value.
    """
    found = _weaker(own, rule)
    if found is not None:
        key, wanted, got = found
        raise InputError(
            f"gates.{rule.name}.{key}: the policy of channel {pinned.channel} requires {wanted}, got {got}; remove "
            "this gate, make it as strict as the policy, or rename it"
        )


def origin(gate: GateRule, pinned: PinnedPolicy | None) -> str:
    """Return the origin of a gate in a plan, as text."""
    rule = next((rule for rule in pinned.policy.gates if rule.name == gate.name), None) if pinned else None
    if pinned is None or rule is None:
        return "run file"
    whose = f"the policy of channel {pinned.channel}"
    return whose if gate == rule else f"run file, stricter than {whose}"


def _weaker(own: GateRule, rule: GateRule) -> tuple[str, object, object] | None:
    """Return the first weaker key, the required and the actual value; None: all models that pass `own` pass `rule`."""
    form = next(key for key in _BOUNDS if getattr(rule, key) is not None)
    for key in ("metric", form, "direction"):
        wanted, got = getattr(rule, key), getattr(own, key)
        if wanted != got and (key not in ("at_least", "at_most") or got is None):
            return key, wanted, "none" if got is None else got
    short = own.threshold < rule.threshold if rule.higher_is_better else own.threshold > rule.threshold
    if short:
        bound = _AMOUNT.get(form, form)
        return bound, getattr(rule, bound), getattr(own, bound)
    for key in ("confidence", "min_items"):
        if getattr(own, key) < getattr(rule, key):
            return key, getattr(rule, key), getattr(own, key)
    if rule.if_channel_empty == "fail" and own.if_channel_empty == "pass":
        return "if_channel_empty", "fail", "pass"
    return None
