"""Events over HTTP, each signed: the headers of Standard Webhooks.

The signature is HMAC-SHA256 over `ID.TIMESTAMP.BODY`, so none of the three can be changed, and a receiver detects an
old message that is sent again. A receiver answers 2xx if it has stored the event; any other answer, including a
redirect, is a failure.
"""

import base64
import hashlib
import hmac
import http.client
import os
import socket
import ssl
from binascii import Error as NotBase64
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from posttrain._version import __version__
from posttrain.domain.errors import InputError, SinkError
from posttrain.domain.sinks import Notice
from posttrain.events.ports import (
    WHOLE_SECONDS,
    Admit,
    NetworkSink,
    Patience,
    absolute,
    anywhere,
    encoded,
    reach,
    refuse_variable,
    secret,
)

PREFIX = "whsec_"  # prefix of secrets in Standard Webhooks' format, followed by base64
LEAST = 16  # minimum bytes of a secret
_READ = 4096  # maximum bytes of an answer that are read; the rest is ignored
_PORTS = {"http": 80, "https": 443}


def signature(secrets: str, ident: str, timestamp: int, body: bytes) -> str:
    """Return `v1,BASE64` for each secret, separated by spaces; during a rotation there are an old and a new secret.

    Raises:
        ValueError: a secret begins with `whsec_` and is not base64, or is too short.
    """
    signed = f"{ident}.{timestamp}.".encode() + body
    return " ".join(
        f"v1,{base64.b64encode(hmac.new(_key(one), signed, hashlib.sha256).digest()).decode()}"
        for one in secrets.split()
    )


def _key(text: str) -> bytes:
    try:
        key = base64.b64decode(text[len(PREFIX) :], validate=True) if text.startswith(PREFIX) else text.encode()
    except NotBase64 as error:
        raise ValueError(f"what follows {PREFIX} must be base64") from error
    if len(key) < LEAST:
        raise ValueError(f"must be at least {LEAST} bytes, got {len(key)} (spaces separate secrets)")
    return key


class WebhookSink(NetworkSink):
    """The `Sink` of one URL.

    Args:
        settings: `url`, or `url_env`, the name of a variable that contains the URL; `secret_env` or `secret_file`.
        now: returns the seconds since the epoch.
    """

    kind: ClassVar[str] = "webhook"
    fields = frozenset({"url", "url_env", "secret_env", "secret_file"})

    def __init__(
        self,
        settings: Mapping[str, Any],
        now: Callable[[], float],
        admit: Admit = anywhere,
        patience: float = WHOLE_SECONDS,
    ) -> None:
        super().__init__(settings, admit, patience)
        self._now = now
        self._url, self._url_env = str(settings.get("url") or ""), str(settings.get("url_env") or "")
        if bool(self._url) == bool(self._url_env):
            raise InputError(
                "webhook: must have either a URL or the name of a variable that contains the URL, not both"
            )
        if self._url:
            _parts(self._url)
        self._secret_env, self._secret_file = settings.get("secret_env"), settings.get("secret_file")
        if bool(self._secret_env) == bool(self._secret_file):
            raise InputError(
                "webhook: must have either --secret-env VAR or --secret-file PATH for the signature, not both"
            )
        refuse_variable(self._url_env, "webhook: --webhook-env")
        refuse_variable(self._secret_env, "webhook: --secret-env")
        if self._secret_file:
            absolute(str(self._secret_file), "webhook: --secret-file")

    @property
    def where(self) -> str:
        """See `Sink.where`."""
        return _shown(_parts(self._url)) if self._url else f"the URL in {self._url_env}"

    def _hand_over(self, notice: Notice, patience: Patience) -> None:
        where, parts, body, sent_at = self.where, self._place(), encoded(notice), int(self._now())
        try:
            signed = signature(secret(self._secret_env, self._secret_file, where), notice.id, sent_at, body)
        except ValueError as error:
            raise SinkError(f"{where}: the secret {error}") from error
        headers = {
            "content-type": "application/json",
            "user-agent": f"posttrain/{__version__}",
            "webhook-id": notice.id,
            "webhook-timestamp": str(sent_at),
            "webhook-signature": signed,
        }
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        with closing(_open(parts, where, self._admit, patience)) as connection:
            connection.request("POST", target, body, headers)
            answer = connection.getresponse()
            answer.read(_READ)
        if patience.over:
            raise SinkError(f"{where}: no answer within {patience.seconds:g} s")
        if 300 <= answer.status < 400:
            raise SinkError(
                f"{where}: answers {answer.status}, and redirects are not followed; use the URL to which it redirects"
            )
        if not 200 <= answer.status < 300:
            raise SinkError(f"{where}: answers {answer.status}")

    def _place(self) -> SplitResult:
        if self._url:
            return _parts(self._url)
        found = os.environ.get(self._url_env, "").strip()
        if not found:
            raise SinkError(
                f"variable {self._url_env} is not set, or is empty, in the process that delivers events; set it to the "
                "URL"
            )
        try:
            return _parts(found)
        except InputError:  # the message of the error would reveal the URL
            raise SinkError(
                f"variable {self._url_env} must contain http://HOST[:PORT]/PATH or https://…, without user and password"
            ) from None


def _parts(url: str) -> SplitResult:
    """Return a URL's parts.

    Raises:
        InputError: no request can be sent to the URL; the message contains neither the URL's query nor its user.
    """
    try:
        parts = urlsplit(url)
        proper = parts.scheme in _PORTS and bool(parts.hostname) and url.isascii() and url.isprintable()
        proper = proper and " " not in url and (parts.port is None or parts.port > 0)
    except ValueError:
        raise InputError("webhook: URL must be http://HOST[:PORT]/PATH or https://…, got a malformed URL") from None
    if parts.username is not None or parts.password is not None:
        raise InputError(
            f"webhook: URL must contain no user and password, as in {_shown(parts)}; remove them: a signature "
            "identifies the sender"
        )
    if not proper:
        raise InputError(f"webhook: URL must be http://HOST[:PORT]/PATH or https://…, got {_shown(parts)!a}")
    return parts


def _shown(parts: SplitResult) -> str:
    host = parts.hostname or ""
    place = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{place}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _open(parts: SplitResult, where: str, admit: Admit, patience: Patience) -> http.client.HTTPConnection:
    host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
    made = http.client.HTTPConnection(host, port)
    plain = reach(host, port, where, admit, patience)
    if parts.scheme == "https":
        made.default_port = _PORTS["https"]  # omits the default port from the Host header
        made.sock = _secured(plain, host)
    else:
        made.sock = plain
    return made


def _secured(plain: socket.socket, host: str) -> socket.socket:
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
