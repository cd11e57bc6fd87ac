"""What a forked job computes is what the same order computes in a Python of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workbench import PATIENCE, Workbench


def written(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "grpo", "evaluate"])
def test_the_same_outputs_bit_for_bit(bench: Workbench, tmp_path: Path, stage: str) -> None:
    [attempt] = bench.attempts(bench.run_id(), stage)
    forked, cold = bench.root / attempt.folder, tmp_path / "cold"
    cold.mkdir()
    assert "imports its own modules" not in (forked / "log.txt").read_text(), "two cold ones would be compared"
    order = (forked / "job.json").read_text()
    for place in {str(Path(json.loads(order)["cache_dir"]).parent)} - {str(bench.root)}:
        order = order.replace(place, str(bench.root))  # the workspace is a copy
    (cold / "job.json").write_text(order)
    command = [sys.executable, "-s", "-P", "-m", "posttrain.jobs.stage", str(cold)]
    subprocess.run(command, check=True, timeout=PATIENCE)
    assert written(cold / "outputs") == written(forked / "outputs")
