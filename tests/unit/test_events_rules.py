"""Rules over events: which event a sink is told of, and in which words."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.domain.sinks import ALL, FOR_PEOPLE, OCCASIONS, Envelope, Rule
from posttrain.events.bus import notice, trial
from posttrain.events.ports import matching, occasions

DIGEST = "sha256:" + "a" * 64


def event(kind: str, subject: str, rows: tuple[Any, ...] = (), **audited: Any) -> Envelope:
    told = {**audited, **({"rows": list(rows)} if rows else {})}
    return Envelope(4, 9, kind, subject, "default", "p1", "os", "r1", 1.5, "ab" * 32, told)


def run(state: str, subject: str = "sort-1", reason: str = "JobFailed") -> Envelope:
    return event(f"run.{state}", subject, (["~", "runs", [subject], {"state": state, "reason": reason}],))


GATE = ["~", "stages", ["sort-1", "gate"], {"reason": "GateFailed", "metrics": {"accuracy/estimate": 0.71}}]
ASKED = ["+", "approval_requests", ["default", DIGEST], {"channel": "prod", "asked": {"action": "set_policy"}}]
MOVED = ["+", "releases", ["default", "prod", 4], {"model_digest": DIGEST, "run_id": "sort-1"}]
EXAMPLES: dict[str, tuple[Envelope, str]] = {  # occasion → an event of it, and the command that its message ends with
    "run-ended": (run("failed"), "posttrain why sort-1"),
    "gate-failed": (event("stage.rejected", "sort-1/gate", (GATE,)), "posttrain why sort-1"),
    "budget-80": (
        event("run.budget_warned", "sort-1", share=0.83, tokens=83, of_tokens=100), "posttrain get sort-1",
    ),
    "approval-needed": (event("approval.requested", "prod", (ASKED,)), f"posttrain approve {DIGEST}"),
    "channel-moved": (event("channel.promote", "prod", (MOVED,), previous=None), "posttrain get prod"),
    "dead-letter": (event("run.set_aside", "sort-1"), "posttrain dead sort-1"),
    "sink-paused": (
        event("sink.paused", "chat", (["~", "sinks", ["default", "chat"], {"paused": "failing"}],)),
        "posttrain sink ls, then posttrain sink resume chat",
    ),
}  # fmt: skip


class Known:
    """One run of ann's that releases to prod; no other."""

    def __init__(self, name: str = "sort", owner: str = "ann", channel: str = "prod") -> None:
        self._said = (name, owner, channel)

    def name(self, run_id: str) -> str:
        return self._said[0] if run_id == "sort-1" else ""

    def owner(self, run_id: str) -> str:
        return self._said[1] if run_id == "sort-1" else ""

    def channel(self, run_id: str) -> str:
        return self._said[2] if run_id == "sort-1" else ""


@pytest.mark.parametrize("occasion", FOR_PEOPLE)
def test_each_occasion_has_an_event_and_a_message_with_the_next_command(occasion: str) -> None:
    told, command = EXAMPLES[occasion]
    assert occasion in occasions(told)
    assert matching([Rule(on=(occasion,))], told, Known()) is not None
    assert [one for one in FOR_PEOPLE if one in occasions(told)] == [occasion]
    said = notice(told, words=False)
    assert len(said.lines) == 3
    assert said.lines[2] == f"Next: {command}"
    assert "\n" not in said.subject + "".join(said.lines)
    json.dumps(said.body, allow_nan=False)
    assert (said.body["id"], said.body["sequence"], said.body["type"]) == (told.name, 9, told.kind)


def test_a_run_that_ended_is_told_by_how_it_ended_too() -> None:
    for state in ("succeeded", "failed", "rejected", "stopped"):
        assert occasions(run(state)) == {ALL, "run-ended", f"run-{state}"}
    assert occasions(run("running")) == {ALL}


def test_a_stage_that_was_set_aside_is_told_once() -> None:
    row = ["~", "stages", ["sort-1", "sft"], {"reason": "SetAside"}]
    assert "dead-letter" in occasions(event("stage.updated", "sort-1/sft", (row,)))
    assert occasions(event("run.updated", "sort-1", (["~", "runs", ["sort-1"], {"reason": "SetAside"}],))) == {ALL}
    assert occasions(event("sink.paused", "c", (["~", "sinks", ["default", "c"], {"paused": "person"}],))) == {ALL}


def test_a_release_stage_that_was_turned_away_is_no_gate_that_failed() -> None:
    row = ["~", "stages", ["sort-1", "release"], {"reason": "ChannelFrozen"}]
    assert occasions(event("stage.rejected", "sort-1/release", (row,))) == {ALL}


WORDS = st.sampled_from(["", "sort", "sort*", "s?rt", "[rs]ort", "*", "other", "SORT", "so"])
EVENTS = st.sampled_from(
    [one for one, _ in EXAMPLES.values()] + [run("stopped", "other-2"), event("token.issued", "t")]
)


@given(
    st.builds(
        Rule,
        st.lists(st.sampled_from(OCCASIONS), min_size=1, max_size=3).map(tuple),
        WORDS,
        st.sampled_from(["", "ann", "bob"]),
        st.sampled_from(["", "prod", "dev"]),
        st.booleans(),
    ),
    EVENTS,
)
def test_a_rule_says_what_each_of_its_limits_says(rule: Rule, told: Envelope) -> None:
    known = Known()
    runs = {"approval.requested": "", "sink.paused": "", "token.issued": ""}
    about = runs.get(told.kind, "sort-1" if told.kind.startswith("channel") else told.subject.partition("/")[0])
    channel = "prod" if told.kind.startswith(("channel.", "approval.")) else known.channel(about)
    wanted = bool(occasions(told) & set(rule.on))
    wanted &= not rule.run or (about != "" and fnmatchcase(known.name(about), rule.run))
    wanted &= not rule.owner or (about != "" and known.owner(about) == rule.owner)
    wanted &= not rule.channel or channel == rule.channel
    assert (matching([rule], told, known) is not None) == wanted
    # a limit that is taken away tells no less, and two rules tell what either does
    wider = replace(rule, run="", owner="", channel="")
    assert not wanted or matching([wider], told, known) is not None
    assert (matching([rule, wider], told, known) is None) == (matching([wider], told, known) is None)
    assert Rule.of(rule.to_json()) == replace(rule, on=tuple(dict.fromkeys(rule.on)))


def test_nothing_is_asked_of_a_run_where_no_rule_asks() -> None:
    class Untouched:
        def name(self, run_id: str) -> str:
            raise AssertionError(run_id)

        owner = channel = name

    assert matching([Rule()], run("failed"), Untouched()) == Rule()


def test_words_are_sent_where_a_rule_says_so_and_nowhere_else() -> None:
    told = replace(run("failed"), words={"rows": [{"message": "ann's file is bad", "owner": "ann"}]})
    assert "ann" not in json.dumps(notice(told, words=False).body)
    full = notice(told, words=True)
    assert "ann's file is bad" in full.lines[1]
    assert full.body["words"] == told.words
    both = [Rule(on=("run-ended",)), Rule(on=("run-failed",), words=True)]
    found = matching(both, told, Known())
    assert found is not None
    assert found.words


def test_a_test_says_that_it_is_one() -> None:
    said = trial("chat", "default", "00ff", 1.0)
    assert (said.id, said.sequence, said.body["test"], said.body["type"]) == ("test_00ff", 0, True, "sink.test")
    assert "test" in said.subject


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on": ["run-eneded"]}, "did you mean 'run-ended'"),
        ({"runs": "x"}, "got 'runs'"),
        ({"on": ["a"]}, "must be one of"),
    ],
)
def test_a_rule_that_is_none_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Rule.of(given)


def test_a_rule_that_says_nothing_tells_what_people_want_to_know() -> None:
    assert Rule.of({}) == Rule(on=FOR_PEOPLE)
