"""Steps that are repeated on the same tensors say what steps say; what only a CUDA graph does is marked gpu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import families
import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.engine.batch import TokenBatch
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.contract import RolloutEngineContract
from posttrain.engine.rollout.kv_pages import GraphedSteps, PageStore, Run, cuda_recorder, padded_size
from posttrain.engine.rollout.llama_decoder import LlamaDecoder, fuse_weights
from posttrain.engine.rollout.port import Generation, RolloutEngine, SamplingParams


class IdempotencyKeys:
    """Records by computing again into the same tensor, as a graph does."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Run) -> Run:
        self.recorded += 1
        out = run().clone()

        def replay() -> Tensor:
            self.replayed += 1
            return out.copy_(run())

        return replay


def test_weights_that_change_reach_what_was_recorded() -> None:
    """A recording reads the tensors that it saw: what is computed from weights is computed into them."""
    decoder = decoder_of()
    before = [factors.data_ptr() for factors in decoder._factors]
    for layer in decoder._weights.layers:
        assert layer.query_norm is not None
        layer.query_norm.data.mul_(3.0)
    values = [factors.clone() for factors in decoder._factors]
    decoder.refresh()
    assert [factors.data_ptr() for factors in decoder._factors] == before
    assert all(not torch.equal(factors, old) for factors, old in zip(decoder._factors, values, strict=True))


def decoder_of(dtype: torch.dtype = torch.float32, device: str = "cpu") -> LlamaDecoder:
    decoder = LlamaDecoder(fuse_weights(families.build("qwen3").to(device, dtype)))
    decoder.refresh()
    return decoder


def store_with(decoder: LlamaDecoder, prompts: list[tuple[int, ...]], page: int = 8) -> PageStore:
    store = PageStore(decoder.shape, 2**24, page)
    store.reach(120, len(prompts))
    computed = decoder.prefill(prompts)
    store.keep(dict(zip(prompts, computed.spans, strict=True)), computed.pairs)
    store.add({row: (prompt, 100) for row, prompt in enumerate(prompts)})
    return store


def several(count: int) -> list[tuple[int, ...]]:
    return [tuple(3 + (row * 5 + at) % 40 for at in range(1 + row)) for row in range(count)]


def compare(device: str, dtype: torch.dtype, near: float, record: Callable[[Run], Run]) -> None:
    """Some steps of eleven rows, then of nine, graphed and not."""
    decoder = decoder_of(dtype, device)
    prompts = several(11)
    plain, pages = store_with(decoder, prompts), store_with(decoder, prompts)
    steps = GraphedSteps(decoder, pages, record)
    for step in range(60):
        if step == 30:
            plain.remove([2, 5])
            pages.remove([2, 5])
        rows = plain.order
        tokens = torch.tensor([3 + (row + step) % 40 for row in rows])
        positions = np.array([len(prompts[row]) + step for row in rows])
        wanted, found = decoder.step(plain, tokens, positions), steps.step(tokens, positions)
        torch.testing.assert_close(found, wanted, atol=near, rtol=0)


@torch.inference_mode()
def test_repeated_steps_say_what_steps_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engine.rollout.kv_pages._AFTER", 3)
    record = IdempotencyKeys()
    compare("cpu", torch.float32, 1e-5, record)
    assert 2 <= record.recorded <= 12
    assert record.replayed > 20, "steps of a size that was recorded are replayed"


@torch.inference_mode()
def test_what_was_recorded_is_dropped_when_what_it_reads_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engine.rollout.kv_pages._AFTER", 0)
    decoder, record = decoder_of(), IdempotencyKeys()
    prompts = several(3)
    store = store_with(decoder, prompts)
    steps = GraphedSteps(decoder, store, record)
    step = torch.tensor([4, 4, 4]), np.array([1, 2, 3])
    for _ in range(2):
        steps.step(*step)
    assert (record.recorded, record.replayed) == (1, 2)
    before = store.allocated
    store.extend({0: 2000})
    assert store.allocated > before
    steps.step(*step)
    assert record.recorded == 2, "the pages lie elsewhere"
    store.extend({0: 9000})
    steps.step(*step)
    recorded = record.recorded
    plain = decoder.rotations
    decoder.inputs(torch.tensor([4]), np.array([plain]))
    assert decoder.rotations > plain
    steps.step(*step)
    assert record.recorded == recorded + 1, "the tables of rotations lie elsewhere"


def test_sizes_are_few_and_not_much_larger() -> None:
    sizes = [padded_size(count) for count in range(1, 20_000)]
    assert all(0 <= size - count < max(32, count / 3.9) for count, size in enumerate(sizes, 1))
    assert all(size % 32 == 0 for size in sizes)
    assert len(set(sizes)) < 50
    assert [padded_size(count, 8) for count in (1, 8, 9, 63, 64, 65, 200, 256)] == [8, 8, 16, 64, 64, 80, 224, 256]


class TestNativeRepeated(RolloutEngineContract):
    """The whole engine over pages, with steps that are repeated."""

    def open_engine(self) -> RolloutEngine:
        model = adopt_module(families.build("qwen3"))
        return NativeRollout(model, store=partial(PageStore, page=4), record=IdempotencyKeys())


@torch.inference_mode()
def test_an_engine_repeats_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engine.rollout.kv_pages._AFTER", 4)
    record = IdempotencyKeys()
    sampling = SamplingParams(60, seed=3, ignore_eos=True)
    work = [Generation(str(key), (3 + key, 9), key, sampling, 60 - key) for key in range(9)]
    said = []
    for options in ({"record": record}, {}):
        engine = NativeRollout(adopt_module(families.build("qwen3")), store=partial(PageStore, page=16), **options)
        engine.submit(work)
        found: dict[str, list[int]] = {}
        while len(found) < len(work):
            found |= {done.id: done.trajectory.response.tolist() for done in engine.completed(300)}
        said.append(found)
    assert said[0] == said[1]
    assert record.replayed > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@torch.inference_mode()
def test_cuda_graphs_say_what_steps_say(dtype: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engine.rollout.kv_pages._AFTER", 3)
    compare("cuda", dtype, near, cuda_recorder())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNativeOnCuda(RolloutEngineContract):
    """Pages and graphs in float32, as the engine opens on CUDA."""

    tolerance = 1e-3

    def open_engine(self) -> RolloutEngine:
        return NativeRollout(on_cuda(torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", [16, 128])
def test_bfloat16_on_cuda_is_near_the_teacher_forced_module(page: int) -> None:
    """Varlen attention over prompts and pages, graphs, float32 logits."""
    model = on_cuda(torch.bfloat16)
    sampling = SamplingParams(60, seed=5, ignore_eos=True)
    prompts = enumerate([(3, 4, 5), (7,) * 20])
    work = [Generation(f"{key}.{n}", tokens, key, sampling, 60, n) for key, tokens in prompts for n in (0, 1)]
    engine = NativeRollout(model, kv_cache=2**24, store=partial(PageStore, page=page))
    engine.submit(work)
    answers = []
    while len(answers) < len(work):
        answers += [done.trajectory for done in engine.completed(300)]
    for answer in answers:
        batch = TokenBatch.pack([answer.document]).to("cuda")
        scored = token_logprobs(model, batch, response_only=True)[len(answer.prompt) :].detach().cpu()
        assert float((scored - torch.from_numpy(answer.logprobs)).abs().mean()) < 0.05


def on_cuda(dtype: torch.dtype) -> LanguageModel:
    return adopt_module(families.build("qwen3").to("cuda", dtype))


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_kept_of_prompts_is_their_keys_and_values_alone(count: int) -> None:
    """A view would hold the queries too, which no budget counts."""
    decoder = decoder_of()
    prompts = [tuple(range(3 + at, 10 + at)) for at in range(count)]
    kept = decoder.prefill(prompts).pairs
    held = sum(pair.untyped_storage().nbytes() for pair in kept)
    assert held == decoder.shape.position_bytes * sum(map(len, prompts))
    one = decoder.prefill([(5,)])
    assert sum(pair.untyped_storage().nbytes() for pair in one.pairs) == decoder.shape.position_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_recorded_after_the_last_recording_is_gone_has_memory() -> None:
    """Keys and values that move make every recording void: the memory that those shared goes with the last of them."""
    record, numbers = cuda_recorder(), torch.arange(8.0, device="cuda")
    for factor in (2.0, 3.0, 5.0):
        replays = [record(lambda by=factor: numbers * by) for _ in range(2)]
        assert all(torch.equal(replay(), numbers * factor) for replay in replays)
        del replays
