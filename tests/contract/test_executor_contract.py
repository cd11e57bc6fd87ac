"""What every executor must honour, over the local one and the fake; then what only real processes can show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import pytest
from far import Far

from podman_image import Podman, podman_of
from posttrain.domain.errors import InfrastructureError, InputError, WorkspaceError
from posttrain.domain.jobs import (
    Accepted,
    Cause,
    Exists,
    JobOrder,
    JobState,
    LogPage,
    Observation,
    PodSeen,
    Submission,
    Unknown,
)
from posttrain.domain.jobspec import JobRef, JobSpec, Listed, PodGroup, external_name
from posttrain.domain.placement import ExecutorSettings
from posttrain.execution import processes
from posttrain.execution.executors.fake import FakeExecutor, Hostility
from posttrain.execution.executors.local import executor as local
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.executors.local.supervisor import Limit
from posttrain.execution.executors.ray import RayExecutor
from posttrain.execution.executors.slurm import SlurmExecutor
from posttrain.execution.ports import Executor
from posttrain.store.attempts import AttemptFolder, mailbox_at
from posttrain.store.mailbox import ORDER, REQUEST
from ray_cluster import Cluster as RayCluster
from slurm_cluster import Cluster as SlurmCluster

HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds; a machine may be as busy as it likes
NEVER_SECONDS = 0.1  # given to what will never happen
SETTLES = 1.0  # seconds of absence that count as proof
PRELOAD = "executor_preload"
ENDED = (JobState.EXITED, JobState.LOST)


class Harness(Protocol):
    """An executor and the power over its jobs."""

    executor: Executor

    def finish(self, spec: JobSpec, code: int) -> None: ...

    def lose(self, spec: JobSpec) -> None: ...

    def starts(self, spec: JobSpec) -> int: ...

    def log(self, spec: JobSpec) -> Path: ...


class LocalHarness:
    def __init__(self, preload: str | None, runs: Path) -> None:
        self.executor: Executor = LocalExecutor(preload, runs=runs)

    def finish(self, spec: JobSpec, code: int) -> None:
        folder = spec.folder
        (folder / "going").write_text(str(code))
        (folder / "going").rename(folder / "go")
        wait_until(lambda: look(self.executor, spec).state == JobState.EXITED)

    def lose(self, spec: JobSpec) -> None:
        wait_until((spec.folder / "ready").exists)
        os.kill(claim(spec)["pid"], signal.SIGKILL)
        wait_until(lambda: look(self.executor, spec).state == JobState.LOST)

    def starts(self, spec: JobSpec) -> int:
        return len(started(spec))

    def log(self, spec: JobSpec) -> Path:
        return spec.folder / "log.txt"


class Boxed(LocalExecutor):
    """Every job in an image."""

    def __init__(self, image: str, runs: Path) -> None:
        super().__init__(runs=runs, images=True)
        self._image, self._store = image, runs.parent / "blobs"

    def submit(self, spec: JobSpec) -> Submission:
        self._store.mkdir(exist_ok=True)
        folder = spec.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps({"store_url": self._store.as_uri()}))
        return super().submit(replace(spec, image=self._image))


class BoxedHarness(LocalHarness):
    def __init__(self, podman: Podman, runs: Path) -> None:
        self.executor, self._podman = Boxed(podman.image, runs), podman

    def lose(self, spec: JobSpec) -> None:
        super().lose(spec)
        mine = [name for name in self._podman.containers() if name.startswith(f"{spec.name}-w1-")]
        assert mine == [], "lost is said of what is gone"


class Led(Far):
    """The driver's part: the order and the spec are in the mailbox before the job is submitted."""

    def submit(self, spec: JobSpec) -> Submission:
        mailbox, store = mailbox_at(spec.mailbox), (self.root.parent / "store").as_uri()
        mailbox.replace(ORDER, JobOrder(spec.name, "train", 0, {}, {}, store, "", epoch=spec.epoch).to_json())
        mailbox.once(REQUEST, spec.to_json())
        return super().submit(spec)


class FarHarness:
    """A node with a root of its own."""

    def __init__(self, root: Path) -> None:
        self.far = Led(root, root)
        self.executor: Executor = self.far

    def finish(self, spec: JobSpec, code: int) -> None:
        folder = self._folder(spec)
        (folder / "going").write_text(str(code))
        (folder / "going").rename(folder / "go")
        wait_until(lambda: look(self.executor, spec).state == JobState.EXITED)

    def lose(self, spec: JobSpec) -> None:
        wait_until((self._folder(spec) / "ready").exists)
        os.kill(claim(self.far.there(spec))["pid"], signal.SIGKILL)
        wait_until(lambda: look(self.executor, spec).state == JobState.LOST)

    def starts(self, spec: JobSpec) -> int:
        return len((self.far.root / "starts" / spec.name).read_text().split())

    def log(self, spec: JobSpec) -> Path:
        return self._folder(spec) / "log.txt"

    def _folder(self, spec: JobSpec) -> Path:
        found: list[Path] = []
        wait_until(lambda: bool(found.extend(self.far.scratch(spec).glob("job-*/attempt")) or found))
        return found[0]


class _Led:
    """The driver's part, as `Led`."""

    store = ""

    def submit(self, spec: JobSpec) -> Submission:
        mailbox = mailbox_at(spec.mailbox)
        mailbox.replace(ORDER, JobOrder(spec.name, "train", 0, {}, {}, self.store, "", epoch=spec.epoch).to_json())
        mailbox.once(REQUEST, spec.to_json())
        return super().submit(spec)  # type: ignore[misc,no-any-return]


class LedSlurm(_Led, SlurmExecutor): ...


class LedRay(_Led, RayExecutor): ...


class NodesHarness:
    """Two nodes of a cluster, which share no more with the driver than a mailbox and a store."""

    def __init__(self, executor: Executor, root: Path) -> None:
        self.executor, self._scratch = executor, root / "scratch"

    def finish(self, spec: JobSpec, code: int) -> None:
        folder = self._folder(spec)
        (folder / "going").write_text(str(code))
        (folder / "going").rename(folder / "go")
        wait_until(lambda: look(self.executor, spec).state == JobState.EXITED)

    def log(self, spec: JobSpec) -> Path:
        return self._folder(spec) / "log.txt"

    def _folder(self, spec: JobSpec) -> Path:
        found: list[Path] = []

        def its() -> bool:
            for path in self._scratch.glob("job-*/attempt"):
                order = path / "job.json"
                if order.exists() and json.loads(order.read_text())["name"] == spec.name:
                    found.append(path)
            return bool(found)

        wait_until(its)
        return found[0]


def _node_python(root: Path) -> dict[str, Any]:
    return {"python": ("env", f"POSTTRAIN_SCRATCH={root / 'scratch'}", sys.executable), "settle": SETTLES}


class SlurmHarness(NodesHarness):
    def __init__(self, cluster: SlurmCluster, root: Path) -> None:
        executor = LedSlurm("slurm-a", ExecutorSettings(kind="slurm", **_node_python(root)))
        executor.store = (root / "store").as_uri()
        super().__init__(executor, root)
        self.cluster = cluster

    def lose(self, spec: JobSpec) -> None:
        wait_until((self._folder(spec) / "ready").exists)
        seen = look(self.executor, spec)
        self.cluster.ask("scontrol", "update", f"JobId={seen.handle}", "Requeue=0")
        self.cluster.lose(seen.node)
        wait_until(lambda: look(self.executor, spec).state == JobState.LOST)
        self.cluster.start(seen.node)
        wait_until(lambda: "idle" in self.cluster.ask("sinfo", "--noheader", "-n", seen.node, "-o", "%T"))

    def starts(self, spec: JobSpec) -> int:
        words = ("squeue", "-h", "--states=all", f"--name={external_name(spec)}", "-o", "%i")
        return len(self.cluster.ask(*words).split())


class RayHarness(NodesHarness):
    def __init__(self, cluster: RayCluster, root: Path) -> None:
        executor = LedRay("ray-b", ExecutorSettings(kind="ray", address=cluster.address, **_node_python(root)))
        executor.store = (root / "store").as_uri()
        super().__init__(executor, root)
        self.cluster = cluster

    def lose(self, spec: JobSpec) -> None:
        wait_until((self._folder(spec) / "ready").exists)
        node = self.cluster.node_of(spec.mailbox)
        self.cluster.lose(node)
        wait_until(lambda: look(self.executor, spec).state == JobState.LOST)
        self.cluster.start(node)

    def starts(self, spec: JobSpec) -> int:
        return 1 if look(self.executor, spec).state is not JobState.UNKNOWN else 0


class FakeHarness:
    def __init__(self, hostility: Hostility | None = None) -> None:
        self.fake = FakeExecutor(hostility=hostility)
        self.executor: Executor = self.fake

    def finish(self, spec: JobSpec, code: int) -> None:
        self.fake.finish(spec.name, code)

    def lose(self, spec: JobSpec) -> None:
        self.fake.lose(spec.name)

    def starts(self, spec: JobSpec) -> int:
        return sum(job.name == spec.name for job in self.fake.launched)

    def log(self, spec: JobSpec) -> Path:
        return spec.folder / "log.txt"


FAR_AWAY = {"idempotent": False, "visible_after": 0.05, "settles_after": 0.3}  # seconds


def hostile(kind: str) -> Hostility:
    """Schedulers whose answers are lost, whose requests are, and to which requests come late."""
    return Hostility(**FAR_AWAY, **{kind: 1})  # type: ignore[arg-type]


def look(executor: Executor, spec: JobRef) -> Observation:
    """One look at one job."""
    return executor.observe([spec])[0]


def settled(executor: Executor, spec: JobSpec) -> str:
    """Submit as a caller should: what is unknown is observed, and submitted anew once its absence is proven; the
    handle.
    """
    answer = executor.submit(spec)
    while isinstance(answer, Unknown):
        wait_until(lambda: not look(executor, spec).hidden)
        seen = look(executor, spec)
        if seen.state is not JobState.UNKNOWN:
            return seen.handle
        answer = executor.submit(spec)
    wait_until(lambda: not look(executor, spec).hidden)
    return answer.handle


def stopped(executor: Executor, spec: JobSpec) -> Observation:
    """Ask a job to end, and wait until it has."""
    AttemptFolder(spec.folder, "").request_stop()
    wait_until(lambda: look(executor, spec).gone)
    return look(executor, spec)


def killed(executor: Executor, spec: JobRef) -> Observation:
    executor.kill(spec)
    wait_until(lambda: look(executor, spec).gone)
    return look(executor, spec)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def claim(spec: JobRef) -> Any:
    return json.loads((spec.folder / "supervisor.json").read_bytes())


def started(spec: JobSpec) -> list[str]:
    path = spec.folder / "started"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Callable[..., JobSpec]]:
    """Makes job specs; whatever they started is gone at the end."""
    made: list[JobSpec] = []

    def make(
        mode: str = "polite",
        name: str = "run1-train-1",
        module: str = "executor_job",
        asking: Mapping[str, Any] = MappingProxyType({}),
        **words: str,
    ) -> JobSpec:
        environment = {"PYTHONPATH": str(HERE), "JOB_MODE": mode, **words}
        run, stage, number = name.rsplit("-", 2)
        folder = tmp_path / "runs" / run / stage / number.zfill(3)
        labels = {"workspace": "w1", "run": run, "stage": stage}
        made.append(JobSpec(name, folder.as_uri(), module, environment, labels=labels, epoch=int(number), **asking))
        return made[-1]

    yield make
    for each in made:
        if (each.folder / "supervisor.json").exists():
            found = claim(each)
            processes.send(found["pid"], found["identity"], signal.SIGKILL)
            look(LocalExecutor(), each)  # kills what a lost supervisor left


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    made = podman_of(tmp_path_factory, HERE)
    yield made
    made.close()


BOXED = pytest.param("boxed", marks=pytest.mark.containers)
FAR = pytest.param("far", marks=pytest.mark.slow)  # an agent and a job for each case
SLURM = pytest.param("slurm", marks=pytest.mark.slurm)
RAY = pytest.param("ray", marks=pytest.mark.ray)
REAL = (BOXED, SLURM, RAY)


@pytest.fixture(
    params=["local", "forked", FAR, "fake", "lose_answers", "lose_requests", "late_requests", BOXED, SLURM, RAY]
)
def harness(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    if request.param == "fake":
        return FakeHarness()
    if request.param == "far":
        return FarHarness(tmp_path / "node")
    if request.param == "slurm":
        return SlurmHarness(request.getfixturevalue("slurm"), tmp_path / "node")
    if request.param == "ray":
        return RayHarness(request.getfixturevalue("ray_cluster"), tmp_path / "node")
    if request.param == "boxed":
        found = request.getfixturevalue("podman")
        for name, value in found.variables.items():
            monkeypatch.setenv(name, value)
        return BoxedHarness(found, tmp_path / "runs")
    if request.param in ("local", "forked"):
        return LocalHarness(PRELOAD if request.param == "forked" else None, tmp_path / "runs")
    return FakeHarness(hostile(request.param))


Make = Callable[..., JobSpec]


def test_a_job_nobody_submitted_is_unknown_and_proven_to_be_absent_in_the_end(harness: Harness, spec: Make) -> None:
    job, executor = spec(), harness.executor
    assert look(executor, job).state is JobState.UNKNOWN
    wait_until(lambda: look(executor, job) == Observation(JobState.UNKNOWN))
    executor.kill(job)
    assert look(executor, job).gone
    assert executor.list("") == []
    assert executor.logs(job) == LogPage("", 0)


def test_who_gives_no_images_refuses_a_job_that_asks_for_one(harness: Harness, spec: Make) -> None:
    job = spec(asking={"image": f"localhost/x@sha256:{'0' * 64}"})
    if harness.executor.images:
        pytest.skip("it runs it")
    with pytest.raises(InputError, match="image localhost/x@sha256") as refused:
        harness.executor.submit(job)
    assert "\n" not in str(refused.value)
    assert look(harness.executor, job).state is JobState.UNKNOWN


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_runs_and_exits_with_its_code(harness: Harness, spec: Make, code: int) -> None:
    job, executor = spec(), harness.executor
    handle = settled(executor, job)
    assert look(executor, job).live
    assert look(executor, job).handle == handle
    harness.finish(job, code)
    assert look(executor, job) == Observation(JobState.EXITED, exit_code=code)
    assert harness.starts(job) == 1


@pytest.mark.parametrize("end", ["finish", "lose"])
def test_how_long_a_job_ran_is_known_whatever_became_of_it(harness: Harness, spec: Make, end: str) -> None:
    job, executor = spec(), harness.executor
    assert look(executor, job).seconds is None, "it never ran"
    begun = time.monotonic()
    settled(executor, job)
    wait_until(lambda: (look(executor, job).seconds or 0.0) > 0.6)
    harness.finish(job, 0) if end == "finish" else harness.lose(job)
    wait_until(lambda: look(executor, job).state in ENDED)
    ran, passed = look(executor, job).seconds, time.monotonic() - begun
    assert ran is not None
    assert 0.6 - processes.HEARTBEAT_SECONDS < ran <= passed + processes.HEARTBEAT_SECONDS
    pause = time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > pause)
    assert look(executor, job).seconds == ran, "time in which nobody looked does not count"


def test_submitting_again_finds_the_job_running_or_ended(harness: Harness, spec: Make) -> None:
    job, executor = spec(), harness.executor
    if not executor.idempotent:
        pytest.skip("its callers look before they submit again")
    assert isinstance(executor.submit(job), Accepted)
    handle = look(executor, job).handle
    assert executor.submit(job) == Exists(handle)
    harness.finish(job, 0)
    assert executor.submit(job) == Exists(handle)
    assert look(executor, job).state == JobState.EXITED
    assert harness.starts(job) == 1


def test_a_lost_job_stays_lost(harness: Harness, spec: Make) -> None:
    job, executor = spec(), harness.executor
    settled(executor, job)
    harness.lose(job)
    assert look(executor, job).state == JobState.LOST
    assert look(executor, job).gone
    if executor.idempotent:
        assert isinstance(executor.submit(job), Exists)
    assert look(executor, job).state == JobState.LOST
    assert harness.starts(job) == 1


def test_a_job_that_is_killed_is_gone_and_stays_so(harness: Harness, spec: Make) -> None:
    job, executor = spec(), harness.executor
    settled(executor, job)
    seen = killed(executor, job)
    assert seen.state is JobState.EXITED
    assert (seen.exit_code or 0) < 0
    assert killed(executor, job) == seen


def test_jobs_do_not_touch_each_other_and_are_seen_in_one_look(harness: Harness, spec: Make) -> None:
    first, second = spec(name="run1-train-1"), spec(name="run1-train-2")
    nobody = spec(name="run2-train-1")
    assert settled(harness.executor, first) != settled(harness.executor, second)
    mine = {"workspace": "w1", "run": "run1", "stage": "train"}
    listed = [Listed("run1-train-1", mine, 1), Listed("run1-train-2", mine, 2)]
    assert harness.executor.list("run1-") == listed
    assert harness.executor.list("run2-") == []
    killed(harness.executor, first)
    wait_until(lambda: look(harness.executor, nobody).gone)
    seen = harness.executor.observe([nobody, second, first])
    assert [one.state for one in seen] == [JobState.UNKNOWN, JobState.RUNNING, JobState.EXITED]
    assert harness.executor.list("run1-train") == listed[1:]
    harness.finish(second, 5)
    assert look(harness.executor, second).exit_code == 5


def test_a_log_is_read_on_from_where_the_last_page_ended(harness: Harness, spec: Make) -> None:
    job, executor = spec(), harness.executor
    settled(executor, job)
    log = harness.log(job)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write("grüße\n")
    wait_until(lambda: "grüße" in executor.logs(job).text)
    page = executor.logs(job)
    assert page.cursor == log.stat().st_size
    assert executor.logs(job, page.cursor) == LogPage("", page.cursor)
    killed(executor, job)


class Distant:
    """A hostile executor with a clock of its own."""

    def __init__(self, **words: float) -> None:
        self.time = 0.0
        self.fake = FakeExecutor(now=lambda: self.time, hostility=Hostility(**words))  # type: ignore[arg-type]

    def sees(self, job: JobSpec, later: float = 0.0) -> Observation:
        self.time += later
        return look(self.fake, job)


def test_what_a_far_executor_does_not_see_proves_nothing_until_it_settles(spec: Make) -> None:
    far, job = Distant(visible_after=10, settles_after=30), spec()
    assert far.sees(job).hidden
    assert not far.sees(job).gone
    assert far.sees(job, 31).gone
    far.fake.submit(job)
    assert far.sees(job, 9).hidden
    assert far.sees(job, 2).live


def test_a_lost_answer_a_lost_request_and_a_late_one_look_the_same_at_first(spec: Make) -> None:
    for word, after in (("lose_answers", True), ("lose_requests", False), ("late_requests", True)):
        far, job = Distant(visible_after=10, settles_after=30, idempotent=0, **{word: 1}), spec()
        assert far.fake.submit(job) == Unknown("no answer")
        assert far.sees(job, 1).hidden
        assert far.sees(job, 31).live == after


def test_a_name_submitted_twice_is_two_jobs_where_nobody_refuses_it(spec: Make) -> None:
    for idempotent, jobs in ((False, 2), (True, 1)):
        far, job = Distant(idempotent=idempotent), spec()
        far.fake.submit(job)
        far.fake.submit(job)
        assert len(far.fake.launched) == jobs
        far.fake.kill(job)
        assert far.sees(job).gone, "one name is one thing to kill"
    far = Distant(twice=1, idempotent=0)
    far.fake.submit(job)
    assert len(far.fake.launched) == 2


def test_an_executor_forgets_what_ended_and_may_start_a_job_anew(spec: Make) -> None:
    far, job = Distant(purges_after=60), spec()
    far.fake.submit(job)
    far.time = 10.0
    far.fake.lose(job.name, Cause.PREEMPTED)
    assert (far.sees(job, 5).cause, far.sees(job).seconds) == (Cause.PREEMPTED, 10.0)
    far.fake.requeue(job.name)
    assert (far.sees(job, 20).incarnation, far.sees(job).live, far.sees(job).seconds) == (1, True, 30.0)
    far.fake.finish(job.name)
    assert far.sees(job, 59).state is JobState.EXITED
    assert far.sees(job, 2) == Observation(JobState.UNKNOWN)


def test_a_gang_is_seen_pod_by_pod_and_says_which_of_them_ended_it(spec: Make) -> None:
    far, job = Distant(), spec(asking={"gang": (PodGroup("learner"), PodGroup("rollout", min=0, max=2))})
    far.fake.submit(job)
    names = ["learner-0", "rollout-0", "rollout-1"]
    assert [(pod.name, pod.state, pod.node) for pod in far.sees(job).pods] == [
        (name, JobState.RUNNING, "somewhere") for name in names
    ]
    far.fake.requeue(job.name)
    assert [pod.incarnation for pod in far.sees(job).pods] == [1, 1, 1]
    far.fake.lose(job.name, Cause.OUT_OF_MEMORY, pod="rollout-1")
    seen = far.sees(job)
    assert (seen.state, seen.cause, seen.gone) == (JobState.LOST, Cause.OUT_OF_MEMORY, True)
    assert [(pod.name, pod.exit_code) for pod in seen.pods] == [
        ("rollout-1", None),
        ("learner-0", -signal.SIGTERM),
        ("rollout-0", -signal.SIGTERM),
    ]
    assert seen.why == "pod rollout-1 on somewhere: out of memory"


def test_what_is_said_of_a_job_that_is_gone() -> None:
    said = {
        "exit code 3": Observation(JobState.EXITED, 3),
        "its process has ended": Observation(JobState.LOST),
        "its supervisor has ended": Observation(JobState.LOST, detail="its supervisor has ended"),
        "the executor no longer has a job with this name": Observation(JobState.UNKNOWN),
        "pod b-0: exit code 3": Observation(
            JobState.EXITED, 3, pods=(PodSeen("a-0", JobState.EXITED, 0), PodSeen("b-0", JobState.EXITED, 3))
        ),
        "pod a-0 on n1: no exit code": Observation(JobState.LOST, pods=(PodSeen("a-0", JobState.LOST, node="n1"),)),
    }
    assert {seen.why: seen for seen in said.values()} == said


@pytest.fixture(params=["cold", "forked"])
def running(request: pytest.FixtureRequest, spec: Make) -> Callable[..., JobSpec]:
    """Launches a job and waits until it has said that it is ready; who launched it is gone then."""

    def launch(*args: str, **words: str) -> JobSpec:
        job = spec(*args, **words)
        LocalExecutor(PRELOAD if request.param == "forked" else None).submit(job)
        wait_until((job.folder / "ready").exists)
        return job

    return launch


def test_the_job_gets_its_environment_its_folder_and_a_log(running: Make) -> None:
    job = running(JOB_WORD="hello")
    assert started(job)[0].endswith(" hello")
    assert "a word for the log" in AttemptFolder(job.folder).log.read_text()
    assert stopped(LocalExecutor(), job) == Observation(JobState.EXITED, exit_code=0)


@pytest.mark.parametrize("preload", [None, PRELOAD])
def test_a_module_that_is_not_there_is_an_exit_code_and_a_log(spec: Make, preload: str | None) -> None:
    job = spec(module="no_such_module")
    LocalExecutor(preload).submit(job)
    wait_until(lambda: look(LocalExecutor(), job).state == JobState.EXITED)
    assert look(LocalExecutor(), job).exit_code == 1
    assert "No module named no_such_module" in AttemptFolder(job.folder).log.read_text()


def test_a_killed_job_exits_with_the_signal_and_takes_its_children_along(running: Make) -> None:
    job = running("parent")
    child = int((job.folder / "child").read_text())
    assert child in processes.group(claim(job)["job_pid"])
    os.kill(claim(job)["job_pid"], signal.SIGKILL)
    wait_until(lambda: look(LocalExecutor(), job).state == JobState.EXITED)
    assert look(LocalExecutor(), job).exit_code == -signal.SIGKILL
    wait_until(lambda: processes.group(claim(job)["job_pid"]) == [])  # killed, but dying takes a moment


def test_a_job_and_its_children_die_with_their_supervisor(running: Make) -> None:
    job = running("parent")
    os.kill(claim(job)["pid"], signal.SIGKILL)
    wait_until(lambda: look(LocalExecutor(), job).state in ENDED)
    assert look(LocalExecutor(), job).state == JobState.LOST
    assert processes.group(claim(job)["job_pid"]) == []


@pytest.mark.slow
def test_a_job_that_has_left_its_result_and_stays_is_killed_after_a_minute(running: Make) -> None:
    """Nothing else of its run starts before it is gone."""
    job = running("deaf")
    began = time.monotonic()
    (job.folder / "result.json").write_text("{}")
    wait_until(lambda: look(LocalExecutor(), job).state == JobState.EXITED)
    assert look(LocalExecutor(), job).exit_code == -signal.SIGKILL
    assert time.monotonic() - began >= processes.LEAVING_SECONDS


def test_the_supervisor_forwards_sigterm(running: Make) -> None:
    job = running()
    os.kill(claim(job)["pid"], signal.SIGTERM)
    wait_until(lambda: look(LocalExecutor(), job).state in ENDED)
    assert look(LocalExecutor(), job).exit_code == -signal.SIGTERM


def test_a_folder_in_place_of_its_record_loses_no_job(running: Make) -> None:
    job = running()
    (job.folder / "exit.json" / "x").mkdir(parents=True)
    (job.folder / "go.new").write_text("3")
    (job.folder / "go.new").rename(job.folder / "go")
    wait_until(lambda: look(LocalExecutor(), job).state != JobState.RUNNING)
    assert look(LocalExecutor(), job) == Observation(JobState.EXITED, exit_code=3)


def test_killing_terminates_then_kills(running: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = running("busy", "run1-a-1", asking={"grace_seconds": PATIENCE})
    deaf = running("deaf", "run1-b-1", asking={"grace_seconds": NEVER_SECONDS})
    monkeypatch.setattr(local, "_KILL_SECONDS", PATIENCE)
    assert killed(LocalExecutor(), busy).exit_code == -signal.SIGTERM
    assert killed(LocalExecutor(), deaf).exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("asking", "what"),
    [
        ({"gang": (PodGroup(), PodGroup("rollout"))}, "2 groups of pods"),
        ({"gang": (PodGroup(max=2),)}, "1 to 2 pods"),
        ({"gang": (PodGroup(cpus=10**6),)}, r"1000000 cpus, but this machine has \d+"),
        ({"gang": (PodGroup(memory=2**60),)}, r"1152921504606846976 bytes of memory, but this machine has \d+"),
        ({"gang": (PodGroup(kind="h100"),)}, "h100 as its kind of GPU"),
        ({"gang": (PodGroup(topology="rack"),)}, "rack as its topology"),
        ({"image": "sha256:5eed"}, "image sha256:5eed"),
        ({"secrets": ("NO_SUCH_TOKEN",)}, "NO_SUCH_TOKEN in the environment"),
        ({"secrets": ("WANDB_API_KEY",)}, "WANDB_API_KEY in the environment"),
    ],
)
def test_what_one_machine_does_not_give_is_refused_in_one_line(
    spec: Make, asking: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a tracker's")
    job = spec(asking=asking)
    with pytest.raises(InputError, match=what) as refused:
        LocalExecutor().submit(job)
    assert "\n" not in str(refused.value)
    assert not job.folder.exists()


def test_a_secret_reaches_the_job_and_no_file(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_WORD", "hush-hush")
    job = spec(asking={"secrets": ("JOB_WORD",), "gang": (PodGroup(cpus=1, memory=1),)})
    LocalExecutor().submit(job)
    wait_until(lambda: len(started(job)) > 0)
    assert started(job)[0].endswith(" hush-hush")
    asked = (job.folder / "spec.json").read_text()
    assert "JOB_WORD" in asked
    assert "hush" not in asked


def test_a_job_ends_when_its_maximum_runtime_is_over(spec: Make) -> None:
    job = spec("busy", asking={"max_seconds": NEVER_SECONDS})
    LocalExecutor().submit(job)
    wait_until(lambda: look(LocalExecutor(), job).state is JobState.EXITED)
    seen = look(LocalExecutor(), job)
    assert (seen.cause, seen.exit_code) == (Cause.OVERTIME, -signal.SIGTERM)
    over = f"the job has reached its maximum runtime of {NEVER_SECONDS:g} s"
    assert over in AttemptFolder(job.folder).log.read_text()


def test_a_job_that_does_not_end_in_its_grace_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"deaf\n"
        Limit(5.0, 1000.0, time.monotonic() - 6.0, tmp_path / "log").enforce(child.pid)
        assert child.poll() is None
        limit = Limit(5.0, 10.0, time.monotonic() - 16.0, tmp_path / "log")
        limit.enforce(child.pid)
        assert limit.over
        limit.enforce(child.pid)
        assert child.wait(PATIENCE) == -signal.SIGKILL
    finally:
        child.kill()


def test_a_copy_of_a_folder_does_not_touch_the_job_of_the_original(running: Make, tmp_path: Path) -> None:
    job = running()
    pid = claim(job)["job_pid"]
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    copied = LocalExecutor(runs=tmp_path / "copy")
    twin = JobRef(job.name, job.mailbox.replace("/runs/", "/copy/"))
    assert copied.list("") == []
    assert look(copied, twin).state is JobState.LOST
    copied.kill(twin)
    assert look(LocalExecutor(), job).state is JobState.RUNNING
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = LocalExecutor(runs=tmp_path / "moved")
    assert [one.name for one in moved.list("")] == [job.name]
    assert killed(moved, JobRef(job.name, job.mailbox.replace("/runs/", "/moved/"))).gone
    wait_until(lambda: processes.group(pid) == [])


def test_a_stopped_supervisor_cannot_keep_a_job_alive(running: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = running("deaf")
    os.kill(claim(job)["pid"], signal.SIGSTOP)
    poll, waits = local._poll, list[float]()

    def patient_at_last(done: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)  # terminated, killed: its supervisor records none of it
        return poll(done, NEVER_SECONDS if len(waits) <= 2 else PATIENCE)

    monkeypatch.setattr(local, "_poll", patient_at_last)
    assert killed(LocalExecutor(), job).state == JobState.LOST
    assert len(waits) > 2
    wait_until(lambda: processes.group(claim(job)["job_pid"]) == [])


_LAUNCHER = """
import json, sys
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.local.executor import LocalExecutor

spec = JobSpec(**json.loads(sys.argv[1]))
print("here", flush=True)
sys.stdin.readline()
print(LocalExecutor().submit(spec).handle, flush=True)
sys.stdin.readline()
"""


def launcher(job: JobSpec) -> subprocess.Popen[str]:
    """A process that launches the job at the first line it is told, and ends at the second."""
    fields = {"name": job.name, "module": job.module, "mailbox": job.mailbox, "environment": job.environment}
    command = [sys.executable, "-c", _LAUNCHER, json.dumps(fields)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.slow
def test_three_processes_that_launch_at_once_start_one_job(spec: Make) -> None:
    job = spec()
    launchers = [launcher(job) for _ in range(3)]  # all have their imports behind them
    for process in launchers:
        assert process.stdin is not None
        process.stdin.write("go\nend\n")
        process.stdin.flush()
    handles = {process.communicate(timeout=PATIENCE)[0] for process in launchers}
    assert len(handles) == 1
    wait_until(lambda: len(started(job)) > 0)
    stopped(LocalExecutor(), job)
    assert len(started(job)) == 1


def test_a_job_outlives_who_launched_it(spec: Make) -> None:
    job = spec()
    process = launcher(job)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline().strip().isdigit()
    process.kill()
    process.communicate()
    assert look(LocalExecutor(), job).state in (JobState.STARTING, JobState.RUNNING)
    assert stopped(LocalExecutor(), job).exit_code == 0


@pytest.mark.parametrize("preload", [None, PRELOAD])
@pytest.mark.parametrize(
    ("place", "most_starts"),
    [("supervisor.before_spawn", 0), ("supervisor.after_spawn", 1), ("supervisor.before_exit_record", 1)],
)
def test_a_supervisor_that_dies_anywhere_leaves_a_lost_attempt(
    spec: Make, monkeypatch: pytest.MonkeyPatch, place: str, most_starts: int, preload: str | None
) -> None:
    job = spec()
    monkeypatch.setenv("POSTTRAIN_CRASHPOINT", place)
    LocalExecutor(preload).submit(job)
    monkeypatch.delenv("POSTTRAIN_CRASHPOINT")
    if place == "supervisor.before_exit_record":
        (job.folder / "go").write_text("0")
    wait_until(lambda: look(LocalExecutor(), job).state == JobState.LOST)
    assert killed(LocalExecutor(), job).state == JobState.LOST
    LocalExecutor().submit(job)
    assert look(LocalExecutor(), job).state == JobState.LOST
    assert len(started(job)) <= most_starts
    assert not (job.folder / "exit.json").exists()


def test_a_supervisor_that_cannot_start_is_an_infrastructure_error(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = spec()
    monkeypatch.setattr(local, "_SUPERVISOR", "no_such_supervisor")
    with pytest.raises(InfrastructureError, match=r"exit code 1; see .*log\.txt"):
        LocalExecutor().submit(job)
    monkeypatch.undo()
    LocalExecutor().submit(job)  # nothing was claimed, so trying again is safe
    assert stopped(LocalExecutor(), job).exit_code == 0


@pytest.mark.parametrize("preload", [None, PRELOAD])
def test_audit_10_a_supervisor_that_is_killed_before_its_claim_leaves_nothing(
    spec: Make, monkeypatch: pytest.MonkeyPatch, preload: str | None
) -> None:
    job = spec()
    monkeypatch.setenv("POSTTRAIN_CRASHPOINT", "supervisor.before_claim")
    with pytest.raises(InfrastructureError, match="exit code 70"):
        LocalExecutor(preload).submit(job)
    assert look(LocalExecutor(), job).gone
    assert started(job) == []


def test_audit_10_a_supervisor_that_outlives_its_killed_launcher_starts_nothing(
    spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec()
    folder = job.folder
    monkeypatch.setattr(local, "_SUPERVISOR", "executor_late_supervisor")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("LATE_FOR", "_claim")
    wait = subprocess.Popen.wait

    def killed(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        wait_until((folder / "arrived").exists)
        process.kill()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", killed)
    with pytest.raises(InfrastructureError, match=r"was killed while it started \(signal 9\)"):
        LocalExecutor().submit(job)
    late = int((folder / "arrived").read_text())
    found = processes.identity(late)
    (folder / "late").touch()
    wait_until(lambda: found is None or not processes.alive(late, found))
    assert look(LocalExecutor(), job).state == JobState.LOST
    assert started(job) == []


def run_out_of_time(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Launchers find their time over as soon as the file is there."""
    wait = subprocess.Popen.wait

    def over(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        wait_until(file.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", over)


@pytest.mark.parametrize(
    ("step", "meanwhile"), [("_claim", JobState.LOST), ("create_json", JobState.STARTING)], ids=["lock", "claim"]
)
def test_a_supervisor_that_comes_after_the_time_out_starts_nothing(
    spec: Make, monkeypatch: pytest.MonkeyPatch, step: str, meanwhile: JobState
) -> None:
    job = spec()
    folder = job.folder
    monkeypatch.setattr(local, "_SUPERVISOR", "executor_late_supervisor")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("LATE_FOR", step)
    run_out_of_time(monkeypatch, folder / "arrived")
    with pytest.raises(InfrastructureError, match="did not start within"):
        LocalExecutor().submit(job)
    late = int((folder / "arrived").read_text())
    found = processes.identity(late)
    assert found is not None
    assert look(LocalExecutor(), job).state == meanwhile  # it has the lock, or it has nothing
    (folder / "late").touch()
    wait_until(lambda: not processes.alive(late, found))
    assert look(LocalExecutor(), job).state == JobState.LOST
    LocalExecutor().submit(job)
    assert look(LocalExecutor(), job).state == JobState.LOST
    assert started(job) == []


def test_a_job_whose_supervisor_came_in_time_is_launched_though_its_launcher_waited_too_long(
    spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec()
    run_out_of_time(monkeypatch, job.folder / "supervisor.json")
    assert LocalExecutor().submit(job) == Exists(str(claim(job)["pid"]))
    wait_until((job.folder / "ready").exists)
    assert stopped(LocalExecutor(), job) == Observation(JobState.EXITED, exit_code=0)
    assert len(started(job)) == 1


def test_a_folder_that_cannot_be_made_is_a_workspace_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError, match="cannot write"):
        LocalExecutor().submit(JobSpec("n", (tmp_path / "file" / "001").as_uri(), "executor_job"))


def test_a_pid_that_belongs_to_another_process_is_left_alone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        found = processes.identity(process.pid)
        assert found is not None
        assert processes.alive(process.pid, found)
        other = found.rpartition(":")[0] + ":1"
        assert not processes.alive(process.pid, other)
        processes.send(process.pid, other, signal.SIGKILL)
        assert processes.kill_group(process.pid, other)  # that group is gone: its number is somebody else's now
        assert processes.alive(process.pid, found)
        assert not processes.kill_group(process.pid, found) or not processes.alive(process.pid, found)
    finally:
        process.kill()
        process.wait()
    assert processes.identity(process.pid) is None
    assert not processes.alive(process.pid, found)
    assert processes.kill_group(process.pid, found)
    processes.send(process.pid, found, signal.SIGKILL)


def test_the_supervisor_loads_little(tmp_path: Path) -> None:
    program = "import sys, posttrain.execution.executors.local.supervisor; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"posttrain"}
    assert {name for name in foreign if not name.startswith("_")} <= {"sitecustomize", "usercustomize"}
    assert not {"subprocess", "asyncio", "socket", "tempfile"} & set(loaded)
