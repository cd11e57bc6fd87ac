"""docs/howto/plugin.md promises that a package adds a kind of stage, an algorithm, a trainer and an executor: its files
become a wheel, pip installs it into an environment, and its run file is run there by real processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from workbench import PATIENCE, Workbench

import posttrain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from installed import package_of, run_of, wheel

pytestmark = pytest.mark.slow
PAGE = "docs/howto/plugin.md"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose own site-packages the test may write to; everything else it takes from this one."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    source = Path(posttrain.__file__).parents[1]
    (packages / "those_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{source}\n")
    return folder / "bin" / "python"


def pip(python: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)


def test_a_wheel_adds_one_of_each(empty: Workbench, python: Path, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-P", "-m", "posttrain", *words]
        return subprocess.run(
            command,
            cwd=empty.folder,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    text = (
        run_of(PAGE)
        .replace("dataset:sort-train", "dataset:train")
        .replace("model:tiny-sort", "model:tiny")
        .replace("reward:sort", "reward:length")
        .replace("accept: 0.1", "accept: -0.9")
    )
    empty.write("run.yaml", text)
    before = run("plan", "run.yaml")
    assert before.returncode == 2
    assert "stages.words: kind: unknown stage kind 'words'" in before.stderr

    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(wheel(tmp_path, *package_of(PAGE))))
    planned = run("plan", "run.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "words (posttrain-words 1.0)" in planned.stdout
    told = run("doctor", "-o", "json").stdout
    assert "kind 'words' of posttrain-words 1.0" in told
    assert "kind 'raft' of posttrain-words 1.0" in told
    assert "trainer 'copying' of posttrain-words 1.0" in told
    assert "executor 'plain' of posttrain-words 1.0" in told
    nearly = run("init", "--executor", "plian")
    assert (nearly.returncode, "did you mean 'plain'?" in nearly.stderr) == (2, True)
    chosen = run("init", "--executor", "plain")
    assert "executor plain" in chosen.stdout, chosen.stderr
    done = run("run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr

    run_id = empty.run_id()
    with empty.open() as workspace:
        stages = {stage.name: stage for stage in workspace.ledger.stages(run_id)}
        [base] = workspace.ledger.assets("model", "tiny")
        attempts = workspace.ledger.attempts(run_id)
        count = json.loads(workspace.blobs.get(stages["words"].outputs["count"]["digest"]))
    assert {a.stage: (a.executor, a.state) for a in attempts} == dict.fromkeys(stages, ("plain", "succeeded"))
    assert stages["copy"].outputs["model"]["digest"] == base.digest, "the model that it began with"
    assert stages["raft"].outputs["model"]["digest"] != base.digest, "it learnt"
    [raft] = [one for one in json.loads(run("get", run_id, "-o", "json").stdout)["stages"] if one["name"] == "raft"]
    assert {"loss", "reward/mean"} <= raft["metrics"].keys()
    rows = [json.loads(line) for line in (empty.folder / "train.jsonl").read_text().splitlines()]
    assert count["rows"] == len(rows)
    assert count["words"] >= 2 * len(rows)
    empty.check(run_id)

    pip(python, "uninstall", "--yes", "--quiet", "posttrain-words")
    assert run("get", run_id).returncode == 0
    gone = run("run", "run.yaml")
    assert gone.returncode == 2
    assert "executor 'plain' must be installed" in gone.stderr
    run("init", "--executor", "local")
    assert "unknown stage kind 'words'" in run("run", "run.yaml").stderr
