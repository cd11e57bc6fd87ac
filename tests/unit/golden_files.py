"""Golden files: what people and programs see, as one file of each kind. `make golden` writes them anew.

What differs from machine to machine or from moment to moment is masked by the name of its field, or by its form.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "golden"
WRITES = os.environ.get("GOLDEN") == "write"
_WIDE = 116  # characters of a line, if it holds more than one value
_SHOWN = 60  # lines of a difference
_MOMENT = re.compile(r"(^|_)(at|since|after|before|seconds|bytes)$")
_BY_CHANCE = "registered at: "  # a difference that is told only where two seconds differ
_FORMS = (
    (re.compile(r"sha256:[0-9a-f]{8,64}"), "sha256:*"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<hash>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"), "<time>"),
    (re.compile(r"\b(took|after|ago|in) [\d.]+ ?(ms|s|m|h)\b"), r"\1 <time>"),
)


def check(name: str, text: str) -> None:
    """Fail where the golden file says something else; with `make golden`, make it say this.

    Args:
        text: what is true now; lines.
    """
    file, text = FOLDER / name, text.rstrip("\n") + "\n"
    if WRITES:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    known = file.read_text(encoding="utf-8") if file.exists() else ""
    found = list(difflib.unified_diff(known.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", "", "", 1))
    if found:
        more = [f"… and {len(found) - _SHOWN} lines more"] if len(found) > _SHOWN else []
        told = "\n".join([*found[:_SHOWN], *more])
        raise AssertionError(f"{told}\nIf this is intended: make golden, and review the difference with git diff")


class Mask:
    """Values without what differs each time.

    Args:
        names: text → what stands in its place, e.g. of folders and ids.
        fields: further names of fields whose values are left out.
    """

    def __init__(self, names: Mapping[str, str], fields: Sequence[str] = ()) -> None:
        self._names = sorted(names.items(), key=lambda item: -len(item[0]))
        self._fields = frozenset(fields)

    def text(self, text: str) -> str:
        for name, instead in self._names:
            text = text.replace(name, instead)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        return text

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.text(name): self._field(name, one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self(one) for one in value if not str(one).startswith(_BY_CHANCE)]
        if isinstance(value, float):
            return float(f"{value:.5g}")  # what processors and libraries agree on
        return self.text(value) if isinstance(value, str) else value

    def _field(self, name: str, value: Any) -> Any:
        if name in self._fields:
            return f"<{name}>"
        if _MOMENT.search(name) and isinstance(value, int | float):
            return f"<{name}>"
        return self(value)


def in_order(value: Any) -> Any:
    """The same value with its lists in an order of their own, where ids decide the order."""
    if isinstance(value, dict):
        return {name: in_order(one) for name, one in value.items()}
    return sorted(map(in_order, value), key=json.dumps) if isinstance(value, list) else value


def once_each(value: Any) -> Any:
    """The same value, in which an object that was there before is named by the place of the first."""
    first: dict[str, str] = {}

    def told(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            known = first.setdefault(json.dumps(value), place)
            if known != place and len(json.dumps(value)) > _WIDE:
                return f"= {known}"
            return {name: told(one, f"{place}/{name}") for name, one in value.items()}
        return [told(one, f"{place}/{at}") for at, one in enumerate(value)] if isinstance(value, list) else value

    return told(value, "")


def laid_out(value: Any, indent: str = "") -> str:
    """JSON of which a line holds as much as is read at one look."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= _WIDE or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + laid_out(one, inner) for one in value) + f"\n{indent}]"
    parts = (f"{inner}{json.dumps(name)}: {laid_out(one, inner)}" for name, one in value.items())
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
