"""What the fork server of executor tests imports; a job of the mode `unready` cannot run on it."""

from __future__ import annotations

import os
from pathlib import Path

LOADED_BY = os.getpid()


def ready(attempt_dir: str) -> bool:
    return not (Path(attempt_dir) / "unready").exists()
