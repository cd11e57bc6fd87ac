"""Pages of run reports, comparisons and traces.

The run report is one page with the configuration, the results, and their reliability. The page of a comparison shows
scores next to each other, the items with changed outcomes, overlaid curves, and the differences between the runs.

The trace is, like the report, one self-contained HTML file without scripts and external resources. It shows the busy
and idle time of roles, the share of each hand-off in every step, and two steps as Gantt charts: the step of median
length and the longest step.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.control.comparison import Comparison, Difference
from posttrain.control.scores import Response, Scores
from posttrain.domain.gates import GateReport, Verdict
from posttrain.domain.jobs import Sample, Span
from posttrain.foreign.evaluations import Measured
from posttrain.telemetry.symptoms import Finding
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
from posttrain.web.pages import Sizes, brief, fitted, template, write_page
from posttrain.web.panels import (
    COMPONENTS,
    MAIN,
    REWARD,
    TONES,
    CurveSeries,
    Panel,
    component,
    panel,
    rank,
    steps_of,
    whiskers,
)

_BEFORE, _AFTER = 1, 0  # colours of a score's two points
WIDTH = 1000.0  # user units of a picture's width
_MOST_BARS = 160  # maximum number of bars; with more steps, neighbouring steps are averaged


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage in the report's table of stages."""

    name: str
    kind: str
    state: str
    cached_from: str | None = None  # "<run>/<stage>", if that stage's outputs were reused
    attempts: int = 0
    seconds: float | None = None  # None: the stage has not started
    tokens: int = 0
    output: str | None = None  # digest of the stage's output
    best: str | None = None  # digest of the stage's best model, if this is not the last model


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One declared limit."""

    name: str  # such as tokens or seconds
    spent: float
    limit: float | None = None  # None: no limit


@dataclass(frozen=True, slots=True)
class StageCurves:
    """The curves that a training stage recorded by step."""

    stage: str
    kind: str
    series: Mapping[str, CurveSeries]  # metric → line, most important first
    begun: str = ""  # which run and stage trained the first steps
    chosen: str = ""  # the decision by the stage's probe
    marks: tuple[tuple[int, str], ...] = ()  # (step, label) for the decision


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Responses to one prompt of a step."""

    step: int
    members: int  # number of members in the group; not all of them are shown
    shown: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class StageSamples:
    """Recorded responses of a training stage."""

    stage: str
    steps: tuple[SampledStep, ...]


@dataclass(frozen=True, slots=True)
class SuiteAnswers:
    """Greedy responses to the prompts of a suite."""

    stage: str
    suite: str
    of: str  # the model that gave the responses
    items: int  # number of items with a reference answer
    wrong: int
    cut: int  # number of wrong responses that reached the token limit
    wrong_shown: tuple[Response, ...]
    right_shown: tuple[Response, ...]
    scored: int = 0  # number of items without an answer, which only a reward scored
    low_shown: tuple[Response, ...] = ()  # responses with low scores, lowest first
    high_shown: tuple[Response, ...] = ()  # responses with high scores, highest first
    sampled: str = ""  # how responses were sampled, as text


@dataclass(frozen=True, slots=True)
class StageParameters:
    """The inputs and parameters of a stage."""

    stage: str
    kind: str
    inputs: tuple[tuple[str, str, str], ...]  # slot, name, digest
    params: tuple[tuple[str, str], ...]  # dotted name, value


@dataclass(frozen=True, slots=True)
class SystemRow:
    """How a stage used the machine."""

    stage: str
    seconds: float
    tokens: int
    tokens_per_second: float | None  # median over the steps
    step_seconds: float | None  # median over the steps
    steps: int  # number of steps from which the times were computed
    phases: tuple[tuple[str, float, float], ...]  # hand-off, median seconds, share of the time
    resident: float | None = None  # peak memory of the job's process in MiB; None: not reported
    allocated: float | None = None  # peak memory of the job's CUDA device in MiB; None: no device


@dataclass(frozen=True, slots=True)
class RunReport:
    """The contents of a run report. Digests are complete, so the page can be checked against the ledger."""

    run_id: str
    name: str
    state: str
    owner: str
    seed: int
    manifest_digest: str
    reason: str = ""  # why the run is in its state, for people
    next_action: str = ""
    stages: tuple[StageRow, ...] = ()
    gates: tuple[Verdict, ...] = ()
    lineage: tuple[str, ...] = ()  # lines of an indented tree
    budgets: tuple[BudgetRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()  # such as a reward version that differs from that of the channel's model
    compared_with: str = ""  # the run with which `changes` compares
    changes: tuple[Difference, ...] = ()
    scores: Scores = field(default_factory=Scores)
    curves: tuple[StageCurves, ...] = ()
    samples: tuple[StageSamples, ...] = ()
    answers: tuple[SuiteAnswers, ...] = ()
    parameters: tuple[StageParameters, ...] = ()
    system: tuple[SystemRow, ...] = ()


def run_report(path: Path, report: RunReport) -> None:
    """Write the page of a run report.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, render_run_report(report), "run report")


def render_run_report(report: RunReport, name: str = "run.html", *, stages: bool = True) -> str:
    """Return the page as HTML, under 2 MB; the same report gives the same text.

    Args:
        name: the name of the template; `_run.html` is the part that a server's page contains.
        stages: whether to include the table of stages, which a server's page may already have.
    """
    return fitted(lambda sizes: _render(report, sizes, name, stages))


@dataclass(frozen=True, slots=True)
class CurvesView:
    """The panels of a stage."""

    of: StageCurves
    main: tuple[Panel, ...]
    more: tuple[Panel, ...]
    left_out: int


def _render(report: RunReport, sizes: Sizes, name: str, stages: bool) -> str:
    pictures = [
        whiskers(row.metric, [(_AFTER, row.estimate), *((_BEFORE, one.estimate) for one in row.before)])
        for row in report.scores.rows
    ]
    return template(name).render(
        report=report,
        stages=stages,
        scales=[scale(verdict) for verdict in report.gates],
        pictures=pictures,
        curves=_panels(report.curves, sizes),
        sizes=sizes,
        components=COMPONENTS,
    )


def _panels(stages: Sequence[StageCurves], sizes: Sizes) -> list[CurvesView]:
    """Return the panels of all stages; if there are too many panels, only the first of every stage."""
    each = max(1, sizes.panels // max(1, len(stages)))
    views = []
    for one in stages[: sizes.panels]:
        lines = _lines(one.series)
        span = steps_of(lines.values())
        panels = {metric: panel(metric, lines[metric], sizes.points, one.marks, span) for metric in list(lines)[:each]}
        main = tuple(made for metric, made in panels.items() if _is_main(metric))
        more = tuple(made for metric, made in panels.items() if not _is_main(metric))
        views.append(CurvesView(one, main, more, len(lines) - len(panels)))
    return views


def _lines(series: Mapping[str, CurveSeries]) -> dict[str, list[CurveSeries]]:
    """Return panel → lines, most important panel first; a panel has one metric or several components of a reward."""
    parts = [replace(one, run=component(metric)) for metric, one in series.items() if component(metric)]
    found: dict[str, list[CurveSeries]] = {REWARD: [series[REWARD]]} if REWARD in series else {}
    for start in range(0, len(parts), TONES):  # each gets its own colour
        found[f"{COMPONENTS} {1 + start // TONES}" if start else COMPONENTS] = parts[start : start + TONES]
    return found | {metric: [one] for metric, one in series.items() if not component(metric)}


def _is_main(metric: str) -> bool:
    return metric.startswith(COMPONENTS) or rank(metric)[0] < MAIN


@dataclass(frozen=True, slots=True)
class Scale:
    """A verdict as a picture: the positions of its numbers in per cent of the width."""

    value: float  # the estimate, or the difference
    limit: float  # its confidence limit
    threshold: float


def scale(verdict: Verdict) -> Scale | None:
    """Return the positions of the estimate, the limit and the threshold; None if the gate could not be tested."""
    value = verdict.difference if verdict.difference is not None else verdict.estimate
    if value is None or verdict.limit is None or verdict.threshold is None:
        return None
    marks = (value, verdict.limit, verdict.threshold)
    low, high = min(marks), max(marks)
    width = (high - low) or 1.0
    return Scale(*[round(8 + 84 * (mark - low) / width, 2) for mark in marks])


template("run.html")  # loaded now, since the file may change while a driver runs for days


@dataclass(frozen=True, slots=True)
class GatePage:
    """The contents of a page about gates without a run."""

    report: GateReport
    files: tuple[tuple[str, str, str, str], ...]  # option, file, format, digest
    not_judged: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()


def gate_page(path: Path, page: GatePage) -> None:
    """Write a page about gates.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    verdicts = page.report.verdicts
    shown = {"page": page, "verdicts": verdicts, "scales": [scale(verdict) for verdict in verdicts]}
    write_page(path, fitted(lambda sizes: template("gates.html").render(**shown, sizes=sizes)), "page of gates")


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """The facts that are shown next to a subject's name."""

    state: str  # state of the subject's run
    seed: int
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ItemPair:
    """One item with the responses of both models."""

    reference: Response
    candidate: Response


@dataclass(frozen=True, slots=True)
class Changed:
    """Items on which exactly one greedy response, the candidate's or the first subject's, is right."""

    label: str  # label of the candidate
    suite: str
    won: int
    lost: int
    won_shown: tuple[ItemPair, ...]
    lost_shown: tuple[ItemPair, ...]


@dataclass(frozen=True, slots=True)
class ComparePage:
    """The contents of a comparison page."""

    found: Comparison
    facts: tuple[SubjectFacts, ...]  # in the order of the subjects
    changed: tuple[Changed, ...] = ()
    curves: tuple[tuple[str, Mapping[str, Sequence[CurveSeries]]], ...] = ()  # stage → metric → lines, one for each run
    troubles: tuple[str, ...] = ()


def compare_page(path: Path, page: ComparePage) -> None:
    """Write the page of a comparison.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, render_compare_page(page), "compare")


def render_compare_page(page: ComparePage, name: str = "compare.html") -> str:
    """Return the page as HTML, under 2 MB; the same comparison gives the same text.

    Args:
        name: the name of the template; `_compare.html` is the part that a server's page contains.
    """
    return fitted(lambda sizes: _render_comparison(page, sizes, name))


def _render_comparison(page: ComparePage, sizes: Sizes, name: str) -> str:
    pictures = [
        whiskers(row.metric, [(n % TONES, cell.estimate) for n, cell in enumerate(row.cells) if cell.estimate])
        for row in page.found.metrics
    ]
    lines = sum(len(series) for _, metrics in page.curves for series in metrics.values())
    points = max(24, min(sizes.points, sizes.points * sizes.panels // max(1, lines)))
    views, left = [], sizes.panels
    for stage, metrics in page.curves:
        drawn = list(metrics.items())[:left]
        left -= len(drawn)
        if drawn:
            span = steps_of(metrics.values())
            views.append((stage, [panel(metric, series, points, span=span) for metric, series in drawn]))
    return template(name).render(page=page, found=page.found, pictures=pictures, curves=views, sizes=sizes, tones=TONES)


template("compare.html")  # loaded now, since the file may change while a process runs


_MOST_RANKS = 16  # maximum number of a role's rows in a Gantt chart


_MOST_SAMPLES = 200


_ROW, _LABEL = 22, 170.0  # height of a Gantt row and width of the row's label


# mid tones, legible on white and on black; a hand-off has the same colour in all runs
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
    """The contents of a trace page."""

    run_id: str
    name: str
    state: str
    attempts: Sequence[AttemptSpans]
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()  # lines about data that could not be read
    begun: Sequence[str] = ()  # lines about stages whose first steps another run trained


@dataclass(frozen=True, slots=True)
class Block:
    """A coloured rectangle; positions and sizes are in user units."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    name: str  # written into the block if it fits
    told: str  # shown when the pointer is over the block


@dataclass(frozen=True, slots=True)
class GanttRow:
    """One row of a Gantt chart: a rank or the controller."""

    label: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Gantt:
    """The Gantt chart of one step, with a row for each role and rank."""

    title: str
    rows: tuple[GanttRow, ...]
    ticks: tuple[tuple[float, str], ...]  # (x, time since the step began)
    left_out: int  # number of ranks that are not drawn

    @property
    def height(self) -> int:
        """The height in user units, without the axis."""
        return _ROW * len(self.rows)


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A hand-off with medians over the steps that have it; for example, not every step has a checkpoint."""

    name: str
    colour: str
    share: float
    seconds: float
    steps: int
    rare: bool  # whether many steps lack the hand-off, so the number of steps is shown


@dataclass(frozen=True, slots=True)
class StageView:
    """The pictures of a stage."""

    timeline: StageTimeline
    bars: tuple[Block, ...]
    legend: tuple[LegendEntry, ...]
    averaged: int  # number of steps per bar
    gantts: tuple[Gantt, ...]


def trace_page(path: Path, page: TracePage) -> None:
    """Write the page of a trace.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, render_trace_page(page), "trace")


def render_trace_page(page: TracePage) -> str:
    """Return the page as HTML; the same facts give the same text."""
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
    """Yield, for every `each` steps, a stack of shares, 100 units high, from top to bottom in the order of a step."""
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
    for place, ((role, number), busy) in enumerate(tracks.items()):
        label = f"{role} · rank {number}" if role != CONTROLLER else role
        inside = [one for one in busy if one.end > begin and one.start < begin + seconds]
        rows.append(GanttRow(label, tuple(_block(label, one, place, begin, seconds) for one in inside)))
    scale = (WIDTH - _LABEL) / seconds
    ticks = tuple((round(_LABEL + at * scale, 2), brief(at)) for at in _ticks(seconds))
    return Gantt(f"{title}: {step.step}, {brief(step.seconds)}", tuple(rows), ticks, left_out)


@dataclass(frozen=True, slots=True)
class _Busy:
    """An interval in which a track was busy."""

    name: str
    start: float
    end: float
    colour: str


def _tracks(near: Sequence[Span], colours: Mapping[str, str]) -> tuple[dict[tuple[str, int], list[_Busy]], int]:
    """Return (role, rank) → work by time, with roles in the order of first calls, and the number of hidden ranks."""
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
        for number, start, end in rank_intervals(span):
            if number < _MOST_RANKS:
                roles.setdefault(role, {}).setdefault(number, []).append(_Busy(method, start, end, colour))
            else:
                hidden.add((role, number))
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
    """Return the innermost hand-off around a call; "" if there is none."""
    around = [span for span in near if not is_call(span) and span.started <= call.started < end_of(span)]
    return min(around, key=lambda span: span.seconds).name if around else ""


def _ticks(seconds: float) -> Iterator[float]:
    """Yield about five round times in [0, seconds]."""
    rough = seconds / 5
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    yield from (index * pace for index in range(int(seconds / pace) + 1))
