"""`access.json` of an attempt's folder, its owner's alone: where a job of a server reads its inputs, what lets it in.

Standard library only, and what the folder needs: jobs import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from posttrain.domain.errors import IntegrityError
from posttrain.store.atomic import write_json
from posttrain.store.left import read_left

FILE = "access.json"
PRIVATE_CACHE = "cache"  # in an attempt's folder: what a job in an image fetches and verifies, nobody else reads
SOCKETS = "sockets"  # below the workspace: where its server listens for jobs that have no network
SOCKET = "server.sock"
INSIDE = "/run/posttrain"  # where such jobs find that folder
_MOST = 1 << 20  # bytes; a certificate with its chain has a few thousand


@dataclass(frozen=True, slots=True)
class JobAccess:
    """What lets a job in."""

    url: str  # of its host's server
    token: str = field(repr=False)
    certificate: str = ""  # what that server shows, in PEM; empty: it has no TLS
    socket: str = ""  # where it is reached instead, by whoever has no network

    def write(self, folder: Path) -> None:
        """Put it where the job finds it.

        Raises:
            WorkspaceError: the disk is full or read-only.
        """
        write_json(folder / FILE, {name: value for name, value in asdict(self).items() if value})


def read_access(folder: Path) -> JobAccess | None:
    """What lies in an attempt's folder; None: nothing. Whatever a job puts there, nobody waits for it.

    Raises:
        IntegrityError: it cannot be read.
    """
    path = folder / FILE
    try:
        said = JobAccess(**json.loads(read_left(path, _MOST)))
        if not all(isinstance(one, str) for one in asdict(said).values()):
            raise TypeError("its values must be texts")
        return said
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}; it is damaged") from error
