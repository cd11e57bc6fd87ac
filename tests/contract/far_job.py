"""A job for tests of the agent: reports steps, writes checkpoints and an output, and does what JOB_MODE says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.jobs import JobResult, Output, Progress
from posttrain.store.attempts import AttemptFolder, EventWriter, SpendingMeter


def checkpoint(folder: Path, step: int) -> None:
    made = folder / "checkpoints" / f"step-{step:08d}"
    made.mkdir(parents=True)
    data, state = f"weights of step {step}".encode() * 50, json.dumps({"tokens": 10 * step, "step": step}).encode()
    (made / "model.safetensors").write_bytes(data)
    (made / "state.json").write_bytes(state)
    shards = {"model.safetensors": digest_bytes(data), "state.json": digest_bytes(state)}
    (made / "COMMIT").write_text(json.dumps({"format": "posttrain.checkpoint/1", "step": step, "shards": shards}))


def main(folder: Path) -> int:
    attempt, mode = AttemptFolder(folder, job=True), os.environ["JOB_MODE"]
    order = attempt.read_order()
    if attempt.mailbox.start(order.epoch, "far job") is not None:
        return 75
    print("variables", *sorted(os.environ), flush=True)
    print("allowance", order.token_allowance, flush=True)
    if mode == "floods":
        while True:
            print("x" * 4096)
    if mode == "clashes":
        os._exit(73)
    if mode == "damages":
        attempt.events.mkdir(exist_ok=True)
        (attempt.events / "000001.jsonl").mkdir()
    with EventWriter(attempt, seconds=0.0) as sink, SpendingMeter(attempt) as meter:
        for step in range(1 + order.resumed_step, 4):
            meter(10 * step, 5)
            checkpoint(folder, step)
            sink(Progress(step, 3, "far", 10 * step, time.time()))
            print(f"step {step}", flush=True)
            hold = Path(os.environ["JOB_HOLD"])
            while step == 2 and hold.exists() and not attempt.stop_requested():
                time.sleep(0.02)
            if attempt.stop_requested():
                attempt.write_result(JobResult("stopped", tokens=10 * step))
                return 0
            if step == 2 and mode == "dies":
                os._exit(9)
            if mode == "escapes":
                attempt.write_result(JobResult("succeeded", {"table": Output("/etc/passwd", "file")}))
                return 0
    (folder / "outputs").mkdir()
    (folder / "outputs" / "table").write_text("1, 2, 3")
    if mode == "babbles":
        (folder / "result.json").write_text("{")
        return 0
    attempt.write_result(JobResult("succeeded", {"table": Output("outputs/table", "file")}, tokens=30))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
