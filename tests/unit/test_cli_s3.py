"""A workspace whose artifacts are on S3, over HTTP: `gc`, `backup` and `restore` do what they do for a folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from cli_world import World, make_world
from obstore.store import from_url

from posttrain.store.blobs import open_blobs
from posttrain.store.direct import Unfinished, open_direct
from posttrain.store.operations import PartStore
from s3_server import s3_server, use_s3

STORE = "s3://artifacts/of team"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with s3_server("artifacts") as address:
        use_s3(monkeypatch, address)
        monkeypatch.setenv("POSTTRAIN_STORE", STORE)
        (tmp_path / "home").mkdir()
        made = make_world(tmp_path / "home", monkeypatch)
        made.ship()
        yield made


def unfinished() -> list[Unfinished]:
    direct = open_direct(STORE)
    assert direct is not None
    return direct.unfinished(time.time() + 60)


@pytest.mark.slow
def test_gc_deletes_what_nobody_needs_and_ends_what_nobody_ended(world: World) -> None:
    blobs, store = open_blobs(STORE), from_url(STORE)
    needed = {one.digest for one in blobs.stored()}
    left = blobs.put(b"left behind")
    obstore.put(store, "uploads/default/" + "0" * 64, b"sent, and not spoken of again")
    whoever_died = obstore.open_writer(store, "sha256/00/" + "0" * 62, buffer_size=5 << 20)
    whoever_died.write(b"x" * (6 << 20))
    whoever_died.flush()
    sent = PartStore(STORE).stored
    assert (len(unfinished()), list(sent())) == (1, ["default/" + "0" * 64])
    now = ("gc", "--older-than", "0s")
    assert world.json(*now, "--dry-run")["folders"] >= 2
    assert (len(unfinished()), len(sent())) == (1, 1)
    assert blobs.has(left)
    world.ok("gc")  # what is young may be under way; moto says of every multipart upload that it began in 2010
    assert (len(unfinished()), len(sent())) == (0, 1)
    world.json(*now)
    assert (unfinished(), sent()) == ([], {})
    assert {one.digest for one in blobs.stored()} == needed
    for name in (world.newest(), "prod"):
        assert "everything matches" in world.ok("verify", name)


@pytest.mark.slow
def test_a_backup_of_it_comes_back_in_a_folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.json("get", "prod")
    done = world.json("backup", str(tmp_path / "kept"))
    assert done["added"] == done["artifacts"] > 10
    monkeypatch.delenv("POSTTRAIN_STORE")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the store is lost
    (tmp_path / "elsewhere").mkdir()
    other = make_world(tmp_path / "elsewhere", monkeypatch)
    other.ok("restore", str(tmp_path / "kept"))
    assert other.json("get", "prod") == before
    assert "everything matches" in other.ok("verify", "prod")
