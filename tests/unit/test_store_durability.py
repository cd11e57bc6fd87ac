"""What a power cut leaves: whatever the store has said is there, whole and under its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from power_cut import Disk

from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import JobOrder, JobResult, Note
from posttrain.store import atomic
from posttrain.store.atomic import create_json, read_json, sync_tree, write_atomic, write_json
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import FORMAT, materialise, put_tree, verify_tree


def test_the_disk_of_these_tests_forgets_what_was_not_synced(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert disk.left(path, tmp_path) is None
    with path.open("rb") as file:
        os.fsync(file.fileno())
    assert disk.left(path, tmp_path) is None, "its name is not safe"
    folder = os.open(tmp_path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    path.write_bytes(b"two")
    assert disk.left(path, tmp_path) == b"one"


def test_a_file_written_at_once_is_safe(disk: Disk, tmp_path: Path) -> None:
    for data in (b"first", b"second"):
        write_atomic(tmp_path / "file", data)
        assert disk.left(tmp_path / "file", tmp_path) == data
    write_json(tmp_path / "value.json", {"a": 1})
    assert disk.left(tmp_path / "value.json", tmp_path) == b'{"a": 1}\n'


def test_the_first_of_two_writers_wins_and_is_safe(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    assert create_json(path, {"who": "first"})
    assert disk.left(path, tmp_path) == b'{"who": "first"}\n', "before anybody else comes"
    assert not create_json(path, {"who": "second"})
    assert read_json(path) == {"who": "first"}
    assert disk.left(path, tmp_path) == path.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["claim.json"]


def test_a_folder_that_a_library_wrote_is_safe_down_to_the_last_file(disk: Disk, tmp_path: Path) -> None:
    files = [tmp_path / "made" / name for name in ("config.json", "sub/a.bin", "sub/deeper/b.bin")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    sync_tree(tmp_path / "made")
    for path in files:
        assert disk.left(path, tmp_path / "made") == path.name.encode()


@pytest.mark.parametrize("way", ["bytes", "file", "bytes again", "file again"])
def test_a_digest_is_given_out_for_what_is_safe(disk: Disk, tmp_path: Path, way: str) -> None:
    data, store = b"weights", tmp_path / "blobs"
    blobs = open_blobs(store)
    (tmp_path / "file").write_bytes(data)
    place = store / "sha256" / digest_bytes(data)[7:9] / digest_bytes(data)[9:]
    if way.endswith("again"):  # somebody else wrote it and died before it could sync it
        place.parent.mkdir(parents=True)
        place.write_bytes(data)
    digest = blobs.put(data) if way.startswith("bytes") else blobs.put_file(tmp_path / "file")
    assert digest == digest_bytes(data)
    assert disk.left(place, store) == data


def test_what_a_job_says_last_is_safe_and_so_are_its_order_and_its_facts(disk: Disk, tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "attempt")
    folder.write_order(JobOrder("n", "sft", 1, {}, {}, "memory://x", "cache"))
    with EventWriter(folder) as sink:
        sink(Note("a word", 1.0))
    folder.write_result(JobResult("succeeded"))
    for name in ("job.json", "result.json"):
        assert disk.left(folder.path / name, folder.path) == (folder.path / name).read_bytes()
    segment = folder.events / "000001.jsonl"
    assert disk.left(segment, folder.events) == segment.read_bytes()


def test_a_tree_in_the_cache_is_named_once_it_is_whole(disk: Disk, tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "blobs")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "sub" / "weights").write_bytes(b"weights")
    target = materialise(blobs, put_tree(blobs, tmp_path / "model"), tmp_path / "cache")
    assert disk.named(target, target.parent)
    assert disk.left(target / "sub" / "weights", target / "sub") == b"weights"


def test_a_listing_that_lies_about_a_size_does_not_verify(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "blobs")
    listing = {"format": FORMAT, "files": {"weights": {"digest": blobs.put(b"weights"), "size": 8}}}
    with pytest.raises(IntegrityError, match="weights must have 8 bytes, got 7"):
        verify_tree(blobs, blobs.put(canonical_json(listing)))


def test_a_folder_is_made_in_one_that_may_be_written_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be synced there; everything else can be done."""

    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(atomic, "sync_folder", refused)
    atomic.make_folder(tmp_path / "drop" / "mine")
    assert (tmp_path / "drop" / "mine").is_dir()
