"""Paths of the console, the handling of its requests, and streams that notify browsers of changed pages.

The server checks the session and the form of a request, and then returns the page:

::

    GET  page  ──▶ cookie ─▶ session ─▶ token ─▶ role ─▶ page           (else: /login)
    POST form  ──▶ the same, and Origin, and the form's own token ─▶ verb ─▶ GET of the page

A page follows changes through a stream: the stream notifies the browser that the page has changed, and the browser
requests the page again. A notification has no content, so the stream contains nothing that would have to be escaped.
Many viewers of the same page cost the same as one viewer.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response

from posttrain.api.control import Control
from posttrain.domain.errors import AuthenticationError, BusyError, InputError, NotFoundError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.server.console import pages, visits
from posttrain.server.console.visits import ASSETS, HEADERS, Visit, asset, failed, html, redirect
from posttrain.server.limits import FOLLOW, HEAVY, LOGIN, LOOK, READ, in_thread
from posttrain.server.operations import Server
from posttrain.server.streams import Followed, is_ending

if TYPE_CHECKING:
    from posttrain.api.values import RunSummary

MOST = 200  # maximum number of concurrent followers; other browsers poll
_EVERY = 1.0  # seconds between two checks for changes
_AGAIN = 5.0  # seconds between two checks of the follower's permission
_SILENT = 15.0  # seconds after which a comment keeps the connection open
_STREAM_SECONDS = 900.0  # seconds after which a stream ends; the browser then opens another
_KEPT = 256  # maximum number of cached marks
_RUN = "run/"
PROJECT = "/projects/{project}"
_Page = Callable[[Visit], Response]
_READ: dict[str, _Page] = {
    "": pages.home,
    "/runs": pages.run_list,
    "/runs/{run}": pages.run,
    "/runs-table": pages.run_table,
    "/channels": pages.channels,
    "/approvals": pages.approvals,
}
_HEAVY: dict[str, _Page] = {  # pages to which a worker contributes
    "/runs/{run}/report": pages.report,
    "/runs/{run}/card": pages.card,
    "/runs/{run}/log": pages.log,
    "/compare": pages.compare,
    "/audit": pages.audit,
    "/channels/{channel}": pages.channel,
    "/channels/{channel}/rollback": pages.confirm_rollback,
    "/channels/{channel}/chat": pages.chat,
}
_FORMS: dict[str, _Page] = {
    "/runs/{run}/notes": pages.note,
    "/runs/{run}/stop": pages.stop,
    "/runs/{run}/retry": pages.retry,
    "/channels/{channel}/rollback": pages.roll_back,
    "/channels/{channel}/approvals": pages.decide,
}
_NOT_MODIFIED_SECONDS = 3600
_LONGEST = 1000  # maximum characters of a name


class Live:
    """Hashes of the state of pages, called marks, which all followers share."""

    def __init__(self) -> None:
        self._marks: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()
        self.followers = 0

    def mark(self, visit: Visit, of: str) -> str:
        """Return a hash of the current state of a page.

        Raises:
            InputError: there is no such page.
        """
        does = _LOOKS.get(of.partition("/")[0])
        if does is None:
            raise InputError(f"live: of must be runs, run/ID, channels, approvals or channel/NAME, got {of[:80]!a}")
        key = visit.project, of
        with self._lock:
            at, known = self._marks.get(key, (-_EVERY, ""))
        if time.monotonic() - at < _EVERY / 2:
            return known
        found = hashlib.sha256(repr(does(visit.control, of.partition("/")[2])).encode("utf-8", "replace")).hexdigest()
        with self._lock:
            self._marks[key] = time.monotonic(), found
            self._marks.move_to_end(key)
            while len(self._marks) > _KEPT:
                self._marks.popitem(last=False)
        return found

    async def follow(self, request: Request, enter: Callable[[Request], Visit]) -> Response:
        """Return a stream of `changed` events for a page."""
        of = request.query_params.get("of", "")
        visit = await in_thread(READ, enter, request)
        if of.startswith(_RUN) and (found := await _elsewhere(visit, of.removeprefix(_RUN))):
            return found
        told = await in_thread(READ, self.mark, visit, of)
        if self.followers >= MOST:
            raise BusyError("too many open pages follow this server; reload the page instead")
        counted = visit.server.limits.taken(visit.asker.identity.principal, FOLLOW)
        stream = Followed(self._told(request, enter, visit, of, told), counted)
        stream.headers.update(HEADERS)
        return stream

    async def _told(
        self, request: Request, enter: Callable[[Request], Visit], visit: Visit, of: str, told: str
    ) -> AsyncIterator[bytes]:
        self.followers += 1
        begun = asked = said = time.monotonic()
        try:
            yield b": following\n\n"
            while not (await request.is_disconnected() or is_ending(request)):
                await asyncio.sleep(_EVERY)
                now = time.monotonic()
                if now - begun > _STREAM_SECONDS:
                    return
                if now - asked >= _AGAIN:
                    visit, asked = await in_thread(READ, enter, request), now
                mark = await in_thread(READ, self.mark, visit, of)
                if mark != told:
                    told, said = mark, now
                    yield b"event: changed\ndata: {}\n\n"
                elif now - said >= _SILENT:
                    said = now
                    yield b": still here\n\n"
        except PosttrainError:  # the stream ends, and the browser requests the page, which shows the reason
            yield b"event: changed\ndata: {}\n\n"
        finally:
            self.followers -= 1


def _brief(one: RunSummary) -> Any:
    return one.id, one.state, one.message, one.under_way, one.tokens, str(one.driver), one.tags


def _run(control: Control, run_id: str) -> Any:
    status = control.watcher(run_id).read()
    stages = [
        (one.record.generation, one.record.state, one.reason, one.progress.step, one.progress.at, len(one.attempts))
        for one in status.stages
    ]
    over = is_final("run", status.run.state)
    said = status.why, status.under_way, status.tokens, str(status.driver)
    return status.run.generation, over, said, stages, status.signals, status.approvals, status.notes


# each function queries only data that every member may see, so a cached mark needs no further check
_LOOKS: dict[str, Callable[[Control, str], Any]] = {
    "runs": lambda control, _: [_brief(one) for one in (*control.queue(pages.PAGE), *control.ls(pages.PAGE))],
    "run": _run,
    "channels": lambda control, _: (control.channels(), control.live()),
    "approvals": lambda control, _: [control.approval_requests(one) for one in pages.guarded(control)],
    "channel": lambda control, name: (control.channel(name), control.approval_requests(name)),
}


def add_routes(app: FastAPI, server: Server) -> None:
    """Add the routes of the console."""
    for name in ASSETS:
        app.add_route(f"/{name}", partial(_asset, name), methods=["GET"])
    for path, method, answer in (
        ("/", "GET", _first),
        ("/login", "GET", _login_page),
        ("/login", "POST", _log_in),
        (PROJECT + "/logout", "POST", _log_out),
        (PROJECT + "/live", "GET", partial(_live, Live())),
    ):
        app.add_route(path, partial(answer, server), methods=[method])
    for lane, known in ((LOOK, _READ), (HEAVY, _HEAVY)):
        for path, page in known.items():
            app.add_route(PROJECT + path, _shown(server, page, lane), methods=["GET"])
    for path, page in _FORMS.items():
        app.add_route(PROJECT + path, _done(server, page), methods=["POST"])
    app.add_route(PROJECT + "/channels/{channel}/chat", pages.answering(server, _enter), methods=["POST"])
    app.add_route("/projects/{rest:path}", _nothing, methods=["GET", "POST"])


def _enter(server: Server, request: Request) -> Visit:
    """Return the visit for a request, in the project of the path. Call this in a thread, because it reads the ledger.

    Raises:
        AuthenticationError: there is no valid session for the project.
        NotFoundError: the path is not valid.
    """
    project = request.path_params["project"]
    secret = visits.secret_of(request, project, secure=server.secure)
    if not secret:
        raise AuthenticationError("log in to this project")
    who = visits.asker(server, secret, project)
    request.state.asker, request.state.principal = who, server.authentication.known_as(who)
    words = [*request.path_params.values(), *(word for _, word in request.query_params.multi_items())]
    if any(not word.isprintable() or "\ufffd" in word or len(word) > _LONGEST for word in words):
        raise NotFoundError("there is no page with this name")
    control = server.authentication.control(who, request.state.id)
    return Visit(server, request, who, secret, control, control.whoami().role, {})


def _shown(server: Server, page: _Page, lane: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        visit = None
        try:
            visit = await in_thread(READ, _enter, server, request)
            run_id = request.path_params.get("run")
            if run_id is not None and (elsewhere := await _elsewhere(visit, run_id, computes=True)):
                return elsewhere
            async with server.limits.taken(visit.asker.identity.principal, lane):
                return await in_thread(lane, page, visit)
        except AuthenticationError:
            return _to_login(request)
        except Exception as error:
            return await in_thread(READ, failed, request, error, visit)

    return answer


async def _elsewhere(visit: Visit, run_id: str, *, computes: bool = False) -> Response | None:
    """Return the response of the server on the host with a run's jobs, or None if this server must respond."""
    server, who = visit.server, visit.asker
    found = await server.peers.answer(
        visit.request, lambda: server.authentication.ledger(who), run_id, who.identity, computes=computes
    )
    if found is not None:
        found.headers.update(HEADERS)
    return found


def _done(server: Server, page: _Page) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        visit = None
        try:
            visit = await in_thread(READ, _enter, server, request)
            fields = await visits.read_form(request, visit.secret, secure=server.secure)
            async with server.limits.taken(visit.asker.identity.principal, HEAVY):
                return await in_thread(HEAVY, page, visit.sending(fields))
        except Exception as error:
            return await in_thread(READ, failed, request, error, visit)

    return answer


def _to_login(request: Request) -> Response:
    known = visits.place(request.url.path + (f"?{request.url.query}" if request.url.query else ""))
    return redirect(f"/login?next={quote(known, safe='')}" if known else "/login")


async def _first(server: Server, request: Request) -> Response:
    """Redirect to the first project to which this browser is logged in."""
    return redirect(await in_thread(READ, _home, server, request))


def _home(server: Server, request: Request) -> str:
    for project in visits.projects(request, secure=server.secure):
        secret = visits.secret_of(request, project, secure=server.secure)
        with suppress(AuthenticationError):
            visits.asker(server, secret, project)
            return f"/projects/{project}/runs"
    return "/login"


async def _login_page(server: Server, request: Request) -> Response:
    return _login(server, request, "")


def _login(server: Server, request: Request, wrong: str, status: int = 200) -> Response:
    secret = visits.secret_of(request, visits.LOGIN, secure=server.secure)
    made = secret or server.workspace.ledger.entropy(32).hex()
    wanted = visits.place(request.query_params.get("next", ""))
    answer = html("login", status, form_token=visits.form_token(made), wanted=wanted, wrong=wrong)
    if not secret:
        _keep(server, answer, visits.LOGIN, made)
    return answer


async def _log_in(server: Server, request: Request) -> Response:
    try:
        secret = visits.secret_of(request, visits.LOGIN, secure=server.secure)
        fields = await visits.read_form(request, secret, secure=server.secure)
        where = f"address {request.client.host if request.client else ''}"
        async with server.limits.taken(where, LOGIN):  # few threads, so guesses do not block other users
            found = await in_thread(READ, visits.log_in, server, fields.get("token", "").strip())
        if not found:
            raise InputError("the token is for no project")
    except AuthenticationError as error:
        return _login(server, request, str(error), 401)
    except Exception as error:
        return await in_thread(READ, failed, request, error, None)
    answer = redirect(visits.place(fields.get("next", "")) or f"/projects/{min(found)}/runs")
    for project, made in found.items():
        if before := visits.secret_of(request, project, secure=server.secure):
            await in_thread(READ, visits.log_out, server, before)
        _keep(server, answer, project, made)
    return answer


async def _log_out(server: Server, request: Request) -> Response:
    project = request.path_params["project"]
    secret = visits.secret_of(request, project, secure=server.secure)
    try:
        await visits.read_form(request, secret, secure=server.secure)
        await in_thread(READ, visits.log_out, server, secret)
    except Exception as error:
        return await in_thread(READ, failed, request, error, None)
    answer = redirect("/login")
    answer.delete_cookie(
        visits.cookie(project, secure=server.secure), secure=server.secure, httponly=True, samesite="strict"
    )
    return answer


def _keep(server: Server, answer: Response, project: str, secret: str) -> None:
    answer.set_cookie(
        visits.cookie(project, secure=server.secure), secret, secure=server.secure, httponly=True, samesite="strict"
    )


async def _live(live: Live, server: Server, request: Request) -> Response:
    try:
        return await live.follow(request, partial(_enter, server))
    except Exception as error:
        return await in_thread(READ, failed, request, error, None)


async def _asset(name: str, request: Request) -> Response:
    body, tag = asset(name)
    kept = f"private, max-age={_NOT_MODIFIED_SECONDS}" if request.query_params.get("v") == tag else "no-store"
    return Response(body, 200, {**HEADERS, "cache-control": kept}, f"{ASSETS[name]}; charset=utf-8")


async def _nothing(request: Request) -> Response:
    return failed(request, NotFoundError("there is no such page"), None)
