"""Inspecting data sets, rewards and models before registration; contamination of evaluation data."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.data import rows
from posttrain.data.assets import REWARD_DIALECTS, inspect_model, inspect_reward
from posttrain.data.catalog import inspect_dataset
from posttrain.data.rows import contamination
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError
from posttrain.domain.rewards import DIALECTS
from posttrain.sandbox.process import open_reward


class TestDataset:
    def test_meta(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        rows = [{"prompt": "ab", "answer": "1"}, {"prompt": "ab "}, {"prompt": "abcd", "level": 2}]
        path.write_text("\n".join(map(json.dumps, rows)))
        meta = inspect_dataset(path)
        canonical_json(meta)
        digest = meta.pop("prompts_digest")
        assert meta == {
            "rows": 3,
            "columns": ["answer", "level", "prompt"],
            "format": "jsonl",
            "files": 1,
            "prompts": 2,
            "answers": 1,
            "characters": {"min": 2, "mean": 3.0, "max": 4},
        }
        path.write_text("\n".join(map(json.dumps, reversed(rows))))
        assert inspect_dataset(path)["prompts_digest"] == digest

    def test_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="the folder has no data file"):
            inspect_dataset(tmp_path)
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(InputError, match="at least one row, got 0"):
            inspect_dataset(tmp_path / "empty.jsonl")


REWARD = '''"""The module speaks of sorting."""
raise SystemExit("inspecting must not execute")

async def score(completion, *, answer, **row):
    """Full marks for the sorted digits."""
'''


class TestReward:
    def test_meta_without_executing(self, tmp_path: Path) -> None:
        path = tmp_path / "exact.py"
        path.write_text(REWARD)
        meta = inspect_reward(path)
        canonical_json(meta)
        digest = meta.pop("source_digest")
        assert digest.startswith("sha256:")
        assert meta == {
            "entry": "score",
            "dialect": "auto",
            "parameters": ["completion", "answer", "**row"],
            "async": True,
            "source": "exact.py",
            "guideline": "Full marks for the sorted digits.",
        }

    def test_guideline_from_module_or_file(self, tmp_path: Path) -> None:
        path = tmp_path / "reward.py"
        path.write_text('"""Of the module."""\ndef score(completion): ...\n')
        assert inspect_reward(path)["guideline"] == "Of the module."
        (tmp_path / "guide.md").write_text("Of the file.\n")
        assert inspect_reward(path, guideline=tmp_path / "guide.md")["guideline"] == "Of the file."
        with pytest.raises(NotFoundError, match=r"guideline .* does not exist"):
            inspect_reward(path, guideline=tmp_path / "absent.md")

    def test_folder_and_imported_entry(self, tmp_path: Path) -> None:
        (tmp_path / "reward.py").write_text("from parts import exact as score\n")
        (tmp_path / "parts.py").write_text("def exact(completion, answer):\n    return float(completion == answer)\n")
        assert inspect_reward(tmp_path, "score")["entry"] == "reward.py:score"
        assert inspect_reward(tmp_path, "parts.py:exact")["parameters"] == ["completion", "answer"]

    @pytest.mark.parametrize(
        ("source", "entry", "match"),
        [
            ("def score(completion:\n", None, r"reward\.py:1 is not valid Python"),
            ("x = 1\n", None, "must define a function `score`, or one public function; it defines none"),
            ("def a(c): ...\ndef b(c): ...\n", None, "it defines a, b"),
            ("def score(c): ...\n", "scor", r"has no function 'scor' \(did you mean 'score'\?\)"),
        ],
    )
    def test_refused(self, tmp_path: Path, source: str, entry: str | None, match: str) -> None:
        path = tmp_path / "reward.py"
        path.write_text(source)
        with pytest.raises(InputError, match=match):
            inspect_reward(path, entry)

    def test_missing_source_and_unknown_dialect(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="does not exist"):
            inspect_reward(tmp_path / "absent.py")
        with pytest.raises(InputError, match=r"must contain `reward\.py` or a single Python file, got none"):
            inspect_reward(tmp_path)
        with pytest.raises(InputError, match="dialect must be one of"):
            inspect_reward(tmp_path, dialect="klingon")

    def test_registration_and_worker_agree_on_dialects(self) -> None:
        assert set(REWARD_DIALECTS) == {"auto", *DIALECTS}

    @pytest.mark.parametrize(
        "source",
        [
            "def helper(completion): ...\ndef score(completion): ...\n",
            "def compute_score(solution_str, ground_truth): ...\ndef other(completion): ...\n",
            "def _private(completion): ...\ndef public(completion): ...\n",
            "def one(completion): ...\ndef two(completion): ...\n",
        ],
    )
    def test_registration_and_worker_agree_on_the_entry(self, tmp_path: Path, source: str) -> None:
        path = tmp_path / "reward.py"
        path.write_text(source)
        try:
            entry = inspect_reward(path)["entry"]
        except PosttrainError as error:
            with pytest.raises(type(error)):
                open_reward(path, timeout=300)
            return
        reward = open_reward(path, timeout=300)
        assert f"({entry})" in reward.where
        reward.close()


def model_folder(folder: Path, tensors: dict[str, list[int]], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **config})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(at))
    return folder


class TestModel:
    def test_meta(self, tmp_path: Path) -> None:
        folder = model_folder(
            tmp_path / "m", {"a": [3, 4], "b": [5], "c": []}, max_position_embeddings=64, vocab_size=60
        )
        meta = inspect_model(folder)
        canonical_json(meta)
        assert meta == {
            "architecture": "Qwen3ForCausalLM",
            "model_type": "qwen3",
            "context_length": 64,
            "vocab_size": 60,
            "parameters": 18,
            "dtypes": ["F32"],
            "tokenizer": True,
            "chat_template": True,
        }

    def test_names_of_other_families(self, tmp_path: Path) -> None:
        assert inspect_model(model_folder(tmp_path / "g", {"a": [1]}, n_positions=32))["context_length"] == 32
        nested = model_folder(tmp_path / "n", {"a": [1]}, text_config={"max_position_embeddings": 9, "vocab_size": 7})
        assert inspect_model(nested)["vocab_size"] == 7

    def test_refused(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path / "m", {"a": [8]})
        with pytest.raises(NotFoundError, match="does not exist"):
            inspect_model(tmp_path / "absent")
        (folder / "pytorch_model.bin").touch()
        with pytest.raises(InputError, match=r"must not contain pickled files, got pytorch_model\.bin"):
            inspect_model(folder)
        (folder / "pytorch_model.bin").unlink()
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1])
        with pytest.raises(
            InputError, match=rf"must have {len(whole)} bytes according to its header, got {len(whole) - 1}"
        ):
            inspect_model(folder)
        for garbage in (b"", b"PK\x03\x04 not safetensors at all", struct.pack("<Q", 4) + b"nope"):
            weights.write_bytes(garbage)
            with pytest.raises(InputError, match="is not safetensors"):
                inspect_model(folder)
        weights.unlink()
        with pytest.raises(NotFoundError, match=r"has no weights model\.safetensors"):
            inspect_model(folder)
        (folder / "config.json").write_text("{}")
        with pytest.raises(InputError, match="must name `architectures`"):
            inspect_model(folder)
        (folder / "config.json").write_text('{"auto_map": {"AutoModel": "x.Y"}}')
        with pytest.raises(InputError, match="auto_map"):
            inspect_model(folder)

    def test_sharded(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path / "m", {"a": [8]})
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
        assert inspect_model(folder)["parameters"] == 8
        index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
        with pytest.raises(NotFoundError, match=r"has no weights two\.safetensors"):
            inspect_model(folder)
        (tmp_path / "outside.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
        index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
        with pytest.raises(NotFoundError, match=r"has no weights \.\./outside\.safetensors"):
            inspect_model(folder)


def prompts(*texts: str) -> list[dict[str, str]]:
    return [{"prompt": text} for text in texts]


STORY = "Natalia sold {n} clips in {month} and half as many in the month after; how many {what} did she sell in all?"


class TestContamination:
    def test_equal_is_told_apart_from_equal_but_for_case_and_blanks(self) -> None:
        report = contamination(prompts("sort 31", "Sort 42"), prompts("sort 99", " sort  42", "sort 31 "))
        assert (report.exact, report.alike, report.similar, report.share) == ((3,), (2,), (), 2 / 3)
        assert str(report) == (
            "2 of 3 evaluation rows are in the training data: 1 equal, first row 3, "
            "1 equal except for case and whitespace, first row 2"
        )
        assert str(contamination(prompts("a"), prompts("b"))) == "0 of 1 evaluation rows are in the training data"

    def test_near_duplicates(self) -> None:
        train = prompts(
            STORY.format(n=48, month="April", what="clips"), "The quick brown fox jumps over the lazy dog, and away."
        )
        asked = prompts(
            "Who wrote the book about the quick grey fox that jumps over a hedge every morning before breakfast?",
            STORY.format(n=48, month="April", what="things"),
            "The quick brown fox jumps over the lazy dog, and on",
        )
        report = contamination(train, asked)
        assert (report.exact, report.alike, report.similar, report.left) == ((), (), (2, 3), 0)
        assert "2 near-duplicates (70% of 5-grams in one prompt), first row 2" in str(report)
        assert contamination(train, asked, overlap=1.0).similar == ()
        assert contamination(train, asked, ngram=None).similar == ()

    def test_a_template_is_no_duplicate(self) -> None:
        def tasks(numbers: range) -> list[dict[str, str]]:
            return prompts(*(STORY.format(n=n, month="April", what="clips") for n in numbers))

        report = contamination(tasks(range(100)), tasks(range(100, 140)))
        assert report.found == 0
        assert contamination(tasks(range(100)), tasks(range(99, 140))).exact == (1,)
        one = prompts(STORY.format(n=7, month="the spring of 1999", what="clips with flowers"))
        again = prompts(STORY.format(n=8, month="the spring of 1999", what="clips with flowers"))
        assert contamination(tasks(range(100)) + one, tasks(range(100, 140)) + again).similar == (41,)

    def test_what_is_too_much_is_left_and_told(self) -> None:
        train = prompts(*(f"{i} a b c d e f g h" for i in range(50)))
        report = contamination(train, prompts("zero one two three four five six seven", "0 a b c d e f g h"), most=60)
        assert (report.exact, report.left) == ((2,), 39), "60 n-grams: 4 of the one that is asked, then 11 rows of 5"
        assert str(report).endswith("; 39 prompts were not checked for near-duplicates")

    def test_refused(self) -> None:
        with pytest.raises(InputError, match="needs at least one evaluation row"):
            contamination([], [])
        with pytest.raises(InputError, match="ngram must be at least 1"):
            contamination([], prompts("a"), ngram=0)
        with pytest.raises(InputError, match="overlap must be in"):
            contamination([], prompts("a"), overlap=0)

    @given(st.lists(st.text(min_size=1), max_size=8), st.lists(st.text(min_size=1), min_size=1, max_size=8))
    def test_more_training_data_never_finds_less(self, train: list[str], evaluation: list[str]) -> None:
        less = contamination(prompts(*train), prompts(*evaluation), ngram=None)
        more = contamination(prompts(*train, *evaluation[:1]), prompts(*evaluation), ngram=None)
        assert set(less.exact) <= set(more.exact)
        assert {1} <= set(more.exact)
        assert set(less.alike) <= {*more.alike, *more.exact}
        assert 0 <= less.share <= more.share <= 1


def test_a_data_set_is_looked_at_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is, few rows are in memory, and somebody hears how far it is."""

    class Counted(dict[str, Any]):
        live = most = 0

        def __init__(self, row: Any) -> None:
            super().__init__(row)
            Counted.live += 1
            Counted.most = max(Counted.most, Counted.live)

        def __del__(self) -> None:
            Counted.live -= 1

    real = rows.canonical_row
    monkeypatch.setattr(rows, "canonical_row", lambda *words: Counted(real(*words)))
    path, told = tmp_path / "many.jsonl", list[str]()
    path.write_text("".join(json.dumps({"prompt": f"{n % 7}", "answer": "a"}) + "\n" for n in range(20_001)))
    meta = inspect_dataset(path, progress=told.append)
    assert (meta["rows"], meta["prompts"], meta["answers"]) == (20_001, 7, 20_001)
    assert told == ["10000 rows", "20000 rows"]
    assert Counted.most <= 3
