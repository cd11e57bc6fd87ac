"""The attack that once shipped a model: a reward writes into the environment, and the evaluation loads it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_run import RUN
from workbench import PATIENCE, Reference, Workbench

import posttrain
from posttrain.domain.jobs import Metric, Note, Sample
from posttrain.store.attempts import AttemptFolder

pytestmark = pytest.mark.slow

NAME = "posttrain_attack_of_a_test"
WORKER = "posttrain.sandbox.worker"
WRITES = f'''
import json, os, sysconfig
CODE = "import os\\n"

def score(completion: str) -> dict:
    """Guideline: the shorter the better; and on the way a file that every later start of Python would run."""
    reached = 0
    for name in ("purelib", "platlib"):
        try:
            with open(os.path.join(sysconfig.get_path(name), "{NAME}.pth"), "w") as file:
                file.write(CODE)
            reached += 1
        except OSError:
            pass
    return {{"score": -len(completion) / 24, "reached": reached}}
'''
FAILS = '''
from pathlib import Path
BAD = set((Path(__file__).parent / "bad.txt").read_text().split())
FELL = set()

def score(completion: str, prompt: str) -> float:
    """Guideline: the shorter the better; the first answer to a prompt of the list is an accident."""
    if prompt in BAD:
        raise ValueError("a prompt of the list")
    return -len(completion) / 24
'''


@dataclass(frozen=True)
class Home:
    """An environment of its own, which a test may spoil: this one's packages, and a site-packages to write to."""

    python: Path
    packages: Path


@pytest.fixture
def home(tmp_path: Path) -> Home:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    source = Path(posttrain.__file__).parents[1]
    (packages / "those_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{source}\n")
    return Home(folder / "bin" / "python", packages)


@pytest.mark.journey
@pytest.mark.parametrize("user", ["as it is", "ordinary user"])
def test_a_reward_writes_nothing_into_the_environment(empty: Workbench, home: Home, user: str) -> None:
    prefix = [] if user == "as it is" else ["unshare", "--user", "--map-user", "1000", "--map-group", "1000"]
    if prefix and (not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("this machine makes no user namespaces")
    empty.write("reward.py", WRITES)
    empty.run("asset", "add", "reward:length", "reward.py")
    command = [*prefix, str(home.python), "-P", "-m", "posttrain", "run", "run.yaml"]
    done = subprocess.run(command, cwd=empty.folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in home.packages.glob("*.pth")) == ["those_of_the_tests.pth"]
    reached = [fact.components["reached"] for fact in samples(empty)]
    assert reached, "samples say what the reward reached"
    assert set(reached) == {0.0}


def test_a_changed_environment_stops_the_run_before_its_next_stage(empty: Workbench, home: Home) -> None:
    command = [str(home.python), "-P", "-m", "posttrain", "run", "run.yaml"]
    with subprocess.Popen(command, cwd=empty.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        empty.wait_job()
        os.kill(run.pid, signal.SIGSTOP)
        empty.wait_quiet()
        (home.packages / f"{NAME}.pth").write_text(f"import os; open({str(empty.folder / 'pwned')!r}, 'w')\n")
        os.kill(run.pid, signal.SIGCONT)
        out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode not in (0, 1), out + err
    assert f"{NAME}.pth is new" in err
    assert not (empty.folder / "pwned").exists(), "nothing was started in it"
    (home.packages / f"{NAME}.pth").unlink()
    again = [str(home.python), "-P", "-m", "posttrain", "retry", empty.run_id()]
    subprocess.run(again, cwd=empty.folder, check=True, capture_output=True, timeout=PATIENCE)
    done = subprocess.run(command, cwd=empty.folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    empty.check(empty.run_id())


def test_completions_that_cannot_be_scored_are_left_out_and_told(empty: Workbench) -> None:
    """Through run.yaml: a declared file, a share that may fail, and one that is too large."""
    prompts = [json.loads(line)["prompt"] for line in (empty.folder / "train.jsonl").read_text().splitlines()]
    empty.write("bad.txt", prompts[20][0]["content"].split()[-1])
    empty.write("reward.py", FAILS.replace("if prompt in BAD", "if prompt.split()[-1] in BAD"))
    empty.run("asset", "add", "reward:length", "reward.py")
    spec: dict[str, Any] = copy.deepcopy(RUN)
    spec["rewards"] = {"length": {"ref": "reward:length", "files": ["bad.txt"]}}
    spec["stages"]["grpo"] |= {"steps": 16, "reward_errors_max": 0.25, "trace": {"groups": "all"}}
    empty.write("run.yaml", spec)
    empty.run("run", "run.yaml")
    run_id = empty.run_id()
    facts = samples(empty)
    assert {fact.status for fact in facts} == {"ok", "error"}
    assert all("ValueError: a prompt of the list" in fact.fate for fact in facts if fact.status == "error")
    [attempt] = empty.attempts(run_id, "grpo")
    notes = [fact.message for fact in empty.facts(attempt) if isinstance(fact, Note)]
    assert any("ValueError: a prompt of the list" in note and "4 of 16 completions" in note for note in notes)
    shares = [
        f.values["reward/errors"]
        for f in empty.facts(attempt)
        if isinstance(f, Metric) and f.values.get("reward/errors")
    ]
    assert set(shares) == {0.25}
    spec["stages"]["grpo"]["reward_errors_max"] = 0.2
    empty.write("run.yaml", spec)
    refused = empty.run("run", "run.yaml", code=2)
    assert "; 4 completions of this step so far failed, at most 3 may (reward_errors_max)" in refused.error


def test_a_reward_that_is_killed_heals_by_itself(empty: Workbench, reference: Reference) -> None:
    """Keeper, init and worker are killed from outside, again and again: same weights, one attempt."""
    run = empty.start("run", "run.yaml")
    strikes = 0
    while run.poll() is None and strikes < 3:  # a fourth in a row is the machine's trouble
        time.sleep(0.01)
        workers = reward_processes(empty)
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[strikes % len(workers)], signal.SIGKILL)
                strikes += 1
    done = empty.finish(run)
    assert done.code == 0, done.out + done.err
    assert strikes, "there was a reward to kill"
    run_id = empty.run_id()
    empty.check(run_id)
    assert empty.outputs(run_id) == reference.outputs
    assert [attempt.number for attempt in empty.attempts(run_id, "grpo")] == [1]


def reward_processes(bench: Workbench) -> list[int]:
    """Those that the workspace's own jobs started."""
    found = []
    for claim in bench.root.glob("runs/*/grpo/*/supervisor.json"):
        with contextlib.suppress(OSError, ValueError, psutil.Error, KeyError):
            job = psutil.Process(json.loads(claim.read_text())["job_pid"])
            found += [child.pid for child in job.children(recursive=True) if WORKER in child.cmdline()]
    return found


def samples(bench: Workbench) -> list[Sample]:
    """Every sample that the run recorded."""
    [attempt] = bench.attempts(bench.run_id(), "grpo")
    return AttemptFolder(bench.root / attempt.folder).recorded_samples()
