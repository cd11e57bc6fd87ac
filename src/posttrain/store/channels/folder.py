"""An attempt's objects as files below its folder: what was acknowledged survives a power cut."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.store.atomic import create_file, make_folder, read_whole, unwritable


class FolderObjects:
    """`ChannelObjects` below `folder`, which is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def place(self) -> str:
        """The folder's path."""
        return str(self._folder)

    def create(self, key: str, data: bytes) -> bool:
        """See `ChannelObjects.create`."""
        path = self._folder / key
        make_folder(path.parent)
        return create_file(path, data)

    def overwrite(self, key: str, data: bytes) -> None:
        """See `ChannelObjects.overwrite`: not synced, for it is written with every segment."""
        path = self._folder / key
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with open(fresh, "wb", opener=_private) as file:
                file.write(data)
            fresh.replace(path)
        except OSError as error:
            raise unwritable(path, error) from error

    def get(self, key: str) -> bytes | None:
        """See `ChannelObjects.get`."""
        try:
            return read_whole(self._folder / key)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, key: str) -> None:
        """See `ChannelObjects.remove`; a file that comes back after a power cut is in its pack too."""
        (self._folder / key).unlink(missing_ok=True)

    def numbers(self, folder: str) -> list[int]:
        """See `ChannelObjects.numbers`."""
        return sorted(int(path.stem) for path in (self._folder / folder).glob("[0-9]*") if path.stem.isdigit())


def _private(path: str, flags: int) -> int:
    """An opener: the file is its owner's alone."""
    return os.open(path, flags, 0o600)
