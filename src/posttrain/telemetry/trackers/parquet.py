"""Points as a Parquet file, one for each run: columns run, stage, step, wall_time, metric, value.

The file is replaced as a whole and never half there. A run that goes on is written again when a quarter more came, so
that all of its writing is a few times its size; at its end the rest follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import make_folder, write_stream
from posttrain.telemetry.tracking import Cursor, Ending, Row, TrackedRun, hold

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 65536
_SHARE = 4  # written again when a quarter more came
_LEAST = 1000  # points


class ParquetTracker:
    """The `Tracker` of a folder of Parquet files.

    Raises:
        WorkspaceError: the file cannot be written, or is another program's.
    """

    kind: ClassVar[str] = "parquet"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = ""
        self._there = 0  # points
        self._held: IO[bytes] | None = None
        self._waiting: list[tuple[str, int, float, str, float]] = []

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return str(self._path if self._run else self._folder)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._run}.parquet"

    def name(self, metric: str) -> str:
        """See `Tracker.name`."""
        return metric

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        self._run = run.id
        make_folder(self._folder)
        self._held = hold(self._folder / f".{self._path.name}.writer", run, self.where, self._path.exists)
        for left in self._folder.glob(f".{self._path.name}.*.tmp"):  # a killed writer's; there is one writer at a time
            left.unlink(missing_ok=True)
        found: dict[tuple[str, str], int] = {}
        for batch in self._batches(["stage", "metric", "step"]):
            columns = batch.to_pydict()
            self._there += batch.num_rows
            for stage, metric, step in zip(columns["stage"], columns["metric"], columns["step"], strict=True):
                found[stage, metric] = max(step, found.get((stage, metric), -1))
        if not self._path.exists():
            self._replace()
        return found

    def _batches(self, columns: list[str] | None = None) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._path.exists():
            return
        try:
            with pq.ParquetFile(self._path) as file:
                if file.schema_arrow.names != _schema().names:
                    raise WorkspaceError(f"{self._path}: must have columns {', '.join(_schema().names)}; move it away")
                yield from file.iter_batches(_BATCH, columns=columns)
        except (pa.ArrowInvalid, OSError) as error:
            raise WorkspaceError(
                f"{self._path}: cannot be read: {error}; move it away, and it is made again"
            ) from error

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        self._waiting += [(r.stage, r.step, r.at, metric, float(v)) for r in rows for metric, v in r.values.items()]
        if len(self._waiting) >= max(_LEAST, self._there // _SHARE):
            self._replace()

    def flush(self) -> None:
        """See `Tracker.flush`: the points of a run that goes on may wait for more; a new process reads them again."""

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`."""
        if self._waiting:
            self._replace()

    def _replace(self) -> None:
        write_stream(self._path, self._fill)
        self._there += len(self._waiting)
        self._waiting.clear()

    def _fill(self, file: IO[bytes]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, _schema()) as writer:
            for batch in self._batches():
                writer.write_batch(batch)
            crashpoint("track.inside_log")
            if self._waiting:
                stages, steps, times, metrics, values = map(list, zip(*self._waiting, strict=True))
                columns = [[self._run] * len(steps), stages, steps, times, metrics, values]
                writer.write_table(pa.table(columns, schema=_schema()))

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._held is not None:
            self._held.close()


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("run", pa.string()),
            ("stage", pa.string()),
            ("step", pa.int64()),
            ("wall_time", pa.float64()),
            ("metric", pa.string()),
            ("value", pa.float64()),
        ]
    )
