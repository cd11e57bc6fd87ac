"""What a worker group asks of the place its workers live in, and of what it sends through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Shardable(Protocol):
    """Items with lengths, of which a part can be taken: a `TokenBatch`, prompts to sample from."""

    @property
    def item_lengths(self) -> Sequence[int]:
        """Tokens of every item: what its cost is estimated from."""

    def select_items(self, items: Sequence[int], /) -> Any:
        """The named items, in the named order; none gives an empty one of the same type."""


class Keyed(Shardable, Protocol):
    """Items that also have names: prompts, by their places in the data stream."""

    @property
    def keys(self) -> Sequence[int]:
        """The name of every item; no two are the same."""


class Gatherable(Protocol):
    """What ranks return and the controller puts together."""

    @classmethod
    def gather(cls, parts: Any, shards: Sequence[Sequence[int]], /) -> Any:
        """One value out of one part per shard; `parts[r]` was computed from the items `shards[r]`."""


@dataclass(frozen=True, slots=True)
class Process:
    """Where one rank runs: `Process(rank=1, pid=4711, host="127.0.0.1", device="cuda:0")`."""

    rank: int
    pid: int
    host: str
    device: str
    alone: bool = False  # the other ranks of its pool go on without it


@dataclass(frozen=True, slots=True)
class Answer(Generic[R_co]):
    """What one rank returned, and what that took."""

    value: R_co
    started: float  # seconds since the epoch, by the rank's clock
    seconds: float  # the method ran
    bytes_out: int = 0  # controller → rank, serialised
    bytes_in: int = 0  # rank → controller


class Stored(Protocol[R_co]):
    """A value that stayed where it was computed. It travels as a reference, from rank to rank, past the controller."""

    @property
    def here(self) -> bool:
        """Whether `value` is the thing itself, in this process, and no copy of it."""

    def value(self) -> R_co:
        """Fetch it; called by the worker that was given the reference."""


@dataclass(frozen=True, slots=True)
class StoredShard(Generic[R_co]):
    """What one rank keeps of a batch that was split: `StoredShard(part, items=(0, 3))`."""

    part: Stored[R_co]
    items: tuple[int, ...]  # of the whole batch, in the order of the part


class Call(Protocol[R_co]):
    """A method running on one rank."""

    @property
    def role(self) -> str:
        """Of the worker."""

    @property
    def rank(self) -> int:
        """Of the worker."""

    def done(self) -> bool:
        """Whether there is an answer or a failure."""

    def answered(self) -> Answer[R_co] | None:
        """The answer, where it has been fetched."""


class Flow(Protocol[R_co]):
    """A generator running on one rank, whose answers come as it yields them."""

    @property
    def role(self) -> str:
        """Of the worker."""

    @property
    def rank(self) -> int:
        """Of the worker."""

    @property
    def ended(self) -> bool:
        """Whether its last answer was taken."""

    def taken(self) -> Answer[int]:
        """How many answers were taken, and what they took together."""


class Backend(Protocol):
    """Processes (or one) in which workers live, one place per rank.

    Every implementation:

    * starts a role's worker on every rank, in the same process as the other roles of that rank;
    * runs the calls of one rank in the order they were submitted, those of different ranks side by side where it has
      several processes;
    * raises a worker's own exception with its role, its rank and its traceback (`failures.blame`);
    * raises at the first failure: the other ranks of a broken collective are not waited for;
    * raises DeadlineError when the time is over, and afterwards refuses calls to ranks that may still be stuck;
    * raises WorkerLostError when a process is gone, and afterwards refuses calls, unless that process is `alone`;
    * frees everything in `close`, also after failures; closing twice is allowed.
    """

    @property
    def name(self) -> str:
        """`inline` or `ray`."""

    @property
    def pool(self) -> str:
        """The pool's name."""

    @property
    def ranks(self) -> int:
        """How many."""

    @property
    def processes(self) -> Sequence[Process]:
        """One per rank, in rank order."""

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        """Construct `worker(place, *args, **kwargs)` on every rank as `role`."""

    def submit(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[R]]:
        """Begin `method(worker, *args, **kwargs)` on these ranks, which all get the same: it is serialised once."""

    def submit_stored(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[Stored[R]]]:
        """As `submit`, but what is returned stays where it is."""

    def submit_stream(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Iterator[R]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Flow[R]]:
        """As `submit`, of a method that yields. A rank goes on while what it yielded waits to be taken, where it has a
        process of its own; other calls to that rank wait until it has ended.
        """

    def take(self, flows: Sequence[Flow[R]], timeout: float) -> list[R]:
        """What has come since; waits `timeout` seconds at most for the first of it, and not where all have ended. A
        failure is raised when what its rank yielded before it has been taken.
        """

    def wait(self, calls: Sequence[Call[R]], timeout: float) -> list[Answer[R]]:
        """The answers, in the order of the calls; `timeout` in seconds."""

    def replace(self, rank: int, timeout: float) -> None:
        """Start a rank's lost process anew, with a worker of every role as `start` constructed it; `timeout` in seconds
        for the process, and for each worker. Only of pools whose processes are `alone`.

        Raises:
            WorkerLostError: the new process is gone too, or did not come up in time.
        """

    def give_up(self, reason: str) -> None:
        """A rank may be stuck: refuse whatever is asked from now on."""

    def close(self) -> None:
        """End every process and free the devices."""
