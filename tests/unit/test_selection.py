"""Early stopping and the best model: what a probe decides, and that no death changes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import latest_checkpoint
from hypothesis import given, settings, strategies as st
from test_train_job import REWARD, Shop, run

from posttrain.domain.canonical import canonical_json
from posttrain.domain.jobs import JobResult, Metric, Note, Progress
from posttrain.engine.config import GRPOConfig, RewardModelConfig, SFTConfig, TrainingConfig
from posttrain.engine.loop.controller import ProbeState, Selection, UnmeasuredError
from posttrain.engine.settings import EarlyStoppingConfig
from posttrain.engine.weights.checkpoint import BestModel
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.jobs import entry
from posttrain.jobs.bodies import training
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import put_tree

VALUES = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.9, 1.0]), min_size=1, max_size=30)


def selection(patience: int | None = 3, min_delta: float = 0.0, *, lower: bool = False) -> Selection:
    stopping = EarlyStoppingConfig(patience=patience, min_delta=min_delta) if patience else None
    return Selection("m", lower, stopping)


def seen(chosen: Selection, values: list[float], first: int = 0) -> int | None:
    """The step at which the values stop a stage; None: they do not."""
    for step, value in enumerate(values[first:], start=first):
        chosen.see(step, {"m": value})
        if chosen.over:
            return step
    return None


@settings(max_examples=300, deadline=None)
@given(values=VALUES, lower=st.booleans())
def test_the_best_is_the_first_of_the_best_values(values: list[float], lower: bool) -> None:
    chosen = selection(None, lower=lower)
    news = [chosen.see(step, {"m": value}) for step, value in enumerate(values)]
    best = min(values) if lower else max(values)
    assert (chosen.state.best, chosen.state.step) == (best, values.index(best))
    assert news == [
        not values[:i] or (v < min(values[:i]) if lower else v > max(values[:i])) for i, v in enumerate(values)
    ]
    assert not chosen.over, "without patience nothing ends a stage"


@settings(max_examples=300, deadline=None)
@given(values=VALUES, patience=st.integers(1, 5), least=st.sampled_from([0.0, 0.05, 0.2]), cut=st.integers(0, 30))
def test_a_resumed_selection_goes_on_as_the_undisturbed_one(
    values: list[float], patience: int, least: float, cut: int
) -> None:
    whole = selection(patience, least)
    end = seen(whole, values)
    first = selection(patience, least)
    assert seen(first, values[:cut]) in (None, end)
    if end is None or end >= cut:
        kept = json.loads(canonical_json(asdict(first.state)))
        again = selection(patience, least).resume(kept)
        assert seen(again, values, min(cut, len(values))) == end
        assert again.state == whole.state


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(values=VALUES, patience=st.integers(1, 5), least=st.sampled_from([0.0, 0.05, 0.2]))
def test_patience_is_so_many_probes_in_a_row_without_an_improvement(
    values: list[float], patience: int, least: float
) -> None:
    expected, counted, missed = None, values[0], 0
    for step, value in enumerate(values[1:], start=1):
        counted, missed = (value, 0) if value - counted > least else (counted, missed + 1)
        if missed == patience:
            expected = step
            break
    assert seen(selection(patience, least), values) == expected


def test_small_gains_add_up_and_the_best_is_exact() -> None:
    """`min_delta` says what counts as going on, not which model is kept."""
    chosen = selection(3, 0.1)
    assert seen(chosen, [0.5, 0.56, 0.62, 0.68, 0.7]) is None
    assert chosen.state == ProbeState(best=0.7, step=4, counted=0.62, missed=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_probe_without_a_number_ends_the_stage(value: float) -> None:
    with pytest.raises(UnmeasuredError, match="m at step 7 must be finite"):
        selection().see(7, {"m": value})


def test_what_is_told_names_metric_steps_and_value() -> None:
    chosen = selection(2, lower=True)
    assert seen(chosen, [0.9, 0.5, 0.5, 0.6]) == 3
    told = chosen.told(30, 240)
    assert told == "stopped early at step 30 of 240: m was not better than 0.5 in 2 probes; the best was 0.5 at step 1"
    assert chosen.metrics(30) == {"best/step": 1.0, "best/m": 0.5, "stopped_early/step": 30.0}


@pytest.mark.parametrize("field", ["early_stopping", "keep_best"])
@pytest.mark.parametrize("kind", ["sft", "reward_model", "grpo", "ppo", "dataflow"])
def test_without_a_probe_there_is_nothing_to_go_by(kind: str, field: str) -> None:
    stage = {"data": "train", "steps": 3} | {
        "grpo": {"reward": "r"},
        "ppo": {"reward": "r"},
        "dataflow": {"recipe": "m:f"},
    }.get(kind, {})
    asked: Any = {} if field == "early_stopping" else True
    with pytest.raises(Exception, match=f"{field} needs a probe, got none"):
        NativeTrainer().check(kind, {**stage, field: asked})
    contract = NativeTrainer().check(kind, {**stage, field: asked, "probe": {"data": "held"}})
    assert contract.inputs["probe"] == ("dataset", "held")
    assert contract.rows["probe"].first == 128
    assert contract.outputs == {"model": "tree", **({"best": "tree"} if field == "keep_best" else {})}
    chosen = Selection.of(_config(kind, {**stage, field: asked, "probe": {"data": "held"}}))
    assert chosen is not None
    assert (chosen.metric, chosen.lower) == (("probe/loss", True) if kind == "sft" else ("probe/accuracy", False))
    assert Selection.of(_config(kind, {**stage, "probe": {"data": "held"}})) is None


def _config(kind: str, params: dict[str, Any]) -> TrainingConfig:
    from posttrain.engine.config import STAGE_CONFIGS

    found = STAGE_CONFIGS[kind].model_validate(params)
    assert isinstance(found, TrainingConfig)
    return found


def test_what_is_spent_at_the_least_ends_with_the_patience() -> None:
    held = {"data": "held", "every": 10}
    params = {"data": "d", "steps": 1000, "batch_size": 4, "probe": held, "early_stopping": {"patience": 2}}
    assert NativeTrainer().check("sft", params).work["least"] == 20 * 4
    assert NativeTrainer().check("sft", {**params, "steps": 7}).work["least"] == 7 * 4
    assert NativeTrainer().check("sft", {**params, "early_stopping": None}).work["least"] == 4000


# --- the folder of the best model -------------------------------------------------------------------------------------


class TestBestModel:
    def test_one_at_a_time_and_with_every_checkpoint(self, tmp_path: Path) -> None:
        content = ["a"]

        def write(folder: Path) -> None:
            (folder / "sub").mkdir()
            (folder / "model.safetensors").write_text(content[0])
            (folder / "sub" / "more.json").write_text("{}")

        best = BestModel(tmp_path / "best", write)
        checkpoint = tmp_path / "checkpoint"
        assert best.put_into(checkpoint) == {}
        best.keep(0)
        content[0] = "b"
        best.keep(40)
        assert [p.name for p in (tmp_path / "best").iterdir()] == ["step-00000040"]
        shards = best.put_into(checkpoint)
        assert sorted(shards) == ["best/model.safetensors", "best/sub/more.json"]
        inodes = {(checkpoint / name).stat().st_ino for name in shards}
        assert best.path is not None
        assert inodes == {p.stat().st_ino for p in best.path.rglob("*") if p.is_file()}, "no byte is stored twice"
        content[0] = "c"
        best.keep(80)
        assert (checkpoint / "best" / "model.safetensors").read_text() == "b", (
            "a checkpoint keeps what it was written with"
        )
        (tmp_path / "best" / ".step-00000090").mkdir()  # a process died while it wrote this
        best.take_from(checkpoint, 40)
        assert best.path == tmp_path / "best" / "step-00000040"
        assert (best.path / "model.safetensors").read_text() == "b"
        assert [p.name for p in (tmp_path / "best").iterdir()] == ["step-00000040"]
        assert best.put_into(tmp_path / "other") == shards
        (best.path / "model.safetensors").write_text("of a later step that was lost")
        best.take_from(checkpoint, 40)
        assert (best.path / "model.safetensors").read_text() == "b"
        best.take_from(None)
        assert best.path is None
        assert not (tmp_path / "best").exists(), "who begins anew has none"

    def test_a_disk_without_links_has_copies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refused)
        best = BestModel(tmp_path / "best", lambda folder: (folder / "w").write_text("x"))
        best.keep(3)
        best.put_into(tmp_path / "checkpoint")
        assert (tmp_path / "checkpoint" / "best" / "w").read_text() == "x"


# --- whole jobs -------------------------------------------------------------------------------------------------------

HELD = [{"prompt": f"Q:{i}", "completion": f"A:{(i + 1) % 3}", "answer": str(i % 3)} for i in range(6)]
STEEP = {"learning_rate": 0.08, "warmup_steps": 0, "schedule": "constant"}
SFT: dict[str, Any] = {
    "steps": 30, "batch_size": 4, "optimizer": STEEP, "runtime": {"checkpoint_every": 5},
    "probe": {"data": "probe", "every": 2, "items": 6}, "early_stopping": {"patience": 3}, "keep_best": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    made = Shop(tmp_path_factory.mktemp("shop"))
    made.put("probe", "".join(json.dumps(row) + "\n" for row in HELD))
    pairs = [{"prompt": f"Q:{i}", "chosen": f"A:{i}", "rejected": f"A:{i + 1}s"} for i in range(8)]
    made.put("pairs", "".join(json.dumps(row) + "\n" for row in pairs))
    return made


def sft(shop: Shop, name: str, changes: dict[str, Any] | None = None, **order: Any) -> AttemptFolder:
    params = {"model": "model", "data": "data", **SFT, **(changes or {})}
    return shop.attempt(name, "sft", params, ["model", "data", "probe"], **order)


def curve(attempt: AttemptFolder, metric: str) -> dict[int, float]:
    return {f.step: f.values[metric] for f in attempt.facts()[0] if isinstance(f, Metric) and metric in f.values}


def digests(shop: Shop, attempt: AttemptFolder) -> dict[str, str]:
    return {name: put_tree(shop.blobs, attempt.outputs / name) for name in ("model", "best")}


@pytest.fixture(scope="module")
def whole(shop: Shop) -> tuple[JobResult, AttemptFolder]:
    attempt = sft(shop, "whole")
    return run(attempt), attempt


def test_a_stage_ends_when_its_probe_stops_improving(shop: Shop, whole: tuple[JobResult, AttemptFolder]) -> None:
    result, attempt = whole
    assert result.status == "succeeded"
    losses = curve(attempt, "probe/loss")
    best = min(losses, key=lambda step: (losses[step], step))
    last = best + 3 * 2
    assert 0 < best < last < 30, losses
    assert list(losses) == list(range(0, last + 1, 2))
    assert [f.step for f in attempt.facts()[0] if isinstance(f, Progress)] == list(range(1, last + 1))
    assert result.message.startswith(f"stopped early at step {last} of 30: probe/loss was not better than ")
    assert result.message in [f.message for f in attempt.facts()[0] if isinstance(f, Note)]
    chosen = {name: result.metrics[name] for name in ("best/step", "best/probe/loss", "stopped_early/step")}
    assert chosen == {"best/step": best, "best/probe/loss": losses[best], "stopped_early/step": last}
    assert not (attempt.path / "best").exists() or not list((attempt.path / "best").iterdir())


def test_the_best_is_the_model_of_that_step(shop: Shop, whole: tuple[JobResult, AttemptFolder]) -> None:
    """Bit for bit that of a stage that ends there; and the last one that of a stage that stops nowhere else."""
    result, attempt = whole
    best, last = int(result.metrics["best/step"]), int(result.metrics["stopped_early/step"])
    found = digests(shop, attempt)
    assert found["model"] != found["best"]
    for name, steps in (("best", best), ("model", last)):
        other = sft(shop, f"until-{steps}", {"steps": steps, "early_stopping": None, "keep_best": False})
        assert run(other).status == "succeeded"
        assert put_tree(shop.blobs, other.outputs / "model") == found[name]


def test_a_probe_changes_nothing(shop: Shop, whole: tuple[JobResult, AttemptFolder]) -> None:
    last = int(whole[0].metrics["stopped_early/step"])
    plain = sft(shop, "unprobed", {"steps": last, "early_stopping": None, "keep_best": False, "probe": None})
    assert run(plain).status == "succeeded"
    assert put_tree(shop.blobs, plain.outputs / "model") == digests(shop, whole[1])["model"]
    assert curve(plain, "loss") == curve(whole[1], "loss")


# where the first process dies; of 30 steps with a probe every 2 and a checkpoint every 5
DEATHS = ["train.step@2", "train.step@7", "train.step@12", "best.before_rename@1", "best.before_rename@3",
          "best.after_rename@1", "best.after_rename@3", "checkpoint.before_commit@2", "checkpoint.after_commit@1",
          "outputs.before_result@1"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "death", [pytest.param(death, marks=pytest.mark.deep if at % 2 else ()) for at, death in enumerate(DEATHS)]
)
def test_a_death_changes_neither_model_nor_what_is_said(
    death: str, shop: Shop, whole: tuple[JobResult, AttemptFolder]
) -> None:
    name = death.replace("@", "-")
    lost = sft(shop, name)
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": death, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posttrain.jobs.stage", str(lost.path)]
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=900, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    latest = latest_checkpoint(lost)
    resume = {"resume": put_tree(shop.blobs, latest.path), "tokens_inherited": latest.tokens} if latest else {}
    again = sft(shop, f"{name}-again", **resume)  # an attempt begins once
    result = run(again)
    assert result.status == "succeeded", result
    assert digests(shop, again) == digests(shop, whole[1])
    undisturbed = whole[0]
    drop = "tokens_per_second"
    assert {k: v for k, v in result.metrics.items() if k != drop} == {
        k: v for k, v in undisturbed.metrics.items() if k != drop
    }
    assert (result.message, result.tokens) == (undisturbed.message, undisturbed.tokens)


@pytest.mark.slow
def test_a_stop_and_a_checkpoint_at_a_probe_lose_no_probe(shop: Shop, whole: tuple[JobResult, AttemptFolder]) -> None:
    """A checkpoint at the step of a probe is written before that is made; who goes on makes it."""
    result: JobResult | None = None
    resume: dict[str, Any] = {}
    for turn in range(40):
        attempt = sft(shop, f"turn-{turn}", **resume)
        asked = iter([False] * 2)

        def stopped(job: entry.Job, asked: Any = asked) -> JobResult:
            from dataclasses import replace

            return training.body(replace(job, stopping=lambda: next(asked, True)))

        assert entry.run(str(attempt.path), stopped) == 0
        result = attempt.read_result()
        assert result is not None
        if result.status == "succeeded":
            break
        latest = latest_checkpoint(attempt)
        assert latest is not None
        resume = {"resume": put_tree(shop.blobs, latest.path), "tokens_inherited": latest.tokens}
    assert result is not None
    assert digests(shop, attempt) == digests(shop, whole[1])
    assert result.message == whole[0].message


def test_a_reward_model_is_probed_on_pairs(shop: Shop) -> None:
    params = {
        "model": "model", "data": "pairs", "steps": 6, "batch_size": 4, "optimizer": STEEP, "keep_best": True,
        "probe": {"data": "probe", "every": 2, "items": 5},
    }  # fmt: skip
    shop.inputs["data"], data = shop.inputs["pairs"], shop.inputs["data"]
    shop.inputs["probe"], probe = shop.inputs["pairs"], shop.inputs["probe"]
    attempt = shop.attempt("judge", "reward_model", {**params, "data": "data"}, ["model", "data", "probe"])
    result = run(attempt)
    shop.inputs |= {"data": data, "probe": probe}
    assert result.failure is None
    found = curve(attempt, "probe/accuracy")
    assert list(found) == [0, 2, 4, 6]
    assert all(value * 5 == pytest.approx(round(value * 5)) for value in found.values()), "five pairs"
    best = max(found, key=lambda step: (found[step], -step))
    assert (result.metrics["best/step"], result.metrics["best/probe/accuracy"]) == (best, found[best])
    assert curve(attempt, "probe/loss")[6] < curve(attempt, "probe/loss")[0]
    assert (attempt.outputs / "best" / "config.json").exists()


def test_what_samples_is_probed_by_its_answers(shop: Shop) -> None:
    shop.put("reward", REWARD, entry="score", source="reward.py")
    changes = {"steps": 9, "early_stopping": {"patience": 1, "min_delta": 1.0}, "keep_best": True}
    attempt = shop.grpo("probed", params={**changes, "probe": {"data": "probe", "every": 2, "items": 4}})
    result = run(attempt)
    assert result.failure is None
    assert result.message.startswith("stopped early at step 2 of 9: probe/accuracy was not better than ")
    assert result.message.split(": ")[1].split(";")[0].endswith("by more than 1 in 1 probe")
    assert {p.name for p in attempt.outputs.iterdir()} == {"model", "best"}


def test_the_configurations_are_those_of_the_kinds() -> None:
    assert [c.selects_by for c in (SFTConfig, RewardModelConfig, GRPOConfig)] == ["probe/loss", *["probe/accuracy"] * 2]
    assert asdict(ProbeState()) == {"best": None, "step": 0, "counted": None, "missed": 0}
