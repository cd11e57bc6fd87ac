"""Rows of a data set in one canonical form, and the overlap of evaluation rows with training data.

Rows are read in several conventions; `data.files` describes the file formats. A canonical row has one of the following:

* `prompt` (text, or a list of chat messages), optionally with `completion` (text, or assistant messages) and its
  boolean `label`, or with the preference pair `chosen` and `rejected` (each in the forms of `completion`);
* `messages` (a whole conversation);
* `text`.

A row may also have a reference `answer`, a text with which a response is compared. A null or NaN is not an answer. A
list, map or boolean is retained for rewards that read it, but no response is compared with it.

Every other column is retained. These conventions are read: TRL's `text`, `messages`, `prompt`, `prompt` + `completion`
[+ `label`], `prompt` + `chosen` + `rejected` (or two whole conversations, whose common beginning is the prompt); verl's
Parquet (`prompt` as a chat list, `reward_model.ground_truth` becomes `answer`); verifiers' `prompt, answer, info,
task`; and `question` + `answer`. A row's number is its position, from 1, in its file if the file is named, else in the
data set.

Contamination means that evaluation rows are in the training data; a score on such rows does not measure the task. Three
kinds are distinguished: the same prompt; the same prompt except for case and whitespace, which is a different task if
case matters; and near-duplicates, which share a large part of their word n-grams with one training prompt. N-grams that
many prompts share are part of a task's template and do not count. Rows that consist only of a common template, and
short rows, are not found.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from posttrain.data.files import read_file
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import DocumentUnit

Row = dict[str, Any]
NGRAM, OVERLAP = 5, 0.7
MOST_NGRAMS = 2_000_000  # maximum n-grams of one comparison, which takes five seconds on one core
_LEAST = 8  # minimum number of counted n-grams for a comparison
_SHARED, _SHARED_LEAST, _SHARED_MOST = 20, 3, 20  # an n-gram in more prompts than 1/20, but 3 to 20, is ignored
_WORD = re.compile(r"\w+|[^\w\s]")


class Rows(list[Row]):
    """The rows of a data set; `files` contains the number of rows of each file, in order."""

    files: Mapping[str, int]

    def located(self, message: str, name: str) -> str:
        """Return an error message; if the data set has several files, row numbers become those in the named file."""
        if len(self.files) < 2:
            return message

        def place(match: re.Match[str]) -> str:
            number = int(match["number"])
            for file, count in self.files.items():
                if number <= count:
                    return f"{name}/{file} row {number}" if match["name"] else f"{file} row {number}"
                number -= count
            return match[0]

        return re.sub(rf"((?P<name>{re.escape(name)} )|(?<= of ))row (?P<number>\d+)\b", place, message)


def read_rows(data: Path | Mapping[str, Path], *, name: str = "") -> Rows:
    """Return all rows of a data set in canonical form.

    Args:
        data: a file, a stored folder (all its files, sorted by name), or name → file (`data.files`).
        name: the data set's name in errors, for example `dataset:sort-train@1`; if it is "", the file's name.

    Raises:
        NotFoundError: there is no such file.
        InputError: there are no rows, a line is malformed, or a row has no known convention; the message names the file
            and the line or row.
    """
    files = data if isinstance(data, Mapping) else stored_files(data)
    rows, counts = Rows(), dict.fromkeys(files, 0)
    for file, row in each_row(files, name=name):
        rows.append(row)
        counts[file] += 1
    rows.files = counts
    return rows


def each_row(files: Mapping[str, Path], *, name: str = "") -> Iterator[tuple[str, Row]]:
    """Yield (file, canonical row) with one row in memory at a time.

    Raises:
        NotFoundError: there is no such file.
        InputError: there are no rows, a line is malformed, or a row has no known convention; the message names the file
            and the line or row.
    """
    some = False
    for file, path in files.items():
        place = named(file, name, len(files))
        for number, row in enumerate(read_file(path, place), start=1):
            some = True
            yield file, canonical_row(row, place, number)
    if not some:
        raise InputError(f"{name or ' '.join(files)} must contain at least one row, got 0; write the data set again")


def named(file: str, name: str, files: int) -> str:
    """Return the name of a data set's file in errors: `dataset:train@1/shard-2.jsonl` if there are several files."""
    return (name or file) if files == 1 else f"{name}/{file}" if name else file


def stored_files(path: Path) -> dict[str, Path]:
    """Return name → file for a stored data set, which is one file or all files of a folder."""
    return {file.name: file for file in (sorted(path.iterdir()) if path.is_dir() else [path])}


def canonical_row(row: Mapping[str, Any], name: str, number: int) -> Row:
    """Return a row in canonical form.

    Raises:
        InputError: the row's prompt, messages or text is missing or malformed.
    """
    place = f"{name} row {number}"
    result = dict(row)
    if "prompt" not in result and isinstance(result.get("question"), str):
        result["prompt"] = result["question"]
    _split_preference(result, place)
    present = [key for key in ("prompt", "messages", "text") if result.get(key) is not None]
    if not present:
        columns = ", ".join(sorted(row)) or "none"
        raise InputError(f"{place} must have a column prompt, messages or text, got columns {columns}")
    for key in present:
        _check_content(result[key], key, place)
    for key in _responses(result):
        _check_content(result[key], key, place)
        if isinstance(result["prompt"], str) and not isinstance(result[key], str):
            raise InputError(f"{place}: {key} must be text like its prompt, got messages")
        if not isinstance(result["prompt"], str) and isinstance(result[key], str):
            result[key] = [{"role": "assistant", "content": result[key]}]
    answer = answer_of(result)
    if answer is not None:
        result["answer"] = answer
    elif _is_blank(result.get("answer")):
        result.pop("answer", None)
    return result


def _responses(row: Row) -> list[str]:
    """Return the columns with responses to the prompt. `chosen` without `rejected`, or the reverse, does not count."""
    if row.get("prompt") is None:
        return []
    found = ["completion"] if row.get("completion") is not None else []
    paired = row.get("chosen") is not None and row.get("rejected") is not None
    return [*found, "chosen", "rejected"] if paired else found


def _split_preference(row: Row, place: str) -> None:
    """Split off TRL's implicit prompt, which is the common beginning of the conversations `chosen` and `rejected`."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    prompted = any(row.get(key) is not None for key in ("prompt", "messages", "text"))
    if prompted or not isinstance(chosen, list) or not isinstance(rejected, list):
        return
    pairs = zip(chosen, rejected, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if _without_nulls(a) != _without_nulls(b)), None)
    if not shared:
        raise InputError(
            f"{place}: chosen and rejected must begin with the same prompt, got no common beginning; add the column "
            "prompt"
        )
    row["prompt"], row["chosen"], row["rejected"] = chosen[:shared], chosen[shared:], rejected[shared:]


def _without_nulls(message: Any) -> Any:
    """Return a message without null fields; in Parquet, every message has all fields of its column."""
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else message


def uniform(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, each with all columns, as in `datasets`; a column that a row lacks is None."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{**columns, **row} for row in rows]


def has_answer(row: Mapping[str, Any]) -> bool:
    """Return whether a response can be compared with this canonical row's `answer`."""
    return isinstance(row.get("answer"), str)


def answer_of(row: Mapping[str, Any]) -> str | None:
    """Return the reference answer: `answer`, `reward_model.ground_truth`, `ground_truth`, `label` or `solution`."""
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    for value in (row.get("answer"), truth, row.get("ground_truth"), row.get("label"), row.get("solution")):
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and not _is_blank(value):
            return str(value)
    return None


def _is_blank(value: Any) -> bool:
    """Return whether a value marks a missing entry, as null and NaN do in Parquet."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _check_content(value: Any, key: str, place: str) -> None:
    if isinstance(value, str):
        if key == "messages":
            raise InputError(f"{place}: messages must be a list of messages, got text")
        return
    if key == "text" or not isinstance(value, list) or not value:
        wanted = "text" if key == "text" else "text or a list of messages"
        raise InputError(f"{place}: {key} must be {wanted}, got {value!r:.60}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"{place}: {key} must contain messages with role and content, got {message!r:.60}")


def documents(rows: Sequence[Row], unit: DocumentUnit) -> int:
    """Return how many documents canonical rows give to a stage with this unit."""
    if unit == "label":
        return sum(1 if row.get("completion") is not None else 2 for row in rows)
    return sum(map(demonstrations, rows)) if unit == "turn" else len(rows)


def demonstrations(row: Mapping[str, Any]) -> int:
    """Return how many training documents a canonical row gives: one for every assistant turn of a conversation."""
    paired = row.get("prompt") is not None and row.get("completion") is not None
    if paired or row.get("messages") is None:
        return 1
    return sum(message["role"] == "assistant" for message in row["messages"])


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the text that identifies the task of a canonical row: the prompt, with each message as `role: content`.

    For a conversation, the text is the part before the first assistant message.
    """
    prompt: Any = row.get("prompt")
    if prompt is None and row.get("messages") is not None:
        prompt = list(takewhile(lambda message: message["role"] != "assistant", row["messages"]))
    prompt = row["text"] if prompt is None else prompt
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {_content_text(message['content'])}" for message in prompt)


def distinct_items(rows: Sequence[Row], name: str, *, whole: bool = False) -> list[Row]:
    """Return the rows of an evaluation suite without those that repeat an earlier prompt and its answer.

    A repeated prompt gets the same greedy response, so a gate must not count it twice: 20 rows repeated ten times are
    20 items. For several samples per item, a suite has the setting `samples`.

    Args:
        name: the data set's name in errors.
        whole: whether a reward reads the rows; if so, a repeated prompt must repeat every column.

    Raises:
        InputError: a prompt has two answers or, with `whole`, two values of a column; the message names the data set
            and the rows (from 1).
    """
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        earlier = first.setdefault(prompt_text(row), index)
        if rows[earlier].get("answer") != row.get("answer"):
            raise InputError(
                f"{name} row {index + 1} repeats the prompt of row {earlier + 1} but has a different answer; no "
                "response can be correct for both; drop one row"
            )
        columns = sorted({*row, *rows[earlier]}) if whole else ()
        other = next((column for column in columns if rows[earlier].get(column) != row.get(column)), None)
        if other is not None:
            raise InputError(
                f"{name} row {index + 1} repeats the prompt of row {earlier + 1} but has a different {other}, which a "
                "reward can read; all rows with one prompt are one item; drop one row"
            )
    return [rows[index] for index in first.values()]


def repeated_rows(name: str, rows: int, items: int) -> str:
    """Return the warning for a suite with repeated rows."""
    return (
        f"{name}: {rows - items} of {rows} rows repeat another row; repeats count once, so the suite has {items} items"
    )


def _content_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True, slots=True)
class ContaminationReport:
    """Evaluation rows that are in the training data. Row numbers count from 1.

    Example: `ContaminationReport(rows=600, exact=(17,), alike=(), similar=(23,), ngram=5, overlap=0.7, left=0)`
    """

    rows: int  # number of compared evaluation rows
    exact: tuple[int, ...]  # rows whose prompt is in the training data
    alike: tuple[int, ...]  # rows whose prompt is, except for case and whitespace
    similar: tuple[int, ...]  # other near-duplicates
    ngram: int | None  # words and punctuation marks per n-gram; None: no search for near-duplicates
    overlap: float  # minimum share of a row's counted n-grams in one training prompt
    left: int = 0  # number of prompts beyond the limit, which were not compared for near-duplicates

    @property
    def found(self) -> int:
        """The number of rows found in the training data."""
        return len(self.exact) + len(self.alike) + len(self.similar)

    @property
    def share(self) -> float:
        """The share of evaluation rows found in the training data."""
        return self.found / self.rows

    def __str__(self) -> str:
        near = f"near-duplicate{'' if len(self.similar) == 1 else 's'}"
        near += f" ({self.overlap:.0%} of {self.ngram}-grams in one prompt)"
        parts = [(self.exact, "equal"), (self.alike, "equal except for case and whitespace"), (self.similar, near)]
        told = ", ".join(f"{len(rows)} {word}, first row {rows[0]}" for rows, word in parts if rows)
        left = f"; {self.left} prompts were not checked for near-duplicates" if self.left else ""
        return f"{self.found} of {self.rows} evaluation rows are in the training data{': ' if told else ''}{told}{left}"


def contamination(
    train: Iterable[Mapping[str, Any]],
    evaluation: Sequence[Mapping[str, Any]],
    *,
    ngram: int | None = NGRAM,
    overlap: float = OVERLAP,
    most: int = MOST_NGRAMS,
) -> ContaminationReport:
    """Compare the prompts of canonical rows with those of the training data.

    Args:
        ngram: words per n-gram; None: no search for near-duplicates.
        overlap: share of a row's counted n-grams, in (0, 1]; the row is flagged if one training prompt has this share.
        most: maximum number of n-grams; rows beyond this limit are compared for equality only.

    Raises:
        InputError: there are no evaluation rows, or a parameter is out of range.
    """
    if not evaluation:
        raise InputError("contamination needs at least one evaluation row, got none; check the evaluation data set")
    if ngram is not None and ngram < 1:
        raise InputError(f"ngram must be at least 1 word, got {ngram}")
    if not 0 < overlap <= 1:
        raise InputError(f"overlap must be in (0, 1], got {overlap}")
    known = {prompt_text(row).strip() for row in train}
    folded = {_folded(text): text for text in sorted(known)}
    exact, alike, others = [], [], defaultdict(list)
    for number, row in enumerate(evaluation, start=1):
        text = prompt_text(row).strip()
        if text in known:
            exact.append(number)
        elif _folded(text) in folded:
            alike.append(number)
        else:
            others[_folded(text)].append(number)
    similar, left = _near(list(folded.values()), others, ngram, overlap, most) if ngram else (set(), 0)
    near = sorted(number for text in similar for number in others[text])
    return ContaminationReport(len(evaluation), tuple(exact), tuple(alike), tuple(near), ngram, overlap, left)


def _folded(text: str) -> str:
    """Return a key that is equal for prompts that differ only in case and whitespace."""
    return " ".join(text.casefold().split())


def _near(
    known: Collection[str], asked: Collection[str], ngram: int, overlap: float, most: int
) -> tuple[set[str], int]:
    """Return the prompts in `asked` that are near-duplicates of a prompt in `known`, and how many were omitted."""
    asked_grams = dict(_grams(asked, ngram, most // 2))
    index: dict[int, list[str]] = defaultdict(list)  # n-gram → prompts in `asked` that contain it
    for text, grams in asked_grams.items():
        for gram in grams:
            index[gram].append(text)
    rest = most - sum(map(len, asked_grams.values()))
    hits = [grams & index.keys() for _, grams in _grams(known if index else [], ngram, rest)]
    frequency = Counter(gram for grams in hits for gram in grams)
    within, among = _shared(len(hits)), _shared(len(asked_grams))
    telling = {gram for gram, texts in index.items() if frequency[gram] <= within and len(texts) <= among}
    counted = Counter(text for gram in telling for text in index[gram])
    found = set()
    for grams in hits:
        common = Counter(text for gram in grams & telling for text in index[gram])
        found |= {text for text, n in common.items() if counted[text] >= _LEAST and n / counted[text] >= overlap}
    return found, len(asked) - len(asked_grams) + (len(known) - len(hits) if index else 0)


def _shared(prompts: int) -> int:
    """Return the maximum number of prompts that can share an n-gram without making it part of a template."""
    return min(max(prompts // _SHARED, _SHARED_LEAST), _SHARED_MOST)


def _grams(texts: Iterable[str], length: int, most: int) -> Iterator[tuple[str, set[int]]]:
    """Yield (text, the text's n-grams) until the total number of n-grams would exceed `most`."""
    for text in texts:
        grams = _ngrams(text, length)
        most -= len(grams)
        if most < 0:
            return
        yield text, grams


def _ngrams(text: str, length: int) -> set[int]:
    words = _WORD.findall(text.casefold())
    return set(map(hash, zip(*(words[i:] for i in range(length)), strict=False)))
