"""Uploads by digest that go on where they stopped.

::

    uploads/PROJECT/HEX.part   what has come so far
    uploads/PROJECT/HEX.here   the bytes are in the store, and this project's, though nothing names them yet
    uploads/PROJECT/HEX.given  they are a page, made for whoever may look
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.domain.canonical import DIGEST_PREFIX, is_digest
from posttrain.domain.errors import ConflictError, InputError, UploadError
from posttrain.store.atomic import make_folder, sync_folder, unwritable
from posttrain.store.trees import file_digest

if TYPE_CHECKING:
    from posttrain.workspace.opened import OpenWorkspace

MOST_BYTES = 1 << 40  # of one file


class Uploads:
    """Of one project."""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self._workspace = workspace
        self._folder = workspace.root / "uploads" / workspace.ledger.project

    def registered(self, digest: str, form: str = "") -> bool:
        """Whether the project's ledger knows these bytes, as this form where one is named.

        A file that looks like the listing of a tree is none: what it lists need not be the project's.
        """
        with self._workspace.ledger.snapshot() as now:
            return any(form in ("", artifact.form) for artifact in now.artifacts(digest))

    def held(self, digest: str) -> bool:
        """Whether the project has these bytes, so that nobody needs to send them again."""
        sent = self._place(digest, "here").exists() and self._workspace.blobs.has(digest)
        return sent or self.registered(digest)

    def offset(self, digest: str) -> int:
        """How many bytes of an upload have come."""
        part = self._place(digest, "part")
        return part.stat().st_size if part.exists() else 0

    def add(self, digest: str, start: int, total: int, pieces: Iterable[bytes]) -> int:
        """Add bytes to an upload; how many have come. With the last of them the file is in the store.

        Args:
            start: where they begin.
            total: bytes of the whole file.

        Raises:
            InputError: sizes that cannot be. ConflictError: something else has come so far than `start` bytes.
            UploadError: the whole has another digest; what had come is gone, so that it can be sent again.
        """
        if not 0 <= start <= total <= MOST_BYTES:
            raise InputError(f"upload: must be 0 <= offset <= size <= {MOST_BYTES}, got {start} and {total}")
        make_folder(self._folder)
        part = self._place(digest, "part")
        with _alone(part) as file:
            have = os.fstat(file).st_size
            if have != start:
                raise ConflictError(f"upload {digest}: {have} bytes have come, these begin at {start}; go on at {have}")
            for piece in pieces:
                have += len(piece)
                if have > total:
                    raise InputError(f"upload {digest}: must be {total} bytes, got more; name its whole size")
                os.write(file, piece)
            if have < total:
                return have
            self._store(digest, part)
        return have

    def keep(self, path: Path, *, to_viewers: bool) -> str:
        """A file of this machine as if it had been uploaded; its digest.

        Args:
            to_viewers: whoever may look may have its bytes.
        """
        digest = self._workspace.blobs.put_file(path)
        make_folder(self._folder)
        for kind in ("here", "given") if to_viewers else ("here",):
            self._place(digest, kind).touch(mode=0o600)
        return digest

    def note(self, digest: str) -> None:
        """Bytes that came into the store by another way are this project's."""
        make_folder(self._folder)
        self._place(digest, "here").touch(mode=0o600)
        sync_folder(self._folder)
        self._place(digest, "part").unlink(missing_ok=True)

    def checked(self, digest: str) -> str:
        """A digest that is one.

        Raises:
            InputError: it is none.
        """
        self._place(digest, "here")
        return digest

    def given(self, digest: str) -> bool:
        """Whether whoever may look may have the bytes: a page that was made for them."""
        return self._place(digest, "given").exists()

    def _store(self, digest: str, part: Path) -> None:
        found = file_digest(part)
        if found != digest:
            part.unlink(missing_ok=True)
            raise UploadError(f"upload {digest}: what came has the digest {found}; send it again")
        with self._workspace.blobs.holding():
            self._workspace.blobs.put_file(part)  # where the store is away, what came waits for the next request
            self.note(digest)

    def _place(self, digest: str, kind: str) -> Path:
        if not is_digest(digest):
            raise InputError(f"digest must be sha256: and 64 hex digits, got {digest[:80]!r}")
        return self._folder / f"{digest.removeprefix(DIGEST_PREFIX)}.{kind}"


@contextmanager
def _alone(part: Path) -> Iterator[int]:
    """The file of an upload, which one request at a time adds to.

    Raises:
        ConflictError: another request does so now.
    """
    try:
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise unwritable(part, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    except BlockingIOError as error:
        raise ConflictError("upload: another request sends these bytes now; ask again where it is") from error
    except OSError as error:
        raise unwritable(part, error) from error
    finally:
        os.close(file)
