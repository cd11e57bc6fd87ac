"""What must be on the disk before something else is: every fsync around every commit point, in order.

A power cut keeps what was synced and may drop or reorder everything else, so a missing sync shows in no other test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.jobs import InputBlob, JobOrder, JobResult, Note, Output
from posttrain.engine.weights.checkpoint import BestModel, TrainState, begin_checkpoint, commit_checkpoint, write_role
from posttrain.jobs import entry
from posttrain.store import atomic
from posttrain.store.attempts import AttemptFolder, EventWriter, SpendingMeter
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import materialise, put_tree


class Disk:
    """What was asked of it: ("sync", path) and ("name", path), in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Path]] = []

    def at(self, what: str, path: Path) -> int:
        """When it happened last."""
        assert (what, path) in self.log, f"no {what} of {path}: {self.log}"
        return len(self.log) - 1 - self.log[::-1].index((what, path))

    def first(self, what: str, path: Path) -> int:
        assert (what, path) in self.log, f"no {what} of {path}: {self.log}"
        return self.log.index((what, path))

    def whole(self, path: Path) -> None:
        """The contents were synced before the name stood for them, and the name after."""
        named = self.at("name", path)
        before = [place for what, place in self.log[:named] if what == "sync" and place.parent == path.parent]
        assert before, f"{path} got its name before its contents were on the disk: {self.log}"
        assert self.at("sync", path.parent) > named, f"the name of {path} is not on the disk: {self.log}"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk()

    def synced(handle: int) -> None:
        found.log.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace", "link"):
        real = getattr(os, name)

        def named(source: object, target: object, *rest: object, _real: object = real, **more: object) -> None:
            _real(source, target, *rest, **more)  # type: ignore[operator]
            found.log.append(("name", Path(str(target))))

        monkeypatch.setattr(os, name, named)
    return found


def order(folder: Path, store: str) -> JobOrder:
    return JobOrder("r-s-1", "init_model", 1, {}, {}, store, str(folder / "cache"))


def test_an_order_a_result_and_a_segment(tmp_path: Path, disk: Disk) -> None:
    attempt = AttemptFolder(tmp_path / "run" / "stage" / "001")
    attempt.write_order(order(tmp_path, "memory://x"))
    disk.whole(attempt.path / "job.json")
    for parent in (tmp_path, tmp_path / "run", tmp_path / "run" / "stage"):  # they name the folders made on the way
        disk.at("sync", parent)
    with EventWriter(attempt) as sink:
        sink(Note("hello", 0.0))
    disk.whole(attempt.events / "000001.jsonl")
    attempt.write_result(JobResult("stopped"))
    disk.whole(attempt.path / "result.json")


def test_a_claim_that_one_of_two_gets(tmp_path: Path, disk: Disk) -> None:
    assert atomic.create_json(tmp_path / "claim.json", {})
    disk.whole(tmp_path / "claim.json")


def test_the_meter_is_on_the_disk_with_its_first_word(tmp_path: Path, disk: Disk) -> None:
    attempt = AttemptFolder(tmp_path / "a")
    with SpendingMeter(attempt) as meter:
        meter(1, 2)
    disk.at("sync", attempt.path / "meter")


@pytest.mark.parametrize("how", ["put", "put_file"])
def test_a_blob_before_its_digest_is_given_out(tmp_path: Path, disk: Disk, how: str) -> None:
    blobs = open_blobs(tmp_path / "blobs")
    (tmp_path / "file").write_bytes(b"weights")
    body = digest_bytes(b"weights").removeprefix("sha256:")
    place = tmp_path / "blobs" / "sha256" / body[:2] / body[2:]
    for _ in range(2):  # the second time it is there, by a writer that may have died before its sync
        disk.log.clear()
        blobs.put(b"weights") if how == "put" else blobs.put_file(tmp_path / "file")
        assert disk.at("sync", place) < disk.at("sync", place.parent) < disk.at("sync", place.parent.parent)


def test_a_materialised_tree(tmp_path: Path, disk: Disk) -> None:
    blobs = open_blobs(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_bytes(b"1")
    folder = materialise(blobs, put_tree(blobs, tmp_path / "model"), tmp_path / "cache")
    made = next(path for what, path in disk.log if what == "name" and path.name == "w")
    disk.whole(made)
    assert disk.at("sync", folder.parent) > disk.at("name", folder)


def test_a_checkpoint_before_its_commit(tmp_path: Path, disk: Disk) -> None:
    path = begin_checkpoint(tmp_path / "checkpoints", 4)
    assert path is not None
    weights = {"w": torch.zeros(2)}
    shards = write_role(path, "policy", 0, 1, weights, {"w/exp_avg": torch.zeros(2)}, {})
    commit_checkpoint(path, TrainState("sha256:x", 4, 8, 100, {}), shards)
    committed = disk.at("name", path / "COMMIT")
    for name in (*shards, "state.json"):
        assert disk.at("sync", path / name) < committed, f"{name} must be on the disk before COMMIT vouches for it"
    assert len(shards) == 2
    folders = [index for index, (what, place) in enumerate(disk.log) if what == "sync" and place == path]
    assert folders[0] < committed < folders[-1], "the folder is synced before and after"
    assert disk.at("sync", path.parent) < committed
    assert disk.at("sync", path / ".COMMIT") < committed


def test_outputs_before_the_result_that_names_them(tmp_path: Path, disk: Disk) -> None:
    attempt = AttemptFolder(tmp_path / "a")
    attempt.write_order(order(tmp_path, (tmp_path / "blobs").as_uri()))

    def body(job: entry.Job) -> JobResult:
        (job.folder / "outputs" / "model").mkdir(parents=True)
        (job.folder / "outputs" / "model" / "w").write_bytes(b"1")
        return JobResult("succeeded", {"model": Output("outputs/model", "tree")})

    assert entry.run(str(attempt.path), body) == 0
    said = disk.at("name", attempt.path / "result.json")
    outputs = attempt.outputs
    for place in (outputs / "model" / "w", outputs / "model", outputs, attempt.path):
        assert disk.first("sync", place) < said
    assert disk.at("sync", outputs / "model" / "w") < disk.at("sync", outputs / "model") < disk.at("sync", outputs)
    disk.whole(attempt.path / "result.json")


def test_an_input_that_a_job_fetched(tmp_path: Path, disk: Disk) -> None:
    blobs = open_blobs(tmp_path / "blobs")
    digest = blobs.put(b"rows")
    job = entry.Job(
        attempt=AttemptFolder(tmp_path / "a"),
        order=JobOrder("r", "sft", 1, {}, {"data": InputBlob(digest, "file")}, blobs.url, str(tmp_path / "cache")),
        sink=lambda fact: None,
        flush=lambda: None,
        blobs=blobs,
        stopping=lambda: False,
        folder=tmp_path / "a",
    )
    disk.whole(job.input("data"))


def test_audit_24_the_best_model_and_its_name(tmp_path: Path, disk: Disk) -> None:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        for name in ("w", "sub/more"):
            (folder / name).write_text(name)

    best = BestModel(tmp_path / "best", write)
    best.keep(3)
    place, coming = tmp_path / "best" / "step-00000003", tmp_path / "best" / ".step-00000003"
    disk.whole(place)
    for each in (coming / "w", coming / "sub" / "more", coming / "sub", coming):
        assert disk.at("sync", each) < disk.at("name", place)
    inside = tmp_path / "checkpoint" / "best"
    assert sorted(best.put_into(tmp_path / "checkpoint")) == ["best/sub/more", "best/w"]
    for name in ("w", "sub/more"):
        assert disk.at("sync", (inside / name).parent) > disk.at("name", inside / name)
    disk.at("sync", inside)
