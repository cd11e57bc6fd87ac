"""Drives one run of stages that need a device each: `device_driver.py WORKSPACE NAME LOCKS DEVICES`, to its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler
from posttrain.domain.canonical import digest_json
from posttrain.domain.jobs import JobCommand, JobOrder
from posttrain.domain.lifecycle import is_final
from posttrain.domain.manifest import InputRef
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.executors.local.devices import Devices
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.processes import process_alive, process_name
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database, SystemClock
from posttrain.store.ledger import Ledger, Stores

_STAGES = 2


class Trainer(NativeTrainer):
    """The native trainer, whose jobs only say which devices they have."""

    def compile(self, order: JobOrder) -> JobCommand:
        words = {"PYTHONPATH": str(Path(__file__).parent), "JOB_PROOFS": os.environ["JOB_PROOFS"]}
        return JobCommand("device_job", words, self.devices(order.kind, order.params))


class Executor(LocalExecutor):
    """The local executor, whose jobs compare no environment."""

    attests = False  # type: ignore[misc]  # hashing it is not what this is about


def resolve(kind: str, text: str) -> InputRef:
    return InputRef(source="asset", name=f"{text}@1", digest=digest_json(text), form="file")


def main(root: Path, name: str, locks: str, devices: int) -> int:
    root.mkdir(exist_ok=True)
    clock = SystemClock()
    ledger = Ledger(Database(root / "ledger.db", create=True), clock)
    machine = Devices(tuple(str(number) for number in range(devices)), folder=locks)
    stores = Stores(ledger, open_blobs(str(root / "blobs")), clock, name)
    jobs = Jobs(Executor(None, lambda: machine), {"native": Trainer()}, AttemptFolders(root), slots=8)
    stages: Mapping[str, Any] = {
        f"s{n}": {"kind": "sft", "data": "train", "steps": n, "batch_size": 1 + sum(map(ord, name))}
        for n in range(1, _STAGES + 1)
    }
    raw = {"name": name, "owner": "ada", "seed": 1, "model": "model:tiny", "data": {"train": "dataset:train"}}
    raw |= {"stages": stages, "budget": {"attempts": 20}}
    manifest = plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", resolve, jobs.trainers).manifest
    reconciler = Reconciler(stores, jobs, process_name(), process_alive)
    run = submit(stores, manifest).run
    with reconciler.kept():
        while not is_final("run", run.state):
            tick = reconciler.step(run.id)
            run = tick.run
            if not tick.changed:
                reconciler.rest(0.1)
    print(run.id, run.state, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
