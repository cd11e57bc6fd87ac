"""`access.json` of an attempt's folder, its owner's alone: where a job of a server reads its inputs, what lets it in.

Standard library only, and what the folder needs: jobs import it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from posttrain.domain.errors import IntegrityError
from posttrain.store.atomic import read_json, write_json

FILE = "access.json"


@dataclass(frozen=True, slots=True)
class JobAccess:
    """What lets a job in."""

    url: str  # of its host's server
    token: str = field(repr=False)
    certificate: str = ""  # what that server shows, in PEM; empty: it has no TLS

    def write(self, folder: Path) -> None:
        """Put it where the job finds it.

        Raises:
            WorkspaceError: the disk is full or read-only.
        """
        write_json(folder / FILE, asdict(self))


def read_access(folder: Path) -> JobAccess | None:
    """What lies in an attempt's folder; None: nothing.

    Raises:
        IntegrityError: it cannot be read.
    """
    said = read_json(folder / FILE)
    try:
        return None if said is None else JobAccess(**said)
    except TypeError as error:
        raise IntegrityError(f"{folder / FILE} cannot be read: {error}; it is damaged") from error
