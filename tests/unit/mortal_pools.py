"""Pools in this process whose ranks can be lost, as those of real processes that are killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.engine.groups.backends.inline import InlineBackend, InlineCall, InlineFlow
from posttrain.engine.groups.port import Flow, Process, RankContext, WorkerLostError

Fate = Callable[[str, int], bool]


class Mortal(InlineBackend):  # type: ignore[misc]
    """An `InlineBackend` with a process number for each rank, which changes when the rank is replaced.

    Args:
        collective: whether its ranks work together, so that none can be replaced.
    """

    def __init__(self, ranks: int = 1, pool: str = "rollout", *, collective: bool = False) -> None:
        super().__init__(ranks, pool=pool)
        self.processes = tuple(replace(p, pid=100 + p.rank, alone=not collective) for p in self.processes)
        self.fate: Fate = lambda method, rank: False  # whether a rank is lost before it answers a call of a method
        self.calls: list[tuple[str, int, Any]] = []  # method, rank, first argument
        self.broken: list[str] = []
        self._dead: set[int] = set()
        self._streams: list[tuple[Any, Process]] = []
        self._started: dict[str, Any] = {}

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        self._started[role] = (worker, args, kwargs)
        for rank in range(self.ranks):
            self._construct(role, rank)

    def replace(self, rank: int, timeout: float) -> None:
        process = replace(self.processes[rank], pid=self.processes[rank].pid + 100)
        self.processes = (*self.processes[:rank], process, *self.processes[rank + 1 :])
        self._dead.discard(rank)
        for role in self._started:
            self._construct(role, rank)

    def give_up(self, reason: str) -> None:
        self.broken.append(reason)

    def submit_stream(
        self, role: str, ranks: Sequence[int], method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Flow[Any]]:
        self.calls += [(method.__name__, rank, args[0]) for rank in ranks]
        found = super().submit_stream(role, ranks, method, args, kwargs)
        self._streams += [(flow, self.processes[flow.rank]) for flow in found]
        return found

    def take(self, flows: Sequence[Flow[Any]], timeout: float) -> list[Any]:
        for flow in flows:
            assert isinstance(flow, InlineFlow)
            process = next(process for one, process in self._streams if one is flow)
            if process != self.processes[flow.rank] or self._ends(flow.method, flow.rank):
                flow.ended = True
                raise self._lost(flow.role, process, flow.method)
        return super().take(flows, timeout)

    def _construct(self, role: str, rank: int) -> None:
        if self._ends("__init__", rank):
            raise self._lost(role, self.processes[rank], "__init__")
        worker, args, kwargs = self._started[role]
        self._workers[role, rank] = worker(RankContext(self.pool, rank, self.ranks), *args, **kwargs)

    def _run(
        self, role: str, rank: int, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> InlineCall[Any]:
        self.calls.append((method.__name__, rank, args[0] if args else None))
        if self._ends(method.__name__, rank):
            lost = self._lost(role, self.processes[rank], method.__name__)
            return InlineCall(role, rank, method.__name__, None, lost)
        return super()._run(role, rank, method, args, kwargs)

    def _ends(self, method: str, rank: int) -> bool:
        if rank not in self._dead and self.fate(method, rank):
            self._dead.add(rank)
        return rank in self._dead

    def _lost(self, role: str, process: Process, method: str) -> WorkerLostError:
        line = f"{role} rank {process.rank} was lost: process {process.pid} ended during {method}"
        return WorkerLostError(line, process if process.alone else None)


def at_the(number: int, wanted: str, of: int) -> Fate:
    """A rank is lost at its n-th call of a method, counted from 1, of all processes that it has had."""
    seen = 0

    def fate(method: str, rank: int) -> bool:
        nonlocal seen
        seen += (method, rank) == (wanted, of)
        return (method, rank, seen) == (wanted, of, number)

    return fate
