"""Attestation of the files that a job imports, and reading of a log that is being written.

An environment has a digest of all its importable files; a comparison names the file that differs. A file in
site-packages decides a job's behaviour as much as the manifest does, and a user who can write such a file (a `.pth`
file runs at every start of Python) controls every later job. So a run pins its environment when its first job starts.
Every later launch compares the current environment with the pinned environment, and so does every job before it imports
any of the files. Files of packages that no job of the run imports are omitted, according to the packages' records.
Files that run at every start of Python are always included.

Reading a gigabyte for every job would be slow, so digests are cached per user by size, times and inode of a file. The
module uses only the standard library, since a job imports it before the job trusts its site-packages.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.domain.errors import InfrastructureError
from posttrain.domain.jobs import LogPage
from posttrain.store.atomic import make_folder, open_plain, write_atomic

PACKAGES = Path(__file__).resolve().parents[2]  # the folder that contains posttrain
_IMPORTABLE = (".py", ".pyc", ".pth", ".so", ".pyd", ".dylib", ".zip", ".egg", ".cfg")
_NOT_THE_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "idlelib", "turtledemo"}
)  # entries directly below a root that are not part of the library
_AT_START = frozenset({"sitecustomize", "usercustomize", "site"})
_TRIES = 3  # walks over folders in which other processes add and remove files
_SHOWN = 3
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Environment:
    """The importable files below some folders: `Environment(("/lib",), {"/lib/numpy/__init__.py": "9f…"})`."""

    roots: tuple[str, ...]
    files: Mapping[str, str]  # path → SHA-256, hex
    packages: tuple[str, ...] = ()  # normalised names of the packages whose files are listed; empty: all packages

    @property
    def digest(self) -> str:
        """SHA-256 over paths and contents."""
        listed = json.dumps([self.roots, sorted(self.files.items()), *([self.packages] if self.packages else [])])
        return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"

    def differs(self, pinned: Environment) -> str:
        """Return how this environment differs from the pinned environment; empty if there is no difference."""
        added = sorted(self.files.keys() - pinned.files.keys())
        gone = sorted(pinned.files.keys() - self.files.keys())
        changed = sorted(name for name, digest in pinned.files.items() if self.files.get(name, digest) != digest)
        told = ((changed, "changed"), (added, "is new"), (gone, "was deleted"))
        named = [f"{path} {word}" for paths, word in told for path in paths]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        return ", ".join(named[:_SHOWN]) + more


def read_environment(
    roots: Sequence[str] | None = None, packages: Sequence[str] = (), known: Collection[str] = ()
) -> Environment:
    """Return the current environment.

    Args:
        roots: folders; None: this interpreter's standard library, its site-packages and this package.
        packages: normalised names; files that only records of other packages claim are omitted. Empty: all files.
        known: files that are always listed.
    """
    places = _own_roots() if roots is None else tuple(roots)
    for attempt in range(_TRIES):
        try:
            files = _read(places)
            others = _of_others(places, packages, set(known)) if packages else set()
            kept = {path: digest for path, digest in files.items() if path not in others}
            return Environment(places, kept, tuple(sorted(packages)))
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise InfrastructureError(
                    "the environment changed while it was read; wait until the installation ends, then try again"
                ) from None
    raise AssertionError("the loop must return or raise")


def normalised(name: str) -> str:
    """Return a package's name in normalised form: `typing-extensions` for `typing_extensions`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _of_others(places: Sequence[str], packages: Collection[str], known: set[str]) -> set[str]:
    """Return the files that records of other packages claim, except `known` files.

    If `known` is empty, files that records of `packages` also claim are excepted instead.
    """
    claimed: tuple[set[str], set[str]] = (set(), set())
    for place in places:
        with contextlib.suppress(OSError):
            for folder in os.listdir(place):
                name, _, kind = folder.rpartition(".")
                own = normalised(name.rpartition("-")[0]) in packages
                if kind == "dist-info" and not (own and known):
                    claimed[own].update(_recorded(place, folder))
    return claimed[False] - claimed[True] - known


def _recorded(place: str, folder: str) -> Iterator[str]:
    """Yield the files of a package's record, except those that Python runs or imports at every start."""
    try:
        with open(os.path.join(place, folder, "RECORD"), encoding="utf-8", newline="") as file:
            names = [row[0] for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error):
        return
    for name in names:
        if not name.endswith(".pth") and name.partition("/")[0].partition(".")[0] not in _AT_START:
            yield os.path.normpath(os.path.join(place, name))


def _read(places: tuple[str, ...]) -> dict[str, str]:
    memory = _memory()
    known = _remembered(memory)
    files: dict[str, str] = {}
    fresh: dict[str, list[object]] = {}
    for path, found in _importable(places):
        mark = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
        entry = known.get(path)
        if not (isinstance(entry, list) and len(entry) == 5 and entry[:4] == mark):
            entry = fresh[path] = [*mark, _digest(path)]
        files[path] = str(entry[4])
    if fresh:
        _remember(memory, {**known, **fresh})
    return files


def marks_of(roots: Sequence[str]) -> str:
    """Return a digest of sizes, times and inodes of importable files and their folders.

    Every write changes the digest, even a write of equal bytes or of a file that was removed again.
    """
    found = _importable(roots, folders=True)
    marks = [[path, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino] for path, one in found]
    return hashlib.sha256(json.dumps(sorted(marks)).encode()).hexdigest()


def pin(environment: Environment, folder: Path) -> None:
    """Store a listing below `folder`, under its digest.

    Raises:
        WorkspaceError: the folder does not exist, or is not writable.
    """
    path = _listing(folder, environment.digest)
    if not path.exists():
        make_folder(path.parent, within=folder)
        value = {"roots": environment.roots, "files": dict(environment.files), "packages": environment.packages}
        write_atomic(path, json.dumps(value).encode())


def pinned(digest: str, folder: Path) -> Environment | None:
    """Return the environment with this digest; None: the listing is missing or does not match the digest."""
    try:
        value = json.loads(_listing(folder, digest).read_bytes())
        found = Environment(tuple(value["roots"]), value["files"], tuple(value.get("packages", ())))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.digest == digest else None


def _listing(folder: Path, digest: str) -> Path:
    return folder / "environments" / f"{digest.removeprefix('sha256:')}.json"


def _own_roots() -> tuple[str, ...]:
    """Return the standard library, site-packages, this package, and the zip files that Python prefers to them."""
    places = [sysconfig.get_path("stdlib"), *site.getsitepackages(), str(PACKAGES / "posttrain")]
    zipped = [place for place in sys.path if place.endswith(".zip")]
    return tuple(sorted({os.path.realpath(place) for place in places if os.path.isdir(place)} | set(zipped)))


def _importable(roots: Sequence[str], *, folders: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every regular file that an import may read, once; links are followed. `folders`: yield folders too."""
    visited: set[tuple[int, int]] = set()
    for root in roots:
        if os.path.isfile(root):
            yield root, os.stat(root)
        waiting = [root] if os.path.isdir(root) else []
        while waiting:
            folder = waiting.pop()
            passed = {"__pycache__", *(_NOT_THE_LIBRARY if folder == root else ())}
            with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in visited:
                    continue
                visited.add((status.st_dev, status.st_ino))
                if folders:
                    yield folder, status
                for entry in entries:
                    with contextlib.suppress(OSError):  # a link to nowhere, or to itself
                        if entry.is_dir():
                            waiting += [entry.path] if entry.name not in passed else []
                        elif entry.is_file() and (entry.name.endswith(_IMPORTABLE) or ".so." in entry.name):
                            yield entry.path, entry.stat()


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError:
        return "unreadable"  # an import cannot read it either


def _memory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "posttrain", f"digests-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}.json")


def _remembered(memory: Path) -> dict[str, list[object]]:
    try:
        value = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _remember(memory: Path, entries: Mapping[str, list[object]]) -> None:
    """Store the cache of digests; an unwritable home folder only makes starts slower."""
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = memory.with_name(f".{memory.name}.{os.getpid()}")
        temporary.write_text(json.dumps(entries))
        temporary.chmod(0o600)
        temporary.replace(memory)


def read_log(path: Path, cursor: int = 0) -> LogPage:
    """Return the text from byte `cursor`, and the start of the next page. A missing log is empty.

    Raises:
        IntegrityError: the log is not a plain file.
    """
    try:
        with open_plain(path) as file:
            file.seek(cursor)
            data = file.read(_CHUNK)
    except FileNotFoundError:
        return LogPage("", cursor)
    whole = data.rfind(b"\n") + 1 if len(data) == _CHUNK else len(data)  # do not cut a line, or a character
    data = data[: whole or len(data)]
    return LogPage(data.decode("utf-8", errors="replace"), cursor + len(data))
