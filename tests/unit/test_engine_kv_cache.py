"""`runtime.kv_cache` bounds how many rows are decoded at once, and changes no answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from posttrain.domain.errors import InputError
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.backbone import key_value_bytes
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.backends.scripted import ScriptedBatch
from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.port import Generation, SamplingParams
from posttrain.engine.rollout.worker import generate

PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12], [5, 9, 13]]
SAMPLING = SamplingParams(max_new_tokens=6, seed=3)


def made() -> LanguageModel:
    config = InitModelConfig(hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2)
    return adopt_module(initial_model(config, character_tokenizer(config.characters), seed=1))


def test_a_tokens_bytes_are_those_of_keys_and_values_in_every_layer() -> None:
    model = made()
    assert key_value_bytes(model.module) == 2 * 2 * 2 * 8 * 4
    assert key_value_bytes(model.module.to(torch.bfloat16)) == 2 * 2 * 2 * 8 * 2
    assert key_value_bytes(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("engine", [NativeRollout, ModuleRollout])
def test_a_small_cache_says_the_same(engine: type[NativeRollout | ModuleRollout]) -> None:
    free = generate(engine(made()), PROMPTS, samples=3, sampling=SAMPLING)
    held = generate(engine(made(), 2 * 11 * 256), PROMPTS, samples=3, sampling=SAMPLING)
    assert [a.response.tolist() for a in held] == [a.response.tolist() for a in free]
    for one, other in zip(held, free, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=1e-5)


def test_a_batch_is_the_rectangle_that_fits() -> None:
    rectangles: list[int] = []

    def decode(work: Sequence[Generation]) -> ScriptedBatch:
        rectangles.append(len(work) * (max(len(g.tokens) for g in work) + max(g.limit for g in work)))
        return ScriptedBatch([([1], False, False)] * len(work))

    engine = BatchedEngine("test", 100, decode, kv_cache=30 * 256, token_bytes=256)
    generate(engine, PROMPTS, samples=3, sampling=SAMPLING)
    assert max(rectangles) <= 30
    assert len(rectangles) > 3
    rectangles.clear()
    generate(BatchedEngine("test", 100, decode, token_bytes=256), PROMPTS, samples=3, sampling=SAMPLING)
    assert len(rectangles) == 1


@pytest.mark.parametrize("engine", [NativeRollout, ModuleRollout])
def test_a_row_that_the_cache_cannot_hold_is_refused_before_anything_is_decoded(
    engine: type[NativeRollout | ModuleRollout],
) -> None:
    with pytest.raises(InputError, match=r"must hold the 11 tokens of generation .* \(2816 bytes\), got 2560"):
        generate(engine(made(), 2560), PROMPTS, samples=1, sampling=SAMPLING)
