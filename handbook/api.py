"""A page with the names that `import posttrain` exports, from their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import posttrain
from handbook.comments import summary
from posttrain.api.handles import Bound


def page() -> str:
    """Return the whole reference in Markdown."""
    named = [(name, getattr(posttrain, name)) for name in posttrain.__all__ if not name.startswith("_")]
    functions = [_function(name, value) for name, value in named if inspect.isfunction(value)]
    return "\n\n".join([*functions, *(_class(name, value) for name, value in named if inspect.isclass(value))])


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class itself defines, in source order."""
    for name, value in vars(owner).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | Bound)):
            yield name, value


def _function(name: str, value: Any) -> str:
    return f"## {name}\n\n```python\nposttrain.{name}{_signature(value)}\n```\n\n{summary(value)}"


def _class(name: str, owner: type) -> str:
    rows = [
        f"| `{one}{'' if isinstance(value, property) else _signature(value)}` | {_told(value)} |"
        for one, value in members(owner)
    ]
    table = ["", "| member | |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {name}\n\n{summary(owner)}", *table])


def _told(value: Any) -> str:
    return summary(value).replace("|", "\\|")


def _signature(value: Any) -> str:
    """Return arguments and defaults, without types."""
    bound = isinstance(value, Bound)
    signature = inspect.signature(value.verb.function if bound else value)
    taken = [one for one in signature.parameters.values() if one.name != "self"][bound:]  # of a verb: what it is of
    kept = [p.replace(annotation=inspect.Parameter.empty) for p in taken]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))
