"""Digests, seeds, state machines, facts: the values everything else rests on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import rfc8785
from hypothesis import given, strategies as st

from posttrain.domain import lifecycle
from posttrain.domain.canonical import canonical_json, derive_seed, digest_json, is_digest
from posttrain.domain.errors import ConflictError, FailureClass, InputError, PosttrainError
from posttrain.domain.jobs import (
    Failure,
    InputBlob,
    JobOrder,
    JobResult,
    Metric,
    Note,
    Output,
    Progress,
    Span,
    fact_from_json,
    fact_to_json,
)

ROOT = Path(__file__).resolve().parents[2]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_canonical_json_is_json_and_does_not_depend_on_key_order(value: object) -> None:
    assert json.loads(canonical_json(value)) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(list(value.items())))) == canonical_json(value)


def test_digest_is_sha256_of_rfc_8785() -> None:
    # the RFC's own example of number and key order: 1.0 is written 1, keys are sorted
    assert canonical_json({"b": 1.0, "a": [1e21, "é"]}) == '{"a":[1e+21,"é"],"b":1}'.encode()
    assert digest_json({}) == "sha256:" + hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**60, {1: 2}, {"x": object()}])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="canonical JSON"):
        canonical_json(value)


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "A" * 64, "md5:" + "0" * 64])
def test_malformed_digests_are_told_apart(text: str) -> None:
    assert not is_digest(text)


@given(st.integers(0, 2**53), st.lists(st.text(max_size=4) | st.integers(0, 9), max_size=3))
def test_seeds_are_63_bits_and_depend_on_every_word(seed: int, purpose: list[str | int]) -> None:
    derived = derive_seed(seed, *purpose)
    assert 0 <= derived < 2**63
    assert derived != derive_seed(seed + 1, *purpose)
    assert derived != derive_seed(seed, *purpose, "more")


def test_a_number_is_not_the_word_that_looks_like_it() -> None:
    assert derive_seed(0, 1) != derive_seed(0, "1")


def test_every_drawn_transition_is_allowed_and_every_other_refused() -> None:
    for machine, table in lifecycle.TABLES.items():
        states = set(table)
        assert lifecycle.INITIAL[machine] in states
        for source in states:
            assert table[source] <= states
            for target in states:
                if target in table[source]:
                    lifecycle.check_transition(machine, source, target)
                else:
                    with pytest.raises(ConflictError, match=f"{machine} cannot go from {source} to {target}"):
                        lifecycle.check_transition(machine, source, target)


def test_every_state_can_be_reached() -> None:
    for machine, table in lifecycle.TABLES.items():
        reached, frontier = set(), {str(lifecycle.INITIAL[machine])}
        while frontier:
            reached |= frontier
            frontier = {target for state in frontier for target in table[state]} - reached
        assert reached == set(table)


def test_facts_orders_and_results_survive_json() -> None:
    for fact in (
        Metric(3, {"reward/mean": 0.5}, 1.0),
        Progress(3, 10, "grpo", 99, 1.0),
        Span("rollout", 3, 1.0, 0.5, {"tokens": 4}),
        Note("careful", 1.0, "warning"),
    ):
        assert fact_from_json(json.loads(json.dumps(fact_to_json(fact)))) == fact
    order = JobOrder("r-sft-1", "sft", 7, {"steps": 2}, {"data": InputBlob("sha256:0", "file")}, "file:///x", "/c")
    assert JobOrder.from_json(json.loads(json.dumps(order.to_json()))) == order
    with pytest.raises(InputError, match="job order must be of schema 1, got 2"):
        JobOrder.from_json({**order.to_json(), "schema": 2})
    failure = Failure(FailureClass.DIVERGED, "loss is NaN", "nan")
    result = JobResult("failed", {"model": Output("outputs/model", "tree")}, {"loss": 1.0}, 5, 2.0, failure)
    assert JobResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_exit_codes_are_distinct_where_users_branch_on_them() -> None:
    def tree(kind: type[PosttrainError]) -> list[type[PosttrainError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    by_code: dict[int, set[type[PosttrainError]]] = {}
    for kind in tree(PosttrainError):
        if kind.__module__ == "posttrain.domain.errors":
            by_code.setdefault(kind.exit_code, set()).add(kind)
    for code, kinds in by_code.items():
        roots = [kind for kind in kinds if not any(other is not kind and issubclass(kind, other) for other in kinds)]
        assert len(roots) == 1, f"exit code {code} means several things: {kinds}"
    assert set(by_code) == set(range(1, 14))


def test_only_infrastructure_is_retried_blindly() -> None:
    retried = {kind for kind in FailureClass if kind.retried}
    assert retried == {FailureClass.INFRASTRUCTURE, FailureClass.PREEMPTED}
    assert all(kind.error.retryable == kind.retried for kind in FailureClass)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "é", "\u2028", "\x7f"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["a", "ab", "é"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_the_fast_encoder_writes_what_rfc8785_does(value: object) -> None:
    try:
        expected = rfc8785.dumps(value)  # type: ignore[arg-type]
    except (rfc8785.CanonicalizationError, ValueError):
        with pytest.raises(InputError):
            canonical_json(value)
    else:
        assert canonical_json(value) == expected


@pytest.mark.parametrize(
    "number", [1e-5, 1e-4, 0.1, 1.0, -0.0, 1e15, 2.0**53, 2.0**53 - 1, 1e21, 1e22, 5e-324, 123456789.125]
)
def test_numbers_are_written_as_rfc8785_does(number: float) -> None:
    if abs(number) < 2**53 or not float(number).is_integer():
        assert canonical_json({"n": number}) == rfc8785.dumps({"n": number})
