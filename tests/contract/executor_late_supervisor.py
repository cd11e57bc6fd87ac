"""The local executor's supervisor, held up before the step LATE_FOR until its attempt folder holds `late`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.execution.executors.local import supervisor

PATIENCE = 60.0


def held_up(step: Callable[..., Any]) -> Callable[..., Any]:
    def wait_and_go_on(path: Path, *rest: Any) -> Any:
        folder = path if path.is_dir() else path.parent
        (folder / "arriving").write_text(str(os.getpid()))
        (folder / "arriving").rename(folder / "arrived")
        deadline = time.monotonic() + PATIENCE
        while not (folder / "late").exists():
            if time.monotonic() >= deadline:
                os._exit(1)  # the test is gone
            time.sleep(0.01)
        return step(path, *rest)

    return wait_and_go_on


if __name__ == "__main__":
    late_for = os.environ["LATE_FOR"]
    setattr(supervisor, late_for, held_up(getattr(supervisor, late_for)))
    sys.exit(supervisor.main(sys.argv[1], sys.argv[2]))
