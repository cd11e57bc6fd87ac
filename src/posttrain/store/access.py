"""What a job of a server is told in its attempt's folder, its owner's alone: what lets it in, and where the server is.

::

    access.json     the token, written before the job starts, and by nobody afterwards
    address.json    where the server is, written again where that changed

The job may write both, so nothing of the server reads them: its driver knows by itself what it has told whom.

Standard library only, and what the folder needs: jobs import it.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.domain.errors import IntegrityError
from posttrain.store.atomic import write_json
from posttrain.store.left import read_left

FILE, ADDRESS = "access.json", "address.json"
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
        tell(folder, self.url, self.certificate)
        write_json(folder / FILE, {"token": self.token, **({"socket": self.socket} if self.socket else {})})


def tell(folder: Path, url: str, certificate: str) -> None:
    """Say where the server is now. Nothing of the folder is read.

    Raises:
        WorkspaceError: the disk is full or read-only. OSError: the job put something there that no file replaces.
    """
    write_json(folder / ADDRESS, {"url": url, **({"certificate": certificate} if certificate else {})})


def read_access(folder: Path) -> JobAccess | None:
    """What lies in its folder, for a job; None: something of it is not there. Whatever is, nobody waits for it.

    Raises:
        IntegrityError: it cannot be read.
    """
    where, key = _read(folder / ADDRESS, {"url", "certificate"}), _read(folder / FILE, {"token", "socket"})
    if where is None or key is None:
        return None
    try:
        return JobAccess(**where, **key)
    except TypeError as error:
        raise IntegrityError(f"{folder / FILE} cannot be read: {error}; it is damaged") from error


def _read(path: Path, known: Set[str]) -> dict[str, str] | None:
    try:
        said = json.loads(read_left(path, _MOST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}; it is damaged") from error
    if not isinstance(said, dict) or set(said) - known or not all(isinstance(one, str) for one in said.values()):
        raise IntegrityError(f"{path} must be an object of texts named {', '.join(sorted(known))}; it is damaged")
    return said
