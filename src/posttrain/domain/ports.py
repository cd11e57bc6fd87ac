"""The ports of the artifact store and the clock, and crashpoints.

Several packages need these ports. A crashpoint is a marked place at which a recovery test can end the process.

With `POSTTRAIN_CRASHPOINT=name`, a process that reaches this crashpoint kills itself with SIGKILL; with `name@3`, it
does so when it reaches the crashpoint for the third time. With `POSTTRAIN_CRASHPOINT_ONCE=FILE`, only the first process
to reach the crashpoint dies: it creates FILE with O_EXCL just before. Without `POSTTRAIN_CRASHPOINT`, a crashpoint
costs one dictionary look-up.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

_reached: Counter[str] = Counter()
CRASHPOINTS = frozenset(
    {
        # control side
        "submit.before_commit", "submit.after_commit",
        "attempt.after_intent", "attempt.after_launch", "attempt.after_handle",
        "stall.after_signal", "stall.after_ask",
        "collect.before_publish", "collect.after_publish", "collect.after_commit",
        "gate.before_commit", "gate.after_commit",
        "promote.before_commit", "promote.after_commit",
        "sealer.before_commit",
        "erase.before_commit", "erase.after_commit", "gc.before_delete",
        "backup.after_ledger", "backup.before_record", "restore.before_rename",
        "track.after_begin", "track.inside_log", "track.after_log", "track.before_end", "track.after_end",
        "sink.after_send",
        "detach.after_request", "detach.after_start", "driver.after_taken", "driver.before_done",
        # execution
        "supervisor.before_claim", "supervisor.before_spawn", "supervisor.after_spawn",
        "supervisor.before_exit_record",
        # jobs
        "job.start", "train.step", "checkpoint.before_shards", "checkpoint.inside_shard", "checkpoint.before_commit",
        "checkpoint.after_commit", "best.before_rename", "best.after_rename",
        "outputs.before_result", "outputs.after_result",
    }
)  # fmt: skip


class BlobStore(Protocol):
    """Content-addressed artifacts. Digests are `sha256:<hex>` of the bytes.

    In every implementation, writes are atomic and write-if-absent (storing the same bytes twice makes one blob); reads
    verify the digest and raise `IntegrityError` on corrupt bytes, `NotFoundError` on a missing blob; a full disk or a
    read-only place raises `WorkspaceError` and leaves no partial blob.
    """

    @property
    def url(self) -> str:
        """The URL with which another process can open the store."""

    def holding(self) -> AbstractContextManager[None]:
        """Prevent deletions during the block, which stores or finds blobs and writes the rows that refer to them."""

    def put(self, data: bytes) -> str:
        """Store bytes and return their digest."""

    def put_file(self, path: Path) -> str:
        """Store a file in constant memory and return its digest."""

    def get(self, digest: str) -> bytes:
        """Return the verified bytes."""

    def stream(self, digest: str) -> Iterator[bytes]:
        """Yield the bytes piece by piece. Corruption is raised after the last piece, so the caller must read all."""

    def fetch(self, digest: str, path: Path) -> None:
        """Write the verified bytes to `path` (atomically: temporary name, then rename)."""

    def check(self, digest: str) -> int:
        """Hash a blob again in constant memory; return its size in bytes. Raises IntegrityError or NotFoundError."""

    def has(self, digest: str) -> bool:
        """Return whether the blob exists; its bytes are not verified."""

    def size(self, digest: str) -> int:
        """Return the size of a blob in bytes, without verifying them. Raises `NotFoundError`."""


class Clock(Protocol):
    """Time, as a port that tests can replace."""

    def now(self) -> float:
        """Return seconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Sleep for this number of seconds."""


def crashpoint(name: str) -> None:
    """Kill this process (SIGKILL) if the environment names this crashpoint.

    Raises:
        KeyError: the name is not registered; tests enumerate the registered names.
    """
    if name not in CRASHPOINTS:
        raise KeyError(f"crashpoint {name!r} is not registered in domain/ports.py")
    target, _, count = os.environ.get("POSTTRAIN_CRASHPOINT", "").partition("@")
    if target != name:
        return
    _reached[name] += 1
    if _reached[name] != int(count or 1):
        return
    once = os.environ.get("POSTTRAIN_CRASHPOINT_ONCE")
    if once:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
