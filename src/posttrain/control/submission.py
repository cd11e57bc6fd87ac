"""Submit a manifest; a second submission of the same digest attaches to the existing run."""

import base64
from dataclasses import dataclass

from posttrain.control.channels import refuse_recalled
from posttrain.control.stores import Stores
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import ConflictError
from posttrain.domain.lifecycle import Reason, RunState, StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import Artifact, RunRecord, StageRecord
from posttrain.store.hosts import Ledger
from posttrain.store.trees import stored_sizes

_LONGEST = 55  # maximum characters of a name in an id, which has at most 64 characters
_RACES = 100  # maximum races that one `--again` may lose to other submissions


@dataclass(frozen=True, slots=True)
class Submitted:
    """The run, and whether it existed before."""

    run: RunRecord
    attached: bool
    moved: bool = False  # the target of a channel or a run's name has changed since the run's submission


def submit(stores: Stores, manifest: Manifest, *, again: bool = False, exact: bool = False) -> Submitted:
    """Record a run for this manifest, or attach to the newest run with the same digest.

    The call also attaches to an unfinished run if only the target of a name (`channel:prod`) has changed: a run may
    move its own channel, and a command repeated after a kill must find that run.

    Args:
        again: whether to start another run of the same manifest.
        exact: whether to attach only to a run of exactly this manifest, not to a run whose names have other targets.
    """
    existing = stores.ledger.runs(manifest_digest=manifest.digest)
    if existing and not again:
        return Submitted(existing[0], attached=True)
    unfinished = None if again or exact else _unfinished(stores, manifest)
    if unfinished:
        return Submitted(unfinished, attached=True, moved=True)
    digest = stores.blobs.put(canonical_json(manifest.to_json()))
    artifacts = _artifacts(stores, manifest, digest)
    repeat = existing[0].repeat + 1 if existing else 1
    for _ in range(_RACES):
        run, stages = _records(stores, manifest, digest, repeat)
        crashpoint("submit.before_commit")
        try:
            with stores.ledger.transaction(stores.actor) as transaction:
                transaction.lock_recalls()
                refuse_recalled(transaction.snapshot, manifest, f"run {manifest.name}")
                transaction.insert_run(run, stages, artifacts)
        except ConflictError:  # another submit of the same digest won the race
            won = stores.ledger.runs(manifest_digest=digest)
            if not won or won[0].repeat < repeat:
                raise
            if not again:
                return Submitted(won[0], attached=True)
            repeat = won[0].repeat + 1
            continue
        crashpoint("submit.after_commit")
        return Submitted(stores.ledger.run(run.id), attached=False)
    raise ConflictError(
        f"{manifest.name}: {_RACES} other submissions of this file were stored first; run the command again"
    )


def new_run_id(ledger: Ledger, name: str) -> str:
    """Return `NAME-<8 characters>`: forty random bits in lower-case base32; a long name is truncated."""
    return f"{name[:_LONGEST]}-{base64.b32encode(ledger.entropy(5)).decode().lower()}"


def _unfinished(stores: Stores, manifest: Manifest) -> RunRecord | None:
    """Return the newest unfinished run whose manifest differs at most in the digests to which its refs resolve."""
    words = manifest.unpinned()
    if words is None:
        return None
    for run in stores.ledger.runs():
        if run.name == manifest.name and not is_final("run", run.state) and stores.manifest(run).unpinned() == words:
            return run
    return None


def _artifacts(stores: Stores, manifest: Manifest, digest: str) -> list[Artifact]:
    """Return the artifacts of the manifest and of its inputs."""
    forms = {ref.digest: str(ref.form) for _, _, ref in manifest.assets() if ref.digest}
    sizes, now = stored_sizes(stores.blobs, {digest: "file", **forms}), stores.clock.now()
    named = [Artifact(one, form, sizes.get(one), "input", now) for one, form in forms.items()]
    return [Artifact(digest, "file", sizes.get(digest), "manifest", now), *named]


def _records(stores: Stores, manifest: Manifest, digest: str, repeat: int) -> tuple[RunRecord, list[StageRecord]]:
    run_id = new_run_id(stores.ledger, manifest.name)
    run = RunRecord(
        id=run_id,
        name=manifest.name,
        manifest_digest=digest,
        state=RunState.PENDING,
        owner=manifest.owner,
        created_at=stores.clock.now(),
        reason=Reason.SUBMITTED,
        message="waiting for a driver",
        next_action=f"posttrain run, or posttrain get {run_id} --watch",
        project=stores.ledger.project,
        repeat=repeat,
    )
    stages = [
        StageRecord(
            run_id=run_id,
            name=stage.name,
            position=position,
            kind=stage.kind,
            state=StageState.PENDING,
            reason=Reason.WAITING_FOR_INPUTS,
            message=f"waiting for {', '.join(sorted(stage.upstream())) or 'its turn'}",
            next_action="none needed",
        )
        for position, stage in enumerate(manifest.stages)
    ]
    return run, stages
