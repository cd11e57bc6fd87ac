"""What a data set may be: forms of files told by their bytes, several files, what Hugging Face's tools write."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from posttrain.data import files
from posttrain.data.files import data_files, file_format, read_file
from posttrain.data.rows import read_rows
from posttrain.domain.errors import InputError, NotFoundError

ROWS: list[dict[str, Any]] = [{"prompt": "sort 31", "answer": "13"}, {"prompt": 'say "ü,\n"', "answer": "007"}]
TABLE = pa.Table.from_pylist(ROWS)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def comma_separated(rows: list[dict[str, Any]], mark: str = ",") -> bytes:
    import csv

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=mark)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(table: pa.Table, new: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def gz(data: bytes) -> bytes:
    """Without the time: the names of tests are made of it, and all workers must find the same."""
    return gzip.compress(data, mtime=0)


def zstd(data: bytes) -> bytes:
    half = len(data) // 2  # two frames, as `cat a.zst b.zst` makes
    return bytes(b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:])))


FORMS = {
    "jsonl": lines(ROWS),
    "json": json.dumps(ROWS, indent=2).encode(),
    "csv": comma_separated(ROWS),
    "parquet": parquet(TABLE),
    "arrow": arrow(TABLE),
}


@pytest.fixture
def blob(tmp_path: Path) -> Callable[[bytes], Path]:
    """A file without a suffix, as the store keeps them."""

    def write(data: bytes) -> Path:
        path = tmp_path / "cd23e4"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_told_by_its_bytes(blob: Callable[[bytes], Path], form: str) -> None:
    path = blob(FORMS[form])
    assert file_format(path) == form
    assert read_rows(path) == ROWS


@pytest.mark.parametrize(("packed", "pack"), [("gzip", gzip.compress), ("zstd", zstd)])
@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_text_may_be_packed(
    blob: Callable[[bytes], Path], form: str, packed: str, pack: Callable[[bytes], bytes]
) -> None:
    path = blob(pack(FORMS[form]))
    assert file_format(path) == f"{form}+{packed}"
    assert read_rows(path) == ROWS


@pytest.mark.parametrize(
    "data",
    [
        arrow(TABLE, pa.ipc.new_file),
        b"\xef\xbb\xbf" + FORMS["csv"],
        b"\xef\xbb\xbf" + FORMS["jsonl"],
        b"\xef\xbb\xbf\n " + FORMS["json"],
        comma_separated(ROWS, "\t"),
        comma_separated(ROWS, ";"),
        gz(FORMS["jsonl"]) + gz(b""),
    ],
)
def test_other_ways_to_write_them(blob: Callable[[bytes], Path], data: bytes) -> None:
    assert read_rows(blob(data)) == ROWS


def test_a_cell_is_the_text_that_was_written_and_an_empty_one_is_no_value(blob: Callable[[bytes], Path]) -> None:
    path = blob(b",prompt,answer,level\n0,Q,007,1.50\n1,R,,\n2,S,NA,true\n")
    assert read_rows(path) == [
        {"Unnamed: 0": "0", "prompt": "Q", "answer": "007", "level": "1.50"},
        {"Unnamed: 0": "1", "prompt": "R", "level": None},
        {"Unnamed: 0": "2", "prompt": "S", "answer": "NA", "level": "true"},
    ]


@given(st.lists(st.fixed_dictionaries({"prompt": st.text(min_size=1), "x": st.text(min_size=1)}), min_size=1))
def test_any_text_survives_csv_and_json(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    path = tmp_path_factory.mktemp("files") / "x"
    path.write_bytes(comma_separated(rows))
    assert list(read_file(path, "x")) == rows
    path.write_bytes(json.dumps(rows, ensure_ascii=False).encode())
    assert list(read_file(path, "x")) == rows


def test_a_long_list_is_read_through_a_small_window(
    blob: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 5)
    rows = [{"prompt": "ü" * 9 + str(i), "n": [i, {"a": 1.5}]} for i in range(50)]
    for indent in (None, 1):
        path = blob(json.dumps(rows, indent=indent, ensure_ascii=False).encode())
        assert list(read_file(path, "x")) == rows


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b'[{"prompt": "a"}, 3]', "d row 2 must be a JSON object, got int"),
        (b'[{"prompt": "a"}, {"prompt": ]', "d row 2 must be a JSON object: Expecting value"),
        (b'[{"prompt": "a"} {"prompt": "b"}]', "row 1 of the list must be followed by a comma or ]"),
        (b'[{"prompt": "a"}', "row 1 of the list must be followed by a comma or ], got its end"),
        (b'[{"prompt": "a"}] x', "the file must end after its list, got 'x'"),
        (b'[{"prompt": NaN}]', "d row 1 .*NaN is not JSON"),
        (rb'[{"prompt": "\ud800"}]', "d row 1 .*the lone surrogate"),
        (b'[{"prompt": "\xff"}]', "d must be UTF-8, got byte 0xff"),
        (b"[]", "at least one row, got 0"),
        (b"prompt,answer\na,b,c\n", r"d row 1 \(line 2\) must have 2 cells like its header, got 3"),
        (b'prompt,answer\n"x\ny",b\na\n', r"d row 2 \(line 4\) must have 2 cells like its header, got 1"),
        (b'prompt,answer\n"a,b\n', "is not CSV: unexpected end of data"),
        (b"prompt, answer\na,b\n", "without surrounding spaces, got ' answer'"),
        (b"prompt,prompt\na,b\n", "must have columns with different names, got prompt, prompt; rename one"),
        (b"prompt,x\na,\xff\n", "must be UTF-8, got byte 0xff"),
        (b"name,age\nada,36\n", "names one of the columns prompt, question, messages, text, chosen, got 'name,age'"),
        (b"messages\nhello\n", "d row 1: messages must be a list of messages, got text"),
        (b"PK\x03\x04....", "got a zip archive; unpack or convert the file"),
        (gz(b'{"prompt": "a"}\n')[:-9], "d cannot be read: .*ended"),
        (gz(gz(b"{}")), r"must contain text when unpacked \(gzip\), got binary data"),
        (zstd(parquet(TABLE)), r"must contain text when unpacked \(zstd\), got binary data"),
        (gz(b'{"prompt": "a"}\n{"prompt": \n'), "d:2 must be one JSON object per line"),
        (arrow(TABLE)[:300], "d cannot be read as Arrow"),
        (b"\xff\xff\xff\xff" + bytes(60), "at least one row, got 0|cannot be read as Arrow"),
    ],
)
def test_malformed(blob: Callable[[bytes], Path], data: bytes, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        read_rows(blob(data), name="d")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(
    blob: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    data = pack(lines([{"prompt": "a" * 100_000}] * 30))
    assert len(read_rows(blob(data))) == 30
    monkeypatch.setattr(files, "ALWAYS", 1_000_000)
    with pytest.raises(
        InputError, match=r"x must have at most 1000000 bytes when unpacked .* got more; unpack the file yourself"
    ):
        read_rows(blob(data), name="x")
    monkeypatch.setattr(files, "MOST_ROW", 50_000)
    with pytest.raises(InputError, match="x:1 must be a row of at most 50000 bytes"):
        read_rows(blob(data), name="x")


def test_a_table_that_unpacks_to_a_huge_one_is_refused(
    blob: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ALWAYS", 1_000_000)
    with pytest.raises(InputError, match="x must contain at most 1000000 bytes"):
        read_rows(blob(parquet(pa.table({"prompt": ["a" * 1000] * 3000}))), name="x")


# --- several files ----------------------------------------------------------------------------------------------------


def shards(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines([{"prompt": f"{number}-{i}"} for i in range(2)]))
    return folder


def test_a_folder_is_its_files_in_sorted_order(tmp_path: Path) -> None:
    shards(tmp_path, "b.jsonl", "a.jsonl")
    (tmp_path / "c.csv.gz").write_bytes(gz(b"prompt\nlast\n"))
    for name in ("README.md", "dataset_infos.json", ".gitattributes", "LICENSE", ".cache/x"):  # a repository's
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert list(data_files(tmp_path)) == ["a.jsonl", "b.jsonl", "c.csv.gz"]
    assert [row["prompt"] for row in read_rows(data_files(tmp_path))] == ["1-0", "1-1", "0-0", "0-1", "last"]
    assert list(data_files(tmp_path / "*.jsonl")) == ["a.jsonl", "b.jsonl"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"answer": "y"}\n')
    with pytest.raises(InputError, match=r"^d@1/b\.jsonl row 2 must have a column prompt"):
        read_rows(data_files(tmp_path), name="d@1")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"answer":\n')
    with pytest.raises(InputError, match=r"^d@1/b\.jsonl:2 must be one JSON object"):
        read_rows(data_files(tmp_path), name="d@1")


def test_a_row_is_named_by_its_file_where_there_are_several(tmp_path: Path) -> None:
    rows = read_rows(data_files(shards(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")), name="d")
    assert rows.files == {"a.jsonl": 2, "b.jsonl": 2, "c.jsonl": 2}
    assert rows.located("d row 4 repeats the prompt of row 1 but has a different answer", "d") == (
        "d/b.jsonl row 2 repeats the prompt of a.jsonl row 1 but has a different answer"
    )
    alone = read_rows(tmp_path / "a.jsonl", name="d")
    assert alone.located("d row 2: too long", "d") == "d row 2: too long"


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["train-0.jsonl", "test-0.jsonl"], "d has the splits test, train; name one: d/test-0.jsonl"),
        (
            [f"data/{s}-0000{i}-of-00002.parquet" for s in ("train", "test") for i in (0, 1)],
            r"d has the splits test, train; name one: d/data/test-\*\.parquet",
        ),
        (["train.jsonl", "heldout.jsonl"], "d has the splits others, train; name one: d/train.jsonl"),
        (["main/train.jsonl", "socratic/train.jsonl"], "in the folders main, socratic; name one: d/socratic"),
        (["a.jsonl", "notes.pdf"], r"must contain data only .*, got notes\.pdf; remove it"),
        (["README.md"], "the folder has no data file"),
    ],
)
def test_folders_that_are_not_one_data_set(tmp_path: Path, names: list[str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        data_files(shards(tmp_path / "d", *names), "d")


def test_a_pattern_must_match(tmp_path: Path) -> None:
    shards(tmp_path, "data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl")
    assert list(data_files(tmp_path / "data" / "train-*.jsonl")) == ["train-0.jsonl", "train-1.jsonl"]
    with pytest.raises(NotFoundError, match="no file matches"):
        data_files(tmp_path / "data" / "dev-*.jsonl")


def saved(folder: Path, *tables: pa.Table) -> Path:
    """As `datasets.Dataset.save_to_disk` leaves it; `make ecosystem` reads what it really writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        (folder / name).write_bytes(arrow(table))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_what_datasets_saves_to_disk(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", TABLE.slice(0, 1), TABLE.slice(1))
    assert read_rows(data_files(folder)) == ROWS
    (folder / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(NotFoundError, match=r"state\.json names data-00000-of-00002\.arrow, which does not exist"):
        data_files(folder)
    both = tmp_path / "both"
    for split in ("train", "test"):
        saved(both / split, TABLE)
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"both has the splits train, test; name one: \./both/train"):
        data_files(both, "./both")
    assert read_rows(data_files(both / "test")) == ROWS
    (both / "dataset_dict.json").write_text('{"splits": []}')
    with pytest.raises(InputError, match=r"dataset_dict\.json must list splits, got \[\]"):
        data_files(both)


@pytest.mark.slow
def test_a_small_parquet_or_arrow_file_of_one_huge_shared_value_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (1 << 20)]))
    nested = pa.StructArray.from_arrays([shared], ["content"])
    lists = pa.ListArray.from_arrays(pa.array(range(2001), pa.int32()), nested)
    for name, column in (("text", shared), ("messages", lists)):
        table = pa.table({"prompt": pa.array(["q"] * 2000), name: column})
        for path, write in ((tmp_path / "a.parquet", pq.write_table), (tmp_path / "a.arrow", feather.write_feather)):
            if path.suffix == ".parquet":
                write(table, path, compression="zstd", store_schema=False)
            else:
                write(table, path, compression="zstd")
            assert path.stat().st_size < 1 << 18
            with pytest.raises(InputError, match="must contain at most"):
                list(read_file(path, path.name))
    many = pa.table(
        {"prompt": ["q"], "numbers": pa.ListArray.from_arrays([0, 40_000_000], pa.nulls(40_000_000, pa.int64()))}
    )
    pq.write_table(many, tmp_path / "b.parquet", compression="zstd")
    with pytest.raises(InputError, match="must contain at most"):
        list(read_file(tmp_path / "b.parquet", "b.parquet"))
