"""Reason codes are the members of one enum: the sources are read for codes that are written out elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.domain import lifecycle
from posttrain.domain.errors import FailureClass
from posttrain.domain.lifecycle import Reason, meaning

ROOT = Path(lifecycle.__file__).parents[1]
ENUM = "domain/lifecycle.py"
# rooms that write or ask for reasons; elsewhere such a word is another's (a class of transformers, a signature)
ROOMS = (
    "api",
    "app",
    "cli",
    "control",
    "decision",
    "drivers",
    "preflight",
    "store",
    "telemetry",
    "trackers",
    "views",
    "web",
    "workspace",
)
_CODE = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*(?::[a-z_]+)?")  # BackOff, JobFailed:bug
_HUMPS = re.compile(r"(?:[A-Z][a-z]+){2,}(?::[a-z_]*)?")  # two words at least, so no word of a text
_CODES = {reason.value for reason in Reason}


def findings(source: str, room: str = "control") -> Iterator[str]:
    """Where a reason is written out: a known code anywhere, any code of the control room, any that is called so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in _CODES or (room == "control" and _HUMPS.fullmatch(node.value)):
                yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.keyword) and node.arg == "reason":
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and _CODE.fullmatch(part.value):
                    yield f"{part.lineno}: reason={part.value!r}"


def test_no_reason_is_written_out_elsewhere() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{finding}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for finding in findings(path.read_text(encoding="utf-8"), room)
    }
    assert sorted(found) == [], f"use posttrain.{ENUM.removesuffix('.py').replace('/', '.')}.Reason"


@pytest.mark.parametrize(
    "source",
    [
        'transaction.update_stage(stage, reason="Running")',
        'transaction.update_stage(stage, reason="Tired")',
        'transaction.update_stage(stage, reason="GatePassed" if passed else "Tired")',
        'Say(stage, "WaitingForGodot", "")',
        'WAITING = "WaitingForDevices"',
        'if stage.reason in ("CircuitOpen", "Corrupt"): pass',
        'reason = "JobFailed:" + kind.value',
        'match stage.reason:\n    case "Ready": pass',
    ],
)
def test_a_reason_is_found_however_it_is_written(source: str) -> None:
    assert len(list(findings(source))) >= 1


@pytest.mark.parametrize(
    "source",
    ['erase(reason="he asked for it")', 'say("Running on")', "reason = Reason.RUNNING", 'quarantine(reason="")'],
)
def test_other_words_are_not_meant(source: str) -> None:
    assert list(findings(source)) == []


def test_every_code_is_the_word_that_was_stored_and_says_what_it_means() -> None:
    for reason in Reason:
        assert _CODE.fullmatch(reason.value), reason
        assert str(reason) == reason.value == f"{reason}"
        assert reason.name == re.sub(r"(?<=[a-z])(?=[A-Z])|:", "_", reason.value).upper()
        assert reason.of
        assert set(reason.of) <= {"run", "stage", "attempt"}
        assert re.fullmatch(r"[A-Z][^|\n]*\.", reason.meaning), reason
        assert re.fullmatch(r"[a-z`][^|\n]*[^.]", reason.action), reason


def test_every_class_of_failure_has_its_reason() -> None:
    told = {kind: Reason.of_failure(kind).value for kind in FailureClass}
    assert told.pop(FailureClass.BUDGET) == "BudgetExceeded"
    assert told.pop(FailureClass.PREEMPTED) == "Preempted"
    assert told == {kind: f"JobFailed:{kind.value}" for kind in told}


def test_a_code_of_another_version_stands_for_itself() -> None:
    assert meaning("Launched") == "The attempt's job is submitted."
    assert meaning("FromTheFuture") == "FromTheFuture"
