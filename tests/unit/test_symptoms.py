"""Each symptom is provoked where that is possible, by a real training loop; a healthy stage has none."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cli_world
import pytest
import torch
from cli_world import World, make_world
from test_cli_report import report, text_of
from test_docs_reference import schemas
from test_engine_training import DOCUMENTS, Desk, even_tokens, grpo, sft, tiny

from posttrain.domain.jobs import JobOrder, JobResult, Metric
from posttrain.domain.lifecycle import Reason, StopCause
from posttrain.domain.records import AttemptRecord
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.rollout.port import Rollouts
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.jobs import entry
from posttrain.store.attempts import AttemptFolder
from posttrain.telemetry.symptoms import PAGE, SYMPTOMS, StageFacts, findings
from posttrain.web.panels import WORDS

Curves = dict[str, dict[int, float]]
Values = Callable[[Sequence[Prompt], Sequence[Trajectory]], Sequence[float | None]]
WARM, WIDE = 100, {"prompts_per_step": 7, "group_size": 8}


def trained(folder: Path, model: LanguageModel, scorer: Values, rate: float, warm: int = 0, **more: Any) -> Curves:
    """The curves that a real stage of GRPO records."""
    optimizer = PolicyGradientOptimizerConfig(learning_rate=rate, warmup_steps=warm)
    usual: dict[str, Any] = {"kl": None, "mini_batches": 1, "prompts_per_step": 4, "group_size": 8, "max_new_tokens": 8}
    desk = Desk(folder, grpo(model, scorer, optimizer=optimizer, **{**usual, **more}))
    desk.run()
    curves: Curves = {}
    for fact in [fact for fact in desk.facts if isinstance(fact, Metric)]:
        for name, value in fact.values.items():
            curves.setdefault(name, {})[fact.step] = value
    return curves


def found(curves: Curves, **more: Any) -> dict[str, str]:
    """Symptom → evidence, except of the throughput of this machine."""
    timeless = {name: curve for name, curve in curves.items() if name != "tokens_per_second"}
    return {one.symptom: one.evidence for one in findings("grpo", StageFacts(timeless, **more))}


def means(curve: dict[int, float]) -> tuple[float, float]:
    """Of the first five and the last five steps."""
    values = [value for _, value in sorted(curve.items())]
    return math.fsum(values[:5]) / 5, math.fsum(values[-5:]) / 5


def straight(first: float, last: float, steps: int = 50) -> dict[int, float]:
    """A recorded curve that is `first` for half of its steps, and `last` thereafter."""
    return {step: first if step <= steps // 2 else last for step in range(1, steps + 1)}


def matching(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The share of a response that is the demonstration's."""
    known = {tuple(document.prompt): list(document.response) for document in DOCUMENTS}
    scores: list[float | None] = []
    for trajectory in trajectories:
        want, got = known[tuple(trajectory.prompt.tolist())], trajectory.response.tolist()
        scores.append(sum(a == b for a, b in zip(got, want, strict=False)) / max(len(got), len(want)))
    return scores


# --- provoked ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_learning_rate_that_is_too_high_is_a_reward_collapse_and_a_lower_one_is_not(tmp_path: Path) -> None:
    told = {}
    for rate in (1.0, 1e-3):
        model = tiny()
        Desk(tmp_path / f"sft-{rate}", sft(model, steps=150)).run()
        told[rate] = trained(tmp_path / f"grpo-{rate}", model, matching, rate, WARM, steps=50, **WIDE)
    first, last = means(told[1.0]["reward/mean"])
    assert (
        f"reward/mean fell from {first:.3g} (steps 1 to 5) to {last:.3g} (steps 46 to 50)"
        in found(told[1.0])["reward-collapse"]
    )
    assert found(told[1e-3]) == {}


@pytest.mark.slow
def test_equal_rewards_are_no_signal_and_a_task_that_was_learnt_is_none(tmp_path: Path) -> None:
    curves = trained(tmp_path, tiny(), lambda _, rows: [0.25] * len(rows), 1e-3, steps=20)
    told = "20 of 20 steps made no update; threshold: 75% of the steps; reward/mean went from 0.25 (steps 1 to 5) to"
    assert told in found(curves)["no-signal"]
    learnt = curves | {"reward/mean": straight(0.25, 1.0), "reward/std": straight(0.4, 0.0)}
    assert "no-signal" not in found(learnt)
    some = curves | {"updates": {step: float(step % 3 == 0) for step in range(1, 21)}}
    assert "no-signal" not in found(some), "a third of the steps learn"


@pytest.mark.slow
def test_noisy_rewards_and_a_high_learning_rate_are_an_entropy_collapse(tmp_path: Path) -> None:
    draws = random.Random(5)

    def noise(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [draws.random() for _ in trajectories]

    curves = trained(tmp_path, tiny(), noise, 0.05, steps=40)
    first, last = means(curves["entropy"])
    assert last < 0.1 * first
    assert found(curves).keys() == {"entropy-collapse"}
    fell = f"entropy fell from {first:.3g} (steps 1 to 5) to {last:.3g} (steps 36 to 40); threshold: 10%"
    assert fell in found(curves)["entropy-collapse"]


@pytest.mark.slow
def test_a_policy_that_has_learnt_what_is_asked_has_no_entropy_and_no_symptom(tmp_path: Path) -> None:
    curves = trained(tmp_path, tiny(), even_tokens, 0.1, steps=60)
    first, last = means(curves["entropy"])
    assert last < 0.1 * first
    assert means(curves["reward/mean"])[1] > 0.99
    assert found(curves) == {}


@pytest.mark.slow
def test_a_reward_for_length_is_a_length_explosion_and_one_for_shortness_is_not(tmp_path: Path) -> None:
    def longer(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [len(trajectory.response) / 32 for trajectory in trajectories]

    def shorter(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [-len(trajectory.response) / 32 for trajectory in trajectories]

    model = tiny()
    short = trained(tmp_path / "short", model, shorter, 2e-2, steps=25, max_new_tokens=32)
    long = trained(tmp_path / "long", model, longer, 2e-2, steps=40, max_new_tokens=32)
    assert "length-explosion" not in found(short)
    first, last = means(long["response_tokens/mean"])
    assert last > 2 * first
    grew = f"response_tokens/mean grew from {first:.3g} (steps 1 to 5) to {last:.3g} (steps 36 to 40)"
    assert grew in found(long)["length-explosion"]


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "mismatch_kl"),
        ({"mini_batches": 4}, "mismatch_kl/first"),
        ({"lag": {"steps": 0, "correction": "tis"}}, "lag/kl"),
    ],
)
def test_a_rollout_with_other_log_probabilities_is_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], metric: str
) -> None:
    feed, off = RolloutWorker.feed, 0.0

    def shifted(self: RolloutWorker, *given: Any, **named: Any) -> Iterator[Rollouts]:
        for rollouts in feed(self, *given, **named):
            for answer in rollouts.trajectories:
                for segment in answer.segments:
                    if segment.logprobs is not None:
                        segment.logprobs[:] -= off
            yield rollouts

    monkeypatch.setattr(RolloutWorker, "feed", shifted)
    for off, said in ((0.0, False), (0.03, False), (0.1, True)):  # KL ≈ off² / 2: 0, 4.5e-4, 5e-3
        curves = trained(tmp_path / f"{off}", tiny(), even_tokens, 2e-2, steps=8, **changes)
        told = found(curves, params=changes)
        assert told.keys() == ({"train-inference-mismatch"} if said else set()), (off, told)
        assert all(words.startswith(f"{metric} is 0.005") for words in told.values()), told
    assert ("mismatch_kl/first" in curves) == (metric == "mismatch_kl/first")


@pytest.mark.parametrize(("slower", "said"), [(5.0, True), (1.5, False)])
@pytest.mark.slow
def test_a_reward_that_becomes_slow_is_a_throughput_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, said: bool
) -> None:
    """The loop's clock shows only the seconds of the reward, so the machine's speed does not matter."""
    clock, calls = SimpleNamespace(now=0.0), iter(range(1000))

    def timed(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Sequence[float | None]:
        clock.now += slower if next(calls) >= 30 else 1.0
        return even_tokens(prompts, trajectories)

    fake = SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr("posttrain.engine.loop.controller.time", fake)
    curves = trained(tmp_path, tiny(), timed, 1e-6, steps=40)
    drops = [one for one in findings("grpo", StageFacts(curves)) if one.symptom == "throughput-drop"]
    assert bool(drops) == said
    for drop in drops:
        assert re.match(r"tokens_per_second fell from \S+ \(steps 1 to 30\) to \S+ \(steps 31 to 40\)", drop.evidence)


# --- recorded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [True, False])
def test_noise_is_no_collapse(error: bool) -> None:
    """A reward whose mean varies by its standard error, which is most of its deviation when a step has few prompts."""
    draws = random.Random(11)
    for _ in range(200):
        curves: Curves = {"reward/mean": {step: draws.gauss(0.5, 0.35) for step in range(1, 41)}}
        curves |= {
            "reward/std": straight(0.5, 0.5, 40),
            **({"reward/stderr": straight(0.35, 0.35, 40)} if error else {}),
        }
        assert found(curves) == {}


def test_a_reward_that_rose_and_fell_is_compared_with_its_best() -> None:
    curves: Curves = {"reward/std": straight(0.2, 0.2), "reward/stderr": straight(0.01, 0.01)}
    rose = {step: 0.3 + 0.5 * (20 < step <= 40) for step in range(1, 51)}
    fell = "reward/mean fell from 0.8 (steps 21 to 25) to 0.3 (steps 46 to 50); threshold: a fall by 0.1"
    assert found(curves | {"reward/mean": rose}) == {"reward-collapse": fell}
    assert found(curves | {"reward/mean": straight(0.8, 0.72)}) == {}, "certain, but within the samples' deviation"


@pytest.mark.parametrize(
    ("entropy", "mean", "spread", "said"),
    [
        ((2.0, 0.1), (0.3, 0.32), (0.4, 0.4), True),
        ((2.0, 0.3), (0.3, 0.32), (0.4, 0.4), False),  # above a tenth
        ((2.0, 0.1), (0.3, 0.45), (0.4, 0.4), False),  # the reward rises
        ((2.0, 0.1), (0.98, 1.0), (0.14, 0.0), False),  # every response is right
        ((2.0, 0.1), (0.3, 0.3), (0.1, 0.0), True),  # the responses are equal, and no better
    ],
)
def test_little_entropy_is_a_collapse_if_nothing_was_learnt(
    entropy: tuple[float, float], mean: tuple[float, float], spread: tuple[float, float], said: bool
) -> None:
    curves = {"entropy": straight(*entropy), "reward/mean": straight(*mean), "reward/std": straight(*spread)}
    assert ("entropy-collapse" in found(curves)) == said


@pytest.mark.parametrize(("speed", "length", "said"), [(45, 9, True), (55, 9, False), (45, 7, False)])
def test_a_lower_throughput_is_a_drop_if_the_responses_are_as_long(speed: float, length: float, said: bool) -> None:
    curves = {"tokens_per_second": straight(100, speed), "response_tokens/mean": straight(10, length)}
    assert [one.symptom for one in findings("grpo", StageFacts(curves))] == ["throughput-drop"] * said


@pytest.mark.parametrize(
    ("length", "cut", "said"),
    [
        ((10, 20), (0.1, 0.4), True),
        ((10, 19), (0.1, 0.5), False),
        ((10, 19), (0.1, 0.7), True),
        ((10, 40), (0.1, 0.3), False),
    ],
)
def test_longer_responses_are_an_explosion_if_the_limit_cuts_them(
    length: tuple[float, float], cut: tuple[float, float], said: bool
) -> None:
    curves = {"response_tokens/mean": straight(*length), "truncated": straight(*cut)}
    assert ("length-explosion" in found(curves)) == said


WORST = {  # metric → values of both halves
    "reward/mean": (1.0, 0.0), "reward/std": (0.1, 0.1), "reward/stderr": (0.01, 0.01), "entropy": (2.0, 0.01),
    "response_tokens/mean": (10.0, 90.0), "truncated": (0.0, 1.0), "mismatch_kl": (0.1, 0.1),
    "tokens_per_second": (100.0, 1.0), "updates": (0.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "least", "symptom"),
    [
        ("reward/mean", 20, "reward-collapse"),
        ("updates", 20, "no-signal"),
        ("entropy", 20, "entropy-collapse"),
        ("response_tokens/mean", 20, "length-explosion"),
        ("mismatch_kl", 5, "train-inference-mismatch"),
        ("tokens_per_second", 40, "throughput-drop"),
    ],
)
def test_short_and_broken_curves_have_no_findings(name: str, least: int, symptom: str) -> None:
    curves = {metric: straight(*values) for metric, values in WORST.items()}

    def left(curve: dict[int, float]) -> set[str]:
        return {one.symptom for one in findings("grpo", StageFacts(curves | {name: curve}))}

    assert left(curves[name]) == {one.name for one in SYMPTOMS} - {"out-of-memory", "stalled-step"}
    assert symptom in left(straight(*WORST[name], least))
    for curve in ({}, dict.fromkeys(range(60), math.nan), straight(*WORST[name], least - 1)):
        assert symptom not in left(curve), len(curve)


def test_a_lag_is_measured_by_its_effective_samples() -> None:
    curves: Curves = {"lag/kl": straight(0.3, 0.3), "lag/ess": straight(0.9, 0.4)}
    lagging = {"lag": {"steps": 2, "correction": "tis"}}
    assert "lag/ess is 0.4 (steps 46 to 50)" in found(curves, params=lagging)["train-inference-mismatch"]
    assert found(curves | {"lag/ess": straight(0.9, 0.6)}, params=lagging) == {}


def test_what_changed_within_a_step_is_no_mismatch() -> None:
    """Runs of a version without `mismatch_kl/first`, whose steps have several updates."""
    assert found({"mismatch_kl": straight(0.1, 0.1), "updates": straight(1, 4)}) == {}
    assert found({"mismatch_kl": straight(0.1, 0.1), "updates": straight(0, 1)}).keys() == {"train-inference-mismatch"}


@pytest.mark.parametrize(
    ("name", "reason", "cause"),
    [
        ("stalled-step", Reason.STALLED, StopCause.STALLED),
        ("out-of-memory", Reason.JOB_FAILED_OUT_OF_MEMORY, StopCause.OUT_OF_MEMORY),
    ],
)
def test_how_attempts_ended_is_evidence(name: str, reason: Reason, cause: StopCause) -> None:
    good = AttemptRecord("run", "grpo", 1, "a", "f", "succeeded", reason=Reason.SUCCEEDED)
    assert found({}, attempts=[good]) == {}
    by_reason = AttemptRecord("run", "grpo", 2, "b", "f", "failed", reason=reason, message="first\nline")
    by_cause = AttemptRecord("run", "grpo", 3, "c", "f", "lost", reason=Reason.LOST, stop_cause=cause)
    assert found({}, attempts=[good, by_reason, by_cause]) == {
        name: f"attempt 2: first line; attempt 3: {reason.meaning}"
    }


# --- shown ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def test_why_and_the_report_name_a_memory_that_torch_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cli_world.train

    def train(folder: AttemptFolder, order: JobOrder) -> None:
        if order.kind != "grpo":
            whole(folder, order)
            return
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 50)
        folder.write_result(JobResult("failed", failure=entry.failure_of(caught.value)))

    monkeypatch.setattr(cli_world, "train", train)
    assert world("run", "run.yaml").exit_code != 0
    run = world.newest()
    [finding] = world.json("why", run)["findings"]
    [memory] = [one for one in SYMPTOMS if one.name == "out-of-memory"]
    assert finding == {
        "stage": "grpo", "symptom": memory.name, "evidence": finding["evidence"], "cause": memory.cause,
        "remedy": memory.remedy, "page": f"{PAGE}#out-of-memory",
    }  # fmt: skip
    assert finding["evidence"].startswith("attempt 1: ")
    said = " ".join(world.ok("why", run).split())
    world.ok("get", run, "--report")
    page = text_of(report(world, run))
    for words in (said, page.partition("Scores")[0]):
        assert "grpo: out-of-memory" in words
        assert f"{PAGE}#out-of-memory" in words
        assert finding["evidence"][:40] in words
        assert memory.remedy[:60] in words


def test_a_stage_that_is_reused_has_the_symptoms_of_its_curves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_world, "Metric", lambda step, values, at: Metric(step, {**values, "mismatch_kl": 0.1}, at))
    world.ok("run", "run.yaml")
    first = world.newest()
    world("run", world.write("again.yaml", cli_world.RUN.replace("name: sort", "name: again")))
    assert first != world.newest()
    for run in (first, world.newest()):
        told = [(one["stage"], one["symptom"]) for one in world.json("why", run)["findings"]]
        assert told == [("grpo", "train-inference-mismatch")], "the curve of sft is too short"


def test_the_stages_lag_decides_what_is_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lag, the KL is not that of equal weights."""
    monkeypatch.setattr("posttrain.preflight.placements.ray_is_installed", lambda: True)
    monkeypatch.setattr(cli_world, "Metric", lambda step, values, at: Metric(step, {**values, "mismatch_kl": 0.1}, at))
    pools = "lag: {steps: 1}, placement: {policy: {cpus: 1}, rollout: {cpus: 1}}, max_new_tokens: 8,"
    world.ok("run", world.write("run.yaml", cli_world.RUN.replace("max_new_tokens: 8,", pools)))
    assert world.json("why", world.newest())["findings"] == []


def test_a_healthy_run_has_no_symptoms(world: World) -> None:
    world.ok("run", "run.yaml")
    assert world.json("why", world.newest())["findings"] == []
    assert "symptom" not in world.ok("why", world.newest())
    world.ok("get", world.newest(), "--report")
    assert "Symptoms" not in report(world, world.newest())


# --- page -------------------------------------------------------------------------------------------------------------


@cache
def fields() -> frozenset[str]:
    """Every field of run.yaml by its name, and by its name after the field that contains it."""
    names = {name for known in schemas().values() for name in known["properties"]}
    return frozenset(names)


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda one: one.name)
def test_a_remedy_names_fields_that_there_are(symptom: Any) -> None:
    quoted = re.findall(r"`([^`]+)`", symptom.remedy)
    others = (*WORDS, "dapo", "reward", "sft")
    named = [word for word in quoted if not word.startswith("posttrain ") and word not in others]
    assert named
    for word in named:
        parts = re.findall(r"[a-z_]+(?=[.:])|[a-z_]+$", word)
        assert parts, word
        assert [part for part in parts if part not in fields() and part not in ("true", "tis")] == [], word


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda one: one.name)
def test_the_page_has_a_section_for_each_symptom_whose_metrics_there_are(symptom: Any) -> None:
    page = (Path(__file__).resolve().parents[2] / PAGE).read_text(encoding="utf-8")
    headings = [line.removeprefix("## ").lower().replace(" ", "-") for line in page.splitlines() if line[:3] == "## "]
    assert headings.count(symptom.name) == 1
    for text in (symptom.metric, symptom.threshold, symptom.cause, symptom.remedy):
        assert f"| {text} |" in page
    known = {*WORDS, "reward/stderr", "lag: {steps: 0}", *(reason.value for reason in Reason)}
    assert set(re.findall(r"`([^`]+)`", symptom.metric)) <= known
