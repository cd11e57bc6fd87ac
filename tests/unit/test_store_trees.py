"""Folders as content-addressed trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.ports import BlobStore
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import FORMAT, TreeFile, materialise, put_tree, read_json, tree_listing, verify_tree


@pytest.fixture
def blobs() -> BlobStore:
    return open_blobs(f"memory://{uuid.uuid4()}")


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


_NAMES = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
_TREES = st.dictionaries(_NAMES.filter(lambda name: name not in (".", "..")), st.binary(max_size=50), max_size=5)


@settings(max_examples=25, deadline=None)
@given(top=_TREES, below=_TREES)
def test_a_tree_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, top: dict[str, bytes], below: dict[str, bytes]
) -> None:
    tmp_path, blobs = tmp_path_factory.mktemp("tree"), open_blobs(f"memory://{uuid.uuid4()}")
    files = {f"f{name}": data for name, data in top.items()} | {f"d/{name}": data for name, data in below.items()}
    folder = tmp_path / "folder"
    folder.mkdir()
    digest = put_tree(blobs, write(folder, files))
    assert contents(materialise(blobs, digest, tmp_path / "cache")) == files
    assert put_tree(blobs, tmp_path / "cache" / "trees" / digest.removeprefix("sha256:")) == digest
    assert verify_tree(blobs, digest) == len(blobs.get(digest)) + sum(map(len, files.values()))


def test_the_listing_names_every_file(blobs: BlobStore, tmp_path: Path) -> None:
    digest = put_tree(blobs, write(tmp_path, {"b": b"22", "a/c": b"1"}))
    assert tree_listing(blobs, digest) == {
        "a/c": TreeFile(digest_bytes(b"1"), 1),
        "b": TreeFile(digest_bytes(b"22"), 2),
    }
    assert read_json(blobs, digest)["format"] == FORMAT


def test_names_contents_and_nothing_else_decide_the_digest(blobs: BlobStore, tmp_path: Path) -> None:
    first = write(tmp_path / "1", {"a": b"x", "b": b"y"})
    second = write(tmp_path / "2", {"b": b"y", "a": b"x"})
    (second / "empty").mkdir()
    os.utime(second / "a", (0, 0))
    (second / "a").chmod(0o600)
    assert put_tree(blobs, first) == put_tree(blobs, second)
    assert put_tree(blobs, write(tmp_path / "3", {"a": b"y", "b": b"x"})) != put_tree(blobs, first)


def test_only_plain_files_make_a_tree(blobs: BlobStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"a": b"x"})
    for make in (lambda p: p.symlink_to(folder / "a"), lambda p: p.symlink_to(tmp_path), os.mkfifo):
        make(folder / "odd")
        with pytest.raises(InputError, match="plain files only"):
            put_tree(blobs, folder)
        (folder / "odd").unlink()
    with pytest.raises(InputError, match="must be a folder"):
        put_tree(blobs, folder / "a")
    write(folder, {"back\\slash": b""})
    with pytest.raises(InputError, match="without backslashes"):
        put_tree(blobs, folder)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "./a", "a//b", "", "a\\b", "a/b/.."])
def test_a_listing_that_leaves_its_folder_is_refused(blobs: BlobStore, tmp_path: Path, name: str) -> None:
    file = {"digest": blobs.put(b"x"), "size": 1}
    digest = blobs.put(canonical_json({"format": FORMAT, "files": {name: file}}))
    with pytest.raises(IntegrityError, match="unsafe entry"):
        materialise(blobs, digest, tmp_path / "cache")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "listing",
    [
        {
            "format": FORMAT,
            "files": {"a": {"digest": "sha256:" + "0" * 64, "size": 1}, "a/b": {"digest": "x", "size": 1}},
        },
        {"format": "posttrain.tree/2", "files": {}},
        {"format": FORMAT},
        {"format": FORMAT, "files": {"a": {"size": 1}}},
        {"format": FORMAT, "files": ["a"]},
        [],
    ],
)
def test_what_is_no_listing_is_refused(blobs: BlobStore, listing: object) -> None:
    with pytest.raises(IntegrityError):
        tree_listing(blobs, blobs.put(json.dumps(listing).encode()))


def test_what_is_no_json_is_refused(blobs: BlobStore) -> None:
    with pytest.raises(IntegrityError, match="not JSON"):
        read_json(blobs, blobs.put(b"{"))


def test_a_missing_or_corrupt_file_leaves_no_folder(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "store")
    digest = put_tree(blobs, write(tmp_path / "folder", {"a": b"x", "b": b"y"}))
    victim = digest_bytes(b"y")
    blob = tmp_path / "store" / "sha256" / victim[7:9] / victim[9:]
    blob.write_bytes(b"z")
    for check in (lambda: materialise(blobs, digest, tmp_path / "cache"), lambda: verify_tree(blobs, digest)):
        with pytest.raises(IntegrityError, match=victim):
            check()
    blob.unlink()
    for check in (lambda: materialise(blobs, digest, tmp_path / "cache"), lambda: verify_tree(blobs, digest)):
        with pytest.raises(NotFoundError, match=victim):
            check()
    assert list((tmp_path / "cache" / "trees").iterdir()) == []


def test_a_folder_is_made_once_and_shared(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "store")
    digest = put_tree(blobs, write(tmp_path / "folder", {"a": b"x"}))
    first = materialise(blobs, digest, tmp_path / "cache")
    made = (first / "a").stat().st_ino
    assert materialise(blobs, digest, tmp_path / "cache") == first
    assert (first / "a").stat().st_ino == made


def _altered(folder: Path) -> None:
    (folder / "a").chmod(0o644)
    (folder / "a").write_bytes(b"X")  # as many bytes as before


def _linked(folder: Path) -> None:
    (folder / "a").rename(folder.parent / "elsewhere")
    (folder / "a").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    "harm",
    [
        _altered,
        _linked,
        lambda folder: (folder / "a").unlink(),
        lambda folder: (folder / "d" / "extra").write_bytes(b""),
        lambda folder: (folder / "d" / "b").rename(folder / "b"),
    ],
    ids=["altered", "linked", "missing", "extra", "moved"],
)
def test_a_damaged_folder_is_made_anew(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    blobs = open_blobs(tmp_path / "store")
    files = {"a": b"x", "d/b": b"y"}
    digest = put_tree(blobs, write(tmp_path / "folder", files))
    folder = materialise(blobs, digest, tmp_path / "cache")
    harm(folder)
    assert contents(materialise(blobs, digest, tmp_path / "cache")) == files
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == [folder.name]


def test_a_damaged_folder_whose_blobs_are_gone_is_not_given_out(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "store")
    digest = put_tree(blobs, write(tmp_path / "folder", {"a": b"x"}))
    _altered(materialise(blobs, digest, tmp_path / "cache"))
    victim = digest_bytes(b"x")
    (tmp_path / "store" / "sha256" / victim[7:9] / victim[9:]).unlink()
    with pytest.raises(NotFoundError, match=victim):
        materialise(blobs, digest, tmp_path / "cache")


def test_files_of_a_shared_folder_are_read_only(blobs: BlobStore, tmp_path: Path) -> None:
    folder = materialise(blobs, put_tree(blobs, write(tmp_path / "f", {"a": b"x", "d/b": b""})), tmp_path / "cache")
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o400}
    assert folder.stat().st_mode & 0o700 == 0o700


def test_processes_that_ask_at_once_get_one_folder(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "store")
    digest = put_tree(blobs, write(tmp_path / "folder", {f"file{n}": bytes([n]) * 1000 for n in range(20)}))
    program = (
        "import sys; from pathlib import Path; from posttrain.store.blobs import open_blobs;"
        "from posttrain.store.trees import materialise;"
        "print(materialise(open_blobs(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))"
    )
    command = [sys.executable, "-c", program, blobs.url, digest, str(tmp_path / "cache")]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate()[0].strip() for process in asking}
    assert [process.returncode for process in asking] == [0, 0, 0]
    assert len(answers) == 1
    assert contents(Path(answers.pop())) == contents(tmp_path / "folder")
    assert len(list((tmp_path / "cache" / "trees").iterdir())) == 1
