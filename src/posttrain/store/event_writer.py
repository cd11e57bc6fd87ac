"""The job's side of its channel: facts are buffered and written as segments.

What a running job says that it spent, beside its facts: at once, and within one line.
"""

from __future__ import annotations

import json
import os
import time

from posttrain.domain.facts import Fact, Note, Progress, Sample, Span, fact_to_json
from posttrain.domain.jobs import PHASE_SECONDS
from posttrain.store.atomic import LINE, make_folder
from posttrain.store.attempts import METER, AttemptFolder
from posttrain.store.channel import EVENTS, SAMPLES, AttemptChannel, Summary


class EventWriter:
    """The job's fact sink: buffers facts and writes them as segments, samples into a folder of their own.

    A segment is due after `most` facts, or when a `Progress` or `Note` comes `seconds` after the last one that was
    told; what is left is written by `close`. Metrics and samples do not make one due: they come just before the
    progress of their step. A span does `phases` seconds after the last segment, whatever is told of progress then. Use
    it as a context manager. Numbering goes on from the segments that are there.

    Raises:
        WorkspaceError: the disk is full or read-only; the facts stay buffered, so a later call tries again.
    """

    def __init__(
        self, attempt: AttemptFolder, most: int = 256, seconds: float = 0.5, phases: float = PHASE_SECONDS
    ) -> None:
        self._most, self._seconds, self._phase_seconds = most, seconds, phases
        make_folder(attempt.events)
        self._channel = attempt.channel
        self._facts, self._samples = _Segments(self._channel, EVENTS, packed=True), _Segments(self._channel, SAMPLES)
        self._told, self._flushed = float("-inf"), time.monotonic()  # of progress or a note; of anything
        self._progress: Progress | None = None
        self._phases = 0

    def __call__(self, fact: Fact) -> None:
        """Say a fact."""
        (self._samples if isinstance(fact, Sample) else self._facts).waiting.append(fact)
        now = time.monotonic()
        late = isinstance(fact, Progress | Note) and now - self._told >= self._seconds
        if isinstance(fact, Progress):
            self._progress = fact
        elif isinstance(fact, Span):
            self._phases += 1
            late = now - self._flushed >= self._phase_seconds
        if late or len(self._facts.waiting) + len(self._samples.waiting) >= self._most:
            self.flush()
        if late and not isinstance(fact, Span):
            self._told = now

    def flush(self) -> None:
        """Write what is buffered. Samples come first: whoever sees a step's progress finds its samples."""
        self._samples.write()
        for stream in (self._samples, self._facts):
            self._facts.waiting += stream.too_large
            stream.too_large.clear()
        something, number = bool(self._facts.waiting), self._facts.write()
        said = self._progress
        if said is not None and something:
            self._channel.summarise(
                Summary(said.step, said.total, said.phase, said.tokens, number, said.at, self._phases)
            )
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        self.flush()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class _Segments:
    """The write-once segments of one stream, and what waits to be written.

    Args:
        packed: many small ones become few; samples are large, and some of them are read by number.
    """

    def __init__(self, channel: AttemptChannel, stream: str, packed: bool = False) -> None:
        self._channel, self._stream, self._packed = channel, stream, packed
        self.waiting: list[Fact] = []
        self.too_large: list[Fact] = []  # what is said instead
        self._next = 1 + channel.last(stream)

    def write(self) -> int:
        """Write what waits as one segment, or several where it is large; the number of the newest."""
        while self.waiting:
            data, taken = self._piece()
            self._channel.append(self._stream, self._next, data)
            self._next += 1
            del self.waiting[:taken]
            if self._packed:
                self._channel.pack(self._stream, self._next - 1)
        return self._next - 1

    def _piece(self) -> tuple[bytes, int]:
        """The next segment, and of how many facts it is: as large as one may be read at once."""
        data, taken = bytearray(), 0
        for fact in self.waiting:
            line = (json.dumps(fact_to_json(fact), sort_keys=True, ensure_ascii=False) + "\n").encode()
            if len(line) > LINE:
                said = f"a {type(fact).__name__.lower()} of {len(line)} bytes is left out: at most {LINE} are recorded"
                self.too_large.append(Note(said, time.time(), "warning"))
                line = b""
            if data and len(data) + len(line) > LINE:
                break
            data += line
            taken += 1
        return bytes(data), taken


class SpendingMeter:
    """Where a job says what it spent, and before each step what that may cost: a kill in the middle loses neither.

    The record is one line that is rewritten in place: it survives the death of the process at once, a power cut to
    within `seconds`. Use it as a context manager.

    Raises:
        OSError: the disk is full or read-only.
    """

    def __init__(self, attempt: AttemptFolder, seconds: float = 0.5) -> None:
        make_folder(attempt.path)
        self._file = os.open(attempt.path / METER, os.O_CREAT | os.O_WRONLY, 0o600)
        self._seconds, self._synced = seconds, float("-inf")

    def __call__(self, spent: int, reserved: int) -> None:
        """Say what the lineage has spent, and what it may spend until the next call."""
        os.pwrite(self._file, f"{spent:020d} {reserved:020d}\n".encode(), 0)
        if time.monotonic() - self._synced >= self._seconds:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def __enter__(self) -> SpendingMeter:
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._file)
