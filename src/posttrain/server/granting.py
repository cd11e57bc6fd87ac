"""Lets jobs of a served workspace in: each by a token of its attempt, which its folder holds and the ledger knows.

What lies in the folder is the job's from its start on. So it is written here and never read.
"""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InfrastructureError, PosttrainError
from posttrain.domain.records import AttemptRecord
from posttrain.store.atomic import read_json
from posttrain.store.grants import Grants
from posttrain.store.reaching import INSIDE, SOCKET, JobAccess, tell
from posttrain.workspace.served import PLACE

log = logging.getLogger("posttrain.driver")
PREFIX = "posttrain_job_"
RENEW_SECONDS = 60.0  # between two renewals
_BYTES = 32
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Granting:
    """Of one host's driver.

    Args:
        root: the workspace's folder.
        host: whose attempts it renews; None: the ledger has one host.
    """

    def __init__(self, root: Path, grants: Grants, host: str | None) -> None:
        self._root, self._grants, self._host = root, grants, host
        self._renewed = -RENEW_SECONDS
        self._told: dict[str, tuple[str, str]] = {}  # where the server is, by the folders that have it from here
        self._damaged: set[str] = set()  # folders of which that was told

    def give(self, attempt: AttemptRecord, folder: Path, *, boxed: bool = False) -> None:
        """See `control.jobs.Access.give`.

        Raises:
            InfrastructureError: the server does not say where it is.
        """
        url, certificate = self._server()
        secret = PREFIX + secrets.token_urlsafe(_BYTES)
        self._grants.add(attempt, digest_bytes(secret.encode()))
        JobAccess(url, secret, certificate, f"{INSIDE}/{SOCKET}" if boxed else "").write(folder)

    def keep(self) -> None:
        """Renew what living jobs have, where it is time, and tell them where the server is now.

        Raises:
            PosttrainError: ledger or server are away; do it again later.
        """
        if time.monotonic() - self._renewed < RENEW_SECONDS:
            return
        place = self._server()
        folders = set(self._grants.renew(self._host))
        self._renewed = time.monotonic()  # whatever lies in the folders: jobs write there
        self._damaged &= folders
        self._told = {name: told for name, told in self._told.items() if name in folders}
        for name in sorted(folders):
            if self._told.get(name) == place:
                continue
            try:
                tell(self._root / name, *place)
                self._told[name] = place
                self._damaged.discard(name)
            except (PosttrainError, OSError) as error:
                if name not in self._damaged:
                    self._damaged.add(name)
                    log.warning("a job cannot be told where the server is: %s", error)

    def _server(self) -> tuple[str, str]:
        said = read_json(self._root / PLACE)
        try:
            parts, certificate = urlsplit(str(said["url"])), str(said.get("certificate", ""))
            host = _EVERYWHERE.get(str(parts.hostname), str(parts.hostname))
            shown = f"[{host}]" if ":" in host else host
            return f"{parts.scheme}://{shown}:{parts.port}", Path(certificate).read_text() if certificate else ""
        except (TypeError, KeyError, OSError) as error:
            raise InfrastructureError(
                f"{self._root / PLACE}: does not say where the server is; it is starting"
            ) from error
