"""The request of an attempt: written once into its folder, and submitted as written by whoever gets to it."""

from __future__ import annotations

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.manifest import StageManifest
from posttrain.domain.records import AttemptRecord
from posttrain.domain.requests import RUN, STAGE, WORKSPACE, Job, JobRequest, PodGroup
from posttrain.execution.ports import Trainer
from posttrain.store.atomic import create_json, read_json

_FILE = "request.json"
_OVERTIME_SECONDS = 120.0  # beyond what the budget leaves: the job ends by itself, or its driver ends it, before


def job_of(folders: AttemptFolders, attempt: AttemptRecord) -> Job:
    """What finds an attempt's job."""
    return Job(attempt.name, str(folders.of(attempt).path), folders.known(attempt))


def secrets_of_rewards(plan: StageManifest) -> frozenset[str]:
    """The names of variables that a stage's rewards get."""
    return frozenset(str(name) for ref in plan.inputs.values() for name in ref.meta.get("secrets", ()))


def request_of(
    jobs: Jobs, attempt: AttemptRecord, order: JobOrder, trainer: Trainer, of_rewards: frozenset[str]
) -> JobRequest:
    """The attempt's request; of several processes that write one at once, the first's.

    Args:
        of_rewards: the secrets that its manifest names. A job of the same run can write into the folder.

    Raises:
        InputError: it asks for something malformed, or another version wrote it.
        IntegrityError: what was written cannot be read, or names other secrets than its manifest and its trainer.
        WorkspaceError: the disk is full or read-only.
    """
    folder = jobs.folders.of(attempt)
    path = folder.path / _FILE
    spec = trainer.compile(order, folder.path)
    if not path.exists():
        allowed = order.seconds_allowance
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
        found = JobRequest.from_json(read_json(path), str(folder.path))
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} cannot be read: {error!r}; it is damaged: posttrain retry makes another"
        ) from error
    other = set(found.secrets) - of_rewards - set(spec.secrets)
    if other:
        raise IntegrityError(
            f"{path} names secrets that its run does not: {', '.join(sorted(other))[:200]!a}; somebody else wrote it: "
            "posttrain retry makes another"
        )
    return found
