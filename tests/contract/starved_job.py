"""A job that a machine has too little for: JOB_MODE says of what. It ends as every job of ours does."""

from __future__ import annotations

import os
import resource
import sys

from posttrain.domain.jobs import JobResult
from posttrain.jobs.entry import Job, main


def body(job: Job) -> JobResult:
    mode = os.environ["JOB_MODE"]
    if mode == "disk":
        with (job.folder / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    if mode == "limit":
        limit = 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = []
    while True:
        held.append(bytearray(os.urandom(1)) * 2**24)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(body)
