"""Runs one attempt's job on a node that shares no disk with its driver: `python -m posttrain.execution.agent MAILBOX`.

The executor starts the agent, which begins the attempt in its mailbox, fetches the inputs, and starts the job in a
scratch folder. The job finds what it finds on a driver's machine: a folder, a mailbox in it, and a store with its
inputs. It needs no key. The agent relays the mailbox, stages checkpoints as they are committed and outputs at the end,
and publishes the result last. The job dies with its agent; the node keeps nothing.

Environment:

    POSTTRAIN_INCARNATION   how often the executor restarted this job before; default 0
    POSTTRAIN_BOOTSTRAP     of a job of a server: the token with which the agent gets the job's token; see `Bootstrap`
    POSTTRAIN_SCRATCH       the folder for scratch folders; default: a folder of this user in the temporary folder
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import (
    ConflictError,
    FailureClass,
    InfrastructureError,
    InputError,
    IntegrityError,
    PosttrainError,
    is_full,
)
from posttrain.domain.jobs import ANOTHER_RUNS, Failure, InputBlob, JobOrder, JobResult
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.ports import BlobStore
from posttrain.execution import processes
from posttrain.execution.code import called, present_code
from posttrain.execution.executors.local.supervisor import Limit, command, job_environment, wait
from posttrain.execution.trainers.installed import Trainers
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.atomic import make_folder, open_plain
from posttrain.store.attempts import AttemptFolder, mailbox_at
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.blobs import open_blobs
from posttrain.store.mailbox import EVENTS, ORDER, REQUEST, SAMPLES, ControlKind, Mailbox, Start
from posttrain.store.mailboxes.served import ServedObjects
from posttrain.store.retries import Bootstrap, RefusedError
from posttrain.store.staging import PartObjects, ServedParts, StoredParts, Uploads
from posttrain.store.trees import materialise, scratch

T = TypeVar("T")
_RELAY_SECONDS = 0.5  # between two looks at the job's mailbox
_LOOK_SECONDS = 2.0  # between two looks at the attempt's mailbox
_FENCE_SECONDS = 15.0  # between two checks that no later incarnation began
_LOG_SECONDS = 5.0  # after which unread output is relayed even if it is short
_LOG_BYTES = 256 << 10
_PIECE = 4 << 20
_SILENT_SECONDS = 600.0  # for which the store may be unreachable before the agent gives the job up
_SERVER_SECONDS = 5.0  # for which a request to the mailbox waits for a server; the next round tries again
_TERMINATED = 128 + signal.SIGTERM
_ENDING_SECONDS = 600.0  # a scheduler that sent SIGTERM kills the agent within this time


class Relay:
    """Copies between the job's mailbox, which is in its folder, and the attempt's."""

    def __init__(self, attempt: AttemptFolder, outside: Mailbox, mine: str) -> None:
        self._attempt, self._inside, self._outside, self._mine = attempt, attempt.mailbox, outside, mine
        self._first = {stream: outside.last(stream) for stream in (EVENTS, SAMPLES)}  # of earlier incarnations
        self._sent = dict.fromkeys(self._first, 0)
        self._orders: list[int] = []  # numbers of the attempt's orders, as the job numbers them
        self._acknowledged, self._summary, self._meter = 0, b"", b""
        self._staged = set(outside.checkpoints())
        self._logged = self._begun = outside.log_end()
        self._written = time.monotonic()

    def up(self) -> None:
        """Copy facts, samples, progress, spending and acknowledgements of the job."""
        for stream, first in self._first.items():
            for number, data in self._inside.segments(stream, self._sent[stream]):
                self._outside.append(stream, first + number, data)
                if stream == EVENTS:
                    self._outside.pack(stream, first + number)
                self._sent[stream] = number
        summary = self._inside.summary()
        if summary is not None and (said := repr(summary).encode()) != self._summary:
            self._outside.summarise(replace(summary, segment=self._first[EVENTS] + summary.segment))
            self._summary = said
        meter = self._inside.metered()
        if meter != self._meter:
            self._outside.meter(meter)
            self._meter = meter
        for number in self._orders[self._acknowledged :]:
            if not self._inside.acknowledged(self._orders.index(number) + 1):
                break
            self._outside.acknowledge(number)
            self._acknowledged += 1

    def down(self) -> None:
        """Copy new orders to the job."""
        for control in self._outside.controls(self._orders[-1] if self._orders else 0):
            self._inside.order(control.kind)
            self._orders.append(control.number)

    def log(self, *, whole: bool = False) -> None:
        """Copy output of the job: much of it at once, or what has waited for some seconds.

        Args:
            whole: whether to copy all of it now.
        """
        late = whole or time.monotonic() - self._written >= _LOG_SECONDS
        with suppress(FileNotFoundError, IntegrityError), open_plain(self._attempt.log) as file:
            file.seek(self._logged - self._begun)
            while (data := file.read(_PIECE)) and (late or len(data) >= _LOG_BYTES):
                self._outside.log(self._logged, data)
                self._logged += len(data)
                self._written = time.monotonic()

    def fenced(self) -> Start | None:
        """Return the later start or tombstone that ends this incarnation; None: it may go on."""
        held = self._outside.started()
        return None if held is None or held.token == self._mine else held

    def checkpoints(self) -> Iterator[tuple[int, int, Path]]:
        """Yield step, tokens and folder of the job's newest committed checkpoint, once."""
        for step in self._attempt.checkpoint_steps()[-1:]:
            found = None if step in self._staged else self._attempt.checkpoint(step)
            if found is not None:
                self._staged.add(step)
                yield found.step, found.tokens, found.path


@dataclass(slots=True)
class Agent:
    """One incarnation of one attempt's job, on this node."""

    url: str  # of the mailbox
    incarnation: int
    scratch: Path
    bootstrap: str = field(default="", repr=False)  # of a server's job; empty: the node has keys of its own
    told: int = 0  # the signal that asked the agent to end
    lost: str = ""  # why the job was given up
    _team: Bootstrap | None = None
    _folder: Path | None = None  # with the job's access to its server

    def run(self) -> int:
        """Run the job to its published result.

        Returns:
            The exit code: 0 if there is a result, `ANOTHER_RUNS` if the attempt has another job or has ended, that of
            the job if it wrote no result.

        Raises:
            PosttrainError: the job cannot be started or its result cannot be published; nothing is published.
        """
        with scratch(self.scratch, "job-") as folder:
            outside = self._mailbox(folder)
            order, spec = self._insist(lambda: self._read(outside))
            process = processes.identity(os.getpid()) or ""
            held = self._insist(lambda: outside.start(order.epoch, process, self.incarnation))
            if held is not None:
                print(f"job {order.name} computes nothing: {held.cancelled or f'{held.host}:{held.pid} has it'}")
                return ANOTHER_RUNS
            mine = outside.started()
            attempt = AttemptFolder(folder / "attempt", "")
            make_folder(attempt.path)
            uploads = Uploads(self._parts(folder, order), outside, self.incarnation)
            relay = Relay(attempt, outside, mine.token if mine else "")
            with self._output(attempt.log), self._signals(attempt):
                try:
                    if not self._fetched(outside, order, attempt, folder):
                        return 0
                    code = self._supervise(spec, attempt, relay, uploads)
                    if self.lost:
                        raise ConflictError(self.lost)
                    return self._insist(lambda: self._publish(outside, attempt, relay, uploads, code))
                except PosttrainError as error:
                    print(f"agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    raise
                finally:
                    uploads.close()
                    with suppress(PosttrainError):
                        relay.log(whole=True)

    def _mailbox(self, folder: Path) -> Mailbox:
        if not self.bootstrap:
            return mailbox_at(self.url)
        self._team = Bootstrap.from_json(self.bootstrap)
        self._team.redeem(folder)
        self._folder = folder
        return Mailbox(ServedObjects(folder, _SERVER_SECONDS))

    def _parts(self, folder: Path, order: JobOrder) -> PartObjects:
        if not self.bootstrap:
            return StoredParts(order.store_url, order.name)
        return ServedParts(folder, pause=self.turn)

    def turn(self, seconds: float) -> None:
        """Wait after an unanswered request; then use the next server of the team."""
        time.sleep(seconds)
        if self._team is not None and self._folder is not None:
            self._team.turn(self._folder)

    def _insist(self, ask: Callable[[], T]) -> T:
        """Repeat what may be repeated until the store or the server answers.

        Raises:
            InfrastructureError: there was no answer for ten minutes, or the attempt has another job.
        """
        until = time.monotonic() + _SILENT_SECONDS
        while True:
            try:
                return ask()
            except RefusedError:
                raise
            except InfrastructureError:
                if time.monotonic() >= until:
                    raise
                self.turn(_LOOK_SECONDS)

    def _read(self, outside: Mailbox) -> tuple[JobOrder, JobSpec]:
        order, spec = outside.document(ORDER), outside.document(REQUEST)
        if order is None or spec is None:
            raise InputError(f"mailbox {outside.place} must contain {ORDER} and {REQUEST}; name an attempt's mailbox")
        return JobOrder.from_json(order), JobSpec.from_json(spec, self.url)

    def _fetched(self, outside: Mailbox, order: JobOrder, attempt: AttemptFolder, folder: Path) -> bool:
        """Return whether the job can start; if this node is the reason that it cannot, publish the failed result."""
        try:
            self._fetch(order, attempt, folder)
            return True
        except InfrastructureError:
            raise
        except (PosttrainError, OSError) as error:
            outside.answer(_failed(error).to_json())
            return False

    def _fetch(self, order: JobOrder, attempt: AttemptFolder, folder: Path) -> None:
        """Fetch the inputs into a store and a cache of this job, and write the order that names them."""
        _refuse_other_code(order)
        own = open_blobs(folder / "blobs")
        blobs: BlobStore = ServedBlobs(folder, pause=self.turn) if self.bootstrap else open_blobs(order.store_url)
        cache = folder / "cache"
        make_folder(cache / "files")
        resumed = [InputBlob(order.resume, "tree")] if order.resume else []
        for blob in (*order.inputs.values(), *resumed):
            if blob.form == "tree":
                materialise(blobs, blob.digest, cache)
                own.put(blobs.get(blob.digest))
            else:
                blobs.fetch(blob.digest, cache / "files" / blob.digest.removeprefix(DIGEST_PREFIX))
        attempt.write_order(replace(order, store_url=own.url, cache_dir=str(cache), channel="", served=False))

    def _supervise(self, spec: JobSpec, attempt: AttemptFolder, relay: Relay, uploads: Uploads) -> int:
        """Start the job and relay until it ends; return its exit code, negative for a signal."""
        log, begun = attempt.log.open("ab"), time.monotonic()
        named = {name: os.environ[name] for name in spec.secrets if name in os.environ}
        own = processes.of_a_server(os.environ) | named
        with log:
            job = subprocess.Popen(
                command(spec.module, attempt.path), cwd=attempt.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=job_environment(spec.environment, own), start_new_session=True,
                preexec_fn=processes.die_with_parent,  # noqa: PLW1509 (one system call)
            )  # fmt: skip
        most = math.inf if spec.max_seconds is None else spec.max_seconds
        limit = Limit(most, spec.grace_seconds, begun, attempt.log)
        beat = _Beat(self, relay, uploads, job.pid)
        try:
            return wait(job.pid, attempt.path / "result.json", beat, limit)
        finally:
            beat.close()

    def _publish(self, outside: Mailbox, attempt: AttemptFolder, relay: Relay, uploads: Uploads, code: int) -> int:
        """Stage what the job left, relay the rest, and publish its result; return the agent's exit code."""
        for step, tokens, folder in relay.checkpoints():
            uploads.checkpoint(step, tokens, folder)
        relay.up()
        result = attempt.read_result()
        if result is None:
            return code if code >= 0 else 128 - code
        if result.status == "stopped" and self.told and not self._ordered(outside):
            print(f"the job has stopped after signal {self.told}; another incarnation continues it", flush=True)
            relay.log(whole=True)
            time.sleep(_ENDING_SECONDS)  # a scheduler requeues a job that it has killed, not one that ended by itself
            return _TERMINATED
        if result.status == "succeeded":
            try:
                uploads.outputs(attempt, result.outputs)
            except (InputError, IntegrityError) as error:  # the job left something else than its result states
                result = _failed(error, result.tokens)
        relay.log(whole=True)
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

    def __init__(self, agent: Agent, relay: Relay, uploads: Uploads, job: int) -> None:
        self._agent, self._relay, self._uploads, self._job = agent, relay, uploads, job
        self._due = dict.fromkeys((self._up, self._down, self._fence), 0.0)
        self._silent: float | None = None  # since when the store does not answer
        self._staging: threading.Thread | None = None
        self._failed: Exception | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        seconds = {self._up: _RELAY_SECONDS, self._down: _LOOK_SECONDS, self._fence: _FENCE_SECONDS}
        try:
            for act, due in self._due.items():
                if now >= due:
                    self._due[act] = now + seconds[act]
                    act()
            self._silent = None
        except RefusedError as error:
            self._give_up(str(error))
        except InfrastructureError as error:
            self._agent.turn(0.0)
            self._silent = now if self._silent is None else self._silent
            if now - self._silent > _SILENT_SECONDS:
                self._give_up(f"the store has not answered for {_SILENT_SECONDS:g} s: {error}")
        except PosttrainError as error:  # another job of the attempt writes the mailbox, or the job damaged its own
            self._give_up(str(error))

    def close(self) -> None:
        """Wait for the checkpoint that is being staged."""
        if self._staging is not None:
            self._staging.join()

    def _up(self) -> None:
        self._relay.up()
        self._relay.log()
        if self._staging is None or not self._staging.is_alive():
            for found in self._relay.checkpoints():
                self._staging = threading.Thread(target=self._stage, args=found)
                self._staging.start()

    def _down(self) -> None:
        self._relay.down()

    def _fence(self) -> None:
        held = self._relay.fenced()
        if held is not None:
            self._give_up(held.cancelled or f"a later incarnation of the job began on {held.host}")

    def _stage(self, step: int, tokens: int, folder: Path) -> None:
        try:
            self._uploads.checkpoint(step, tokens, folder)
        except (PosttrainError, OSError) as error:  # the job dropped it meanwhile, or the store does not answer
            print(f"agent: the checkpoint of step {step} is not staged: {error}", flush=True)

    def _give_up(self, why: str) -> None:
        self._agent.lost = self._agent.lost or why
        with suppress(ProcessLookupError):
            os.killpg(self._job, signal.SIGKILL)


def _failed(error: Exception, tokens: int = 0) -> JobResult:
    """Return the result of a job that this node cannot compute, and print the traceback to the log."""
    traceback.print_exc()
    kind = FailureClass.DISK_FULL if is_full(error) else getattr(error, "failure_class", None) or FailureClass.BAD_INPUT
    message = " ".join(str(error).split())[:500]
    return JobResult("failed", tokens=tokens, failure=Failure(kind, message, f"{type(error).__name__}@agent"))


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


def main() -> None:
    """Run the attempt of the mailbox that the command line names."""
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
        raise SystemExit(error.exit_code) from error
    raise SystemExit(code)


if __name__ == "__main__":
    main()
