"""What is seen of the jobs of a run: the executor is asked once for all, then each is looked for a last word.

Jobs that run for nobody: no live attempt of the ledger owns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.control.attempts import another_runs, unheeded
from posttrain.control.decide import Sight, View
from posttrain.control.jobs import Jobs, job_of
from posttrain.control.launching import look, tokens_inherited
from posttrain.control.stores import Stores
from posttrain.domain.errors import InputError, IntegrityError, PosttrainError
from posttrain.domain.jobs import JobResult, JobState, Observation
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.records import AttemptRecord
from posttrain.domain.requests import RUN, STAGE, WORKSPACE, Job, Listed
from posttrain.store.attempts import AttemptFolder
from posttrain.store.channel import EVENTS
from posttrain.store.ledger import Ledger


class Looks:
    """What the executor says of a run's live attempts: asked once for all of them, and only if somebody asks."""

    def __init__(self, jobs: Jobs, seen: Mapping[str, Observation]) -> None:
        self._jobs = jobs
        self._known = seen  # a moment ago, of the jobs of all runs
        self._seen: Mapping[str, Observation] | None = None

    def of(self, view: View, attempt: AttemptRecord) -> Observation:
        """One look; of this pass, or a moment old."""
        if self._seen is None:
            self._seen = self._all(view)
        return self._seen.get(attempt.name) or look(self._jobs, attempt)

    def _all(self, view: View) -> Mapping[str, Observation]:
        name = self._jobs.executor.name
        launched = [a for a in view.attempts if a.state == AttemptState.LAUNCHED and a.executor == name]
        if all(attempt.name in self._known for attempt in launched):
            return self._known
        try:
            seen = self._jobs.executor.observe([job_of(self._jobs.folders, attempt) for attempt in launched])
        except Exception:  # then each is asked for by itself: what concerns one stops no other
            return {}
        return {attempt.name: one for attempt, one in zip(launched, seen, strict=True)}


def see(stores: Stores, jobs: Jobs, view: View, name: str, looks: Looks) -> Sight:
    """The live attempt of a running stage.

    Raises:
        InfrastructureError: the executor or the attempt's channel does not answer.
    """
    attempt, folder = view.tries(name)[-1], jobs.folders.of(view.tries(name)[-1])
    if attempt.state == AttemptState.PLANNED:
        return _unanswered(jobs, view, name, attempt)
    job = looks.of(view, attempt)  # first: who is gone has said its last word
    try:
        word = _word(jobs, view, name, attempt)
        if word is None and job.gone:
            job = look(jobs, attempt)  # what was seen is a moment old, and an executor may start a job anew
            if job.gone and another_runs(stores, jobs.folders, attempt, job):
                return Sight(job, another_runs=True)
            word = _word(jobs, view, name, attempt)  # it may have ended between the two looks
        progress = reported(folder, job) if word is None and job.state is JobState.RUNNING else None
        lost = unheeded(jobs.folders, attempt) if word is None and job.gone else ""
        metered = word is None and not job.gone and view.manifest.budget.tokens is not None
        tokens = folder.spent() - tokens_inherited(stores.blobs, attempt) if metered else 0
        return Sight(job, word=word, unheeded=lost, tokens=tokens, progress=progress)
    except (InputError, IntegrityError) as error:  # what is in its folder cannot be read: no retry would mend that
        return Sight(job, unreadable=str(error))


def _unanswered(jobs: Jobs, view: View, name: str, attempt: AttemptRecord) -> Sight:
    """An attempt of which nobody wrote down that it was launched: its job may have ended since, and left its result."""
    if not jobs.folders.of(attempt).has_order():
        return Sight(Observation(JobState.UNKNOWN), ordered=False)
    job = look(jobs, attempt)
    if job.state is not JobState.UNKNOWN:
        return Sight(job)
    try:
        return Sight(job, word=_word(jobs, view, name, attempt))
    except (InputError, IntegrityError) as error:
        return Sight(job, unreadable=str(error))


def reported(folder: AttemptFolder, job: Observation) -> str:
    """How far the job says it is; the first part is for people."""
    said = folder.channel.summary()
    if said is None:  # it loads, or is a job of before, which writes none
        return f"its start | {folder.channel.last(EVENTS)} | {job.incarnation}"
    place = f"step {said.step} of {said.total}"
    return f"{place} | {said.tokens} | {said.phase} | {said.phases} | {job.incarnation}"


def _word(jobs: Jobs, view: View, name: str, attempt: AttemptRecord) -> JobResult | None:
    return jobs.trainer(view.manifest.stage(name).trainer).collect(jobs.folders.of(attempt))


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
