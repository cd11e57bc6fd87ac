"""The inputs of one attempt, read from its server over HTTP: a job of a server has no key to the store.

A server that is away for minutes is waited for, which the job's log says; where it is, and what lets the job in, is
read anew from the attempt's folder at each try. Standard library only.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import urlsplit

from posttrain.domain.canonical import DIGEST_PREFIX, is_digest
from posttrain.domain.errors import InfrastructureError, InputError, IntegrityError, NotFoundError, UnavailableError
from posttrain.store.access import FILE, JobAccess, read_access
from posttrain.store.atomic import write_stream

PATIENCE = 900.0  # seconds that a server may be away
_CONNECT_SECONDS = 10.0
_STALLED = 90.0  # seconds without a byte: longer than a server lets its store be silent
_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
_PIECE = 1 << 20
_SAY_AFTER = 2  # tries
_IN_MEMORY = 8 << 20
_OK, _ELSEWHERE, _MISSING = 200, 307, 404
_REFUSED = (401, 403)
_GONE = (OSError, http.client.HTTPException)


class ServedBlobs:
    """A `BlobStore` that can only be read, of what the attempt's inputs reach.

    Args:
        folder: the attempt's.
        patience: seconds that the server may be away.
    """

    url = ""

    def __init__(self, folder: Path, patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep) -> None:
        self._folder, self._patience, self._pause = folder, patience, pause
        self._direct = True

    def holding(self) -> AbstractContextManager[None]:
        """What inputs reach is kept as long as the run needs it."""
        return nullcontext()

    def put(self, data: bytes) -> str:
        """Never.

        Raises:
            InputError: a job leaves what it made in its folder.
        """
        raise InputError("a job of a server stores nothing itself: it leaves its outputs in its attempt folder")

    def put_file(self, path: Path) -> str:
        """Never: see `put`."""
        return self.put(b"")

    def get(self, digest: str) -> bytes:
        """See `BlobStore.get`."""
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            self._download(digest, file)
            file.seek(0)
            return file.read()

    def stream(self, digest: str) -> Iterator[bytes]:
        """See `BlobStore.stream`."""
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            self._download(digest, file)
            file.seek(0)
            while piece := file.read(_PIECE):
                yield piece

    def fetch(self, digest: str, path: Path) -> None:
        """See `BlobStore.fetch`."""

        def fill(file: BinaryIO) -> None:
            self._download(digest, file)

        write_stream(path, fill)

    def check(self, digest: str) -> int:
        """See `BlobStore.check`."""
        return sum(len(piece) for piece in self.stream(digest))

    def has(self, digest: str) -> bool:
        """See `BlobStore.has`."""
        try:
            self.size(digest)
        except NotFoundError:
            return False
        return True

    def size(self, digest: str) -> int:
        """See `BlobStore.size`."""

        def asked(access: JobAccess) -> int:
            with _Answer(access, "HEAD", digest) as answer:
                return int(answer.headers.get("content-length") or 0)

        return int(self._again(digest, asked))

    def _download(self, digest: str, file: IO[bytes]) -> None:
        def asked(access: JobAccess) -> None:
            file.seek(0)
            file.truncate()
            state, size = hashlib.sha256(), 0
            with _Answer(access, "GET", digest, direct=self._direct) as answer:
                while piece := answer.read(_PIECE):
                    state.update(piece)
                    size += len(piece)
                    file.write(piece)
            if answer.length:
                raise ConnectionError("its answer broke off")
            if DIGEST_PREFIX + state.hexdigest() != digest:
                self._direct = False  # what lies between may be at fault: once more, through the server
                raise IntegrityError(
                    f"blob {digest} is corrupt: bytes hash to {DIGEST_PREFIX}{state.hexdigest()}; restore it from a "
                    "copy or run its stage again"
                )

        try:
            self._again(digest, asked)
        except IntegrityError:
            self._again(digest, asked)

    def _again(self, digest: str, ask: Callable[[JobAccess], Any]) -> Any:
        """What the server answers, once it does.

        Raises:
            NotFoundError: the attempt's inputs do not reach that.
            UnavailableError: the server was away for longer than a job waits.
            InfrastructureError: the attempt is over.
        """
        if not is_digest(digest):
            raise IntegrityError(f"a digest must be sha256: and 64 hex digits, got {digest!r}")
        until, tried = time.monotonic() + self._patience, 0
        while True:
            access = read_access(self._folder)
            if access is None:
                raise InfrastructureError(f"{self._folder / FILE}: is gone; the attempt has no access any more")
            try:
                return ask(access)
            except (*_GONE, UnavailableError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
                self._direct = False
            if time.monotonic() >= until:
                raise UnavailableError(f"server {access.url} was away for {self._patience:g} s ({why}); try again")
            if tried == _SAY_AFTER:
                print(f"server {access.url} does not answer ({why}); waiting for it", file=sys.stderr, flush=True)
            self._pause(_PAUSES[min(tried, len(_PAUSES) - 1)])
            tried += 1


class _Answer:
    """The answer to one request, followed to the store where the server says so; no token goes there."""

    def __init__(self, access: JobAccess, method: str, digest: str, *, direct: bool = False) -> None:
        base = urlsplit(access.url)
        context = _pinned(access.certificate) if base.scheme == "https" else None
        self._connection = _connection(access.url, context)
        try:
            path = f"/v1/attempt/blobs/{digest}{'?direct=yes' if direct else ''}"
            headers = {"authorization": f"Bearer {access.token}"}
            self._connection.request(method, base.path.rstrip("/") + path, headers=headers)
            self._response = self._connection.getresponse()
            if self._response.status == _ELSEWHERE:
                self._follow(str(self._response.headers.get("location")))
            status = self._response.status
            if status == _MISSING:
                raise NotFoundError(
                    f"blob {digest} is no input of this attempt, or not in the store; run the stage again"
                )
            if status in _REFUSED:
                raise InfrastructureError("the server refuses this attempt: it has ended, or another one took over")
            if status != _OK:
                raise UnavailableError(f"status {status}")
        except BaseException:
            self._connection.close()
            raise

    def _follow(self, url: str) -> None:
        self._connection.close()
        parts = urlsplit(url)
        self._connection = _connection(url, ssl.create_default_context() if parts.scheme == "https" else None)
        self._connection.request("GET", f"{parts.path}?{parts.query}")
        self._response = self._connection.getresponse()
        if self._response.status != _OK:
            raise UnavailableError(f"the store answers {self._response.status}")

    @property
    def headers(self) -> Any:
        return self._response.headers

    @property
    def length(self) -> int | None:
        """Bytes that did not come."""
        return self._response.length

    def read(self, size: int) -> bytes:
        return self._response.read(size)

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _connection(url: str, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port
    made: http.client.HTTPConnection
    if context is None:
        made = http.client.HTTPConnection(host, port, timeout=_CONNECT_SECONDS)
    else:
        made = http.client.HTTPSConnection(host, port, timeout=_CONNECT_SECONDS, context=context)
    made.connect()
    made.sock.settimeout(_STALLED)
    return made


def _pinned(certificate: str) -> ssl.SSLContext:
    """Believes this one certificate, whatever name it is for: the server is asked by the address of this host."""
    made = ssl.create_default_context(cadata=certificate or None)
    made.check_hostname = False
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return made
