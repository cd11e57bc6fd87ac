"""What every artifact store must honour, over the local folder, the memory fake, and S3 over HTTP."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

import obstore
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from obstore.store import from_url

from posttrain.domain.canonical import digest_bytes, digest_chunks
from posttrain.domain.errors import InfrastructureError, InputError, IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.ports import BlobStore
from posttrain.store.backends.local import LocalFolder, Memory
from posttrain.store.backends.remote import Remote
from posttrain.store.blobs import open_blobs
from s3_server import s3_server, use_s3

ABSENT = "sha256:" + "0" * 64
LARGE = 9_000_001  # more than two chunks
NOBODY = 65534


@dataclass(frozen=True)
class Place:
    """A store and a back door to its objects."""

    blobs: BlobStore

    def overwrite(self, digest: str, data: bytes) -> None:
        store = Memory(self.blobs.url.removeprefix("memory://")).open() if self._memory else from_url(self.blobs.url)
        obstore.put(store, f"sha256/{digest[7:9]}/{digest[9:]}", data)

    @property
    def _memory(self) -> bool:
        return self.blobs.url.startswith("memory://")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server("artifacts") as address:
        yield address


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "s3":
        use_s3(monkeypatch, request.getfixturevalue("s3"))
        return Place(open_blobs(f"s3://artifacts/{uuid.uuid4()}"))
    where = tmp_path / "a store" if request.param == "local" else f"memory://{uuid.uuid4()}"
    return Place(open_blobs(where))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_bytes_come_back_by_their_digest(place: Place, tmp_path: Path, data: bytes) -> None:
    digest = place.blobs.put(data)
    assert digest == digest_bytes(data)
    assert place.blobs.has(digest)
    assert place.blobs.size(digest) == len(place.blobs.get(digest))
    assert place.blobs.get(digest) == data
    place.blobs.fetch(digest, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == data


def test_a_large_file_streams_both_ways(place: Place, tmp_path: Path, large: Path) -> None:
    digest = place.blobs.put_file(large)
    assert digest == digest_bytes(large.read_bytes())
    place.blobs.fetch(digest, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == large.read_bytes()
    assert place.blobs.put(large.read_bytes()) == digest


def test_an_empty_file_is_a_blob(place: Place, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert place.blobs.put_file(tmp_path / "empty") == place.blobs.put(b"") == digest_bytes(b"")


def test_another_process_opens_the_same_store_by_url(place: Place) -> None:
    digest = place.blobs.put(b"shared")
    assert open_blobs(place.blobs.url).get(digest) == b"shared"


def test_what_is_not_there_is_not_found(place: Place, tmp_path: Path) -> None:
    assert not place.blobs.has(ABSENT)
    with pytest.raises(NotFoundError, match=ABSENT):
        place.blobs.get(ABSENT)
    with pytest.raises(NotFoundError, match=ABSENT):
        place.blobs.fetch(ABSENT, tmp_path / "fetched")
    with pytest.raises(NotFoundError, match="no file"):
        place.blobs.put_file(tmp_path / "nothing")
    with pytest.raises(IntegrityError, match="must be a plain file"):
        place.blobs.put_file(tmp_path)
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("name", ["", "sha256:12", "../../etc/passwd", ABSENT.upper(), "md5:" + "0" * 64])
def test_what_is_no_digest_is_refused(place: Place, name: str) -> None:
    with pytest.raises(IntegrityError, match="64 hex digits"):
        place.blobs.get(name)


def test_corrupt_bytes_are_never_given_out(place: Place, tmp_path: Path) -> None:
    digest = place.blobs.put(b"right")
    place.overwrite(digest, b"wrong")
    (tmp_path / "fetched").write_bytes(b"as before")
    message = f"blob {digest} is corrupt: bytes hash to {digest_bytes(b'wrong')}"
    with pytest.raises(IntegrityError, match=message):
        place.blobs.get(digest)
    with pytest.raises(IntegrityError, match=message):
        place.blobs.fetch(digest, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"as before"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_putting_again_mends_a_corrupt_blob(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"right")
    digest = place.blobs.put(b"right")
    for put in (partial(place.blobs.put, b"right"), partial(place.blobs.put_file, tmp_path / "file")):
        place.overwrite(digest, b"wrong")
        assert put() == digest
        assert place.blobs.get(digest) == b"right"


def test_threads_putting_the_same_bytes_make_one_blob(place: Place, large: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(place.blobs.put_file(large))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {digest_bytes(large.read_bytes())}
    assert digest_bytes(place.blobs.get(found[0])) == found[0]


def test_a_file_that_changes_while_it_is_stored_gets_no_name(
    place: Place, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest_bytes(large.read_bytes())

    def digest_then_change(chunks: Iterator[bytes]) -> str:
        digest = digest_chunks(chunks)
        large.write_bytes(b"other" * 2_000_000)
        return digest

    monkeypatch.setattr("posttrain.store.blobs.digest_chunks", digest_then_change)
    with pytest.raises(IntegrityError, match="changed while it was stored"):
        place.blobs.put_file(large)
    assert not place.blobs.has(before)


def test_an_address_nobody_understands_is_refused() -> None:
    with pytest.raises(InputError, match="nonsense://there"):
        open_blobs("nonsense://there")


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond a million bytes: what the operating system then says is what a full quota says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, large: Path, small_disk: None) -> None:
    blobs = open_blobs(tmp_path / "store")
    data = large.read_bytes()
    for put in (partial(blobs.put, data), partial(blobs.put_file, large)):
        with pytest.raises(WorkspaceError, match="the disk is full"):
            put()
        assert files(tmp_path / "store") == []
    assert blobs.get(blobs.put(b"small")) == b"small"


def test_a_full_disk_while_fetching_leaves_what_was_there(
    tmp_path: Path, large: Path, request: pytest.FixtureRequest
) -> None:
    blobs = open_blobs(tmp_path / "store")
    digest = blobs.put_file(large)
    request.getfixturevalue("small_disk")
    (tmp_path / "out").mkdir()
    with pytest.raises(WorkspaceError, match="the disk is full"):
        blobs.fetch(digest, tmp_path / "out" / "fetched")
    assert files(tmp_path / "out") == []


@pytest.fixture
def read_only_store() -> Iterator[BlobStore]:
    """A store that this process may read and not write; root steps down for the length of the test."""
    folder = Path(tempfile.mkdtemp())
    blobs = open_blobs(folder)
    blobs.put(b"there")
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folder.rglob("*"):
        path.chmod(0o444)  # its owner opens it to others
    for path in folders:
        path.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield blobs
    if root:
        os.seteuid(0)
    for path in folders:
        path.chmod(0o755)
    rmtree(folder)


def test_a_read_only_store_can_be_read(read_only_store: BlobStore) -> None:
    assert read_only_store.get(digest_bytes(b"there")) == b"there"
    assert read_only_store.put(b"there") == digest_bytes(b"there")
    with pytest.raises(WorkspaceError, match="read-only"):
        read_only_store.put(b"new")


def test_a_store_that_does_not_answer_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise obstore.exceptions.GenericError("error sending request\n\nDebug source: …")

    monkeypatch.setattr(obstore, "get", fail)
    with pytest.raises(InfrastructureError, match="does not answer: error sending request; try again"):
        open_blobs("memory://x").get(ABSENT)


def test_what_there_is_is_listed_and_what_is_deleted_is_gone(place: Place) -> None:
    store = open_blobs(place.blobs.url)
    sizes = {store.put(data): len(data) for data in (b"", b"one", b"another")}
    assert {blob.digest: blob.bytes for blob in store.stored()} == sizes
    assert all(abs(blob.modified - time.time()) < 3600 for blob in store.stored())
    gone = digest_bytes(b"one")
    store.delete(gone)
    store.delete(gone)  # another was faster
    assert not store.has(gone)
    assert {blob.digest for blob in store.stored()} == sizes.keys() - {gone}
    store.note("workspaces/a-workspace", "host:/here")
    store.note("heads/log/1", "1")
    assert store.notes("workspaces") == {"a-workspace": "host:/here"}
    for _ in range(2):  # another was faster
        store.drop_note("heads/log/1")
    assert store.notes("heads/log") == {}
    assert len(list(store.stored())) == 2


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_found_is_as_young_as_if_it_had_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """Else somebody who deletes what is old and unneeded would take it from whoever found it."""
    store = open_blobs(tmp_path)
    (tmp_path / "again").write_bytes(b"large")
    for put, data in ((lambda: store.put(b"small"), b"small"), (lambda: store.put_file(tmp_path / "again"), b"large")):
        digest = put()
        path = tmp_path / "sha256" / digest[7:9] / digest[9:]
        os.utime(path, (1.0, 1.0))
        if remote:  # whose objects get another time only by being written
            monkeypatch.setattr(LocalFolder, "touch", Remote.touch)
        assert put() == digest == digest_bytes(data)
        assert store.modified(digest) > time.time() - 3600
        assert store.get(digest) == data
