"""Folders as content-addressed trees, scratch folders that last for a block, and the Merkle tree of RFC 6962.

The listing of a tree is a blob that names the blobs of its files:

::

    {"format": "posttrain.tree/1", "files": {"config.json": {"digest": "sha256:…", "size": 512}, …}}

The listing is canonical JSON, so equal folders have equal digests. Paths are relative and use `/`; empty folders, modes
and times do not affect the digest.

`scratch` creates a folder that exists during a block. If the process is killed, the next call removes the folder.

The Merkle tree grows leaf by leaf:
`leaf = SHA-256(0x00 || entry)`, `node = SHA-256(0x01 || left || right)`. A tree of n leaves is stored as the roots of
its perfect subtrees, one for each bit of n that is set, the largest first. Whenever 256, 256², … leaves are complete,
their root is stored as a *tile*, so that proofs need not hash everything again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.domain.adapters import extended
from posttrain.domain.canonical import DIGEST_PREFIX, canonical_json, digest_bytes, digest_chunks, is_digest
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.ports import BlobStore
from posttrain.store.atomic import files_below, make_folder, open_plain, sync_folder, taken, unwritable, writing

_MOVED = ".moved-"
_FRESH_SECONDS = 60.0  # a younger folder is possibly not locked yet
FORMAT = "posttrain.tree/1"
_CHUNK = 1 << 20
_BESIDE = re.compile(  # files that a trainer leaves next to a model, by path in its folder; most are pickles
    r"(?:^|/)(?:checkpoint-\d+/|(?:training_args\.bin|optimizer\.(?:pt|bin)|scheduler\.pt|scaler\.pt|rng_state\w*\.pth|"
    r"trainer_state\.json)$)"
)
HASH = 32  # bytes
EMPTY = hashlib.sha256(b"").digest()  # root of no leaves
LEVELS = 8  # levels of the binary tree that a tile spans: 256 leaves


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a folder below `parent` that exists during the block; first remove the folders of killed processes.

    Raises:
        WorkspaceError: the folder cannot be created.
    """
    make_folder(parent)
    _sweep(parent, prefix)
    with writing(parent):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)  # the kernel releases the lock when this process dies
        yield folder
    finally:
        remove_tree(folder)
        os.close(held)


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it, as far as possible, however deeply folders are nested.

    A job may have created folders nested more deeply than a recursive walk (a thousand levels) or a path (4096
    characters) allows. Nested folders are therefore moved up first, until no folder is nested.
    """
    with suppress(OSError):
        folder.chmod(0o700)
        waiting = _folders(folder)
        while waiting:
            here = waiting.pop()
            here.chmod(0o700)
            for inner in _folders(here):
                inner.chmod(0o700)  # moving a folder requires write access to it
                moved = folder / f"{_MOVED}{os.urandom(12).hex()}"
                inner.rename(moved)
                waiting.append(moved)
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            if time.time() - folder.stat().st_mtime < _FRESH_SECONDS:
                continue  # possibly new and not locked yet
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # already removed, or owned by another user
        try:
            if taken(held):
                remove_tree(folder)
        finally:
            os.close(held)


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of a tree; `size` in bytes."""

    digest: str
    size: int


def put_tree(
    blobs: BlobStore,
    folder: Path,
    *,
    follow_links: bool = False,
    skip: Callable[[str], bool] = lambda name: False,
    progress: Callable[[str], None] = lambda _: None,
) -> str:
    """Store every file below `folder` and the listing; return the listing's digest.

    Args:
        follow_links: whether to store the target of a symbolic link to a file (a hub's cache has such links); if not,
            links are rejected.
        skip: returns whether to leave out a file, by its path in the tree.
        progress: called after each file with a text that states the number of files and bytes stored.

    Raises:
        InputError: the folder does not exist; there is a link or special file, or a name that is not portable.
        WorkspaceError: the store is full or read-only.
    """
    done = [0, 0]

    def store(path: Path) -> str:
        digest = blobs.put_file(path)
        done[0], done[1] = done[0] + 1, done[1] + path.stat().st_size
        progress(f"{done[0]} files, {done[1] / 2**20:.1f} MiB stored")
        return digest

    return blobs.put(_listing(folder, store, follow_links, skip))


def tree_digest(folder: Path, *, follow_links: bool = False, skip: Callable[[str], bool] = lambda name: False) -> str:
    """Return the digest that `put_tree` would return, without storing anything; InputErrors: see `put_tree`."""
    return digest_bytes(_listing(folder, file_digest, follow_links, skip))


def is_byproduct(name: str) -> bool:
    """Return whether a file is a by-product of programs.

    By-products are compiled Python and hidden files of version control, a downloader or a desktop. An asset is the same
    version with and without them.
    """
    return name.endswith(".pyc") or any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def beside_model(name: str) -> bool:
    """Return whether a file in a model's folder is not part of the model.

    Such files are by-products and files from which a trainer resumes. A model is the same version with and without
    them.
    """
    return is_byproduct(name) or _BESIDE.search(name) is not None


def not_taken(folder: Path) -> str:
    """Return one line about files that a trainer left next to a model, or an empty text. Reads only names."""
    names = [path.relative_to(folder).as_posix() for path in files_below(folder)]
    found = sorted({name[: place.end()] for name in names if (place := _BESIDE.search(name))})
    return f"{folder}: not opened and not stored, not part of the model: {', '.join(found)}" if found else ""


def put_files(blobs: BlobStore, files: Mapping[str, Path]) -> str:
    """Store files as a tree, under these names; return the tree's digest.

    Raises:
        InputError: a file cannot be read, or a name is not portable.
        WorkspaceError: the store is full or read-only.
    """
    return blobs.put(_of_files(files, blobs.put_file))


def files_digest(files: Mapping[str, Path]) -> str:
    """Return the digest that `put_files` would return, without storing anything; InputErrors: see `put_files`."""
    return digest_bytes(_of_files(files, file_digest))


def file_digest(path: Path) -> str:
    """Return the digest `sha256:…` of a file, computed in constant memory.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open_plain(path, follow=True) as file:
            return digest_chunks(iter(lambda: file.read(_CHUNK), b""))
    except IntegrityError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from error


def _listing(folder: Path, store: Callable[[Path], str], follow_links: bool, skip: Callable[[str], bool]) -> bytes:
    if not folder.is_dir():
        raise InputError(f"a tree must be a folder, got {folder}; check the path")
    files: dict[str, Path] = {}
    try:
        found = sorted(files_below(folder))
    except IntegrityError as error:
        raise InputError(str(error)) from error
    for path in found:
        name = path.relative_to(folder).as_posix()
        if skip(name):
            continue
        if (path.is_symlink() and not follow_links) or not path.is_file():
            raise InputError(f"a tree contains plain files only, got {path}; replace it with a copy of its target")
        files[name] = path
    return _of_files(files, store)


def _of_files(files: Mapping[str, Path], store: Callable[[Path], str]) -> bytes:
    listing: dict[str, Any] = {}
    for name, path in files.items():
        if not _portable(name):
            raise InputError(f"a tree's file names must be UTF-8 without backslashes, got {name!r}; rename it")
        listing[name] = {"digest": store(path), "size": path.stat().st_size}
    return canonical_json({"format": FORMAT, "files": listing})


def put_listing(blobs: BlobStore, files: Mapping[str, TreeFile]) -> str:
    """Store the listing of a tree whose files are stored; return the tree's digest.

    Raises:
        IntegrityError: a name would leave the folder.
    """
    data = listing_bytes(files)
    _check_paths(digest_bytes(data), files)
    return blobs.put(data)


def listing_bytes(files: Mapping[str, TreeFile]) -> bytes:
    """Return the listing of a tree; its digest is the tree's."""
    return canonical_json({"format": FORMAT, "files": {name: asdict(file) for name, file in sorted(files.items())}})


def put_extended(blobs: BlobStore, base: str, adapter: str) -> str:
    """Store the listing of a model with an adapter, whose files are stored; return the tree's digest.

    Args:
        base: the digest of the model's tree; an adapter that it has is replaced.
        adapter: the digest of a tree with the adapter's files.

    Raises:
        NotFoundError: a listing is missing.
        IntegrityError: `adapter` has other files than those of an adapter.
    """
    return put_listing(blobs, extended(tree_listing(blobs, base), tree_listing(blobs, adapter)))


def tree_listing(blobs: BlobStore, digest: str) -> dict[str, TreeFile]:
    """Return the files of a tree by path, sorted.

    Raises:
        NotFoundError: the blob does not exist.
        IntegrityError: the blob is corrupt or not a tree, or a path would leave the folder.
    """
    value = read_json(blobs, digest)
    try:
        if value["format"] != FORMAT:
            raise IntegrityError(
                f"blob {digest} must be a {FORMAT}, got {value['format']!r}; name the digest of a tree"
            )
        files = {name: TreeFile(file["digest"], int(file["size"])) for name, file in sorted(value["files"].items())}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise IntegrityError(f"blob {digest} is not a tree listing: {error!r}; name the digest of a tree") from error
    _check_paths(digest, files)
    return files


def materialise(blobs: BlobStore, digest: str, cache_dir: Path) -> Path:
    """Return the tree as a folder below `cache_dir`, shared by all callers for this digest; do not write into it.

    The files are read-only, and every call hashes each of them, because a model that was altered in the cache would be
    trained and evaluated under a wrong digest. A folder that does not match its listing is recreated; a process that
    reads the old folder at that moment keeps its open files. The folder appears atomically, and several processes may
    call this function at the same time.

    Raises:
        NotFoundError, IntegrityError: a blob is missing or corrupt.
        WorkspaceError: the cache cannot be written.
    """
    target = cache_dir / "trees" / digest.removeprefix(DIGEST_PREFIX)
    listing = tree_listing(blobs, digest)
    if _matches(target, listing):
        return target
    with scratch(target.parent, ".new-") as temporary:
        made = temporary / "made"
        _fill(blobs, listing, made)
        _put_in_place(made, target, listing, temporary / "damaged")
        sync_folder(target.parent)
    return target


def verify_tree(blobs: BlobStore, digest: str) -> int:
    """Read the listing and every file back, in constant memory; return the number of bytes.

    Raises:
        NotFoundError, IntegrityError: a blob is missing or corrupt; the error names the first such blob.
    """
    total = len(blobs.get(digest))
    for name, file in tree_listing(blobs, digest).items():
        size = blobs.check(file.digest)
        if size != file.size:
            raise IntegrityError(f"tree {digest}: {name} must have {file.size} bytes, got {size}; store it again")
        total += size
    return total


def stored_sizes(blobs: BlobStore, forms: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes of files and trees in bytes, by digest; a missing blob or an invalid tree is left out.

    Args:
        forms: the form of each digest, `file` or `tree`.
    """
    sizes = {}
    for digest, form in forms.items():
        try:
            sizes[digest] = blobs.size(digest)
            if form == "tree":
                sizes[digest] += sum(file.size for file in tree_listing(blobs, digest).values())
        except (IntegrityError, NotFoundError):  # reading it reports the error
            sizes.pop(digest, None)
    return sizes


def read_json(blobs: BlobStore, digest: str) -> Any:
    """Return the JSON document stored as this blob.

    Raises:
        NotFoundError: the blob does not exist.
        IntegrityError: the blob is corrupt, or not JSON.
    """
    try:
        return json.loads(blobs.get(digest))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"blob {digest} is not JSON: {error}; name the digest of a document") from error


def _fill(blobs: BlobStore, listing: Mapping[str, TreeFile], folder: Path) -> None:
    make_folder(folder)
    for name, file in listing.items():
        path = folder / name
        make_folder(path.parent)
        blobs.fetch(file.digest, path)
        path.chmod(0o400)


def _matches(folder: Path, listing: Mapping[str, TreeFile]) -> bool:
    """Return whether the folder contains exactly the listed files. Sizes are compared first, because this is cheap."""
    try:
        paths = list(files_below(folder))
        found = {path.relative_to(folder).as_posix(): path for path in paths}
        return (
            folder.is_dir()
            and found.keys() == listing.keys()
            and not any(path.is_symlink() for path in paths)
            and all(path.stat().st_size == listing[name].size for name, path in found.items())
            and all(file_digest(path) == listing[name].digest for name, path in found.items())
        )
    except (OSError, InputError, IntegrityError):  # unreadable, or removed during the check
        return False


def _put_in_place(made: Path, target: Path, listing: Mapping[str, TreeFile], aside: Path) -> None:
    """Rename `made` to `target`. An existing folder stays if it matches; otherwise it is moved to `aside`."""
    try:
        if target.is_dir() and not _matches(target, listing):
            os.rename(target, aside)
        os.rename(made, target)
    except OSError as error:
        if not _matches(target, listing):  # otherwise another process has created the same folder
            raise unwritable(target, error) from error


def _check_paths(digest: str, files: Mapping[str, TreeFile]) -> None:
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    for name, file in files.items():
        if not _portable(name) or name in folders or not is_digest(file.digest):
            raise IntegrityError(f"tree {digest} has an unsafe entry {name!r} → {file.digest!r}; do not use it")


def _portable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/")) and "\\" not in name and "\0" not in name


@dataclass(frozen=True, slots=True)
class Tile:
    """The root over the `position`-th block of 256^(level + 1) leaves."""

    level: int
    position: int
    hash: bytes


@dataclass(slots=True)
class Tree:
    """A growing Merkle tree."""

    size: int = 0
    peaks: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, size: int, peaks: bytes) -> Tree:
        """Return the tree with these `packed` peaks."""
        return cls(size, [peaks[at : at + HASH] for at in range(0, len(peaks), HASH)])

    @property
    def packed(self) -> bytes:
        """Return the peaks as bytes to store."""
        return b"".join(self.peaks)

    def add(self, leaves: Iterable[bytes]) -> list[Tile]:
        """Append leaf hashes.

        Returns:
            The tiles that became complete, in order.
        """
        tiles: list[Tile] = []
        for leaf in leaves:
            node, size, level = leaf, self.size, 0
            while size & 1:
                node = node_hash(self.peaks.pop(), node)
                size >>= 1
                level += 1
                if level % LEVELS == 0:
                    tiles.append(Tile(level // LEVELS - 1, size, node))
            self.peaks.append(node)
            self.size += 1
        return tiles

    @property
    def root(self) -> bytes:
        """RFC 6962's Merkle tree hash of all leaves."""
        if not self.peaks:
            return EMPTY
        found = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            found = node_hash(peak, found)
        return found


def leaf_hash(entry: bytes) -> bytes:
    """Return RFC 6962's hash of an entry."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return RFC 6962's hash of two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()
