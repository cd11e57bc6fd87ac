"""The rows of several runs, read at once: a list of runs costs the ledger what one of them does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.store.hosts import Host
from posttrain.store.snapshot import Snapshot


class Rows:
    """What a list shows of these runs, in as many statements however many they are.

    Args:
        ledger: read now, and not again.
        runs: in the order in which they are shown.
        hosts: those of the ledger; asked at most once.
    """

    def __init__(self, ledger: Snapshot, runs: Sequence[RunRecord], hosts: Callable[[], Sequence[Host]]) -> None:
        self.runs = list(runs)
        self.hosts = functools.cache(hosts)
        ids = [run.id for run in runs]
        self.released = ledger.released(*ids) if ids else {}
        self._stages: dict[str, list[StageRecord]] = {run_id: [] for run_id in ids}
        self._live: dict[tuple[str, str], list[AttemptRecord]] = {}
        self.tags: dict[str, list[str]] = {run_id: [] for run_id in ids}
        for note in ledger.notes(*ids, tags=True) if ids else ():
            self.tags[note.run_id].append(note.tag)
        for stage in ledger.stages_in_brief(*ids) if ids else ():
            self._stages[stage.run_id].append(stage)
        for attempt in ledger.attempts_of(*ids, live=True) if ids else ():
            self._live.setdefault((attempt.run_id, attempt.stage), []).append(attempt)

    def stages(self, run_id: str) -> list[StageRecord]:
        """See `Snapshot.stages_in_brief`."""
        return self._stages[run_id]

    def live(self, run_id: str, stage: str) -> list[AttemptRecord]:
        """The attempts of a stage that have not ended."""
        return self._live.get((run_id, stage), [])
