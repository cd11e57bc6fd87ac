"""A run's spans as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

One process per stage's controller and per role, one thread per rank; the controller's hand-offs nest in steps; an arrow
goes from each call to what it made the ranks do; a counter adds up the bytes that moved. Times are microseconds since
the first span. The viewers drop slices of a thread that overlap without nesting, which clocks read twice produce: see
`_nested`. The untouched duration of a span is in its `seconds`.

Format: "Trace Event Format", Google, 2016 (JSON object form, events X, M, s, f, C, i).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from posttrain.domain.facts import Span
from posttrain.telemetry.timeline import (
    CONTROLLER,
    AttemptSpans,
    end_of,
    rank_intervals,
    role_of,
    step_times,
)

Event = dict[str, Any]
_HAND_OFFS, _CALLS = 0, 1  # the controller's threads; calls that overlap go on to 2, 3, …


@dataclass(frozen=True, slots=True)
class _Slice:
    """A complete event before it has its place, in microseconds."""

    name: str
    start: int
    end: int
    args: dict[str, Any]
    category: str
    flows: tuple[int, ...] = ()  # arrows that leave a call (one per rank) or arrive at a rank


def chrome_trace(attempts: Sequence[AttemptSpans]) -> dict[str, Any]:
    """The trace as a JSON object. Attempts of a stage follow each other on its tracks; stages lie side by side.

    Events of metadata come first, then all others by time.
    """
    said = [attempt for attempt in attempts if attempt.spans]
    writer = _Writer(_first(said))
    for stage in dict.fromkeys(attempt.stage for attempt in said):
        writer.stage(stage, [attempt for attempt in said if attempt.stage == stage])
    events = sorted(writer.events, key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": [*writer.names, *events], "displayTimeUnit": "ms"}


def _first(attempts: Sequence[AttemptSpans]) -> float:
    starts = [span.started for attempt in attempts for span in attempt.spans]
    starts += [start for a in attempts for call in a.calls() for _, start, _ in rank_intervals(call)]
    return min(starts, default=0.0)


class _Writer:
    """Gathers events; numbers processes and arrows."""

    def __init__(self, origin: float) -> None:
        self.names: list[Event] = []
        self.events: list[Event] = []
        self._origin, self._processes, self._arrows = origin, 0, 0

    def stage(self, stage: str, attempts: Sequence[AttemptSpans]) -> None:
        """All tracks of a stage."""
        driver = self._process(f"{stage} · {CONTROLLER}")
        self._thread(driver, _HAND_OFFS, "hand-offs")
        on_ranks: dict[tuple[str, str], dict[int, list[_Slice]]] = {}
        lanes: list[list[_Slice]] = []
        hand_offs, beside = _apart([one for attempt in attempts for one in self._hand_offs(attempt)])
        self._slices(driver, _HAND_OFFS, hand_offs)
        moved = 0
        for attempt in attempts:
            self._mark(driver, attempt)
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
            self._thread(driver, lane, "hand-offs beside others")
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
        """(rank, what the call made it do)."""
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
        """The counter of bytes, which goes on over attempts."""
        for call in sorted(attempt.calls(), key=end_of):
            moved += int(call.attributes.get("bytes_out", 0)) + int(call.attributes.get("bytes_in", 0))
            where = {"pid": process, "tid": _HAND_OFFS, "ts": self._at(end_of(call))}
            self.events.append({"ph": "C", "name": "bytes moved", **where, "args": {"bytes": moved}})
        return moved

    def _mark(self, process: int, attempt: AttemptSpans) -> None:
        where = {"pid": process, "tid": _HAND_OFFS, "ts": self._at(attempt.window()[0])}
        self.events.append({"ph": "i", "s": "p", "name": f"attempt {attempt.attempt}", "cat": "attempt", **where})

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
    """The first lane that is free when the slice begins; a new one if none is."""
    for lane in lanes:
        if lane[-1].end <= slice_.start:
            return lane
    lanes.append([])
    return lanes[-1]


def _apart(slices: Iterable[_Slice]) -> tuple[list[_Slice], list[list[_Slice]]]:
    """Steps and the hand-offs in them; and in lanes of their own hand-offs that began during one and outlasted it."""
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
    """Whether two overlap so little that the clock that says when and the one that says how long explain it."""
    return 2 * (first.end - second.start) < min(first.end - first.start, second.end - second.start)


def _nested(slices: Iterable[_Slice]) -> Iterator[_Slice]:
    """Slices of one thread by start, each wholly inside or wholly outside of every other.

    Of two that overlap by less than half of the shorter, the second is made to begin where the first ends (the clock
    that says when differs from the one that says how long); of others, the second ends with the first.
    """
    order = count()
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
