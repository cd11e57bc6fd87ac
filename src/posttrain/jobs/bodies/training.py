"""Trains, by every kind of algorithm, resumed where a checkpoint is named.

The controller runs in this process; the roles run where the stage's `placement` puts them (`jobs.bodies.pools`).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.data.rows import prompt_text, read_rows, uniform
from posttrain.domain.errors import InputError
from posttrain.domain.facts import Note
from posttrain.domain.jobs import JobResult, Output
from posttrain.domain.kinds import kind_of
from posttrain.domain.rewards import reward_slots
from posttrain.engine.assembly import PoolOf, open_learner, open_roles
from posttrain.engine.batch import Document
from posttrain.engine.config import (
    DataflowConfig,
    PPOConfig,
    RowsConfig,
    SamplingConfig,
    TrainingConfig,
    TurnsConfig,
    named,
    stage_config,
)
from posttrain.engine.evaluation.probe import AccuracyProbe
from posttrain.engine.groups.recording import Recorder
from posttrain.engine.loop.controller import Controller, Limits, Order
from posttrain.engine.loop.environment import Environment, TextEnvironment
from posttrain.engine.loop.from_rows import FromRows
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.recipe import Recipe
from posttrain.engine.models.chat import encode_examples, encode_preferences, encode_prompts
from posttrain.engine.models.loading import is_sequence_classifier, load_tokenizer
from posttrain.engine.models.source import ModelSource, ScalarSource
from posttrain.engine.recipes.algorithm import RolloutAlgorithm, RowAlgorithm
from posttrain.engine.recipes.dataflow import Entry, load_dataflow
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.samples import Prompt
from posttrain.engine.scoring import ModelScorer, RewardScorer, Scorer, response_text
from posttrain.engine.selection import Selection
from posttrain.engine.weights.checkpoint import BestModel
from posttrain.jobs.bodies.pools import open_pools, settled
from posttrain.jobs.bodies.rewards import open_rewards
from posttrain.jobs.entry import Job, failed, loading
from posttrain.pacing.balancing import TOKENS, CostModel
from posttrain.planner.residency import Shape
from posttrain.store.channel import ControlKind
from posttrain.store.trees import materialise


@dataclass(frozen=True, slots=True)
class Trained:
    """A recipe, ready to run, and how its model is written."""

    recipe: Recipe
    save_model: Callable[[Path], object]
    tokenizer: PreTrainedTokenizerBase

    def write(self, folder: Path) -> None:
        """The model as it is now, in Hugging Face format."""
        self.save_model(folder)
        self.tokenizer.save_pretrained(folder)


def body(job: Job) -> JobResult:
    """Train, save outputs/model, answer."""
    config = stage_config(job.order.kind, dict(job.order.params))
    if not isinstance(config, TrainingConfig):
        raise InputError(f"posttrain.jobs.train trains models, got a stage of kind {job.order.kind}")
    with ExitStack() as stack:
        with loading():
            config, sizes = settled(job, config)
            trained, controller, slower = _load(job, config, stack)
        job.tell_start()
        try:
            outcome = controller.run()
            if outcome.status == "succeeded":
                folder = job.folder / "outputs" / "model"
                folder.mkdir(parents=True, exist_ok=True)
                trained.write(folder)
                best = _leave_best(job, controller)
        except Exception as error:
            return failed(error, controller.tokens)
    metrics = outcome.metrics | slower | sizes
    if outcome.status != "succeeded":
        return JobResult(outcome.status, metrics=metrics, tokens=outcome.tokens)
    outputs = {"model": Output("outputs/model", "tree"), **best}
    return JobResult("succeeded", outputs, metrics, outcome.tokens, message=outcome.message)


def _load(job: Job, config: TrainingConfig, stack: ExitStack) -> tuple[Trained, Controller, dict[str, float]]:
    """Open what the stage works with; also the slower ways that its models must go."""
    recorder = Recorder(job.sink)
    pool_of = stack.enter_context(open_pools(config, recorder, _costs(job)))
    trained = _open(job, config, pool_of, stack)
    slower = job.tell_fallbacks(trained.recipe.roles.fallbacks())
    return trained, _controller(job, trained, config, recorder), slower


def _leave_best(job: Job, controller: Controller) -> dict[str, Output]:
    """The best model by the probe, where the stage keeps it."""
    kept = controller.best.path if controller.best else None
    if kept is None:
        return {}
    target = job.folder / "outputs" / "best"
    shutil.rmtree(target, ignore_errors=True)  # of an attempt that died before its last word
    kept.rename(target)
    return {"best": Output("outputs/best", "tree")}


def _costs(job: Job) -> CostModel:
    """What a document costs the model; by tokens alone where its configuration does not tell its sizes."""
    try:
        written = json.loads((job.input("model") / "config.json").read_bytes())
    except (OSError, ValueError):  # whoever opens the model says what is wrong with it
        return TOKENS
    shape = Shape.of_config(written) if isinstance(written, dict) else None
    if shape is None:
        return TOKENS
    return CostModel.of_model(
        parameters=shape.parameters, layers=shape.layers, attention_width=shape.heads * shape.head_dim
    )


def _open(job: Job, config: TrainingConfig, pool_of: PoolOf, stack: ExitStack) -> Trained:
    tokenizer = load_tokenizer(job.input("model"))
    algorithm = _algorithm(job, config)
    if isinstance(config, RowsConfig):
        return _from_rows(job, config, algorithm, tokenizer, pool_of)
    assert isinstance(config, SamplingConfig)
    return _on_policy(job, config, algorithm, tokenizer, pool_of, stack)


def _algorithm(job: Job, config: TrainingConfig) -> Any:
    """What the stage trains by: a user's own, or that of its kind."""
    spec = kind_of(job.order.kind).algorithm
    if isinstance(config, DataflowConfig):
        return _dataflow(job)(config)
    assert spec is not None, "a kind with a training configuration has an algorithm"
    return named(spec.algorithm)(config)


def _from_rows(
    job: Job, config: RowsConfig, algorithm: RowAlgorithm[Any], tokenizer: PreTrainedTokenizerBase, pool_of: PoolOf
) -> Trained:
    source = ScalarSource if kind_of(job.order.kind).scores else ModelSource
    roles = open_learner(config, source(job.input("model"), config.runtime.dtype), job.order.seed, pool_of)
    context = roles.made.one(TrainWorker.context_length)
    limit = min(config.max_length or context, context)
    rows = _rows(job, config, "data", tokenizer, limit, None)
    held_out = _rows(job, config, "probe", tokenizer, limit, config.probe.items) if config.probe else []
    recipe = FromRows(config, algorithm, roles, rows, job.order.seed, held_out, phase=job.order.kind)
    return Trained(recipe, lambda folder: roles.made.each(TrainWorker.save_model, folder), tokenizer)


def _rows(
    job: Job, config: RowsConfig, slot: str, tokenizer: PreTrainedTokenizerBase, limit: int, items: int | None
) -> list[Any]:
    """What an algorithm that reads rows is given: documents, or pairs."""
    name = job.label(slot)
    rows = read_rows(job.input(slot), name=name)[:items]
    if config.reads == "pairs":
        return list(encode_preferences(tokenizer, rows, name=name, limit=limit))
    return [Document(e.prompt, e.completion) for e in encode_examples(tokenizer, rows, name=name, limit=limit)]


def _on_policy(
    job: Job,
    config: SamplingConfig,
    algorithm: RolloutAlgorithm,
    tokenizer: PreTrainedTokenizerBase,
    pool_of: PoolOf,
    stack: ExitStack,
) -> Trained:
    dtype, judged = config.runtime.dtype, "reward_model" in job.order.inputs
    taught = "teacher" in job.order.inputs
    if taught:
        _check_teacher(job.input("model"), job.input("teacher"), job.label("teacher"))
    if judged:
        _check_judge(job.input("model"), job.input("reward_model"), job.label("reward_model"))
    roles = open_roles(
        config,
        ModelSource(job.input("model"), dtype),
        job.order.seed,
        pool_of,
        critic=ScalarSource(job.input("model"), dtype) if isinstance(config, PPOConfig) else None,
        reward_model=ScalarSource(job.input("reward_model"), dtype) if judged else None,
        teacher=ModelSource(job.input("teacher"), dtype) if taught else None,
        stop=(*config.stop, *algorithm.source.stop),
    )
    context = roles.made.one(TrainWorker.context_length)
    if taught:
        context = min(context, roles.frozen["teacher"].one(FrozenWorker.context_length))
    train = _prompts(job, "data", tokenizer, context, config.response_tokens, None)
    scorer: Scorer | None = None
    if judged:
        scorer = ModelScorer(
            roles.frozen["reward_model"], tokenizer, tokens=roles.micro_batch_tokens, early=roles.early("reward_model")
        )
    elif config.reward:
        scorer = _reward_function(
            job, config, config.reward, tokenizer, train, stack, placed=algorithm.reads_token_scores
        )
    probe = _probe(job, config, tokenizer, context)
    environment = _environment(config, algorithm, tokenizer)
    recipe = OnPolicy(
        *(config, algorithm, roles, train, scorer, job.order.seed, probe),
        phase=job.order.kind,
        text=partial(response_text, tokenizer),
        environment=environment,
    )
    return Trained(recipe, lambda folder: roles.made.each(TrainWorker.save_model, folder), tokenizer)


def _reward_function(
    job: Job,
    config: SamplingConfig,
    reward: str | Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase,
    train: list[Prompt],
    stack: ExitStack,
    *,
    placed: bool,
) -> Scorer:
    ranks = config.placement.pool_of("reward").resources.rank_count if config.placement.reward else 1
    timeout = float(config.reward_timeout)  # settled (`bodies.pools`)
    opened = open_rewards(job, "reward", reward, stack, timeout=timeout, ranks=ranks)

    def tell(line: str) -> None:
        job.sink(Note(line, time.time(), "warning"))

    share = config.reward_errors_max
    name = ", ".join(job.label(place) for place in reward_slots("reward", reward))
    scorer = RewardScorer(
        *(opened, tokenizer), errors_max=share, processes=ranks, placed=placed, turns=config.turns_most, name=name,
        tell=tell,
    )  # fmt: skip
    scorer.smoke_test(train)
    return scorer


def _environment(
    config: SamplingConfig, algorithm: RolloutAlgorithm, tokenizer: PreTrainedTokenizerBase
) -> Environment | None:
    """What an algorithm observes between two responses."""
    if not isinstance(config, TurnsConfig):
        return None
    observe = getattr(algorithm, "observe", None)
    if (observe is None) != (config.turns_most == 1):
        name = f"recipe {config.recipe}" if isinstance(config, DataflowConfig) else type(algorithm).__name__
        there = "no observe(row, responses); define it" if observe is None else "an observe; set turns to 2 or more"
        raise InputError(f"{name} has turns {config.turns_most}, got {there}")
    if observe is None:
        return None
    return TextEnvironment(observe, tokenizer, config.observed_most)


def _dataflow(job: Job) -> Entry:
    """The user's algorithm; its source is put under its own name, for this process and the workers' to import."""
    meta = job.order.inputs["recipe"].meta
    folder = job.folder / "recipe"
    folder.mkdir(exist_ok=True)
    file = folder / str(meta["source"])
    file.write_bytes(job.input("recipe").read_bytes())
    return load_dataflow(file, str(meta["entry"]))


def _probe(job: Job, config: SamplingConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> AccuracyProbe | None:
    if not config.probe:
        return None
    held_out = _prompts(job, "probe", tokenizer, context, config.max_new_tokens, config.probe.items)
    return AccuracyProbe(
        held_out,
        tokenizer,
        extract=config.probe.extract,
        max_new_tokens=config.max_new_tokens,
        stop=config.stop,
        name=job.label("probe"),
    )


def _check_judge(policy: Path, judge: Path, name: str) -> None:
    """A reward model scores what it reads, which are the policy's tokens, so it was trained on the same ones.

    Raises:
        InputError: it makes text, or has another vocabulary.
    """
    if load_tokenizer(policy).get_vocab() != load_tokenizer(judge).get_vocab():
        raise InputError(f"reward model {name} must have the policy's tokenizer, got another vocabulary; train it anew")
    if not is_sequence_classifier(judge):
        raise InputError(
            f"reward model {name} must score responses, got a model that is no sequence classifier; "
            "name one of kind reward_model"
        )


def _check_teacher(policy: Path, teacher: Path, name: str) -> None:
    """A teacher reads the policy's tokens and says which of them it would have taken, so both have the same ones.

    Raises:
        InputError: it scores, or has another vocabulary.
    """
    if load_tokenizer(policy).get_vocab() != load_tokenizer(teacher).get_vocab():
        raise InputError(
            f"teacher {name} must have the policy's tokenizer, got another vocabulary; name one of the policy's family"
        )
    if is_sequence_classifier(teacher):
        raise InputError(f"teacher {name} must make text, got a model that scores; name one that a policy is")


def _prompts(
    job: Job, slot: str, tokenizer: PreTrainedTokenizerBase, context: int, reserve: int, items: int | None
) -> list[Prompt]:
    name = job.label(slot)
    rows = uniform(read_rows(job.input(slot), name=name))[:items]
    encoded = encode_prompts(tokenizer, rows, name=name, limit=context, reserve=reserve)
    return [Prompt(tokens, prompt_text(row), row) for tokens, row in zip(encoded, rows, strict=True)]


def _controller(job: Job, trained: Trained, config: TrainingConfig, recorder: Recorder) -> Controller:
    """The loop, already resumed where its order names a checkpoint.

    Of this very attempt there is none: it begins once (`jobs.entry`), also where an executor starts its job anew, whose
    next attempt then finds what was done.
    """
    controller = Controller(
        recipe=trained.recipe,
        checkpoints=job.folder / "checkpoints",
        fingerprint=job.fingerprint(),
        every=config.runtime.checkpoint_every,
        sink=job.sink,
        flush=job.flush,
        orders=_orders(job),
        limits=Limits(
            job.order.token_allowance,
            job.deadline,
            job.order.seconds_allowance,
            job.order.tokens_declared,
            job.order.seconds_declared,
        ),
        recorder=recorder,
        meter=job.meter,
        selection=Selection.of(config),
        best=BestModel(job.folder / "best", trained.write) if config.keep_best else None,
    )
    if job.order.resume:
        controller.resume(materialise(job.blobs, job.order.resume, Path(job.order.cache_dir)))
    return controller


def _orders(job: Job) -> Callable[[], Order]:
    """Stop by an order or SIGTERM; one checkpoint for every time one is asked for."""
    served = written = 0  # one that was asked for while this process was loading is owed

    def orders() -> Order:
        nonlocal served, written
        if served > written:  # asked again, so the last one was carried out
            job.attempt.acknowledge(ControlKind.CHECKPOINT, served)
            written = served
        if job.stopping():
            return Order.STOP
        requested = job.attempt.checkpoints_requested()
        if requested > served:
            served = requested
            return Order.CHECKPOINT
        return Order.GO_ON

    return orders
