"""Which events a sink is told of: pure functions of an event, a sink's rules, and what is known of the event's run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from posttrain.domain.lifecycle import Reason
from posttrain.domain.sinks import (
    ALL,
    BUDGET_WARNED,
    BY_FAILURE,
    RUN_ENDED,
    RUN_ENDINGS,
    RUN_SET_ASIDE,
    Envelope,
    Rule,
)
from posttrain.store.sinking import SINK_PAUSED

_GATE_REASONS = (Reason.GATE_FAILED, Reason.GATE_INCONCLUSIVE, Reason.GATE_ERROR)
_OF_A_RUN = ("run", "stage", "attempt", "signal")  # the first word of kinds whose subject begins with a run's id


class Facts(Protocol):
    """What is known of runs beside their events; asked only where a rule asks."""

    def name(self, run_id: str) -> str:
        """Of a run; empty: there is none."""

    def owner(self, run_id: str) -> str:
        """Of a run; empty: there is none, or it was erased."""

    def channel(self, run_id: str) -> str:
        """That it releases to; empty: none, or it cannot be told."""


def occasions(event: Envelope) -> frozenset[str]:
    """The occasions that an event is."""
    kind, _, what = event.kind.partition(".")
    found = {ALL}
    if kind == "run" and what in RUN_ENDINGS:
        found |= {RUN_ENDED, f"run-{what}"}
    if event.kind == "stage.rejected" and event.row("stages").get("reason") in _GATE_REASONS:
        found.add("gate-failed")
    if event.kind == BUDGET_WARNED:
        found.add("budget-80")
    if event.kind == "approval.requested":
        found.add("approval-needed")
    if event.kind in ("channel.promote", "channel.rollback"):
        found.add("channel-moved")
    set_aside = event.kind == "stage.updated" and event.row("stages").get("reason") == Reason.SET_ASIDE
    if event.kind == RUN_SET_ASIDE or set_aside:
        found.add("dead-letter")
    if event.kind == SINK_PAUSED and event.row("sinks").get("paused") == BY_FAILURE:
        found.add("sink-paused")
    return frozenset(found)


def run_of(event: Envelope) -> str:
    """The id of the run that an event is about; empty: none."""
    if event.kind.partition(".")[0] in _OF_A_RUN:
        return event.subject.partition("/")[0]
    told = {"approval.requested": "approval_requests", "channel.promote": "releases", "channel.rollback": "releases"}
    return str(event.row(told[event.kind]).get("run_id") or "") if event.kind in told else ""


def channel_of(event: Envelope, facts: Facts) -> str:
    """The channel that an event is about, by itself or by its run; empty: none."""
    if event.kind.startswith("channel."):
        return event.subject
    if event.kind == "approval.requested":
        return str(event.row("approval_requests").get("channel") or "")
    run = run_of(event)
    return facts.channel(run) if run else ""


def matching(rules: Sequence[Rule], event: Envelope, facts: Facts) -> Rule | None:
    """The rule by which a sink is told of an event: the first, or the first that sends words; None: it is not told."""
    what = occasions(event)
    found = [rule for rule in rules if _says(rule, event, what, facts)]
    return next((rule for rule in found if rule.words), found[0] if found else None)


def _says(rule: Rule, event: Envelope, what: frozenset[str], facts: Facts) -> bool:
    if not what.intersection(rule.on):
        return False
    run = run_of(event)
    if rule.run and not (run and fnmatchcase(facts.name(run), rule.run)):
        return False
    if rule.owner and not (run and facts.owner(run) == rule.owner):
        return False
    return not rule.channel or channel_of(event, facts) == rule.channel
