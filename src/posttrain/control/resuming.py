"""Where an attempt goes on from: the furthest committed checkpoint of the same work, whichever run did it.

Work is the same where the stage's cache key is (`control.cache`): a run whose budget was raised, or that is placed
elsewhere, goes on from where the one before it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from posttrain.control import budgets
from posttrain.control.jobs import AttemptFolders
from posttrain.control.stores import Stores
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.jobs import CheckpointCommit
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.domain.shapes import count
from posttrain.store.ledger import Ledger
from posttrain.store.left import ANSWER
from posttrain.store.trees import TreeFile, put_tree, read_json, tree_listing

_COMMIT, _STATE = "COMMIT", "state.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in the store."""

    digest: str  # of its tree
    step: int
    origin: str  # run/stage that wrote it
    tokens: int  # that its lineage had spent


def find_checkpoint(
    stores: Stores, folders: AttemptFolders, stage: StageRecord, key: str, own: Sequence[AttemptRecord]
) -> Found | None:
    """The furthest checkpoint of this stage's attempts and of other stages with its cache key, published.

    A half-written or damaged one does not count, nor one that its job drops while it is read.
    """
    for step, attempt in sorted(_candidates(stores.ledger, folders, stage, key, own), key=lambda c: c[0], reverse=True):
        checkpoint = folders.of(attempt).checkpoint(step)
        try:
            if checkpoint is None:
                continue
            digest = put_tree(stores.blobs, checkpoint.path)
            if _whole(stores.blobs, digest) and tokens_in(stores.blobs, digest) == checkpoint.tokens:
                return Found(digest, step, f"{attempt.run_id}/{attempt.stage}", checkpoint.tokens)
        except (InputError, IntegrityError):  # dropped or replaced while it was read
            continue
    return None


def tokens_in(blobs: BlobStore, checkpoint: str | None) -> int:
    """Tokens that the lineage of a checkpoint had spent when it was written; 0 for none."""
    return _number(_state(blobs, checkpoint), "tokens") if checkpoint is not None else 0


def tokens_inherited(blobs: BlobStore, attempt: AttemptRecord) -> int:
    """Tokens that the checkpoint which an attempt resumes from brought along: as the ledger has it.

    Of an attempt of a release before, by the checkpoint; never by its order, which its job may have rewritten.

    Raises:
        IntegrityError: that checkpoint is damaged, or gone.
    """
    return tokens_in(blobs, attempt.resume) if attempt.resumed_tokens is None else attempt.resumed_tokens


def origin_of(stores: Stores, folders: AttemptFolders, stage: StageRecord, attempt: AttemptRecord) -> tuple[str, int]:
    """(run/stage, step) of the checkpoint that an attempt resumes from; ("", 0) for none."""
    if attempt.resume is None:
        return "", 0
    if attempt.resumed_from is not None:
        return attempt.resumed_from, attempt.resumed_step or 0
    step = _number(_state(stores.blobs, attempt.resume), "step")
    own = [a for a in stores.ledger.attempts(stage.run_id, stage.name) if a.number < attempt.number]
    found = (a for s, a in _candidates(stores.ledger, folders, stage, stage.cache_key or "", own) if s == step)
    return next((f"{a.run_id}/{a.stage}" for a in found), "an earlier run"), step


def trained_elsewhere(stores: Stores, folders: AttemptFolders, attempts: Sequence[AttemptRecord]) -> str:
    """`steps 1-40 were trained in RUN/STAGE`, of a stage that went on from another's checkpoint; else empty.

    Args:
        attempts: of one stage, oldest first.
    """
    found = [taken for attempt in attempts if (taken := _foreign(stores, folders, attempt))]
    return f"steps 1-{found[-1][1]} were trained in {found[-1][0]}" if found else ""


def _state(blobs: BlobStore, checkpoint: str) -> Mapping[str, Any]:
    listing = tree_listing(blobs, checkpoint)
    value = _small(blobs, listing[_STATE]) if _STATE in listing else {}
    if not isinstance(value, Mapping):
        raise IntegrityError(f"{_STATE} of checkpoint {checkpoint} must be an object; remove the checkpoint")
    return value


def _number(state: Mapping[str, Any], name: str) -> int:
    try:
        return count(state.get(name, 0))
    except TypeError as error:
        raise IntegrityError(f"{_STATE} of a checkpoint: {name} {error}; remove the checkpoint") from error


def _small(blobs: BlobStore, file: TreeFile) -> Any:
    """The JSON of a file of a checkpoint. A job wrote it, and no job fills the memory of who reads."""
    if file.size > ANSWER:
        raise IntegrityError(f"a checkpoint's {_STATE} and {_COMMIT} must have at most {ANSWER} bytes, got {file.size}")
    return read_json(blobs, file.digest)


def tokens_taken_over(stores: Stores, folders: AttemptFolders, attempts: Sequence[AttemptRecord]) -> int:
    """Tokens that a run's stages got with checkpoints of other runs, as `budgets.taken_over`.

    Args:
        attempts: of a run.
    """
    known = list(attempts)
    for place, attempt in enumerate(known):
        if attempt.resume is not None and (attempt.resumed_from is None or attempt.resumed_tokens is None):
            origin, _ = _foreign(stores, folders, attempt) or (f"{attempt.run_id}/{attempt.stage}", 0)
            tokens = tokens_inherited(stores.blobs, attempt)
            known[place] = replace(attempt, resumed_from=origin, resumed_tokens=tokens)
    return budgets.taken_over(known)


def _foreign(stores: Stores, folders: AttemptFolders, attempt: AttemptRecord) -> tuple[str, int] | None:
    """(run/stage, step) of the checkpoint that an attempt took from another stage; None when it took none such."""
    if attempt.resume is None:
        return None
    origin, step = attempt.resumed_from or "", attempt.resumed_step or 0
    if not origin:  # of a release before
        with suppress(InputError, IntegrityError):  # not launched yet, or damaged
            order = folders.of(attempt).read_order()
            origin, step = order.resumed_from, order.resumed_step
    if not origin:
        stage = next(s for s in stores.ledger.stages(attempt.run_id) if s.name == attempt.stage)
        origin, step = origin_of(stores, folders, stage, attempt)
    return None if origin == f"{attempt.run_id}/{attempt.stage}" else (origin, step)


def _candidates(
    ledger: Ledger, folders: AttemptFolders, stage: StageRecord, key: str, own: Sequence[AttemptRecord]
) -> Iterator[tuple[int, AttemptRecord]]:
    """(step, attempt) of everything that looks like a checkpoint: the stage's own first, the newest attempt first."""
    others = [s for s in ledger.stages_by_key(key) if (s.run_id, s.name) != (stage.run_id, stage.name)]
    attempts = [a for other in others for a in ledger.attempts(other.run_id, other.name)]
    for attempt in (*reversed(own), *attempts):
        yield from ((step, attempt) for step in folders.of(attempt).checkpoint_steps())


def _whole(blobs: BlobStore, digest: str) -> bool:
    """Whether the stored tree is what its COMMIT says: its job may have dropped files while it was read."""
    listing = tree_listing(blobs, digest)
    if _COMMIT not in listing:
        return False
    commit = CheckpointCommit.from_json(_small(blobs, listing[_COMMIT]))
    unlisted = {name for name in listing if name.endswith(".safetensors")} - commit.shards.keys()
    return not unlisted and all(
        name in listing and listing[name].digest == shard for name, shard in commit.shards.items()
    )
