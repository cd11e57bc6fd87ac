"""How a reward's function is called, read from its source: nothing is executed.

What is imported, made by a call or wrapped by an unknown decorator has parameters that only its own code knows. Then
the answer is the reason why, and whoever asks says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from posttrain.domain.rewards import Signature

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = Function | ast.ClassDef | ast.expr | ast.alias
_TRANSPARENT = {"cache", "lru_cache", "reward", "metric", "staticmethod", "override", "final"}  # they keep parameters
_VERIFIERS = Signature(("state",), takes_all="columns")  # its rubrics and tasks get all there is
_ENVIRONMENT = "load_environment"  # a function of verifiers' modules
_DEEPEST = 8  # names that stand for names


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
