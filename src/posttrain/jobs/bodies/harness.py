"""The evaluation of a model by a harness: lm-eval or Inspect in a cell, over a server of the model.

::

    job ── posttrain.serving ── engine        serves the model, and counts the tokens
     └──── cell: lm-eval or Inspect           its packages and tasks, no network but the server

The harness reads its packages, which are unpacked once on each machine, and its tasks and data. It can write only in
its scratch folder. Its results become `outputs/metrics.parquet` and `outputs/items.parquet`, as of any evaluation.
A metric that is not the mean of one value per item is reported with its numerator and denominator.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.domain.errors import BudgetExceededError, InputError
from posttrain.domain.harnesses import DATA, INSPECT, LM_EVAL, MEANS, PACKAGES, SITE, TASKS, Harness, this_python
from posttrain.domain.jobs import JobResult, Metric, Note, Progress, seconds_short
from posttrain.domain.kinds import HARNESS, ItemRange
from posttrain.engine.config import HarnessConfig
from posttrain.foreign.evaluations import Answered, Measured, read_answers, read_evaluation
from posttrain.jobs.bodies.evaluation import (
    ITEM_TYPES,
    METRIC_TYPES,
    OUTPUTS,
    fixed_logprobs,
    open_model,
    write_table,
)
from posttrain.jobs.bodies.rewards import workspace_folders
from posttrain.jobs.bodies.served import ServedModel
from posttrain.jobs.bodies.training import choose, tell_sizes
from posttrain.jobs.entry import Job, failed
from posttrain.sandbox.program import Program, ProgramError, run_program
from posttrain.store.trees import scratch

_WEIGHTS = (".safetensors", ".bin", ".pt")  # files of a model that a tokenizer does not need
_TOGETHER, _TEXTS = 8, 16  # requests of lm-eval at a time, and texts of one request
_KEYS = {LM_EVAL: "OPENAI_API_KEY", INSPECT: "POSTTRAIN_API_KEY"}  # variables with the key of the served model


def body(job: Job) -> JobResult:
    """Run the harness, and write both tables."""
    config = HarnessConfig.model_validate(dict(job.order.params))
    facts = Harness.from_json(job.order.inputs[HARNESS].meta, job.label(HARNESS))
    if facts.python != this_python():
        raise InputError(
            f"{job.label(HARNESS)}: its packages are for Python {facts.python}, and this job runs on {this_python()}; "
            "fetch it on such a machine: posttrain harness fetch"
        )
    folder, packages, model = job.input(HARNESS), unpacked(job), job.input("model")
    sizes = choose(job, config)
    tell_sizes(job, sizes)
    out = job.folder / "outputs" / HARNESS
    shutil.rmtree(out, ignore_errors=True)  # of a start of this attempt that its executor repeated
    out.mkdir(parents=True)
    served = ServedModel(job, "model", config.runtime, ("max_length", config.max_length), sizes.load.kv_cache)
    try:
        with served:
            slower = job.tell_fallbacks(served.facts["fallbacks"])
            job.tell_start()
            program = _program(config, facts, served, folder, packages, model)
            watch = _Watch(job, config, facts, served)
            job.sink(Note(f"starting {facts.program}; it loads its tasks, which may take a minute", time.time()))
            for note in (*_ran(program, out, watch, job, served), *_truncated(job)):
                job.sink(Note(note, time.time(), "warning"))
        # after the server has freed its memory
        means = write_results(job, config, facts, out, partial(_fixed, job, config))
        watch.tell(watch.total)
    except _StoppedError:
        return JobResult("stopped", tokens=served.tokens)
    except Exception as error:
        return failed(error, served.tokens)
    job.sink(Metric(0, means, time.time()))
    return JobResult("succeeded", OUTPUTS, means | slower, served.tokens)


class _StoppedError(Exception):
    """A stop was requested."""


def _ran(program: Program, out: Path, watch: _Watch, job: Job, served: ServedModel) -> tuple[str, ...]:
    """Run the harness; an error of the server comes before that of the program, which it may have caused."""
    hidden, confined = workspace_folders(job), not job.order.trust_rewards
    try:
        return run_program(program, out, watch.look, hidden=hidden, confined=confined)
    except ProgramError as error:
        served.check()
        refused = f"; the server refused a request: {served.refused}" if served.refused else ""
        raise ProgramError(f"{error}{refused}") from error
    finally:
        served.check()


def _truncated(job: Job) -> Iterator[str]:
    """Yield a warning if lm-eval cut prompts, which only its output reports."""
    sys.stdout.flush()
    count = job.attempt.log.read_text(errors="replace").lower().count("left truncat") if job.attempt.log.exists() else 0
    if count:
        yield (
            f"lm-eval cut the beginning of prompts that exceed the context, and measured the rest (reported in log.txt "
            f"{count} times); raise max_length, or lower max_new_tokens"
        )


class _Watch:
    """Reports progress, and ends a harness that exceeds a limit."""

    def __init__(self, job: Job, config: HarnessConfig, facts: Harness, served: ServedModel) -> None:
        self._job, self._served, self._timeout, self._name = job, served, config.timeout, facts.program
        self.total = sum(facts.documents(config.tasks, config.limit).values())
        self._seen, self._at = -1, time.monotonic()

    def look(self) -> None:
        """Raise the reason why the harness must end."""
        self._served.check()
        job, now = self._job, time.monotonic()
        if job.stopping():
            raise _StoppedError
        if job.deadline is not None and time.time() >= job.deadline:
            late = seconds_short(job.order.seconds_allowance, job.order.seconds_declared)
            raise BudgetExceededError(f"{late} during evaluation; raise budget.wall_clock")
        answered = self._served.answered
        if answered != self._seen:
            self._seen, self._at = answered, now
            self.tell(min(answered, self.total - 1))
        elif now - self._at > self._timeout:
            raise ProgramError(
                f"{self._name} sent no request for {self._timeout:g} s and was ended; see log.txt, or raise timeout"
            )

    def tell(self, step: int) -> None:
        """Report progress. A document may need several requests, or share one, so only the end is exact."""
        self._job.sink(Progress(step, self.total, "evaluate", self._served.tokens, time.time()))


def unpacked(job: Job) -> Path:
    """Return the folder with the packages of the harness, unpacked once on this machine."""
    digest = job.order.inputs[HARNESS].digest.removeprefix("sha256:")
    folder = Path(job.order.cache_dir) / "harnesses" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(job.input(HARNESS) / PACKAGES) as archive:
            if not _whole(archive, folder / SITE):
                with scratch(folder.parent, "unpacking-") as made:
                    archive.extractall(made / digest / SITE, filter="data")
                    with suppress(OSError):
                        folder.rename(made / "former")
                    with suppress(OSError):  # another job was faster
                        (made / digest).rename(folder)
    except tarfile.TarError as error:
        raise InputError(
            f"{job.label(HARNESS)}: {PACKAGES} cannot be unpacked: {error!s:.100}; fetch it again"
        ) from error
    os.utime(folder)  # `posttrain gc` keeps what was used of late
    return folder / SITE


def _whole(archive: tarfile.TarFile, folder: Path) -> bool:
    """Return whether a folder has exactly the files of an archive."""
    files = 0
    for member in archive:
        if member.isreg():
            files += 1
            packed, path = archive.extractfile(member), folder / member.name
            if packed is None or not path.is_file() or path.read_bytes() != packed.read():
                return False
    return files == sum(path.is_file() for path in folder.rglob("*"))


def _program(
    config: HarnessConfig, facts: Harness, served: ServedModel, folder: Path, packages: Path, model: Path
) -> Program:
    """Return the command of the harness."""
    files = {
        f"tokenizer/{path.name}": path for path in model.iterdir() if path.is_file() and path.suffix not in _WEIGHTS
    }
    tasks = folder / TASKS
    if tasks.is_dir():
        files[TASKS] = tasks
    words = _lm_eval(config, facts, served, tasks.is_dir()) if facts.program == LM_EVAL else _inspect(config, facts)
    return Program(
        facts.program,
        # without the packages of this environment, since the harness has its own
        [sys.executable, "-s", "-S", "-P", "-m", *words],
        {
            **{"PYTHONPATH": str(packages), "HF_HOME": "{home}/hf", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            **{"TOKENIZERS_PARALLELISM": "false", "HF_ALLOW_CODE_EVAL": "1", "TQDM_DISABLE": "1"},
            **{"INSPECT_LOG_LEVEL": "warning", "POSTTRAIN_BASE_URL": f"{served.url}/v1"},
        },
        files=files,
        readable=[packages],
        linked={"hf": folder / DATA} if (folder / DATA).is_dir() else {},
        folder=TASKS if tasks.is_dir() else "",
        network=[urlsplit(served.url).netloc],
        secrets={_KEYS[facts.program]: served.key},
    )


def _lm_eval(config: HarnessConfig, facts: Harness, served: ServedModel, own_tasks: bool) -> Iterator[str]:
    about = {
        **{"model": "model", "base_url": f"{served.url}/v1/completions", "tokenizer_backend": "huggingface"},
        **{"tokenizer": "{source}/tokenizer", "tokenized_requests": True, "num_concurrent": _TOGETHER},
        **{"max_length": config.max_length or served.facts["context"], "add_bos_token": config.add_bos_token},
        **{"max_gen_toks": config.max_new_tokens, "max_retries": 3, "timeout": int(config.timeout)},
    }
    yield from ("lm_eval", "run", "--model", "local-completions", "--batch_size", str(_TEXTS))
    yield from ("--model_args", ",".join(f"{name}={value}" for name, value in about.items()))
    yield from ("--tasks", ",".join(dict.fromkeys(config.tasks or facts.tasks)))
    yield from ("--output_path", "{home}/out", "--log_samples", "--confirm_run_unsafe_code")
    yield from ("--include_path", "{source}/" + TASKS) if own_tasks else ()
    yield from ("--limit", str(config.limit)) if config.limit else ()
    yield from ("--num_fewshot", str(config.num_fewshot)) if config.num_fewshot is not None else ()
    yield from ("--apply_chat_template",) if config.chat else ()


def _inspect(config: HarnessConfig, facts: Harness) -> Iterator[str]:
    chosen = facts.chosen(config.tasks)
    yield from ("inspect_ai", "eval", *(task.source or name for name, task in chosen.items()))
    yield from ("--model", "openai-api/posttrain/model", "--log-dir", "{home}/out", "--log-format", "json")
    yield from ("--display", "plain", "--max-retries", "3", "--max-connections", str(_TOGETHER * _TEXTS), "--seed", "0")
    yield from ("--max-tokens", str(config.max_new_tokens), "--temperature", f"{config.temperature:g}")
    yield from ("--limit", str(config.limit)) if config.limit else ()


def write_results(
    job: Job, config: HarnessConfig, facts: Harness, out: Path, about: Callable[[Iterable[str]], Mapping[str, str]]
) -> dict[str, float]:
    """Write both tables; return the mean of each metric, and the aggregates of the others.

    Args:
        about: prompts → the metadata of the items.

    Raises:
        ProgramError: results are missing, of other tasks, or outside of their range.
    """
    pattern = "results_*.json" if facts.program == LM_EVAL else "*.json"
    files = sorted(path for path in out.rglob(pattern) if path.is_file())
    if not files:
        raise ProgramError(f"{facts.program} left no results; see log.txt")
    try:
        measured = {one.metric: one for path in files for one in read_evaluation(path)[1]}
        answers = [one for path in files for one in read_answers(path)]
        texts = [
            part for one in answers for part in (one.item, one.prompt, one.answer, one.response, one.extracted or "")
        ]
        "".join(texts).encode()
    except (InputError, TypeError, UnicodeEncodeError) as error:
        raise ProgramError(f"{facts.program}: {error}".replace(f"{out}/", "")) from error
    wanted, aggregations = facts.metrics(config.tasks, config.ranges), facts.aggregations(config.tasks)
    _refuse_others(config, facts, answers, measured)
    columns: dict[str, list[Any]] = {name: [] for name in METRIC_TYPES}
    means: dict[str, float] = {}
    for name, one in measured.items():
        if one.refused and aggregations.get(name) in MEANS:
            raise ProgramError(f"{name}: must have a value for each item, but {one.refused}; see log.txt")
        if one.refused:
            means |= _tell_refused(job, one)
            continue
        possible = wanted.get(name)
        if not one.items:
            raise ProgramError(f"{facts.program}: results of {name} are missing; see log.txt")
        _check(one, possible)
        means[name] = math.fsum(one.items.values()) / len(one.items)
        columns["metric"] += [name] * len(one.items)
        columns["item_id"] += one.items
        columns["value"] += one.items.values()
        for part in ("binary", "low", "high"):
            columns[part] += [possible and getattr(possible, part)] * len(one.items)
    lacking = [name for name in wanted if name not in means and name not in measured]
    if lacking:
        raise ProgramError(f"{facts.program}: results of {lacking[0]} are missing; see log.txt, then fetch again")
    write_table(columns, METRIC_TYPES, job.folder / OUTPUTS["metrics"].path)
    items = job.folder / OUTPUTS["items"].path
    write_table(_items(answers, measured, wanted), ITEM_TYPES, items, about(one.prompt for one in answers))
    return means


def _fixed(job: Job, config: HarnessConfig, prompts: Iterable[str]) -> Mapping[str, str]:
    """Return the log-probabilities of the first prompts; their tokens are not the stage's."""
    model, tokenizer = open_model(job, config.runtime)
    texts = dict.fromkeys(prompts)
    return fixed_logprobs(model, (tokenizer.encode(text, add_special_tokens=False) for text in texts))


def _refuse_others(
    config: HarnessConfig, facts: Harness, answers: Sequence[Answered], measured: Mapping[str, Measured]
) -> None:
    """Refuse results of other tasks, and a number of documents that differs from the limit and the facts."""
    tasks = facts.chosen(config.tasks)
    known = {*tasks, *facts.groups}
    other = next((name for name in measured if not any(name.startswith(f"{one}/") for one in known)), None)
    if other is not None:
        raise ProgramError(f"{facts.program}: results of {other} belong to no task of the stage; see log.txt")
    for name, wanted in facts.documents(config.tasks, config.limit).items():
        kinds = {one.kind for one in answers if one.task == name} or {""}
        for kind in kinds:
            found = sum(one.task == name and one.kind == kind for one in answers)
            if found != wanted:
                raise ProgramError(
                    f"{facts.program}: results of {name} must have {wanted} documents, got {found}; see log.txt"
                )


def _check(one: Measured, possible: ItemRange | None) -> None:
    """Refuse values that are missing or outside of the range."""
    for item, value in one.items.items():
        if not math.isfinite(value):
            raise ProgramError(f"{one.metric}: has no value for {item}; see log.txt, then retry")
        if possible and not (possible.low <= value <= possible.high and (value in (0, 1) or not possible.binary)):
            what = "0 or 1" if possible.binary else f"within {possible.low:g} and {possible.high:g}"
            raise ProgramError(
                f"{one.metric}: must be {what}, got {value:g} for {item}; declare its range in ranges: [LEAST, MOST]"
            )


def _tell_refused(job: Job, one: Measured) -> dict[str, float]:
    """Report a metric that no gate can judge; return its value, numerator and denominator, those that are known."""
    value = "" if one.value is None else f" {one.value:.6g}"
    parts = "" if one.numerator is None else f" ({one.numerator:.6g} over {one.denominator:.6g})"
    line = f"{one.metric}{value}{parts}: no gate can judge it: {one.refused}"
    print(line)
    job.sink(Note(line, time.time()))
    known = {"": one.value, "/numerator": one.numerator, "/denominator": one.denominator}
    return {
        f"{one.metric}{end}": number for end, number in known.items() if number is not None and math.isfinite(number)
    }


def _items(
    answers: Sequence[Answered], measured: Mapping[str, Measured], wanted: Mapping[str, ItemRange | None]
) -> dict[str, list[Any]]:
    """Return the columns of the items; an item is correct if the first metric of its task from 0 to 1 is 1."""
    rates = [name for name, one in wanted.items() if one and (one.low, one.high) == (0, 1) and name in measured]
    tasks = {one.task for one in answers}
    first = {task: measured[name].items for name in reversed(rates) for task in tasks if name.startswith(f"{task}/")}
    columns: dict[str, list[Any]] = {name: [] for name in ITEM_TYPES}
    places: dict[tuple[str, str, str], int] = {}
    for one in answers:
        right = first.get(one.task, {}).get(one.item)
        place = (one.task, one.item, "")
        places[place] = places.get(place, -1) + 1
        row = {
            **{"suite": one.task, "item_id": one.item, "prompt": one.prompt, "answer": one.answer},
            **{"kind": "greedy" if not places[place] else "sampled", "sample_index": places[place]},
            **{"response": one.response, "extracted": one.extracted, "correct": None if right is None else right == 1},
        }
        for name, column in columns.items():
            column.append(row.get(name))
    return columns
