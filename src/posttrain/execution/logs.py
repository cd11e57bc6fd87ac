"""Reading a log that somebody is writing."""

from __future__ import annotations

from pathlib import Path

from posttrain.domain.jobs import LogPage
from posttrain.store.atomic import open_plain

_CHUNK = 1 << 20


def read_log(path: Path, cursor: int = 0) -> LogPage:
    """Text from byte `cursor`, and where the next page begins. A log that is not there yet is empty.

    Raises:
        IntegrityError: it is no plain file.
    """
    try:
        with open_plain(path) as file:
            file.seek(cursor)
            data = file.read(_CHUNK)
    except FileNotFoundError:
        return LogPage("", cursor)
    whole = data.rfind(b"\n") + 1 if len(data) == _CHUNK else len(data)  # do not cut a line, or a character
    data = data[: whole or len(data)]
    return LogPage(data.decode("utf-8", errors="replace"), cursor + len(data))
