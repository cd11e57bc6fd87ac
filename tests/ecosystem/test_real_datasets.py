"""What the real `datasets` writes is read: folders on disk, shards, text, packed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.files import data_files
from posttrain.data.rows import read_rows
from posttrain.domain.errors import InputError

pytestmark = pytest.mark.ecosystem
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"Sort {i}, ü"}],
        "completion": [{"role": "assistant", "content": f"{i}"}],
        "answer": str(i),
        "info": {"level": i},
    }
    for i in range(7)
]
TEXTS = [{"prompt": f'say "{i}",\nthen stop', "answer": f"00{i}"} for i in range(7)]


def made(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize("shards", [1, 3])
def test_saved_to_disk(tmp_path: Path, shards: int) -> None:
    made(ROWS).save_to_disk(tmp_path / "d", num_shards=shards)
    assert read_rows(data_files(tmp_path / "d")) == ROWS
    shuffled = made(ROWS).shuffle(seed=3)  # an index over the rows, which saving writes out
    shuffled.save_to_disk(tmp_path / "s")
    assert read_rows(data_files(tmp_path / "s")) == shuffled.to_list()


def test_a_dict_of_splits_needs_one_named(tmp_path: Path) -> None:
    from datasets import DatasetDict

    DatasetDict(train=made(ROWS), test=made(ROWS[:2])).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match="has the splits train, test; name one: d/train"):
        data_files(tmp_path / "d", "d")
    assert read_rows(data_files(tmp_path / "d" / "test")) == ROWS[:2]


WRITTEN: dict[str, Callable[[Any, Path], Any]] = {
    "x.parquet": lambda data, path: data.to_parquet(path),
    "x.jsonl": lambda data, path: data.to_json(path),
    "x.jsonl.gz": lambda data, path: data.to_json(path, compression="gzip"),
    "x.json": lambda data, path: data.to_json(path, lines=False),
    "x.csv": lambda data, path: data.to_csv(path),
    "x.csv.gz": lambda data, path: data.to_csv(path, compression="gzip"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_it_writes(tmp_path: Path, name: str) -> None:
    rows = TEXTS if "csv" in name else ROWS
    WRITTEN[name](made(rows), tmp_path / name)
    assert read_rows(data_files(tmp_path)) == rows


def test_a_table_of_pandas_with_its_index(tmp_path: Path) -> None:
    made(TEXTS).to_pandas().to_csv(tmp_path / "x.csv")
    assert read_rows(tmp_path / "x.csv") == [{"Unnamed: 0": str(i), **row} for i, row in enumerate(TEXTS)]


def test_shards_as_the_hub_keeps_them(tmp_path: Path) -> None:
    from datasets import load_dataset

    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        for at in range(2):
            part = made(rows).shard(2, at, contiguous=True)
            (tmp_path / "data").mkdir(exist_ok=True)
            part.to_parquet(tmp_path / "data" / f"{split}-0000{at}-of-00002.parquet")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    with pytest.raises(InputError, match=r"has the splits test, train; name one: d/data/test-\*\.parquet"):
        data_files(tmp_path, "d")
    pattern = tmp_path / "data" / "train-*.parquet"
    theirs = load_dataset("parquet", data_files=str(pattern), split="train", cache_dir=str(tmp_path / "cache"))
    assert read_rows(data_files(pattern)) == theirs.to_list() == ROWS
