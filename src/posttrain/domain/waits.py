"""The conditions of a stage of kind `wait`: a duration (`for`), a signal that a user sends, or both.

The times of the stage are two columns of its row, which are written once, when the wait begins: `started_at` and, with
`for`, the end of the wait, `not_before`. So a change of the run's driver does not affect the times, and they are never
computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import Driver, StageContract, kind_of
from posttrain.domain.lifecycle import Reason, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.placement import LONGEST, parse_duration
from posttrain.domain.records import Signal, StageRecord
from posttrain.domain.runspec import Name
from posttrain.domain.validation import Frozen, validated

_Seconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=LONGEST)]
_UNITS = (("day", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


class Wait(Frozen):
    """The parameters of a `wait` stage."""

    seconds: _Seconds | None = Field(default=None, alias="for")
    signal: Name | None = None
    within: _Seconds | None = None  # maximum wait for the signal; None: unlimited

    @model_validator(mode="after")
    def _consistent(self) -> Wait:
        if self.seconds is None and self.signal is None:
            raise ValueError("must have `for` (a time, such as 2h) or `signal` (a name), got neither; add one of them")
        if self.within is not None and self.signal is None:
            raise ValueError("`within` needs `signal`, got none; add `signal`, or use `for` instead")
        if self.within is not None and self.seconds is not None and self.within <= self.seconds:
            raise ValueError(f"`within` must be longer than `for`, got {self.within:g} s and {self.seconds:g} s")
        return self

    @property
    def words(self) -> str:
        """The conditions as text: `waits 2 h`, `waits for signal go, at most 1 day (posttrain signal RUN go)`."""
        parts = [span(self.seconds)] if self.seconds is not None else []
        if self.signal is not None:
            most = f", at most {span(self.within)}" if self.within is not None else ""
            parts.append(f"for signal {self.signal}{most} (posttrain signal RUN {self.signal})")
        return f"waits {' and '.join(parts)}"

    def begun(self, now: float) -> dict[str, float]:
        """Return the columns of the row of a stage whose wait begins at `now`."""
        return {"started_at": now} | ({"not_before": now + self.seconds} if self.seconds is not None else {})

    def given_up_at(self, stage: StageRecord) -> float | None:
        """Return the time at which the wait for the signal ends; None: never."""
        return None if self.within is None or stage.started_at is None else stage.started_at + self.within


def wait_contract(params: Mapping[str, Any], source: str) -> StageContract:
    """Return the contract of a `wait` stage, which has no inputs or outputs.

    Raises:
        InputError: a key is unknown, a value is out of range, or there is no condition to wait for.
    """
    wait = validated(Wait, dict(params), source)
    return StageContract(wait.model_dump(by_alias=True, exclude_none=True), {}, {})


def waits(manifest: Manifest) -> Iterator[tuple[str, Wait]]:
    """Yield name and parameters of every `wait` stage."""
    for stage in manifest.stages:
        if kind_of(stage.kind).driver is Driver.WAIT:
            yield stage.name, Wait.model_validate(stage.params)


def wait_of(manifest: Manifest, stage: str) -> Wait:
    """Return the conditions of one stage.

    Raises:
        InputError: the stage does not exist, or is not a `wait` stage.
    """
    found = dict(waits(manifest)).get(stage)
    if found is None:
        raise InputError(f"stage {stage!r} must be a wait stage")
    return found


def signals_of(manifest: Manifest) -> set[str]:
    """Return the signals that a run waits for."""
    return {wait.signal for _, wait in waits(manifest) if wait.signal is not None}


def times(wait: Wait, stage: StageRecord) -> list[float]:
    """Return the times at which a waiting stage must be checked even if no signal arrives."""
    return [at for at in (stage.not_before, wait.given_up_at(stage)) if at is not None]


def waiting(stage: StageRecord) -> bool:
    """Return whether a stage waits for a time, a signal or an approval now."""
    return stage.state == StageState.READY and stage.reason in (
        Reason.WAITING_FOR_TIME,
        Reason.WAITING_FOR_SIGNAL,
        Reason.WAITING_FOR_APPROVAL,
    )


def told(stage: StageRecord, wait: Wait, sent: Signal | None) -> tuple[Reason, str, str]:
    """Return reason, message and next action of a stage that continues to wait.

    Args:
        sent: the stage's signal; None: the signal was not sent.
    """
    parts, ends = [], wait.given_up_at(stage)
    missing = wait.signal is not None and sent is None
    if missing:
        most = f" (until {moment(ends)} at the latest)" if ends is not None else ""
        parts = [f"for signal {wait.signal}{most}"]
    action = f"posttrain signal {stage.run_id} {wait.signal}" if missing else "none needed"
    if stage.not_before is None:
        return Reason.WAITING_FOR_SIGNAL, f"waits {parts[0]}" if parts else "waits", action
    return Reason.WAITING_FOR_TIME, " and ".join([f"waits until {moment(stage.not_before)}", *parts]), action


def moment(at: float) -> str:
    """Return `2026-11-22 14:05:00 UTC`, independent of the local time zone."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def span(seconds: float) -> str:
    """Return a time in its two greatest units: `2 h`, `1 h 30 min`, `2 days`."""
    parts: list[str] = []
    left = max(0.0, seconds)
    for unit, size in _UNITS:
        number = int(left // size) if unit != "s" else round(left, 3)
        if number and len(parts) < 2:
            plural = "s" if unit == "day" and number > 1 else ""
            parts.append(f"{number:g} {unit}{plural}")
            left -= number * size
        elif parts:
            break
    return " ".join(parts) or "0 s"
