"""The one-page run report: a single HTML file that opens anywhere, offline, for years.

No script, no external reference, styles and pictures inside; a content-security policy in the page forbids anything
else. Everything that comes from a run is escaped by the template engine.
"""

from __future__ import annotations

import base64
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.gates import Verdict

_TONES = {
    **dict.fromkeys(("succeeded", "pass", "live", "promoted"), "good"),
    **dict.fromkeys(("failed", "rejected", "fail", "error", "lost"), "bad"),
    **dict.fromkeys(("stopped", "stopping", "inconclusive", "skipped"), "warn"),
}


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


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One declared limit."""

    name: str  # tokens, seconds …
    spent: float
    limit: float | None = None  # None: not limited


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """One field that differs from the run compared with."""

    field: str
    before: str
    after: str
    notes: tuple[str, ...] = ()


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
    changes: tuple[ChangeRow, ...] = ()
    curve: bytes | None = None  # PNG


def run_report(path: Path, report: RunReport) -> None:
    """Write the page.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(render_run_report(report), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise WorkspaceError(
            f"run report: cannot write {path}: {error.strerror}; free the place or choose another"
        ) from error


def render_run_report(report: RunReport) -> str:
    """The page as HTML; the same report gives the same text."""
    curve = base64.b64encode(report.curve).decode("ascii") if report.curve else None
    scales = [scale(verdict) for verdict in report.gates]
    return _page().render(report=report, curve=curve, scales=scales)


@functools.cache
def _page() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, duration=duration, tone=tone)
    return environment.get_template("run.html")


def number(value: float | None, signed: bool = False) -> str:
    """Four significant digits, thousands separated; a dash for nothing."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):+,}" if signed else f"{int(value):,}"
    return f"{value:+.4g}" if signed else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return "–"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def tone(state: str) -> str:
    """The colour class of a state or outcome. Its word is always shown too."""
    return _TONES.get(str(state), "calm")


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
    at = [round(8 + 84 * (mark - low) / width, 2) for mark in marks]
    return Scale(*at)


_page()  # now: who drives a run for days reports at its end, whatever became of the file
