"""How often each gate passes a model exactly on its threshold: the level, compared with the nominal one.

    python -m benchmarks.gates            # the table of docs/gates.md, five minutes of processor time
    python -m benchmarks.gates --tiny     # its small cases, in seconds

Every verdict comes from `posttrain.decision.gates.judge`. Rates and paired rates are enumerated: all results, weighted
by their probabilities, at the worst threshold or nuisance rate of a grid. Means are simulated. The column `customary`
is the level of the usual method on the same case: Wilson's limit, Tango's score limit, a BCa bootstrap, or counting
repeated rows as items. Exits 1 if an exact level exceeds the nominal level, or a simulated level exceeds it by more
than two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from posttrain.data.rows import distinct_items
from posttrain.decision.gates import Evidence, Look, judge
from posttrain.domain.gates import GateRule, Outcome
from posttrain.domain.kinds import RATE, SHARE, ItemRange
from posttrain.domain.policies import LookBudget

Array = NDArray[np.float64]
DRAWS, QUICK_DRAWS, BOOTSTRAPS = 2000, 200, 400  # simulated data sets per case; of them judged by the bootstrap too
RESAMPLES = 999  # of a bootstrap
NUISANCE = 200  # rates of losses tried per paired case
GRID = np.arange(1, 100) / 100  # thresholds tried per rate


@dataclass(frozen=True, slots=True)
class Level:
    """One row of the table."""

    what: str  # kind of gate and case
    items: int
    nominal: float
    level: float
    error: float  # standard error; 0: enumerated
    customary: float | None  # level of the usual method
    how: str

    @property
    def holds(self) -> bool:
        """Whether the level is at most the nominal one, within two standard errors."""
        return self.level <= self.nominal + 2 * self.error + 1e-9


def passes(rule: GateRule, ours: Array, theirs: Array | None, possible: ItemRange, seed: int = 0) -> bool:
    """Return whether the gate passes these values."""
    ids = tuple(map(str, range(len(ours))))
    baseline = None if theirs is None else Evidence(ids, theirs, possible)
    verdict = judge(rule, Evidence(ids, ours, possible), baseline, channel_empty=False, seed=seed)
    return verdict.outcome is Outcome.PASS


# --- rates ------------------------------------------------------------------------------------------------------------


def rate_levels(items: int, confidence: float, upper: bool) -> Level:
    """Return the level at the worst threshold of the grid, for a rate against a number."""
    counts = np.arange(items + 1)
    found: list[tuple[float, float]] = []
    for threshold in GRID:
        bound = {"at_most" if upper else "at_least": float(threshold)}
        rule = GateRule(name="g", metric="m", confidence=confidence, **bound)
        good = [passes(rule, bits(int(right), items), None, RATE) for right in counts]
        usual = [_wilson(int(right), items, confidence, upper) for right in counts]
        usual_good = [limit <= threshold if upper else limit >= threshold for limit in usual]
        chances = stats.binom.pmf(counts, items, threshold)
        found.append((float(chances @ good), float(chances @ usual_good)))
    level, customary = (max(column) for column in zip(*found, strict=True))
    what = f"rate, {'at_most' if upper else 'at_least'}"
    return Level(what, items, 1 - confidence, level, 0.0, customary, f"exact, {len(GRID)} thresholds")


def bits(right: int, items: int) -> Array:
    """Return `ones` ones, then zeros."""
    return np.repeat([1.0, 0.0], [right, items - right])


def _wilson(right: int, items: int, confidence: float, upper: bool) -> float:
    interval = stats.binomtest(right, items).proportion_ci(2 * confidence - 1, "wilson")
    return float(interval.high if upper else interval.low)


def repeated_levels(rows: int, times: int) -> Level:
    """Return levels of a suite with repeated rows, judged at .8; customary: each row is an item."""
    suite = [{"prompt": f"q{row}", "answer": "1"} for row in range(rows)] * times
    items = len(distinct_items(suite, "suite"))
    rule = GateRule(name="g", metric="m", at_least=0.8)
    right = np.arange(rows + 1)
    chances = stats.binom.pmf(right, rows, 0.8)
    good = [passes(rule, bits(int(r), items), None, RATE) for r in right]
    usual = [passes(rule, bits(int(r) * times, rows * times), None, RATE) for r in right]
    level, customary = float(chances @ good), float(chances @ usual)
    return Level(f"rate, {rows} rows {times} times over", items, 0.05, level, 0.0, customary, "exact, threshold .8")


# --- paired rates -----------------------------------------------------------------------------------------------------


def paired_levels(items: int, threshold: float, confidence: float = 0.95, lower: bool = False) -> Level:
    """Return the level at the worst rate of losses, for a difference of rates exactly on the threshold."""
    form = {"not_worse_than": "channel", "margin": -threshold} if threshold < 0 else {}
    form = form or {"better_than": "channel", "by": threshold}
    rule = GateRule(name="g", metric="m", confidence=confidence, direction="lower" if lower else "higher", **form)

    def good(gained: int, lost: int) -> bool:
        ours, theirs = np.zeros(items), np.zeros(items)
        ours[:gained], theirs[gained : gained + lost] = 1, 1
        return passes(rule, *((theirs, ours) if lower else (ours, theirs)), RATE)

    z = float(stats.norm.ppf(confidence))
    ours = _worst_nuisance(items, threshold, _edge(items, good))
    usual = _worst_nuisance(items, threshold, _edge(items, lambda b, c: tango(b, c, items, threshold) >= z))
    word = f"not_worse_than, margin {-threshold:g}" if threshold < 0 else f"better_than, by {threshold:g}"
    what = f"paired rates, {word}{', lower' if lower else ''}"
    return Level(what, items, 1 - confidence, ours, 0.0, usual, f"exact, {NUISANCE} rates of losses")


def _edge(items: int, good: Callable[[int, int], bool]) -> NDArray[np.int64]:
    """Return for each number of losses the minimum gains that pass (`items + 1`: none); it grows with the losses."""
    wanted, gained = np.full(items + 1, items + 1), 0
    for lost in range(items + 1):
        while gained + lost <= items and not good(gained, lost):
            gained += 1
        if gained + lost > items:
            break
        wanted[lost] = gained
    return wanted


def _worst_nuisance(items: int, difference: float, wanted: NDArray[np.int64]) -> float:
    losses = np.arange(items + 1)
    low, high = max(0.0, -difference), (1 - difference) / 2
    chances = []
    for worse in np.linspace(low, high, NUISANCE + 2)[1:-1]:
        share = (worse + difference) / (1 - worse)
        chances.append(stats.binom.pmf(losses, items, worse) @ stats.binom.sf(wanted - 1, items - losses, share))
    return float(max(chances))


def tango(gained: int, lost: int, items: int, difference: float) -> float:
    """Return the paired score statistic (Tango 1998, Stat. Med. 17), the customary test of paired rates."""
    linear = -gained - lost + (2 * items - gained + lost) * difference
    root = math.sqrt(max(linear**2 + 8 * items * lost * difference * (1 - difference), 0.0))
    variance = items * (2 * (root - linear) / (4 * items) + difference * (1 - difference))
    excess = gained - lost - items * difference
    return excess / math.sqrt(variance) if variance > 1e-12 else (0.0 if excess <= 0 else math.inf)


# --- looks ------------------------------------------------------------------------------------------------------------


def rate_looks(items: int, looks: int) -> Level:
    """Return how often any of several models on the threshold passes; customary: each is judged as the first look."""
    counts, rule = np.arange(items + 1), GateRule(name="g", metric="m", at_least=0.8)
    chances = stats.binom.pmf(counts, items, 0.8)

    def any_passes(budget: LookBudget) -> float:
        missed = 1.0
        for number in range(1, looks + 1):
            judged = Look(number, budget).rule(rule)
            missed *= 1 - float(chances @ [passes(judged, bits(int(right), items), None, RATE) for right in counts])
        return 1 - missed

    what = f"rate, at_least .8, one of {looks} looks"
    return Level(what, items, 0.05, any_passes("corrected"), 0.0, any_passes("warn"), "exact, independent models")


def paired_looks(items: int, looks: int) -> Level:
    """Return the same for models that are as good as the channel's, at the worst rate of losses of each look."""
    rule = GateRule(name="g", metric="m", better_than="channel")
    each = [Look(number, "corrected").rule(rule).confidence for number in range(1, looks + 1)]
    corrected = 1 - math.prod(1 - paired_levels(items, 0.0, confidence).level for confidence in each)
    customary = 1 - (1 - paired_levels(items, 0.0).level) ** looks
    what = f"paired rates, better_than, by 0, one of {looks} looks"
    return Level(what, items, 0.05, corrected, 0.0, customary, f"exact, {NUISANCE} rates of losses")


# --- means ------------------------------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int], Array]


@dataclass(frozen=True, slots=True)
class Population:
    """A distribution from which items are drawn."""

    name: str
    possible: ItemRange
    mean: float
    draw: Draw


def runaways(share: float, usual: float = 20.0, longest: float = 1024.0) -> Population:
    """Return responses of one length, except a few that reach the limit."""

    def draw(generator: np.random.Generator, items: int) -> Array:
        return np.where(generator.random(items) < share, longest, usual)

    mean = share * longest + (1 - share) * usual
    return Population(f"tokens, {share:.0%} at {longest:.0f}", ItemRange(1.0, longest), mean, draw)


def shares(rate: float, samples: int) -> Population:
    """Return shares of correct samples per item, with equal probabilities for all items."""
    return Population(
        f"share of {samples}, rate {rate:g}",
        SHARE,
        rate,
        lambda generator, items: generator.binomial(samples, rate, items) / samples,
    )


def geometric(longest: int = 64, end: float = 0.1) -> Population:
    """Return geometric response lengths, truncated at the limit."""
    mean = sum((1 - end) ** token for token in range(longest))
    return Population(
        f"tokens, geometric to {longest}",
        ItemRange(1.0, longest),
        mean,
        lambda generator, items: np.minimum(generator.geometric(end, items), longest).astype(float),
    )


POPULATIONS = (
    runaways(0.01),
    runaways(0.03),
    geometric(),
    shares(0.95, 4),
    shares(0.3, 8),
    Population(".9, and 0 in 5 %", SHARE, 0.855, lambda g, n: np.where(g.random(n) < 0.95, 0.9, 0.0)),
    Population("beta(.05, .95)", SHARE, 0.05, lambda g, n: g.beta(0.05, 0.95, n)),
)
PAIRS = ((runaways(0.01), runaways(0.0)), (runaways(0.03), runaways(0.01)), (shares(0.95, 4), shares(0.95, 4)))


def mean_levels(population: Population, items: int, upper: bool, draws: int) -> Level:
    """Return levels for a mean against its true value."""
    bound = {"at_most" if upper else "at_least": population.mean}
    rule = GateRule(name="g", metric="m", **bound)
    generator = np.random.default_rng(items)
    samples = [(population.draw(generator, items), None) for _ in range(draws)]
    what = f"mean, {'at_most' if upper else 'at_least'}: {population.name}"
    return _simulated(what, rule, samples, population.possible, -1 if upper else 1)


def difference_levels(ours: Population, theirs: Population, items: int, lower: bool, draws: int) -> Level:
    """Return levels for a difference of means against its true value."""
    sign = -1 if lower else 1
    gain = sign * (ours.mean - theirs.mean)
    form = {"better_than": "channel", "by": gain} if gain >= 0 else {"not_worse_than": "channel", "margin": -gain}
    rule = GateRule(name="g", metric="m", direction="lower" if lower else "higher", **form)
    generator = np.random.default_rng(items)
    samples = [(ours.draw(generator, items), theirs.draw(generator, items)) for _ in range(draws)]
    word = f"{'lower' if lower else 'higher'}, {'by' if gain >= 0 else 'margin'} {abs(gain):.3g}"
    return _simulated(f"paired means, {word}: {ours.name} / {theirs.name}", rule, samples, ours.possible, sign)


def _simulated(
    what: str, rule: GateRule, samples: Sequence[tuple[Array, Array | None]], possible: ItemRange, sign: int
) -> Level:
    nominal, draws = 1 - rule.confidence, len(samples)
    passed = [passes(rule, ours, theirs, possible, seed) for seed, (ours, theirs) in enumerate(samples)]
    usual = [
        sign * _bca(sign * (ours if theirs is None else ours - theirs), rule.confidence)
        for ours, theirs in samples[:BOOTSTRAPS]
    ]
    customary = float(np.mean([sign * (limit - rule.threshold) >= 0 for limit in usual]))
    error = math.sqrt(nominal * rule.confidence / draws)
    how = f"{draws} draws, ± {error:.4f}"
    return Level(what, len(samples[0][0]), nominal, float(np.mean(passed)), error, customary, how)


def _bca(values: Array, confidence: float) -> float:
    if np.ptp(values) == 0:
        return float(values[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (values,),
            np.mean,
            confidence_level=2 * confidence - 1,
            n_resamples=RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval.low
    return float(values.min()) if math.isnan(found) else float(found)


# --- the table --------------------------------------------------------------------------------------------------------


def table(quick: bool, draws: int) -> Iterator[Level]:
    """Return every row; the exact rows of the quick table are also in the whole table."""
    sizes = (20, 22) if quick else (20, 22, 50, 200)
    for items in sizes:
        for upper in (False, True):
            yield rate_levels(items, 0.95, upper)
    if not quick:
        yield from (rate_levels(50, confidence, False) for confidence in (0.9, 0.99))
    yield repeated_levels(20, 10)
    for items in (20, 50) if quick else (20, 50, 100, 400):
        for threshold in (-0.1, -0.02, 0.0, 0.01, 0.05):
            yield paired_levels(items, threshold)
    yield paired_levels(50, 0.02, lower=True)
    if not quick:
        yield from (paired_levels(100, -0.05, confidence) for confidence in (0.9, 0.99))
    yield rate_looks(20, 10)
    yield paired_looks(20, 5)
    if not quick:
        yield from (rate_looks(200, looks) for looks in (10, 20))
        yield paired_looks(50, 5)
    yield from simulated(quick, draws)


def simulated(quick: bool, draws: int) -> Iterator[Level]:
    """Return the rows for means and their differences."""
    for items in (20,) if quick else (20, 50, 200):
        for population in POPULATIONS[:1] if quick else POPULATIONS:
            yield from (mean_levels(population, items, upper, draws) for upper in (False, True))
        for ours, theirs in PAIRS[:1] if quick else PAIRS:
            yield from (difference_levels(ours, theirs, items, lower, draws) for lower in (False, True))


def shown(row: Level) -> str:
    """Return one line of the table."""
    customary = "" if row.customary is None else f"{row.customary:.4f}"
    mark = "" if row.holds else "  ABOVE ITS LEVEL"
    return f"{row.what:<76} {row.items:>5}  {row.nominal:>7.2f} {row.level:>7.4f} {customary:>9}  {row.how}{mark}"


HEADER = f"{'gate':<76} {'items':>5}  {'nominal':>7} {'level':>7} {'customary':>9}  how"


def show(rows: Iterable[Level]) -> list[Level]:
    """Print rows as they are computed."""
    print(HEADER)
    found = []
    for row in rows:
        print(shown(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    """Print the table; exit 1 if a method exceeds its level."""
    parser = argparse.ArgumentParser(description="Levels of gates")
    parser.add_argument("--tiny", "--quick", dest="quick", action="store_true", help="small cases only, in seconds")
    parser.add_argument("--draws", type=int, help=f"simulated data sets per case ({DRAWS}; quick {QUICK_DRAWS})")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    rows = show(table(options.quick, options.draws or (QUICK_DRAWS if options.quick else DRAWS)))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    above = [row for row in rows if not row.holds]
    print(f"{len(rows) - len(above)} of {len(rows)} gates at or under their level")
    raise SystemExit(bool(above))


if __name__ == "__main__":
    main()
