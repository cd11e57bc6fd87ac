"""Comments of fields in the sources: on the field's lines, or above the field."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from functools import cache


def comment(owner: type, name: str) -> str:
    """Return the comment of a field or an enum's member, from the most derived class; empty if there is none."""
    for kind in owner.__mro__:
        if name in vars(kind).get("__annotations__", {}) or name in getattr(kind, "__members__", {}):
            return _comments(kind).get(name, "")
    return ""


def summary(owner: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split())


@cache
def _comments(kind: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(kind))
    said = {token.start[0]: token for token in _tokens(source)}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if not isinstance(target, ast.Name):
            continue
        beside = [
            said[line].string for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in said
        ]
        found[target.id] = _text([*_above(said, node.lineno), *beside])
    return found


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def _above(said: dict[int, tokenize.TokenInfo], line: int) -> list[str]:
    """Return the comments on the lines directly above."""
    found: list[str] = []
    while (token := said.get(line := line - 1)) and token.line.lstrip().startswith("#"):
        found.insert(0, token.string)
    return found


def _text(parts: list[str]) -> str:
    words = " ".join(part.lstrip("# ") for part in parts)
    return " ".join(words.split()).replace("None:", "none:")
