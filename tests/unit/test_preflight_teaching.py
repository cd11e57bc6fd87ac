"""A teacher that the student cannot learn from: plan, lock and run say so before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from cli_world import World, make_world, write_model

from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import character_tokenizer

RUN = """\
name: taught
owner: ada
seed: 17
model: model:tiny
data: {train: dataset:train, pairs: dataset:pairs}
stages:
  sft: {kind: sft, model: base, data: train, steps: 2}
  judge: {kind: reward_model, model: sft, data: pairs, steps: 2}
  small: {kind: init_model, hidden_size: 16, characters: "0123456789"}
  other: {kind: init_model, hidden_size: 32, characters: "0123456789:"}
  large: {kind: init_model, hidden_size: 32, characters: "0123456789"}
  distill: {kind: distill, model: MODEL, teacher: TEACHER, data: train, steps: 2, max_new_tokens: 4, top_k: 8}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("teaching"), patch)
        made.prepare()
        rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)]
        made.write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        made.ok("asset", "add", "dataset:pairs", "pairs.jsonl")
        for name, characters in (("same", "0123456789?"), ("mate", "0123456789?"), ("other", "9876543210?")):
            write_model(made.root / name, 0.5)
            character_tokenizer(InitModelConfig(characters=characters).characters).save_pretrained(made.root / name)
            made.ok("asset", "add", f"model:{name}", str(made.root / name))
        yield made


def taught(world: World, teacher: str, model: str = "sft") -> str:
    return world.write("taught.yaml", RUN.replace("MODEL", model).replace("TEACHER", teacher))


def refused(world: World, name: str) -> str:
    found = set[str]()
    for verb in ("plan", "lock", "run"):
        result = world(verb, name)
        assert result.exit_code == 2, (verb, result.stdout)
        found.add(result.stderr.strip())
    (line,) = found
    return line.removeprefix(f"error: {name}: stages.distill.")


def written(world: World, old: str, new: str, teacher: str = "sft", model: str = "sft") -> str:
    text = RUN.replace("MODEL", model).replace("TEACHER", teacher)
    assert old in text
    return world.write("taught.yaml", text.replace(old, new))


def test_a_teacher_is_a_stage_or_a_model_by_its_ref(world: World) -> None:
    shown = world.ok("plan", taught(world, "sft", "base"))
    assert "teacher: stage sft" in shown
    assert "teacher: model:same@1" in world.ok("plan", taught(world, "model:same"))
    assert "teacher: stage large" in world.ok("plan", taught(world, "large", "small"))
    planned = world.json("plan", taught(world, "model:same@1"), "-o", "json")
    (stage,) = [one for one in planned["stages"] if one["name"] == "distill"]
    (found,) = [one for one in stage["inputs"] if one["slot"] == "teacher"]
    assert found["name"] == "model:same@1", found


def test_responses_have_room_in_a_model_that_the_run_makes(world: World) -> None:
    """Its context stands in the file, and its tokens are characters, so what can never fit is refused."""
    line = refused(world, written(world, "max_new_tokens: 4", "max_new_tokens: 512", teacher="large", model="small"))
    assert line.startswith("data: dataset:train@1 row 1: prompt of at least "), line
    assert "+ a response of up to 512 exceeds the context of 512; " in line
    assert line.endswith("lower max_new_tokens or raise context_length")
    world.ok("plan", written(world, "max_new_tokens: 4", "max_new_tokens: 400", teacher="large", model="small"))


def test_a_student_that_is_its_own_teacher_is_warned_of(world: World) -> None:
    warned = "distill: teacher sft is the trained model, so the student learns nothing"
    assert warned in " ".join(world.ok("plan", taught(world, "sft")).split())
    registered = " ".join(world.ok("plan", taught(world, "model:tiny", "base")).split())
    assert "distill: teacher model:tiny@1 is the trained model" in registered
    kept = (
        "tuned: {kind: grpo, model: sft, data: train, reward: exact, steps: 2, keep_best: true, probe: {data: train}}"
    )
    more = f"rewards: {{exact: reward:sort}}\nstages:\n  {kept}"
    for teacher, said in (("tuned/best", False), ("tuned", True)):
        name = written(world, "stages:", more, teacher=teacher, model="tuned")
        assert ("the student learns nothing" in " ".join(world.ok("plan", name).split())) == said, teacher
    for teacher, model in (("sft", "base"), ("model:same", "base"), ("large", "small")):
        assert "the student learns nothing" not in world.ok("plan", taught(world, teacher, model))


@pytest.mark.parametrize(
    ("teacher", "model", "told"),
    [
        ("judge", "sft", "teacher: must generate text, got judge, which scores responses; name a model that generates"),
        (
            "other", "small",
            "teacher: must have the student's tokenizer, but other has a different one (vocabularies of 10 and 11 "
            "tokens); name a model of the student's family",
        ),
        ("nobody", "sft", "teacher: no stage 'nobody' makes a model"),
        ("model:nobody", "sft", "teacher: "),
    ],
)  # fmt: skip
def test_one_that_scores_or_speaks_otherwise_or_is_not_there_is_refused(
    world: World, teacher: str, model: str, told: str
) -> None:
    assert refused(world, taught(world, teacher, model)).startswith(told)


def test_the_vocabularies_of_registered_models_are_compared_token_by_token(world: World) -> None:
    name = written(world, "model: model:tiny\n", "model: model:same\n", "model:other", "base")
    assert refused(world, name) == (
        "teacher: must have the student's tokenizer, but model:other@1 has a different one (vocabularies of 18 and 18 "
        "tokens); name a model of the student's family"
    )
    assert "teacher: model:mate@1" in world.ok(
        "plan", written(world, "model: model:tiny\n", "model: model:same\n", "model:mate", "base")
    )


def test_where_a_plan_cannot_tell_the_job_will(world: World) -> None:
    """The base has no `tokenizer.json`."""
    assert "teacher: model:other@1" in world.ok("plan", taught(world, "model:other", "base"))
    shutil.copytree(world.root / "same", world.root / "broken")
    (world.root / "broken" / "tokenizer.json").write_text('{"model": 3}')
    name = written(world, "model: model:tiny\n", "model: ./broken\n", "model:other", "base")
    assert "must have the student's tokenizer" not in world("plan", name).stderr


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("top_k: 8", "top_k: 61", "top_k: must be at most 60, the size of the vocabulary, got 61; lower it"),
        ("top_k: 8", "top_k: 0", "top_k: must be at least 1, got 0"),
        ("teacher: sft, ", "", "teacher: is required; add it"),
        ("top_k: 8", "lag: {steps: 1}", "lag: unknown key here: only policy gradients have it"),
        ("top_k: 8", "divergence: kl", "divergence: "),
        ("top_k: 8", "beta: 0.5", "beta requires divergence: jsd, got beta 0.5 with forward_kl; remove beta"),
        ("top_k: 8", "divergence: jsd, beta: 1", "beta: must be less than 1, got 1"),
        ("top_k: 8", "placement: {critic: {ranks: 1}}", "placement.critic: "),
    ],
)
def test_what_a_stage_says_wrongly_is_one_line(world: World, old: str, new: str, told: str) -> None:
    line = refused(world, written(world, old, new))
    assert told in line, line
    assert "\n" not in line


def test_more_than_the_vocabulary_of_a_model_that_is_yet_to_be_made_is_refused(world: World) -> None:
    line = refused(world, written(world, "top_k: 8", "top_k: 18", "large", "small"))
    assert line == "top_k: must be at most 17, the size of the vocabulary, got 18; lower it"


def test_words_of_others_are_understood(world: World) -> None:
    line: Any = world("plan", written(world, "kind: distill", "kind: gkd")).stderr
    assert "is kind: distill" in line
    assert "teacher" in refused(world, written(world, "teacher: sft", "teacher_model_name_or_path: sft"))


def test_a_judge_may_be_a_registered_model_too(world: World) -> None:
    folder = world.root / "scorer"
    write_model(folder, 0.5)
    config = {**json.loads((folder / "config.json").read_text()), "architectures": ["Qwen3ForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    world.ok("asset", "add", "model:scorer", str(folder))
    grpo = "kind: grpo, model: sft, reward_model: JUDGE, data: train, steps: 2, max_new_tokens: 4"
    whole = "kind: distill, model: sft, teacher: sft, data: train, steps: 2, max_new_tokens: 4, top_k: 8"
    assert "reward_model: model:scorer@1" in world.ok(
        "plan", written(world, whole, grpo.replace("JUDGE", "model:scorer"))
    )
    line = refused(world, written(world, whole, grpo.replace("JUDGE", "model:same")))
    assert line.startswith("reward_model: must score responses, got model:same@1")


FLOW = """\
from posttrain.engine.recipes.dataflow import Dataflow

class Flow(Dataflow):
    pass
"""


@pytest.mark.parametrize(
    ("role", "line"),
    [
        (
            "{model: other}",
            "roles.extra: must have the student's tokenizer, but other has a different one (vocabularies of",
        ),
        ("{model: judge}", "roles.extra: must generate text, got judge, which scores responses"),
        ("{model: sft, head: score}", "roles.extra: must score responses, got sft, which is not a sequence classifier"),
        ("{model: nobody}", "roles.extra: no stage 'nobody' makes a model"),
        ("{model: judge, head: score, trained: true}", "roles.extra: a role with head: score cannot be trained here"),
        ("{head: score}", "roles.extra: a role with head: score needs a model, got none; name a reward model"),
    ],
)
def test_a_declared_role_that_cannot_do_its_work_is_refused(world: World, role: str, line: str) -> None:
    world.write("flow.py", FLOW)
    given = f"recipe: 'flow:Flow', model: small, data: train, steps: 2, roles: {{extra: {role}}}"
    stage = f"distill: {{kind: dataflow, {given}}}"
    assert line in refused(world, world.write("flow.yaml", RUN.rpartition("  distill")[0] + f"  {stage}\n"))
