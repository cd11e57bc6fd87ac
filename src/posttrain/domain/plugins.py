"""Extensions by installed packages: entry points of the groups `posttrain.kinds`, `posttrain.trainers` and others.

Entry points are read only if a name is requested that Posttrain itself lacks, and their objects are imported only when
they are used. Errors of a package are reported when a command requests the name of its entry point, and by
`posttrain doctor`; they do not affect other commands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from posttrain.domain.canonical import digest_files, digest_json
from posttrain.domain.errors import InputError, PosttrainError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import EntryPoint

TRAINERS: Final = "posttrain.trainers"
EXECUTORS: Final = "posttrain.executors"
_PREFIX = "posttrain."
_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,62}$")
_REQUIRED = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
_COMPILED = (".pyc", ".pyo")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package: `Plugin("posttrain.trainers", "words", "posttrain-words 1.0", …)`."""

    group: str
    name: str
    distribution: str  # name and version
    point: EntryPoint

    def __str__(self) -> str:
        kind = self.group.removeprefix(_PREFIX).removesuffix("s").replace("_", " ")
        return f"{kind} {self.name!r} of {self.distribution}"

    def load(self) -> Any:
        """Import and return the object that the entry point names.

        Raises:
            InputError: the import raises any error.
        """
        with self.calling(f"loading {self.point.value}"):
            return self.point.load()

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Convert errors of the package's code, except Posttrain's own, to one-line errors that name the distribution.

        Raises:
            InputError: the code raised an error that is not one of Posttrain's.
        """
        try:
            yield
        except PosttrainError:
            raise
        except (Exception, SystemExit) as error:
            said = " ".join(str(error).split())[:300]
            raise InputError(f"{self}: {what} raised {type(error).__name__}: {said}; fix or uninstall it") from error

    def code_digest(self, *modules: str) -> str:
        """Return the digest of the plugin's code.

        It covers name and version, every file of the package on the disk, and the versions of its requirements.

        Args:
            modules: dotted names of other modules that the plugin runs.

        Raises:
            InputError: the sources of the plugin cannot be read.
        """
        files: dict[str, str] = {}
        for module in dict.fromkeys((self.point.module, *modules)):
            with self.calling(f"reading the sources of {module}"):
                files |= _digests(module)
        required = self.point.dist.requires if self.point.dist else None
        names = sorted({found[0] for one in required or () if (found := _REQUIRED.match(one))})
        versions = {name: _version(name) for name in names}
        return digest_json({"distribution": self.distribution, "files": files, "requires": versions})


def find_plugin(group: str, name: str) -> Plugin | None:
    """Return the entry point with this name; None: no installed package has one.

    Raises:
        InputError: two packages have the name, or none was found and a package cannot be read.
    """
    found, troubles = _scan()
    plugins = [plugin for plugin in found if (plugin.group, plugin.name) == (group, name)]
    if len(plugins) > 1:
        owners = " and ".join(sorted(plugin.distribution for plugin in plugins))
        raise InputError(f"{plugins[0]}: must be in one installed package, got {owners}; uninstall one of them")
    if not plugins and troubles:
        raise InputError(f"{name!r} may be in an installed package that cannot be read: {troubles[0]}")
    return plugins[0] if plugins else None


def plugin_names(group: str) -> list[str]:
    """Return the names that installed packages add to a group, for hints."""
    return sorted({plugin.name for plugin in _scan()[0] if plugin.group == group})


def all_plugins(own: Mapping[str, Collection[str]]) -> tuple[list[Plugin], list[str]]:
    """Return all installed plugins, and one line for each error; no plugin is imported.

    Args:
        own: group → Posttrain's own names, which no package can override.
    """
    found, troubles = list(_scan()[0]), list(_scan()[1])
    for group, name in dict.fromkeys((plugin.group, plugin.name) for plugin in found):
        mine = [plugin for plugin in found if (plugin.group, plugin.name) == (group, name)]
        if group not in own:
            troubles.append(f"{mine[0]}: there is no group {group}, only {', '.join(sorted(own))}")
        elif name in own[group]:
            troubles.append(f"{mine[0]}: Posttrain itself has this name; rename the entry point")
        elif len(mine) > 1:
            owners = " and ".join(sorted(plugin.distribution for plugin in mine))
            troubles.append(f"{mine[0]}: must be in one installed package, got {owners}; uninstall one of them")
        elif not _NAME.match(name):
            troubles.append(
                f"{mine[0]}: a name must consist of lower-case letters, digits, - and _; rename the entry point"
            )
    return found, troubles


@functools.cache
def _scan() -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    """Return every entry point of Posttrain's groups, and the errors. For other packages, only one file is read."""
    from importlib import metadata  # late: a slow import, and most commands need no plugin

    found: dict[tuple[str, str, str], Plugin] = {}
    troubles: list[str] = []
    for distribution in metadata.distributions():
        told = "an installed package"
        try:
            if f"[{_PREFIX}" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            told = f"{distribution.name} {distribution.version}"
            for point in distribution.entry_points:
                if point.group.startswith(_PREFIX):
                    plugin = Plugin(point.group, point.name, told, point)
                    found.setdefault((distribution.name, point.group, point.name), plugin)
        except Exception as error:
            troubles.append(f"{told}: entry_points.txt cannot be read: {type(error).__name__}: {error}; reinstall it")
    return tuple(found.values()), tuple(troubles)


def _digests(module: str) -> dict[str, str]:
    """Return path → digest for the files of the package or module at the beginning of a dotted name."""
    spec = _outermost(module)
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if not folders:
        path = Path(str(spec.origin))
        return digest_files({path.name: path})
    files = {
        f"{spec.name}/{path.relative_to(folder).as_posix()}": path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in _COMPILED
    }
    if not files:
        raise FileNotFoundError(f"{folders[0]} contains no file")
    return digest_files(files)


def _outermost(module: str) -> ModuleSpec:
    """Return the spec of the first part of a dotted name that is not a namespace package."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:count]))
        if spec is None:
            break
        if spec.origin is not None:
            return spec
    raise ModuleNotFoundError(f"no module named {module!r}")


def _version(library: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"
