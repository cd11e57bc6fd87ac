"""The evaluation of a model on its suites, and the sampling of its responses to prompts.

An evaluation writes `outputs/items.parquet` (every response) and `outputs/metrics.parquet` (metric, item_id, value, and
the range that the suite declares for it): the input of a gate. The same responses give the same bytes.

Sampling uses the decoder of training. The request is `{"folder", "name", "rows", "samples", "max_new_tokens",
"temperature", "seed", "stop", "top_k", "top_p", "min_p", "runtime"}`; a temperature of 0 selects the most likely
tokens; without `max_new_tokens` the limit is 256, or the room in the context. The first line of the answer is the
device and the fall-backs, followed by one line per response: `{"prompt", "sample", "text", "tokens", "truncated",
"logprob"}`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.data.rows import distinct_items, prompt_text, read_rows, repeated_rows, uniform
from posttrain.domain.canonical import canonical_json, derive_seed
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import FIXED_LOGPROBS, JobResult, Metric, Note, Output, Progress, seconds_short
from posttrain.domain.rewards import JUDGES
from posttrain.engine.batch import peak_memory
from posttrain.engine.config import EvaluateConfig
from posttrain.engine.evaluation.evaluate import (
    ROWS_PER_CALL,
    Item,
    Judge,
    Meter,
    RewardJudge,
    SuiteResult,
    evaluate_suite,
    suite_items,
)
from posttrain.engine.models.files import ModelSource, decode_response, encode_prompts, load_tokenizer
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.rollout.decoding import StopStrings, prompt_logprobs
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams
from posttrain.engine.rollout.worker import decoding_fallbacks, generate, open_rollout
from posttrain.engine.settings import InferenceRuntimeConfig
from posttrain.jobs.bodies.rewards import open_rewards
from posttrain.jobs.bodies.served import open_models
from posttrain.jobs.bodies.training import choose, settled_device, tell_sizes
from posttrain.jobs.entry import Job, failed
from posttrain.planner.sizes import reward_seconds

OUTPUTS = {"metrics": Output("outputs/metrics.parquet", "file"), "items": Output("outputs/items.parquet", "file")}
_USUAL_TOKENS = 256
_FIXED, _FIXED_TOKENS = 16, 256  # texts whose log-probabilities are recorded, and tokens of each
_ROWS_PER_CALL = 64  # responses between two answers


def body(job: Job) -> JobResult:
    """Evaluate every suite, write both tables, and return the means."""
    config = EvaluateConfig.model_validate(dict(job.order.params))
    sizes = choose(job, config)
    tell_sizes(job, sizes)
    model, tokenizer = open_model(job, config.runtime)
    slower = job.tell_fallbacks(decoding_fallbacks(model, config.rollout.engine))
    suites: dict[str, list[Item]] = {}
    for name, suite in config.suites.items():
        label = job.label(suite.data)
        written = read_rows(job.input(suite.data), name=label)
        rows = distinct_items(written, label, whole=bool(suite.reward))
        rows = uniform(rows) if suite.reward else rows
        if len(rows) < len(written):
            job.sink(Note(repeated_rows(label, len(written), len(rows)), time.time(), "warning"))
        texts = [prompt_text(row) for row in rows]
        suites[name] = suite_items(rows, texts, tokenizer, suite, name=label, context=model.context_length)
    order = job.order
    late = seconds_short(order.seconds_allowance, order.seconds_declared)
    meter = Meter(order.token_allowance, job.deadline, job.meter, order.tokens_declared, late)
    try:
        with ExitStack() as stack:
            judges = _judges(job, config, suites, stack)
            job.tell_start()
            engine = config.rollout.engine
            rollout = open_rollout(model, sizes.load.kv_cache, texts=StopStrings(tokenizer), name=engine)
            results = _answer(job, config, suites, rollout, tokenizer, meter, judges)
    except Exception as error:
        return failed(error, meter.tokens)
    if results is None:
        return JobResult("stopped", tokens=meter.tokens)
    prompts = (item.prompt for result in results for item in result.items)
    means = write_tables(results, job.folder / "outputs", fixed_logprobs(model, prompts))
    job.sink(Metric(0, {**means, **peak_memory()}, time.time()))
    return JobResult("succeeded", OUTPUTS, means | slower, meter.tokens)


def _judges(
    job: Job, config: EvaluateConfig, suites: Mapping[str, Sequence[Item]], stack: ExitStack
) -> dict[str, Judge]:
    """Return the rewards that score suites, each tried on its suite's first items before any token is generated.

    Raises:
        InputError: a reward cannot be opened (see `open_rewards`).
        RewardError: a reward fails on the first items (see `RewardJudge.smoke_test`).
    """
    judges: dict[str, Judge] = {}
    models = open_models(job, config.models, stack)
    for name, suite in config.suites.items():
        if suite.reward:
            timeout = suite.reward_timeout
            if timeout == "auto":
                timeout = reward_seconds(ROWS_PER_CALL, suite.max_new_tokens)
            reward = open_rewards(job, f"{JUDGES}{name}", suite.reward, stack, timeout=timeout, models=models)
            judges[name] = judge = RewardJudge(reward, name, suite.worth)
            judge.smoke_test(suites[name])
    return judges


def _answer(
    job: Job,
    config: EvaluateConfig,
    suites: Mapping[str, Sequence[Item]],
    rollout: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    meter: Meter,
    judges: Mapping[str, Judge],
) -> list[SuiteResult] | None:
    """Return the results of all suites; None: a stop was requested."""
    total = sum(len(items) * (1 + config.suites[name].samples) for name, items in suites.items())
    done = 0

    def between(count: int) -> bool:
        nonlocal done
        done += count
        job.sink(Progress(done, total, "evaluate", meter.tokens, time.time()))
        return done == total or not job.stopping()

    results = []
    for name, items in suites.items():
        result = evaluate_suite(
            *(name, config.suites[name], items, rollout, tokenizer),
            seed=job.order.seed, meter=meter, between=between, judge=judges.get(name),
        )  # fmt: skip
        if result is None:
            return None
        results.append(result)
    return results


def fixed_logprobs(model: LanguageModel, prompts: Iterable[Sequence[int]]) -> dict[str, str]:
    """Return the log-probabilities of the first prompts under the evaluated model, as metadata of the items.

    A server of the model compares its own with them before it answers anyone (`domain.jobs.FIXED_LOGPROBS`).
    """
    texts = list(islice((list(prompt[:_FIXED_TOKENS]) for prompt in prompts if len(prompt) > 1), _FIXED))
    found = [one.logprobs[1:].tolist() for one in prompt_logprobs(model, texts, 0)] if texts else []
    kind = str(model.dtype).removeprefix("torch.")
    return {FIXED_LOGPROBS: canonical_json({"texts": texts, "logprobs": found, "dtype": kind}).decode()}


def write_tables(
    results: Sequence[SuiteResult], folder: Path, about: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Write `items.parquet` and `metrics.parquet`; return the mean of every metric.

    Args:
        about: metadata of `items.parquet`.

    Raises:
        InputError: two suites produce a metric of the same name.
    """
    columns: dict[str, list[Any]] = {name: [] for name in METRIC_TYPES}
    means: dict[str, float] = {}
    for result in results:
        ranges = result.config.metrics(result.suite)
        for metric, values in result.metrics().items():
            if metric in means:
                raise InputError(f"metric {metric} is computed by two suites; rename one suite")
            means[metric] = sum(values) / len(values)
            columns["metric"] += [metric] * len(values)
            columns["item_id"] += [item.id for item in result.items_of(metric)]
            columns["value"] += values
            for name in ("binary", "low", "high"):
                columns[name] += [getattr(ranges[metric], name)] * len(values)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(columns, METRIC_TYPES, folder / "metrics.parquet")
    write_table(_item_columns(results), ITEM_TYPES, folder / "items.parquet", about)
    return means


METRIC_TYPES = {
    **{"metric": "string", "item_id": "string", "value": "float64"},
    **{"binary": "bool", "low": "float64", "high": "float64"},  # the declared range
}


ITEM_TYPES = {
    "suite": "string",
    "item_id": "string",
    "prompt": "string",
    "answer": "string",
    "kind": "string",
    "sample_index": "int32",
    "response": "string",
    "extracted": "string",
    "correct": "bool",
    "tokens": "int32",
    "truncated": "bool",
    "logprob": "float64",
    "reward": "float64",  # null without a reward in the suite
    "components": "string",  # the components of the reward, as a JSON map
}


def _item_columns(results: Sequence[SuiteResult]) -> dict[str, list[Any]]:
    rows = [(result.suite, response) for result in results for response in result.responses]
    return {
        "suite": [suite for suite, _ in rows],
        "item_id": [r.item.id for _, r in rows],
        "prompt": [r.item.text for _, r in rows],
        "answer": [r.item.answer for _, r in rows],
        "kind": [r.kind for _, r in rows],
        "sample_index": [r.sample for _, r in rows],
        "response": [r.text for _, r in rows],
        "extracted": [r.extracted for _, r in rows],
        "correct": [r.correct for _, r in rows],
        "tokens": [r.tokens for _, r in rows],
        "truncated": [r.truncated for _, r in rows],
        "logprob": [r.logprob for _, r in rows],
        "reward": [r.reward for _, r in rows],
        "components": [canonical_json(dict(r.components)).decode() if r.components else None for _, r in rows],
    }


def write_table(
    columns: Mapping[str, list[Any]], types: Mapping[str, str], path: Path, about: Mapping[str, str] | None = None
) -> None:
    """Write a Parquet file with these columns, types and metadata."""
    import pyarrow.parquet  # late: the import starts a thread, and the fork server must be single-threaded

    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in types.items()], about)
    pyarrow.parquet.write_table(pyarrow.table(dict(columns), schema=schema), path, compression="zstd")


def open_model(job: Job, runtime: InferenceRuntimeConfig) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """Return the model in slot `model`, on the stage's device and in its precision, and its tokenizer."""
    folder = job.input("model")
    return ModelSource(folder, runtime.dtype).open(settled_device(runtime)), load_tokenizer(folder)


def sample(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the device and fall-backs, then responses, prompt by prompt."""
    runtime, folder = InferenceRuntimeConfig.model_validate(request["runtime"]), Path(request["folder"])
    limit, samples, temperature = request["max_new_tokens"], request["samples"], request["temperature"]
    device, tokenizer = settled_device(runtime), load_tokenizer(folder)
    model = ModelSource(folder, runtime.dtype).open(device)
    prompts = encode_prompts(
        tokenizer, request["rows"], name=request["name"], limit=model.context_length, reserve=limit or 1
    )
    most = limit or min(_USUAL_TOKENS, model.context_length - min(map(len, prompts)))
    seed = derive_seed(request["seed"], "sample")
    among, stop = {name: request[name] for name in ("top_k", "top_p", "min_p")}, tuple(request["stop"])
    sampling = SamplingParams(most, temperature or 1.0, greedy=temperature == 0, seed=seed, stop=stop, **among)
    rollout = open_rollout(model, texts=StopStrings(tokenizer))
    yield {"device": device, "fallbacks": decoding_fallbacks(model)}
    step = max(1, _ROWS_PER_CALL // samples)
    for start in range(0, len(prompts), step):
        chunk = prompts[start : start + step]
        keys = range(start, start + len(chunk))
        room = [min(most, model.context_length - len(prompt)) for prompt in chunk for _ in range(samples)]
        answers = generate(rollout, chunk, samples=samples, sampling=sampling, prompt_keys=keys, limits=room)
        for at, found in enumerate(answers):
            yield {
                "prompt": start + at // samples,
                "sample": at % samples,
                "text": decode_response(tokenizer, found.response.tolist(), ended=found.closed),
                "tokens": found.generated,
                "truncated": found.truncated,
                "logprob": float(found.logprobs.sum(dtype="float64")),
            }
