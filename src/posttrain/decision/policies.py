"""A run's gates under the policy of its channel: a run may add gates and make them stricter, never weaker."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateRule
from posttrain.domain.policies import PinnedPolicy

_BOUNDS = ("at_least", "at_most", "not_worse_than", "better_than")
_AMOUNT = {"not_worse_than": "margin", "better_than": "by"}  # the key that holds the bound of a relative form


def under_policy(gates: Sequence[GateRule], pinned: PinnedPolicy) -> tuple[GateRule, ...]:
    """The gates of a run, and those of the policy that it does not have.

    Raises:
        InputError: one has the name of a gate of the policy and is weaker; names the key.
    """
    own = {gate.name: gate for gate in gates}
    for rule in pinned.policy.gates:
        if rule.name in own:
            refuse_weaker(own[rule.name], rule, pinned)
    return (*gates, *(rule for rule in pinned.policy.gates if rule.name not in own))


def refuse_weaker(own: GateRule, rule: GateRule, pinned: PinnedPolicy) -> None:
    """Refuse a gate of a run that lets pass what the policy's gate of that name would not.

    Raises:
        InputError: it does; names the key, what the policy says and what was written.
    """
    found = _weaker(own, rule)
    if found is not None:
        key, wanted, got = found
        raise InputError(
            f"gates.{rule.name}.{key}: the policy of channel {pinned.channel} says {wanted}, got {got}; leave this "
            "gate out, make it as strict, or give another gate its own name"
        )


def origin(gate: GateRule, pinned: PinnedPolicy | None) -> str:
    """Where a gate of a plan comes from, in words."""
    rule = next((rule for rule in pinned.policy.gates if rule.name == gate.name), None) if pinned else None
    if pinned is None or rule is None:
        return "run file"
    whose = f"the policy of channel {pinned.channel}"
    return whose if gate == rule else f"run file, stricter than {whose}"


def _weaker(own: GateRule, rule: GateRule) -> tuple[str, object, object] | None:
    """Key, what is wanted and what was written; None: whatever passes `own` passes `rule`."""
    form = _form(rule)
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


def _form(rule: GateRule) -> str:
    return next(key for key in _BOUNDS if getattr(rule, key) is not None)
