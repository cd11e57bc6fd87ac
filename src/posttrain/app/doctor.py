"""Checks of `doctor`: whether this machine and the workspace, with its server, database and store, are ready.

Each check has a finding and a remedy. This module does not import the engine: versions come from package metadata, and
torch and Ray are queried in another process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import metadata
from pathlib import Path

from posttrain._version import __version__
from posttrain.app.workspace import Workspace, find_workspace
from posttrain.client.logins import logged_in
from posttrain.client.transport import Transport
from posttrain.control.attempts import end_orphans, find_orphans
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.engines import GROUPS, OWN_ENGINES
from posttrain.domain.errors import InfrastructureError, PosttrainError, WorkspaceError
from posttrain.domain.ids import PROJECT_VARIABLE, SERVER_VARIABLE
from posttrain.domain.kinds import CONTROL, KINDS, OWN
from posttrain.domain.plugins import EXECUTORS, TRAINERS, all_plugins
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.machine import ask_ray, local_devices, read_machine
from posttrain.execution.ports import Executor
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.preflight.cluster_checks import Check, check_ray, cluster_checks
from posttrain.preflight.confinement import confinement
from posttrain.store.audit import verify_rows
from posttrain.store.ledger import FAILING, PAUSED, ledger_counts
from posttrain.store.sealer import Lost, verify_chain
from posttrain.workspace.background import DriverKind, RunDriver, run_driver
from posttrain.workspace.served import is_served, served_at
from posttrain.workspace.settings import OWN_EXECUTORS, OpenWorkspace

_APART = 60.0  # seconds; a larger difference between two clocks is reported
_LATE = 300.0  # seconds that a run may wait for a driver, and an event to be sealed
_PROBE = digest_bytes(b"is anybody there?")
_ENGINE = ("torch", "transformers", "safetensors")
_LOW_DISK, _NO_DISK = 5 * 2**30, 2**28  # bytes of free space below which the check warns or fails
_FSYNCS = 15
_SLOW_FSYNC = 0.05  # seconds; a stage makes about twenty ledger commits
_RUNS_LOOKED_AT = 50


def remote_checks(url: str) -> Iterator[Check]:
    """Check whether a server answers; check its version, readiness and clock, and the token's principal."""
    try:
        reply = Transport(url, "").look("/readyz")
    except PosttrainError as error:
        yield Check("server", "fail", str(error), f"check {SERVER_VARIABLE} and the network, or unset it")
        return
    version = reply.headers.get("posttrain-version", "")
    if not version:
        yield Check("server", "fail", f"{url} answers, but is not a Posttrain server", f"correct {SERVER_VARIABLE}")
        return
    other = version != __version__
    remedy = f"this command is Posttrain {__version__}; upgrade the older of the two" if other else ""
    yield Check("server", "warn" if other else "ok", f"{url} answers, Posttrain {version}", remedy)
    ready = reply.status == 200
    said = "it drives every run" if ready else reply.body.decode("utf-8", "replace")[:200]
    yield Check(
        "ready", "ok" if ready else "fail", said, "" if ready else "ask its administrator; the reason is in its log"
    )
    yield from _clock(reply.headers.get("date", ""))
    yield _token(url)


def _clock(said: str) -> Iterator[Check]:
    try:
        apart = time.time() - parsedate_to_datetime(said).timestamp()
    except ValueError:
        return
    bad = abs(apart) > _APART
    which = "ahead of" if apart > 0 else "behind"
    finding = f"{abs(apart):.0f} s {which} the server's" if bad else "as the server's"
    yield Check("clock", "warn" if bad else "ok", finding, "set the clock, because displayed times are wrong" * bad)


def _token(url: str) -> Check:
    try:
        control = logged_in(url, os.environ.get(PROJECT_VARIABLE, ""))
        found = control.whoami()
        control.close()
    except PosttrainError as error:
        return Check("token", "fail", str(error), f"posttrain login {url}")
    if found.role is None:
        remedy = f"ask an admin of {found.project} for a role"
        return Check("token", "fail", f"{found.principal} has no role in {found.project}", remedy)
    return Check("token", "ok", f"{found.principal}, {found.role} of {found.project}")


def server_checks(root: Path) -> Iterator[Check]:
    """Check whether the server of a served workspace answers and drives runs; check its version."""
    if not is_served(root):
        return
    place = served_at(root)
    if place is None:
        finding = "the server is starting, or could not record its address"
        yield Check("server", "warn", finding, "read the server's log")
        return
    try:
        reply = Transport(place.url, "").look("/readyz")
    except PosttrainError as error:
        remedy = "read the server's log; if the server hangs, kill it; its jobs continue"
        yield Check("server", "fail", str(error), remedy)
        return
    version = reply.headers.get("posttrain-version", "")
    other = version != __version__
    remedy = f"this command is Posttrain {__version__}; upgrade the older of the two" if other else ""
    yield Check("server", "warn" if other else "ok", f"{place.url} answers, Posttrain {version or '?'}", remedy)
    if reply.status == 200:
        yield Check("driver", "ok", "the server drives every run")
    else:
        why = json.loads(reply.body).get("status", "")
        yield Check("driver", "fail", f"{why}", "read the lines of posttrain.driver in the server's log")


def standing_checks(workspace: OpenWorkspace) -> Iterator[Check]:
    """Check the queue, the sinks and the store of a workspace, which may be served or not."""
    try:
        now = ledger_counts(workspace.ledger.database, workspace.ledger.clock)
    except PosttrainError as error:
        yield Check("queue", "fail", str(error), "check the database")
    else:
        late = now.oldest_due > _LATE or now.oldest_unsealed > _LATE
        waits = f", the first for {now.oldest_due:.0f} s" if now.oldest_due else ""
        said = (
            f"objects that wait for a driver: {now.due}{waits}; in progress: {now.leased}; unsealed events: "
            f"{now.unsealed}"
        )
        remedy = "posttrain ls shows which runs have a driver" if late else ""
        yield Check("queue", "warn" if late else "ok", said, remedy)
        states = [state for one in now.sinks.values() for state in one.states.items()]
        bad = sum(number for state, number in states if state in (FAILING, PAUSED))
        if states:
            said = f"sinks that deliver: {sum(number for _, number in states) - bad}; that fail or are paused: {bad}"
            yield Check("sinks", "warn" if bad else "ok", said, "posttrain sink ls" if bad else "")
    began = time.perf_counter()
    try:
        workspace.blobs.has(_PROBE)
    except PosttrainError as error:
        yield Check("store", "fail", str(error), "check the store; runs wait for it")
    else:
        took = (time.perf_counter() - began) * 1000
        yield Check("store", "ok", f"{workspace.blobs.url} answers in {took:.0f} ms")


def examine(*, probe: bool = False, ray: str = "", end: bool = False, accept: str | None = None) -> list[Check]:
    """Run every check: first those of the machine, then those of the environment's server or else of the workspace.

    Args:
        probe: also start the engine in another process to query GPUs, which takes seconds.
        ray: address of a running Ray cluster; the check whether it accepts this machine takes seconds.
        end: also end the workspace's jobs that no live attempt owns.
        accept: the reason why the loss of part of the ledger is accepted.
    """
    facts = read_machine(probe=probe)
    checks = [_python(), _processors(), _threads(), _engine(), *cluster_checks(facts)]
    if ray:
        checks.append(check_ray(ray, facts, ask_ray(ray) if "ray" in facts.packages else None))
    checks += [*_device_locks(), _rewards(), _packages()]
    if url := os.environ.get(SERVER_VARIABLE, "").rstrip("/"):
        return [*checks, *remote_checks(url)]
    try:
        root = find_workspace()
        checks += server_checks(root)
        workspace = Workspace(root)
    except WorkspaceError as error:
        missing = "no workspace" in str(error) or "is not a workspace" in str(error)
        remedy = "posttrain init" if missing else "repair it as the message describes"
        return [*checks, Check("workspace", "warn" if missing else "fail", str(error), remedy)]
    try:
        accepted = Lost(0) if accept is None else workspace.accept_loss(accept)
        checks += [Check("workspace", "ok", str(workspace.root)), _disk(workspace.root), _fsync(workspace.root)]
        checks += [
            _guarded("ledger", lambda: _ledger(workspace)),
            _guarded("log heads", lambda: _heads(workspace, accepted)),
            *(_guarded("jobs", partial(_orphans, workspace, one, end)) for one in workspace.jobs.executors),
            *_images(workspace),
            *standing_checks(workspace),
            *_runs(workspace),
        ]
    finally:
        workspace.close()
    return checks


def _images(workspace: Workspace) -> Iterator[Check]:
    """Check whether jobs can run in images, if the workspace's executor is podman."""
    executor = workspace.jobs.executor
    if isinstance(executor, LocalExecutor) and executor.images:
        why = executor.trouble()
        remedy = "runs that name an image are rejected" if why else ""
        yield Check("images", "fail" if why else "ok", why or "podman runs jobs in images", remedy)


def _python() -> Check:
    where = f"{platform.system()} {platform.release()} ({platform.machine()})"
    return Check("python", "ok", f"{platform.python_version()} on {where}")


def _processors() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    busy = load > usable
    return Check(
        "processors",
        "warn" if busy else "ok",
        f"{usable} usable, load {load:.1f}",
        "the machine is busy: runs and benchmarks take longer" if busy else "",
    )


def _threads() -> Check:
    shown = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ}
    finding = ", ".join(f"{name}={value}" for name, value in shown.items()) or "not set here"
    return Check("OpenMP", "ok", f"{finding}; every job sets its own (runtime.threads, passive waiting)")


def _engine() -> Check:
    versions, missing = [], []
    for name in _ENGINE:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("engine", "fail", f"not installed: {', '.join(missing)}", "pip install posttrain")
    return Check("engine", "ok", ", ".join(versions))


def _device_locks() -> Iterator[Check]:
    """Check which processes hold the devices that jobs use; no check without devices."""
    try:
        room = LocalExecutor(None, local_devices).capacity()
    except PosttrainError as error:
        yield Check("device locks", "fail", str(error), "jobs that need a device will not start")
        return
    if room.devices:
        held = "".join(f"; {name} is held by {who}" for name, who in room.held.items())
        yield Check("device locks", "ok", f"{room.devices - len(room.held)} of {room.devices} free{held}")


def _rewards() -> Check:
    """Check whether the kernel supports the confinement of rewards."""
    try:
        found = confinement()
    except PosttrainError as error:
        return Check("rewards", "fail", str(error), "see python -m posttrain.sandbox.probe")
    if found.whole:
        return Check("rewards", "ok", "confined: a separate root, no network, no other processes")
    remedy = "allow user namespaces, or trust your rewards: posttrain init --rewards trusted"
    return Check("rewards", "warn", "; ".join(found.notes), remedy)


def _packages() -> Check:
    """List what installed packages add, without importing the packages."""
    found, troubles = all_plugins(
        {TRAINERS: {NativeTrainer.name, CONTROL}, KINDS: OWN, EXECUTORS: OWN_EXECUTORS}
        | {GROUPS[field]: own for field, own in OWN_ENGINES.items()}
    )
    if troubles:
        return Check("packages", "warn", "; ".join(troubles), "the rest of Posttrain is not affected")
    return Check("packages", "ok", "; ".join(map(str, found)) or "no package extends Posttrain")


def _disk(root: Path) -> Check:
    free = shutil.disk_usage(root).free
    state = "fail" if free < _NO_DISK else "warn" if free < _LOW_DISK else "ok"
    return Check("disk", state, f"{free / 2**30:.1f} GiB free", "" if state == "ok" else "free some space")


def _fsync(root: Path) -> Check:
    """Check the median time until a small write is on the disk; every ledger commit waits for such a write."""
    times = []
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-") as file:
            for _ in range(_FSYNCS):
                started = time.perf_counter()
                file.write(b"x" * 512)
                file.flush()
                os.fsync(file.fileno())
                times.append(time.perf_counter() - started)
    except OSError as error:
        return Check("fsync", "fail", f"cannot write: {error.strerror}", "make the workspace writable, or free space")
    middle = statistics.median(times)
    slow = middle > _SLOW_FSYNC
    remedy = "the disk is slow; put the workspace on a local disk" if slow else ""
    return Check("fsync", "warn" if slow else "ok", f"{middle * 1000:.1f} ms", remedy)


def _ledger(workspace: Workspace) -> Check:
    chain = verify_chain(workspace.ledger)
    database, unsafe = workspace.ledger.database.product()
    where = f"{database} at {workspace.ledger_address}" if workspace.ledger_address else database
    rows = verify_rows(workspace.ledger)
    said = (
        f"{where}: {chain.sealed} events, the event log is intact, {chain.pending} events are not sealed yet, "
        f"{rows} rows match"
    )
    if unsafe:
        remedy = f"a power failure can lose commits; turn {unsafe} on in the database server"
        return Check("ledger", "warn", f"{said}; {unsafe} off", remedy)
    return Check("ledger", "ok", said)


def _heads(workspace: Workspace, accepted: Lost) -> Check:
    """Check whether the ledger contains every head of the event log that is stored outside the ledger."""
    lost = workspace.lost()
    found = [*accepted.lines(), *lost.lines()]
    if not found and not lost.kept:
        workspace.seal()  # a new or restored ledger has no head yet
        if not workspace.lost().kept:
            said = (
                "no head of the event log is stored in the artifact store, so the loss of the newest events would not "
                "be detected"
            )
            return Check("log heads", "warn", said, "make the artifact store writable")
    if not found:
        return Check("log heads", "ok", "the ledger continues every head that is stored outside it")
    said, _, remedy = found[0].partition("; ")
    said = "; ".join([said, *(line.partition("; ")[0] for line in found[1:])])
    return Check("log heads", "ok", f"accepted: {said}") if accepted else Check("log heads", "fail", said, remedy)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except PosttrainError as error:
        return Check(name, "fail", str(error), "restore the workspace from a copy")


def _orphans(workspace: Workspace, executor: Executor, end: bool) -> Check:
    """Check for jobs of an executor that no live attempt owns."""
    check = "jobs" if executor is workspace.jobs.executor else f"jobs of {executor.name}"
    try:
        ended = end_orphans(workspace.ledger, workspace.jobs, executor) if end else []
        found = find_orphans(workspace.ledger, workspace.jobs, executor)
    except InfrastructureError as error:
        return Check(check, "fail", str(error), "fix this; until then, no job starts")
    names = [", ".join(job.name for job in jobs) for jobs in (found.ours, found.strangers)]
    told = [f"running, but no attempt owns them: {names[0]}"] if found.ours else []
    if found.strangers:
        told.append(f"owned by another workspace, or by this one before it was moved: {names[1]}")
    if told:
        ways = ["posttrain doctor --end-orphans"] if found.ours else []
        ways += ["run posttrain doctor in that workspace, or end these processes"] if found.strangers else []
        return Check(check, "warn", "; ".join([*ended, *told]), "; ".join(ways))
    return Check(check, "ok", "; ".join(ended) or "no orphaned processes")


def _runs(workspace: Workspace) -> Iterator[Check]:
    """Check which driver drives which runs, which runs have no driver, and which runs are unreadable."""
    idle, at_work = [], defaultdict(list)
    now = workspace.ledger.clock.now()
    for run in workspace.ledger.runs(limit=_RUNS_LOOKED_AT):
        manifest, trouble = workspace.manifest_or_trouble(run)
        if manifest is None:
            remedy = "restore the workspace from a copy, or submit the run again"
            yield Check("run", "fail", f"{run.id}: {trouble}", remedy)
        driver = run_driver(workspace.root, run, now)
        if driver is not None and driver.kind is DriverKind.NONE:
            idle.append((run.id, driver))
        elif driver is not None:
            at_work[driver].append(run.id)
    said = [
        f"{driver} drives {', '.join(runs)}" + (f"; its log: {driver.log}" if driver.log else "")
        for driver, runs in at_work.items()
    ]
    yield Check("drivers", "ok", "; ".join(said) or "no driver is active")
    if aside := workspace.reconciler.queue.rows(dead=True):
        names = ", ".join(one.object for one in aside)
        yield Check("set aside", "warn", f"failed repeatedly: {names}", "posttrain dead")
    if idle:
        found = f"no driver drives {', '.join(_undriven(run_id, driver) for run_id, driver in idle)}"
        yield Check("runs", "warn", found, f"posttrain attach {idle[0][0]}")
    else:
        yield Check("runs", "ok", "no run waits for a driver")


def _undriven(run_id: str, driver: RunDriver) -> str:
    if driver.trouble:
        return f"{run_id} (its background driver gave the run up: {driver.trouble}; log: {driver.log})"
    return f"{run_id} (its background driver has ended or is suspended; log: {driver.log})" if driver.log else run_id
