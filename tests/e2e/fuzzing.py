"""Who is struck in a run, in which phase, and with which signal: dealt from a seed, so that all come up equally often.

A phase is a stage of the run, or `submit`: the time until the run is in the ledger. A strike waits until its victim is
there in its phase, and then for a moment that the seed chooses: while the process starts, or once the job has begun its
work. The shortest phases (submit, gate, release) have marked places too, at which the command kills itself.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from workbench import Workbench

from posttrain.app.workspace import Workspace
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import StageRecord
from posttrain.store.attempts import AttemptFolder

BASELINE = "baseline-evaluate"  # a stage of those runs alone whose channel has a release already
JOBS = ("sft", "grpo", "evaluate", BASELINE)
REWARDED = ("grpo",)  # stages with a reward, so with its keeper, the init of its namespace, and its worker
PHASES = {
    "command": ("submit", *JOBS, "gate", "release"),
    "supervisor": JOBS,
    "job": JOBS,
    "keeper": REWARDED,
    "init": REWARDED,
    "worker": REWARDED,
    "fork server": JOBS,
    "launcher": ("launch",),  # a supervisor on its way to its claim, or to its job: at marked places of its own
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
PLACES = {  # marked ones of the phases that a signal from outside meets now and then only
    "launch": ("supervisor.before_claim", "supervisor.before_spawn"),
    "submit": ("submit.before_commit", "submit.after_commit"),
    "gate": ("gate.before_commit", "gate.after_commit"),
    "release": ("promote.before_commit", "promote.after_commit"),
}
ELSEWHERE = (  # marked places of the command in any stage that has a job
    *("attempt.after_intent", "attempt.after_launch", "attempt.after_handle"),
    *("collect.before_publish", "collect.after_publish", "collect.after_commit", "sealer.before_commit"),
)
PER_RUN, WITH_BASELINE, OF_BASELINE = 5, 3, 3  # strikes; every third run has a baseline, and three strikes at it
_FORK_SERVER = "posttrain.execution.executors.local.forkserver"
_WORKER = "posttrain.sandbox.worker"
_SHORTLY = 0.3  # seconds; what training takes here
_LONGEST_STOP = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Strike:
    """One signal to one process."""

    victim: str
    phase: str
    sent: signal.Signals

    @property
    def ends_job(self) -> bool:
        """Whether an attempt may be lost by it; one that anything else costs is a mistake."""
        return self.victim in ("supervisor", "job", "launcher") and self.sent != signal.SIGSTOP

    def __str__(self) -> str:
        return f"{self.sent.name} {self.victim} in {self.phase}"


STRIKES = tuple(
    Strike(victim, phase, sent)
    for victim, phases in PHASES.items()
    for phase in phases
    for sent in (SIGNALS[:1] if victim == "launcher" else SIGNALS)
)
COLUMNS = ("launch", *PHASES["command"])


def has_baseline(seed: int) -> bool:
    """Whether the run of this seed compares with a release."""
    return seed % WITH_BASELINE == 0


def dealt(seed: int) -> list[Strike]:
    """The strikes of one run, in the order of its phases."""
    own = OF_BASELINE if has_baseline(seed) else 0
    compared = -(-seed // WITH_BASELINE) * OF_BASELINE  # cards that runs before this one took
    baseline = [strike for strike in STRIKES if strike.phase == BASELINE]
    others = [strike for strike in STRIKES if strike.phase != BASELINE]
    found = [*_cards(baseline, compared, own), *_cards(others, PER_RUN * seed - compared, PER_RUN - own)]
    return sorted(found, key=lambda strike: COLUMNS.index(strike.phase))


def _cards(deck: Sequence[Strike], first: int, count: int) -> Iterator[Strike]:
    """Cards of a shuffled deck that is gone through again and again."""
    shuffled = _shuffled(tuple(deck), OF_BASELINE if deck[0].phase == BASELINE else PER_RUN)
    for number in range(first, first + count):
        yield shuffled[number % len(deck)]


def with_owed(own: Sequence[Strike], owed: Sequence[Strike], *, baseline: bool) -> list[Strike]:
    """The strikes of a run with one that an earlier run owes, where it can be met beside them."""
    phases = {one.phase for one in own if one.victim == "fork server"}
    can = (
        one
        for one in owed
        if one not in own
        and (baseline or one.phase != BASELINE)
        and not (one.victim == "fork server" and one.phase in phases)
    )
    return sorted([*own, *itertools.islice(can, 1)], key=lambda strike: COLUMNS.index(strike.phase))


@functools.cache
def _shuffled(deck: tuple[Strike, ...], most: int) -> list[Strike]:
    """A deck in which a run is dealt one strike at the fork server of a phase: a second one finds none there.

    Args:
        most: cards of it that a run gets.
    """
    for seed in itertools.count(len(deck)):
        cards = random.Random(seed).sample(deck, len(deck))
        hands = (cards[first:] + cards[:first] for first in range(len(cards)))
        struck = ([one.phase for one in hand[:most] if one.victim == "fork server"] for hand in hands)
        if all(len(set(phases)) == len(phases) for phases in struck):
            return cards
    raise AssertionError("the loop returns")


@dataclass(slots=True)
class Seen:
    """A process that could be struck now."""

    pid: int
    at_work: bool  # its job has said something, or there is no job to wait for


class Watch:
    """What is there of one run at a moment."""

    def __init__(self, bench: Workbench) -> None:
        self.bench, self._workspace = bench, Workspace(bench.root)
        self._before = {run.id for run in self._workspace.ledger.runs()}
        self.alive: dict[Path, tuple[float, float]] = {}  # attempt folder → first and last time its job was seen

    def close(self) -> None:
        """Look no more."""
        self._workspace.close()

    def look(self, commands: Sequence[subprocess.Popen[str]]) -> dict[tuple[str, str], Seen]:
        """(victim, phase) → the process."""
        found = {}
        ledger = self._workspace.ledger
        run = next((run for run in ledger.runs(limit=1) if run.id not in self._before), None)
        stages = ledger.stages(run.id) if run else []
        owner = int(run.lease_owner.split(":")[1]) if run and run.lease_owner else None
        living = [command.pid for command in commands if command.poll() is None]
        for pid in [pid for pid in living if pid == owner] or living[:1]:
            found["command", _phase(stages) if run else "submit"] = Seen(pid, True)
            found |= {("fork server", _phase(stages)): Seen(server, True) for server in _fork_servers(pid)}
        for folder in self.bench.root.glob(f"runs/{run.id}/*/*/") if run else ():
            phase, work = folder.parent.name, any(AttemptFolder(folder).events.glob("*"))
            for victim, pid in _of_attempt(folder, rewarded=phase in REWARDED):
                found[victim, phase] = Seen(pid, work)
                if victim == "job":
                    self.alive[folder] = (self.alive.get(folder, (time.time(), 0.0))[0], time.time())
        return found


def _phase(stages: Iterable[StageRecord]) -> str:
    """The stage that runs; else the one that runs next; else nothing."""
    left = [stage for stage in stages if not is_final("stage", stage.state)]
    return next((s.name for s in left if s.state == "running"), left[0].name if left else "")


def _of_attempt(folder: Path, rewarded: bool) -> Iterator[tuple[str, int]]:
    """(victim, process id) of an attempt's living processes."""
    with suppress(OSError, ValueError, KeyError):
        claim = json.loads((folder / "supervisor.json").read_bytes())
        if _lives(claim["pid"], folder):
            yield "supervisor", claim["pid"]
        if not _lives(claim["job_pid"], folder):
            return
        yield "job", claim["job_pid"]
        if rewarded:
            yield from _rewards(claim["job_pid"])


def _fork_servers(command: int) -> Iterator[int]:
    with suppress(psutil.Error):
        for process in psutil.Process(command).children():
            with suppress(psutil.Error, OSError):
                if _FORK_SERVER in process.cmdline():
                    yield process.pid


def _lives(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _rewards(job: int) -> Iterator[tuple[str, int]]:
    """The keeper is the job's child, the init is pid 1 of a namespace, the worker is the init's child."""
    with suppress(psutil.Error):
        for process in psutil.Process(job).children(recursive=True):
            with suppress(psutil.Error, OSError):
                if _WORKER in process.cmdline():
                    numbers = _numbers(process.pid)
                    apart = numbers[-1] == 1 if len(numbers) > 1 else None
                    yield {None: "keeper", True: "init", False: "worker"}[apart], process.pid


def _numbers(pid: int) -> list[int]:
    """A process's ids, from the outermost namespace to its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next([int(word) for word in line.split()[1:]] for line in lines if line.startswith("NSpid:"))


class Fuzz:
    """One disturbed run.

    Args:
        seconds: how long each stage's job took undisturbed, from which moments are chosen; being wrong costs nothing.
        owed: strikes of runs before that met nobody; on a busy machine short phases go by.
    """

    def __init__(self, bench: Workbench, seed: int, seconds: dict[str, float], owed: Sequence[Strike] = ()) -> None:
        self.bench, self.rng, self.seconds = bench, random.Random(seed), seconds
        self.left = with_owed(dealt(seed), owed, baseline=has_baseline(seed))
        self.struck: list[Strike] = []
        self.watch = Watch(bench)
        self._due: dict[Strike, float] = {}
        self._moments = {strike: self._moment(strike) for strike in dict.fromkeys(self.left)}
        self._marks: dict[Path, Strike] = {}
        self.temporary = bench.folder / "tmp"
        self.temporary.mkdir()

    def _moment(self, strike: Strike) -> tuple[float, bool]:
        """How long after its victim was first seen; and whether to wait for the job's first word before."""
        if strike.phase in PLACES:
            return self.rng.uniform(0.0, 0.8 if strike.phase == "submit" else 0.01), False
        if strike.victim in ("command", "supervisor", "job") and self.rng.random() < 0.5:
            return self.rng.uniform(
                0.0, (0.5 if strike.victim == "command" else 0.9) * self.seconds[strike.phase]
            ), False
        shortly = _SHORTLY / (
            3 if strike.victim in ("keeper", "init", "worker") else 1
        )  # they leave before the job does
        return self.rng.uniform(0.0, shortly), self.rng.random() < 0.7

    def environment(self) -> dict[str, str]:
        """Of the next command: where its temporary files go, and at which marked place it dies."""
        given = {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.bench.folder / "torch")}
        marked = next((s for s in self.left if s.phase in PLACES and s.sent == signal.SIGKILL), None)
        if marked:
            place, nth = self.rng.choice(PLACES[marked.phase]), 1
        elif not self.rng.randrange(4):
            place, nth = self.rng.choice(ELSEWHERE), self.rng.randint(1, 3)
        else:
            return given
        mark = self.bench.folder / f"died-{len(self._marks)}"
        self._marks[mark] = marked or Strike("command", place, signal.SIGKILL)
        return given | {"POSTTRAIN_CRASHPOINT": f"{place}@{nth}", "POSTTRAIN_CRASHPOINT_ONCE": str(mark)}

    def disturb(self, commands: Sequence[subprocess.Popen[str]]) -> None:
        """Strike while any of the commands runs."""
        while any(command.poll() is None for command in commands):
            self.bench.live()  # sees to it that no stage has two jobs
            seen, now = self.watch.look(commands), time.monotonic()
            for strike in self.left:
                process = seen.get((strike.victim, strike.phase))
                if process is None or (strike.phase in PLACES and strike.sent == signal.SIGKILL):
                    continue
                wait, for_work = self._moments[strike]
                if process.at_work or not for_work:
                    self._due.setdefault(strike, now + wait)
                worked = process.at_work and strike.victim != "command"  # the machine is faster than it was: at once
                if now >= (0.0 if worked and not for_work else self._due.get(strike, float("inf"))):
                    self._hit(process.pid, strike)
                    break
            if not any(phase in PLACES for _, phase in seen):
                time.sleep(0.02)
        for mark in [mark for mark in self._marks if mark.exists()]:
            self._done(self._marks.pop(mark))

    def _hit(self, pid: int, strike: Strike) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, strike.sent)
            if strike.sent == signal.SIGSTOP:
                time.sleep(self.rng.uniform(0.1, _LONGEST_STOP))
                os.kill(pid, signal.SIGCONT)
            self._done(strike)

    def _done(self, strike: Strike) -> None:
        self.struck.append(strike)
        if strike in self.left:
            self.left.remove(strike)


def table(struck: Iterable[Strike]) -> str:
    """How often each victim was struck in each phase: KILL/TERM/STOP, `·` for what there cannot be."""
    counts = dict.fromkeys(STRIKES, 0)
    for strike in struck:
        counts[strike] = counts.get(strike, 0) + 1
    elsewhere = {s.phase: n for s, n in counts.items() if s not in STRIKES}
    width = max(map(len, JOBS)) + 2
    rows = ["victim      " + "".join(f"{phase:>{width}}" for phase in COLUMNS)]
    for victim, phases in PHASES.items():
        cells = partial(_cell, counts, victim, phases)
        rows.append(f"{victim:<12}" + "".join(f"{cells(phase):>{width}}" for phase in COLUMNS))
    rows.append("command at  " + ", ".join(f"{place} {count}" for place, count in sorted(elsewhere.items())))
    return "\n".join(rows)


def _cell(counts: dict[Strike, int], victim: str, phases: Sequence[str], phase: str) -> str:
    return "/".join(str(counts.get(Strike(victim, phase, s), "·")) for s in SIGNALS) if phase in phases else "·"
