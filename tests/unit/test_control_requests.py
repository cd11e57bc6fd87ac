"""What an attempt asks of its executor is written down once, and submitted as written by whoever gets to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_bench import TRAIN_ONLY, Bench, train

from posttrain.control import jobs
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Cause, JobCommand
from posttrain.domain.jobspec import JobSpec, PodGroup
from posttrain.events.ports import SECRETS
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import AttemptFolder
from posttrain.store.mailbox import Mailbox


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, {"sft": [train()]})


def compiles(monkeypatch: pytest.MonkeyPatch, **words: Any) -> None:
    def compile(_: NativeTrainer, order: Any) -> JobCommand:
        return JobCommand(**{"module": "first", **words})

    monkeypatch.setattr(NativeTrainer, "compile", compile)


def dies_before_submitting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run whose driver died when its attempt's request was written."""

    def dies(name: str) -> None:
        raise KeyboardInterrupt(name)

    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.control.launch.crashpoint", dies)
        with pytest.raises(KeyboardInterrupt):
            bench.reconciler.tick(run_id)
    return run_id


def test_a_request_says_whose_it_is_and_how_long_it_may_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, environment={"OMP_NUM_THREADS": "3"}, devices=2, secrets=("HF_TOKEN",))
    run_id = bench.submit(**TRAIN_ONLY, budget={"wall_clock": "1h"})
    assert bench.drive(run_id).state == "succeeded"
    [asked] = bench.executor.launched
    assert (asked.name, asked.module, asked.epoch) == (f"{run_id}-sft-1", "first", 1)
    assert asked.labels == {"workspace": "", "run": run_id, "stage": "sft"}
    assert (asked.gang, asked.devices, asked.secrets) == ((PodGroup(gpus=2),), 2, ("HF_TOKEN",))
    assert asked.environment == {"OMP_NUM_THREADS": "3"}
    assert asked.max_seconds is not None
    assert 3600 < asked.max_seconds <= 3600 + jobs._OVERTIME_SECONDS


def test_a_second_driver_submits_what_the_first_wrote(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiles(monkeypatch)
    run_id = dies_before_submitting(bench, monkeypatch)
    compiles(monkeypatch, module="second", devices=7)
    assert bench.drive(run_id).state == "succeeded"
    [asked] = bench.executor.launched
    assert (asked.module, asked.devices) == ("first", 0)
    written = json.loads((asked.folder / "request.json").read_bytes())
    assert "mailbox" not in written, "the workspace may be moved"
    assert JobSpec.from_json(written, asked.mailbox) == asked


def test_of_two_drivers_that_write_at_once_the_first_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, module="second")
    once = Mailbox.once

    def late(mailbox: Mailbox, key: str, value: dict[str, Any]) -> dict[str, Any]:
        once(mailbox, key, {**value, "module": "first"})
        return once(mailbox, key, value)

    monkeypatch.setattr(Mailbox, "once", late)
    assert bench.drive(bench.submit(**TRAIN_ONLY)).state == "succeeded"
    assert [asked.module for asked in bench.executor.launched] == ["first"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"gang": [{"name": "main", "colour": "red"}]}, "request.json cannot be read"),
        ({"schema": 99}, "job spec must be of schema 1, got 99"),
    ],
)
def test_a_request_that_cannot_be_read_ends_the_attempt_and_names_the_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any], what: str
) -> None:
    run_id = dies_before_submitting(bench, monkeypatch)
    path = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0]).path / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **damage}))
    assert bench.drive(run_id).state == "failed"
    assert what in bench.stage(run_id, "sft").message
    assert bench.executor.launched == []


def test_a_job_that_the_executor_ended_for_its_runtime_has_spent_the_budget(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(budget={"wall_clock": 600}, **TRAIN_ONLY)
    while not bench.launched:
        bench.reconciler.tick(run_id)
    bench.executor.lose(bench.ledger.attempts(run_id)[0].name, Cause.OVERTIME)
    assert bench.drive(run_id).state == "failed"
    stage = bench.stage(run_id, "sft")
    assert (stage.reason, len(bench.ledger.attempts(run_id))) == ("BudgetExceeded", 1)
    assert "(when the attempt began, 600 s were left of budget.wall_clock: 600 s)" in stage.message


def test_of_a_gang_the_stage_names_the_pod_that_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PodGroup", lambda gpus: PodGroup("rollout", max=2, gpus=gpus))
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    while not bench.launched:
        bench.reconciler.tick(run_id)
    bench.executor.lose(bench.ledger.attempts(run_id)[0].name, Cause.OUT_OF_MEMORY, pod="rollout-1")
    assert bench.drive(run_id).state == "failed"
    assert "out of memory (pod rollout-1 on somewhere: out of memory)" in bench.stage(run_id, "sft").message


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN must not be in plain text; name it in secrets"),
        ({"environment": {"aws_secret_access_key": "x"}}, "aws_secret_access_key must not"),
        ({"gang": ()}, "got none"),
        ({"gang": (PodGroup("a"), PodGroup("a"))}, "got a, a"),
    ],
)
def test_a_malformed_request_is_refused(words: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        JobSpec("n", "file:///a", "m", **words)
    assert JobSpec("n", "file:///a", "m", {"TOKENIZERS_PARALLELISM": "false"}).devices == 0


@pytest.mark.parametrize(("least", "most"), [(2, 1), (-1, 1), (0, 0)])
def test_a_group_has_pods(least: int, most: int) -> None:
    with pytest.raises(InputError, match=f"got {least}, {most}"):
        PodGroup(min=least, max=most)


def test_audit_29_a_request_that_somebody_else_wrote_gets_no_secret(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = dies_before_submitting(bench, monkeypatch)
    path = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0]).path / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "secrets": ["AWS_SECRET_ACCESS_KEY"]}))
    assert bench.drive(run_id).state == "failed"
    message = bench.stage(run_id, "sft").message
    assert "request.json names secrets that its run does not declare: 'AWS_SECRET_ACCESS_KEY'" in message
    assert (bench.executor.launched, "\n" in message) == ([], False)


def test_audit_29_a_secret_that_the_operator_took_back_reaches_no_later_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_back(_: AttemptFolder) -> int:
        monkeypatch.setenv(SECRETS, "default/OTHER_KEY,bens/JUDGE_KEY")
        return -9

    monkeypatch.setenv(SECRETS, "default/JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "sk-0123456789")
    bench.scripts["grpo"] = [taken_back, train()]
    bench.jobs = replace(bench.jobs, access=SimpleNamespace(give=lambda *_, **__: None))  # type: ignore[arg-type]
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")
    grpo = {"kind": "grpo", "data": "train", "reward": "exact", "steps": 2, "max_new_tokens": 8}
    rewards = {"exact": {"ref": "reward:sort", "secrets": ["JUDGE_KEY"]}}
    run_id = bench.submit(**{**TRAIN_ONLY, "stages": {"grpo": grpo}, "rewards": rewards})
    assert bench.drive(run_id).state == "failed"
    assert [asked.secrets for asked in bench.executor.launched] == [("JUDGE_KEY",)]
    message = bench.stage(run_id, "grpo").message
    assert (
        f"JUDGE_KEY: must be in {SECRETS} of the server as default/JUDGE_KEY; ask its operator, then posttrain retry"
        in message
    )


@pytest.mark.parametrize("value", ["short", "a            b"])
def test_audit_29_a_short_secret_is_refused_by_whoever_drives_before_the_first_stage_computes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", value)
    grpo = {"kind": "grpo", "model": "sft", "data": "train", "reward": "exact", "steps": 2, "max_new_tokens": 8}
    rewards = {"exact": {"ref": "reward:sort", "secrets": ["JUDGE_KEY"]}}
    stages = {**TRAIN_ONLY["stages"], "grpo": grpo}  # type: ignore[dict-item]
    run_id = bench.submit(**{**TRAIN_ONLY, "stages": stages, "rewards": rewards})
    assert bench.drive(run_id).state == "failed"
    assert bench.executor.launched == []
    assert (
        "secrets: JUDGE_KEY: the driver's environment must contain it, with 8 characters or more"
        in bench.stage(run_id, "sft").message
    )
