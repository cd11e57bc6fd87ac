"""Activation checkpointing: the same gradients from fewer saved bytes, and names that stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import InitModelConfig
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig

SIZE = InitModelConfig(hidden_size=32, intermediate_size=64, layers=4)
BATCH = TokenBatch.pack([Document((1, 5), tuple(range(6, 6 + n))) for n in (3, 17, 30)])


def policy(*, recompute: bool) -> TrainWorker:
    module = initial_model(SIZE, character_tokenizer(SIZE.characters), 0)
    runtime = RuntimeConfig(activation_checkpointing=recompute)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    return TrainWorker(RankContext(), adopt_module(module), optimizer, runtime, steps=4, seed=0)


def test_the_same_weights_from_fewer_saved_bytes() -> None:
    weights: list[dict[str, Tensor]] = []
    saved: list[int] = []
    for recompute in (False, True):
        worker, kept = policy(recompute=recompute), 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        for step in range(3):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                worker.update(BATCH, SupervisedObjective(Totals.of(BATCH)), step=step)
        weights.append({name: p.clone() for name, p in worker.engine.learner.parameters().items()})
        saved.append(kept)
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-6, rtol=1e-5)
    assert saved[1] < 0.5 * saved[0]


def test_a_model_without_layers_to_find_is_refused() -> None:
    module = GPT2LMHeadModel(GPT2Config(vocab_size=25, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(InputError, match="activation_checkpointing needs a model with a list of decoder layers"):
        TrainWorker(
            RankContext(),
            adopt_module(module),
            OptimizerConfig(),
            RuntimeConfig(activation_checkpointing=True),
            steps=1,
            seed=0,
        )
