"""Calls to Ray hosts: what became of each, and how long the others are waited for when one has failed.

The controller waits in `settle` and nowhere else. What unblocks it: every answer; the deadline; or a failure and then
the grace, within which ranks that were merely slower report too. A rank still silent after that may be stuck in a
collective that will never complete, so the pool is given up.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import ray
from ray.exceptions import RayError

from posttrain.domain.errors import DeadlineError
from posttrain.domain.workers import blame
from posttrain.engine.groups.backends.ray_host import Failure, Outcome, fetch
from posttrain.engine.groups.failures import RemoteTraceback, WorkerError, WorkerLostError
from posttrain.engine.groups.payload import StoredAway, unpack
from posttrain.engine.groups.port import Answer, Process

R = TypeVar("R")

GRACE = 10.0  # seconds


@final
class RayCall(Generic[R]):
    """A method running on one rank.

    Args:
        outcome: reference to the `Outcome`.
        stored: reference to the value, when that stays in the object store.
        size: bytes of the arguments.
    """

    def __init__(
        self, role: str, process: Process, method: str, outcome: Any, size: int, stored: Any | None = None
    ) -> None:
        self.role, self.rank, self.method = role, process.rank, method
        self.reference = outcome
        self.failure: Exception | None = None
        self._process, self._size, self._stored = process, size, stored
        self._answer: Answer[R] | None = None

    def done(self) -> bool:
        """Whether there is an answer or a failure."""
        return self.settled or bool(ray.wait([self.reference], timeout=0)[0])

    def answered(self) -> Answer[R] | None:
        """The answer, where it has been fetched."""
        return self._answer

    @property
    def settled(self) -> bool:
        """Whether the outcome has been fetched."""
        return self._answer is not None or self.failure is not None

    def settle(self) -> None:
        """Fetch the outcome, which is there."""
        try:
            outcome: Outcome = ray.get(self.reference)
        except RayError as error:
            self.failure = self._lost(error)
        else:
            if outcome.failure is not None:
                self.failure = _rebuilt(outcome.failure)
            else:
                self._answer = self._read(outcome)
        if self.failure is not None:
            blame(self.failure, self.role, self.rank, self.method, self._process.pid)

    def _read(self, outcome: Outcome) -> Answer[R]:
        if outcome.answer is None:
            value: Any = StoredAway(self._stored, fetch)
            return Answer(value, outcome.started, outcome.seconds, self._size, 0)
        value = unpack(outcome.answer, fetch)
        return Answer(value, outcome.started, outcome.seconds, self._size, outcome.answer.size)

    def _lost(self, error: RayError) -> WorkerLostError:
        process = self._process
        line = (
            f"{self.role} rank {self.rank} is gone: process {process.pid} on {process.host} ended during {self.method}"
        )
        together = "its pool is given up, because its ranks work together; start again from the last checkpoint"
        lost = WorkerLostError(line, process) if process.alone else WorkerLostError(f"{line}; {together}")
        lost.__cause__ = error
        return lost


@final
class RayFlow(Generic[R]):
    """A generator running on one rank.

    Args:
        outcomes: Ray's generator of references to its outcomes.
        size: bytes of the arguments.
    """

    def __init__(self, role: str, process: Process, method: str, outcomes: Any, size: int) -> None:
        self.role, self.rank, self.outcomes, self.ended = role, process.rank, outcomes, False
        self._process, self._method, self._size = process, method, size
        self.failure: Exception | None = None  # that is raised when what came before has been taken
        self._taken = Answer(0, time.time(), 0.0, size)

    def taken(self) -> Answer[int]:
        """See `Flow`."""
        return self._taken

    def next(self) -> list[R]:
        """What is there; none where it has ended.

        Raises:
            WorkerLostError: its process is gone.
            Exception: what the worker raised.
        """
        if self.failure is not None:
            self.ended = True
            raise self.failure
        try:
            reference = next(self.outcomes)
        except StopIteration:
            self.ended = True
            return []
        call = RayCall[R](self.role, self._process, self._method, reference, self._size)
        call.settle()
        if call.failure is not None:
            self.failure = call.failure
            return []
        answer, before = call.answered(), self._taken
        assert answer is not None
        started = before.started if before.value else answer.started
        seconds, bytes_in = before.seconds + answer.seconds, before.bytes_in + answer.bytes_in
        self._taken = Answer(before.value + 1, started, seconds, self._size, bytes_in)
        return [answer.value]


def take(flows: Sequence[RayFlow[R]], timeout: float, give_up: Callable[[str], None]) -> list[R]:
    """What has come of them; waits `timeout` seconds at most for the first of it. A failure is raised when what
    its rank yielded before it has been taken.

    Args:
        give_up: told why the pool cannot be used any longer.

    Raises:
        WorkerLostError: a process is gone.
        Exception: what a worker raised.
    """
    found, deadline = list[R](), time.monotonic() + timeout
    while waiting := [flow for flow in flows if not flow.ended]:
        if failed := next((flow for flow in waiting if flow.failure is not None), None):
            if found:
                break
            if isinstance(failed.failure, WorkerLostError) and failed.failure.process is None:
                give_up(str(failed.failure))
            failed.next()
        left = 0.0 if found else max(deadline - time.monotonic(), 0.0)
        ready, _ = ray.wait([flow.outcomes for flow in waiting], num_returns=1, timeout=left)
        if not ready:
            break
        found += next(flow for flow in waiting if flow.outcomes is ready[0]).next()
    return found


def settle(calls: Sequence[RayCall[Any]], timeout: float, give_up: Callable[[str], None]) -> None:
    """Wait until every call has an answer.

    Args:
        calls: of one dispatch.
        timeout: seconds.
        give_up: told why the pool cannot be used any longer.

    Raises:
        DeadlineError: calls without an outcome when the time is over.
        WorkerLostError: a process is gone.
        Exception: what a worker raised; the first failure, except that a lost process explains the others' failures.
    """
    waiting = {call.reference: call for call in calls if not call.settled}
    failure = next((call.failure for call in calls if call.failure is not None), None)
    deadline = time.monotonic() + (timeout if failure is None else 0.0)
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        call = waiting.pop(ready[0])
        call.settle()
        if call.failure is None:
            continue
        if isinstance(call.failure, WorkerLostError) and call.failure.process:
            raise call.failure  # the others are not waited for: they go on
        if failure is None:
            deadline = time.monotonic() + GRACE
        if failure is None or (isinstance(call.failure, WorkerLostError) and not isinstance(failure, WorkerLostError)):
            failure = call.failure
    silent = list(waiting.values())
    if failure is not None:
        if silent:
            give_up(f"{_named(silent)} did not answer after another rank had failed")
        elif isinstance(failure, WorkerLostError):
            give_up(str(failure))
        raise failure
    if silent:
        give_up(f"{_named(silent)} did not answer in time")
        raise DeadlineError(
            f"{_named(silent)} must answer {silent[0].method} before its deadline, waited {timeout:.3g} seconds; look "
            "at what the rank does, or give the call more time (runtime.call_timeout)"
        )


def _named(calls: Sequence[RayCall[Any]]) -> str:
    ranks = ", ".join(str(call.rank) for call in calls)
    return f"{calls[0].role} rank{'s' if len(calls) > 1 else ''} {ranks}"


def _rebuilt(failure: Failure) -> Exception:
    """The worker's exception, of its own type where it can be had, caused by its traceback."""
    error: Exception | None = None
    if failure.pickled is not None:
        try:
            error = pickle.loads(failure.pickled)  # noqa: S301  # from a process that this one started
        except Exception:  # of a type that only the worker can import
            error = None
    if error is None:
        error = WorkerError(failure.summary)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error
