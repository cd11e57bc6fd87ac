"""The console's page on which people talk to the served models of channels, one or two side by side.

The server of the console passes messages on to the servers of models on this machine, with the key that they recorded
in the workspace's folder. The conversation is in the page's form, and nothing of it is stored. With the console's
script an answer appears as it arrives, as JSON lines; without it, the form returns the page with the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse

from posttrain.client.chats import Message, Talker, running
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError
from posttrain.server.console import visits
from posttrain.server.console.visits import HEADERS, Visit, failed
from posttrain.server.limits import FOLLOW, HEAVY, in_thread
from posttrain.server.operations import Server

_LINES = "application/x-ndjson"
_MOST = 48 << 10  # characters of a conversation


def page(visit: Visit) -> Response:
    """Show an empty conversation with a channel's model, or with two."""
    return _page(visit, [visit.named("channel"), *_other(visit, visit.request.query_params.get("other", ""))])


def _other(visit: Visit, name: str) -> list[str]:
    return [name] if name and name != visit.named("channel") else []


def _page(visit: Visit, names: list[str], talks: list[list[Message]] | None = None, wrong: str = "") -> Response:
    known = [one.name for one in visit.control.channels()]
    if odd := next((name for name in names if name not in known), None):
        raise NotFoundError(f"there is no channel {odd[:80]!r}")
    root = visit.server.workspace.root
    served = [name for name in known if running(root, visit.project, name)]
    columns = [(name, talk, json.dumps(talk)) for name, talk in zip(names, talks or [[] for _ in names], strict=True)]
    absent = [name for name in names if name not in served]
    return visit.page("chat", name=names[0], columns=columns, served=served, absent=absent, wrong=wrong)


def whole(visit: Visit) -> Response:
    """Send a message to the models of the form; show the page with their whole answers."""
    names = [visit.named("channel"), *_other(visit, visit.form.get("other", ""))]
    message, talks = _message(visit), [_history(visit, place) for place in range(len(names))]
    try:
        for name, talk in zip(names, talks, strict=True):
            answer = "".join(_talker(visit, name).answer([*talk, message]))
            talk += [message, {"role": "assistant", "content": answer}]
    except PosttrainError as error:
        return _page(visit, names, talks, str(error))
    return _page(visit, names, talks)


def answering(server: Server, enter: Callable[[Server, Request], Visit]) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a message: a stream of JSON lines if the browser asks for them, and a page otherwise."""

    async def answer(request: Request) -> Response:
        visit = None
        try:
            visit = await in_thread(HEAVY, enter, server, request)
            visit = visit.sending(await visits.read_form(request, visit.secret, secure=server.secure))
            principal = visit.asker.identity.principal
            if request.headers.get("accept") != _LINES:
                async with server.limits.taken(principal, HEAVY):
                    return await in_thread(HEAVY, whole, visit)
            talk = _talker(visit, visit.named("channel"))
            pieces = talk.answer([*_history(visit, 0), _message(visit)])
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(server.limits.taken(principal, FOLLOW))
                held = stack.pop_all()
            return StreamingResponse(_lines(pieces, talk, held), headers=HEADERS, media_type=_LINES)
        except Exception as error:
            return await in_thread(HEAVY, failed, request, error, visit)

    return answer


async def _lines(pieces: Iterator[str], talk: Talker, held: AsyncExitStack) -> AsyncIterator[bytes]:
    def line(**said: str) -> bytes:
        return json.dumps(said).encode() + b"\n"

    async with held:
        try:
            while (piece := await in_thread(FOLLOW, next, pieces, None)) is not None:
                yield line(text=piece)
            yield line(digest=talk.digest)
        except PosttrainError as error:
            yield line(error=str(error))


def _talker(visit: Visit, name: str) -> Talker:
    visit.control.channel(name)  # raises if the visitor may not see it
    found = running(visit.server.workspace.root, visit.project, name)
    if found is None:
        raise InputError(f"channel {name[:80]} is not served on this machine: posttrain serve-model {name[:80]}")
    return found


def _message(visit: Visit) -> Message:
    message = visit.form.get("message", "").strip()
    if not message:
        raise InputError("the message must have text, got none; write one")
    return {"role": "user", "content": message}


def _history(visit: Visit, place: int) -> list[Message]:
    """Return the conversation so far, which the form contains.

    Raises:
        InputError: it is not a conversation, or too long.
    """
    text = visit.form.get(f"history{place}", "") or "[]"
    try:
        found: Any = json.loads(text)
        talk = [{"role": str(one["role"]), "content": str(one["content"])} for one in found]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("the conversation of the form cannot be read; begin a new one") from error
    if len(text) > _MOST or any(one["role"] not in ("user", "assistant") for one in talk):
        raise InputError(f"a conversation has at most {_MOST} characters, got {len(text)}; begin a new one")
    return talk
