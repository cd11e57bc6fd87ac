"""The inputs of one attempt, read over HTTP from its server, because a job that a server launched has no store key.

A job waits minutes for an unreachable server, and its log records the wait. Each try reads the server's address and the
job's token again from the attempt's folder. The module uses only the standard library.
"""

import hashlib
import http.client
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import urlsplit

from posttrain.domain.canonical import DIGEST_PREFIX, is_digest
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, UnavailableError
from posttrain.store.atomic import write_stream
from posttrain.store.retries import PATIENCE, REFUSED, JobAccess, Reach, connected, reached, refusal

_PIECE = 1 << 20
_IN_MEMORY = 8 << 20
_OK, _ELSEWHERE, _MISSING = 200, 307, 404
T = TypeVar("T")


class ServedBlobs:
    """A read-only `BlobStore` of the blobs of an attempt's inputs.

    Args:
        folder: the attempt's folder.
        patience: seconds that the server may be unreachable.
    """

    url = ""

    def __init__(self, folder: Path, patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep) -> None:
        self._reach = Reach(folder, patience, pause)
        self._direct = True

    def holding(self) -> AbstractContextManager[None]:
        """Hold no lock, because `gc` deletes no input of a live run."""
        return nullcontext()

    def put(self, data: bytes) -> str:
        """Raise: this store is read-only.

        Raises:
            InputError: always; a job leaves its outputs in its folder.
        """
        raise InputError("a job of a server stores nothing itself: it leaves its outputs in its attempt folder")

    def put_file(self, path: Path) -> str:
        """Raise: see `put`."""
        return self.put(b"")

    def get(self, digest: str) -> bytes:
        """See `BlobStore.get`."""
        return b"".join(self.stream(digest))

    def stream(self, digest: str) -> Iterator[bytes]:
        """See `BlobStore.stream`."""
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            self._download(digest, file)
            file.seek(0)
            while piece := file.read(_PIECE):
                yield piece

    def fetch(self, digest: str, path: Path) -> None:
        """See `BlobStore.fetch`."""
        write_stream(path, lambda file: self._download(digest, file))

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
            with _answer(access, "HEAD", digest) as answer:
                return int(answer.headers.get("content-length") or 0)

        return int(self._again(digest, asked))

    def _download(self, digest: str, file: IO[bytes]) -> None:
        def asked(access: JobAccess) -> None:
            file.seek(0)
            file.truncate()
            state = hashlib.sha256()
            with _answer(access, "GET", digest, direct=self._direct) as answer:
                while piece := answer.read(_PIECE):
                    state.update(piece)
                    file.write(piece)
            if answer.length:
                raise ConnectionError("its answer ended early")
            if DIGEST_PREFIX + state.hexdigest() != digest:
                self._direct = False  # a proxy may be at fault: retry through the server
                raise IntegrityError(
                    f"blob {digest} is corrupt: bytes hash to {DIGEST_PREFIX}{state.hexdigest()}; restore it from a "
                    "copy or run its stage again"
                )

        try:
            self._again(digest, asked)
        except IntegrityError:
            self._again(digest, asked)

    def _again(self, digest: str, ask: Callable[[JobAccess], T]) -> T:
        """Call `ask` until the server answers, and return the answer.

        Raises:
            NotFoundError: the blob is not part of the attempt's inputs.
            UnavailableError, InfrastructureError: see `Reach.again`.
        """
        if not is_digest(digest):
            raise IntegrityError(f"a digest must be `sha256:` followed by 64 hex digits, got {digest!r}")
        return self._reach.again(ask, self._leave_direct)

    def _leave_direct(self) -> None:
        self._direct = False


@contextmanager
def _answer(access: JobAccess, method: str, digest: str, *, direct: bool = False) -> Iterator[http.client.HTTPResponse]:
    """Yield the answer to one request; follow a redirect to the store, without sending the token."""
    with ExitStack() as held:
        connection = held.enter_context(closing(reached(access)))
        path = f"/v1/attempt/blobs/{digest}{'?direct=yes' if direct and not access.socket else ''}"
        headers = {"authorization": f"Bearer {access.token}"}
        connection.request(method, urlsplit(access.url).path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        if response.status == _ELSEWHERE:
            held.close()
            url = str(response.headers.get("location"))
            connection = held.enter_context(closing(connected(url)))
            connection.request("GET", f"{urlsplit(url).path}?{urlsplit(url).query}")
            response = connection.getresponse()
            if response.status != _OK:
                raise UnavailableError(f"the store answers {response.status}")
        if response.status == _MISSING:
            raise NotFoundError(
                f"blob {digest} is not an input of this attempt, or is not in the store; run the stage again"
            )
        if response.status in REFUSED:
            raise refusal()
        if response.status != _OK:
            raise UnavailableError(f"status {response.status}")
        yield response
