"""Runs jobs on a Ray cluster through its Jobs API, by Ray's own client.

A job is the agent (`execution.agent`), started by Ray on a node with the resources that its flavour requests. Ray
refuses a second submission of an id, and starts no job again by itself. Neither a working directory nor a variable of
this process travels. Everyone who reaches a Ray cluster can run programs as its user, so its jobs are not secret to
each other.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from posttrain.domain.errors import CapacityError, InfrastructureError, InputError
from posttrain.domain.jobs import (
    Absence,
    Accepted,
    Capacity,
    Cause,
    Exists,
    JobState,
    LogPage,
    Observation,
    Submission,
    Unknown,
)
from posttrain.domain.jobspec import RUN, STAGE, WORKSPACE, JobRef, JobSpec, Listed, external_name
from posttrain.domain.placement import ExecutorSettings
from posttrain.execution.ports import NotAskedError, Patience
from posttrain.store.attempts import mailbox_at
from posttrain.store.staging import relayed_log, seconds_ran

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

T = TypeVar("T")
_SECONDS = 20.0  # for which an answer is awaited
_TERMINATED = -15
_LABELS = (WORKSPACE, RUN, STAGE)
_ACCELERATOR = "accelerator_type:"  # as Ray names resources for kinds of accelerators
_SHARE = 0.001  # of that resource, by which a job is placed on a node of its kind
# errors that end a job for reasons of its node
_LOST = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE", "JOB_SUPERVISOR_ACTOR_START_FAILURE")


class RayExecutor:
    """The `Executor` of one Ray cluster.

    Args:
        settings: the address of its dashboard, and how Python is run on its nodes.
    """

    remote: ClassVar[bool] = True
    attests: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True
    images: ClassVar[bool] = False
    avoids: ClassVar[bool] = False

    def __init__(self, name: str, settings: ExecutorSettings) -> None:
        if settings.address is None:
            raise InputError(
                f"executors.{name}: address must be that of the cluster's dashboard, such as http://127.0.0.1:8265"
            )
        self.name = name
        self._settings, self._patience = settings, Patience(name)
        self._missing: dict[str, float] = {}  # job → since when no answer contained it
        self._made: JobSubmissionClient | None = None

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`. The handle is Ray's id of the submission."""
        group = spec.gang[0]
        if len(spec.gang) != 1 or group.min != group.max or group.topology:
            raise InputError(f"job {spec.name}: executor {self.name} starts one group of equal nodes; request that")
        if unmet := [*spec.options, *(["time_limit"] if spec.time_limit else []), *spec.avoid]:
            raise InputError(f"job {spec.name} requests {unmet[0]}, which executor {self.name} lacks; leave it out")
        if spec.image:
            raise InputError(f"job {spec.name} requests image {spec.image}, which executor {self.name} cannot run")
        key = external_name(spec)
        self._missing.pop(key, None)
        several = group.min > 1  # the pools of its roles reserve their own resources, as placement groups
        kind = {f"{_ACCELERATOR}{group.kind}": _SHARE} if group.kind and not several else {}
        words = [*(spec.python or self._settings.python), "-m", "posttrain.execution.agent", spec.mailbox]
        variables = {"POSTTRAIN_BOOTSTRAP": spec.bootstrap} if spec.bootstrap else {}
        try:
            found = self._ask(
                lambda client: client.submit_job(
                    entrypoint=f"exec {shlex.join(words)}",
                    submission_id=key,
                    metadata={"name": spec.name, "epoch": str(spec.epoch), **spec.labels},
                    runtime_env={"env_vars": variables} if variables else None,
                    entrypoint_num_cpus=group.cpus or 1,
                    entrypoint_num_gpus=0 if several else group.gpus,
                    entrypoint_memory=group.memory or None,
                    entrypoint_resources=kind or None,
                )
            )
        except NotAskedError as error:
            raise CapacityError(str(error)) from error
        except _RefusedError as error:
            if "already exists" in str(error):
                return Exists(key)
            raise InfrastructureError(f"executor {self.name} rejected job {spec.name}: {error}") from error
        except InfrastructureError as error:
            return Unknown(str(error))
        return Accepted(str(found))

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        found, now = self._jobs(), time.monotonic()
        return [self._observed(job, external_name(job), found, now) for job in jobs]

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`. Ray sends SIGTERM, and SIGKILL some seconds later."""
        if external_name(job) in self._jobs():
            with suppress(_RefusedError):  # the job has ended since the list
                self._ask(lambda client: client.stop_job(external_name(job)))

    def list(self, prefix: str) -> list[Listed]:
        """See `Executor.list`."""
        listed = []
        for key, job in sorted(self._jobs().items()):
            about = job.metadata or {}
            name, epoch = about.get("name", ""), about.get("epoch", "")
            if key.startswith(f"{name}.pt-") and name.startswith(prefix) and str(job.status) in ("PENDING", "RUNNING"):
                labels = {label: about[label] for label in _LABELS if label in about}
                listed.append(Listed(name, labels, int(epoch) if epoch.isdigit() else 0))
        return listed

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """See `Executor.logs`: what the agent has relayed."""
        return relayed_log(mailbox_at(job.mailbox), cursor)

    def capacity(self) -> Capacity:
        """See `Executor.capacity`: none, since Ray has a queue of its own."""
        return Capacity()

    def _jobs(self) -> dict[str, JobDetails]:
        """Return the jobs of the cluster by id, as it keeps them."""
        return {str(job.submission_id): job for job in self._ask(lambda client: client.list_jobs())}

    def _observed(self, ref: JobRef, key: str, jobs: dict[str, JobDetails], now: float) -> Observation:
        job = jobs.get(key)
        if job is None:
            sure = now - self._missing.setdefault(key, now) >= self._settings.settle  # a submission may be under way
            absent = Absence.AUTHORITATIVE if sure else Absence.NOT_VISIBLE_YET
            return Observation(JobState.UNKNOWN, absent=absent, seconds=seconds_ran(mailbox_at(ref.mailbox)))
        self._missing.pop(key, None)
        status, said = str(job.status), " ".join(str(job.message or "").split())[:200]
        seconds = None if status == "PENDING" else seconds_ran(mailbox_at(ref.mailbox))  # Ray counts time in its queue
        here: dict[str, Any] = {"handle": key, "node": str(job.driver_node_id or "")[:12], "seconds": seconds}
        if status == "PENDING":
            return Observation(JobState.STARTING, detail=f"queued by {self.name}: {said}", **here)
        if status == "RUNNING":
            return Observation(JobState.RUNNING, **here)
        if status == "SUCCEEDED":
            return Observation(JobState.EXITED, 0, **here)
        if status == "STOPPED":
            return Observation(JobState.EXITED, _TERMINATED, **here)
        if status != "FAILED":
            raise InfrastructureError(f"executor {self.name}: job {key} is in the unknown state {status[:40]!a}")
        if job.driver_exit_code is None or str(job.error_type) in _LOST:
            cause = Cause.NODE_LOST if str(job.error_type) in _LOST else None
            return Observation(JobState.LOST, detail=f"Ray: {said}", cause=cause, **here)
        return Observation(JobState.EXITED, int(job.driver_exit_code), **here)

    def _client(self) -> JobSubmissionClient:
        if self._made is None:
            os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
            try:
                from ray.job_submission import JobSubmissionClient
            except ImportError as error:
                raise InputError(f"executor {self.name} needs Ray: pip install 'posttrain[ray]'") from error
            self._made = JobSubmissionClient(self._settings.address)
        return self._made

    def _ask(self, request: Callable[[JobSubmissionClient], T]) -> T:
        """Return an answer of the cluster; Ray's client has no deadlines of its own.

        Raises:
            _RefusedError: the cluster answered that it does not do this.
            InfrastructureError: there was no answer.
        """

        def answer(limit: float) -> T:
            future: Future[T] = Future()

            def work() -> None:
                try:
                    future.set_result(request(self._client()))
                except BaseException as error:
                    future.set_exception(error)

            threading.Thread(target=work, daemon=True).start()
            return future.result(limit)

        try:
            return self._patience.ask(answer, _SECONDS)
        except (InfrastructureError, InputError):
            raise
        except RuntimeError as error:  # the client's exception for every status that is not 200
            said = " ".join(str(error).split())  # a traceback, whose end has the reason
            if "status code 4" in said or "already exists" in said:
                raise _RefusedError(f"executor {self.name}: {said[-300:]}") from error
            raise InfrastructureError(f"executor {self.name}: {said[-300:]}") from error
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise InfrastructureError(f"executor {self.name}: {type(error).__name__}: {said}") from error


class _RefusedError(InfrastructureError):
    """The cluster answered, and refused the request."""
