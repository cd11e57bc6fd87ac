"""How much an algorithm is: its statements, and the places that name it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import posttrain
from posttrain.domain.kinds import OWN

SOURCE = Path(posttrain.__file__).parent
RECIPES = SOURCE / "engine" / "recipes"
MOST = 110
SPECS = {name: kind.algorithm for name, kind in OWN.items() if kind.algorithm}


def statements(file: Path) -> int:
    """Imports and docstrings apart."""
    found = 0
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        found += isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom)
    return found


def begun_with(file: Path) -> int:
    """Statements of the recipes whose classes it begins with."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    taken = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    shared = {name.rpartition(".")[2] for name in taken if name.startswith("posttrain.engine.recipes.")}
    return sum(statements(RECIPES / f"{name}.py") for name in shared - {"algorithm"})  # which is the protocol


@pytest.mark.parametrize("kind", SPECS)
def test_an_algorithm_is_short_with_what_it_begins_with(kind: str) -> None:
    assert len(SPECS) >= 10
    file = RECIPES / f"{SPECS[kind].algorithm.partition(':')[0].rpartition('.')[2]}.py"
    assert statements(file) > 3
    assert statements(file) + begun_with(file) <= MOST


@pytest.mark.parametrize("kind", sorted(SPECS.keys() - {"sft", "grpo", "ppo", "reward_model", "dataflow"}))
def test_an_algorithm_is_named_by_one_row(kind: str) -> None:
    """What adding one took: its file, its test and a row of the table; nobody else imports it."""
    module, _, name = SPECS[kind].algorithm.rpartition(".")[2].partition(":")
    naming = re.compile(rf"recipes\.{module}\b|import {name}\b|\b{module}:{name}\b")
    named = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if file != RECIPES / f"{module}.py" and naming.search(file.read_text(encoding="utf-8"))
    ]
    assert named == ["domain/kinds.py"]
