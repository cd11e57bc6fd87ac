"""An attempt's objects below a prefix of an object store that obstore supports: `s3://bucket/prefix`.

The store must give S3's guarantees: reads and listings show every acknowledged write, and of several PUTs with
`If-None-Match: *` one succeeds. Address and credentials come from the environment (`AWS_ENDPOINT_URL`, …).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from posttrain.domain.errors import InputError, IntegrityError, UnavailableError
from posttrain.store.atomic import most_of
from posttrain.store.external import refuse_no_endpoint

_DIGITS = 16  # digits of an object's number
_SECONDS = timedelta(seconds=30)  # maximum duration of a request, including obstore's retries
_RETRIES: Any = {"max_retries": 3, "retry_timeout": _SECONDS}


@functools.lru_cache(maxsize=256)
def object_store(url: str) -> ObjectStoreObjects:
    """Return the objects below a URL, opened once per process."""
    return ObjectStoreObjects(url)


def checked_url(url: str) -> str:
    """Return the normal form of a URL for mailboxes, after a test of its store.

    Raises:
        InputError: the URL is not an S3 URL, or contains credentials; or the store lacks conditional PUTs.
        UnavailableError: the store does not answer.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise InputError(f"mailboxes must be at s3://BUCKET/PREFIX, got {url.partition('@')[2] or url!r}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InputError(
            "mailboxes: the URL must contain no credentials; export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    place, key = ObjectStoreObjects(url), f"try-{secrets.token_hex(8)}"
    first, second = place.create(key, b"1"), place.create(key, b"2")
    place.remove(key)
    if not first or second:
        raise InputError(
            f"mailboxes {url}: the store must reject a PUT with If-None-Match: * if the object exists; use a store "
            "that does this"
        )
    return place.place


class ObjectStoreObjects:
    """`MailboxObjects` below `url`.

    Raises:
        InputError: obstore does not support the URL.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        refuse_no_endpoint(self._url)
        try:
            self._store: Any = from_url(self._url, retry_config=_RETRIES)
        except Exception as error:  # obstore raises its own and built-in errors here
            raise InputError(
                f"mailbox URL {url!r} cannot be opened: {_line(error)}; name s3://BUCKET/PREFIX"
            ) from error

    @property
    def place(self) -> str:
        """The URL."""
        return self._url

    def create(self, key: str, data: bytes) -> bool:
        """See `MailboxObjects.create`."""
        with self._translated():
            try:
                obstore.put(self._store, key, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def overwrite(self, key: str, data: bytes) -> None:
        """See `MailboxObjects.overwrite`."""
        with self._translated():
            obstore.put(self._store, key, data)

    def get(self, key: str) -> bytes | None:
        """See `MailboxObjects.get`."""
        with self._translated():
            try:
                found = obstore.get(self._store, key)
                size, most = found.meta["size"], most_of(key)
                if size <= most:
                    return bytes(found.bytes())
            except FileNotFoundError:  # obstore's NotFoundError is a FileNotFoundError
                return None
        raise IntegrityError(f"{self._url}/{key} must have at most {most} bytes, got {size}; it is damaged")

    def remove(self, key: str) -> None:
        """See `MailboxObjects.remove`."""
        with self._translated(), suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def numbers(self, folder: str) -> list[int]:
        """See `MailboxObjects.numbers`."""
        with self._translated():
            found = obstore.list_with_delimiter(self._store, folder)["objects"]
        stems = (item["path"].rpartition("/")[2].partition(".")[0] for item in found)
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < _DIGITS)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise UnavailableError(f"mailbox {self._url} does not answer: {_line(error)}; try again") from error


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
