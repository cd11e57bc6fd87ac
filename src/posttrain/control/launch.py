"""The launch of a ready stage's job: the stage cache, the checkpoint to resume from, the intent and the submission.

A launch commits the intent, writes the job's order, and submits the job exactly once.

An attempt resumes from the furthest committed checkpoint of the same work in any run. Two stages do the same work if
their cache keys are equal: a run with a larger budget or a different placement resumes where its predecessor stopped.

The stage cache stores results by code, parameters, seed and input digests, so equal stages are computed once.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.control import budgets, jobs as environments
from posttrain.control.decide import View, hold_back, nodes_to_avoid, phase_seconds, stall_after
from posttrain.control.jobs import AttemptFolders, Jobs, secrets_of_stage, spec_of
from posttrain.data.catalog import external_versions, local_copy
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import (
    CapacityError,
    ConflictError,
    FailureClass,
    InfrastructureError,
    InputError,
    IntegrityError,
    NotFoundError,
    WorkspaceError,
)
from posttrain.domain.jobs import CheckpointCommit, Failure, InputBlob, JobOrder, Observation, Unknown, count
from posttrain.domain.jobspec import secret_fault
from posttrain.domain.lifecycle import AttemptState, Reason, RunState, StageState, is_final
from posttrain.domain.manifest import Manifest, StageManifest, deciding_code, job_identity, named_code
from posttrain.domain.ports import BlobStore, crashpoint
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.domain.roles import servers_of
from posttrain.events.ports import SECRETS, secrets_of
from posttrain.execution.ports import Executor, Trainer
from posttrain.store.atomic import ANSWER, make_folder
from posttrain.store.attempts import AttemptFolder, unclaimed
from posttrain.store.ledger import Ledger, Stores
from posttrain.store.retries import PRIVATE_CACHE
from posttrain.store.sealer import head_name
from posttrain.store.trees import TreeFile, read_json, tree_listing, verify_tree

_COMMIT, _STATE = "COMMIT", "state.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in the store."""

    digest: str  # the digest of its tree
    step: int
    origin: str  # the run/stage that wrote it
    tokens: int  # tokens that the checkpoint's lineage spent


def find_checkpoint(
    stores: Stores,
    folders: AttemptFolders,
    stage: StageRecord,
    own: Sequence[AttemptRecord],
    same: Sequence[StageRecord],
) -> Found | None:
    """Publish and return the furthest checkpoint of this stage's attempts and of the stages `same` (equal cache keys).

    Checkpoints that are incomplete or damaged, or that a job drops while they are read, do not count.
    """
    rooted = max((one for one in own if one.resume), key=lambda one: one.resumed_step or 0, default=None)
    candidates = _candidates(stores.ledger, folders, stage, own, same)
    for step, attempt in sorted(candidates, key=lambda c: c[0], reverse=True):
        if rooted is not None and step < (rooted.resumed_step or 0):  # its files may be gone, its artifact is not
            if known := _still_stored(stores, rooted):
                return known
            rooted = None
        try:
            found = folders.of(attempt).store_checkpoint(stores.blobs, step)
            if found and _whole(stores.blobs, found.digest) and tokens_in(stores.blobs, found.digest) == found.tokens:
                return Found(found.digest, step, f"{attempt.run_id}/{attempt.stage}", found.tokens)
        except (InputError, IntegrityError):  # the checkpoint was dropped or replaced while it was read
            continue
    return _still_stored(stores, rooted) if rooted is not None else None


def _still_stored(stores: Stores, attempt: AttemptRecord) -> Found | None:
    """Return the checkpoint from which an earlier attempt resumed; None if it is damaged, or of an older version."""
    if attempt.resume is None or attempt.resumed_step is None:
        return None
    try:
        verify_tree(stores.blobs, attempt.resume)
    except (IntegrityError, NotFoundError):
        return None
    return Found(attempt.resume, attempt.resumed_step, attempt.resumed_from or "", attempt.resumed_tokens or 0)


def tokens_in(blobs: BlobStore, checkpoint: str | None) -> int:
    """Return the tokens that a checkpoint's lineage had spent when it was written; 0 without a checkpoint."""
    return _number(_state(blobs, checkpoint), "tokens") if checkpoint is not None else 0


def tokens_inherited(blobs: BlobStore, attempt: AttemptRecord) -> int:
    """Return the tokens spent before the checkpoint that an attempt resumes from, as recorded in the ledger.

    For attempts of older versions the checkpoint is read, but never the order, since the job may have rewritten it.

    Raises:
        IntegrityError: the checkpoint is damaged or was deleted.
    """
    return tokens_in(blobs, attempt.resume) if attempt.resumed_tokens is None else attempt.resumed_tokens


def origin_of(stores: Stores, folders: AttemptFolders, stage: StageRecord, attempt: AttemptRecord) -> tuple[str, int]:
    """Return (run/stage, step) of the checkpoint that an attempt resumes from; ("", 0) without a checkpoint."""
    if attempt.resume is None:
        return "", 0
    if attempt.resumed_from is not None:
        return attempt.resumed_from, attempt.resumed_step or 0
    step = _number(_state(stores.blobs, attempt.resume), "step")
    own = [a for a in stores.ledger.attempts(stage.run_id, stage.name) if a.number < attempt.number]
    same = stores.ledger.stages_by_key(stage.cache_key or "")
    found = (a for s, a in _candidates(stores.ledger, folders, stage, own, same) if s == step)
    return next((f"{a.run_id}/{a.stage}" for a in found), "an earlier run"), step


def trained_elsewhere(stores: Stores, folders: AttemptFolders, attempts: Sequence[AttemptRecord]) -> str:
    """Return `steps 1-40 were trained in RUN/STAGE` if a stage resumed another stage's checkpoint; else empty.

    Args:
        attempts: the attempts of one stage, oldest first.
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
    """Return the JSON of a checkpoint file; its size is limited, because a job wrote it."""
    if file.size > ANSWER:
        raise IntegrityError(f"a checkpoint's {_STATE} and {_COMMIT} must have at most {ANSWER} bytes, got {file.size}")
    return read_json(blobs, file.digest)


def tokens_taken_over(stores: Stores, folders: AttemptFolders, attempts: Sequence[AttemptRecord]) -> int:
    """Return the tokens of the checkpoints that a run's stages resumed from other runs; see `budgets.taken_over`.

    Args:
        attempts: the attempts of a run.
    """
    known = list(attempts)
    for place, attempt in enumerate(known):
        if attempt.resume is not None and (attempt.resumed_from is None or attempt.resumed_tokens is None):
            origin, _ = _foreign(stores, folders, attempt) or (f"{attempt.run_id}/{attempt.stage}", 0)
            known[place] = replace(attempt, resumed_from=origin, resumed_tokens=tokens_inherited(stores.blobs, attempt))
    return budgets.taken_over(known)


def _foreign(stores: Stores, folders: AttemptFolders, attempt: AttemptRecord) -> tuple[str, int] | None:
    """Return (run/stage, step) of another stage's checkpoint from which an attempt resumed; None: there is none."""
    if attempt.resume is None:
        return None
    origin, step = attempt.resumed_from or "", attempt.resumed_step or 0
    if not origin:  # recorded by an older version
        with suppress(InputError, IntegrityError):  # not launched yet, or damaged
            order = folders.of(attempt).read_order()
            origin, step = order.resumed_from, order.resumed_step
    if not origin:
        stage = next(s for s in stores.ledger.stages(attempt.run_id) if s.name == attempt.stage)
        origin, step = origin_of(stores, folders, stage, attempt)
    return None if origin == f"{attempt.run_id}/{attempt.stage}" else (origin, step)


def _candidates(
    ledger: Ledger,
    folders: AttemptFolders,
    stage: StageRecord,
    own: Sequence[AttemptRecord],
    same: Sequence[StageRecord],
) -> Iterator[tuple[int, AttemptRecord]]:
    """Yield (step, attempt) of every possible checkpoint: the stage's own first, newest attempts first."""
    others = [s for s in same if (s.run_id, s.name) != (stage.run_id, stage.name)]
    attempts = [a for other in others for a in ledger.attempts(other.run_id, other.name)]
    for attempt in (*reversed(own), *attempts):
        yield from ((step, attempt) for step in folders.of(attempt).checkpoint_steps())


def _whole(blobs: BlobStore, digest: str) -> bool:
    """Return whether the stored tree matches its COMMIT: the job may have dropped files during the read."""
    listing = tree_listing(blobs, digest)
    if _COMMIT not in listing:
        return False
    commit = CheckpointCommit.from_json(_small(blobs, listing[_COMMIT]))
    unlisted = {name for name in listing if name.endswith(".safetensors")} - commit.shards.keys()
    return not unlisted and all(
        name in listing and listing[name].digest == shard for name, shard in commit.shards.items()
    )


def plan_attempt(
    stores: Stores,
    jobs: Jobs,
    view: View,
    stage: StageRecord,
    key: str,
    same: Sequence[StageRecord],
    *,
    unwatched: int | None,
    rivals: int = 0,
) -> tuple[Reason, str] | None:
    """Commit a planned attempt with a deterministic external name; the next pass launches the attempt.

    Args:
        same: the stages with the same cache key.
        unwatched: number of slots that jobs of runs without a driver take; None: unknown, so the executor is queried
            if there are such runs.
        rivals: the number of other stages of the run that could start now.

    Returns:
        Why the stage waits; None: the attempt is planned.

    Raises:
        ConflictError: another driver ended the run since the rows were read.
    """
    earlier = view.tries(stage.name)
    found = find_checkpoint(stores, jobs.folders, stage, earlier, same)
    executor = jobs.executor_for(view.manifest.stage(stage.name))
    attempt = _new_attempt(jobs, executor, stage, len(earlier) + 1, found, stores.clock.now())
    anew = " begins again: no checkpoint exists" if attempt.number > 1 else ""
    message = f"attempt {attempt.number}" + (_resumes(stage, found) if found else anew)
    if found:  # hashing the checkpoint took time, and other jobs may have taken slots
        _, unwatched = taken_slots(stores, jobs)
    plan = functools.partial(_plan, stores, jobs, view.manifest, stage, attempt, key, message, rivals)
    try:
        return plan(unwatched)
    except _UnwatchedError:
        return plan(taken_slots(stores, jobs)[1])


class _UnwatchedError(Exception):
    """Jobs of runs without a driver may take slots, and the executor was not asked whether these jobs are alive."""


def _plan(
    stores: Stores,
    jobs: Jobs,
    manifest: Manifest,
    stage: StageRecord,
    attempt: AttemptRecord,
    key: str,
    message: str,
    rivals: int,
    unwatched: int | None,
) -> tuple[Reason, str] | None:
    """Do `plan_attempt` in one transaction, one per host at a time: no two attempts get the same slot or share."""
    limited = budgets.limited(manifest)  # without a budget, no rows are read to compute the spending
    with stores.ledger.transaction(stores.actor) as transaction:
        state = transaction.lock_run(stage.run_id, slots_of=jobs.host or "")
        if state != RunState.RUNNING:
            raise ConflictError(f"{stage.run_id}/{stage.name}: cannot start, since the run is {state}")
        attempts = transaction.snapshot.attempts(stage.run_id) if limited else []
        stages = transaction.snapshot.stages(stage.run_id) if limited else []
        taken_over = tokens_taken_over(stores, jobs.folders, [*attempts, attempt] if limited else [])
        spent = budgets.spending(stages, attempts, taken_over=taken_over)
        driven, left = transaction.snapshot.occupying(jobs.host, attempt.created_at, jobs.near)
        if left and unwatched is None:
            raise _UnwatchedError
        free = free_slots(jobs, manifest.stage(stage.name), driven + (unwatched or 0), rivals)
        held = hold_back(manifest, stage, attempts, spent, free=free, rivals=rivals)
        if isinstance(held, tuple):
            return held
        transaction.insert_attempt(replace(attempt, reserved_tokens=held.tokens, reserved_seconds=held.seconds))
        transaction.update_stage(
            stage,
            state=StageState.RUNNING,
            reason=Reason.RUNNING,
            message=message,
            next_action="",
            cache_key=key,
            started_at=stage.started_at or attempt.created_at,
        )
    return None


def _new_attempt(
    jobs: Jobs, executor: Executor, stage: StageRecord, number: int, found: Found | None, now: float
) -> AttemptRecord:
    """Return the planned attempt of this number, which resumes from the checkpoint `found`."""
    directory = jobs.folders.path(stage.run_id, stage.name, number)
    return AttemptRecord(
        run_id=stage.run_id,
        stage=stage.name,
        number=number,
        name=f"{stage.run_id}-{stage.name}-{number}",
        folder=directory.relative_to(jobs.folders.root).as_posix(),
        state=AttemptState.PLANNED,
        executor=executor.name,
        resume=found.digest if found else None,
        channel=jobs.folders.mailbox_of(stage.run_id, stage.name, number),
        resumed_from=found.origin if found else None,
        resumed_step=found.step if found else None,
        resumed_tokens=found.tokens if found else None,
        reason=Reason.PLANNED,
        created_at=now,
        host=None if executor.remote else jobs.host,
    )


def launch_attempt(
    stores: Stores, jobs: Jobs, view: View, stage: StageRecord, attempt: AttemptRecord, trainer: Trainer
) -> Failure | None:
    """Submit an attempt's job, which the executor does not have yet, and record the job's handle.

    Returns:
        Why the job could not be started; None: the job was started, or waits.
    """
    manifest, folder = view.manifest, jobs.folders.of(attempt)
    executor = jobs.executor_of(attempt)
    if waits_for_devices(stores, jobs, manifest, stage, trainer):
        return None
    cache = _cache(jobs, manifest, stage, attempt)
    if refused := _refused_secrets(stores, jobs, view) or _fetch_elsewhere(stores, executor, stage, cache):
        return refused
    # a driver that died may have written an order when the workspace was elsewhere or trusted its rewards
    attempt = _settled(stores, jobs, attempt)
    order = _order(stores, jobs, view, stage, attempt)
    if not jobs.folders.root.is_dir():  # creates no folder at a former place of the workspace
        raise WorkspaceError(
            f"{jobs.folders.root}: no longer exists; if the workspace was moved, drive it from its new folder"
        )
    _lay_down(executor, folder, order)
    avoid = nodes_to_avoid(view.tries(stage.name))
    spec = spec_of(jobs, attempt, order, trainer, manifest.stage(stage.name), avoid)
    if jobs.access is not None and executor.remote:
        spec = replace(spec, bootstrap=jobs.access.bootstrap(attempt))
    elif jobs.access is not None:
        jobs.access.give(attempt, folder.path, boxed=bool(order.image))
    crashpoint("attempt.after_intent")
    try:
        answer = executor.submit(spec)
    except CapacityError as error:  # another job took the devices first
        say(stores, stage, Reason.WAITING_FOR_CLUSTER if executor.remote else Reason.WAITING_FOR_DEVICES, str(error))
        return None
    except InfrastructureError as error:
        return Failure(FailureClass.INFRASTRUCTURE, str(error), "")  # not the job's fault, so no signature
    if isinstance(answer, Unknown):
        say(
            stores, stage, Reason.SUBMISSION_UNKNOWN, f"it is not known whether the job was submitted ({answer.detail})"
        )
        return None
    crashpoint("attempt.after_launch")
    record_launch(stores, attempt, answer.handle, stage)
    return None


def look(jobs: Jobs, attempt: AttemptRecord) -> Observation:
    """Return one observation of an attempt's job.

    Raises:
        InfrastructureError: the executor does not answer, or the job was submitted to another executor.
    """
    return jobs.executor_of(attempt).observe([jobs.folders.job(attempt)])[0]


def taken_slots(stores: Stores, jobs: Jobs) -> tuple[int, int]:
    """Return how many of this host's slots are taken by jobs of runs with a driver, and by jobs of other runs.

    A job of a run without a driver counts while it is alive, because no driver records its end.

    Raises:
        InfrastructureError: the executor does not answer.
    """
    with stores.ledger.snapshot() as now:
        driven, left = now.occupying(jobs.host, stores.clock.now(), jobs.near)
    by_name = {one.name: [jobs.folders.job(attempt) for attempt in left if attempt.executor == one.name]
               for one in jobs.executors}  # fmt: skip
    found = [seen for one in jobs.executors if by_name[one.name] for seen in one.observe(by_name[one.name])]
    return driven, sum(seen.live for seen in found)


def free_slots(jobs: Jobs, plan: StageManifest, taken: int, rivals: int = 0) -> int:
    """Return the number of free slots. A remote executor has a queue of its own: there is one for every rival too."""
    return 1 + rivals if jobs.executor_for(plan).remote else jobs.slots - taken


def waits_for_devices(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord, trainer: Trainer) -> bool:
    """Return whether devices that a job of the stage needs are taken; if so, record their holders in the stage's row.

    Raises:
        InputError: the machine has fewer devices than the job needs.
        InfrastructureError: the executor cannot read the devices.
    """
    plan = manifest.stage(stage.name)
    wanted = trainer.devices(plan.kind, plan.params)
    lack = jobs.executor_for(plan).capacity().lack(wanted) if wanted else ""
    if lack:
        say(stores, stage, Reason.WAITING_FOR_DEVICES, lack)
    return bool(lack)


def say(
    stores: Stores, stage: StageRecord, reason: Reason, message: str, action: str = "none needed", **columns: Any
) -> None:
    """Record why a stage waits, unless the stage's row already contains the reason."""
    if (stage.reason, stage.message) != (reason, message):
        stores.update_stage(stage, reason=reason, message=message, next_action=action, **columns)


def record_launch(stores: Stores, attempt: AttemptRecord, handle: str, stage: StageRecord) -> None:
    """Record that the executor has the job."""
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.update_attempt(
            attempt,
            state=AttemptState.LAUNCHED,
            reason=Reason.LAUNCHED,
            handle=handle,
            launched_at=stores.clock.now(),
        )
        if stage.reason in (Reason.WAITING_FOR_DEVICES, Reason.WAITING_FOR_CLUSTER, Reason.SUBMISSION_UNKNOWN):
            transaction.update_stage(stage, reason=Reason.RUNNING, message=f"attempt {attempt.number}", next_action="")
    crashpoint("attempt.after_handle")


def _order(stores: Stores, jobs: Jobs, view: View, stage: StageRecord, attempt: AttemptRecord) -> JobOrder:
    manifest = view.manifest
    limited = budgets.limited(manifest)
    attempts = stores.ledger.attempts(stage.run_id) if limited else []
    inherited = tokens_inherited(stores.blobs, attempt)
    origin, step = origin_of(stores, jobs.folders, stage, attempt)
    taken_over = tokens_taken_over(stores, jobs.folders, attempts)
    spent = budgets.spending(stores.ledger.stages(stage.run_id) if limited else [], attempts, taken_over=taken_over)
    share = budgets.share_of(manifest, attempt, spent)
    plan, executor = manifest.stage(stage.name), jobs.executor_of(attempt)
    image = manifest.image_of(plan)
    return JobOrder(
        name=attempt.name,
        kind=plan.kind,
        seed=manifest.seed,
        params=plan.params,
        inputs={slot: InputBlob(**blob) for slot, blob in stage.inputs.items()},
        store_url="" if jobs.access else stores.blobs.url,
        cache_dir="" if executor.remote else str(_cache(jobs, manifest, stage, attempt)),
        resume=attempt.resume,
        resumed_from=origin,
        resumed_step=step,
        tokens_inherited=inherited,
        token_allowance=None if share.tokens is None else share.tokens + inherited,
        seconds_allowance=share.seconds,
        tokens_declared=manifest.budget.tokens,
        seconds_declared=manifest.budget.wall_clock,
        environment="" if image or not executor.attests else environments.ordered(jobs.folders, stage.run_id),
        trust_rewards=jobs.trust_rewards,
        epoch=attempt.number,
        channel=attempt.channel or "",
        phase_seconds=phase_seconds(stall_after(manifest, stage.name)),
        served=jobs.access is not None,
        image=image or "",
        code=dict(named_code(manifest, plan)) if executor.remote else {},
        log_head=head_name(*view.head),
    )


def _settled(stores: Stores, jobs: Jobs, attempt: AttemptRecord) -> AttemptRecord:
    """Set the attempt's mailbox to the mailbox's place in this workspace.

    A copy of a workspace has its own mailboxes, and older versions recorded no place.
    """
    url = jobs.folders.mailbox_of(attempt.run_id, attempt.stage, attempt.number)
    return attempt if url == attempt.channel else stores.update_attempt(attempt, channel=url)


def _lay_down(executor: Executor, folder: AttemptFolder, order: JobOrder) -> None:
    if executor.remote:
        folder.write_order(order)
        return
    make_folder(folder.path)
    # a running container could write into a replaced job.json
    with unclaimed(folder.path) if order.image else nullcontext(True) as free:
        if free:
            folder.write_order(order)


def _cache(jobs: Jobs, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord) -> Path:
    """Return the cache folder of a job; a job in an image has a private folder, which no other job may read."""
    boxed = manifest.image_of(manifest.stage(stage.name))
    return jobs.folders.of(attempt).path / PRIVATE_CACHE if boxed else jobs.folders.root / "cache"


def _refused_secrets(stores: Stores, jobs: Jobs, view: View) -> Failure | None:
    """Return the failure if secrets that a run's rewards still need are missing, before anything computes; else None.

    The secrets are looked up in the driver's current configuration, which may have changed since submission.
    """
    left = [one.name for one in view.stages if not is_final("stage", one.state)]
    named = sorted({name for one in left for name in secrets_of_stage(view.manifest.stage(one))})
    if not named:
        return None
    project = stores.ledger.project
    other = set(named) - secrets_of(project) if jobs.access is not None else set()
    faults = [
        f"secrets: {name}: must be in {SECRETS} of the server as {project}/{name}; ask its operator"
        if name in other
        else secret_fault(name)
        for name in named
    ]
    fault = next(filter(None, faults), "")
    return Failure(FailureClass.BAD_INPUT, f"{fault}, then posttrain retry", "launch") if fault else None


def _fetch_elsewhere(stores: Stores, executor: Executor, stage: StageRecord, cache: Path) -> Failure | None:
    """Copy a job's external inputs into its cache, because jobs get no credentials of external stores.

    Returns:
        Why the copy failed; None: all inputs are in the cache.

    Raises:
        InfrastructureError: the workspace's own store does not answer.
    """
    for blob in stage.inputs.values():
        if stores.blobs.has(blob["digest"]):  # an error of the store is raised and does not use up an attempt
            continue
        versions = external_versions(
            stores.ledger.assets_by_digest(blob["digest"]), blob["digest"], blob.get("name", "")
        )
        try:
            if versions and executor.remote:
                raise InputError(
                    f"{blob.get('name') or blob['digest']}: jobs of executor {executor.name} cannot read this "
                    "external input; register a copy of it in the artifact store"
                )
            if versions:
                local_copy(versions, cache)
        except (InfrastructureError, InputError, IntegrityError) as error:
            passes = isinstance(error, InfrastructureError)
            return Failure(FailureClass.INFRASTRUCTURE if passes else FailureClass.BAD_INPUT, str(error), "launch")
    return None


def _resumes(stage: StageRecord, found: Found) -> str:
    own = found.origin == f"{stage.run_id}/{stage.name}"
    return f" resumes from the checkpoint at step {found.step}" + ("" if own else f" of {found.origin}")


def cache_key(manifest: Manifest, stage: StageManifest, inputs: Mapping[str, InputBlob]) -> str:
    """Return the digest of exactly the values that decide a stage's outputs (`domain.manifest`).

    Models on other servers are not pinned, so only runs of the same manifest reuse what was computed with them.
    """
    code = deciding_code(manifest, stage)
    decides = job_identity(stage.kind, stage.params, manifest.seed, inputs, manifest.image_of(stage))
    own = {"manifest": manifest.digest} if servers_of(stage.params) else {}
    return digest_json({"code": code, **decides, **own})


def usable(stage: StageRecord, blobs: BlobStore) -> bool:
    """Return whether all bytes of a cached stage's outputs are intact. A missing or corrupt blob is a cache miss."""
    try:
        for output in stage.outputs.values():
            if output["form"] == "tree":
                verify_tree(blobs, output["digest"])
            else:
                blobs.check(output["digest"])
    except (NotFoundError, IntegrityError):
        return False
    return bool(stage.outputs)
