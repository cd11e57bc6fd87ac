"""Workers in the controller's own process and thread: no copies, no processes, the same semantics.

With several ranks, calls run one after the other, so there are no collectives; this suffices for tests and for
measurements of dispatch. A worker with collectives runs inline on one rank.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, final

from posttrain.domain.errors import InputError, blame
from posttrain.engine.groups.port import Answer, Call, Flow, Process, RankContext, Stored, WorkerLostError

R = TypeVar("R")


@final
@dataclass(frozen=True, slots=True)
class InlineStored(Generic[R]):
    """A stored value in this process: the reference contains the value."""

    here: ClassVar[bool] = True
    held: R

    def value(self) -> R:
        """Return the value itself, not a copy."""
        return self.held


@final
@dataclass(frozen=True, slots=True)
class InlineCall(Generic[R]):
    """A call that has already returned or failed."""

    role: str
    rank: int
    method: str
    answer: Answer[R] | None
    failure: Exception | None

    def done(self) -> bool:
        """Return True."""
        return True

    def answered(self) -> Answer[R] | None:
        """Return the answer; None after a failure."""
        return self.answer


@final
@dataclass(slots=True)
class InlineFlow(Generic[R]):
    """A generator that advances when the caller takes an answer."""

    role: str
    rank: int
    method: str
    answers: Iterator[R]
    ended: bool = False
    _count: int = 0
    _started: float = 0.0
    _seconds: float = 0.0

    def taken(self) -> Answer[int]:
        """See `Flow`."""
        return Answer(self._count, self._started or time.time(), self._seconds)

    def next(self) -> list[R]:
        """Return the next answer in a list; an empty list after the last answer."""
        self._started, begin = self._started or time.time(), time.perf_counter()
        try:
            return [next(self.answers)]
        except StopIteration:
            self.ended, self._count = True, self._count - 1
            return []
        except Exception as error:
            self.ended = True
            blame(error, self.role, self.rank, self.method, os.getpid())
            raise
        finally:
            self._count, self._seconds = self._count + 1, self._seconds + time.perf_counter() - begin


@final
class InlineBackend:
    """`Backend` inside this process.

    Args:
        ranks: number of ranks; with more than one rank there are no collectives.
        device: the device of every rank context.
        pool: the pool's name.
    """

    name = "inline"

    def __init__(self, ranks: int = 1, device: str = "cpu", pool: str = "main") -> None:
        if ranks < 1:
            raise InputError(f"a pool must have at least 1 rank, got {ranks}")
        self.pool, self.ranks = pool, ranks
        self.contexts = tuple(RankContext(pool, rank, ranks, device) for rank in range(ranks))
        self.processes = tuple(Process(rank, os.getpid(), "localhost", device) for rank in range(ranks))
        self._workers: dict[tuple[str, int], Any] = {}
        self._closed = False

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        """See `Backend.start`."""
        for context in self.contexts:
            try:
                self._workers[role, context.rank] = worker(context, *args, **kwargs)
            except Exception as error:
                blame(error, role, context.rank, "__init__", os.getpid())
                raise

    def submit(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[R]]:
        """See `Backend.submit`; the calls run one after the other before this method returns."""
        return [self._run(role, rank, method, args, kwargs) for rank in ranks]

    def submit_stored(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[Stored[R]]]:
        """See `Backend.submit_stored`."""
        made = [self._run(role, rank, method, args, kwargs) for rank in ranks]
        kept = [
            Answer(InlineStored(c.answer.value), c.answer.started, c.answer.seconds) if c.answer else None for c in made
        ]
        return [InlineCall(role, c.rank, c.method, answer, c.failure) for c, answer in zip(made, kept, strict=True)]

    def submit_stream(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Iterator[R]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Flow[R]]:
        """See `Backend.submit_stream`; a generator starts only when its first answer is taken."""
        self._refuse_closed(role, ranks[0])
        name = method.__name__
        return [InlineFlow(role, r, name, iter(method(self._workers[role, r], *args, **kwargs))) for r in ranks]

    def take(self, flows: Sequence[Flow[R]], timeout: float) -> list[R]:
        """See `Backend.take`; each rank computes its next answer in turn, without a time limit."""
        for flow in flows:
            assert isinstance(flow, InlineFlow)
            while not flow.ended:
                if found := flow.next():
                    return found
        return []

    def wait(self, calls: Sequence[Call[R]], timeout: float) -> list[Answer[R]]:
        """See `Backend.wait`. All calls have already run, so the group checks deadlines afterwards."""
        answers: list[Answer[R]] = []
        for call in calls:
            assert isinstance(call, InlineCall)
            if call.failure is not None:
                raise call.failure
            assert call.answer is not None
            answers.append(call.answer)
        return answers

    def replace(self, rank: int, timeout: float) -> None:
        """Do nothing: a worker can only be lost together with the controller."""

    def give_up(self, reason: str) -> None:
        """Do nothing: no call can be stuck here."""

    def close(self) -> None:
        """See `Backend.close`."""
        self._workers.clear()
        self.contexts = ()
        self._closed = True

    def _run(
        self, role: str, rank: int, method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> InlineCall[R]:
        self._refuse_closed(role, rank)
        started, begin = time.time(), time.perf_counter()
        try:
            value = method(self._workers[role, rank], *args, **kwargs)
        except Exception as error:
            blame(error, role, rank, method.__name__, os.getpid())
            return InlineCall(role, rank, method.__name__, None, error)
        return InlineCall(role, rank, method.__name__, Answer(value, started, time.perf_counter() - begin), None)

    def _refuse_closed(self, role: str, rank: int) -> None:
        if self._closed:
            raise WorkerLostError(
                f"{role} rank {rank} has ended, since its pool {self.pool} was closed; start a new pool"
            )
