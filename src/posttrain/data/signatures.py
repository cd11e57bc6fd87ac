"""How a reward's function is called, read from its source: nothing is executed.

What is imported, made by a call or wrapped by an unknown decorator has parameters that only its own code knows. Then
the answer is the reason why, and whoever asks says so.

A reward function that an installed package has: `trl.rewards:accuracy_reward`, without a file of one's own.

It is found and read, never imported here. What stands for it is a source of a few lines, which imports it and refuses
another version: so its digest pins distribution, version and the bytes of the module.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, NotFoundError, nearest
from posttrain.domain.rewards import Signature
from posttrain.store.trees import file_digest

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = Function | ast.ClassDef | ast.expr | ast.alias
_TRANSPARENT = {"cache", "lru_cache", "reward", "metric", "staticmethod", "override", "final"}  # they keep parameters
_VERIFIERS = Signature(("state",), takes_all="columns")  # its rubrics and tasks get all there is
_ENVIRONMENT = "load_environment"  # a function of verifiers' modules
_DEEPEST = 8  # names that stand for names
WORD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
SOURCE = "imported_reward.py"  # the name of the source that stands for it
_TEMPLATE = '''"""{function} of {module}, {distribution} {version}, whose module is {digest}."""

import importlib.metadata
import sys

from {module} import {function}

if importlib.metadata.version("{distribution}") != "{version}":
    raise ImportError("{distribution} must be {version}, as planned; plan the run again")
'''


def definitions(module: ast.Module) -> dict[str, _Definition | None]:
    """Names that a module binds at its top, also under `if` and `try`: to what, None where there are several ways."""
    found: dict[str, _Definition | None] = {}
    for name, value, certain in _bindings(module.body, True):
        found[name] = value if certain or name not in found else None
    return found


def _bindings(body: list[ast.stmt], certain: bool) -> Iterator[tuple[str, _Definition, bool]]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node, certain
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias, certain
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, certain
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value, certain
        elif isinstance(node, ast.If | ast.Try | ast.With):
            branches = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            branches += [handler.body for handler in getattr(node, "handlers", [])]
            for branch in branches:
                yield from _bindings(branch, False)


def functions(module: ast.Module) -> dict[str, Function]:
    """The functions that a module defines at its top."""
    return {name: node for name, node in definitions(module).items() if isinstance(node, Function)}


def rubrics(module: ast.Module) -> list[str]:
    """Names that are bound to a call of a class whose name ends in Rubric or RubricGroup: verifiers' way."""
    return [name for name, node in definitions(module).items() if isinstance(node, ast.Call) and _is_rubric(node)]


def _is_rubric(node: ast.Call) -> bool:
    return _last(node.func).endswith(("Rubric", "RubricGroup"))


def signature_of(module: ast.Module, entry: str) -> Signature | str:
    """The parameters of what `entry` names, or why they are not known before it is loaded."""
    return _signature(definitions(module), entry, _DEEPEST)


def _signature(known: dict[str, _Definition | None], name: str, depth: int) -> Signature | str:
    node = known.get(name)
    if node is None or not depth:
        return f"{name} is bound in several ways"
    if isinstance(node, ast.alias):
        return f"{name} is imported"
    if isinstance(node, Function):
        return _VERIFIERS if node.name == _ENVIRONMENT else _of_function(node)
    if isinstance(node, ast.ClassDef):
        return _of_class(node)
    if isinstance(node, ast.Name):
        return _signature(known, node.id, depth - 1)
    if isinstance(node, ast.Lambda):
        return _of_arguments(node.args)
    if isinstance(node, ast.Call):
        return _of_call(known, name, node, depth - 1)
    return f"{name} is made by an expression"


def _of_call(known: dict[str, _Definition | None], name: str, node: ast.Call, depth: int) -> Signature | str:
    """`partial(f, …)`, or an object of a class of this file."""
    if _last(node.func) == "partial" and node.args and isinstance(node.args[0], ast.Name):
        whole = _signature(known, node.args[0].id, depth)
        plain = not any(isinstance(a, ast.Starred) for a in node.args) and all(k.arg for k in node.keywords)
        if isinstance(whole, str) or not plain or whole.nameless:
            return whole if isinstance(whole, str) else f"{name} is made by partial with arguments of its own"
        given = {keyword.arg for keyword in node.keywords}
        rest = whole.names[len(node.args) - 1 :]
        return replace(whole, names=rest, required=tuple(n for n in whole.required if n in rest and n not in given))
    if _is_rubric(node):
        return _VERIFIERS
    if isinstance(node.func, ast.Name) and isinstance(known.get(node.func.id), ast.ClassDef):
        return _signature(known, node.func.id, depth)
    return f"{name} is made by calling {_last(node.func) or 'something'}"


def _of_class(node: ast.ClassDef) -> Signature | str:
    if any(_last(base.value if isinstance(base, ast.Subscript) else base) == "Task" for base in node.bases):
        return _VERIFIERS
    call = next((part for part in node.body if isinstance(part, Function) and part.name == "__call__"), None)
    if call is None or node.decorator_list:
        return f"class {node.name} gets its __call__ from elsewhere"
    found = _of_function(call)
    if isinstance(found, str):
        return found
    if found.nameless:
        return replace(found, nameless=found.nameless[1:])
    own = found.names[0] if found.names else ""  # self
    return replace(found, names=found.names[1:], required=tuple(name for name in found.required if name != own))


def _of_function(node: Function) -> Signature | str:
    for decorator in node.decorator_list:
        name = _last(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if name not in _TRANSPARENT:
            return f"{node.name} is decorated by {name or 'something'}"
    return _of_arguments(node.args)


def _of_arguments(found: ast.arguments) -> Signature:
    positional = [*found.posonlyargs, *found.args]
    without = positional[: len(positional) - len(found.defaults)]
    required = [a.arg for a in without if a not in found.posonlyargs]
    required += [a.arg for a, default in zip(found.kwonlyargs, found.kw_defaults, strict=True) if default is None]
    return Signature(
        names=tuple(a.arg for a in (*found.args, *found.kwonlyargs)),
        required=tuple(required),
        takes_all=found.kwarg.arg if found.kwarg else "",
        nameless=tuple(a.arg for a in found.posonlyargs),
    )


def _last(node: ast.expr) -> str:
    """`Rubric` of `vf.Rubric`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@dataclass(frozen=True, slots=True)
class ImportedReward:
    """What is known of a package's reward function without importing it."""

    module: str
    function: str
    distribution: str
    version: str
    digest: str  # of the module's files
    signature: Signature | str  # or why it is not known

    @property
    def source(self) -> bytes:
        """The source that stands for it."""
        return _TEMPLATE.format(
            **{key: getattr(self, key) for key in ("module", "function", "distribution", "version", "digest")}
        ).encode()


def imported_reward(word: str) -> ImportedReward:
    """Find `module:function` among the installed packages.

    Raises:
        InputError: not of this form, a built-in, or a file that cannot be read.
        NotFoundError: no such module is installed, or it does not have the function.
    """
    if not WORD.fullmatch(word):
        raise InputError(f"reward {word!r} must be MODULE:FUNCTION, such as trl.rewards:accuracy_reward")
    module, _, function = word.partition(":")
    files = _files(module)
    owners = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise InputError(
            f"reward {word}: {module} is of the standard library: no version to pin; call it in a file of yours"
        )
    if not files or not owners:
        raise NotFoundError(
            f"reward {word}: no installed package has a module {module}; install it beside posttrain, or give a file"
        )
    parsed = {path: _parsed(path, word) for path in files}
    homes = [path for path, tree in parsed.items() if _defines(tree, function)]
    known = {name for tree in parsed.values() for name in definitions(tree) if not name.startswith("_")}
    if not homes and not any(function in path.read_text(encoding="utf-8") for path in files):
        raise NotFoundError(f"reward {word}: {module} has no {function}{nearest(function, known)}")
    one = len(homes) == 1
    return ImportedReward(
        module=module,
        function=function,
        distribution=owners[0],
        version=importlib.metadata.version(owners[0]),
        digest=digest_json({path.name: file_digest(path) for path in files}),
        signature=signature_of(parsed[homes[0]], function) if one else f"{function} is imported from elsewhere",
    )


def _files(module: str) -> list[Path]:
    """The Python files of a module: its own, or those at the top of its package."""
    path: list[str] | None = None
    found = None
    for end in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:end])
        found = PathFinder.find_spec(name, path)
        if found is None:
            return []
        path = list(found.submodule_search_locations or [])
    if path:
        return sorted(file for folder in path for file in Path(folder).glob("*.py"))
    return [Path(found.origin)] if found and found.origin and found.origin.endswith(".py") else []


def _parsed(path: Path, word: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=path.name)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"reward {word}: {path.name} cannot be read: {error}") from error


def _defines(tree: ast.Module, name: str) -> bool:
    node = definitions(tree).get(name)
    return node is not None and not isinstance(node, ast.alias)
