"""Who sits at a browser: cookies, forms, and where a form may come from.

A cookie of each project has the secret of a session (`access.authenticators.session`). What every form carries follows
from that secret, so that only a page of this server can have made it; a browser says besides where a form comes from.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

from posttrain.access.authenticators import session
from posttrain.access.authenticators.token import TokenAuthenticator
from posttrain.domain.errors import AccessError, AuthenticationError, InputError
from posttrain.server.entrance import Asker
from posttrain.server.requests import whole

if TYPE_CHECKING:
    from posttrain.server.app import Server

FIELD = "form_token"  # of every form
MOST_BYTES = 64 << 10  # of a form
LOGIN = "_login"  # in the place of a project: the cookie of the form that logs in
_NAME = "posttrain-"
_HOST = "__Host-"  # browsers take such a cookie over TLS only, from this host alone, for all paths
_PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PLACE = re.compile(r"/projects/[A-Za-z0-9/_.~%?=&:+-]*")
_FORM = "application/x-www-form-urlencoded"


def cookie(project: str, *, secure: bool) -> str:
    """The name of a project's cookie."""
    return f"{_HOST if secure else ''}{_NAME}{project}"


def projects(request: Request, *, secure: bool) -> list[str]:
    """Projects that this browser has a session of, good or over."""
    prefix = cookie("", secure=secure)
    names = (name.removeprefix(prefix) for name in request.cookies if name.startswith(prefix))
    return sorted(name for name in names if name != LOGIN and _PROJECT.fullmatch(name))


def secret_of(request: Request, project: str, *, secure: bool) -> str:
    """What the cookie of a project says; empty: there is none."""
    return request.cookies.get(cookie(project, secure=secure), "")


def asker(server: Server, secret: str, project: str) -> Asker:
    """Who sits there. It reads the ledger.

    Raises:
        AuthenticationError: nobody who is logged in to this project.
    """
    try:
        identity = session.SessionAuthenticator(server.workspace.ledger).authenticate(secret)
    except AccessError as error:
        raise AuthenticationError(str(error)) from error
    if identity.scopes is None or project not in identity.scopes:
        raise AuthenticationError("the session is of another project; log in to this one")
    return Asker(identity, project)


def log_in(server: Server, token: str) -> dict[str, str]:
    """Project → secret of a new session, of each that a token is for.

    Raises:
        AuthenticationError: the token is good for nothing.
    """
    ledger = server.workspace.ledger
    try:
        found = TokenAuthenticator(ledger).authenticate(token)
        return {project: session.begin(ledger, token) for project in found.scopes or ()}
    except AccessError as error:
        raise AuthenticationError(str(error)) from error


def log_out(server: Server, secret: str) -> None:
    """End a session."""
    session.end(server.workspace.ledger, secret)


def form_token(secret: str) -> str:
    """What forms of a session carry: it follows from the session's secret, and does not tell it."""
    return hmac.new(secret.encode(), b"posttrain form", hashlib.sha256).hexdigest()


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form.

    Raises:
        InputError: it is no form, or too large. SlowError: it did not come in time.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _FORM:
        raise InputError(f"a form must be sent as {_FORM}, got {kind[:80]!a}")
    body = await whole(request, MOST_BYTES, "a form")
    try:
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=50, errors="strict"))
    except ValueError as error:
        raise InputError("a form must be text in UTF-8 of at most 50 fields") from error
    if any("\0" in value for value in fields.values()):
        raise InputError("a form must be text, got a NUL character in it")
    return fields


def refuse_foreign(request: Request, fields: Mapping[str, str], secret: str, *, secure: bool) -> None:
    """Let nothing happen that another site's page asks for.

    Args:
        secure: pages come over TLS alone, so one of this host that did not is not this server's.

    Raises:
        AccessError: the form is not from a page of this server and this session.
    """
    origin, site = _origin(request.headers.get("origin", "")), request.headers.get("sec-fetch-site", "")
    here = ("https" if secure else "http", request.headers.get("host", ""))
    if origin != here or site not in ("", "same-origin"):
        raise AccessError("the form must come from a page of this server; open the page again, and send it from there")
    given = fields.get(FIELD, "")
    if not secret or not hmac.compare_digest(given.encode(), form_token(secret).encode()):
        raise AccessError("the form must be of the session that you are logged in to; open the page again")


def _origin(said: str) -> tuple[str, str]:
    """Scheme and host."""
    try:
        parts = urlsplit(said)
    except ValueError:
        return "", ""
    return parts.scheme, parts.netloc


def place(word: str) -> str:
    """Where to go after logging in: a page of the console; empty: what was asked for is none."""
    return word if _PLACE.fullmatch(word) and "//" not in word else ""
