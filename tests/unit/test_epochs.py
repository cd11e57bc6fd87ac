"""`epochs`: passes over the data, which a plan turns into the steps that the job's cursor takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN as SORT, World, make_world
from hypothesis import given, settings, strategies as st
from test_control_planning import RUN as FILE, changed, resolve

from posttrain.control.plan import Planned, plan_run
from posttrain.data.rows import canonical_row, demonstrations
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import DocumentUnit
from posttrain.domain.manifest import InputRef
from posttrain.domain.rendering import Messages, examples
from posttrain.domain.runspec import parse_run_spec, passes_of
from posttrain.engine.config import STAGE_CONFIGS, TrainingConfig
from posttrain.engine.loop.recipe import Journal
from posttrain.execution.trainers.native import NativeTrainer

TRAINERS = {"native": NativeTrainer()}


@settings(max_examples=200, deadline=None)
@given(epochs=st.integers(1, 5), documents=st.integers(1, 40), per_step=st.integers(1, 50), seed=st.integers(0, 9))
def test_so_many_steps_take_every_document_that_often_and_one_less_does_not(
    epochs: int, documents: int, per_step: int, seed: int
) -> None:
    steps = passes_of(float(epochs), documents, per_step).steps
    journal = Journal(documents, seed)
    seen: Counter[int] = Counter()
    for step in range(steps):
        if step == steps - 1:
            assert sum(seen.values()) < epochs * documents, "one step less is not enough"
        seen.update(row for _, row in journal.take(per_step))
    assert min(seen[row] for row in range(documents)) >= epochs
    assert journal.consumed - epochs * documents < per_step


@pytest.mark.parametrize(
    ("epochs", "documents", "per_step", "steps"),
    [(2.0, 8000, 64, 250), (0.1, 30, 3, 1), (0.3, 10, 1, 3), (1.1, 100, 11, 10), (1e-6, 5, 5, 1), (1.0, 1, 64, 1)],
)
def test_epochs_count_as_the_decimal_that_was_written(epochs: float, documents: int, per_step: int, steps: int) -> None:
    assert passes_of(epochs, documents, per_step).steps == steps


def test_what_plan_prints() -> None:
    assert str(passes_of(2.0, 8000, 64)) == "epochs 2 = 250 steps (8000 documents, 64 a step)"
    assert str(passes_of(0.5, 8, 8)) == "epochs 0.5 = 1 step (8 documents, 8 a step)"


@pytest.mark.parametrize(
    ("row", "documents"),
    [
        ({"prompt": "Q", "completion": "A"}, 1),
        ({"text": "all of it"}, 1),
        ({"messages": [{"role": r, "content": r} for r in ("user", "assistant", "user", "assistant")]}, 2),
        ({"messages": [{"role": r, "content": r} for r in ("system", "user", "assistant")]}, 1),
        ({"prompt": "Q", "completion": "A", "messages": [{"role": "assistant", "content": "x"}] * 3}, 1),
        ({"prompt": "Q", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}] * 2}, 2),
    ],
)
def test_every_assistant_turn_is_a_document_as_it_is_for_the_job(row: dict[str, Any], documents: int) -> None:
    class Letters:
        """As much of a tokenizer as rendering asks for."""

        end: int | None = 0
        raised: tuple[type[Exception], ...] = ()
        templated = True

        def render(self, messages: Messages, *, generate: bool) -> str:
            return "".join(f"{m['role']}{m['content']}" for m in messages)

        def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
            return [[ord(c) for c in text] for text in texts]

    canonical = canonical_row(row, "x", 1)
    assert demonstrations(canonical) == documents
    [turns] = examples(Letters(), [canonical], name="x")
    assert len(turns) == documents


def planned(raw: dict[str, Any], documents: int = 100) -> Planned:
    def count(ref: InputRef, word: str, unit: DocumentUnit) -> int:
        assert ref.name == f"dataset:{word}@1"
        return documents + 7 * (unit == "turn")

    return plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", resolve, TRAINERS, count=count)


def of_stage(name: str, **params: Any) -> dict[str, Any]:
    stage = {key: value for key, value in {**FILE["stages"][name], **params}.items() if value is not None}
    return changed(f"stages.{name}", stage)


def test_epochs_are_the_same_run_as_their_steps() -> None:
    epochs = planned(of_stage("sft", steps=None, epochs=3, batch_size=8))
    assert epochs.passes["sft"].steps == 41  # 3 x 107 / 8, rounded up
    assert epochs.manifest.digest == planned(of_stage("sft", steps=41, batch_size=8)).manifest.digest
    assert epochs.contracts["sft"].work["steps"] == 41
    assert (
        planned(of_stage("grpo", steps=None, epochs=2.0, prompts_per_step=30)).manifest.stage("grpo").params["steps"]
        == 7
    )


def without_length(kind: str) -> dict[str, Any]:
    fields = {"reward": "exact", "recipe": "m:f", "teacher": "base"}
    known = STAGE_CONFIGS[kind].model_fields
    short = {"critic": {"warmup": 0}} if kind == "vapo" else {}  # by default 50 steps
    return {"kind": kind, "data": "train", **short} | {key: value for key, value in fields.items() if key in known}


KINDS = [kind for kind, config in STAGE_CONFIGS.items() if issubclass(config, TrainingConfig)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_takes_exactly_one_of_steps_and_epochs(kind: str) -> None:
    stage = without_length(kind)
    for length, words in (({}, "got neither"), ({"steps": 3, "epochs": 1}, "got both")):
        with pytest.raises(InputError, match=f"exactly one of steps and epochs must be given, {words}") as caught:
            planned(changed("stages.more", {**stage, **length}))
        assert "\n" not in str(caught.value)
    assert planned(changed("stages.more", {**stage, "epochs": 2})).manifest.stage("more").params["steps"] > 0
    for wrong in (0, -1, float("nan"), float("inf"), 1e7, True, "two", [1]):
        with pytest.raises(InputError, match="epochs"):
            planned(changed("stages.more", {**stage, "epochs": wrong}))


def test_an_old_ppo_file_is_told_what_its_epochs_are_called_now() -> None:
    ppo = {"kind": "ppo", "data": "train", "reward": "exact", "steps": 3, "epochs": 2}
    with pytest.raises(InputError, match="ppo_epochs counts passes over a rollout batch"):
        planned(changed("stages.ppo", ppo))
    with pytest.raises(InputError, match=r"critic\.warmup must be < steps \(7\), got 9"):
        planned(changed("stages.ppo", {**ppo, "steps": 7, "epochs": None, "critic": {"warmup": 9}}))
    late = {key: value for key, value in ppo.items() if key != "steps"}
    with pytest.raises(InputError, match=r"critic\.warmup must be < steps \(7\), got 9"):
        planned(changed("stages.ppo", {**late, "critic": {"warmup": 9}}))


def test_more_steps_than_there_may_be_are_refused() -> None:
    with pytest.raises(InputError, match="steps: must be at most 1000000000, got 1"):
        planned(of_stage("sft", steps=None, epochs=1e6, batch_size=1), documents=10**6)


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.mark.slow
def test_plan_prints_what_epochs_come_to_and_the_job_gets_the_steps(world: World) -> None:
    text = SORT.replace("steps: 4, batch_size: 8", "epochs: 2, batch_size: 8")
    world.write("run.yaml", text.replace("steps: 6,", "epochs: 0.5, prompts_per_step: 16,"))
    shown = world.ok("plan", "run.yaml")
    assert "epochs 2 = 15 steps (60 documents, 8 a step)" in shown
    assert "epochs 0.5 = 2 steps (60 documents, 16 a step)" in shown
    stages = {stage["name"]: stage for stage in world.json("plan", "run.yaml")["stages"]}
    assert stages["sft"]["passes"] == {"epochs": 2.0, "steps": 15, "documents": 60, "per_step": 8}
    assert "passes" not in stages["evaluate"]
    world.ok("run", "run.yaml")
    assert {s["name"]: s["steps"] for s in world.json("get", "sort")["stages"]}["sft"] == 15
    world.ok("lock", "run.yaml")
    assert json.loads((world.root / "run.lock.json").read_text())["stages"][0]["params"]["steps"] == 15
    world.ok("run", "run.lock.json")
    assert len(world.json("ls")["runs"]) == 1


def test_conversations_and_files_that_are_not_registered_are_counted(world: World) -> None:
    turns = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    world.write("chat.jsonl", "".join(json.dumps({"messages": turns, "answer": "x"}) + "\n" for _ in range(5)))
    text = SORT.replace("dataset:train", "./chat.jsonl").replace("steps: 4, batch_size: 8", "epochs: 1, batch_size: 4")
    world.write("run.yaml", text)
    assert "epochs 1 = 3 steps (10 documents, 4 a step)" in world.ok("plan", "run.yaml")


def test_a_step_that_takes_more_than_there_is_is_told(world: World) -> None:
    world.write("run.yaml", SORT.replace("batch_size: 8", "batch_size: 61"))
    line = "sft: batch_size is 61, and dataset:train@1 has 60 documents, so every step repeats some of them"
    assert line in " ".join(world.ok("plan", "run.yaml").split())
    world.write(
        "run.yaml",
        SORT.replace("steps: 6,", "steps: 6, prompts_per_step: 99,").replace(
            "steps: 4, batch_size: 8", "steps: 4, batch_size: 60"
        ),
    )
    shown = " ".join(world.ok("plan", "run.yaml").split())
    assert "grpo: prompts_per_step is 99, and dataset:train@1 has 60 documents" in shown
    assert "batch_size is" not in shown


def test_a_data_set_that_cannot_be_counted_is_named(world: World) -> None:
    world.write("none.jsonl", "")
    text = SORT.replace("dataset:train,", "./none.jsonl,").replace("steps: 4, batch_size: 8", "epochs: 1")
    world.write("run.yaml", text)
    result = world("plan", "run.yaml")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
