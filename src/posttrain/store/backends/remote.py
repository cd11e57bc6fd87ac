"""Any object store that obstore opens by URL: `s3://bucket/prefix`, `gs://…`, `az://…`.

Credentials come from the environment. Every request has a timeout, so an unreachable or slow store causes an error
within a minute. Large objects therefore take several requests: they are read in ranges and written in parts
(multipart), with few parts in memory. A failed upload is aborted; the upload of a killed process is aborted by
`posttrain gc` (`store.direct`).
"""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from posttrain.domain.errors import InputError
from posttrain.store.backends import Backend
from posttrain.store.external import refuse_no_endpoint
from posttrain.store.signed import Keys, address, compose

YOUNG = 3600.0  # seconds; objects younger than this are deleted only on request
PART = 8 << 20  # bytes of one request
ANSWER_SECONDS = 30.0  # maximum duration of a request
_COPIED = 16 << 20  # minimum bytes per second of a copy within a store
_COPIED_AT_ONCE = 1 << 30  # bytes; S3 copies at most 5 GiB in one request
_MOST_PARTS = 9000  # S3 accepts 10,000
_AT_ONCE = 2  # concurrent parts
_EMPTY = "416"  # the status for a range of an empty object
_RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=15)}


class Remote(Backend):
    """An object store by URL. Acknowledged writes are durable, so `settle` does nothing."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, seconds: float = ANSWER_SECONDS, checksum: str = "") -> Any:
        """Return the store.

        Args:
            seconds: maximum duration of a request.
            checksum: the algorithm of the checksum that each write states.

        Raises:
            InputError: obstore does not support the URL, or the environment has an invalid endpoint.
        """
        refuse_no_endpoint(self.url)
        try:
            config = {"checksum_algorithm": checksum} if checksum else None
            return from_url(self.url, config=config, client_options=_client(seconds), retry_config=_RETRIES)
        except Exception as error:  # obstore raises its own and built-in errors here
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(
                f"artifact store URL {self.url!r} cannot be opened: {line}; name a folder or s3://…"
            ) from error

    def touch(self, _key: str, modified: float) -> bool:
        """See `Backend.touch`. Only a write renews an object's age; a young object needs no renewal."""
        return time.time() - modified < YOUNG

    def pieces(self, store: Any, key: str) -> Iterator[bytes]:
        """See `Backend.pieces`: one request per piece."""
        try:
            first = obstore.get(store, key, options={"range": (0, PART)})
        except BaseError as error:
            if _EMPTY not in str(error) or obstore.head(store, key)["size"]:
                raise
            return
        size = int(first.meta["size"])
        yield bytes(first.bytes())
        yield from (
            bytes(obstore.get_range(store, key, start=start, end=min(size, start + PART)))
            for start in range(PART, size, PART)
        )

    def write(self, store: Any, key: str, pieces: Iterator[bytes], size: int) -> None:
        """See `Backend.write`."""
        obstore.put(store, key, pieces, chunk_size=max(PART, -(-size // _MOST_PARTS)), max_concurrency=_AT_ONCE)

    def copy(self, source: str, target: str, size: int) -> None:
        """Copy an object of `size` bytes within the store, in one request, which is answered after the copy."""
        obstore.copy(self.open(ANSWER_SECONDS + size / _COPIED), source, target)

    def compose(self, store: Any, sources: Sequence[str], target: str, size: int) -> None:
        """See `Backend.compose`: copies within the store; without S3, or its keys, through this process."""
        seconds, keys = ANSWER_SECONDS + size / _COPIED, Keys.of_environment()
        if len(sources) == 1 and size <= _COPIED_AT_ONCE:
            obstore.copy(self.open(seconds), sources[0], target)
        elif keys is not None and self.url.startswith("s3://"):
            place = urlsplit(self.url)
            prefix = f"/{place.netloc}/{place.path.strip('/')}".rstrip("/")
            parts = [(f"{prefix}/{source}", "") for source in sources]
            if len(parts) == 1:
                spans = ((at, min(size, at + _COPIED_AT_ONCE) - 1) for at in range(0, size, _COPIED_AT_ONCE))
                parts = [(parts[0][0], f"bytes={first}-{last}") for first, last in spans]
            compose(keys, parts, address(store, target), seconds)
        else:
            super().compose(store, sources, target, size)

    def checked(self) -> Any:
        """See `Backend.checked`."""
        return self.open(checksum="SHA256") if self.url.startswith("s3://") else self.open()


def _client(seconds: float) -> Any:
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on")
    return {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=seconds), "allow_http": plain}
