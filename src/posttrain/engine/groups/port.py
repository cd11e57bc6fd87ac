"""The port between a worker group and the processes of its workers: calls, failures, replacement and transport.

The port defines what a worker group requires of its workers' processes and of the values that it sends. A worker's
context contains its rank, its device, and the objects that other workers on the rank lend. Every call to a worker
group is recorded as one span, which shows when each rank was busy and how many bytes moved.

Failures: a rank's exception is raised in the controller with its own type, role, rank and traceback.

Replacement: if the ranks of a pool work alone, a lost process is started again; the other ranks keep their processes
and their work.

::

    lost ──▶ process of the same rank ──▶ workers of every role ──▶ `restore`: its earlier state ──▶ continue
      ▲                  │ lost too                │ lost too            │ lost too
      └──────────────────┴─────────────────────────┴─────────────────────┘  `MOST` times, then the pool is given up

The caller that notices a loss waits for the replacement. Each wait has a deadline, that of a start or of a call.

Transport: arguments and answers are sent between processes as pickles, with tensors next to the pickle, not inside it.
torch's pickling of a tensor writes a complete file into the pickle and copies the data several times. Here the
tensor's memory is passed as a buffer (PEP 574), which a transport copies once; the receiver's copy is writable.
"""

import io
import pickle
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from posttrain.domain.errors import FailureClass, InfrastructureError, InputError, JobFailedError
from posttrain.domain.jobs import Fact, FactSink, Note, Span

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
MOST = 3  # losses of one rank in one step: a loss caused by its prompts or by lack of memory recurs after each start


class Shardable(Protocol):
    """Items with lengths that can be split: a `TokenBatch`, prompts to sample from."""

    @property
    def item_lengths(self) -> Sequence[int]:
        """Tokens of every item, from which its cost is estimated."""

    def select_items(self, items: Sequence[int], /) -> Any:
        """Return the items with these indices, in this order; without indices, an empty value of the same type."""


class Keyed(Shardable, Protocol):
    """Items that also have keys; the keys of prompts are their positions in the data stream."""

    @property
    def keys(self) -> Sequence[int]:
        """The key of every item; all keys are distinct."""


class Gatherable(Protocol):
    """Values of ranks that the controller combines."""

    @classmethod
    def gather(cls, parts: Any, shards: Sequence[Sequence[int]], /) -> Any:
        """Return one value from one part per shard; `parts[r]` was computed from the items `shards[r]`."""


@dataclass(frozen=True, slots=True)
class Process:
    """The process of one rank: `Process(rank=1, pid=4711, host="127.0.0.1", device="cuda:0")`."""

    rank: int
    pid: int
    host: str
    device: str
    alone: bool = False  # the pool's other ranks can continue without this process


@dataclass(frozen=True, slots=True)
class Answer(Generic[R_co]):
    """The return value of one rank, and its cost."""

    value: R_co
    started: float  # seconds since the epoch, by the rank's clock
    seconds: float  # duration of the method
    bytes_out: int = 0  # controller → rank, serialised
    bytes_in: int = 0  # rank → controller


class Stored(Protocol[R_co]):
    """A value that stays on its rank. References to the value are sent between ranks without passing the controller."""

    @property
    def here(self) -> bool:
        """Whether `value` returns the object itself, in this process, instead of a copy."""

    def value(self) -> R_co:
        """Fetch the value; called by the worker that received the reference."""


@dataclass(frozen=True, slots=True)
class StoredShard(Generic[R_co]):
    """The part of a split batch that one rank stores: `StoredShard(part, items=(0, 3))`."""

    part: Stored[R_co]
    items: tuple[int, ...]  # indices in the whole batch, in the order of the part


class Call(Protocol[R_co]):
    """A method running on one rank."""

    @property
    def role(self) -> str:
        """The role of the worker."""

    @property
    def rank(self) -> int:
        """The rank of the worker."""

    def done(self) -> bool:
        """Return whether there is an answer or a failure."""

    def answered(self) -> Answer[R_co] | None:
        """Return the answer, if it has been fetched."""


class Flow(Protocol[R_co]):
    """A generator running on one rank, whose answers arrive as the generator yields them."""

    @property
    def role(self) -> str:
        """The role of the worker."""

    @property
    def rank(self) -> int:
        """The rank of the worker."""

    @property
    def ended(self) -> bool:
        """Whether the last answer was taken."""

    def taken(self) -> Answer[int]:
        """Return how many answers were taken, and their total cost."""


class Backend(Protocol):
    """The processes of a pool, one per rank; the in-process back-end has one process for all ranks.

    Every implementation:

    * starts a role's worker on every rank, in the same process as the other roles of that rank;
    * runs the calls of one rank in the order of submission, and those of different ranks concurrently if the back-end
      has several processes;
    * raises a worker's own exception with the worker's role, rank and traceback (`domain.errors.blame`);
    * raises at the first failure, without waiting for the other ranks of a broken collective;
    * raises DeadlineError when the time is over, and afterwards rejects calls to ranks that may still be stuck;
    * raises WorkerLostError when a process has ended, and afterwards rejects calls, unless that process is `alone`;
    * frees everything in `close`, even after failures; closing twice is allowed.
    """

    @property
    def name(self) -> str:
        """`inline` or `ray`."""

    @property
    def pool(self) -> str:
        """The pool's name."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def processes(self) -> Sequence[Process]:
        """The processes, one per rank, in rank order."""

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        """Construct `worker(context, *args, **kwargs)` on every rank as `role`, with the rank's `RankContext`."""

    def submit(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[R]]:
        """Begin `method(worker, *args, **kwargs)` on these ranks, with equal arguments, which are serialised once."""

    def submit_stored(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[Stored[R]]]:
        """Like `submit`, but the return value stays on its rank."""

    def submit_stream(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Iterator[R]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Flow[R]]:
        """Like `submit`, for a generator method.

        With one process per rank, the generator continues while its answers wait to be taken. Other calls to the rank
        wait until the generator has ended.
        """

    def take(self, flows: Sequence[Flow[R]], timeout: float) -> list[R]:
        """Return the answers that have arrived; wait at most `timeout` seconds for the first one.

        The call does not wait if all flows have ended. A failure is raised after all earlier answers of its rank.
        """

    def wait(self, calls: Sequence[Call[R]], timeout: float) -> list[Answer[R]]:
        """Return the answers, in the order of the calls; `timeout` in seconds."""

    def replace(self, rank: int, timeout: float) -> None:
        """Start a rank's lost process again, and construct its worker of every role as `start` did.

        This is possible only in pools whose processes are `alone`. `timeout`, in seconds, applies to the start of the
        process and to the construction of each worker.

        Raises:
            WorkerLostError: the new process has ended too, or did not start in time.
        """

    def give_up(self, reason: str) -> None:
        """Reject all further calls, because a rank may be stuck."""

    def close(self) -> None:
        """End every process and free the devices."""


class WorkerLostError(InfrastructureError):
    """A worker's process has ended, or its pool can no longer be used; a retry resumes from a checkpoint.

    Args:
        process: the lost process, if the other ranks of its pool continue; None: the pool can no longer be used.
    """

    def __init__(self, message: str, process: Process | None = None) -> None:
        super().__init__(message)
        self.process = process


class WorkerError(JobFailedError):
    """A worker raised an exception that cannot be pickled; this error has its text and traceback."""

    failure_class: ClassVar[FailureClass] = FailureClass.BUG


class RemoteTraceback(Exception):  # noqa: N818  # it is a cause to print, not an error to catch
    """The traceback of a worker in another process, as text: the `__cause__` of the controller's exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@final
@dataclass(slots=True)
class RankContext:
    """One rank of a resource pool, as passed to its workers: `RankContext("main", rank=1, size=2, device="cpu")`.

    Workers of several roles can share a rank. They are separate objects of separate classes, and lend each other
    objects by type: the policy lends its model, and a rollout engine on the same rank decodes with the model's weights.
    """

    pool: str = "main"
    rank: int = 0
    size: int = 1
    device: str = "cpu"  # "cpu", "cuda:0"
    collective: bool = False  # whether torch.distributed's default group consists of exactly the pool's ranks
    sequence_parallel: int = 1  # consecutive ranks that compute one shard together
    _lent: dict[type[Any], Any] = field(default_factory=dict, repr=False)

    def lend(self, thing: object) -> None:
        """Share an object with later workers of the rank; the next object of the same type replaces it."""
        self._lent[type(thing)] = thing

    def borrow(self, kind: type[T]) -> T | None:
        """Return the object of exactly this type that another worker of the rank lent; None if there is none."""
        found: T | None = self._lent.get(kind)
        return found

    def need_collectives(self, worker: str) -> None:
        """Raise if the ranks cannot communicate.

        Raises:
            InputError: there are several ranks and no process group.
        """
        if self.size > 1 and not self.collective:
            raise InputError(
                f"{worker} on {self.size} ranks needs a process group, but its ranks are in one process; place the "
                "role in a Ray pool or on 1 rank"
            )


def _nowhere(fact: Fact) -> None:
    """A sink that drops facts."""


@final
@dataclass(slots=True)
class Recorder:
    """Records the calls of a run's groups. The controller sets `step` before each step."""

    sink: FactSink = field(default=_nowhere)
    step: int = 0

    def call(
        self,
        role: str,
        pool: str,
        method: str,
        ranks: Sequence[int],
        answers: Sequence[Answer[Any]],
        begun: tuple[float, float],
        imbalance: float,
    ) -> None:
        """Record an answered call; `begun` is its start by the wall clock and the performance counter, in seconds."""
        if self.sink is _nowhere:
            return
        attributes = {
            "kind": "call",
            "role": role,
            "method": method,
            "pool": pool,
            "ranks": [[rank, a.started, a.seconds] for rank, a in zip(ranks, answers, strict=True)],
            "bytes_out": sum(a.bytes_out for a in answers),
            "bytes_in": sum(a.bytes_in for a in answers),
            "imbalance": imbalance,
        }
        self.sink(Span(f"{role}.{method}", self.step, begun[0], time.perf_counter() - begun[1], attributes))


def nothing(ranks: Collection[int]) -> None:
    """Restore nothing: a newly constructed worker has the same state as the lost worker."""


@final
@dataclass(slots=True)
class Replacing:
    """Replaces the lost processes of one pool; all groups of the pool share this object.

    Args:
        backend: the pool's back-end.
        recorder: receives a note of each replacement, and has the current step.
        seconds: maximum time to start a process, and to construct each of its workers.
        restore: gives the workers of these ranks the state of the lost workers.
    """

    backend: Backend
    recorder: Recorder
    seconds: float
    restore: Callable[[Collection[int]], None] = nothing
    _counts: Counter[tuple[int, int]] = field(default_factory=Counter)  # by step and rank
    _bare: set[int] = field(default_factory=set)  # ranks whose workers have not been restored yet

    def replace(self, lost: WorkerLostError) -> None:
        """Start a lost process again, unless it was already replaced.

        Raises:
            WorkerLostError: the pool cannot continue without the process, or its rank was lost too often.
        """
        while True:
            try:
                self._start(lost)
                if self._bare:
                    self.restore(frozenset(self._bare))
                    self._bare.clear()
                return
            except WorkerLostError as error:
                if error.process is None:
                    raise
                lost = error

    def _start(self, lost: WorkerLostError) -> None:
        process, backend, step = lost.process, self.backend, self.recorder.step
        if process is None:
            raise lost
        if backend.processes[process.rank] != process:
            return
        self._counts[step, process.rank] += 1
        count = self._counts[step, process.rank]
        if count > MOST:
            line = f"{lost}; this rank lost {count} processes in step {step}, and at most {MOST} are replaced"
            backend.give_up(line)
            raise WorkerLostError(f"{line}; see the job's log for the cause (most often a lack of memory)") from lost
        line = f"{lost}; another takes its place, replacement {count} of at most {MOST} in a step"
        self.recorder.sink(Note(line, time.time(), "warning"))
        self._bare.add(process.rank)
        backend.replace(process.rank, self.seconds)


Fetch = Callable[[Any], "Parcel"]  # handle of a stored value → the packed value


@final
@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed value: the pickle, the buffers that it refers to, and the handles of its stored values."""

    buffers: tuple[Any, ...]  # bytes-like; the first is the pickle
    handles: tuple[Any, ...]
    size: int  # bytes of all buffers


@final
@dataclass(frozen=True)
class StoredAway(Generic[R]):
    """A `Stored` value behind a handle; if an argument contains the value, only the handle is sent."""

    here: ClassVar[bool] = False  # every call of `value` fetches a copy
    handle: Any
    fetch: Fetch

    def value(self) -> R:
        """Fetch a copy of the value."""
        value: R = unpack(self.fetch(self.handle), self.fetch)
        return value


def pack(value: object) -> Parcel:
    """Return the value as a parcel, which refers to the value's memory.

    A transport must copy this memory before the value changes.


    Tensors lose their graph, and arrive on the CPU.

    Raises:
        PicklingError, AttributeError, TypeError: pickle cannot serialise the value.
    """
    file, buffers, handles = io.BytesIO(), list[pickle.PickleBuffer](), list[Any]()
    _Pickler(file, buffers, handles).dump(value)
    parts = (pickle.PickleBuffer(file.getvalue()), *buffers)
    return Parcel(parts, tuple(handles), sum(part.raw().nbytes for part in parts))


def unpack(parcel: Parcel, fetch: Fetch) -> Any:
    """Return the packed value; its tensors and arrays own their memory."""
    pickled, *buffers = parcel.buffers
    # copy, because the transport's memory is shared and read-only
    return _Unpickler(io.BytesIO(pickled), [bytearray(buffer) for buffer in buffers], parcel.handles, fetch).load()


def check_importable(function: Callable[..., object], what: str) -> None:
    """Reject a function that another process cannot import: a lambda, a local function, a class of the main script.

    Raises:
        InputError: the function cannot be imported.
    """
    name = getattr(function, "__qualname__", repr(function))
    module = getattr(function, "__module__", None)
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        reachable = False
    else:
        reachable = module not in (None, "__main__")
    if not reachable:
        raise InputError(
            f"{what} must be importable by name in another process, got {name} of {module}; "
            "define it at the top level of a module"
        )


@final
class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], handles: list[Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._handles = handles

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is Tensor or kind is torch.nn.Parameter:
            return _reduced(thing)
        if kind is StoredAway:
            self._handles.append(thing.handle)
            return _stored, (len(self._handles) - 1,)
        return NotImplemented


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[bytearray], handles: tuple[Any, ...], fetch: Fetch) -> None:
        super().__init__(file, buffers=buffers)
        self._held = [StoredAway[Any](handle, fetch) for handle in handles]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_stored.__module__, _stored.__name__):
            return self._held.__getitem__
        return super().find_class(module, name)


def _stored(index: int) -> StoredAway[Any]:
    """Raise; pickles name this function in place of the stored value with this index, and `unpack` replaces it."""
    raise pickle.UnpicklingError(f"stored value {index} outside a parcel")


def _reduced(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return NotImplemented
    plain = tensor.detach().cpu().contiguous()
    memory: Any = plain.reshape(-1).view(torch.uint8).numpy()  # CPython's gc crashes on buffers of memoryviews
    wanted = tensor.requires_grad and tensor.is_leaf
    kind = type(tensor) is torch.nn.Parameter
    return _tensor, (pickle.PickleBuffer(memory), plain.dtype, tuple(plain.shape), wanted, kind)


def _tensor(memory: bytearray, dtype: torch.dtype, shape: tuple[int, ...], wanted: bool, parameter: bool) -> Tensor:
    # frombuffer rejects empty memory
    tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape) if memory else torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, requires_grad=wanted) if parameter else tensor.requires_grad_(wanted)
