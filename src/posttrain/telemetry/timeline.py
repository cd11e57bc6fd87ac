"""Where a stage's time went: per role how busy its ranks were and what moved, per step which hand-off took how long.

Computed from spans alone. A hand-off ("phase") span is the controller's; a call span is one dispatch to a worker group
and carries the busy interval of every rank. Runs whose spans name no calls have a controller and no roles.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.domain.facts import Span

CONTROLLER = "controller"  # the process that drives the dataflow: a track like a role's
BETWEEN = frozenset({"weights", "checkpoint", "probe"})  # hand-offs that alone make no step: behind the last one
Interval = tuple[float, float]  # [start, end) in seconds since the epoch


@dataclass(frozen=True, slots=True)
class AttemptSpans:
    """What one attempt at a stage said, in the order it said it."""

    stage: str
    attempt: int
    spans: Sequence[Span]

    def phases(self) -> list[Span]:
        """The controller's hand-offs."""
        return [span for span in self.spans if not is_call(span)]

    def calls(self) -> list[Span]:
        """Dispatches to worker groups."""
        return [span for span in self.spans if is_call(span)]

    def window(self) -> Interval:
        """From the controller's first hand-off to its last span; (0, 0) without any. Calls before, while other pools
        start, are no work that others wait for.
        """
        if not self.spans:
            return 0.0, 0.0
        first = min(span.started for span in self.phases() or self.spans)
        return first, max(end_of(span) for span in self.spans)


@dataclass(frozen=True, slots=True)
class RankUse:
    """One rank of a role; busy + idle is the stage's window."""

    rank: int
    busy: float  # seconds, overlapping calls counted once
    idle: float


@dataclass(frozen=True, slots=True)
class RoleUse:
    """One role of a stage, over all its attempts."""

    stage: str
    role: str
    pool: str
    ranks: tuple[RankUse, ...]
    calls: int
    bytes_out: int  # to the workers
    bytes_in: int  # back
    imbalance_mean: float  # max/mean cost over ranks, mean over calls; 1 where nothing was split
    imbalance_max: float

    @property
    def busy(self) -> float:
        """Seconds, mean over ranks."""
        return statistics.fmean(rank.busy for rank in self.ranks) if self.ranks else 0.0

    @property
    def idle(self) -> float:
        """Seconds, mean over ranks."""
        return statistics.fmean(rank.idle for rank in self.ranks) if self.ranks else 0.0

    @property
    def idle_share(self) -> float:
        """Idle over busy + idle; 0 of an empty window."""
        whole = self.busy + self.idle
        return self.idle / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "stage": self.stage,
            "role": self.role,
            "pool": self.pool,
            "ranks": len(self.ranks),
            "busy_seconds": self.busy,
            "idle_seconds": self.idle,
            "idle_share": self.idle_share,
            "calls": self.calls,
            "bytes_out": self.bytes_out,
            "bytes_in": self.bytes_in,
            "imbalance_mean": self.imbalance_mean,
            "imbalance_max": self.imbalance_max,
        }


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step as the controller saw it; a step that was lost and redone appears once per attempt."""

    stage: str
    attempt: int
    step: int
    started: float  # seconds since the epoch
    seconds: float  # from its first hand-off to the end of its last
    # hand-off → seconds in which it was the one under way that had begun last
    phases: Mapping[str, float] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Hand-off → share of the step; what no hand-off covers is missing to 1."""
        return {name: spent / self.seconds if self.seconds else 0.0 for name, spent in self.phases.items()}


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """Summary of a stage."""

    stage: str
    seconds: float  # windows of all attempts together
    attempts: int
    roles: tuple[RoleUse, ...]  # the controller first
    steps: tuple[StepTime, ...]
    phases: Mapping[str, float]  # hand-off → median share of a step, in the order of a step

    @property
    def redone(self) -> int:
        """Steps that an attempt took and lost, and a later one took again."""
        return len(self.steps) - len({step.step for step in self.steps})

    def slowest(self, most: int = 5) -> list[StepTime]:
        """The longest steps, longest first."""
        return sorted(self.steps, key=lambda step: -step.seconds)[:most]

    def typical(self) -> StepTime | None:
        """The step of median length (the shorter of two); None without steps."""
        ordered = sorted(self.steps, key=lambda step: step.seconds)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "stage": self.stage,
            "seconds": self.seconds,
            "attempts": self.attempts,
            "steps": len(self.steps) - self.redone,
            "redone_steps": self.redone,
            "roles": [role.to_json() for role in self.roles],
            "phase_shares": dict(self.phases),
            "slowest_steps": [
                {"step": step.step, "attempt": step.attempt, "seconds": step.seconds, "phases": dict(step.phases)}
                for step in self.slowest()
            ],
        }


def is_call(span: Span) -> bool:
    """Whether a span is a dispatch to a worker group."""
    return span.attributes.get("kind") == "call"


def end_of(span: Span) -> float:
    """When it ended, in seconds since the epoch."""
    return span.started + max(0.0, span.seconds)


def rank_intervals(span: Span) -> Iterator[tuple[int, float, float]]:
    """(rank, start, end) of every rank that a call kept busy."""
    yield from (
        (int(rank), float(started), float(started) + max(0.0, float(seconds)))
        for rank, started, seconds in span.attributes.get("ranks", ())
    )


def union_seconds(intervals: Iterable[Interval], window: Interval) -> float:
    """Seconds inside `window` that at least one interval covers."""
    covered, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            covered += end - start
            reached = end
    return covered


def summarise(attempts: Sequence[AttemptSpans]) -> list[StageTimeline]:
    """One summary per stage that said any span, in the order of the attempts given."""
    stages: dict[str, list[AttemptSpans]] = {}
    for attempt in attempts:
        if attempt.spans:
            stages.setdefault(attempt.stage, []).append(attempt)
    return [_summary(stage, own) for stage, own in stages.items()]


def step_times(attempt: AttemptSpans) -> list[StepTime]:
    """The steps of one attempt in the order they began.

    What only probes or saves (the state behind the last step, or one resumed from) is no step.
    """
    steps: dict[int, list[Span]] = {}
    for span in attempt.phases():
        steps.setdefault(span.step, []).append(span)
    found = []
    for step, spans in steps.items():
        if BETWEEN.issuperset(span.name for span in spans):
            continue
        started, end = min(span.started for span in spans), max(end_of(span) for span in spans)
        phases = _own_seconds(spans)
        found.append(StepTime(attempt.stage, attempt.attempt, step, started, end - started, phases))
    return sorted(found, key=lambda one: (one.started, one.step))


def _own_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Hand-off → seconds in which it was the one under way that had begun last; in the order of a step."""
    ordered = sorted(spans, key=lambda one: (one.started, -one.seconds))
    own = {span.name: 0.0 for span in ordered}
    moments = sorted({moment for span in ordered for moment in (span.started, end_of(span))})
    for begin, end in itertools.pairwise(moments):
        last = next((span for span in reversed(ordered) if span.started <= begin and end_of(span) >= end), None)
        if last:
            own[last.name] += end - begin
    return own


def _summary(stage: str, attempts: Sequence[AttemptSpans]) -> StageTimeline:
    steps = [step for attempt in attempts for step in step_times(attempt)]
    names = dict.fromkeys(name for step in steps for name in step.phases)
    shares = [step.shares() for step in steps]
    phases = {name: statistics.median(share.get(name, 0.0) for share in shares) for name in names}
    seconds = sum(end - start for start, end in (attempt.window() for attempt in attempts))
    roles = (_controller(stage, attempts), *_roles(stage, attempts))
    return StageTimeline(stage, seconds, len(attempts), roles, tuple(steps), phases)


def _controller(stage: str, attempts: Sequence[AttemptSpans]) -> RoleUse:
    """Busy in a hand-off while no call is out; idle while it waits for workers, and between hand-offs."""
    busy = whole = 0.0
    calls = [call for attempt in attempts for call in attempt.calls()]
    for attempt in attempts:
        window = attempt.window()
        out = [(call.started, end_of(call)) for call in attempt.calls()]
        phases = [(phase.started, end_of(phase)) for phase in attempt.phases()]
        busy += union_seconds(phases + out, window) - union_seconds(out, window)
        whole += window[1] - window[0]
    return _use(stage, CONTROLLER, "", {0: busy}, whole, calls, split=False)


def _roles(stage: str, attempts: Sequence[AttemptSpans]) -> Iterator[RoleUse]:
    by_role: dict[tuple[str, str], list[Span]] = {}
    busy: dict[tuple[str, str], dict[int, float]] = {}
    whole = 0.0
    for attempt in attempts:
        window = attempt.window()
        whole += window[1] - window[0]
        intervals: dict[tuple[tuple[str, str], int], list[Interval]] = {}
        for call in attempt.calls():
            role = role_of(call)
            by_role.setdefault(role, []).append(call)
            for rank, start, end in rank_intervals(call):
                intervals.setdefault((role, rank), []).append((start, end))
        for (role, rank), spent in intervals.items():
            ranks = busy.setdefault(role, {})
            ranks[rank] = ranks.get(rank, 0.0) + union_seconds(spent, window)
    yield from (_use(stage, *role, busy.get(role, {}), whole, calls) for role, calls in by_role.items())


def role_of(call: Span) -> tuple[str, str]:
    """(role, pool) that a call went to."""
    return str(call.attributes.get("role", call.name)), str(call.attributes.get("pool", ""))


def _use(
    stage: str, role: str, pool: str, busy: Mapping[int, float], whole: float, calls: Sequence[Span], split: bool = True
) -> RoleUse:
    ranks = tuple(RankUse(rank, spent, max(0.0, whole - spent)) for rank, spent in sorted(busy.items()))
    uneven = [float(call.attributes.get("imbalance", 1.0)) for call in calls] if split else []
    return RoleUse(
        stage=stage,
        role=role,
        pool=pool,
        ranks=ranks,
        calls=len(calls),
        bytes_out=sum(int(call.attributes.get("bytes_out", 0)) for call in calls),
        bytes_in=sum(int(call.attributes.get("bytes_in", 0)) for call in calls),
        imbalance_mean=statistics.fmean(uneven) if uneven else 1.0,
        imbalance_max=max(uneven, default=1.0),
    )
