"""Runs jobs on a Slurm cluster through its command line, on this machine or on a login node.

A job is a batch script that runs the agent (`execution.agent`); Slurm finds it by the job's name, which contains a
digest of its mailbox. Slurm cannot refuse a second submission of a name, so a submission first looks for the name in
the same shell, and two jobs of one name run one after the other (`singleton`): the second finds that the attempt began.

Every answer is framed by a random mark, and its last line has the exit status. An answer that is cut off, late, or of
another request therefore is no answer, which proves nothing about any job.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

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
from posttrain.domain.jobspec import JobRef, JobSpec, Listed, external_name
from posttrain.domain.placement import ExecutorSettings
from posttrain.execution import processes
from posttrain.execution.ports import NotAskedError, Patience
from posttrain.store.attempts import mailbox_at
from posttrain.store.staging import relayed_log, seconds_ran

_SECONDS = 20.0  # for which an answer is awaited
_SUBMIT_SECONDS = 40.0
_HAS_POSTTRAIN = "import importlib.util, sys; sys.exit(importlib.util.find_spec('posttrain') is None)"
_NO_PYTHON = (126, 127)  # exit codes of a shell that cannot run a command
_WARNING_SECONDS = 300  # at most; before a time limit, for a checkpoint
_PORTS = 20000  # beginning of the range of ports of Ray's heads
# variables of a user's shell that would hide jobs from squeue and scancel, or change what sbatch submits
_PLAIN = r"unset $(env | sed -n 's/^\(\(SQUEUE\|SCANCEL\|SBATCH\|SLURM_\(JOB\|CLUSTERS\)\)[A-Za-z0-9_]*\)=.*/\1/p')"
_SQUEUE = (
    "squeue --noheader --all --states=all --user=$(id -u)"  # also jobs in partitions that are hidden from the user
)
_FIELDS = ("JobID", "State", "RestartCnt", "TimeUsed", "exit_code", "BatchHost", "Reason", "Comment", "Name")
_COLUMNS = ",".join(f"{name}:|" for name in _FIELDS)
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)\.pt-[0-9a-f]{12}")
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_NEVER = {  # reasons that waiting does not remove; others may also mean that nodes are down
    "PartitionTimeLimit": "a `time_limit` that the partition allows",
    "BadConstraints": "another `constraint`",
}
_PAUSED = ("SUSPENDED", "STOPPED")
_RUNS = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING")
_ENDED: Mapping[str, Cause | None] = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": None,
    "TIMEOUT": Cause.OVERTIME,
    "DEADLINE": Cause.OVERTIME,
    "PREEMPTED": Cause.PREEMPTED,
    "OUT_OF_MEMORY": Cause.OUT_OF_MEMORY,
    "NODE_FAIL": Cause.NODE_LOST,
    "BOOT_FAIL": Cause.NODE_LOST,
}
# refusals of a controller that did not take the job; of any other failure the outcome is unknown
_REFUSED = re.compile(r"sbatch: error: (?:Batch job submission failed: )?(?P<why>(?:(?!sbatch: error).)*)$")
_NO_ANSWER = re.compile(r"timed out|unable to contact|connect|transport|communication|temporar", re.IGNORECASE)
_FOR_NOW = re.compile(r"inactive|drain|\bdown\b|violates", re.IGNORECASE)  # the same request may succeed later
_BY_CONFIGURATION = re.compile(r"invalid|unrecognized|not available|not permitted|denied", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Row:
    """One job of the queue."""

    id: int
    state: str
    restarts: int
    seconds: float
    code: int | None  # negative: a signal; None: unknown
    node: str
    reason: str
    about: Mapping[str, object]  # the comment
    key: str

    @property
    def live(self) -> bool:
        return self.state in (*_QUEUED, *_PAUSED, *_RUNS)


class SlurmExecutor:
    """The `Executor` of one Slurm cluster.

    Args:
        settings: how the cluster is reached, and how Python is run on its nodes.
    """

    remote: ClassVar[bool] = True
    attests: ClassVar[bool] = False
    idempotent: ClassVar[bool] = False
    avoids: ClassVar[bool] = True

    def __init__(self, name: str, settings: ExecutorSettings) -> None:
        self.name, self.images = name, settings.container is not None
        self._settings = settings
        self._missing: dict[str, float] = {}  # job → since when no answer contained it
        self._patience = Patience(name)

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`. The handle is Slurm's number of the job."""
        self._refuse(spec)
        key = external_name(spec)
        self._missing.pop(key, None)
        look = f"{_SQUEUE} --name={shlex.quote(key)} --Format='JobID:|' </dev/null"
        text = (
            f'found=$({look}) || exit 75; if [ -n "$found" ]; then echo "exists $found"; exit 0; fi; '
            f"exec timeout {_SUBMIT_SECONDS / 2:g} {shlex.join(['sbatch', *_options(spec, key)])}"
        )
        try:
            answer = self._ask(text, self._script(spec), _SUBMIT_SECONDS)
        except NotAskedError as error:
            raise CapacityError(str(error)) from error
        except InfrastructureError as error:
            refused = _REFUSED.search(str(error))
            if refused is None or _NO_ANSWER.search(str(error)):
                return Unknown(str(error))
            why = f"executor {self.name} rejected job {spec.name}: {refused['why']}"
            if _FOR_NOW.search(refused["why"]):
                raise CapacityError(why) from error
            if _BY_CONFIGURATION.search(refused["why"]):
                if spec.avoid:  # the nodes may have been renamed, or may be all that there are
                    return self.submit(replace(spec, avoid=()))
                raise InputError(f"{why}; correct the flavour: posttrain executor add") from error
            raise InfrastructureError(why) from error
        last = answer.strip().splitlines()[-1] if answer.strip() else ""
        if last.startswith("exists ") and (known := re.findall(r"\d+", last)):
            return Exists(min(known, key=int))
        number = re.fullmatch(r"(\d+)(?:;\S+)?", last)
        return Accepted(number[1]) if number else Unknown(f"sbatch answered {last[:80]!a} instead of a job's number")

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        found: dict[str, list[_Row]] = {}
        for row in self._rows():
            found.setdefault(row.key, []).append(row)
        now = time.monotonic()
        return [self._observed(job, found.get(external_name(job), []), now) for job in jobs]

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`. Slurm sends SIGTERM, and SIGKILL after its KillWait."""
        self._ask(f"scancel --user=$(id -u) --name={shlex.quote(external_name(job))}")

    def list(self, prefix: str) -> list[Listed]:
        """See `Executor.list`."""
        found = {}
        for row in self._rows():
            match, labels, epoch = _NAME.fullmatch(row.key), row.about.get("labels"), row.about.get("epoch")
            if match and row.live and match["name"].startswith(prefix) and isinstance(labels, dict):
                found[row.key] = Listed(match["name"], labels, epoch if isinstance(epoch, int) else 0)
        return [found[key] for key in sorted(found)]

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """See `Executor.logs`: what the agent has relayed."""
        return relayed_log(mailbox_at(job.mailbox), cursor)

    def capacity(self) -> Capacity:
        """See `Executor.capacity`: none, since Slurm has a queue of its own."""
        return Capacity()

    def _observed(self, job: JobRef, rows: Sequence[_Row], now: float) -> Observation:
        if not rows:
            since = self._missing.setdefault(external_name(job), now)
            sure = now - since >= self._settings.settle  # a submission may be under way
            absent = Absence.AUTHORITATIVE if sure else Absence.NOT_VISIBLE_YET
            return Observation(JobState.UNKNOWN, absent=absent, seconds=seconds_ran(mailbox_at(job.mailbox)))
        self._missing.pop(external_name(job), None)
        row = next((one for one in rows if one.live), rows[0])
        seconds = _ran(job, row)
        here = {"incarnation": row.restarts, "handle": str(row.id), "node": row.node}
        if row.state in _QUEUED or row.state in _PAUSED:
            why = row.reason if row.state in _QUEUED else row.state.lower()
            detail = f"queued by {self.name}" + (f": {why}" if why != "None" else "")
            if why in _NEVER:
                detail += f"; it never starts: its flavour needs {_NEVER[why]} (posttrain executor add); then scancel "
                detail += str(row.id)
            return Observation(JobState.STARTING, detail=detail, seconds=seconds, **here)  # type: ignore[arg-type]
        if row.state in _RUNS:
            return Observation(JobState.RUNNING, seconds=seconds, **here)  # type: ignore[arg-type]
        if row.state not in _ENDED:
            detail = f"executor {self.name}: job {row.id} is in the unknown state {row.state[:40]!a}"
            return Observation(JobState.UNKNOWN, detail=detail, absent=Absence.NOT_VISIBLE_YET, **here)  # type: ignore[arg-type]
        return self._of_ended(row, seconds, here)

    def _of_ended(self, row: _Row, seconds: float | None, here: Mapping[str, object]) -> Observation:
        cause, detail, code = _ENDED[row.state], "", row.code
        if cause is Cause.OVERTIME and row.about.get("limit") == "nodes":
            cause, detail = Cause.PREEMPTED, "the time limit of its flavour was reached"
        if cause is Cause.NODE_LOST:
            detail = f"node {row.node} was lost"
            return Observation(JobState.LOST, detail=detail, cause=cause, seconds=seconds, **here)  # type: ignore[arg-type]
        if row.state == "CANCELLED":
            code, detail = code if (code or 0) < 0 else -signal.SIGTERM, "the job was cancelled in Slurm (scancel)"
        if cause is not None:
            detail = detail or f"Slurm ended it: {row.state}"
        if row.state == "FAILED" and code in _NO_PYTHON:
            detail = (
                f"node {row.node}: {shlex.join(self._settings.python)} cannot be run or has no Posttrain; install "
                f"Posttrain there, or correct `python` of executor {self.name}: posttrain executor add"
            )
        return Observation(
            JobState.EXITED,
            code,
            detail,
            cause=cause,
            seconds=seconds,
            **here,  # type: ignore[arg-type]
        )

    def _rows(self) -> Sequence[_Row]:
        """Return the user's jobs that Slurm still has, by number."""
        mark = secrets.token_hex(8)  # begins each row: names and comments of other jobs may contain anything
        columns = _COLUMNS.replace("JobID:|", f"JobID:|{mark}|", 1)
        text = self._ask(f"{_SQUEUE} --Format='{columns}'")
        rows = []
        for line in text.splitlines():
            number, marked, rest = line.partition(f"|{mark}|")
            head, _, key = rest.rstrip("|").rpartition("|")
            if marked and number.strip().isdigit() and _NAME.fullmatch(key.strip()):
                rows.append(_row(int(number), head, key.strip()))
        return sorted(rows, key=lambda row: row.id)

    def _refuse(self, spec: JobSpec) -> None:
        """Refuse what the adapter does not provide.

        Raises:
            InputError: the spec requests it.
        """
        if len(spec.gang) != 1 or spec.gang[0].min != spec.gang[0].max or spec.gang[0].topology:
            raise InputError(f"job {spec.name}: executor {self.name} starts one group of equal nodes; request that")
        if spec.image and not self.images:
            raise InputError(
                f"job {spec.name} requests image {spec.image}, but executor {self.name} has no `container`; add "
                "one, such as [apptainer, exec, --nv]: posttrain executor add"
            )

    def _script(self, spec: JobSpec) -> str:
        """Return the batch script; it alone contains the bootstrap token, and only its user may read it."""
        python = [*(spec.python or self._settings.python)]
        if spec.image and self._settings.container:
            python = [*self._settings.container, f"docker://{spec.image}", *python]
        words = shlex.join(python)
        lines = ["#!/bin/sh -l", "run() {", 'export POSTTRAIN_INCARNATION="${SLURM_RESTART_COUNT:-0}"']
        lines += [f"export POSTTRAIN_BOOTSTRAP={shlex.quote(spec.bootstrap)}"] if spec.bootstrap else []
        lines += _RAY.format(python=words, port=_PORTS, rest=spec.gang[0].min - 1).splitlines() * (spec.gang[0].min > 1)
        lines.append(f"{words} -c {shlex.quote(_HAS_POSTTRAIN)} || exit 127")
        start = f"exec {words} -m posttrain.execution.agent {shlex.quote(spec.mailbox)}"
        return "\n".join([*lines, start, "}", "run", ""])  # a script that is cut off starts nothing

    def _ask(self, text: str, given: str = "", seconds: float = _SECONDS) -> str:
        """Return what a shell command prints where Slurm's commands are.

        Raises:
            InfrastructureError: there was no complete answer, or the command failed.
        """
        mark, prefix = secrets.token_hex(12), self._settings.command or ("sh", "-c")
        whole = f"LC_ALL=C; export LC_ALL; echo {mark}; {_PLAIN}; ( {text} ); code=$?; echo; echo {mark} $code."

        def answer(limit: float) -> subprocess.CompletedProcess[bytes]:
            try:
                return subprocess.run(
                    [*prefix, f"exec sh -c {shlex.quote(whole)}"], input=given.encode(), capture_output=True,
                    timeout=limit, check=False, env=processes.without_keys(os.environ),
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise TimeoutError from error

        try:
            done = self._patience.ask(answer, seconds)
        except OSError as error:
            raise InfrastructureError(f"executor {self.name}: {prefix[0]} cannot be run: {error.strerror}") from error
        out, said = done.stdout.decode(errors="replace"), " ".join(done.stderr.decode(errors="replace").split())
        _, begun, rest = out.partition(f"{mark}\n")
        body, ended, status = rest.rpartition(f"\n{mark} ")
        code = re.fullmatch(r"(\d+)\.\s*", status)  # a status that is cut off has no full stop
        if not (begun and ended and code):
            what = "the answer was cut off" if begun else "no answer"
            raise InfrastructureError(f"executor {self.name}: {what}: {said[-300:] or 'no reason given'}")
        if int(code[1]):
            raise InfrastructureError(f"executor {self.name}: {said[-300:] or f'exit code {code[1]}'}")
        return body


# A job of several nodes has a Ray cluster over them, with a token of its own; it ends with the job.
_RAY = """own="--num-cpus=${{SLURM_CPUS_PER_TASK:-1}} --num-gpus=${{SLURM_GPUS_ON_NODE:-0}} --disable-usage-stats"
own="$own --block --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0"
export RAY_ADDRESS="$({python} -c 'import ray; print(ray.util.get_node_ip_address())')"
export RAY_ADDRESS="$RAY_ADDRESS:$(({port} + SLURM_JOB_ID % 20000))"
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
public="--export=HOME,USER,LOGNAME,PATH,RAY_AUTH_MODE,RAY_AUTH_TOKEN,RAY_USAGE_STATS_ENABLED"
export RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
srun $public --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \
{python} -m posttrain.execution.agent ray start --head --port="${{RAY_ADDRESS##*:}}" --include-dashboard=false $own &
srun $public --overlap --nodes={rest} --ntasks={rest} --exclude="$SLURMD_NODENAME" \
{python} -m posttrain.execution.agent ray start --address="$RAY_ADDRESS" $own &"""


def _row(number: int, head: str, key: str) -> _Row:
    """Return the row of a job; what cannot be read of it is missing, and stops no other job."""
    cells = [cell.strip() for cell in head.split("|", len(_FIELDS) - 3)]
    state, restarts, used, code, node, reason, comment = [*cells, *[""] * 7][:7]
    about = None
    with suppress(ValueError):
        about = json.loads(comment)  # an admin may have changed it
    about = about if isinstance(about, dict) else {}
    again = int(restarts) if restarts.isdigit() else 0
    return _Row(number, state, again, _span(used), _code(code), "" if node == "n/a" else node, reason, about, key)


def _options(spec: JobSpec, key: str) -> list[str]:
    """Return the words of sbatch; no variable of the submitter's environment travels."""
    pods = spec.gang[0]
    about = {"labels": dict(spec.labels), "epoch": spec.epoch}
    limits = {"run": spec.max_seconds, "nodes": spec.time_limit}
    named = {name: seconds for name, seconds in limits.items() if seconds is not None}
    words = {
        "job-name": key,
        "dependency": "singleton",
        "export": "HOME,USER,LOGNAME,PATH",
        "open-mode": "append",
        "output": "/dev/null",
        "nodes": str(pods.min),
        "ntasks-per-node": "1",
        "cpus-per-task": str(pods.cpus or 1),
        **({"mem": f"{-(-pods.memory // 2**20)}M"} if pods.memory else {}),
        **({"gres": f"gpu:{f'{pods.kind}:' if pods.kind else ''}{pods.gpus}"} if pods.gpus else {}),
        **({"exclude": ",".join(spec.avoid)} if spec.avoid else {}),
        **spec.options,
    }
    if named:
        which = min(named, key=lambda name: named[name])
        minutes = max(1, -int(-named[which] // 60))
        about["limit"] = which
        words["time"] = str(minutes)
        if which == "nodes":  # the agent itself ends a job before the run's limit
            words["signal"] = f"B:TERM@{min(_WARNING_SECONDS, 6 * minutes)}"
    words["comment"] = json.dumps(about, separators=(",", ":"))
    return ["--parsable", "--requeue", *(f"--{name}={value}" for name, value in words.items())]


def _ran(job: JobRef, row: _Row) -> float | None:
    """Return the seconds that all incarnations ran; Slurm counts those of the last."""
    if not row.restarts:
        return row.seconds if row.seconds or row.state not in (*_QUEUED, "CANCELLED") else None
    return max(row.seconds, seconds_ran(mailbox_at(job.mailbox)) or 0.0)


def _span(text: str) -> float:
    """Return the seconds of `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return 0.0  # INVALID, of a job whose clock jumped
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return float(total + 86400 * int(days or 0))


def _code(text: str) -> int | None:
    """Return an exit code, negative for a signal, of a status of wait(2) or of `CODE:SIGNAL`; None: unknown."""
    with suppress(ValueError, OverflowError):
        if ":" in text:
            code, number = map(int, text.split(":"))
            return -number if number else code
        return os.waitstatus_to_exitcode(int(text))
    return None
