"""Distillation: its divergences against their definition in float64, and a student that learns from a teacher."""

from __future__ import annotations

from typing import Any

import pytest
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, inline, quiet

from posttrain.engine.assembly import open_roles
from posttrain.engine.config import DistillConfig
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.initial import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.distill import Distill


def config(**changes: Any) -> DistillConfig:
    options = {
        "data": "d", "teacher": "t", "steps": 30, "prompts_per_step": 4, "group_size": 2, "max_new_tokens": 6,
        "top_k": 8, "optimizer": {"learning_rate": 2e-2, "warmup_steps": 0}, **changes,
    }  # fmt: skip
    return DistillConfig(**options)


def recipe(made: DistillConfig) -> OnPolicy:
    student, teacher = (adopt_module(initial_model(TINY, TOKENIZER, seed)) for seed in (0, 5))
    roles = open_roles(made, student, 11, inline(), teacher=teacher)
    return OnPolicy(made, Distill(made), roles, PROMPTS, None, 11)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_student_comes_nearer_to_its_teacher(kind: str) -> None:
    made = recipe(config(divergence=kind))
    told = [made.step(step, quiet(step)).metrics for step in range(30)]
    print(told[0], told[-1])
    assert told[-1]["loss"] < 0.2 * told[0]["loss"]
