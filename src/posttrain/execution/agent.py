"""Runs one attempt's job on a node that shares no disk with its driver: `python -m posttrain.execution.agent MAILBOX`.

The executor starts the agent, which begins the attempt in its mailbox, fetches the inputs, and starts the job in a
scratch folder. As on a driver's machine, the job has a folder, a mailbox in it, and a store with its inputs. It needs
no key. The agent relays the mailbox, stages checkpoints as they are committed and outputs at the end,
and publishes the result last. The job dies with its agent; the node keeps nothing.

Environment:

    POSTTRAIN_INCARNATION   how often the executor restarted this job before; default 0
    POSTTRAIN_BOOTSTRAP     of a job of a server: the token with which the agent gets the job's token; see `Bootstrap`
    POSTTRAIN_SCRATCH       the folder for scratch folders; default: a folder of this user in the temporary folder
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from posttrain.domain.canonical import DIGEST_PREFIX, digest_bytes
from posttrain.domain.errors import (
    ConflictError,
    FailureClass,
    InfrastructureError,
    InputError,
    IntegrityError,
    NotFoundError,
    PosttrainError,
    WorkspaceError,
    is_full,
)
from posttrain.domain.jobs import ANOTHER_RUNS, GANG, NODE_FAILED, Failure, JobOrder, JobResult
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.ports import BlobStore
from posttrain.execution import processes
from posttrain.execution.executors.local.supervisor import Limit, command, job_environment, wait
from posttrain.execution.installed import Trainers
from posttrain.execution.machine import read_machine
from posttrain.execution.ports import called, present_code
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.atomic import make_folder, open_plain
from posttrain.store.attempts import AttemptFolder, mailbox_at, spending
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.blobs import ObjectBlobs, open_blobs
from posttrain.store.mailbox import EVENTS, ORDER, RAN, REQUEST, SAMPLES, ControlKind, Mailbox
from posttrain.store.mailboxes.served import ServedObjects
from posttrain.store.retries import Bootstrap, RefusedError
from posttrain.store.staging import PartObjects, ServedParts, StoredParts, Uploads, fetch_checkpoint, seconds_ran
from posttrain.store.trees import materialise, scratch

PROBE = "posttrain.execution.agent"  # the module of a job that reports what it finds on its node
PROBED = "probe.json"  # that report, in the mailbox
T = TypeVar("T")
_RAY = "ray"
_RELAY_SECONDS = 0.5  # between two looks at the job's mailbox
_LOOK_SECONDS = 2.0  # between two looks at the attempt's mailbox
_FENCE_SECONDS = 5.0  # between two checks that no later incarnation began
_OVERLAP_SECONDS = 8.0  # for which a new incarnation waits, so that an earlier one that still runs has ended itself
_LOG_SECONDS = 5.0  # after which unread output is relayed even if it is short
_LOG_BYTES = 256 << 10
_LOG_MOST = 1 << 30  # bytes of output that are relayed
_PIECE = 4 << 20
_PROBE_BYTES = 1 << 20
_SILENT_SECONDS = 600.0  # for which the store may be unreachable before the agent gives the job up
_SERVER_SECONDS = 5.0  # for which a request to the mailbox waits for a server; the next round tries again
_TERMINATED = 128 + signal.SIGTERM
_ENDING_SECONDS = 600.0  # a scheduler that sent SIGTERM kills the agent within this time


class Relay:
    """Copies between the job's mailbox, which is in its folder, and the attempt's.

    Attributes:
        spent: tokens that earlier incarnations spent beyond the checkpoint from which the job resumes.
        ran: seconds that earlier incarnations ran.
    """

    def __init__(self, attempt: AttemptFolder, outside: Mailbox, incarnation: int = 0) -> None:
        self.spent, self.ran, self._incarnation = 0, 0.0, incarnation
        self._attempt, self._inside, self._outside = attempt, attempt.mailbox, outside
        self._first = {stream: outside.last(stream) for stream in (EVENTS, SAMPLES)}  # of earlier incarnations
        self._sent = dict.fromkeys(self._first, 0)
        self._orders: list[tuple[int, int | None]] = []  # numbers of each order outside and inside; None: done before
        self._summary, self._meter = b"", b""
        self._done = set(outside.checkpoints())  # steps that are staged, or cannot be
        self._logged = self._begun = outside.log_end()
        self._written = self._started = time.monotonic()

    def up(self) -> None:
        """Copy facts, samples, progress, spending and acknowledgements of the job."""
        for stream, first in self._first.items():
            for number, data in self._inside.segments(stream, self._sent[stream], _pass_over):
                self._outside.append(stream, first + number, data)
                if stream == EVENTS:
                    self._outside.pack(stream, first + number)
                self._sent[stream] = number
        summary = self._inside.summary()
        if summary is not None and (said := repr(summary).encode()) != self._summary:
            tokens, segment = summary.tokens + self.spent, self._first[EVENTS] + summary.segment
            self._outside.summarise(replace(summary, tokens=tokens, segment=segment))
            self._summary = said
        meter = self._inside.metered()
        if meter != self._meter and (spent := spending(meter)) is not None:
            self._outside.replace_meter(spent + self.spent, self._incarnation)
            self._meter = meter
        for place, (outer, inner) in enumerate(self._orders):
            if inner is not None and self._inside.acknowledged(inner):
                self._outside.acknowledge(outer)
                self._orders[place] = (outer, None)

    def down(self) -> None:
        """Copy new orders to the job, and record how long it runs."""
        for control in self._outside.controls(self._orders[-1][0] if self._orders else 0):
            done = self._outside.acknowledged(control.number)
            self._orders.append((control.number, None if done else self._inside.order(control.kind)))
        self._outside.replace(RAN, {"seconds": self.ran + time.monotonic() - self._started})

    def log(self, *, whole: bool = False) -> None:
        """Copy output of the job: a piece that is long or has waited for some seconds.

        Args:
            whole: whether to copy all of it now.
        """
        late = whole or time.monotonic() - self._written >= _LOG_SECONDS
        with suppress(FileNotFoundError, IntegrityError), open_plain(self._attempt.log) as file:
            file.seek(self._logged - self._begun)
            while self._logged - self._begun < _LOG_MOST and (data := file.read(_PIECE)):
                if not late and len(data) < _LOG_BYTES:
                    return
                self._logged += self._outside.log(self._logged, data)
                self._written = time.monotonic()
                if self._logged - self._begun >= _LOG_MOST:
                    self._outside.log(self._logged, b"\n[the rest of the log is not relayed]\n")
                if not whole:  # the job's end, its orders and its limit wait for this call
                    return

    def newest(self) -> int | None:
        """Return the step of the job's newest checkpoint; None: it is staged, or cannot be, or there is none."""
        step = next(iter(self._attempt.checkpoint_steps()[-1:]), None)
        return None if step in self._done else step

    def stage(self, step: int, uploads: Uploads) -> None:
        """Stage a checkpoint if it is valid.

        Raises:
            PosttrainError, OSError: it was not staged, and may be staged later.
        """
        found = self._attempt.checkpoint(step)
        if found is not None:
            uploads.checkpoint(found.step, found.tokens, found.path)
        self._done.add(step)


def _pass_over(error: IntegrityError) -> None:
    print(f"agent: {error}", flush=True)


@dataclass(slots=True)
class Agent:
    """One incarnation of one attempt's job, on this node."""

    url: str  # of the mailbox
    incarnation: int
    scratch: Path
    bootstrap: str = field(default="", repr=False)  # of a server's job; empty: the node has keys of its own
    told: int = 0  # the signal that asked the agent to end
    lost: str = ""  # why the job was given up
    job: int = 0  # process of the job
    _token: str = field(default_factory=lambda: secrets.token_hex(8))  # identifies this incarnation's start
    _team: Bootstrap | None = None
    _folder: Path | None = None  # with the job's access to its server

    def run(self) -> int:
        """Run the job to its published result.

        Returns:
            The exit code: 0 if there is a result, `ANOTHER_RUNS` if the attempt has another job or has ended, that of
            the job if it wrote no result, negative for a signal.

        Raises:
            PosttrainError: the job cannot be started or its result cannot be published; nothing is published.
        """
        _refuse_shared(self.scratch)
        with scratch(self.scratch, "job-") as folder:
            outside = self._mailbox(folder)
            order, spec = self._insist(lambda: self._read(outside))
            before, process = self._insist(outside.started), processes.identity(os.getpid()) or ""
            held = self._insist(lambda: outside.start(order.epoch, process, self.incarnation, self._token))
            if held is not None:
                print(f"job {order.name} computes nothing: {held.cancelled or f'{held.host}:{held.pid} has it'}")
                return ANOTHER_RUNS
            if self._team is not None:
                self._team.settle(folder)
            if spec.module == PROBE:
                return self._probe(outside, order, folder)
            attempt = AttemptFolder(folder / "attempt", "")
            make_folder(attempt.path)
            over = threading.Event()
            fence = threading.Thread(target=self._fence, args=(outside, over), daemon=True)
            fence.start()
            with self._output(attempt.log), self._signals(attempt):
                try:
                    if before is not None:
                        over.wait(_OVERLAP_SECONDS)
                    return self._compute(outside, order, spec, attempt, folder)
                finally:
                    over.set()

    def _compute(self, outside: Mailbox, order: JobOrder, spec: JobSpec, attempt: AttemptFolder, folder: Path) -> int:
        parts = self._parts(folder, order)
        uploads = Uploads(parts, outside, self.incarnation, lambda: self.lost)
        relay = self._insist(lambda: Relay(attempt, outside, self.incarnation))
        try:
            try:
                _refuse_other_code(order)
                _refuse_lacking(spec)
                relay.spent, relay.ran = self._fetch(outside, order, attempt, folder, parts)
            except (InfrastructureError, ConflictError):  # no answer, or another job has the attempt
                raise
            except (PosttrainError, OSError) as error:  # this node is the reason
                refused = _failed(error)
                return self._insist(lambda: self._answer(outside, refused))
            code, over = self._supervise(spec, attempt, relay, uploads)
            return self._insist(lambda: self._publish(outside, attempt, relay, uploads, code, over))
        except PosttrainError as error:
            print(f"agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            raise
        finally:
            uploads.close()
            with suppress(PosttrainError):
                relay.log(whole=True)

    def _probe(self, outside: Mailbox, order: JobOrder, folder: Path) -> int:
        """Report what a job finds on this node: Python, packages, accelerators, and the store's answers."""
        facts, parts, data = read_machine(probe=True), self._parts(folder, order), os.urandom(_PROBE_BYTES)
        key = f"{self.incarnation}/{digest_bytes(data).removeprefix(DIGEST_PREFIX)}"
        answers = {
            "put": _seconds(lambda: parts.put(key, data)),
            "get": _seconds(lambda: parts.get(key)),
            "list": _seconds(outside.checkpoints),
        }
        names = (facts.gpus.torch_name,) * (facts.gpus.torch or 0)
        outside.replace(
            PROBED,
            {
                "node": facts.host, "python": facts.python, "accelerators": list(names), "seconds": answers,
                "packages": {name: one.version for name, one in facts.packages.items()},
                "code": {name: present_code(name, Trainers([NativeTrainer()])) for name in order.code},
                "trouble": facts.gpus.torch_trouble, "at": time.time(),
            },
        )  # fmt: skip
        return self._answer(outside, JobResult("succeeded"))

    def give_up(self, why: str) -> None:
        """End the job and publish nothing."""
        self.lost = self.lost or why
        if self.job:
            with suppress(ProcessLookupError):
                os.killpg(self.job, signal.SIGKILL)

    def turn(self, seconds: float) -> None:
        """Wait after an unanswered request; then use the next server of the team."""
        time.sleep(seconds)
        if self._team is not None and self._folder is not None:
            self._team.turn(self._folder)

    def _fence(self, outside: Mailbox, over: threading.Event) -> None:
        """Give the job up as soon as a later incarnation has begun, or the attempt has ended."""
        while not over.wait(_FENCE_SECONDS):
            try:
                held = outside.started()
                if held is not None and held.token != self._token:
                    self.give_up(held.cancelled or f"a later incarnation of the job began on {held.host}")
            except RefusedError as error:
                self.give_up(str(error))
            except PosttrainError:  # no answer is no reason
                continue

    def _mailbox(self, folder: Path) -> Mailbox:
        if not self.bootstrap:
            return mailbox_at(self.url)
        self._team, self._folder = Bootstrap.from_json(self.bootstrap), folder
        self._team.redeem(folder)
        return Mailbox(ServedObjects(folder, _SERVER_SECONDS))

    def _parts(self, folder: Path, order: JobOrder) -> PartObjects:
        if not self.bootstrap:
            return StoredParts(order.store_url, order.name)
        return ServedParts(folder, pause=self.turn)

    def _insist(self, ask: Callable[[], T], *, writes: bool = True) -> T:
        """Repeat what may be repeated until the store or the server answers, and has space.

        Args:
            writes: whether a full disk may be the store's; if not, it is this node's.

        Raises:
            ConflictError: the job was given up.
            InfrastructureError: there was no answer for ten minutes, or the attempt has another job.
        """
        until = time.monotonic() + _SILENT_SECONDS
        while True:
            if self.lost:
                raise ConflictError(self.lost)
            try:
                return ask()
            except RefusedError:
                raise
            except (InfrastructureError, WorkspaceError) as error:  # a full store gets space again
                if time.monotonic() >= until or (isinstance(error, WorkspaceError) and not writes):
                    raise
                self.turn(_LOOK_SECONDS)

    def _read(self, outside: Mailbox) -> tuple[JobOrder, JobSpec]:
        order, spec = outside.document(ORDER), outside.document(REQUEST)
        if order is None or spec is None:
            raise InputError(f"mailbox {outside.place} must contain {ORDER} and {REQUEST}; name an attempt's mailbox")
        return JobOrder.from_json(order), JobSpec.from_json(spec, self.url)

    def _fetch(
        self, outside: Mailbox, order: JobOrder, attempt: AttemptFolder, folder: Path, parts: PartObjects
    ) -> tuple[int, float]:
        """Fetch the inputs into a store and a cache of this job, and write the order that names them.

        Returns:
            The tokens that earlier incarnations spent beyond the checkpoint from which this one resumes, and the
            seconds that they ran. Its allowances are what is left.
        """
        own = open_blobs(folder / "blobs")
        blobs: BlobStore = ServedBlobs(folder, pause=self.turn) if self.bootstrap else open_blobs(order.store_url)
        cache = folder / "cache"
        make_folder(cache / "files")
        for blob in order.inputs.values():
            if blob.form == "tree":
                materialise(blobs, blob.digest, cache)
                own.put(blobs.get(blob.digest))
            else:
                blobs.fetch(blob.digest, cache / "files" / blob.digest.removeprefix(DIGEST_PREFIX))
        order = self._insist(lambda: self._resumed(outside, order, own, folder, parts), writes=False)
        if order.resume:
            source = blobs if not own.has(order.resume) else own
            materialise(source, order.resume, cache)
            own.put(source.get(order.resume))
        metered, ran = spending(self._insist(outside.metered)), seconds_ran(outside) or 0.0
        spent = max(0, (metered or 0) - order.tokens_inherited)
        left = None if order.token_allowance is None else order.token_allowance - spent
        seconds = None if order.seconds_allowance is None else order.seconds_allowance - ran
        order = replace(order, token_allowance=left, seconds_allowance=seconds)
        attempt.write_order(replace(order, store_url=own.url, cache_dir=str(cache), channel="", served=False))
        return spent, ran

    def _resumed(
        self, outside: Mailbox, order: JobOrder, own: ObjectBlobs, folder: Path, parts: PartObjects
    ) -> JobOrder:
        """Return the order with the newest checkpoint that an earlier incarnation staged, if there is one."""
        for step in reversed(outside.checkpoints()):
            try:
                digest, tokens = fetch_checkpoint(outside, step, parts, own, folder)
            except (InputError, IntegrityError, NotFoundError) as error:
                print(f"agent: the checkpoint of step {step} cannot be resumed from: {error}", flush=True)
                continue
            return replace(order, resume=digest, resumed_step=step, tokens_inherited=tokens)
        return order

    def _supervise(self, spec: JobSpec, attempt: AttemptFolder, relay: Relay, uploads: Uploads) -> tuple[int, bool]:
        """Start the job and relay until it ends; return its exit code (negative: a signal), and whether it was late."""
        log, begun = attempt.log.open("ab"), time.monotonic()
        named = {name: os.environ[name] for name in spec.secrets}
        own = {name: value for name, value in processes.of_a_server(os.environ).items() if not name.startswith("RAY_")}
        own |= named | (_gang() if len(spec.pods) > 1 else {GANG: ""})
        with log:
            job = subprocess.Popen(
                command(spec.module, attempt.path), cwd=attempt.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=job_environment(spec.environment, own), start_new_session=True,
                preexec_fn=partial(processes.die_with, os.getpid()),  # noqa: PLW1509 (two system calls)
            )  # fmt: skip
        self.job = job.pid
        if self.lost:
            self.give_up(self.lost)
        most = math.inf if spec.max_seconds is None else max(0.0, spec.max_seconds - relay.ran)
        limit, beat = Limit(most, spec.grace_seconds, begun, attempt.log), _Beat(self, relay, uploads)
        try:
            code = wait(job.pid, attempt.path / "result.json", beat, limit)
            return 1 if code == ANOTHER_RUNS else code, limit.over  # no job had this folder before
        finally:
            self.job = 0
            beat.close()

    def _publish(
        self, outside: Mailbox, attempt: AttemptFolder, relay: Relay, uploads: Uploads, code: int, over: bool
    ) -> int:
        """Stage what the job left, relay the rest, and publish its result; return the agent's exit code."""
        if (step := relay.newest()) is not None:
            relay.stage(step, uploads)
        relay.up()
        relay.down()
        try:
            result = attempt.read_result()
        except IntegrityError as error:
            result = _failed(error)
        if result is None and over:
            why = "the job has reached its maximum runtime and was ended"
            result = JobResult("failed", failure=Failure(FailureClass.BUDGET, why, "Overtime@agent"))
        if result is None:
            return code
        if result.status == "stopped" and self.told and not self._ordered(outside):
            print(f"the job has stopped after signal {self.told}; another incarnation continues it", flush=True)
            relay.log(whole=True)
            time.sleep(_ENDING_SECONDS)  # a scheduler requeues a job that it has killed, not one that ended by itself
            return _TERMINATED
        if result.status == "succeeded":
            try:
                result = replace(result, outputs=uploads.outputs(attempt, result.outputs))
            except (InputError, IntegrityError) as error:  # the job left something else than its result states
                result = _failed(error, result.tokens)
        relay.log(whole=True)
        return self._answer(outside, replace(result, tokens=result.tokens + relay.spent))

    def _answer(self, outside: Mailbox, result: JobResult) -> int:
        """Publish the job's result unless the attempt has another job; return the agent's exit code.

        Raises:
            ConflictError: a later incarnation has begun, or the attempt has ended.
        """
        held = outside.started()
        if self.lost or held is None or held.token != self._token:
            raise ConflictError(self.lost or "a later incarnation of the job has begun, or the attempt has ended")
        outside.answer(result.to_json())
        return 0

    def _ordered(self, outside: Mailbox) -> bool:
        return any(control.kind is ControlKind.STOP for control in outside.controls())

    @contextmanager
    def _signals(self, attempt: AttemptFolder) -> Iterator[None]:
        """Make SIGTERM, which schedulers send before they kill, a request to write a checkpoint and end."""

        def end(number: int, _: FrameType | None) -> None:
            self.told = number
            threading.Thread(target=attempt.request_stop).start()  # a signal handler may not write files

        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def _output(self, log: Path) -> Iterator[None]:
        """Write what the agent prints into the job's log."""
        kept = [os.dup(1), os.dup(2)]
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)


class _Beat:
    """What the agent does while the job runs: relays in the calling thread, and stages checkpoints beside it."""

    def __init__(self, agent: Agent, relay: Relay, uploads: Uploads) -> None:
        self._agent, self._relay, self._uploads = agent, relay, uploads
        self._due = dict.fromkeys((self._up, relay.down), 0.0)
        self._silent: float | None = None  # since when the store does not answer
        self._staging: threading.Thread | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        seconds = {self._up: _RELAY_SECONDS, self._relay.down: _LOOK_SECONDS}
        try:
            for act, due in self._due.items():
                if now >= due:
                    self._due[act] = now + seconds[act]
                    act()
                    if act == self._relay.down:  # which always writes; nothing new may be left to relay
                        self._silent = None
        except RefusedError as error:
            self._agent.give_up(str(error))
        except (InfrastructureError, WorkspaceError) as error:
            self._agent.turn(0.0)
            self._silent = now if self._silent is None else self._silent
            if now - self._silent > _SILENT_SECONDS:
                self._agent.give_up(f"the store has taken nothing for {_SILENT_SECONDS:g} s: {error}")
        except PosttrainError as error:  # another job of the attempt writes the mailbox
            self._agent.give_up(str(error))

    def close(self) -> None:
        """Wait for the checkpoint that is being staged."""
        if self._staging is not None:
            self._staging.join()

    def _up(self) -> None:
        self._relay.up()
        self._relay.log()
        step = self._relay.newest()
        if step is not None and (self._staging is None or not self._staging.is_alive()):
            self._staging = threading.Thread(target=self._stage, args=(step,))
            self._staging.start()

    def _stage(self, step: int) -> None:
        try:
            self._relay.stage(step, self._uploads)
        except (PosttrainError, OSError) as error:  # the job deleted it, or the store does not answer
            print(f"agent: the checkpoint of step {step} is not staged yet: {error}", flush=True)
            time.sleep(_LOOK_SECONDS)


def _gang() -> dict[str, str]:
    """Return the variables with which a job of several nodes finds the Ray cluster over them."""
    given = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN") if name in os.environ}
    return given | {GANG: os.environ.get("RAY_ADDRESS", "")}


def _seconds(ask: Callable[[], object]) -> float:
    begun = time.monotonic()
    ask()
    return time.monotonic() - begun


def _failed(error: Exception, tokens: int = 0) -> JobResult:
    """Return the result of a job that this node cannot compute, and print the traceback to the log."""
    traceback.print_exc()
    kind = FailureClass.DISK_FULL if is_full(error) else getattr(error, "failure_class", None) or FailureClass.BAD_INPUT
    message = " ".join(str(error).split())[:500]
    return JobResult("failed", tokens=tokens, failure=Failure(kind, message, f"{type(error).__name__}@agent"))


def _refuse_shared(folder: Path) -> None:
    """Refuse a scratch folder that another user of the node can replace.

    Raises:
        InputError: the folder is another user's, or others may write it.
    """
    make_folder(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InputError(f"{folder}: must be a folder that only this user can write; change POSTTRAIN_SCRATCH")


def _refuse_other_code(order: JobOrder) -> None:
    """Compare the code that decides results with the driver's.

    Raises:
        InputError: this node has another Posttrain, other libraries, or another platform.
    """
    trainers = Trainers([NativeTrainer()])
    for name, wanted in order.code.items():
        found = present_code(name, trainers)
        if found != wanted:
            raise InputError(
                f"node {os.uname().nodename}: its {called(name)} and libraries have the digest {found[:19]}…, but the "
                f"run was locked with {wanted[:19]}…; install the same packages on the node, or submit the run again"
            )


def _refuse_lacking(spec: JobSpec) -> None:
    """Check that this node has the values of the secrets in a spec.

    Raises:
        InputError: a secret is not set.
    """
    if lacking := [name for name in spec.secrets if name not in os.environ]:
        raise InputError(
            f"node {os.uname().nodename}: job {spec.name} needs {', '.join(lacking)} in the environment of its agent; "
            "set it there"
        )


def main() -> None:
    """Run the attempt of the mailbox that the command line names, or Ray: `agent ray WORDS`."""
    if sys.argv[1:2] == [_RAY]:  # the ranks of a gang inherit its environment, so it has no key of this node
        kept = processes.of_a_server(os.environ) | {n: one for n, one in os.environ.items() if n.startswith("RAY_")}
        os.execve(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", *sys.argv[2:]], kept)
    processes.close_to_others()  # the environment may have the keys of the store
    if len(sys.argv) != 2:
        print(f"usage: agent MAILBOX, got {len(sys.argv) - 1} arguments", file=sys.stderr)
        raise SystemExit(2)
    own = Path(tempfile.gettempdir(), f"posttrain-{os.getuid()}")
    place = Path(os.environ.get("POSTTRAIN_SCRATCH") or own)
    bootstrap = os.environ.pop("POSTTRAIN_BOOTSTRAP", "")
    agent = Agent(sys.argv[1], int(os.environ.get("POSTTRAIN_INCARNATION") or 0), place, bootstrap)
    try:
        code = agent.run()
    except PosttrainError as error:
        print(f"error: {error}", file=sys.stderr)
        passes = isinstance(error, InfrastructureError) and not isinstance(error, RefusedError)
        raise SystemExit(NODE_FAILED if passes else error.exit_code) from error
    if code < 0:  # the scheduler sees how the job ended
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
