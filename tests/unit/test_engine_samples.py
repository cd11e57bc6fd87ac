"""Samples, their segments, and the documents that they are trained as."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.advantages import generalized_advantages
from posttrain.engine.batch import TokenBatch
from posttrain.engine.loop.recipe import Held, read_held, write_held
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Prompt, Segment, Source, Trajectory, groups_of
from posttrain.sandbox.port import Score


def segment(source: Source, *tokens: int, version: str = "") -> Segment:
    logprobs = np.array([-token / 10 for token in tokens], dtype=np.float32) if source == "sampled" else None
    return Segment(np.array(tokens, dtype=np.int32), source, logprobs, version)


TWO_TURNS = Trajectory(
    (
        segment("prompt", 1, 2),
        segment("sampled", 3, 4, version="0.7"),
        segment("observed", 5, 6, 7),
        segment("sampled", 8, version="0.8"),
    )
)


def test_an_observation_is_part_of_the_response_and_nobodys_decision() -> None:
    assert TWO_TURNS.prompt.tolist() == [1, 2]
    assert TWO_TURNS.response.tolist() == [3, 4, 5, 6, 7, 8]
    assert TWO_TURNS.sampled.tolist() == [True, True, False, False, False, True]
    assert TWO_TURNS.logprobs.tolist() == pytest.approx([-0.3, -0.4, 0, 0, 0, -0.8])
    assert (len(TWO_TURNS), TWO_TURNS.generated, TWO_TURNS.versions) == (8, 3, ("0.7", "0.8"))


def test_only_what_was_sampled_is_trained() -> None:
    one = Trajectory.answer([9], [8, 7], [-1.0, -2.0], truncated=True, version="0.8")
    batch = TokenBatch.pack([TWO_TURNS.document, one.document])
    assert batch.response_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert batch.response_lengths.tolist() == [3, 2]
    assert batch.column("behaviour_logprobs")[7] == pytest.approx(-0.8)
    assert batch.versions == (("0.7", "0.8"), ("0.8",))
    assert batch.select([1]).versions == (("0.8",),)
    parts = [batch.select([1]), batch.select([0])]
    assert TokenBatch.gather(parts, [[1], [0]]).versions == batch.versions, "gathering keeps every version"


def test_advantages_pass_over_an_observation() -> None:
    """What was sampled after it follows on what was sampled before it, as if nothing stood between."""
    batch = TokenBatch.pack([TWO_TURNS.document])
    values = torch.tensor([0.0, 0.0, 0.5, 0.25, 9.0, 9.0, 9.0, 1.0])
    rewards = torch.tensor([0.0] * 7 + [2.0])
    found, _ = generalized_advantages(rewards, values, batch.response_mask, batch.lengths, 0.9, 0.8)
    last = 2.0 - 1.0
    second = 0.9 * 1.0 - 0.25 + 0.9 * 0.8 * last
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * second
    assert found.tolist() == pytest.approx([0, 0, first, second, 0, 0, 0, last])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=6))
def test_arrays_of_any_sequence_fit_together(turns: list[tuple[bool, int]]) -> None:
    made = [segment("sampled" if own else "observed", *range(1, size + 1)) for own, size in turns]
    trajectory = Trajectory((segment("prompt", 1), *made))
    sizes = {len(trajectory.response), len(trajectory.sampled), len(trajectory.logprobs)}
    assert sizes == {sum(size for _, size in turns)}
    assert trajectory.generated == int(trajectory.sampled.sum()) == sum(size for own, size in turns if own)
    assert not trajectory.logprobs[~trajectory.sampled].any()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "got segments none"),
        ((segment("sampled", 1),), "must begin with a prompt and have no other prompt, got segments sampled"),
        ((segment("prompt", 1), segment("prompt", 1)), "got segments prompt, prompt"),
    ],
)
def test_a_sequence_has_one_prompt_at_its_beginning(segments: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trajectory(segments)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="a sampled segment must have 2 log-probabilities, got None"):
        Segment(np.array([1, 2], dtype=np.int32), "sampled")
    with pytest.raises(InputError, match="must have 2 samples each, got 1"):
        groups_of([TWO_TURNS], [0], 2)


def test_groups_keep_the_order_of_prompts_and_samples() -> None:
    answers = [Trajectory.answer([1], [n], [-0.5], truncated=False) for n in range(6)]
    groups = groups_of(answers, [40, 38], 3)
    assert [(g.key, [(s.index, int(s.last.response[0])) for s in g.samples]) for g in groups] == [
        (40, [(0, 0), (1, 1), (2, 2)]),
        (38, [(0, 3), (1, 4), (2, 5)]),
    ]


def test_where_a_response_ended_says_whether_its_last_token_is_text() -> None:
    """An end of sequence is none; a token that completes a stop string is, as is the last one before a limit."""
    ended, cut, stopped = (
        Trajectory.answer([1], [2, 3], [-0.1, -0.2], truncated=truncated, stopped=by_string)
        for truncated, by_string in ((False, False), (True, False), (False, True))
    )
    assert [one.closed for one in (ended, cut, stopped)] == [True, False, False]
    assert [one.status for one in (ended, cut, stopped)] == ["ok", "truncated", "ok"]
    assert stopped.sampled_with(version="0.7").stopped
    assert not ended.went_on([4], stopped).closed
    assert stopped.went_on([4], ended).closed


def test_what_waits_in_a_checkpoint_knows_where_it_ended(tmp_path: Path) -> None:
    answers = [Trajectory.answer([1], [2, 3], [-0.1, -0.2], truncated=False, stopped=one) for one in (True, False)]
    (group,) = groups_of(answers, [5], 2)
    held = Held(5, 0, 0, ScoredGroup(Prompt((1,)), group, (Score(1.0), Score(0.0))))
    write_held(tmp_path, [held], [], {})
    ((read,), _, _) = read_held(tmp_path, lambda key: Prompt((1,)))
    assert [sample.last.stopped for sample in read.group.group.samples] == [True, False]
