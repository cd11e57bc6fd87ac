"""A folder as an object store. obstore's writes are atomic there, but not durable: this module syncs them."""

import os
from contextlib import suppress
from pathlib import Path

from obstore.store import LocalStore

from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import make_folder, sync_folder, unwritable
from posttrain.store.backends import Backend

_OTHERS = 0o077  # permissions of all but the owner


class LocalFolder(Backend):
    """Durability for blobs below `folder`.

    obstore writes under a temporary name and renames or links it, without fsync: after a power cut a name could refer
    to a file without its bytes. So each blob is synced, and then the folders that name it, before its digest is
    returned.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.url = self.folder.as_uri()

    def open(self) -> LocalStore:
        """The store; the folder is made if it is missing.

        Raises:
            WorkspaceError: it cannot be made.
        """
        try:
            make_folder(self.folder)
            return LocalStore(self.folder)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        except Exception as error:  # obstore's own errors have no common shape here
            raise WorkspaceError(f"cannot open the artifact store {self.folder}: {error}; check the folder") from error

    def touch(self, key: str, _modified: float) -> bool:
        """See `Backend.touch`. A file of another owner may be read-only for us; we could not delete it either."""
        with suppress(PermissionError):
            os.utime(self.folder / key)
        return True

    def settle(self, key: str) -> None:
        """Make the blob at `key` durable, and private to its owner: obstore leaves permissions to the umask."""
        path = self.folder / key
        with path.open("rb") as file:
            _close_to_others(file.fileno(), 0o600)
            os.fsync(file.fileno())
        for folder in (path.parent, path.parent.parent):
            _close_to_others(folder, 0o700)
        for folder in (path.parent, path.parent.parent, self.folder):  # the first blob made all three
            sync_folder(folder)


def _close_to_others(place: int | Path, mode: int) -> None:
    with suppress(PermissionError):  # another owner's, readable for us
        if os.stat(place).st_mode & _OTHERS:
            os.chmod(place, mode)
