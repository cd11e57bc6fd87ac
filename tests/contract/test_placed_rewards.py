"""Rewards that say where they were earned: what a reward's process takes, refuses, and tells of turns."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from reward_bench import Opener, call

from posttrain.sandbox.port import RewardCall, RewardError, ScriptedReward, part_of
from posttrain.sandbox.process import WeightedReward
from posttrain.sandbox.protocol import MAX_PLACES, AnswerError, MalformedError, plain, receive

TALK = RewardCall(
    ["Q", "Q"],
    ["5>7", "7"],
    [{"answer": "7"}, {"answer": "7"}],
    completion_ids=[[5, 11, 7, 2], [7, 2]],
    turns=[["5", "7"], ["7"]],
    turn_spans=[[[0, 1], [2, 4]], [[0, 2]]],
)


def test_turns_are_told_and_their_scores_stand_at_their_ends(opened: Opener) -> None:
    reward = opened(
        "def score(completion, turns, answer):\n"
        "    return {'turn_scores': [float(said == answer) / 4 + 0.5 for said in turns], 'tries': len(turns)}\n"
    )
    scores = reward.score(TALK)
    assert [(s.score, dict(s.at), dict(s.components)) for s in scores] == [
        (1.25, {0: 0.5, 3: 0.75}, {"tries": 2.0}),
        (0.75, {}, {"tries": 1.0}),
    ]


def test_what_is_one_turn_needs_no_ends(opened: Opener) -> None:
    reward = opened("def score(completion, turns):\n    return {'turn_scores': [len(turns[0]) / 4]}\n")
    (score,) = reward.score(call("abc"))
    assert (score.score, dict(score.at)) == (0.75, {}), "it stands at the response's end, as every other score does"


def test_tokens_and_the_rest_at_the_end(opened: Opener) -> None:
    reward = opened(
        "import numpy\ndef score(completion, completion_ids):\n"
        "    quarter = numpy.float32(0.25)\n"
        "    return {'score': 1.0, 'token_scores': {i: quarter for i, t in enumerate(completion_ids) if t == 7}}\n"
    )
    assert [(s.score, dict(s.at)) for s in reward.score(TALK)] == [(1.0, {2: 0.25}), (1.0, {0: 0.25})]


def test_turns_and_tokens_add_up_where_they_meet(opened: Opener) -> None:
    reward = opened(
        "def score(completion, turns):\n    return {'turn_scores': [0.5] * len(turns), 'token_scores': {'0': 2}}\n"
    )
    assert [(s.score, dict(s.at)) for s in reward.score(TALK)] == [(3.0, {0: 2.5, 3: 0.5}), (2.5, {0: 2.0})]


@pytest.mark.parametrize("form", ["trl", "column"])
def test_who_else_is_told_of_turns(opened: Opener, form: str) -> None:
    """A function of whole batches is; and a column of the data set that has this name goes before."""
    if form == "trl":
        reward = opened("def score(prompts, completions, turns, **kwargs):\n    return [len(said) for said in turns]\n")
        assert [s.score for s in reward.score(TALK)] == [2.0, 1.0]
        assert [s.score for s in reward.score(call("a", "b"))] == [1.0, 1.0]
    else:
        reward = opened("def score(completion, turns):\n    return float(turns)\n")
        assert [s.score for s in reward.score(call("a", turns=3))] == [3.0]


WRONG = {
    "{'turn_scores': [0.5]}": r"turn_scores for each turn of IT \(2\), got 1",
    "{'turn_scores': [0.5, 1.0, 2.0]}": r"turn_scores for each turn of IT \(2\), got 3",
    "{'turn_scores': [0.5, None]}": "finite numbers within ±1e\\+30 as turn_scores of IT, got NoneType",
    "{'turn_scores': 3}": "turn_scores as a list of numbers for IT, got int",
    "{'turn_scores': (x for x in [0.5, 1.0])}": "turn_scores as a list of numbers for IT, got generator",
    "{'turn_scores': {0: 0.2, 1: 1.0}}": "turn_scores as a list of numbers for IT, got dict",
    "{'turn_scores': b'ab'}": "turn_scores as a list of numbers for IT, got bytes",
    "{'turn_scores': [0.5, 1e300]}": r"finite numbers within ±1e\+30 as turn_scores of IT, got 1e\+300",
    "{'score': 1e300}": r"a score within ±1e\+30 for IT, got 1e\+300; scale it",
    "{'token_scores': {0: 10**400}}": r"finite numbers within ±1e\+30 as token_scores of IT, got inf",
    "{'token_scores': {4: 0.5}}": "token_scores of tokens 0 to 3 of IT, got a score of token 4",
    "{'token_scores': {1: 0.5}}": "token_scores of tokens that the policy sampled for IT, got a score of token 1",
    "{'token_scores': {1e300: 0.5}}": "token_scores of tokens 0 to 3 of IT, got a score of token 1000000",
    "{'token_scores': [0.5]}": "token_scores as a map of tokens to numbers for IT, got list",
    "{'token_scores': {-1: 0.5}}": "token_scores of tokens by number from 0 for IT, got -1",
    "{'token_scores': {0.5: 0.5}}": "token_scores of tokens by number from 0 for IT, got 0.5",
    "{'token_scores': {'end': 0.5}}": "token_scores of tokens by number from 0 for IT, got 'end'",
    "{'token_scores': {0: float('nan')}}": "finite numbers within ±1e\\+30 as token_scores of IT, got nan",
    "{'score': None, 'turn_scores': [0.5, 0.5]}": "a number for IT, got NoneType",
    "{'bonus': 1.0}": r"`score`, `turn_scores` or `token_scores` in its mapping for IT, got \['bonus'\]",
}


@pytest.mark.parametrize("answer", WRONG)
def test_places_that_are_none_are_one_line(opened: Opener, answer: str) -> None:
    reward = opened(f"def score(completion):\n    return {answer} if completion == '5>7' else 1.0\n")
    with pytest.raises(
        RewardError, match=r"reward\.py:1 \(score\) must return " + WRONG[answer].replace("IT", "completion 0 '5>7'")
    ):
        reward.score(TALK)
    assert reward.score(TALK, allowed=1)[1].score == 1.0, "the others are scored all the same"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    "placed",
    ["[[0]]", "[0.5]", '{"0": 1}', "[[-1, 1.0]]", "[[0, null]]", "[[true, 1.0]]", "[[0, 1e999]]", "null"],
)  # fmt: skip
def test_the_job_believes_no_worker(pair: tuple[socket.socket, socket.socket], placed: str) -> None:
    ours, theirs = pair
    said = b'{"id": 1, "answers": [{"at": 0, "score": 1.0, "components": {}, "placed": %s}]}' % placed.encode()
    theirs.sendall(struct.pack(">Q", len(said)) + said)
    with pytest.raises(MalformedError):
        receive(ours, [1])


def test_weights_weigh_what_was_earned_on_the_way(opened: Opener) -> None:
    early = opened("def score(completion):\n    return {'score': 1.0, 'token_scores': {0: 0.5, 2: 0.25}}\n")
    late = opened("def score(completion):\n    return {'score': 2.0, 'token_scores': {2: 1.0}}\n")
    plain = ScriptedReward(lambda call: [4.0 for _ in call.completions])
    both = WeightedReward({"early": (2.0, early), "late": (-0.5, late), "plain": (1.0, plain)})
    for score in both.score(part_of(TALK, [0, 0])):
        assert score.score == 2.0 - 1.0 + 4.0
        assert dict(score.at) == {0: 1.0, 2: 0.5 - 0.5}
        assert {name: part.score for name, part in score.parts.items()} == {"early": 1.0, "late": 2.0, "plain": 4.0}


def test_a_dense_reward_of_a_long_response_is_one_message(opened: Opener) -> None:
    """A number at each of ten thousand tokens, with all its digits."""
    dense = "{i: 1 / (i + 3) for i in range(10_000)}"
    reward = opened(f"def score(completion, completion_ids):\n    return {{'token_scores': {dense}}}\n")
    (score,) = reward.score(RewardCall(["Q"], ["x"], [{}], completion_ids=[[5] * 10_000]))
    assert len(score.at) == 10_000
    assert score.at[9_999] == 1 / 10_002


def test_places_are_bounded() -> None:
    """Of a response whose length nobody told, too."""
    with pytest.raises(AnswerError, match=f"scores of at most {MAX_PLACES} tokens of it, got {MAX_PLACES + 1}"):
        plain({"token_scores": dict.fromkeys(range(MAX_PLACES + 1), 0.5)}, "it", [])
    with pytest.raises(AnswerError, match="tokens 0 to 9999999 of it, got a score of token 10000000"):
        plain({"token_scores": {10**7: 0.5}}, "it", [])
    assert plain({"turn_scores": np.array([0.5])}, "it", [])["score"] == 0.5
