"""Entry points of jobs, and of programs that answer a waiting process (`execution.foreground`).

In addition to its work, every job reads the order, opens the store, catches errors, and writes its result last. A job
first claims the attempt's `start`: if another process has claimed it, or a tombstone exists, the job exits with
`ANOTHER_RUNS` and computes nothing. Otherwise the job writes a `result.json`, even after a failure, and then exits with
0; an exit without a result means that the process was lost. A failure is one line in the result and a full traceback in
the log. Nothing here imports torch: OpenMP reads its settings when torch is loaded, so they are set first. Then
`lazily` imports the job's body (`bodies`), the only deferred import.

A program that answers a waiting process reads one request and answers in lines.
"""

import ctypes
import errno
import gc
import io
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from resource import RUSAGE_SELF, getrusage
from typing import IO, Any, NoReturn, Self

from posttrain.domain.canonical import digest_bytes, digest_json
from posttrain.domain.errors import (
    BudgetExceededError,
    FailureClass,
    InfrastructureError,
    InputError,
    IntegrityError,
    JobFailedError,
    NotFoundError,
    PosttrainError,
    StoppedError,
    WorkspaceError,
    is_full,
    trace_in,
    worker_of,
)
from posttrain.domain.jobs import (
    ANOTHER_RUNS,
    NO_MEMORY,
    NO_SPACE,
    Fact,
    FactSink,
    Failure,
    JobOrder,
    JobResult,
    Metric,
    Note,
    Progress,
)
from posttrain.domain.manifest import job_identity
from posttrain.domain.ports import BlobStore, crashpoint
from posttrain.domain.roles import keys_of_servers
from posttrain.execution.environment import PACKAGES, pinned
from posttrain.execution.processes import identity
from posttrain.sandbox.port import RewardError
from posttrain.store.atomic import sync_folder, sync_tree
from posttrain.store.attempts import AttemptFolder, EventWriter, SpendingMeter
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.blobs import open_blobs
from posttrain.store.mailbox import ControlKind
from posttrain.store.trees import materialise

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_BROKEN = (errno.EROFS, errno.EIO)
# beginning of torch's message if torch does not raise OutOfMemoryError
_NO_ROOM = re.compile(
    r"(\[enforce fail at [^]]+\][^:]*)?DefaultCPUAllocator: |(CUDA|HIP|XPU|MPS)( error:| backend)? out of mem"
)
_MEMORY = ("torch", "ray", "vllm")
_PR_SET_PDEATHSIG = 1
_LINE_SECONDS = 10.0  # between two lines of progress in a job's log
_PRINTED = (  # metrics in a line
    *("loss", "reward/mean", "response_tokens/mean", "kl", "entropy", "grad_norm", "probe/accuracy", "probe/loss"),
)
Program = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Job:
    """The context of a job's body."""

    attempt: AttemptFolder
    order: JobOrder
    sink: FactSink
    flush: Callable[[], None]  # makes the facts reported so far durable
    blobs: BlobStore
    stopping: Callable[[], bool]  # whether a stop was requested, by an order or SIGTERM
    folder: Path
    meter: Callable[[int, int], None] = lambda spent, reserved: None  # tokens spent, and the next step's maximum
    deadline: float | None = None  # seconds since the epoch
    begun: float = 0.0  # processor seconds of the process before the order was read
    # secrets of rewards and keys of roles, which are not in the environment
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def input(self, slot: str) -> Path:
        """Return the local path of an input, fetched and verified.

        Raises:
            InputError: the order has no such slot.
            NotFoundError: the blob is missing.
            IntegrityError: the blob is corrupt.
        """
        if slot not in self.order.inputs:
            raise InputError(
                f"job {self.order.name} has no input {slot!r}, got {', '.join(sorted(self.order.inputs)) or 'none'}"
            )
        blob = self.order.inputs[slot]
        cache = Path(self.order.cache_dir)
        if blob.form == "tree":
            return materialise(self.blobs, blob.digest, cache)
        path = cache / "files" / blob.digest.removeprefix("sha256:")
        if not (path.is_file() and digest_bytes(path.read_bytes()) == blob.digest):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.blobs.fetch(blob.digest, path)
        return path

    def label(self, slot: str) -> str:
        """Return an input's name in errors: its reference, or its slot."""
        blob = self.order.inputs.get(slot)
        return blob.name if blob and blob.name else slot

    def tell_fallbacks(self, found: Mapping[str, str]) -> dict[str, float]:
        """Report the fall-backs of the models: for each, a warning and a metric `fallback/NAME` with the value 1.

        Returns:
            The metrics.
        """
        metrics = {f"fallback/{name}": 1.0 for name in found}
        for reason in found.values():
            self.sink(Note(reason, time.time(), "warning"))
        if metrics:
            self.sink(Metric(0, metrics, time.time()))
        return metrics

    def tell_start(self) -> None:
        """Print the processor time of the start; in a cold process it includes interpreter and environment check."""
        whole = time.process_time()
        print(f"start: {whole:.2f} s of processor time, {self.begun:.2f} s of it before the order was read")

    def fingerprint(self) -> str:
        """Return the digest of the job's identity (`domain.manifest`); a checkpoint with another digest is rejected."""
        order = self.order
        return digest_json(job_identity(order.kind, order.params, order.seed, order.inputs, order.image))


class Logged:
    """A fact sink that also prints progress to the job's log: the first step, a line every ten seconds, and the end.

    A line has the metrics of its step. A probe follows the progress of its step, so the next line shows it.
    """

    def __init__(self, sink: FactSink) -> None:
        self._sink, self._values = sink, dict[str, tuple[int, float]]()  # step and value, since the last line
        self._printed: Progress | None = None
        self._waiting: Progress | None = None  # the newest progress, if it was not printed
        self._again_at = 0.0

    def __call__(self, fact: Fact) -> None:
        """Pass the fact on, and print a line if one is due."""
        self._sink(fact)
        if isinstance(fact, Metric):
            self._values |= {name: (fact.step, fact.values[name]) for name in _PRINTED if name in fact.values}
        elif isinstance(fact, Progress):
            self._waiting = fact
            if time.monotonic() >= self._again_at:
                self._print(fact)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        newest = self._waiting or (self._printed if self._values else None)
        if newest is not None:
            self._print(newest)

    def _print(self, fact: Progress) -> None:
        before, self._printed, self._waiting = self._printed, fact, None
        self._again_at = time.monotonic() + _LINE_SECONDS
        with suppress(Exception):  # neither a full disk nor a strange value of a package ends the job here
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fact.at))
            words = [f"{stamp} {fact.phase} step {fact.step}/{fact.total}"]
            for name, (step, value) in self._values.items():
                if step == fact.step or name.startswith("probe/"):
                    words.append(f"{name} {value:.4g}" + (f" at step {step}" if step != fact.step else ""))
            if before is not None and fact.at > before.at:
                words.append(f"{(fact.tokens - before.tokens) / (fact.at - before.at):.0f} tokens/s")
            print("  ".join(words))
        self._values.clear()


Body = Callable[[Job], JobResult]


def run(attempt_dir: str, body: Body) -> int:
    """Run one job to its `result.json`.

    Returns:
        The exit code: 0 if there is a result, of any status; `ANOTHER_RUNS` if another process has the attempt or the
        attempt was cancelled; `NO_SPACE`, `NO_MEMORY` or 1 if no result could be written.
    """
    started, begun = time.time(), time.process_time()
    attempt = AttemptFolder(Path(attempt_dir), job=True)
    try:
        if attempt.read_result() is not None:
            return 0
        order = attempt.read_order()
        if not _begins(attempt, order):
            return ANOTHER_RUNS
        named = {name for blob in order.inputs.values() for name in blob.meta.get("secrets", ())}
        named |= keys_of_servers(order.params)
        secrets = {name: os.environ.pop(name) for name in sorted(named & os.environ.keys())}
        settle_environment(order.params.get("runtime", {}).get("threads", 1))
        crashpoint("job.start")
        facts = partial(EventWriter, phases=order.phase_seconds)
        with _sigterm_noted() as stopping, SpendingMeter(attempt) as meter, facts(attempt) as sink:
            allowed = order.seconds_allowance
            job = partial(
                Job,
                attempt=attempt,
                order=order,
                flush=sink.flush,
                stopping=lambda: stopping() or attempt.stop_requested(),
                folder=attempt.path,
                meter=meter,
                deadline=None if allowed is None else started + allowed,
                begun=begun,
                secrets=secrets,
            )

            def work() -> JobResult:
                _refuse_other_package(order)
                # through the server, or directly with the user's rights
                blobs = ServedBlobs(attempt.path) if order.served else open_blobs(order.store_url)
                with Logged(sink) as logged:
                    return body(job(sink=logged, blobs=blobs))

            result = _guarded(work)
        if attempt.outputs.is_dir():
            sync_tree(attempt.outputs)  # a durable result must not name outputs that a power cut can lose
            sync_folder(attempt.path)
        crashpoint("outputs.before_result")
        if result.status == "stopped":
            attempt.acknowledge(ControlKind.STOP)
        attempt.write_result(replace(result, seconds=time.time() - started))
        crashpoint("outputs.after_result")
    except (PosttrainError, OSError, MemoryError) as error:
        with suppress(OSError, MemoryError):  # the log is on the same disk
            traceback.print_exc()
            print(f"job {attempt_dir} could not write a result: {_one_line(error)}", file=sys.stderr)
        return {FailureClass.DISK_FULL: NO_SPACE, FailureClass.OUT_OF_MEMORY: NO_MEMORY}.get(_class_of(error), 1)
    return 0


def main(body: Body) -> NoReturn:
    """Run `python -m posttrain.jobs.… ATTEMPT_DIR`; after the result the process exits without finalising Python."""
    if len(sys.argv) != 2:
        print(f"usage: {Path(sys.argv[0]).stem} ATTEMPT_DIR, got {len(sys.argv) - 1} arguments", file=sys.stderr)
        raise SystemExit(2)
    code = run(sys.argv[1], body)
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def lazily(name: str) -> Callable[[Any], Any]:
    """Return a function that imports `module:Name` when it is called, after the environment is settled."""

    def call(given: Any) -> Any:
        with loading():
            found = resolve_name(name)
        return found(given)

    return call


def _begins(attempt: AttemptFolder, order: JobOrder) -> bool:
    """Return whether this process becomes the attempt's job; if not, the log names the process that is the job."""
    held = attempt.mailbox.start(order.epoch, identity(os.getpid()) or "")
    if held is None:
        return True
    why = (
        f"the attempt was cancelled: {held.cancelled}"
        if held.cancelled
        else f"process {held.pid} of {held.host} has it"
    )
    print(f"job {order.name} computes nothing: {why}", file=sys.stderr)
    return False


def settle_environment(threads: int) -> None:
    """Set the thread settings that torch reads once, when it is imported.

    On a busy machine, spin-waiting OpenMP threads are 9x slower (measured).
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # progress bars would fill the log
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # `posttrain logs` shows what a running job prints


@contextmanager
def loading() -> Iterator[None]:
    """Disable garbage collection while a job imports modules and opens models and data.

    These objects live until the job ends: collections would find nothing and take a tenth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def failure_of(error: BaseException) -> Failure:
    """Return the failure for an exception; the control side acts on the failure's class and on repeated signatures."""
    kind, message, where = _class_of(error), _one_line(error), _innermost(error)
    if kind is FailureClass.BUG and not isinstance(error, PosttrainError):
        message = f"{type(error).__name__} at {where}: {message}; see log.txt"
    worker = worker_of(error)
    return Failure(kind, f"{worker}: {message}" if worker else message, f"{type(error).__name__}@{where}")


def failed(error: Exception, tokens: int = 0) -> JobResult:
    """Return the result of a job that raised, and print the traceback to the log. Call it in the `except` block."""
    if isinstance(error, StoppedError):  # while it waited for another server
        return JobResult("stopped", tokens=tokens)
    traceback.print_exc()
    return JobResult(status="failed", tokens=tokens, failure=failure_of(error))


def _refuse_other_package(order: JobOrder) -> None:
    """Check that this package is in the attested environment, since PYTHONPATH does not reach jobs.

    Raises:
        InputError: the package is imported from another place.
    """
    attested = pinned(order.environment, Path(order.cache_dir)) if order.environment else None
    own = os.path.realpath(PACKAGES / "posttrain")
    if attested is not None and own not in attested.roots:
        raise InputError(
            f"the job imports posttrain from {own}, which its run did not attest, because PYTHONPATH does not reach "
            "jobs; install the package that posttrain is run from (pip install -e)"
        )


def _guarded(work: Callable[[], JobResult]) -> JobResult:
    try:
        return work()
    except Exception as error:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # the result needs the memory that the frames hold
        return failed(error)


def _class_of(error: BaseException) -> FailureClass:
    declared = getattr(error, "failure_class", None)
    if isinstance(declared, FailureClass):
        return declared
    if is_full(error):
        return FailureClass.DISK_FULL
    if isinstance(error, OSError) and error.errno in _BROKEN:
        return FailureClass.INFRASTRUCTURE
    trace = trace_in(str(error)) if type(error) is RuntimeError or _of_torch(error) else None
    if trace is not None and trace.kind is FailureClass.INFRASTRUCTURE:
        return trace.kind
    lacks = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    kind, library = type(error), type(error).__module__.partition(".")[0]
    said = (kind is RuntimeError or _of_torch(error)) and _NO_ROOM.match(str(error))
    if lacks or said or (kind.__name__ == "OutOfMemoryError" and library in _MEMORY):
        return FailureClass.OUT_OF_MEMORY
    classes: Mapping[type[BaseException], FailureClass] = {
        BudgetExceededError: FailureClass.BUDGET,
        NotFoundError: FailureClass.BAD_INPUT,
        InputError: FailureClass.BAD_INPUT,
        IntegrityError: FailureClass.BAD_INPUT,
        RewardError: FailureClass.BAD_INPUT,  # the user's own code
        JobFailedError: FailureClass.DIVERGED,  # the model's numbers are not finite
        WorkspaceError: FailureClass.INFRASTRUCTURE,
        InfrastructureError: FailureClass.INFRASTRUCTURE,
    }
    return next((kind for base, kind in classes.items() if isinstance(error, base)), FailureClass.BUG)


def _of_torch(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "torch"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"cannot write {error.filename or 'to the attempt folder'}: {error.strerror}; free space and retry"
    if isinstance(error, MemoryError):
        most = getrusage(RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
        return f"out of memory; its process used {most:.2f} GiB at most. {error}".removesuffix(". ")[:500]
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


def _innermost(error: BaseException) -> str:
    """Return `module:function` of the deepest frame: stable between attempts, unlike line numbers."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "nowhere"


@contextmanager
def _sigterm_noted() -> Iterator[Callable[[], bool]]:
    """Make SIGTERM a request to stop instead of a kill; yield a function that returns whether SIGTERM arrived."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(program: Program) -> None:
    """Answer the single request on standard input; end if the requesting process ends.

    All other output, including that of C libraries, goes to standard error.
    """
    _answer(json.load, program)


def converse(program: Callable[[tuple[Mapping[str, Any], IO[str]]], Iterator[Mapping[str, Any]]]) -> None:
    """Answer like `serve`, with a program that reads further lines of standard input itself after the request."""
    _answer(lambda asked: json.loads(asked.readline()), lambda request: program((request, sys.stdin)))


def _answer(read: Callable[[IO[str]], dict[str, Any]], program: Program) -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        request = read(sys.stdin)
        _die_with(int(request["asked_by"]))
        settle_environment(int(request.get("threads", 1)))
        try:
            for answer in program(request):
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
        except Exception as error:
            traceback.print_exc()
            code = error.exit_code if isinstance(error, PosttrainError) else JobFailedError.exit_code
            message = failure_of(error).message.removesuffix("; see log.txt")
            answers.write(json.dumps({"error": message, "exit_code": code}) + "\n")


def _die_with(parent: int) -> None:
    """Have the kernel send this process SIGKILL when the requesting process ends, however it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
