"""A pool that emulates another machine: one rank in a thread, whose decoding ends after a given time.

For benchmarks on one machine. The computation is real, and its time is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Answer, Call, Flow, Stored


@dataclass
class Running:
    """A call in the pool's thread."""

    role: str
    rank: int
    method: str
    answer: Future[Answer[Any]]

    def done(self) -> bool:
        """Whether the call has ended."""
        return self.answer.done()

    def answered(self) -> Answer[Any] | None:
        """Return the answer; None before the call has ended."""
        return self.answer.result() if self.answer.done() and not self.answer.exception() else None


class Arriving:
    """The answers of a generator in the pool's thread."""

    def __init__(self, role: str, rank: int) -> None:
        self.role, self.rank, self.ended = role, rank, False
        self.queue: Queue[Any] = Queue()
        self._taken, self._begun = 0, time.time()

    def taken(self) -> Answer[int]:
        """Return the number of answers taken."""
        return Answer(self._taken, self._begun, time.time() - self._begun)

    def take(self, timeout: float) -> list[Any]:
        """Return the answers that have arrived; wait for the first."""
        found: list[Any] = []
        with suppress(Empty):
            while not self.ended:
                one = self.queue.get_nowait() if found else self.queue.get(timeout=timeout)
                if isinstance(one, Exception):
                    raise one
                self.ended = one is None
                found += [] if self.ended else [one]
        self._taken += len(found)
        return found


class Elsewhere:
    """One rank in a separate thread; generation takes `decode_seconds`."""

    name = "inline"

    def __init__(self, pool: str) -> None:
        self._inner, self._thread = InlineBackend(pool=pool), ThreadPoolExecutor(1)
        self.decode_seconds = self.generated = 0.0  # the emulated time, and the real time of the last call
        self.arrived: list[tuple[float, Any]] = []  # (seconds since the start, answer) of the last stream
        self.pool, self.ranks, self.contexts = pool, 1, self._inner.contexts
        self.processes = self._inner.processes

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        """See `Backend.start`; in this process."""
        self._inner.start(role, worker, args, kwargs, timeout)

    def submit(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Call[Any]]:
        """See `Backend.submit`; returns immediately."""

        def run() -> Answer[Any]:
            (answer,) = self._inner.wait(self._inner.submit(role, ranks, method, args, kwargs), 60.0)
            return answer

        return [Running(role, rank, method.__name__, self._thread.submit(run)) for rank in ranks]

    def submit_stored(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Call[Stored[Any]]]:
        """See `Backend.submit_stored`; runs after the current call."""
        done = self._thread.submit(lambda: self._inner.submit_stored(role, ranks, method, args, kwargs))
        return done.result()

    def submit_stream(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Iterator[Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Flow[Any]]:
        """See `Backend.submit_stream`; returns immediately, and answers arrive at their emulated times."""
        flow = Arriving(role, ranks[0])

        def run() -> None:
            try:
                arrive()
            except Exception as error:  # raised when it is taken
                flow.queue.put(error)

        def arrive() -> None:
            begin, came = time.perf_counter(), []
            inner = self._inner.submit_stream(role, ranks, method, args, kwargs)
            while found := self._inner.take(inner, 60.0):
                came += [(time.perf_counter() - begin, one) for one in found]
            self.generated = time.perf_counter() - begin
            slower = max(self.decode_seconds / self.generated, 1.0)
            self.arrived = []
            for at, one in came:
                time.sleep(max(0.0, at * slower - (time.perf_counter() - begin)))
                self.arrived.append((time.perf_counter() - begin, one))
                flow.queue.put(one)
            flow.queue.put(None)

        self._thread.submit(run)
        return [flow]

    def take(self, flows: Sequence[Flow[Any]], timeout: float) -> list[Any]:
        """Return the answers that have arrived."""
        (flow,) = flows
        assert isinstance(flow, Arriving)
        return flow.take(timeout)

    def wait(self, calls: Sequence[Call[Any]], timeout: float) -> list[Answer[Any]]:
        """Return the answers."""
        return [call.answer.result(timeout) if isinstance(call, Running) else _kept(call) for call in calls]

    def replace(self, rank: int, timeout: float) -> None:
        """Do nothing: no process can be lost."""

    def give_up(self, reason: str) -> None:
        """Do nothing: no call can be stuck."""

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
        self._inner.close()


def _kept(call: Call[Any]) -> Answer[Any]:
    answer = call.answered()
    assert answer is not None
    return answer
