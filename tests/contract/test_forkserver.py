"""Jobs begin in forks of a process that has imported the engine: in the same surroundings as cold ones, or cold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from posttrain.domain.jobs import JobState
from posttrain.domain.jobspec import JobSpec
from posttrain.execution import processes
from posttrain.execution.environment import pin, read_environment
from posttrain.execution.executors.local.devices import Devices
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.executors.local.forkserver import ForkServer
from posttrain.execution.executors.local.supervisor import job_environment
from posttrain.store.attempts import AttemptFolder

HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds for what must happen, on a machine as busy as it likes
NEVER_SECONDS = 0.1  # given to what will never happen


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def stopped(executor: LocalExecutor, spec: JobSpec) -> int | None:
    """Ask a job to end; its exit code."""
    AttemptFolder(spec.folder).request_stop()
    wait_until(lambda: executor.observe([spec])[0].gone)
    return executor.observe([spec])[0].exit_code


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


class Driver:
    """An executor with its fork server."""

    def __init__(self, folder: Path, preload: str | None = "executor_preload") -> None:
        self.executor, self._folder, self._count = LocalExecutor(preload), folder, 0
        self.places = [str(HERE)]

    def spec(self, **words: str) -> JobSpec:
        self._count += 1
        folder = self._folder / f"job-{self._count}"
        folder.mkdir()
        environment = {"PYTHONPATH": os.pathsep.join(self.places), **words}
        return JobSpec(folder.name, folder.as_uri(), "executor_forked_job", environment)

    def launch(self, spec: JobSpec, pinned: str = "") -> None:
        order = {"environment": pinned, "cache_dir": str(self._folder)}
        (spec.folder / "job.json").write_text(json.dumps(order))
        self.executor.submit(spec)

    def run(self, spec: JobSpec | None = None, pinned: str = "") -> dict[str, Any]:
        """What a job found; nothing where it did not run."""
        spec = spec or self.spec()
        self.launch(spec, pinned)
        wait_until(lambda: self.executor.observe([spec])[0].state is JobState.EXITED)
        found = spec.folder / "found.json"
        return dict(json.loads(found.read_bytes())) if found.exists() else {}

    def code(self, spec: JobSpec) -> int | None:
        return self.executor.observe([spec])[0].exit_code


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    assert made.executor._forks is not None
    made.executor._forks.close()


def test_jobs_share_one_server_and_find_what_a_cold_one_finds(driver: Driver, tmp_path: Path) -> None:
    first, second = driver.run(), driver.run()
    (tmp_path / "cold").mkdir()
    cold = Driver(tmp_path / "cold", preload=None).run()
    assert first["server"] == second["server"] is not None
    assert first["server"] != os.getpid()
    assert cold.pop("server") is None
    second.pop("server")
    for found in (second, cold):
        folder = found["folder"]
        assert found.pop("argv")[1:] == [found.pop("folder")]
        assert found.pop("words")[-3:] == ["-m", "executor_forked_job", folder]
    assert second == cold
    assert second["open"] == [0, 1, 2], "the supervisor's lock would outlive the supervisor"
    assert (tmp_path / "job-2" / "log.txt").read_text() == "out\n"


@pytest.mark.parametrize("preload", ["executor_preload", None], ids=["forked", "cold"])
def test_no_key_of_a_tracker_or_the_ledger_reaches_a_job_or_its_supervisor(
    tmp_path: Path, preload: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD", "OTHER_WORD"):
        monkeypatch.setenv(name, "secret")
    found = Driver(tmp_path, preload=preload).run()
    assert found["keys"] == ["OTHER_WORD"]
    assert not found["parents_keys"]


@pytest.mark.parametrize(
    ("end", "code", "log"), [("7", 7, "out\n"), ("raise", 1, "ValueError: as told\n"), ("a word", 1, "a word\n")]
)
def test_it_ends_as_a_program_ends(driver: Driver, end: str, code: int, log: str) -> None:
    spec = driver.spec(END=end)
    assert driver.run(spec)["server"] is not None
    assert driver.code(spec) == code
    assert (spec.folder / "log.txt").read_text().endswith(log)


@pytest.mark.slow
def test_a_job_that_it_is_not_ready_for_starts_cold(driver: Driver) -> None:
    spec = driver.spec()
    (spec.folder / "unready").touch()
    assert driver.run(spec)["server"] is None
    log = (spec.folder / "log.txt").read_text()
    assert "this job starts cold and imports its own modules: its order needs" in log
    assert driver.run()["server"] is not None


@pytest.mark.slow
def test_other_variables_are_another_server(driver: Driver) -> None:
    plain, worded = driver.run(), driver.run(driver.spec(WORD="x"))
    assert plain["server"] != worded["server"] is not None
    wait_until(lambda: processes.identity(plain["server"]) is None)


def test_a_killed_server_takes_nothing_along_and_the_next_job_starts_cold(driver: Driver) -> None:
    running = driver.spec(JOB_MODE="polite")
    spec = JobSpec(running.name, running.mailbox, "executor_job", running.environment)
    server = driver.run(driver.spec(JOB_MODE="polite"))["server"]
    driver.launch(spec)
    wait_until((spec.folder / "ready").exists)
    os.kill(server, signal.SIGKILL)
    after = driver.spec(JOB_MODE="polite")
    assert driver.run(after)["server"] is None
    assert "the fork server of its driver has stopped serving" in (after.folder / "log.txt").read_text()
    assert driver.executor.observe([spec])[0].state is JobState.RUNNING
    assert stopped(driver.executor, spec) == 0


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    server, driver = ForkServer("executor_preload"), Driver(tmp_path, preload=None)

    def start(seconds: float) -> int | None:
        spec = driver.spec()
        words = {"folder": str(spec.folder), "devices": 0, "machine": asdict(Devices())}
        (spec.folder / "spec.json").write_text(json.dumps({**spec.to_json(), **words}))
        return server.start(spec.folder, job_environment(spec.environment), seconds)

    assert start(PATIENCE) == 0
    found = tmp_path / "job-1" / "found.json"
    wait_until(found.exists)
    process = json.loads(found.read_bytes())["server"]
    os.kill(process, signal.SIGSTOP)
    assert start(NEVER_SECONDS) is None
    assert processes.identity(process) is None, "what hangs is killed"
    assert start(PATIENCE) is None, "it is not asked again"


@pytest.mark.slow
def test_what_has_threads_serves_nobody(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "executor_preload_threads")
    spec = driver.spec()
    assert driver.run(spec)["server"] is None
    assert "must have one thread, got 2" in (spec.folder / "log.txt").read_text()


_DRIVER = """
import json, sys
from posttrain.execution.executors.local.devices import Devices
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.local.executor import LocalExecutor

executor = LocalExecutor("executor_preload")
executor.submit(JobSpec(**json.loads(sys.argv[1])))
print("launched", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["leaves", "killed"])
def test_it_ends_with_its_driver(tmp_path: Path, end: str) -> None:
    spec = Driver(tmp_path, preload=None).spec()
    fields = {"name": spec.name, "module": spec.module, "mailbox": spec.mailbox}
    words = json.dumps({**fields, "environment": dict(spec.environment)})
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "launched\n"
    found = spec.folder / "found.json"
    wait_until(found.exists)
    server = json.loads(found.read_bytes())["server"]
    identity = processes.identity(server)
    assert identity is not None
    process.kill() if end == "killed" else process.stdin.write("\n")
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: not processes.alive(server, identity))


class TestAttested:
    @pytest.fixture
    def packages(self, tmp_path: Path, driver: Driver) -> Path:
        """A pretended site-packages, from which the server preloads."""
        folder = tmp_path / "packages"
        folder.mkdir()
        for name in ("executor_preload.py", "executor_forked_job.py"):
            (folder / name).write_bytes((HERE / name).read_bytes())
        driver.places = [str(folder)]
        return folder

    def pinned(self, packages: Path, tmp_path: Path) -> str:
        environment = read_environment([str(packages)])
        pin(environment, tmp_path)
        return environment.digest

    def refusal(self, tmp_path: Path, number: int) -> str:
        return str(json.loads((tmp_path / f"job-{number}" / "result.json").read_bytes())["failure"]["message"])

    def test_the_pinned_environment_is_served(self, driver: Driver, packages: Path, tmp_path: Path) -> None:
        pinned = self.pinned(packages, tmp_path)
        assert driver.run(pinned=pinned)["server"] == driver.run(pinned=pinned)["server"] is not None

    def test_another_one_is_not_even_preloaded(self, driver: Driver, packages: Path, tmp_path: Path) -> None:
        pinned = self.pinned(packages, tmp_path)
        (packages / "executor_preload.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
        assert driver.run(pinned=pinned) == {}
        assert "executor_preload.py changed; restore it" in self.refusal(tmp_path, 1)
        log = (tmp_path / "job-1" / "log.txt").read_text()
        line = "this job starts cold and imports its own modules: the environment differs from the one"
        assert line in log, "not only that somebody hung up"
        assert not (tmp_path / "pwned").exists()

    def test_a_change_under_a_running_server_is_seen(self, driver: Driver, packages: Path, tmp_path: Path) -> None:
        pinned = self.pinned(packages, tmp_path)
        assert driver.run(pinned=pinned)
        (packages / "late.pth").write_text("import os\n")
        assert driver.run(pinned=pinned) == {}
        assert "late.pth is new; restore it" in self.refusal(tmp_path, 2)

    @pytest.mark.slow
    @pytest.mark.parametrize("late", ["other.py", "more.py"])
    def test_what_was_another_file_while_it_was_imported_serves_nobody(
        self, driver: Driver, packages: Path, tmp_path: Path, late: str
    ) -> None:
        """Then its memory is not what the files say, and every later job would be told that they are as pinned."""
        (packages / "other.py").write_text("WORD = 'good'\n")
        preload = (HERE / "executor_preload.py").read_text()
        (packages / "executor_preload.py").write_text(
            preload
            + "HERE = Path(__file__).parent\n"
            + f"before = (HERE / '{late}').read_text() if (HERE / '{late}').exists() else ''\n"
            + f"(HERE / '{late}').write_text('WORD = 1')\n"
            + f"(HERE / '{late}').write_text(before) if before else (HERE / '{late}').unlink()\n"
        )
        pinned = self.pinned(packages, tmp_path)
        for number in (1, 2):
            assert driver.run(pinned=pinned)["server"] is None
            log = (tmp_path / f"job-{number}" / "log.txt").read_text()
            assert "files of the environment were written while" in log
        assert (packages / "other.py").read_text() == "WORD = 'good'\n"

    @pytest.mark.slow
    def test_a_file_that_came_once_while_it_imported_is_no_end(
        self, driver: Driver, packages: Path, tmp_path: Path
    ) -> None:
        """Another Python may make a folder for compiled files meanwhile."""
        preload = (HERE / "executor_preload.py").read_text()
        (packages / "executor_preload.py").write_text(
            preload + "(Path(__file__).parent / '__pycache__').mkdir(exist_ok=True)\n"
        )
        found = driver.run(pinned=self.pinned(packages, tmp_path))
        assert found["server"] is not None

    @pytest.mark.slow
    def test_a_refused_environment_ends_no_other_runs_server(
        self, driver: Driver, packages: Path, tmp_path: Path
    ) -> None:
        assert driver.run(pinned="sha256:" + "0" * 64) == {}
        assert driver.run(pinned=self.pinned(packages, tmp_path))["server"] is not None

    @pytest.mark.slow
    def test_a_run_that_pinned_something_else_gets_its_own(
        self, driver: Driver, packages: Path, tmp_path: Path
    ) -> None:
        before = driver.run(pinned=self.pinned(packages, tmp_path))["server"]
        (packages / "more.py").touch()
        after = driver.run(pinned=self.pinned(packages, tmp_path))["server"]
        assert after not in (None, before)
