"""Which worker of a group raised an exception: a note that the exception carries to whoever tells of it."""

from __future__ import annotations

_PREFIX = "worker: "


def blame(error: BaseException, role: str, rank: int, method: str, pid: int) -> None:
    """Note on an exception which worker raised it; the innermost worker is named, once."""
    if not raised_by(error):
        error.add_note(f"{_PREFIX}{role} rank {rank}, in {method}, process {pid}")


def raised_by(error: BaseException) -> str:
    """`policy rank 1, in update, process 4711`; empty when no worker raised it."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_PREFIX) for note in notes if note.startswith(_PREFIX)), "")


def worker_of(error: BaseException) -> str:
    """`policy rank 1`; empty when no worker raised it."""
    return raised_by(error).partition(",")[0]
