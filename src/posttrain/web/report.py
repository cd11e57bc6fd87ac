"""Pages of a run report and of a comparison.

The run report is one page: what was asked, what came out, and whether it may be believed. The page of a comparison has
scores side by side, the items that changed hands, curves over each other, and what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.control.comparing import Comparison, Difference
from posttrain.control.scores import Response, Scores
from posttrain.domain.gates import Verdict
from posttrain.domain.jobs import Sample
from posttrain.web.pages import Sizes, fitted, template, write_page
from posttrain.web.panels import COMPONENTS, MAIN, REWARD, TONES, CurveSeries, Panel, component, panel, rank, whiskers

_BEFORE, _AFTER = 1, 0  # colours of a score's two points


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of the run."""

    name: str
    kind: str
    state: str
    cached_from: str | None = None  # "<run>/<stage>" whose outputs were reused
    attempts: int = 0
    seconds: float | None = None  # None: not started
    tokens: int = 0
    output: str | None = None  # digest of what it left
    best: str | None = None  # digest of its best model, where that is not the last one


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One declared limit."""

    name: str  # tokens, seconds …
    spent: float
    limit: float | None = None  # None: not limited


@dataclass(frozen=True, slots=True)
class StageCurves:
    """Everything that a training stage recorded by step."""

    stage: str
    kind: str
    series: Mapping[str, CurveSeries]  # metric → its line, what matters most first
    begun: str = ""  # where its first steps were trained
    chosen: str = ""  # what its probe decided
    marks: tuple[tuple[int, str], ...] = ()  # (step, word) of that


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Responses to one prompt of a step."""

    step: int
    members: int  # of the group; not all of them are shown
    shown: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class StageSamples:
    """Recorded responses of a training stage."""

    stage: str
    steps: tuple[SampledStep, ...]


@dataclass(frozen=True, slots=True)
class SuiteAnswers:
    """Greedy answers to a suite."""

    stage: str
    suite: str
    of: str  # whose answers
    items: int  # with an answer to compare with
    wrong: int
    cut: int  # of the wrong ones, how many met the limit of tokens
    wrong_shown: tuple[Response, ...]
    right_shown: tuple[Response, ...]
    scored: int = 0  # items without an answer, which only a reward scored
    low_shown: tuple[Response, ...] = ()  # of these the least first
    high_shown: tuple[Response, ...] = ()  # the greatest first
    sampled: str = ""  # how responses were sampled, in words


@dataclass(frozen=True, slots=True)
class StageParameters:
    """What a stage was told."""

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
    tokens_per_second: float | None  # of the steps, the median
    step_seconds: float | None  # the median
    steps: int  # that the times are of
    phases: tuple[tuple[str, float, float], ...]  # hand-off, median seconds, share of the time
    resident: float | None = None  # MiB that the job's process took at the most; None: it said nothing
    allocated: float | None = None  # MiB of its CUDA device; None: it had none


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything the page shows. Digests are written in full, so that the page can be checked against the ledger."""

    run_id: str
    name: str
    state: str
    owner: str
    seed: int
    manifest_digest: str
    reason: str = ""  # why it is in this state, for a person
    next_action: str = ""
    stages: tuple[StageRow, ...] = ()
    gates: tuple[Verdict, ...] = ()
    lineage: tuple[str, ...] = ()  # lines of an indented tree
    budgets: tuple[BudgetRow, ...] = ()
    warnings: tuple[str, ...] = ()  # e.g. that a reward's version is not the one the channel's model was trained on
    compared_with: str = ""  # the run that `changes` is about
    changes: tuple[Difference, ...] = ()
    scores: Scores = field(default_factory=Scores)
    curves: tuple[StageCurves, ...] = ()
    samples: tuple[StageSamples, ...] = ()
    answers: tuple[SuiteAnswers, ...] = ()
    parameters: tuple[StageParameters, ...] = ()
    system: tuple[SystemRow, ...] = ()


def run_report(path: Path, report: RunReport) -> None:
    """Write the page.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, render_run_report(report), "run report")


def render_run_report(report: RunReport, name: str = "run.html", *, stages: bool = True) -> str:
    """The page as HTML, under 2 MB; the same report gives the same text.

    Args:
        name: of the template; `_run.html` is what stands in the page of a server.
        stages: with the table of them, which a page of the server may have already.
    """
    return fitted(lambda sizes: _render(report, sizes, name, stages))


@dataclass(frozen=True, slots=True)
class CurvesView:
    """A stage's panels."""

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
    """Panels of all stages; where there may not be so many, every stage keeps its first ones."""
    each = max(1, sizes.panels // max(1, len(stages)))
    views = []
    for one in stages[: sizes.panels]:
        lines = _lines(one.series)
        panels = {metric: panel(metric, lines[metric], sizes.points, one.marks) for metric in list(lines)[:each]}
        main = tuple(made for metric, made in panels.items() if _is_main(metric))
        more = tuple(made for metric, made in panels.items() if not _is_main(metric))
        views.append(CurvesView(one, main, more, len(lines) - len(panels)))
    return views


def _lines(series: Mapping[str, CurveSeries]) -> dict[str, list[CurveSeries]]:
    """Panel → its lines, what matters most first: a metric each, but the components of a reward share them."""
    parts = [replace(one, run=component(metric)) for metric, one in series.items() if component(metric)]
    found: dict[str, list[CurveSeries]] = {REWARD: [series[REWARD]]} if REWARD in series else {}
    for start in range(0, len(parts), TONES):  # a colour each
        found[f"{COMPONENTS} {1 + start // TONES}" if start else COMPONENTS] = parts[start : start + TONES]
    return found | {metric: [one] for metric, one in series.items() if not component(metric)}


def _is_main(metric: str) -> bool:
    return metric.startswith(COMPONENTS) or rank(metric)[0] < MAIN


@dataclass(frozen=True, slots=True)
class Scale:
    """A verdict as a picture: per cent of the width at which its numbers stand."""

    value: float  # the estimate, or the difference
    limit: float  # its confidence limit
    threshold: float


def scale(verdict: Verdict) -> Scale | None:
    """Where estimate, limit and threshold stand on a line; None when the gate could not be tested."""
    value = verdict.difference if verdict.difference is not None else verdict.estimate
    if value is None or verdict.limit is None or verdict.threshold is None:
        return None
    marks = (value, verdict.limit, verdict.threshold)
    low, high = min(marks), max(marks)
    width = (high - low) or 1.0
    return Scale(*[round(8 + 84 * (mark - low) / width, 2) for mark in marks])


template("run.html")  # now: who drives a run for days reports at its end, whatever became of the file


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """What stands beside a subject's name."""

    state: str  # of its run
    seed: int
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ItemPair:
    """One item, answered by both."""

    reference: Response
    candidate: Response


@dataclass(frozen=True, slots=True)
class Changed:
    """Items on which a candidate's greedy answer is right where the first subject's is wrong, or the other way."""

    label: str  # of the candidate
    suite: str
    won: int
    lost: int
    won_shown: tuple[ItemPair, ...]
    lost_shown: tuple[ItemPair, ...]


@dataclass(frozen=True, slots=True)
class ComparePage:
    """Everything the page shows."""

    found: Comparison
    facts: tuple[SubjectFacts, ...]  # as the subjects
    changed: tuple[Changed, ...] = ()
    curves: tuple[tuple[str, Mapping[str, Sequence[CurveSeries]]], ...] = ()  # stage → metric → a line of each run
    troubles: tuple[str, ...] = ()


def compare_page(path: Path, page: ComparePage) -> None:
    """Write the page.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, render_compare_page(page), "compare")


def render_compare_page(page: ComparePage, name: str = "compare.html") -> str:
    """The page as HTML, under 2 MB; the same comparison gives the same text.

    Args:
        name: of the template; `_compare.html` is what stands in the page of a server.
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
            views.append((stage, [panel(metric, series, points) for metric, series in drawn]))
    return template(name).render(page=page, found=page.found, pictures=pictures, curves=views, sizes=sizes, tones=TONES)


template("compare.html")  # now: a page of a changed checkout belongs to no old process
