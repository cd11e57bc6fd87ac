"""The staging area: files of jobs that share no disk with their driver, from the upload to the adoption.

::

    staging/NAME/EPOCH/HEX     one part of a file, at most `PART` bytes, named by its SHA-256

A job writes only below the prefix of its attempt and epoch (the number of times that the executor restarted it), next
to the blobs of the artifact store. Every PUT states the SHA-256 of its bytes, and S3 rejects other bytes. The attempt's
mailbox lists the parts of each file (`checkpoints/00000120.json`, `outputs/000000.json`) after all of them are stored.
The result names the list of outputs, so the outputs and the result are of one incarnation. The mailbox's
stream `parts` lists every stored part, so that a later epoch does not send equal bytes again. A part is not
skipped because an object exists.

The collector adopts a file: it hashes the parts, copies them within the store to the key of the file's digest, and
records the digest in a row, all under the store's lock.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import obstore

from posttrain.domain.canonical import DIGEST_PREFIX, is_digest
from posttrain.domain.errors import (
    ConflictError,
    InputError,
    IntegrityError,
    NotFoundError,
    PosttrainError,
    UnavailableError,
)
from posttrain.domain.jobs import JobOrder, LogPage, Output, count, duration
from posttrain.domain.ports import BlobStore
from posttrain.store.atomic import files_below, look_over, open_plain
from posttrain.store.attempts import TAIL, AttemptFolder, StoredCheckpoint, spending
from posttrain.store.blobs import ObjectBlobs, answering, backend_of
from posttrain.store.direct import LARGE
from posttrain.store.mailbox import ORDER, PARTS, RAN, Mailbox, refuse
from posttrain.store.retries import (
    PARTS as PARTS_PATH,
    PATIENCE,
    REFUSED,
    JobAccess,
    Reach,
    connected,
    reached,
    refusal,
)
from posttrain.store.trees import TreeFile, put_listing

PART = 32 << 20  # bytes of a part; S3 accepts 10,000 parts of an object, so a file may have 320 GB
FOLDER = "staging"
_AT_ONCE = 4  # concurrent uploads of one job
_PAGE = 1 << 20  # bytes of a page of a log
_CHARACTER = 4  # maximum bytes of a character
_MOST_FILES = 100_000  # of an output or a checkpoint; their list has at most 64 MiB
_MOST_PARTS = 10_000  # of a file, as S3 accepts
_PARTS_NOTED = 16  # parts after which the list of stored parts is written
_LIST = re.compile(r"outputs/[0-9]{1,9}\.json")
_PART = re.compile(r"[0-9]{1,6}/[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file in the staging area."""

    digest: str
    size: int  # bytes
    parts: tuple[str, ...]  # EPOCH/HEX, in the order of the bytes

    def to_json(self) -> dict[str, Any]:
        return {"digest": self.digest, "size": self.size, "parts": list(self.parts)}

    @classmethod
    def from_json(cls, value: Any) -> StagedFile:
        """Return the inverse of `to_json`.

        Raises:
            IntegrityError: the value has another shape, or names an object outside the attempt's area.
        """
        try:
            file = cls(str(value["digest"]), count(value["size"]), tuple(map(str, value["parts"])))
        except (KeyError, TypeError) as error:
            raise IntegrityError(f"a staged file must have digest, size and parts: {error!r}; it is damaged") from error
        if not is_digest(file.digest) or not all(map(_PART.fullmatch, file.parts)):
            raise IntegrityError("a staged file must name its digest and parts as EPOCH/HEX; it is damaged")
        if len(file.parts) != -(-file.size // PART) or len(file.parts) > _MOST_PARTS:
            raise IntegrityError(
                f"a staged file of {file.size} bytes must not have {len(file.parts)} parts; it is damaged"
            )
        return file


class PartObjects(Protocol):
    """The objects below the prefix of one attempt."""

    def get(self, key: str) -> bytes:
        """Return the bytes of an object.

        Raises:
            NotFoundError: it does not exist.
            UnavailableError: the store does not answer.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whose last path component is the SHA-256 of its bytes.

        Raises:
            UnavailableError: the store does not answer.
        """


class StoredParts:
    """`PartObjects` in an artifact store that this process may write.

    Raises:
        InputError: the URL is not supported.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url, self._prefix = url, f"{FOLDER}/{name}"
        self._backend = backend_of(url)
        self._store = self._backend.checked()

    def get(self, key: str) -> bytes:
        """See `PartObjects.get`."""
        name = f"{self._prefix}/{key}"
        with answering(self._url, name):
            return b"".join(self._backend.pieces(self._store, name))

    def put(self, key: str, data: bytes) -> None:
        """See `PartObjects.put`."""
        name = f"{self._prefix}/{key}"
        with answering(self._url, name):
            obstore.put(self._store, name, data)
            self._backend.settle(name)


class ServedParts:
    """`PartObjects` of an attempt at a server, because a job that a server launched has no key to the store.

    The server stores a small part; a large one is sent directly to the store, with a URL that fixes its bytes.

    Args:
        folder: the folder with the job's access.
        patience: seconds that the server may be unreachable.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep) -> None:
        self._reach = Reach(folder, patience, pause)

    def get(self, key: str) -> bytes:
        """See `PartObjects.get`."""

        def asked(access: JobAccess) -> bytes:
            with closing(reached(access)) as server:
                return _answer(server, access, "GET", f"{PARTS_PATH}/{key}")

        return self._reach.again(asked)

    def put(self, key: str, data: bytes) -> None:
        """See `PartObjects.put`."""

        def asked(access: JobAccess) -> None:
            with closing(reached(access)) as server:
                if len(data) >= LARGE:
                    said = _answer(server, access, "POST", f"{PARTS_PATH}/{key}?size={len(data)}")
                    if said:
                        ticket = json.loads(said)
                        _send(str(ticket["url"]), dict(ticket["headers"]), data)
                        return
                _answer(server, access, "PUT", f"{PARTS_PATH}/{key}", data)

        self._reach.again(asked)


def _answer(
    server: http.client.HTTPConnection, access: JobAccess, method: str, path: str, data: bytes | None = None
) -> bytes:
    prefix = urlsplit(access.url).path.rstrip("/")
    server.request(method, prefix + path, data, {"authorization": f"Bearer {access.token}"})
    response = server.getresponse()
    said = response.read()
    if response.status in REFUSED:
        raise refusal()
    if response.status == 404:
        raise NotFoundError(f"part {path.rpartition('/')[2]} is not staged; it was deleted")
    if response.status not in (200, 204):
        raise UnavailableError(f"status {response.status}")
    return said


def _send(url: str, headers: dict[str, str], data: bytes) -> None:
    """Send bytes to a presigned URL, which is in no error."""
    place = urlsplit(url)
    with closing(connected(url)) as store:
        store.request("PUT", f"{place.path}?{place.query}", data, headers)
        response = store.getresponse()
        response.read()
    if response.status != 200:
        raise UnavailableError(f"the store answers {response.status}")


class StagingArea:
    """The staging area of an artifact store, for its cleaning."""

    def __init__(self, url: str) -> None:
        self._url, self._store = url, backend_of(url).open()

    def stored(self) -> Iterator[tuple[str, str, float, int]]:
        """Yield attempt, key, time of the write (seconds since the epoch) and bytes of every object."""
        with answering(self._url, FOLDER):
            for one in itertools.chain.from_iterable(obstore.list(self._store, prefix=FOLDER)):
                key = str(one["path"])
                yield key.split("/")[1], key, one["last_modified"].timestamp(), int(one["size"])

    def drop(self, key: str) -> None:
        """Delete an object; a missing object is not an error."""
        with suppress(FileNotFoundError), answering(self._url, key):
            obstore.delete(self._store, key)


class Uploads:
    """The uploads of one incarnation of a job.

    Args:
        epoch: how often the executor restarted the job before.
        lost: returns why nothing more may be stored or listed; empty: it may.
    """

    def __init__(
        self, objects: PartObjects, mailbox: Mailbox, epoch: int, lost: Callable[[], str] = lambda: ""
    ) -> None:
        self._objects, self._mailbox, self._epoch, self._lost = objects, mailbox, epoch, lost
        self._pool = ThreadPoolExecutor(_AT_ONCE, "upload")
        self._known: dict[str, str] = {}  # HEX → EPOCH/HEX of every part that was stored
        self._fresh: list[str] = []  # stored, but not listed yet
        for _, data in mailbox.segments(PARTS, 0, refuse):
            self._known |= {key.rpartition("/")[2]: key for key in data.decode().split() if _PART.fullmatch(key)}
        self._noted, self._segment = set(self._known.values()), mailbox.last(PARTS)

    def file(self, path: Path) -> StagedFile:
        """Store a file in parts.

        Raises:
            IntegrityError: the path is not a plain file.
            UnavailableError: the store does not answer.
        """
        whole, size, parts = hashlib.sha256(), 0, list[str]()
        if path.lstat().st_size > PART * _MOST_PARTS:
            raise IntegrityError(f"{path.name}: must have at most {PART * _MOST_PARTS} bytes; write several files")
        sent = deque[Future[str]]()
        with open_plain(path) as file:
            while data := file.read(PART):
                if len(sent) >= _AT_ONCE:
                    parts.append(self._stored(sent.popleft()))
                sent.append(self._pool.submit(self._send, data))
                whole.update(data)  # beside the hashes and the uploads of the parts
                size += len(data)
        parts += map(self._stored, sent)
        return StagedFile(DIGEST_PREFIX + whole.hexdigest(), size, tuple(parts))

    def tree(self, folder: Path) -> dict[str, Any]:
        """Store every file of a folder; return the entries of a list of staged files.

        Raises:
            IntegrityError: the folder contains something other than files.
        """
        look_over(folder)
        names = {path.relative_to(folder).as_posix(): path for path in sorted(files_below(folder))}
        odd = next((name for name in names if not name.isprintable()), None)
        if odd is not None or len(names) > _MOST_FILES:
            what = f"a file named {odd!a}" if odd is not None else f"{len(names)} files"
            raise IntegrityError(
                f"{folder.name}: a job elsewhere leaves at most {_MOST_FILES} files, with printable names, got {what}"
            )
        return {name: self.file(path).to_json() for name, path in names.items()}

    def checkpoint(self, step: int, tokens: int, folder: Path) -> None:
        """Store a committed checkpoint, then list it; a repeated call has no effect."""
        files = self.tree(folder)
        self._note()
        self._refuse_lost()
        self._mailbox.once(checkpoint_key(step), {"step": step, "tokens": tokens, "files": files})

    def outputs(self, attempt: AttemptFolder, outputs: Mapping[str, Output]) -> dict[str, Output]:
        """Store a job's outputs, then list them; return the outputs with the key of the list as path.

        Raises:
            IntegrityError: an output is missing, outside `outputs/`, or contains something other than files.
        """
        listed = {}
        for name, output in outputs.items():
            path = attempt.output_path(name, output)
            files = self.tree(path) if output.form == "tree" else {"": self.file(path).to_json()}
            listed[name] = {"form": output.form, "files": files}
        self._refuse_lost()
        key = f"outputs/{self._epoch:06d}.json"  # another incarnation may list its own
        self._mailbox.replace(key, listed)
        return {name: replace(output, path=key) for name, output in outputs.items()}

    def close(self) -> None:
        """End the threads; uploads that wait are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def _send(self, data: bytes) -> str:
        self._refuse_lost()
        hexadecimal = hashlib.sha256(data).hexdigest()
        if hexadecimal in self._known:
            return self._known[hexadecimal]
        key = f"{self._epoch}/{hexadecimal}"
        self._objects.put(key, data)
        return key

    def _stored(self, sent: Future[str]) -> str:
        """Wait for a part; it counts as stored from then on."""
        key = sent.result()
        if self._known.setdefault(key.rpartition("/")[2], key) == key and key not in self._noted:
            self._noted.add(key)
            self._fresh.append(key)
            if len(self._fresh) >= _PARTS_NOTED:
                self._note()
        return key

    def _refuse_lost(self) -> None:
        if why := self._lost():
            raise ConflictError(why)

    def _note(self) -> None:
        if self._fresh:
            self._segment += 1
            self._mailbox.append(PARTS, self._segment, "\n".join(self._fresh).encode())
            self._fresh.clear()


class StagedAttempt(AttemptFolder):
    """An attempt whose job runs without this host's disk: everything that it leaves is in its mailbox or staged.

    Args:
        path: the attempt's folder on this host, in which the job writes nothing.
        store: the artifact store that contains the staging area.
    """

    def __init__(self, path: Path, channel: str, name: str, store: str) -> None:
        super().__init__(path, channel)
        self._name, self._store = name, store

    def write_order(self, order: JobOrder) -> None:
        """See `AttemptFolder.write_order`."""
        self.mailbox.replace(ORDER, order.to_json())

    def has_order(self) -> bool:
        """See `AttemptFolder.has_order`."""
        return self.mailbox.document(ORDER) is not None

    def read_order(self) -> JobOrder:
        """See `AttemptFolder.read_order`."""
        return self._order_of(self.mailbox.document(ORDER))

    def tail(self) -> str:
        """See `AttemptFolder.tail`."""
        begun, pieces = max(0, self.mailbox.log_end() - TAIL), b""
        while piece := self.mailbox.logged(begun + len(pieces)):
            pieces += piece
        return pieces.decode("utf-8", "replace")

    def metered(self) -> int | None:
        """See `AttemptFolder.metered`."""
        return spending(self.mailbox.metered())

    def checkpoint_steps(self) -> list[int]:
        """See `AttemptFolder.checkpoint_steps`."""
        return self.mailbox.checkpoints()

    def store_checkpoint(self, blobs: BlobStore, step: int) -> StoredCheckpoint | None:
        """See `AttemptFolder.store_checkpoint`."""
        said = self.mailbox.document(checkpoint_key(step))
        if said is None:
            return None
        try:
            return StoredCheckpoint(self._tree(blobs, said["files"]), step, count(said["tokens"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"checkpoint {step} of {self._name} is not a list of files: {error!r}") from error

    def store_output(self, blobs: BlobStore, name: str, output: Output) -> str:
        """See `AttemptFolder.store_output`."""
        if not _LIST.fullmatch(output.path):
            raise IntegrityError(f"output {name} of {self._name} must name its list of files, got {output.path!a}")
        said = (self.mailbox.document(output.path) or {}).get(name, {})
        try:
            form, files = str(said["form"]), said["files"]
            if form != output.form:
                raise IntegrityError(f"output {name} must be a {output.form}, as its result states, got a {form}")
            return self._tree(blobs, files) if form == "tree" else self._file(blobs, StagedFile.from_json(files[""]))
        except (KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"output {name} of {self._name} is not staged: {error!r}") from error

    def _tree(self, blobs: BlobStore, files: Mapping[str, Any]) -> str:
        staged = {str(name): StagedFile.from_json(value) for name, value in files.items()}
        for file in staged.values():
            self._file(blobs, file)
        return put_listing(blobs, {name: TreeFile(file.digest, file.size) for name, file in staged.items()})

    def _file(self, blobs: BlobStore, file: StagedFile) -> str:
        if not isinstance(blobs, ObjectBlobs) or blobs.url != self._store:
            raise InputError(f"{self._name}: its files are staged in {self._store}, not in {blobs.url}")
        keys = [f"{FOLDER}/{self._name}/{part}" for part in file.parts]
        try:
            return blobs.adopt(file.digest, keys, file.size, PART)
        except NotFoundError as error:
            raise IntegrityError(f"{self._name}: {error}") from error


def fetch_checkpoint(mailbox: Mailbox, step: int, parts: PartObjects, own: BlobStore, folder: Path) -> tuple[str, int]:
    """Put a staged checkpoint into a store of this node; return its digest and tokens.

    Raises:
        NotFoundError: a part does not exist.
        IntegrityError: the checkpoint is not what its list states.
    """
    said = mailbox.document(checkpoint_key(step)) or {}
    try:
        files, tokens = (
            {str(n): StagedFile.from_json(value) for n, value in said["files"].items()},
            count(said["tokens"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"checkpoint {step} is not a list of files: {error!r}") from error
    for name, file in files.items():
        path = folder / "fetched"
        with path.open("wb") as target:
            target.writelines(map(parts.get, file.parts))
        if own.put_file(path) != file.digest:
            raise IntegrityError(f"checkpoint {step}: {name} has another digest than its list states")
        path.unlink()
    return put_listing(own, {name: TreeFile(file.digest, file.size) for name, file in files.items()}), tokens


def relayed_log(mailbox: Mailbox, cursor: int = 0) -> LogPage:
    """Return the output of a job elsewhere from byte `cursor` on, as much as fits a page and no part of a character."""
    data = mailbox.logged(cursor)[:_PAGE]
    while 0 < len(data) < _CHARACTER and (more := mailbox.logged(cursor + len(data))):
        data += more[:_PAGE]  # a character may begin in one piece and end in another
    whole = data.rfind(b"\n") + 1 if len(data) >= _PAGE else len(data)
    data = data[: whole or len(data)]
    for dropped in range(min(_CHARACTER, len(data) + 1)):
        with suppress(UnicodeDecodeError):
            return LogPage(data[: len(data) - dropped].decode("utf-8"), cursor + len(data) - dropped)
    return LogPage(data.decode("utf-8", errors="replace"), cursor + len(data))


def seconds_ran(mailbox: Mailbox) -> float | None:
    """Return the seconds that all incarnations of an agent's job ran, as the agent reported; None: no report."""
    with suppress(PosttrainError, TypeError, ValueError):
        kept = mailbox.document(RAN)
        return None if kept is None else duration(kept.get("seconds"))
    return None


def checkpoint_key(step: int) -> str:
    """Return the key of the list of a checkpoint's files in the mailbox."""
    return f"checkpoints/{step:08d}.json"
