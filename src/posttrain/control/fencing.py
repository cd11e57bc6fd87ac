"""At most one job of an attempt computes, and none of one that ended: by the attempt's `start` object."""

from __future__ import annotations

import socket
from contextlib import suppress

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.stores import Stores
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.jobs import ANOTHER_RUNS, JobState, Observation
from posttrain.domain.lifecycle import AttemptState, is_final
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord
from posttrain.execution import processes
from posttrain.store.channel import ControlKind, Start


def give_up(folders: AttemptFolders, attempt: AttemptRecord, why: str) -> bool:
    """Before an attempt is recorded as ended: a job of it that comes late (its launcher was suspended, say) begins not.

    Returns:
        Whether no job of it computes; False: one began before this.

    Raises:
        WorkspaceError: the attempt folder cannot be written; then it has not ended yet.
    """
    try:
        held = folders.of(attempt).channel.bury(attempt.number, why)
    except IntegrityError:  # something is there, and a job that cannot read it does not begin either
        return True
    return held is None or not _may_live(held)


def another_runs(stores: Stores, folders: AttemptFolders, attempt: AttemptRecord, seen: Observation) -> bool:
    """Whether the executor's job found that another one has begun this attempt, which may live: its result counts.

    It is over when its process is seen to be gone; of another machine's that cannot be seen. A job that the executor
    started anew has found its own earlier incarnation, which the executor has proven to be gone.
    """
    if seen.state is not JobState.EXITED or seen.exit_code != ANOTHER_RUNS or seen.incarnation:
        return False
    if attempt.reason == Reason.ASSUMED_DEAD:
        return False
    folder = folders.of(attempt)
    held = folder.channel.started()
    if held is None or folder.channel.answered() is not None or not _may_live(held):
        return False
    if attempt.reason != Reason.ANOTHER_RUNS:
        message = f"process {held.pid} of {held.host} began this attempt before the launched job; its result counts"
        with stores.ledger.transaction(stores.actor) as transaction:
            transaction.update_attempt(attempt, reason=Reason.ANOTHER_RUNS, message=message)
    return True


def assume_dead(stores: Stores, jobs: Jobs, run_id: str, stage: str) -> AttemptRecord:
    """Take a person's word that the job of a stage is dead of which nothing can be seen: its host is gone, say.

    What it may still compute is published by nobody.

    Raises:
        NotFoundError: the run has no such stage.
        InputError: it is not waited for such a job, or the job is seen to live.
        ConflictError: somebody moved first.
    """
    row = next((one for one in stores.ledger.stages(run_id) if one.name == stage), None)
    if row is None:
        raise NotFoundError(f"run {run_id} has no stage {stage!r}; posttrain get {run_id} shows them")
    attempt = next(iter(reversed(stores.ledger.attempts(run_id, stage))), None)
    message = f"{stores.actor} says that its job is dead"
    if attempt is not None and not is_final("attempt", attempt.state) and jobs.elsewhere(attempt):
        return _with_its_host(stores, jobs, attempt, message)
    unseen = row.reason in (Reason.ANOTHER_RUNS, Reason.JOB_NOT_VISIBLE)
    if attempt is None or attempt.state != AttemptState.LAUNCHED or not unseen:
        raise InputError(
            f"{run_id}/{stage}: --assume-dead needs a job of which nothing can be seen, the stage is {row.state} "
            f"({row.reason}); posttrain why {run_id}"
        )
    held = None
    with suppress(IntegrityError):  # what its job left says nothing
        held = jobs.folders.of(attempt).channel.started()
    if held is not None and held.host == socket.gethostname() and _may_live(held):
        raise InputError(f"{run_id}/{stage}: process {held.pid} of this host lives; posttrain stop {run_id} ends it")
    with stores.ledger.transaction(stores.actor) as transaction:
        return transaction.update_attempt(attempt, reason=Reason.ASSUMED_DEAD, message=message)


def _with_its_host(stores: Stores, jobs: Jobs, attempt: AttemptRecord, message: str) -> AttemptRecord:
    """The attempt is this host's from now on, which finds no job of it.

    Should its host come back, it ends the job, which no attempt of its own needs.
    """
    host = next((one for one in jobs.hosts.all() if one.id == attempt.host), None) if jobs.hosts else None
    if host is not None and not host.gone:
        raise InputError(
            f"{attempt.run_id}/{attempt.stage}: its host {host.name} was heard of {host.silent:.0f} s ago; posttrain "
            f"stop {attempt.run_id} ends it there"
        )
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.leave_to(attempt.run_id, jobs.host)
        return transaction.update_attempt(attempt, reason=Reason.ASSUMED_DEAD, message=message, host=jobs.host)


def unheeded(folders: AttemptFolders, attempt: AttemptRecord) -> str:
    """What is said of a job that was told to stop and was ended instead; empty for one that said it stops."""
    channel = folders.of(attempt).channel
    stops = [control.number for control in channel.controls() if control.kind is ControlKind.STOP]
    if not stops or any(channel.acknowledged(number) for number in stops):
        return ""
    return "stopped by a person; the job did not heed it and was killed, so steps since its last checkpoint are lost"


def _may_live(held: Start) -> bool:
    elsewhere = held.host != socket.gethostname()
    return not held.cancelled and (elsewhere or processes.alive(held.pid, held.process))
