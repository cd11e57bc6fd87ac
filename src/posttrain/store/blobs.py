"""The artifact store: bytes stored under their SHA-256 through obstore, whose errors are translated.

A failing store raises one of three errors: the object is missing, the disk is full, or the store does not answer.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
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
from posttrain.store.backends.local import MEMORY, LocalFolder, Memory
from posttrain.store.backends.remote import Remote

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # errno in obstore's messages
_PANIC = "PanicException"  # raised by Rust code for an invalid address; no module exports the class
_QUERY = re.compile(r"\?[^\s\"']*")  # the query of a URL, which may contain a signature
_CHUNK = 4 << 20
ADOPTING = "staging/adopting"  # folder of files that are being adopted; `gc` deletes what a killed process left
USERS = "workspaces"  # folder of notes: the workspaces that use a store
_HERE = ("file:", "memory:")
_PROBE = "probe"  # name and content of an object that tests writing and reading


@contextmanager
def answering(url: str, digest: str) -> Iterator[None]:
    """Translate errors of obstore in the block.

    Args:
        url: the store's URL.
        digest: the digest of the requested blob, or the name of a different object.

    Raises:
        NotFoundError: the object does not exist.
        WorkspaceError: the disk is full or read-only.
        UnavailableError: the store does not answer, or denies access.
    """
    try:
        yield
    except PosttrainError:
        raise
    except FileNotFoundError as error:  # obstore's NotFoundError is a FileNotFoundError
        raise NotFoundError(f"blob {digest} is not in the artifact store; run the stage again") from error
    except (BaseError, OSError) as error:
        raise _failure(url, error) from error
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise UnavailableError(
            f"artifact store {url} is not usable: {str(error).splitlines()[0]}; check its address in the environment"
        ) from error


def _failure(url: str, error: Exception) -> PosttrainError:
    line = _QUERY.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
    if not url.startswith(_HERE):
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return UnavailableError(
                f"artifact store {url} refuses this process: {line}; check its keys and their permissions"
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
    """One blob in a listing."""

    digest: str
    bytes: int
    modified: float  # seconds since the epoch, by the store's clock


def open_blobs(location: str | Path, lock: StoreLock | None = None) -> ObjectBlobs:
    """Open the artifact store at a folder or URL (`file:///…`, `s3://bucket/prefix`, `memory://name`).

    Args:
        lock: the lock that separates processes that record blobs from those that delete blobs; None: no process
            deletes blobs.

    Raises:
        InputError: the URL is not supported.
        WorkspaceError: the folder cannot be created.
    """
    return ObjectBlobs(backend_of(location), lock)


def blobs_url(location: str | Path) -> str:
    """Return `open_blobs(location).url` without opening the store.

    Raises:
        InputError: the URL contains credentials, which would be written into ledgers and job orders.
    """
    url = backend_of(location).url
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        shown = f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise InputError(f"artifact store URL {shown} must not contain credentials; set them in the environment")
    return url


def backend_of(location: str | Path) -> Backend:
    """Return the back-end that stores the objects of a store."""
    address = str(location)
    if isinstance(location, Path) or "://" not in address:
        return LocalFolder(Path(address))
    if address.startswith("file://"):
        return LocalFolder(Path(unquote(urlsplit(address).path)))
    return Memory(address.removeprefix(MEMORY)) if address.startswith(MEMORY) else Remote(address)


class ObjectBlobs:
    """A `BlobStore` over a back-end. A blob's key is `sha256/ab/cdef…`, which keeps the listings of folders short.

    A put of an existing blob verifies the blob, and repairs it if it is corrupt. A put also renews the blob's age, so
    that a sweep does not delete the blob as old.
    """

    def __init__(self, backend: Backend, lock: StoreLock | None = None) -> None:
        self._backend, self._lock = backend, lock
        self._store = backend.open()

    def holding(self) -> AbstractContextManager[None]:
        """See `BlobStore.holding`.

        Raises:
            DeadlineError: a process that deletes blobs held the lock for too long, e.g. because it was suspended.
        """
        return nullcontext() if self._lock is None else self._lock.shared()

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self._backend.url

    def put(self, data: bytes) -> str:
        """Store bytes and return their digest.

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
                        # the blob is corrupt or was just written, or the store has no conditional puts; these bytes
                        # are correct
                        obstore.put(self._store, key, data)
            self._settle(digest)
        return digest

    def put_file(self, path: Path) -> str:
        """Store a file in constant memory and return its digest.

        Raises:
            NotFoundError: the file does not exist.
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

    def adopt(self, digest: str, keys: Sequence[str], size: int, part: int) -> str:
        """Store a blob whose bytes are in this store under other keys, in this order; return its digest.

        The objects are composed under a key that no job can write, hashed there, and copied to the key of the digest.

        Args:
            size: bytes of the blob.
            part: bytes of each object except the last.

        Raises:
            NotFoundError: an object does not exist.
            IntegrityError: an object has another size, or the bytes have another digest.
        """
        own = f"{ADOPTING}/{secrets.token_hex(16)}"
        with self.holding(), self._translated(digest):
            for place, key in enumerate(keys):
                wanted, found = min(part, size - place * part), int(obstore.head(self._store, key)["size"])
                if found != wanted:
                    raise IntegrityError(f"part {place + 1} of {digest} must have {wanted} bytes, got {found}")
            if not keys:
                obstore.put(self._store, own, b"")
            else:
                self._backend.compose(self._store, keys, own, size)
            try:
                actual = digest_chunks(self._backend.pieces(self._store, own))
                if actual != digest:
                    raise IntegrityError(f"staged file must have the digest {digest}, got {actual}; upload it again")
                if not self._intact(digest):
                    self._backend.compose(self._store, [own], blob_key(digest), size)
            finally:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, own)
            self._settle(digest)
        return digest

    def _upload(self, digest: str, path: Path, file: BinaryIO) -> None:
        """Upload the file as a stream. The digest is checked before the end, so a changed file is never stored."""

        def changed(_: str) -> IntegrityError:
            return IntegrityError(
                f"file {path} changed while it was stored; store it again while no process writes to it"
            )

        with self._translated(digest):
            chunks = verified(_chunks(file), digest, changed)
            self._backend.write(self._store, blob_key(digest), chunks, path.stat().st_size)

    def _settle(self, digest: str) -> None:
        """Make a blob durable, even an existing one: the process that wrote it may have stopped before this step."""
        with self._translated(digest):
            self._backend.settle(blob_key(digest))

    def get(self, digest: str) -> bytes:
        """Return the verified bytes.

        Raises:
            NotFoundError: the blob does not exist.
            IntegrityError: the bytes do not hash to the digest.
        """
        try:
            return b"".join(self.stream(digest))
        except IntegrityError:  # the bytes may have been damaged in transfer
            return b"".join(self.stream(digest))

    def stream(self, digest: str) -> Iterator[bytes]:
        """Yield the bytes piece by piece, in constant memory.

        Raises:
            NotFoundError: the blob does not exist; raised at the first piece.
            IntegrityError: the bytes do not hash to the digest; raised after the last piece.
        """
        return verified(self._stream(digest), digest, lambda found: _corrupt(digest, found))

    def fetch(self, digest: str, path: Path) -> None:
        """Write the verified bytes to `path`, atomically and in constant memory; the folder must exist.

        Raises:
            NotFoundError, IntegrityError: see `get`; `path` is unchanged.
            WorkspaceError: `path` cannot be written.
        """
        write_stream(path, lambda file: file.writelines(self.stream(digest)))

    def check(self, digest: str) -> int:
        """Verify a blob's hash in constant memory; return its size in bytes.

        Raises:
            NotFoundError, IntegrityError: see `get`.
        """
        return sum(len(chunk) for chunk in self.stream(digest))

    def has(self, digest: str) -> bool:
        """Return whether the blob exists (not verified)."""
        try:
            self.size(digest)
        except NotFoundError:
            return False
        return True

    def size(self, digest: str) -> int:
        """Return the size of a blob in bytes (not verified).

        Raises:
            NotFoundError: the blob does not exist.
        """
        with self._translated(digest):
            return int(obstore.head(self._store, blob_key(digest))["size"])

    def stored(self) -> Iterator[StoredBlob]:
        """Yield every blob in the store."""
        with self._translated("sha256"):
            for some in obstore.list(self._store, prefix="sha256"):
                for one in some:
                    digest = DIGEST_PREFIX + str(one["path"]).removeprefix("sha256/").replace("/", "")
                    if is_digest(digest):
                        yield StoredBlob(digest, int(one["size"]), one["last_modified"].timestamp())

    def modified(self, digest: str) -> float:
        """Return the time at which a blob was last written or its age was renewed (seconds since the epoch).

        Raises:
            NotFoundError: the blob does not exist.
        """
        with self._translated(digest):
            return float(obstore.head(self._store, blob_key(digest))["last_modified"].timestamp())

    def delete(self, digest: str) -> None:
        """Delete a blob, if it exists. The caller must hold the store's lock alone (`store.atomic`)."""
        with suppress(NotFoundError), self._translated(digest):
            obstore.delete(self._store, blob_key(digest))

    def probe(self) -> None:
        """Write a small object to a remote store and read it back; a local folder was tested when it was opened.

        Raises:
            UnavailableError: the store does not answer, has no such bucket, or denies access.
        """
        if self.url.startswith(_HERE):
            return
        try:
            with answering(self.url, _PROBE):
                obstore.put(self._store, _PROBE, _PROBE.encode())
                bytes(obstore.get(self._store, _PROBE).bytes())
        except NotFoundError as error:
            raise UnavailableError(
                f"artifact store {self.url}: this address has no such bucket; create it, or name another one"
            ) from error

    def note(self, name: str, said: str) -> None:
        """Write a small object next to the artifacts, such as `workspaces/ID` or `heads/LOG/SIZE-ROOT`."""
        with self._translated(name):
            obstore.put(self._store, name, said.encode())
            self._backend.settle(name)

    def notes(self, folder: str) -> dict[str, str]:
        """Return the contents of the small objects in a folder, by the last part of the name."""
        found = dict[str, str]()
        with self._translated(folder):
            for name in [str(one["path"]) for some in obstore.list(self._store, prefix=folder) for one in some]:
                with suppress(FileNotFoundError):  # deleted since the listing
                    said = bytes(obstore.get(self._store, name).bytes())
                    found[name.rpartition("/")[2]] = said.decode("utf-8", "replace")
        return found

    def drop_note(self, name: str) -> None:
        """Delete a small object; a missing object is not an error."""
        with suppress(NotFoundError), self._translated(name):
            obstore.delete(self._store, name)

    def _intact(self, digest: str) -> bool:
        """Return whether the correct bytes exist and count as new; renew their age if the back-end can."""
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
    """Return the key of a blob's object.

    Raises:
        IntegrityError: the argument is not a digest.
    """
    if not is_digest(digest):
        raise IntegrityError(
            f"a digest must be `sha256:` followed by 64 hex digits, got {digest!r}; a row that names it was altered: "
            "posttrain doctor shows which"
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
