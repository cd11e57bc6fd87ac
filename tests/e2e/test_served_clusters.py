"""The README's demo over two servers whose jobs run on a real Slurm: a server, the database, a node and jobs end."""

from __future__ import annotations

import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from teams import Team
from test_clusters import working_below
from test_served_demo import played_here, released
from workbench import Workbench

from postgres_server import Server
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import mailbox_at
from posttrain.store.mailbox import Mailbox
from posttrain.store.staging import StagingArea
from s3_server import s3_server, use_s3
from slurm_cluster import Cluster as Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.postgres, pytest.mark.deep]


@pytest.fixture
def team(tmp_path: Path, postgres: Server, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """Two servers whose stages run on Slurm unless their placement names another flavour. The nodes have no key."""
    node = tmp_path / "node-python"
    node.write_text(f'#!/bin/sh\nexport POSTTRAIN_SCRATCH={tmp_path / "scratch"}\nexec {sys.executable} "$@"\n')
    node.chmod(node.stat().st_mode | stat.S_IXUSR)
    executors = {
        "executors": {"slurm-a": {"kind": "slurm", "settle": "2s", "python": str(node)}},
        "flavours": {"small": {"executor": "slurm-a", "partition": "low"}},
        "default": "small",
    }
    with s3_server("store") as s3:
        use_s3(monkeypatch, s3)
        made = Team(tmp_path, postgres, s3, ("--mailboxes", "s3://store/mail"), executors, slurm.environment)
        yield made
        made.close()
        postgres.drop(made.address)


def launched(team: Team, stage: str) -> AttemptRecord | None:
    """The newest attempt of a stage, once it was launched."""
    with team.benches[0].open() as workspace:
        runs = workspace.ledger.runs(limit=1)
        attempts = workspace.ledger.attempts(runs[0].id, stage) if runs else []
    return attempts[-1] if attempts and attempts[-1].state == "launched" else None


def computes(bench: Workbench, mailbox: Mailbox, incarnation: int) -> None:
    """Wait until this incarnation of a job has made some steps."""

    def does() -> bool:
        held, told = mailbox.started(), mailbox.summary()
        begun = held is not None and held.incarnation >= incarnation
        return begun and told is not None and told.at > (held.at if held else 0.0) and told.step >= 5

    bench.wait(f"steps of incarnation {incarnation}", does)


@pytest.mark.timeout(3000)
def test_the_demo_over_two_servers_and_slurm_releases_what_it_releases_here(team: Team, slurm: Slurm) -> None:
    ann = team.asker("ann", 0, team.token("ann", "approver"))
    first = team.benches[0]
    with first.open() as workspace:
        before = {run.id for run in workspace.ledger.runs()}
    playing = ann.start("demo", "--task", "01")
    sft = first.wait("sft on Slurm", lambda: launched(team, "sft"))  # a stage lasts some seconds: two kinds of end each
    computes(first, mailbox_at(str(sft.channel)), 0)
    slurm.ask("scontrol", "requeue", str(sft.handle))
    grpo = first.wait("grpo on Slurm", lambda: launched(team, "grpo"))
    mailbox = mailbox_at(str(grpo.channel))
    computes(first, mailbox, 0)
    job = str(grpo.handle)
    team.servers[0].kill()
    team.postgres.stop(signal.SIGQUIT)  # as a power cut
    node = slurm.ask("squeue", "-h", f"--jobs={job}", "-o", "%B")
    slurm.lose(node)
    team.postgres.start()
    team.servers[0].start()
    computes(first, mailbox, 1)
    slurm.start(node)
    slurm.ask("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    computes(first, mailbox, 2)
    out, err = playing.communicate(timeout=2400)
    assert playing.returncode == 0, (out[-2000:], err)
    assert "everything matches" in out
    assert released(ann) == released(played_here(team))
    with first.open() as workspace:
        runs = [run.id for run in workspace.ledger.runs() if run.id not in before]
        attempts = [one for run_id in runs for one in workspace.ledger.attempts(run_id)]
    assert {one.executor for one in attempts} == {"slurm-a"}
    for begun in (sft, grpo):
        [same] = [one for one in attempts if one.name == begun.name]
        assert (same.state, same.handle) == ("succeeded", begun.handle), "every restart was Slurm's, under one attempt"
    assert 0 < (same.seconds or 0) < sum(one.seconds or 0 for one in attempts)
    first.wait("an empty queue", lambda: slurm.ask("squeue", "-h", "-o", "%i %j %T") == "")
    for bench in team.benches:
        bench.wait_quiet()
    first.run("gc", "--older-than", "0s")
    assert list(StagingArea(first.environment["POSTTRAIN_STORE"]).stored()) == []
    scratch = team.folder / "scratch"
    assert working_below(scratch) == []
    assert list(scratch.glob("job-*")) == []
