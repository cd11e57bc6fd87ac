"""Uploads by digest, which any server of the ledger can resume, and folders with uploaded files.

The bytes received so far are in the store, in parts (`store.operations`). A row assigns a complete file to the project
(`store.operations`), even before any other row refers to the file.

`Bundles` writes uploaded files into a folder for a verb that reads files.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Self

from posttrain.api.verbs import FileRef, RunFile
from posttrain.data.refs import confined
from posttrain.domain.canonical import digest_bytes, is_digest
from posttrain.domain.errors import ConflictError, DeadlineError, InputError, NotFoundError, PartSizeError, UploadError
from posttrain.store.operations import LEAST, PART, Parts, PartStore, PendingUploads
from posttrain.store.trees import scratch, tree_listing
from posttrain.workspace.settings import OpenWorkspace

MOST_BYTES = 1 << 40  # maximum size of one file
_LONGEST_NAME = 255


class Uploads:
    """The files that one project has sent."""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self._workspace, self._pending = workspace, PendingUploads(workspace.ledger)

    def registered(self, digest: str, form: str = "") -> bool:
        """Return whether the project's ledger contains these bytes, in the given form if `form` is not empty.

        A file that looks like the listing of a tree is not a tree, because the project need not have its entries.
        """
        return any(form in ("", artifact.form) for artifact in self._workspace.ledger.artifacts(digest))

    def held(self, digest: str) -> bool:
        """Return whether the project has these bytes, so no client needs to send them again."""
        return (self._pending.has(checked(digest)) and self._workspace.blobs.has(digest)) or self.registered(digest)

    def keep(self, path: Path, *, to_viewers: bool) -> str:
        """Store a file of this machine like an upload; return its digest.

        Args:
            to_viewers: whether every viewer of the project may read the file.
        """
        with self._workspace.blobs.holding():
            digest = self._workspace.blobs.put_file(path)
            self._pending.add(digest, shown=to_viewers)
        return digest

    def note(self, digest: str) -> None:
        """Record that bytes in the store belong to this project."""
        self._pending.add(checked(digest))

    def given(self, digest: str) -> bool:
        """Return whether every viewer may read the bytes, which are then those of a page for viewers."""
        return self._pending.shown(checked(digest))


class Arriving:
    """The uploads that one project is sending."""

    def __init__(self, workspace: OpenWorkspace, store: PartStore) -> None:
        self._workspace, self._parts = workspace, Parts(workspace.ledger, store)
        self._uploads = Uploads(workspace)

    def offset(self, digest: str, total: int | None = None) -> int:
        """Return how many bytes of an upload with the given total size have arrived.

        Without a size, return the largest such number of the uploads with this digest.
        """
        found = self._parts.sizes(checked(digest))
        return max(found.values(), default=0) if total is None else found.get(total, 0)

    def add(self, digest: str, start: int, total: int, pieces: Iterable[bytes]) -> int:
        """Add bytes to an upload; return how many have arrived. With the last byte, the file is put into the store.

        Args:
            start: the offset of the first byte.
            total: size of the whole file in bytes.

        Raises:
            InputError: the sizes are invalid.
            ConflictError: the number of bytes that have arrived is not `start`.
            PartSizeError: there are fewer bytes than a request must send, and they are not the last bytes of the file.
            UploadError: the whole file has another digest; its parts were deleted, so the file can be sent again.
        """
        if not 0 <= start <= total <= MOST_BYTES:
            raise InputError(
                f"upload: the offset and size must satisfy 0 <= offset <= size <= {MOST_BYTES}, got {start} and {total}"
            )
        known = self._parts.sizes(checked(digest))
        have, short = _begun(digest, start, total, known), False
        for block in _blocks(pieces, total - start, digest):
            if len(block) == total:  # the whole file is one small block
                self._keep(digest, block)
                if known:  # there are parts of uploads with this digest
                    self._parts.forget(digest)
                return total
            short = have == start and len(block) < min(LEAST, total - have)
            if not short:
                self._parts.add(digest, total, have, block)
                have += len(block)
        if short:
            raise PartSizeError(
                f"upload {digest}: a request must send at least {LEAST} bytes or the last bytes of the file, got "
                f"fewer, which were discarded; continue at {start}"
            )
        if have == total:
            self._store(digest, total)
        return have

    def forget(self, digest: str) -> None:
        """Delete the parts of an upload whose file arrived in another way."""
        self._parts.forget(checked(digest))

    def _keep(self, digest: str, data: bytes) -> None:
        found = digest_bytes(data)
        if found != digest:
            raise _other(digest, found)
        with self._workspace.blobs.holding():
            self._workspace.blobs.put(data)
            self._uploads.note(digest)

    def _store(self, digest: str, total: int) -> None:
        """Put the whole file into the store; if the store is unreachable, the parts remain for the next request."""
        with scratch(self._workspace.root / "cache" / "scratch", "upload-") as folder:
            found = self._parts.whole(digest, total, folder / "whole")
            if not found and self._uploads.held(digest):
                return
            if not found:
                raise ConflictError(
                    f"upload {digest}: another request restarted it; request its offset and continue there"
                )
            if found == digest:
                with self._workspace.blobs.holding():
                    self._workspace.blobs.put_file(folder / "whole")
                    self._uploads.note(digest)
        if found != digest:
            self._parts.forget(digest, total)
            raise _other(digest, found)
        self._parts.forget(digest)


def _begun(digest: str, start: int, total: int, known: Mapping[int, int]) -> int:
    """Return how many bytes of an upload with the given total size have arrived, which must equal `start`.

    Raises:
        ConflictError: the number differs from `start`.
    """
    have, others = known.get(total, 0), [one for one in known if one != total]
    if have != start:
        also = f" (another upload of this file declares the size {min(others)})" if others else ""
        raise ConflictError(
            f"upload {digest}: {have} of {total} bytes have arrived{also}, but the request's bytes begin at {start}; "
            f"continue at {have}"
        )
    return have


def checked(digest: str) -> str:
    """Return the digest if it is valid.

    Raises:
        InputError: the digest is malformed.
    """
    if not is_digest(digest):
        raise InputError(f"digest must be `sha256:` followed by 64 hex digits, got {digest[:80]!r}")
    return digest


def _blocks(pieces: Iterable[bytes], most: int, digest: str) -> Iterator[bytes]:
    """Yield the received bytes in parts; at an interruption, the remaining bytes are the last part.

    Args:
        most: the maximum number of bytes that may arrive.

    Raises:
        InputError: more bytes arrived.
        DeadlineError: the next bytes did not arrive in time.
    """
    block, stalled = bytearray(), None
    try:
        for piece in pieces:
            most -= len(piece)
            if most < 0:
                raise InputError(f"upload {digest}: more bytes arrived than the declared size; declare the full size")
            block += piece
            if len(block) >= PART:
                yield bytes(block)
                block.clear()
    except DeadlineError as error:
        stalled = error
    if block:
        yield bytes(block)
    if stalled is not None:
        raise stalled


def _other(digest: str, found: str) -> UploadError:
    return UploadError(f"upload {digest}: the received bytes have the digest {found}; send it again")


class Bundles:
    """Writes files into a folder for one caller, who may name only files of the caller's project."""

    def __init__(self, workspace: OpenWorkspace, uploads: Uploads) -> None:
        self._workspace, self._uploads = workspace, uploads
        self._folder = Path()

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Make a folder for one request and change into it, so that errors show no other path.

        The folder is outside the workspace, because no verb may write files such as an exported model there.
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
        """Write the files; return a path relative to the working folder.

        Raises:
            InputError: a name is invalid or outside the folder.
            NotFoundError: the project does not have the bytes.
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
        """Put a file into the store for the caller, who may then fetch the file; return its digest."""
        return self._uploads.keep(path, to_viewers=to_viewers)

    def lay(self, ref: FileRef, name: str) -> Path:
        """Write a file or folder to a relative path; return the path. Raises the same errors as `lay_down`."""
        parts = PurePosixPath(name).parts
        if not parts:
            raise InputError(f"files: a file's name must not be empty or a dot, got {name[:80]!a}; name the file")
        path = self._folder.joinpath(*(_plain(part) for part in parts))
        self._refuse_foreign(ref.digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"files: {name[:80]!a} is below another file that was sent; rename one") from error
        if path.exists():
            raise InputError(f"files: {name[:80]!a} was sent twice; rename one")
        blobs = self._workspace.blobs
        if ref.form == "file":
            blobs.fetch(ref.digest, path)
        elif ref.form == "tree":
            listing = tree_listing(blobs, ref.digest)
            whole = self._uploads.registered(ref.digest, "tree")  # if so, the project also has the tree's files
            path.mkdir(exist_ok=True)
            for inner, file in listing.items():
                if not whole:
                    self._refuse_foreign(file.digest)
                (path / inner).parent.mkdir(parents=True, exist_ok=True)
                blobs.fetch(file.digest, path / inner)
        else:
            raise InputError(f"file {name!r}: form must be file or tree, got {ref.form!r}")
        return path.relative_to(self._folder)

    def _refuse_foreign(self, digest: str) -> None:
        if not is_digest(digest) or not self._uploads.held(digest):
            raise NotFoundError(f"there are no bytes {digest[:80]!r} in this project; upload them first")


def _plain(part: str) -> str:
    """Return a part of a path if it is valid.

    Raises:
        InputError: the text is not a plain name.
    """
    try:
        long = len(part.encode()) > _LONGEST_NAME
    except UnicodeEncodeError as error:
        raise InputError(f"a file's name must be text, got {part[:80]!a}") from error
    if part in ("", ".", "..") or "/" in part or "\0" in part or "\\" in part or long:
        raise InputError(f"a file's name must be one part of a path, got {part[:80]!a}")
    return part
