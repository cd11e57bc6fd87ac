"""Where a control plane keeps what it knows: what planning, judging, releasing and every look back work on.

Nothing here starts a job or can be asked about one; that is `control.jobs`.
"""

import json
from dataclasses import dataclass
from typing import Any

from posttrain.domain.manifest import Manifest, manifest_from_json
from posttrain.domain.ports import BlobStore, Clock
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.store.hosts import Ledger


@dataclass(frozen=True, slots=True)
class Stores:
    """Ledger and blobs, and by whom and when they are written."""

    ledger: Ledger
    blobs: BlobStore
    clock: Clock
    actor: str  # who acts, as the audit log names it

    def manifest(self, run: RunRecord) -> Manifest:
        """The run's locked manifest.

        Raises:
            IntegrityError: its bytes no longer match the digest.
        """
        return manifest_from_json(json.loads(self.blobs.get(run.manifest_digest)))

    def update_stage(self, stage: StageRecord, **changes: Any) -> StageRecord:
        """Change a stage in a transaction of its own; see `Transaction.update_stage`."""
        with self.ledger.transaction(self.actor) as transaction:
            return transaction.update_stage(stage, **changes)

    def update_attempt(self, attempt: AttemptRecord, **changes: Any) -> AttemptRecord:
        """Change an attempt in a transaction of its own; see `Transaction.update_attempt`."""
        with self.ledger.transaction(self.actor) as transaction:
            return transaction.update_attempt(attempt, **changes)
