"""The timeline of a stage, and a run's spans as a Chrome trace.

A timeline shows how a stage used its time: for each role, how busy its ranks were and how many bytes were transferred;
for each step, the duration of each hand-off. A timeline is computed from spans alone. A hand-off span ("phase") is
recorded by the controller. A call span is one dispatch to a worker group, with the busy interval of every rank. Runs
without call spans have a controller and no roles.

A Chrome trace can be opened in ui.perfetto.dev and chrome://tracing. The trace has one process for each stage's
controller and one for each role, and one thread for each rank. The controller's hand-offs are nested in steps, an arrow
goes from each call to the work of its ranks, and a counter adds up the bytes that were transferred. Times are
microseconds since the first span. The viewers drop slices of a thread that overlap without being nested, which
different clocks can cause; see `_nested`. A span's original duration is in its `seconds`.

Format: "Trace Event Format", Google, 2016 (JSON object form, events X, M, s, f, C, i).
"""

import heapq
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.domain.jobs import Span

CONTROLLER = "controller"  # the process that drives the dataflow; it has a track like a role
BETWEEN = frozenset({"weights", "checkpoint", "probe"})  # hand-offs that do not form a step, e.g. after the last step
Interval = tuple[float, float]  # [start, end) in seconds since the epoch
Event = dict[str, Any]
_HAND_OFFS, _CALLS = 0, 1  # the controller's threads; overlapping calls also use 2, 3, …


@dataclass(frozen=True, slots=True)
class AttemptSpans:
    """The spans of one attempt at a stage, in the order in which the attempt reported them."""

    stage: str
    attempt: int
    spans: Sequence[Span]

    def phases(self) -> list[Span]:
        """Return the controller's hand-offs."""
        return [span for span in self.spans if not is_call(span)]

    def calls(self) -> list[Span]:
        """Return the dispatches to worker groups."""
        return [span for span in self.spans if is_call(span)]

    def window(self) -> Interval:
        """Return the interval from the controller's first hand-off to the end of the last span; (0, 0) without spans.

        Calls before the first hand-off occur while other pools start, and delay no other work.
        """
        if not self.spans:
            return 0.0, 0.0
        first = min(span.started for span in self.phases() or self.spans)
        return first, max(end_of(span) for span in self.spans)


@dataclass(frozen=True, slots=True)
class RankUse:
    """One rank of a role; busy and idle seconds add up to the stage's window."""

    rank: int
    busy: float  # seconds; overlapping calls count once
    idle: float


@dataclass(frozen=True, slots=True)
class RoleUse:
    """One role of a stage, over all its attempts."""

    stage: str
    role: str
    pool: str
    ranks: tuple[RankUse, ...]
    calls: int
    bytes_out: int  # sent to the workers
    bytes_in: int  # returned by the workers
    imbalance_mean: float  # maximum/mean of the cost over ranks, averaged over calls; 1 if calls were not split
    imbalance_max: float

    @property
    def busy(self) -> float:
        """Busy seconds, averaged over ranks."""
        return statistics.fmean(rank.busy for rank in self.ranks) if self.ranks else 0.0

    @property
    def idle(self) -> float:
        """Idle seconds, averaged over ranks."""
        return statistics.fmean(rank.idle for rank in self.ranks) if self.ranks else 0.0

    @property
    def idle_share(self) -> float:
        """The share of idle time in the window; 0 for an empty window."""
        whole = self.busy + self.idle
        return self.idle / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
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
    """One step of the controller; a step that was lost and redone appears once for each attempt."""

    stage: str
    attempt: int
    step: int
    started: float  # seconds since the epoch
    seconds: float  # from the beginning of the first hand-off to the end of the last
    # hand-off → seconds in which it was, of the running hand-offs, the one that began last
    phases: Mapping[str, float] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Return hand-off → share of the step. The sum is less than 1 if no hand-off covers a part of the step."""
        return {name: spent / self.seconds if self.seconds else 0.0 for name, spent in self.phases.items()}


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """Summary of how a stage used its time."""

    stage: str
    seconds: float  # sum over the windows of all attempts
    attempts: int
    roles: tuple[RoleUse, ...]  # the controller first
    steps: tuple[StepTime, ...]
    phases: Mapping[str, float]  # hand-off → median share of a step, in the order of a step

    @property
    def redone(self) -> int:
        """The number of steps that an attempt lost and a later attempt repeated."""
        return len(self.steps) - len({step.step for step in self.steps})

    def slowest(self, most: int = 5) -> list[StepTime]:
        """Return the longest steps, longest first."""
        return sorted(self.steps, key=lambda step: -step.seconds)[:most]

    def typical(self) -> StepTime | None:
        """Return the step of median length (the shorter one if there are two); None if there are no steps."""
        ordered = sorted(self.steps, key=lambda step: step.seconds)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
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
    """Return whether a span is a dispatch to a worker group."""
    return span.attributes.get("kind") == "call"


def end_of(span: Span) -> float:
    """Return the end of a span, in seconds since the epoch."""
    return span.started + max(0.0, span.seconds)


def rank_intervals(span: Span) -> Iterator[tuple[int, float, float]]:
    """Return (rank, start, end) of every rank that was busy with a call."""
    yield from (
        (int(rank), float(started), float(started) + max(0.0, float(seconds)))
        for rank, started, seconds in span.attributes.get("ranks", ())
    )


def union_seconds(intervals: Iterable[Interval], window: Interval) -> float:
    """Return the seconds in `window` that at least one interval covers."""
    covered, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            covered += end - start
            reached = end
    return covered


def summarise(attempts: Sequence[AttemptSpans]) -> list[StageTimeline]:
    """Return one summary for each stage that has spans, in the order of the attempts."""
    stages: dict[str, list[AttemptSpans]] = {}
    for attempt in attempts:
        if attempt.spans:
            stages.setdefault(attempt.stage, []).append(attempt)
    return [_summary(stage, own) for stage, own in stages.items()]


def step_times(attempt: AttemptSpans) -> list[StepTime]:
    """Return the steps of one attempt in the order in which they began.

    A group that consists only of probes or saves (after the last step, or after a resume) is not a step.
    """
    steps: dict[int, list[Span]] = {}
    for span in attempt.phases():
        steps.setdefault(span.step, []).append(span)
    found = []
    for step, spans in steps.items():
        if BETWEEN.issuperset(span.name for span in spans):
            continue
        started, end = min(span.started for span in spans), max(end_of(span) for span in spans)
        found.append(StepTime(attempt.stage, attempt.attempt, step, started, end - started, _own_seconds(spans)))
    return sorted(found, key=lambda one: (one.started, one.step))


def _own_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Return hand-off → seconds in which it was the last-begun of the running hand-offs; in the order of a step."""
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
    """Return the controller's use of time.

    The controller is busy in a hand-off during which no call runs, and idle while it waits and between hand-offs.
    """
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
    """Return (role, pool) of a call."""
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


@dataclass(frozen=True, slots=True)
class _Slice:
    """A complete event to which no track has been assigned yet; times are in microseconds."""

    name: str
    start: int
    end: int
    args: dict[str, Any]
    category: str
    flows: tuple[int, ...] = ()  # arrows that leave a call (one per rank) or arrive at a rank


def chrome_trace(attempts: Sequence[AttemptSpans]) -> dict[str, Any]:
    """Return the trace as a JSON object.

    The attempts of a stage follow each other on the stage's tracks. Different stages have different tracks. Metadata
    events come first, and then all other events in the order of time.
    """
    said = [attempt for attempt in attempts if attempt.spans]
    starts = [span.started for attempt in said for span in attempt.spans]
    starts += [start for a in said for call in a.calls() for _, start, _ in rank_intervals(call)]
    writer = _Writer(min(starts, default=0.0))
    for stage in dict.fromkeys(attempt.stage for attempt in said):
        writer.stage(stage, [attempt for attempt in said if attempt.stage == stage])
    events = sorted(writer.events, key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": [*writer.names, *events], "displayTimeUnit": "ms"}


class _Writer:
    """Collects events, and numbers processes and arrows."""

    def __init__(self, origin: float) -> None:
        self.names: list[Event] = []
        self.events: list[Event] = []
        self._origin, self._processes, self._arrows = origin, 0, 0

    def stage(self, stage: str, attempts: Sequence[AttemptSpans]) -> None:
        """Add all tracks of a stage."""
        driver = self._process(f"{stage} · {CONTROLLER}")
        self._thread(driver, _HAND_OFFS, "hand-offs")
        on_ranks: dict[tuple[str, str], dict[int, list[_Slice]]] = {}
        lanes: list[list[_Slice]] = []
        hand_offs, beside = _apart([one for attempt in attempts for one in self._hand_offs(attempt)])
        self._slices(driver, _HAND_OFFS, hand_offs)
        moved = 0
        for attempt in attempts:
            where = {"pid": driver, "tid": _HAND_OFFS, "ts": self._at(attempt.window()[0])}
            self.events.append({"ph": "i", "s": "p", "name": f"attempt {attempt.attempt}", "cat": "attempt", **where})
            for call in sorted(attempt.calls(), key=lambda span: span.started):
                work = list(self._work(call))
                flows = tuple(arrow for _, one in work for arrow in one.flows)
                shown = replace(self._slice(call, "call"), flows=flows)
                _lane(lanes, shown).append(shown)
                ranks = on_ranks.setdefault(role_of(call), {})
                for rank, one in work:
                    ranks.setdefault(rank, []).append(one)
            moved = self._bytes(driver, attempt, moved)
        for lane, slices in enumerate(lanes, _CALLS):
            self._thread(driver, lane, "calls" if lane == _CALLS else f"calls {lane}")
            self._slices(driver, lane, slices)
        for lane, slices in enumerate(beside, _CALLS + len(lanes)):
            self._thread(driver, lane, "overlapping hand-offs")
            self._slices(driver, lane, slices)
        for (role, pool), ranks in on_ranks.items():
            process = self._process(f"{stage} · {role}" + (f" (pool {pool})" if pool else ""))
            for rank, slices in sorted(ranks.items()):
                self._thread(process, rank, f"rank {rank}")
                self._slices(process, rank, slices)

    def _hand_offs(self, attempt: AttemptSpans) -> Iterator[_Slice]:
        for step in step_times(attempt):
            args = {"attempt": attempt.attempt, "seconds": step.seconds}
            start, end = self._at(step.started), self._at(step.started + step.seconds)
            yield _Slice(f"step {step.step}", start, end, args, "step")
        yield from (self._slice(span, "hand-off") for span in attempt.phases())

    def _work(self, call: Span) -> Iterator[tuple[int, _Slice]]:
        """Yield (rank, the rank's work for a call)."""
        name = str(call.attributes.get("method", call.name))
        for rank, start, end in rank_intervals(call):
            self._arrows += 1
            args = {"step": call.step, "seconds": end - start}
            yield rank, _Slice(name, self._at(start), self._at(end), args, "work", (self._arrows,))

    def _slice(self, span: Span, category: str) -> _Slice:
        told = {key: value for key, value in span.attributes.items() if key not in ("kind", "ranks")}
        args = {"step": span.step, "seconds": span.seconds, **told}
        return _Slice(span.name, self._at(span.started), self._at(end_of(span)), args, category)

    def _slices(self, process: int, thread: int, slices: Iterable[_Slice]) -> None:
        for one in _nested(slices):
            where = {"pid": process, "tid": thread, "ts": one.start}
            self.events.append(
                {"ph": "X", "name": one.name, "cat": one.category, **where, "dur": one.end - one.start}
                | {"args": one.args}
            )
            for flow in one.flows:
                arrow = {"name": "call", "cat": "flow", "id": flow, **where}
                self.events.append({"ph": "s", **arrow} if one.category == "call" else {"ph": "f", "bp": "e", **arrow})

    def _bytes(self, process: int, attempt: AttemptSpans, moved: int) -> int:
        """Add the counter of bytes, which continues from one attempt to the next; return its value."""
        for call in sorted(attempt.calls(), key=end_of):
            moved += int(call.attributes.get("bytes_out", 0)) + int(call.attributes.get("bytes_in", 0))
            where = {"pid": process, "tid": _HAND_OFFS, "ts": self._at(end_of(call))}
            self.events.append({"ph": "C", "name": "bytes moved", **where, "args": {"bytes": moved}})
        return moved

    def _process(self, name: str) -> int:
        self._processes += 1
        base = {"ph": "M", "pid": self._processes, "tid": 0}
        self.names.append({**base, "name": "process_name", "args": {"name": name}})
        self.names.append({**base, "name": "process_sort_index", "args": {"sort_index": self._processes}})
        return self._processes

    def _thread(self, process: int, thread: int, name: str) -> None:
        base = {"ph": "M", "pid": process, "tid": thread}
        self.names.append({**base, "name": "thread_name", "args": {"name": name}})
        self.names.append({**base, "name": "thread_sort_index", "args": {"sort_index": thread}})

    def _at(self, moment: float) -> int:
        return max(0, round((moment - self._origin) * 1e6))


def _lane(lanes: list[list[_Slice]], slice_: _Slice) -> list[_Slice]:
    """Return the first lane that is free when the slice begins, or a new one."""
    for lane in lanes:
        if lane[-1].end <= slice_.start:
            return lane
    lanes.append([])
    return lanes[-1]


def _apart(slices: Iterable[_Slice]) -> tuple[list[_Slice], list[list[_Slice]]]:
    """Return steps with their hand-offs and, in separate lanes, the hand-offs that outlast an earlier hand-off."""
    track: list[_Slice] = []
    lanes: list[list[_Slice]] = []
    last: _Slice | None = None
    for one in sorted(slices, key=lambda one: (one.start, -one.end)):
        if one.category == "step":
            track.append(one)
        elif last and one.start < last.end < one.end and not _clocks_differ(last, one):
            _lane(lanes, one).append(one)
        else:
            track.append(one)
            last = one if last is None or one.end > last.end else last
    return track, lanes


def _clocks_differ(first: _Slice, second: _Slice) -> bool:
    """Return whether the different clocks of starts and durations explain the overlap of two slices."""
    return 2 * (first.end - second.start) < min(first.end - first.start, second.end - second.start)


def _nested(slices: Iterable[_Slice]) -> Iterator[_Slice]:
    """Yield the slices of one thread in the order of their starts, each wholly inside or outside every other slice.

    If two slices overlap by less than half of the shorter slice, the second begins where the first ends (start times
    and durations come from different clocks); otherwise the second is cut to end with the first.
    """
    order = itertools.count()
    waiting = [(one.start, -one.end, next(order), one) for one in slices]
    heapq.heapify(waiting)
    open_: list[_Slice] = []
    while waiting:
        one = heapq.heappop(waiting)[-1]
        while open_ and open_[-1].end <= one.start:
            open_.pop()
        if open_ and one.end > open_[-1].end:
            outer = open_[-1]
            if _clocks_differ(outer, one):
                later = replace(one, start=outer.end)
                heapq.heappush(waiting, (later.start, -later.end, next(order), later))
                continue
            one = replace(one, end=outer.end)
        yield one
        open_.append(one)
