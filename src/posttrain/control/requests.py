"""The request of an attempt: written once into its folder, and submitted as written by whoever gets to it."""

from __future__ import annotations

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.records import AttemptRecord
from posttrain.domain.requests import RUN, STAGE, WORKSPACE, Job, JobRequest, PodGroup
from posttrain.execution.ports import Trainer
from posttrain.store.atomic import create_json, read_json

_FILE = "request.json"
_OVERTIME_SECONDS = 120.0  # beyond what the budget leaves: the job ends by itself, or its driver ends it, before


def job_of(folders: AttemptFolders, attempt: AttemptRecord) -> Job:
    """What finds an attempt's job."""
    return Job(attempt.name, str(folders.of(attempt).path), folders.known(attempt))


def request_of(jobs: Jobs, attempt: AttemptRecord, order: JobOrder, trainer: Trainer) -> JobRequest:
    """The attempt's request; of several processes that write one at once, the first's.

    Raises:
        InputError: it asks for something malformed, or another version wrote it.
        IntegrityError: what was written cannot be read.
        WorkspaceError: the disk is full or read-only.
    """
    folder = jobs.folders.of(attempt)
    path = folder.path / _FILE
    if not path.exists():
        spec = trainer.compile(order, folder.path)
        allowed = order.seconds_allowance
        of_rewards = {str(name) for blob in order.inputs.values() for name in blob.meta.get("secrets", ())}
        request = JobRequest(
            attempt.name,
            spec.module,
            str(folder.path),
            dict(spec.environment),
            gang=(PodGroup(gpus=spec.devices),),
            image=order.image,
            secrets=(*spec.secrets, *sorted(of_rewards - set(spec.secrets))),
            max_seconds=None if allowed is None else max(0.0, allowed) + _OVERTIME_SECONDS,
            labels={WORKSPACE: jobs.workspace(), RUN: attempt.run_id, STAGE: attempt.stage},
            epoch=attempt.number,
        )
        create_json(path, request.to_json())
    try:
        return JobRequest.from_json(read_json(path), str(folder.path))
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} cannot be read: {error!r}; it is damaged: posttrain retry makes another"
        ) from error
