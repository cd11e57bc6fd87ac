"""Requests to S3 that obstore does not make: presigned URLs that fix headers, multipart uploads by id, copies of parts.

A presigned URL contains the AWS Signature Version 4 of one request, including headers that fix the bytes:
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import obstore

from posttrain.domain.errors import UnavailableError
from posttrain.store.retries import connected

XML = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_ALGORITHM = "AWS4-HMAC-SHA256"
_REGION = "us-east-1"
_ANSWER_SECONDS = 30.0
_VALID_SECONDS = 300  # of a URL that this process uses at once


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


def address(store: Any, key: str) -> str:
    """Return the URL of an object in an obstore store, without a signature."""
    return str(obstore.sign(store, "GET", key, timedelta(seconds=60))).partition("?")[0]


def ask(
    keys: Keys,
    method: str,
    url: str,
    query: Mapping[str, str],
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    seconds: float = _ANSWER_SECONDS,
) -> bytes:
    """Send one request; return the body of the answer. A missing object is not an error.

    Raises:
        UnavailableError: the store does not answer, or refuses.
    """
    place = urlsplit(signed := presigned(keys, method, url, _VALID_SECONDS, headers=headers, query=query))
    where = f"artifact store {place.scheme}://{place.netloc}"
    try:
        with closing(connected(signed, patience=_ANSWER_SECONDS, silence=seconds)) as connection:
            connection.request(method, f"{place.path}?{place.query}", body, dict(headers or {}))
            response = connection.getresponse()
            said = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"{where} does not answer: {error}; try again") from error
    if response.status not in (200, 204, 404):
        raise UnavailableError(f"{where} answers {response.status} to {method}; try again")
    return said


def compose(keys: Keys, parts: Sequence[tuple[str, str]], target: str, seconds: float) -> None:
    """Make one object of several, within the store.

    Args:
        parts: the objects as `/BUCKET/KEY`, in order, each with the copied range (`bytes=0-99`; empty: all of it). Each
            except the last has at least 5 MiB.
        target: the URL of the new object, without a signature.
        seconds: maximum duration of a request.

    Raises:
        UnavailableError: the store does not answer, or refuses; no object is made.
    """
    begun = text_of(ET.fromstring(ask(keys, "POST", target, {"uploads": ""})), "UploadId")
    try:
        listed = ""
        for number, (part, span) in enumerate(parts, 1):
            query = {"partNumber": str(number), "uploadId": begun}
            copied = {"x-amz-copy-source": quote(part), **({"x-amz-copy-source-range": span} if span else {})}
            said = ask(keys, "PUT", target, query, headers=copied, seconds=seconds)
            tag = text_of(ET.fromstring(said), "ETag")
            if not tag:
                raise UnavailableError(f"artifact store: did not copy {part}; try again")
            listed += f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        if not text_of(
            ET.fromstring(ask(keys, "POST", target, {"uploadId": begun}, body=body, seconds=seconds)), "ETag"
        ):
            raise UnavailableError(f"artifact store: did not complete the copy of {len(parts)} parts; try again")
    except BaseException:
        ask(keys, "DELETE", target, {"uploadId": begun})
        raise


def text_of(node: ET.Element, name: str) -> str:
    """Return the text of a child of an element in an answer of S3; empty without such a child."""
    return node.findtext(f"{XML}{name}") or ""
