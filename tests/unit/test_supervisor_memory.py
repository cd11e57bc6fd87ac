"""Who was killed for memory, by the counter of a cgroup that may hold others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.execution.executors.local import supervisor
from posttrain.execution.executors.local.supervisor import OomKills

KILLED = -9


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A cgroup that holds this process alone."""
    holds(tmp_path, os.getpid())
    counts(tmp_path, 3)
    return tmp_path


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


def holds(group: Path, *pids: int) -> None:
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def counts(group: Path, kills: int) -> None:
    (group / "memory.events").write_text(f"oom {kills}\noom_kill {kills}\n")


def test_audit_35_a_kill_in_a_cgroup_of_its_own_is_out_of_memory(group: Path, child: int) -> None:
    kills = OomKills(group)
    assert kills.told(KILLED) == {}
    holds(group, os.getpid(), child)
    kills.look()
    counts(group, 4)
    assert "oom" in kills.told(KILLED)


@pytest.mark.parametrize("late", [False, True])
def test_audit_35_a_kill_in_a_shared_cgroup_is_a_hint(group: Path, late: bool) -> None:
    other = os.getppid()
    if not late:
        holds(group, os.getpid(), other)
    kills = OomKills(group)
    holds(group, os.getpid(), other)  # another job of the server
    kills.look()
    holds(group, os.getpid())
    counts(group, 4)
    told = kills.told(KILLED)
    assert "oom" not in told
    assert "exit code -9; memory ran out, and the kernel killed a process, possibly this job, in a" in told["said"]


def test_audit_35_whoever_launched_the_job_does_not_share_its_cgroup(group: Path) -> None:
    holds(group, os.getpid(), os.getppid())
    kills = OomKills(group, {os.getppid()})
    counts(group, 4)
    assert "oom" in kills.told(KILLED)
    holds(group, 1, os.getpid(), os.getppid())
    kills.look()
    assert "oom" not in kills.told(KILLED)


def test_audit_35_a_kill_long_ago_or_of_a_job_that_was_asked_to_end_shows_nothing(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    kills = OomKills(group)
    counts(group, 4)  # another job's, once
    for _ in range(100):
        now[0] += 0.25
        kills.look()
    assert kills.told(KILLED) == {}
    counts(group, 5)
    assert "oom" in kills.told(KILLED)
    kills.asked()
    assert kills.told(KILLED) == {}


def test_audit_35_where_nothing_counts_nothing_is_shown() -> None:
    kills = OomKills(None)
    kills.look()
    assert kills.told(KILLED) == {}
