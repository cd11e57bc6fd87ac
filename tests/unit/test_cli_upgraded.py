"""The package is replaced under a command that runs: a driver has what it needs, and others say so in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import make_world

import posttrain

HERE = Path(__file__).parent
DRIVE = """
import json, sys
from pathlib import Path
import pytest
from cli_world import World, make_world
from posttrain.app.driver import Driver

world = make_world(Path.cwd(), pytest.MonkeyPatch())
look, before = Driver.look, set()

def noted(self):
    changed = look(self)
    if not before:
        before.update(sys.modules)
    return changed

Driver.look = noted
print(world.ok("run", "run.yaml"))
assert before
late = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in json.loads(sys.argv[1]))
print(json.dumps(late))
"""
REPLACE = """
import sys
from pathlib import Path
from posttrain.cli import main

source = Path(main.__file__).parents[1] / "views" / "status.py"
assert source.is_relative_to(sys.argv[1]), source
{change}
sys.argv = ["posttrain", "ls"]
main.main()
"""


@pytest.mark.slow
def test_a_driver_imports_nothing_after_its_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From training to gates, release, report and curves."""
    make_world(tmp_path, monkeypatch).prepare()
    decided = json.dumps(["posttrain", "scipy", "matplotlib", "jinja2", "pyarrow"])
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, decided],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prod now points at" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('source.write_text("def (")', "status.py"),
        pytest.param("source.unlink()", "posttrain.views.status", marks=pytest.mark.slow),
    ],
)
def test_a_command_whose_source_was_replaced_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, named: str
) -> None:
    make_world(tmp_path, monkeypatch).ok("init")
    copy = tmp_path / "packages"
    shutil.copytree(Path(posttrain.__file__).parent, copy / "posttrain", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", REPLACE.format(change=change), str(copy)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 9, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: posttrain itself was changed while this command ran ({named}), so it cannot")
    assert line.endswith("; nothing is lost; run the same command again")
    report = re.search(r"; ([^ ]+)\); nothing", line)
    assert report
    assert "Traceback" in Path(report[1]).read_text()


BROKEN = """
import os, sys
from pathlib import Path
from posttrain.cli import main, runs

source = Path(main.__file__).parents[1] / "views" / "status.py"
{change}

def fails(*_, **__):
    raise ZeroDivisionError("a bug")

import posttrain.app.workspace
posttrain.app.workspace.find_workspace = fails
sys.argv = ["posttrain", "ls"]
main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", ["source.chmod(0o640)", "os.link(source, source.with_suffix('.copy'))"])
def test_a_bug_is_not_hidden_by_a_link_or_a_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """An installer of another environment links to the same files; the sources are what they were."""
    make_world(tmp_path, monkeypatch).ok("init")
    copy = tmp_path / "packages"
    shutil.copytree(Path(posttrain.__file__).parent, copy / "posttrain", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", BROKEN.format(change=change)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "unexpected ZeroDivisionError: a bug; this is a bug in Posttrain: please report it with" in done.stderr
