"""What is read of a request before anybody looks at it: sizes and forms."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from posttrain.api.operations import Operation
from posttrain.domain.errors import InputError

MOST_BYTES = 8 << 20  # of a JSON body


def sent(operation: Operation, request: Request, body: bytes) -> dict[str, Any]:
    """A request's parameters by name.

    Args:
        body: as `read` gave it.

    Raises:
        InputError: a body that is too large, or no JSON object; a parameter that is there twice.
    """
    found: dict[str, Any] = {name: request.path_params[name] for name in operation.in_path}
    odd = next((name for name, value in found.items() if "\ufffd" in value), None)
    if odd is not None:
        raise InputError(f"{operation.verb}: {odd} must be text in UTF-8")
    if operation.method in ("GET", "DELETE"):
        for name in request.query_params:
            values = request.query_params.getlist(name)
            if len(values) > 1:
                raise InputError(f"{operation.verb}: {name} must be there once, got it {len(values)} times")
            found.setdefault(name, values[0])
        return found
    named = _object(body) if body else {}
    twice = next((name for name in named if name in found), None)
    if twice is not None:
        raise InputError(f"{operation.verb}: {twice} is named by the path, and must not be in the body")
    return found | named


async def read(operation: Operation, request: Request) -> bytes:
    """The body of a request; of one whose parameters are its query, nothing.

    Raises:
        InputError: it is too large.
    """
    if operation.method in ("GET", "DELETE"):
        return b""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MOST_BYTES:
            raise InputError(f"a request's body must be at most {MOST_BYTES} bytes; upload files by their digests")
        pieces.append(piece)
    return b"".join(pieces)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"a request's body must be JSON: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise InputError("a request's body must be a JSON object")
    return found
