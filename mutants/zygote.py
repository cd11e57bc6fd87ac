"""A process that has imported the slow libraries and forks one child per trial, in the environment of a copy.

It reads one JSON line per trial, `{"arguments": [pytest's], "environment": {…}, "said": file, "limit": seconds}`, and
answers with one line: the exit code, or `null` if the trial exceeded its limit. It imports no module of Posttrain.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

SLOW = (
    "pytest",
    "hypothesis",
    "sqlalchemy",
    "pyarrow.parquet",
    "scipy.special",
    "scipy.optimize",
    "obstore",
    "pydantic",
    "typer.testing",
    "rich.live",
    "psutil",
    "tokenizers",
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    """Import, then serve until standard input ends."""
    for name in SLOW:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), flush=True)


def trial(order: dict[str, Any]) -> int | None:
    """Fork a child that runs the trial; wait for its end."""
    child = os.fork()
    if child == 0:
        run(order)
    until = time.monotonic() + order["limit"]
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run(order: dict[str, Any]) -> NoReturn:
    """Run pytest in this process."""
    code = 3
    try:
        os.setsid()
        said = os.open(order["said"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(source, target)
        os.environ.update(order["environment"])
        import tempfile

        import pytest

        tempfile.tempdir = None  # it may have been determined before the environment was set
        code = int(pytest.main(order["arguments"]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
