"""Worker groups use no magic: what a reader sees in a class is what runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import posttrain.engine

ENGINE = Path(posttrain.engine.__file__).parent
FILES = sorted([*ENGINE.glob("groups/**/*.py"), *ENGINE.glob("roles/*.py"), ENGINE / "rollout" / "worker.py"])

DECORATORS = {
    "dataclass",
    "final",
    "property",
    "classmethod",
    "staticmethod",
    "contextmanager",
    "overload",
    "torch.no_grad",
    "torch.inference_mode",
}
FORBIDDEN_CALLS = {"setattr", "delattr", "exec", "eval", "compile", "__import__", "globals", "vars"}
FORBIDDEN_METHODS = {"__getattr__", "__getattribute__", "__setattr__", "__init_subclass__", "__class_getitem__"}
DISPATCHING = {"map", "each", "one", "each_stored"}
PLACED = ("roles", "rollout")  # where worker classes live


def name_of(node: ast.expr) -> str:
    """`torch.no_grad` of an expression of names; a call counts as what it calls."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def offences(tree: ast.Module) -> Iterator[str]:
    """What a reader could not see through, with its line."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            yield from (f"{line}: {found}" for found in _called(node))
        if isinstance(node, ast.ClassDef):
            yield from (f"{line}: metaclass of {node.name}" for word in node.keywords if word.arg == "metaclass")
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            strange = {name_of(decorator) for decorator in node.decorator_list} - DECORATORS
            yield from (f"{line}: decorator {name}" for name in sorted(strange))
        if isinstance(node, ast.FunctionDef) and node.name in FORBIDDEN_METHODS:
            yield f"{line}: {node.name}"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and (
                    target.attr in ("__class__", "__bases__", "__dict__") or name_of(target.value) in classes
                ):
                    yield f"{line}: assignment to {ast.unparse(target)}"


def _called(node: ast.Call) -> Iterator[str]:
    name = name_of(node)
    if name in FORBIDDEN_CALLS:
        yield f"call of {name}"
    if name == "type" and len(node.args) == 3:
        yield "class made by type()"
    if name == "getattr" and not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant)):
        yield "getattr of a computed name"
    by_name = node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    if isinstance(node.func, ast.Attribute) and node.func.attr in DISPATCHING and by_name:
        yield f"method passed as a string to {name}"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ENGINE)) for file in FILES])
def test_no_magic(file: Path) -> None:
    assert list(offences(ast.parse(file.read_text()))) == []


def workers(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Classes that are constructed with a place first, but for the engine that packages may derive theirs from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name != "TorchEngine":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    annotations = [arg.annotation for arg in method.args.args[1:2]]
                    if any(a is not None and ast.unparse(a) == "RankContext" for a in annotations):
                        yield node


def test_workers_are_final_and_stand_alone() -> None:
    found = [w for file in FILES if file.parent.name in PLACED for w in workers(ast.parse(file.read_text()))]
    assert len(found) >= 3
    for worker in found:
        assert "final" in {name_of(decorator) for decorator in worker.decorator_list}, worker.name
        assert not worker.bases, f"{worker.name} inherits; share code by composition"


@pytest.mark.parametrize(
    "source",
    [
        "setattr(x, name, 1)",
        "A = type('A', (), {})",
        "class A(metaclass=M): pass",
        "class A: pass\nA.run = run",
        "x.__class__ = B",
        "@register(mode=1)\ndef f(): pass",
        "class A:\n    def __getattr__(self, name): pass",
        "group.each('step', 1)",
        "getattr(worker, name)()",
        "exec(source)",
    ],
)
def test_the_walk_finds_magic(source: str) -> None:
    assert list(offences(ast.parse(source)))
