"""One request of a browser, and how every page of the console is sent: its frame, its headers, its errors."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from posttrain._version import __version__
from posttrain.domain.errors import AuthenticationError, PosttrainError
from posttrain.domain.principals import Role
from posttrain.server.console import CONSOLE, sessions
from posttrain.server.logs import logged_problem
from posttrain.server.workers import Refused
from posttrain.web.pages import template

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.server.app import Server
    from posttrain.server.entrance import Asker

log = logging.getLogger("posttrain.server")
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
_SEE_OTHER = 303
_TITLES = {
    401: "Log in",
    403: "Not yours to do",
    404: "Not found",
    409: "Not any more",
    422: "That cannot be",
    429: "Too much at once",
}


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
        known = sessions.projects(self.request, secure=self.server.secure)
        return html(
            name, status, project=self.project, who=self.asker.identity.principal, role=self.role, live=live,
            projects=known, form_token=sessions.form_token(self.secret), base=f"/projects/{self.project}",
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
    return RedirectResponse(place, _SEE_OTHER, HEADERS)


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
