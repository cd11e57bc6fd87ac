"""Rewards that stand at tokens: which they reach, what GAE makes of them, and what is said where nobody reads them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, EvenTokens, inline, scalar
from test_engine_turns import SEEN, Seen, Talk, sometimes
from test_train_job import Shop, model_digest, run

from posttrain.cli.trace import token_table
from posttrain.domain.jobs import Fact, InputBlob, Note, Sample
from posttrain.engine.algorithms.objectives import kl_estimate, kl_rewards, score_rewards
from posttrain.engine.config import CriticConfig, PPOConfig, PPOKLConfig
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.recipe import Held, read_held, write_held
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.algorithm import ScoredGroup, pack
from posttrain.engine.samples import Prompt, Segment, Trajectory, groups_of
from posttrain.engine.scores import RewardScorer, Stretch
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import Trace
from posttrain.sandbox.port import RewardError, Score, ScriptedReward
from posttrain.sandbox.process import open_reward
from posttrain.store.attempts import AttemptFolder
from posttrain.views.trace import RecordedSample

VALUES = st.floats(-8, 8, width=16)


@given(st.data())
def test_the_sum_of_a_documents_rewards_is_its_score(data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6).filter(any), min_size=1, max_size=4))
    scores = torch.tensor([data.draw(VALUES) for _ in masks])
    mask = torch.tensor([m for row in masks for m in row])
    lengths = [len(row) for row in masks]
    earned = torch.tensor([data.draw(VALUES) if m else 0.0 for m in mask.tolist()])
    found = score_rewards(scores, mask, lengths, earned)
    start = 0
    for row, score in zip(masks, scores.tolist(), strict=True):
        here = found[start : start + len(row)].tolist()
        end = max(t for t, m in enumerate(row) if m)
        before = [t for t in range(len(row)) if t != end]
        assert [here[t] for t in before] == [float(earned[start + t]) for t in before]
        assert sum(here) == pytest.approx(score, abs=1e-4)
        start += len(row)


def test_without_places_the_bits_are_those_of_before() -> None:
    scores, mask = torch.tensor([0.1, -3.7]), torch.tensor([False, True, True, True])
    plain, none = (score_rewards(scores, mask, [2, 2], earned) for earned in (None, torch.zeros(4)))
    assert torch.equal(plain, none)
    assert plain.tolist() == [0, float(scores[0]), 0, float(scores[1])]


def test_a_score_outside_the_response_is_refused() -> None:
    with pytest.raises(ValueError, match="token scores must belong to response tokens, got a score at token 1; move"):
        score_rewards(torch.ones(1), torch.tensor([False, False, True]), [3], torch.tensor([0.0, 0.5, 0.0]))
    with pytest.raises(ValueError, match="got a score at token 0"):
        kl_rewards(*[torch.zeros(1)] * 2, torch.tensor([False]), torch.ones(1), [1], torch.ones(1), coefficient=0.1)


def talked(*turns: Sequence[int], observed: Sequence[int] = (7, 8)) -> Trajectory:
    """A prompt of two tokens, then what was said, with an observation between two."""
    segments = [Segment(np.array([1, 2], np.int32), "prompt")]
    for at, said in enumerate(turns):
        if at:
            segments.append(Segment(np.array(observed, np.int32), "observed"))
        segments.append(Segment(np.array(said, np.int32), "sampled", np.full(len(said), -0.5, np.float32)))
    return Trajectory(tuple(segments))


def test_a_batch_has_them_at_their_tokens() -> None:
    sequences = [talked([3, 4], [5, 6, 2]), talked([9, 2])]
    scores = (Score(1.0, at={1: 0.25, 6: 0.5}), Score(2.0))
    (group,) = groups_of(sequences, [0], 2)
    batch = pack([ScoredGroup(Prompt((1, 2)), group, scores)])
    assert batch is not None
    assert batch.column("token_scores").tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0.5, 0, 0, 0, 0]
    assert [t.turn_spans for t in sequences] == [[(0, 2), (4, 7)], [(0, 2)]]
    plain = pack([ScoredGroup(Prompt((1, 2)), group, (Score(1.0), Score(2.0)))])
    assert plain is not None
    assert "token_scores" not in plain.token_columns


def test_what_waits_in_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    (group,) = groups_of([talked([3, 2]), talked([4, 2])], [5], 2)
    scores = (Score(1.0, {"a": 2.0}, at={0: 0.25}, parts={"x": Score(1.0, at={1: -1.5})}), Score(None))
    write_held(tmp_path, [Held(5, 1, 0, ScoredGroup(Prompt((1, 2)), group, scores, 1))], (), {})
    ((held,), _, _) = read_held(tmp_path, lambda key: Prompt((1, 2)))
    assert held.group.scores == scores


class Placed(EvenTokens):
    """A score that was earned in part at the end of every turn, and in part at the first token."""

    def scores(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(1.5, at=self.at(t)) for t in trajectories]

    @staticmethod
    def at(trajectory: Trajectory) -> Mapping[int, float]:
        earned = {0: 0.125}
        for turn, (_, stop) in enumerate(trajectory.turn_spans):
            end = stop - 1
            earned[end] = earned.get(end, 0.0) + 0.25 * (turn + 1)
        return earned


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_gae_over_rewards_of_turns(place: str) -> None:
    """Against the plain loop in float64, over two turns with a hole between them."""
    coefficient = 0.1
    config = PPOConfig(
        data="d", reward="r", steps=1, prompts_per_step=4, group_size=3, max_new_tokens=20,
        critic=CriticConfig(optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2)),
        kl=PPOKLConfig(coefficient=coefficient, place=place, estimator="k1" if place == "reward" else "k3"),
        gae={"gamma": 0.9, "lam": 0.8, "whiten": False},
        optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2),
    )  # fmt: skip
    roles = open_roles(
        config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline(), sources={"critic": scalar()}
    )
    recipe = OnPolicy(config, Talk(config), roles, PROMPTS, Placed(), 11, environment=Seen(sometimes))
    facts: list[Fact] = []
    recipe.step(0, Trace(facts.append, 0))
    ((asked, credited),) = recipe._algorithm.credited  # type: ignore[attr-defined]
    for sample in (fact for fact in facts if isinstance(fact, Sample)):
        shown(sample)
    starts, turns = np.cumsum([0, *asked.lengths]), set()
    for begin, end in itertools.pairwise(starts):
        mask = asked.response_mask[begin:end]
        at = mask.nonzero()[:, 0].tolist()
        gaps = [t for t, after in itertools.pairwise(at) if after != t + 1]
        turns.add(len(gaps) + 1)
        old, anchor = (
            asked.column(name)[begin:end][at].double() for name in ("behaviour_logprobs", "reference_logprobs")
        )
        reward = [0.0] * len(at)
        if place == "reward":
            kl = kl_estimate(old, anchor, torch.ones(len(at), dtype=torch.bool), "k1").double()
            reward = (-coefficient * kl).tolist()
        earned = {at[0]: 0.125}
        for turn, last in enumerate([*gaps, at[-1]]):
            earned[last] = earned.get(last, 0.0) + 0.25 * (turn + 1)
        earned[at[-1]] += 1.5 - sum(earned.values())
        reward = [r + earned.get(t, 0.0) for r, t in zip(reward, at, strict=True)]
        value = asked.column("values")[begin:end][at].double().tolist()
        running, expected = 0.0, []
        for t in reversed(range(len(at))):
            after = value[t + 1] if t + 1 < len(at) else 0.0
            running = reward[t] + 0.9 * after - value[t] + 0.9 * 0.8 * running
            expected.insert(0, running)
        found = credited.column("advantages")[begin:end]
        assert found[at].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert found[~mask].abs().max() == 0
        assert len(SEEN) == sum(b - a - 1 for a, b in itertools.pairwise(at)) or not gaps
    assert turns == {1, 2}


def shown(sample: Sample) -> None:
    """What a trace tells of each token of a response stands at that token, whether or not something was observed."""
    tokens = len(sample.tokens)
    seen = list(sample.observed) or [False] * tokens
    columns = (sample.advantages, sample.logprobs, sample.ratios, sample.values, sample.returns, sample.earned)
    assert {len(column) for column in columns} == {len(seen)} == {tokens}
    assert len(sample.clipped) == tokens
    for place, observed in enumerate(seen):
        assert all((column[place] == 0) == observed for column in (sample.ratios, sample.logprobs))
        if observed:
            assert sample.tokens[place] in SEEN
            assert not any(column[place] for column in columns)
    assert sample.earned[0] in (0.125, 0.375, 1.5)
    assert sum(sample.earned) == pytest.approx(1.5)
    one = RecordedSample("ppo", 1, sample, pieces=())
    table = token_table(one)
    titles = [str(column.header) for column in table.columns]
    cells = {title: list(column.cells) for title, column in zip(titles, table.columns, strict=True)}
    assert [bool(str(cell)) for cell in cells["advantage"]] == [not observed for observed in seen]
    assert "earned" in titles
    if any(seen):
        assert [str(cell) == "observed" for cell in cells["policy"]] == seen


def scored(at: Mapping[int, float], *, allowed: float = 0.0) -> Sequence[Score]:
    """What becomes of places in a response of two turns, beside one that has a score alone."""
    reward = ScriptedReward(lambda call: [Score(1.0, at=at), Score(0.5)][: len(call)])
    scorer = RewardScorer(reward, TOKENIZER, errors_max=allowed)
    return scorer.begin([Prompt((1, 2))] * 2, [talked([3, 4], [5, 2])] * 2, Stretch(0, 2)).result()


def test_a_token_that_nobody_sampled_earns_nothing() -> None:
    assert scored({1: 0.25, 5: 1.0})[0].at == {1: 0.25, 5: 1.0}
    for at, line in (
        ({6: 1.0}, r"the reward must return token_scores of tokens 0 to 5, got a score of token 6"),
        ({2: 1.0}, r"token_scores of tokens that the policy sampled, got a score of token 2, which is in an obs"),
    ):
        with pytest.raises(RewardError, match=line):
            scored(at)
        failed, other = scored(at, allowed=0.5)
        assert (failed.status, failed.score, other.score) == ("error", None, 0.5), "it is left out of its group"


# --- through the job --------------------------------------------------------------------------------------------------

REWARDS = """
def earned(completion, completion_ids):
    wanted = {i: 0.5 for i, token in enumerate(completion_ids) if token % 2}
    return {"score": sum(wanted.values()), "token_scores": wanted}


def late(completion, completion_ids):
    return sum(0.5 for token in completion_ids if token % 2)
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    made = Shop(tmp_path_factory.mktemp("shop"))
    blob = made.blobs.put(REWARDS.encode())
    for name in ("earned", "late"):
        made.inputs[f"reward:{name}"] = InputBlob(
            blob, "file", "path:reward.py", {"entry": name, "source": "reward.py"}
        )
    return made


def trained(shop: Shop, kind: str, reward: str) -> tuple[AttemptFolder, str]:
    options: dict[str, Any] = {
        "model": "model", "data": "data", "reward": {reward: 1.0}, "steps": 2, "prompts_per_step": 2, "group_size": 3,
        "max_new_tokens": 6, "optimizer": {"learning_rate": 1e-2},
    }  # fmt: skip
    attempt = shop.attempt(f"{kind}-{reward}", kind, options, ["model", "data", f"reward:{reward}"])
    result = run(attempt)
    assert result.status == "succeeded", result.failure
    return attempt, model_digest(attempt)


@pytest.mark.parametrize("kind", ["ppo", "reinforce_plus_plus", "grpo"])
def test_who_reads_them_learns_otherwise_and_who_does_not_says_so(shop: Shop, kind: str) -> None:
    placed, late = (trained(shop, kind, name) for name in ("earned", "late"))
    told = [
        fact.message
        for fact in placed[0].facts()[0]
        if isinstance(fact, Note) and "scores of single tokens" in fact.message
    ]
    assert not any("scores of single tokens" in f.message for f in late[0].facts()[0] if isinstance(f, Note))
    if kind == "grpo":
        assert len(told) == 1, "once"
        assert placed[1] == late[1], "the sum counts"
    else:
        assert not told
        assert placed[1] != late[1], "a token is credited with what follows it"


def test_a_reward_that_indexes_its_tokens_and_turns_passes_the_smoke_test(shop: Shop) -> None:
    """It is asked once before step 1, with tokens and as many turns as the stage has."""
    source = (
        "def last(completion, completion_ids):\n    return {'token_scores': {len(completion_ids) - 1: 1.0}}\n\n\n"
        "def two(completion, turns):\n    first, second = turns\n    return float(len(first + second))\n"
    )
    blob = shop.blobs.put(source.encode())
    for name in ("last", "two"):
        shop.inputs[f"reward:{name}"] = InputBlob(
            blob, "file", "path:reward.py", {"entry": name, "source": "reward.py"}
        )
    trained(shop, "ppo", "last")
    reward = open_reward(blob_file(shop, source), "two", timeout=600.0)
    try:
        RewardScorer(reward, TOKENIZER, turns=2).smoke_test([Prompt((1, 2), row={"answer": "12"})])
    finally:
        reward.close()


def blob_file(shop: Shop, source: str) -> Path:
    path = shop.root / "two.py"
    path.write_text(source)
    return path
