"""An attempt's objects, accessed through the attempt's server, because a job that a server launched has no store key.

Requests wait for an unreachable server, except the request that writes the summary: the summary is written again with
the next segment.
"""

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

from posttrain.domain.errors import InfrastructureError, InputError, UnavailableError
from posttrain.store.retries import PATIENCE, REFUSED, JobAccess, KeptConnection, Reach, reached, refusal

_PATH = "/v1/attempt/channel"
_OK, _MISSING, _THERE = (200, 201, 204), 404, 409
TOO_MUCH = 413  # HTTP status: the attempt has written its maximum


class ServedObjects:
    """`MailboxObjects` of the attempt with this folder.

    Args:
        patience: seconds that the server may be unreachable.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep) -> None:
        self._reach, self._kept = Reach(folder, patience, pause), KeptConnection()

    @property
    def place(self) -> str:
        """The mailbox, named by its attempt's folder."""
        return f"the mailbox of {self._reach.folder}"

    def create(self, key: str, data: bytes) -> bool:
        """See `MailboxObjects.create`."""
        return self._ask("PUT", key, data, {"if-none-match": "*"})[0] != _THERE

    def overwrite(self, key: str, data: bytes) -> None:
        """See `MailboxObjects.overwrite`."""
        self._ask("PUT", key, data, once=True)

    def get(self, key: str) -> bytes | None:
        """See `MailboxObjects.get`."""
        status, found = self._ask("GET", key)
        return None if status == _MISSING else found

    def remove(self, key: str) -> None:
        """See `MailboxObjects.remove`."""
        self._ask("DELETE", key)

    def numbers(self, folder: str) -> list[int]:
        """See `MailboxObjects.numbers`."""
        status, found = self._ask("GET", f"{folder}/")
        return [] if status == _MISSING else [int(number) for number in json.loads(found)]

    def _ask(
        self,
        method: str,
        key: str,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        once: bool = False,
    ) -> tuple[int, bytes]:
        def exchanged(access: JobAccess) -> tuple[int, bytes]:
            path = f"{urlsplit(access.url).path.rstrip('/')}{_PATH}/{quote(key)}"
            try:
                connection = self._kept.to(access, reached)
                connection.request(method, path, data, {"authorization": f"Bearer {access.token}", **(headers or {})})
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException):
                self._kept.drop()
                raise

        def asked(access: JobAccess) -> tuple[int, bytes]:
            idle = self._kept.made is not None
            try:
                status, body = exchanged(access)
            except (OSError, http.client.HTTPException):
                if not idle:
                    raise
                status, body = exchanged(access)  # a server closes idle connections
            if status in REFUSED:
                raise refusal()
            if status == TOO_MUCH:
                raise InputError(
                    f"{key}: the attempt has written more to its mailbox than its server allows; report fewer or "
                    "smaller values"
                )
            if status not in (*_OK, _MISSING, _THERE):
                raise UnavailableError(f"status {status}")
            return status, body

        try:
            return self._reach.again(asked, once=once)
        except UnavailableError as error:
            raise InfrastructureError(f"mailbox: {error}") from error
