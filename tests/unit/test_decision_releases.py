"""Promotion ships only a PASS on an unmoved channel; rollback walks back and never returns by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from posttrain.control import verdicts
from posttrain.decision.releases import judged_at, live_before, promotion, release_states, rollback_target
from posttrain.domain.errors import ConflictError, GateInconclusiveError, GateRejectedError, InputError, NotFoundError
from posttrain.domain.gates import GateReport, Outcome, Verdict
from posttrain.domain.lifecycle import RunState
from posttrain.domain.records import ReleaseEntry, RunRecord, outcome_error


def report(outcome: Outcome = Outcome.PASS, candidate: str = "new", baseline: str | None = "old") -> GateReport:
    row = Verdict(gate="accuracy", metric="m", outcome=outcome, reason="it is 0.4.", test="t", confidence=0.95, items=9)
    return GateReport.of([row], candidate=candidate, baseline=baseline)


def history(*steps: str) -> list[ReleaseEntry]:
    """`"A"` promotes A, `"<A"` rolls back to A."""
    return [
        ReleaseEntry(
            sequence=number,
            channel="prod",
            model_digest=step.lstrip("<"),
            run_id=None,
            action="rollback" if step.startswith("<") else "promote",
            actor="test",
            at=float(number),
        )
        for number, step in enumerate(steps, start=1)
    ]


def at(*steps: str) -> ReleaseEntry:
    return history(*steps)[-1]


def test_a_run_whose_release_was_refused_ends_with_the_error_that_refused_it() -> None:
    for kind, (reason, _) in verdicts._TURNED_AWAY.items():
        run = RunRecord("sort-1", "sort", "sha256:0", RunState.REJECTED, "ann", 1.0, reason=reason)
        assert type(outcome_error(run, ())) is kind


def test_a_pass_on_an_unmoved_channel_is_promoted() -> None:
    assert promotion(at("old"), 1, "new", report())
    assert promotion(None, 0, "new", report(baseline=None))


def test_repeating_a_promotion_changes_nothing() -> None:
    assert promotion(at("old", "new"), 1, "new", report()) is False


@pytest.mark.parametrize("steps", [("old", "other"), ("old", "other", "old")])
def test_a_channel_that_moved_is_a_conflict(steps: tuple[str, ...]) -> None:
    with pytest.raises(ConflictError, match=rf"must still point at release 1, .* got release {len(steps)}; judge"):
        promotion(at(*steps), 1, "new", report())
    with pytest.raises(ConflictError, match=r"must still point at release 1, .* got no release"):
        promotion(None, 1, "new", report())


def test_a_report_against_another_baseline_is_a_conflict() -> None:
    with pytest.raises(ConflictError, match="compared with older, which is not the model of release 1"):
        promotion(at("old"), 1, "new", report(baseline="older"))
    with pytest.raises(ConflictError, match="compared with nothing"):
        promotion(at("old"), 1, "new", report(baseline=None))


def test_a_report_is_of_the_release_that_it_names() -> None:
    bound = report().model_copy(update={"channel": "prod", "release": 1})
    assert judged_at(bound, "prod", history("old", "other", "old")) == 1


def test_a_report_that_names_no_release_is_of_the_only_one_with_its_baseline() -> None:
    """One of before says neither channel nor release, and one about another channel says nothing of this one."""
    elsewhere = report().model_copy(update={"channel": "staging", "release": 3})
    for told in (report(), elsewhere):
        assert judged_at(told, "prod", history("other", "old", "other")) == 2
        with pytest.raises(ConflictError, match="live in channel prod 2 times, and the report does not record at"):
            judged_at(told, "prod", history("old", "other", "old"))
        with pytest.raises(ConflictError, match="live in channel prod 0 times"):
            judged_at(told, "prod", history("other"))
    assert judged_at(report(baseline=None), "prod", history("old")) == 0


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.FAIL, GateRejectedError),
        (Outcome.ERROR, GateRejectedError),
        (Outcome.INCONCLUSIVE, GateInconclusiveError),
    ],
)
@pytest.mark.parametrize("current", ["old", "new", "other"])
def test_anything_but_a_pass_ships_nothing(outcome: Outcome, error: type[Exception], current: str) -> None:
    with pytest.raises(error, match=rf"the outcome of gate accuracy is {outcome.value}: it is 0\.4"):
        promotion(at("old", current), 1, "new", report(outcome))


def test_a_report_without_gates_or_about_another_model_ships_nothing() -> None:
    with pytest.raises(GateRejectedError, match="no gate was judged"):
        promotion(at("old"), 1, "new", GateReport.of([], candidate="new", baseline="old"))
    with pytest.raises(GateRejectedError, match="must be about new, got a report about elsewhere"):
        promotion(at("old"), 1, "new", report(candidate="elsewhere"))


def target(rows: list[ReleaseEntry], to: str | None = None) -> str:
    """Where a rollback goes when each rollback of the history quarantined what it took off."""
    taken_off = {was.model_digest for was, entry in itertools.pairwise(rows) if entry.action == "rollback"}
    return rollback_target(rows, rows[-1], taken_off - {rows[-1].model_digest}, to)


@pytest.mark.parametrize(
    ("steps", "goes_to"),
    [
        (["A", "C"], "A"),
        (["A", "B", "C"], "B"),
        (["A", "B", "C", "<B"], "A"),  # not C, which was just left
        (["A", "B", "C", "<A", "D"], "A"),
        (["A", "A", "B", "B"], "A"),
        (["A", "B", "A"], "B"),
    ],
)
def test_a_bare_rollback_goes_to_the_newest_release_that_is_not_quarantined(steps: list[str], goes_to: str) -> None:
    assert target(history(*steps)) == goes_to


@pytest.mark.parametrize("steps", [["A", "B", "<A"], ["A", "B", "A", "<B"]])
def test_a_bare_rollback_fails_when_every_other_release_is_quarantined(steps: list[str]) -> None:
    with pytest.raises(NotFoundError, match=r"no other release that is not quarantined; .* --lift-quarantine REASON"):
        target(history(*steps))


@pytest.mark.parametrize("steps", [["A"], ["A", "A"]])
def test_a_bare_rollback_of_the_only_model_names_it(steps: list[str]) -> None:
    with pytest.raises(NotFoundError, match=r"channel prod has released no other model; it stays at A$"):
        target(history(*steps))


def test_rollback_to_a_named_model() -> None:
    rows = history("A", "B", "C", "<B")
    assert target(rows, to="A") == "A"
    assert target(rows, to="C") == "C", "whether its quarantine may be lifted is for the caller to check"
    with pytest.raises(NotFoundError, match="Z was never live in channel prod"):
        target(rows, to="Z")
    with pytest.raises(InputError, match="B is live in channel prod already"):
        target(rows, to="B")


@settings(deadline=None)
@given(st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=12))
def test_repeated_rollbacks_end_and_revive_nothing_that_they_left(promoted: list[str]) -> None:
    rows, left = history(*promoted), set[str]()
    for _ in range(len(promoted) + 1):
        try:
            found = target(rows)
        except NotFoundError:
            break
        assert found not in left
        left.add(rows[-1].model_digest)
        rows.append(replace(rows[-1], sequence=len(rows) + 1, model_digest=found, action="rollback"))
    else:
        pytest.fail("rolling back did not end")
    assert {rows[-1].model_digest, *left} == set(promoted)


def test_audit_13_entries_that_are_no_moves_change_nothing_of_what_was_live() -> None:
    rows = history("A", "B")
    canary = replace(rows[-1], sequence=3, model_digest="C", action="canary")
    assert rollback_target([*rows, canary], rows[-1], ()) == "A"
    assert live_before([*rows, canary], 4) == 2
    assert release_states([*rows, canary]) == release_states(rows)
    with pytest.raises(NotFoundError, match="C was never live"):
        rollback_target([*rows, canary], rows[-1], (), "C")


def test_every_released_model_has_a_state_by_the_release_machine() -> None:
    moves = [("a", "promote"), ("b", "promote"), ("c", "promote"), ("a", "rollback"), ("c", "promote")]
    history = [ReleaseEntry(i, "prod", model, None, action, "ann", 0.0) for i, (model, action) in enumerate(moves, 1)]
    assert release_states([]) == {}
    assert release_states(history[:1]) == {"a": "live"}
    assert release_states(history[:3]) == {"a": "superseded", "b": "superseded", "c": "live"}
    assert release_states(history[:4]) == {"a": "live", "b": "superseded", "c": "rolled_back"}
    assert release_states(history) == {"a": "superseded", "b": "superseded", "c": "live"}
