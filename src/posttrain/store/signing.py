"""AWS Signature Version 4 of one request in its URL: with headers that bind what is sent, which obstore does not sign.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode, urlsplit

_ALGORITHM = "AWS4-HMAC-SHA256"
_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Keys:
    """Of an account at S3."""

    access: str
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)
    region: str = _REGION

    @classmethod
    def of_environment(cls) -> Keys | None:
        """Those that are named by the environment; None where they come from elsewhere (a role of the machine)."""
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
    """A URL that lets whoever has it ask this one thing, until it expires.

    Args:
        url: without a query.
        headers: that the request must have, with these values.
        query: what is asked for.
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
