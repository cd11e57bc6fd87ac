"""Checkpoints: what a resumed job needs to go on bit for bit, behind one commit point.

::

    checkpoints/step-00000120/
        model.safetensors       trainable parameters at the optimiser's precision
        optimizer.safetensors   AdamW: <parameter>/exp_avg, <parameter>/exp_avg_sq, <parameter>/step
        state.json              TrainState: step, data cursor, tokens spent, what it belongs to
        COMMIT                  domain.jobs.CheckpointCommit: {"format", "step", "shards": {name: sha256:…}}

COMMIT is written once, after every shard and the folder are on the disk; a folder without it does not exist for
anybody. No random state is stored because there is none: every random number is a function of (seed, step, …).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from posttrain.domain.canonical import canonical_json, digest_bytes, digest_chunks
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import CheckpointCommit
from posttrain.engine.weights.shards import write_tensors

KEEP = 2  # the newest may be half published when the next begins
COMMIT = "COMMIT"
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TrainState:
    """The part of a checkpoint that is no tensor."""

    belongs_to: str  # digest of kind, parameters, seed and inputs: a checkpoint of another job is refused
    step: int  # steps completed
    consumed: int  # documents taken from the data stream (journal)
    tokens: int  # spent so far in this lineage
    metrics: Mapping[str, float]  # of the last step


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory; tensors by parameter name."""

    state: TrainState
    parameters: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]  # "<parameter>/exp_avg" …


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write one checkpoint below `folder`, then drop all but the newest two. A committed one of that step stays.

    Raises:
        OSError: the disk is full or read-only; nothing counts as written then.
    """
    path = folder / f"step-{checkpoint.state.step:08d}"
    if not (path / COMMIT).exists():
        crashpoint("checkpoint.before_shards")
        shutil.rmtree(path, ignore_errors=True)  # left by a process that died before its commit
        path.mkdir(parents=True)
        shards = _write_shards(path, checkpoint)
        _sync_folder(path)
        _sync_folder(folder)
        crashpoint("checkpoint.before_commit")
        commit = CheckpointCommit(checkpoint.state.step, shards)
        _write_synced(path / f".{COMMIT}", canonical_json(commit.to_json()))
        (path / f".{COMMIT}").rename(path / COMMIT)
        _sync_folder(path)
        crashpoint("checkpoint.after_commit")
    _prune(folder, checkpoint.state.step)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a committed checkpoint; every shard is verified against COMMIT.

    Raises:
        IntegrityError: no COMMIT, an unknown format, or a shard that is missing, unlisted or altered.
    """
    shards = _read_commit(path)
    for name, expected in shards.items():
        found = digest_file(path / name) if (path / name).is_file() else "nothing"
        if found != expected:
            raise IntegrityError(
                f"checkpoint shard {path / name} must be {expected}, got {found}; resume from an older checkpoint"
            )
    state = TrainState(**json.loads((path / _STATE).read_bytes()))
    return Checkpoint(state, load_file(path / _MODEL), load_file(path / _OPTIMIZER))


def digest_file(path: Path) -> str:
    """`sha256:…` of a file, in constant memory."""
    with path.open("rb") as file:
        return digest_chunks(iter(lambda: file.read(_CHUNK), b""))


def _write_shards(path: Path, checkpoint: Checkpoint) -> dict[str, str]:
    shards = {
        _MODEL: write_tensors(
            path / _MODEL, checkpoint.parameters, halfway=lambda: crashpoint("checkpoint.inside_shard")
        ),
        _OPTIMIZER: write_tensors(path / _OPTIMIZER, checkpoint.moments),
    }
    state = canonical_json(asdict(checkpoint.state))
    _write_synced(path / _STATE, state)
    return {**shards, _STATE: digest_bytes(state)}


def _read_commit(path: Path) -> Mapping[str, str]:
    try:
        shards = CheckpointCommit.from_json(json.loads((path / COMMIT).read_bytes())).shards
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"checkpoint {path} has no readable COMMIT ({type(error).__name__}); resume from another"
        ) from error
    except IntegrityError as error:
        raise IntegrityError(f"checkpoint {path}: {error}; resume from another") from error
    if set(shards) != {_MODEL, _OPTIMIZER, _STATE}:
        raise IntegrityError(f"checkpoint {path} must hold {_MODEL}, {_OPTIMIZER}, {_STATE}, got {sorted(shards)}")
    return shards


def _prune(folder: Path, newest: int) -> None:
    """Older ones lose their COMMIT first, so that a crash in here leaves no folder that only looks whole."""
    older = sorted(p for p in folder.glob("step-*") if p.name < f"step-{newest:08d}")
    for path in older[: -(KEEP - 1)]:
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
