"""Random signals at random moments to every process of a run: `make fuzz SEED=1 RUNS=30`.

One run is a whole one, from supervised fine-tuning to the release. Its command, supervisors, jobs and what the jobs
start (the reward's keeper and worker) are killed, told to end, or stopped for a while; the command also dies at a
marked place of submission, launch, collection, gate or release. Repeating the same command must heal it: the weights
are those of the undisturbed run, one release, a chain that holds, no process left, every attempt billed.

    SEED     of the first run; run N has seed SEED + N
    RUNS     how many; without it nothing here runs
    VICTIMS  some of command,supervisor,job,reward (all by default)
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from workbench import Live, Reference, Workbench

from posttrain.domain.facts import Progress
from posttrain.store.attempts import AttemptFolder

RUNS, SEED = int(os.environ.get("RUNS") or 0), int(os.environ.get("SEED") or 1)
VICTIMS = tuple((os.environ.get("VICTIMS") or "command,supervisor,job,reward").split(","))
MOST_STRIKES, MOST_COMMANDS, LONGEST_PAUSE = 8, 30, 3.0
MOST_COMMANDS_STRUCK = 2  # it is always there: the other strikes are for jobs, whenever there is one
PLACES = (
    *("submit.before_commit", "submit.after_commit", "attempt.after_intent", "attempt.after_launch"),
    *("attempt.after_handle", "collect.before_publish", "collect.after_publish", "collect.after_commit"),
    *(
        "gate.before_commit",
        "gate.after_commit",
        "promote.before_commit",
        "promote.after_commit",
        "sealer.before_commit",
    ),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not RUNS, reason="runs by `make fuzz SEED=… RUNS=…`"),
]


class Fuzz:
    """One disturbed run."""

    def __init__(self, bench: Workbench, seed: int) -> None:
        self.bench, self.rng = bench, random.Random(seed)
        self.strikes = self.rng.randint(3, MOST_STRIKES)
        self.done: Counter[str] = Counter()  # "SIGKILL job in grpo" → how often
        self.ran: set[Path] = set()  # attempts whose job was seen

    def run(self) -> None:
        """The same command again and again until it says that the run succeeded."""
        for number in range(MOST_COMMANDS):
            process = self.bench.start("run", "run.yaml", env=self.mine(number))
            self.disturb(process)
            ended = self.bench.finish(process)
            if ended.code == 0:
                return
            assert ended.code < 0 or ended.code in (6, 9, 11, 12, 130), ended
            assert "Traceback" not in ended.err
        raise AssertionError(f"not healed by {MOST_COMMANDS} commands: {ended}; struck: {dict(self.done)}")

    def mine(self, number: int) -> dict[str, str]:
        """The environment in which some command dies at some marked place, once."""
        if self.rng.random() < 0.5 or number > 10:
            return {}
        place = self.rng.choice(PLACES)
        self.done[f"armed {place}"] += 1
        mark = self.bench.folder / f"died-{number}"
        return {"POSTTRAIN_CRASHPOINT": f"{place}@{self.rng.randint(1, 3)}", "POSTTRAIN_CRASHPOINT_ONCE": str(mark)}

    def disturb(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            until = time.monotonic() + self.rng.uniform(0.0, LONGEST_PAUSE)
            while time.monotonic() < until and process.poll() is None:
                self.ran |= {live.attempt for live in self.bench.live("job")}
                time.sleep(0.02)
            if self.strikes and process.poll() is None:
                self.strikes -= self.strike(process)

    def strike(self, process: subprocess.Popen[str]) -> int:
        """Send a signal to a random process; how many were sent."""
        struck = sum(count for what, count in self.done.items() if what.endswith(" command"))
        spared = "command" if struck >= MOST_COMMANDS_STRUCK and len(VICTIMS) > 1 else ""
        victim, number = (
            self.rng.choice([v for v in VICTIMS if v != spared]),
            self.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)),
        )
        where = ""
        if victim == "command":
            pids = [process.pid]
        else:
            lives = self.bench.live("supervisor" if victim == "supervisor" else "job")
            pids = (
                [live.pid for live in lives] if victim != "reward" else [p for live in lives for p in started_by(live)]
            )
            where = f" in {lives[0].attempt.parent.name}" if lives else ""
        if not pids:
            return 0
        pid = self.rng.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(self.rng.uniform(0.1, 2.0))
                os.kill(pid, signal.SIGCONT)
        self.done[f"{number.name} {victim}{where}"] += 1
        return 1


def started_by(job: Live) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
    return []


@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_a_disturbed_run_is_healed_by_the_same_command(seed: int, empty: Workbench, reference: Reference) -> None:
    fuzz = Fuzz(empty, seed)
    fuzz.run()
    run_id = empty.run_id()
    empty.check(run_id)
    assert empty.outputs(run_id) == reference.outputs, f"struck: {dict(fuzz.done)}"
    with empty.open() as workspace:
        history, stages = workspace.ledger.history("prod"), workspace.ledger.stages(run_id)
    assert [(e.run_id, e.action) for e in history] == [(run_id, "promote")]
    attempts = empty.attempts(run_id)
    for attempt in attempts:
        said = [fact.tokens for fact in empty.facts(attempt) if isinstance(fact, Progress)]
        folder = AttemptFolder(empty.root / attempt.folder)
        inherited = folder.read_order().tokens_inherited if folder.has_order() else 0
        assert attempt.tokens >= (said[-1] if said else inherited) - inherited, f"{attempt.name} is not billed"
        assert attempt.seconds > 0 or empty.root / attempt.folder not in fuzz.ran, f"{attempt.name} ran for nothing"
    assert sum(stage.tokens for stage in stages) == sum(attempt.tokens for attempt in attempts)
    print(f"seed {seed}: {len(attempts)} attempts; {dict(fuzz.done)}")
