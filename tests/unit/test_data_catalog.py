"""The registry of assets: what makes a version, and what a run file's refs are pinned to."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.catalog import Catalog
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.ports import BlobStore
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.trees import tree_listing

REWARD = "from rules import worth\n\n\ndef score(completion):\n    return worth(completion)\n"


@pytest.fixture
def blobs() -> BlobStore:
    return open_blobs(f"memory://{uuid.uuid4()}")


@pytest.fixture
def catalog(tmp_path: Path, blobs: BlobStore) -> Iterator[Catalog]:
    ledger = Ledger(Database(tmp_path / "ledger.db"))
    yield Catalog(ledger, blobs, "user:ada")
    ledger.close()


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    """A reward of two files."""
    folder = tmp_path / "reward"
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    (folder / "rules.py").write_text("def worth(text):\n    return float(len(text))\n")
    return folder


def leave_behind(folder: Path) -> None:
    """What running its tests and a version control leave in a folder."""
    for name in ("__pycache__/rules.cpython-312.pyc", "rules.pyc", ".git/HEAD", ".DS_Store", "sub/.cache/x"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x00")
    (folder / ".venv").symlink_to(folder.parent)


def test_what_programs_leave_in_a_folder_makes_no_version(catalog: Catalog, blobs: BlobStore, reward: Path) -> None:
    first = catalog.add_reward(reward, "length")
    by_path = catalog.resolver(reward.parent)("reward", "./reward")
    leave_behind(reward)
    again = catalog.add_reward(reward, "length")
    assert (again.version, again.digest) == (1, first.digest)
    assert by_path.digest == catalog.resolver(reward.parent)("reward", "./reward").digest == first.digest
    assert list(tree_listing(blobs, first.digest)) == ["reward.py", "rules.py"]
    (reward / "rules.py").write_text("def worth(text):\n    return 0.0\n")
    assert catalog.add_reward(reward, "length").version == 2


def test_a_file_of_the_hubs_cache_is_a_data_set(
    catalog: Catalog, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "datasets--org--sums"
    snapshot = repository / "snapshots" / "c0ffee"
    for folder in (repository / "refs", repository / "blobs", snapshot / "data"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "blobs" / "1").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (snapshot / "data" / "train.jsonl").symlink_to("../../../blobs/1")  # as the cache is laid out
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    resolve = catalog.resolver(tmp_path)
    ref = resolve("dataset", "hf:org/sums@main/data/train.jsonl")
    assert (ref.form, ref.name) == ("file", "hf:org/sums@main/data/train.jsonl")
    manifest = MagicMock()
    manifest.assets.return_value = [("sft", "data", ref)]
    catalog.publish(manifest)
    assert blobs.get(str(ref.digest)) == (repository / "blobs" / "1").read_bytes()
    with pytest.raises(
        NotFoundError, match=r"hf download --repo-type dataset org/sums data/test\.jsonl --revision main"
    ):
        resolve("dataset", "hf:org/sums@main/data/test.jsonl")


def test_several_files_are_one_data_set(catalog: Catalog, blobs: BlobStore, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    first, second = rows(folder, "a.jsonl", 2), rows(folder, "b.jsonl", 3)
    (folder / "README.md").write_text("what it is")
    asset = catalog.add_dataset(folder, "sums")
    assert (asset.form, asset.meta["rows"], asset.meta["files"]) == ("tree", 5, 2)
    assert list(tree_listing(blobs, asset.digest)) == ["a.jsonl", "b.jsonl"]
    assert catalog.add_dataset(second, "sums", first).version == 1, "the same files, in whatever order they are given"
    for word in ("./shards", "./shards/*.jsonl"):
        ref = catalog.resolver(tmp_path)("dataset", word)
        assert (ref.digest, ref.form) == (asset.digest, "tree")
    second.unlink()
    assert catalog.add_dataset(folder, "one").digest == catalog.add_dataset(first, "one").digest
    with pytest.raises(InputError, match=r"files must have different names, got a\.jsonl twice"):
        catalog.add_dataset(first, "sums", first)
    with pytest.raises(InputError, match="if several paths are given, each must be a file, got the folder"):
        catalog.add_dataset(first, "sums", folder)


def test_parquet_shards_of_the_hubs_cache_are_a_data_set(
    catalog: Catalog, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "datasets--org--sums"
    snapshot = repository / "snapshots" / "c0ffee" / "data"
    for folder in (repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    for number, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        pq.write_table(pa.table({"prompt": [f"{number}"]}), repository / "blobs" / str(number))
        (snapshot / f"{name}.parquet").symlink_to(f"../../../blobs/{number}")
    (snapshot.parent / "README.md").write_text("what it is")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    resolve = catalog.resolver(tmp_path)
    with pytest.raises(InputError, match=r"name one: hf:org/sums@c0ffee/data/test-\*\.parquet"):
        resolve("dataset", "hf:org/sums@c0ffee")
    ref = resolve("dataset", "hf:org/sums@c0ffee/data/train-*.parquet")
    manifest = MagicMock()
    manifest.assets.return_value = [("sft", "data", ref)]
    catalog.publish(manifest)
    listing = tree_listing(blobs, str(ref.digest))
    assert list(listing) == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    with pytest.raises(NotFoundError, match="hf download --repo-type dataset org/sums --include 'data/dev-"):
        resolve("dataset", "hf:org/sums@c0ffee/data/dev-*.parquet")


def test_a_model_of_the_hubs_cache_is_published_though_it_is_made_of_links(
    catalog: Catalog, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    files = {
        "config.json": b'{"architectures": ["Qwen3ForCausalLM"]}',
        "model.safetensors": struct.pack("<Q", len(header)) + header + bytes(4),
    }
    for number, (name, data) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    ref = catalog.resolver(tmp_path)("model", "hf:org/tiny@c0ffee")
    manifest = MagicMock()
    manifest.assets.return_value = [("sft", "model", ref)]
    catalog.publish(manifest)
    assert list(tree_listing(blobs, str(ref.digest))) == sorted(files)


def rows(folder: Path, name: str, count: int) -> Path:
    """A data set of so many rows."""
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": f"Q {i}", "answer": str(i)}) + "\n" for i in range(count)))
    return path


def test_a_name_without_a_version_is_its_latest_and_one_with_it_stays(catalog: Catalog, tmp_path: Path) -> None:
    first = catalog.add_dataset(rows(tmp_path, "a.jsonl", 1), "train")
    second = catalog.add_dataset(rows(tmp_path, "b.jsonl", 2), "train")
    resolve = catalog.resolver(tmp_path)
    assert (first.version, second.version) == (1, 2)
    assert resolve("dataset", "dataset:train").digest == second.digest
    assert resolve("dataset", "dataset:train@1").digest == first.digest
    with pytest.raises(NotFoundError, match="version 3 does not exist; the latest is 2"):
        resolve("dataset", "dataset:train@3")


@pytest.mark.parametrize("registered", [True, False])
def test_how_a_reward_is_called_is_part_of_the_pin(catalog: Catalog, tmp_path: Path, registered: bool) -> None:
    (tmp_path / "rules.py").write_text("def mine(completion, answer):\n    return 1.0\n")
    if registered:
        catalog.add_reward(tmp_path / "rules.py", "rules", entry="mine", dialect="row")
    pinned = catalog.resolver(tmp_path)("reward", "reward:rules" if registered else "rules.py")
    assert pinned.meta == {"entry": "mine", "dialect": "row" if registered else "auto", "source": "rules.py"}


def test_bytes_that_are_missing_from_the_store_are_not_planned_with(
    catalog: Catalog, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.add_dataset(rows(tmp_path, "a.jsonl", 1), "train")
    monkeypatch.setattr(type(blobs), "has", lambda self, digest: False)
    with pytest.raises(NotFoundError, match=r"its bytes .* are missing from the store; register it again"):
        catalog.resolver(tmp_path)("dataset", "dataset:train")


def test_a_file_that_changed_since_it_was_planned_is_not_submitted(catalog: Catalog, tmp_path: Path) -> None:
    path = rows(tmp_path, "a.jsonl", 1)
    pinned = catalog.resolver(tmp_path)("dataset", "./a.jsonl")
    manifest = MagicMock()
    manifest.assets.return_value = [("sft", "data", pinned)]
    catalog.publish(manifest)
    rows(tmp_path, path.name, 2)
    with pytest.raises(InputError, match="changed during the submission"):
        catalog.publish(manifest)
