"""Gate rules as written, verdicts and reports as values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from posttrain.domain.canonical import canonical_json
from posttrain.domain.gates import Direction, GateReport, GateRule, Outcome, Verdict, worst

ABSOLUTE = {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.9}
MARGIN = {"name": "no-regression", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.02}
BETTER = {"name": "shorter", "metric": "heldout/tokens", "better_than": "channel", "direction": "lower", "by": 0.5}


def verdict(outcome: Outcome = Outcome.PASS, **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "gate": "accuracy", "metric": "heldout/accuracy", "outcome": outcome, "reason": "because.", "test": "Wilson",
        "confidence": 0.95, "items": 100, "estimate": 0.95, "limit": 0.91, "threshold": 0.9, "missed_by": -0.01,
    }  # fmt: skip
    return Verdict(**{**fields, **changes})


@pytest.mark.parametrize("written", [ABSOLUTE, MARGIN, BETTER])
def test_a_rule_survives_json(written: dict[str, Any]) -> None:
    rule = GateRule(**written)
    assert GateRule.model_validate(rule.model_dump(mode="json")) == rule
    assert GateRule.model_validate_json(rule.model_dump_json()) == rule


def test_defaults_of_a_relative_rule_are_written_out() -> None:
    rule = GateRule(**MARGIN)
    assert (rule.direction, rule.if_channel_empty, rule.by) == (Direction.HIGHER, "fail", None)
    spelled_out = GateRule(**MARGIN, direction="higher", if_channel_empty="fail", confidence=0.95, min_items=20)
    assert spelled_out == rule
    assert GateRule(name="a", metric="m", better_than="channel").by == 0.0
    assert GateRule(name="a", metric="m", better_than="sft").if_channel_empty is None, "that model is always there"


@pytest.mark.parametrize(
    ("written", "threshold", "higher", "relative"),
    [
        (ABSOLUTE, 0.9, True, False),
        ({"name": "short", "metric": "m", "at_most": 12}, 12.0, False, False),
        (MARGIN, -0.02, True, True),
        ({**MARGIN, "direction": "lower"}, 0.02, False, True),
        (BETTER, -0.5, False, True),
        ({**BETTER, "direction": "higher"}, 0.5, True, True),
    ],
)
def test_threshold_and_side(written: dict[str, Any], threshold: float, higher: bool, relative: bool) -> None:
    rule = GateRule(**written)
    assert (rule.threshold, rule.higher_is_better, rule.needs_baseline) == (threshold, higher, relative)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_most": 0.95}, "gate 'accuracy': exactly one of .* got at_least and at_most"),
        ({"at_least": None}, "gate 'accuracy': exactly one of .* got none"),
        ({"margin": 0.02}, "gate 'accuracy': margin has no meaning with at_least; remove margin"),
        ({"direction": "lower"}, "gate 'accuracy': direction has no meaning with at_least"),
        ({"if_channel_empty": "pass"}, "gate 'accuracy': if_channel_empty has no meaning with at_least"),
        ({"confidence": 0.4}, "gate 'accuracy': confidence must be > 0.5 and <= 0.999, got 0.4"),
        ({"confidence": 1.0}, "gate 'accuracy': confidence .* got 1.0"),
        ({"min_items": 0}, "gate 'accuracy': min_items must be >= 2, got 0"),
        ({"metric": " "}, "gate 'accuracy': metric must not be empty"),
        ({"name": "Not A Name"}, "gate 'Not A Name': name must be"),
        ({"at_least": float("nan")}, "finite"),
        ({"at_leest": 0.9}, "at_leest"),
    ],
)
def test_an_absolute_rule_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GateRule(**{**ABSOLUTE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margin": None}, "not_worse_than needs margin"),
        ({"margin": -0.1}, "margin must be >= 0, got -0.1"),
        ({"by": 0.1}, "by has no meaning with not_worse_than; remove by"),
        ({"better_than": "channel"}, "got not_worse_than and better_than"),
        ({"not_worse_than": "Prod"}, "not_worse_than"),
        (
            {"not_worse_than": "sft", "if_channel_empty": "fail"},
            "if_channel_empty has no meaning with not_worse_than",
        ),
        ({"if_channel_empty": "human"}, "if_channel_empty"),
    ],
)
def test_a_relative_rule_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GateRule(**{**MARGIN, **changes})


def test_messages_are_one_line() -> None:
    with pytest.raises(ValidationError) as caught:
        GateRule(**{**ABSOLUTE, "margin": 0.1})
    assert all("\n" not in error["msg"] for error in caught.value.errors())


def test_precedence_is_error_fail_inconclusive_pass() -> None:
    order = [Outcome.ERROR, Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS]
    for outcomes in itertools.product(order, repeat=3):
        assert worst(outcomes) is min(outcomes, key=order.index)


def test_no_outcome_at_all_is_an_error() -> None:
    assert worst([]) is Outcome.ERROR
    assert GateReport.of([], candidate="sha256:c").outcome is Outcome.ERROR


@settings(deadline=None)
@given(st.lists(st.sampled_from(Outcome), min_size=1), st.sampled_from(Outcome))
def test_another_verdict_never_improves_the_outcome(outcomes: list[Outcome], other: Outcome) -> None:
    assert worst([*outcomes, other]).severity >= worst(outcomes).severity


def test_a_report_survives_json_and_its_digest_names_it() -> None:
    rows = [verdict(details={"discordance": 0.1}), verdict(Outcome.FAIL, gate="other", limit=None)]
    report = GateReport.of(rows, candidate="sha256:c", baseline="sha256:b", evaluator="sha256:e")
    again = GateReport.model_validate_json(report.model_dump_json())
    assert again == report
    assert again.digest == report.digest
    assert report.outcome is Outcome.FAIL
    assert [row.gate for row in report.decisive] == ["other"]
    assert GateReport.of(rows, candidate="sha256:x").digest != report.digest
    canonical_json(report.model_dump(mode="json"))


def test_a_report_cannot_claim_a_better_outcome_than_its_verdicts() -> None:
    forged = GateReport.of([verdict(Outcome.FAIL)], candidate="sha256:c").model_dump(mode="json")
    forged["outcome"] = "pass"
    with pytest.raises(ValidationError, match="outcome must be fail"):
        GateReport.model_validate(forged)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_verdict_holds_only_finite_numbers(number: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        verdict(estimate=number)
    with pytest.raises(ValidationError, match="finite"):
        verdict(details={"x": number})
