"""Which files words may name: on a server those that came with the request, and no other of its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from posttrain.domain.errors import InputError

UNCONFINED = (
    "a server runs a dataflow of one's own only in an image, which confines it; name one that the project allows: "
    "image: NAME@sha256:…"
)
_FOLDER: ContextVar[Path | None] = ContextVar("posttrain_confined", default=None)


@contextmanager
def confined(folder: Path) -> Iterator[None]:
    """For the length of the block words name what is in this folder, by relative paths, and nothing else."""
    token = _FOLDER.set(folder.resolve())
    try:
        yield
    finally:
        _FOLDER.reset(token)


def is_confined() -> bool:
    """Whether words come from afar."""
    return _FOLDER.get() is not None


def refuse_elsewhere(word: str, path: Path) -> None:
    """Refuse a word that names a file outside; whether it exists is not told.

    Args:
        path: where it would be.

    Raises:
        InputError: it does.
    """
    folder = _FOLDER.get()
    if folder is None:
        return
    plain = Path(word)
    leaves = plain.is_absolute() or word.startswith("~") or ".." in plain.parts or "\0" in word
    if leaves or not path.resolve().is_relative_to(folder):
        raise InputError(
            f"{word[:120]!a}: a server reads no files but those that are sent with the request; the command line sends "
            "what a run file names, or name a registered asset"
        )


def refuse_afar(what: str) -> None:
    """Refuse what only whoever has the workspace before them may ask for.

    Args:
        what: begins the error, with what to do instead.

    Raises:
        InputError: the words come from afar.
    """
    if is_confined():
        raise InputError(what)
