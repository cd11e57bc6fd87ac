"""Direct transfer of large blobs between a client and an S3 store, by presigned URLs.

A URL is for one object and expires. A URL for an upload fixes the length and SHA-256 of the bytes, and names an object
that no reader uses. The server copies the received object to a key that no client can write, hashes the copy, and then
copies the copy to the blob's key. Readers therefore never get wrong bytes, even if the store does not check the signed
headers.

::

    uploads/PROJECT/HEX           the object that a client sends
    uploads/PROJECT/HEX.RANDOM    a copy that is being verified

A presigned URL contains the AWS Signature Version 4 of one request, including headers that fix the bytes; obstore does
not sign such headers: https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import secrets
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode, urlsplit

import obstore

from posttrain.domain.canonical import DIGEST_PREFIX, digest_chunks
from posttrain.domain.errors import InputError, NotFoundError, UnavailableError, UploadError
from posttrain.store.backends.remote import Remote
from posttrain.store.blobs import answering, blob_key
from posttrain.store.retries import connected

_ALGORITHM = "AWS4-HMAC-SHA256"
_REGION = "us-east-1"
LARGE = 8 << 20  # bytes; blobs of at least this size are transferred directly
MOST = 5 << 30  # bytes that S3 accepts, and copies, in one request
SECONDS = 3600  # validity of a URL; a transfer must start within it, and may take longer
_UPLOADS = "uploads"
_ANSWER_SECONDS = 30.0
_XML = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of an S3 account."""

    access: str
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)
    region: str = _REGION

    @classmethod
    def of_environment(cls) -> Keys | None:
        """Return the keys in the environment; None if the environment has none (e.g. the machine has a cloud role)."""
        given = os.environ.get
        access, secret = given("AWS_ACCESS_KEY_ID"), given("AWS_SECRET_ACCESS_KEY")
        region = given("AWS_REGION") or given("AWS_DEFAULT_REGION") or _REGION
        return cls(access, secret, given("AWS_SESSION_TOKEN") or "", region) if access and secret else None


def presigned(
    keys: Keys,
    method: str,
    url: str,
    seconds: int,
    *,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
    now: float | None = None,
) -> str:
    """Return a URL with which its holder can send this request until the URL expires.

    Args:
        url: the URL, without a query.
        headers: headers and values that the request must have.
        query: parameters of the request's query.
    """
    parts = urlsplit(url)
    at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() if now is None else now))
    scope = f"{at[:8]}/{keys.region}/s3/aws4_request"
    signed = {"host": parts.netloc, **{name.lower(): value for name, value in (headers or {}).items()}}
    names = ";".join(sorted(signed))
    asked = {
        **(query or {}),
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{keys.access}/{scope}",
        "X-Amz-Date": at,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": names,
    }
    if keys.session:
        asked["X-Amz-Security-Token"] = keys.session
    words = urlencode(sorted(asked.items()), quote_via=quote, safe="-_.~")
    lines = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
    canonical = "\n".join((method, parts.path or "/", words, lines, names, "UNSIGNED-PAYLOAD"))
    text = "\n".join((_ALGORITHM, at, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{keys.secret}".encode()
    for word in scope.split("/"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return f"{parts.scheme}://{parts.netloc}{parts.path}?{words}&X-Amz-Signature={signature}"


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
        keys = Keys.of_environment()
        if keys is None or not LARGE <= size <= MOST:
            return None
        checksum = base64.b64encode(bytes.fromhex(digest.removeprefix(DIGEST_PREFIX))).decode()
        headers = {"content-length": str(size), "x-amz-checksum-sha256": checksum}
        return Ticket(presigned(keys, "PUT", self._address(_sent(project, digest)), SECONDS, headers=headers), headers)

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
            self._ask(keys, "DELETE", self._address(one.key), {"uploadId": one.id})

    def _multipart(self, keys: Keys) -> Iterator[Unfinished]:
        own = urlsplit(self._url).path.strip("/")
        bucket = self._address("x").rsplit("/", 1 + (own.count("/") + 1 if own else 0))[0]
        more = {"uploads": "", "prefix": f"{own}/" if own else ""}
        while True:
            answer = ET.fromstring(self._ask(keys, "GET", bucket, more))
            for one in answer.iter(f"{_XML}Upload"):
                key, begun = _text(one, "Key"), datetime.fromisoformat(_text(one, "Initiated"))
                at = (begun if begun.tzinfo else begun.replace(tzinfo=UTC)).timestamp()
                yield Unfinished(key.removeprefix(f"{own}/" if own else ""), _text(one, "UploadId"), at)
            if _text(answer, "IsTruncated") != "true":
                return
            markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
            more |= {name: _text(answer, word) for name, word in markers.items()}

    def _ask(self, keys: Keys, method: str, address: str, query: Mapping[str, str]) -> bytes:
        url = presigned(keys, method, address, 300, query=query)
        try:
            with closing(connected(url, patience=_ANSWER_SECONDS, silence=_ANSWER_SECONDS)) as connection:
                connection.request(method, f"{urlsplit(url).path}?{urlsplit(url).query}")
                response = connection.getresponse()
                body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"artifact store {self._url} does not answer: {error}; try again") from error
        if response.status not in (200, 204, 404):
            raise UnavailableError(f"artifact store {self._url} answers {response.status} to {method}; try again")
        return body

    def _address(self, key: str) -> str:
        """Return the URL of an object, without a signature."""
        with answering(self._url, key):
            signed = str(obstore.sign(self._store, "GET", key, timedelta(seconds=60)))
        return signed.partition("?")[0]

    def _drop(self, key: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)


def _sent(project: str, digest: str) -> str:
    blob_key(digest)
    if not project or "/" in project:
        raise InputError(f"project must be one word, got {project[:40]!r}")
    return f"{_UPLOADS}/{project}/{digest.removeprefix(DIGEST_PREFIX)}"


def _text(node: ET.Element, name: str) -> str:
    return node.findtext(f"{_XML}{name}") or ""
