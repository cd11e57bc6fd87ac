"""A reward function that an installed package has: `trl.rewards:accuracy_reward`, without a file of one's own.

It is found and read, never imported here. What stands for it is a source of a few lines, which imports it and refuses
another version: so its digest pins distribution, version and the bytes of the module.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from posttrain.data.signatures import definitions, signature_of
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, NotFoundError, nearest
from posttrain.domain.rewards import Signature
from posttrain.store.trees import file_digest

WORD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
SOURCE = "imported_reward.py"  # the name of the source that stands for it
_TEMPLATE = '''"""{function} of {module}, {distribution} {version}, whose module is {digest}."""

import importlib.metadata
import sys

from {module} import {function}

if importlib.metadata.version("{distribution}") != "{version}":
    raise ImportError("{distribution} must be {version}, as planned; plan the run again")
'''


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
