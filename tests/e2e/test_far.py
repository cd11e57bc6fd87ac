"""Jobs on a machine that shares nothing with its driver but an object store, and drivers whose machine is lost."""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tiny_run import make_template
from workbench import PATIENCE, Reference, Workbench

from posttrain.domain.jobspec import JobRef
from posttrain.execution import processes
from posttrain.store.attempts import mailbox_at
from posttrain.store.staging import StagingArea
from serving import Served

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from far import HERE
from installed import install, on_path

from s3_server import KEYS

pytestmark = pytest.mark.slow


@pytest.fixture
def first(tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """A workspace whose jobs run on a far machine."""
    bench = Workbench(tmp_path / "first")
    bench.folder.mkdir()
    site = tmp_path / "site"
    install(site, "posttrain-far", "1.0", "[posttrain.executors]\nfar = far:Far\n", {})
    on_path(monkeypatch, site)
    monkeypatch.setenv("FAR_ROOT", str(tmp_path / "node"))
    bench.environment = {
        **s3,
        "POSTTRAIN_STORE": f"s3://far/{tmp_path.name}",
        "FAR_ROOT": str(tmp_path / "node"),
        "PYTHONPATH": f"{site}:{HERE}",
    }
    make_template(bench, "--executor", "far", "--mailboxes", f"s3://far/mail-{tmp_path.name}")
    yield bench
    bench.clean()


def test_a_servers_job_elsewhere_holds_no_key_and_outlives_its_server(
    first: Workbench, reference: Reference, tmp_path: Path
) -> None:
    first.environment |= {"FAR_KEYLESS": "yes"}
    served = Served(first)
    ann = served.client(tmp_path / "ann", "ann", "submitter")
    running = ann.start("run", "run.yaml")
    starts = str(tmp_path / "node" / "starts")
    for pid in first.wait("an agent", lambda: processes.carrying("FAR_STARTS", starts)):
        with suppress(FileNotFoundError, ProcessLookupError):
            known = Path(f"/proc/{pid}/environ").read_text()
            assert "AWS_" not in known
            assert KEYS["SECRET_ACCESS_KEY"] not in known
    served.kill()
    first.wait("the end of the driver", lambda: served.driver() is None)
    served.start()
    ended = ann.finish(running)
    assert ended.code == 0, ended.err
    run_id = first.run_id()
    assert first.outputs(run_id) == reference.outputs
    assert all(one.host is None for one in first.attempts(run_id))
    assert "posttrain_bootstrap_" not in (first.folder / "serve.log").read_text()
    served.end()


def second_host(first: Workbench, folder: Path) -> Workbench:
    """The first host is lost: of its folder, the ledger and the settings are left, on another machine."""
    (folder / ".posttrain").mkdir(parents=True)
    shutil.copy(first.root / "workspace.json", folder / ".posttrain")
    ledgers = [sqlite3.connect(root / "ledger.db") for root in (first.root, folder / ".posttrain")]
    with closing(ledgers[0]) as source, closing(ledgers[1]) as target:
        source.backup(target)
    shutil.rmtree(first.root)
    other = Workbench(folder)
    other.environment = first.environment
    return other


def test_a_second_host_finishes_what_the_first_began_from_what_the_node_staged(
    first: Workbench, reference: Reference, tmp_path: Path
) -> None:
    """The driver's machine is lost while sft trains, and then its job dies: what it staged is all that is left."""
    died = tmp_path / "died"
    first.environment |= {"POSTTRAIN_CRASHPOINT": "train.step@8", "POSTTRAIN_CRASHPOINT_ONCE": str(died)}
    driver = first.start("run", "run.yaml")

    def launched() -> JobRef | None:
        with first.open() as workspace:
            runs = workspace.ledger.runs(limit=1)
            attempts = workspace.ledger.attempts(runs[0].id, "sft") if runs else []
        return next((JobRef(one.name, str(one.channel)) for one in attempts if one.state == "launched"), None)

    job = first.wait("a launched job", launched)
    driver.kill()
    driver.wait(PATIENCE)
    second = second_host(first, tmp_path / "second")
    del second.environment["POSTTRAIN_CRASHPOINT"]
    second.wait("the death of the job", died.exists)
    run_id = second.run_id()
    second.run("attach", run_id)
    assert second.outputs(run_id) == reference.outputs
    begun, again = second.attempts(run_id, "sft")
    assert begun.state != "succeeded"
    assert (again.state, again.resumed_step) == ("succeeded", 5)
    assert mailbox_at(job.mailbox).checkpoints() == [5]
    assert "of processor time" in second.run("logs", run_id, "sft").out
    area = StagingArea(second.environment["POSTTRAIN_STORE"])
    assert {name for name, *_ in area.stored()} >= {one.name for one in second.attempts(run_id)}
    second.run("gc", "--older-than", "0s")
    assert list(area.stored()) == [], "nothing of a run that has succeeded is resumed"
    assert list((tmp_path / "node" / "scratch").glob("*/job-*")) == []
