"""Refs of assets, the files that refs may name, and the functions in a reward's source.

A user names an asset as `dataset:sort-train@1`, `model:tiny-sort`, `./heldout.jsonl`, `hf:org/name@revision` or
`hf:org/name@revision/path/in/repo.jsonl`. A model that this workspace made is named as `channel:prod`,
`channel:prod@3`, `run:sort-b0ed9b49/sft` or `model:sort/sft@2`, and a reward in an installed package as
`trl.rewards:accuracy_reward`. A data set's path may be a folder or a pattern: `./shards/train-*.jsonl`. On a server,
refs may name only the files that came with the request, and no other file of the machine.

The parameters of a reward's function are read from the source without executing it. If the function is imported, made
by a call or wrapped by an unknown decorator, its parameters are unknown, and the result is the reason, which the caller
reports.

A reward function in an installed package needs no file from the user. The function's module is found and parsed, never
imported here. A generated source file of a few lines represents the function: this file imports the function and
rejects a different version, so the file's digest pins the distribution, the version and the bytes of the module.
"""

import ast
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path

from posttrain.data.files import PACKED, SUFFIXES, is_pattern
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, NotFoundError, nearest
from posttrain.domain.rewards import Signature
from posttrain.store.trees import file_digest

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = Function | ast.ClassDef | ast.expr | ast.alias
_TRANSPARENT = {"cache", "lru_cache", "reward", "metric", "staticmethod", "override", "final"}  # these keep parameters
UNCONFINED = (
    "a server runs a custom dataflow only in an image, which confines it; name an image that the project allows: "
    "image: NAME@sha256:…"
)
_FOLDER: ContextVar[Path | None] = ContextVar("posttrain_confined", default=None)
KINDS = ("dataset", "model", "reward", "harness", "history")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_TRAINED = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}/[a-z0-9][a-z0-9._-]{0,62}(/best)?")  # a run's name and the stage
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FOLDERS = {"dataset": "datasets", "model": "models"}
_MADE = {"channel": NAME, "run": re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")}  # prefix of a model's ref → form of the name


_VERIFIERS = Signature(("state",), takes_all="columns")  # verifiers' rubrics and tasks get all columns


_ENVIRONMENT = "load_environment"  # the conventional function of verifiers' modules


_DEEPEST = 8  # maximum length of a chain of names bound to names


WORD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


SOURCE = "imported_reward.py"  # the file name of the generated source


_TEMPLATE = '''"""{function} of {module}, {distribution} {version}, whose module is {digest}."""

import importlib.metadata
import sys

from {module} import {function}

if importlib.metadata.version("{distribution}") != "{version}":
    raise ImportError("{distribution} must be {version}, as planned; plan the run again")
'''


def definitions(module: ast.Module) -> dict[str, _Definition | None]:
    """Return name → definition for names bound at a module's top level, including `if` and `try`; None: ambiguous."""
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
    """Return the functions defined at a module's top level."""
    return {name: node for name, node in definitions(module).items() if isinstance(node, Function)}


def rubrics(module: ast.Module) -> list[str]:
    """Return the names of rubrics: names bound to a call of a class `…Rubric` or `…RubricGroup`, as in verifiers."""
    return [name for name, node in definitions(module).items() if isinstance(node, ast.Call) and _is_rubric(node)]


def _is_rubric(node: ast.Call) -> bool:
    return _last(node.func).endswith(("Rubric", "RubricGroup"))


def signature_of(module: ast.Module, entry: str) -> Signature | str:
    """Return the parameters of `entry`, or the reason why they are unknown until the module is loaded."""
    return _signature(definitions(module), entry, _DEEPEST)


def _signature(known: dict[str, _Definition | None], name: str, depth: int) -> Signature | str:
    node = known.get(name)
    if node is None or not depth:
        return f"{name} is assigned more than once"
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
    return f"{name} is assigned from an expression"


def _of_call(known: dict[str, _Definition | None], name: str, node: ast.Call, depth: int) -> Signature | str:
    """Return the parameters of `partial(f, …)`, or of an instance of a class in the same file."""
    if _last(node.func) == "partial" and node.args and isinstance(node.args[0], ast.Name):
        whole = _signature(known, node.args[0].id, depth)
        plain = not any(isinstance(a, ast.Starred) for a in node.args) and all(k.arg for k in node.keywords)
        if isinstance(whole, str) or not plain or whole.nameless:
            return whole if isinstance(whole, str) else f"{name} is a partial whose arguments cannot be read"
        given = {keyword.arg for keyword in node.keywords}
        rest = whole.names[len(node.args) - 1 :]
        return replace(whole, names=rest, required=tuple(n for n in whole.required if n in rest and n not in given))
    if _is_rubric(node):
        return _VERIFIERS
    if isinstance(node.func, ast.Name) and isinstance(known.get(node.func.id), ast.ClassDef):
        return _signature(known, node.func.id, depth)
    return f"{name} is the result of calling {_last(node.func) or 'an expression'}"


def _of_class(node: ast.ClassDef) -> Signature | str:
    if any(_last(base.value if isinstance(base, ast.Subscript) else base) == "Task" for base in node.bases):
        return _VERIFIERS
    call = next((part for part in node.body if isinstance(part, Function) and part.name == "__call__"), None)
    if call is None or node.decorator_list:
        return f"class {node.name} does not define its __call__ here"
    found = _of_function(call)
    if isinstance(found, str):
        return found
    if found.nameless:
        return replace(found, nameless=found.nameless[1:])
    own = found.names[0] if found.names else ""  # the name of self
    return replace(found, names=found.names[1:], required=tuple(name for name in found.required if name != own))


def _of_function(node: Function) -> Signature | str:
    for decorator in node.decorator_list:
        name = _last(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if name not in _TRANSPARENT:
            return f"{node.name} is decorated by {name or 'an expression'}"
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
    """Return the last part of a dotted name: `Rubric` for `vf.Rubric`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@dataclass(frozen=True, slots=True)
class ImportedReward:
    """The facts about a package's reward function, without importing it."""

    module: str
    function: str
    distribution: str
    version: str
    digest: str  # the digest of the module's files
    signature: Signature | str  # or the reason why the signature is unknown

    @property
    def source(self) -> bytes:
        """The generated source that represents the function."""
        return _TEMPLATE.format(
            **{key: getattr(self, key) for key in ("module", "function", "distribution", "version", "digest")}
        ).encode()


def imported_reward(word: str) -> ImportedReward:
    """Return the reward `module:function` of an installed package.

    Raises:
        InputError: the text does not have this form, or names a built-in or a file that cannot be read.
        NotFoundError: no such module is installed, or the module does not have the function.
    """
    if not WORD.fullmatch(word):
        raise InputError(f"reward {word!r} must be MODULE:FUNCTION, such as trl.rewards:accuracy_reward")
    module, _, function = word.partition(":")
    files = _files(module)
    owners = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise InputError(
            f"reward {word}: {module} is in the standard library, which has no version to pin; give a "
            "Python file that calls the function"
        )
    if not files or not owners:
        raise NotFoundError(
            f"reward {word}: no installed package has a module {module}; install it next to posttrain, or give a file"
        )
    parsed = {path: _parsed(path, word) for path in files}
    homes = [p for p, tree in parsed.items() if not isinstance(definitions(tree).get(function), ast.alias | None)]
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
    """Return the Python files of a module: its file, or the files at the top of its package."""
    path: list[str] | None = None
    found = None
    for name in accumulate(module.split("."), "{}.{}".format):
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


@contextmanager
def confined(folder: Path) -> Iterator[None]:
    """Within the block, refs may name only files in this folder, by relative paths."""
    token = _FOLDER.set(folder.resolve())
    try:
        yield
    finally:
        _FOLDER.reset(token)


def is_confined() -> bool:
    """Return whether refs come from a remote client and may therefore name only the client's files."""
    return _FOLDER.get() is not None


def refuse_elsewhere(word: str, path: Path) -> None:
    """Reject a ref to a file outside the confined folder, without revealing whether the file exists.

    Args:
        word: the ref as written.
        path: the file's location.

    Raises:
        InputError: the file is outside the folder.
    """
    folder = _FOLDER.get()
    if folder is None:
        return
    plain = Path(word)
    leaves = plain.is_absolute() or word.startswith("~") or ".." in plain.parts or "\0" in word
    if leaves or not path.resolve().is_relative_to(folder):
        raise InputError(
            f"{word[:120]!a}: a server reads only files that are sent with the request; name a registered asset, or "
            "use the command line, which sends the files that a run file names"
        )


def refuse_afar(what: str) -> None:
    """Reject a request that only a local user may make.

    Args:
        what: the error message with the remedy.

    Raises:
        InputError: the request comes from a remote client.
    """
    if is_confined():
        raise InputError(what)


class Source(StrEnum):
    """The source of a referenced asset."""

    REGISTRY = "registry"  # a version registered in this workspace
    PATH = "path"  # a local file or folder
    HUB = "hub"  # the local cache of the Hugging Face hub
    CHANNEL = "channel"  # a current or past release of a channel of this workspace
    RUN = "run"  # the output of a stage of a run in this workspace
    MODULE = "module"  # a reward of an installed package


@dataclass(frozen=True, slots=True)
class AssetRef:
    """A parsed reference: `AssetRef("dataset", Source.REGISTRY, "sort-train", version=1)`."""

    kind: str
    source: Source
    name: str  # name in the registry, path or module as written, org/name on the hub, channel, or run
    version: int | None = None  # version (None: the latest), or a channel's release (None: the live release)
    revision: str | None = None  # hub only
    file: str | None = None  # hub data sets only: a file, folder or pattern; None: the whole repository
    stage: str | None = None  # run only; None: the stage of the run's final model

    @property
    def made(self) -> bool:
        """Whether the ref names a run's output, through a channel, the run, or a version that a stage trained."""
        return self.source in (Source.CHANNEL, Source.RUN) or (self.source is Source.REGISTRY and "/" in self.name)

    @property
    def on_disk(self) -> bool:
        """Whether the referenced files are outside the workspace."""
        return self.source in (Source.PATH, Source.HUB)

    def __str__(self) -> str:
        if self.source is Source.HUB:
            return f"hf:{self.name}@{self.revision}" + (f"/{self.file}" if self.file else "")
        if self.source in (Source.PATH, Source.MODULE):
            return self.name
        if self.source is Source.RUN:
            return f"run:{self.name}" + (f"/{self.stage}" if self.stage else "")
        head = "channel" if self.source is Source.CHANNEL else self.kind
        return f"{head}:{self.name}" + (f"@{self.version}" if self.version is not None else "")


def parse_ref(text: str, kind: str) -> AssetRef:
    """Parse a reference to an asset of `kind`.

    A text that contains a slash, begins with a dot or a tilde, or ends in the suffix of a known file type is a path.

    Raises:
        InputError: the text names an unknown or different kind (the message contains the most similar kind), its name
            or version is malformed, or a hub reference has no revision.
    """
    if kind not in KINDS:
        raise InputError(f"asset kind must be one of {', '.join(KINDS)}, got {kind!r}{nearest(kind, KINDS)}")
    head, colon, rest = text.partition(":")
    if colon and head == "hf":
        return _hub_ref(rest, kind, text)
    if colon and head in _MADE:
        return _made_ref(Source(head), rest, kind, text)
    name, at, version = rest.partition("@")
    trained = head == kind == "model" and _TRAINED.fullmatch(name)
    if _is_path(text) and not trained:
        return AssetRef(kind, Source.PATH, text)
    if not colon:
        raise InputError(
            f"ref must be kind:name@version, hf:org/name@revision or a path, got {text!r}; write {kind}:{text}"
        )
    if kind == "reward" and WORD.fullmatch(text) and ("." in head or not get_close_matches(head, KINDS)):
        return AssetRef(kind, Source.MODULE, text)
    if head not in KINDS:
        raise InputError(f"ref {text!r}: unknown kind {head!r}{nearest(head, KINDS)}; expected {kind}:NAME@VERSION")
    if head != kind:
        raise InputError(f"ref {text!r}: expected a {kind}, got a {head}; write {kind}:NAME@VERSION")
    if not (NAME.fullmatch(name) or trained):
        raise InputError(f"ref {text!r}: name must match {NAME.pattern}, got {name!r}")
    return AssetRef(kind, Source.REGISTRY, name, _number("version", version, text) if at else None)


def _number(what: str, written: str, text: str) -> int:
    if not (written.isascii() and written.isdigit() and len(written) <= 9 and int(written) >= 1):
        raise InputError(f"ref {text!r}: {what} must be a whole number >= 1, got {written!r}")
    return int(written)


def _made_ref(source: Source, rest: str, kind: str, text: str) -> AssetRef:
    """Parse `channel:NAME[@RELEASE]` or `run:RUN[/STAGE]`."""
    if kind != "model":
        raise InputError(f"ref {text!r}: must name a {kind}, but a {source} names a model; write {kind}:NAME")
    name, mark, more = rest.partition("@" if source is Source.CHANNEL else "/")
    if not _MADE[source].fullmatch(name) or (mark and not more):
        form = "channel:NAME or channel:NAME@RELEASE" if source is Source.CHANNEL else "run:RUN or run:RUN/STAGE"
        raise InputError(f"ref {text!r}: must be {form}, got {rest!r}")
    if source is Source.CHANNEL:
        return AssetRef(kind, source, name, version=_number("release", more, text) if mark else None)
    return AssetRef(kind, source, name, stage=more or None)


def _hub_ref(rest: str, kind: str, text: str) -> AssetRef:
    name, _, revision = rest.partition("@")
    if kind not in _HUB_FOLDERS:
        raise InputError(f"ref {text!r}: a {kind} cannot come from the hub; give a Python file or {kind}:NAME@VERSION")
    if not _HUB_NAME.fullmatch(name):
        raise InputError(f"ref {text!r}: must be hf:org/name@revision, got name {name!r}")
    file = None
    if kind == "dataset" and "/" in revision:  # the data set is one file of a repository
        revision, _, file = revision.partition("/")
    if not revision:
        raise InputError(f"ref {text!r}: a hub ref must name its revision, got none; write hf:{name}@COMMIT")
    if file is not None and not {"", ".", ".."}.isdisjoint(file.split("/")):
        raise InputError(f"ref {text!r}: must name a file, got {file!r}; write hf:{name}@{revision}/PATH/IN/REPO.jsonl")
    return AssetRef(kind, Source.HUB, name, revision=revision, file=file)


def _is_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or "/" in text or text.endswith((*SUFFIXES, *PACKED, ".py"))


def local_path(ref: AssetRef, base: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the absolute or relative path of the file or folder that a path or hub reference names.

    Args:
        base: the folder at which relative paths start: the run file's folder.
        environment: the variables that locate the hub's cache folder: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME.

    Raises:
        InputError: the reference names an asset of the workspace, the path is not readable or is outside the files of a
            request, or the hub revision is malformed.
        NotFoundError: there is no such file, or the hub's cache does not contain the file; in the second case, the
            message contains the command that fetches it.
    """
    if not ref.on_disk:
        raise InputError(f"ref {ref} names an asset of the workspace, not a file")
    if ref.source is Source.HUB:
        return _hub_snapshot(ref, environment)
    try:
        path = base / Path(ref.name).expanduser()
        refuse_elsewhere(ref.name, path)
        there = path.exists() or (ref.kind == "dataset" and is_pattern(path))
    except (OSError, RuntimeError, ValueError) as error:  # the path is too long or not permitted, or ~USER is unknown
        raise InputError(f"{ref.kind} {ref.name[:60]}: is not a readable path: {error}") from error
    if not there:
        hub = ref.kind in _HUB_FOLDERS and ref.name.count("/") == 1 and _HUB_NAME.fullmatch(ref.name)
        way = f"write hf:{ref.name}@REVISION for the hub's, or " if hub else ""
        raise NotFoundError(f"{ref.kind} {ref.name}: no such file or folder ({path}); {way}check the path")
    return path


def _hub_snapshot(ref: AssetRef, environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = cache / f"{_HUB_FOLDERS[ref.kind]}--{ref.name.replace('/', '--')}"
    revision = ref.revision or ""
    if ".." in revision.split("/") or revision.startswith("/"):
        raise InputError(f"ref {ref}: revision must be a commit, branch or tag, got {revision!r}")
    pointer = folder / "refs" / revision
    commit = pointer.read_text().strip() if pointer.is_file() else revision
    snapshot = folder / "snapshots" / commit
    found = snapshot / ref.file if ref.file else snapshot
    there = any(found.parent.glob(found.name)) if is_pattern(found) else found.exists() if ref.file else found.is_dir()
    if not there:
        only = f" --include '{ref.file}'" if is_pattern(found) else f" {ref.file}" if ref.file else ""
        what = f"--repo-type dataset {ref.name}{only}" if ref.kind == "dataset" else ref.name
        command = f"hf download {what} --revision {revision}"
        raise NotFoundError(f"ref {ref}: not in the local cache {cache}; fetch it with: {command}")
    return found
