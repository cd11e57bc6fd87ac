"""The way of a job to its first step: what it imports, that nothing is collected meanwhile, what its log says of it."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from test_train_job import Shop

from posttrain.domain.jobs import Fact, Metric, Progress
from posttrain.jobs import entry
from posttrain.jobs.bodies import training
from posttrain.jobs.entry import loading

SLOW_TO_IMPORT = ("torch", "transformers", "numpy", "scipy", "tokenizers", "safetensors", "jinja2", "posttrain.engine")
NEEDLESS = (
    *("ray", "pyarrow", "pandas", "matplotlib", "sqlalchemy", "alembic", "typer", "rich"),
    *("posttrain.control", "posttrain.app", "posttrain.cli", "posttrain.server", "posttrain.decision"),
)
STARTED = re.compile(r"^start: (\d+\.\d\d) s of processor time, (\d+\.\d\d) s of it before the order was read$", re.M)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


def said_by(*words: str) -> str:
    """What a Python says on both streams, in order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-u", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def imported(said: str) -> set[str]:
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", said, re.MULTILINE))


def within(names: set[str], rooms: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if any(name == room or name.startswith(f"{room}.") for room in rooms))


@pytest.fixture(scope="module")
def preloaded() -> set[str]:
    """What it has, and what it looked for in vain: nobody looks again at no cost."""
    said = said_by("-X", "importtime", "-c", "import sys, posttrain.jobs.preload; print('has', *sys.modules)")
    return imported(said) | set(said.rpartition("\nhas ")[2].split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_job_imports_nothing_needless_and_its_fork_has_the_rest(kind: str, shop: Shop, preloaded: set[str]) -> None:
    attempt = getattr(shop, kind)(f"imports-{kind}")
    said = said_by("-X", "importtime", "-m", "posttrain.jobs.stage", str(attempt.path))
    result = attempt.read_result()
    assert result is not None
    assert result.status == "succeeded"
    before, told, _ = said.partition("\nstart: ")
    names = imported(before)
    assert told
    assert {"torch", "posttrain.engine.loop.controller"} <= names & preloaded
    assert within(names - preloaded, SLOW_TO_IMPORT) == []
    assert within(names, NEEDLESS) == []


@pytest.mark.slow
def test_what_jobs_are_forked_from_has_one_thread() -> None:
    """More than one cannot be forked, so every job would start cold."""
    said = said_by("-c", "import os, posttrain.jobs.preload; print('threads', len(os.listdir('/proc/self/task')))")
    assert said.splitlines()[-1] == "threads 1"


class TestCollector:
    def test_it_rests_while_a_job_loads_and_works_while_it_trains(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[str, bool]] = []

        def watched(module: Any, name: str) -> None:
            given = getattr(module, name)

            def watching(*args: Any, **kwargs: Any) -> Any:
                seen.append((name, gc.isenabled()))
                return given(*args, **kwargs)

            monkeypatch.setattr(module, name, watching)

        watched(training, "_open")
        watched(training, "_leave_best")
        assert gc.isenabled()
        assert entry.run(str(shop.sft("collected").path), training.body) == 0
        assert seen == [("_open", False), ("_leave_best", True)]
        assert gc.isenabled()

    def test_it_is_left_as_it_was_also_by_an_error(self) -> None:
        with pytest.raises(ZeroDivisionError), loading():
            raise ZeroDivisionError
        assert gc.isenabled()
        gc.disable()
        try:
            with loading():
                pass
            assert not gc.isenabled()
        finally:
            gc.enable()


def test_a_log_says_what_the_start_cost(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(str(shop.grpo("told").path), training.body) == 0
    told = STARTED.search(capsys.readouterr().out)
    assert told is not None
    assert 0 <= float(told[2]) <= float(told[1])


def test_a_log_shows_the_progress_of_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    passed, at, now = list[Fact](), 1.7e9, [50.0]
    monkeypatch.setattr(entry, "time", Mock(wraps=time, monotonic=lambda: now[0]))
    with entry.Logged(passed.append) as sink:
        for step in range(1, 49):  # one step a second, stopped before step 50, and a probe after every tenth
            now[0] += 1
            sink(Metric(step, {"loss": 2 / step, "reward/max": 1.0}, at + step))
            sink(Progress(step, 50, "grpo", 100 * step, at + step))
            if step % 10 == 0:
                sink(Metric(step, {"probe/accuracy": step / 50}, at + step))
        sink(Metric(48, {"probe/accuracy": 0.96}, at + 49))
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert len(passed) == 101
    assert [line[0].partition(" grpo ")[2] for line in lines] == [f"step {n}/50" for n in (1, 11, 21, 31, 41, 48)]
    assert lines[0][1:] == ["loss 2"], "no rate before a second line"
    assert lines[1][1:] == ["loss 0.1818", "probe/accuracy 0.2 at step 10", "100 tokens/s"]
    assert lines[5][1:] == ["loss 0.04167", "probe/accuracy 0.96", "100 tokens/s"]
    assert lines[0][0].startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at + 1)))


def test_a_strange_value_of_a_package_is_not_printed_and_ends_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    passed = list[Fact]()
    with entry.Logged(passed.append) as sink:
        for value, at in ((None, 1.7e9), ("0.5", 1.7e9), (1.0, 1.7e18), (10**400, 1.7e9)):
            sink(Metric(1, {"loss": cast("float", value)}, at))
            sink(Progress(1, 2, "own", 0, at))
        sink(Progress(2, 2, "own", 0, 1.7e9))
    assert len(passed) == 9
    assert "own step 2/2" in capsys.readouterr().out


def test_what_this_file_counts_as_imported() -> None:
    said = "import time:       110 |        221 |     torch.nn\nnot import time: 1 | 2 | x\n"
    assert imported(said) == {"torch.nn"}
    assert within({"torch.nn", "torchgen", "numpy"}, ("torch",)) == ["torch.nn"]


def test_what_a_running_job_prints_is_in_its_log_before_it_ends(tmp_path: Path) -> None:
    """`posttrain logs` reads the file; `os._exit` writes no buffer."""
    program = "from posttrain.jobs.entry import settle_environment; settle_environment(1); print('step 1'); import os; "
    log = tmp_path / "log.txt"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with log.open("wb") as out:
        words = [sys.executable, "-c", program + "os._exit(0)"]
        subprocess.run(words, env=plain, stdout=out, check=True, timeout=300)
    assert log.read_text() == "step 1\n"
