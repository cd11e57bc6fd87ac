"""The list of mutants: one YAML file per area; each mutant replaces an exact piece of a source file.

::

    control/attempts.py:                       below src/posttrain
      tests: [unit/test_control_hazards.py]    below tests; one must fail
      mutants:
        - name: a result between two looks is lost
          old: "return trainer.collect(folder) or observation"
          new: "return observation"
          tests: [...]                         instead of the file's
            equivalent: why no test can notice   such a mutant is not run

          `old` must occur in its file exactly once: a change of the line also requires a change of the mutant.
"""

from __future__ import annotations

import ast
import functools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
_TOP = re.compile(r"^[A-Za-z@_]", re.MULTILINE)  # where a statement of the module begins
LISTS = Path(__file__).resolve().parent / "lists"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change that a test must notice."""

    area: str  # name of its list
    file: str  # below src/posttrain
    name: str
    old: str
    new: str
    tests: tuple[str, ...]  # pytest arguments, below tests/
    equivalent: str = ""

    @property
    def path(self) -> Path:
        """The source file, from the root of the repository."""
        return Path("src", "posttrain", self.file)

    def apply(self, source: str) -> str:
        """Return the mutated source.

        Raises:
            ValueError: `old` does not occur exactly once, or the result is not Python.
        """
        found = source.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self}: `old` must stand in {self.path} exactly once, found {found} times; write it anew"
            )
        mutated = source.replace(self.old, self.new)
        try:
            self._compile(mutated, source.index(self.old))
        except SyntaxError as error:
            raise ValueError(f"{self}: the mutated {self.path} is no Python: {error}; mend `new`") from error
        if self.old == self.new:
            raise ValueError(f"{self}: `new` must differ from `old`, got the same")
        return mutated

    def _compile(self, mutated: str, at: int) -> None:
        """Compile the changed statements of the module, or all of it where they cannot be told apart: a third of it."""
        begin = max((found.start() for found in _TOP.finditer(mutated, 0, at + 1)), default=0)
        end = _TOP.search(mutated, at + len(self.new))
        try:
            compile(mutated[begin : end.start() if end else None], self.file, "exec")
        except SyntaxError:
            compile(mutated, self.file, "exec")

    def __str__(self) -> str:
        return f"{self.area}: {self.file}: {self.name}"


def load(folder: Path = LISTS) -> list[Mutant]:
    """Return the mutants of all lists."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        for file, entry in yaml.safe_load(path.read_text()).items():
            for mutant in entry["mutants"]:
                tests = tuple(mutant.get("tests", entry.get("tests", ())))
                fields = {key: mutant[key] for key in ("name", "old", "new")}
                found.append(Mutant(path.stem, file, tests=tests, equivalent=mutant.get("equivalent", ""), **fields))
    return found


def check(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """Return the errors of the list, one line each: a stale entry, a duplicate name, a test that does not exist."""
    problems, names = [], set[str]()
    for mutant in mutants:
        if str(mutant) in names:
            problems.append(f"{mutant}: two mutants have this name; rename one")
        names.add(str(mutant))
        try:
            mutant.apply((root / mutant.path).read_text())
        except (OSError, ValueError) as error:
            problems.append(str(error))
        if not mutant.tests and not mutant.equivalent:
            problems.append(f"{mutant}: names no tests that must notice it")
        for test in mutant.tests:
            file, *parts = test.partition("[")[0].split("::")
            if not (root / "tests" / file).exists():
                problems.append(f"{mutant}: there is no tests/{file}")
            elif parts and not _defines(root, root / "tests" / file, parts):
                problems.append(f"{mutant}: tests/{file} defines no {'::'.join(parts)}; name a test that exists")
    return problems


def _defines(root: Path, file: Path, names: Sequence[str]) -> bool:
    """Return whether a test file defines a test: a function, a class, or a method of a class or of its bases."""
    found = _definitions(file).get(names[0])
    if found is None or len(names) == 1:
        return isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if isinstance(found, ast.ImportFrom):
        place = (found.module or "").replace(".", "/") + ".py"
        homes = (root / "src", *(path.parent for path in root.glob(f"tests/**/{place}")))
        return any(_defines(root, home / place, names) for home in homes if (home / place).exists())
    if not isinstance(found, ast.ClassDef):
        return False
    methods = [one.name for one in found.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in found.bases]
    return names[1] in methods or any(
        _defines(root, file, (base.id, *names[1:])) for base in bases if isinstance(base, ast.Name)
    )


@functools.cache
def _definitions(file: Path) -> dict[str, ast.stmt]:
    """Return top-level name → its definition in a file: a function, a class or an import."""
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            found |= {alias.asname or alias.name: statement for alias in statement.names}
    return found


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants by a seed, from every area; mutants of the same test file are adjacent."""
    generator = random.Random(seed)
    alive = [mutant for mutant in mutants if not mutant.equivalent]
    areas = sorted({mutant.area for mutant in alive})
    first = [generator.choice([mutant for mutant in alive if mutant.area == area]) for area in areas]
    rest = [mutant for mutant in alive if mutant not in first]
    chosen = [*first, *generator.sample(rest, max(0, count - len(first)))][:count]
    return sorted(chosen, key=lambda mutant: (mutant.tests, str(mutant)))
