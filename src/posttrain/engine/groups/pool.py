"""A resource pool: the processes, one per rank, in which the workers of one or more roles live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar, final

from posttrain.domain.errors import InputError
from posttrain.engine.groups.failures import WorkerLostError
from posttrain.engine.groups.port import Backend, Process
from posttrain.engine.groups.rank_context import RankContext
from posttrain.engine.groups.recording import Recorder
from posttrain.engine.groups.replacing import Replacing
from posttrain.engine.groups.worker_group import GroupHandle, WorkerGroup
from posttrain.pacing.balancing import TOKENS, CostModel

W = TypeVar("W")
P = ParamSpec("P")


@final
@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a pool gives its workers."""

    start: float = 300.0  # to be constructed: a process, its imports, its model
    call: float = 3600.0  # for a call nobody gave a deadline of its own


DEADLINES = Deadlines()


@final
class ResourcePool:
    """Roles started in one pool share its processes and devices; their classes are not fused.

    Args:
        backend: where the workers live; closed with the pool.
        recorder: told of every call.
        costs: what an item costs; batches are split by it.
        sequence_parallel: consecutive ranks that work on one shard together.
        deadlines: how long what is asked here may take.
        replacing: how lost processes are replaced, of another pool over the same back-end.

    Raises:
        InputError: ranks that cannot be divided by `sequence_parallel`.
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
        self.deadlines = deadlines

    @property
    def ranks(self) -> int:
        """How many."""
        return self._backend.ranks

    @property
    def processes(self) -> Sequence[Process]:
        """One per rank; an inline pool names the controller's own process for each."""
        return self._backend.processes

    def start(
        self, role: str, worker: Callable[Concatenate[RankContext, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerGroup[W]:
        """Construct a worker on every rank.

        Args:
            role: the group's name in traces and errors.
            worker: its class; constructed as `worker(context, *args, **kwargs)`.

        Raises:
            Exception: whatever a constructor raised, with role and rank.
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
        """The same processes for roles whose ranks each take a shard of their own, whatever others share."""
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
