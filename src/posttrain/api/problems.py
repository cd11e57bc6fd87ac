"""Conversion of errors to problem documents (RFC 9457) and back, with the same classes, messages and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.domain import errors
from posttrain.domain.errors import InfrastructureError, PosttrainError

MEDIA_TYPE = "application/problem+json"
TYPE = "urn:posttrain:problem:"  # followed by the name of the error
SERVER_ERRORS = 500  # this status and above: the fault is the server's, not the request's
_LOG = "The server's log contains the reason, in the lines with the id of this request."
UNEXPECTED = "unexpected"  # a bug: the server's log has the details
_STATUS: Mapping[type[PosttrainError], int] = {
    errors.NotFoundError: 404,
    errors.ApiVersionError: 404,
    errors.InputError: 422,
    errors.AccessError: 403,
    errors.ConflictError: 409,
    errors.GateRejectedError: 409,
    errors.GateInconclusiveError: 409,
    errors.BudgetExceededError: 409,
    errors.StoppedError: 409,
    errors.JobFailedError: 409,
    errors.IntegrityError: 500,
    errors.UploadError: 422,
    errors.LimitError: 429,
    errors.SinkError: 424,
    errors.TrackerError: 424,
    errors.CapacityError: 503,
    errors.InfrastructureError: 503,
    errors.WorkspaceError: 503,
    errors.DeadlineError: 504,
    errors.SlowError: 408,
}


def _classes(above: type[PosttrainError] = PosttrainError) -> Iterator[type[PosttrainError]]:
    for one in above.__subclasses__():
        yield one
        yield from _classes(one)


def _name(kind: type[BaseException]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__.removesuffix("Error")).lower()


def problem(error: BaseException, request: str = "", status: int | None = None) -> dict[str, Any]:
    """Return the document that describes an error.

    With a status of 500 or more, the document contains only the kind of the error and the request's id, because the
    messages of such errors name databases, users, endpoints and objects.

    Args:
        request: id of the request, which is also in the server's log.
        status: replaces the status of the error's class.
    """
    known = error if isinstance(error, PosttrainError) else None
    kind: type[PosttrainError] = type(known) if known else PosttrainError
    found = next((_STATUS[one] for one in kind.__mro__ if issubclass(one, PosttrainError) and one in _STATUS), 500)
    title = (kind.__doc__ or "").strip().split("\n")[0] if known else "An unexpected error in Posttrain."
    hidden = (status or found) >= SERVER_ERRORS
    return {
        "type": TYPE + (_name(kind) if known else UNEXPECTED),
        "title": title,
        "status": status or found,
        "detail": f"{title} {_LOG}" if hidden else " ".join(str(error).split()),
        "exit_code": kind.exit_code,
        "retryable": kind.retryable,
        **({"request": request} if request else {}),
    }


def raised(document: Mapping[str, Any]) -> PosttrainError:
    """Return the error that a problem document describes."""
    known = {TYPE + _name(one): one for one in _classes()}
    word, detail = str(document.get("type", "")), str(document.get("detail") or document.get("title") or "")
    found = known.get(word)
    code = document.get("exit_code")
    if found is None and detail and code != PosttrainError.exit_code:  # a type that only a newer server has
        found = next((one for one in _classes() if one.exit_code == code), None)
    if found is not None:
        return found(detail)
    request = f" (request {document['request']})" if document.get("request") else ""
    return InfrastructureError(
        f"the server failed with an unexpected error{request}; the server's log contains the details"
    )
