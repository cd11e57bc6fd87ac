"""Sessions of the native engine: what is computed, and that the same bits come from memory, files and long suffixes."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import families
import numpy as np
import pytest
import torch

from posttrain.domain.errors import JobFailedError
from posttrain.engine.models.backbone import key_value_bytes
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.kv_pages import PageStore
from posttrain.engine.rollout.port import Generation, KVShape, SamplingParams
from posttrain.engine.rollout.sessions import HeldSessions
from posttrain.engine.samples import Trajectory

STORES: dict[str, Any] = {"slots": None, "pages": partial(PageStore, page=16)}


@cache
def model(family: str = "qwen3") -> LanguageModel:
    module = families.build(family)
    module.config.max_position_embeddings = 8192
    return adopt_module(module)


def opened(memory: int | None = None, store: str = "slots") -> NativeRollout:
    """An engine with room for the keys and values of `memory` tokens."""
    size = None if memory is None else memory * (key_value_bytes(model().module) or 0)
    return NativeRollout(model(), size, store=STORES[store])


def ask(engine: NativeRollout, work: Sequence[Generation]) -> dict[str, Trajectory]:
    engine.submit(work)
    found: dict[str, Trajectory] = {}
    while len(found) < len(work):
        found |= {done.id: done.trajectory for done in engine.completed(60.0)}
    return found


def play(
    engine: NativeRollout, turns: int, tokens: int, observed: int, samples: int = 1, *, alone: bool = False
) -> list[list[tuple[list[int], list[float]]]]:
    """Responses and log-probabilities of conversations, all samples of a turn together or one after the other."""
    context = {at: (5, 4, 3 + at % 2) for at in range(samples)}
    told: list[list[tuple[list[int], list[float]]]] = [[] for _ in range(samples)]
    for turn in range(turns):
        params = SamplingParams(tokens, seed=turn, ignore_eos=True)
        work = [Generation(f"{turn}.{at}", context[at], at, params, tokens, session=f"{at}") for at in context]
        parts = [[one] for one in reversed(work)] if alone else [work]
        found = {name: answer for part in parts for name, answer in ask(engine, part).items()}
        for at in context:
            answer = found[f"{turn}.{at}"]
            told[at].append((answer.response.tolist(), answer.logprobs.tolist()))
            seen = [4 + (turn + at + place) % 20 for place in range(observed)]
            context[at] = (*context[at], *answer.response.tolist(), *seen)
    return told


@pytest.mark.parametrize("store", STORES)
def test_thirty_two_turns_read_each_token_once(store: str) -> None:
    """32 turns of 128 tokens, half of them sampled: without sessions, the prefill would be 17 times the tokens."""
    engine = opened(store=store)
    play(engine, 32, 64, 64)
    counts = engine.counts()
    whole = 3 + 32 * 64 + 31 * 64
    assert counts["prefilled_tokens"] + counts["decoded_tokens"] <= 1.02 * whole
    assert counts["continued_tokens"] > 15 * whole


@pytest.mark.parametrize("store", STORES)
def test_memory_and_company_change_no_bit(store: str) -> None:
    """With a quarter of the memory, rows are preempted and sessions are written to files."""
    plenty, scarce = opened(store=store), opened(170, store)
    spilled: list[int] = []
    spill = scarce._sessions.spill
    scarce._sessions.spill = lambda needed: (spilled.append(moved := spill(needed)), moved)[1]  # type: ignore[method-assign, func-returns-value]
    decode = scarce._decode

    def within() -> None:
        assert scarce._store.used + scarce._sessions.used <= scarce._budget
        decode()

    scarce._decode = within  # type: ignore[method-assign]
    wanted = play(plenty, 3, 40, 5, samples=6)
    assert play(scarce, 3, 40, 5, samples=6) == wanted
    assert sum(spilled) > 0
    assert scarce.counts()["preemptions"] > 0
    assert play(opened(store=store), 3, 40, 5, samples=6, alone=True) == wanted
    assert plenty.counts()["preemptions"] == 0


def test_a_long_observation_is_computed_in_chunks_of_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk has at least 16 tokens; the chunks of a session begin where it ends."""
    whole = play(opened(), 2, 6, 100)
    monkeypatch.setattr("posttrain.engine.rollout.llama_decoder._CHUNK", 32)
    found = play(opened(), 2, 6, 100)
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in whole[0]]
    np.testing.assert_allclose(found[0][1][1], whole[0][1][1], atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_response_of_one_token_is_held_too(tokens: int) -> None:
    engine = opened()
    play(engine, 5, tokens, 3)
    assert engine.counts()["prefilled_tokens"] == 3 + 4 * (3 + 1), "the last token of a response, and the observation"


def test_equal_contexts_of_sessions_and_of_others_do_not_share_their_bits() -> None:
    """A context is computed in two ways: as a whole, and as the suffix of a session."""
    params = SamplingParams(6, seed=3, ignore_eos=True)
    for order in (1, -1):
        engine = opened()
        first = ask(engine, [Generation("0", (5, 4, 3), 0, params, 6, session="s")])["0"]
        tokens = (5, 4, 3, *first.response.tolist(), 7, 7)
        both = [Generation("plain", tokens, 1, params, 6), Generation("held", tokens, 1, params, 6, session="s")]
        found = ask(engine, both[::order])
        plain = ask(opened(), both[:1])["plain"]
        assert found["plain"].logprobs.tolist() == plain.logprobs.tolist()
        assert found["held"].logprobs.tolist() != plain.logprobs.tolist(), "rounding differs, or the test shows nothing"
        np.testing.assert_allclose(found["held"].logprobs, plain.logprobs, atol=1e-5)


@pytest.mark.parametrize("memory", [None, 170])
def test_an_aborted_turn_that_was_preempted_is_held_with_its_bits(memory: int | None) -> None:
    """Four rows fit at first, and the youngest is preempted as they grow; it is aborted while it waits."""
    params = SamplingParams(40, seed=3, ignore_eos=True)
    whole = ask(opened(), [Generation("0", (5, 4, 3), 0, params, 40)])["0"]
    engine = opened(memory)
    work = [Generation(f"{at}", (5, 4, 3), at, params, 40, session=f"s{at}" if at == 0 else "") for at in (1, 2, 3, 0)]
    engine.submit(work)
    while not (engine.counts()["preemptions"] or engine.counts()["steps"] > 35):
        engine.completed(0.0)
    engine.abort(["0"])
    found: dict[str, Trajectory] = {}
    while "0" not in found:
        found |= {done.id: done.trajectory for done in engine.completed(60.0)}
    said = found["0"].response.tolist()
    assert 0 < len(said) < 40
    assert said == whole.response.tolist()[: len(said)]
    before = engine.counts()["prefilled_tokens"]
    turn = Generation("turn", (5, 4, 3, *said, 7, 7), 1, params, 6, session="s0")
    ask(engine, [turn])
    assert engine.counts()["prefilled_tokens"] - before <= 3 + 3 * 4


def test_a_session_that_is_released_before_its_answer_is_not_held() -> None:
    engine, params = opened(), SamplingParams(6, seed=3, ignore_eos=True)
    engine.submit([Generation("0", (5, 4, 3), 0, params, 6, session="s")])
    engine.completed(0.0)
    engine.release(["s"])
    while not engine.completed(60.0):
        pass
    assert engine._sessions.used == 0


def test_the_first_chunk_of_an_aborted_turn_is_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both turns have a long suffix; the first is aborted after one chunk, beside a row that keeps running."""
    monkeypatch.setattr("posttrain.engine.rollout.llama_decoder._CHUNK", 32)
    params = SamplingParams(60, seed=3, ignore_eos=True)
    answers = []
    for aborts in (False, True):
        engine = opened()
        first = ask(engine, [Generation("0", (5, 4, 3), 0, params, 6, session="s")])["0"]
        begin = (5, 4, 3, *first.response.tolist())
        engine.submit([Generation("beside", (9, 8), 7, params, 60)])
        engine.completed(0.0)
        if aborts:
            engine.submit([Generation("lost", (*begin, *[11] * 100), 1, params, 6, session="s")])
            engine.completed(0.0)
            engine.abort(["lost"])
            assert [done.id for done in engine.completed(0.0)] == ["lost"]
        engine.submit([Generation("turn", (*begin, *[12] * 100), 1, params, 6, session="s")])
        found: dict[str, Trajectory] = {}
        while "turn" not in found:
            found |= {done.id: done.trajectory for done in engine.completed(60.0)}
        answers.append(found["turn"].logprobs.tolist())
    assert answers[0] == answers[1]


def shape(dtype: torch.dtype) -> KVShape:
    return KVShape(layers=2, kv_heads=2, head_dim=4, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sessions_in_files_are_the_oldest_and_have_the_same_bits(dtype: torch.dtype) -> None:
    held = HeldSessions(shape(dtype))
    pairs = {name: [torch.randn(5, 2, 2, 4).to(dtype) for _ in range(2)] for name in "abc"}
    for name in "abc":
        held.hold(name, np.arange(5, dtype=np.int32), pairs[name])
    each = held.used // 3
    assert held.spill(0) == 0
    assert held.spill(each + 1) == 2
    assert held.used == each
    assert [name for name in "abc" if held._held[name].inside] == ["c"]
    for name in "abc":
        assert held.continued(name, np.arange(7, dtype=np.int32)) == 5
        assert all(map(torch.equal, held.past(name, 4), [pair[:4] for pair in pairs[name]]))
    held.release(["a", "nobody"])
    assert held.continued("a", np.arange(7, dtype=np.int32)) == 0
    held.clear()
    assert held.used == 0


def test_any_number_of_sessions_is_in_one_file_whose_space_is_used_again() -> None:
    """2,000 sessions that grow and end in any order; the file is at most a quarter larger than what it has."""
    gc.collect()  # files of other tests are closed now, not between the two counts
    held, chance, open_files = HeldSessions(shape(torch.float32)), random.Random(5), len(os.listdir("/proc/self/fd"))
    kept: dict[str, list[torch.Tensor]] = {}
    for at in range(2000):
        name, count = f"{at}", 1 + chance.randrange(40)
        if kept and (len(kept) > 300 or chance.random() < 0.3):
            name = chance.choice(list(kept))
            assert all(map(torch.equal, held.past(name, 99), kept.pop(name)))
            held.release([name])
        kept[name] = [torch.randn(count, 2, 2, 4) for _ in range(2)]
        held.hold(name, np.arange(count, dtype=np.int32), kept[name])
        held.spill(held.used)
    assert held._file is not None
    within = sum(one.numel() * 4 for pairs in kept.values() for one in pairs)
    assert within <= held._file.end <= 1.25 * within
    assert len(os.listdir("/proc/self/fd")) == open_files + 1
    for name, pairs in kept.items():
        assert all(map(torch.equal, held.past(name, 99), pairs))
    file = held._file
    held.release(list(kept))
    assert file.end == 0
    held.clear()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_an_error_in_an_abort_leaves_an_engine_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, params = opened(100), SamplingParams(40, seed=3, ignore_eos=True)
    wanted = ask(opened(), [Generation("again", (5, 4), 1, params, 40)])["again"]

    def refuse(needed: int) -> int:
        raise JobFailedError("no room")

    engine.submit([Generation("0", (5, 4, 3), 0, params, 40, session="s"), Generation("1", (5, 4), 0, params, 40)])
    engine.completed(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._sessions, "spill", refuse)
        with pytest.raises(JobFailedError, match="no room"):
            engine.abort(["0"])
    assert (
        ask(engine, [Generation("again", (5, 4), 1, params, 40)])["again"].logprobs.tolist() == wanted.logprobs.tolist()
    )


def test_a_full_disk_ends_the_job_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

        def seek(self, begin: int) -> None:
            pass

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    held = HeldSessions(shape(torch.float32))
    held.hold("a", np.arange(5, dtype=np.int32), [torch.randn(5, 2, 2, 4) for _ in range(2)])
    with pytest.raises(JobFailedError, match=r"session a must be written .* No space left on device; free space in"):
        held.spill(1)
    held.clear()
    monkeypatch.undo()
    pairs = [torch.randn(5, 2, 2, 4) for _ in range(2)]
    held.hold("b", np.arange(5, dtype=np.int32), pairs)
    assert held.spill(1) == 1, "what the full disk did not take is forgotten"
    assert all(map(torch.equal, held.past("b", 5), pairs))


@pytest.mark.parametrize("every", [1, 16])
def test_a_next_turn_waits_for_few_steps_beside_many_rows(every: int) -> None:
    engine, params = NativeRollout(model(), read_every=every), SamplingParams(500, seed=1, ignore_eos=True)
    engine.submit([Generation(f"{at}", (5, 4, 3), at, params, 500, session=f"{at}") for at in range(40)])
    engine.completed(0.0)
    before = engine.counters.steps
    engine.submit([Generation("turn", (5, 4, 7), 77, params, 5, session="turn")])
    while not engine.counters.prefilled_tokens > 3:
        engine.completed(0.0)
    assert engine.counters.steps - before <= 32 + every
