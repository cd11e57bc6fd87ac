"""Points as lines of a CSV file, one file for each run: `run,stage,step,wall_time,metric,value`.

Lines are only ever added. A last line without its end was cut short by a kill or a full disk, and is cut away.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, ClassVar

from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import make_folder, unwritable
from posttrain.telemetry.tracking import Cursor, Ending, Row, TrackedRun, hold

COLUMNS = ("run", "stage", "step", "wall_time", "metric", "value")
_HEADER = (",".join(COLUMNS) + "\n").encode()


class CsvTracker:
    """The `Tracker` of a folder of CSV files.

    Raises:
        WorkspaceError: the file cannot be written, or is another program's.
    """

    kind: ClassVar[str] = "csv"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = ""
        self._file = -1
        self._held: IO[bytes] | None = None

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return str(self._path if self._run else self._folder)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._run}.csv"

    def name(self, metric: str) -> str:
        """See `Tracker.name`."""
        return metric

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        self._run = run.id
        make_folder(self._folder)
        self._held = hold(self._folder / f".{self._path.name}.writer", run, self.where, self._path.exists)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            found = self._whole_lines()
        except OSError as error:
            raise unwritable(self._path, error) from error
        return found

    def _whole_lines(self) -> dict[tuple[str, str], int]:
        """What is there; a line without its end is cut away."""
        found: dict[tuple[str, str], int] = {}
        end = 0
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines):
                if not line.endswith(b"\n"):
                    break
                if number == 0 and line != _HEADER:
                    raise WorkspaceError(f"{self._path}: must begin with {_HEADER.decode().strip()}; move it away")
                if number:
                    self._take(line, number + 1, found)
                end += len(line)
        os.ftruncate(self._file, end)
        if end == 0:
            self._write(_HEADER)
        return found

    def _take(self, line: bytes, number: int, found: dict[tuple[str, str], int]) -> None:
        try:
            _, stage, step, _, metric, _ = next(csv.reader([line.decode()]))
            place = stage, metric
            found[place] = max(int(step), found.get(place, -1))
        except (ValueError, StopIteration) as error:
            raise WorkspaceError(
                f"{self._path}: line {number} is none of ours: {line[:80]!r}; mend it, or move the file away"
            ) from error

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        for row in rows:
            for metric, value in row.values.items():
                lines.writerow((self._run, row.stage, row.step, f"{row.at:.6f}", metric, repr(float(value))))
        self._write(text.getvalue().encode())

    def _write(self, data: bytes) -> None:
        try:
            half = len(data) // 2
            written = os.write(self._file, data[:half])
            crashpoint("track.inside_log")
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            raise unwritable(self._path, error) from error

    def flush(self) -> None:
        """See `Tracker.flush`."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`: how a run ended stands in the workspace, not among its points."""
        self.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._held is not None:
            self._held.close()
