"""What a program does that answers somebody who waits (`execution.foreground`): read the question, answer in lines."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from posttrain.domain.errors import JobFailedError, PosttrainError
from posttrain.jobs.entry import failure_of, settle_environment

Program = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


def serve(program: Program) -> None:
    """Answer the one question on standard input. What libraries print goes to standard error."""
    request = json.load(sys.stdin)
    settle_environment(int(request.get("threads", 1)))
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        for answer in program(request):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except Exception as error:
        traceback.print_exc()
        code = error.exit_code if isinstance(error, PosttrainError) else JobFailedError.exit_code
        answers.write(json.dumps({"error": failure_of(error).message, "exit_code": code}) + "\n")
        answers.flush()
