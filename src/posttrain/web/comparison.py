"""The page of a comparison: scores side by side, the items that changed hands, curves over each other, what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.control.comparing import Comparison
from posttrain.control.scores import Response
from posttrain.web.pages import Sizes, fitted, template, write_page
from posttrain.web.panels import TONES, Panel, panel
from posttrain.web.series import CurveSeries
from posttrain.web.whiskers import whiskers


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


@dataclass(frozen=True, slots=True)
class _StageView:
    stage: str
    panels: tuple[Panel, ...]


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
    return fitted(lambda sizes: _render(page, sizes, name))


def _render(page: ComparePage, sizes: Sizes, name: str) -> str:
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
            views.append(_StageView(stage, tuple(panel(metric, series, points) for metric, series in drawn)))
    return template(name).render(page=page, found=page.found, pictures=pictures, curves=views, sizes=sizes, tones=TONES)


template("compare.html")  # now: a page of a changed checkout belongs to no old process
