"""The attempt folder, its claim by a supervisor, and the facts and spending that a job writes into it.

The folder contains everything that a job receives, reports and produces. Both sides of the process boundary use it:

::

    ATTEMPT_DIR/
        job.json            JobOrder, written before the launch
        request.json        JobSpec, written once and submitted as written, by any process
        start.json events/ samples/ summary.json controls/ result.json     the attempt's mailbox: see `store.mailbox`
        checkpoints/step-00000120/   COMMIT is written last: every reader ignores a folder without it
        outputs/            the job's outputs
        meter               tokens spent and tokens that the current step may spend, rewritten in place
        spec.json supervisor.json exit.json log.txt      files of the local executor
        cache/ seccomp.json                              files of a job in an image

This module does not import the database, and it imports an object store only if the mailboxes of the workspace are in
an object store.

Files that supervisors rely on are written before an attempt is claimed, never after: `with unclaimed(folder) as free:`.
Such files are hidden from a container by other files that are mounted over them, and a replaced file would no longer be
hidden. The writer therefore holds `supervisor.lock`; a supervisor holds this lock from before its claim until its job
ends.

On its side of the mailbox, the job buffers facts and writes them as segments. It writes the tokens that it has spent
immediately, as one line in a separate file.
"""

import functools
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.jobs import (
    PHASE_SECONDS,
    CheckpointCommit,
    Fact,
    JobOrder,
    JobResult,
    Note,
    Output,
    Progress,
    Sample,
    Span,
    count,
    fact_from_json,
    fact_to_json,
)
from posttrain.domain.ports import BlobStore
from posttrain.store.atomic import (
    ANSWER,
    LINE,
    its_doing,
    look_over,
    make_folder,
    open_plain,
    read_json,
    read_untrusted,
    taken,
    write_json,
)
from posttrain.store.mailbox import EVENTS, METER, SAMPLES, ControlKind, Mailbox, Summary, refuse
from posttrain.store.mailboxes.folder import FolderObjects
from posttrain.store.trees import file_digest, put_tree

TAIL = 64 << 10  # bytes at the end of a log that are searched for known failures
_METER_BYTES = 64  # two numbers
_DIGITS = 16  # digits of a step's number
LOCK, CLAIM = "supervisor.lock", "supervisor.json"
_SECONDS = 60.0  # wait for a supervisor that has the lock; the supervisor claims the folder immediately, or ends


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in the artifact store."""

    digest: str  # of its tree
    step: int
    tokens: int  # spent up to the checkpoint, by its list of files; `state.json` in it decides


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A checkpoint whose shards match its COMMIT."""

    path: Path
    step: int
    tokens: int  # spent up to the checkpoint, including resumed attempts (from `state.json`; 0 without that file)


class AttemptFolder:
    """One attempt's folder at `path`. The constructor does not access the folder.

    Args:
        channel: URL of the mailbox, from the ledger; empty: the folder itself; None: the URL in the order, which the
            job may have rewritten, so only jobs pass None.
        job: whether the caller is the attempt's job; a job that a server launched has no key to the store.
    """

    def __init__(self, path: Path, channel: str | None = None, *, job: bool = False) -> None:
        self.path, self._channel, self._job = Path(path), channel, job
        self.events = self.path / "events"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.outputs = self.path / "outputs"
        self.log = self.path / "log.txt"

    @functools.cached_property
    def mailbox(self) -> Mailbox:
        """The attempt's mailbox, which is in the folder unless the channel or the order contains a URL.

        Raises:
            InputError: a mailbox at this URL cannot be opened.
        """
        url, order = self._channel, None
        if url is None:
            with suppress(IntegrityError):  # `read_order` reports the error
                order = read_json(self.path / "job.json")
            url = str(order.get("channel", "")) if isinstance(order, Mapping) else ""
        if url and self._job and isinstance(order, Mapping) and order.get("served"):
            from posttrain.store.mailboxes.served import ServedObjects  # imported only if needed, because it loads HTTP

            return Mailbox(ServedObjects(self.path))
        return mailbox_at(url or self.path.absolute().as_uri())

    def tail(self) -> str:
        """Return the end of the job's output."""
        with suppress(FileNotFoundError, IntegrityError), open_plain(self.log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read(TAIL).decode("utf-8", "replace")
        return ""

    def write_order(self, order: JobOrder) -> None:
        """Create the folder and write its `job.json`.

        Raises:
            WorkspaceError: the disk is full or read-only.
        """
        make_folder(self.path)
        write_json(self.path / "job.json", order.to_json())

    def has_order(self) -> bool:
        """Return whether `job.json` was written."""
        return (self.path / "job.json").exists()

    def read_order(self) -> JobOrder:
        """Return the order.

        Raises:
            NotFoundError: there is no `job.json`.
            IntegrityError: the file cannot be read.
        """
        raw = read_json(self.path / "job.json")
        if raw is None:
            raise NotFoundError(f"there is no job.json in {self.path}; name an attempt folder")
        return self._order_of(raw)

    def _order_of(self, raw: Any) -> JobOrder:
        try:
            return JobOrder.from_json(raw)
        except (KeyError, TypeError, AttributeError) as error:
            raise _unreadable(self.path / "job.json", error) from error

    def request_stop(self) -> None:
        """Request that the job write a checkpoint and end; a repeated request has no effect."""
        if self._reachable() and not self.stop_requested():
            self.mailbox.order(ControlKind.STOP)

    def stop_requested(self) -> bool:
        """Return whether a stop of the job was requested."""
        return any(control.kind is ControlKind.STOP for control in self.mailbox.controls())

    def request_checkpoint(self) -> None:
        """Request one more checkpoint from the job."""
        if self._reachable():
            self.mailbox.order(ControlKind.CHECKPOINT)

    def _reachable(self) -> bool:
        """Return whether the mailbox may have a reader: an order must not create the folder of a removed workspace."""
        return bool(self._channel) or self.path.is_dir()

    def checkpoints_requested(self) -> int:
        """Return the number of checkpoints requested so far; a job that has written fewer writes a checkpoint."""
        return sum(control.kind is ControlKind.CHECKPOINT for control in self.mailbox.controls())

    def acknowledge(self, kind: ControlKind, count: int | None = None) -> None:
        """Record that the job has carried out the first `count` orders of this kind; None: all orders so far."""
        for control in [one for one in self.mailbox.controls() if one.kind is kind][:count]:
            self.mailbox.acknowledge(control.number)

    def write_result(self, result: JobResult) -> None:
        """Write the job's result, as its last action.

        Raises:
            WorkspaceError: the disk is full or read-only; there is then no result.
            ConflictError: another job of this attempt has already written a result.
        """
        self.mailbox.answer(result.to_json())

    def read_result(self) -> JobResult | None:
        """Return the job's result, as the job reported it; None while there is no result.

        Raises:
            IntegrityError: the file cannot be read.
        """
        raw = self.mailbox.answered()
        if raw is None:  # a job that rejects its environment writes this file, without importing mailbox code
            with suppress(FileNotFoundError):
                raw = _json_of(self.path / "result.json", ANSWER)
        if raw is None:
            return None
        try:
            return JobResult.from_json(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(self.path / "result.json", error) from error

    def facts(
        self, after_segment: int = 0, unreadable: Callable[[IntegrityError], None] = refuse
    ) -> tuple[list[Fact], int]:
        """Return the facts of the segments after `after_segment`, in reported order, and the last segment's number.

        Args:
            unreadable: called for a segment that cannot be read, which is then skipped; the default raises.

        Raises:
            IntegrityError: a segment cannot be read.
        """
        return self._said(EVENTS, after_segment, unreadable)

    def recorded_samples(self, unreadable: Callable[[IntegrityError], None] = refuse) -> list[Sample]:
        """Return the recorded samples, in the order of the reports; empty if no sample was recorded.

        Args:
            unreadable: see `facts`.

        Raises:
            IntegrityError: a segment cannot be read.
        """
        said, _ = self._said(SAMPLES, 0, unreadable)
        return [fact for fact in said if isinstance(fact, Sample)]

    def some_samples(self, segments: int) -> list[Sample]:
        """Return the recorded samples of at most `segments` segments, evenly spaced from the first to the last.

        The records of a job of a million steps do not fit in memory, so only as many are read as a person can inspect.
        Segments that cannot be read are skipped.
        """
        found = self.mailbox.numbers(SAMPLES)
        if len(found) > segments:
            found = [found[place * (len(found) - 1) // max(1, segments - 1)] for place in range(segments)]
        said: list[Fact] = []
        for number in found:
            with suppress(IntegrityError):
                said += _facts(self.mailbox.segment(SAMPLES, number), f"{self.samples}/{number}")
        return [fact for fact in said if isinstance(fact, Sample)]

    def last_progress(self) -> Progress | None:
        """Return the newest `Progress` that the job reported.

        Raises:
            IntegrityError: a segment cannot be read.
        """
        for data in self.mailbox.backwards(EVENTS):
            for fact in reversed(_facts(data, str(self.events))):
                if isinstance(fact, Progress):
                    return fact
        return None

    def metered(self) -> int | None:
        """Return the maximum tokens that the lineage can have spent, from the job's last record; None without a record.

        Raises:
            IntegrityError: the meter is not a plain file.
        """
        try:
            return spending(read_untrusted(self.path / METER, _METER_BYTES))
        except FileNotFoundError:
            return None

    def spent(self) -> int:
        """Return the maximum tokens that the lineage can have spent, from the running job's records.

        The call is cheap and never raises; a record that cannot be read counts as absent.
        """
        metered = None
        with suppress(IntegrityError):
            metered = self.metered()
        said = self.mailbox.summary()
        return max(metered or 0, said.tokens if said else 0)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of folders with a COMMIT, oldest first; shards are not verified."""
        names = sorted(path.parent.name.removeprefix("step-") for path in self.checkpoints.glob("step-*/COMMIT"))
        return [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < _DIGITS]

    def checkpoint(self, step: int) -> CommittedCheckpoint | None:
        """Return the checkpoint of a step; None if it is not valid."""
        folder = self.checkpoints / f"step-{step:08d}"
        commit = _verified_commit(folder)
        if commit is None:
            return None
        try:
            state = _json_of(folder / "state.json", ANSWER) if "state.json" in commit.shards else {}
            return CommittedCheckpoint(folder, commit.step, count(state.get("tokens", 0)))
        except (FileNotFoundError, IntegrityError, TypeError, AttributeError):  # a damaged checkpoint does not count
            return None

    def store_checkpoint(self, blobs: BlobStore, step: int) -> StoredCheckpoint | None:
        """Put the checkpoint of a step into the store; None if it is not valid.

        Raises:
            InputError, IntegrityError: the job deleted or replaced the checkpoint during the call.
        """
        found = self.checkpoint(step)
        return None if found is None else StoredCheckpoint(put_tree(blobs, found.path), found.step, found.tokens)

    def output_path(self, name: str, output: Output) -> Path:
        """Return the path of an output that consists of files.

        Raises:
            IntegrityError: the output is missing or outside the attempt's `outputs/`.
        """
        path = self.path / output.path
        if not _is_below(path, self.outputs.resolve()):
            raise IntegrityError(f"output {name} must be a file or folder below outputs/, got {output.path!r}")
        look_over(path)
        return path

    def store_output(self, blobs: BlobStore, name: str, output: Output) -> str:
        """Put an output of the job into the store; return its digest.

        Raises:
            IntegrityError: the output is missing or outside the attempt's `outputs/`.
        """
        path = self.output_path(name, output)
        return put_tree(blobs, path) if output.form == "tree" else blobs.put_file(path)

    def _said(self, stream: str, after: int, unreadable: Callable[[IntegrityError], None]) -> tuple[list[Fact], int]:
        """Return the facts of a stream's segments after number `after`, and the number of the last segment."""
        found: list[Fact] = []
        last = after
        for facts, number in self.segments(after, unreadable, stream):
            found += facts
            last = number
        return found, last

    def segments(
        self, after: int, unreadable: Callable[[IntegrityError], None], stream: str = EVENTS
    ) -> Iterator[tuple[list[Fact], int]]:
        """Yield the facts of one segment at a time, with the segment's number.

        The facts of a million steps do not fit in memory. A segment that cannot be read yields no facts.
        """
        for number, data in self.mailbox.segments(stream, after, unreadable):
            facts: list[Fact] = []
            try:
                facts = _facts(data, f"{self.path / stream}/{number:06d}.jsonl")
            except IntegrityError as error:
                unreadable(error)
            yield facts, number


def _is_below(path: Path, allowed: Path) -> bool:
    try:
        return allowed in path.resolve().parents and path.exists()
    except (OSError, RuntimeError) as error:  # such as an overlong name, or a link to itself
        if isinstance(error, OSError) and not its_doing(error):
            raise
        return False


def spending(line: bytes) -> int | None:
    """Return the tokens in a record of a meter, spent and reserved; None if it is not a whole record."""
    try:
        spent, reserved = (count(int(one)) for one in line.split())
    except (ValueError, TypeError):  # not yet written, or truncated by a power cut
        return None
    return spent + reserved


def mailbox_at(url: str) -> Mailbox:
    """Return the mailbox at a URL: a folder (file://…) or a prefix of an object store.

    Raises:
        InputError: a mailbox at this URL cannot be opened.
    """
    if url.startswith("file:"):
        return Mailbox(FolderObjects(Path(unquote(urlsplit(url).path))))
    from posttrain.store.mailboxes.objects import object_store  # loaded only if needed

    return Mailbox(object_store(url))


def _unreadable(path: Path, error: Exception) -> IntegrityError:
    return IntegrityError(f"{path} has invalid fields: {error}; it is damaged or from another version")


def _json_of(path: Path, most: int) -> Any:
    """Return the JSON that a job wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        IntegrityError: the file cannot be read.
    """
    try:
        return json.loads(read_untrusted(path, most))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not JSON: {error}; it is damaged") from error


def _facts(data: bytes, name: str) -> list[Fact]:
    try:
        found = []
        for line in io.BytesIO(data):  # split only at b"\n", because JSON strings may contain other line separators
            if len(line) > LINE:
                raise ValueError(f"a fact must have at most {LINE} bytes, got {len(line)}")
            if line != b"\n":
                found.append(fact_from_json(json.loads(line.decode())))
        return found
    except (ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"event segment {name} cannot be read: {error}; remove it to continue without its facts"
        ) from error


def _verified_commit(folder: Path) -> CheckpointCommit | None:
    """Return the COMMIT of a checkpoint folder; None unless every listed shard exists with its digest."""
    try:
        commit = CheckpointCommit.from_json(_json_of(folder / "COMMIT", ANSWER))
        look_over(folder)
        matches = all(file_digest(folder / name) == digest for name, digest in commit.shards.items())
    except (OSError, ValueError, RecursionError, InputError, IntegrityError):
        return None  # incomplete, damaged, or pruned during the check
    return commit if matches else None


@contextmanager
def unclaimed(folder: Path) -> Iterator[bool]:
    """Prevent supervisors from claiming a folder; yield False if one has claimed it or holds the lock too long.

    Raises:
        OSError: the folder does not exist, or the lock cannot be made or opened.
    """
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        claim = folder / CLAIM
        yield taken(lock, seconds=_SECONDS, over=claim.exists) and not claim.exists()
    finally:
        os.close(lock)


class EventWriter(AbstractContextManager["EventWriter"]):
    """The job's fact sink, which buffers facts and writes them as segments; samples have a separate folder.

    A segment is written after `most` facts, and at a `Progress` or `Note` if the last segment caused by one of these
    facts is at least `seconds` old; `close` writes the rest. Metrics and samples do not cause a segment, because the
    progress of their step follows them. A span causes a segment if the last segment of any cause is `phases` seconds
    old; this does not delay the next progress. Use the writer as a context manager. Numbering continues from the
    existing segments.

    Raises:
        WorkspaceError: the disk is full or read-only; the facts stay buffered, so a later call tries again.
    """

    def __init__(
        self, attempt: AttemptFolder, most: int = 256, seconds: float = 0.5, phases: float = PHASE_SECONDS
    ) -> None:
        self._most, self._seconds, self._phase_seconds = most, seconds, phases
        make_folder(attempt.events)
        self._channel = attempt.mailbox
        self._facts, self._samples = _Segments(self._channel, EVENTS, packed=True), _Segments(self._channel, SAMPLES)
        self._told, self._flushed = float("-inf"), time.monotonic()  # last progress or note written, last segment
        self._progress: Progress | None = None
        self._phases = 0

    def __call__(self, fact: Fact) -> None:
        """Buffer a fact, and write a segment if one is due."""
        (self._samples if isinstance(fact, Sample) else self._facts).waiting.append(fact)
        now = time.monotonic()
        late = isinstance(fact, Progress | Note) and now - self._told >= self._seconds
        if isinstance(fact, Progress):
            self._progress = fact
        elif isinstance(fact, Span):
            self._phases += 1
            late = now - self._flushed >= self._phase_seconds
        if late or len(self._facts.waiting) + len(self._samples.waiting) >= self._most:
            self.flush()
        if late and not isinstance(fact, Span):
            self._told = now

    def flush(self) -> None:
        """Write the buffered facts, samples first, so that a reader of a step's progress finds the step's samples."""
        self._samples.write()
        for stream in (self._samples, self._facts):
            self._facts.waiting += stream.too_large
            stream.too_large.clear()
        something, number = bool(self._facts.waiting), self._facts.write()
        said = self._progress
        if said is not None and something:
            self._channel.summarise(
                Summary(said.step, said.total, said.phase, said.tokens, number, said.at, self._phases)
            )
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write the remaining facts."""
        self.flush()

    def __exit__(self, *failure: object) -> None:
        self.close()


class _Segments:
    """The write-once segments of one stream, and the facts that wait to be written.

    Args:
        packed: whether to pack small segments into fewer objects. Segments of samples are not packed, because they are
            large and some of them are read by number.
    """

    def __init__(self, channel: Mailbox, stream: str, packed: bool = False) -> None:
        self._channel, self._stream, self._packed = channel, stream, packed
        self.waiting: list[Fact] = []
        self.too_large: list[Fact] = []  # notes in place of facts that exceed the limit
        self._next = 1 + channel.last(stream)

    def write(self) -> int:
        """Write the waiting facts as one segment, or several if they are large; return the newest number."""
        while self.waiting:
            data, taken = self._piece()
            self._channel.append(self._stream, self._next, data)
            self._next += 1
            del self.waiting[:taken]
            if self._packed:
                self._channel.pack(self._stream, self._next - 1)
        return self._next - 1

    def _piece(self) -> tuple[bytes, int]:
        """Return the next segment, at most as large as a reader accepts, and its number of facts."""
        data, taken = bytearray(), 0
        for fact in self.waiting:
            line = (json.dumps(fact_to_json(fact), sort_keys=True, ensure_ascii=False) + "\n").encode()
            if len(line) > LINE:
                said = f"a {type(fact).__name__.lower()} of {len(line)} bytes is left out: at most {LINE} are recorded"
                self.too_large.append(Note(said, time.time(), "warning"))
                line = b""
            if data and len(data) + len(line) > LINE:
                break
            data += line
            taken += 1
        return bytes(data), taken


class SpendingMeter(AbstractContextManager["SpendingMeter"]):
    """The record of the tokens that a job has spent and of the tokens that its next step may spend.

    The record is one line that is rewritten in place. Nothing is lost if the process dies, even within a step; a power
    cut loses at most the records of the last `seconds`. Use the meter as a context manager.

    Raises:
        OSError: the disk is full or read-only.
    """

    def __init__(self, attempt: AttemptFolder, seconds: float = 0.5) -> None:
        make_folder(attempt.path)
        self._file = os.open(attempt.path / METER, os.O_CREAT | os.O_WRONLY, 0o600)
        self._seconds, self._synced = seconds, float("-inf")

    def __call__(self, spent: int, reserved: int) -> None:
        """Record the tokens that the lineage has spent, and the tokens that it may spend until the next call."""
        os.pwrite(self._file, f"{spent:020d} {reserved:020d}\n".encode(), 0)
        if time.monotonic() - self._synced >= self._seconds:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def __exit__(self, *failure: object) -> None:
        os.close(self._file)
