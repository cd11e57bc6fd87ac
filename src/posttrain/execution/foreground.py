"""Run an engine program for whose answers a caller waits, without an attempt or a ledger.

The program ends with its caller.

The request is one JSON document on the program's standard input; each answer is a JSON line. A line with `error` and
`exit_code` is the one-line error that ended the program.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

from posttrain.domain.errors import (
    DeadlineError,
    InfrastructureError,
    InputError,
    IntegrityError,
    JobFailedError,
    PosttrainError,
    WorkspaceError,
)
from posttrain.execution.processes import without_keys

_ERRORS: dict[int, type[PosttrainError]] = {
    kind.exit_code: kind for kind in (InputError, JobFailedError, InfrastructureError, IntegrityError, WorkspaceError)
}
_SHOWN = 300  # maximum characters of the last line of a failed program


def answers(module: str, request: Mapping[str, Any], *, timeout: float) -> Iterator[dict[str, Any]]:
    """Yield the answers of `python -m MODULE` as they arrive.

    Args:
        timeout: seconds for the whole exchange.

    Raises:
        PosttrainError: the error that ended the program.
        InfrastructureError: the program failed without reporting an error.
        DeadlineError: the program took longer than `timeout`.
    """
    environment = {name: value for name, value in without_keys(os.environ).items() if not name.startswith("PYTHON")}
    late = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        program = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), _give_up, (program, late))
        timer.daemon = True  # the timer must not delay the end of this process
        try:
            timer.start()
            yield from _exchange(program, request)
            code = program.wait()
        finally:
            timer.cancel()
            _end(program)
        if late.is_set():
            raise DeadlineError(f"{module}: gave no answer within {timeout:g} s; allow more time")
        if code != 0:
            raise InfrastructureError(
                f"{module}: ended with exit code {code}{_last_words(log)}; fix the cause, then try again"
            )


def _exchange(program: subprocess.Popen[str], request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    assert program.stdin is not None
    assert program.stdout is not None
    with contextlib.suppress(BrokenPipeError), program.stdin as asked:  # the program may have died already
        json.dump({**request, "asked_by": os.getpid()}, asked)
    for line in program.stdout:
        answer = json.loads(line)
        if "error" in answer:
            raise _ERRORS.get(answer["exit_code"], JobFailedError)(answer["error"])
        yield answer


def _give_up(program: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    _end(program)


def _end(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)  # the program leads a separate session
    program.wait()


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return f": {lines[-1][-_SHOWN:]}" if lines else ""
