"""Ranks of settings: never beyond what the intervals allow, and seldom wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings as examples, strategies as st
from scipy import stats

from posttrain.decision.gates import Evidence, estimate, paired
from posttrain.decision.power import rank
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import RATE, SHARE

Bits = list[float]


def evidence(values: Bits, first: int = 0) -> Evidence:
    return Evidence(tuple(f"i{first + n:04d}" for n in range(len(values))), np.array(values, float), RATE)


def bits(right: int, items: int = 100) -> Evidence:
    return evidence([1.0] * right + [0.0] * (items - right))


def test_one_seed_is_a_comparison_of_models() -> None:
    found = rank("s/accuracy", [{1: bits(90)}, {1: bits(50)}, {1: bits(52)}], "higher")
    assert [(one.best, one.worst) for one in found.settings] == [(1, 1), (2, 3), (2, 3)]
    assert found.settings[0].mean == estimate("s/accuracy", bits(90))
    pair = found.differences[0]
    alone = paired("s/accuracy", bits(50), bits(90), 1 - 0.05 / 3)
    assert (pair.value, pair.low, pair.high) == pytest.approx((alone.difference, alone.low, alone.high))
    assert "another seed may order" in " ".join(found.notes)
    lower = rank("s/accuracy", [{1: bits(90)}, {1: bits(50)}, {1: bits(52)}], "lower")
    assert [(one.best, one.worst) for one in lower.settings] == [(3, 3), (1, 2), (1, 2)]


def test_seeds_that_disagree_widen_the_interval() -> None:
    half = {seed: bits(50) for seed in (1, 2, 3)}
    steady = rank("s/accuracy", [{seed: bits(70) for seed in half}, half], "higher")
    shaken = rank("s/accuracy", [{1: bits(95), 2: bits(70), 3: bits(45)}, half], "higher")
    assert [(one.best, one.worst) for one in steady.settings] == [(1, 1), (2, 2)]
    assert [(one.best, one.worst) for one in shaken.settings] == [(1, 2), (1, 2)]
    gains = [-0.45, -0.2, 0.05]
    wanted = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    found = shaken.differences[0]
    assert found.value == pytest.approx(-0.2)
    assert found.low < wanted[0], "items add to what seeds leave open"
    assert found.high > wanted[1]
    mean = shaken.settings[0].mean
    assert mean is not None
    assert "Student's t over 3 seeds" in mean.method
    assert 0 <= (mean.low or 0) < mean.value < (mean.high or 0) <= 1
    assert not shaken.notes


def test_a_setting_without_measurements_is_ranked_nowhere_and_said_so() -> None:
    found = rank("s/accuracy", [{1: bits(90)}, {}, {2: bits(10)}], "higher")
    assert [(one.best, one.worst) for one in found.settings if one.mean] == [(1, 2)] * 2
    assert found.settings[1].mean is None
    notes = " ".join(found.notes)
    assert "1 of 3 settings were not measured" in notes
    assert "settings 1 and 3 are not compared: no seed was measured for both" in notes


def test_audit_24_seeds_measured_over_other_ranges_are_not_averaged() -> None:
    shares = Evidence(bits(50).item_ids, bits(50).values, SHARE)
    with pytest.raises(InputError, match="its seeds were not measured on the same items"):
        rank("s/accuracy", [{1: bits(50), 2: shares}], "higher")


def test_audit_24_no_limit_of_a_mean_leaves_its_range() -> None:
    shaken = rank("s/accuracy", [{1: bits(100), 2: bits(0)}], "higher").settings[0].mean
    assert shaken is not None
    assert (shaken.low, shaken.value, shaken.high) == (0.0, 0.5, 1.0)


def test_few_seeds_in_common_decide_nothing() -> None:
    """Two seeds that agree by chance, or one that is left of two, have no spread to tell luck from a setting."""
    half, better = [{seed: bits(right) for seed in (1, 2)} for right in (50, 80)]
    found = rank("s/accuracy", [half, better], "higher")
    assert [(one.best, one.worst) for one in found.settings] == [(1, 2)] * 2
    assert found.differences[0].low > 0, "only the rank is withheld"
    assert "1 of 1 pairs have fewer than 3 seeds in common and are therefore not ordered" in found.notes
    lost = rank("s/accuracy", [{1: bits(52), 2: bits(80)}, {2: bits(59), 3: bits(81)}], "higher")
    assert [(one.best, one.worst) for one in lost.settings] == [(1, 2)] * 2
    assert lost.differences[0].seeds == 1


def test_other_items_are_not_compared() -> None:
    found = rank("s/accuracy", [{1: bits(90)}, {1: evidence([0.0] * 100, first=50)}], "higher")
    assert [(one.best, one.worst) for one in found.settings] == [(1, 2), (1, 2)]
    assert "measured on other items" in found.notes[0]


@pytest.mark.slow
@examples(deadline=None, max_examples=25)
@given(
    st.lists(
        st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8), min_size=2, max_size=2),
        min_size=2,
        max_size=4,
    )
)
def test_ranks_say_what_the_differences_say(values: list[list[Bits]]) -> None:
    settings = [{seed: evidence(own) for seed, own in enumerate(seeds)} for seeds in values]
    found = rank("s/accuracy", settings, "higher")
    turned = rank("s/accuracy", settings[::-1], "higher")
    assert [(one.best, one.worst) for one in found.settings] == [(o.best, o.worst) for o in turned.settings[::-1]]
    for place, one in enumerate(found.settings):
        assert 1 <= one.best <= one.worst <= len(settings)
        ahead = [d for d in found.differences if d.decided and (d.second if d.value > 0 else d.first) == place]
        assert one.worst == len(settings) - len(ahead)
    for each in found.differences:
        assert each.low <= each.value <= each.high
        assert each.turned().turned() == each


@pytest.mark.slow
def test_equal_settings_are_seldom_told_apart() -> None:
    """Four settings of one truth, whose seeds differ: at 95 % one sweep in twenty may order any two of them."""
    rng, wrong = np.random.default_rng(3), 0
    rounds = 40
    for _ in range(rounds):
        hard = rng.random(60)
        settings = []
        for _ in range(4):
            level = 0.5 + 0.08 * rng.standard_normal(3)
            settings.append({s: evidence([float(h < level[s]) for h in hard]) for s in range(3)})
        wrong += any(d.decided for d in rank("s/accuracy", settings, "higher").differences)
    assert wrong <= stats.binom.ppf(0.999, rounds, 0.05)
