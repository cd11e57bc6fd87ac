"""Points as a Parquet file, one for each run: columns run, stage, step, wall_time, metric, value.

The file is replaced as a whole and is never incomplete. During a run, the file is rewritten when a quarter more points
have arrived, so all writes together amount to a few times the file's size. The remaining points are written at the end
of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.ports import crashpoint
from posttrain.store.atomic import write_stream
from posttrain.telemetry.tracker import Cursor, Ending, FileTracker, Row, TrackedRun

COLUMNS = ("run", "stage", "step", "wall_time", "metric", "value")
_PLACE = ["stage", "metric", "step"]
_BATCH = 65536
_SHARE = 4  # rewritten when a quarter more points have arrived
_LEAST = 1000  # minimum number of new points for a rewrite


class ParquetTracker(FileTracker):
    """The `Tracker` of a folder of Parquet files."""

    kind: ClassVar[str] = "parquet"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._points = 0  # number of points in the file
        self._waiting: list[tuple[str, int, float, str, float]] = []

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        found, name = Cursor(), f"{run.id}.parquet"
        self._own(run, self._folder / name, f".{name}.writer")
        for left in self._folder.glob(f".{name}.*.tmp"):  # left by a killed writer; only one writer runs at a time
            left.unlink(missing_ok=True)
        for batch in self._batches(_PLACE):
            self._points += batch.num_rows
            for stage, metric, step in zip(*(batch.column(name).to_pylist() for name in _PLACE), strict=True):
                found.saw(stage, step, metric)
        if not self._path.exists():
            self._replace()
        return found

    def _batches(self, columns: list[str] | None = None) -> Any:
        import pyarrow.parquet

        if not self._path.exists():
            return
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                if file.schema_arrow.names != _schema().names:
                    raise WorkspaceError(f"{self._path}: must have columns {', '.join(_schema().names)}; move it away")
                yield from file.iter_batches(_BATCH, columns=columns)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise WorkspaceError(
                f"{self._path}: cannot be read: {error}; move the file away, and it is recreated"
            ) from error

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        self._waiting += [(r.stage, r.step, r.at, metric, float(v)) for r in rows for metric, v in r.values.items()]
        if len(self._waiting) >= max(_LEAST, self._points // _SHARE):
            self._replace()

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`. Points of an unfinished run may remain in memory; a new process reads them again."""
        if self._waiting:
            self._replace()

    def _replace(self) -> None:
        write_stream(self._path, self._fill)
        self._points += len(self._waiting)
        self._waiting.clear()

    def _fill(self, file: IO[bytes]) -> None:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetWriter(file, _schema()) as writer:
            for batch in self._batches():
                writer.write_batch(batch)
            crashpoint("track.inside_log")
            if self._waiting:
                stages, steps, times, metrics, values = map(list, zip(*self._waiting, strict=True))
                columns = [[self._run] * len(steps), stages, steps, times, metrics, values]
                writer.write_table(pyarrow.table(columns, schema=_schema()))


def _schema() -> Any:
    import pyarrow

    kinds = ("string", "string", "int64", "float64", "string", "float64")
    return pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
