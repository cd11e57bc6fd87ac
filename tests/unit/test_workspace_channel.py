"""A workspace whose jobs and drivers talk through an object store: chosen once, refused in one line, and a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import control_bench
import obstore
import pytest
from control_bench import TRAIN_ONLY, Bench, evaluate, train, vanish

from driving import drive
from posttrain.app.workspace import init_workspace
from posttrain.control import actions
from posttrain.control.jobs import AttemptFolders
from posttrain.control.launch import tokens_taken_over, trained_elsewhere
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import InfrastructureError, InputError, WorkspaceError
from posttrain.domain.jobs import CheckpointCommit, JobOrder, JobResult, Progress
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.mailboxes import objects
from posttrain.store.mailboxes.objects import ObjectStoreObjects
from posttrain.store.trees import file_digest
from posttrain.telemetry.tracker import StageWatcher
from posttrain.workspace.settings import SETTINGS
from s3_server import s3_server

SECRET = "sixteen-letters-and-more"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 server of this process, on loopback, with a bucket."""
    with s3_server("bucket") as address:
        yield address


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in (("ALLOW_HTTP", "true"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", SECRET), ("REGION", "r")):
        monkeypatch.setenv(f"AWS_{name}", value)
    return "s3://bucket/talk"


def test_it_is_chosen_when_the_workspace_is_made(store: str, tmp_path: Path) -> None:
    workspace = init_workspace(tmp_path, channel=f"{store}/")
    workspace.close()
    written = (workspace.root / SETTINGS).read_text()
    assert json.loads(written)["channel"] == store
    assert SECRET not in written
    again = init_workspace(tmp_path)
    again.close()
    assert again.jobs.folders.mailboxes() == f"{store}/{again.place()}"
    with pytest.raises(WorkspaceError, match="its mailboxes are in s3://bucket/talk") as caught:
        init_workspace(tmp_path, channel="s3://bucket/another")
    assert "\n" not in str(caught.value)
    assert not obstore.list(ObjectStoreObjects(store)._store).collect(), "what was tried is gone"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///tmp/talk", "must be at s3://BUCKET/PREFIX"),
        ("talk", "must be at s3://BUCKET/PREFIX"),
        (f"s3://me:{SECRET}@bucket/talk", "must contain no credentials"),
        (f"s3://bucket/talk?secret={SECRET}", "must contain no credentials"),
    ],
)
def test_what_is_no_place_is_refused_and_leaves_nothing(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as caught:
        init_workspace(tmp_path / "here", channel=url)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "here").exists()


def test_a_store_that_overwrites_is_refused(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStoreObjects, "create", lambda self, key, data: self.overwrite(key, data) or True)
    with pytest.raises(InputError, match="If-None-Match") as caught:
        init_workspace(tmp_path / "here", channel=store)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "here").exists()


def test_a_bucket_that_is_not_there_is_one_line(store: str, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError) as caught:
        init_workspace(tmp_path / "here", channel="s3://nobody-made-this/talk")
    assert "\n" not in str(caught.value)


def test_a_whole_run_talks_through_it(bench: Bench, store: str) -> None:
    bench.jobs = replace(bench.jobs, folders=AttemptFolders(bench.root, lambda: store))
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")

    def counts(folder: AttemptFolder) -> int:
        assert folder.mailbox.start(1, "1") is None
        with EventWriter(folder) as sink:
            sink(Progress(3, 3, "sft", 70, 0.0))
        return train()(folder) or 0

    bench.scripts = {"sft": [lambda folder: -9, counts], "evaluate": [evaluate(190)]}
    run_id = bench.submit()
    assert bench.drive(run_id).state == "succeeded"
    lost, ended = bench.ledger.attempts(run_id, "sft")
    assert (lost.state, ended.state) == ("lost", "succeeded")
    held = bench.jobs.folders.of(lost).mailbox.started()
    assert held is not None
    assert held.cancelled, "a job that comes late computes nothing"
    said = bench.jobs.folders.of(ended).mailbox.summary()
    assert said is not None
    assert (said.step, said.tokens) == (3, 70)
    assert ObjectStoreObjects(f"{store}/{run_id}/sft/002").get("result.json") is not None
    here = {path.name for path in bench.jobs.folders.of(ended).path.iterdir()}
    assert not here & {"start.json", "summary.json", "result.json", "controls"}, "nothing is in the folder"
    assert SECRET not in (bench.jobs.folders.of(ended).path / "job.json").read_text()


def test_an_attempt_keeps_its_place_which_only_its_job_has_from_its_order(store: str, tmp_path: Path) -> None:
    order = JobOrder("a", "sft", 1, {}, {}, "", "")
    there, here = AttemptFolder(tmp_path / "there"), AttemptFolder(tmp_path / "here", "")
    there.write_order(replace(order, channel=f"{store}/there"))
    here.write_order(replace(order, channel=f"{store}/there"))
    assert AttemptFolder(there.path, job=True).mailbox._objects.place == f"{store}/there"
    assert here.mailbox._objects.place == str(here.path)
    assert objects.object_store(f"{store}/there") is objects.object_store(f"{store}/there"), "it is opened once"


@pytest.mark.parametrize("far", [True, False])
def test_an_order_that_its_job_rewrote_leads_nobody_elsewhere_and_bills_nothing_away(
    bench: Bench, store: str, far: bool
) -> None:
    base, elsewhere = (f"{store}/hostile" if far else ""), f"{store}/another/sft/001"
    bench.jobs = replace(bench.jobs, folders=AttemptFolders(bench.root, lambda: base))
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")
    bench.scripts = {"sft": [_dies_at_step_one, None]}
    run_id = bench.submit(**TRAIN_ONLY)
    while len(bench.ledger.attempts(run_id)) < 2 or bench.ledger.attempts(run_id)[1].state != "launched":
        bench.reconciler.tick(run_id)
        bench.clock.sleep(30)
    attempt = bench.ledger.attempts(run_id)[1]
    job = bench.jobs.folders.of(attempt)
    lies = {"channel": elsewhere, "tokens_inherited": 10**6, "resumed_from": "another/sft", "resumed_step": 77}
    job.write_order(replace(job.read_order(), **lies))
    again = Ledger(Database(control_bench.ledger_place(bench.root)), bench.clock)  # a driver that has just begun
    stores = replace(bench.stores, ledger=again)
    actions.stop(stores, run_id)
    reconciler = Reconciler(stores, bench.jobs, "there")
    reconciler.tick(run_id)
    channel = AttemptFolder(job.path, f"{base}/{run_id}/sft/002" if far else "")
    assert channel.stop_requested()
    with EventWriter(channel) as sink:
        sink(Progress(3, 3, "sft", 390, 0.0))
    channel.write_result(JobResult("stopped", tokens=400))
    bench.executor.finish(attempt.name)
    assert drive(reconciler, run_id, interval=1.0, timeout=600).state == "stopped"
    attempts = again.attempts(run_id)
    assert [(one.state, one.tokens) for one in attempts] == [("lost", 150), ("stopped", 300)]
    assert trained_elsewhere(stores, bench.jobs.folders, attempts) == ""
    assert tokens_taken_over(stores, bench.jobs.folders, attempts) == 0
    assert StageWatcher(bench.root).read(attempts).tokens == 390
    assert not obstore.list(ObjectStoreObjects(elsewhere)._store).collect(), "nobody wrote there"


def test_a_copy_of_the_workspace_gives_what_was_planned_in_the_original_a_channel_of_its_own(
    bench: Bench, store: str
) -> None:
    bench.jobs = replace(bench.jobs, folders=AttemptFolders(bench.root, lambda: f"{store}/original"))
    bench.scripts = {"sft": [train()]}
    run_id = bench.submit(**TRAIN_ONLY)
    reconciler = Reconciler(bench.stores, bench.jobs, "here")
    while not bench.ledger.attempts(run_id):
        reconciler.tick(run_id)
    assert [one.state for one in bench.ledger.attempts(run_id)] == ["planned"]
    copied = replace(bench.jobs, folders=AttemptFolders(bench.root, lambda: f"{store}/copy"))
    assert drive(Reconciler(bench.stores, copied, "there"), run_id, interval=1.0, timeout=600).state == "succeeded"
    (attempt,) = bench.ledger.attempts(run_id)
    assert attempt.channel == copied.folders.of(attempt).read_order().channel == f"{store}/copy/{run_id}/sft/001"
    assert ObjectStoreObjects(attempt.channel).get("result.json") is not None
    assert not obstore.list(ObjectStoreObjects(f"{store}/original")._store).collect()
    verify_rows(bench.ledger)


def _dies_at_step_one(folder: AttemptFolder) -> int:
    path = folder.checkpoints / "step-00000001"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": 1, "tokens": 100}))
    (path / "COMMIT").write_text(
        json.dumps(CheckpointCommit(1, {"state.json": file_digest(path / "state.json")}).to_json())
    )
    return vanish(tokens=150)(folder) or 0
