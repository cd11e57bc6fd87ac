"""Random signals to every process of a run, in every phase of it: `make fuzz SEED=1 RUNS=30`.

One run is a whole one, from supervised fine-tuning to the release; every third is judged against the release before.
Its command, supervisors, jobs, the fork server and the reward's keeper, init and worker are killed, told to end, or
stopped for a while, and supervisors are killed while they launch: five strikes a run, dealt so that over 30 runs each
(victim, phase, signal) comes up twice or more (`fuzzing`). Now and
then two terminals run the command, and it also dies at a marked place of its own. Repeating the same command must heal
the run: every artifact is that of the undisturbed run, one release, a lineage that verifies, no process and no
temporary file left, every attempt billed for what it did and for nothing else, and no attempt lost but to a strike.

Measured: `make fuzz SEED=1 RUNS=30`, commit `7ad05c7`, 2026-11-21, 19 min: 120 strikes (53 at the command, 9 of them at
marked places, 23 supervisor, 26 job, 6 keeper, 6 init, 6 worker); all 30 runs ended with the undisturbed run's
artifacts, and each of the 54 was met.

    SEED  of the first run; run N has seed SEED + N
    RUNS  how many; without it two runs (one in CI), so that what is here stays runnable
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzzing import BASELINE, STRIKES, Fuzz, Strike, dealt, has_baseline, table
from tiny_run import RUN, once
from workbench import Reference, Workbench

from posttrain import channel
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import AttemptFolder

RUNS, SEED = int(os.environ.get("RUNS") or 0), int(os.environ.get("SEED") or 1)
SEEDS = tuple(range(SEED, SEED + RUNS)) if RUNS else (3, 4)  # one of them with a baseline
MOST_COMMANDS = 20
ALL = 30  # runs after which nothing may be left that was never struck
UNSEEN = 3.0  # seconds that a job ran and need not be billed: no heart beats while its supervisor is stopped
CLOCKS = 1.05  # a clock that is being set and one that is not may differ so far
slow = pytest.mark.slow
STRUCK: list[Strike] = []
MISSED: list[Strike] = []  # met nobody in their run; a later run may owe them
SLOWLY = """
import time

def score(completion: str) -> float:
    time.sleep(0.02)
    return -len(completion) / 24
"""


@pytest.fixture(scope="session")
def origin(shared: Path, template: Workbench) -> Workbench:
    """A workspace whose reward takes its time, as judges do: it can be met at work."""

    def make(bench: Workbench) -> dict[str, Any]:
        bench.write("reward.py", SLOWLY)
        bench.run("asset", "add", "reward:length", "reward.py")
        return {}

    return once(shared / "slowly-rewarded", make, origin=template)[0]


@pytest.fixture(scope="session")
def alone(shared: Path, origin: Workbench) -> Reference:
    """The run that nobody disturbed, without a baseline."""
    bench, known = once(shared / "alone", undisturbed, origin=origin)
    return Reference(bench, **known)


@pytest.fixture(scope="session")
def released(shared: Path, origin: Workbench) -> Workbench:
    """A workspace whose channel has a release: of another model, evaluated in another way."""

    def make(bench: Workbench) -> dict[str, Any]:
        first = copy.deepcopy(RUN) | {"name": "first", "release": {"channel": "prod", "model": "sft"}}
        stages = first["stages"]
        stages["sft"]["steps"] = 4
        stages["evaluate"] = {"kind": "evaluate", "model": "sft"} | {"suites": stages["evaluate"]["suites"]}
        stages["evaluate"]["suites"]["heldout"]["max_new_tokens"] = 23
        del stages["grpo"], first["rewards"]
        first["gates"] = [{"name": "room", "metric": "heldout/response_tokens", "at_most": 22.9}]
        bench.write("first.yaml", first)
        bench.run("run", "first.yaml")
        return {}

    return once(shared / "released", make, origin=origin)[0]


@pytest.fixture(scope="session")
def compared(shared: Path, released: Workbench) -> Reference:
    """The run that nobody disturbed, with a baseline."""
    bench, known = once(shared / "compared", undisturbed, origin=released)
    return Reference(bench, **known)


def undisturbed(bench: Workbench) -> dict[str, Any]:
    bench.run("run", "run.yaml")
    return {"run_id": bench.run_id(), "outputs": bench.outputs(bench.run_id())}


def test_thirty_runs_in_a_row_are_dealt_every_strike() -> None:
    for first in range(100):
        counts = Counter(strike for seed in range(first, first + ALL) for strike in dealt(seed))
        assert counts.keys() == set(STRIKES)
        assert min(counts.values()) >= 2
    for seed in range(100):
        phases = [strike.phase for strike in dealt(seed) if strike.victim == "fork server"]
        assert len(set(phases)) == len(phases), "the second one would find no fork server"
    assert all(strike.phase != BASELINE for seed in range(100) if not has_baseline(seed) for strike in dealt(seed))


@slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if RUNS or has_baseline(seed) else pytest.mark.deep) for seed in SEEDS]
)
def test_a_disturbed_run_is_healed_by_the_same_command(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    baseline = has_baseline(seed)
    origin: Workbench = request.getfixturevalue("released" if baseline else "origin")
    reference: Reference = request.getfixturevalue("compared" if baseline else "alone")
    bench = origin.copy(tmp_path / "bench")
    try:
        fuzz = Fuzz(bench, seed, seconds_of(reference), [one for one in MISSED if one not in STRUCK])
        try:
            repeat(fuzz)
            check(fuzz, reference)
        except Exception as error:  # at once: the others take their time
            print(f"\nseed {seed} is not healed: {error}", flush=True)
            raise
        finally:
            fuzz.watch.close()
            STRUCK.extend(fuzz.struck)
            MISSED.extend(one for one in fuzz.left if one not in MISSED)
            missed = f"; not met: {', '.join(map(str, fuzz.left))}" if fuzz.left else ""
            attempts = len(bench.attempts(bench.run_id()))
            print(f"\nseed {seed}: {attempts} attempts; {', '.join(map(str, fuzz.struck))}{missed}", flush=True)
    finally:
        bench.clean()


@slow
def test_everybody_was_struck_in_every_phase() -> None:
    print("", table(STRUCK), sep="\n")
    never = [strike for strike in STRIKES if strike not in STRUCK]
    assert not never or RUNS < ALL, f"never struck in {RUNS} runs: {', '.join(map(str, never))}"


def repeat(fuzz: Fuzz) -> None:
    """The same command again and again, at times in two terminals, until it says that the run succeeded."""
    for _ in range(MOST_COMMANDS):
        environment = fuzz.environment()
        commands = [fuzz.bench.start("run", "run.yaml", env=environment)]
        if "POSTTRAIN_CRASHPOINT" not in environment and not fuzz.rng.randrange(4):  # which it might pass
            commands.append(fuzz.bench.start("run", "run.yaml", env=environment))
        fuzz.disturb(commands)
        ended = [fuzz.bench.finish(command) for command in commands]
        assert all(command.code <= 0 for command in ended), f"ended by more than a strike: {ended}"
        if 0 in [command.code for command in ended]:
            return
        if not fuzz.rng.randrange(3):
            fuzz.bench.wait_quiet()  # else the jobs are still there when the next command comes
    raise AssertionError(f"not healed by {MOST_COMMANDS} commands: {ended}; struck: {fuzz.struck}")


def check(fuzz: Fuzz, reference: Reference) -> None:
    bench = fuzz.bench
    run_id = bench.run_id()
    bench.check(run_id)
    assert artifacts(bench, run_id) == artifacts(reference.bench, reference.run_id)
    with bench.open() as workspace:
        verified = channel("prod", workspace).verify()
        ours = [(e.run_id, e.action) for e in workspace.ledger.history("prod") if e.run_id == run_id]
        runs = Counter(run.manifest_digest for run in workspace.ledger.runs())
    assert ours == [(run_id, "promote")]
    assert set(runs.values()) == {1}, "one submission is one run"
    assert verified.problems == ()
    assert verified.checked > 0
    assert sorted(path.name for path in fuzz.temporary.iterdir()) == []
    check_bills(fuzz, run_id, reference)
    again = bench.run("run", "run.yaml") if not fuzz.rng.randrange(4) else None
    with bench.open() as workspace:
        assert len(workspace.ledger.history("prod")) == (2 if BASELINE in artifacts(bench, run_id) else 1)
    assert again is None or f"run {run_id}" in again.out


def check_bills(fuzz: Fuzz, run_id: str, reference: Reference) -> None:
    """Each attempt is billed for what it did, once; none was lost that nobody struck."""
    bench, struck = fuzz.bench, Counter(strike.phase for strike in fuzz.struck if strike.ends_job)
    with bench.open() as workspace:
        stages, budget = workspace.ledger.stages(run_id), workspace.stores.manifest(workspace.ledger.run(run_id)).budget
    whole = {stage: tokens for stage, (_, tokens) in spent(reference.bench, reference.run_id).items()}
    for stage in stages:
        attempts = sorted(bench.attempts(run_id, stage.name), key=lambda attempt: attempt.number)
        assert len(attempts) <= 1 + struck[stage.name] + struck["launch"], (
            f"lost without a strike: {attempts}; {fuzz.struck}"
        )
        assert stage.tokens == sum(attempt.tokens for attempt in attempts)
        for attempt in attempts:
            check_bill(fuzz, attempt, whole[stage.name])
    assert sum(stage.tokens for stage in stages) <= (budget.tokens or 0)
    assert sum(attempt.seconds for attempt in bench.attempts(run_id)) <= (budget.wall_clock or 0)


def check_bill(fuzz: Fuzz, attempt: AttemptRecord, whole: int) -> None:
    """Tokens: its lineage's less what it took over. Seconds: as long as its job was seen, in the time that it had."""
    place = fuzz.bench.root / attempt.folder
    folder = AttemptFolder(place)
    inherited = folder.read_order().tokens_inherited if folder.has_order() else 0
    progress = folder.last_progress()
    said = max(progress.tokens if progress else inherited, folder.metered() or 0) - inherited
    assert attempt.tokens >= said, f"{attempt.name} is not billed"
    if attempt.state == "succeeded":
        assert inherited + attempt.tokens == whole, f"{attempt.name} is billed twice, or not for all"
    ended = attempt.finished_at or 0.0
    first, last = fuzz.watch.alive.get(place, (0.0, 0.0))
    assert attempt.seconds > 0 or not last, f"{attempt.name} ran for nothing"
    assert attempt.seconds >= min(last, ended) - first - UNSEEN, f"{attempt.name} ran longer than it is billed for"
    assert attempt.seconds <= (ended - attempt.created_at) * CLOCKS + UNSEEN, (
        f"{attempt.name} is billed for time in which it did not run"
    )


def artifacts(bench: Workbench, run_id: str) -> dict[str, Any]:
    """Stage → digests of all that it left: weights, answers, metrics, the gates' report."""
    with bench.open() as workspace:
        return {stage.name: stage.outputs for stage in workspace.ledger.stages(run_id) if stage.state == "succeeded"}


def spent(bench: Workbench, run_id: str) -> dict[str, tuple[float, int]]:
    """Stage → seconds and tokens."""
    with bench.open() as workspace:
        stages, attempts = workspace.ledger.stages(run_id), workspace.ledger.attempts(run_id)
    return {s.name: (sum(a.seconds for a in attempts if a.stage == s.name), s.tokens) for s in stages}


def seconds_of(reference: Reference) -> dict[str, float]:
    """Stage → how long its job took when nobody disturbed it."""
    return {stage: seconds for stage, (seconds, _) in spent(reference.bench, reference.run_id).items()}
