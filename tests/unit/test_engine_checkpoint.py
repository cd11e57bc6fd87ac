"""Checkpoints: exact, verified, one commit point, and whole or absent after a kill at any of their crashpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import latest_checkpoint
from hypothesis import given, settings, strategies as st
from power_cut import Disk
from safetensors.torch import load_file
from torch import Tensor

from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import IntegrityError
from posttrain.engine.weights.checkpoint import (
    TrainState,
    begin_checkpoint,
    commit_checkpoint,
    digest_file,
    prune_checkpoints,
    read_role,
    read_state,
    write_role,
    write_tensors,
)
from posttrain.store.attempts import AttemptFolder

STATE = TrainState(fingerprint="sha256:" + "0" * 64, step=3, consumed=96, tokens=1234, metrics={"loss": 0.25})


@dataclass(frozen=True)
class Checkpoint:
    """A policy on one rank."""

    state: TrainState
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    path = begin_checkpoint(folder, checkpoint.state.step)
    if path is None:
        prune_checkpoints(folder, checkpoint.state.step)
        return folder / f"step-{checkpoint.state.step:08d}"
    commit_checkpoint(
        path, checkpoint.state, write_role(path, "policy", 0, 1, checkpoint.parameters, checkpoint.moments, {})
    )
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(read_state(path), *read_role(path, "policy", {}))


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 9), writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, size: int, writers: int, readers: int
) -> None:
    """Rows as torch.chunk deals them, ranks without a row included."""
    path = tmp_path_factory.mktemp("resharded")
    whole = torch.arange(size * 2.0).view(size, 2)

    def rows(rank: int, ranks: int) -> tuple[int, int]:
        chunk = -(-size // ranks)
        return min(rank * chunk, size), min((rank + 1) * chunk, size)

    shards: dict[str, str] = {}
    for rank in range(writers):
        start, stop = rows(rank, writers)
        moments = {"w/exp_avg": -whole[start:stop], "w/step": torch.tensor(3.0)}
        shards |= write_role(path, "critic", rank, writers, {"w": whole[start:stop]}, moments, {"w": (start, stop)})
    assert len(shards) == 2 * writers
    for rank in range(readers):
        start, stop = rows(rank, readers)
        parameters, moments = read_role(path, "critic", {"w": (start, stop)})
        assert torch.equal(parameters["w"], whole[start:stop])
        assert torch.equal(moments["w/exp_avg"], -whole[start:stop])
        assert moments["w/step"] == 3.0
    assert torch.equal(read_role(path, "critic", {})[0]["w"], whole)


def checkpoint(step: int = 3, seed: int = 0) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(6, 4, generator=generator)
    parameters = {"q.weight": buffer[:4], "k.weight": buffer[4:], "norm": torch.randn(4, generator=generator)}
    moments = {f"{n}/exp_avg": torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    moments |= {f"{n}/step": torch.tensor(float(step)) for n in parameters}
    return Checkpoint(replace(STATE, step=step), parameters, moments)


def same(left: Checkpoint, right: Checkpoint) -> bool:
    pairs = ((left.parameters, right.parameters), (left.moments, right.moments))
    return left.state == right.state and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


def test_round_trip_is_exact_for_tensors_that_share_storage(tmp_path: Path) -> None:
    assert same(load_checkpoint(save_checkpoint(tmp_path, checkpoint())), checkpoint())


def test_equal_state_gives_equal_bytes(tmp_path: Path) -> None:
    one, two = save_checkpoint(tmp_path / "a", checkpoint()), save_checkpoint(tmp_path / "b", checkpoint())
    assert (one / "COMMIT").read_bytes() == (two / "COMMIT").read_bytes()
    assert (one / "COMMIT").read_bytes() == canonical_json(json.loads((one / "COMMIT").read_bytes()))


@settings(deadline=None, max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]),
)
def test_streamed_files_are_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype
) -> None:
    tensors = {f"t{i}": (torch.arange(1 + sum(s)).sum() % 7 * torch.ones(s)).to(dtype) for i, s in enumerate(shapes)}
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    calls: list[int] = []
    digest = write_tensors(path, tensors, halfway=lambda: calls.append(path.stat().st_size))
    assert digest == digest_file(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    assert len(calls) == any(t.numel() for t in tensors.values())
    assert all(size < path.stat().st_size for size in calls)


def test_all_that_commit_names_survives_a_power_cut_before_commit_does(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, left = Path.rename, dict[str, bytes | None]()

    def committing(path: Path, target: Path) -> Path:
        files = [file for file in path.parent.iterdir() if file.is_file()]
        left.update({file.name: disk.left(file, tmp_path) for file in files if file != path})
        assert disk.left(path, tmp_path) is None, "its name is not safe, and need not be"
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", committing)
    path = save_checkpoint(tmp_path, checkpoint())
    commit = (path / "COMMIT").read_bytes()
    assert sorted(left) == sorted(json.loads(commit)["shards"])
    assert {name: (path / name).read_bytes() for name in left} == left
    assert disk.left(path / "COMMIT", tmp_path) == commit


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save_checkpoint(tmp_path, checkpoint(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_one_that_is_half_dropped_does_not_look_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptFolder(tmp_path)
    for step in (2, 4):
        save_checkpoint(folder.checkpoints, checkpoint(step))

    def killed(path: Path, **options: object) -> None:
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder.checkpoints, checkpoint(6))
    assert (folder.checkpoints / "step-00000002").is_dir()
    assert folder.checkpoint_steps() == [4, 6]


def test_what_more_ranks_left_when_they_died_is_no_part_of_the_next(tmp_path: Path) -> None:
    path = begin_checkpoint(tmp_path, 3)
    assert path is not None
    stale = checkpoint(seed=1)
    rows = {name: (0, len(tensor)) for name, tensor in stale.parameters.items()}
    write_role(path, "policy", 0, 2, stale.parameters, stale.moments, rows)
    assert same(load_checkpoint(save_checkpoint(tmp_path, checkpoint())), checkpoint())


def test_a_committed_one_is_never_rewritten(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(seed=0))
    assert same(load_checkpoint(save_checkpoint(tmp_path, checkpoint(seed=1))), checkpoint(seed=0))


def test_the_attempt_folder_understands_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoints", checkpoint())
    latest = latest_checkpoint(AttemptFolder(tmp_path))
    assert latest is not None
    assert (latest.step, latest.tokens) == (3, STATE.tokens)


@pytest.mark.parametrize(
    "name", ["policy-model-00001-of-00001.safetensors", "policy-optimizer-00001-of-00001.safetensors", "state.json"]
)
def test_an_altered_shard_is_refused(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, checkpoint())
    data = bytearray((path / name).read_bytes())
    data[-2] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        load_checkpoint(path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint())
    (path / "policy-optimizer-00001-of-00001.safetensors").unlink()
    with pytest.raises(IntegrityError, match="got nothing"):
        load_checkpoint(path)


def test_a_shard_that_commit_does_not_list_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint())
    write_role(path, "policy", 1, 2, checkpoint(seed=1).parameters, {}, {})
    with pytest.raises(IntegrityError, match=r"00002-of-00002\.safetensors is not listed in COMMIT"):
        load_checkpoint(path)


@pytest.mark.parametrize("commit", [b"", b"{", b"[]", b'{"format":"other/9","step":1,"shards":{}}'])
def test_a_strange_commit_is_refused(tmp_path: Path, commit: bytes) -> None:
    path = save_checkpoint(tmp_path, checkpoint())
    (path / "COMMIT").write_bytes(commit)
    with pytest.raises(IntegrityError, match="checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("crashpoint", "whole"),
    [
        ("checkpoint.before_shards", False),
        ("checkpoint.inside_shard", False),
        ("checkpoint.before_commit", False),
        ("checkpoint.after_commit", True),
    ],
)
def test_killed_while_writing(tmp_path: Path, crashpoint: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process really dies; the older one stays, the newer is whole or does not count, and can be written again."""
    save_checkpoint(tmp_path / "checkpoints", checkpoint(3))
    monkeypatch.setenv("POSTTRAIN_CRASHPOINT", crashpoint)
    child = os.fork()
    if child == 0:
        save_checkpoint(tmp_path / "checkpoints", checkpoint(6))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.delenv("POSTTRAIN_CRASHPOINT")
    folder = AttemptFolder(tmp_path)
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert latest.step == (6 if whole else 3)
    if crashpoint == "checkpoint.inside_shard":
        half = (tmp_path / "checkpoints" / "step-00000006" / "policy-model-00001-of-00001.safetensors").stat().st_size
        assert 0 < half < (latest.path / "policy-model-00001-of-00001.safetensors").stat().st_size
    assert same(load_checkpoint(save_checkpoint(tmp_path / "checkpoints", checkpoint(6))), checkpoint(6))
