"""The rows of several runs, read at once: a list of runs costs the ledger what one of them does."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.domain.records import AttemptRecord, RunRecord, Signal, StageRecord
from posttrain.store.snapshot import Snapshot


class Rows:
    """What a snapshot would answer of these runs.

    Args:
        ledger: read now, and not again.
        runs: in the order in which they are shown.
    """

    def __init__(self, ledger: Snapshot, runs: Sequence[RunRecord]) -> None:
        self.ids = [run.id for run in runs]
        self._runs = {run.id: run for run in runs}
        self._signals: dict[str, list[Signal]] = {}
        self._stages: dict[str, list[StageRecord]] = {run_id: [] for run_id in self.ids}
        self._attempts: dict[tuple[str, str], list[AttemptRecord]] = {}
        for stage in ledger.stages(*self.ids) if self.ids else ():
            self._stages[stage.run_id].append(stage)
        for attempt in ledger.attempts_of(*self.ids) if self.ids else ():
            self._attempts.setdefault((attempt.run_id, attempt.stage), []).append(attempt)
        for signal in ledger.signals(*self.ids) if self.ids else ():
            self._signals.setdefault(signal.run_id, []).append(signal)

    def run(self, run_id: str) -> RunRecord:
        """See `Snapshot.run`."""
        return self._runs[run_id]

    def stages(self, run_id: str) -> list[StageRecord]:
        """See `Snapshot.stages`."""
        return self._stages[run_id]

    def attempts(self, run_id: str, stage: str) -> list[AttemptRecord]:
        """See `Snapshot.attempts`."""
        return self._attempts.get((run_id, stage), [])

    def signals(self, run_id: str) -> list[Signal]:
        """See `Snapshot.signals`."""
        return self._signals.get(run_id, [])
