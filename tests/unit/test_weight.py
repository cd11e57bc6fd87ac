"""`make weight` counts what it says it counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "weight.py"


def test_a_tree_is_weighed_by_rooms(tmp_path: Path) -> None:
    files = {
        "src/posttrain/store/rows.py": '"""Rows."""\n\nimport json\n\n\ndef read():\n    "Another."\n    return json\n',
        "src/posttrain/store/backends/memory.py": "KEPT = {}\n",
        "src/posttrain/main.py": "from posttrain.store import rows\n\nif __name__ == '__main__':\n    rows.read()\n",
        "src/posttrain/store/log.py": "from posttrain.store import rows\n" + "# a line\n" * 150,
        "tests/unit/test_rows.py": "from posttrain.store import rows\n\n\ndef test_a(): ...\n\n\ndef helper(): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    said = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    rows = [line.split() for line in said.splitlines()]
    assert rows == [
        ["room", "statements", "code", "files", "imports", "tests"],
        ["store", "5", "3", "3", "2", "1"],
        ["(package)", "3", "2", "1", "1", "0"],
        ["all", "8", "5", "4", "3", "1"],
    ]
    rooms = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "--rooms"], capture_output=True, text=True, check=False, timeout=60
    )
    assert rooms.stdout.split() == ["(package)", "→", "store", "1"]


def test_a_function_or_a_file_that_is_too_large_fails(tmp_path: Path) -> None:
    source = tmp_path / "src" / "posttrain" / "store"
    source.mkdir(parents=True)
    (source / "rows.py").write_text("def read():\n" + "    print()\n" * 60)
    (source / "log.py").write_text("x = 1\n" * 801)
    run = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert "rows.py:1 read: a function has at most 60 lines, got 61" in run.stderr
    assert "log.py: a file has at most 800 lines, got 801" in run.stderr


def test_modules_that_import_each_other_fail(tmp_path: Path) -> None:
    source = tmp_path / "src" / "posttrain" / "store"
    source.mkdir(parents=True)
    (source / "rows.py").write_text("from posttrain.store import log\n")
    (source / "log.py").write_text("def said():\n    from posttrain.store.rows import read\n")
    run = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert "posttrain.store.log → posttrain.store.rows → posttrain.store.log: import each other" in run.stderr


def test_a_small_file_needs_two_importers_or_a_reason(tmp_path: Path) -> None:
    source = tmp_path / "src" / "posttrain" / "store"
    source.mkdir(parents=True)
    for name in ("lonely", "shared", "deferred", "named", "ahead"):
        (source / f"{name}.py").write_text("x = 1\n")
    (source / "unused.py").write_text("OWN = 'posttrain.store.unused'\n")
    (source / "program.py").write_text("if __name__ == '__main__':\n    print()\n")
    (source / "rows.py").write_text(
        "from posttrain.store import lonely, shared\n\nif TYPE_CHECKING:\n    from posttrain.store import deferred\n"
        "NAMED = 'posttrain.store.named:x'\n\n\nclass Rows:\n    from posttrain.store import ahead\n\n\n"
        "def read():\n    from posttrain.store import deferred\n" + "# a line\n" * 150
    )
    (source / "log.py").write_text("from posttrain.store import shared\n" + "# a line\n" * 150)
    run = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        f"store/{name}.py: a file with {has} importer has at least 150 lines, got 1; move it into a file that uses it"
        for name, has in (("ahead", "one"), ("lonely", "one"), ("unused", "no"))
    ]
