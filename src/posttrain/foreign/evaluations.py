"""Readers of evaluations by lm-evaluation-harness (lm-eval) and Inspect: the value of every metric, item by item.

The format of a file follows from its content. A metric is usable by a gate if it is the mean of one value per item;
any other metric has only its aggregate, with the reason why no gate can judge it. Reading needs neither package.

::

    lm-eval   results_TIME.json and samples_TASK_TIME.jsonl of --log_samples   TASK/METRIC or TASK/METRIC,FILTER
    Inspect   a log as .eval (a ZIP file) or .json                             TASK/SCORER or TASK/SCORER/PART

An lm-eval item is a document, identified by its hash: equal documents are one item, whose value is their mean. An
Inspect item is a sample, identified by its id and text; its value is the mean over the epochs.
"""

import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError
from posttrain.domain.harnesses import INSPECT, LM_EVAL, RATES
from posttrain.domain.kinds import RATE, SHARE, ItemRange

_MOST, _MOST_LINE = 512 << 20, 64 << 20  # maximum bytes of a JSON document, also unpacked; of a line of samples
_ZSTD = 93  # the method by which Inspect compresses; zipfile of Python 3.11 cannot read it
_STAMP = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d+"  # the time in lm-eval's file names
_PAIRS = ("weighted_perplexity", "bits_per_byte")  # aggregations of (log-likelihood, number of words or bytes)
_DEFAULTS = {  # metric → aggregation that lm-eval uses if a task names none
    **dict.fromkeys((*RATES, "likelihood"), "mean"),
    **dict.fromkeys(("word_perplexity", "byte_perplexity"), "weighted_perplexity"),
    **{name: name for name in ("bits_per_byte", "perplexity", "bleu", "chrf", "ter", "brier_score")},
    "f1": "f1_score",
    "mcc": "matthews_corrcoef",
}
_LETTERS: Mapping[str, Any] = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # correct, incorrect, partial, no answer
_STRANGE = (  # errors of reading a file with other fields or a damaged ZIP file
    *(KeyError, TypeError, AttributeError, IndexError, OverflowError, NotImplementedError, zipfile.BadZipFile),
)
_TEXT = 2000  # characters of a prompt that identify a sample; Inspect's summaries keep more


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of one model."""

    metric: str
    items: Mapping[str, float]  # id of an item → value, NaN: not measured; empty if no gate can judge the metric
    range: ItemRange | None = None  # the range of an item's value; None: the format does not define one
    refused: str = ""  # why no gate can judge the metric
    value: float | None = None  # the aggregate in the file, if no gate can judge the metric
    numerator: float | None = None  # of the aggregate, if known
    denominator: float | None = None
    note: str = ""  # a warning about the items


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to one item, of one filter or epoch."""

    task: str
    item: str
    kind: str  # the filter of lm-eval, or the epoch of Inspect
    prompt: str
    answer: str  # the reference
    response: str
    extracted: str | None  # what the filter made of the response


def read_evaluation(path: Path) -> tuple[str, list[Measured]]:
    """Return the format (`lm-eval` or `inspect`) and the metrics of a results file.

    Raises:
        InputError: the file is not one of these, damaged, too large or incomplete, or an item occurs twice.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return INSPECT, _inspect(
                    path, *(_member(path, archive, name) for name in ("header.json", "summaries.json"))
                )
        raw = _json(path)
        if isinstance(raw.get("results"), dict) and isinstance(raw.get("configs"), dict):
            return LM_EVAL, list(_lm_eval(path, raw))
        if isinstance(raw.get("eval"), dict) and "status" in raw:
            return INSPECT, _inspect(path, raw, raw.get("samples") or ())
    except _STRANGE as error:
        raise InputError(
            f"{path}: must have the fields of lm-eval 0.4 or Inspect 0.3, got {type(error).__name__}: {error!s:.100}; "
            "evaluate with such a version"
        ) from error
    if "doc_hash" in raw:
        raise InputError(f"{path}: contains samples of lm-eval; give the results_….json next to it, or the folder")
    raise _unknown(path)


def read_answers(path: Path) -> Iterator[Answered]:
    """Yield the answers in a results file that `read_evaluation` accepts, with prompts; a `.eval` file has none.

    Raises:
        InputError: a sample has other fields.
    """
    raw = _json(path)
    try:
        if "configs" in raw:
            for task in raw["configs"]:
                if samples := _samples_file(path, task):
                    yield from _lm_eval_answers(task, samples)
        else:
            yield from (_inspect_answer(raw["eval"]["task"], sample) for sample in raw.get("samples") or ())
    except (*_STRANGE, ValueError) as error:
        raise InputError(
            f"{path}: its samples must be those of lm-eval 0.4 or Inspect 0.3, got {error!r:.100}"
        ) from error


def _unknown(path: Path) -> InputError:
    return InputError(
        f"{path}: must be metrics.parquet of Posttrain, results_….json of lm-eval or a log of Inspect, got another "
        "file; check the path"
    )


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON map; for a file with a map on each line, the first map."""
    size = path.stat().st_size
    if size == 0 or size > _MOST:
        raise InputError(f"{path}: must have from 1 to {_MOST} bytes, got {size}; evaluate again, in parts if needed")
    try:
        raw, end = json.JSONDecoder().raw_decode(text := path.read_text(encoding="utf-8").lstrip())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON or is cut off ({error!s:.100}); copy or create it again") from error
    if not isinstance(raw, dict) or (text[end:].strip() and "doc_hash" not in raw):
        raise _unknown(path)
    return raw


# --- lm-eval ----------------------------------------------------------------------------------------------------------


def _lm_eval(path: Path, raw: Mapping[str, Any]) -> Iterator[Measured]:
    for task, scores in raw["results"].items():
        config = raw["configs"].get(task)
        samples = _samples_file(path, task) if config else None
        rows = _rows(samples, raw["n-samples"][task]["effective"]) if samples else []
        for key, value in scores.items():
            name, comma, chosen = key.partition(",")
            if not comma or name.endswith("_stderr"):
                continue
            metric = f"{task}/{name}" + (f",{chosen}" if chosen != "none" else "")
            mine = [row for row in rows if row["filter"] == chosen]
            aggregation = _aggregation(config, name) if config else "that of a group; judge its tasks"
            mean = aggregation == "mean" and samples is not None
            yield _documents(metric, name, mine) if mean else _aggregate(metric, name, mine, value, aggregation)


def _samples_file(path: Path, task: str) -> Path | None:
    """Return the samples of a task that were written together with a results file; None: no such file."""
    stamp = re.search(_STAMP, path.name)
    wanted = re.compile(rf"samples_{re.escape(task)}_({re.escape(stamp[0]) if stamp else _STAMP})\.jsonl")
    found = [one for one in sorted(path.parent.iterdir()) if wanted.fullmatch(one.name)]
    return found[0] if len(found) == 1 else None


def _aggregation(config: Mapping[str, Any], name: str) -> str:
    """Return how lm-eval aggregates a metric of a task; `unknown` if the file does not record it."""
    listed = config.get("metric_list") or [{"metric": name}]
    entry = next((one for one in listed if one.get("metric") == name), {"aggregation": "unknown"})
    return str(entry.get("aggregation") or _DEFAULTS.get(name, "unknown"))


def _rows(path: Path, expected: int) -> list[dict[str, Any]]:
    """Return the rows of a file of samples: a filter, a document's number and hash, and the value of each metric.

    Raises:
        InputError: a line is no sample, a document occurs twice with one filter, or documents are missing.
    """
    rows: list[dict[str, Any]] = []
    seen: dict[str, set[int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE), b""), start=1):
            try:
                raw = json.loads(line)
                row = {key: raw[key] for key in ("filter", "doc_id", "doc_hash", *raw["metrics"])}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(
                    f"{path}: line {number}: must be a sample of lm-eval 0.4, got {type(error).__name__}: "
                    f"{error!s:.100}; copy or create the file again"
                ) from error
            if row["doc_id"] in seen.setdefault(row["filter"], set()):
                raise InputError(
                    f"{path}: line {number}: each document must occur once for a filter, got doc {row['doc_id']} twice "
                    f"with {row['filter']}; evaluate into a new folder"
                )
            seen[row["filter"]].add(row["doc_id"])
            rows.append(row)
    few = next((docs for docs in (seen or {"": set()}).values() if len(docs) != expected), None)
    if few is not None:
        lacking = next((f", e.g. not doc {doc}" for doc in range(expected) if doc not in few), "")
        raise InputError(
            f"{path}: must contain {expected} documents, as the results state, got {len(few)}{lacking}; copy or create "
            "the file again"
        )
    return rows


def _documents(metric: str, name: str, rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Return a mean as one value per document; equal documents are one item, named after the first."""
    values: dict[str, list[float]] = {}
    names: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row["doc_id"]):
        value = row.get(name, math.nan)
        if not isinstance(value, int | float):
            return Measured(metric, {}, refused=f"its values are not numbers, e.g. for doc {row['doc_id']}")
        item = names.setdefault(row["doc_hash"], _document(row))
        values.setdefault(item, []).append(float(value))
    note = f"{metric}: {len(rows)} documents are {len(values)} items, because equal documents count once"
    items = {item: math.fsum(same) / len(same) for item, same in values.items()}
    return Measured(metric, items, RATE if name in RATES else None, note=note if len(values) < len(rows) else "")


def _lm_eval_answers(task: str, path: Path) -> Iterator[Answered]:
    """Yield the answers in a file of samples. The response to a multiple choice is the likeliest choice."""
    names: dict[str, str] = {}
    with path.open("rb") as file:
        rows = sorted((json.loads(line) for line in file), key=lambda row: (row["doc_id"], row["filter"]))
    for row in rows:
        item = names.setdefault(row["doc_hash"], _document(row))
        asked = [
            row["arguments"][name] for name in sorted(row["arguments"], key=lambda one: int(one.rpartition("_")[2]))
        ]
        given = [one[0] for one in row["resps"]]
        choices, answer = [one.get("arg_1") for one in asked], row["target"]
        response, extracted = "", None  # of the likelihood of the prompt itself
        if isinstance(choices[0], dict):  # settings of a generation
            response, extracted = given[0], str(row["filtered_resps"][0])
        elif choices[0] is not None:
            response = extracted = choices[max(range(len(choices)), key=lambda at: float(given[at][0]))]
            answer = choices[int(answer)] if answer.isdecimal() and int(answer) < len(choices) else answer
        yield Answered(task, item, row["filter"], str(asked[0]["arg_0"]), answer, str(response), extracted)


def _document(row: Mapping[str, Any]) -> str:
    return f"doc {row['doc_id']} ({row['doc_hash'][:16]})"


def _aggregate(metric: str, name: str, rows: Sequence[Mapping[str, Any]], value: Any, aggregation: str) -> Measured:
    """Return a metric without items, with numerator and denominator if each document has such a pair."""
    why = f"it is not the mean of one value per document (aggregation: {aggregation:.80})"
    if aggregation == "mean":
        why = "its values for each document are missing; evaluate with --log_samples, and keep the files together"
    pairs = rows if aggregation in _PAIRS else ()
    sums = [math.fsum(row[name][place] for row in pairs) if pairs else None for place in (0, 1)]
    return Measured(metric, {}, None, why, float(value) if isinstance(value, int | float) else None, sums[0], sums[1])


# --- Inspect ----------------------------------------------------------------------------------------------------------


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    """Return a JSON document of a log; its size is checked before it is unpacked.

    Raises:
        InputError: the document is missing, too large or damaged.
    """
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise InputError(
            f"{path}: must be a log of a finished evaluation by Inspect, got a ZIP file without {name}; evaluate again"
        ) from error
    if info.file_size > _MOST:
        raise InputError(f"{path}: {name} must have at most {_MOST} bytes, got {info.file_size}; use fewer samples")
    try:
        return json.loads(_unpacked(path, archive, info))
    except (ValueError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise InputError(f"{path}: {name} is damaged: {error!s:.100}; copy or create the log again") from error


def _unpacked(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with archive.open(info) as file:  # the declared size may be a lie
            return file.read(info.file_size + 1)[: info.file_size]
    if info.compress_type != _ZSTD:
        raise ValueError(f"compressed with method {info.compress_type}, which Inspect does not use")
    import pyarrow  # imported here: the import takes 0.1 s

    with path.open("rb") as file:
        file.seek(info.header_offset + 26)  # the lengths of the name and the extra field in the local header
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        packed = file.read(info.compress_size)
    return bytes(pyarrow.Codec("zstd").decompress(packed, decompressed_size=info.file_size, asbytes=True))


def _inspect(path: Path, header: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Return the metrics of a log.

    Raises:
        InputError: the evaluation did not succeed, samples are missing, or a sample occurs twice.
    """
    if header["status"] != "success" or header.get("invalidated"):
        why = f": {header['error']['message']!s:.300}" if isinstance(header.get("error"), dict) else ""
        raise InputError(
            f"{path}: must be the log of a successful evaluation, got status {header['status']!r:.40}"
            f"{', invalidated' if header.get('invalidated') else ''}{why}; evaluate again"
        )
    task, expected = header["eval"]["task"], header["results"]["total_samples"]
    if len(samples) != expected:
        raise InputError(
            f"{path}: must contain {expected} samples, got {len(samples)}; evaluate again, and log samples"
        )
    epochs = header["eval"]["config"].get("epochs") or 1
    counts: dict[str, set[int]] = {}
    values: dict[str, dict[str, list[Any]]] = {}  # metric → item → value of each epoch
    for sample in samples:
        item = _sample_name(sample)
        seen = counts.setdefault(item, set())
        if sample["epoch"] in seen:
            raise InputError(
                f"{path}: each sample must occur once per epoch, got {item} twice in epoch {sample['epoch']}; evaluate "
                "again"
            )
        seen.add(sample["epoch"])
        for metric, value in _scores(task, sample):
            values.setdefault(metric, {}).setdefault(item, []).append(value)
    return [_averaged(name, counts, values[name], epochs) for name in values]


def _sample_name(sample: Mapping[str, Any]) -> str:
    """Return the id of a sample with a digest of its text, so a changed sample is a different item."""
    given = sample["input"]
    turns = [(one["role"], _parts(one["content"])) for one in given] if isinstance(given, list) else given[:_TEXT]
    targets = [sample["target"]] if isinstance(sample["target"], str) else sample["target"]
    read = {"input": turns, "target": [one[:_TEXT] for one in targets]}
    return f"{sample['id']} ({digest_json(read).removeprefix('sha256:')[:16]})"


def _inspect_answer(task: str, sample: Mapping[str, Any]) -> Answered:
    given, target = sample["input"], sample["target"]
    turns = (
        [f"{one['role']}: {' '.join(_parts(one['content']))}" for one in given] if isinstance(given, list) else [given]
    )
    answer = target if isinstance(target, str) else ", ".join(target)
    extracted = next((score.get("answer") for score in (sample.get("scores") or {}).values()), None)
    response = sample["output"].get("completion", "")
    return Answered(task, _sample_name(sample), str(sample["epoch"]), "\n".join(turns), answer, response, extracted)


def _parts(content: Any) -> list[str]:
    """Return the texts of a message, with Inspect's names for pictures and sound, as its summaries have them."""
    listed = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part["text"][:_TEXT] if part["type"] == "text" else f"({part['type'].capitalize()})" for part in listed]


def _scores(task: str, sample: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for scorer, score in (sample.get("scores") or {}).items():
        whole, value = f"{task}/{scorer}", score["value"]
        yield from (
            ((f"{whole}/{part}", one) for part, one in value.items()) if isinstance(value, dict) else [(whole, value)]
        )


def _averaged(metric: str, items: Iterable[str], values: Mapping[str, Sequence[Any]], epochs: int) -> Measured:
    """Return the means over epochs; NaN for an item without a score in some epoch."""
    graded = all(isinstance(one, str | bool | None) for given in values.values() for one in given)
    means: dict[str, float] = {}
    for item in items:
        given: list[Any] = [math.nan if one is None else one for one in values.get(item, ())]
        numbers = [_LETTERS.get(one, one) if isinstance(one, str) else one for one in given]
        if not all(isinstance(one, int | float) for one in numbers):
            return Measured(metric, {}, refused=f"its values are not numbers, e.g. for sample {item}")
        means[item] = math.fsum(numbers) / epochs if len(numbers) == epochs else math.nan
    return Measured(metric, means, SHARE if graded else None)
