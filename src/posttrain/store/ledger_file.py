"""A ledger that is a file: whether it is whole, may be written, and is its owner's alone."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import unwritable

_MAGIC, _HEADER = b"SQLite format 3\0", 100  # bytes


def refuse_cut_short(file: Path, create: bool) -> None:
    """SQLite takes an empty file for a new database, and may notice only later that pages are missing.

    Raises:
        WorkspaceError: there is no ledger, or less of it than its header says.
    """
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        if create:
            _make_private(file)
            return
        raise WorkspaceError(f"there is no ledger at {file}; run `posttrain init` first") from error
    except OSError as error:
        raise unwritable(file, error) from error
    if not size and create:
        return  # made a moment ago, by another process or by one that died then
    log = file.with_name(file.name + "-wal")
    if log.exists() and log.stat().st_size:
        return  # what is missing may stand in the log: SQLite sees to it
    with file.open("rb") as opened:
        header = opened.read(_HEADER)
    if size >= _HEADER and not header.startswith(_MAGIC):
        return  # no database at all, which SQLite says
    page = int.from_bytes(header[16:18]) or 0
    counted = header[24:28] == header[92:96]  # else the count is of an older version of SQLite
    wanted = max(_HEADER, (65536 if page == 1 else page) * int.from_bytes(header[28:32]) if counted else 0)
    if size < wanted:
        raise WorkspaceError(f"ledger {file} is cut short ({size} of {wanted} bytes); restore it from a copy")


def writable(file: Path) -> bool:
    """Whether this process may write to it."""
    places = (file, file.absolute().parent)  # SQLite makes two files beside it
    return all(os.access(place, os.W_OK, effective_ids=True) for place in places)


def _make_private(file: Path) -> None:
    """SQLite gives the files beside a database the database's own permissions."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        return  # whoever opens it says what is wrong
