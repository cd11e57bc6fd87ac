"""Points as scalars of TensorBoard's event files: a folder for each run, tags `stage/metric`.

One file for each run, to which records are added; a record that was cut short is cut away. Scalars are float32, as
TensorBoard's own. Format: TFRecord (length, its masked CRC-32C, data, its masked CRC-32C) of `Event` messages.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from posttrain.domain.crashpoints import crashpoint
from posttrain.store.atomic import make_folder, private, unwritable
from posttrain.telemetry.tracking import Cursor, Ending, Row, TrackedRun, hold

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_NAME = "events.out.tfevents.{created:.0f}.posttrain"
_VERSION = "brain.Event:2"
_ABOUT, _OUTCOME = "run/about", "run/outcome"  # texts
_LENGTH, _CHECK = 8, 4  # bytes
_LONGEST = 2**26  # bytes of a record: more is no length of ours


class TensorBoardTracker:
    """The `Tracker` of a logdir.

    Raises:
        WorkspaceError: the event file cannot be written.
    """

    kind: ClassVar[str] = "tensorboard"

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._path = logdir
        self._file: IO[bytes] | None = None
        self._texts: dict[str, list[str]] = {}
        self._held: IO[bytes] | None = None

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return str(self._path if self._path == self._logdir else self._path.parent)

    def name(self, metric: str) -> str:
        """See `Tracker.name`."""
        return metric

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        self._path = self._logdir / run.id / _NAME.format(created=run.created_at)
        folder = self._path.parent
        make_folder(folder)
        written = _NAME.partition("{")[0] + "*"  # another workspace's file has another time in its name
        self._held = hold(folder / ".posttrain.writer", run, self.where, lambda: any(folder.glob(written)))
        found: dict[tuple[str, str], int] = {}
        end = 0
        try:
            self._file = open(self._path, "ab", buffering=0, opener=private)  # noqa: SIM115
            for place, event in _events(self._path):
                self._take(event, found)
                end = place
            os.ftruncate(self._file.fileno(), end)
        except OSError as error:
            raise unwritable(self._path, error) from error
        if end == 0:
            self._write(_event(run.created_at, 0, file_version=_VERSION))
        if _ABOUT not in self._texts:
            facts = {"run": run.id, "owner": run.owner, "manifest": run.manifest, **run.params}
            table = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
            self._text(_ABOUT, f"| | |\n|---|---|\n{table}", 0, run.created_at)
        return found

    def _take(self, event: Event, found: dict[tuple[str, str], int]) -> None:
        for value in event.summary.value:
            if value.tag in (_ABOUT, _OUTCOME):
                self._texts.setdefault(value.tag, []).append(value.tensor.string_val[0].decode())
                continue
            stage, _, metric = value.tag.partition("/")
            found[stage, metric] = max(event.step, found.get((stage, metric), -1))

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`: a record for each row."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [
                Summary.Value(tag=f"{row.stage}/{name}", simple_value=_float32(value))
                for name, value in row.values.items()
            ]
            self._write(_event(row.at, row.step, summary=Summary(value=values)))

    def flush(self) -> None:
        """See `Tracker.flush`."""
        assert self._file is not None
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritable(self._path, error) from error

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`."""
        told = [f"**{ending.state}** {ending.message}", *(f"- gate {g}: {v}" for g, v in ending.verdicts.items())]
        text, known = "\n".join(told), self._texts.get(_OUTCOME, [])
        if known[-1:] != [text]:
            self._text(_OUTCOME, text, len(known), ending.finished_at or 0.0)
        self.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._held is not None:
            self._held.close()

    def _text(self, tag: str, text: str, step: int, at: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata("", ""))
        self._write(_event(at, step, summary=Summary(value=[value])))
        self._texts.setdefault(tag, []).append(text)

    def _write(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        try:
            RecordWriter(_Halves(self._file)).write(event.SerializeToString())
        except OSError as error:
            raise unwritable(self._path, error) from error


class _Halves:
    """A file that is written whole, whatever the operating system takes at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        done = self._file.write(data[: len(data) // 2])
        crashpoint("track.inside_log")
        while done < len(data):
            done += self._file.write(data[done:])


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    """The whole records of a file with the place behind each; ends before one that is cut short or damaged.

    What is cut away is written again. The data of the last record only is checked: what lies before it was whole when
    the next one was added.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    size, place = path.stat().st_size, 0
    with open(path, "rb") as file:
        while place < size:
            head = file.read(_LENGTH + _CHECK)
            if len(head) < _LENGTH + _CHECK:
                return
            length = struct.unpack("<Q", head[:_LENGTH])[0]
            if length > _LONGEST or struct.unpack("<I", head[_LENGTH:])[0] != masked_crc32c(head[:_LENGTH]):
                return
            data, check = file.read(length), file.read(_CHECK)
            last = file.tell() >= size
            if len(check) < _CHECK or (last and struct.unpack("<I", check)[0] != masked_crc32c(data)):
                return
            place += _LENGTH + _CHECK + length + _CHECK
            yield place, Event.FromString(data)


def _event(at: float, step: int, **content: Any) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=at, step=step, **content)


def _float32(value: float) -> float:
    """What float32 cannot hold is infinite there."""
    return value if abs(value) < 3.4e38 or value != value else float("inf") * (1 if value > 0 else -1)
