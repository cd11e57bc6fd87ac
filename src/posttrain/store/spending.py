"""What a running job says that it spent, beside its facts: at once, and within one line."""

from __future__ import annotations

import os
import time

from posttrain.store.atomic import make_folder
from posttrain.store.attempts import METER, AttemptFolder


class SpendingMeter:
    """Where a job says what it spent, and before each step what that may cost: a kill in the middle loses neither.

    The record is one line that is rewritten in place: it survives the death of the process at once, a power cut to
    within `seconds`. Use it as a context manager.

    Raises:
        OSError: the disk is full or read-only.
    """

    def __init__(self, attempt: AttemptFolder, seconds: float = 0.5) -> None:
        make_folder(attempt.path)
        self._file = os.open(attempt.path / METER, os.O_CREAT | os.O_WRONLY, 0o600)
        self._seconds, self._synced = seconds, float("-inf")

    def __call__(self, spent: int, reserved: int) -> None:
        """Say what the lineage has spent, and what it may spend until the next call."""
        os.pwrite(self._file, f"{spent:020d} {reserved:020d}\n".encode(), 0)
        if time.monotonic() - self._synced >= self._seconds:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def __enter__(self) -> SpendingMeter:
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._file)
