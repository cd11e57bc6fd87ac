"""The native engine says the same, bit for bit, whatever its slots, memory, order, preemptions and aborts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import families
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.models.sharding import canonical
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.kv_pages import PageStore
from posttrain.engine.rollout.kv_slots import SlotStore
from posttrain.engine.rollout.llama_decoder import LlamaDecoder, LowRank
from posttrain.engine.rollout.port import Generation, KVStore, SamplingParams
from posttrain.engine.samples import Trajectory

LARGE = 2**30
STORES: dict[str, Callable[..., KVStore]] = {"slots": SlotStore, "pages": partial(PageStore, page=16)}
chosen = ["slots"]


@pytest.fixture(params=STORES, autouse=True, scope="module")
def _each_store(request: pytest.FixtureRequest) -> None:
    """All of this file is true of every key-value store."""
    chosen[0] = request.param


def engine_of(model: LanguageModel, **options: Any) -> NativeRollout:
    return NativeRollout(model, store=STORES[chosen[0]], **options)


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return adopt_module(families.build(family).to(dtype))


def position_bytes(model: LanguageModel) -> int:
    config = model.module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.module.dtype.itemsize)


def drain(engine: NativeRollout, count: int) -> dict[str, Trajectory]:
    found: dict[str, Trajectory] = {}
    while len(found) < count:
        done = engine.completed(300)
        assert done
        found |= {completion.id: completion.trajectory for completion in done}
    assert engine.completed(0) == []
    return found


def alone(family: str, asked: Generation, dtype: torch.dtype = torch.float32) -> Trajectory:
    """The answer to one generation in an engine of its own."""
    return _alone(family, asked, dtype, chosen[0])


@cache
def _alone(family: str, asked: Generation, dtype: torch.dtype, store: str) -> Trajectory:
    engine = engine_of(model_of(family, dtype), kv_cache=LARGE, texts=StopStrings(families.tokenizer()))
    engine.submit([asked])
    return drain(engine, 1)[asked.id]


def assert_same(one: Trajectory, other: Trajectory) -> None:
    assert one.response.tolist() == other.response.tolist()
    assert np.array_equal(one.logprobs, other.logprobs)
    assert one.status == other.status


@dataclass(frozen=True)
class Case:
    work: tuple[Generation, ...]
    rows: int
    read_every: int
    lines: float  # the budget, in longest rows
    parts: int  # submitted in so many
    aborted: frozenset[str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 24))
    seed, temperature = draw(st.integers(0, 3)), draw(st.sampled_from([1.0, 1.3]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    endless = draw(st.booleans())
    work = []
    for key, length in enumerate(lengths):
        prompt = torch.randint(3, families.VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
        for sample in range(draw(st.integers(1, 4))):
            greedy = draw(st.integers(0, 9)) == 0
            stop = draw(st.sampled_from([(), (), ("the",), ("é", "a"), ("€", "answer>", "z9")]))
            sampling = SamplingParams(55, temperature, greedy, seed, rows, endless, stop=stop)
            limit = draw(st.integers(1, 55))
            work.append(Generation(f"{key}.{sample}", tuple(prompt.tolist()), key, sampling, limit, sample))
    aborted = frozenset(asked.id for asked in work if draw(st.integers(0, 9)) == 0)
    return Case(
        tuple(draw(st.permutations(work))),
        rows,
        draw(st.integers(1, 16)),
        draw(st.sampled_from([2.6, 3.0, 5.0, 40.0])),
        draw(st.integers(1, 3)),
        aborted,
    )


def play(case: Case, family: str, dtype: torch.dtype = torch.float32) -> NativeRollout:
    """Decode a case, and hold every answer against that of the generation alone."""
    model = model_of(family, dtype)
    budget, texts = int(case.lines * 128 * position_bytes(model)), StopStrings(families.tokenizer())
    engine = engine_of(model, kv_cache=budget, read_every=case.read_every, texts=texts)
    found: dict[str, Trajectory] = {}
    size = -(-len(case.work) // case.parts)
    for begin in range(0, len(case.work), size):
        engine.submit(case.work[begin : begin + size])
        found |= {completion.id: completion.trajectory for completion in engine.completed(0)}
    engine.abort(case.aborted)
    found |= drain(engine, len(case.work) - len(found))
    assert set(found) == {asked.id for asked in case.work}
    for asked in case.work:
        answer, whole = found[asked.id], alone(family, asked, dtype)
        if answer.status != "aborted":
            assert_same(answer, whole)
            continue
        assert asked.id in case.aborted
        assert answer.response.tolist() == whole.response.tolist()[: answer.generated]
        assert np.array_equal(answer.logprobs, whole.logprobs[: answer.generated])
    return engine


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_a_schedule_changes_no_bit(case: Case) -> None:
    play(case, "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("family", [*families.NATIVE, *families.ADAPTED])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_many_schedules_change_no_bit(family: str, case: Case) -> None:
    play(case, family)


def requests(prompts: list[list[int]], samples: int, limit: int = 40, **sampling: int | bool) -> list[Generation]:
    params = SamplingParams(**{"max_new_tokens": limit, "seed": 5, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return [
        Generation(f"{key}.{sample}", tuple(prompt), key, params, limit, sample)
        for key, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def test_where_memory_is_short_the_youngest_wait_and_say_the_same() -> None:
    work = requests([[3, 4, 5, 6, 7], [9] * 30], 4, limit=60)
    row = 96 * position_bytes(model_of("qwen3"))
    engine = engine_of(model_of("qwen3"), kv_cache=int(4.4 * row))
    engine.submit(work)
    found = drain(engine, len(work))
    for asked in work:
        assert_same(found[asked.id], alone("qwen3", asked))
    ample = engine_of(model_of("qwen3"), kv_cache=LARGE)
    ample.submit(work)
    drain(ample, len(work))
    assert ample.counters.preemptions == 0
    assert engine.counters.steps > ample.counters.steps


def small_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots begin small, so that short rows outgrow them."""
    monkeypatch.setattr("posttrain.engine.rollout.kv_slots._FIRST_CLASS", 32)


def test_preempted_rows_are_read_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    work = requests([[3, 4, 5], [7, 8]], 4, limit=50)
    wanted = [alone("qwen3", asked) for asked in work]
    small_classes(monkeypatch)
    engine = engine_of(model_of("qwen3"), kv_cache=9 * 32 * position_bytes(model_of("qwen3")))
    engine.submit(work)
    found = drain(engine, len(work))
    for asked, one in zip(work, wanted, strict=True):
        assert_same(found[asked.id], one)
    assert engine.counters.preemptions > 0
    assert engine.counters.recomputed_tokens > 0


def play_in_small_classes(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patched:
        small_classes(patched)
        play(case, "qwen2")


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_rows_that_move_between_classes_say_the_same(case: Case) -> None:
    play_in_small_classes(case)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_many_rows_that_move_between_classes_say_the_same(case: Case) -> None:
    play_in_small_classes(case)


def test_a_prompt_is_computed_once_for_all_who_share_it() -> None:
    work = requests([[3, 4, 5], [7, 8, 9, 10]], 6, batch_size=4)
    engine = engine_of(model_of("qwen3"), kv_cache=LARGE)
    engine.submit(work)
    drain(engine, len(work))
    assert engine.counters.prefilled_tokens == 7


def test_long_prompts_are_computed_in_chunks_between_the_steps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[3, 4], [5 + i % 50 for i in range(50)]]
    work = requests(prompts, 2, limit=20)
    wanted = [alone("qwen3", asked) for asked in work]
    monkeypatch.setattr("posttrain.engine.rollout.llama_decoder._CHUNK", 16)
    engine = engine_of(model_of("qwen3"), kv_cache=LARGE)
    engine.submit(work)
    found = drain(engine, len(work))
    for asked, one in zip(work, wanted, strict=True):
        assert_same(found[asked.id], one)
    assert engine.counters.prefilled_tokens == 52
    assert engine.counters.steps > 19, "the short ones waited for the long prompt"


def test_many_prompts_are_computed_in_pieces_as_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens at once than one piece takes: the bits are those of a prompt that came alone."""
    prompts = [[3 + (number + at) % 50 for at in range(5 + 7 * number % 30)] for number in range(60)]
    assert sum(map(len, prompts)) > 1024
    work = requests(prompts, 1, limit=4)
    sizes: list[int] = []
    piece = LlamaDecoder._finish_piece

    def counted(self: LlamaDecoder, x: torch.Tensor, *given: Any) -> torch.Tensor:
        sizes.append(len(x))
        return piece(self, x, *given)

    monkeypatch.setattr(LlamaDecoder, "_finish_piece", counted)
    engine = engine_of(model_of("qwen3"), kv_cache=LARGE)
    engine.submit(work)
    found = drain(engine, len(work))
    assert 512 in sizes
    assert max(sizes) < 1024
    for asked in work:
        assert_same(found[asked.id], alone("qwen3", asked))


def test_what_is_decoded_behind_an_end_is_dropped_and_counted() -> None:
    work = requests([[3, 4, 5], [7, 8]], 3, limit=20, ignore_eos=False)
    engine = engine_of(model_of("qwen3"), kv_cache=LARGE, read_every=16)
    engine.submit(work)
    found = drain(engine, len(work))
    for asked in work:
        assert_same(found[asked.id], alone("qwen3", asked))
    assert engine.counters.discarded_tokens > 0


def test_free_slots_are_filled_from_the_queue() -> None:
    limits = [5, 40, 40, 40, 10, 10, 10, 10]
    sampling = SamplingParams(40, ignore_eos=True, batch_size=4)
    work = [Generation(str(i), (3, 4 + i), i, sampling, limit) for i, limit in enumerate(limits)]
    engine = engine_of(model_of("qwen3"), kv_cache=LARGE)
    engine.submit(work)
    drain(engine, len(work))
    assert engine.counters.steps < 45  # batch by batch: 39 + 9; without refilling before all have ended


# --- several versions of an adapter -----------------------------------------------------------------------------------


def put_version(model: LanguageModel, number: int) -> None:
    """Give the adapter the weights of a version."""
    with torch.no_grad():
        for at, (name, held) in enumerate(model.module.named_parameters()):
            if "lora_" in name:
                held.normal_(std=0.15, generator=torch.Generator().manual_seed(1000 * number + at))


@cache
def _alone_at(family: str, asked: Generation, number: int, store: str) -> Trajectory:
    """The answer of a version to one generation in an engine of its own."""
    model = adopt_module(families.build(family))
    put_version(model, number)
    engine = NativeRollout(model, LARGE, store=STORES[store], texts=StopStrings(families.tokenizer()))
    engine.submit([asked])
    return drain(engine, 1)[asked.id]


def play_versions(case: Case, family: str) -> int:
    """Update after each part of a case, and hold every answer against its version's; return how many were in flight."""
    model = adopt_module(families.build(family))
    budget, texts = int(case.lines * 128 * position_bytes(model)), StopStrings(families.tokenizer())
    engine = engine_of(model, kv_cache=budget, read_every=case.read_every, texts=texts)
    found, begun, size, version = dict[str, Trajectory](), dict[str, int](), -(-len(case.work) // case.parts), 0
    for version, first in enumerate(range(0, len(case.work), size)):
        engine.pause()
        put_version(model, version)
        if version % 2:
            held = dict(engine.attest(()).views or ())
            shown = {name: one for name, one in held.items() if name.endswith("lora_A.weight")}
            own = {canonical(name): one for name, one in model.module.named_parameters()}
            assert shown
            assert all(torch.equal(one, own[name]) for name, one in shown.items()), "of the version that comes next"
        engine.update("", str(version))
        engine.resume()
        engine.submit(case.work[first : first + size])
        for _ in range(3):
            found |= {completion.id: completion.trajectory for completion in engine.completed(0)}
        begun |= {delta.id: version for delta in engine.progress() if delta.id not in begun}
    found |= drain(engine, len(case.work) - len(found))
    flying = 0
    for asked in case.work:
        answer = found[asked.id]
        (own_version,) = answer.versions
        assert_same(answer, _alone_at(family, asked, int(own_version), chosen[0]))
        assert asked.id not in begun or int(own_version) == begun[asked.id], "the version that began it"
        flying += int(own_version) < version
    copies = {len(low.copies) for low in lows(engine)}
    assert copies <= set(range(1, case.parts + 1))
    return flying


def play_policies(case: Case, family: str) -> None:
    """Serve two kept adapters beside the module's, and hold every answer and every score against each alone."""
    model = adopt_module(families.build(family))
    engine = engine_of(
        model, kv_cache=int(case.lines * 128 * position_bytes(model)), read_every=case.read_every,
        texts=StopStrings(families.tokenizer()),
    )  # fmt: skip
    for number, name in enumerate(("one", "two"), start=1):
        put_version(model, number)
        engine.keep(name)
    put_version(model, 0)
    names, found = ["", "one", "two"], dict[str, Trajectory]()
    work = [replace(one, policy=names[at % 3], session="") for at, one in enumerate(case.work)]
    size = -(-len(work) // case.parts)
    before = {name: one.clone() for name, one in model.module.named_parameters()}
    for first in range(0, len(work), size):
        engine.submit(work[first : first + size])
        found |= {completion.id: completion.trajectory for completion in engine.completed(0)}
        for number, name in enumerate(names):
            scored = [one.logprobs.tolist()[1:] for one in engine.score([(5, 4, 3, 8)], 1, name)]
            assert scored == [score_at(family, number)]
        with pytest.raises(InputError, match="tokens in 0"):
            engine.score([(10**6,)], 1, "one")
        assert all(torch.equal(one, before[name]) for name, one in model.module.named_parameters())
    found |= drain(engine, len(work) - len(found))
    for asked in work:
        own = replace(asked, policy="")
        assert_same(found[asked.id], _alone_at(family, own, names.index(asked.policy), chosen[0]))
        assert found[asked.id].versions == ((asked.policy,) if asked.policy else ())


@cache
def score_at(family: str, number: int) -> list[float]:
    model = adopt_module(families.build(family))
    put_version(model, number)
    found: list[float] = engine_of(model).score([(5, 4, 3, 8)])[0].logprobs.tolist()[1:]
    return found


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_many_kept_adapters_change_no_bit_of_each_other(case: Case) -> None:
    play_policies(case, "qwen2-lora16+head")


def test_kept_adapters_change_no_bit_of_each_other() -> None:
    work = requests([[3, 4, 5], [7, 8, 9, 10, 11]], 6, limit=30)
    play_policies(Case(tuple(work), 24, 1, 40.0, 3, frozenset()), "qwen3-lora1")


def test_kept_adapters_are_fixed_and_are_of_a_model_with_an_adapter() -> None:
    with pytest.raises(InputError, match="has no adapter"):
        engine_of(model_of("qwen3")).keep("one")
    engine = engine_of(adopt_module(families.build("qwen3-lora1")), kv_cache=LARGE)
    engine.keep("one")
    with pytest.raises(InputError, match="taken"):
        engine.keep("one")
    asked = replace(requests([[3, 4, 5]], 1, limit=5)[0], policy="one")
    with pytest.raises(InputError, match="no session"):
        engine.submit([replace(asked, session="talk")])
    with pytest.raises(InputError, match="serves the policy in training and one, got two"):
        engine.submit([replace(asked, policy="two")])
    with pytest.raises(InputError, match="got two"):
        engine.score([(3, 4)], 0, "two")
    engine.submit([asked])
    with pytest.raises(InputError, match="without work"):
        engine.keep("two")
    engine.pause()
    with pytest.raises(InputError, match="cannot be updated"):
        engine.update("", "1")
    engine.resume()
    drain(engine, 1)


def lows(engine: NativeRollout) -> list[LowRank]:
    return [one.low for layer in engine._weights.layers for one in (layer.qkv, layer.down) if one.low is not None]


@pytest.mark.slow
@pytest.mark.parametrize("family", families.ADAPTED)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_each_of_several_versions_in_flight_finishes_what_it_began(family: str, case: Case) -> None:
    play_versions(case, family)


def test_two_adapters_in_flight_change_no_bit_of_each_other() -> None:
    work = requests([[3, 4, 5], [7, 8, 9, 10, 11]], 3, limit=50)
    case = Case(tuple(work[::2] + work[1::2]), 24, 1, 40.0, 2, frozenset())
    assert play_versions(case, "qwen3-lora1") > 0


def test_a_preempted_response_goes_on_with_the_adapter_that_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """New responses share its prompt, which each version computes."""
    small_classes(monkeypatch)
    model, family = adopt_module(families.build("llama-lora8")), "llama-lora8"
    engine = engine_of(model, kv_cache=9 * 32 * position_bytes(model))
    old, new = ([replace(one, id=f"{at}:{one.id}") for one in requests([[3, 4, 5]], 4, limit=80)] for at in range(2))
    put_version(model, 0)
    engine.submit(old)
    while not engine.counters.preemptions:
        assert not engine.completed(0)
    engine.pause()
    put_version(model, 1)
    engine.update("", "1")
    engine.resume()
    engine.submit(new)
    found = drain(engine, 8)
    for version, some in enumerate((old, new)):
        for asked in some:
            assert_same(found[asked.id], _alone_at(family, asked, version, chosen[0]))


def test_the_next_turn_of_a_response_in_flight_is_of_the_new_version_alone() -> None:
    model = adopt_module(families.build("qwen3-lora1"))
    engine = engine_of(model, kv_cache=LARGE)
    put_version(model, 0)
    asked = replace(requests([[3, 4, 5]], 1, limit=20)[0], session="talk")
    engine.submit([asked])
    engine.completed(0)
    engine.pause()
    put_version(model, 1)
    engine.update("", "1")
    engine.resume()
    first = drain(engine, 1)[asked.id]
    assert_same(first, _alone_at("qwen3-lora1", replace(asked, session=""), 0, chosen[0]))
    turn = replace(asked, id="second", tokens=(*asked.tokens, *first.response.tolist(), 9))
    engine.submit([turn])
    assert_same(drain(engine, 1)["second"], _alone_at("qwen3-lora1", replace(turn, session=""), 1, chosen[0]))


def test_a_copy_of_an_adapter_is_used_again_and_freed_after_the_last_response() -> None:
    model = adopt_module(families.build("qwen3-lora1"))
    engine, most = engine_of(model, kv_cache=LARGE), 0
    long = replace(requests([[9, 8]], 1, limit=55)[0], id="long")
    engine.submit([long])
    answered = 0
    for number in range(6):
        engine.submit([replace(one, id=f"{number}:{one.id}") for one in requests([[3, 4, 5]], 2, limit=4)])
        answered += len(engine.completed(0))
        engine.pause()
        put_version(model, number + 1)
        assert dict(engine.attest(()).views or ()), "outside of inference mode"
        engine.update("", str(number + 1))
        engine.resume()
        while answered < 2 * (number + 1):
            answered += len(engine.completed(0))
        most = max(most, *(len(low.copies) for low in lows(engine)))
    assert most == 3, "of the long response, of those that an update left behind, and of the next ones"
    drain(engine, 1)
    assert {len(low.copies) for low in lows(engine)} == {1}
    engine.pause()
    assert dict(engine.attest(()).views or ())


@pytest.mark.parametrize("in_flight", ["recompute", "keep_kv"])
def test_responses_that_have_begun_go_on_under_new_weights(in_flight: str) -> None:
    model = adopt_module(families.build("qwen3"))
    engine = engine_of(model, kv_cache=LARGE)
    work = requests([[3, 4, 5], [7, 8]], 2, limit=30)
    engine.submit(work)
    short = Generation("short", (5, 6), 9, SamplingParams(12, ignore_eos=True), 12)
    engine.submit([short])
    assert [done.id for done in engine.completed(300)] == ["short"]
    engine.pause()
    with pytest.raises(InputError, match="has 4 unfinished samples, which cannot finish with the old weights"):
        engine.update("", "0.1")
    with torch.no_grad():
        model.module.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    engine.update("", "0.1", in_flight=in_flight)  # type: ignore[arg-type]
    engine.resume()
    found = drain(engine, len(work))
    for asked in work:
        answer = found[asked.id]
        assert [segment.version for segment in answer.segments[1:]] == ["", "0.1"]
        old = answer.segments[1]
        assert old.tokens.tolist() == alone("qwen3", asked).response.tolist()[: len(old.tokens)]
        new = answer.segments[2]
        scored = token_logprobs(model, TokenBatch.pack([answer.document]), response_only=True)[len(answer.prompt) :]
        apart = float((scored[len(old.tokens) :] - torch.from_numpy(new.logprobs)).detach().abs().max())
        assert (apart < 1e-4) == (in_flight == "recompute")


def test_what_never_fits_is_refused_when_it_is_submitted() -> None:
    engine = engine_of(model_of("qwen3"), kv_cache=1000)
    with pytest.raises(InputError, match=r"runtime.kv_cache must hold the 41 tokens of generation 0\.0"):
        engine.submit(requests([[3]], 1))


@pytest.mark.parametrize("family", [*families.NATIVE, *families.ADAPTED])
def test_logprobs_are_those_of_the_teacher_forced_module(family: str) -> None:
    work = requests([[3, 4, 5], [7] * 20, [9, 8]], 4, limit=40)
    engine = engine_of(model_of(family), kv_cache=LARGE)
    engine.submit(work)
    found = drain(engine, len(work))
    model = adopt_module(families.build(family, attention="eager"))
    for asked in work:
        answer = found[asked.id]
        ids = torch.tensor([[*answer.prompt.tolist(), *answer.response.tolist()]])
        with torch.no_grad():
            logits = model.module(ids, attention_mask=torch.ones_like(ids)).logits[0, len(answer.prompt) - 1 : -1]
        wanted = logits.double().log_softmax(-1).gather(1, ids[0, len(answer.prompt) :, None])[:, 0]
        assert float((wanted - torch.from_numpy(answer.logprobs)).abs().max()) < 1e-5


def test_bfloat16_is_near_the_teacher_forced_module() -> None:
    """Not bit for bit: in bfloat16 the order of sums shows, and a response may take another way."""
    work = requests([[3, 4, 5], [7] * 20], 4, limit=30)
    model = model_of("qwen3", torch.bfloat16)
    engine = engine_of(model, kv_cache=LARGE)
    engine.submit(work)
    for answer in drain(engine, len(work)).values():
        scored = token_logprobs(model, TokenBatch.pack([answer.document]), response_only=True)[len(answer.prompt) :]
        assert float((scored - torch.from_numpy(answer.logprobs)).detach().abs().mean()) < 0.05
