"""What an order and its parameters say reaches what they speak of: through whole training jobs, tiny ones."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from checkpoints import latest_checkpoint
from test_train_job import ROWS, TINY, Shop, model_digest, run

from posttrain.domain.errors import FailureClass, InputError
from posttrain.domain.jobs import InputBlob, JobResult, Metric, Note, Progress
from posttrain.engine.groups.port import RankContext
from posttrain.engine.groups.worker_group import Deadlines
from posttrain.engine.loop import controller
from posttrain.engine.loop.controller import Order
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.rollout import worker
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.port import PromptBatch, SamplingParams
from posttrain.engine.rollout.worker import SilentError
from posttrain.jobs import entry
from posttrain.jobs.bodies import rewards, training
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import put_tree

TWO = "def first(completion):\n    return 1.0\n\n\ndef second(completion):\n    return 2.0\n"
ODD = "def score(completions, **rest):\n    return float(isinstance(completions, str))\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def shop(made: Shop) -> Shop:
    """A shop whose inputs a test may change."""
    mine = object.__new__(Shop)
    mine.root, mine.blobs, mine.inputs = made.root, made.blobs, dict(made.inputs)
    return mine


def refused(result: JobResult, kind: FailureClass, *words: str) -> None:
    assert result.failure is not None
    assert result.failure.kind is kind
    for word in words:
        assert word in result.failure.message


def watched(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every call of `place.name`, which goes on to work."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    real: Callable[..., Any] = getattr(place, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append((arguments, named))
        return real(*arguments, **named)

    monkeypatch.setattr(place, name, call)
    return calls


class TestReward:
    def test_the_function_that_was_registered_is_called(self, shop: Shop) -> None:
        shop.put("reward", TWO, entry="second", source="reward.py")
        result = run(shop.grpo("entry", params={"steps": 1}))
        assert result.metrics["reward/mean"] == 2.0

    def test_it_is_called_in_the_dialect_it_was_registered_with(self, shop: Shop) -> None:
        shop.put("reward", ODD, entry="score", dialect="areal", source="reward.py")
        result = run(shop.grpo("dialect", params={"steps": 1}))
        assert result.metrics["reward/mean"] == 1.0

    def test_its_time_out_is_the_stages(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = watched(monkeypatch, rewards, "open_reward")
        run(shop.grpo("patient", params={"steps": 1, "reward_timeout": 77.5}))
        assert [named["timeout"] for _, named in calls] == [77.5]

    def test_attempts_cache_and_store_are_hidden_from_it(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = watched(monkeypatch, rewards, "open_reward")
        attempt = shop.grpo("hidden", params={"steps": 1})
        run(attempt)
        [(_, named)] = calls
        assert {attempt.path, shop.root / "cache", shop.root / "blobs"} <= {*named["hidden"]}

    def test_one_that_is_broken_costs_no_token(self, shop: Shop) -> None:
        shop.put("reward", "def score(completion):\n    return 1 / 0\n", entry="score")
        result = run(shop.grpo("broken"))
        refused(result, FailureClass.BAD_INPUT, "ZeroDivisionError")
        assert result.tokens == 0


TALK = """
import os
from functools import partial

from posttrain.engine.algorithms.objectives import PolicyObjective
from posttrain.engine.recipes.algorithm import Update
from posttrain.engine.recipes.dataflow import Dataflow


class Talk(Dataflow):
    def observe(self, row, responses):
        if len(responses[0]) % 2:
            raise ValueError(f"{self.config.settings['word']} {'HUSH' in os.environ} {os.getcwd()}")
        return row["answer"]

    def credit(self, batch):
        return batch.with_columns(advantages=batch.spread(batch.column("reward")))

    def updates(self, step):
        return (Update("policy", partial(PolicyObjective, clip_low=0.2, clip_high=0.2)),)
"""


class TestObserver:
    def test_observe_runs_in_a_cell_as_the_stage_says(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HUSH", "secret")
        before = {child.pid for child in psutil.Process().children()}
        calls = watched(monkeypatch, rewards, "ProcessObserver")
        shop.put("recipe", TALK, source="talk.py", entry="Talk")
        params = {
            "model": "model", "data": "data", "reward": "reward", "recipe": "talk:Talk", "settings": {"word": "told"},
            "turns": 2, "observation_tokens": 2, "observe_timeout": 77.5, "observe_concurrency": 3, "steps": 1,
            "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4, "reward_errors_max": 1.0,
        }  # fmt: skip
        attempt = shop.attempt("talk", "dataflow", params, ["model", "data", "reward", "recipe"])
        result = run(attempt)
        assert result.status == "succeeded", result.failure
        [(_, named)] = calls
        assert (named["timeout"], named["concurrency"], named["confined"]) == (77.5, 3, True)
        assert {attempt.path, shop.root / "cache", shop.root / "blobs"} <= {*named["hidden"]}
        facts = attempt.facts()[0]
        lines = {fact.message.partition(" raised ")[2].partition(";")[0] for fact in facts if isinstance(fact, Note)}
        assert lines == {"ValueError: told False /tmp"}
        left = [child for child in psutil.Process().children() if child.pid not in before]
        assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]

    def test_an_observe_that_cannot_be_confined_is_refused_unless_it_is_trusted(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = watched(monkeypatch, rewards, "ProcessObserver")
        config = SimpleNamespace(observe_timeout=90.0, observe_concurrency=1)
        for trusted in (False, True):
            order = SimpleNamespace(inputs={}, kind="grpo", params={}, trust_rewards=trusted, cache_dir=str(shop.root))
            job = SimpleNamespace(order=order, folder=shop.root, blobs=shop.blobs)
            with pytest.raises(InputError, match="observe: ValidationError"), ExitStack() as stack:
                rewards.open_observer(job, config, "observe", stack)  # type: ignore[arg-type]
        assert [named["confined"] for _, named in calls] == [True, False]


class TestDeadlines:
    def test_workers_calls_and_engines_have_the_time_that_the_stage_gives(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened, asked = watched(monkeypatch, training, "ResourcePool"), watched(monkeypatch, worker, "answers")
        waits = {"start_timeout": "20m", "call_timeout": 7777}
        assert run(shop.grpo("waits", params={"steps": 1, "runtime": waits})).status == "succeeded"
        assert [named["deadlines"] for _, named in opened] == [Deadlines(1200.0, 7777.0)]
        assert {words[3] for words, _ in asked} == {7777.0}

    def test_what_is_left_open_is_chosen_and_told(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = watched(monkeypatch, training, "ResourcePool")
        attempt = shop.grpo("usual", params={"steps": 1})
        assert run(attempt).status == "succeeded"
        assert [named["deadlines"] for _, named in opened] == [Deadlines(300.0, 3600.0)]
        told = [fact.values for fact in attempt.facts()[0] if isinstance(fact, Metric)]
        assert told[0]["sizes/call_timeout"] == 3600.0

    def test_an_engine_that_says_nothing_is_given_up_when_its_time_is_over(self) -> None:
        class Mute(ScriptedRollout):
            def completed(self, timeout: float) -> list[Any]:
                return []

        model = adopt_module(initial_model(TINY, character_tokenizer("ab"), 0))
        context = RankContext()
        context.lend(model)
        mute = Mute(lambda prompt, sample: [1])
        role = worker.RolloutWorker(context, None, mute, patience=0.01)
        drawn = SamplingParams(max_new_tokens=4)
        with pytest.raises(SilentError, match=r"scripted returned no sample within 0\.01 s; waiting: 2"):
            list(role.feed(PromptBatch(((1, 2),), (0,)), drawn, 2))


class TestProbe:
    def test_it_reads_as_many_rows_and_what_its_pattern_says(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = watched(monkeypatch, training, "AccuracyProbe")
        settings = {"data": "probe", "every": 1, "items": 3, "extract": "A:(.)"}
        run(shop.grpo("probed", params={"steps": 1, "probe": settings, "max_new_tokens": 4}))
        [((rows, _), named)] = calls
        assert len(rows) == 3
        assert (named["extract"], named["max_new_tokens"]) == ("A:(.)", 4)


class TestCheckpoints:
    def test_they_come_as_often_as_the_stage_says(self, shop: Shop) -> None:
        every = shop.sft("every", params={"runtime": {"checkpoint_every": 1}})
        assert run(every).status == "succeeded"
        assert [step for step in every.checkpoint_steps() if every.checkpoint(step)] == [3, 4]

    def test_none_covers_a_step_that_nobody_heard_of(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        attempt, heard = shop.sft("heard"), list[list[int]]()
        commit = controller.commit_checkpoint

        def committing(*given: Any) -> None:
            heard.append([fact.step for fact in attempt.facts()[0] if isinstance(fact, Progress)])
            commit(*given)

        monkeypatch.setattr(controller, "commit_checkpoint", committing)
        assert run(attempt).status == "succeeded"
        assert heard == [[1, 2], [1, 2, 3, 4]]

    def test_one_is_written_before_a_step_that_may_cost_more_than_it_may(self, shop: Shop) -> None:
        attempt = shop.sft("own", token_allowance=45)
        refused(run(attempt), FailureClass.BUDGET)
        latest = latest_checkpoint(attempt)
        assert latest is not None
        assert latest.step > 0

    def test_the_one_that_an_order_names_is_gone_on_from(self, shop: Shop) -> None:
        first = shop.sft("first", params={"steps": 4}, token_allowance=45)
        refused(run(first), FailureClass.BUDGET)
        older = latest_checkpoint(first)
        assert older is not None
        attempt = shop.sft("next", resume=put_tree(shop.blobs, older.path))
        result = run(attempt)
        assert (result.status, notes(attempt)) == ("succeeded", [f"resumed from the checkpoint at step {older.step}"])

    @pytest.mark.parametrize("other", ["batch size", "seed", "data"])
    def test_one_of_another_stage_is_refused(self, shop: Shop, other: str) -> None:
        given = shop.sft(f"given-{other}", params={"steps": 2})
        run(given)
        latest = latest_checkpoint(given)
        assert latest is not None
        resume = put_tree(shop.blobs, latest.path)
        if other == "data":
            shop.put("data", json.dumps(ROWS[0]) + "\n")
        attempt = shop.sft(f"taken-{other}", params={"steps": 2, "batch_size": 3 if other == "batch size" else 2})
        seed = 6 if other == "seed" else 5
        attempt.write_order(replace(attempt.read_order(), resume=resume, seed=seed))
        refused(run(attempt), FailureClass.BAD_INPUT, "is from a different stage")

    def test_one_is_written_for_each_that_is_asked_for(self, tmp_path: Path) -> None:
        attempt = AttemptFolder(tmp_path)
        attempt.request_checkpoint()  # while the job was loading
        job: Any = SimpleNamespace(attempt=attempt, stopping=lambda: False)
        orders = training._orders(job)
        said = [orders(), orders()]
        attempt.request_checkpoint()
        said += [orders(), orders()]
        attempt.request_stop()
        job.stopping = attempt.stop_requested
        assert [*said, orders()] == [Order.CHECKPOINT, Order.GO_ON, Order.CHECKPOINT, Order.GO_ON, Order.STOP]
        assert all(attempt.mailbox.acknowledged(control.number) for control in attempt.mailbox.controls()[:2])


def notes(attempt: AttemptFolder) -> list[str]:
    return [fact.message for fact in attempt.facts()[0] if isinstance(fact, Note) and "resumed" in fact.message]


class TestLimits:
    def test_a_deadline_that_is_past_ends_a_job(self, shop: Shop) -> None:
        late = shop.sft("late", seconds_allowance=0.0, seconds_declared=60.0)
        words = (
            "deadline passed (when the attempt began, 0 s were left of budget.wall_clock: 60 s) at step 0 of 4; "
            "raise budget.wall_clock"
        )
        refused(run(late), FailureClass.BUDGET, words)

    def test_what_was_left_is_said_beside_what_was_declared(self, shop: Shop) -> None:
        poor = shop.sft("poor", token_allowance=3, tokens_declared=5000)
        words = "0 of the stage's 3 tokens are spent (budget.tokens: 5000) at step 0 of 4; raise budget.tokens"
        refused(run(poor), FailureClass.BUDGET, words)

    def test_a_pair_that_is_longer_than_the_stage_allows_is_refused(self, shop: Shop) -> None:
        rows = [{"prompt": "Q:1", "chosen": "A:1", "rejected": "A:2"}]
        shop.put("data", "".join(json.dumps(row) + "\n" for row in rows))
        options = {"model": "model", "data": "data", "steps": 1, "batch_size": 1}
        for limit, ends in ((7, "succeeded"), (6, "failed")):
            params = {**options, "max_length": limit}
            result = run(shop.attempt(f"pairs-{limit}", "reward_model", params, ["model", "data"]))
            assert result.status == ends, result.failure
        refused(result, FailureClass.BAD_INPUT, "must have at most 6 tokens, got 7")

    def test_completions_without_usable_labels_are_refused(self, shop: Shop) -> None:
        good, bad = ({"prompt": "Q:1", "completion": f"A:{label:d}", "label": label} for label in (True, False))
        pair = {"prompt": "Q:2", "chosen": "A:1", "rejected": "A:2"}
        wrong = {
            "labels true and false, got only true": [good, good],
            "asset:data@1 row 2: label must be true or false, got 'false'": [good, {**bad, "label": "false"}],
            "asset:data@1 row 2: chosen and rejected must differ": [good, {**pair, "rejected": "A:1"}],
            "must have at most 7 tokens, got 8": [pair, {**bad, "completion": "A:12"}],
        }
        params = {"model": "model", "data": "data", "steps": 1, "batch_size": 3, "max_length": 7}
        for number, (line, rows) in enumerate({**wrong, "": [good, bad, pair]}.items()):
            shop.put("data", "".join(json.dumps(row) + "\n" for row in rows))
            result = run(shop.attempt(f"labels-{number}", "kto", params, ["model", "data"]))
            if line:
                refused(result, FailureClass.BAD_INPUT, line)
        assert result.status == "succeeded", result.failure
        assert result.tokens == 21, "three documents of 7 tokens are trained on"
        assert {"loss", "chosen", "rejected", "margin", "reference_point"} <= result.metrics.keys()


class TestMeter:
    def test_it_is_told_what_each_step_may_cost_and_what_all_did(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a killed job is billed."""
        attempt, read = shop.sft("metered"), list[int | None]()
        step = controller.FromRows.step

        def during(self: controller.FromRows[Any], number: int, *rest: Any) -> Any:
            read.append(attempt.metered())
            return step(self, number, *rest)

        monkeypatch.setattr(controller.FromRows, "step", during)
        result = run(attempt)
        assert attempt.metered() == result.tokens > 0
        spent = [0, *(fact.tokens for fact in attempt.facts()[0] if isinstance(fact, Progress))]
        assert all(billed is not None and billed >= after for billed, after in zip(read, spent[1:], strict=True))


class TestInputs:
    def test_the_precision_of_the_stage_is_that_of_its_model(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        importlib.import_module("posttrain.engine.loop.controller")  # which reads the name's type once
        calls = watched(monkeypatch, training, "ModelSource")
        run(shop.sft("precise", params={"steps": 1, "runtime": {"dtype": "bfloat16"}}))
        assert {arguments[1] for arguments, _ in calls} == {"bfloat16"}

    def test_a_cached_file_that_was_altered_is_fetched_again(self, shop: Shop) -> None:
        before = shop.sft("before", params={"steps": 1})
        run(before)
        cached = shop.root / "cache" / "files" / shop.inputs["data"].digest.removeprefix("sha256:")
        cached.chmod(0o644)
        cached.write_text(json.dumps({"prompt": "Q:9", "completion": "A:9"}) + "\n")
        after = shop.sft("after", params={"steps": 1})
        run(after)
        assert model_digest(after) == model_digest(before)

    def test_a_judge_with_another_vocabulary_is_refused(self, shop: Shop) -> None:
        other = shop.attempt("other", "init_model", {**TINY.model_dump(mode="json"), "characters": "0123456789Q:"}, [])
        assert entry.run(str(other.path), training.init_model) == 0
        shop.inputs["reward_model"] = InputBlob(put_tree(shop.blobs, other.outputs / "model"), "tree", "model:judge@1")
        params = {"model": "model", "data": "data", "reward_model": "reward_model", "steps": 1, "max_new_tokens": 4}
        result = run(shop.attempt("judged", "ppo", params, ["model", "data", "reward_model"]))
        refused(result, FailureClass.BAD_INPUT, "model:judge@1 must have the policy's tokenizer")

    def test_a_judge_that_makes_text_is_refused(self, shop: Shop) -> None:
        shop.inputs["reward_model"] = shop.inputs["model"]
        params = {"model": "model", "data": "data", "reward_model": "reward_model", "steps": 1, "max_new_tokens": 4}
        result = run(shop.attempt("unjudged", "grpo", params, ["model", "data", "reward_model"]))
        refused(result, FailureClass.BAD_INPUT, "must score responses, got a model that is not a sequence classifier")

    @pytest.mark.parametrize("same", [True, False])
    def test_a_teacher_has_the_students_tokens(self, shop: Shop, same: bool) -> None:
        letters = TINY.characters if same else "0123456789Q:"
        words = {**TINY.model_dump(mode="json"), "characters": letters, "hidden_size": 32, "context_length": 12}
        other = shop.attempt(f"large-{same}", "init_model", words, [])
        assert entry.run(str(other.path), training.init_model) == 0
        shop.inputs["teacher"] = InputBlob(put_tree(shop.blobs, other.outputs / "model"), "tree", "model:large@1")
        params = {"model": "model", "data": "data", "teacher": "teacher", "steps": 2, "max_new_tokens": 4, "top_k": 3}
        result = run(shop.attempt(f"taught-{same}", "distill", params, ["model", "data", "teacher"]))
        if not same:
            refused(result, FailureClass.BAD_INPUT, "teacher model:large@1 must have the policy's tokenizer")
            return
        assert result.status == "succeeded"
        assert {"loss", "agreement", "teacher_mass", "student_mass", "mismatch_kl"} <= result.metrics.keys()
        long = run(shop.attempt("long", "distill", {**params, "max_new_tokens": 11}, ["model", "data", "teacher"]))
        refused(long, FailureClass.BAD_INPUT, "12")

    def test_a_teacher_that_scores_is_refused(self, shop: Shop) -> None:
        rows = [{"prompt": f"Q:{i}", "chosen": "A:1", "rejected": "A:2"} for i in range(4)]
        shop.put("pairs", "".join(json.dumps(row) + "\n" for row in rows))
        words = {"model": "model", "data": "pairs", "steps": 1}
        judge = shop.attempt("scoring", "reward_model", words, ["model"])
        order = replace(judge.read_order(), inputs={**judge.read_order().inputs, "data": shop.inputs["pairs"]})
        judge.write_order(order)
        assert run(judge).status == "succeeded"
        shop.inputs["teacher"] = InputBlob(put_tree(shop.blobs, judge.outputs / "model"), "tree", "model:judge@1")
        params = {"model": "model", "data": "data", "teacher": "teacher", "steps": 1, "max_new_tokens": 4, "top_k": 3}
        result = run(shop.attempt("untaught", "distill", params, ["model", "data", "teacher"]))
        refused(result, FailureClass.BAD_INPUT, "teacher model:judge@1 must generate text, got a model that scores")


def test_a_job_says_how_long_it_ran(made: Shop) -> None:
    assert run(made.sft("timed", params={"steps": 1})).seconds > 0
