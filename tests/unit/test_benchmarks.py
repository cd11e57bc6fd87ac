"""Benchmarks use public faces only, run one tiny round each, and the levels they state are what they compute."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "benchmarks").glob("*.py"))
HELPERS = {"__init__", "__main__", "elsewhere", "empty_worker", "judging", "process_tree", "ray_pools", "sorting_task"}
HELPERS |= {"trl_trainers", "real_runs"}


def private_uses(source: str) -> list[str]:
    """Names with a leading underscore that a module takes from anything but itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in parts if name.startswith("_") and not name.endswith("__")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            found += [str(name) for name in names if str(name).startswith("_")]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_benchmark_reaches_for_nothing_private(path: Path) -> None:
    assert private_uses(path.read_text(encoding="utf-8")) == []


def test_what_counts_as_private() -> None:
    source = "from a._b import c\nfrom a import _d\nx._e = y._f()\nself._own\ngetattr(x, '_g')\nx.__class__\n_mine()\n"
    assert sorted(private_uses(source)) == ["_b", "_d", "_g", "x._e", "y._f"]


def run(*words: str) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=2000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_benchmark_is_run_by_a_test() -> None:
    from benchmarks.__main__ import SUITES

    assert {path.stem for path in MODULES} - HELPERS == {*(suite.split()[0] for suite in SUITES), "gates", "learning"}


@pytest.mark.slow
@pytest.mark.first
def test_a_tiny_round_of_everything_as_make_bench_runs_it(tmp_path: Path) -> None:
    """That of `demo` makes workspaces and plays nothing: a demo takes minutes, and `make dist` plays one."""
    pytest.importorskip("trl", reason="`make slow` installs the extra bench")
    shown = run("benchmarks", "--tiny", "--json", str(tmp_path))
    from benchmarks.__main__ import SUITES, file_name

    assert [line for line in shown.splitlines() if line.startswith("# ")] == [f"# {suite}" for suite in SUITES]
    assert {path.name for path in tmp_path.iterdir()} == set(map(file_name, SUITES))
    assert "targets met" in shown, "of dispatch, whose counts depend on no machine"
    assert "missed" not in shown
    for column in ("reached", "TRL", "ours", "written", "verify", "p99"):
        assert column in shown


@pytest.mark.slow
def test_one_tiny_seed_of_the_learning_tables(tmp_path: Path) -> None:
    shown = run("benchmarks.learning", "--tiny", "--json", str(tmp_path / "found")).splitlines()
    found = json.loads((tmp_path / "found").read_text())
    assert len(found["learned"]) == 15
    assert [line.split(" | ")[0][2:] for line in shown[2:13]] == list(found["differences"])
    for learned in found["learned"].values():
        assert [sorted(learned["tuning"]), len(learned["runs"])] == [sorted(map(str, learned["algorithm"]["rates"])), 1]
        assert learned["runs"][0]["steps"] == 1
        assert learned["runs"][0]["tokens"] > 500
        assert 0 <= learned["runs"][0]["score"] <= 1


@pytest.mark.slow
def test_log_probabilities_over_150_k_words_take_a_quarter_of_the_memory(tmp_path: Path) -> None:
    """Forward and backward, by the kernel's count of each process."""
    from benchmarks.logprobs import TARGET

    run("benchmarks.logprobs", "--tokens", "1536", "--hidden", "64", "--rounds", "1", "--json", str(tmp_path / "found"))
    rows = json.loads((tmp_path / "found").read_text())
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert all(row["naive"]["peak_mib"] > 1000 for row in rows)
    assert all(row["ratio"] <= TARGET for row in rows)


@pytest.fixture(scope="module")
def levels() -> list[str]:
    return run("benchmarks.gates", "--tiny").splitlines()


@pytest.mark.slow
def test_every_small_gate_is_at_or_under_its_level(levels: list[str]) -> None:
    assert levels[-1] == f"{len(levels) - 2} of {len(levels) - 2} gates at or under their level"
    assert len(levels) > 15


def test_a_method_above_its_level_is_told() -> None:
    from benchmarks.gates import Level, shown

    assert not Level("Wilson", 22, 0.05, 0.198, 0.0, None, "exact").holds
    assert not Level("bootstrap", 20, 0.05, 0.0604, 0.005, None, "2000 draws").holds
    assert Level("bound", 20, 0.05, 0.0599, 0.005, None, "2000 draws").holds
    assert shown(Level("Wilson", 22, 0.05, 0.198, 0.0, None, "exact")).endswith("ABOVE ITS LEVEL")


@pytest.mark.slow
def test_the_documented_levels_are_what_the_command_prints(levels: list[str]) -> None:
    documented = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8").splitlines()
    assert levels[0] in documented
    exact = [line for line in levels[1:-1] if "exact" in line]
    assert len(exact) > 10
    assert [line for line in exact if line not in documented] == []
