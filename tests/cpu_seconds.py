"""What each test costs in CPU seconds, its own process and those that it waited for. `--cpu 100` prints those that
cost most, `--cpu-file` keeps all. Unlike durations, CPU seconds hardly grow when the machine is busy.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST = 10.0  # CPU seconds of a fast test, which takes two at most on a quiet machine: a test that takes more is slow
# tests that are not fast
OTHERS = ("slow", "gpu", "ray", "ecosystem", "browser", "postgres", "slurm", "containers", "evals", "vllm")
_LAST = pytest.StashKey[float]()
_LOOPS, _USUAL = 500_000, 0.007  # turns of an empty loop, and the CPU seconds that they usually take


def spent() -> float:
    """User and system seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def pace() -> float:
    """How many times slower than usual this processor is just now: one that is shared may be half as fast."""
    taken = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(_LOOPS):
            pass
        taken.append(time.process_time() - begin)
    return max(1.0, statistics.median(taken) / _USUAL)


class CpuSeconds:
    """Measures every phase of a test where it runs, and adds the phases up where the test is reported."""

    def __init__(self, config: pytest.Config, limit: float = MOST) -> None:
        self.config, self.limit = config, limit
        self.cost: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        now = spent()
        report.cpu = now - self.config.stash.get(_LAST, now)  # xdist carries every attribute of a report
        self.config.stash[_LAST] = now
        if (
            report.when == "call"
            and report.passed
            and report.cpu > self.limit
            and not any(map(item.get_closest_marker, OTHERS))
            and report.cpu > self.limit * pace()
        ):
            report.outcome = "failed"
            report.longrepr = (
                f"a fast test must take at most {self.limit:g} CPU seconds, this one took {report.cpu:.1f}: "
                "make it cheaper, share what it starts with, or mark it slow"
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        one = self.cost[report.nodeid]
        one[0] += getattr(report, "cpu", 0.0)
        one[1] += report.duration

    def pytest_collection_finish(self) -> None:
        self.config.stash[_LAST] = spent()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if hasattr(self.config, "workerinput"):  # one of several workers, which knows its own share alone
            return
        ranked = sorted(self.cost.items(), key=lambda item: -item[1][0])
        if most := self.config.getoption("--cpu"):
            total = sum(cpu for _, (cpu, _) in ranked)
            terminalreporter.section(f"{most} of {len(ranked)} tests by CPU seconds, {total:.0f} s in all")
            for name, (cpu, wall) in ranked[:most]:
                terminalreporter.write_line(f"{cpu:7.1f} s CPU {wall:7.1f} s {name}")
        if file := self.config.getoption("--cpu-file"):
            Path(file).write_text(json.dumps(dict(ranked), indent=0))
