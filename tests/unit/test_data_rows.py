"""Reading data sets: conventions, file formats, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from posttrain.data.files import file_format
from posttrain.data.rows import canonical_row, has_answer, prompt_text, read_rows
from posttrain.domain.errors import InputError, NotFoundError

CHAT = [{"role": "user", "content": "Q: sort 31"}]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_lines_and_blank_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": 3})
    path.write_text(path.read_text() + "\n\n" + json.dumps({"text": "b"}))
    assert read_rows(path) == [{"prompt": "a", "answer": "3"}, {"text": "b"}]


def test_format_is_told_by_content_not_by_suffix(tmp_path: Path) -> None:
    blob = tmp_path / ("f" * 64)
    row = {
        "data_source": "made",
        "prompt": CHAT,
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": "13"},
        "extra_info": {"split": "train", "index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row]), blob)
    assert file_format(blob) == "parquet"
    assert read_rows(blob) == [{**row, "answer": "13"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "completion": "b"}, {}),
        ({"prompt": CHAT, "completion": "b"}, {"completion": [{"role": "assistant", "content": "b"}]}),
        ({"prompt": CHAT, "answer": "13", "info": {"k": 1}, "task": "sort"}, {}),
        ({"question": "a", "answer": 1.5}, {"prompt": "a", "answer": "1.5"}),
        ({"messages": [*CHAT, {"role": "assistant", "content": "A"}]}, {}),
        ({"prompt": "a", "ground_truth": "x"}, {"answer": "x"}),
        ({"prompt": "a", "solution": "y"}, {"answer": "y"}),
        ({"text": "plain", "prompt": None}, {}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}),
        (
            {"prompt": CHAT, "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
            {"chosen": [{"role": "assistant", "content": "b"}]},
        ),
        ({"prompt": "a", "chosen": 3}, {}),
        ({"prompt": "a", "completion": "b", "rejected": ["c"]}, {}),
        ({"text": "a", "chosen": [1], "rejected": [2]}, {}),
    ],
)
def test_conventions(row: dict[str, object], expected: dict[str, object]) -> None:
    assert canonical_row(row, "d", 1) == {**row, **expected}


def test_the_prompt_of_two_conversations_is_what_they_share() -> None:
    good, bad = ([{"role": "assistant", "content": text}] for text in ("A: 13", "A: 31"))
    row = canonical_row({"chosen": CHAT + good, "rejected": CHAT + bad, "margin": 1.5}, "d", 1)
    assert row == {"prompt": CHAT, "chosen": good, "rejected": bad, "margin": 1.5}
    for chosen in (CHAT + bad, good):
        with pytest.raises(InputError, match="d row 1: chosen and rejected must begin with the same prompt"):
            canonical_row({"chosen": chosen, "rejected": CHAT + bad}, "d", 1)


def test_an_absent_answer_in_parquet_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [None, "13"], "label": [float("nan"), 7.0]}), path)
    first, second = read_rows(path)
    assert "answer" not in first
    assert not has_answer(first)
    assert second["answer"] == "13"
    assert "answer" not in canonical_row({"prompt": "a", "answer": float("nan")}, "d", 1)


@pytest.mark.parametrize("answer", [["13", "31"], {"a": 1}, True])
def test_an_answer_that_is_no_text_is_left_to_the_reward(answer: object) -> None:
    row = canonical_row({"prompt": "a", "answer": answer}, "d", 1)
    assert row["answer"] == answer
    assert not has_answer(row)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"d\.jsonl must contain at least one row, got 0"),
        ('{"prompt": "a"}\n{oops\n', r"d\.jsonl:2 must be one JSON object per line"),
        ('{"prompt": "a"}\n[1]\n', r"d\.jsonl:2 must be a JSON object, got list"),
        ('{"prompt": "a", "w": NaN}\n', r"d\.jsonl:1 .*NaN is not JSON"),
        ('{"prompt": "\xff"}\n', r"d\.jsonl:1 .*utf-8"),
        ('{"prompt": "a"}\n{"answer": "b"}\n', r"row 2 must have a column prompt, .* got columns answer"),
        ('{"prompt": 3}\n', r"d\.jsonl row 1: prompt must be text or a list of messages, got 3"),
        ('{"prompt": [{"content": "x"}]}\n', r"d\.jsonl row 1: prompt must contain messages with role and content"),
        ('{"text": ["x"]}\n', r"d\.jsonl row 1: text must be text, got"),
        ('{"messages": "x"}\n', r"d\.jsonl row 1: messages must be a list of messages, got text"),
        ('{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}\n', "must be text like its prompt"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": 3}\n',
            r"row 1: rejected must be text or a list of messages, got 3",
        ),
        (
            '{"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}\n',
            "chosen must be text",
        ),
        ('{"chosen": "ab", "rejected": "ac"}\n', r"row 1 must have a column prompt, .* got columns chosen, rejected"),
    ],
)
def test_malformed(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=match) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"dataset:x@1: data set file .* does not exist"):
        read_rows(tmp_path / "none", name="dataset:x@1")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"broken\.parquet cannot be read as Parquet"):
        read_rows(broken)


def test_prompt_text_is_what_makes_a_task() -> None:
    assert prompt_text({"prompt": CHAT}) == "user: Q: sort 31"
    messages = [{"role": "system", "content": "s"}, *CHAT, {"role": "assistant", "content": "A"}]
    assert prompt_text({"messages": messages}) == "system: s\nuser: Q: sort 31"
    assert prompt_text({"text": "t"}) == "t"


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3), min_size=1))
def test_other_columns_survive(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("rows") / "d.jsonl"
    written = [{**row, "prompt": f"p{i}"} for i, row in enumerate(rows)]
    read = read_rows(jsonl(path, *written))
    assert [{k: v for k, v in row.items() if k != "answer"} for row in read] == [
        {k: v for k, v in row.items() if k != "answer"} for row in written
    ]


def test_columns_that_parquet_fills_with_nulls_do_not_make_messages_differ(tmp_path: Path) -> None:
    asked, right = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "13"}
    wrong = {"role": "assistant", "content": "31"}
    path = jsonl(tmp_path / "d.jsonl", {"chosen": [{**asked, "name": None}, right], "rejected": [asked, wrong]})
    (row,) = read_rows(path)
    assert [message["content"] for message in row["prompt"]] == ["Q"]
    assert (row["chosen"], row["rejected"]) == ([right], [wrong])
