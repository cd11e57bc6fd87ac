"""Checkpoints, the best model of a stage, and the streamed writing of safetensors files.

A checkpoint contains everything that a resumed job needs to continue bit for bit, behind one commit point:

::

    checkpoints/step-00000120/
        policy-model-00001-of-00002.safetensors      one rank's rows of the parameters, at the optimiser's precision
        policy-optimizer-00001-of-00002.safetensors  AdamW: <parameter>/exp_avg, /exp_avg_sq, /step
        critic-…                one such pair per rank of every role that learns
        best/                   the best model before this step, if the stage keeps it
        state.json              TrainState: step, data cursor, tokens spent, the stage's fingerprint
        COMMIT                  domain.jobs.CheckpointCommit: {"format", "step", "shards": {name: sha256:…}}

COMMIT is written once, after every shard and the folder are durable; readers ignore a folder without COMMIT. The
safetensors metadata of a file records its rows of each parameter, so any number of ranks can read files that any number
of ranks wrote. No random state is stored: every random number is a function of (seed, step, …).

The best model of a stage is one folder in Hugging Face format, next to the checkpoints and inside each checkpoint:

::

    best/step-00000040/           the model after 40 steps; replaced as a whole when a later model is better
    checkpoints/step-00000050/
        best/…                    the same files (hard links if the disk supports them), named in COMMIT

A job that continues from a checkpoint therefore has the best model of the earlier steps, in any folder or workspace.
The disk has one such model and, for a moment, its replacement.

Tensors are streamed to a safetensors file with constant extra memory; the digest is computed during the write, and the
file is durable when the call returns. The library's writer rejects tensors that share storage, as all q/k/v projections
do after the zero-copy rollout has fused them, and has no hook in mid-file at which a recovery test could crash. The
format is a length, a JSON header, and raw little-endian bytes; the library reads it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from posttrain.domain.canonical import canonical_json, digest_bytes, digest_chunks
from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import CheckpointCommit
from posttrain.domain.ports import crashpoint

_DTYPE_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_WRITE_BYTES = 1 << 22  # bytes per write
KEEP = 2  # checkpoints; the newest one may not be completely published when the next one begins
COMMIT = "COMMIT"
_STATE = "state.json"
_CHUNK = 1 << 20
_INSIDE = "best"  # subfolder of a checkpoint


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    halfway: Callable[[], None] | None = None,
) -> str:
    """Write `tensors`, in the order of their names, and fsync.

    Args:
        path: the file to create.
        tensors: by name, on any device; equal values are written as equal bytes.
        metadata: strings for the header.
        halfway: called once, after about half of the bytes have been passed to the kernel.

    Returns:
        `sha256:…` of the file.

    Raises:
        OSError: the disk is full or read-only.
    """
    names = sorted(tensors)
    digest, written, total = hashlib.sha256(), 0, sum(_size(tensors[name]) for name in names)
    with path.open("wb") as file:
        head = _header(names, tensors, metadata or {})
        digest.update(head)
        file.write(head)
        for name in names:
            data = _bytes(tensors[name])
            for start in range(0, len(data), _WRITE_BYTES):
                piece = data[start : start + _WRITE_BYTES]
                if halfway and written + len(piece) > total // 2:
                    piece, rest = piece[: max(total // 2 - written, 0)], piece[max(total // 2 - written, 0) :]
                    digest.update(piece)
                    file.write(piece)
                    file.flush()
                    halfway()
                    halfway, written, piece = None, written + len(piece), rest
                digest.update(piece)
                file.write(piece)
                written += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return "sha256:" + digest.hexdigest()


def read_rows(files: Sequence[Path], rows: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Read rows of tensors from several files that `write_tensors` wrote with `NAME: "start:stop"` metadata.

    Args:
        rows: name → the rows [start, stop) to read; `NAME/exp_avg` uses NAME. Other tensors are read whole.

    Returns:
        A map from name to rows; scalars are read from the first file.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            held = shard.metadata() or {}
            for name in shard.keys():  # noqa: SIM118  # it is no mapping
                base = name.partition("/")[0]
                view = shard.get_slice(name)
                if not view.get_shape():
                    pieces.setdefault(name, [(0, shard.get_tensor(name))])
                    continue
                first = int(held[base].partition(":")[0]) if base in held else 0
                start, stop = rows.get(base, (0, first + view.get_shape()[0]))
                low, high = max(start - first, 0), min(stop - first, view.get_shape()[0])
                if low < high or (start == stop and name not in pieces):
                    pieces.setdefault(name, []).append((first, view[low : max(low, high)]))
    return {
        name: found[0][1] if len(found) == 1 else torch.cat([piece for _, piece in sorted(found, key=lambda f: f[0])])
        for name, found in pieces.items()
    }


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():  # torch cannot view empty tensors
        return memoryview(b"")
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _header(names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in names:
        end = offset + _size(tensors[name])
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensor bytes
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class TrainState:
    """The part of a checkpoint that has no tensors."""

    fingerprint: str  # digest of kind, parameters, seed and inputs; other stages' checkpoints are rejected
    step: int  # steps completed
    consumed: int  # documents read from the data stream (journal)
    tokens: int  # spent so far, including the tokens of the attempts that this attempt resumes
    metrics: Mapping[str, float]  # of the last step
    incarnation: int = 0  # number of earlier resumes
    probes: Mapping[str, Any] | None = None  # the probes' state (`engine.loop.controller`); None: probes decide nothing
    updated: bool = True  # whether a step changed weights; True if an older version of Posttrain did not record it


def begin_checkpoint(folder: Path, step: int) -> Path | None:
    """Create the folder for the checkpoint of `step`; return None if a committed checkpoint exists.

    Raises:
        OSError: the disk is full or read-only.
    """
    path = folder / f"step-{step:08d}"
    if (path / COMMIT).exists():
        return None
    crashpoint("checkpoint.before_shards")
    shutil.rmtree(path, ignore_errors=True)  # left by a process that died before its commit
    path.mkdir(parents=True)
    return path


def write_role(
    path: Path,
    role: str,
    rank: int,
    ranks: int,
    parameters: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    rows: Mapping[str, tuple[int, int]],
) -> dict[str, str]:
    """Write one rank's part of a role, durably.

    Args:
        parameters: whole tensors, or this rank's rows of them.
        moments: "<parameter>/exp_avg" … → tensor, with the layout of the parameter.
        rows: parameter → this rank's rows [start, stop); empty: all rows.

    Returns:
        A map from file name to digest, for `commit_checkpoint`.

    Raises:
        OSError: the disk is full or read-only; the checkpoint then does not exist.
    """
    model, optimizer = (f"{role}-{part}-{rank + 1:05d}-of-{ranks:05d}.safetensors" for part in ("model", "optimizer"))
    metadata = {name: f"{start}:{stop}" for name, (start, stop) in rows.items()}
    halfway = (lambda: crashpoint("checkpoint.inside_shard")) if rank == 0 else None
    return {
        model: write_tensors(path / model, parameters, metadata, halfway=halfway),
        optimizer: write_tensors(path / optimizer, moments, metadata),
    }


def commit_checkpoint(path: Path, state: TrainState, shards: Mapping[str, str]) -> None:
    """Commit the written files as a checkpoint, then drop all checkpoints but the newest two.

    Args:
        shards: the results of every `write_role`.

    Raises:
        OSError: the disk is full or read-only; the checkpoint then does not exist.
    """
    data = canonical_json(asdict(state))
    _write_synced(path / _STATE, data)
    sync(path)
    sync(path.parent)
    crashpoint("checkpoint.before_commit")
    commit = CheckpointCommit(state.step, {**shards, _STATE: digest_bytes(data)})
    _write_synced(path / f".{COMMIT}", canonical_json(commit.to_json()))
    (path / f".{COMMIT}").rename(path / COMMIT)
    sync(path)
    crashpoint("checkpoint.after_commit")
    prune_checkpoints(path.parent, state.step)


def read_state(path: Path) -> TrainState:
    """Verify every shard of a committed checkpoint against COMMIT, and return the checkpoint's state.

    Raises:
        IntegrityError: there is no COMMIT; the format is unknown; a shard is missing, unlisted or altered.
    """
    shards = _read_commit(path)
    files = {file.name for kind in ("*.safetensors", "*.json") for file in path.glob(kind)} - {_STATE}
    unlisted = sorted(files - shards.keys())
    if unlisted:
        raise IntegrityError(f"checkpoint shard {path / unlisted[0]} is not listed in COMMIT; remove the file")
    for name, expected in shards.items():
        found = digest_file(path / name) if (path / name).is_file() else "nothing"
        if found != expected:
            raise IntegrityError(
                f"checkpoint shard {path / name} must be {expected}, got {found}; resume from an older checkpoint"
            )
    return TrainState(**json.loads((path / _STATE).read_bytes()))


def read_role(
    path: Path, role: str, rows: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a role's parameters and moments; read only the requested rows.

    Args:
        path: a checkpoint that `read_state` verified.
        rows: parameter → [start, stop); a parameter without an entry is read whole.

    Raises:
        IntegrityError: the checkpoint has no such role.
    """
    found = []
    for part in ("model", "optimizer"):
        files = sorted(path.glob(f"{role}-{part}-*-of-*.safetensors"))
        if not files:
            raise IntegrityError(
                f"checkpoint {path} must contain the role {role}, but has no file of it; start without the checkpoint"
            )
        found.append(read_rows(files, rows))
    return found[0], found[1]


def digest_file(path: Path) -> str:
    """Return `sha256:…` of a file, in constant memory."""
    with path.open("rb") as file:
        return digest_chunks(iter(lambda: file.read(_CHUNK), b""))


def _read_commit(path: Path) -> Mapping[str, str]:
    try:
        shards = CheckpointCommit.from_json(json.loads((path / COMMIT).read_bytes())).shards
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"checkpoint {path} has no readable COMMIT ({type(error).__name__}); resume from another checkpoint"
        ) from error
    except IntegrityError as error:
        raise IntegrityError(f"checkpoint {path}: {error}; resume from another checkpoint") from error
    if _STATE not in shards or len(shards) < 3:
        raise IntegrityError(
            f"checkpoint {path} must contain {_STATE} and the shards of at least one role, got {sorted(shards)}"
        )
    return shards


def prune_checkpoints(folder: Path, newest: int) -> None:
    """Delete older checkpoints, COMMIT first: a crash then leaves no incomplete folder that has COMMIT."""
    older = sorted(p for p in folder.glob("step-*") if p.name < f"step-{newest:08d}")
    for path in older[: -(KEEP - 1)]:
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BestModel:
    """The best model of one attempt.

    Args:
        folder: contains only this model.
        write: writes the current model into an existing folder.
    """

    def __init__(self, folder: Path, write: Callable[[Path], object]) -> None:
        self._folder, self._write = folder, write
        self.path: Path | None = None  # the model's folder; None: no model yet
        self._files: dict[str, str] = {}  # path below the folder → digest

    def keep(self, step: int) -> None:
        """Write the current model, and drop the previous model.

        Raises:
            OSError: the disk is full or read-only; the previous model still exists.
        """
        coming, place = self._folder / f".step-{step:08d}", self._folder / f"step-{step:08d}"
        for left in (coming, place):
            shutil.rmtree(left, ignore_errors=True)
        coming.mkdir(parents=True)
        self._write(coming)
        files = _files(coming)
        for name in files:
            sync(coming / name)
        for folder in {coming, *((coming / name).parent for name in files)}:
            sync(folder)
        crashpoint("best.before_rename")
        coming.rename(place)
        sync(self._folder)
        crashpoint("best.after_rename")
        self._hold(place)

    def put_into(self, checkpoint: Path) -> dict[str, str]:
        """Add the model to a checkpoint that is being written; return a map from path in the checkpoint to digest."""
        if self.path is None:
            return {}
        for name in self._files:
            target = checkpoint / _INSIDE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.path / name, target)
            except OSError:  # a disk without links
                shutil.copyfile(self.path / name, target)
                sync(target)
        for folder in {(checkpoint / _INSIDE / name).parent for name in self._files} | {checkpoint / _INSIDE}:
            sync(folder)
        return {f"{_INSIDE}/{name}": digest for name, digest in self._files.items()}

    def take_from(self, checkpoint: Path | None, step: int = 0) -> None:
        """Take the model of a verified checkpoint as the best model; delete all other files, e.g. of a lost process.

        Args:
            checkpoint: the checkpoint; None: the stage starts from its beginning.
            step: the step after which the model was written.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self.path, self._files = None, {}
        if checkpoint is None or not (checkpoint / _INSIDE).is_dir():
            return
        place = self._folder / f"step-{step:08d}"
        shutil.copytree(checkpoint / _INSIDE, place, copy_function=shutil.copyfile)
        for name in _files(place):
            sync(place / name)
        self._hold(place)

    def _hold(self, place: Path) -> None:
        self.path, self._files = place, {name: digest_file(place / name) for name in _files(place)}
        for other in self._folder.iterdir():
            if other != place:
                shutil.rmtree(other, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
