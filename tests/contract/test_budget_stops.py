"""A real process that reports more than its budget, heeds no order and no SIGTERM: it is gone after the grace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrain.control.decide import STOP_GRACE_SECONDS
from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler
from posttrain.control.wakeups import OBSERVE_SECONDS
from posttrain.domain.canonical import digest_json
from posttrain.domain.jobs import JobCommand, JobOrder
from posttrain.domain.manifest import InputRef
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import SpendingMeter
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger, Stores

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local executor needs /proc")


class Clock:
    """Time that passes only when somebody sleeps."""

    time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Deaf(NativeTrainer):
    """Its jobs run on until they are killed."""

    def compile(self, order: JobOrder) -> JobCommand:
        words = {"PYTHONPATH": str(Path(__file__).parent), "JOB_MODE": "deaf"}
        return JobCommand("executor_job", words)


def _resolve(kind: str, text: str, called: object = None) -> InputRef:
    return InputRef(source="asset", name=f"{text}@1", digest=digest_json(text), form="file")


@pytest.mark.slow  # ten seconds between SIGTERM and SIGKILL
def test_audit_7_a_process_that_refuses_the_stop_is_killed_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalExecutor, "attests", False)
    clock = Clock()
    ledger = Ledger(Database(tmp_path / "ledger.db"), clock)
    stores = Stores(ledger, open_blobs(str(tmp_path / "blobs")), clock, "test")
    jobs = Jobs(LocalExecutor(), {"native": Deaf()}, AttemptFolders(tmp_path))
    raw = {"name": "r", "owner": "ada", "seed": 1, "model": "model:tiny", "data": {"train": "dataset:train"}}
    raw |= {"stages": {"sft": {"kind": "sft", "data": "train", "steps": 3}}, "budget": {"tokens": 1000}}
    manifest = plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", _resolve, jobs.trainers).manifest
    run_id, driver = submit(stores, manifest).run.id, Reconciler(stores, jobs, "here")
    while not [one for one in ledger.attempts(run_id) if one.state == "launched"]:
        driver.step(run_id)
        clock.sleep(0.1)
    (attempt,) = ledger.attempts(run_id)
    with SpendingMeter(jobs.folders.of(attempt)) as meter:
        meter(1001, 0)
    began = clock.now()
    while ledger.run(run_id).state == "running":
        driver.step(run_id)
        clock.sleep(0.5)
        assert clock.now() < began + 10 * STOP_GRACE_SECONDS
    (ended,) = ledger.attempts(run_id)
    assert (ledger.run(run_id).reason, ended.stop_cause, ended.tokens) == ("BudgetExceeded", "budget", 1001)
    assert (ended.stop_requested_at or 0.0) - began <= OBSERVE_SECONDS
    assert (ended.finished_at or 0.0) - (ended.stop_requested_at or 0.0) <= STOP_GRACE_SECONDS + 2.0
    ledger.close()
