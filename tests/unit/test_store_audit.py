"""Rows against the event log: an edited row is found though the chain holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.domain.errors import IntegrityError
from posttrain.domain.records import Asset, RunRecord, StageRecord
from posttrain.store.audit import verify_releases
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain

MODEL, OTHER, MANIFEST = (f"sha256:{digit * 64}" for digit in "abc")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A run whose stage failed, was retried and made a model, which was promoted twice over another and rolled back."""
    ledger = Ledger(Database(tmp_path / "ledger.db"))
    stage = StageRecord("run1", "sft", 0, "sft", "pending")
    with ledger.transaction("ann") as transaction:
        transaction.insert_asset(
            Asset("dataset", "train", 0, OTHER, "file", 1.5, "ann", {"rows": 3}, ("dataset:raw@1",))
        )
        transaction.insert_run(RunRecord("run1", "run", MANIFEST, "pending", "ann", 1.5), [stage])
        for state in ("ready", "running", "failed", "pending", "ready", "running"):
            inputs = {"inputs": {"data": {"digest": OTHER, "meta": {"share": 1.0}}}} if state == "ready" else {}
            stage = transaction.update_stage(stage, state=state, **inputs)
        outputs = {"model": {"digest": MODEL, "form": "tree"}}
        transaction.update_stage(stage, state="succeeded", outputs=outputs, metrics={"loss": float("nan")})
        transaction.put_cache("sha256:key", "run1", "sft")
        transaction.append_release("prod", OTHER, None, "promote", expected=None)
        transaction.append_release("prod", MODEL, "run1", "promote", expected=OTHER, report_digest=MANIFEST)
    with ledger.transaction("bob") as transaction:
        transaction.append_release("prod", OTHER, None, "rollback", expected=MODEL)
    seal(ledger)
    yield ledger
    ledger.close()


def test_what_happened_is_what_the_rows_say(ledger: Ledger) -> None:
    assert verify_releases(ledger) == 6
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, "run1", "promote", expected=OTHER)
    assert verify_releases(ledger) == 7  # not sealed yet


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            f"UPDATE releases SET model_digest = '{MODEL}' WHERE sequence = 3",
            "release 3 of channel prod: model must be",
        ),
        ("UPDATE releases SET actor = 'eve' WHERE sequence = 2", "release 2 of channel prod: actor must be 'ann'"),
        ("UPDATE releases SET report_digest = NULL WHERE sequence = 2", "release 2 of channel prod: report must be"),
        ("UPDATE releases SET at = at + 1 WHERE sequence = 1", "release 1 of channel prod: at must be"),
        ("UPDATE releases SET run_id = NULL WHERE sequence = 2", "release 2 of channel prod: run must be 'run1'"),
        ("UPDATE releases SET action = 'promote' WHERE sequence = 3", "action must be 'rollback'"),
        ("DELETE FROM releases WHERE sequence = 3", "release 3 of channel prod: an event tells of it, but it is gone"),
        ("UPDATE releases SET channel = 'canary' WHERE sequence = 1", "release 1 of channel canary: stands in"),
        (f"UPDATE stages SET outputs = replace(outputs, '{MODEL}', '{OTHER}')", "stage run1/sft: outputs must be"),
        (f"UPDATE stages SET inputs = replace(inputs, '{OTHER}', '{MODEL}')", "stage run1/sft: inputs must be"),
        ("UPDATE stages SET cached_from = 'run0/sft'", "stage run1/sft: cached_from must be None"),
        (f"UPDATE runs SET manifest_digest = '{MODEL}'", "run run1: manifest must be"),
        (f"UPDATE assets SET digest = '{MODEL}'", "asset dataset:train@1: digest must be"),
        ("UPDATE assets SET parents = '[]'", "asset dataset:train@1: parents must be ['dataset:raw@1']"),
    ],
)
def test_an_edited_row_is_named_though_the_chain_holds(
    tmp_path: Path, ledger: Ledger, statement: str, words: str
) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        assert connection.execute(statement).rowcount == 1
    connection.close()
    verify_chain(ledger)
    with pytest.raises(IntegrityError) as caught:
        verify_releases(ledger)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
