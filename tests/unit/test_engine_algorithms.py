"""Advantages, losses and their aggregation: values by hand, and the traps of the field."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from batches import pieces
from hypothesis import given, strategies as st
from torch import Tensor

from posttrain.engine.algorithms.advantages import ESTIMATORS, dr_grpo, grpo, has_signal, rloo
from posttrain.engine.algorithms.objectives import (
    MODES,
    Totals,
    corrected_kl_penalty,
    is_clipped,
    kl_penalty,
    log_ratio,
    negative_log_likelihood,
    ppo_clip,
    token_weights,
)
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.loop.recipe import Journal
from posttrain.engine.roles.learner import learning_rate

NAN = float("nan")
REWARDS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, NAN]), min_size=4, max_size=4), min_size=1, max_size=5)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def batch(*shapes: tuple[int, int]) -> TokenBatch:
    """Documents of (prompt, response) lengths with made-up behaviour log-probabilities and advantages."""
    documents = [Document([1] * p, [2 + i] * r, [-0.5 - 0.1 * j for j in range(r)]) for i, (p, r) in enumerate(shapes)]
    made = TokenBatch.pack(documents)
    return made.with_columns(advantages=made.spread(torch.tensor([1.0, -0.7, 0.3, -1.1][: len(shapes)])))


class TestAdvantages:
    def test_grpo_divides_by_the_unbiased_deviation(self) -> None:
        """And by 1e-4 more, as TRL."""
        expected = row(0.5, 0.5, -0.5, -0.5) / (math.sqrt(1 / 3) + 1e-4)
        torch.testing.assert_close(grpo(row(1, 1, 0, 0)), expected, rtol=1e-12, atol=0)

    def test_dr_grpo_only_centres(self) -> None:
        torch.testing.assert_close(dr_grpo(row(1, 0, 0, 0)), row(0.75, -0.25, -0.25, -0.25), rtol=1e-12, atol=0)

    def test_rloo_is_the_distance_to_the_mean_of_the_others(self) -> None:
        rewards = [0.9, 0.2, 0.4]
        expected = [r - (sum(rewards) - r) / 2 for r in rewards]
        torch.testing.assert_close(rloo(row(*rewards)), row(*expected), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_negative_mean_keeps_the_sign(self, name: str) -> None:
        """Trap 14: dividing by the mean would turn the better of two bad responses into the worse."""
        better, worse = ESTIMATORS[name](row(-1, -3))[0].tolist()
        assert better > 0 > worse

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_an_unscored_member_is_left_out(self, name: str) -> None:
        """Trap 12: it is not a zero; the others get what they would get without it."""
        estimate = ESTIMATORS[name]
        with_gap, without = estimate(row(1, NAN, 0.2, 0.4))[0], estimate(row(1, 0.2, 0.4))[0]
        assert with_gap[1] == 0
        torch.testing.assert_close(with_gap[[0, 2, 3]], without)

    @pytest.mark.parametrize("name", ESTIMATORS)
    @pytest.mark.parametrize("rewards", [(0.1,) * 8, (0.7,), (NAN, NAN), (0.3, NAN), (1e6,) * 3])
    def test_no_spread_no_advantage(self, name: str, rewards: tuple[float, ...]) -> None:
        """Trap 4: equal rewards, a group of one, nobody scored: exactly zero, never a rounding rest over ε."""
        assert not has_signal(row(*rewards)).any()
        assert ESTIMATORS[name](row(*rewards)).abs().max() == 0

    @given(REWARDS)
    def test_every_estimator_is_finite_and_centred(self, rewards: list[list[float]]) -> None:
        values = torch.tensor(rewards, dtype=torch.float64)
        for estimate in ESTIMATORS.values():
            advantages = estimate(values)
            assert advantages.isfinite().all()
            assert advantages.sum(dim=1).abs().max() < 1e-12
            assert ((advantages != 0).any(dim=1) <= has_signal(values)).all()

    @given(REWARDS, st.randoms())
    def test_order_inside_a_group_does_not_matter(self, rewards: list[list[float]], random: object) -> None:
        values = torch.tensor(rewards, dtype=torch.float64)
        order = list(range(values.shape[1]))
        random.shuffle(order)  # type: ignore[attr-defined]
        for estimate in ESTIMATORS.values():
            torch.testing.assert_close(estimate(values)[:, order], estimate(values[:, order]))


class TestPolicyLoss:
    mask = torch.tensor([False, True, True, True, True])
    old = torch.tensor([0.0, -1.0, -1.0, -1.0, -1.0])
    advantages = torch.tensor([0.0, 1.0, 1.0, -1.0, -1.0])
    clip: ClassVar[dict[str, float]] = {"clip_low": 0.2, "clip_high": 0.28}

    def current(self, *ratios: float) -> Tensor:
        return torch.tensor([-3.0, *(-1 + math.log(r) for r in ratios)], requires_grad=True)

    def test_on_policy_gradient_is_minus_the_advantage(self) -> None:
        """Trap 5: the importance weight is there once; a second one would show as soon as the ratio leaves 1."""
        logprobs = self.current(1.0, 1.1, 1.0, 0.9)
        ppo_clip(logprobs, self.old, self.advantages, self.mask, **self.clip).sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.0, -1.1, 1.0, 0.9]))

    def test_clip_is_asymmetric_and_one_sided(self) -> None:
        logprobs = self.current(1.5, 0.5, 0.5, 1.5)
        loss = ppo_clip(logprobs, self.old, self.advantages, self.mask, **self.clip)
        torch.testing.assert_close(loss, torch.tensor([0.0, -1.28, -0.5, 0.8, 1.5]))
        loss.sum().backward()
        assert logprobs.grad is not None
        assert (logprobs.grad != 0).tolist() == [False, False, True, False, True]
        clipped = is_clipped(logprobs, self.old, self.advantages, self.mask, **self.clip)
        assert clipped.tolist() == [False, True, False, True, False]

    def test_ratio_saturates_instead_of_overflowing(self) -> None:
        logprobs = torch.tensor([0.0, 500.0, -500.0, 500.0, -500.0], requires_grad=True)
        loss = ppo_clip(logprobs, self.old, self.advantages, self.mask, **self.clip)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert logprobs.grad is not None
        assert logprobs.grad.isfinite().all()

    @pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
    def test_nothing_under_the_mask_leaks(self, poison: float) -> None:
        """Trap 3: 0 · NaN is NaN, in the value and in the gradient."""
        logprobs = torch.tensor([poison, -1.0, -1.2, -0.9, -1.0], requires_grad=True)
        old, advantages = self.old.clone(), self.advantages.clone()
        old[0] = advantages[0] = poison
        losses = [
            ppo_clip(logprobs, old, advantages, self.mask, **self.clip),
            kl_penalty(logprobs, old, self.mask, "k2"),
            kl_penalty(logprobs, old, self.mask, "k3"),
            negative_log_likelihood(logprobs, self.mask),
        ]
        for loss in losses:
            (gradient,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)
            assert loss[0] == 0
            assert loss.isfinite().all()
            assert gradient[0] == 0
            assert gradient.isfinite().all()

    def test_kl_estimators(self) -> None:
        d = torch.tensor([0.0, 0.3, -0.4, 0.0, 1.0])
        logprobs = self.old - d
        k2, k3 = (kl_penalty(logprobs, self.old, self.mask, name) for name in ("k2", "k3"))
        torch.testing.assert_close(k2, d.square() / 2)
        torch.testing.assert_close(k3, d.exp() - d - 1)
        assert (k3 >= 0).all()

    @pytest.mark.parametrize("off_policy", [False, True])
    def test_whose_gradient_a_kl_loss_has(self, off_policy: bool) -> None:
        """Exact expectations over nine tokens: k3's gradient is that of the other direction until it is corrected."""
        generator = torch.Generator().manual_seed(3)
        logits, reference, other = (torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(3))
        logits.requires_grad_()
        ref, mask = reference.log_softmax(-1), torch.ones(9, dtype=torch.bool)
        old = other.log_softmax(-1) if off_policy else logits.detach().log_softmax(-1)

        def gradient(penalty: Tensor) -> Tensor:
            """Of its expectation over what the old policy samples."""
            return torch.autograd.grad((old.exp() * penalty).sum(), logits)[0]

        now = logits.log_softmax(-1)
        forward = torch.autograd.grad((now.exp() * (now - ref)).sum(), logits)[0]
        now = logits.log_softmax(-1)
        backward = torch.autograd.grad((ref.exp() * (ref - now)).sum(), logits)[0]
        now = logits.log_softmax(-1)
        corrected = corrected_kl_penalty(now, old, ref, mask)
        torch.testing.assert_close((old.exp() * corrected).sum(), (now.exp() * (now - ref)).sum())
        torch.testing.assert_close(gradient(corrected), forward)
        if not off_policy:
            torch.testing.assert_close(gradient(kl_penalty(logits.log_softmax(-1), ref, mask, "k2")), forward)
            torch.testing.assert_close(gradient(kl_penalty(logits.log_softmax(-1), ref, mask, "k3")), backward)
        assert (forward - backward).abs().max() > 0.05

    def test_a_small_k3_is_not_lost_in_rounding(self) -> None:
        d = torch.tensor([1e-3, -1e-3, 1e-2, 3e-4])
        found = kl_penalty(torch.zeros(4), d, torch.ones(4, dtype=torch.bool), "k3")
        torch.testing.assert_close(found.double(), d.double().expm1() - d.double(), rtol=1e-3, atol=0)

    def test_k1_is_not_offered(self) -> None:
        with pytest.raises(KeyError):
            kl_penalty(self.old, self.old, self.mask, "k1")

    def test_log_ratio_is_clamped(self) -> None:
        assert log_ratio(torch.tensor([100.0]), torch.tensor([0.0]), torch.tensor([True])).item() == 20


class TestAggregation:
    @pytest.mark.parametrize("mode", MODES)
    def test_weights_of_a_step(self, mode: str) -> None:
        whole = batch((2, 3), (1, 1), (3, 0))
        weights = token_weights(whole, Totals.of(whole), mode, norm=10)
        expected = {
            "token-mean": [1 / 4] * 4,
            "seq-mean-token-mean": [1 / 6] * 3 + [1 / 2],
            "seq-mean-token-sum-norm": [1 / 20] * 4,
        }[mode]
        torch.testing.assert_close(weights[whole.response_mask], torch.tensor(expected))
        assert weights[~whole.response_mask].abs().max() == 0

    @pytest.mark.parametrize("mode", MODES)
    @given(
        shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4),
        budget=st.integers(1, 30),
    )
    def test_loss_and_gradient_do_not_depend_on_the_split(
        self, mode: str, shapes: list[tuple[int, int]], budget: int
    ) -> None:
        """Trap 1, for policy loss and KL: the parts of any split add up to the whole."""
        whole = batch(*shapes)
        size = int(whole.tokens.numel())

        def gradient(token_budget: int) -> tuple[Tensor, Tensor]:
            parameter = torch.linspace(-1, -0.2, 10).requires_grad_()
            total, totals = torch.zeros(()), Totals.of(whole)
            for micro in pieces(whole, token_budget):
                logprobs = parameter[micro.tokens]
                mask, old = micro.response_mask, micro.column("behaviour_logprobs")
                tokens = ppo_clip(logprobs, old, micro.column("advantages"), mask, clip_low=0.2, clip_high=0.28)
                tokens = tokens + 0.1 * kl_penalty(logprobs, old, mask, "k3")
                loss = (token_weights(micro, totals, mode, norm=8) * tokens).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            assert parameter.grad is not None
            return total, parameter.grad

        for one, split in zip(gradient(size), gradient(budget), strict=True):
            torch.testing.assert_close(one, split, rtol=1e-5, atol=1e-6)

    def test_totals_count_documents_with_a_response(self) -> None:
        """Trap 2: whether a document that was dropped is counted is decided by whoever counts."""
        whole = batch((2, 3), (1, 5), (1, 2), (4, 0))
        assert Totals.of(whole.select([0, 2, 3])) == Totals(tokens=5, sequences=2, items=3, computed=5)
        assert Totals.of(whole) == Totals(tokens=10, sequences=3, items=4, computed=10)
        assert Totals.of(whole, whole.select([0, 2])) == Totals(tokens=10, sequences=3, items=4, computed=5)

    def test_nothing_to_learn_is_not_a_division_by_zero(self) -> None:
        empty = batch((3, 0))
        for mode in MODES:
            assert token_weights(empty, Totals.of(empty), mode).abs().max() == 0

    def test_unknown_mode(self) -> None:
        with pytest.raises(ValueError, match="token-mean"):
            token_weights(batch((1, 1)), Totals.of(batch((1, 1))), "mean")


class TestSchedule:
    options: ClassVar[dict[str, Any]] = {"peak": 2.0, "warmup": 4, "final_ratio": 0.1}

    def test_warm_up_is_linear_and_reaches_the_peak(self) -> None:
        rates = [learning_rate(s, 100, schedule="constant", **self.options) for s in range(6)]
        assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])

    @pytest.mark.parametrize("schedule", ["linear", "cosine"])
    def test_decay_ends_at_the_final_ratio(self, schedule: str) -> None:
        rates = [learning_rate(s, 100, schedule=schedule, **self.options) for s in range(4, 101)]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == pytest.approx(0.2)

    @pytest.mark.parametrize("schedule", ["linear", "cosine"])
    def test_decay_begins_where_warm_up_ends(self, schedule: str) -> None:
        """And takes all the steps that remain: the first of them is at the peak, half of them at the middle."""
        rates = [learning_rate(s, 20, schedule=schedule, peak=2.0, warmup=4, final_ratio=0.1) for s in range(21)]
        assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
        assert rates[12] == pytest.approx(2.0 * 0.55)
        assert rates[20] == pytest.approx(0.2)

    def test_a_warm_up_as_long_as_the_stage_leaves_nothing_to_decay(self) -> None:
        rates = [learning_rate(s, 4, schedule="cosine", peak=1.0, warmup=8, final_ratio=0.0) for s in range(4)]
        assert rates == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8])

    def test_no_warm_up(self) -> None:
        assert learning_rate(0, 10, peak=1.0, warmup=0, schedule="linear", final_ratio=0.0) == 1.0

    def test_unknown_schedule(self) -> None:
        with pytest.raises(ValueError, match="cosine"):
            learning_rate(0, 1, peak=1.0, warmup=0, schedule="step", final_ratio=0.0)


class TestJournal:
    def test_every_epoch_is_a_permutation_of_its_own(self) -> None:
        journal = Journal(20, seed=3)
        epochs = [[r for _, r in journal.take(20)] for _ in range(3)]
        assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    @given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=8), st.data())
    def test_resumed_equals_uninterrupted(self, documents: int, sizes: list[int], data: st.DataObject) -> None:
        """Trap 11: at any place, an epoch boundary included, and with batches larger than the data set."""
        whole = Journal(documents, seed=1)
        stretches = [whole.take(size) for size in sizes]
        cut = data.draw(st.integers(0, len(sizes)))
        again = Journal(documents, seed=1, consumed=sum(sizes[:cut]))
        assert [again.take(size) for size in sizes[cut:]] == stretches[cut:]

    def test_positions_never_repeat_and_peek_changes_nothing(self) -> None:
        journal = Journal(3, seed=0)
        assert journal.peek(7) == [r for _, r in journal.take(7)]
        assert [p for p, _ in journal.take(4)] == [7, 8, 9, 10]
