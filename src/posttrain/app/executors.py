"""Executors and flavours of a workspace: declares them, lists them, and proves their nodes with probe jobs.

A probe is a job of the agent that runs no stage: it reports Python, packages, accelerators, how long the store takes to
answer, and its clock. Without a server, nodes reach the store with a profile of their own; `plan` refuses a flavour
whose nodes have not been proven.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.app.workspace import Workspace, declared, refuse_unreachable, runs_with_jobs
from posttrain.domain.errors import (
    CapacityError,
    ConflictError,
    InfrastructureError,
    NotFoundError,
    PosttrainError,
    nearest,
)
from posttrain.domain.jobs import Accepted, Exists, JobOrder, JobState, Observation
from posttrain.domain.jobspec import RUN, STAGE, WORKSPACE, JobSpec
from posttrain.domain.lifecycle import is_final
from posttrain.domain.placement import Cluster, ExecutorSettings, Flavour
from posttrain.domain.runspec import read_yaml
from posttrain.domain.validation import validated
from posttrain.execution.agent import PROBE, PROBED
from posttrain.execution.ports import Executor, present_code
from posttrain.store.atomic import read_json, write_json
from posttrain.store.attempts import mailbox_at
from posttrain.store.mailbox import ORDER, REQUEST, Mailbox
from posttrain.store.staging import StagingArea
from posttrain.workspace.settings import CLUSTER, SETTINGS, settings_lock

_LOOK_SECONDS = 1.0  # between two looks at a probe
_PROBE_SECONDS = 600.0  # for which a probe may run
_SKEW_SECONDS = 30.0  # maximum difference of the clocks of a node and this machine
_SILENT_SECONDS = 60.0  # for which a probe may run without reaching the mailbox
_NO_ACCESS = (
    "give the nodes a profile that reaches the mailboxes and the store: for S3, ~/.aws of the jobs' user, a role of "
    "the machine, or a script as `python` that exports the variables"
)
_STEP = "doctor"  # label of probe jobs


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of one flavour's probe."""

    flavour: str
    executor: str
    trouble: str = ""  # why jobs cannot run there; empty: they can
    action: str = ""
    warning: str = ""  # what a job would miss there, if it needs it
    waited: float = 0.0  # seconds from the submission to the report
    skew: float = 0.0  # seconds that the node's clock is ahead of this machine's
    report: dict[str, Any] = field(default_factory=dict)  # node, python, accelerators, packages, seconds …
    proves: bool = True  # false: the probe still waits in the cluster's queue, so nothing is known of the nodes


def declare(workspace: Workspace, file: Path) -> Cluster:
    """Add the executors and flavours of a file to a workspace, where they replace those of the same names.

    Raises:
        InputError: the file is invalid, or jobs elsewhere could not reach this workspace.
        ConflictError: a live job would become invisible, because its executor would be reached in another way, or
            stages of submitted runs would move to another default flavour.
    """
    content = read_yaml(file)
    with settings_lock(workspace.root):
        settings = read_json(workspace.root / SETTINGS) or {}
        known = declared(settings, workspace.root / SETTINGS)
        joined = known.joined(validated(Cluster, _with_known(known, content), str(file)))
        declared({**settings, CLUSTER: joined.model_dump(mode="json", exclude_unset=True)}, file)
        refuse_unreachable(workspace.root, ", ".join(joined.executors), str(workspace.channel_address or ""))
        moved = {name for name, one in known.executors.items() if _reach(one) != _reach(joined.executors[name])}
        _refuse_invisible(workspace, moved, file)
        if joined.default != known.default and (held := list(runs_with_jobs(workspace))):
            raise ConflictError(
                f"{file}: default: must remain {known.default or 'unset'} while runs may start jobs "
                f"({', '.join(held)}), got {joined.default}; wait until they end, or posttrain stop {held[0]}"
            )
        write_json(workspace.root / SETTINGS, {**settings, CLUSTER: joined.model_dump(mode="json", exclude_unset=True)})
    return joined


def _refuse_invisible(workspace: Workspace, changed: set[str], file: Path) -> None:
    for project in workspace.ledger.projects() if changed else ():
        ledger = workspace.seen_by(workspace.actor, project, "os").ledger
        for run in ledger.runs():
            every = [one for one in ledger.attempts(run.id) if one.executor in changed]
            if live := [one for one in every if not is_final("attempt", one.state)]:
                raise ConflictError(
                    f"{file}: executor {live[0].executor} must keep its kind, command and address while it has jobs "
                    f"({live[0].name}), got others; wait, or declare it under another name"
                )


def _reach(one: ExecutorSettings) -> tuple[object, ...]:
    return one.kind, one.command, one.address


def _with_known(known: Cluster, value: Any) -> Any:
    """Return the content of a file, whose flavours may name executors that the workspace has."""
    named = {name: value.get(name, {}) for name in ("executors", "flavours")}
    if any(not isinstance(one, dict) for one in named.values()):
        return value
    dumped = known.model_dump(mode="json", exclude_unset=True)
    return {**value, **{name: {**dumped.get(name, {}), **one} for name, one in named.items()}}


def probes(workspace: Workspace, name: str | None, patience: float) -> Iterator[Probed]:
    """Submit a probe job to each flavour, and yield what it reports.

    Args:
        name: a flavour, or an executor with all its flavours; None: all.
        patience: seconds to wait for one report.

    Raises:
        NotFoundError: there is no such flavour or executor.
    """
    flavours = workspace.jobs.cluster.flavours
    for executor in workspace.jobs.others.values():
        with suppress(PosttrainError):  # a probe that was not proven to be over reports below why
            _end_earlier(workspace, executor)
    chosen = {one: flavour for one, flavour in flavours.items() if name in (None, one, flavour.executor)}
    if not chosen:
        if name is None:
            raise NotFoundError("this workspace has no flavours; declare some: posttrain executor add FILE")
        near = nearest(name, (*flavours, *workspace.jobs.cluster.executors))
        raise NotFoundError(f"there is no flavour or executor {name!r}{near}; posttrain executor ls shows them")
    for one, flavour in chosen.items():
        executor = workspace.jobs.others[flavour.executor]
        try:
            found = _probe(workspace, one, flavour, executor, patience)
        except (CapacityError, InfrastructureError) as error:  # which proves nothing about the nodes
            yield Probed(one, executor.name, str(error), "probe again when the cluster answers")
            continue
        except PosttrainError as error:
            found = Probed(one, executor.name, str(error))
        if found.proves:
            workspace.record_proof(one, succeeded=not found.trouble)
        yield found


def _probe(workspace: Workspace, name: str, flavour: Flavour, executor: Executor, patience: float) -> Probed:
    code = {one: present_code(one, workspace.jobs.trainers) for one in sorted(workspace.jobs.trainers)}
    spec = _spec(workspace, name, flavour)
    mailbox = mailbox_at(spec.mailbox)
    order = JobOrder(spec.name, _STEP, 0, {}, {}, workspace.blobs.url, "", epoch=1, code=code)
    mailbox.replace(ORDER, order.to_json())
    mailbox.once(REQUEST, spec.to_json())
    begun = time.time()
    try:
        answer = executor.submit(spec)
        seen, running = Observation(JobState.STARTING), 0.0
        if not isinstance(answer, Accepted | Exists):
            raise InfrastructureError(f"it is not known whether the probe was submitted: {answer.detail}")
        while True:
            before, report = time.time(), mailbox.document(PROBED)
            if report is not None:
                return _judged(name, flavour, code, report, begun, before)
            if seen.gone:
                return Probed(name, executor.name, _without_report(seen), _remedy(seen), waited=time.time() - begun)
            if seen.state is JobState.RUNNING and mailbox.started() is None:
                running = running or time.time()
                if time.time() - running > _SILENT_SECONDS:
                    why = (
                        f"node {seen.node}: the probe has run for {_SILENT_SECONDS:.0f} s without reaching the mailbox"
                    )
                    return Probed(name, executor.name, why, _NO_ACCESS, waited=time.time() - begun)
            if time.time() - begun > patience:
                why = seen.detail or f"its job is {seen.state}"
                action = "" if "it never starts" in why else "wait longer with --wait, or choose other nodes"
                said = f"no report within {patience:.0f} s: {why}"
                waits = seen.state is JobState.STARTING
                return Probed(name, executor.name, said, action, waited=patience, proves=not waits)
            time.sleep(_LOOK_SECONDS)
            with suppress(InfrastructureError):
                seen = executor.observe([spec])[0]
    finally:
        with suppress(PosttrainError):
            executor.kill(spec)
        with suppress(PosttrainError):
            _remove(workspace, spec, mailbox)


def _end_earlier(workspace: Workspace, executor: Executor) -> None:
    """End the probes of a doctor that was killed."""
    for job in executor.list(f"{_STEP}-"):
        if job.labels.get(WORKSPACE) == f"{workspace.place()}/{_STEP}":
            place = f"{job.labels[STAGE]}/{job.name.rpartition('-')[2]}"
            left = JobSpec(job.name, f"{workspace.channels}/{_STEP}/{place}", PROBE)
            executor.kill(left)
            _remove(workspace, left, mailbox_at(left.mailbox))


def _spec(workspace: Workspace, name: str, flavour: Flavour) -> JobSpec:
    token = uuid.uuid4().hex[:8]
    return JobSpec(
        f"{_STEP}-{name}-{token}",
        f"{workspace.channels}/{_STEP}/{name}/{token}",
        PROBE,
        gang=(flavour.gang(name, flavour.gpus_per_node, {}),),
        image=flavour.image or "",
        labels={WORKSPACE: f"{workspace.place()}/{_STEP}", RUN: _STEP, STAGE: name},  # not an orphan of the workspace
        epoch=1,
        options=flavour.options(),
        python=flavour.python or (),
        max_seconds=_PROBE_SECONDS,
        time_limit=flavour.time_limit,
    )


def _judged(
    name: str, flavour: Flavour, code: dict[str, str], report: dict[str, Any], begun: float, before: float
) -> Probed:
    """Compare a report with this machine and its flavour; it was written after `before` minus one look."""
    now, at = time.time(), float(report["at"])
    skew = at - min(max(at, before - 2 * _LOOK_SECONDS), now)
    seen, trouble, action, warning = len(report["accelerators"]), "", "", ""
    if seen < flavour.gpus_per_node:
        why = f" ({report['trouble']})" if report["trouble"] else ""
        warning = f"torch sees {seen} of the flavour's {flavour.gpus_per_node} GPUs of a node{why}"
    other = next((one for one in code if report["code"].get(one) != code[one]), None)
    if other is not None:
        mine, theirs = code[other][:19], str(report["code"].get(other))[:19]
        trouble = f"node {report['node']}: its {other} has the digest {theirs}…, but this machine's has {mine}…"
        action = "install the same packages on the nodes"
    elif abs(skew) > _SKEW_SECONDS:
        trouble = f"node {report['node']}: its clock differs by {skew:+.0f} s from this machine's"
        action = "set the clock of the node or of this machine, for example with NTP"
    return Probed(name, flavour.executor, trouble, action, warning, now - begun, skew, report)


def _without_report(seen: Observation) -> str:
    where = f"node {seen.node}: " if seen.node and "node " not in seen.why else ""
    return f"{where}the probe ended without a report ({seen.why})"


def _remedy(seen: Observation) -> str:
    return "" if "install Posttrain" in seen.why else _NO_ACCESS


def _remove(workspace: Workspace, spec: JobSpec, mailbox: Mailbox) -> None:
    mailbox.discard(ORDER, REQUEST, PROBED)
    area = StagingArea(workspace.blobs.url)
    for name, key, *_ in area.stored():
        if name == spec.name:
            area.drop(key)
