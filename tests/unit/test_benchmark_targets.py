"""A benchmark that misses a target says so and exits with 1; a tiny round judges nothing. Measurements are made up."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.judging import at_least, at_most, judge

ROOT = Path(__file__).resolve().parents[2]


def code_of(run: Callable[[], object]) -> int:
    with pytest.raises(SystemExit) as left:
        run()
    return int(left.value.code or 0)


@pytest.mark.parametrize(("found", "code"), [(2.5, 0), (2.6, 0), (2.4999, 1), (math.nan, 1)])
def test_what_is_at_least_is_judged(found: float, code: int) -> None:
    assert code_of(lambda: judge([at_least("it", 9.0, 2.5), at_least("it", found, 2.5)])) == code


@pytest.mark.parametrize(("found", "code"), [(0.02, 0), (0.0, 0), (0.0201, 1), (math.nan, 1)])
def test_what_is_at_most_is_judged(found: float, code: int) -> None:
    assert code_of(lambda: judge([at_most("it", 0.0, 0.02, ""), at_most("it", found, 0.02, "")])) == code


def test_a_miss_is_told_with_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(lambda: judge([at_most("a forked job", 2.5, 2.0, " s"), at_least("native", 2.6, 2.5)])) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == ["missed: a forked job is 2.5 s, target at most 2 s", "targets met: 1 of 2"]


def test_a_round_that_cannot_tell_misses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(lambda: judge([at_least("it", 0.1, 2.5)], full=False)) == 0
    assert capsys.readouterr().out == ""


# A benchmark's module and the ratio that it is to find: what stands in for its measuring.
MADE_UP: dict[str, Callable[[Any, float], dict[str, Callable[..., Any]]]] = {
    "rollout": lambda module, ratio: {
        "measure": lambda work, *_: [
            module.Result(name, len(work.limits), work.group, 1.0, ratio, ratio, ratio, 1.0, 1.0)
            for name in ("hf generate", "posttrain native")
        ]
    },
    "versions": lambda module, ratio: {"measure": lambda *_: [module.Result(16, 1, 1.0, 1.0, *[ratio] * 5)]},
    "demo": lambda module, ratio: {"measure": lambda *_: [(module.Play(ratio, 9.0), module.Play(1.0, 1.0))]},
    "training": lambda module, ratio: {
        "measure": lambda *_: [
            module.Result(task, 1.0, 1.0, ratio, ratio, ratio, 1.0, 1.0, 0.0, 0.0, "") for task in ("sft", "grpo")
        ]
    },
    "per_token": lambda module, ratio: {"measure": lambda mean, *_: module.Row(mean, 8, 8, ratio, 9.0)},
    "controller": lambda module, ratio: {
        "shares": lambda *_: module.Share(1.0, ratio, 0.0, 1, 1),
        "growth": lambda *_: {},
    },
    "logprobs": lambda module, ratio: {
        "compare": lambda dtype, *_: module.Row(dtype, 1.0, *[module.Measured(1.0, 1.0, 1.0)] * 2, *[ratio] * 3)
    },
    "overlap": lambda module, ratio: {
        "measure": lambda *_: module.Result(1.0, 1.0, 1.0, ratio, 1.0),
        "teach": lambda *_: None,
    },
    "streaming": lambda module, ratio: {
        "measure": lambda rows, *_, **__: [
            module.Result(way, rows, 8, 1.0, own, own, own, 1.0, 1.0, 1.0, 1.0, 1.0)
            for way, own in (("padded batches", 1.0), ("continuous", ratio))
        ]
    },
    "starting": lambda module, ratio: {
        "prepare": lambda *_: {},
        "measure": lambda *_: [
            module.Row(job, *[9.0] * 4, own, 1.0, 1.0, 9) for job, own in (("first", 9.0), ("sft", ratio))
        ],
    },
}
# benchmark and options: a ratio that meets the target, one that misses it
JUDGED: list[Any] = [
    ("rollout", 2.5, 2.4),
    ("rollout --size 24m", 1.6, 1.5),
    ("versions .", 0.95, 0.94),
    ("demo .", 1.05, 1.06),
    pytest.param("training", 2.6, 2.5, marks=pytest.mark.slow),
    ("per_token", 0.1, 0.11),
    ("controller", 0.02, 0.03),
    ("logprobs", 0.25, 0.26),
    ("overlap", 0.9, 0.89),
    ("streaming", 1.5, 1.4),
    ("starting", 2.0, 2.1),
]


@pytest.mark.parametrize(("typed", "meets", "misses"), JUDGED)
def test_a_full_round_is_judged_and_a_tiny_one_is_not(
    typed: str, meets: float, misses: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = typed.split()
    if name == "training":
        pytest.importorskip("trl", reason="`make slow` installs the extra bench")
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.chdir(ROOT)
    for ratio, more, code in ((meets, [], 0), (misses, [], 1), (misses, ["--tiny"], 0)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [name, *options, *more])
            for place, instead in MADE_UP[name](module, ratio).items():
                patch.setattr(module, place, instead)
            assert code_of(module.main) == code
        told = capsys.readouterr().out
        assert ("missed: " in told) == bool(code)
        assert ("targets met: " in told) == (not more)


@pytest.mark.slow
def test_training_of_24_m_parameters_is_told_and_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="`make slow` installs the extra bench")
    module = importlib.import_module("benchmarks.training")
    monkeypatch.setattr(sys, "argv", ["training", "--size", "24m"])
    monkeypatch.setattr(module, "measure", MADE_UP["training"](module, 0.1)["measure"])
    assert code_of(module.main) == 0


def test_16_rows_of_24_m_parameters_are_told_and_not_judged() -> None:
    from benchmarks.rollout import ROWS, TARGETS

    assert {size: [rows for rows in ROWS if rows in of] for size, of in TARGETS.items()} == {
        "1m": [256, 16],
        "24m": [256],
    }


def test_a_demo_is_summed_up_by_the_ratio_of_each_round() -> None:
    from benchmarks.demo import Play, Result, summary

    rounds = [
        (Play(60.0, 200.0), Play(50.0, 100.0)),
        (Play(30.0, 80.0), Play(60.0, 160.0)),
        (Play(9.0, 9.0), Play(9.0, 9.0)),
    ]
    assert summary(rounds) == [
        Result("processor", 30.0, 50.0, 1.0, 0.5, 1.2),
        Result("wall", 80.0, 100.0, 1.0, 0.5, 2.0),
    ]


def test_a_demo_of_other_sources_than_its_checkouts_is_refused(tmp_path: Path) -> None:
    from benchmarks.demo import Side

    Side(ROOT, Path(sys.executable)).check()
    with pytest.raises(SystemExit, match="must take posttrain from"):
        Side(tmp_path, Path(sys.executable)).check()


def test_orphans_are_counted_and_waited_for(tmp_path: Path) -> None:
    """As supervisors are, which outlive the command that started them; what is asked for is what they used at least."""
    orphan = (
        "import os, sys, time\n"
        "if os.fork():\n"
        "    os._exit(3)\n"
        "os.setsid()\n"
        "while time.process_time() < 0.5:\n"
        "    pass\n"
        "open('ended', 'w').close()\n"
    )
    command = [sys.executable, "-m", "benchmarks.process_tree", str(tmp_path), sys.executable, "-c", orphan]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    told = json.loads(done.stdout)
    assert (told["code"], (tmp_path / "ended").exists()) == (3, True)
    assert told["processor"] >= 0.5
    assert told["wall"] > 0
