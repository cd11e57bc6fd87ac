"""The product's ports in a simulated world: ledger, blobs, mailboxes and executor, each with its faults."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sim_world import ViolationError, World
from sqlalchemy import Connection, event

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import DeadlineError, InfrastructureError, NotFoundError
from posttrain.domain.jobs import Cause, Observation, Submission, Unknown
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.domain.records import AttemptRecord
from posttrain.execution.executors.fake import FakeExecutor, Hostility
from posttrain.store.attempts import AttemptFolder
from posttrain.store.database import Database, LostAnswerError
from posttrain.store.ledger import Stores
from posttrain.store.mailbox import Mailbox

T = TypeVar("T")


@dataclass
class Weather:
    """What is away, until when (seconds of the world)."""

    world: World
    away: dict[str, float] = field(default_factory=dict)
    lost_commits: float = 0.0  # share of commits whose answer is lost

    def is_away(self, what: str) -> bool:
        """Whether it does not answer now."""
        return self.away.get(what, 0.0) > self.world.time


class SimDatabase(Database):
    """A SQLite ledger: others act before and after each transaction, never within one."""

    def __init__(self, path: Path, world: World, weather: Weather) -> None:
        self._world, self._weather = world, weather
        self.writes = self.reads = 0
        self.committed: Callable[[], None] = lambda: None
        super().__init__(path)
        event.listen(self._engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        self._engine.dispose()

    @contextmanager
    def read(self, *, across: str = "") -> Iterator[Connection]:
        """See `Database.read`."""
        if not self._world.depth:
            self._world.point()
            self._answers()
        self.reads += 1
        with self._open(), super().read(across=across) as connection:
            yield connection

    @contextmanager
    def write(self, *, across: str = "") -> Iterator[Connection]:
        """See `Database.write`."""
        self._world.must(not self._world.depth, "a write transaction begins within another transaction")
        self._world.point()
        self._answers()
        self.writes += 1
        lost = self._world.current is not None and self._world.random.random() < self._weather.lost_commits
        gone = lost and self._world.random.random() < 0.5
        with self._open(), super().write(across=across) as connection:
            yield connection
            if gone:
                self._world.say("loses a commit and its answer")
                raise LostAnswerError("the answer to a commit was lost")
        self.committed()
        if lost:
            self._world.say("loses the answer to a commit")
            raise LostAnswerError("the answer to a commit was lost")
        self._world.point()

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._world.depth += 1
        try:
            yield
        finally:
            self._world.depth -= 1

    def _answers(self) -> None:
        if self._weather.is_away("database"):
            self._world.pause(self._world.random.uniform(0.0, 5.0))
            if self._weather.is_away("database"):
                raise DeadlineError("the ledger was locked for too long; run the command again")


class Outside:
    """Actions outside of the ledger: others act before and after each, and none is done within a transaction."""

    def __init__(self, world: World, weather: Weather, name: str) -> None:
        self.world, self.weather, self.name = world, weather, name

    def act(self, action: Callable[[], T], *, silent: bool = False) -> T:
        """Do it.

        Args:
            silent: whether it answers even while this is away.
        """
        self.world.must(not self.world.depth or self.world.current is None, f"{self.name} within a transaction")
        self.world.point()
        if not silent and self.weather.is_away(self.name):
            raise InfrastructureError(f"{self.name} does not answer (503); try again")
        found = action()
        self.world.point()
        return found


class SimBlobs:
    """`BlobStore` in memory."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self.held: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """See `BlobStore.url`."""
        return "memory://simulated"

    def holding(self) -> AbstractContextManager[None]:
        """See `BlobStore.holding`."""
        return nullcontext()

    def put(self, data: bytes) -> str:
        """See `BlobStore.put`."""
        digest = digest_bytes(data)
        self.outside.act(lambda: self.held.__setitem__(digest, data))
        return digest

    def put_file(self, path: Path) -> str:
        """See `BlobStore.put_file`."""
        return self.put(path.read_bytes())

    def get(self, digest: str) -> bytes:
        """See `BlobStore.get`."""
        return self.outside.act(lambda: self._of(digest))

    def fetch(self, digest: str, path: Path) -> None:
        """See `BlobStore.fetch`."""
        path.write_bytes(self.get(digest))

    def check(self, digest: str) -> int:
        """See `BlobStore.check`."""
        return len(self.get(digest))

    def has(self, digest: str) -> bool:
        """See `BlobStore.has`."""
        return self.outside.act(lambda: digest in self.held)

    def size(self, digest: str) -> int:
        """See `BlobStore.size`."""
        return len(self.get(digest))

    def _of(self, digest: str) -> bytes:
        try:
            return self.held[digest]
        except KeyError as error:
            raise NotFoundError(f"there is no blob {digest}") from error


class SimObjects:
    """`MailboxObjects` in memory, of one attempt."""

    def __init__(self, outside: Outside, held: dict[str, bytes], place: str) -> None:
        self._outside, self._held, self._place = outside, held, place

    @property
    def place(self) -> str:
        """See `MailboxObjects.place`."""
        return self._place

    def create(self, key: str, data: bytes) -> bool:
        """See `MailboxObjects.create`; now and then its answer is lost."""
        lost = self._outside.act(lambda: self._put(key, data))
        if lost and self._outside.world.random.random() < 0.02 and not self._outside.world.calm:
            raise InfrastructureError("no answer")
        return lost

    def overwrite(self, key: str, data: bytes) -> None:
        """See `MailboxObjects.overwrite`."""
        self._held[key] = data

    def get(self, key: str) -> bytes | None:
        """See `MailboxObjects.get`."""
        return self._outside.act(lambda: self._held.get(key))

    def remove(self, key: str) -> None:
        """See `MailboxObjects.remove`."""
        self._held.pop(key, None)

    def numbers(self, folder: str) -> list[int]:
        """See `MailboxObjects.numbers`."""
        names = (key.removeprefix(f"{folder}/").partition(".")[0] for key in self._held if key.startswith(f"{folder}/"))
        return sorted(int(name) for name in names if name.isdigit())

    def _put(self, key: str, data: bytes) -> bool:
        return self._held.setdefault(key, data) is data


class SimFolder(AttemptFolder):
    """An attempt's folder whose channel is in memory."""

    def __init__(self, path: Path, outside: Outside, channels: dict[str, dict[str, bytes]]) -> None:
        super().__init__(path)
        held = channels.setdefault(str(path), {})
        self.mailbox = Mailbox(SimObjects(outside, held, path.name), outside.world.pause)


class SimExecutor(FakeExecutor):
    """The fake among others: its answers are lost, its jobs are actors."""

    def __init__(self, outside: Outside, begin: Callable[[JobSpec, int], None], hostility: Hostility) -> None:
        self.outside, self._begin = outside, begin
        self.ended: Callable[[str, int | None], None] = lambda name, number: None
        self.folder: Callable[[Path], AttemptFolder] = AttemptFolder
        self.rates: dict[str, float] = {}  # fault → share of submissions or kills
        self.doubted: Callable[[str], None] = lambda run_id: None  # a run whose job may have been submitted
        self.holds: Callable[[str], bool] = lambda run_id: True  # whether who acts has the lease of this run
        self.launched_by_rows: Callable[[str], bool] = lambda name: False
        self.hosts: dict[str, str] = {}  # job → the host that submitted it, where jobs are hosts' own
        self._unproven: dict[str, JobSpec] = {}  # submitted, and nobody has seen yet whether it is there
        super().__init__(self._on_start, outside.world.now, hostility)

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`."""
        return self.outside.act(lambda: self._submit(spec), silent=True)

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        return self.outside.act(lambda: self._observe(jobs))

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`."""
        self.hostility.deaf = int(self._dice("deaf"))
        self.outside.world.say(f"kills {job.name}")
        self.outside.act(lambda: super(SimExecutor, self).kill(job))

    def finish(self, name: str, exit_code: int = 0, number: int | None = None) -> None:
        """See `FakeExecutor.finish`."""
        super().finish(name, exit_code, number)
        self.ended(name, number)

    def lose(self, name: str, cause: Cause | None = None, number: int | None = None) -> None:
        """See `FakeExecutor.lose`."""
        super().lose(name, cause, number)
        self.ended(name, number)

    def _observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        found = super().observe(jobs)
        for job, seen in zip(jobs, found, strict=True):
            if not seen.hidden:
                self._unproven.pop(job.name, None)
        return found

    def _check_order(self, request: JobSpec) -> None:
        """One name after the other, each of a higher epoch, and none while another may have been submitted.

        Whoever was frozen over the end of their lease may submit what is over since: that the tombstone stops.
        """
        if not self.holds(request.labels["run"]):
            return
        must, place = self.outside.world.must, _place(request)
        for other in self.launched:
            later = other.name == request.name or other.epoch < request.epoch or _place(other) != place
            must(later, f"{request.name} of epoch {request.epoch} is submitted after {other.name} of {other.epoch}")
        for other in self._unproven.values():
            blind = other.name != request.name and _place(other) == place and not self.launched_by_rows(other.name)
            must(not blind, f"{request.name} is submitted while nobody knows whether {other.name} was")
        self._unproven[request.name] = request

    def _submit(self, request: JobSpec) -> Submission:
        self._check_order(request)
        away = self.outside.weather.is_away(self.outside.name)
        hostility = self.hostility
        for fault in ("lose_answers", "lose_requests", "late_requests", "twice"):
            setattr(hostility, fault, int(self._dice(fault)))
        hostility.lose_requests = int(away or hostility.lose_requests)
        hostility.twice *= not hostility.idempotent
        hostility.late_after = self.outside.world.random.uniform(1.0, 200.0)
        if hostility.late_requests and not hostility.lose_requests:
            self.outside.world.add("network", lambda: void(self.list("?")), hostility.late_after + 0.001)
        answer = super().submit(request)
        self.outside.world.say(f"submits {request.name}: {type(answer).__name__}")
        if isinstance(answer, Unknown):
            self.doubted(request.labels["run"])
        return answer

    def _dice(self, fault: str) -> bool:
        world = self.outside.world
        return not world.calm and world.random.random() < self.rates.get(fault, 0.0)

    def _on_start(self, request: JobSpec) -> None:
        number = sum(one.name == request.name for one in self.launched) - 1
        self._begin(request, number)


class HostExecutor:
    """The executor as the drivers of one host reach it: its own jobs, and none of another's."""

    def __init__(self, whole: SimExecutor, host: str) -> None:
        self._whole, self._host = whole, host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`."""
        self._must(spec.name, "submits")
        self._whole.hosts.setdefault(spec.name, self._host)
        return self._whole.submit(spec)

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        for job in jobs:
            self._must(job.name, "looks at")
        return self._whole.observe(jobs)

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`."""
        self._must(job.name, "kills")
        self._whole.kill(job)

    def list(self, prefix: str) -> list[Listed]:
        """See `Executor.list`."""
        return [one for one in self._whole.list(prefix) if self._whole.hosts.get(one.name) == self._host]

    def _must(self, name: str, what: str) -> None:
        other = self._whole.hosts.get(name, self._host)
        self._whole.outside.world.must(other == self._host, f"{self._host} {what} {name}, a job of {other}")


class SimFolders(AttemptFolders):
    """Attempt folders whose channels are in memory."""

    __slots__ = ("held", "outside")

    outside: Outside
    held: dict[str, dict[str, bytes]]

    def of(self, attempt: AttemptRecord) -> AttemptFolder:
        """See `AttemptFolders.of`."""
        return SimFolder(self.root / attempt.folder, self.outside, self.held)


def sim_folders(root: Path, outside: Outside, channels: dict[str, dict[str, bytes]]) -> SimFolders:
    """The attempt folders below `root`."""
    made = SimFolders(root)
    object.__setattr__(made, "outside", outside)
    object.__setattr__(made, "held", channels)
    return made


@dataclass(frozen=True, slots=True)
class Process:
    """What one process of the day works with."""

    stores: Stores
    jobs: Jobs


def _place(request: JobSpec) -> tuple[str, str]:
    return request.labels["run"], request.labels["stage"]


def void(_: object) -> None:
    """Nothing."""


class Rows:
    """The ledger's rows past the product: what is really there."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)

    def all(self, query: str, *values: object) -> list[Any]:
        """Every row."""
        return self._connection.execute(query, values).fetchall()

    def one(self, query: str, *values: object) -> Any:
        """The first column of the first row; None without one."""
        row = self._connection.execute(query, values).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        """Close it."""
        self._connection.close()


__all__ = ["Rows", "SimBlobs", "SimDatabase", "SimExecutor", "SimFolder", "ViolationError", "Weather", "sim_folders"]
