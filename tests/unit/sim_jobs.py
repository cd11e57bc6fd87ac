"""Jobs of a simulated world: each begins its attempt, computes for a while, says how far it is, and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from control_bench import metrics_table
from sim_ports import Rows, SimExecutor
from sim_world import Actor, World

from posttrain.domain.errors import FailureClass, InfrastructureError
from posttrain.domain.jobs import ANOTHER_RUNS, Cause, CheckpointCommit, Failure, JobOrder, JobResult, Output, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.store.attempts import AttemptFolder, EventWriter, SpendingMeter
from posttrain.store.mailbox import ControlKind
from posttrain.store.trees import file_digest

T = TypeVar("T")
_ITEMS = 200
TOKENS = 10  # of a step
_TRIES = 20  # of a job at a channel that does not answer


@dataclass
class SimJob:
    """One job that an executor started."""

    name: str
    number: int  # of those with this name
    stage: str  # RUN/STAGE
    actor: Actor
    process: str  # its identity
    computes: bool = False
    lives: bool = True


class Jobs:
    """All jobs of a world, and what must hold of them."""

    def __init__(self, world: World, folder: Callable[[Path], AttemptFolder], rows: Callable[[], Rows]) -> None:
        self._world, self._folder, self._rows = world, folder, rows
        self.executor: SimExecutor
        self.all: list[SimJob] = []
        self.changed: Callable[[str], None] = lambda run_id: None  # a job of a run moved
        self.rates: dict[str, float] = {}
        self.answered: list[str] = []  # names of attempts whose job said that it succeeded
        self.spent: dict[str, int] = {}  # run → tokens that its jobs really spent, those of steps cut short too
        self.long = 3000.0  # seconds that a job computes at most
        self._tables: dict[int, bytes] = {}

    def begin(self, request: JobSpec, number: int) -> None:
        """The executor has a new job."""
        if self.executor.idempotent:
            twins = [job for job in self.all if job.lives and job.name == request.name and not self.is_zombie(job)]
            self._world.must(not twins, f"two live jobs of {request.name}")
        self._start(request, number)

    def is_zombie(self, job: SimJob) -> bool:
        """Whether the executor calls this job ended, or has begun it elsewhere, while it goes on."""
        return False

    def alive(self, pid: int, process: str) -> bool:
        """In the place of `processes.alive`."""
        return any(job.lives for job in self.all if job.process == process)

    def ended(self, name: str, number: int | None) -> None:
        """The executor ended jobs, or saw them end."""
        for job in self.all:
            if job.lives and job.name == name and number in (None, job.number):
                job.lives = job.computes = False
                if self._world.current is not job.actor:
                    job.actor.kill()
                self.changed(job.stage.partition("/")[0])

    def strike(self, dice: Random) -> None:
        """Something happens to a job that runs."""
        living = [job for job in self.all if job.lives]
        if not living:
            return
        job = dice.choice(living)
        what = dice.choice(("killed", "killed", "preempted", "node lost", "out of memory", "requeued", "requeued"))
        if what == "out of memory" and dice.random() < 0.7:
            return
        self._world.say(f"{job.name} is {what}")
        if what == "requeued":
            request = next(one for one in self.executor.launched if one.name == job.name)
            self.ended(job.name, job.number)
            self.executor.requeue(job.name, job.number)
            self._start(request, job.number)
        elif what == "killed":
            self.executor.finish(job.name, -9, job.number)
        else:
            causes = {"preempted": Cause.PREEMPTED, "node lost": Cause.NODE_LOST, "out of memory": Cause.OUT_OF_MEMORY}
            self.executor.lose(job.name, causes[what], job.number)

    def _start(self, request: JobSpec, number: int) -> None:
        labels = request.labels
        short = f"job {len(self.all)}"
        actor = self._world.add(short, lambda: self._run(request, job), self._world.random.expovariate(1 / 40))
        job = SimJob(request.name, number, f"{labels['run']}/{labels['stage']}", actor, f"simulated {len(self.all)}")
        self.all.append(job)
        self._world.say(f"{short} is {request.name} (its start {number})")

    def _run(self, request: JobSpec, job: SimJob) -> None:
        try:
            self._live(request, job)
        except InfrastructureError as error:  # the channel was away for longer than a job waits
            self._world.say(f"{job.name} gives up: {error}")
            job.computes = False
            self.executor.finish(job.name, 1, job.number)

    def _live(self, request: JobSpec, job: SimJob) -> None:
        folder = self._folder(request.folder)
        held = self._patiently(lambda: folder.mailbox.start(request.epoch, job.process))
        self._world.say(f"{request.name} {'begins' if held is None else 'finds another start'}")
        if held is not None:
            self.executor.finish(job.name, ANOTHER_RUNS, job.number)
            return
        twins = [one for one in self.all if one.computes and one.stage == job.stage]
        self._world.must(not twins, f"two jobs of {job.stage} compute: {[one.name for one in twins]}, {job.name}")
        job.computes = True
        began = self._world.time
        order = folder.read_order()
        self._world.must(order.epoch == request.epoch, f"{job.name} is of epoch {request.epoch}, told {order.epoch}")
        result = self._work(folder, job, order)
        if result is None:
            self.executor.finish(job.name, 3, job.number)
            return
        self._world.say(f"{job.name} says {result.status}")
        timed = JobResult(**{**vars_of(result), "seconds": self._world.time - began})
        self._patiently(lambda: folder.write_result(timed))
        if timed.status == "succeeded":
            self.answered.append(job.name)
        job.computes = False
        self._world.pause(self._world.random.expovariate(1 / 5))
        self.executor.finish(job.name, 0, job.number)

    def _work(self, folder: AttemptFolder, job: SimJob, order: JobOrder) -> JobResult | None:
        dice, trains = self._world.random, order.kind != "evaluate"
        length = dice.uniform(5.0, self.long) if trains else dice.uniform(5.0, 300.0)
        steps = 6 if trains else 2
        breaks = not self._world.calm and dice.random() < self.rates.get("breaks", 0.0)
        broken_at = dice.randrange(steps) if breaks else None
        with SpendingMeter(folder) as meter:
            for step in range(min(order.resumed_step, steps), steps):
                over = self._spend(job, order, meter, TOKENS * step)
                if over is not None:
                    return over
                self._rest(job, length / steps)
                state = self._rows().one("SELECT state FROM attempts WHERE name = ?", job.name)
                known = state in ("planned", "launched") or self.is_zombie(job)
                self._world.must(known, f"{job.name} computes and its attempt is {state}")
                told = self._patiently(folder.mailbox.controls)
                if step == broken_at:
                    return self._broken(dice)
                if trains and (step % 2 or told):
                    self._checkpoint(folder, step + 1, job.actor.name)
                progress = Progress(step + 1, steps, order.kind, TOKENS * (step + 1), 0.0)
                self._patiently(lambda progress=progress: self._say(folder, progress))  # type: ignore[misc]
                if any(control.kind is ControlKind.STOP for control in told) and dice.random() < 0.9:
                    self._patiently(lambda: folder.acknowledge(ControlKind.STOP))
                    return JobResult("stopped", tokens=TOKENS * (step + 1))
        return self._trained(folder, job) if trains else self._evaluated(folder, job)

    def _spend(self, job: SimJob, order: JobOrder, meter: SpendingMeter, done: int) -> JobResult | None:
        """Begin a step, as trainers do: never one that would exceed the allowance."""
        if order.token_allowance is not None and done + TOKENS > order.token_allowance:
            return JobResult("failed", tokens=done, failure=Failure(FailureClass.BUDGET, "tokens are spent", "budget"))
        meter(done, TOKENS)
        run_id = job.stage.partition("/")[0]
        self.spent[run_id] = self.spent.get(run_id, 0) + (0 if self.is_zombie(job) else TOKENS)
        return None

    def _rest(self, job: SimJob, seconds: float) -> None:
        """Compute for these seconds."""
        self._world.pause(seconds)

    def _say(self, folder: AttemptFolder, progress: Progress) -> None:
        sink = EventWriter(folder, seconds=0)
        sink(progress)

    def _broken(self, dice: Random) -> JobResult | None:
        if dice.random() < 0.4:
            return None
        kind = dice.choice((FailureClass.INFRASTRUCTURE, FailureClass.INFRASTRUCTURE, FailureClass.BUG))
        return JobResult("failed", failure=Failure(kind, "it broke", f"it broke {dice.randrange(1000)}"))

    def _checkpoint(self, folder: AttemptFolder, step: int, words: str) -> None:
        place = folder.checkpoints / f"step-{step:08d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.safetensors").write_text(f"{words} {step}")
        self._world.point()
        (place / "state.json").write_text(json.dumps({"step": step, "tokens": TOKENS * step}))
        self._world.point()
        shards = {name: file_digest(place / name) for name in ("model.safetensors", "state.json")}
        (place / "COMMIT").write_text(json.dumps(CheckpointCommit(step, shards).to_json()))

    def _trained(self, folder: AttemptFolder, job: SimJob) -> JobResult:
        place = folder.outputs / "model"
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.safetensors").write_text(job.actor.name)
        metrics = {"loss": 0.5, "by": number_of(job)}
        return JobResult("succeeded", {"model": Output("outputs/model", "tree")}, metrics, 60)

    def _evaluated(self, folder: AttemptFolder, job: SimJob) -> JobResult:
        folder.outputs.mkdir(parents=True, exist_ok=True)
        right = self._world.random.choice((140, 185, 190, 190))
        if right not in self._tables:
            values = {"heldout/accuracy": [1.0] * right + [0.0] * (_ITEMS - right)}
            self._tables[right] = metrics_table(values)
        (folder.outputs / "metrics.parquet").write_bytes(self._tables[right])
        (folder.outputs / "items.parquet").write_text(job.actor.name)
        outputs = {name: Output(f"outputs/{name}.parquet", "file") for name in ("metrics", "items")}
        metrics = {"heldout/accuracy": right / _ITEMS, "by": number_of(job)}
        return JobResult("succeeded", outputs, metrics, 10)

    def _patiently(self, action: Callable[[], T]) -> T:
        for _ in range(_TRIES):
            try:
                return action()
            except InfrastructureError:
                self._world.pause(10.0)
        return action()


def number_of(job: SimJob) -> float:
    """Its number among all jobs: `job 7` is the actor of job 7."""
    return float(job.actor.name.removeprefix("job "))


def vars_of(result: JobResult) -> dict[str, object]:
    """Its fields as they are."""
    return {name: getattr(result, name) for name in JobResult.__dataclass_fields__}
