"""Split items over ranks and pack them into micro-batches by their cost.

All arithmetic is on integers and ties are broken by position, so every machine computes the same split.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from posttrain.domain.errors import InputError

_EXCHANGES = 4  # per part: enough for lognormal lengths
_PARTNERS = 4  # number of lightest parts with which the heaviest part may exchange items
_GOOD_ENOUGH = 10_000  # stop once the heaviest load is within mean / _GOOD_ENOUGH of the mean

_Item = tuple[int, int]  # cost, index
_NOTHING: _Item = (0, -1)


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of an item of n tokens: `linear`·n + `quadratic`·n², in an arbitrary unit.

    `CostModel(7700, 1)`: attention over 7700 tokens costs as much as all their other computation.

    Raises:
        InputError: a factor is negative, or both factors are zero.
    """

    linear: int
    quadratic: int

    def __post_init__(self) -> None:
        if min(self.linear, self.quadratic) < 0 or not self.linear + self.quadratic:
            raise InputError(
                f"cost factors must be >= 0 and not both 0, got linear={self.linear}, quadratic={self.quadratic}"
            )

    @classmethod
    def of_model(cls, *, parameters: int, layers: int, attention_width: int) -> CostModel:
        """Return the cost model of a transformer with causal attention.

        One forward pass over n tokens takes 2·`parameters`·n FLOPs in matrix products (Kaplan et al. 2020, table 1)
        and 4·`layers`·`attention_width`·n²/2 in attention: scores and weighted sum, half of them masked. A backward
        pass takes twice as many FLOPs in each, so the ratio is the same. The factors are rounded to `quadratic` = 1,
        which keeps the integers small.

        Args:
            parameters: the number of parameters of the layers, without embeddings.
            layers: the number of layers with attention.
            attention_width: heads × head dimension.

        Raises:
            InputError: a number is below 1.
        """
        least = min(parameters, layers, attention_width)
        if least < 1:
            raise InputError(f"parameters, layers and attention width of a model must be >= 1, got {least}")
        width = layers * attention_width
        return cls(max(1, (2 * parameters + width) // (2 * width)), 1)

    def costs(self, lengths: Iterable[int]) -> list[int]:
        """Return the cost of each item from its number of tokens."""
        linear, quadratic = self.linear, self.quadratic
        return [n * (linear + quadratic * n) for n in lengths] if quadratic else [linear * n for n in lengths]


TOKENS = CostModel(1, 0)


@final
@dataclass(frozen=True, slots=True)
class Assignment:
    """The items of each part: `Assignment(shards=((0, 3), (1, 2)), loads=(9, 8), largest=7)`."""

    shards: tuple[tuple[int, ...], ...]  # ascending within a part; a part may be empty
    loads: tuple[int, ...]  # cost of each part
    largest: int  # cost of the costliest item; 0 without items

    @classmethod
    def of(cls, costs: Sequence[int], shards: Iterable[Iterable[int]]) -> Assignment:
        """Return the assignment of a given split."""
        ordered = tuple(tuple(sorted(shard)) for shard in shards)
        return cls(ordered, tuple(sum(costs[i] for i in shard) for shard in ordered), max(costs, default=0))

    @property
    def imbalance(self) -> float:
        """Heaviest load over mean load: 1.0 for equal loads; at 1.1 the mean part is idle for a tenth of its time."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    @property
    def bound(self) -> float:
        """Upper bound of the imbalance from the costs alone: 1 + (m - 1)·largest/total (see `balance`)."""
        total = sum(self.loads)
        return 1.0 + (len(self.loads) - 1) * self.largest / total if total else 1.0

    @property
    def floor(self) -> float:
        """Lower bound for any split, because an item cannot be divided: m·largest/total, at least 1."""
        total = sum(self.loads)
        return max(1.0, len(self.loads) * self.largest / total) if total else 1.0


def balance(costs: Sequence[int], parts: int) -> Assignment:
    """Split items into parts of nearly equal costs, by a fast heuristic.

    Each item, the costliest first, goes to the part with the least load so far (LPT). Then items of the heaviest part
    are moved to, or exchanged with, light parts while that lowers its load, for a bounded number of times.

    For m parts, Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969), proves for LPT

        heaviest load <= mean load + (1 - 1/m)·largest cost        and        <= (4/3 - 1/(3m))·the best possible,

    and the exchanges only ever lower the heaviest load. On lognormal lengths (sigma 0.99, 2…64 parts) the imbalance is
    at most 1e-4 above Karmarkar-Karp differencing's, in a third of its time or less (`benchmarks/dispatch.py`).

    Args:
        costs: the cost of each item, >= 0.
        parts: the number of parts, >= 1; there may be fewer items.

    Raises:
        InputError: a cost is negative, or there is no part.
    """
    if parts < 1:
        raise InputError(f"parts to balance over must be >= 1, got {parts}")
    if costs and min(costs) < 0:
        raise InputError(f"costs to balance must be >= 0, got {min(costs)}")
    if parts == 1:
        return Assignment.of(costs, [range(len(costs))])
    shards, loads = _longest_first(costs, parts)
    _exchange(shards, loads)
    return Assignment.of(costs, ([item for _, item in shard] for shard in shards))


def _longest_first(costs: Sequence[int], parts: int) -> tuple[list[list[_Item]], list[int]]:
    """Return the shards of LPT, ascending by (cost, item), and their loads; ties go to the part with fewest items."""
    shards: list[list[_Item]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable: equal costs by position
        load, count, part = heap[0]
        shards[part].append((costs[item], item))
        heapq.heapreplace(heap, (load + costs[item], count + 1, part))
    for shard in shards:
        shard.sort()
    loads = [0] * parts
    for load, _, part in heap:
        loads[part] = load
    return shards, loads


def _exchange(shards: list[list[_Item]], loads: list[int]) -> None:
    """Lower the heaviest load by moves and swaps, in place."""
    parts, total = len(shards), sum(loads)
    for _ in range(_EXCHANGES * parts):
        heavy = max(range(parts), key=loads.__getitem__)
        if (loads[heavy] * parts - total) * _GOOD_ENOUGH <= total or len(shards[heavy]) == 1:
            return
        for light in heapq.nsmallest(_PARTNERS, range(parts), key=loads.__getitem__):
            found = _best_swap(shards[heavy], shards[light], loads[heavy] - loads[light])
            if found:
                _swap(shards, loads, heavy, light, *found)
                break
        else:
            return


def _best_swap(heavy: list[_Item], light: list[_Item], gap: int) -> tuple[_Item, _Item] | None:
    """Return the best swap of an item of the heavy part with an item of the light part, or with none; None: no gain.

    A swap that moves d of the gap leaves the parts gap - 2·d apart, so d should be close to gap / 2 and must be within
    0 < d < gap to lower the heavier part.
    """
    offers = [_NOTHING, *light]
    best, found = gap, None
    for item in heavy:
        place = bisect_left(offers, (item[0] - gap // 2, -1))
        for offer in offers[max(place - 1, 0) : place + 1]:
            moved = item[0] - offer[0]
            if max(moved, gap - moved) < best:
                best, found = max(moved, gap - moved), (item, offer)
    return found


def _swap(shards: list[list[_Item]], loads: list[int], heavy: int, light: int, item: _Item, offer: _Item) -> None:
    for source, target, moved in ((heavy, light, item), (light, heavy, offer)):
        if moved is not _NOTHING:
            del shards[source][bisect_left(shards[source], moved)]
            insort(shards[target], moved)
            loads[source] -= moved[0]
            loads[target] += moved[0]


def micro_batches(
    lengths: Sequence[int], costs: Sequence[int], token_budget: int, at_least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Pack items into few micro-batches that fit the budget and cost about the same.

    Their number is that of first-fit decreasing, or that of cutting the items in order if this is smaller: at most
    11/9·fewest possible + 6/9 (Dósa 2007). No two micro-batches of first-fit would fit into one, so with T tokens and
    budget B there are also at most max(1, ceil(2·T/B) - 1). `at_least` raises the number for ranks that step together.

    Args:
        lengths: tokens of each item.
        costs: cost of each item.
        token_budget: tokens of a micro-batch; an item that exceeds it is a separate micro-batch.
        at_least: minimum number of micro-batches, unless there are fewer items.

    Returns:
        The micro-batches, with every item once. Items ascend within a micro-batch. The costliest micro-batch is first,
        so the k-th micro-batches of several ranks are similar, and a lack of memory appears in the first one.

    Raises:
        InputError: lengths and costs differ in number, a value is negative, or the budget or `at_least` is below 1.
    """
    if len(lengths) != len(costs):
        raise InputError(f"micro-batches need one cost per item ({len(lengths)}), got {len(costs)}")
    if min(token_budget, at_least) < 1:
        raise InputError(f"token budget and count of micro-batches must be >= 1, got {min(token_budget, at_least)}")
    if not lengths:
        return ()
    least = min(*lengths, *costs)
    if least < 0:
        raise InputError(f"lengths and costs to pack must be >= 0, got {least}")
    fewest = min(_first_fit(lengths, token_budget), _in_order(lengths, token_budget), key=len)
    count = max(len(fewest), min(at_least, len(lengths)))
    packed = _spread(lengths, costs, token_budget, count) or _divide(fewest, costs, count)
    ordered = (tuple(sorted(items)) for items in packed)
    return tuple(sorted(ordered, key=lambda items: (-sum(costs[i] for i in items), items)))


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack by first-fit decreasing: each item, the longest first, into the first micro-batch with room."""
    room = np.full(len(lengths), budget, dtype=np.int64)
    packed: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        oversized = lengths[item] > budget
        place = len(packed) if oversized else int((room[: len(packed) + 1] >= lengths[item]).argmax())
        if place == len(packed):
            packed.append([])
        packed[place].append(item)
        room[place] = -1 if oversized else room[place] - lengths[item]
    return packed


def _in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items in order; cut where the next item does not fit."""
    packed: list[list[int]] = []
    used = 0
    for item, length in enumerate(lengths):
        if not packed or used + length > budget:
            packed.append([])
            used = 0
        packed[-1].append(item)
        used += length
    return packed


def _spread(lengths: Sequence[int], costs: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Put each item, the longest first, into the cheapest of `count` micro-batches with room; [] if one fails."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], costs[i]), reverse=True)
    packed = [[item] for item in order[:count]]
    room = budget - np.array([lengths[item] for item in order[:count]], dtype=np.int64)
    load = np.array([costs[item] for item in order[:count]], dtype=np.float64)
    for item in order[count:]:
        place = int(np.where(room >= lengths[item], load, np.inf).argmin())
        if room[place] < lengths[item]:
            return []
        packed[place].append(item)
        room[place] -= lengths[item]
        load[place] += costs[item]
    return packed


def _divide(packed: Sequence[list[int]], costs: Sequence[int], count: int) -> list[list[int]]:
    """Halve the costliest micro-batch that has more than one item until there are `count`."""
    divided = list(packed)
    while len(divided) < count:
        costliest = max((items for items in divided if len(items) > 1), key=lambda items: sum(costs[i] for i in items))
        divided.remove(costliest)
        divided += [[costliest[k] for k in half] for half in balance([costs[i] for i in costliest], 2).shards]
    return divided
