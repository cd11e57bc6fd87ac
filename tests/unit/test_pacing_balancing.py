"""Splitting by cost: every item once, within the proven bounds, the same on every machine."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.pacing.balance import TOKENS, Assignment, CostModel, balance, micro_batches

COSTS = st.lists(st.integers(0, 10**6), max_size=60)
PARTS = st.integers(1, 12)
LENGTHS = st.lists(st.integers(0, 200), max_size=60)


def lognormal_lengths(count: int, seed: int = 0) -> list[int]:
    """Response lengths as they are: mean 256, sigma 0.99."""
    rng = random.Random(seed)
    return [max(1, round(rng.lognormvariate(math.log(256) - 0.99**2 / 2, 0.99))) for _ in range(count)]


def least_possible_load(costs: list[int], parts: int) -> int:
    """The heaviest load of the best of all splits."""
    loads = (
        [sum(c for c, p in zip(costs, split, strict=True) if p == part) for part in range(parts)]
        for split in itertools.product(range(parts), repeat=len(costs))
    )
    return min(max(load) for load in loads)


def first_fit_decreasing(lengths: list[int], budget: int) -> int:
    """How many micro-batches the textbook's algorithm needs."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = next((k for k, room in enumerate(rooms) if room >= length), None)
        if fits is None:
            rooms.append(budget - length)
        else:
            rooms[fits] -= length
    return len(rooms)


def cuts_in_order(lengths: list[int], budget: int) -> int:
    """How many micro-batches cutting without reordering needs."""
    count, used = 0, budget + 1
    for length in lengths:
        if used + length > budget:
            count, used = count + 1, 0
        used += length
    return count


class TestCostModel:
    def test_cost_is_a_polynomial_of_the_length(self) -> None:
        assert CostModel(3, 2).costs([0, 1, 10]) == [0, 5, 230]
        assert TOKENS.costs([0, 1, 10]) == [0, 1, 10]

    def test_of_a_model_attention_weighs_what_its_flops_are(self) -> None:
        parameters, layers, width = 440_401_920, 28, 2048
        costs = CostModel.of_model(parameters=parameters, layers=layers, attention_width=width)
        for tokens in (100, 4_000, 100_000):
            flops = 2 * parameters * tokens + 4 * layers * width * tokens**2 / 2
            per_unit = 2 * layers * width
            assert costs.costs([tokens])[0] * per_unit == pytest.approx(flops, rel=1e-4)

    def test_a_model_without_layers_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"must be >= 1, got 0$"):
            CostModel.of_model(parameters=10, layers=0, attention_width=4)

    @pytest.mark.parametrize("factors", [(-1, 2), (1, -2), (0, 0)])
    def test_factors_that_order_nothing_are_refused(self, factors: tuple[int, int]) -> None:
        with pytest.raises(InputError, match="cost factors must be >= 0 and not both 0"):
            CostModel(*factors)


class TestBalance:
    @given(COSTS, PARTS)
    def test_every_item_goes_to_exactly_one_part(self, costs: list[int], parts: int) -> None:
        split = balance(costs, parts)
        assert len(split.shards) == parts
        assert sorted(itertools.chain(*split.shards)) == list(range(len(costs)))
        assert all(list(shard) == sorted(shard) for shard in split.shards)
        assert split.loads == tuple(sum(costs[i] for i in shard) for shard in split.shards)

    @given(COSTS, PARTS)
    def test_heaviest_load_is_within_grahams_bound_of_the_mean(self, costs: list[int], parts: int) -> None:
        split = balance(costs, parts)
        assert max(split.loads) * parts <= sum(costs) + (parts - 1) * max(costs, default=0)
        assert 1.0 <= split.floor <= split.imbalance * (1 + 1e-12)
        assert split.imbalance <= split.bound * (1 + 1e-12)

    @given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
    def test_heaviest_load_is_within_grahams_bound_of_the_best(self, costs: list[int], parts: int) -> None:
        best = least_possible_load(costs, parts)
        assert 3 * parts * max(balance(costs, parts).loads) <= (4 * parts - 1) * best

    @given(COSTS, PARTS)
    def test_fewer_items_than_parts_leave_parts_empty_and_no_other(self, costs: list[int], parts: int) -> None:
        shards = balance([cost + 1 for cost in costs], parts).shards
        assert sum(not shard for shard in shards) == max(0, parts - len(costs))

    @given(st.integers(0, 100), st.integers(0, 5), PARTS)
    def test_equal_items_spread_evenly(self, items: int, cost: int, parts: int) -> None:
        counts = [len(shard) for shard in balance([cost] * items, parts).shards]
        assert max(counts) - min(counts) <= 1

    def test_a_known_split(self) -> None:
        assert balance([7, 1, 2, 6, 5, 3], 2) == Assignment(shards=((0, 2, 5), (1, 3, 4)), loads=(12, 12), largest=7)

    def test_exchanges_even_out_what_longest_first_leaves(self) -> None:
        costs = [3, 3, 2, 2, 2]  # longest first alone: 3 + 2 + 2 against 3 + 2
        assert balance(costs, 2).loads == (6, 6)

    def test_lengths_with_a_long_tail_come_out_even(self) -> None:
        costs = CostModel(7700, 1).costs(lognormal_lengths(1024))
        split = balance(costs, 16)
        assert split.imbalance <= split.floor * 1.0003
        in_turn = Assignment.of(costs, [range(part, 1024, 16) for part in range(16)])
        chunks = Assignment.of(costs, [range(part * 64, part * 64 + 64) for part in range(16)])
        assert min(in_turn.imbalance, chunks.imbalance) > 1.1

    def test_the_split_is_the_same_in_another_process(self) -> None:
        program = (
            "from posttrain.pacing.balance import balance; import random; r = random.Random(5); "
            "print(balance([r.randrange(1000) for _ in range(300)], 7).shards)"
        )
        command = [sys.executable, "-c", program]
        printed = {
            subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
            ).stdout
            for seed in ("1", "2")
        }
        rng = random.Random(5)
        assert printed == {f"{balance([rng.randrange(1000) for _ in range(300)], 7).shards}\n"}

    def test_nothing_to_split_is_even(self) -> None:
        split = balance([], 3)
        assert (split.shards, split.imbalance, split.bound, split.floor) == (((), (), ()), 1.0, 1.0, 1.0)

    def test_no_part_is_refused(self) -> None:
        with pytest.raises(InputError, match="parts to balance over must be >= 1, got 0"):
            balance([1], 0)

    def test_negative_cost_is_refused(self) -> None:
        with pytest.raises(InputError, match="costs to balance must be >= 0, got -4"):
            balance([1, -4], 2)


class TestMicroBatches:
    @given(LENGTHS, st.integers(1, 300), st.integers(1, 8), st.sampled_from([TOKENS, CostModel(50, 1)]))
    def test_every_item_once_and_the_budget_held(
        self, lengths: list[int], budget: int, at_least: int, model: CostModel
    ) -> None:
        packed = micro_batches(lengths, model.costs(lengths), budget, at_least)
        assert sorted(itertools.chain(*packed)) == list(range(len(lengths)))
        assert all(packed)
        assert all(list(items) == sorted(items) for items in packed)
        assert all(len(items) == 1 or sum(lengths[i] for i in items) <= budget for items in packed)

    @given(LENGTHS, st.integers(1, 300), st.integers(1, 8))
    def test_as_many_as_asked_for_where_there_are_items(self, lengths: list[int], budget: int, at_least: int) -> None:
        packed = micro_batches(lengths, TOKENS.costs(lengths), budget, at_least)
        assert len(packed) >= min(at_least, len(lengths))

    @given(LENGTHS, st.integers(1, 300), st.integers(1, 8))
    def test_never_more_than_asked_for_first_fit_or_cutting_need(
        self, lengths: list[int], budget: int, at_least: int
    ) -> None:
        count = len(micro_batches(lengths, TOKENS.costs(lengths), budget, at_least))
        needed = min(first_fit_decreasing(lengths, budget), cuts_in_order(lengths, budget))
        assert count <= max(needed, min(at_least, len(lengths)))
        assert needed <= max(1, math.ceil(2 * sum(lengths) / budget) - 1)

    @given(LENGTHS, st.integers(1, 300))
    def test_the_costliest_comes_first(self, lengths: list[int], budget: int) -> None:
        costs = CostModel(50, 1).costs(lengths)
        sums = [sum(costs[i] for i in items) for items in micro_batches(lengths, costs, budget)]
        assert sums == sorted(sums, reverse=True)

    @given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=40), st.integers(1, 150))
    def test_costs_need_not_follow_lengths(self, items: list[tuple[int, int]], budget: int) -> None:
        lengths, costs = [length for length, _ in items], [cost for _, cost in items]
        packed = micro_batches(lengths, costs, budget, 3)
        assert sorted(itertools.chain(*packed)) == list(range(len(items)))
        assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in packed)

    def test_fewer_than_cutting_in_order_on_lengths_with_a_long_tail(self) -> None:
        lengths = lognormal_lengths(512)
        packed = micro_batches(lengths, TOKENS.costs(lengths), 2048)
        assert len(packed) <= math.ceil(sum(lengths) / 2048) + 1 < cuts_in_order(lengths, 2048)

    def test_they_cost_about_the_same(self) -> None:
        lengths = lognormal_lengths(256)
        packed = micro_batches(lengths, TOKENS.costs(lengths), 8192)
        assert Assignment.of(lengths, packed).imbalance < 1.01

    def test_an_item_above_the_budget_is_alone(self) -> None:
        assert micro_batches([3, 20, 2, 0], [3, 20, 2, 0], 10) == ((1,), (0, 2, 3))

    @pytest.mark.parametrize("at_least", [1, 14])
    def test_where_levelling_would_run_out_of_room_the_tight_packing_stays(self, at_least: int) -> None:
        lengths = [21] * 6 + [14] * 8 + [10] * 9  # 13 full enough micro-batches of 30; the longest spread first need 15
        packed = micro_batches(lengths, lengths, 30, at_least)
        assert len(packed) == max(13, at_least)
        assert max(sum(lengths[i] for i in items) for items in packed) <= 30

    def test_no_items_no_micro_batches(self) -> None:
        assert micro_batches([], [], 10, at_least=4) == ()

    @pytest.mark.parametrize(
        ("lengths", "costs", "budget", "at_least", "message"),
        [
            ([1, 2], [1], 4, 1, r"one cost per item \(2\), got 1"),
            ([1], [1], 0, 1, "must be >= 1, got 0"),
            ([1], [1], 4, -1, "must be >= 1, got -1"),
            ([-1], [1], 4, 1, "must be >= 0, got -1"),
            ([1], [-2], 4, 1, "must be >= 0, got -2"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, lengths: list[int], costs: list[int], budget: int, at_least: int, message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            micro_batches(lengths, costs, budget, at_least)
