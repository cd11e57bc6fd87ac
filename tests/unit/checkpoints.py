"""What tests ask of an attempt's checkpoints."""

from __future__ import annotations

from posttrain.store.attempts import AttemptFolder, CommittedCheckpoint


def latest_checkpoint(attempt: AttemptFolder) -> CommittedCheckpoint | None:
    """The newest that verifies."""
    return next(filter(None, map(attempt.checkpoint, reversed(attempt.checkpoint_steps()))), None)
