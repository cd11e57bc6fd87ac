"""Points as scalars in TensorBoard's event files: a folder for each run, with tags `stage/metric`.

There is one file for each run, to which records are appended; a truncated record is removed. Scalars are float32, as in
TensorBoard. Format: TFRecord (the length, the length's masked CRC-32C, the data, the data's masked CRC-32C) of `Event`
messages.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.telemetry.tracker import AppendedTracker, Cursor, Ending, Row, TrackedRun

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_NAME = "events.out.tfevents.{created:.0f}.posttrain"
_VERSION = "brain.Event:2"
_ABOUT, _OUTCOME = "run/about", "run/outcome"  # tags of texts
_LENGTH, _CHECK = 8, 4  # bytes of a length and of a checksum
_LONGEST = 2**26  # maximum bytes of a record; a larger length is damage


class TensorBoardTracker(AppendedTracker):
    """The `Tracker` of a logdir."""

    kind: ClassVar[str] = "tensorboard"

    def __init__(self, logdir: Path) -> None:
        super().__init__(logdir)
        self._texts: dict[str, list[str]] = {}

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return str(self._path.parent if self._run else self._folder)

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        folder, found = self._folder / run.id, Cursor()
        written = _NAME.partition("{")[0] + "*"  # the name of another workspace's file contains another time
        path = folder / _NAME.format(created=run.created_at)
        self._own(run, path, ".posttrain.writer", lambda: any(folder.glob(written)))
        if not self._mend(self._taken(found)):
            self._write(_event(run.created_at, 0, file_version=_VERSION))
        if _ABOUT not in self._texts:
            facts = {"run": run.id, "owner": run.owner, "manifest": run.manifest, **run.params}
            table = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
            self._text(_ABOUT, f"| | |\n|---|---|\n{table}", 0, run.created_at)
        return found

    def _taken(self, found: Cursor) -> Iterator[int]:
        """Yield the position after each whole record, after reading the record's points and texts."""
        for place, event in _events(self._path):
            for value in event.summary.value:
                if value.tag in (_ABOUT, _OUTCOME):
                    self._texts.setdefault(value.tag, []).append(value.tensor.string_val[0].decode())
                    continue
                stage, _, metric = value.tag.partition("/")
                found.saw(stage, event.step, metric)
            yield place

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`. Each row becomes one record."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [
                Summary.Value(tag=f"{row.stage}/{name}", simple_value=_float32(value))
                for name, value in row.values.items()
            ]
            self._write(_event(row.at, row.step, summary=Summary(value=values)))

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`."""
        told = [f"**{ending.state}** {ending.message}", *(f"- gate {g}: {v}" for g, v in ending.verdicts.items())]
        text, known = "\n".join(told), self._texts.get(_OUTCOME, [])
        if known[-1:] != [text]:
            self._text(_OUTCOME, text, len(known), ending.finished_at or 0.0)
        self.flush()

    def _text(self, tag: str, text: str, step: int, at: float) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata

        one = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape=one)
        value = summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata("", ""))
        self._write(_event(at, step, summary=summary_pb2.Summary(value=[value])))
        self._texts.setdefault(tag, []).append(text)

    def _write(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._append(record.getvalue())


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield the whole records of a file, each with the position after it; stop before a truncated or damaged record.

    A removed record is written again. Only the last record's data is checked, because each earlier record was complete
    when the next record was appended.
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
    """Return the value, or ±infinity if its magnitude exceeds float32's range."""
    return value if abs(value) < 3.4e38 or value != value else float("inf") * (1 if value > 0 else -1)
