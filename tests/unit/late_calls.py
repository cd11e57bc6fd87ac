"""Calls that end at a moment of their own: workers and scorers whose every answer may come late, in this process.

A worker does what it is asked in order, as a real one; when it does so, and when anybody learns of it, is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from test_engine_training import FixedScorer

from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Call, Flow
from posttrain.engine.groups.worker_group import Future
from posttrain.engine.samples import Prompt, Trajectory

AT_ONCE = 0.3  # of calls
NOTHING = 0.4  # of looks at a stream, or at a call


class Pending:
    """A call that is carried out when somebody waits for it, or when its worker is asked for something else."""

    def __init__(self, role: str, rank: int, method: Any, run: Callable[[], Call[Any]]) -> None:
        self.role, self.rank, self.method, self._run = role, rank, method.__name__, run
        self._call: Call[Any] | None = None

    def carried_out(self) -> Call[Any]:
        self._call = self._call or self._run()
        return self._call

    def done(self) -> bool:
        return self._call is not None

    def answered(self) -> Any:
        return self._call.answered() if self._call else None


class Late:
    """What is late of a backend's calls.

    Args:
        backend: whose methods are replaced.
        seed: of the delays.
    """

    def __init__(self, backend: InlineBackend, seed: int) -> None:
        self.counts = {"calls": 0, "stored": 0, "streams": 0, "nothing": 0}
        self._dice, self._wait, self._take = random.Random(seed), backend.wait, backend.take
        self._stream = backend.submit_stream
        self._held: dict[tuple[str, int], list[Pending]] = {}
        self._submits = {"calls": backend.submit, "stored": backend.submit_stored}
        backend.submit = lambda *words: self._submitted("calls", *words)  # type: ignore[method-assign]
        backend.submit_stored = lambda *words: self._submitted("stored", *words)  # type: ignore[method-assign]
        backend.submit_stream, backend.take = self._streamed, self._taken  # type: ignore[method-assign]
        backend.wait = self._waited  # type: ignore[method-assign]

    def _submitted(
        self, form: str, role: str, ranks: Sequence[int], method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        submit: Callable[..., list[Any]] = self._submits[form]
        if self._dice.random() < AT_ONCE:
            for rank in ranks:
                self._before(role, rank)
            return submit(role, ranks, method, args, kwargs)
        self.counts[form] += 1
        made = [Pending(role, r, method, lambda r=r: submit(role, [r], method, args, kwargs)[0]) for r in ranks]
        for pending in made:
            self._held.setdefault((role, pending.rank), []).append(pending)
        return made

    def _before(self, role: str, rank: int, last: Any = None) -> None:
        """Carry out what a worker was asked before."""
        held = self._held.get((role, rank), [])
        while held:
            first = held.pop(0)
            first.carried_out()
            if first is last:
                return

    def _waited(self, calls: Sequence[Any], timeout: float) -> list[Any]:
        for call in calls:
            if isinstance(call, Pending) and not call.done():
                self._before(call.role, call.rank, call)
        return self._wait([c.carried_out() if isinstance(c, Pending) else c for c in calls], timeout)

    def _streamed(
        self, role: str, ranks: Sequence[int], method: Callable[..., Iterator[Any]], *words: Any
    ) -> list[Flow[Any]]:
        for rank in ranks:
            self._before(role, rank)
        self.counts["streams"] += 1
        return self._stream(role, ranks, method, *words)

    def _taken(self, flows: Sequence[Flow[Any]], timeout: float) -> list[Any]:
        """Nothing yet, or what has come since: of several answers, or of one."""
        if self._dice.random() < NOTHING:
            self.counts["nothing"] += 1
            return []
        found = self._take(flows, timeout)
        while found and self._dice.random() < NOTHING:
            found = [*found, *self._take(flows, timeout)]
        return found


class LateScorer(FixedScorer):
    """Scores in stretches of one group; whoever looks is told late, or of another stretch first."""

    def __init__(self, values: Callable[..., Sequence[float | None]], seed: int | None) -> None:
        super().__init__(values)
        self._dice = random.Random(seed) if seed is not None else None

    def groups(self, prompts: int, tokens: int) -> int:
        return 1

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Any) -> Future[Any]:
        if self._dice is None:
            return super().begin(prompts, trajectories, stretch)
        dice = self._dice
        return Future(lambda: super(LateScorer, self).begin(prompts, trajectories, stretch).result(),
                      lambda: dice.random() >= NOTHING)  # fmt: skip
