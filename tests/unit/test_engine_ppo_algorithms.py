"""PPO's arithmetic and Bradley-Terry: against plain loops, and the traps in which peers were caught."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from batches import pieces
from hypothesis import given, strategies as st
from pydantic import ValidationError
from torch import Tensor

from posttrain.engine.algorithms.advantages import Moments, generalized_advantages, whiten
from posttrain.engine.algorithms.objectives import (
    MODES,
    Totals,
    bradley_terry,
    clipped_value_loss,
    is_value_clipped,
    kl_estimate,
    kl_penalty,
    kl_rewards,
    score_rewards,
    token_weights,
)
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import PPOConfig, RewardModelConfig

NAN = math.nan
# documents as masks over their tokens: prompts, holes (observations), truncated or not, nothing at all
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5)
NUMBERS = st.floats(-5, 5, width=32)


def packed(masks: Sequence[Sequence[bool]]) -> tuple[Tensor, tuple[int, ...]]:
    return torch.tensor([bit for mask in masks for bit in mask]), tuple(len(mask) for mask in masks)


def noise(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def naive_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Sequence[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Token by token, backwards, one document at a time."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    start = 0
    for length in lengths:
        running = following = 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                value = float(values[t])
                running = float(rewards[t]) + gamma * following - value + gamma * lam * running
                following = value
                advantages[t], returns[t] = running, running + value
        start += length
    return advantages, returns


class TestGeneralizedAdvantages:
    @given(masks=MASKS, seed=st.integers(0, 99), gamma=st.sampled_from([1.0, 0.97, 0.5]), lam=st.floats(0, 1))
    def test_it_is_the_plain_loop(self, masks: list[list[bool]], seed: int, gamma: float, lam: float) -> None:
        mask, lengths = packed(masks)
        rewards, values = noise(seed, len(mask)).double(), noise(seed + 1, len(mask)).double()
        expected = naive_gae(rewards, values, mask, lengths, gamma, lam)
        exact = generalized_advantages(rewards, values, mask, lengths, gamma, lam)
        single = generalized_advantages(rewards.float(), values.float(), mask, lengths, gamma, lam)
        for one, other, naive in zip(exact, single, expected, strict=True):
            torch.testing.assert_close(one, torch.tensor(naive, dtype=torch.float64), atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(other, torch.tensor(naive), atol=1e-6, rtol=1e-6)

    def test_by_hand(self) -> None:
        mask, lengths = packed([[False, True, True], [False, True]])
        rewards, values = torch.tensor([9.0, 0, 1, 9, 2]), torch.tensor([9.0, 0.5, 0.25, 9, 1])
        advantages, returns = generalized_advantages(rewards, values, mask, lengths, 0.5, 0.5)
        second = 1 - 0.25
        first = 0 + 0.5 * 0.25 - 0.5 + 0.25 * second
        torch.testing.assert_close(advantages, torch.tensor([0, first, second, 0, 1.0]))
        torch.testing.assert_close(returns, torch.tensor([0, first + 0.5, 1.0, 0, 2.0]))

    def test_lambda_one_gives_monte_carlo_and_lambda_zero_one_step(self) -> None:
        mask, lengths = packed([[False, True, True, True]])
        rewards, values = noise(1, 4), noise(2, 4)
        returns = generalized_advantages(rewards, values, mask, lengths, 1.0, 1.0)[1]
        torch.testing.assert_close(returns[1:], rewards[1:].flip(0).cumsum(0).flip(0))
        delta = generalized_advantages(rewards, values, mask, lengths, 1.0, 0.0)[0]
        torch.testing.assert_close(delta[1:], rewards[1:] + torch.cat([values[2:], torch.zeros(1)]) - values[1:])

    @given(masks=MASKS, seed=st.integers(0, 99))
    def test_nothing_crosses_documents_and_prompts_do_not_count(self, masks: list[list[bool]], seed: int) -> None:
        """Trap 8. A document alone gives what it gives in company; what stands outside the mask is not read."""
        mask, lengths = packed(masks)
        rewards, values = noise(seed, len(mask)), noise(seed + 1, len(mask))
        whole = generalized_advantages(rewards.where(mask, NAN), values.where(mask, math.inf), mask, lengths, 0.9, 0.8)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for start, length in zip(starts, lengths, strict=True):
            part = slice(start, start + length)
            alone = generalized_advantages(rewards[part], values[part], mask[part], [length], 0.9, 0.8)
            for one, other in zip(whole, alone, strict=True):
                assert torch.equal(one[part], other)

    def test_a_hole_is_as_if_it_were_not_there(self) -> None:
        """Observation tokens between response tokens neither discount nor carry a value."""
        holed, _ = packed([[False, True, False, False, True, True]])
        tight, _ = packed([[False, True, True, True]])
        rewards, values = noise(3, 6), noise(4, 6)
        keep = torch.tensor([0, 1, 4, 5])
        with_hole = generalized_advantages(rewards, values, holed, [6], 0.9, 0.8)
        without = generalized_advantages(rewards[keep], values[keep], tight, [4], 0.9, 0.8)
        for one, other in zip(with_hole, without, strict=True):
            assert torch.equal(one[keep], other)

    def test_long_responses_stay_exact(self) -> None:
        mask, lengths = packed([[False] + [True] * 3000, [False, True]])
        rewards, values = noise(5, len(mask)) * 1e-3, noise(6, len(mask)).double()
        advantages, _ = generalized_advantages(rewards, values, mask, lengths, 1.0, 1.0)
        expected, _ = naive_gae(rewards, values, mask, lengths, 1.0, 1.0)
        torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)

    def test_gradients_stop_here(self) -> None:
        mask, lengths = packed([[False, True, True]])
        values = noise(0, 3).requires_grad_()
        advantages, returns = generalized_advantages(noise(1, 3), values, mask, lengths, 1.0, 0.95)
        assert not advantages.requires_grad
        assert not returns.requires_grad


class TestWhitening:
    @given(st.lists(NUMBERS, min_size=2, max_size=12), st.integers(0, 3))
    def test_mean_zero_deviation_one_and_the_order_kept(self, numbers: list[float], outside: int) -> None:
        values = torch.tensor([*numbers, *[NAN] * outside])
        mask = torch.tensor([True] * len(numbers) + [False] * outside)
        found = whiten(values, mask)
        assert found.isfinite().all()
        assert found[~mask].abs().sum() == 0
        assert abs(float(found.sum())) < 1e-4 * len(numbers)
        if float(torch.tensor(numbers).var()) > 1e-3:
            assert float(found[mask].std()) == pytest.approx(1, abs=1e-3)
        higher, lower = (
            max(range(len(numbers)), key=numbers.__getitem__),
            min(range(len(numbers)), key=numbers.__getitem__),
        )
        assert found[higher] >= found[lower]

    def test_a_negative_mean_does_not_flip_the_sign(self) -> None:
        """Trap 14."""
        better, worse = whiten(torch.tensor([-1.0, -3.0]), torch.tensor([True, True])).tolist()
        assert better > 0 > worse

    @pytest.mark.parametrize("numbers", [(0.1,), (0.1,) * 7, (1e6,) * 3])
    def test_no_spread_gives_nothing(self, numbers: tuple[float, ...]) -> None:
        mask = torch.ones(len(numbers), dtype=torch.bool)
        assert whiten(torch.tensor(numbers), mask).abs().max() < 1e-6
        torch.testing.assert_close(whiten(torch.tensor(numbers[:1]), mask[:1], centre=False), torch.tensor(numbers[:1]))

    def test_statistics_of_the_whole_make_the_parts_agree(self) -> None:
        """Trap 1: whitened in parts, with the whole's statistics, it is what it is at once."""
        values, mask = noise(0, 10), torch.tensor([True, False] * 5)
        moments = Moments.of(values, mask)
        parts = torch.cat([whiten(values[part], mask[part], moments) for part in (slice(0, 3), slice(3, 10))])
        torch.testing.assert_close(parts, whiten(values, mask))

    def test_without_centring_the_mean_stays(self) -> None:
        values, mask = noise(0, 20) + 3, torch.ones(20, dtype=torch.bool)
        assert float(whiten(values, mask, centre=False).mean()) == pytest.approx(float(values.mean()), rel=1e-4)

    def test_nothing_chosen(self) -> None:
        assert whiten(torch.tensor([1.0]), torch.tensor([False])).tolist() == [0.0]


class TestRewards:
    @given(masks=MASKS, seed=st.integers(0, 99), estimator=st.sampled_from(["k1", "k2", "k3"]))
    def test_it_is_the_plain_loop(self, masks: list[list[bool]], seed: int, estimator: str) -> None:
        """Trap 3: with end of sequence or without, the score stands at the last response token, and NaN outside."""
        mask, lengths = packed(masks)
        old, reference = noise(seed, len(mask)).double(), noise(seed + 1, len(mask)).double()
        scores = noise(seed + 2, len(lengths)).double()
        arguments = (old.where(mask, NAN), reference.where(mask, -math.inf), mask, scores)
        asked: dict[str, Any] = {"coefficient": 0.1, "estimator": estimator}
        found = kl_rewards(*arguments, lengths, **asked)
        single = kl_rewards(*(each.float() if each is not mask else mask for each in arguments), lengths, **asked)
        expected, start = [0.0] * len(mask), 0
        for document, length in enumerate(lengths):
            response = [t for t in range(start, start + length) if mask[t]]
            for t in response:
                d = float(reference[t] - old[t])
                kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]
                expected[t] = -0.1 * kl + (float(scores[document]) if t == response[-1] else 0.0)
            start += length
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(single, torch.tensor(expected), atol=1e-5, rtol=1e-5)

    def test_long_ratios_saturate(self) -> None:
        """Trap 6."""
        old, reference = torch.tensor([0.0, -500.0, 500.0]), torch.zeros(3)
        mask = torch.tensor([False, True, True])
        for estimator in ("k1", "k2", "k3"):
            rewards = kl_rewards(old, reference, mask, torch.ones(1), [3], coefficient=1.0, estimator=estimator)
            assert rewards.isfinite().all()
        assert kl_estimate(old, reference, mask, "k1").tolist() == [0, -20, 20]

    def test_k1_is_for_rewards_only(self) -> None:
        mask = torch.tensor([True])
        with pytest.raises(KeyError):
            kl_penalty(torch.zeros(1), torch.zeros(1), mask, "k1")
        with pytest.raises(ValueError, match="must be one of k1, k2, k3, got 'k4'"):
            kl_estimate(torch.zeros(1), torch.zeros(1), mask, "k4")

    def test_rewards_carry_no_gradient(self) -> None:
        old = torch.zeros(2, requires_grad=True)
        mask = torch.tensor([False, True])
        assert not kl_rewards(old, torch.ones(2), mask, torch.ones(1), [2], coefficient=0.1).requires_grad

    @pytest.mark.parametrize("score", [NAN, math.inf])
    def test_a_missing_score_is_not_a_zero(self, score: float) -> None:
        """Trap 12."""
        with pytest.raises(ValueError, match=r"scores must be finite, got (nan|inf) at document 1; drop the doc"):
            score_rewards(torch.tensor([1.0, score]), torch.tensor([True, True]), [1, 1])

    def test_one_score_per_document(self) -> None:
        with pytest.raises(ValueError, match=r"scores must have shape \[2\], got \[1\]"):
            score_rewards(torch.ones(1), torch.tensor([True, True]), [1, 1])


def value_batch(shapes: Sequence[tuple[int, int]]) -> TokenBatch:
    made = TokenBatch.pack([Document([i % 10 for i in range(p)], [i % 7 for i in range(r)]) for p, r in shapes])
    size = len(made.tokens)
    return made.with_columns(values=noise(0, size), returns=noise(1, size))


class TestValueLoss:
    mask = torch.tensor([False, True, True, True, True])
    old = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    returns = torch.tensor([0.0, 2.0, 2.0, 0.0, 1.1])

    def test_the_larger_error_counts(self) -> None:
        values = torch.tensor([7.0, 1.5, 0.5, 1.5, 1.1], requires_grad=True)
        loss = clipped_value_loss(values, self.old, self.returns, self.mask, 0.2)
        # towards the return beyond the clip; away from it; away on the other side; inside the clip
        torch.testing.assert_close(loss, 0.5 * torch.tensor([0.0, 0.8**2, 1.5**2, 1.5**2, 0.0]))
        loss.sum().backward()
        assert values.grad is not None
        torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.0, -1.5, 1.5, 0.0]))
        clipped = is_value_clipped(values, self.old, self.returns, self.mask, 0.2)
        assert clipped.tolist() == [False, True, False, False, False]

    def test_without_clip_it_is_half_the_squared_error(self) -> None:
        values = noise(0, 5)
        loss = clipped_value_loss(values, self.old, self.returns, self.mask, None)
        torch.testing.assert_close(loss, 0.5 * (values - self.returns).square() * self.mask)
        assert not is_value_clipped(values, self.old, self.returns, self.mask, None).any()

    @pytest.mark.parametrize("clip", [0.2, None])
    @pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
    def test_nothing_under_the_mask_leaks(self, poison: float, clip: float | None) -> None:
        """Trap 3."""
        values = torch.tensor([poison, 1.5, 0.5, 1.5, 1.1], requires_grad=True)
        old, returns = self.old.clone(), self.returns.clone()
        old[0] = returns[0] = poison
        loss = clipped_value_loss(values, old, returns, self.mask, clip)
        (gradient,) = torch.autograd.grad(loss.sum(), values)
        assert loss[0] == 0
        assert loss.isfinite().all()
        assert gradient[0] == 0
        assert gradient.isfinite().all()
        assert not is_value_clipped(values, old, returns, self.mask, clip)[0]

    @pytest.mark.parametrize("mode", MODES)
    @given(
        shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4),
        budget=st.integers(1, 30),
    )
    def test_gradient_does_not_depend_on_the_split(self, mode: str, shapes: list[tuple[int, int]], budget: int) -> None:
        """Traps 1 and 2: the value loss, like the policy's, is normalised by the step's own totals."""
        whole = value_batch(shapes)

        def gradient(token_budget: int) -> tuple[Tensor, Tensor]:
            parameter = torch.linspace(-1, 1, 10).requires_grad_()
            total, totals = torch.zeros(()), Totals.of(whole)
            for micro in pieces(whole, token_budget):
                values = parameter[micro.tokens]
                old, returns = micro.column("values"), micro.column("returns")
                tokens = clipped_value_loss(values, old, returns, micro.response_mask, 0.2)
                loss = (token_weights(micro, totals, mode, norm=8) * tokens).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            assert parameter.grad is not None
            return total, parameter.grad

        for one, split in zip(gradient(len(whole.tokens)), gradient(budget), strict=True):
            torch.testing.assert_close(one, split, rtol=1e-5, atol=1e-6)


class TestBradleyTerry:
    def test_by_hand(self) -> None:
        chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
        expected = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(2))]
        torch.testing.assert_close(bradley_terry(chosen, rejected), torch.tensor(expected))
        torch.testing.assert_close(
            bradley_terry(chosen, rejected, torch.tensor([1.0, -2.0])), torch.full((2,), math.log(2))
        )

    @given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), NUMBERS)
    def test_only_differences_count_and_a_swap_mirrors_them(
        self, pairs: list[tuple[float, float]], shift: float
    ) -> None:
        chosen, rejected = torch.tensor(pairs).T
        torch.testing.assert_close(
            bradley_terry(chosen + shift, rejected + shift), bradley_terry(chosen, rejected), atol=1e-5, rtol=1e-4
        )
        probability = (-bradley_terry(chosen, rejected)).exp() + (-bradley_terry(rejected, chosen)).exp()
        torch.testing.assert_close(probability, torch.ones_like(probability))

    def test_hopeless_pairs_stay_finite(self) -> None:
        chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
        loss = bradley_terry(chosen, -chosen.detach())
        (gradient,) = torch.autograd.grad(loss.sum(), chosen)
        assert loss.tolist() == [2e4, 0.0]
        assert gradient.tolist() == [-1.0, 0.0]


class TestConfiguration:
    def test_a_reward_model_is_an_input_like_any_model(self) -> None:
        scored = PPOConfig(data="d", reward_model="rm", steps=3, probe={"data": "held-out"})
        assert scored.inputs() == {
            "model": ("model", "base"),
            "data": ("dataset", "d"),
            "probe": ("dataset", "held-out"),
            "reward_model": ("model", "rm"),
        }
        assert PPOConfig(data="d", reward="r", steps=3).inputs()["reward"] == ("reward", "r")
        assert RewardModelConfig(data="d", steps=3).inputs() == {"model": ("model", "base"), "data": ("dataset", "d")}

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({}, "exactly one of reward and reward_model must be given, got neither"),
            ({"reward": "r", "reward_model": "m"}, "exactly one of reward and reward_model must be given, got both"),
            ({"reward": "r", "kl": {"place": "loss"}}, "k2 or k3 in the loss, got k1"),
            ({"reward": "r", "critic": {"warmup": 3}}, r"critic\.warmup must be < steps \(3\), got 3"),
            ({"reward": "r", "gae": {"lam": 1.1}}, "less than or equal to 1"),
        ],
    )
    def test_what_cannot_be_run_is_refused(self, options: dict[str, Any], match: str) -> None:
        """Trap 16: nothing is silently ignored."""
        with pytest.raises(ValidationError, match=match):
            PPOConfig(data="d", steps=3, **options)

    def test_the_penalty_can_be_left_out(self) -> None:
        assert PPOConfig(data="d", reward="r", steps=3, kl=None).kl is None
        assert PPOConfig(data="d", reward="r", steps=3, kl={"place": "loss", "estimator": "k3"}).kl is not None
