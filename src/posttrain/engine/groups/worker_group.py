"""A role's workers as one group, and the resource pools of their processes.

A group is called by passing the method itself:

::

    scored  = policy.map(TrainWorker.fill, batch, "now", "logprobs")     # split by cost, gathered in the original order
    shards  = policy.each(TrainWorker.save, folder)                      # every rank; collectives go here
    length  = policy.within(30).one(TrainWorker.context_length)          # one rank, no collective; at most 30 seconds
    future  = rollout.nonblocking.map(RolloutWorker.generate, prompts)   # does not wait; future.result() does
    groups  = rollout.feed(covers, RolloutWorker.feed, prompts)          # a generator; groups.take(1.0) returns answers

The method is an ordinary attribute of an ordinary class. A type checker therefore rejects a misspelt method, a wrong
argument and a batch of the wrong type; go-to-definition finds the worker; a traceback shows the worker's frames. There
is no registration, code generation or rebinding.

Where ranks work alone, a lost process is replaced (see `groups.port`), and its unanswered calls are repeated.

A resource pool is the set of processes, one per rank, in which the workers of one or more roles live.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, final

from posttrain.domain.errors import DeadlineError, InputError
from posttrain.engine.groups.port import (
    Answer,
    Backend,
    Call,
    Flow,
    Gatherable,
    Keyed,
    Process,
    RankContext,
    Recorder,
    Replacing,
    Shardable,
    Stored,
    StoredShard,
    WorkerLostError,
)
from posttrain.pacing.balance import TOKENS, Assignment, CostModel, balance

_TURN = 0.02  # seconds that idle ranks wait for the other ranks before their next call
_FETCH = 5.0  # minimum seconds to fetch an answer, however late the caller requests it
W = TypeVar("W")
B = TypeVar("B", bound=Shardable)
K = TypeVar("K", bound=Keyed)
G = TypeVar("G", bound=Gatherable)
R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")
_Parts = Sequence[tuple[Sequence[int], tuple[Any, ...]]]  # (ranks, their common arguments)


@final
@dataclass(frozen=True, slots=True)
class GroupHandle:
    """The connection of a group to its workers."""

    role: str
    backend: Backend
    recorder: Recorder
    costs: CostModel  # cost of an item, by its length
    deadline: float  # seconds per call
    sequence_parallel: int  # consecutive ranks that work on one shard together
    replacing: Replacing
    only: tuple[int, ...] | None = None  # the ranks to call, see `WorkerGroup.at`; None: all

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that are called."""
        return range(self.backend.ranks) if self.only is None else self.only

    @property
    def shards(self) -> int:
        """The number of parts that a batch is split into."""
        return len(self.ranks) // self.sequence_parallel

    def replaced(self, lost: WorkerLostError) -> int:
        """Replace a lost process; return its rank.

        Raises:
            WorkerLostError: the process cannot be replaced.
        """
        if self.only is not None or lost.process is None:
            raise lost
        self.replacing.replace(lost)
        return lost.process.rank


@final
class Future(Generic[R]):
    """The answer to a call that may still be running."""

    def __init__(self, wait: Callable[[], R], done: Callable[[], bool]) -> None:
        self._wait, self._done = wait, done
        self._settled: tuple[R] | None = None

    def done(self) -> bool:
        """Return whether `result` would return, or raise, immediately."""
        return self._settled is not None or self._done()

    def result(self) -> R:
        """Wait for the answer.

        Raises:
            DeadlineError: the call exceeded the group's deadline.
            WorkerLostError: a worker's process has ended, and is not replaced.
            Exception: raised by the worker, with its role, rank and traceback.
        """
        if self._settled is None:
            self._settled = (self._wait(),)
        return self._settled[0]


@final
class Feed(Generic[K, R]):
    """The answers of all ranks to calls of a generator that accepts more items while earlier items are in progress.

    Args:
        handle: the group's handle.
        call: calls the generator method on a rank, with or without new items.
        method: the method's name, for errors and the record.
        covers: returns the rank of an answer, the keys of the items that it covers, and whether the rank rests: it does
            nothing more until it is sent something.
        batch: the first items, split by cost.
    """

    def __init__(
        self,
        handle: GroupHandle,
        call: Callable[[int, K], Flow[R]],
        method: str,
        covers: Callable[[R], tuple[int, Iterable[int], bool]],
        batch: K,
    ) -> None:
        self._handle, self._call, self._method, self._covers = handle, call, method, covers
        ranks = range(handle.backend.ranks)
        assignment = balance(handle.costs.costs(batch.item_lengths), len(ranks))
        self._coming: list[list[K]] = [[batch.select_items(shard)] for shard in assignment.shards]
        self._given: list[list[K]] = [[] for _ in ranks]
        self._left: list[set[int]] = [set() for _ in ranks]  # by rank: keys of items that were sent and not answered
        self._given_to, self._rests = list(handle.backend.processes), [False for _ in ranks]
        self._added, self._silent, self._imbalance = 0, 0.0, assignment.imbalance
        self._flows: dict[int, Flow[R]] = {}
        self._took = [Answer(0, time.time(), 0.0) for _ in ranks]
        self._begun = time.time(), time.perf_counter()

    @property
    def ended(self) -> bool:
        """Whether all items were answered."""
        return not (self._flows or any(self._left) or any(self._coming))

    @property
    def resting(self) -> bool:
        """Whether all ranks that have unanswered items rest."""
        return not (self.ended or self._flows or any(self._coming))

    def add(self, batch: K) -> None:
        """Add items, all to one rank; successive calls use successive ranks."""
        self._coming[self._added % len(self._coming)].append(batch)
        self._added += 1

    def rank_of(self, key: int) -> int | None:
        """Return the rank that has an unanswered item; None: its process was lost, and the item is sent again."""
        return next((rank for rank, left in enumerate(self._left) if key in left), None)

    def send(self, rank: int, batch: K) -> None:
        """Send a batch without items to a rank. It is not sent again if the process is lost."""
        self._coming[rank].append(batch)

    def take(self, timeout: float) -> list[R]:
        """Return the answers that have arrived; wait at most `timeout` seconds for the first one.

        If all ranks rest, return immediately.

        Raises:
            DeadlineError: no answer arrived within the group's deadline.
            WorkerLostError: a worker's process has ended, and is not replaced.
            Exception: raised by a worker, with its role, rank and traceback.
        """
        begin, found = time.perf_counter(), list[R]()
        while not (found or self.ended):
            self._call_ranks()
            if not self._flows:
                break
            left = timeout - (time.perf_counter() - begin)
            try:
                found = self._handle.backend.take(list(self._flows.values()), max(0.0, min(left, _TURN)))
            except WorkerLostError as lost:
                del self._flows[self._handle.replaced(lost)]
                begin = time.perf_counter()
            self._settle(found)
            if left <= 0:
                break
        self._silent = 0.0 if found or not self._flows else self._silent + time.perf_counter() - begin
        if self._silent > self._handle.deadline:
            role, deadline = self._handle.role, self._handle.deadline
            self._handle.backend.give_up(f"{role} did not answer {self._method}")
            raise DeadlineError(
                f"{role} must answer {self._method} within {deadline:g} seconds, but did not answer for "
                f"{self._silent:.3g} seconds; give the call a longer deadline (runtime.call_timeout)"
            )
        return found

    def _call_ranks(self) -> None:
        """Call every idle rank that has items; items that a lost process had not answered are sent first."""
        for rank, coming in enumerate(self._coming):
            if rank in self._flows:
                continue
            if self._given_to[rank] != self._handle.backend.processes[rank]:
                self._ask_again(rank)
            if coming:
                self._left[rank].update(coming[0].keys)
                self._given[rank].append(coming[0])
                self._flows[rank], self._rests[rank] = self._call(rank, coming.pop(0)), False
            elif self._left[rank] and not self._rests[rank]:
                self._flows[rank] = self._call(rank, self._given[rank][-1].select_items(()))

    def _ask_again(self, rank: int) -> None:
        left, given = self._left[rank], self._given[rank]
        rests = [(batch, [at for at, key in enumerate(batch.keys) if key in left]) for batch in given]
        self._coming[rank][:0] = [batch.select_items(rest) for batch, rest in rests if rest]
        self._left[rank], self._given[rank] = set(), []
        self._given_to[rank], self._rests[rank] = self._handle.backend.processes[rank], False

    def _settle(self, found: Sequence[R]) -> None:
        for rank, keys, rests in map(self._covers, found):
            self._left[rank].difference_update(keys)
            self._rests[rank] = rests
        for rank, flow in [(rank, flow) for rank, flow in self._flows.items() if flow.ended]:
            told, before = flow.taken(), self._took[rank]
            sizes = before.bytes_out + told.bytes_out, before.bytes_in + told.bytes_in
            self._took[rank] = Answer(before.value + told.value, before.started, before.seconds + told.seconds, *sizes)
            del self._flows[rank]
        if self.ended:
            words = self._handle.role, self._handle.backend.pool, self._method, range(len(self._took)), self._took
            self._handle.recorder.call(*words, self._begun, self._imbalance)


@final
class NonBlocking(Generic[W]):
    """The calls of a group that return before the workers answer."""

    def __init__(self, handle: GroupHandle) -> None:
        self._handle = handle

    def map(self, method: Callable[Concatenate[W, B, P], G], batch: B, *args: P.args, **kwargs: P.kwargs) -> Future[G]:
        """Like `WorkerGroup.map`."""
        handle = self._handle
        assignment, parts = self._split(batch, args)

        def combine(answers: Sequence[G]) -> G:
            first = answers[:: handle.sequence_parallel]  # the ranks of one shard return equal answers
            if len(first) == 1:
                return first[0]
            gathered: G = first[0].gather(first, assignment.shards)
            return gathered

        return self._future(handle.backend.submit, method, parts, kwargs, combine, assignment.imbalance)

    def map_stored(
        self, method: Callable[Concatenate[W, B, P], R], batch: B, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[StoredShard[R]]]:
        """Like `map`, but the return values stay on their ranks.

        The result has a reference for each rank, with the items from which the rank's value was computed. Ranks without
        items are called, but not included.
        """
        handle = self._handle
        assignment, parts = self._split(batch, args)

        def kept(answers: Sequence[Stored[R]]) -> list[StoredShard[R]]:
            first = answers[:: handle.sequence_parallel]  # the ranks of one shard return equal answers
            shards = zip(first, assignment.shards, strict=True)
            return [StoredShard(part, tuple(items)) for part, items in shards if items]

        return self._future(handle.backend.submit_stored, method, parts, kwargs, kept, assignment.imbalance)

    def each(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[list[R]]:
        """Like `WorkerGroup.each`."""
        return self._future(self._handle.backend.submit, method, [(self._handle.ranks, args)], kwargs, list)

    def one(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Like `WorkerGroup.one`."""
        parts = [(self._handle.ranks[:1], args)]
        return self._future(self._handle.backend.submit, method, parts, kwargs, lambda answers: answers[0])

    def each_stored(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[Stored[R]]]:
        """Like `WorkerGroup.each_stored`."""
        return self._future(self._handle.backend.submit_stored, method, [(self._handle.ranks, args)], kwargs, list)

    def _split(self, batch: B, args: tuple[Any, ...]) -> tuple[Assignment, _Parts]:
        """Return the assignment of a batch to shards, and each rank's arguments with its part of the batch."""
        handle, size = self._handle, self._handle.sequence_parallel
        assignment = balance(handle.costs.costs(batch.item_lengths), handle.shards)
        parts: list[B] = [batch] if handle.shards == 1 else [batch.select_items(shard) for shard in assignment.shards]
        return assignment, [(handle.ranks[at * size : (at + 1) * size], (part, *args)) for at, part in enumerate(parts)]

    def _future(
        self,
        submit: Callable[..., list[Call[R]]],
        method: Callable[..., Any],
        parts: _Parts,
        kwargs: Mapping[str, Any],
        combine: Callable[[Sequence[R]], T],
        imbalance: float = 1.0,
    ) -> Future[T]:
        """Call a method on the ranks of each part.

        Calls that a lost process has not answered are repeated on its replacement, with a new deadline.
        """
        handle, name, begun = self._handle, method.__name__, (time.time(), time.perf_counter())
        asked = {rank: args for ranks, args in parts for rank in ranks}
        calls = [call for ranks, args in parts for call in submit(handle.role, ranks, method, args, kwargs)]

        def wait() -> T:
            since, answers = begun[1], None
            while answers is None:
                left = handle.deadline - (time.perf_counter() - since)
                try:
                    answers = handle.backend.wait(calls, max(left, min(_FETCH, handle.deadline)))
                except WorkerLostError as lost:
                    rank, since = handle.replaced(lost), time.perf_counter()
                    again = submit(handle.role, (rank,), method, asked[rank], kwargs)
                    calls[:] = [again[0] if call.rank == rank else call for call in calls]
            slowest = max(answers, key=lambda answer: answer.seconds)
            if slowest.seconds > handle.deadline:  # in this process, a call could not be interrupted
                raise DeadlineError(
                    f"{handle.role} must answer {name} within {handle.deadline:g} seconds, took {slowest.seconds:.3g}; "
                    "give the call a longer deadline (runtime.call_timeout)"
                )
            words = handle.role, handle.backend.pool, name, [call.rank for call in calls], answers, begun, imbalance
            handle.recorder.call(*words)
            return combine([answer.value for answer in answers])

        return Future(wait, lambda: all(call.done() for call in calls))


@final
class WorkerGroup(Generic[W]):
    """All ranks of one role.

    Every call waits for its answer, at most until the group's deadline, and raises the errors of `Future.result`.
    `ResourcePool.start` creates a group.
    """

    def __init__(self, handle: GroupHandle) -> None:
        self._handle = handle
        self.role, self.ranks = handle.role, len(handle.ranks)  # role: `policy`, `critic` …; ranks: number of workers
        self.backend, self.replacing = handle.backend, handle.replacing

    @property
    def nonblocking(self) -> NonBlocking[W]:
        """The same calls, each returning a `Future` immediately; in-process workers answer before the call returns."""
        return NonBlocking(self._handle)

    def within(self, seconds: float) -> WorkerGroup[W]:
        """Return the same workers with a deadline of `seconds` per call.

        Raises:
            InputError: `seconds` is not positive.
        """
        if not seconds > 0:
            raise InputError(f"deadline of a call to {self.role} must be > 0 seconds, got {seconds}")
        return WorkerGroup(replace(self._handle, deadline=seconds))

    def at(self, ranks: Iterable[int]) -> WorkerGroup[W]:
        """Return the workers of these ranks, for `each` and `one`.

        If a process is lost, such a call fails. A caller that repeats several calls as a whole must first replace the
        process (`replacing`).
        """
        return WorkerGroup(replace(self._handle, only=tuple(ranks)))

    def map(self, method: Callable[Concatenate[W, B, P], G], batch: B, *args: P.args, **kwargs: P.kwargs) -> G:
        """Split a batch by cost, one shard per rank; gather the return values in the original order.

        A rank with an empty shard is called too, because it must take part in collectives. With sequence parallelism,
        consecutive ranks get the same shard, and the answer of the first of these ranks is used.
        """
        return self.nonblocking.map(method, batch, *args, **kwargs).result()

    def feed(
        self,
        covers: Callable[[R], tuple[int, Iterable[int], bool]],
        method: Callable[Concatenate[W, K, P], Iterator[R]],
        batch: K,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Feed[K, R]:
        """Split a batch by cost, one shard per rank, for a generator method; return immediately.

        The generator may leave work for its next call. Items may be added later.

        Raises:
            InputError: ranks share a shard, so each of these ranks would yield every answer.
        """
        handle = self._handle
        if handle.sequence_parallel > 1:
            raise InputError(
                f"every rank of {self.role} must have its own shard, but {handle.sequence_parallel} ranks share a "
                "shard; start the role in `pool.by_rank()`"
            )

        def call(rank: int, part: K) -> Flow[R]:
            return handle.backend.submit_stream(handle.role, (rank,), method, (part, *args), kwargs)[0]

        return Feed(handle, call, method.__name__, covers, batch)

    def each(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call every rank with the same arguments; return the answers in rank order."""
        return self.nonblocking.each(method, *args, **kwargs).result()

    def one(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call rank 0 alone. The method must not communicate with the other ranks."""
        return self.nonblocking.one(method, *args, **kwargs).result()

    def each_stored(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[Stored[R]]:
        """Call every rank; the return values stay on the ranks, and the result has references for other workers."""
        return self.nonblocking.each_stored(method, *args, **kwargs).result()


@final
@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits of a pool's workers, seconds."""

    start: float = 300.0  # for a process, its imports and the construction of a worker
    call: float = 3600.0  # for a call without a separate deadline


DEADLINES = Deadlines()


@final
class ResourcePool:
    """The processes and devices that several roles share; the roles' worker classes stay separate.

    Args:
        backend: runs the workers; closed with the pool.
        recorder: receives every call.
        costs: the cost of an item, by which batches are split.
        sequence_parallel: number of consecutive ranks that work on one shard together.
        deadlines: the time limits of starts and calls.
        replacing: the `Replacing` object of another pool with the same back-end.

    Raises:
        InputError: the number of ranks is not a multiple of `sequence_parallel`.
    """

    def __init__(
        self,
        backend: Backend,
        recorder: Recorder | None = None,
        *,
        costs: CostModel = TOKENS,
        sequence_parallel: int = 1,
        deadlines: Deadlines = DEADLINES,
        replacing: Replacing | None = None,
    ) -> None:
        if sequence_parallel < 1 or backend.ranks % sequence_parallel:
            raise InputError(f"sequence_parallel must divide the pool's {backend.ranks} ranks, got {sequence_parallel}")
        self._backend, self._costs, self._sequence_parallel = backend, costs, sequence_parallel
        self._recorder = recorder or Recorder()
        self._replacing = replacing or Replacing(backend, self._recorder, deadlines.start)
        self.deadlines, self.ranks = deadlines, backend.ranks

    @property
    def processes(self) -> Sequence[Process]:
        """The process of each rank; in an inline pool this is always the controller's."""
        return self._backend.processes

    def start(
        self, role: str, worker: Callable[Concatenate[RankContext, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerGroup[W]:
        """Construct a worker on every rank.

        Args:
            role: the group's name in traces and errors.
            worker: the class, called as `worker(context, *args, **kwargs)`.

        Raises:
            Exception: the exception of a constructor, with role and rank.
        """
        while True:
            try:
                self._backend.start(role, worker, args, kwargs, self.deadlines.start)
                break
            except WorkerLostError as lost:
                self._replacing.replace(lost)
        words = role, self._backend, self._recorder, self._costs, self.deadlines.call, self._sequence_parallel
        return WorkerGroup(GroupHandle(*words, self._replacing))

    def by_rank(self) -> ResourcePool:
        """Return a pool of the same processes for roles whose ranks each take a separate shard."""
        words = self._backend, self._recorder
        return ResourcePool(*words, costs=self._costs, deadlines=self.deadlines, replacing=self._replacing)

    def close(self) -> None:
        """End every worker and free the devices."""
        self._backend.close()

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
