"""The two-turn example of docs/howto/turns.md, as a reader pastes it into an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_recovery import armed
from workbench import Workbench

from posttrain.domain.jobs import Metric, Span

pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "turns.md"


def test_what_the_page_says_happens_and_a_killed_job_changes_nothing(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POSTTRAIN_")}
    bench = Workbench(tmp_path)
    try:
        done = subprocess.run(
            ["bash", "-ec", block], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900,
            env={**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        run = next(one["id"] for one in bench.run("ls", "-o", "json").json["runs"] if one["name"] == "guess")
        (attempt,) = bench.attempts(run, "guess")
        facts = bench.facts(attempt)
        steps = [fact.values for fact in facts if isinstance(fact, Metric) and "reward/mean" in fact.values]
        first, last = (sum(v["reward/mean"] for v in part) / 10 for part in (steps[:10], steps[-10:]))
        assert last > first + 0.02, "it learns; some seeds stay at .72, where the first guess alone is learnt"
        assert all(1 < values["turns/mean"] <= 2 for values in steps)
        assert {span.name for span in facts if isinstance(span, Span)} >= {"environment", "rollout", "update"}
        crash, mark = armed(bench, ("train.step", 23))
        words = [f"stages.guess.{word}" for word in ("runtime.checkpoint_every=10", "observe_concurrency=4")]
        bench.run("run", "run.yaml", *(part for word in words for part in ("--set", word)), env=crash)
        assert mark.exists()
        again = next(one["id"] for one in bench.run("ls", "-o", "json").json["runs"] if one["name"] == "guess")
        assert again != run
        assert len(bench.attempts(again, "guess")) == 2
        with bench.open() as workspace:
            models = [
                row.outputs for one in (run, again) for row in workspace.ledger.stages(one) if row.name == "guess"
            ]
        assert models[0] == models[1]
    finally:
        bench.clean()
