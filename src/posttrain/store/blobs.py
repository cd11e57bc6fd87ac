"""The artifact store: bytes by the SHA-256 of the bytes, through obstore, with the errors of a failing store.

A failing store raises one of three errors: nothing is there, a disk is full, or the store does not answer.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from posttrain.domain.canonical import DIGEST_PREFIX, digest_bytes, digest_chunks, is_digest, verified
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, PosttrainError, UnavailableError
from posttrain.store.atomic import StoreLock, open_plain, unwritable, write_stream
from posttrain.store.backends import Backend
from posttrain.store.backends.local import LocalFolder
from posttrain.store.backends.memory import SCHEME, Memory
from posttrain.store.backends.remote import Remote

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how obstore's messages carry errno
_PANIC = "PanicException"  # of Rust code, where an address is none; no module has the class
_QUERY = re.compile(r"\?[^\s\"']*")  # of a URL: a signature may be in it
_CHUNK = 4 << 20
USERS = "workspaces"  # notes: which workspaces keep their artifacts in a store
_HERE = ("file:", "memory:")
_PROBE = "probe"  # an object that is written and read to see whether that goes; its bytes say so


@contextmanager
def answering(url: str, digest: str) -> Iterator[None]:
    """Errors of obstore in the block as ours.

    Args:
        url: of the store.
        digest: what is asked for.

    Raises:
        NotFoundError: it is not there.
        WorkspaceError: the disk is full or read-only.
        UnavailableError: the store does not answer, or refuses this process.
    """
    try:
        yield
    except PosttrainError:
        raise
    except FileNotFoundError as error:  # obstore's NotFoundError is one
        raise NotFoundError(f"blob {digest} is not in the artifact store; run the stage again") from error
    except (BaseError, OSError) as error:
        raise _failure(url, error) from error
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise UnavailableError(
            f"artifact store {url} cannot be asked: {str(error).splitlines()[0]}; check its address in the environment"
        ) from error


def _failure(url: str, error: Exception) -> PosttrainError:
    line = _QUERY.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
    if not url.startswith(_HERE):
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return UnavailableError(
                f"artifact store {url} refuses this process: {line}; check its keys, and what they may do there"
            )
        return UnavailableError(f"artifact store {url} does not answer: {line}; try again")
    found = _OS_ERROR.search(str(error))
    code = int(found.group(1)) if found else getattr(error, "errno", None)
    if code is None and isinstance(error, PermissionDeniedError):
        code = errno.EACCES
    if code is not None:
        return unwritable(url, OSError(code, os.strerror(code)))
    return UnavailableError(f"artifact store {url} does not answer: {line}; try again")


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """One blob as a listing shows it."""

    digest: str
    bytes: int
    modified: float  # seconds since the epoch, by the store's clock


def open_blobs(location: str | Path, lock: StoreLock | None = None) -> ObjectBlobs:
    """The artifact store at a folder or URL (`file:///…`, `s3://bucket/prefix`, `memory://name`).

    Args:
        lock: by which whoever records is told from whoever deletes; None: nobody deletes from it.

    Raises:
        InputError: a URL that is not understood.
        WorkspaceError: a folder that cannot be made.
    """
    return ObjectBlobs(backend_of(location), lock)


def blobs_url(location: str | Path) -> str:
    """What `open_blobs(location).url` would be, without opening anything.

    Raises:
        InputError: a URL that holds credentials: it is written into ledgers and job orders.
    """
    url = backend_of(location).url
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        shown = f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise InputError(f"artifact store URL {shown} must not hold credentials; give them by the environment")
    return url


def backend_of(location: str | Path) -> Backend:
    """What keeps the objects of a store."""
    address = str(location)
    if isinstance(location, Path) or "://" not in address:
        return LocalFolder(Path(address))
    if address.startswith("file://"):
        return LocalFolder(Path(unquote(urlsplit(address).path)))
    return Memory(address.removeprefix(SCHEME)) if address.startswith(SCHEME) else Remote(address)


class ObjectBlobs:
    """A `BlobStore` over a backend. A blob's key is `sha256/ab/cdef…`: no folder gets too long a listing.

    Putting what is there already verifies it and mends it if it is corrupt: the cure for a corrupt blob is to put it
    again. It is as young afterwards as if it had been written, so that nobody takes it for left behind.
    """

    def __init__(self, backend: Backend, lock: StoreLock | None = None) -> None:
        self._backend, self._lock = backend, lock
        self._store = backend.open()

    def holding(self) -> AbstractContextManager[None]:
        """See `BlobStore.holding`.

        Raises:
            DeadlineError: somebody deletes, and was stopped while they did.
        """
        return nullcontext() if self._lock is None else self._lock.shared()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self._backend.url

    def put(self, data: bytes) -> str:
        """Store bytes; the digest.

        Raises:
            WorkspaceError: the disk is full or read-only.
        """
        digest = digest_bytes(data)
        key = blob_key(digest)
        with self.holding():
            if not self._intact(digest):
                with self._translated(digest):
                    try:
                        obstore.put(self._store, key, data, mode="create")
                    except (AlreadyExistsError, NotSupportedError, NotImplementedError):
                        # corrupt, written this moment by another, or the store has no conditions: these bytes are right
                        obstore.put(self._store, key, data)
            self._settle(digest)
        return digest

    def put_file(self, path: Path) -> str:
        """Store a file in constant memory; the digest.

        Raises:
            NotFoundError: no such file.
            IntegrityError: the file changed while it was read.
            WorkspaceError: the disk is full or read-only.
        """
        try:
            with open_plain(path, follow=True) as file, self.holding():
                digest = digest_chunks(_chunks(file))
                if not self._intact(digest):
                    file.seek(0)
                    self._upload(digest, path, file)
                self._settle(digest)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFoundError(f"there is no file {path}; check the path") from error
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from error
        return digest

    def _upload(self, digest: str, path: Path, file: BinaryIO) -> None:
        """Stream the file up; its digest is checked before the upload ends, so a changed file never gets a name."""

        def changed(_: str) -> IntegrityError:
            return IntegrityError(f"file {path} changed while it was stored; store it again when nobody writes to it")

        with self._translated(digest):
            chunks = verified(_chunks(file), digest, changed)
            self._backend.write(self._store, blob_key(digest), chunks, path.stat().st_size)

    def _settle(self, digest: str) -> None:
        """Also done for a blob that was there: whoever wrote it may not have come this far."""
        with self._translated(digest):
            self._backend.settle(blob_key(digest))

    def get(self, digest: str) -> bytes:
        """The verified bytes.

        Raises:
            NotFoundError: no such blob.
            IntegrityError: the bytes do not hash to the digest.
        """
        try:
            return b"".join(self.stream(digest))
        except IntegrityError:  # on its way, perhaps
            return b"".join(self.stream(digest))

    def stream(self, digest: str) -> Iterator[bytes]:
        """The bytes piece by piece, in constant memory.

        Raises:
            NotFoundError: no such blob, at the first piece.
            IntegrityError: the bytes do not hash to the digest, after the last piece.
        """
        return verified(self._stream(digest), digest, lambda found: _corrupt(digest, found))

    def fetch(self, digest: str, path: Path) -> None:
        """Write the verified bytes to `path`, atomically and in constant memory; the folder must exist.

        Raises:
            NotFoundError, IntegrityError: as `get`; nothing is at `path` then that was not there before.
            WorkspaceError: `path` cannot be written.
        """
        write_stream(path, lambda file: file.writelines(self.stream(digest)))

    def check(self, digest: str) -> int:
        """Hash a blob again in constant memory; how many bytes it has.

        Raises:
            NotFoundError, IntegrityError: as `get`.
        """
        return sum(len(chunk) for chunk in self.stream(digest))

    def has(self, digest: str) -> bool:
        """Whether the blob is present (not verified)."""
        try:
            self.size(digest)
        except NotFoundError:
            return False
        return True

    def size(self, digest: str) -> int:
        """How many bytes a blob has (not verified).

        Raises:
            NotFoundError: no such blob.
        """
        with self._translated(digest):
            return int(obstore.head(self._store, blob_key(digest))["size"])

    def stored(self) -> Iterator[StoredBlob]:
        """Every blob that there is."""
        with self._translated("sha256"):
            for some in obstore.list(self._store, prefix="sha256"):
                for one in some:
                    digest = DIGEST_PREFIX + str(one["path"]).removeprefix("sha256/").replace("/", "")
                    if is_digest(digest):
                        yield StoredBlob(digest, int(one["size"]), one["last_modified"].timestamp())

    def modified(self, digest: str) -> float:
        """When a blob was written, or found by who would have written it (seconds since the epoch).

        Raises:
            NotFoundError: no such blob.
        """
        with self._translated(digest):
            return float(obstore.head(self._store, blob_key(digest))["last_modified"].timestamp())

    def delete(self, digest: str) -> None:
        """Delete a blob; one that is gone already is no error. Hold the store's lock alone (`store.atomic`)."""
        with suppress(NotFoundError), self._translated(digest):
            obstore.delete(self._store, blob_key(digest))

    def probe(self) -> None:
        """Write a small object and read it again, where the store is elsewhere; a folder was made when it was opened.

        Raises:
            UnavailableError: the store does not answer, has no such bucket, or refuses this process.
        """
        if self.url.startswith(_HERE):
            return
        try:
            with answering(self.url, _PROBE):
                obstore.put(self._store, _PROBE, _PROBE.encode())
                bytes(obstore.get(self._store, _PROBE).bytes())
        except NotFoundError as error:
            raise UnavailableError(
                f"artifact store {self.url}: there is no such bucket at this address; make it, or name another one"
            ) from error

    def note(self, name: str, said: str) -> None:
        """Write a small object beside the artifacts: `workspaces/ID`, `heads/LOG/SIZE-ROOT`."""
        with self._translated(name):
            obstore.put(self._store, name, said.encode())
            self._backend.settle(name)

    def notes(self, folder: str) -> dict[str, str]:
        """The small objects in a folder: the last part of the name → what it says."""
        found = dict[str, str]()
        with self._translated(folder):
            for name in [str(one["path"]) for some in obstore.list(self._store, prefix=folder) for one in some]:
                with suppress(FileNotFoundError):  # dropped meanwhile
                    said = bytes(obstore.get(self._store, name).bytes())
                    found[name.rpartition("/")[2]] = said.decode("utf-8", "replace")
        return found

    def drop_note(self, name: str) -> None:
        """Delete a small object; one that is gone already is no error."""
        with suppress(NotFoundError), self._translated(name):
            obstore.delete(self._store, name)

    def _intact(self, digest: str) -> bool:
        """Whether the right bytes are there, and young from now on."""
        try:
            if digest_chunks(self._stream(digest)) != digest:
                return False
            with self._translated(digest):
                return self._backend.touch(blob_key(digest), self.modified(digest))
        except NotFoundError:
            return False

    def _stream(self, digest: str) -> Iterator[bytes]:
        with self._translated(digest):
            yield from self._backend.pieces(self._store, blob_key(digest))

    def _translated(self, digest: str) -> AbstractContextManager[None]:
        return answering(self.url, digest)


def blob_key(digest: str) -> str:
    """The key of a blob's object.

    Raises:
        IntegrityError: no digest.
    """
    if not is_digest(digest):
        raise IntegrityError(
            f"a digest must be sha256: and 64 hex digits, got {digest!r}; a row that names it was altered: posttrain "
            "doctor says which"
        )
    body = digest.removeprefix(DIGEST_PREFIX)
    return f"sha256/{body[:2]}/{body[2:]}"


def _corrupt(digest: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"blob {digest} is corrupt: bytes hash to {found}; restore it from a copy or run its stage again"
    )


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk
