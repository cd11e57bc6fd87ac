"""The attempt channel: what one attempt's job and the control side say to each other, over objects with names.

::

    start.json              the job's first act, or a tombstone: created once, so exactly one process begins
    events/000001.jsonl     facts up: write-once segments, numbered without gaps; samples/ likewise
    events/packs/000001     64 of them in one object, written before they are removed: no reader misses or doubles one
    summary.json            how far the job is: replaced with every segment, read without reading any
    controls/000001.json    orders down: numbered, typed, write-once
    controls/acks/000001.json   the job's word that it carried one out
    result.json             how the job ended: last, and once

Where the objects are is the port `ChannelObjects`; a back-end each in `store.channels`. Nothing here lists what it can
count, and nothing but `summary.json` is ever replaced. An answer that got lost (a PUT that went through and said
nothing) is resolved by what is there afterwards: no fact, order or start is doubled by trying again. Only the standard
library: jobs import this.
"""

from __future__ import annotations  # `shaped` reads the types of its forms as they are written

import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from posttrain.domain.errors import ConflictError, InfrastructureError, IntegrityError
from posttrain.domain.jobs import count, real, shaped
from posttrain.store.atomic import SEGMENT, SMALL

PACK = 64  # segments
EVENTS, SAMPLES = "events", "samples"
_START, _SUMMARY, _RESULT = "start.json", "summary.json", "result.json"
_WAITS = (0.1, 0.5, 2.0)  # seconds before an unanswered request is tried again
T = TypeVar("T")


def refuse(error: IntegrityError) -> None:
    """Raise what cannot be read: for whoever is not told of it and goes on."""
    raise error


class ChannelObjects(Protocol):
    """Small objects of one attempt by key (`events/000001.jsonl`). Every implementation:

    - reads what was acknowledged before, from any process;
    - shows an object whole or not at all;
    - when a request gets no answer, raises `InfrastructureError`: it may have gone through or not.
    """

    @property
    def place(self) -> str:
        """How errors call it."""

    def create(self, key: str, data: bytes) -> bool:
        """Write where nothing is yet, durably; False where there is something, which stays. One of several wins.

        Raises:
            WorkspaceError: the disk is full or read-only.
            InfrastructureError: no answer.
        """

    def overwrite(self, key: str, data: bytes) -> None:
        """Replace an object that only one process writes; it need not survive a power cut.

        Raises:
            WorkspaceError, InfrastructureError: as `create`.
        """

    def get(self, key: str) -> bytes | None:
        """The bytes; None where there is nothing.

        Raises:
            InfrastructureError: no answer.
        """

    def remove(self, key: str) -> None:
        """Take an object away; nothing happens where there is none."""

    def numbers(self, folder: str) -> list[int]:
        """Of the objects `FOLDER/NUMBER.…` directly below a folder, in order."""


class ControlKind(StrEnum):
    """What a job may be told."""

    STOP = "stop"  # write a checkpoint and end
    CHECKPOINT = "checkpoint"  # write one and go on


@dataclass(frozen=True, slots=True)
class Control:
    """One numbered order to the job."""

    number: int
    kind: ControlKind
    at: float


@dataclass(frozen=True, slots=True)
class Start:
    """Who begins an attempt, by the `start` object: a job, or nobody any more where `cancelled` says why."""

    epoch: int  # the attempt's
    host: str
    pid: int
    process: str  # its identity: a pid alone may stand for another process tomorrow
    token: str  # random: tells whose create went through when its answer was lost
    at: float
    cancelled: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """How far a job is."""

    step: int
    total: int
    phase: str
    tokens: int
    segment: int  # the newest of its facts
    at: float
    phases: int = 0  # spans that have ended: within a long step, what shows that it goes on


class AttemptChannel:
    """One attempt's channel over `objects`. Making it touches nothing.

    Args:
        pause: how long-lasting silence is waited out.
    """

    def __init__(self, objects: ChannelObjects, pause: Callable[[float], None] = time.sleep) -> None:
        self._objects, self._pause = objects, pause

    def start(self, epoch: int, process: str) -> Start | None:
        """Begin the attempt: a job's first act. None: this process has it; else who has, and the job must end."""
        mine = _start(epoch, process)
        held = self._held(mine)
        return None if held.token == mine.token else held

    def bury(self, epoch: int, why: str) -> Start | None:
        """Leave a tombstone, so that a job which comes late computes nothing.

        Returns:
            None: no job of this attempt has begun, and none will; else who began before.
        """
        held = self.started() or self._held(_start(epoch, cancelled=why))
        return None if held.cancelled else held

    def started(self) -> Start | None:
        """Who has the attempt; None while nobody has.

        Raises:
            IntegrityError: the object cannot be read.
        """
        data = self._objects.get(_START)
        return None if data is None else self._read(_START, data, Start)

    def order(self, kind: ControlKind) -> int:
        """Give the job an order; its number. Of several that give one at once, each gets a number of its own."""
        number = 1
        while True:
            mine = _json({**asdict(Control(number, kind, time.time())), "token": secrets.token_hex(8)})
            if self._objects.get(_control(number)) is None and self._create(_control(number), mine) == mine:
                return number
            number += 1

    def controls(self, after: int = 0) -> list[Control]:
        """The orders behind number `after`.

        Raises:
            IntegrityError: one cannot be read.
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
        """Say that the job carried out an order; saying it again changes nothing."""
        if not self.acknowledged(number):
            self._create(_ack(number), _json({"at": time.time()}))

    def acknowledged(self, number: int) -> bool:
        """Whether the job carried out an order."""
        return self._objects.get(_ack(number)) is not None

    def append(self, stream: str, number: int, data: bytes) -> None:
        """Write segment `number` of a stream, once; the same bytes again change nothing.

        Raises:
            ConflictError: it holds other facts: another process writes.
        """
        if self._create(_segment(stream, number), data) != data:
            raise ConflictError(
                f"segment {stream}/{number} of {self._objects.place} holds other facts; another job of it writes"
            )

    def last(self, stream: str) -> int:
        """The number of the newest segment; 0 for none."""
        single, packed = self._objects.numbers(stream), self._objects.numbers(f"{stream}/packs")
        return max(single[-1] if single else 0, packed[-1] * PACK if packed else 0)

    def numbers(self, stream: str) -> list[int]:
        """The numbers of the segments that were not packed."""
        return self._objects.numbers(stream)

    def segment(self, stream: str, number: int) -> bytes:
        """One segment that was not packed; empty where there is none."""
        return self._objects.get(_segment(stream, number)) or b""

    def segments(
        self, stream: str, after: int = 0, unreadable: Callable[[IntegrityError], None] = refuse
    ) -> Iterator[tuple[int, bytes]]:
        """(number, bytes) of the segments behind `after`, in order, each once, whoever packs them meanwhile.

        Args:
            unreadable: told of a pack that cannot be read, which is then left out, or of a segment that is no file,
                where reading ends; without it that raises.

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
            # a segment is removed after its pack was written: looked for in this order, it is in one of them
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
        """Segments from the newest on; one that is packed meanwhile may come twice."""
        for number in reversed(self._objects.numbers(stream)):
            data = self._objects.get(_segment(stream, number))
            if data is not None:
                yield data
        for group in reversed(self._objects.numbers(f"{stream}/packs")):
            whole = self._objects.get(_pack(stream, group))
            yield from reversed(self._unpacked(stream, group, whole) if whole is not None else [])

    def pack(self, stream: str, number: int) -> None:
        """Put a whole group of segments, of which `number` is the last, into one object. Only who writes them does."""
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
        """Say how far the job is; what does not get through is said with the next."""
        with suppress(InfrastructureError):
            self._objects.overwrite(_SUMMARY, _json(asdict(summary)))

    def summary(self) -> Summary | None:
        """How far the job is; None while it said nothing, or what it said was lost in a power cut."""
        with suppress(IntegrityError):
            data = self._objects.get(_SUMMARY)
            return None if data is None else self._read(_SUMMARY, data, Summary)
        return None

    def answer(self, result: Mapping[str, Any]) -> None:
        """Say how the job ended, once.

        Raises:
            ConflictError: it was said, and otherwise.
        """
        data = _json(result)
        if self._create(_RESULT, data) != data:
            raise ConflictError(f"{self._objects.place} has another result; another job of this attempt answered")

    def answered(self) -> dict[str, Any] | None:
        """How the job ended by its own word; None while there is none.

        Raises:
            IntegrityError: it is not JSON.
        """
        data = self._objects.get(_RESULT)
        return None if data is None else self._table(_RESULT, data)

    def _held(self, wanted: Start) -> Start:
        return self._read(_START, self._create(_START, _json(asdict(wanted))), Start)

    def _create(self, key: str, data: bytes) -> bytes:
        """Write where nothing is; what is there afterwards. Tried again while nobody answers.

        Raises:
            WorkspaceError: the disk is full or read-only.
            InfrastructureError: nobody answered.
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
        raise InfrastructureError(f"{self._objects.place}/{key} is there and cannot be read; try again")

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
        return IntegrityError(f"{where} cannot be read: {error}; it is damaged or of another version")


def _start(epoch: int, process: str = "", cancelled: str = "") -> Start:
    return Start(epoch, socket.gethostname(), os.getpid(), process, secrets.token_hex(8), time.time(), cancelled)


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
