"""A real job that stands still: asked for a checkpoint, killed and tried again, though every driver on the way dies.

Time passes in the ledger alone: what is written of a job's silence is made older, so that no machine is too slow.
"""

from __future__ import annotations

import copy
import os
import signal
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from test_recovery import armed
from tiny_run import RUN
from workbench import Workbench

pytestmark = [pytest.mark.slow, pytest.mark.journey]
LIMIT = 3600.0


def older(bench: Workbench, quiet: float) -> None:
    """As if a quarter of the limit had passed since the last look, and somebody had watched `quiet` seconds before."""
    with closing(sqlite3.connect(bench.root / "ledger.db")) as ledger, ledger:
        values = (quiet, LIMIT / 4)
        assert ledger.execute("UPDATE watches SET quiet = ?, at = at - ?", values).rowcount == 1


def watched(bench: Workbench) -> bool:
    with closing(sqlite3.connect(bench.root / "ledger.db")) as ledger:
        return bool(ledger.execute("SELECT count(*) FROM watches").fetchone()[0])


def test_a_job_that_was_stopped_in_its_tracks_is_replaced(empty: Workbench) -> None:
    bench, raw = empty, copy.deepcopy({name: value for name, value in RUN.items() if name not in ("gates", "release")})
    stage: dict[str, Any] = raw["stages"]["sft"] | {"steps": 400, "runtime": {"checkpoint_every": 2}}
    bench.write("run.yaml", raw | {"stages": {"sft": stage}, "runtime": {"stall_after": LIMIT}})
    launched, _ = armed(bench, ("attempt.after_handle", 1))
    bench.run("run", "run.yaml", env=launched, code=-signal.SIGKILL)
    job, run_id = bench.wait_job(), bench.run_id()
    bench.wait("a checkpoint", lambda: list(bench.root.glob("runs/*/sft/001/checkpoints/step-*/COMMIT")))
    os.kill(job.pid, signal.SIGSTOP)
    driver = bench.start("attach", run_id)
    bench.wait("a first look", lambda: watched(bench))
    driver.kill()
    bench.finish(driver)
    older(bench, LIMIT * 0.75)
    asking, died = armed(bench, ("stall.after_ask", 1))
    bench.run("attach", run_id, env=asking, code=-signal.SIGKILL)
    assert died.exists()
    why = bench.run("why", run_id, code=None).out
    assert "no progress for 1 h" in " ".join(why.split())
    assert bench.live("job") == [job]
    older(bench, LIMIT)
    bench.run("attach", run_id)
    bench.check(run_id)
    first, second = bench.attempts(run_id, "sft")
    assert (first.state, first.reason, second.state) == ("lost", "Stalled", "succeeded")
    assert "asked to checkpoint, then killed" in first.message
    assert (bench.resumed_at(second) or 0) > 0
    [finding] = [one for one in bench.run("why", run_id, "-o", "json").json["findings"] if "stall" in one["symptom"]]
    assert (finding["stage"], finding["page"]) == ("sft", "docs/remedies.md#stalled-step")
    assert finding["evidence"].startswith("attempt 1: no progress for 1 h")
    controls = sorted(path.name for path in (bench.root / first.folder / "controls").glob("*.json"))
    assert controls == ["000001.json"], "it was asked once, whoever drove the run"
