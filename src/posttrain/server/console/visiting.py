"""Visits of browsers to the console: one request, its cookie and form, and the frame, headers and errors of pages.

A cookie of each project has the secret of a session (`access.authenticators.session`). The token of every form follows
from that secret, so that only a page of this server can have made the form. The browser also sends the origin of the
form, which must be this server.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from posttrain._version import __version__
from posttrain.access.authenticators import session
from posttrain.access.authenticators.token import TokenAuthenticator
from posttrain.api.control import Control
from posttrain.domain.errors import AccessError, AuthenticationError, InputError, PosttrainError
from posttrain.domain.ids import Role
from posttrain.server.console import CONSOLE
from posttrain.server.entrance import Asker
from posttrain.server.limits import whole
from posttrain.server.logs import logged_problem
from posttrain.server.underway import Server
from posttrain.server.workers import Refused
from posttrain.web.pages import template

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer browsers say `Origin: null` of our own forms
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
ASSETS = {"console.css": "text/css", "console.js": "text/javascript"}
_TITLES = {
    401: "Log in",
    403: "Not yours to do",
    404: "Not found",
    409: "Not any more",
    422: "That cannot be",
    429: "Too much at once",
}
FIELD = "form_token"  # of every form
MOST_BYTES = 64 << 10  # of a form
LOGIN = "_login"  # in the place of a project: the cookie of the form that logs in
_PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PLACE = re.compile(r"/projects/[A-Za-z0-9/_.~%?=&:+-]*")
_FORM = "application/x-www-form-urlencoded"


@functools.cache
def asset(name: str) -> tuple[bytes, str]:
    """The style or the script of all pages, and by which word a browser knows that it is another one."""
    body = template(f"console/{name}").render().encode()
    return body, hashlib.sha256(body).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Visit:
    """Somebody who is logged in asks for something of one project."""

    server: Server
    request: Request
    asker: Asker
    secret: str
    control: Control
    role: str | None
    form: Mapping[str, str]  # of a POST; checked

    @property
    def project(self) -> str:
        """The project."""
        return self.asker.project

    def named(self, word: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[word])

    def sending(self, fields: Mapping[str, str]) -> Visit:
        """With the fields of a form."""
        return replace(self, form=fields)

    def may(self, needed: Role) -> bool:
        """Whether they have a role; `Control` asks again."""
        return self.role is not None and Role(self.role).covers(needed)

    def worker(self, verb: str, sent: Mapping[str, Any]) -> bytes:
        """What a worker answers."""
        return self.server.workers.ask(self.asker.to_json(), verb, sent, self.request.state.id)

    def drawn(self, page: str, **words: Any) -> Markup:
        """A part of a page that a worker draws, since it computes or reads files."""
        return Markup(json.loads(self.worker(CONSOLE, {"page": page, **words})))  # drawn by a template, which escapes

    def page(self, name: str, /, *, live: str = "", status: int = 200, **words: Any) -> Response:
        """A page.

        Args:
            live: what to follow, so that the page is drawn anew when it changes.
        """
        known = projects(self.request, secure=self.server.secure)
        return html(
            name, status, project=self.project, who=self.asker.identity.principal, role=self.role, live=live,
            projects=known, form_token=form_token(self.secret), base=f"/projects/{self.project}",
            now=self.server.workspace.ledger.clock.now(), trouble=self.server.ready(),
            approver=self.may(Role.APPROVER), submitter=self.may(Role.SUBMITTER), **words,
        )  # fmt: skip

    def goes_to(self, place: str) -> Response:
        """To a page of this project, by GET."""
        return redirect(f"/projects/{self.project}{place}")


def html(name: str, status: int = 200, /, **words: Any) -> Response:
    """A page of the console."""
    known = {**_NOBODY, "version": __version__, "css": asset("console.css")[1], "js": asset("console.js")[1], **words}
    body = template(f"console/{name}.html").render(**known)
    return Response(body.encode("utf-8", "replace"), status, HEADERS, "text/html; charset=utf-8")


_NOBODY: dict[str, Any] = {
    "project": "", "who": "", "role": "", "live": "", "projects": (), "form_token": "", "base": "", "trouble": "",
    "approver": False, "submitter": False,
}  # fmt: skip


def redirect(place: str) -> Response:
    """By GET."""
    return RedirectResponse(place, 303, HEADERS)


def failed(request: Request, error: Exception, visit: Visit | None) -> Response:
    """The page of an error. One that nobody meant to raise tells its request's id and nothing else."""
    status = 401 if isinstance(error, AuthenticationError) else None
    document = error.document if isinstance(error, Refused) else logged_problem(error, request.state.id, status=status)
    status = int(document["status"])
    words = {"title": _TITLES.get(status, "That did not work"), "detail": str(document["detail"])}
    if visit is None:
        return html("error", status, **words)
    try:
        return visit.page("error", status=status, **words)
    except PosttrainError:  # the ledger is away: the frame asks for nothing
        return html("error", status, **words)


def cookie(project: str, *, secure: bool) -> str:
    """The name of a project's cookie. Browsers take one that begins with __Host- over TLS only, from this host alone,
    for all paths.
    """
    return f"{'__Host-' if secure else ''}posttrain-{project}"


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


async def read_form(request: Request, secret: str, *, secure: bool) -> dict[str, str]:
    """The fields of a form of this server and of the session of a secret.

    Raises:
        InputError: it is no form, or too large. SlowError: it did not come in time. AccessError: as `refuse_foreign`.
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
    refuse_foreign(request, fields, secret, secure=secure)
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
    if not secret or not hmac.compare_digest(fields.get(FIELD, "").encode(), form_token(secret).encode()):
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
