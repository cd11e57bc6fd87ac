"""Pools in this process whose stored values lie elsewhere as far as anyone can tell: only a worker may fetch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from posttrain.engine.groups.backends.inline import InlineBackend, InlineCall
from posttrain.engine.groups.port import Answer, Call, Flow, Process, Stored

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Guard:
    """Who is at work: the controller, or a worker; and what was fetched."""

    def __init__(self) -> None:
        self.working = 0
        self.fetched = 0


@dataclass(frozen=True, eq=False)
class GuardedStored(Generic[R_co]):
    """Fails where the controller fetches it."""

    held: R_co
    guard: Guard

    @property
    def here(self) -> bool:
        return False

    def value(self) -> R_co:
        assert self.guard.working, "the controller fetched what should have stayed with its worker"
        self.guard.fetched += 1
        return self.held


class GuardedBackend:
    """An `InlineBackend` that keeps what is stored from the controller."""

    name = "inline"

    def __init__(self, guard: Guard, ranks: int = 1, pool: str = "main") -> None:
        self._inner, self._guard = InlineBackend(ranks, pool=pool), guard
        self.pool, self.ranks = pool, ranks
        self.processes: Sequence[Process] = self._inner.processes

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        self._inner.start(role, worker, args, kwargs, timeout)

    def submit(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[R]]:
        self._guard.working += 1
        try:
            return self._inner.submit(role, ranks, method, args, kwargs)
        finally:
            self._guard.working -= 1

    def submit_stored(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[Stored[R]]]:
        kept: list[Call[Stored[R]]] = []
        for call in self.submit(role, ranks, method, args, kwargs):
            assert isinstance(call, InlineCall)
            answer: Answer[Stored[R]] | None = None
            if call.answer is not None:
                value = GuardedStored(call.answer.value, self._guard)
                answer = Answer(value, call.answer.started, call.answer.seconds)
            kept.append(InlineCall(role, call.rank, call.method, answer, call.failure))
        return kept

    def submit_stream(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Iterator[R]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Flow[R]]:
        return self._inner.submit_stream(role, ranks, method, args, kwargs)

    def take(self, flows: Sequence[Flow[R]], timeout: float) -> list[R]:
        self._guard.working += 1
        try:
            return self._inner.take(flows, timeout)
        finally:
            self._guard.working -= 1

    def wait(self, calls: Sequence[Call[R]], timeout: float) -> list[Answer[R]]:
        return self._inner.wait(calls, timeout)

    def close(self) -> None:
        self._inner.close()
