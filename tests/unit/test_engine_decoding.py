"""The decoding loop over a model that says nothing: what is drawn is decided by the random numbers alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.decoding import BatchDecoding, Rows
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.sampling import draw, row_keys, uniforms
from posttrain.engine.rollout.worker import plan_generations
from posttrain.engine.samples import Trajectory

WORDS = 50  # vocabulary
END = 7
CPU = torch.device("cpu")


class Indifferent:
    """Every word is as likely as any other, in a session that can drop rows."""

    drop_share: float | None = 0.0

    def __init__(self, rows: Rows, bad: float = 0.0) -> None:
        self._slots, self._bad = len(rows.limits), bad

    def prefill(self) -> Tensor:
        return torch.full((self._slots, WORDS), self._bad)

    def step(self, tokens: Tensor) -> Tensor:
        assert len(tokens) == self._slots
        return self.prefill()

    def drop(self, count: int, free: Tensor, moved: Tensor) -> None:
        assert len(free) == len(moved)
        self._slots = count


def decode(limits: list[int], *, samples: int = 1, bad: float = 0.0, **sampling: object) -> list[Trajectory]:
    """Responses to prompts of one token, `samples` for each."""
    given = SamplingParams(**{"max_new_tokens": max(limits), "seed": 5, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    prompts = [[1]] * (len(limits) // samples)
    work = plan_generations(prompts, samples, given, None, limits, context_length=1000)
    batch, left = BatchDecoding(work, lambda rows: Indifferent(rows, bad), [END], CPU), set(range(len(work)))
    while left:
        left -= set(batch.step())
    found = []
    for row, asked in enumerate(work):
        (tokens, logprobs), (ended, stopped) = batch.said(row), batch.ended(row)
        found.append(Trajectory.answer(asked.tokens, tokens, logprobs, truncated=not ended, stopped=stopped))
    return found


def words(answer: Trajectory) -> list[int]:
    found: list[int] = answer.response.tolist()
    return found


def test_each_token_has_a_random_number_of_its_own_however_long_the_response() -> None:
    limits = [200, 130, 64, 65]
    keys = row_keys(5, range(4), [0] * 4, CPU)
    numbers = uniforms(keys, 0, 200)
    expected = torch.stack([draw(torch.zeros(4, WORDS), numbers[:, i], 1.0)[0] for i in range(200)], dim=1)
    for row, answer in enumerate(decode(limits)):
        assert words(answer) == expected[row, : limits[row]].tolist()
        assert answer.truncated


def test_samples_of_a_prompt_and_seeds_differ() -> None:
    first, second = decode([40, 40], samples=2)
    assert words(first) != words(second)
    assert words(decode([40], seed=5)[0]) == words(first)
    assert words(decode([40], seed=6)[0]) != words(first)


def test_a_row_ends_at_the_end_of_sequence_and_the_others_go_on() -> None:
    whole = decode([120, 120, 120])
    answers = decode([120, 120, 120], ignore_eos=False)
    ends = [words(answer).index(END) for answer in whole]
    assert len(set(ends)) == 3, "choose a seed whose rows end apart"
    for answer, same, end in zip(answers, whole, ends, strict=True):
        assert (words(answer), answer.truncated) == (words(same)[: end + 1], False)


def test_the_temperature_of_a_log_probability_is_that_of_the_sampling() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    cold, hot = (draw(logits, torch.tensor([0.5], dtype=torch.float64), t) for t in (0.5, 4.0))
    assert cold[1].item() == pytest.approx((logits / 0.5).log_softmax(-1)[0, cold[0]].item())
    assert hot[1].item() == pytest.approx((logits / 4.0).log_softmax(-1)[0, hot[0]].item())


@pytest.mark.parametrize("greedy", [False, True])
def test_numbers_that_are_none_are_a_diverged_policy(greedy: bool) -> None:
    with pytest.raises(JobFailedError, match="policy logits must be finite"):
        decode([3], bad=float("nan"), greedy=greedy)
