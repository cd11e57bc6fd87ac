"""Training by every kind of algorithm, the sizes and processes that a job chooses for it, and initial models.

Training resumes from the checkpoint that the order names. The controller runs in this process; the roles run where the
stage's `placement` puts them. This module is the composition root that names the back-ends of worker groups.

Sizes for which the stage has `auto` are chosen once, before any model is opened, and reported. Only `planner.sizes`
chooses sizes, from this machine's resources, so a plan on this machine has the same sizes.

An initial model is a randomly initialised model in Hugging Face format.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from posttrain.data.rows import prompt_text, read_rows, uniform
from posttrain.domain.canonical import derive_seed, digest_json
from posttrain.domain.errors import InputError, IntegrityError, StoppedError
from posttrain.domain.jobs import GANG, JobResult, Metric, Note, Output, Progress
from posttrain.domain.rendering import check_labels, labels_of
from posttrain.domain.rewards import reward_slots
from posttrain.domain.roles import ROLLOUT, RoleSpec, in_pools, role_named
from posttrain.engine.batch import Document
from posttrain.engine.config import (
    EvaluateConfig,
    HarnessConfig,
    InitModelConfig,
    RowsConfig,
    SamplingConfig,
    TrainingConfig,
    TurnsConfig,
    training_config,
)
from posttrain.engine.evaluation.evaluate import AccuracyProbe
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.cluster import open_cluster
from posttrain.engine.groups.port import Recorder
from posttrain.engine.groups.worker_group import DEADLINES, Deadlines, ResourcePool
from posttrain.engine.loop.controller import (
    Controller,
    FromRows,
    FrozenSource,
    Limits,
    Order,
    PoolOf,
    Selection,
    open_learner,
    open_roles,
)
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.recipe import Recipe
from posttrain.engine.models.adapters import in_folder, read_adapter
from posttrain.engine.models.files import (
    LabelledRow,
    ModelSource,
    ScalarSource,
    character_tokenizer,
    encode_examples,
    encode_preferences,
    encode_prompts,
    initial_model,
    is_sequence_classifier,
    load_tokenizer,
    save_model,
)
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.algorithm import RolloutAlgorithm, RowAlgorithm
from posttrain.engine.recipes.dataflow import algorithm_of
from posttrain.engine.roles.remote import RemoteModel
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.samples import Prompt
from posttrain.engine.scores import (
    Environment,
    ModelScorer,
    RewardScorer,
    Scorer,
    SumScorer,
    TextEnvironment,
    response_text,
)
from posttrain.engine.settings import InferenceRuntimeConfig
from posttrain.engine.weights.checkpoint import BestModel
from posttrain.execution.machine import room_of, this_machine
from posttrain.jobs.bodies.rewards import open_observer, open_rewards, recipe_of
from posttrain.jobs.bodies.served import compare_tokens, open_models, open_remote
from posttrain.jobs.entry import Job, failed, loading
from posttrain.pacing.balance import TOKENS, CostModel
from posttrain.planner.residency import infeasible
from posttrain.planner.shape import Shape
from posttrain.planner.sizes import Room, Settled, settle
from posttrain.store.mailbox import ControlKind
from posttrain.store.trees import materialise

_GANG_SECONDS = 300.0  # for the nodes of a gang to join their cluster


def settled_device(runtime: InferenceRuntimeConfig) -> str:
    """Return the device that `auto` means in this process; sets the process's threads to the stage's number."""
    torch.set_num_threads(runtime.threads)
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def open_pools(config: TrainingConfig, recorder: Recorder, costs: CostModel = TOKENS) -> Iterator[PoolOf]:
    """Yield the pools of a stage's placement: this process if one rank is enough, else Ray actors.

    Args:
        config: the configuration of the stage.
        recorder: records the groups' calls.
        costs: the cost model of a document, by which batches are balanced over ranks.

    Raises:
        InputError: the cluster lacks resources for the placement.
        InfrastructureError: no cluster could be reached or started.
    """
    device = settled_device(config.runtime)
    pools = config.placement.pools(in_pools(config.opened())).values()
    alone = len(pools) == 1 and all(pool.resources.rank_count == 1 for pool in pools)
    if alone and not config.runtime.ray_address:
        with ResourcePool(InlineBackend(device=device), recorder, costs=costs, deadlines=_deadlines(config)) as pool:
            yield lambda role: pool
        return
    with ExitStack() as stack:
        yield _open_cluster_pools(config, recorder, costs, stack).__getitem__


def _open_cluster_pools(
    config: TrainingConfig, recorder: Recorder, costs: CostModel, stack: ExitStack
) -> dict[str, ResourcePool]:
    """Return each role's pool of Ray processes. All pools are checked with the cluster before any pool is created."""
    gang = os.environ.get(GANG)  # set on nodes of a flavour, which are all of the requested kind
    roles, address = in_pools(config.opened()), config.runtime.ray_address or gang or None
    elsewhere = gang is None or config.runtime.ray_address is not None
    placement = config.placement if elsewhere else config.placement.of_any_kind()
    pools = placement.pools(roles)
    learners = {role.name for role in config.roles() if role.trained}
    ranks = ", ".join(f"{name} ({pool.resources.rank_count})" for name, pool in pools.items())
    to = f"requesting processes from the Ray cluster at {address}" if address else "starting Ray on this machine"
    recorder.sink(Note(f"{to} for the ranks of {ranks}; each loads its packages, which may take a minute", time.time()))
    cpus = sum(pool.resources.cpus or 0 for pool in pools.values())
    size = None if config.runtime.object_store == "auto" else config.runtime.object_store
    cluster = stack.enter_context(open_cluster(address, cpus=None if address else max(cpus, 1), store_bytes=size))
    until = time.monotonic() + (_GANG_SECONDS if gang and address == gang else 0.0)
    while lines := infeasible(placement, cluster.resources(), roles=roles, where="the Ray cluster"):
        if time.monotonic() >= until:
            raise InputError("; ".join(lines))
        time.sleep(1.0)  # a node of the gang has not joined yet
    opened: dict[str, ResourcePool] = {}
    deadlines = _deadlines(config)
    for name, pool in pools.items():
        wanted = pool.resources
        learns = not learners.isdisjoint(pool.roles)
        frozen = set(pool.roles) - learners - {ROLLOUT.name}
        shared = config.runtime.sequence_parallel if learns else 1  # ranks of other roles take whole sequences
        backend = cluster.backend(
            name,
            wanted.rank_count,
            cpus=wanted.cpus_per_rank,
            gpus=wanted.gpus_per_rank,
            kind=wanted.kind,
            threads=config.runtime.threads,
            sequence_parallel=shared,
            start_seconds=deadlines.start,
            collective_seconds=deadlines.call / 2,  # the collective's error then comes before the call's
            collective=learns or bool(frozen and config.runtime.shard_frozen is True),
        )
        made = ResourcePool(backend, recorder, costs=costs, sequence_parallel=shared, deadlines=deadlines)
        opened |= dict.fromkeys(pool.roles, stack.enter_context(made))
    return opened


def _deadlines(config: TrainingConfig) -> Deadlines:
    """Return the stage's deadlines; the pool's defaults for `auto`."""
    start, call = config.runtime.start_timeout, config.runtime.call_timeout
    return Deadlines(
        DEADLINES.start if start == "auto" else start,
        DEADLINES.call if call == "auto" else call,
    )


def settled(job: Job, config: TrainingConfig) -> tuple[TrainingConfig, dict[str, float]]:
    """Return the stage's configuration with every size settled and reported, and the metrics `sizes/NAME`."""
    found = choose(job, config)
    load, names = found.load, ("micro_batch_tokens", "kv_cache", "object_store", "start_timeout", "call_timeout")
    chosen = {name: value for name in names if (value := getattr(load, name)) is not None}
    chosen |= {name: bool(getattr(load, name)) for name in ("activation_checkpointing", "shard_frozen")}
    changes: dict[str, Any] = {"runtime": config.runtime.model_copy(update=chosen)}
    if load.reward_timeout is not None:
        changes["reward_timeout"] = load.reward_timeout
    return config.model_copy(update=changes), tell_sizes(job, found)


def tell_sizes(job: Job, found: Settled) -> dict[str, float]:
    """Print the settled sizes with their arithmetic to the log, and return the metrics."""
    metrics = {f"sizes/{name}": value for name, value in found.values().items()}
    job.sink(Metric(0, metrics, time.time()))
    for size in found.sizes:
        print(f"{size.name}: {size.said}" + (f" ({size.why})" if size.chosen else ", as written"))
    return metrics


def choose(job: Job, config: TrainingConfig | EvaluateConfig | HarnessConfig) -> Settled:
    """Return the sizes that `planner.sizes` chooses for this machine."""
    load = config.load(job.order.kind)
    room = Room() if load.ray_address is not None else room_of(this_machine())
    if room.gpu_there and settled_device(config.runtime) != "cuda":  # torch does not see the machine's GPUs
        room = Room(memory=room.memory)
    shapes = {role.name: shape for role in load.roles if role.model and (shape := _shape(job, role)) is not None}
    return settle(load, shapes, room)


def _shape(job: Job, role: RoleSpec) -> Shape | None:
    folder = job.input(role.model)
    config = _config(folder)
    if config is None:
        return None
    return Shape.of_files(config, sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def _config(folder: Path) -> dict[str, Any] | None:
    """Return a model's configuration; None: it is missing or invalid, which is reported when the model is opened."""
    try:
        written = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return written if isinstance(written, dict) else None


@dataclass(frozen=True, slots=True)
class Trained:
    """A recipe, ready to run, and the function that writes its model."""

    recipe: Recipe
    save_model: Callable[[Path], object]
    tokenizer: PreTrainedTokenizerBase
    over: str = ""  # the input whose files the model extends by an adapter; "": the model is complete
    remote: tuple[RemoteModel, ...] = ()  # models of roles on other servers

    def write(self, folder: Path) -> None:
        """Write the current model in Hugging Face format, or its adapter in peft's."""
        self.save_model(folder)
        if not self.over:
            self.tokenizer.save_pretrained(folder)


def body(job: Job) -> JobResult:
    """Train, save outputs/model, and return the result."""
    config = training_config(job.order.kind, dict(job.order.params))
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
                best = _leave_best(job, controller, trained.over)
        except StoppedError:  # in the middle of a step, so the next attempt continues from the last checkpoint
            return JobResult("stopped", metrics=slower | sizes, tokens=controller.tokens)
        except Exception as error:
            return failed(error, controller.tokens)
    metrics = outcome.metrics | slower | sizes
    if outcome.status != "succeeded":
        return JobResult(outcome.status, metrics=metrics, tokens=outcome.tokens)
    outputs = {"model": Output("outputs/model", "tree", trained.over), **best}
    return JobResult("succeeded", outputs, metrics, outcome.tokens, message=outcome.message)


def _load(job: Job, config: TrainingConfig, stack: ExitStack) -> tuple[Trained, Controller, dict[str, float]]:
    """Open models, data and rewards of the stage; also return the fall-backs of the models."""
    recorder = Recorder(job.sink)
    trained = _open(job, config, stack.enter_context(open_pools(config, recorder, _costs(job))), stack)
    slower = job.tell_fallbacks(trained.recipe.roles.fallbacks())
    return trained, _controller(job, trained, config, recorder), slower


def _leave_best(job: Job, controller: Controller, over: str) -> dict[str, Output]:
    """Move the best model by the probe to the outputs, if the stage stores one."""
    kept = controller.best.path if controller.best else None
    if kept is None:
        return {}
    target = job.folder / "outputs" / "best"
    shutil.rmtree(target, ignore_errors=True)  # the folder of an attempt that died before its result
    kept.rename(target)
    return {"best": Output("outputs/best", "tree", over)}


def _costs(job: Job) -> CostModel:
    """Return the cost model of documents; by tokens only if the configuration lacks the sizes."""
    written = _config(job.input("model"))
    shape = None if written is None else Shape.of_config(written)
    if shape is None:
        return TOKENS
    return CostModel.of_model(
        parameters=shape.active, layers=shape.layers, attention_width=shape.heads * shape.head_dim
    )


def _open(job: Job, config: TrainingConfig, pool_of: PoolOf, stack: ExitStack) -> Trained:
    tokenizer = load_tokenizer(job.input("model"))
    algorithm = _algorithm(job, config)
    if config.reads == "prompts":
        return _on_policy(job, cast(SamplingConfig, config), algorithm, tokenizer, pool_of, stack)
    return _from_rows(job, cast(RowsConfig, config), algorithm, tokenizer, pool_of)


def _algorithm(job: Job, config: TrainingConfig) -> Any:
    """Return the stage's algorithm: the user's own algorithm, or the algorithm of the stage's kind."""
    return algorithm_of(job.order.kind, config, recipe_of(job))


def _from_rows(
    job: Job, config: RowsConfig, algorithm: RowAlgorithm[Any], tokenizer: PreTrainedTokenizerBase, pool_of: PoolOf
) -> Trained:
    roles = open_learner(config, _source(job, config, config.roles()[0]), job.order.seed, pool_of)
    context = roles.made.one(TrainWorker.context_length)
    limit = min(config.max_length or context, context)
    rows = _rows(job, config, "data", tokenizer, limit, None)
    held_out = _rows(job, config, "probe", tokenizer, limit, config.probe.items) if config.probe else []
    recipe = FromRows(config, algorithm, roles, rows, job.order.seed, held_out, phase=job.order.kind)
    return _trained(recipe, config, tokenizer)


def _trained(recipe: Recipe, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Trained:
    made = recipe.roles.made
    over = config.roles()[0].model if config.adapter else ""
    return Trained(recipe, lambda folder: made.each(TrainWorker.save_model, folder), tokenizer, over)


def _source(job: Job, config: TrainingConfig, role: RoleSpec) -> ModelSource | ScalarSource:
    """Return the initial model of a role; a role that learns gets the stage's adapter.

    Raises:
        InputError: a whole model would be trained, but it has an adapter.
    """
    folder, dtype = job.input(role.model), config.runtime.dtype
    lora = config.adapter.lora if config.adapter and role.trained else None
    if role.trained and lora is None and in_folder(folder):
        read_adapter(folder).refuse_whole_training(job.label(role.model))
    source = ModelSource if role.head == "language" else ScalarSource
    quantize = config.adapter.quantize if config.adapter and role.trained else None
    return source(folder, dtype, lora, derive_seed(job.order.seed, "adapter", role.name), quantize)


def _rows(
    job: Job, config: RowsConfig, slot: str, tokenizer: PreTrainedTokenizerBase, limit: int, items: int | None
) -> list[Any]:
    """Return the input of an algorithm that reads rows: documents, pairs, or labelled completions."""
    name = job.label(slot)
    rows = read_rows(job.input(slot), name=name)[:items]
    if config.reads == "pairs":
        return list(encode_preferences(tokenizer, rows, name=name, limit=limit))
    labelled = config.reads == "labels"
    if labelled:
        check_labels(rows, name, both=items is None)
    found = encode_examples(tokenizer, rows, name=name, limit=limit, labelled=labelled)
    if labelled:
        labels = chain.from_iterable(map(labels_of, rows))
        return [LabelledRow(e.prompt, e.completion, label) for e, label in zip(found, labels, strict=True)]
    return [Document(e.prompt, e.completion) for e in found]


def _on_policy(
    job: Job,
    config: SamplingConfig,
    algorithm: RolloutAlgorithm,
    tokenizer: PreTrainedTokenizerBase,
    pool_of: PoolOf,
    stack: ExitStack,
) -> Trained:
    own = [role for role in config.opened() if role.model]
    for role in own:
        if role.name in config.reward_models:
            _check_judge(job.input("model"), job.input(role.model), job.label(role.model))
        elif role.model != "model":
            _check_teacher(job.input("model"), job.input(role.model), job.label(role.model), role)
    sources: dict[str, FrozenSource] = {role.name: _source(job, config, role) for role in own}
    remote = {name: open_remote(job, config, name, one) for name, one in config.remote.items()}
    sources |= {name: one.source for name, one in remote.items()}
    model, stop = cast(ModelSource, sources[own[0].name]), (*config.stop, *algorithm.source.stop)
    roles = open_roles(config, model, job.order.seed, pool_of, sources=sources, stop=stop)
    context = roles.made.one(TrainWorker.context_length)
    others = [one.one(FrozenWorker.context_length) for one in roles.frozen.values()]
    others += [one.one(TrainWorker.context_length) for one in roles.learners.values()]
    context = min([context, *others])
    short = [one.about for one in remote.values() if one.context_length == context]
    try:
        train = _prompts(job, "data", tokenizer, context, config.response_tokens, None)
    except InputError as error:
        raise InputError(f"{error}; the context is that of {short[0]}" if short else str(error)) from error
    for name, model_there in remote.items():
        compare_tokens(model_there, tokenizer, train)
        longest = max(len(row.tokens) for row in train)
        model_there.probe(longest + config.response_tokens, _width(config, name))
    scorer = _scorer(job, config, roles, tokenizer, train, stack, placed=algorithm.reads_token_scores)
    _tell_unused(job, config, algorithm)
    recipe = OnPolicy(
        *(config, algorithm, roles, train, scorer, job.order.seed, _probe(job, config, tokenizer, context)),
        phase=job.order.kind,
        text=partial(response_text, tokenizer),
        environment=_environment(job, config, algorithm, tokenizer, stack),
    )
    return replace(_trained(recipe, config, tokenizer), remote=tuple(remote.values()))


def _width(config: SamplingConfig, role: str) -> int:
    """Return the number of likeliest tokens that a role computes at each position; 0: the configuration has none."""
    found = role_named(config.roles(), role)
    return found.wide // 8 if found else 0


def _tell_unused(job: Job, config: SamplingConfig, algorithm: RolloutAlgorithm) -> None:
    """Warn of declared roles that the first and the last step do not use, or do not train."""
    steps = {0, max(config.steps - 1, 0)}
    learn = {update.role for step in steps for update in algorithm.updates(step)}
    used = learn | {column.role for step in steps for column in algorithm.requires(step)} | config.terms.keys()
    for role in config.roles():
        fault = "is trained, but has no update" if role.trained and role.name not in learn else ""
        fault = fault or ("is not used by a column, an update or the reward" if role.name not in used else "")
        if fault and role.name not in ("rollout", "reward"):
            line = f"role {role.name} of {type(algorithm).__name__} {fault}; use it, or remove the role"
            job.sink(Note(line, time.time(), "warning"))


def _scorer(
    job: Job,
    config: SamplingConfig,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Prompt],
    stack: ExitStack,
    *,
    placed: bool,
) -> Scorer | None:
    """Return the stage's scorer: reward functions, a reward model, or their weighted sum; None without any."""
    functions, weights = config.functions, config.terms
    called = _reward_function(job, config, functions, tokenizer, train, stack, placed=placed) if functions else None
    judges = {
        name: ModelScorer(roles.frozen[name], tokenizer, tokens=roles.micro_batch_tokens, early=roles.early(name))
        for name in weights
    }
    if not judges or not isinstance(config.reward, dict):
        return next(iter(judges.values()), called)
    return SumScorer(called, judges, weights | (functions if isinstance(functions, dict) else {}))


def _reward_function(
    job: Job,
    config: SamplingConfig,
    reward: str | Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase,
    train: list[Prompt],
    stack: ExitStack,
    *,
    placed: bool,
) -> RewardScorer:
    ranks = config.placement.pool_of("reward").resources.rank_count if config.placement.reward else 1
    timeout = float(config.reward_timeout)  # `settled` has replaced `auto`
    models = open_models(job, config.models, stack)
    opened = open_rewards(job, "reward", reward, stack, timeout=timeout, ranks=ranks, models=models)
    name = ", ".join(job.label(place) for place in reward_slots("reward", reward))
    scorer = RewardScorer(
        *(opened, tokenizer), errors_max=config.reward_errors_max, processes=ranks, placed=placed,
        alone=not config.terms, turns=config.turns_most, name=name,
        tell=lambda line: job.sink(Note(line, time.time(), "warning")),
    )  # fmt: skip
    scorer.smoke_test(train)
    return scorer


def _environment(
    job: Job,
    config: SamplingConfig,
    algorithm: RolloutAlgorithm,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
) -> Environment | None:
    """Return the environment that observes between two responses; None if there is no environment."""
    observe = getattr(algorithm, "observe", None)
    if (observe is None) != (config.turns_most == 1):
        name = type(algorithm).__name__
        there = (
            "no method observe(row, responses); define it"
            if observe is None
            else "an observe method; set turns to 2 or more"
        )
        raise InputError(f"{name} has turns {config.turns_most}, but has {there}")
    if observe is None:
        return None
    name = f"observe of {type(algorithm).__name__}"
    observer = open_observer(job, cast(TurnsConfig, config), name, stack)
    return TextEnvironment(observer, tokenizer, config.observed_most)


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
    """Check that a reward model has the policy's vocabulary, since it reads the policy's tokens.

    Raises:
        InputError: the reward model generates text, or has a different vocabulary.
    """
    if load_tokenizer(policy).get_vocab() != load_tokenizer(judge).get_vocab():
        raise InputError(
            f"reward model {name} must have the policy's tokenizer, got another vocabulary; train it again"
        )
    if not is_sequence_classifier(judge):
        raise InputError(
            f"reward model {name} must score responses, got a model that is not a sequence classifier; name the "
            "output of a reward_model stage"
        )


def _check_teacher(policy: Path, teacher: Path, name: str, role: RoleSpec) -> None:
    """Check that a role's model has the policy's vocabulary, since it reads the policy's tokens.

    Raises:
        InputError: the model of a role that predicts tokens scores responses, or the vocabularies differ.
    """
    if load_tokenizer(policy).get_vocab() != load_tokenizer(teacher).get_vocab():
        raise InputError(
            f"{role.name} {name} must have the policy's tokenizer, got another vocabulary; name a {role.name} of the "
            "policy's model family"
        )
    if role.head == "language" and is_sequence_classifier(teacher):
        raise InputError(f"{role.name} {name} must generate text, got a model that scores; name a model that generates")


def _prompts(
    job: Job, slot: str, tokenizer: PreTrainedTokenizerBase, context: int, reserve: int, items: int | None
) -> list[Prompt]:
    name = job.label(slot)
    rows = uniform(read_rows(job.input(slot), name=name))[:items]
    encoded = encode_prompts(tokenizer, rows, name=name, limit=context, reserve=reserve)
    return [Prompt(tokens, prompt_text(row), row) for tokens, row in zip(encoded, rows, strict=True)]


def _controller(job: Job, trained: Trained, config: TrainingConfig, recorder: Recorder) -> Controller:
    """Return the loop, resumed from the checkpoint that the order names, if any.

    This attempt has no checkpoint of its own yet: an attempt begins only once (`jobs.entry`). If an executor restarts
    the job, the next attempt resumes.
    """
    controller = Controller(
        recipe=trained.recipe,
        checkpoints=job.folder / "checkpoints",
        fingerprint=_fingerprint(job, trained),
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
        try:
            controller.resume(materialise(job.blobs, job.order.resume, Path(job.order.cache_dir)))
        except IntegrityError as error:
            if not trained.remote:
                raise
            served = "; ".join(one.about for one in trained.remote)
            raise IntegrityError(f"{error}; or a server has another model than before, now {served}") from error
    return controller


def _fingerprint(job: Job, trained: Trained) -> str:
    """Return the job's fingerprint; models on other servers count, since no attempt may continue with others."""
    served = [one.identity for one in trained.remote]
    return digest_json([job.fingerprint(), *served]) if served else job.fingerprint()


def _orders(job: Job) -> Callable[[], Order]:
    """Return the poll of orders: stop by an order or SIGTERM; one checkpoint for each request."""
    served = written = 0  # a request during loading is served too

    def orders() -> Order:
        nonlocal served, written
        if served > written:  # polled again, so the last checkpoint was written
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


def init_model(job: Job) -> JobResult:
    """Build the model and save it to outputs/model."""
    config = InitModelConfig.model_validate(dict(job.order.params))
    tokenizer = character_tokenizer(config.characters)
    model = initial_model(config, tokenizer, derive_seed(job.order.seed, "init_model", "weights"))
    save_model(adopt_module(model), tokenizer, job.folder / "outputs" / "model")
    job.sink(Progress(1, 1, "init_model", 0, time.time()))
    metrics = {"parameters": float(sum(p.numel() for p in model.parameters()))}
    return JobResult("succeeded", {"model": Output("outputs/model", "tree")}, metrics)
