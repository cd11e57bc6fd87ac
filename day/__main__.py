"""Plays the day with an installed wheel, without the checkout: `python -m day --wheel FILE --constraints FILE`.

The driver, the process that writes the trackers, and the job are killed in the middle of GRPO. Any failed check ends
the day with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE = 1800.0  # seconds for any step, on a busy machine
KILLED_AFTER = 25  # steps of GRPO; the last of them have no checkpoint yet
TRACKERS = ("csv", "tensorboard", "mlflow", "wandb")


class Day:
    """A folder and an environment in which commands run."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self.count = 0
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("POSTTRAIN", "PYTHON"))}
        self.environment = {**kept, "PATH": f"{python.parent}:{kept['PATH']}"}

    def say(self, text: str) -> None:
        """Print the title of the next chapter."""
        self.count += 1
        print(f"\n{self.count}. {text}", flush=True)

    def type(self, *words: str) -> None:
        """Run a command that must succeed; print it with its output."""
        print("$", *words, flush=True)
        done = subprocess.run(words, cwd=self.folder, env=self.environment, timeout=PATIENCE, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}")

    def ask(self, *words: str) -> Any:
        """Return the JSON that a command prints."""
        command = [*words, "-o", "json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, timeout=PATIENCE, check=True, capture_output=True
        )
        return json.loads(done.stdout)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command in the background."""
        print("$", *words, "&", flush=True)
        with open(self.folder / "killed.log", "wb") as log:
            return subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )


def main() -> None:
    """Play the day."""
    parser = argparse.ArgumentParser(prog="python -m day", description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="play it in this folder, which must be empty, and leave it there")
    options = parser.parse_args()
    began = time.monotonic()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="posttrain-day-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"--keep: must be an empty folder, got {folder}")
    try:
        play(Day(folder, folder / "venv" / "bin" / "python"), options.wheel.resolve(), options.constraints.resolve())
        print(f"\nthe day took {time.monotonic() - began:.0f} s", flush=True)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def play(day: Day, wheel: Path, constraints: Path) -> None:
    """Run all chapters, from the wheel to the checks of three trackers."""
    day.say("Install the wheel and the task's package into an empty environment")
    subprocess.run([sys.executable, "-m", "venv", day.folder / "venv"], check=True)
    install = [str(day.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    day.type(*install, "--constraint", str(constraints), f"{wheel}[tensorboard,mlflow,wandb]", "reasoning-gym")

    day.say("Rows and reward are the package's; the run file is ours")
    for name in ("make_rows.py", "reward.py", "model.yaml", "run.yaml"):
        shutil.copy(HERE / name, day.folder)
    day.type("python", "make_rows.py")
    day.type("posttrain", "init", *(word for kind in TRACKERS for word in ("--tracker", kind)))
    for name in ("train", "heldout"):
        day.type("posttrain", "asset", "add", f"dataset:{name}", f"{name}.jsonl")
    day.type("posttrain", "asset", "create", "model:tiny", "model.yaml")
    day.type("posttrain", "plan", "run.yaml")

    day.say("SFT, then GRPO; driver, tracker and job are killed in the middle of it")
    run = interrupted(day)
    day.type("posttrain", "attach", run)

    day.say("The gate against the SFT stage let it through")
    day.type("posttrain", "compare", f"{run}/baseline-sft.evaluate", f"{run}/evaluate")
    day.type("posttrain", "lineage", "prod")

    day.say("Exported, it answers in plain transformers as the gate saw it answer")
    day.type("posttrain", "export", "prod", "exported")
    items = next((day.folder / ".posttrain" / "runs" / run / "evaluate").glob("*/outputs/items.parquet"))
    day.type("python", str(HERE / "check_export.py"), "exported", str(items))

    day.say("TensorBoard, MLflow and W&B show every point once")
    day.type("posttrain", "track", run)
    day.type("python", str(HERE / "check_trackers.py"), run, str(day.folder / ".posttrain" / "tracking"))


def interrupted(day: Day) -> str:
    """Start the run and kill all its processes in the middle of GRPO; return the run's id."""
    driver = day.start("posttrain", "run", "run.yaml")
    run = wait_for(lambda: running(day, driver), "the run to be submitted")

    def far_enough() -> bool:
        if driver.poll() is not None:
            raise SystemExit(f"the run ended before it could be killed:\n{(day.folder / 'killed.log').read_text()}")
        stages = {stage["name"]: stage for stage in day.ask("posttrain", "get", run)["stages"]}
        return int(stages["grpo"]["step"] or 0) >= KILLED_AFTER

    wait_for(far_enough, f"step {KILLED_AFTER} of GRPO")
    claim = next((day.folder / ".posttrain" / "runs" / run / "grpo").glob("*/supervisor.json"))
    job = json.loads(claim.read_bytes())["job_pid"]
    victims = {"driver": [driver.pid], "tracker": children(driver.pid, "track"), "job": [job]}
    for name, pids in victims.items():
        if not pids:
            raise SystemExit(f"there is no {name} to kill")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        print(f"killed the {name} ({', '.join(map(str, pids))})", flush=True)
    driver.wait()
    return str(run)


def running(day: Day, driver: subprocess.Popen[bytes]) -> str:
    """Return the run's id; empty while there is no run."""
    if driver.poll() is not None:
        raise SystemExit(f"posttrain run ended:\n{(day.folder / 'killed.log').read_text()}")
    return next((str(run["id"]) for run in day.ask("posttrain", "ls")["runs"] if run["name"] == "day"), "")


def children(parent: int, word: str) -> list[int]:
    """Return the processes that `parent` started whose command line contains the word."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found += [int(entry.name)] if any(word in one for one in words) else []
        except OSError:  # ended in the meantime
            continue
    return found


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """Poll `look`; return its first non-empty result."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.5)
    return found


if __name__ == "__main__":
    main()
