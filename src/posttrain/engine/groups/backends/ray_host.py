"""The host in each process of a Ray pool, and the calls to hosts.

A host contains the workers of every role in its process. A call collects the outcome of each host, and limits the wait
for the other hosts after a failure.

The controller waits for calls only in `settle`. The wait ends when every rank has answered, at the deadline, or at the
end of the grace period that follows a failure; within this period, slower ranks also report. A rank that has no outcome
by then may be stuck in a collective that never completes, so the pool is given up.
"""

import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, final

import psutil
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError

from posttrain.domain.errors import DeadlineError, InputError, blame
from posttrain.engine.groups.port import (
    Answer,
    Parcel,
    Process,
    RankContext,
    RemoteTraceback,
    StoredAway,
    WorkerError,
    WorkerLostError,
    pack,
    unpack,
)

R = TypeVar("R")
GRACE = 10.0  # seconds


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a host sends to the controller."""

    pickled: bytes | None  # None: the exception cannot be unpickled elsewhere
    summary: str  # `ValueError: no such token`
    traceback: str


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call. It has no answer if the call failed, or if the answer stays in the object store."""

    started: float  # seconds since the epoch
    seconds: float
    answer: Parcel | None = None
    failure: Failure | None = None


@final
class Host:
    """One rank, which Ray runs as an actor with one thread: calls run one at a time, in the order of submission.

    Args:
        context: passed to the host's workers.
        paths: the controller's `sys.path`; paths missing here are appended.
        threads: number of torch's threads.
    """

    def __init__(self, context: RankContext, paths: Sequence[str], threads: int) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        torch.set_num_threads(threads)
        self._context = context
        self._address = ray.util.get_node_ip_address()
        self._workers: dict[str, Any] = {}
        self._store: Any = None  # a TCPStore; torch exports the name only in builds that contain it
        if context.device != "cpu":
            torch.cuda.set_device(context.device)

    def __repr__(self) -> str:
        """Return the prefix of this host's lines in the controller's log."""
        return f"{self._context.pool}[{self._context.rank}]"

    def identify(self, alone: bool) -> Process:
        """Return the process of this host."""
        return Process(self._context.rank, os.getpid(), self._address, self._context.device, alone)

    def open_store(self, seconds: float) -> tuple[str, int]:
        """Listen on this node's address for the other ranks; only rank 0 does this.

        The socket is created here because a socket that the store creates would listen on every address of the node.
        """
        listening = socket.create_server((self._address, 0), backlog=max(128, self._context.size))
        port: int = listening.getsockname()[1]
        self._store = self._tcp_store((self._address, port), seconds, listening.detach())
        return self._address, port

    def join(self, address: tuple[str, int], seconds: float) -> None:
        """Join the default process group of the pool's ranks; a collective may take at most `seconds`."""
        interfaces = psutil.net_if_addrs().items()
        mine = [name for name, found in interfaces if any(a.address == self._address for a in found)]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if mine else ():
            os.environ[variable] = mine[0]
        store = self._store or self._tcp_store(address, seconds)
        dist.init_process_group(
            "gloo" if self._context.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self._context.rank,
            world_size=self._context.size,
            timeout=timedelta(seconds=seconds),
        )
        self._store = store

    def start(self, role: str, parcel: Parcel) -> Outcome:
        """Construct a worker of the packed `(class, args, kwargs)`."""
        started, begin = time.time(), time.perf_counter()
        try:
            worker, args, kwargs = unpack(parcel, fetch)
            self._workers.pop(role, None)  # frees the old worker's memory before the new one loads
            self._workers[role] = worker(self._context, *args, **kwargs)
        except Exception as error:
            return Outcome(started, time.perf_counter() - begin, failure=_failure(error))
        return Outcome(started, time.perf_counter() - begin, pack(None))

    def call(self, role: str, parcel: Parcel) -> Outcome:
        """Run the packed `(method, args, kwargs)` on the role's worker."""
        started, begin = time.time(), time.perf_counter()
        try:
            method, args, kwargs = unpack(parcel, fetch)
            started, begin = time.time(), time.perf_counter()
            value = method(self._worker(role), *args, **kwargs)
            return Outcome(started, time.perf_counter() - begin, pack(value))
        except Exception as error:
            return Outcome(started, time.perf_counter() - begin, failure=_failure(error))

    def keep(self, role: str, parcel: Parcel) -> tuple[Outcome, Parcel | None]:
        """Like `call`, but return two values to the object store; the controller fetches only the first value."""
        outcome = self.call(role, parcel)
        return Outcome(outcome.started, outcome.seconds, None, outcome.failure), outcome.answer

    def stream(self, role: str, parcel: Parcel) -> Iterator[Outcome]:
        """Like `call`, for a generator method; yield an outcome for each answer."""
        answers: Iterator[Any] | None = None
        while True:
            started, begin = time.time(), time.perf_counter()
            try:
                if answers is None:
                    method, args, kwargs = unpack(parcel, fetch)
                    answers = iter(method(self._worker(role), *args, **kwargs))
                value = next(answers)
                outcome = Outcome(started, time.perf_counter() - begin, pack(value))
            except StopIteration:
                return
            except Exception as error:
                yield Outcome(started, time.perf_counter() - begin, failure=_failure(error))
                return
            yield outcome

    def close(self) -> None:
        """Release the workers and leave the process group."""
        self._workers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _worker(self, role: str) -> Any:
        if role not in self._workers:
            raise InputError(f"pool {self._context.pool} has not started role {role}, only {sorted(self._workers)}")
        return self._workers[role]

    def _tcp_store(self, address: tuple[str, int], seconds: float, descriptor: int | None = None) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            *address,
            self._context.size,
            descriptor is not None,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )


def fetch(handle: Any) -> Parcel:
    """Fetch the stored value of a handle from the object store."""
    parcel: Parcel = ray.get(handle)
    return parcel


def _failure(error: Exception) -> Failure:
    """Return the exception as text and, if the controller can unpickle it, pickled."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        if type(pickle.loads(pickled or b"")) is not type(error):  # noqa: S301  # our own bytes, read back
            pickled = None
    except Exception:
        pickled = None
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    return Failure(pickled, summary, "".join(traceback.format_exception(error)).rstrip())


@final
class RayCall(Generic[R]):
    """A method running on one rank.

    Args:
        size: bytes of the arguments.
        outcome: reference to the `Outcome`.
        stored: reference to the value, if the value stays in the object store.
    """

    def __init__(
        self, role: str, process: Process, method: str, size: int, outcome: Any, stored: Any | None = None
    ) -> None:
        self.role, self.rank, self.method = role, process.rank, method
        self.reference = outcome
        self.failure: Exception | None = None
        self._process, self._size, self._stored = process, size, stored
        self._answer: Answer[R] | None = None

    def done(self) -> bool:
        """Return whether there is an answer or a failure."""
        return self.settled or bool(ray.wait([self.reference], timeout=0)[0])

    def answered(self) -> Answer[R] | None:
        """Return the answer, if it has been fetched."""
        return self._answer

    @property
    def settled(self) -> bool:
        """Whether the outcome has been fetched."""
        return self._answer is not None or self.failure is not None

    def settle(self) -> None:
        """Fetch the outcome, which must be available."""
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
            f"{self.role} rank {self.rank} was lost: process {process.pid} on {process.host} ended during {self.method}"
        )
        together = "its pool is given up, because its ranks work together; start again from the last checkpoint"
        lost = WorkerLostError(line, process) if process.alone else WorkerLostError(f"{line}; {together}")
        lost.__cause__ = error
        return lost


@final
class RayFlow(Generic[R]):
    """A generator running on one rank.

    Args:
        outcomes: Ray's generator of references to the outcomes.
        size: bytes of the arguments.
    """

    def __init__(self, role: str, process: Process, method: str, outcomes: Any, size: int) -> None:
        self.role, self.rank, self.outcomes, self.ended = role, process.rank, outcomes, False
        self._process, self._method, self._size = process, method, size
        self.failure: Exception | None = None  # raised after the earlier answers have been taken
        self._taken = Answer(0, time.time(), 0.0, size)

    def taken(self) -> Answer[int]:
        """See `Flow`."""
        return self._taken

    def next(self) -> list[R]:
        """Return the next answer in a list; an empty list if the generator has ended or failed.

        Raises:
            WorkerLostError: the rank's process has ended.
            Exception: raised by the worker.
        """
        if self.failure is not None:
            self.ended = True
            raise self.failure
        try:
            reference = next(self.outcomes)
        except StopIteration:
            self.ended = True
            return []
        call = RayCall[R](self.role, self._process, self._method, self._size, reference)
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
    """Return the answers that have arrived; wait at most `timeout` seconds for the first one.

    A failure is raised after all earlier answers of its rank have been taken.

    Args:
        give_up: called with the reason when the pool cannot be used any longer.

    Raises:
        WorkerLostError: a process has ended.
        Exception: raised by a worker.
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
        calls: the calls of one dispatch.
        timeout: seconds.
        give_up: called with the reason when the pool cannot be used any longer.

    Raises:
        DeadlineError: a call has no outcome after `timeout` seconds.
        WorkerLostError: a process has ended.
        Exception: the first failure of a worker, unless a lost process explains the failures.
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
            raise call.failure  # the other ranks continue, and the controller does not wait for them
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
            f"{_named(silent)} must answer {silent[0].method} within {timeout:.3g} seconds, but did not; check "
            "what the rank does, or raise runtime.call_timeout"
        )


def _named(calls: Sequence[RayCall[Any]]) -> str:
    ranks = ", ".join(str(call.rank) for call in calls)
    return f"{calls[0].role} rank{'s' if len(calls) > 1 else ''} {ranks}"


def _rebuilt(failure: Failure) -> Exception:
    """Return the worker's exception, with its original type if possible; its cause is the remote traceback."""
    error: Exception | None = None
    if failure.pickled is not None:
        try:
            error = pickle.loads(failure.pickled)  # noqa: S301  # from a process that this one started
        except Exception:  # only the worker can import the exception's type
            error = None
    if error is None:
        error = WorkerError(failure.summary)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error
