"""The list of mutants is in order, its tool tells what it should, and some drawn by a seed are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MINE = {
    "name": "a moment is another",
    "old": "return time.time()",
    "new": "return time.time() + 1",
    "tests": ["unit/test_data_refs.py"],
}


def mutants(*words: str) -> tuple[int, str]:
    """Exit code and output of `python -m mutants WORDS…`."""
    command = [sys.executable, "-m", "mutants", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def listed(folder: Path, **changes: object) -> str:
    """A list of one mutant of the clock."""
    (folder / "mine.yaml").write_text(yaml.safe_dump({"store/database.py": {"mutants": [{**MINE, **changes}]}}))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "0 entries out of order"),
        ({"old": "return time.tiem()"}, "must stand in src/posttrain/store/database.py exactly once, found 0 times"),
        ({"old": "time"}, "exactly once, found"),
        ({"new": "return time.time("}, "is no Python"),
        ({"new": MINE["old"]}, "must differ"),
        ({"tests": []}, "names no tests"),
        ({"tests": ["unit/test_absent.py"]}, "there is no tests/unit/test_absent.py"),
    ],
)
def test_a_stale_list_is_refused(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    code, said = mutants("--check", "--lists", listed(tmp_path, **changes))
    assert told in said
    assert code == (0 if not changes else 2)


@pytest.mark.slow
def test_the_list_fits_the_sources() -> None:
    code, said = mutants("--check")
    assert code == 0, said
    assert int(said.split()[0]) >= 470


@pytest.mark.slow
def test_a_mutant_that_no_test_notices_is_told(tmp_path: Path) -> None:
    code, said = mutants("--jobs", "1", "--lists", listed(tmp_path))
    assert code == 1
    assert "survived: mine: store/database.py: a moment is another" in said


@pytest.mark.slow
def test_tests_that_fail_anyway_notice_nothing(tmp_path: Path) -> None:
    code, said = mutants(
        "--jobs", "1", "--lists", listed(tmp_path, tests=["unit/test_data_refs.py::test_refused_in_one_line[absent]"])
    )
    assert code == 2
    assert "the tests must pass without a mutant" in said


@pytest.mark.slow
@pytest.mark.first
def test_four_drawn_by_a_seed_are_noticed() -> None:
    """`make mutants` tries them all; a mutant costs its tests, so that a dozen took as long as a demo."""
    code, said = mutants("--sample", "4", "--seed", "7")
    total = next(line.split() for line in said.splitlines() if line.startswith("all "))
    assert total[1:3] == ["4", "4"], said
    assert code == 0, said
