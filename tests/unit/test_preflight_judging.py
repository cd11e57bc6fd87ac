"""A model that makes text judges nothing: plan, lock and run say so before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.domain.rendering import is_classifier

RUN = """\
name: judged
owner: ada
seed: 17
model: model:tiny
data: {train: dataset:train}
stages:
  sft: {kind: sft, model: base, data: train, steps: 2}
  judge: {kind: reward_model, model: sft, data: train, steps: 2}
  grpo: {kind: grpo, model: sft, data: train, reward_model: JUDGE, steps: 2, max_new_tokens: 4}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("judging"), patch)
        made.prepare()
        rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)]
        made.write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        made.ok("asset", "add", "dataset:pairs", "pairs.jsonl")
        yield made


def judged(world: World, judge: str) -> str:
    text = RUN.replace("{train: dataset:train}", "{train: dataset:train, pairs: dataset:pairs}")
    text = text.replace("model: sft, data: train, steps: 2}\n  grpo", "model: sft, data: pairs, steps: 2}\n  grpo")
    return world.write("judged.yaml", text.replace("JUDGE", judge))


@pytest.mark.parametrize(("judge", "named"), [("sft", "sft"), ("base", "model:tiny@1")])
def test_a_model_that_makes_text_is_refused(world: World, judge: str, named: str) -> None:
    name = judged(world, judge)
    for verb in ("plan", "lock", "run"):
        result = world(verb, name)
        assert result.exit_code == 2, (verb, result.stdout)
        assert result.stderr.strip() == (
            f"error: judged.yaml: stages.grpo.reward_model: must score responses, got {named}, which is "
            "not a sequence classifier; name a stage of kind reward_model, or a model that such a stage made"
        )


def test_one_that_scores_is_taken(world: World) -> None:
    assert "grpo" in world.ok("plan", judged(world, "judge"))


@pytest.mark.parametrize(
    ("told", "scores"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, True),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({"architectures": "Qwen3ForSequenceClassification"}, False),
        ({}, False),
    ],
)
def test_a_model_says_whether_it_scores(told: dict[str, Any], scores: bool) -> None:
    assert is_classifier(told) == scores


def test_a_base_on_disk_is_looked_at_too(world: World) -> None:
    """Also where the stage's own model is another stage's."""
    name = judged(world, "base")
    text = (world.root / name).read_text().replace("model: model:tiny", "model: ./base")
    result = world("plan", world.write("on-disk.yaml", text))
    assert result.exit_code == 2
    assert "stages.grpo.reward_model: must score responses" in result.stderr
