"""What the control plane works with. `app` makes one; nothing here names a concrete back-end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.control.codes import trainer_of
from posttrain.control.planning import manifest_from_json
from posttrain.domain.manifest import Manifest
from posttrain.domain.ports import BlobStore, Clock
from posttrain.domain.records import AttemptRecord, RunRecord
from posttrain.execution.ports import Executor, Trainer
from posttrain.store.attempts import AttemptFolder
from posttrain.store.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Wiring:
    """Ledger, blobs, executor, trainers, clock and the workspace folder of one control plane."""

    ledger: Ledger
    blobs: BlobStore
    executor: Executor
    trainers: Mapping[str, Trainer]
    clock: Clock
    root: Path  # the workspace folder
    actor: str  # who acts, as the audit log names it
    slots: int = 1  # jobs of one run at a time
    trust_rewards: bool = False  # rewards may run where the kernel cannot confine them
    channels: Callable[[], str] = lambda: ""  # URL below which new attempts have their channels; empty: their folders
    workspace: Callable[[], str] = lambda: ""  # what tells it from others and from its copies, on its jobs

    def manifest(self, run: RunRecord) -> Manifest:
        """The run's locked manifest.

        Raises:
            IntegrityError: its bytes no longer match the digest.
        """
        return manifest_from_json(json.loads(self.blobs.get(run.manifest_digest)))

    def trainer(self, name: str) -> Trainer:
        """A trainer that a manifest names.

        Raises:
            InputError: it is not installed any more, or its package is broken.
        """
        return trainer_of(name, self.trainers)

    def attempt_dir(self, run_id: str, stage: str, number: int) -> Path:
        """Where attempt `number` lives."""
        return self.root / "runs" / run_id / stage / f"{number:03d}"

    def folder(self, attempt: AttemptRecord) -> AttemptFolder:
        """The attempt's folder."""
        return AttemptFolder(self.root / attempt.folder, self.channel(attempt))

    def channel(self, attempt: AttemptRecord) -> str:
        """URL of the channel that an attempt gets with its order; empty: its folder."""
        base = self.channels()
        return f"{base}/{attempt.run_id}/{attempt.stage}/{attempt.number:03d}" if base else ""
