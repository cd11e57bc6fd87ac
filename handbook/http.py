"""The endpoints of a server as tables, from the document that it serves itself."""

from __future__ import annotations

from posttrain.api.guarding import NEEDS
from posttrain.api.operations import OPERATIONS
from posttrain.server.openapi import document


def table() -> str:
    """Every endpoint: method, path below `/v1/projects/PROJECT`, the role that it needs, what it does.

    What is of no project stands with its whole path.
    """
    paths = document()["paths"]
    rows = ["| method and path | role | what it does |", "|---|---|---|"]
    known = {one.verb for one in OPERATIONS.values()}
    for path, methods in paths.items():
        below = path.partition("{project}")[2] or path
        for method, told in methods.items():
            verb = told["operationId"]
            role = NEEDS[verb] if verb in known else {"add_to_blob": "submitter", "blob_state": "submitter"}.get(verb)
            role = role or {"blob": "submitter", "token": "whoever has one"}.get(
                verb, "viewer" if told.get("security") != [] else "–"
            )
            rows.append(f"| `{method.upper()} {below}` | {role} | {' '.join(told['summary'].split())} |")
    return "\n".join(rows)
