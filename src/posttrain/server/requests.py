"""What is read of a request before anybody looks at it: sizes and forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from posttrain.api.verbs import Verb
from posttrain.domain.errors import InputError, SlowError
from posttrain.domain.ids import TYPES, Id

MOST_BYTES = 8 << 20  # of a JSON body
PIECE_SECONDS = 30.0  # within which something of a body must come
BODY_SECONDS = 120.0  # within which a body must come that is held as a whole
_SMALL = 1 << 16  # bytes that a connection holds by itself
IN_PATHS: Mapping[str, Id] = {  # parameter of a path → what it must be
    **{"project": TYPES["ProjectId"], "digest": TYPES["Digest"], "operation_id": TYPES["OperationId"]},
    **{"run_id": TYPES["RunId"], "sample": TYPES["SampleId"], "token_id": TYPES["TokenId"]},
    **{"principal": TYPES["Principal"], **dict.fromkeys(("words", "name", "channel", "kind"), TYPES["Name"])},
}
_DIGITS = 16  # of a size that is a number


def sent(operation: Verb[..., Any], request: Request, body: bytes) -> dict[str, Any]:
    """A request's parameters by name.

    Args:
        body: as `read` gave it.

    Raises:
        InputError: a body that is too large, or no JSON object; a parameter that is there twice.
    """
    found: dict[str, Any] = {name: request.path_params[name] for name in operation.in_path}
    if operation.method in ("GET", "DELETE"):
        for name in request.query_params:
            values = request.query_params.getlist(name)
            if len(values) > 1:
                raise InputError(f"{operation.name}: {name} must be there once, got it {len(values)} times")
            found.setdefault(name, values[0])
        return found
    named = _object(body) if body else {}
    twice = next((name for name in named if name in found), None)
    if twice is not None:
        raise InputError(f"{operation.name}: {twice} is named by the path, and must not be in the body")
    return found | named


def check_path(request: Request) -> None:
    """Check what the path names, before anything is asked of the ledger.

    Raises:
        InputError: a part is no such id or name.
    """
    for name, value in request.path_params.items():
        if "\ufffd" in value:
            raise InputError(f"{name} must be text in UTF-8")
        IN_PATHS[name].check(value, name)


async def read(operation: Verb[..., Any], request: Request) -> bytes:
    """The body of a request; of one whose parameters are its query, nothing.

    Raises:
        InputError: it is too large, or its sender left. SlowError: it did not come in time.
    """
    if operation.method in ("GET", "DELETE"):
        return b""
    return await whole(request, MOST_BYTES, "a request's body", "; upload files by their digests")


def weight(operation: Verb[..., Any], request: Request) -> int:
    """Bytes that a body will take here, as its sender says; nothing where a connection has room for it anyway."""
    if operation.method in ("GET", "DELETE"):
        return 0
    said = request.headers.get("content-length", "")
    if said.isdecimal() and len(said) < _DIGITS:
        return min(int(said), MOST_BYTES) if int(said) > _SMALL else 0
    return MOST_BYTES if "transfer-encoding" in request.headers else 0


async def whole(request: Request, most: int, what: str, instead: str = "") -> bytes:
    """A body that is held here as a whole.

    Args:
        what: it is, for whoever sent too much.
        instead: what to do then.

    Raises:
        InputError: it is too large, or its sender left. SlowError: it did not come in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                if len(body) + len(piece) > most:
                    raise InputError(f"{what} must have at most {most} bytes{instead}")
                body += piece
    except TimeoutError as error:
        raise SlowError(f"{what} must come within {BODY_SECONDS:g} s; ask again") from error
    except ClientDisconnect as error:
        raise InputError(f"{what} must come whole, got {len(body)} bytes before it broke off; send it again") from error
    return bytes(body)


def timely(receive: Receive) -> Receive:
    """What comes of a request, where each piece of its body comes in time.

    Raises:
        SlowError: one did not.
    """
    ended = False

    async def received() -> Message:
        nonlocal ended
        if ended:  # now it is waited for that somebody leaves, however long they stay
            return await receive()
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                message = await receive()
        except TimeoutError as error:
            raise SlowError(f"nothing of the request's body has come for {PIECE_SECONDS:g} s; send it again") from error
        ended = not message.get("more_body", False)
        return message

    return received


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"a request's body must be JSON: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise InputError("a request's body must be a JSON object")
    if b"\\u0000" in body and "\0" in "".join(_texts(found)):
        raise InputError("a request's body must hold no NUL (\\u0000) in its texts; remove it")
    return found


def _texts(value: Any) -> Iterator[str]:
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    if isinstance(value, str):
        yield value
    for one in inside:
        yield from _texts(one)
