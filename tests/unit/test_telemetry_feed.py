"""What of a stage's metrics is written to trackers: each step once, the first value, in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain.domain.jobs import Metric
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.mailbox import Mailbox
from posttrain.telemetry import tracker
from posttrain.telemetry.tracker import Row, StageFeed


@dataclass
class Tried:
    """An attempt as the ledger names it."""

    folder: str
    channel: str | None = None


def taken(one: StageFeed, step: int, values: Mapping[str, float]) -> list[Any]:
    return [dict(row.values) for row in one.take(step, 1.0, values)]


@pytest.fixture
def fed(tmp_path: Path) -> StageFeed:
    return StageFeed(tmp_path, "sft")


def test_of_a_step_that_is_redone_the_first_value_counts_and_another_one_is_told(fed: StageFeed) -> None:
    for step in (1, 2, 3):
        assert taken(fed, step, {"loss": float(step), "memory/peak": 1.0}) == [{"loss": step, "memory/peak": 1.0}]
    assert taken(fed, 2, {"loss": 2.0, "memory/peak": 9.0}) == []
    assert (fed.differing, fed.difference) == (0, ""), "another process has other memory"
    assert taken(fed, 2, {"loss": 2.5, "new": 1.0}) == [{"new": 1.0}], "what was not told of before is"
    assert taken(fed, 3, {"loss": 3.5}) == []
    assert (fed.differing, fed.difference) == (2, "sft/loss at step 2: first 2, redone 2.5")
    assert taken(fed, 2, {"loss": 2.0}) == [], "the first value stays the one that others are compared with"
    assert fed.differing == 2


def test_what_is_no_number_is_what_it_was(fed: StageFeed) -> None:
    [row] = taken(fed, 1, {"loss": math.nan})
    assert math.isnan(row["loss"])
    assert taken(fed, 1, {"loss": math.nan}) == []
    assert fed.differing == 0
    taken(fed, 1, {"loss": 1.0})
    assert fed.differing == 1


def test_the_steps_that_were_written_last_are_remembered(fed: StageFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "_REMEMBERED", 3)
    for step in range(1, 6):
        taken(fed, step, {"loss": 0.0})
    for step in range(1, 6):
        assert taken(fed, step, {"loss": 1.0}) == []
    assert (fed.differing, fed.difference) == (3, "sft/loss at step 3: first 0, redone 1")


def test_each_segment_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed, attempts = StageFeed(tmp_path, "sft"), [Tried("first"), Tried("second")]
    for number, attempt in enumerate(attempts):
        with EventWriter(AttemptFolder(tmp_path / attempt.folder)) as sink:
            sink(Metric(number + 1, {"loss": float(number)}, 5.0))
    assert list(fed.read(attempts)) == [Row("sft", 1, 5.0, {"loss": 0.0}), Row("sft", 2, 5.0, {"loss": 1.0})]  # type: ignore[arg-type]
    asked: list[int] = []
    segments = Mailbox.segments

    def noted(self: Mailbox, stream: str, after: int = 0, *more: Any) -> Any:
        asked.append(after)
        return segments(self, stream, after, *more)

    monkeypatch.setattr(Mailbox, "segments", noted)
    with EventWriter(AttemptFolder(tmp_path / "second")) as sink:
        sink(Metric(3, {"loss": 3.0}, 6.0))
    assert list(fed.read(attempts)) == [Row("sft", 3, 6.0, {"loss": 3.0})]  # type: ignore[arg-type]
    assert asked == [1, 1]
