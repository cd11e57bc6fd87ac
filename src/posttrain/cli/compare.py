"""`compare`: runs or evaluate stages side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import Output, OutputOption, console, digest, emit_json, excerpt, open_control, say, style
from posttrain.cli.shell import lazily

if TYPE_CHECKING:
    from rich.text import Text

    from posttrain.api.values import Cell, Comparison, MetricRow
    from posttrain.cli.tables import Grid

_ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}
_VALUE = 48  # characters of a parameter's value on a terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C …]",
            help="Runs, or RUN/STAGE of evaluate stages; all are held against A.",
            autocompletion=lazily("runs"),
        ),
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page of it too.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Compare what runs scored, item by item: won, lost and tied against the first, with intervals."""
    control = open_control()
    try:
        found = control.compare(what, html)
    finally:
        control.close()
    if output is Output.JSON:
        emit_json(found.to_json() | ({"page": str(html)} if html else {}))
        return
    _show(found)
    if html is not None:
        say(f"page:   {html}")


def _show(found: Comparison) -> None:
    screen = console()
    for one in found.subjects:
        say(f"{one.label}  {one.name}  {one.model}  {digest(one.digest)}")
    screen.print(metric_table(found))
    screen.print(*_footnotes(found), sep="\n")
    if found.parameters:
        screen.print(parameter_table(found))
    elif len({one.run.id for one in found.subjects}) > 1:
        say("parameters: nothing that decides results differs")


def metric_table(found: Comparison) -> Grid:
    """A row for each metric and subject; differences are to the first subject."""
    from posttrain.cli.tables import Column, Grid

    counts = ("items", "won", "lost", "tied")
    titles = ("metric", "", "items", "value", f"difference to {found.subjects[0].label}", "won", "lost", "tied")
    table = Grid([Column(title, right=title in counts) for title in titles], heads=2)
    for row in found.metrics:
        name = row.metric + _ARROWS[row.better]
        for one, cell in zip(found.subjects, row.cells, strict=True):
            items = str(cell.estimate.items) if cell.estimate else ""
            value = str(cell.estimate) if cell.estimate else "not measured"
            table.row(name, one.label, items, value, *_against(row, cell))
            name = ""
    return table


def _against(row: MetricRow, cell: Cell) -> Iterator[Text | str]:
    """Difference, won, lost, tied. Of a metric that no way improves, how many items have more and how many less."""
    from rich.text import Text

    pair = cell.paired
    if pair is None:
        yield Text(f"not paired: {cell.unpaired}" if cell.unpaired else "", style="dim")
        yield from ("", "", "")
        return
    won, lost = pair.wins(row.better)
    good = pair.decided and row.better and (pair.difference > 0) == (row.better == "higher")
    tint = "" if not (pair.decided and row.better) else style("pass" if good else "fail")
    yield Text(str(pair), style=tint)
    yield from (f"{won}", f"{lost}") if row.better else (f"{won} more", f"{lost} less")
    yield str(pair.same)


def _footnotes(found: Comparison) -> Iterator[Text]:
    from rich.text import Text

    yield Text(f"{100 * found.confidence:g} % intervals, each by itself: {'; '.join(found.methods)}", style="dim")
    for note in found.notes:
        yield Text(f"note: {note}", style=style("warn"))


def parameter_table(found: Comparison) -> Grid:
    """Fields that are not the same for all, a column for each subject."""
    from posttrain.cli.tables import Column, Grid

    subjects = [Column(one.label, wraps=True) for one in found.subjects]
    table = Grid([Column("field"), *subjects], title="parameters that differ")
    for row in found.parameters:
        table.row(row.path, *(excerpt(value, _VALUE) for value in row.values))
    return table
