"""Access of attempts over every database: as long as they live, and as any server of the ledger knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.store.database import Database, SystemClock
from posttrain.store.grants import Granted, Grants
from posttrain.store.ledger import Ledger

ANN = "user:ann"
SECRETS = {name: digest_bytes(name.encode()) for name in ("first", "second", "far")}
FIRST = AttemptRecord(
    run_id="r-1", stage="sft", number=1, name="r-1-sft-1", folder="runs/r-1/sft/001", state=AttemptState.PLANNED,
    executor="local", resume="sha256:" + "7" * 64,
)  # fmt: skip


@pytest.fixture
def ledger(ledger_at: str) -> Ledger:
    made = Ledger(Database(ledger_at), SystemClock())
    stages = [StageRecord("r-1", name, place, "sft", "pending") for place, name in enumerate(("sft", "far"))]
    with made.transaction(ANN) as transaction:
        transaction.insert_run(RunRecord("r-1", "r", "sha256:" + "0" * 64, "pending", "ann", 1.0), stages)
        transaction.insert_attempt(FIRST)
    return made


def test_access_lives_with_its_attempt(ledger: Ledger) -> None:
    grants = Grants(ledger.database, ledger.clock)
    other = Grants(Database(ledger.database.place, create=False), ledger.clock)  # of another server
    grants.add(FIRST, SECRETS["first"])
    assert other.known(SECRETS["first"]) == Granted("default", "r-1", "sft", 1, FIRST.resume)
    assert other.known(SECRETS["second"]) is None
    with ledger.transaction(ANN) as transaction:
        launched = transaction.update_attempt(FIRST, state=AttemptState.LAUNCHED)
    assert other.known(SECRETS["first"]) is not None
    with ledger.transaction(ANN) as transaction:
        transaction.update_attempt(launched, state=AttemptState.LOST)
    assert other.known(SECRETS["first"]) is None


def test_a_bootstrap_token_opens_nothing_and_a_jobs_token_redeems_nothing(ledger: Ledger) -> None:
    grants = Grants(ledger.database, ledger.clock)
    grants.add(FIRST, SECRETS["first"])
    grants.add(FIRST, SECRETS["far"], bootstrap=True)
    assert grants.known(SECRETS["far"]) is None
    assert not grants.redeem(SECRETS["first"], SECRETS["second"])
    assert grants.known(SECRETS["second"]) is None
    assert grants.redeem(SECRETS["far"], SECRETS["second"])
    assert grants.known(SECRETS["second"]) is not None


def test_access_of_an_attempt_that_another_followed_is_over(ledger: Ledger) -> None:
    grants = Grants(ledger.database, ledger.clock)
    second = replace(FIRST, number=2, name="r-1-sft-2", folder="runs/r-1/sft/002")
    grants.add(FIRST, SECRETS["first"])
    with ledger.transaction(ANN) as transaction:
        transaction.insert_attempt(second)
    grants.add(second, SECRETS["second"])
    assert grants.known(SECRETS["first"]) is None
    assert grants.known(SECRETS["second"]) is not None


def test_a_host_renews_its_own_and_forgets_what_is_over(ledger: Ledger) -> None:
    grants = Grants(ledger.database, ledger.clock)
    far = replace(FIRST, stage="far", name="r-1-far-1", folder="runs/r-1/far/001", host="b" * 32)
    with ledger.transaction(ANN) as transaction:
        transaction.insert_attempt(far)
    grants.add(FIRST, SECRETS["first"])
    grants.add(far, SECRETS["far"])
    assert grants.renew(None) == [FIRST.folder]
    assert sorted(grants.renew("b" * 32)) == [far.folder, FIRST.folder]
    assert grants.renew("c" * 32) == [FIRST.folder], "it belongs to no host: its job is on another machine"
    with ledger.transaction(ANN) as transaction:
        transaction.update_attempt(FIRST, state=AttemptState.FAILED)
    assert grants.renew(None) == []
    assert grants.known(SECRETS["first"]) is None
    assert grants.known(SECRETS["far"]) is not None
