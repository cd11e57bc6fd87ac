"""A lost process of a pool whose ranks work alone is started anew; the other ranks keep their processes and their work.

::

    lost ──▶ process of the same rank ──▶ workers of every role ──▶ `restore`: what the lost one had ──▶ go on
      ▲                  │ lost too                │ lost too            │ lost too
      └──────────────────┴─────────────────────────┴─────────────────────┘  `MOST` times, then the pool is given up

Whoever notices a loss waits here. Each wait below has a deadline, that of a start or of a call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import final

from posttrain.domain.facts import Note
from posttrain.engine.groups.failures import WorkerLostError
from posttrain.engine.groups.port import Backend
from posttrain.engine.groups.recording import Recorder

MOST = 3  # of one rank in one step: what its prompts or its memory cause comes again, and each time costs a start


def nothing(ranks: Collection[int]) -> None:
    """A worker is what the lost one was as soon as it is constructed."""


@final
@dataclass(slots=True)
class Replacing:
    """The replacements of one pool, which all its groups share.

    Args:
        backend: of the pool.
        recorder: where each replacement is told, with the step.
        seconds: for a process, and for each of its workers, to start.
        restore: gives the workers of these ranks what the lost ones had been given.
    """

    backend: Backend
    recorder: Recorder
    seconds: float
    restore: Callable[[Collection[int]], None] = nothing
    _counts: Counter[tuple[int, int]] = field(default_factory=Counter)  # by step and rank
    _bare: set[int] = field(default_factory=set)  # ranks whose workers lack what `restore` gives

    def replace(self, lost: WorkerLostError) -> None:
        """Start a lost process anew, unless that was done since.

        Raises:
            WorkerLostError: its pool cannot go on without it, or it was lost too often.
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
            line = (
                f"{lost}, the {count}th process of this rank that is lost in step {step} (at most {MOST} are replaced)"
            )
            backend.give_up(line)
            raise WorkerLostError(f"{line}; look in the job's log for what ends it, memory first") from lost
        line = f"{lost}; another takes its place, replacement {count} of at most {MOST} in a step"
        self.recorder.sink(Note(line, time.time(), "warning"))
        self._bare.add(process.rank)
        backend.replace(process.rank, self.seconds)
