"""What the processes of `test_ledger_contract` do: each opens the ledger for itself and goes on until it is done."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from posttrain.domain.approvals import ApprovalRequest
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import ConflictError, StaleWriteError
from posttrain.domain.records import Asset, RunRecord, StageRecord
from posttrain.store.database import Database
from posttrain.store.journal import RUN
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.work import WorkQueue
from posttrain.store.writer import POLICY_SET

MODEL = "sha256:" + "b" * 64
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ledger_workers"])
PATIENCE = 300.0  # seconds; only a hang waits so long


def opened(address: str, busy_seconds: float = PATIENCE) -> closing[Ledger]:
    """The ledger there; closed at the end of the block."""
    return closing(Ledger(Database(address, busy_seconds=busy_seconds)))


def a_run(run_id: str = "run1", name: str = "sort", created_at: float = 1.0) -> RunRecord:
    return RunRecord(run_id, name, digest_bytes(run_id.encode()), "pending", "ann", created_at)


def a_stage(run_id: str = "run1", name: str = "train") -> StageRecord:
    return StageRecord(run_id, name, 0, "grpo", "pending")


def submit(ledger: Ledger, run_id: str = "run1") -> RunRecord:
    """A run of one stage."""
    run = a_run(run_id)
    with ledger.transaction("ann") as transaction:
        transaction.insert_run(run, [a_stage(run_id)])
    return run


def together(work: Callable[..., None], address: str, names: list[str], *arguments: Any) -> list[Any]:
    """Do `work(address, name, say, *arguments)` in one process for each name, all starting at once; what they said.

    A process that dies, or says nothing, fails the test.
    """
    start, said = PROCESSES.Barrier(len(names)), PROCESSES.SimpleQueue()
    started = [
        PROCESSES.Process(target=_begin, args=(start, said, work, address, name, arguments), daemon=True)
        for name in names
    ]
    for process in started:
        process.start()
    answers = [said.get() for _ in started]
    for process in started:
        process.join(PATIENCE)
    failed = [answer for answer in answers if isinstance(answer, WorkerError)]
    assert not failed, failed
    assert [process.exitcode for process in started] == [0] * len(names)
    return answers


class WorkerError(Exception):
    """A process ended with an error."""


def _begin(
    start: Any, said: Any, work: Callable[..., Any], address: str, name: str, arguments: tuple[Any, ...]
) -> None:
    try:
        start.wait(PATIENCE)
        said.put(work(address, name, *arguments))
    except BaseException as error:
        said.put(WorkerError(f"{name}: {type(error).__name__}: {error}"))


def open_first(address: str, name: str) -> str:
    """Open what nobody opened before, and use it."""
    with opened(address) as ledger:
        submit(ledger, name)
        return ledger.run(name).id


def say_and_seal(address: str, name: str, times: int) -> int:
    """Append events in transactions of several, and seal now and then; how many were sealed here."""
    sealed = 0
    with opened(address) as ledger:
        for number in range(times):
            with ledger.transaction(name) as transaction:
                for part in range(3):
                    transaction.append_event("note", f"run/{name}", {"number": 3 * number + part})
            if number % 4 == 0:
                sealed += seal(ledger)
    return sealed


def seal_all(address: str, name: str) -> int:
    """Seal what is there, writing a little between; how many events were sealed here."""
    sealed = 0
    with opened(address) as ledger:
        for number in range(5):
            with ledger.transaction(name) as transaction:
                transaction.append_event("note", name, {"number": number})
            sealed += seal(ledger)
    return sealed


def follow(address: str, name: str, notes: int) -> list[tuple[int, str, int]]:
    """Read sealed events by a cursor, sealing and verifying beside the writers, until so many notes were seen."""
    seen: list[tuple[int, str, int]] = []
    deadline, after = time.monotonic() + PATIENCE, 0
    with opened(address) as ledger:
        while len(seen) < notes:
            assert time.monotonic() < deadline, f"{name} saw {len(seen)} of {notes}"
            page = ledger.events(after=after, limit=50)
            for event in page:
                assert event.sequence == after + 1, f"{name}: {event.sequence} came after {after}"
                after = event.sequence
                if event.kind == "note":
                    seen.append((after, event.actor, event.payload["number"]))
            if not page:
                seal(ledger)
                assert verify_chain(ledger).sealed >= after
    return seen


def count_up(address: str, name: str, times: int) -> int:
    """Add one to a run's counter by compare-and-set; how often somebody else was first."""
    lost = 0
    with opened(address) as ledger:
        for _ in range(times):
            while True:
                run = ledger.run("run1")
                try:
                    with ledger.transaction(name) as transaction:
                        transaction.update_run(run, message=str(int(run.message or 0) + 1))
                    break
                except StaleWriteError:
                    lost += 1
    return lost


def register(address: str, name: str, times: int) -> list[int]:
    """Register versions of one asset until each of ours is in; the versions they became."""
    versions = []
    with opened(address) as ledger:
        for number in range(times):
            new = Asset("dataset", "train", 0, MODEL, "file", 1.0, name, {"who": name, "number": number})
            while True:
                try:
                    with ledger.transaction(name) as transaction:
                        versions.append(transaction.insert_asset(new).version)
                    break
                except ConflictError:
                    continue
    return versions


def promote(address: str, name: str, times: int) -> list[int]:
    """Move one channel, each time from what was just seen live; the sequences of our releases."""
    mine = []
    with opened(address) as ledger:
        for number in range(times):
            model = f"sha256:{name}{number:0{64 - len(name)}d}"
            while True:
                live = ledger.channel("prod")
                expected = live.sequence if live else 0
                try:
                    with ledger.transaction(name) as transaction:
                        mine.append(transaction.append_release("prod", model, None, "promote", expected).sequence)
                    break
                except ConflictError:
                    continue
    return mine


def govern(address: str, name: str, times: int) -> list[int]:
    """p0 sets a policy and takes it away again, so often; everybody else promotes what was judged under none."""
    if name != "p0":
        return promote(address, name, times)
    with opened(address) as ledger:
        for policy in (f"sha256:{'e' * 64}", None) * times:
            while True:
                try:
                    with ledger.transaction(name) as transaction:
                        record = transaction.snapshot.channel_record("prod")
                        transaction.set_channel(record, POLICY_SET, policy=policy)
                    break
                except ConflictError:
                    continue
    return []


def claim(address: str, name: str, runs: list[str]) -> list[str]:
    """Claim every run for an hour; those that we got."""
    mine = []
    with opened(address) as ledger:
        queue = WorkQueue(ledger, name, lease=3600.0)
        for run_id in runs:
            taken = queue.claim([run_id])
            assert all(one.lease_owner == name for one in taken)
            mine += [one.object for one in taken]
    return mine


def take_and_wake(address: str, name: str, runs: list[str], times: int) -> dict[str, int]:
    """Take what is due and finish it, waking another object each time; how often each object was ours."""
    rng, mine = random.Random(name), dict.fromkeys(runs, 0)
    with opened(address) as ledger:
        queue = WorkQueue(ledger, name)
        for _ in range(times):
            for one in queue.claim(limit=2):
                mine[one.object] += 1
                queue.wake(RUN, [rng.choice(runs)])
                queue.give_back(one)
    return mine


def write_and_wait(address: str, told: Any, busy_seconds: float = PATIENCE) -> None:
    """Write in a transaction that never ends, and tell when it holds its locks."""
    with opened(address, busy_seconds) as ledger, ledger.transaction("dying") as transaction:
        transaction.update_run(transaction.snapshot.run("run1"), message="half done")
        transaction.insert_run(a_run("half"), [a_stage("half")])
        told.set()
        time.sleep(3600.0)


def say_or_ship(address: str, name: str, request: ApprovalRequest, times: int) -> int:
    """Reject and approve in turn, or ship where nobody rejects; how often it shipped."""
    shipped = 0
    with opened(address) as ledger:
        for number in range(times):
            with ledger.transaction(f"user:{name}") as transaction:
                transaction.lock_channel("prod")
                if name != "p0":
                    transaction.say_approval(request, "rejected" if number % 2 == 0 else "approved")
                elif all(one.verdict == "approved" for one in transaction.snapshot.approvals(request.digest)):
                    live = transaction.snapshot.channel("prod")
                    transaction.append_release("prod", MODEL, None, "promote", expected=live.sequence if live else 0)
                    shipped += 1
    return shipped
