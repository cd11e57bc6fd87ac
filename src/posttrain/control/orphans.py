"""Jobs that run for nobody: no live attempt of the ledger owns them."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.control.jobs import Jobs
from posttrain.domain.errors import PosttrainError
from posttrain.domain.requests import RUN, STAGE, WORKSPACE, Job, Listed
from posttrain.store.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Orphans:
    """What an executor has beside the jobs of live attempts."""

    ours: tuple[Listed, ...] = ()  # submitted by this workspace, from where it is now
    strangers: tuple[Listed, ...] = ()  # of another one, of a copy, of where this one was before: left alone


def find_orphans(ledger: Ledger, jobs: Jobs) -> Orphans:
    """Look; nothing is touched.

    Raises:
        InfrastructureError: the executor does not answer.
    """
    listed = jobs.executor.list("")
    if not listed:
        return Orphans()
    owned = _owned(ledger)  # read after the list: an attempt is in the ledger before its job is submitted
    free = [job for job in listed if job.name not in owned]
    mine = jobs.workspace() if free else ""
    ours = tuple(job for job in free if mine and job.labels.get(WORKSPACE) == mine)
    return Orphans(ours, tuple(job for job in free if job not in ours))


def end_orphans(ledger: Ledger, jobs: Jobs) -> list[str]:
    """Kill this workspace's; one line for each.

    Raises:
        InfrastructureError: the executor does not answer.
    """
    told = []
    for job in find_orphans(ledger, jobs).ours:
        folder = jobs.folders.path(job.labels[RUN], job.labels[STAGE], job.epoch)
        try:
            jobs.executor.kill(Job(job.name, str(folder)))
            told.append(f"job {job.name} was ended: no attempt owns it")
        except PosttrainError as error:  # one that resists stops no other
            told.append(f"job {job.name}, which no attempt owns, could not be ended: {error}")
    return told


def _owned(ledger: Ledger) -> set[str]:
    """The names of live attempts, of every project: they share an executor."""
    with ledger.snapshot() as now:
        return now.live_attempts()
