"""What a program does that answers somebody who waits (`execution.foreground`): read the question, answer in lines."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from posttrain.domain.errors import JobFailedError, PosttrainError
from posttrain.jobs.entry import failure_of, settle_environment

_PR_SET_PDEATHSIG = 1
Program = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


def serve(program: Program) -> None:
    """Answer the one question on standard input, and die with whoever asked.

    Whatever else is printed, by C libraries too, goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        _die_with(int(request["asked_by"]))
        settle_environment(int(request.get("threads", 1)))
        try:
            for answer in program(request):
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
        except Exception as error:
            traceback.print_exc()
            code = error.exit_code if isinstance(error, PosttrainError) else JobFailedError.exit_code
            message = failure_of(error).message.removesuffix("; see log.txt")
            answers.write(json.dumps({"error": message, "exit_code": code}) + "\n")


def _die_with(parent: int) -> None:
    """SIGKILL for this process when the one that asked ends, however it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
