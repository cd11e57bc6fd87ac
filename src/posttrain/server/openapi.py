"""The server's interface as an OpenAPI 3.1 document, made from the table of verbs and the types of the protocol."""

import inspect
from typing import Any

from posttrain._version import __version__
from posttrain.api.codec import MEDIA_TYPE, adapter
from posttrain.api.control import OPERATIONS
from posttrain.api.verbs import PREFIX, Verb

_REF = "#/components/schemas/{model}"
_FILES = {  # the result of verbs that return files, which clients fetch by their digests
    "type": "object",
    "properties": {
        "value": {},
        "files": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "properties": {"digest": {"type": "string"}, "bytes": {"type": "integer"}},
                "required": ["digest", "bytes"],
            },
        },
    },
    "required": ["files"],
}
_PROBLEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "description": "urn:posttrain:problem:NAME, which never changes"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "one line: what, the constraint, the value, the next action"},
        "exit_code": {"type": "integer", "description": "of the command line, for this error"},
        "retryable": {"type": "boolean"},
        "request": {"type": "string", "description": "the id of the request in the event log and the server's log"},
    },
    "required": ["type", "title", "status", "detail", "exit_code", "retryable"],
}
_STREAMS = {
    "/runs/{run_id}/watch": ("watch", "Stream the state of a run at every change: events `status`, then `end`.", ()),
    "/runs/{run_id}/logs": (
        "logs",
        "Stream the output of a run's jobs: events `log`, then `end`.",
        ("stage", "follow"),
    ),
}


_WRONG = {  # status → description of its problems
    400: "the request is malformed",
    401: "the token is unknown",
    403: "the role does not allow it",
    404: "the project contains no object of that name",
    408: "the body did not arrive in time",
    409: "the state differs from the one that the request expects",
    422: "a value of the request is invalid",
    424: "an external system refused it",
    429: "too many requests of one principal; `Retry-After` contains the seconds to wait",
    500: "stored bytes are corrupt, or a bug in Posttrain",
    503: "the server, its database or its store is unavailable",
    504: "the request took too long",
}
_KEY = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{8,64}$"},
    "description": "the same request with the same key is carried out once",
}


def document() -> dict[str, Any]:
    """Return the whole document. Call this in a worker, because it imports the types of every value."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS.values():
        paths.setdefault(operation.whole_path, {})[operation.method.lower()] = _described(operation, schemas)
    for path, (name, text, in_query) in _STREAMS.items():
        paths[PREFIX + path] = {"get": _stream(name, text, in_query)}
    paths |= _bytes() | _itself() | _operations()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Posttrain",
            "version": __version__,
            "description": "The verbs of the command line over HTTP. See docs/server.md.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _described(operation: Verb[..., Any], schemas: dict[str, Any]) -> dict[str, Any]:
    first, _, rest = (inspect.getdoc(operation.function) or "").partition("\n\n")
    asked = operation.parameters
    inside = operation.method in ("GET", "DELETE")
    named = [name for name in asked if inside or name in operation.in_path]
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": " ".join(first.split()),
        "description": f"Needs the role {operation.needs}." + (f"\n\n{rest}" if rest else ""),
        "parameters": [_PROJECT, *(_parameter(operation, name, asked[name], schemas) for name in named)],
        "responses": _responses(_json(_answer(operation, schemas)), cached=operation.method == "GET"),
    }
    if not inside:
        body = {name: one for name, one in asked.items() if name not in operation.in_path}
        required = [name for name, one in body.items() if one.default is inspect.Parameter.empty and not _optional(one)]
        fields = {name: _schema(one.annotation, schemas) for name, one in body.items()}
        schema: dict[str, Any] = {"type": "object", "properties": fields, "additionalProperties": False}
        schema |= {"required": required} if required else {}
        found["requestBody"] = {"required": bool(required), "content": _json(schema)}
    if operation.unsafe:
        found["parameters"].append(_KEY)
    if operation.unsafe and operation.heavy:
        found["parameters"].append(_PREFER)
        found["responses"]["202"] = {
            "description": "the request continues as an operation; see `Location`",
            "headers": {"location": {"schema": {"type": "string"}}},
            "content": _json(_OPERATION),
        }
    if operation.streams:
        found["responses"]["200"]["content"]["text/event-stream"] = {}
    return found


_PREFER = {
    "name": "prefer",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "`respond-async, wait=10`: if the request takes longer than 10 s, answer with 202 and an operation",
}
_OPERATION = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "verb": {"type": "string"},
        "state": {"enum": ["running", "succeeded", "failed", "cancelled"]},
        "progress": {"type": "string"},
        "seconds": {"type": "number"},
        "answer": {"description": "the result, if the operation succeeded"},
        "problem": {"$ref": "#/components/schemas/Problem"},
    },
    "required": ["id", "verb", "state", "progress", "seconds"],
}


_PROJECT = {"name": "project", "in": "path", "required": True, "schema": {"type": "string"}}


def _responses(content: dict[str, Any], *, cached: bool = False) -> dict[str, Any]:
    """Return the responses to a request, including errors."""
    told = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    return {
        "200": {"description": "the result", "content": content},
        **({"304": {"description": "the version that `If-None-Match` names is current"}} if cached else {}),
        **{str(status): {"description": words, **told} for status, words in _WRONG.items()},
    }


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answer(operation: Verb[..., Any], schemas: dict[str, Any]) -> dict[str, Any]:
    if operation.writes or operation.streams:
        return _FILES if operation.writes else {"type": "object"}
    found = _taken(operation.answer.json_schema(mode="serialization", ref_template=_REF), schemas)
    if not operation.paged:
        return found
    behind = {"type": ["string", "null"], "description": "`cursor` of the next page; null on the last page"}
    return _object(items=found, next=behind)


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    return _taken(adapter(kind).json_schema(ref_template=_REF), schemas)


def _taken(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Move the definitions in a schema to the document's schemas; return the schema."""
    schemas.update(schema.pop("$defs", {}))
    return schema


def _parameter(operation: Verb[..., Any], name: str, one: inspect.Parameter, schemas: dict[str, Any]) -> dict[str, Any]:
    place = "path" if name in operation.in_path else "query"
    required = place == "path" or (one.default is inspect.Parameter.empty and not _optional(one))
    return {"name": name, "in": place, "required": required, "schema": _schema(one.annotation, schemas)}


def _optional(one: inspect.Parameter) -> bool:
    return type(None) in getattr(one.annotation, "__args__", ())


def _stream(name: str, text: str, in_query: tuple[str, ...]) -> dict[str, Any]:
    words = {"schema": {"type": "string"}}
    return {
        "operationId": name,
        "summary": text,
        "parameters": [
            _PROJECT,
            {"name": "run_id", "in": "path", "required": True, **words},
            *({"name": one, "in": "query", "required": False, **words} for one in in_query),
        ],
        "responses": _responses({"text/event-stream": {}}),
    }


def _bytes() -> dict[str, Any]:
    digest = {"name": "digest", "in": "path", "required": True, "schema": {"type": "string"}}
    path = PREFIX + "/blobs/{digest}"
    stands = _responses(_json(_object(held={"type": "boolean"}, offset={"type": "integer"})))
    numbers = [
        {"name": name, "in": "header", "required": True, "schema": {"type": "integer"}}
        for name in ("upload-offset", "upload-length")
    ]
    size = {"name": "size", "in": "query", "required": False, "schema": {"type": "integer"}}
    octets: dict[str, Any] = {"application/octet-stream": {}}
    return {
        path: {
            "get": {
                "operationId": "blob",
                "summary": "Return the bytes of a digest that the project has.",
                "parameters": [_PROJECT, digest],
                "responses": _responses(octets),
            },
            "patch": {
                "operationId": "add_to_blob",
                "summary": "Append to an upload at the offset in the request; after the last byte, the project has the "
                "file.",
                "parameters": [_PROJECT, digest, *numbers],
                "requestBody": {"required": True, "content": octets},
                "responses": stands,
            },
        },
        path + "/state": {
            "get": {
                "operationId": "blob_state",
                "summary": "Return whether the project has the file, and how many bytes of an upload have arrived.",
                "parameters": [_PROJECT, digest, size],
                "responses": stands,
            }
        },
    }


def _itself() -> dict[str, Any]:
    """Return the paths that describe the server, which need no token, and the path that describes a token."""
    status = _object(status={"type": "string"})
    version = _object(version={"type": "string"}, api={"type": "array", "items": {"type": "integer"}})
    ready = {"description": "the reason why the server drives no runs", "content": _json(status)}
    asked: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
        "/healthz": ("healthy", "Return whether the process is alive.", status, {}),
        "/readyz": ("ready", "Return whether the server drives runs.", status, {"503": ready}),
        "/v1/version": (
            "version",
            "Return the version of the server, and the versions of the API that the server supports.",
            version,
            {},
        ),
        "/openapi.json": ("interface", "Return the OpenAPI description of the API.", {"type": "object"}, {}),
    }
    return {
        path: {
            "get": {
                "operationId": name,
                "summary": text,
                "parameters": [],
                "security": [],
                "responses": {**_responses(_json(schema)), **more},
            }
        }
        for path, (name, text, schema, more) in asked.items()
    } | {"/v1/token": {"get": _token()}}


def _token() -> dict[str, Any]:
    roles = {"type": "object", "additionalProperties": {"type": "string"}}
    return {
        "operationId": "token",
        "summary": "Return the principal that the token identifies, and the principal's highest role in each of the "
        "token's projects.",
        "parameters": [],
        "responses": _responses(_json(_object(principal={"type": "string"}, projects=roles))),
    }


def _operations() -> dict[str, Any]:
    """Return the paths of operations, which continue after the connection of their request."""
    words = {"name": "operation_id", "in": "path", "required": True, "schema": {"type": "string"}}
    told = {
        "get": ("operation", "Return the state of an operation and, at the end, its result."),
        "delete": ("cancel_operation", "Cancel an operation."),
    }
    return {
        PREFIX + "/operations/{operation_id}": {
            method: {
                "operationId": name,
                "summary": text,
                "parameters": [_PROJECT, words],
                "responses": _responses(_json(_OPERATION)),
            }
            for method, (name, text) in told.items()
        }
    }
