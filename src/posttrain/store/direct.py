"""Direct transfer of large blobs between a client and an S3 store, by presigned URLs.

A URL is for one object and expires. A URL for an upload fixes the length and SHA-256 of the bytes, and names an object
that no reader uses. The server copies the received object to a key that no client can write, hashes the copy, and then
copies the copy to the blob's key. Readers therefore never get wrong bytes, even if the store does not check the signed
headers.

::

    uploads/PROJECT/HEX           the object that a client sends
    uploads/PROJECT/HEX.RANDOM    a copy that is being verified

"""

from __future__ import annotations

import base64
import secrets
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import obstore

from posttrain.domain.canonical import DIGEST_PREFIX, digest_chunks
from posttrain.domain.errors import InputError, NotFoundError, UploadError
from posttrain.store.backends.remote import Remote
from posttrain.store.blobs import answering, blob_key
from posttrain.store.signed import XML, Keys, address, ask, presigned, text_of

LARGE = 8 << 20  # bytes; blobs of at least this size are transferred directly
MOST = 5 << 30  # bytes that S3 accepts, and copies, in one request
SECONDS = 3600  # validity of a URL; a transfer must start within it, and may take longer
_UPLOADS = "uploads"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The permission for a client to send one blob to the store."""

    url: str = field(repr=False)
    headers: Mapping[str, str]  # headers that the client must send


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A multipart upload that was started and not completed."""

    key: str
    id: str
    at: float  # seconds since the epoch


def open_direct(url: str) -> Direct | None:
    """Return direct transfers with a store; None if the store does not support them, e.g. because it is a folder."""
    return Direct(url) if url.startswith("s3://") else None


class Direct:
    """Direct transfers with an S3 store.

    Raises:
        InputError: the URL is not valid.
    """

    def __init__(self, url: str) -> None:
        self._url, self._remote = url, Remote(url)
        self._store = self._remote.open()

    def download(self, digest: str) -> str:
        """Return a URL to download one blob.

        Raises:
            UnavailableError: the store's keys are not available.
        """
        with answering(self._url, digest):
            return str(obstore.sign(self._store, "GET", blob_key(digest), timedelta(seconds=SECONDS)))

    def upload(self, project: str, digest: str, size: int) -> Ticket | None:
        """Return a ticket to upload one blob to the store; None if the client must upload it through the server."""
        return self._ticket(_sent(project, digest), digest.removeprefix(DIGEST_PREFIX), size)

    def part(self, key: str, size: int) -> Ticket | None:
        """Return a ticket to write an object whose last path component is the SHA-256 of its bytes; None: no keys."""
        return self._ticket(key, key.rpartition("/")[2], size)

    def _ticket(self, key: str, hexadecimal: str, size: int) -> Ticket | None:
        keys = Keys.of_environment()
        if keys is None or not LARGE <= size <= MOST:
            return None
        checksum = base64.b64encode(bytes.fromhex(hexadecimal)).decode()
        headers = {"content-length": str(size), "x-amz-checksum-sha256": checksum}
        return Ticket(presigned(keys, "PUT", self._address(key), SECONDS, headers=headers), headers)

    def adopt(self, project: str, digest: str, size: int) -> None:
        """Store the object that a client has sent as a blob, if it has the declared size and digest.

        Raises:
            NotFoundError: no object has arrived.
            UploadError: the object has a different size or digest, and was deleted.
            UnavailableError: the store does not answer; the object is kept.
        """
        came = _sent(project, digest)
        own = f"{came}.{secrets.token_hex(16)}"
        with answering(self._url, digest):
            try:
                found = int(obstore.head(self._store, came)["size"])
            except FileNotFoundError as error:
                raise NotFoundError(f"upload {digest}: no bytes have arrived; send the bytes") from error
            if found != size:
                self._drop(came)
                raise UploadError(f"upload {digest}: must be {size} bytes, got {found}; send it again")
            self._remote.copy(came, own, size)
            try:
                actual = digest_chunks(self._remote.pieces(self._store, own))
                if actual != digest:
                    self._drop(came)
                    raise UploadError(f"upload {digest}: the received bytes have the digest {actual}; send it again")
                self._remote.copy(own, blob_key(digest), size)
                self._drop(came)
            finally:
                self._drop(own)

    def unfinished(self, before: float) -> list[Unfinished]:
        """Return the multipart uploads that were started before this moment and not completed.

        Raises:
            UnavailableError: the store does not answer.
        """
        keys = Keys.of_environment()
        return [one for one in self._multipart(keys) if one.at < before] if keys is not None else []

    def end(self, one: Unfinished) -> None:
        """Abort a multipart upload; it is not an error if the upload no longer exists."""
        keys = Keys.of_environment()
        if keys is not None:
            ask(keys, "DELETE", self._address(one.key), {"uploadId": one.id})

    def _multipart(self, keys: Keys) -> Iterator[Unfinished]:
        own = urlsplit(self._url).path.strip("/")
        bucket = self._address("x").rsplit("/", 1 + (own.count("/") + 1 if own else 0))[0]
        more = {"uploads": "", "prefix": f"{own}/" if own else ""}
        while True:
            answer = ET.fromstring(ask(keys, "GET", bucket, more))
            for one in answer.iter(f"{XML}Upload"):
                key, begun = text_of(one, "Key"), datetime.fromisoformat(text_of(one, "Initiated"))
                at = (begun if begun.tzinfo else begun.replace(tzinfo=UTC)).timestamp()
                yield Unfinished(key.removeprefix(f"{own}/" if own else ""), text_of(one, "UploadId"), at)
            if text_of(answer, "IsTruncated") != "true":
                return
            markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
            more |= {name: text_of(answer, word) for name, word in markers.items()}

    def _address(self, key: str) -> str:
        """Return the URL of an object, without a signature."""
        with answering(self._url, key):
            return address(self._store, key)

    def _drop(self, key: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)


def _sent(project: str, digest: str) -> str:
    blob_key(digest)
    if not project or "/" in project:
        raise InputError(f"project must be one word, got {project[:40]!r}")
    return f"{_UPLOADS}/{project}/{digest.removeprefix(DIGEST_PREFIX)}"
