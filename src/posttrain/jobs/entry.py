"""Entry points of jobs, and of programs that answer a process which waits (`execution.foreground`).

Around its work every job reads the order, opens the store, catches what goes wrong, and answers last. A job's first act
is the attempt's `start`: where another process has that, or a tombstone is there, it exits with `ANOTHER_RUNS` and
computes nothing. Else it answers with a `result.json`, for failures too, and then exits 0; an exit without an answer
means that the process was lost. A failure is one line in the answer and a full traceback in the log. Nothing here
imports torch: OpenMP reads its settings when torch is loaded, so they are set first. Then `lazily` imports what the job
does (`bodies`), the one place where an import waits.

A program that answers a waiting process reads the question and answers in lines.
"""

import ctypes
import errno
import gc
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
from typing import Any, NoReturn

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
    WorkspaceError,
    is_full,
    worker_of,
)
from posttrain.domain.jobs import (
    ANOTHER_RUNS,
    NO_MEMORY,
    NO_SPACE,
    FactSink,
    Failure,
    JobOrder,
    JobResult,
    Metric,
    Note,
)
from posttrain.domain.manifest import job_identity
from posttrain.domain.ports import BlobStore, crashpoint
from posttrain.execution.environment import PACKAGES, pinned
from posttrain.execution.processes import identity
from posttrain.sandbox.port import RewardError
from posttrain.store.atomic import sync_folder, sync_tree
from posttrain.store.attempts import AttemptFolder, EventWriter, SpendingMeter
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.blobs import open_blobs
from posttrain.store.channel import ControlKind
from posttrain.store.trees import materialise

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_BROKEN = (errno.EROFS, errno.EIO)
# as torch begins it, where it raises no OutOfMemoryError
_NO_ROOM = re.compile(
    r"(\[enforce fail at [^]]+\][^:]*)?DefaultCPUAllocator: |(CUDA|HIP|XPU|MPS)( error:| backend)? out of mem"
)
_MEMORY = ("torch", "ray", "vllm")
_PR_SET_PDEATHSIG = 1
Program = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Job:
    """What a job's body works with."""

    attempt: AttemptFolder
    order: JobOrder
    sink: FactSink
    flush: Callable[[], None]  # makes the facts said so far durable
    blobs: BlobStore
    stopping: Callable[[], bool]  # somebody asked for a stop, by an order or SIGTERM
    folder: Path
    meter: Callable[[int, int], None] = lambda spent, reserved: None  # tokens spent, and what the next step may cost
    deadline: float | None = None  # seconds since the epoch
    begun: float = 0.0  # processor seconds that its process had taken when its order was read
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # of its rewards; no longer in its environment

    def input(self, slot: str) -> Path:
        """The local path of an input, fetched and verified.

        Raises:
            InputError: the order has no such slot.
            NotFoundError, IntegrityError: the blob is gone or corrupt.
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
        """How errors call an input: its reference, or its slot."""
        blob = self.order.inputs.get(slot)
        return blob.name if blob and blob.name else slot

    def tell_fallbacks(self, found: Mapping[str, str]) -> dict[str, float]:
        """Say which slower ways the models must go: a warning each, and a metric `fallback/NAME` of 1.

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
        """Say in the log what the way to the first step cost; of a cold process interpreter and comparison included."""
        whole = time.process_time()
        print(f"start: {whole:.2f} s of processor time, {self.begun:.2f} s of it before the order was read")

    def fingerprint(self) -> str:
        """Digest of what decides this job's result (`domain.manifest`): a checkpoint of another job is refused."""
        order = self.order
        return digest_json(job_identity(order.kind, order.params, order.seed, order.inputs, order.image))


Body = Callable[[Job], JobResult]


def run(attempt_dir: str, body: Body) -> int:
    """Run one job to its `result.json`.

    Returns:
        The exit code: 0 once there is a result, whatever it says; `ANOTHER_RUNS` where the attempt is another's or
        was cancelled; `NO_SPACE`, `NO_MEMORY` or 1 when nothing could be written.
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
                sink=sink,
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
                # its server, or with its user's own rights the store
                return body(job(blobs=ServedBlobs(attempt.path) if order.served else open_blobs(order.store_url)))

            result = _guarded(work)
        if attempt.outputs.is_dir():
            sync_tree(attempt.outputs)  # a result that survives a power cut must not name outputs that did not
            sync_folder(attempt.path)
        crashpoint("outputs.before_result")
        if result.status == "stopped":
            attempt.acknowledge(ControlKind.STOP)
        attempt.write_result(replace(result, seconds=time.time() - started))
        crashpoint("outputs.after_result")
    except (PosttrainError, OSError, MemoryError) as error:
        with suppress(OSError, MemoryError):  # the log lies on the same disk
            traceback.print_exc()
            print(f"job {attempt_dir} could not leave a result: {_one_line(error)}", file=sys.stderr)
        return {FailureClass.DISK_FULL: NO_SPACE, FailureClass.OUT_OF_MEMORY: NO_MEMORY}.get(_class_of(error), 1)
    return 0


def main(body: Body) -> NoReturn:
    """`python -m posttrain.jobs.… ATTEMPT_DIR`. Nothing is left to do after the result, so Python is not taken down."""
    if len(sys.argv) != 2:
        print(f"usage: {Path(sys.argv[0]).stem} ATTEMPT_DIR, got {len(sys.argv) - 1} arguments", file=sys.stderr)
        raise SystemExit(2)
    code = run(sys.argv[1], body)
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def lazily(name: str) -> Callable[[Any], Any]:
    """What `module:Name` names, imported when it is called: by then the environment is settled."""

    def call(given: Any) -> Any:
        with loading():
            found = resolve_name(name)
        return found(given)

    return call


def _begins(attempt: AttemptFolder, order: JobOrder) -> bool:
    """Whether this process is the attempt's job, from now on; else the log says who is."""
    held = attempt.channel.start(order.epoch, identity(os.getpid()) or "")
    if held is None:
        return True
    why = (
        f"the attempt was given up: {held.cancelled}" if held.cancelled else f"process {held.pid} of {held.host} has it"
    )
    print(f"job {order.name} computes nothing: {why}", file=sys.stderr)
    return False


def settle_environment(threads: int) -> None:
    """Thread settings that torch reads once, when it is imported.

    A spinning OpenMP costs 9x on a busy machine (measured).
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # they would fill the log


@contextmanager
def loading() -> Iterator[None]:
    """Nothing is collected while a job imports and opens what it works with.

    That stays until the job ends: looking through it again and again finds nothing and takes a tenth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def failure_of(error: BaseException) -> Failure:
    """Classify an exception: what happens next depends on the class, and on whether the same signature comes twice."""
    kind, message, where = _class_of(error), _one_line(error), _innermost(error)
    if kind is FailureClass.BUG and not isinstance(error, PosttrainError):
        message = f"{type(error).__name__} at {where}: {message}; see log.txt"
    worker = worker_of(error)
    return Failure(kind, f"{worker}: {message}" if worker else message, f"{type(error).__name__}@{where}")


def failed(error: Exception, tokens: int = 0) -> JobResult:
    """The answer of a job that raised; the traceback goes to the log. Call it inside the `except` block."""
    traceback.print_exc()
    return JobResult(status="failed", tokens=tokens, failure=failure_of(error))


def _refuse_other_package(order: JobOrder) -> None:
    """Hold this package against the environment that was attested: what a launcher found by PYTHONPATH, a job does not.

    Raises:
        InputError: it comes from elsewhere.
    """
    attested = pinned(order.environment, Path(order.cache_dir)) if order.environment else None
    own = os.path.realpath(PACKAGES / "posttrain")
    if attested is not None and own not in attested.roots:
        raise InputError(
            f"the job imports posttrain from {own}, which is not what its run attested, for PYTHONPATH does not reach "
            "jobs; install the package that posttrain is run from (pip install -e), then retry"
        )


def _guarded(work: Callable[[], JobResult]) -> JobResult:
    try:
        return work()
    except Exception as error:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # what they hold is needed for the answer
        return failed(error)


def _class_of(error: BaseException) -> FailureClass:
    declared = getattr(error, "failure_class", None)
    if isinstance(declared, FailureClass):
        return declared
    if is_full(error):
        return FailureClass.DISK_FULL
    if isinstance(error, OSError) and error.errno in _BROKEN:
        return FailureClass.INFRASTRUCTURE
    lacks = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    kind, library = type(error), type(error).__module__.partition(".")[0]
    said = (kind is RuntimeError or library == "torch") and _NO_ROOM.match(str(error))
    if lacks or said or (kind.__name__ == "OutOfMemoryError" and library in _MEMORY):
        return FailureClass.OUT_OF_MEMORY
    classes: Mapping[type[BaseException], FailureClass] = {
        BudgetExceededError: FailureClass.BUDGET,
        NotFoundError: FailureClass.BAD_INPUT,
        InputError: FailureClass.BAD_INPUT,
        IntegrityError: FailureClass.BAD_INPUT,
        RewardError: FailureClass.BAD_INPUT,  # the user's own code
        JobFailedError: FailureClass.DIVERGED,  # the model's numbers are no numbers
        WorkspaceError: FailureClass.INFRASTRUCTURE,
        InfrastructureError: FailureClass.INFRASTRUCTURE,
    }
    return next((kind for base, kind in classes.items() if isinstance(error, base)), FailureClass.BUG)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"cannot write {error.filename or 'to the attempt folder'}: {error.strerror}; free space and retry"
    if isinstance(error, MemoryError):
        most = getrusage(RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
        return f"out of memory; its process held {most:.2f} GiB at most. {error}".removesuffix(". ")[:500]
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


def _innermost(error: BaseException) -> str:
    """`module:function` of the deepest frame: stable between attempts, unlike line numbers of changing sources."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "nowhere"


@contextmanager
def _sigterm_noted() -> Iterator[Callable[[], bool]]:
    """SIGTERM asks for a stop instead of killing; yields whether it came."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(program: Program) -> None:
    """Answer the one question on standard input, and die with whoever asked.

    Whatever else is printed, by C libraries too, goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
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
    """SIGKILL for this process when the one that asked ends, however it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
