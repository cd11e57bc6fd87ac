"""Jobs that run out of memory or of disk, for real: the kernel kills, an allocation fails, a disk fills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.jobs import NO_SPACE, Cause, JobOrder, JobState, Observation
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.store.attempts import AttemptFolder
from posttrain.store.database import Database

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PATIENCE = 400.0
_PROGRAM = """
import json, sys
from pathlib import Path
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.local.executor import LocalExecutor
if len(sys.argv) > 2:
    Path(sys.argv[2], "cgroup.procs").write_text("0")
LocalExecutor().submit(JobSpec(**json.loads(sys.argv[1])))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup with 300 MB of memory."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    place = base / f"posttrain-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / limit).write_text(str(300 * 2**20))
    except OSError as error:
        with suppress(OSError):
            place.rmdir()
        pytest.skip(f"no cgroup with a limit can be made here: {error}")
    yield place
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with suppress(OSError):
            place.rmdir()
            return
        time.sleep(0.1)


def ended(place: Path, mode: str, *group: Path) -> tuple[AttemptFolder, Observation]:
    """A job in a folder there, to its end."""
    folder = AttemptFolder(place / "runs" / "r" / "sft" / "001")
    folder.write_order(JobOrder("r-sft-1", "sft", 1, {}, {}, (place / "blobs").as_uri(), str(place / "cache"), epoch=1))
    environment = {"PYTHONPATH": str(HERE), "JOB_MODE": mode}
    asked = {"name": "r-sft-1", "module": "starved_job", "mailbox": folder.path.as_uri(), "environment": environment}
    subprocess.run([sys.executable, "-c", _PROGRAM, json.dumps({**asked, "epoch": 1}), *map(str, group)], check=True)
    until, executor = time.monotonic() + PATIENCE, LocalExecutor()
    job = JobSpec(**asked, epoch=1)  # type: ignore[arg-type]
    while (seen := executor.observe([job])[0]).live:
        assert time.monotonic() < until
        time.sleep(0.05)
    return folder, seen


def test_audit_35_a_job_that_the_kernel_killed_for_memory_is_out_of_memory(tmp_path: Path, small_group: Path) -> None:
    _, seen = ended(tmp_path, "kernel", small_group)
    assert (seen.state, seen.exit_code, seen.cause) == (JobState.EXITED, -9, Cause.OUT_OF_MEMORY), seen
    assert "the kernel killed it" in seen.why
    assert "GiB" in seen.why


def test_audit_35_a_job_whose_allocation_fails_says_so_in_its_receipt(tmp_path: Path) -> None:
    folder, seen = ended(tmp_path, "limit")
    assert (seen.state, seen.exit_code) == (JobState.EXITED, 0), folder.log.read_text()[-2000:]
    result = folder.read_result()
    assert result is not None
    assert result.failure is not None
    assert result.failure.kind == "out_of_memory"
    assert "out of memory; its process used" in result.failure.message


def test_audit_36_a_job_that_fills_its_disk_is_no_lost_job(small_disk: Path) -> None:
    folder, seen = ended(small_disk, "disk")
    assert (seen.state, seen.exit_code) == (JobState.EXITED, NO_SPACE), seen
    assert (folder.path / "exit.json").is_file()
    assert not (folder.path / ".reserve").exists()


def test_audit_36_a_ledger_on_a_full_disk_says_so(small_disk: Path) -> None:
    with (small_disk / "filling").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(WorkspaceError) as caught:
        Database(small_disk / "ledger.db")
    assert "the disk is full; free some space" in str(caught.value)
    assert "\n" not in str(caught.value)
