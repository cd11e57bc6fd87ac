"""Tables that cut nothing: where their columns do not fit a terminal, each row becomes a block of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP, _INDENT = 2, 2  # columns between two cells, and before the lines of a block
_WRAPPED = 16  # columns that a text which may be wrapped has at the least, or its longest word


@dataclass(frozen=True, slots=True)
class Column:
    """One column. What is not said to wrap is never broken: ids, digests, numbers with their intervals."""

    title: str = ""
    right: bool = False
    wraps: bool = False  # between words
    spare: bool = False  # left out first where there is no room for all


@dataclass(slots=True)
class Grid:
    """Rows of text under titles; a column in which no row has anything is left out.

    Args:
        heads: so many columns begin a row's block where the table does not fit.
    """

    columns: Sequence[Column]
    heads: int = 1
    title: str = ""
    rows: list[list[Text]] = field(default_factory=list)

    def row(self, *cells: str | Text) -> None:
        """Add a row, a cell for each column."""
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """As a table, else without its spare columns, else as blocks."""
        told = [n for n in range(len(self.columns)) if any(row[n].plain for row in self.rows)]
        if self.title:
            yield Text(self.title, style="dim")
        for shown in (told, [n for n in told if not self.columns[n].spare]):
            widths = self._widths(shown, options.max_width)
            if widths:
                yield self._table(shown, widths)
                return
        for row in self.rows:
            yield from self._block(row, told, options.max_width)

    def _widths(self, shown: Sequence[int], most: int) -> list[int]:
        """Of each column; empty where they do not fit."""
        texts = [[self.columns[n].title, *(row[n].plain for row in self.rows)] for n in shown]
        whole = [max(map(cell_len, cells)) for cells in texts]
        widths = [
            min(width, max(_WRAPPED, *(cell_len(word) for cell in cells for word in cell.split() or [""])))
            if self.columns[n].wraps
            else width
            for n, width, cells in zip(shown, whole, texts, strict=True)
        ]
        left = most - sum(widths) - _GAP * (len(shown) - 1)
        if left < 0:
            return []
        for place, width in enumerate(whole):
            more = min(width - widths[place], left)
            widths[place], left = widths[place] + more, left - more
        return widths

    def _table(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for number, width in zip(shown, widths, strict=True):
            column = self.columns[number]
            justify = "right" if column.right else "left"
            table.add_column(column.title, justify=justify, no_wrap=not column.wraps, width=width)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(row[n] for n in shown))
        return table

    def _block(self, row: Sequence[Text], told: Sequence[int], most: int) -> Iterator[RenderableType]:
        """The heads on a line, below it everything else with its title, as much on a line as there is room for."""
        head = Text("  ").join([row[n] for n in told if n < self.heads and row[n].plain])
        if head.plain:
            yield head
        line = Text()
        for number in told:
            if number < self.heads or not row[number].plain:
                continue
            title = self.columns[number].title
            piece = Text.assemble((f"{title} " if title else "", "dim"), row[number])
            if line.plain and _INDENT + line.cell_len + _GAP + piece.cell_len > most:
                yield Padding(line, (0, 0, 0, _INDENT))
                line = Text()
            line = Text(" " * _GAP).join([line, piece]) if line.plain else piece
        if line.plain:
            yield Padding(line, (0, 0, 0, _INDENT))
