"""`python -m posttrain.jobs.train ATTEMPT_DIR`: supervised fine-tuning or GRPO, resumed where a checkpoint is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from posttrain.data.rows import prompt_text, read_rows
from posttrain.domain.errors import InputError
from posttrain.domain.facts import Note
from posttrain.domain.jobs import JobResult, Output
from posttrain.engine.config import GRPOConfig, InferenceRuntimeConfig, RuntimeConfig, SFTConfig, stage_config
from posttrain.jobs.entry import Job, failed, main
from posttrain.store.trees import materialise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.engine.controller import Controller, Order
    from posttrain.engine.models.language_model import LanguageModel
    from posttrain.engine.recipes.grpo import Prompt
    from posttrain.engine.recipes.recipe import Recipe


def body(job: Job) -> JobResult:
    """Train, save outputs/model, answer."""
    config = stage_config(job.order.kind, dict(job.order.params))
    if not isinstance(config, SFTConfig | GRPOConfig):
        raise InputError(f"posttrain.jobs.train trains sft and grpo stages, got {job.order.kind}")
    model, tokenizer = open_model(job, config.runtime)
    with ExitStack() as stack:
        if isinstance(config, SFTConfig):
            recipe = _sft(job, config, model, tokenizer)
        else:
            recipe = _grpo(job, config, model, tokenizer, stack)
        controller = _controller(job, recipe, config.runtime)
        try:
            outcome = controller.run()
        except Exception as error:
            return failed(error, controller.tokens)
    if outcome.status != "succeeded":
        return JobResult(outcome.status, metrics=outcome.metrics, tokens=outcome.tokens)
    from posttrain.engine.models.loading import save_model

    save_model(model, tokenizer, job.folder / "outputs" / "model")
    return JobResult("succeeded", {"model": Output("outputs/model", "tree")}, outcome.metrics, outcome.tokens)


def open_model(job: Job, runtime: InferenceRuntimeConfig) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """The model in slot `model` on the device and in the precision the stage asks for, and its tokenizer."""
    import torch

    from posttrain.engine.models.loading import load_model, load_tokenizer

    torch.set_num_threads(runtime.threads)
    device = runtime.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = runtime.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    folder = job.input("model")
    return load_model(folder, device=device, dtype=dtype), load_tokenizer(folder)


def _sft(job: Job, config: SFTConfig, model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    from posttrain.engine.batch import Document
    from posttrain.engine.models.chat import encode_examples
    from posttrain.engine.recipes.sft import SFT

    limit = min(config.max_length or model.context_length, model.context_length)
    name = job.label("data")
    examples = encode_examples(tokenizer, read_rows(job.input("data"), name=name), name=name, limit=limit)
    return SFT(config, model, [Document(e.prompt, e.completion) for e in examples], job.order.seed)


def _grpo(
    job: Job, config: GRPOConfig, model: LanguageModel, tokenizer: PreTrainedTokenizerBase, stack: ExitStack
) -> Recipe:
    from posttrain.engine.recipes.grpo import GRPO
    from posttrain.engine.recipes.probe import AccuracyProbe
    from posttrain.engine.recipes.scoring import RewardScorer
    from posttrain.engine.rewards.process import open_reward
    from posttrain.engine.rollout.opening import open_rollout

    def prompts(slot: str, items: int | None = None) -> list[Prompt]:
        return _prompts(job, slot, tokenizer, model.context_length, config.max_new_tokens, items)

    meta = job.order.inputs["reward"].meta
    reward = open_reward(
        job.input("reward"),
        meta.get("entry"),
        timeout=config.reward_timeout,
        dialect=meta.get("dialect") or "auto",
        name=job.label("reward"),
        source=meta.get("source") or "",
        hidden=_workspace(job),
    )
    stack.callback(reward.close)
    for note in reward.notes:
        job.sink(Note(note, time.time(), "warning"))
    scorer, train = RewardScorer(reward, tokenizer), prompts("data")
    scorer.rehearse(train)
    probe = None
    if config.probe:
        held_out = prompts("probe", config.probe.items)
        probe = AccuracyProbe(
            held_out,
            tokenizer,
            extract=config.probe.extract,
            max_new_tokens=config.max_new_tokens,
            name=job.label("probe"),
        )
    return GRPO(config, model, open_rollout(model), train, scorer, job.order.seed, probe)


def _workspace(job: Job) -> list[Path]:
    """What is no business of a reward's: attempts, cached inputs, the store where it is a folder, what they lie in."""
    store = urlsplit(job.blobs.url)
    folders = [job.folder.resolve(), Path(job.order.cache_dir).resolve()]
    if store.scheme == "file":
        folders.append(Path(unquote(store.path)))
    return [Path(os.path.commonpath(folders[:2])), *folders]


def _prompts(
    job: Job, slot: str, tokenizer: PreTrainedTokenizerBase, context: int, reserve: int, items: int | None
) -> list[Prompt]:
    from posttrain.engine.models.chat import encode_prompts
    from posttrain.engine.recipes.grpo import Prompt

    name = job.label(slot)
    rows = read_rows(job.input(slot), name=name)[:items]
    encoded = encode_prompts(tokenizer, rows, name=name, limit=context, reserve=reserve)
    return [Prompt(tokens, prompt_text(row), row) for tokens, row in zip(encoded, rows, strict=True)]


def _controller(job: Job, recipe: Recipe, runtime: RuntimeConfig) -> Controller:
    """The loop, already resumed where there is something to resume from: this attempt's own work first."""
    from posttrain.engine.controller import Controller, Limits
    from posttrain.engine.weights.checkpoint import load_checkpoint

    controller = Controller(
        recipe=recipe,
        checkpoints=job.folder / "checkpoints",
        belongs_to=job.fingerprint(),
        every=runtime.checkpoint_every,
        sink=job.sink,
        flush=job.flush,
        orders=_orders(job),
        limits=Limits(job.order.token_allowance, job.order.deadline),
    )
    latest = job.attempt.latest_checkpoint()
    if latest is not None:
        controller.resume(load_checkpoint(latest.path))
    elif job.order.resume:
        controller.resume(load_checkpoint(materialise(job.blobs, job.order.resume, Path(job.order.cache_dir))))
    return controller


def _orders(job: Job) -> Callable[[], Order]:
    """Stop by control.json or SIGTERM; one checkpoint for every time one is asked for."""
    from posttrain.engine.controller import Order

    served = job.attempt.checkpoints_requested()

    def orders() -> Order:
        nonlocal served
        if job.stopping():
            return Order.STOP
        requested = job.attempt.checkpoints_requested()
        if requested > served:
            served = requested
            return Order.CHECKPOINT
        return Order.GO_ON

    return orders


if __name__ == "__main__":
    main(body)
