"""The registry of assets: what makes a version, and what a run file's refs are pinned to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from posttrain.data.catalog import Catalog
from posttrain.domain.errors import NotFoundError
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
