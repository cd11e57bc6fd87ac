"""What every place of a mailbox's objects must honour, and what holds over all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from server_bench import ServerBench, attempt_with_access, served

from posttrain.domain.errors import ConflictError, InfrastructureError, IntegrityError
from posttrain.domain.jobs import ANOTHER_RUNS, JobOrder
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.store.attempts import AttemptFolder
from posttrain.store.mailbox import EVENTS, PACK, ControlKind, Mailbox, MailboxObjects, Summary
from posttrain.store.mailboxes.folder import FolderObjects
from posttrain.store.mailboxes.objects import ObjectStoreObjects
from posttrain.store.mailboxes.served import ServedObjects
from s3_server import s3_server

HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds; a machine may be as busy as it likes


SERVED = "served:"
SERVERS: list[ServerBench] = []


def folder_of(address: str) -> str:
    """The folder of an attempt that a server lets in."""
    [bench] = SERVERS
    name = address.removeprefix(SERVED)
    folder = bench.workspace.root / "runs" / name / "sft" / "001"
    return str(folder if folder.exists() else attempt_with_access(bench, name).folder)


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The endpoint of an S3 server of this process, on loopback, with a bucket."""
    with s3_server("bucket") as endpoint:
        yield endpoint


ADDRESSES = ["folder", "objects", "served"]
LONG = [*ADDRESSES[:2], pytest.param("served", marks=pytest.mark.slow)]  # of tests that ask a served one very often
LONGEST = ["folder", *(pytest.param(place, marks=pytest.mark.slow) for place in ADDRESSES[1:])]  # or the store too


@pytest.fixture(params=ADDRESSES)
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "attempt")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("store"))
    for name, value in (("ALLOW_HTTP", "true"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("REGION", "r")):
        monkeypatch.setenv(f"AWS_{name}", value)
    if request.param == "served":
        request.getfixturevalue("server")
        return f"{SERVED}{uuid.uuid4().hex[:8]}"
    return f"s3://bucket/{uuid.uuid4()}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerBench]:
    """A server whose workspace has its channels in the store; attempts are made as they are asked for."""
    with served(tmp_path / "served", channel="s3://bucket/channels") as made:
        monkeypatch.setattr(sys.modules[__name__], "SERVERS", [made])
        yield made


@pytest.fixture
def objects(address: str) -> MailboxObjects:
    return opened(address)


def opened(address: str) -> MailboxObjects:
    if address.startswith(SERVED):
        return ServedObjects(Path(folder_of(address)))
    return ObjectStoreObjects(address) if "://" in address else FolderObjects(Path(address))


@dataclass
class Lossy:
    """A place whose answers get lost: the first `lost` of every write went through, or did not; which, nobody hears."""

    inner: MailboxObjects
    through: bool
    lost: int = 2
    asked: int = field(default=0)

    @property
    def place(self) -> str:
        return self.inner.place

    def create(self, key: str, data: bytes) -> bool:
        self.asked += 1
        if self.asked <= self.lost:
            if self.through:
                self.inner.create(key, data)
            raise InfrastructureError("no answer")
        self.asked = 0
        return self.inner.create(key, data)

    def overwrite(self, key: str, data: bytes) -> None:
        raise InfrastructureError("no answer")

    def get(self, key: str) -> bytes | None:
        return self.inner.get(key)

    def remove(self, key: str) -> None:
        self.inner.remove(key)

    def numbers(self, folder: str) -> list[int]:
        return self.inner.numbers(folder)


class Killed(BaseException):
    """The process ended here."""


class Dying:
    """A place whose process is killed before its `steps`-th write or removal."""

    def __init__(self, inner: MailboxObjects, steps: int) -> None:
        self._inner, self._left = inner, steps

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in ("create", "overwrite", "remove"):
            return found

        def counted(*given: object) -> object:
            self._left -= 1
            if self._left < 0:
                raise Killed
            return found(*given)

        return counted


def test_an_object_is_created_once_and_read_back(objects: MailboxObjects) -> None:
    assert objects.get("a/b.json") is None
    assert objects.create("a/b.json", b"one")
    assert not objects.create("a/b.json", b"two")
    assert objects.get("a/b.json") == b"one"
    objects.overwrite("a/b.json", b"")
    objects.overwrite("a/b.json", b"three")
    assert objects.get("a/b.json") == b"three"
    objects.remove("a/b.json")
    objects.remove("a/b.json")
    assert objects.get("a/b.json") is None


def test_numbers_are_of_what_lies_directly_below_a_folder(objects: MailboxObjects) -> None:
    assert objects.numbers("events") == []
    for key in ("events/000010.jsonl", "events/000002.jsonl", "events/packs/000007", "events/x.jsonl", "other/1"):
        objects.create(key, b"")
    assert objects.numbers("events") == [2, 10]
    assert objects.numbers("events/packs") == [7]


def test_one_begins_and_who_comes_later_learns_who(objects: MailboxObjects) -> None:
    channel = Mailbox(objects)
    assert channel.started() is None
    assert channel.start(3, "me") is None
    held = channel.start(3, "another")
    assert held is not None
    assert (held.epoch, held.pid, held.process, held.cancelled) == (3, os.getpid(), "me", "")
    assert channel.bury(3, "stopped") == held == channel.started()


def test_nobody_begins_what_was_given_up(objects: MailboxObjects) -> None:
    channel = Mailbox(objects)
    assert channel.bury(3, "stopped by a person") is None
    assert channel.bury(3, "again") is None
    held = channel.start(3, "late")
    assert held is not None
    assert held.cancelled == "stopped by a person"


def test_of_eight_processes_at_once_one_begins(address: str) -> None:
    place = f"{SERVED}{folder_of(address)}" if address.startswith(SERVED) else address
    words = [sys.executable, str(HERE / "channel_jobs.py"), "race", place, "8"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
    codes = dict(json.loads(done.stdout))
    assert sorted(codes.values()) == [0] + [1] * 7
    held = Mailbox(opened(address)).started()
    assert held is not None
    assert codes[held.pid] == 0


def test_of_a_start_and_a_tombstone_at_once_one_holds(address: str) -> None:
    for number in range(10):
        channel = Mailbox(opened(f"{address}-{number}"))
        barrier, said = threading.Barrier(2), {}

        def act(name: str, deed: Callable[[], object], barrier: threading.Barrier = barrier, said: dict = said) -> None:  # type: ignore[type-arg]
            barrier.wait(PATIENCE)
            said[name] = deed()

        deeds = {"start": lambda c=channel: c.start(1, "p"), "bury": lambda c=channel: c.bury(1, "over")}
        threads = [threading.Thread(target=act, args=item) for item in deeds.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert (said["start"] is None) != (said["bury"] is None), "began and buried, or neither"


@pytest.mark.parametrize("through", [True, False])
def test_an_answer_that_is_lost_doubles_nothing(objects: MailboxObjects, through: bool) -> None:
    waited: list[float] = []
    channel = Mailbox(Lossy(objects, through), pause=waited.append)
    assert channel.start(1, "me") is None, "its own start is no other's"
    channel.append(EVENTS, 1, b"one\n")
    assert channel.order(ControlKind.STOP) == 1
    assert channel.order(ControlKind.STOP) == 2
    channel.answer({"status": "succeeded"})
    channel.summarise(Summary(1, 2, "sft", 3, 1, 4.0))  # said with the next one
    assert len(waited) >= 4
    seen = Mailbox(objects)
    assert list(seen.segments(EVENTS)) == [(1, b"one\n")]
    assert [control.number for control in seen.controls()] == [1, 2]
    assert seen.answered() == {"status": "succeeded"}


def test_a_place_that_stays_silent_is_an_error_and_not_waited_for_for_ever(objects: MailboxObjects) -> None:
    waited: list[float] = []
    channel = Mailbox(Lossy(objects, through=False, lost=10**9), pause=waited.append)
    with pytest.raises(InfrastructureError, match="no answer"):
        channel.start(1, "me")
    assert 1 < len(waited) < 10


def test_orders_are_numbered_typed_and_acknowledged(objects: MailboxObjects) -> None:
    channel = Mailbox(objects)
    assert [channel.order(kind) for kind in (ControlKind.CHECKPOINT, ControlKind.STOP)] == [1, 2]
    assert [(c.number, c.kind) for c in channel.controls()] == [(1, "checkpoint"), (2, "stop")]
    assert [c.number for c in channel.controls(after=1)] == [2]
    channel.acknowledge(1)
    channel.acknowledge(1)
    assert [channel.acknowledged(number) for number in (1, 2)] == [True, False]
    assert objects.create("controls/000003.json", b'{"kind": "dance", "at": 0}')
    with pytest.raises(IntegrityError, match="controls/000003"):
        channel.controls()


def test_orders_given_at_once_all_get_a_number(objects: MailboxObjects) -> None:
    given: list[int] = []
    threads = [
        threading.Thread(target=lambda: given.append(Mailbox(objects).order(ControlKind.CHECKPOINT))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(given) == list(range(1, 9))
    assert len(Mailbox(objects).controls()) == 8


def test_the_result_is_said_once(objects: MailboxObjects) -> None:
    channel = Mailbox(objects)
    assert channel.answered() is None
    channel.answer({"status": "failed"})
    channel.answer({"status": "failed"})
    with pytest.raises(ConflictError, match="another result"):
        channel.answer({"status": "succeeded"})
    assert channel.answered() == {"status": "failed"}


def test_a_segment_is_written_once(objects: MailboxObjects) -> None:
    channel = Mailbox(objects)
    channel.append(EVENTS, 1, b"one\n")
    channel.append(EVENTS, 1, b"one\n")
    with pytest.raises(ConflictError, match="events/1"):
        channel.append(EVENTS, 1, b"other\n")
    assert list(channel.segments(EVENTS)) == [(1, b"one\n")]


def filled(objects: MailboxObjects, segments: int) -> Mailbox:
    channel = Mailbox(objects)
    for number in range(channel.last(EVENTS) + 1, segments + 1):
        channel.append(EVENTS, number, b"%d\n" % number)
        channel.pack(EVENTS, number)
    return channel


def expected(first: int, last: int) -> list[tuple[int, bytes]]:
    return [(number, b"%d\n" % number) for number in range(first, last + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("address", LONG, indirect=True)
def test_packed_segments_are_few_and_read_from_anywhere(objects: MailboxObjects) -> None:
    channel = filled(objects, 2 * PACK + 3)
    assert objects.numbers(EVENTS) == [2 * PACK + 1, 2 * PACK + 2, 2 * PACK + 3]
    assert objects.numbers(f"{EVENTS}/packs") == [1, 2]
    for after in (0, 1, PACK - 1, PACK, PACK + 1, 2 * PACK, 2 * PACK + 3):
        assert list(channel.segments(EVENTS, after)) == expected(after + 1, 2 * PACK + 3)
    assert channel.last(EVENTS) == 2 * PACK + 3
    assert list(channel.backwards(EVENTS)) == [data for _, data in reversed(expected(1, 2 * PACK + 3))]


@pytest.mark.slow
@pytest.mark.parametrize("address", LONG, indirect=True)
def test_numbering_goes_on_behind_a_pack_and_only_whole_packs_are_made(objects: MailboxObjects) -> None:
    channel = filled(objects, PACK)
    assert (objects.numbers(EVENTS), channel.last(EVENTS)) == ([], PACK)
    assert channel.last(f"{EVENTS}/none") == 0
    for number in range(PACK + 2, 2 * PACK + 1):  # the first of them is lost
        channel.append(EVENTS, number, b"%d\n" % number)
    channel.pack(EVENTS, 2 * PACK)
    assert objects.numbers(f"{EVENTS}/packs") == [1]
    assert objects.numbers(EVENTS) == list(range(PACK + 2, 2 * PACK + 1))


@pytest.mark.parametrize("address", LONGEST, indirect=True)
def test_a_reader_between_two_looks_misses_and_doubles_nothing(objects: MailboxObjects) -> None:
    """Whatever is packed between any two of its segments."""
    channel = Mailbox(objects)
    for number in range(1, 2 * PACK + 1):
        channel.append(EVENTS, number, b"%d\n" % number)
    for stop in (1, PACK - 1, PACK, PACK + 5):
        reader, seen = channel.segments(EVENTS), []
        for item in reader:
            seen.append(item)
            if len(seen) == stop:
                channel.pack(EVENTS, PACK)
                channel.pack(EVENTS, 2 * PACK)
        assert seen == expected(1, 2 * PACK)


@pytest.mark.parametrize("address", LONGEST, indirect=True)
def test_a_writer_killed_between_any_two_writes_loses_and_doubles_nothing(address: str) -> None:
    # before the pack, behind it, between two removals, before the last one, behind it
    for steps in (PACK, PACK + 1, PACK + 2, PACK + 30, 2 * PACK, 2 * PACK + 1):
        objects = opened(f"{address}-{steps}")
        with pytest.raises(Killed):
            filled(Dying(objects, steps), PACK + 3)  # type: ignore[arg-type]
        assert list(Mailbox(objects).segments(EVENTS)) == expected(1, Mailbox(objects).last(EVENTS))
        filled(objects, PACK + 2)
        assert list(Mailbox(objects).segments(EVENTS)) == expected(1, PACK + 2)


@pytest.mark.parametrize("address", LONG, indirect=True)
def test_a_damaged_pack_is_named_or_left_out(objects: MailboxObjects) -> None:
    channel = filled(objects, PACK + 1)
    for bad in (b"{", b'{"lengths": [1]}\n1', b'{"lengths": 3}\n'):
        objects.overwrite(f"{EVENTS}/packs/000001", bad)
        with pytest.raises(IntegrityError, match="packs/000001"):
            list(channel.segments(EVENTS))
        told: list[IntegrityError] = []
        assert [item for item in channel.segments(EVENTS, 0, told.append) if item[1]] == expected(PACK + 1, PACK + 1)
        assert len(told) == 1


def ordered(folder: Path) -> AttemptFolder:
    attempt = AttemptFolder(folder)
    attempt.write_order(
        JobOrder("run-s-1", "sft", 1, {}, {}, (folder / "blobs").as_uri(), str(folder / "cache"), epoch=1)
    )
    return attempt


def job(folder: Path) -> list[str]:
    return [sys.executable, str(HERE / "channel_jobs.py"), str(folder)]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait(PATIENCE)


@pytest.mark.slow
def test_of_two_jobs_of_one_attempt_one_computes(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    attempt = ordered(tmp_path / "001")
    children += [subprocess.Popen(job(attempt.path)) for _ in range(2)]
    while all(child.poll() is None for child in children):  # one leaves by itself; the other waits to be told
        time.sleep(0.01)
    late, first = sorted(children, key=lambda child: child.poll() is None)
    assert late.returncode == ANOTHER_RUNS
    (attempt.path / "go").touch()
    assert first.wait(PATIENCE) == 0
    assert (attempt.path / "computed").read_text() == f"{first.pid}\n"
    held = attempt.mailbox.started()
    assert held is not None
    assert (held.pid, held.epoch) == (first.pid, 1)
    result = attempt.read_result()
    assert result is not None
    assert result.status == "succeeded"


def test_a_cancelled_attempt_that_is_launched_late_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    attempt = ordered(tmp_path / "001")
    attempt.mailbox.bury(1, "stopped by a person")
    spec = JobSpec("run-s-1", attempt.path.as_uri(), "channel_jobs", {"PYTHONPATH": str(HERE)})
    executor = LocalExecutor()
    executor.submit(spec)
    while (seen := executor.observe([spec])[0]).live:
        time.sleep(0.01)
    assert seen.exit_code == ANOTHER_RUNS
    assert not (attempt.path / "computed").exists()
    assert attempt.read_result() is None
    assert "computes nothing: the attempt was cancelled: stopped by a person" in attempt.log.read_text()
    assert attempt.mailbox.last(EVENTS) == 0
