"""An attempt's objects as files below its folder: acknowledged writes survive a power cut."""

import errno
import os
import re
from pathlib import Path

from posttrain.domain.errors import IntegrityError, WorkspaceError
from posttrain.store.atomic import create_file, its_doing, make_folder, most_of, private, read_untrusted, unwritable

_NUMBERED = re.compile(r"([0-9]{1,15})(\.[a-z]+)?")


class FolderObjects:
    """`MailboxObjects` below `folder`, which the first write creates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def place(self) -> str:
        """The folder's path."""
        return str(self._folder)

    def create(self, key: str, data: bytes) -> bool:
        """See `MailboxObjects.create`."""
        path = self._folder / key
        try:
            make_folder(path.parent)
            return create_file(path, data)
        except WorkspaceError as error:
            raise _refused(path, error.__cause__) or error from error.__cause__

    def overwrite(self, key: str, data: bytes) -> None:
        """See `MailboxObjects.overwrite`. The file is not synced, because it is written with every segment."""
        path = self._folder / key
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            if not path.parent.is_dir():
                make_folder(path.parent)
            with open(fresh, "wb", opener=private) as file:
                file.write(data)
            fresh.replace(path)
        except OSError as error:
            raise _refused(path, error) or unwritable(path, error) from error

    def get(self, key: str) -> bytes | None:
        """See `MailboxObjects.get`."""
        try:
            return read_untrusted(self._folder / key, most_of(key))
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        """See `MailboxObjects.remove`. Not synced: a file that a power cut restores is also in its pack."""
        (self._folder / key).unlink(missing_ok=True)

    def numbers(self, folder: str) -> list[int]:
        """See `MailboxObjects.numbers`."""
        try:
            names = os.listdir(self._folder / folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return []
            raise _refused(self._folder / folder, error) or error from error
        return sorted(int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name)))


def _refused(path: Path, error: BaseException | None) -> IntegrityError | None:
    """Return the error for a path that the job made unusable; None if the job is not the cause."""
    if not its_doing(error):
        return None
    return IntegrityError(
        f"{path} cannot be used: {getattr(error, 'strerror', error)}; its job created something else at this path"
    )
