"""The stores of a control plane, for planning, judging, releasing and queries.

Nothing here starts or observes a job; `control.jobs` does.
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
    """Ledger and blobs, with the clock and the actor of their writes."""

    ledger: Ledger
    blobs: BlobStore
    clock: Clock
    actor: str  # the acting principal, by the name in the audit log

    def manifest(self, run: RunRecord) -> Manifest:
        """Return the run's locked manifest.

        Raises:
            IntegrityError: the manifest's bytes no longer match the digest.
        """
        return manifest_from_json(json.loads(self.blobs.get(run.manifest_digest)))

    def update_stage(self, stage: StageRecord, **changes: Any) -> StageRecord:
        """Change a stage in a separate transaction; see `Transaction.update_stage`."""
        with self.ledger.transaction(self.actor) as transaction:
            return transaction.update_stage(stage, **changes)

    def update_attempt(self, attempt: AttemptRecord, **changes: Any) -> AttemptRecord:
        """Change an attempt in a separate transaction; see `Transaction.update_attempt`."""
        with self.ledger.transaction(self.actor) as transaction:
            return transaction.update_attempt(attempt, **changes)
