"""One contract for every rollout engine, over every model family it takes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from transformers import DynamicCache, LlamaForCausalLM

from posttrain.domain.errors import InputError, IntegrityError, JobFailedError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams
from posttrain.engine.rollout.sampling import row_keys, uniforms
from posttrain.engine.rollout.worker import generate, open_rollout
from posttrain.engine.samples import Trajectory

EOS = families.EOS
LIMIT = 18
PROMPTS = [
    torch.randint(3, families.VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (5, 3, 11, 1, 4, 7, 8)
]
SAMPLED = SamplingParams(max_new_tokens=LIMIT, temperature=1.3, seed=3)
NATIVE = (*families.NATIVE, *families.ADAPTED)
CASES = [("native", family) for family in NATIVE] + [("module", family) for family in families.FAMILIES]


@cache
def model_of(family: str) -> LanguageModel:
    return adopt_module(families.build(family))


@cache
def engine_of(kind: str, family: str) -> RolloutEngine:
    return NativeRollout(model_of(family)) if kind == "native" else ModuleRollout(model_of(family))


def scripted() -> RolloutEngine:
    return ScriptedRollout(
        lambda prompt, sample: [*prompt, *[9] * 5 * sample, EOS, 9, 9, 9, 9, 9, 9], eos_token_id=EOS, context_length=96
    )


def every_engine() -> list[Any]:
    models = [pytest.param(engine_of, case, id="-".join(case)) for case in CASES]
    return [*models, pytest.param(scripted, (), id="scripted")]


def greedy_reference(family: str, prompt: list[int], limit: int = LIMIT) -> tuple[int, ...]:
    """What `generate` of transformers says to one prompt alone."""
    ids = torch.tensor([prompt])
    module = families.build(family, attention="eager")
    out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def assert_same_draws(
    model: LanguageModel,
    sampling: SamplingParams,
    left: Sequence[Trajectory],
    right: Sequence[Trajectory],
    samples: int,
    keys: Sequence[int] | None = None,
) -> None:
    """Equal responses; a first difference is allowed only where the random number lies on the edge of two tokens."""
    assert len(left) == len(right)
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        assert one.prompt.tolist() == other.prompt.tolist()
        if words(one) == words(other):
            continue
        at = next(i for i, pair in enumerate(zip(words(one), words(other), strict=False)) if pair[0] != pair[1])
        prompt, sample = divmod(place, samples)
        key = prompt if keys is None else keys[prompt]
        number = uniforms(row_keys(sampling.seed, [key], [sample], model.device), at, 1)
        ids = torch.tensor([[*one.prompt.tolist(), *words(one)[:at]]])
        with torch.no_grad():
            logits = model.module(ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        edges = (logits.double() / sampling.temperature).softmax(-1).cumsum(-1)
        assert (edges - number[0]).abs().min() < 1e-6, (one, other)


def words(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(trajectory.response.tolist())


def said(trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
    return [words(t) for t in trajectories]


@pytest.mark.parametrize(("make", "case"), every_engine())
def test_answers_come_prompt_by_prompt_and_end_as_promised(make: Any, case: tuple[str, ...]) -> None:
    out = generate(make(*case), PROMPTS, samples=3, sampling=SAMPLED)
    assert len(out) == 3 * len(PROMPTS)
    for place, t in enumerate(out):
        assert t.prompt.tolist() == list(PROMPTS[place // 3])
        assert len(words(t)) == len(t.logprobs)
        assert 1 <= len(words(t)) <= LIMIT
        assert EOS not in words(t)[:-1]
        assert t.truncated == (words(t)[-1] != EOS)
        assert all(logprob <= 0 for logprob in t.logprobs)
    assert {t.truncated for t in out} == {True, False}


@pytest.mark.parametrize(("make", "case"), every_engine())
def test_limits_cut_single_responses(make: Any, case: tuple[str, ...]) -> None:
    limits = [1 + (7 * i) % LIMIT for i in range(2 * len(PROMPTS))]
    engine = make(*case)
    free = generate(engine, PROMPTS, samples=2, sampling=SAMPLED)
    cut = generate(engine, PROMPTS, samples=2, sampling=SAMPLED, limits=limits)
    assert said(cut) == [words(t)[:limit] for t, limit in zip(free, limits, strict=True)]
    assert [t.truncated for t in cut] == [words(t)[-1] != EOS for t in cut]


@pytest.mark.parametrize(("make", "case"), every_engine())
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[3], []]}, "prompt 1 must contain at least one token"),
        ({"prompts": [[3], [3] * 90]}, r"prompt 1 .* context of 96 tokens, got 90 \+ 18"),
        ({"samples": 0}, "samples per prompt must be >= 1, got 0"),
        ({"prompt_keys": [1, 2]}, r"one per prompt \(1\), got 2"),
        ({"limits": [LIMIT + 1]}, "limits must be 1 numbers in 1..18"),
    ],
)
def test_bad_requests_are_refused(make: Any, case: tuple[str, ...], arguments: dict[str, Any], message: str) -> None:
    call = {"prompts": [[3]], "samples": 1, "sampling": SAMPLED, **arguments}
    with pytest.raises(InputError, match=message):
        generate(make(*case), call.pop("prompts"), **call)


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_greedy_is_what_transformers_generates(kind: str, family: str) -> None:
    sampling = SamplingParams(max_new_tokens=LIMIT, greedy=True, batch_size=5)
    out = generate(engine_of(kind, family), PROMPTS, samples=1, sampling=sampling)
    assert said(out) == [greedy_reference(family, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(("kind", "family"), CASES)
@pytest.mark.parametrize("greedy", [False, True])
def test_reported_logprobs_are_those_of_the_trained_module(kind: str, family: str, greedy: bool) -> None:
    sampling = SamplingParams(max_new_tokens=LIMIT, temperature=1.3, seed=3, greedy=greedy)
    out = generate(engine_of(kind, family), PROMPTS, samples=2, sampling=sampling)
    batch = TokenBatch.pack([t.document for t in out])
    scored = token_logprobs(model_of(family), batch, temperature=1.3, response_only=True)
    torch.testing.assert_close(scored, batch.column("behaviour_logprobs"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_responses_do_not_depend_on_the_batch(kind: str, family: str) -> None:
    engine = engine_of(kind, family)
    keys = [11, 2**40, -3, 7, 0, 5, 6]
    together = generate(engine, PROMPTS, samples=4, sampling=SAMPLED, prompt_keys=keys)
    small = SamplingParams(max_new_tokens=LIMIT, temperature=1.3, seed=3, batch_size=3)
    backwards = generate(engine, PROMPTS[::-1], samples=4, sampling=small, prompt_keys=keys[::-1])
    alone = generate(engine, [PROMPTS[2]], samples=2, sampling=SAMPLED, prompt_keys=[keys[2]])
    forwards = [backwards[4 * (6 - i) + sample] for i in range(7) for sample in range(4)]
    assert_same_draws(model_of(family), SAMPLED, together, forwards, 4, keys)
    assert_same_draws(model_of(family), SAMPLED, together[8:10], alone, 2, [keys[2]])
    assert len(set(said(together))) > 20


@pytest.mark.parametrize("family", NATIVE)
def test_native_and_module_draw_the_same(family: str) -> None:
    sampling = SamplingParams(max_new_tokens=LIMIT, temperature=0.9, seed=21)
    native, module = (
        generate(engine_of(kind, family), PROMPTS, samples=5, sampling=sampling) for kind in ("native", "module")
    )
    assert_same_draws(model_of(family), sampling, native, module, 5)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@example(prompts=[[3], [3], [42, 52, 19, 39, 59, 55, 27]], samples=3, batch_size=1, seed=170_750_280_733_257)  # an edge
@given(
    prompts=st.lists(
        st.lists(st.integers(3, families.VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=6
    ),
    samples=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**62),
)
def test_native_equals_module_on_any_batch(prompts: list[list[int]], samples: int, batch_size: int, seed: int) -> None:
    sampling = SamplingParams(max_new_tokens=9, seed=seed, batch_size=batch_size)
    native = generate(engine_of("native", "qwen3"), prompts, samples=samples, sampling=sampling)
    module = generate(
        engine_of("module", "qwen3"), prompts, samples=samples, sampling=SamplingParams(max_new_tokens=9, seed=seed)
    )
    assert_same_draws(model_of("qwen3"), sampling, native, module, samples)


@pytest.mark.parametrize("kind", ["native", "module"])
def test_random_numbers_do_not_repeat_in_a_long_response(kind: str) -> None:
    """At so high a temperature a token tells its random number; numbers are made 64 tokens at a time."""
    sampling = SamplingParams(max_new_tokens=90, temperature=1e6, seed=3)
    said = generate(engine_of(kind, "qwen3"), [[3, 4]], samples=48, sampling=sampling)
    long = [words(t) for t in said if len(words(t)) >= 84]
    assert len(long) >= 4
    for tokens in long:
        assert sum(a == b for a, b in zip(tokens[:20], tokens[64:84], strict=True)) < 6  # one in 61 by chance


def test_generation_is_bit_equal_when_repeated() -> None:
    engine = engine_of("native", "qwen3")
    first, second = (generate(engine, PROMPTS, samples=3, sampling=SAMPLED) for _ in range(2))
    assert said(first) == said(second)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["native", "module"])
def test_an_end_in_the_first_place_is_a_response(kind: str) -> None:
    model = adopt_module(families.build("llama"))
    engine = NativeRollout(model) if kind == "native" else ModuleRollout(model)
    free = generate(engine, PROMPTS, samples=1, sampling=SamplingParams(max_new_tokens=4, greedy=True, ignore_eos=True))
    first = words(free[0])[0]
    model.module.generation_config.eos_token_id = [first, EOS]
    out = generate(engine, PROMPTS[:1], samples=2, sampling=SamplingParams(max_new_tokens=4, greedy=True))
    assert [(words(t), t.truncated) for t in out] == [((first,), False)] * 2
    model.module.generation_config.eos_token_id = None
    model.module.config.eos_token_id = None
    endless = generate(engine, PROMPTS, samples=1, sampling=SamplingParams(max_new_tokens=4, greedy=True))
    assert said(endless) == said(free)
    assert all(t.truncated for t in endless)


@pytest.mark.parametrize("family", NATIVE)
def test_zero_copy_reads_what_the_optimiser_wrote(family: str) -> None:
    model = adopt_module(families.build(family))
    names = [name for name, _ in model.module.named_parameters()]
    optimiser = torch.optim.AdamW(model.module.parameters(), lr=0.05)
    engine = open_rollout(model)
    assert engine.name == "native"
    before = said(generate(engine, PROMPTS, samples=1, sampling=SAMPLED))
    batch = TokenBatch.pack([t.document for t in generate(engine, PROMPTS, samples=2, sampling=SAMPLED)])
    for _ in range(3):
        optimiser.zero_grad()
        token_logprobs(model, batch).mean().backward()
        optimiser.step()
    after = generate(engine, PROMPTS, samples=1, sampling=SAMPLED)
    copied = adopt_module(copy.deepcopy(families.build(family)))
    copied.module.load_state_dict(model.module.state_dict())
    assert said(after) == said(generate(ModuleRollout(copied), PROMPTS, samples=1, sampling=SAMPLED))
    assert said(after) != before
    assert [name for name, _ in model.module.named_parameters()] == names
    scored = token_logprobs(model, TokenBatch.pack([t.document for t in after]), temperature=1.3, response_only=True)
    assert scored[scored != 0].tolist() == pytest.approx([lp for t in after for lp in t.logprobs], abs=1e-4)


def test_a_second_native_engine_shares_the_buffers_of_the_first() -> None:
    model = adopt_module(families.build("qwen2"))
    first, second = NativeRollout(model), NativeRollout(model)
    assert said(generate(first, PROMPTS, samples=1, sampling=SAMPLED)) == said(
        generate(second, PROMPTS, samples=1, sampling=SAMPLED)
    )


def test_re_pointed_weights_are_noticed() -> None:
    model = adopt_module(families.build("qwen3"))
    engine = NativeRollout(model)
    weight = model.module.model.layers[1].self_attn.k_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(IntegrityError, match=r"layers\.1\.self_attn\.k_proj\.weight must stay where .* it was moved"):
        generate(engine, PROMPTS, samples=1, sampling=SAMPLED)


@pytest.mark.parametrize("kind", ["native", "module"])
def test_a_diverged_policy_is_reported(kind: str) -> None:
    model = adopt_module(families.build("llama"))
    engine = NativeRollout(model) if kind == "native" else ModuleRollout(model)
    with torch.no_grad():
        model.module.model.norm.weight[0] = float("nan")
    for greedy in (False, True):
        with pytest.raises(JobFailedError, match="must be finite"):
            generate(engine, PROMPTS, samples=1, sampling=SamplingParams(max_new_tokens=4, greedy=greedy))


def _alter(name: str) -> LanguageModel:
    module = families.build("qwen3")
    if name == "adapter":
        module.model.layers[0].self_attn.q_proj = torch.nn.utils.parametrizations.weight_norm(
            module.model.layers[0].self_attn.q_proj
        )
    elif name == "hook":
        module.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    elif name == "window":
        module.config.layer_types = ["full_attention", "sliding_attention"]
    elif name == "activation":
        module.config.hidden_act = "gelu"
    else:
        module.config.rope_parameters = {**module.config.rope_parameters, "rope_type": "dynamic"}
    return LanguageModel(module, "padded", None)


@pytest.mark.parametrize("alteration", ["adapter", "hook", "window", "activation", "rope"])
def test_the_native_decoder_takes_only_what_it_computes(alteration: str) -> None:
    model = _alter(alteration)
    assert open_rollout(model).name == "module"
    with pytest.raises(InputError, match="use the module rollout"):
        NativeRollout(model)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_opening_chooses_by_family(family: str) -> None:
    assert open_rollout(model_of(family)).name == ("native" if family in families.NATIVE else "module")


class FixedRowsCache(DynamicCache):
    """A cache that cannot pick rows."""

    @property
    def batch_select_indices(self) -> Any:
        raise AttributeError("batch_select_indices")


class FixedRows(LlamaForCausalLM):
    def forward(self, *args: Any, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        past = past_key_values if past_key_values is not None else FixedRowsCache(config=self.config)
        return super().forward(*args, past_key_values=past if use_cache else None, use_cache=use_cache, **kwargs)


class Forgetful(LlamaForCausalLM):
    def forward(self, *args: Any, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, past_key_values=None, use_cache=False, **kwargs)


@pytest.mark.parametrize("kind", [FixedRows, Forgetful])
def test_any_cache_will_do(kind: type[LlamaForCausalLM]) -> None:
    source = families.build("llama")
    module = kind(copy.deepcopy(source.config)).eval()
    module.load_state_dict(source.state_dict())
    engine = open_rollout(adopt_module(module))
    assert engine.name == "module"
    found = generate(engine, PROMPTS, samples=3, sampling=SAMPLED)
    assert said(found) == said(generate(engine_of("module", "llama"), PROMPTS, samples=3, sampling=SAMPLED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_cuda_computes_what_the_cpu_computes(family: str) -> None:
    model = adopt_module(families.build(family).to("cuda"))
    assert model.packing == "packed"
    out = generate(open_rollout(model), PROMPTS, samples=3, sampling=SAMPLED)
    assert said(out) == said(generate(open_rollout(model_of(family)), PROMPTS, samples=3, sampling=SAMPLED))
    batch = TokenBatch.pack([t.document for t in out])
    on_cuda = token_logprobs(model, batch.to("cuda"), temperature=1.3)
    torch.testing.assert_close(
        on_cuda.cpu(), token_logprobs(model_of(family), batch, temperature=1.3), atol=1e-3, rtol=0
    )
