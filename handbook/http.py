"""Tables of a server's endpoints, from the OpenAPI document that the server returns."""

from __future__ import annotations

from posttrain.api.control import OPERATIONS
from posttrain.server.openapi import document

_OTHERS = {"add_to_blob": "submitter", "blob_state": "submitter", "blob": "submitter", "token": "any valid token"}


def table() -> str:
    """Return every endpoint: method, path below `/v1/projects/PROJECT`, required role, purpose.

    Endpoints without a project have their full path.
    """
    paths = document()["paths"]
    rows = ["| method and path | role | what it does |", "|---|---|---|"]
    for path, methods in paths.items():
        below = path.partition("{project}")[2] or path
        for method, told in methods.items():
            verb = told["operationId"]
            usual = "viewer" if told.get("security") != [] else "–"
            role = OPERATIONS[verb].needs if verb in OPERATIONS else _OTHERS.get(verb, usual)
            rows.append(f"| `{method.upper()} {below}` | {role} | {' '.join(told['summary'].split())} |")
    return "\n".join(rows)
