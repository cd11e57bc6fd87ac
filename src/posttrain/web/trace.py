"""The one-page trace of a run: a self-contained HTML file, like the report (no script, nothing from outside).

It shows who was busy and who waited, which hand-off took how much of every step, and two steps as Gantt charts: the one
of median length and the longest.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.domain.jobs import Sample, Span
from posttrain.telemetry.timeline import (
    CONTROLLER,
    AttemptSpans,
    StageTimeline,
    StepTime,
    end_of,
    is_call,
    rank_intervals,
    role_of,
    summarise,
)
from posttrain.web.pages import brief, template, write_page

WIDTH = 1000.0  # user units of a picture's width
_MOST_BARS = 160  # steps drawn one by one; of more, neighbours are averaged
_MOST_RANKS = 16  # rows of a role in a Gantt chart
_MOST_SAMPLES = 200
_ROW, _LABEL = 22, 170.0  # height of a Gantt row, width of its label
# Mid tones: legible on white and on black. A hand-off keeps its colour in all runs
_COLOURS = {
    "rollout": "#3b82c4",
    "reward": "#d99a2b",
    "reference": "#b86aa0",
    "values": "#4aa8b8",
    "advantage": "#8f8a3a",
    "update": "#cf5f3c",
    "weights": "#3f9b6c",
    "checkpoint": "#7d8590",
    "probe": "#8467c4",
    "pack": "#a67c52",
}
_OTHERS = ("#5f7fae", "#a8763e", "#6f9a4d", "#9c5d77", "#5c8f8a")


@dataclass(frozen=True, slots=True)
class TracePage:
    """Everything the page shows."""

    run_id: str
    name: str
    state: str
    attempts: Sequence[AttemptSpans]
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()  # what could not be read
    begun: Sequence[str] = ()  # stages whose first steps another run trained


@dataclass(frozen=True, slots=True)
class Block:
    """A coloured rectangle, in user units."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    name: str  # written into it where there is room
    told: str  # shown on hovering


@dataclass(frozen=True, slots=True)
class GanttRow:
    """One rank, or the controller."""

    label: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Gantt:
    """One step: its rows by role and rank over time."""

    title: str
    rows: tuple[GanttRow, ...]
    ticks: tuple[tuple[float, str], ...]  # (x, time since the step began)
    left_out: int  # ranks not drawn

    @property
    def height(self) -> int:
        """User units, without the axis."""
        return _ROW * len(self.rows)


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A hand-off; medians over the steps that have it (a checkpoint is not in every step)."""

    name: str
    colour: str
    share: float
    seconds: float
    steps: int
    rare: bool  # so that the number of steps is told


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage's pictures."""

    timeline: StageTimeline
    bars: tuple[Block, ...]
    legend: tuple[LegendEntry, ...]
    averaged: int  # steps per bar
    gantts: tuple[Gantt, ...]


def trace_page(path: Path, page: TracePage) -> None:
    """Write the page.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, render_trace_page(page), "trace")


def render_trace_page(page: TracePage) -> str:
    """The page as HTML; the same facts give the same text."""
    stages = [_view(timeline, page.attempts) for timeline in summarise(page.attempts)]
    shown = page.samples[:_MOST_SAMPLES]
    return template("trace.html").render(page=page, stages=stages, samples=shown, width=WIDTH, label=_LABEL, row=_ROW)


def _view(timeline: StageTimeline, attempts: Sequence[AttemptSpans]) -> StageView:
    others = [name for name in timeline.phases if name not in _COLOURS]
    colours = _COLOURS | {name: _OTHERS[index % len(_OTHERS)] for index, name in enumerate(others)}
    each = max(1, math.ceil(len(timeline.steps) / _MOST_BARS))
    typical, slowest = timeline.typical(), timeline.slowest(1)
    legend = tuple(_legend(timeline, name, colours[name]) for name in timeline.phases)
    wanted = [("Typical step", typical), ("Slowest step", slowest[0] if slowest else None)]
    if typical in slowest:
        wanted = wanted[:1]
    gantts = tuple(_gantt(title, step, attempts, colours) for title, step in wanted if step)
    return StageView(timeline, tuple(_bars(timeline, colours, each)), legend, each, gantts)


def _legend(timeline: StageTimeline, phase: str, colour: str) -> LegendEntry:
    steps = [step for step in timeline.steps if phase in step.phases]
    share = statistics.median(step.shares()[phase] for step in steps)
    middle = statistics.median(step.phases[phase] for step in steps)
    return LegendEntry(phase, colour, share, middle, len(steps), rare=len(steps) < 0.9 * len(timeline.steps))


def _bars(timeline: StageTimeline, colours: Mapping[str, str], each: int) -> Iterator[Block]:
    """Per step (or `each` steps) a stack of shares, top down in the order of a step; 100 units high."""
    bins = [timeline.steps[at : at + each] for at in range(0, len(timeline.steps), each)]
    width = WIDTH / max(len(bins), 24)
    for place, steps in enumerate(bins):
        whole = sum(step.seconds for step in steps)
        named = f"step {steps[0].step}" + (f" to {steps[-1].step}" if each > 1 else "")
        y = 0.0
        for name in timeline.phases:
            spent = sum(step.phases.get(name, 0.0) for step in steps)
            if whole <= 0 or spent <= 0:
                continue
            height = min(100 * spent / whole, 100 - y)
            told = f"{named}: {name} {brief(spent / len(steps))}, {spent / whole:.1%} of {brief(whole / len(steps))}"
            yield Block(
                round(place * width, 2), round(y, 3), round(width * 0.9, 2), round(height, 3), colours[name], name, told
            )
            y += height


def _gantt(title: str, step: StepTime, attempts: Sequence[AttemptSpans], colours: Mapping[str, str]) -> Gantt:
    begin, seconds = step.started, max(step.seconds, 1e-9)
    attempt = next(a for a in attempts if (a.stage, a.attempt) == (step.stage, step.attempt) and a.spans)
    near = [span for span in attempt.spans if end_of(span) > begin and span.started < begin + seconds]
    tracks, left_out = _tracks(near, colours)
    rows = []
    for place, ((role, rank), busy) in enumerate(tracks.items()):
        label = f"{role} · rank {rank}" if role != CONTROLLER else role
        inside = [one for one in busy if one.end > begin and one.start < begin + seconds]
        rows.append(GanttRow(label, tuple(_block(label, one, place, begin, seconds) for one in inside)))
    scale = (WIDTH - _LABEL) / seconds
    ticks = tuple((round(_LABEL + at * scale, 2), brief(at)) for at in _ticks(seconds))
    return Gantt(f"{title}: {step.step}, {brief(step.seconds)}", tuple(rows), ticks, left_out)


@dataclass(frozen=True, slots=True)
class _Busy:
    """What a track was doing when."""

    name: str
    start: float
    end: float
    colour: str


def _tracks(near: Sequence[Span], colours: Mapping[str, str]) -> tuple[dict[tuple[str, int], list[_Busy]], int]:
    """(role, rank) → what it did by time, roles in the order of their first call; and how many ranks have no row."""
    controller: list[_Busy] = []
    roles: dict[str, dict[int, list[_Busy]]] = {}
    hidden: set[tuple[str, int]] = set()
    for span in sorted(near, key=lambda one: (one.started, -one.seconds)):
        if not is_call(span):
            colour = colours.get(span.name, _OTHERS[0])
            controller.append(_Busy(span.name, span.started, end_of(span), colour))
            continue
        colour = colours.get(_during(span, near), _OTHERS[0])
        role, method = role_of(span)[0], str(span.attributes.get("method", span.name))
        for rank, start, end in rank_intervals(span):
            if rank < _MOST_RANKS:
                roles.setdefault(role, {}).setdefault(rank, []).append(_Busy(method, start, end, colour))
            else:
                hidden.add((role, rank))
    tracks = {(role, rank): busy for role, ranks in roles.items() for rank, busy in sorted(ranks.items())}
    return {(CONTROLLER, 0): controller, **tracks}, len(hidden)


def _block(label: str, busy: _Busy, place: int, begin: float, seconds: float) -> Block:
    scale = (WIDTH - _LABEL) / seconds
    x = _LABEL + max(busy.start - begin, 0.0) * scale
    width = max(_LABEL + min(busy.end - begin, seconds) * scale - x, 0.6)
    shown = busy.name if len(busy.name) * 7 + 8 < width else ""
    told = f"{label}: {busy.name} {brief(busy.end - busy.start)}"
    return Block(round(x, 2), place * _ROW + 3, round(width, 2), _ROW - 6, busy.colour, shown, told)


def _during(call: Span, near: Sequence[Span]) -> str:
    """The hand-off that a call was made in, the innermost; empty without one."""
    around = [span for span in near if not is_call(span) and span.started <= call.started < end_of(span)]
    return min(around, key=lambda span: span.seconds).name if around else ""


def _ticks(seconds: float) -> Iterator[float]:
    """Five or so round times in [0, seconds]."""
    rough = seconds / 5
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    yield from (index * pace for index in range(int(seconds / pace) + 1))
