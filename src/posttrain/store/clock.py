"""The real clock behind the `Clock` port."""

from __future__ import annotations

import time


class SystemClock:
    """Wall-clock time of this machine."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
