"""The mailbox: messages between one attempt's job and the control side, as named objects.

::

    job.json request.json   the order and the spec, for a job that cannot read the driver's disk
    start.json              the job's first write, or a tombstone: created once, so exactly one process begins
    starts/000002.json      the start of the second incarnation, or a tombstone, and so on
    events/000001.jsonl     facts of the job: write-once segments, numbered without gaps; samples/ likewise
    events/packs/000001     64 segments in one object, written before they are removed: each is read exactly once
    summary.json            the job's progress: replaced with every segment, so readers need not read segments
    controls/000001.json    orders to the job: numbered, typed, write-once
    controls/acks/000001.json   the job's acknowledgement of an order
    result.json             the job's result: written last, and once
    meter checkpoints/00000120.json outputs/000000.json parts/000001.jsonl log/000000000000000  from a job elsewhere:
                            its spending, its staged files (see `store.staging`), and its output by byte offset

    The port `MailboxObjects` hides the place of the objects; `store.mailboxes` has its back-ends. Where possible, this
    module reads numbered objects one after the other instead of listing them. It replaces no object except
    `summary.json`. If the answer to a write is lost (a PUT that succeeded without a response), the object is read
    afterwards, so a retry never duplicates a fact, an order or a start. Jobs import this module, so it uses only the
    standard library.
"""

from __future__ import annotations  # `shaped` reads the annotations of its forms as text

import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from posttrain.domain.errors import ConflictError, InfrastructureError, IntegrityError
from posttrain.domain.jobs import count, real, shaped
from posttrain.store.atomic import SEGMENT, SMALL

PACK = 64  # segments
EVENTS, SAMPLES, PARTS = "events", "samples", "parts"
ORDER, REQUEST, METER = "job.json", "request.json", "meter"
RAN = "ran.json"  # the seconds that all incarnations of an agent's job ran
_START, _SUMMARY, _RESULT, _LOG, _METERS = "start.json", "summary.json", "result.json", "log", "meters"
_WAITS = (0.1, 0.5, 2.0)  # seconds before an unanswered request is tried again
T = TypeVar("T")


def refuse(error: IntegrityError) -> None:
    """Raise the error of an unreadable segment: the default for callers that do not handle it."""
    raise error


class MailboxObjects(Protocol):
    """Small objects of one attempt by key (`events/000001.jsonl`). Every implementation:

    - reads every acknowledged write, from any process;
    - shows an object complete or not at all;
    - raises `InfrastructureError` for a request without an answer, which may have succeeded or not.
    """

    @property
    def place(self) -> str:
        """The name of the place in errors."""

    def create(self, key: str, data: bytes) -> bool:
        """Write an object durably if none exists; return False if one exists. Of several writers, exactly one succeeds.

        Raises:
            WorkspaceError: the disk is full or read-only.
            InfrastructureError: there was no answer.
        """

    def overwrite(self, key: str, data: bytes) -> None:
        """Replace an object that only one process writes; the new content need not survive a power cut.

        Raises:
            WorkspaceError, InfrastructureError: see `create`.
        """

    def get(self, key: str) -> bytes | None:
        """Return the bytes of an object; None if it does not exist.

        Raises:
            InfrastructureError: there was no answer.
        """

    def remove(self, key: str) -> None:
        """Remove an object; a missing object is not an error."""

    def numbers(self, folder: str) -> list[int]:
        """Return the numbers of the objects `FOLDER/NUMBER.…` directly below a folder, in order."""


class ControlKind(StrEnum):
    """The kinds of orders to a job."""

    STOP = "stop"  # write a checkpoint and end
    CHECKPOINT = "checkpoint"  # write a checkpoint and continue


@dataclass(frozen=True, slots=True)
class Control:
    """One numbered order to the job."""

    number: int
    kind: ControlKind
    at: float


@dataclass(frozen=True, slots=True)
class Start:
    """The `start` object: the process that began an attempt; or a tombstone, which has a reason in `cancelled`."""

    epoch: int  # epoch of the attempt
    host: str
    pid: int
    process: str  # identity of the process; a pid alone may be reused
    token: str  # random; identifies the successful create if its answer was lost
    at: float
    cancelled: str = ""
    incarnation: int = 0  # restarts by the executor itself before this start


@dataclass(frozen=True, slots=True)
class Summary:
    """The progress of a job."""

    step: int
    total: int
    phase: str
    tokens: int
    segment: int  # number of the newest segment of facts
    at: float
    phases: int = 0  # number of ended spans, which show progress within a long step


class Mailbox:
    """One attempt's mailbox over `objects`. The constructor does not access the objects.

    Args:
        pause: called with the seconds to wait between retries.
    """

    def __init__(self, objects: MailboxObjects, pause: Callable[[float], None] = time.sleep) -> None:
        self._objects, self._pause = objects, pause

    @property
    def place(self) -> str:
        """The name of the mailbox in errors."""
        return self._objects.place

    def start(self, epoch: int, process: str, incarnation: int = 0, token: str = "") -> Start | None:
        """Begin the attempt, as a job's first action. Return None; or the start that prevents it.

        Args:
            incarnation: restarts by the executor itself before this start.
            token: identifies this start if the call is repeated; empty: the call is not repeated.

        A job that receives such a start must end. It is a tombstone, or that of the same or a later incarnation: the
        executor restarts a job only after the earlier incarnation has ended.
        """
        mine = _start(epoch, process, incarnation=incarnation)
        mine = replace(mine, token=token or mine.token)
        number = 1
        while (held := self._held(number, mine)).token != mine.token:
            if held.cancelled or held.incarnation >= incarnation:
                return held
            number += 1
        return None

    def bury(self, epoch: int, why: str, *, begun: bool = False) -> Start | None:
        """Write a tombstone, so that a late job computes nothing; return the earlier start, if there is one.

        Args:
            begun: whether to write the tombstone even if a job has begun, so that no later incarnation begins.

        Returns:
            None: no job of this attempt has begun, and none will. Otherwise the start of the job that began last.
        """
        held, number = self._newest()
        while held is None or (begun and not held.cancelled):
            mine = _start(epoch, cancelled=why)
            number += 1
            other = self._held(number, mine)
            if other.token == mine.token:
                return held
            held = other
        return None if held.cancelled else held

    def started(self) -> Start | None:
        """Return the start of the process that began the attempt last; None if no process has begun the attempt.

        Raises:
            IntegrityError: the object cannot be read.
        """
        return self._newest()[0]

    def order(self, kind: ControlKind) -> int:
        """Send the job an order; return its number. Concurrent callers get different numbers."""
        number = 1
        while True:
            mine = _json({**asdict(Control(number, kind, time.time())), "token": secrets.token_hex(8)})
            if self._objects.get(_control(number)) is None and self._create(_control(number), mine) == mine:
                return number
            number += 1

    def controls(self, after: int = 0) -> list[Control]:
        """Return the orders after number `after`.

        Raises:
            IntegrityError: an order cannot be read.
        """
        found: list[Control] = []
        while (data := self._objects.get(_control(after := after + 1))) is not None:
            raw = self._table(_control(after), data)
            try:
                found.append(Control(after, ControlKind(raw["kind"]), real(raw["at"])))
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(_control(after), error) from error
        return found

    def acknowledge(self, number: int) -> None:
        """Record that the job has carried out an order; a repeated call has no effect."""
        if not self.acknowledged(number):
            self._create(_ack(number), _json({"at": time.time()}))

    def acknowledged(self, number: int) -> bool:
        """Return whether the job has carried out an order."""
        return self._objects.get(_ack(number)) is not None

    def append(self, stream: str, number: int, data: bytes) -> None:
        """Write segment `number` of a stream, once; a repeated call with the same bytes has no effect.

        Raises:
            ConflictError: the segment has different facts, so another process writes the stream.
        """
        if self._create(_segment(stream, number), data) != data:
            raise ConflictError(
                f"segment {stream}/{number} of {self._objects.place} contains other facts: another job of the attempt "
                "writes them"
            )

    def last(self, stream: str) -> int:
        """Return the number of the newest segment; 0 if there is none."""
        single, packed = self._objects.numbers(stream), self._objects.numbers(f"{stream}/packs")
        return max(single[-1] if single else 0, packed[-1] * PACK if packed else 0)

    def numbers(self, stream: str) -> list[int]:
        """Return the numbers of the segments that were not packed."""
        return self._objects.numbers(stream)

    def segment(self, stream: str, number: int) -> bytes:
        """Return a segment that was not packed; empty if there is no such segment."""
        return self._objects.get(_segment(stream, number)) or b""

    def segments(
        self, stream: str, after: int = 0, unreadable: Callable[[IntegrityError], None] = refuse
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (number, bytes) of the segments after `after`, in order, each once, even if a writer packs them.

        Args:
            unreadable: called for a pack that cannot be read, which is then skipped, and for a segment that is not a
                file, at which reading ends; the default raises.

        Raises:
            IntegrityError: a pack cannot be read.
        """
        number = after + 1
        while True:
            group = _group(number)
            try:
                whole = self._objects.get(_pack(stream, group)) if number % PACK == 1 else None
                data = None if whole is not None else self._objects.get(_segment(stream, number))
            except IntegrityError as error:
                unreadable(error)
                return
            if data is not None:
                yield number, data
                number += 1
                continue
            # a segment is removed after its pack was written, so a lookup in this order finds it
            whole = whole if whole is not None else self._objects.get(_pack(stream, group))
            if whole is None:
                return
            first = (group - 1) * PACK + 1
            pieces = [b""] * PACK
            try:
                pieces = self._unpacked(stream, group, whole)
            except IntegrityError as error:
                unreadable(error)
            yield from ((place, piece) for place, piece in enumerate(pieces, start=first) if place >= number)
            number = first + PACK

    def backwards(self, stream: str) -> Iterator[bytes]:
        """Yield segments from the newest to the oldest; a segment that is being packed may be yielded twice."""
        for number in reversed(self._objects.numbers(stream)):
            data = self._objects.get(_segment(stream, number))
            if data is not None:
                yield data
        for group in reversed(self._objects.numbers(f"{stream}/packs")):
            whole = self._objects.get(_pack(stream, group))
            yield from reversed(self._unpacked(stream, group, whole) if whole is not None else [])

    def pack(self, stream: str, number: int) -> None:
        """Pack the group of segments that ends with `number`, if it is complete, into one object.

        Only the writer of the segments may call this.
        """
        if number % PACK:
            return
        group, members = _group(number), range(number - PACK + 1, number + 1)
        if self._objects.get(_pack(stream, group)) is None:
            found = [self._objects.get(_segment(stream, member)) for member in members]
            pieces = [piece for piece in found if piece is not None]
            if len(pieces) < PACK or sum(map(len, pieces)) > SEGMENT - SMALL:
                return
            self._create(_pack(stream, group), _json({"lengths": [len(piece) for piece in pieces]}) + b"".join(pieces))
        for member in members:
            self._objects.remove(_segment(stream, member))

    def summarise(self, summary: Summary) -> None:
        """Write the job's progress. A write without an answer is not retried, because the next call replaces it."""
        with suppress(InfrastructureError):
            self._objects.overwrite(_SUMMARY, _json(asdict(summary)))

    def summary(self) -> Summary | None:
        """Return the job's progress; None if none was reported yet, or a power cut lost the report."""
        with suppress(IntegrityError):
            data = self._objects.get(_SUMMARY)
            return None if data is None else self._read(_SUMMARY, data, Summary)
        return None

    def answer(self, result: Mapping[str, Any]) -> None:
        """Write the job's result, once.

        Raises:
            ConflictError: another result exists.
        """
        data = _json(result)
        if self._create(_RESULT, data) != data:
            raise ConflictError(f"{self._objects.place} has another result: another job of this attempt wrote it")

    def answered(self) -> dict[str, Any] | None:
        """Return the job's result, as the job reported it; None if there is no result yet.

        Raises:
            IntegrityError: the result is not JSON.
        """
        data = self._objects.get(_RESULT)
        return None if data is None else self._table(_RESULT, data)

    def document(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object at a key; None if it does not exist.

        Raises:
            IntegrityError: the object cannot be read.
        """
        data = self._objects.get(key)
        return None if data is None else self._table(key, data)

    def replace(self, key: str, value: Mapping[str, Any]) -> None:
        """Write the JSON object at a key, whether or not one exists."""
        self._objects.overwrite(key, _json(value))

    def once(self, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Write the JSON object at a key if there is none; return the object that exists afterwards."""
        return self._table(key, self._create(key, _json(value)))

    def discard(self, *keys: str) -> None:
        """Delete these documents, the result and all starts, so that nothing remains of a job that only reported."""
        for key in (*keys, _RESULT, *(_start_key(number) for number in range(1, self._newest()[1] + 1))):
            self._objects.remove(key)

    def checkpoints(self) -> list[int]:
        """Return the steps of the staged checkpoints, oldest first."""
        return self._objects.numbers("checkpoints")

    def replace_meter(self, tokens: int, incarnation: int) -> None:
        """Record the tokens that the job has spent or may spend until the next call.

        Each incarnation has a record of its own, because an earlier one may still write when the next one runs.
        """
        self._objects.overwrite(f"{_METERS}/{incarnation:06d}", f"{tokens:020d} {0:020d}\n".encode())

    def metered(self) -> bytes:
        """Return the record of the job's spending, of the latest incarnation that has one; empty if there is none."""
        latest = self._objects.numbers(_METERS)[-1:]
        return self._objects.get(f"{_METERS}/{latest[0]:06d}" if latest else METER) or b""

    def log(self, offset: int, text: bytes) -> int:
        """Write output of the job, which begins at this byte of its log; return the bytes that are there afterwards."""
        return len(self._create(f"{_LOG}/{offset:015d}", text))

    def log_end(self) -> int:
        """Return the number of bytes of output so far."""
        last = self._objects.numbers(_LOG)[-1:]
        return last[0] + len(self._objects.get(f"{_LOG}/{last[0]:015d}") or b"") if last else 0

    def logged(self, cursor: int) -> bytes:
        """Return the next piece of the job's output from byte `cursor` on; empty if there is none yet."""
        begun = [offset for offset in self._objects.numbers(_LOG) if offset <= cursor]
        data = self._objects.get(f"{_LOG}/{begun[-1]:015d}") if begun else None
        return data[cursor - begun[-1] :] if data is not None else b""

    def _newest(self) -> tuple[Start | None, int]:
        """Return the last start and its number."""
        found, number = None, 0
        while (data := self._objects.get(_start_key(number + 1))) is not None:
            number += 1
            found = self._read(_start_key(number), data, Start)
        return found, number

    def _held(self, number: int, wanted: Start) -> Start:
        return self._read(_start_key(number), self._create(_start_key(number), _json(asdict(wanted))), Start)

    def _create(self, key: str, data: bytes) -> bytes:
        """Write an object if none exists; return the bytes that exist afterwards. Retry if there is no answer.

        Raises:
            WorkspaceError: the disk is full or read-only.
            InfrastructureError: there was no answer.
        """
        for wait in (*_WAITS, None):
            try:
                if self._objects.create(key, data):
                    return data
                found = self._objects.get(key)
                if found is not None:
                    return found
            except InfrastructureError:
                if wait is None:
                    raise
            self._pause(wait or 0.0)
        raise InfrastructureError(
            f"{self._objects.place}/{key}: the store reports that this object exists, but does not return it; try again"
        )

    def _unpacked(self, stream: str, group: int, whole: bytes) -> list[bytes]:
        head, _, body = whole.partition(b"\n")
        key = _pack(stream, group)
        lengths = self._table(key, head).get("lengths")
        try:
            ends = [0, *itertools.accumulate(map(count, lengths if isinstance(lengths, list) else ()))]
        except TypeError as error:
            raise self._unreadable(key, error) from error
        if len(ends) != PACK + 1 or ends[-1] != len(body):
            raise self._unreadable(key, ValueError(f"its {PACK} lengths must add up to {len(body)} bytes"))
        return [body[begin:end] for begin, end in itertools.pairwise(ends)]

    def _table(self, key: str, data: bytes) -> dict[str, Any]:
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._unreadable(key, error) from error
        if not isinstance(raw, dict):
            raise self._unreadable(key, TypeError("it must be an object"))
        return raw

    def _read(self, key: str, data: bytes, form: Callable[..., T]) -> T:
        try:
            return shaped(form, self._table(key, data))
        except (ValueError, TypeError) as error:
            raise self._unreadable(key, error) from error

    def _unreadable(self, key: str, error: Exception) -> IntegrityError:
        where = f"{self._objects.place}/{key}"
        return IntegrityError(f"{where} cannot be read: {error}; it is damaged or from another version")


def _start(epoch: int, process: str = "", cancelled: str = "", incarnation: int = 0) -> Start:
    host, pid, token = socket.gethostname(), os.getpid(), secrets.token_hex(8)
    return Start(epoch, host, pid, process, token, time.time(), cancelled, incarnation)


def _start_key(number: int) -> str:
    return _START if number == 1 else f"starts/{number:06d}.json"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _group(number: int) -> int:
    return (number - 1) // PACK + 1


def _segment(stream: str, number: int) -> str:
    return f"{stream}/{number:06d}.jsonl"


def _pack(stream: str, group: int) -> str:
    return f"{stream}/packs/{group:06d}"


def _control(number: int) -> str:
    return f"controls/{number:06d}.json"


def _ack(number: int) -> str:
    return f"controls/acks/{number:06d}.json"
