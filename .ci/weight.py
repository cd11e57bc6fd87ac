"""Print the weight of every room of the source, and fail where a file or a function is larger than the rule allows.

    make weight                      this tree
    python .ci/weight.py TREE        another checkout
    python .ci/weight.py --rooms     which room imports from which, as a diagram

A statement is a node of the syntax tree that is a statement; docstrings do not count, `code` leaves imports out too. A
room is a folder directly below `src/posttrain`. A test belongs to the room that its file imports from most often.

The rule: of the files 95 in 100 have at most 600 lines, none has more than 800; of the functions 95 in 100 have at most
45 lines, none has more than 60. No modules import each other in a circle, inside functions or for types neither.

A file has 150 lines, or two other files import it; or it is an entry of a registry, a program, or a module that is
loaded only when it is used.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "posttrain"
OUTSIDE = "(package)"  # modules directly below `src/posttrain`
_IMPORTS = ast.Import | ast.ImportFrom
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_PROGRAM = ast.unparse(ast.parse("__name__ == '__main__'"))
FILE, FUNCTION = (600, 800), (45, 60)  # lines: of 95 in 100, and of all
LEAST = 150  # lines of a file with one importer
# folders whose files implement one port, or are algorithms or examples
REGISTRIES = (
    "access/authenticators", "engine/groups/backends", "engine/recipes", "engine/rollout/backends", "events/sinks",
    "examples", "execution/executors", "execution/trainers", "store/backends", "store/mailboxes", "telemetry/trackers",
)  # fmt: skip


@dataclass
class Weight:
    """What one room holds."""

    statements: int = 0
    code: int = 0
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
        counted, imports = statements(tree), sum(isinstance(node, _IMPORTS) for node in ast.walk(tree))
        weight.statements, weight.code = weight.statements + counted, weight.code + counted - imports
        weight.files, weight.imports = weight.files + 1, weight.imports + imports
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_bytes())
        found = Counter(room for room in _imported(tree) if room in rooms)
        about = max(sorted(found), key=found.__getitem__, default=OUTSIDE)
        rooms[about].tests += sum(_is_test(node) for node in ast.walk(tree))
    return rooms


def table(rooms: dict[str, Weight]) -> Iterator[str]:
    """The lines to print, the heaviest room first, the sum last."""
    yield f"{'room':<12} {'statements':>10} {'code':>7} {'files':>6} {'imports':>8} {'tests':>6}"
    total = Weight()
    for name, one in sorted(rooms.items(), key=lambda item: -item[1].statements):
        yield _line(name, one)
        for column in vars(total):
            setattr(total, column, getattr(total, column) + getattr(one, column))
    yield _line("all", total)


def _line(name: str, one: Weight) -> str:
    return f"{name:<12} {one.statements:>10,} {one.code:>7,} {one.files:>6} {one.imports:>8,} {one.tests:>6,}"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, _FUNCTIONS) and node.name.startswith("test_")


def _imported(tree: ast.AST) -> Iterator[str]:
    """The rooms that a module imports from, one entry an import."""
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE:
                yield rest.partition(".")[0] or OUTSIDE


def too_large(root: Path) -> Iterator[str]:
    """What breaks the rule about sizes, a line each."""
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in sorted((root / "src" / PACKAGE).rglob("*.py")):
        text, name = path.read_text(), path.relative_to(root).as_posix()
        files[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _FUNCTIONS):
                functions[f"{name}:{node.lineno} {node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    for what, sizes, (usual, most) in (("file", files, FILE), ("function", functions, FUNCTION)):
        for name, lines in sizes.items():
            if lines > most:
                yield f"{name}: a {what} has at most {most} lines, got {lines}; divide it"
        large = [name for name, lines in sizes.items() if lines > usual]
        if len(large) * 20 > max(len(sizes), 20):
            yield f"at most one {what} in 20 has more than {usual} lines, got {len(large)} of {len(sizes)}: {large[0]}"


def too_small(root: Path) -> Iterator[str]:
    """Files that only one other file imports and that have few lines, a line each."""
    modules = _paths(root)
    trees = {name: ast.parse(path.read_bytes()) for name, path in modules.items()}
    importers, first, named = Counter[str](), set[str](), set[str]()  # first: imported when its importer is
    for name, tree in trees.items():
        importers.update(set(_modules(tree, modules)) - {name})
        first |= {one for node in _at_start(tree) for one in _modules(node, modules)}
        nodes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        words = {word.partition(":")[0].removeprefix(f"{PACKAGE}.") for word in nodes if isinstance(word, str)}
        named |= words - {name.removeprefix(f"{PACKAGE}.")}
    for name, path in modules.items():
        lines, at = len(path.read_text().splitlines()), path.relative_to(root / "src" / PACKAGE).as_posix()
        entry = path.name == "__init__.py" or any(at.startswith(f"{one}/") for one in REGISTRIES)
        if lines >= LEAST or importers[name] > 1 or entry:
            continue
        program = any(isinstance(node, ast.If) and ast.unparse(node.test) == _PROGRAM for node in trees[name].body)
        if not program and (name in first or not importers[name]) and name.removeprefix(f"{PACKAGE}.") not in named:
            has = "one importer" if importers[name] else "no importer"
            yield f"{at}: a file with {has} has at least {LEAST} lines, got {lines}; move it into a file that uses it"


def _at_start(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported, without those for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, _FUNCTIONS):
            yield from _at_start(node)


def circles(root: Path) -> Iterator[str]:
    """Modules that import each other, directly or by way of others; a line for each circle that is found."""
    modules = _paths(root)
    asked = {name: set(_modules(ast.parse(path.read_bytes()), modules)) - {name} for name, path in modules.items()}
    done: set[str] = set()

    def follow(name: str, way: list[str]) -> Iterator[str]:
        if name in way:
            yield f"{' → '.join([*way[way.index(name) :], name])}: import each other; move what both need below them"
        elif name not in done:
            for other in sorted(asked[name]):
                yield from follow(other, [*way, name])
            done.add(name)

    for name in asked:
        yield from follow(name, [])


def _paths(root: Path) -> dict[str, Path]:
    """Module → its file."""
    source = root / "src"
    paths = {path.relative_to(source).with_suffix(""): path for path in sorted((source / PACKAGE).rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def _modules(tree: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The modules of the package that a module imports, or imports names of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                name if name in known else node.module for name in below if name in known or node.module in known
            )


def diagram(root: Path) -> Iterator[str]:
    """The rooms and their imports: how many statements of one import from another, the heaviest first."""
    source, found = root / "src" / PACKAGE, Counter[tuple[str, str]]()
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).parts
        room = parts[0] if len(parts) > 1 else OUTSIDE
        found.update((room, other) for other in _imported(ast.parse(path.read_bytes())) if other != room)
    for room in sorted({room for room, _ in found}):
        others = sorted((-count, other) for (one, other), count in found.items() if one == room)
        yield f"{room:<12} → {', '.join(f'{other} {-count}' for count, other in others)}"


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    tree = Path(words[0] if words else ".")
    if "--rooms" in sys.argv:
        print("\n".join(diagram(tree)))
        sys.exit(0)
    print("\n".join(table(weigh(tree))))
    odd = [*too_large(tree), *too_small(tree), *circles(tree)]
    sys.stderr.writelines(f"{line}\n" for line in odd)
    sys.exit(bool(odd))
