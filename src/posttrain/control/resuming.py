"""Where an attempt goes on from: the furthest committed checkpoint of the same work, whichever run did it.

Work is the same where the stage's cache key is (`control.cache`): a run whose budget was raised, or that is placed
elsewhere, goes on from where the one before it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.control.wiring import Wiring
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.jobs import CheckpointCommit
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.store.trees import put_tree, read_json, tree_listing

_COMMIT, _STATE = "COMMIT", "state.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in the store."""

    digest: str  # of its tree
    step: int
    origin: str  # run/stage that wrote it


def find_checkpoint(wiring: Wiring, stage: StageRecord, key: str, own: Sequence[AttemptRecord]) -> Found | None:
    """The furthest checkpoint of this stage's attempts and of other stages with its cache key, published.

    A half-written or damaged one does not count, nor one that its job drops while it is read.
    """
    for step, attempt in sorted(_candidates(wiring, stage, key, own), key=lambda c: c[0], reverse=True):
        checkpoint = wiring.folder(attempt).checkpoint(step)
        try:
            if checkpoint is None:
                continue
            digest = put_tree(wiring.blobs, checkpoint.path)
            if _whole(wiring, digest):
                return Found(digest, step, f"{attempt.run_id}/{attempt.stage}")
        except (InputError, IntegrityError):  # dropped or replaced while it was read
            continue
    return None


def tokens_in(wiring: Wiring, checkpoint: str | None) -> int:
    """Tokens that the lineage of a checkpoint had spent when it was written; 0 for none."""
    return int(_state(wiring, checkpoint).get("tokens", 0)) if checkpoint is not None else 0


def origin_of(wiring: Wiring, stage: StageRecord, attempt: AttemptRecord) -> tuple[str, int]:
    """(run/stage, step) of the checkpoint that an attempt resumes from; ("", 0) for none."""
    if attempt.resume is None:
        return "", 0
    step = int(_state(wiring, attempt.resume).get("step", 0))
    own = [a for a in wiring.ledger.attempts(stage.run_id, stage.name) if a.number < attempt.number]
    found = (a for s, a in _candidates(wiring, stage, stage.cache_key or "", own) if s == step)
    return next((f"{a.run_id}/{a.stage}" for a in found), "an earlier run"), step


def trained_elsewhere(wiring: Wiring, attempts: Sequence[AttemptRecord]) -> str:
    """`steps 1-40 were trained in RUN/STAGE`, of a stage that went on from another's checkpoint; else empty.

    Args:
        attempts: of one stage, oldest first.
    """
    found = [taken for attempt in attempts if (taken := _foreign(wiring, attempt))]
    return f"steps 1-{found[-1][1]} were trained in {found[-1][0]}" if found else ""


def _state(wiring: Wiring, checkpoint: str) -> Mapping[str, Any]:
    state = tree_listing(wiring.blobs, checkpoint).get(_STATE)
    value: Mapping[str, Any] = read_json(wiring.blobs, state.digest) if state else {}
    return value


def tokens_taken_over(wiring: Wiring, attempts: Sequence[AttemptRecord]) -> int:
    """Tokens that a run's stages got with checkpoints of other runs; of several a stage took, those in the largest.

    Args:
        attempts: of a run.
    """
    most: dict[str, int] = {}
    for attempt in attempts:
        if _foreign(wiring, attempt):
            most[attempt.stage] = max(most.get(attempt.stage, 0), tokens_in(wiring, attempt.resume))
    return sum(most.values())


def _foreign(wiring: Wiring, attempt: AttemptRecord) -> tuple[str, int] | None:
    """(run/stage, step) of the checkpoint that an attempt took from another stage; None when it took none such."""
    if attempt.resume is None:
        return None
    try:
        order = wiring.folder(attempt).read_order()
        origin, step = order.resumed_from, order.resumed_step
    except (InputError, IntegrityError):  # not launched yet, or damaged
        origin, step = "", 0
    if not origin:
        stage = next(s for s in wiring.ledger.stages(attempt.run_id) if s.name == attempt.stage)
        origin, step = origin_of(wiring, stage, attempt)
    return None if origin == f"{attempt.run_id}/{attempt.stage}" else (origin, step)


def _candidates(
    wiring: Wiring, stage: StageRecord, key: str, own: Sequence[AttemptRecord]
) -> Iterator[tuple[int, AttemptRecord]]:
    """(step, attempt) of everything that looks like a checkpoint: the stage's own first, the newest attempt first."""
    others = [s for s in wiring.ledger.stages_by_key(key) if (s.run_id, s.name) != (stage.run_id, stage.name)]
    attempts = [a for other in others for a in wiring.ledger.attempts(other.run_id, other.name)]
    for attempt in (*reversed(own), *attempts):
        yield from ((step, attempt) for step in wiring.folder(attempt).checkpoint_steps())


def _whole(wiring: Wiring, digest: str) -> bool:
    """Whether the stored tree is what its COMMIT says: its job may have dropped files while it was read."""
    listing = tree_listing(wiring.blobs, digest)
    if _COMMIT not in listing:
        return False
    commit = CheckpointCommit.from_json(read_json(wiring.blobs, listing[_COMMIT].digest))
    unlisted = {name for name in listing if name.endswith(".safetensors")} - commit.shards.keys()
    return not unlisted and all(
        name in listing and listing[name].digest == shard for name, shard in commit.shards.items()
    )
