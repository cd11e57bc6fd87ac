"""A word of another trainer is told what it is called here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN, World, make_world
from pydantic import BaseModel

from posttrain.domain.runspec import RunSpec
from posttrain.domain.validation import FIELDS, KINDS, _inner, _model_of
from posttrain.engine.config import STAGE_CONFIGS


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("steps: 4,", "steps: 4, lr: 1.0e-4,", "lr: unknown key (did you mean 'learning_rate' under 'optimizer'?)"),
        ("steps: 4,", "max_steps: 4,", "max_steps: unknown key (did you mean 'steps'?)"),
        ("steps: 4,", "num_train_epochs: 4,", "num_train_epochs: unknown key (did you mean 'epochs'?)"),
        ("steps: 6,", "total_epochs: 4,", "total_epochs: unknown key (did you mean 'epochs'?)"),
        ("steps: 6,", "steps: 6, ppo_epochs: 4,", "ppo_epochs: unknown key (did you mean 'mini_batches'?)"),
        ("steps: 4,", "steps: 4, learning_rate: 1.0e-4,", "(did you mean 'learning_rate' under 'optimizer'?)"),
        ("steps: 6,", "steps: 6, num_generations: 4,", "num_generations: unknown key (did you mean 'group_size'?)"),
        ("steps: 6,", "steps: 6, beta: 0.04,", "beta: unknown key (did you mean 'coefficient' under 'kl'?)"),
        ("steps: 6,", "steps: 6, epsilon_high: 0.3,", "(did you mean 'clip_high'?)"),
        ("steps: 6,", "steps: 6, gradient_checkpointing: true,", "'activation_checkpointing' under 'runtime'"),
        ("steps: 4,", "steps: 4, train_batch_size: 8,", "(did you mean 'batch_size'?)"),
        ("steps: 6,", "steps: 6, train_batch_size: 8,", "(did you mean 'prompts_per_step'?)"),
        ("steps: 4,", "steps: 4, lora: {rank: 8},", "lora: unknown key (did you mean 'lora' under 'adapter'?)"),
        ("steps: 4,", "steps: 4, peft_config: {r: 8},", "peft_config: unknown key (did you mean 'adapter'?)"),
        ("steps: 4,", "steps: 4, adapter: {lora: {r: 8}},", "adapter.lora.r: unknown key (did you mean 'rank'?)"),
        (
            "steps: 4,",
            "steps: 4, load_in_4bit: true,",
            "load_in_4bit: unknown key (did you mean 'quantize' under 'adapter'?)",
        ),
        ("steps: 6,", "steps: 6, use_vllm: true,", "use_vllm: unknown key here: vLLM and SGLang are not supported yet"),
        ("at_least: ", "min: ", "min: unknown key (did you mean 'at_least'?)"),
        (
            "kind: grpo",
            "kind: vapo, gae: {lam: 0.9}",
            "gae.lam: unknown key (did you mean 'critic_lam', or 'alpha' for the λ of the policy?)",
        ),
        ("kind: grpo", "kind: ppo, gae: {gae_lambda: 0.9}", "gae.gae_lambda: unknown key (did you mean 'lam'?)"),
        ("kind: sft", "kind: ipo", "unknown stage kind 'ipo': it is kind: dpo with loss: ipo"),
        ("kind: sft", "kind: cpo", "unknown stage kind 'cpo': it is not supported yet; the nearest are kind: simpo"),
        ("kind: grpo", "kind: VAPO", "unknown stage kind 'VAPO' (did you mean 'vapo'?)"),
        ("kind: grpo", "kind: grppo", "unknown stage kind 'grppo' (did you mean 'grpo'?)"),
        ("model: model:tiny", "model: Qwen/Qwen3-0.6B", "write hf:Qwen/Qwen3-0.6B@REVISION for the hub's"),
        ("dataset:train,", "openai/gsm8k,", "write hf:openai/gsm8k@REVISION for the hub's"),
    ],
)
def test_the_hint_names_the_field_that_was_meant(world: World, before: str, after: str, line: str) -> None:
    assert before in RUN
    world.write("run.yaml", RUN.replace(before, after, 1))
    result = world("plan", "run.yaml")
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


def fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        below: Any = _model_of(field.annotation) or _model_of(_inner(field.annotation))
        yield from fields(below) if below else ()


def test_every_hint_is_a_field_that_there_is_and_no_word_is_one_of_ours_already() -> None:
    known = {name for model in (RunSpec, *STAGE_CONFIGS.values()) for name in fields(model)}
    assert {word for words in FIELDS.values() for word in words} - known == set()
    assert FIELDS.keys() & known == {"warmup", "ppo_epochs", "beta", "lam"}  # the critic's, PPO's, DPO's, PPO's
    assert KINDS.keys() & STAGE_CONFIGS.keys() == set()
