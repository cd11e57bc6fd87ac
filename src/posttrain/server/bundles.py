"""Files that were uploaded, laid down in a folder for a verb that reads files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Self

from posttrain.api.operations import FileRef, RunFile
from posttrain.data.confining import confined
from posttrain.domain.canonical import is_digest
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.store.atomic import scratch
from posttrain.store.trees import tree_listing

if TYPE_CHECKING:
    from posttrain.server.uploads import Uploads
    from posttrain.workspace.opened import OpenWorkspace

_LONGEST_NAME = 255


class Bundles:
    """Lays files down for one asker, who may name only what their project holds."""

    def __init__(self, workspace: OpenWorkspace, uploads: Uploads) -> None:
        self._workspace, self._uploads = workspace, uploads
        self._folder = Path()

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """For the length of one request, in whose folder this process works meanwhile: errors show no other path.

        It is no part of the workspace: nothing may be written into that by hand, an exported model for example.
        """
        with scratch(Path(tempfile.gettempdir(), f"posttrain-{os.getuid()}"), "request-") as folder:
            self._folder = folder
            os.chdir(folder)
            try:
                with confined(folder):
                    yield self
            finally:
                os.chdir("/")

    def lay_down(self, sent: FileRef | RunFile) -> Path:
        """A path, relative to where this process works.

        Raises:
            InputError: a name that is none, or leads out of the folder.
            NotFoundError: bytes that the project does not hold.
        """
        if isinstance(sent, FileRef):
            name = _plain(sent.name)
            taken = (self._folder / name).exists()
            return self.lay(sent, f"{len(list(self._folder.iterdir()))}/{name}" if taken else name)
        for name, ref in sent.files.items():
            self.lay(ref, name)
        path = self._folder / _plain(sent.name)
        path.write_text(sent.text, "utf-8")
        return path.relative_to(self._folder)

    def keep(self, path: Path, *, to_viewers: bool) -> str:
        """Put a file into the store for whoever asks, who may fetch it from now on; its digest."""
        return self._uploads.keep(path, to_viewers=to_viewers)

    def lay(self, ref: FileRef, name: str) -> Path:
        """A file or folder under a relative path. Raises as `lay_down`."""
        parts = PurePosixPath(name).parts
        if not parts:
            raise InputError("a file's name must be one part of a path, got none")
        path = self._folder.joinpath(*(_plain(part) for part in parts))
        self._refuse_foreign(ref.digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"files: {name[:80]!a} lies below another file that was sent; name them apart") from error
        if path.exists():
            raise InputError(f"files: {name[:80]!a} was sent twice; name them apart")
        blobs = self._workspace.blobs
        if ref.form == "file":
            blobs.fetch(ref.digest, path)
            return path.relative_to(self._folder)
        if ref.form != "tree":
            raise InputError(f"file {name!r}: form must be file or tree, got {ref.form!r}")
        listing = tree_listing(blobs, ref.digest)
        whole = self._uploads.registered(ref.digest, "tree")  # then its files are the project's too
        path.mkdir(exist_ok=True)
        for inner, file in listing.items():
            if not whole:
                self._refuse_foreign(file.digest)
            target = path / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            blobs.fetch(file.digest, target)
        return path.relative_to(self._folder)

    def _refuse_foreign(self, digest: str) -> None:
        if not is_digest(digest) or not self._uploads.held(digest):
            raise NotFoundError(f"there are no bytes {digest[:80]!r} in this project; upload them first")


def _plain(part: str) -> str:
    """One name of a path.

    Raises:
        InputError: it is none, or leads elsewhere.
    """
    try:
        long = len(part.encode()) > _LONGEST_NAME
    except UnicodeEncodeError as error:
        raise InputError(f"a file's name must be text, got {part[:80]!a}") from error
    if part in ("", ".", "..") or "/" in part or "\0" in part or "\\" in part or long:
        raise InputError(f"a file's name must be one part of a path, got {part[:80]!a}")
    return part
