"""Processes of channel tests: `python channel_jobs.py WORD ADDRESS …`; ADDRESS is a folder or an object store's URL."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from posttrain.domain.jobs import JobResult
from posttrain.jobs import entry
from posttrain.store.mailbox import EVENTS, PACK, Mailbox, MailboxObjects
from posttrain.store.mailboxes.folder import FolderObjects
from posttrain.store.mailboxes.objects import ObjectStoreObjects
from posttrain.store.mailboxes.served import ServedObjects


def objects(address: str) -> MailboxObjects:
    if address.startswith("served:"):
        return ServedObjects(Path(address.removeprefix("served:")))
    return ObjectStoreObjects(address) if "://" in address else FolderObjects(Path(address))


def race(address: str, racers: str) -> int:
    """Let processes begin at the same moment, forked from this one; print who ended how: 0 for who began."""
    (told, ready), (gate, opened) = os.pipe(), os.pipe()
    pids = [os.fork() or _begin(address, ready, gate, opened) for _ in range(int(racers))]
    waiting = len(pids)
    while waiting:
        waiting -= len(os.read(told, waiting))
    os.close(opened)
    print(json.dumps([[pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] for pid in pids]))
    return 0


def _begin(address: str, ready: int, gate: int, opened: int) -> int:
    """Say that one is ready, wait until the gate opens, try to begin; it ends this process."""
    code = 2
    try:
        os.close(opened)
        channel = Mailbox(objects(address))
        os.write(ready, b".")
        os.read(gate, 1)
        code = 0 if channel.start(1, "a process") is None else 1
    finally:
        os._exit(code)


def write(address: str, segments: str) -> int:
    """Write segments, packed as they fill groups, from where the last writer was killed."""
    channel = Mailbox(objects(address))
    for number in range(channel.last(EVENTS) + 1, int(segments) + 1):
        channel.append(EVENTS, number, b"%d\n" % number)
        if number % PACK == 0:
            channel.pack(EVENTS, number)
    return 0


def compute(job: entry.Job) -> JobResult:
    """The body of a job: leave a trace of computing, then wait for a file."""
    with (job.folder / "computed").open("a") as file:
        file.write(f"{os.getpid()}\n")
    (job.folder / "ready").touch()
    while not (job.folder / "go").exists() and not job.stopping():
        time.sleep(0.01)
    return JobResult("succeeded")


if __name__ == "__main__":
    words = {"race": race, "write": write}
    if sys.argv[1] in words:
        sys.exit(words[sys.argv[1]](*sys.argv[2:]))
    entry.main(compute)  # as an executor runs it: MODULE ATTEMPT_DIR
