"""Mark and sweep over every database and every kind of store: what any project needs stays."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import WorkspaceError
from posttrain.domain.records import Asset, RunRecord, StageRecord
from posttrain.store.atomic import FileLock
from posttrain.store.audit import verify_rows
from posttrain.store.blobs import ObjectBlobs, open_blobs
from posttrain.store.database import Database
from posttrain.store.garbage import SweptBlobs, sweep
from posttrain.store.ledger import Ledger
from posttrain.store.schema import artifacts, projects
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.trees import put_tree
from s3_server import s3_server, use_s3

ANN = "user:ann"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server("swept") as address:
        yield address


@pytest.fixture(params=["local", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectBlobs:
    where: str | Path = tmp_path / "blobs" if request.param == "local" else f"memory://sweep-{tmp_path}"
    if request.param == "s3":
        use_s3(monkeypatch, request.getfixturevalue("s3"))
        where = f"s3://swept/{uuid.uuid4()}"
    return open_blobs(where, FileLock(tmp_path / "store.lock"))


@pytest.fixture
def ledger(ledger_at: str) -> Ledger:
    return Ledger(Database(ledger_at))


def folder(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    (made / "model.safetensors").write_bytes(name.encode())
    (made / "config.json").write_bytes(b"{}")
    return made


def swept(ledger: Ledger, blobs: ObjectBlobs, tmp_path: Path, older_than: float = -60.0) -> SweptBlobs:
    return sweep(ledger, blobs, FileLock(tmp_path / "store.lock"), ANN, older_than=older_than)


def test_what_any_project_names_stays(ledger: Ledger, blobs: ObjectBlobs, tmp_path: Path) -> None:
    kept = put_tree(blobs, folder(tmp_path, "kept"))
    named = blobs.put(b"named in a manifest only")
    manifest = blobs.put(canonical_json({"inputs": [{"digest": named}]}))
    report = blobs.put(canonical_json({"policy": blobs.put(b"policy")}))
    lost = {blobs.put(b"lost alone"), put_tree(blobs, folder(tmp_path, "lost"))}
    other = Ledger(ledger.database, project="other")
    with other.transaction(ANN) as transaction:
        transaction.insert_asset(Asset("model", "base", 1, kept, "tree", 1.0, ANN, {}, ()))
    stage = StageRecord(run_id="r-1", name="gate", position=0, kind="gate", state="pending")
    with ledger.transaction(ANN) as transaction:
        transaction.insert_run(RunRecord("r-1", "r", manifest, "pending", "ann", 1.0), [stage])
    with ledger.transaction(ANN) as transaction:
        made = {"report": {"digest": report, "form": "file"}}
        ready = transaction.update_stage(ledger.stages("r-1")[0], state="ready")
        transaction.update_stage(ready, state="succeeded", outputs=made, finished_at=2.0)
    done = swept(ledger, blobs, tmp_path)
    assert (done.deleted, done.needed) == (3, 7)  # both folders have the same config.json
    assert not any(blobs.has(one) for one in lost)
    assert {one.digest for one in blobs.stored()} >= {kept, named, manifest, report}
    seal(ledger)
    assert verify_chain(ledger).pending == 0
    verify_rows(ledger)
    assert swept(ledger, blobs, tmp_path).deleted == 0


def test_what_is_no_more_is_not_listed(ledger: Ledger, blobs: ObjectBlobs, tmp_path: Path) -> None:
    """An artifact that rows forgot, as of a stage that was bound anew, goes with its row, which an event tells."""
    gone = blobs.put(b"bound once")
    with ledger.transaction(ANN) as transaction:
        transaction.insert_asset(Asset("dataset", "d", 1, blobs.put(b"d"), "file", 1.0, ANN, {}, ()))
    with ledger.database.write(across="a test") as connection:
        project = connection.execute(select(projects.c.id)).scalars().first()
        row = {"project": project, "digest": gone, "form": "file", "bytes": 10, "class": "input", "created_at": 1.0}
        connection.execute(artifacts.insert(), row)
    assert swept(ledger, blobs, tmp_path).deleted == 1
    assert not blobs.has(gone)
    with ledger.database.read(across="a test") as connection:
        assert gone not in connection.execute(select(artifacts.c.digest)).scalars().all()
    told = [event for event in ledger.pending_events(limit=9999) if event.kind == "gc.swept"]
    assert [event.payload["blobs"] for event in told] == [1]


def test_what_is_young_stays(ledger: Ledger, blobs: ObjectBlobs, tmp_path: Path) -> None:
    digest = blobs.put(b"a moment ago")
    done = swept(ledger, blobs, tmp_path, older_than=3600.0)
    assert (done.deleted, done.young, done.young_bytes) == (0, 1, 12)
    assert blobs.has(digest)


def test_a_newer_releases_tables_may_name_more(ledger: Ledger, blobs: ObjectBlobs, tmp_path: Path) -> None:
    from sqlalchemy import text

    blobs.put(b"what it needs")
    with ledger.database.write(across="a test") as connection:
        connection.execute(text("UPDATE schema_version SET version_num = '0099', usable_since = '0003'"))
    with pytest.raises(WorkspaceError, match="run gc with the newer version of Posttrain"):
        swept(ledger, blobs, tmp_path)
