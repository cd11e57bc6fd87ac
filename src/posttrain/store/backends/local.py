"""Object stores of this machine: a folder, and this process's memory for tests.

obstore's writes to a folder are atomic but not durable, so this module syncs them. Memory stores with equal names are
the same store.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore
from obstore.store import LocalStore, MemoryStore

from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import make_folder, sync_folder, unwritable
from posttrain.store.backends import Backend

_CHUNK = 4 << 20  # bytes
_OTHERS = 0o077  # permissions of everyone except the owner


class LocalFolder(Backend):
    """A back-end that stores blobs durably below `folder`.

    obstore writes under a temporary name and renames or links the file, without fsync: after a power cut, a name could
    refer to a file without its bytes. Therefore each blob is synced, and then the folders above the blob, before the
    digest is returned.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.url = self.folder.as_uri()

    def open(self) -> LocalStore:
        """Return the store; create the folder if it is missing.

        Raises:
            WorkspaceError: the folder cannot be created.
        """
        try:
            make_folder(self.folder)
            return LocalStore(self.folder)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        except Exception as error:  # obstore's errors have no common class here
            raise WorkspaceError(f"cannot open the artifact store {self.folder}: {error}; check the folder") from error

    def touch(self, key: str, _modified: float) -> bool:
        """See `Backend.touch`. Another owner's file may be read-only; this process then cannot delete it either."""
        with suppress(PermissionError):
            os.utime(self.folder / key)
        return True

    def compose(self, store: Any, sources: Sequence[str], target: str, size: int) -> None:
        """See `Backend.compose`: one object becomes a second name of its file."""
        if len(sources) == 1:
            obstore.copy(store, sources[0], target)
        else:
            self.write(store, target, (piece for source in sources for piece in self.pieces(store, source)), size)

    def pieces(self, store: Any, key: str) -> Iterator[bytes]:
        """See `Backend.pieces`. This is several times as fast as obstore's stream, which changes threads."""
        with open(self.folder / key, "rb") as file:
            while piece := file.read(_CHUNK):
                yield piece

    def settle(self, key: str) -> None:
        """Make the blob at `key` durable and private to its owner; obstore leaves permissions to the umask."""
        path = self.folder / key
        with path.open("rb") as file:
            _close_to_others(file.fileno(), 0o600)
            os.fsync(file.fileno())
        above = [folder for folder in path.parents if self.folder in folder.parents]
        for folder in above:
            _close_to_others(folder, 0o700)
        for folder in (*above, self.folder):  # the first blob created all of them
            sync_folder(folder)


def _close_to_others(place: int | Path, mode: int) -> None:
    with suppress(PermissionError):  # another user owns the file
        if os.stat(place).st_mode & _OTHERS:
            os.chmod(place, mode)


MEMORY = "memory://"
_stores: dict[str, MemoryStore] = {}


class Memory(Backend):
    """A named memory store: `memory://NAME`."""

    def __init__(self, name: str) -> None:
        self.url = MEMORY + name
        self._name = name

    def open(self) -> MemoryStore:
        """Return the store of this name."""
        return _stores.setdefault(self._name, MemoryStore())
