"""Devices of a machine and their locks, with real processes and pretended devices: never two jobs on one."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from posttrain.domain.errors import CapacityError, InfrastructureError, InputError
from posttrain.domain.jobs import Capacity, JobState
from posttrain.domain.jobspec import JobSpec, PodGroup
from posttrain.execution import processes
from posttrain.execution.executors.local.devices import FOLDER_VARIABLE, Devices, holders, lock_folder, take
from posttrain.execution.executors.local.executor import LocalExecutor

HERE = Path(__file__).parent
PATIENCE = 300.0
PRELOAD = "executor_preload"
ENDED = (JobState.EXITED, JobState.LOST)
Make = Callable[..., JobSpec]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    folder = tmp_path / "locks"
    folder.mkdir()
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Make]:
    """Makes jobs that need devices; whatever they started is gone at the end."""
    made: list[JobSpec] = []

    def make(name: str = "run1-train-1", devices: int = 1, mode: str = "waits") -> JobSpec:
        words = {"PYTHONPATH": str(HERE), "JOB_MODE": mode, "JOB_PROOFS": str(tmp_path)}
        made.append(JobSpec(name, (tmp_path / name).as_uri(), "device_job", words, gang=(PodGroup(gpus=devices),)))
        return made[-1]

    yield make
    for each in made:
        if (each.folder / "supervisor.json").exists():
            found = claim(each)
            processes.send(found["pid"], found["identity"], signal.SIGKILL)
            LocalExecutor().observe([each])[0]


def claim(spec: JobSpec) -> dict[str, int | str]:
    found: dict[str, int | str] = json.loads((spec.folder / "supervisor.json").read_bytes())
    return found


def pid(spec: JobSpec, key: str = "pid") -> int:
    return int(claim(spec)[key])


def said(tmp_path: Path, word: str) -> list[str]:
    path = tmp_path / "said"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(word)]


def started(tmp_path: Path, spec: JobSpec) -> str:
    """The devices that a job found in its environment, once it has said so."""
    beginning = f"start {spec.folder} "
    wait_until(lambda: bool(said(tmp_path, beginning)))
    return said(tmp_path, beginning)[0].removeprefix(beginning)


def end(executor: LocalExecutor, spec: JobSpec) -> None:
    (spec.folder / "go").touch()
    wait_until(lambda: executor.observe([spec])[0].state is JobState.EXITED)


@pytest.fixture(params=["cold", "forked"])
def executor(request: pytest.FixtureRequest, locks: Path) -> LocalExecutor:
    machine = Devices(("0", "1"), folder=str(locks))
    return LocalExecutor(PRELOAD if request.param == "forked" else None, lambda: machine)


def test_a_job_has_its_devices_for_itself(executor: LocalExecutor, spec: Make, tmp_path: Path) -> None:
    first, second, third = spec("a-1"), spec("b-1"), spec("c-1")
    executor.submit(first)
    executor.submit(second)
    assert (started(tmp_path, first), started(tmp_path, second)) == ("0", "1")
    with pytest.raises(
        CapacityError, match=r"needs 1 of 2 devices, but none is free: 0 is held by a-1 of .*; 1 is held by b-1"
    ):
        executor.submit(third)
    assert executor.observe([third])[0].state is JobState.UNKNOWN, "nothing of it is claimed"
    end(executor, second)
    executor.submit(third)
    assert started(tmp_path, third) == "1"
    assert list(executor.capacity().held) == ["0", "1"]
    end(executor, first)
    end(executor, third)
    assert executor.capacity() == Capacity(2)
    assert not said(tmp_path, "collision")


def test_a_job_that_needs_several_locks_none_until_it_has_all(
    executor: LocalExecutor, spec: Make, tmp_path: Path
) -> None:
    one, both, none = spec("a-1"), spec("b-1", devices=2), spec("c-1", devices=0)
    executor.submit(one)
    with pytest.raises(CapacityError, match="needs 2 of 2 devices, but only 1 is free"):
        executor.submit(both)
    assert list(executor.capacity().held) == ["0"]
    executor.submit(none)
    assert started(tmp_path, none) == os.environ.get("CUDA_VISIBLE_DEVICES", ""), "it is shown what was visible before"
    end(executor, one)
    executor.submit(both)
    assert started(tmp_path, both) == "0,1"
    with pytest.raises(InputError, match="requests 3 devices, but this machine has 2"):
        executor.submit(spec("d-1", devices=3))


@pytest.mark.parametrize("victim", ["pid", "job_pid"])
def test_a_kill_frees_a_device_when_the_last_of_the_job_is_gone(
    executor: LocalExecutor, spec: Make, tmp_path: Path, victim: str
) -> None:
    job, after = spec("a-1", devices=2, mode="straggler"), spec("b-1", devices=2)
    executor.submit(job)
    started(tmp_path, job)
    child = int((job.folder / "child").read_text())
    os.kill(pid(job, victim), signal.SIGKILL)
    wait_until(lambda: executor.observe([job])[0].state in ENDED)
    try:
        assert holders(executor._machine())["0"].startswith(f"process {child} that a-1 of ")
        with pytest.raises(CapacityError, match=f"process {child}"):
            executor.submit(after)
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: not executor.capacity().held)
    executor.submit(after)
    assert started(tmp_path, after) == "0,1"
    assert not said(tmp_path, "collision")


def test_a_supervisor_that_starts_nothing_holds_nothing(
    executor: LocalExecutor, spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_CRASHPOINT", "supervisor.before_spawn")
    job = spec()
    executor.submit(job)
    wait_until(lambda: executor.observe([job])[0].state is JobState.LOST)
    assert executor.capacity() == Capacity(2)


def test_what_lies_in_a_lock_file_means_nothing_by_itself(locks: Path) -> None:
    machine = Devices(("0", "GPU-5e/../x"), folder=str(locks))
    stale = {"attempt": "old\n\x1b[31m", "job_pid": os.getpid(), "job_identity": "of another boot:1", "token": "t"}
    for words in ("{", "[" * 60000, "[]", '{"job_pid": "x", "token": 3}', json.dumps(stale)):
        (locks / "posttrain-device-0.lock").write_text(words)
        assert holders(machine) == {}
        taken = take(machine, 2)
        assert taken is not None
        assert take(machine, 1) is None
        assert holders(machine).keys() == set(machine.names)
        assert all(who.isprintable() for who in holders(machine).values())
        taken.close()
    assert {path.name for path in locks.iterdir()} == {"posttrain-device-0.lock", "posttrain-device-GPU-5e____x.lock"}


def test_a_lock_file_that_a_cleaner_removed_is_made_anew(locks: Path) -> None:
    machine = Devices(("0",), folder=str(locks))
    for _ in range(2):
        taken = take(machine, 1)
        assert taken is not None
        taken.close()
        (locks / "posttrain-device-0.lock").unlink()


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(locks: Path, tmp_path: Path) -> None:
    machine, secret = Devices(("0",), folder=str(locks)), tmp_path / "mine"
    secret.write_text("precious")
    (locks / "posttrain-device-0.lock").symlink_to(secret)
    with pytest.raises(InfrastructureError, match=f"device locks in {locks} cannot be used: .*{FOLDER_VARIABLE}"):
        LocalExecutor(None, lambda: machine).capacity()
    (locks / "posttrain-device-0.lock").unlink()
    os.link(secret, locks / "posttrain-device-0.lock")
    with pytest.raises(OSError, match="is not a regular file with exactly one link"):
        take(machine, 1)
    assert secret.read_text() == "precious"


def test_every_user_finds_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert lock_folder() in ("/run/lock", "/tmp")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert Devices().folder == str(tmp_path)


def test_a_lock_file_is_for_every_user_whatever_the_umask(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        taken = take(Devices(("0",), folder=str(locks)), 1)
    finally:
        os.umask(before)
    assert taken is not None
    assert (locks / "posttrain-device-0.lock").stat().st_mode & 0o777 == 0o666
    taken.close()


@pytest.mark.slow
def test_three_drivers_in_two_workspaces_share_two_devices_and_lose_nothing_to_kills(
    locks: Path, tmp_path: Path
) -> None:
    """Each run has two stages that could run at once; every first attempt is killed, or its supervisor is."""
    environment = {**os.environ, "JOB_PROOFS": str(tmp_path)}
    places = [(tmp_path / "one", "a"), (tmp_path / "one", "b"), (tmp_path / "two", "c")]
    for place in {place for place, _ in places}:
        place.mkdir()
    drivers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "device_driver.py"), str(place), name, str(locks), "2"],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for place, name in places
    ]  # fmt: skip
    try:
        killed: set[str] = set()
        while any(driver.poll() is None for driver in drivers):
            for line in said(tmp_path, "start "):
                folder = Path(line.split()[1])
                if folder.name == "001" and line not in killed and not (folder / "exit.json").exists():
                    found = json.loads((folder / "supervisor.json").read_bytes())
                    which = ("pid", "identity") if len(killed) % 2 else ("job_pid", "job_identity")
                    processes.send(found[which[0]], found[which[1]], signal.SIGKILL)
                    killed.add(line)
            time.sleep(0.01)
        out = "".join(driver.communicate()[0] for driver in drivers)
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
    assert len(re.findall(r" succeeded$", out, re.MULTILINE)) == 3, out
    assert not said(tmp_path, "collision")
    assert {line.split()[2] for line in said(tmp_path, "start ")} == {"0", "1"}
    assert killed
    waits = [message for place in ("one", "two") for message in waited(tmp_path / place)]
    assert any(
        re.search(r"needs 1 of 2 devices, but none is free: 0 is held by [abc]", message) for message in waits
    ), waits


_WAITED = "SELECT body FROM payloads JOIN events ON id = event WHERE audited LIKE '%WaitingForDevices%'"


def waited(workspace: Path) -> list[str]:
    """What stages said while they waited for devices."""
    with closing(sqlite3.connect(workspace / "ledger.db")) as ledger:
        return [row[0] for row in ledger.execute(_WAITED)]
