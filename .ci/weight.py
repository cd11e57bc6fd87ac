"""Print the weight of every room of the source: statements, files, import statements and tests.

    make weight                      this tree
    python .ci/weight.py TREE        another checkout

A statement is a node of the syntax tree that is a statement; docstrings do not count. A room is a folder directly below
`src/posttrain`. A test belongs to the room that its file imports from most often.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "posttrain"
OUTSIDE = "(package)"  # modules directly below `src/posttrain`


@dataclass
class Weight:
    """What one room holds."""

    statements: int = 0
    files: int = 0
    imports: int = 0
    tests: int = 0


def statements(tree: ast.AST) -> int:
    """Statements of a module without its docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def weigh(root: Path) -> dict[str, Weight]:
    """Every room of the source below `root`, with the tests that are about it."""
    rooms: dict[str, Weight] = {}
    source = root / "src" / PACKAGE
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        weight = rooms.setdefault(parts[0] if len(parts) > 1 else OUTSIDE, Weight())
        tree = ast.parse(path.read_bytes())
        weight.statements += statements(tree)
        weight.files += 1
        weight.imports += sum(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_bytes())
        found = Counter(room for room in _imported(tree) if room in rooms)
        about = max(sorted(found), key=found.__getitem__, default=OUTSIDE)
        rooms[about].tests += sum(_is_test(node) for node in ast.walk(tree))
    return rooms


def table(rooms: dict[str, Weight]) -> Iterator[str]:
    """The lines to print, the heaviest room first, the sum last."""
    yield f"{'room':<12} {'statements':>10} {'files':>6} {'imports':>8} {'tests':>6}"
    total = Weight()
    for name, one in sorted(rooms.items(), key=lambda item: -item[1].statements):
        yield _line(name, one)
        for column in vars(total):
            setattr(total, column, getattr(total, column) + getattr(one, column))
    yield _line("all", total)


def _line(name: str, one: Weight) -> str:
    return f"{name:<12} {one.statements:>10,} {one.files:>6} {one.imports:>8,} {one.tests:>6,}"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def _imported(tree: ast.AST) -> Iterator[str]:
    """The rooms that a module imports from, one entry an import."""
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE:
                yield rest.partition(".")[0] or OUTSIDE


if __name__ == "__main__":
    print("\n".join(table(weigh(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))))
