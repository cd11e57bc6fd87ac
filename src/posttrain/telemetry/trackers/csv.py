"""Points as lines of a CSV file, one file for each run: `run,stage,step,wall_time,metric,value`.

Lines are only appended. A last line without a line end was truncated by a kill or a full disk, and is removed.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import ClassVar

from posttrain.domain.errors import WorkspaceError
from posttrain.telemetry.tracker import AppendedTracker, Cursor, Row, TrackedRun

COLUMNS = ("run", "stage", "step", "wall_time", "metric", "value")
_HEADER = (",".join(COLUMNS) + "\n").encode()


class CsvTracker(AppendedTracker):
    """The `Tracker` of a folder of CSV files."""

    kind: ClassVar[str] = "csv"

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        found, name = Cursor(), f"{run.id}.csv"
        self._own(run, self._folder / name, f".{name}.writer")
        if not self._mend(self._lines(found)):
            self._append(_HEADER)
        return found

    def _lines(self, found: Cursor) -> Iterator[int]:
        """Yield the position after each whole line."""
        end = 0
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                if number == 1 and line != _HEADER:
                    raise WorkspaceError(f"{self._path}: must begin with {_HEADER.decode().strip()}; move it away")
                if number > 1:
                    self._take(line, number, found)
                end += len(line)
                yield end

    def _take(self, line: bytes, number: int, found: Cursor) -> None:
        try:
            _, stage, step, _, metric, _ = next(csv.reader([line.decode()]))
            found.saw(stage, int(step), metric)
        except (ValueError, StopIteration) as error:
            raise WorkspaceError(
                f"{self._path}: line {number} is not a row of metrics: {line[:80]!r}; correct it, or move the file away"
            ) from error

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            (self._run, row.stage, row.step, f"{row.at:.6f}", metric, repr(float(value)))
            for row in rows
            for metric, value in row.values.items()
        )
        self._append(text.getvalue().encode())
