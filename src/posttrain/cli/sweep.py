"""Commands `sweep` and `compare`.

`sweep` runs one run file under several settings and seeds and shows them in one table. `compare` shows runs or evaluate
stages side by side.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    answer_json,
    aside,
    console,
    count,
    digest,
    emit_json,
    excerpt,
    lazily,
    open_control,
    say,
    style,
    tinted,
)
from posttrain.cli.drive import DETACHED, FileArgument, open_quietly
from posttrain.domain.overrides import parse_overrides, setting_words, value_words, written

if TYPE_CHECKING:
    from rich.text import Text

    from posttrain.api.control import Control
    from posttrain.api.values import Cell, Comparison, MetricRow, Ranking, Sweep
    from posttrain.cli.screens import Grid

_ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}
_VALUE = 48  # maximum characters of a parameter's value on a terminal


def sweep(
    file: FileArgument,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=A,B", help="Values to try, e.g. grpo.optimizer.learning_rate=1e-4,3e-4; repeatable."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Number of seeds for each setting; the first seed is that of the run file."),
    ] = 1,
    metric: Annotated[
        str | None, typer.Option(help="Metric of the ranking; default: the metric of the first gate.")
    ] = None,
    better: Annotated[
        str | None, typer.Option(metavar="higher|lower", help="Direction in which the metric improves.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs, without submitting them.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a file under several settings and seeds, and rank them.

    Settings whose intervals do not separate them share a range of ranks. The command releases nothing.
    """
    from posttrain.domain.errors import InputError

    if better not in (None, "higher", "lower"):
        raise InputError(f"--better must be higher or lower, got {better!r}")
    control = open_control()
    found = control.plan_sweep(file, parse_overrides(sets or ()), seeds=seeds, metric=metric, better=better)
    tell = aside if output is Output.JSON else say
    many, each = len(found.settings), len(found.seeds)
    count = f"{many} setting{'s' * (many > 1)} x {each} seed{'s' * (each > 1)} = {len(found.points)} runs"
    tell(f"{count}; ranked by {found.metric}, {found.better} is better")
    tell(*(f"note: {note}" for note in found.notes))
    tell(*(f"warning: {warning}" for warning in found.warnings))
    if dry_run:
        _show_points(found, output)
        return

    runs: dict[tuple[int, int], str] = {}  # (index of the setting, seed) → run id
    try:
        for number, point in enumerate(found.points, start=1):  # a failed run does not stop the sweep
            run_id = runs[point.place, point.seed] = control.submit_point(point).run.id
            tell(f"[{number}/{len(found.points)}] {setting_words(point.setting)}, seed {point.seed}: run {run_id}")
            with open_quietly(control, run_id, output) as display:
                control.drive(run_id, watch=display)
    except KeyboardInterrupt:
        tell("detached; the job continues. The same command continues the sweep")
        raise typer.Exit(DETACHED) from None
    _show(found, runs, control, output)
    _raise_first(runs.values(), control)


def _raise_first(runs: Iterable[str], control: Control) -> None:
    """Raise the outcome of the first run that did not succeed."""
    first = next(filter(None, (control.status(run_id).outcome for run_id in runs)), None)
    if first is not None:
        raise first


def _show_points(found: Sweep, output: Output) -> None:
    answer_json(
        output,
        lambda: {
            "metric": found.metric,
            "better": found.better,
            "runs": [
                {"set": dict(point.setting), "seed": point.seed, "manifest": point.planned.manifest.digest}
                for point in found.points
            ],
            "notes": list(found.notes),
            "warnings": list(found.warnings),
        },
    )
    say(*(f"{setting_words(point.setting)}, seed {point.seed}" for point in found.points))


def _show(found: Sweep, runs: Mapping[tuple[int, int], str], control: Control, output: Output) -> None:
    ranked = control.rank(found, runs)
    ranking, troubles = ranked.ranking, ranked.troubles
    states = {key: control.run(run).state for key, run in runs.items()}
    if output is Output.JSON:
        own: list[dict[str, Any]] = [
            {
                "set": dict(setting),
                "runs": [
                    {"seed": seed, "run": runs[place, seed], "state": states[place, seed]} for seed in found.seeds
                ],
            }
            for place, setting in enumerate(found.settings)
        ]
        emit_json({"metric": found.metric, "better": found.better, "seeds": list(found.seeds)} | ranked.to_json(own))
        return
    screen = console()
    screen.print(ranking_table(found, ranking, states))
    say(*(f"all: {path} {value_words(value)}" for path, value in _the_same(found).items()))
    screen.print(*_footnotes(found, ranking, troubles), sep="\n")
    _next(found, ranking)


def ranking_table(found: Sweep, ranking: Ranking, states: dict[tuple[int, int], str]) -> Grid:
    """Return a row for each setting, best mean first, with the value of each seed."""
    from posttrain.cli.screens import Column, Grid

    arrow = {"higher": "↑", "lower": "↓"}[found.better]
    paths = [path for path, _ in found.settings[0] if path not in _the_same(found)]
    names = _short([path for path, _ in found.settings[0]])
    titles = ("rank", *(names[path] for path in paths), f"{found.metric} {arrow}", "each seed", "from the best")
    table = Grid([Column(title) for title in titles])
    one_each = len(found.seeds) == 1 and all(one.mean for one in ranking.settings)  # the mean is the one seed's value
    order = _order(found, ranking)
    for place in order:
        one, setting = ranking.settings[place], dict(found.settings[place])
        rank = "" if one.mean is None else f"{one.best}" if one.best == one.worst else f"{one.best}-{one.worst}"
        mean = f"{one.mean.value:.4g} {str(one.mean).partition(' ')[2]}" if one.mean else "not measured"
        seeds = [_seed_words(one.values.get(seed), states[place, seed]) for seed in found.seeds]
        words = [tinted(value_words(setting[path])) for path in paths]
        table.row(
            tinted(rank, style("pass") if one.worst == 1 else ""),
            *words,
            mean,
            "" if one_each else "  ".join(seeds),
            _to(ranking, order[0], place),
        )
    return table


def _the_same(found: Sweep) -> dict[str, Any]:
    """Return path → value for the paths that have the same value in all settings; empty if there is one setting."""
    first, *others = [dict(setting) for setting in found.settings]
    return {path: value for path, value in first.items() if others and all(one[path] == value for one in others)}


def _short(paths: Sequence[str]) -> dict[str, str]:
    """Return path → shortest end of the path that no other path has."""
    parts = {path: path.split(".") for path in paths}
    return {
        path: next(
            ".".join(own[-n:])
            for n in range(1, len(own) + 1)
            if n == len(own) or all(own[-n:] != other[-n:] for name, other in parts.items() if name != path)
        )
        for path, own in parts.items()
    }


def _order(found: Sweep, ranking: Ranking) -> list[int]:
    sign = -1 if found.better == "higher" else 1
    return sorted(
        range(len(ranking.settings)),
        key=lambda place: (not (one := ranking.settings[place]).mean, sign * one.mean.value if one.mean else 0.0),
    )


def _seed_words(value: float | None, state: str) -> str:
    return f"{value:.4g}" if value is not None else state


def _to(ranking: Ranking, best: int, place: int) -> str:
    """Return the difference from the setting with the best mean."""
    if place == best:
        return ""
    for one in ranking.differences:
        if (one.first, one.second) == (best, place):
            return str(one)
        if (one.first, one.second) == (place, best):
            return str(one.turned())
    return "not compared"


def _footnotes(found: Sweep, ranking: Ranking, troubles: Sequence[str]) -> Iterator[Any]:
    methods = dict.fromkeys(one.mean.method for one in ranking.settings if one.mean)
    pairs = len(ranking.differences)
    all_held = (
        f"; differences: simultaneous {100 * ranking.confidence:g} % intervals for all {pairs} pairs"
        if pairs > 1
        else ""
    )
    yield tinted(f"means: {100 * ranking.confidence:g} % intervals, {'; '.join(methods) or 'none'}{all_held}", "dim")
    yield from (tinted(f"note: {note}", style("warn")) for note in (*ranking.notes, *troubles))
    yield from (tinted(f"warning: {warning}", style("warn")) for warning in ranking.warnings)


def _next(found: Sweep, ranking: Ranking) -> None:
    best = _order(found, ranking)[0]
    one = ranking.settings[best]
    words = [f"--set {shlex.quote(f'{path}={written(value)}')}" for path, value in found.settings[best]]
    command = " ".join(["posttrain run", shlex.quote(str(found.source)), *words])
    if one.mean is None:
        say("nothing was measured; next: posttrain ls")
    elif one.worst == 1:
        say(f"next: {command}")
    else:
        tied = sum(other.best == 1 and other.mean is not None for other in ranking.settings)
        say(f"{tied} settings may be the best; more seeds or items could separate them")
        say("the setting with the best mean:", f"  {command}")


def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C …]",
            help="Runs, evaluate stages (RUN/STAGE), model folders or imported runs (history:NAME); each is compared "
            "with A.",
            autocompletion=lazily("subjects"),
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the comparison as a page.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Compare the scores of runs, item by item.

    The command shows how many items were won, lost and tied against the first run, and differences with intervals.
    """
    found = open_control().compare(what, html)
    answer_json(output, lambda: found.to_json() | ({"page": str(html)} if html else {}))
    _show_comparison(found)
    if html is not None:
        say(f"page:   {html}")


def _show_comparison(found: Comparison) -> None:
    screen = console()
    say(*(f"{one.label}  {one.name}  {one.model}  {digest(one.digest)}" for one in found.subjects))
    say(*(f"{one.label}  {one.ref}  imported, by step" for one in found.histories))
    screen.print(metric_table(found), *([history_table(found)] if found.histories else []), sep="\n")
    screen.print(*_notes_below(found), sep="\n")
    if found.parameters:
        screen.print(parameter_table(found))
    elif len({one.run.id for one in found.subjects}) > 1:
        say("parameters: nothing that determines results differs")


def metric_table(found: Comparison) -> Grid:
    """Return a row for each metric and subject; differences are from the first subject."""
    from posttrain.cli.screens import Column, Grid

    counts = ("items", "won", "lost", "tied")
    titles = ("metric", "", "items", "value", f"difference from {found.subjects[0].label}", "won", "lost", "tied")
    table = Grid([Column(title, right=title in counts) for title in titles], heads=2)
    for row in found.metrics:
        name = row.metric + _ARROWS[row.better]
        for one, cell in zip(found.subjects, row.cells, strict=True):
            items = str(cell.estimate.items) if cell.estimate else ""
            value = str(cell.estimate) if cell.estimate else "not measured"
            table.row(name, one.label, items, value, *_against(row, cell))
            name = ""
    return table


def history_table(found: Comparison) -> Grid:
    """Return a table of imported runs' metrics: steps, and first, last, least and greatest values."""
    from posttrain.cli.screens import Column, Grid

    numbers = ("points", "steps", "first", "last", "least", "most")
    table = Grid([Column("imported metric"), Column(""), *(Column(title, right=True) for title in numbers)], heads=2)
    for one in found.histories:
        for curve in one.curves:
            values = (f"{value:.4g}" for value in (curve.first, curve.last, curve.least, curve.most))
            table.row(curve.metric, one.label, count(curve.points), "-".join(map(str, curve.steps)), *values)
    return table


def _against(row: MetricRow, cell: Cell) -> Iterator[Text | str]:
    """Yield the difference and the numbers of items won, lost and tied.

    For a metric without a direction, the numbers are of items with a higher value, a lower value and the same value.
    """
    pair = cell.paired
    if pair is None:
        yield tinted(f"not paired: {cell.unpaired}" if cell.unpaired else "", "dim")
        yield from ("", "", "")
        return
    won, lost = pair.wins(row.better)
    good = pair.decided and row.better and (pair.difference > 0) == (row.better == "higher")
    yield tinted(str(pair), "" if not (pair.decided and row.better) else style("pass" if good else "fail"))
    yield from (f"{won}", f"{lost}") if row.better else (f"{won} more", f"{lost} less")
    yield str(pair.same)


def _notes_below(found: Comparison) -> Iterator[Text]:
    yield tinted(
        f"{100 * found.confidence:g} % intervals, not corrected for their number: {'; '.join(found.methods)}", "dim"
    )
    yield from (tinted(f"note: {note}", style("warn")) for note in found.notes)
    yield from (tinted(f"warning: {warning}", style("warn")) for warning in found.warnings)


def parameter_table(found: Comparison) -> Grid:
    """Return the fields that differ, with a column for each subject."""
    from posttrain.cli.screens import Column, Grid

    subjects = [Column(one.label, wraps=True) for one in found.subjects]
    table = Grid([Column("field"), *subjects], title="parameters that differ")
    for row in found.parameters:
        table.row(row.path, *(excerpt(value, _VALUE) for value in row.values))
    return table
