"""Requests of browsers to the console (visits), with cookies and forms, and the frame, headers and errors of pages.

The cookie of each project contains the secret of a session (`access.authenticators.session`). The token of every form
is derived from that secret, so only a page of this server can have made the form. The browser also sends the form's
origin, which must be this server.
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
from posttrain.server.authentication import Asker
from posttrain.server.console import CONSOLE
from posttrain.server.limits import whole
from posttrain.server.logs import logged_problem
from posttrain.server.operations import Server
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
    "referrer-policy": "same-origin",  # with no-referrer, browsers would send `Origin: null` with the console's forms
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
ASSETS = {"console.css": "text/css", "console.js": "text/javascript"}
_TITLES = {
    401: "Log in",
    403: "Not allowed",
    404: "Not found",
    409: "Out of date",
    422: "Invalid request",
    429: "Too many requests",
}
FIELD = "form_token"  # the field that contains the token in every form
MOST_BYTES = 64 << 10  # maximum size of a form
LOGIN = "_login"  # the name of the login form's cookie contains this instead of a project
_PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PLACE = re.compile(r"/projects/[A-Za-z0-9/_.~%?=&:+-]*")
_FORM = "application/x-www-form-urlencoded"


@functools.cache
def asset(name: str) -> tuple[bytes, str]:
    """Return the style sheet or the script of all pages, and a tag that changes with its content."""
    body = template(f"console/{name}").render().encode()
    return body, hashlib.sha256(body).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Visit:
    """A request by a logged-in principal to one project."""

    server: Server
    request: Request
    asker: Asker
    secret: str
    control: Control
    role: str | None
    form: Mapping[str, str]  # the checked form of a POST

    @property
    def project(self) -> str:
        """The name of the project."""
        return self.asker.project

    def named(self, word: str) -> str:
        """Return the value of a path parameter."""
        return str(self.request.path_params[word])

    def sending(self, fields: Mapping[str, str]) -> Visit:
        """Return the visit with the fields of a form."""
        return replace(self, form=fields)

    def may(self, needed: Role) -> bool:
        """Return whether the principal has a role; `Control` checks the role again."""
        return self.role is not None and Role(self.role).covers(needed)

    def worker(self, verb: str, sent: Mapping[str, Any]) -> bytes:
        """Carry out a verb in a worker; return the result as JSON."""
        return self.server.workers.ask(self.asker.to_json(), verb, sent, self.request.state.id)

    def drawn(self, page: str, **words: Any) -> Markup:
        """Return a part of a page that a worker renders, because rendering it computes or reads files."""
        return Markup(json.loads(self.worker(CONSOLE, {"page": page, **words})))  # the worker's template escaped it

    def page(self, name: str, /, *, live: str = "", status: int = 200, **words: Any) -> Response:
        """Return a page.

        Args:
            live: the stream that the page follows; the page is rendered again when the stream reports a change.
        """
        known = projects(self.request, secure=self.server.secure)
        return html(
            name, status, project=self.project, who=self.asker.identity.principal, role=self.role, live=live,
            projects=known, form_token=form_token(self.secret), base=f"/projects/{self.project}",
            now=self.server.workspace.ledger.clock.now(), trouble=self.server.ready(),
            approver=self.may(Role.APPROVER), submitter=self.may(Role.SUBMITTER), **words,
        )  # fmt: skip

    def goes_to(self, place: str) -> Response:
        """Return a redirect to a page of this project, which the browser requests with GET."""
        return redirect(f"/projects/{self.project}{place}")


def html(name: str, status: int = 200, /, **words: Any) -> Response:
    """Return a page of the console."""
    known = {**_NOBODY, "version": __version__, "css": asset("console.css")[1], "js": asset("console.js")[1], **words}
    body = template(f"console/{name}.html").render(**known)
    return Response(body.encode("utf-8", "replace"), status, HEADERS, "text/html; charset=utf-8")


_NOBODY: dict[str, Any] = {
    "project": "", "who": "", "role": "", "live": "", "projects": (), "form_token": "", "base": "", "trouble": "",
    "approver": False, "submitter": False,
}  # fmt: skip


def redirect(place: str) -> Response:
    """Return a redirect that the browser follows with GET."""
    return RedirectResponse(place, 303, HEADERS)


def failed(request: Request, error: Exception, visit: Visit | None) -> Response:
    """Return the page for an error; for an unexpected error, the page shows only the request's id."""
    status = 401 if isinstance(error, AuthenticationError) else None
    document = error.document if isinstance(error, Refused) else logged_problem(error, request.state.id, status=status)
    status = int(document["status"])
    words = {"title": _TITLES.get(status, "The request failed"), "detail": str(document["detail"])}
    if visit is None:
        return html("error", status, **words)
    try:
        return visit.page("error", status=status, **words)
    except PosttrainError:  # the ledger is unreachable, so the page has a frame that needs no data
        return html("error", status, **words)


def cookie(project: str, *, secure: bool) -> str:
    """Return the name of a project's cookie.

    Browsers accept a cookie whose name begins with __Host- only over TLS, from this host, and for all paths.
    """
    return f"{'__Host-' if secure else ''}posttrain-{project}"


def projects(request: Request, *, secure: bool) -> list[str]:
    """Return the projects for which this browser has a session, valid or expired."""
    prefix = cookie("", secure=secure)
    names = (name.removeprefix(prefix) for name in request.cookies if name.startswith(prefix))
    return sorted(name for name in names if name != LOGIN and _PROJECT.fullmatch(name))


def secret_of(request: Request, project: str, *, secure: bool) -> str:
    """Return the value of a project's cookie; "" if there is no cookie."""
    return request.cookies.get(cookie(project, secure=secure), "")


def asker(server: Server, secret: str, project: str) -> Asker:
    """Return the caller that a session represents, after reading the ledger.

    Raises:
        AuthenticationError: the session is not valid for this project.
    """
    try:
        identity = session.SessionAuthenticator(server.workspace.ledger).authenticate(secret)
    except AccessError as error:
        raise AuthenticationError(str(error)) from error
    if identity.scopes is None or project not in identity.scopes:
        raise AuthenticationError("the session is for another project; log in to this project")
    return Asker(identity, project)


def log_in(server: Server, token: str) -> dict[str, str]:
    """Begin a session for each project of a token; return project → secret.

    Raises:
        AuthenticationError: the token is not valid.
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
    """Return the token for a session's forms, which is derived from the session's secret but does not reveal it."""
    return hmac.new(secret.encode(), b"posttrain form", hashlib.sha256).hexdigest()


async def read_form(request: Request, secret: str, *, secure: bool) -> dict[str, str]:
    """Return the fields of a submitted form, after checking that this server issued the form in this session.

    Raises:
        InputError: the body is not a form, or is too large.
        SlowError: the form did not arrive in time.
        AccessError: the form is not from a page of this server and this session.
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
    """Reject a form that comes from a page of another site.

    Args:
        secure: whether pages are served only over TLS; if so, a page of this host without TLS is not this server's.

    Raises:
        AccessError: the form is not from a page of this server and this session.
    """
    origin, site = _origin(request.headers.get("origin", "")), request.headers.get("sec-fetch-site", "")
    here = ("https" if secure else "http", request.headers.get("host", ""))
    if origin != here or site not in ("", "same-origin"):
        raise AccessError(
            "the form must come from a page of this server; open the page again and send the form from there"
        )
    if not secret or not hmac.compare_digest(fields.get(FIELD, "").encode(), form_token(secret).encode()):
        raise AccessError("the form must be from the current session; open the page again")


def _origin(said: str) -> tuple[str, str]:
    """Return the scheme and host of an `Origin` header."""
    try:
        parts = urlsplit(said)
    except ValueError:
        return "", ""
    return parts.scheme, parts.netloc


def place(word: str) -> str:
    """Return the page to show after the login; "" if the requested page is not in the console."""
    return word if _PLACE.fullmatch(word) and "//" not in word else ""
