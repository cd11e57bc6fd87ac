"""Every error that Posttrain raises on purpose, suggestions for unknown names, and the origin of a worker's error.

::

    PosttrainError                    exit  meaning
    ├── InputError                      2   the input cannot be run: fix the named field
    │   ├── NotFoundError               2   an unknown ref, run, channel or asset
    │   │   └── LostOperationError      2   the server that carried an operation out no longer exists
    │   ├── ApiVersionError             2   a server and its client have no version of the API in common
    │   ├── CursorError                 2   an invalid cursor of this list
    │   └── PartSizeError               2   a part of an upload is too small
    ├── GateRejectedError               3   a gate's verdict is FAIL or ERROR; nothing released
    ├── GateInconclusiveError           4   too little evidence; nothing released
    ├── JobFailedError                  5   a job ended in a way that a retry would repeat
    ├── InfrastructureError             6   a service is unavailable, or a job was lost too often (retryable)
    │   ├── CapacityError               6   devices that a job needs are taken       (retryable)
    │   │   ├── BusyError               6   a server is overloaded                   (retryable)
    │   │   └── LimitError              6   a principal exceeds a server's limit     (retryable)
    │   └── UnavailableError            6   the artifact store does not respond      (retryable)
    ├── BudgetExceededError             7   the run's declared budget is spent
    ├── IntegrityError                  8   bytes do not match their digest, or stored records are damaged
    │   └── UploadError                 8   uploaded bytes do not match their digest
    ├── ConflictError                   9   the current state forbids the action     (retryable)
    │   ├── ChannelClosedError          9   the channel is frozen or protected
    │   ├── RecalledError               9   the model was made from a recalled asset
    │   ├── PolicyError                 9   the gates were judged under another policy
    │   ├── ApprovalError               9   an approval is missing or rejected
    │   └── StaleWriteError             9   a ledger row changed after it was read   (retryable)
    ├── WorkspaceError                 10   no workspace, read-only, disk full, newer schema
    │   └── LedgerUnavailableError     10   its database does not respond            (retryable)
    ├── StoppedError                   11   a user stopped the run
    ├── DeadlineError                  12   a wait reached its deadline               (retryable)
    │   └── SlowError                  12   a request body did not arrive in time     (retryable)
    └── AccessError                    13   the caller lacks the permission
        └── AuthenticationError        13   the credentials are missing or invalid

Exit code 0 means success, 1 an unexpected error (a bug in Posttrain), 130 that Ctrl-C detached the command. An error's
message is one line with the object, the constraint, the offending value and the next action. Its type states whether a
retry can help (`retryable`).

The error for an unknown name suggests similar known names. An exception that a worker raises has a note that names the
worker; the job's one-line error contains the note.
"""

import difflib
import errno
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

_PREFIX = "worker: "


class PosttrainError(Exception):
    """Base of the tree. `str(error)` is one line fit for a terminal."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class InputError(PosttrainError):
    """The input is invalid."""

    exit_code = 2


class NotFoundError(InputError):
    """A name does not exist."""


class PartSizeError(InputError):
    """A part of an upload is too small; none of it is kept."""


class LostOperationError(NotFoundError):
    """The server that ran an operation has ended; a repeated request runs the operation once."""


class ApiVersionError(InputError):
    """A server and its client have no API version in common."""


class CursorError(InputError):
    """A cursor is not a position in this list."""


class GateRejectedError(PosttrainError):
    """A gate returned FAIL or ERROR."""

    exit_code = 3


class GateInconclusiveError(PosttrainError):
    """A gate has too few items to decide."""

    exit_code = 4


class JobFailedError(PosttrainError):
    """A job failed in a way that a retry would repeat."""

    exit_code = 5


class InfrastructureError(PosttrainError):
    """A service or resource is unavailable, or a job was lost too often."""

    exit_code = 6
    retryable = True


class CapacityError(InfrastructureError):
    """The devices that a job needs are in use; no job was started, and waiting loses nothing."""


class BusyError(CapacityError):
    """The server is overloaded; it did not run the request."""


class LimitError(CapacityError):
    """A principal exceeds a limit of the server; the server did not run the request."""


class UnavailableError(InfrastructureError):
    """The artifact store does not answer; nothing is half-written, and a later retry helps."""


class BudgetExceededError(PosttrainError):
    """The run's declared budget is spent."""

    exit_code = 7


class TrackerError(InfrastructureError):
    """A tracker cannot be written; the run is not affected."""


class SinkError(InfrastructureError):
    """A sink did not accept an event; it is sent again, and nothing else is affected."""


class IntegrityError(PosttrainError):
    """Bytes do not match their digest, or stored records are damaged."""

    exit_code = 8


class UploadError(IntegrityError):
    """Uploaded bytes do not match their digest; none of them is kept."""


class ConflictError(PosttrainError):
    """The current state forbids the action: an object changed, or is frozen, quarantined or not approved."""

    exit_code = 9
    retryable = True


class QuarantinedError(ConflictError):
    """A model that was rolled back from a channel can be promoted to it again only with a reason."""


class ChannelClosedError(ConflictError):
    """A channel is frozen or protected; a user must open it first."""


class RecalledError(ConflictError):
    """A model is recalled, or depends on a recalled asset."""


class PolicyError(ConflictError):
    """The gates were judged under a policy other than the channel's current one."""


class ApprovalError(ConflictError):
    """The request lacks approvals, or was rejected."""


class StaleWriteError(ConflictError):
    """A ledger row changed after it was read: the caller must read it and decide again."""


class WorkspaceError(PosttrainError):
    """The workspace cannot be used in its current state."""

    exit_code = 10


class LedgerUnavailableError(WorkspaceError):
    """The ledger's database is not reachable."""

    retryable = True


class StoppedError(PosttrainError):
    """A user stopped the run."""

    exit_code = 11


class DeadlineError(PosttrainError):
    """A wait reached its deadline."""

    exit_code = 12
    retryable = True


class SlowError(DeadlineError):
    """A request's body did not arrive in time; the server did not run the request."""


class AccessError(PosttrainError):
    """The principal lacks the permission."""

    exit_code = 13


class AuthenticationError(AccessError):
    """The credentials are missing or invalid."""


class FailureClass(StrEnum):
    """The reason why an attempt failed, which determines the next step of the control side (see `control`)."""

    INFRASTRUCTURE = "infrastructure"  # a process or node was lost; the next attempt resumes from the checkpoint
    PREEMPTED = "preempted"  # the job was ended from outside and is queued again; this does not count as an attempt
    OUT_OF_MEMORY = "out_of_memory"  # not retried automatically: the next attempt would need the same memory
    DISK_FULL = "disk_full"  # not retried automatically: the disk would still be full
    DIVERGED = "diverged"  # training diverged: the loss is NaN, or the reward collapsed
    BAD_INPUT = "bad_input"
    BUG = "bug"  # an unexpected exception in the job; not retried automatically
    BUDGET = "budget"

    @property
    def retried(self) -> bool:
        """Whether the control plane retries this class automatically."""
        return self in (FailureClass.INFRASTRUCTURE, FailureClass.PREEMPTED)

    @property
    def error(self) -> type[PosttrainError]:
        """The error (and so the exit code) of a run whose stage failed for this reason."""
        return _ERRORS.get(self, JobFailedError)


@dataclass(frozen=True, slots=True)
class Trace:
    """Lines by which drivers and libraries report a failure in a job's log."""

    name: str
    meaning: str
    kind: FailureClass
    pattern: re.Pattern[str]
    of_node: bool = False  # whether another node is the remedy


TRACES = (
    Trace(
        "cuda_out_of_memory", "a GPU has no memory left", FailureClass.OUT_OF_MEMORY,
        re.compile(r"(CUDA|HIP) (error: )?out of memory|OutOfMemoryError: (CUDA|HIP)"),
    ),
    Trace(
        "disk_full", "a disk of the node is full", FailureClass.DISK_FULL,
        re.compile(r"No space left on device|Disk quota exceeded"),
    ),
    Trace(
        "gpu_fault", "a GPU of the node is faulty", FailureClass.INFRASTRUCTURE,
        re.compile(r"NVRM: Xid|uncorrectable ECC error|GPU has fallen off the bus|CUDA error: unspecified launch fail"),
        of_node=True,
    ),
    Trace(
        "nccl", "communication among GPUs failed or hung", FailureClass.INFRASTRUCTURE,
        re.compile(r"ncclSystemError|ncclRemoteError|ncclInternalError|Watchdog caught collective operation timeout"),
    ),
)  # fmt: skip


def trace_in(text: str) -> Trace | None:
    """Return the kind of failure that a text reports last; None: none that is known."""
    found = [(max((one.end() for one in trace.pattern.finditer(text)), default=-1), trace) for trace in TRACES]
    end, trace = max(found, key=lambda item: item[0])
    return trace if end >= 0 else None


_ERRORS: Mapping[FailureClass, type[PosttrainError]] = {
    FailureClass.INFRASTRUCTURE: InfrastructureError,
    FailureClass.PREEMPTED: InfrastructureError,
    FailureClass.DISK_FULL: WorkspaceError,
    FailureClass.BAD_INPUT: InputError,
    FailureClass.BUDGET: BudgetExceededError,
}
_WRITERS = ("sqlite3", "sqlalchemy", "obstore", "safetensors")


_SAID = ("database or disk is full", "No space left on device")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk is full.

    This is the case if the error or its cause is an `OSError` with a number in `_FULL`, or an error of a library in
    `_WRITERS` with a text in `_SAID`. The same text in any other error proves nothing."""
    told = type(error).__module__.partition(".")[0] in _WRITERS and any(words in str(error) for words in _SAID)
    full = told or (isinstance(error, OSError) and error.errno in _FULL)
    return full or (error.__cause__ is not None and is_full(error.__cause__))


def unwritable(path: Path | str, error: OSError) -> WorkspaceError:
    """Return the one-line error for a write that the operating system rejected."""
    if error.errno in _FULL:
        return WorkspaceError(f"cannot write {path}: the disk is full; free some space and run the command again")
    if error.errno in _READ_ONLY:
        return WorkspaceError(f"cannot write {path}: it is read-only; make the folder writable")
    return WorkspaceError(f"cannot write {path}: {error.strerror or error}; check the folder")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)`; without a similar name, the known names; without known names, an empty text."""
    names = sorted(known)
    return meant(word, names) or (f" (known: {', '.join(names)})" if names else "")


def meant(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)`, whatever the case of `word`; empty if no known name is similar."""
    names = {one.lower(): one for one in sorted(known)}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""


def meant_name(principal: str, known: Iterable[str]) -> str:
    """Return `meant` for `user:NAME` or `service:NAME`, comparing the names without the prefix."""
    names = {one.partition(":")[2]: one for one in sorted(known)}
    close = difflib.get_close_matches(principal.partition(":")[2], names, n=1, cutoff=0.5)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""


def blame(error: BaseException, role: str, rank: int, method: str, pid: int) -> None:
    """Add a note that names the worker to an exception, unless an inner worker has added its note."""
    if not raised_by(error):
        error.add_note(f"{_PREFIX}{role} rank {rank}, in {method}, process {pid}")


def raised_by(error: BaseException) -> str:
    """Return `policy rank 1, in update, process 4711`; empty if no worker raised the error."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_PREFIX) for note in notes if note.startswith(_PREFIX)), "")


def worker_of(error: BaseException) -> str:
    """Return `policy rank 1`; empty if no worker raised the error."""
    return raised_by(error).partition(",")[0]
