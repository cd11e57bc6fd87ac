"""The task of the GRPO benchmark: quick to learn, with responses that end at uneven lengths."""

from __future__ import annotations

import random
from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from posttrain.engine.batch import Document
from posttrain.engine.config import SFTConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import FromRows, PoolOf, open_learner
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.sft import SFT
from posttrain.engine.settings import OptimizerConfig
from posttrain.engine.trace import Trace

TEACHING_STEPS = 200


def one_process() -> PoolOf:
    """Run every role in this process."""
    pool = ResourcePool(InlineBackend())
    return lambda role: pool


def task(rng: random.Random, longest: int = 8, repeats: int = 3) -> dict[str, str]:
    """Return a row: sort 3 to `longest` digits; an answer repeats the question up to `repeats` times."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, longest)))
    answer = "".join(sorted(digits))
    return {
        "question": f"Q: sort {digits}",
        "worked": f"{digits}; " * rng.randint(0, repeats) + f"A: {answer}",
        "answer": answer,
    }


def exact(completion: str, answer: str) -> float:
    """Return 1 if the text after the last `A: ` is the answer, else 0."""
    return float(completion.rpartition("A: ")[2] == answer)


def render(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Return the chat prompt's tokens."""
    chat = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return ids


def teach(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int = TEACHING_STEPS,
    *,
    draw: Callable[[random.Random], dict[str, str]] = task,
    seed: int = 2,
) -> None:
    """Train supervised steps on rows of `draw` until responses end and are sometimes correct."""
    rng = random.Random(seed)
    documents = []
    for _ in range(4000):
        row = draw(rng)
        response = [*tokenizer.encode(row["worked"], add_special_tokens=False), tokenizer.eos_token_id]
        documents.append(Document(render(tokenizer, row["question"]), response))
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=20)
    config = SFTConfig(data="x", steps=steps, batch_size=32, optimizer=optimizer)
    roles = open_learner(config, adopt_module(module), 0, one_process())
    recipe = FromRows(config, SFT(config), roles, documents, 0)
    for step in range(steps):
        recipe.step(step, Trace(lambda fact: None, step))
