"""Nothing but the registry knows a kind of stage by its name: the sources are read for comparisons and tables.

`foreign` is left out: its words are the trainers of other tools, and what it writes is a run file. So is
`engine.algorithms`: its words are estimators, some of which are called as the algorithms that they come from.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.domain import kinds
from posttrain.domain.kinds import OWN

ROOT = Path(kinds.__file__).parents[1]
parsed = functools.cache(ast.parse)  # every source is looked at twice
LEFT_OUT = ("domain/kinds.py", "foreign/", "engine/algorithms/")


def words(node: ast.expr) -> Iterator[str]:
    """Constants of an operand: a string, or what a tuple, list or set of them holds."""
    for part in ast.walk(node) if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Call) else [node]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Module level names with what they stand for, so that a comparison with one is a comparison with its value."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def is_kind(node: ast.expr) -> bool:
    """`stage.kind`, `row.kind`, a variable called kind."""
    return (isinstance(node, ast.Attribute) and node.attr == "kind") or (
        isinstance(node, ast.Name) and node.id == "kind"
    )


def findings(source: str, everywhere: dict[str, ast.expr] | None = None) -> Iterator[str]:
    tree = parsed(source)
    known = {**(everywhere or {}), **constants(tree)}

    def names(node: ast.expr) -> set[str]:
        stands_for = known.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr == "name":
            return {node.value.id.lower()} & OWN.keys()  # GATE.name
        return set(words(stands_for)) & OWN.keys()

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(map(is_kind, operands)):
                yield from (f"{node.lineno}: compares with {word!r}" for part in operands for word in names(part))
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)} & OWN.keys()
            if len(keys) > 1:
                yield f"{node.lineno}: a table of {', '.join(sorted(keys))}"
        elif isinstance(node, ast.Match) and is_kind(node.subject):
            yield f"{node.lineno}: matches a kind"


def sources() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT) and "examples" not in path.parts
    ]


def test_nobody_else_knows_a_kind_by_its_name() -> None:
    everywhere: dict[str, ast.expr] = {}
    for path in sources():
        everywhere |= {name: value for name, value in constants(parsed(path.read_text())).items() if name.isupper()}
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{finding}"
        for path in sources()
        for finding in findings(path.read_text(), everywhere)
    }
    assert sorted(found) == [], "ask posttrain.domain.kinds by a property instead"


@pytest.mark.parametrize(
    "source",
    [
        'if stage.kind == "gate": pass',
        'if "gate" != stage.kind: pass',
        'if row.kind in ("gate", "release"): pass',
        'if kind == "evaluate": pass',
        'WORD = "evaluate"\nif stage.kind == WORD: pass',
        'PLACES = frozenset({"gate", "release"})\nif stage.kind not in PLACES: pass',
        "if stage.kind == GATE.name: pass",
        'LESS = {"sft": "lower steps", "grpo": "lower more"}',
        'match stage.kind:\n    case "gate": pass',
    ],
)
def test_a_comparison_is_found_however_it_is_written(source: str) -> None:
    assert len(list(findings(source))) >= 1


@pytest.mark.parametrize(
    "source",
    [
        'if asset.kind == "reward": pass',
        "if one.kind == other.kind: pass",
        "if failure.kind is FailureClass.BUDGET: pass",
    ],
)
def test_other_kinds_are_not_meant(source: str) -> None:
    assert list(findings(source)) == []
