"""Sinks: places outside that are told of events, and which events each is told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.domain.errors import InputError, nearest

RUN_ENDINGS = ("succeeded", "failed", "rejected", "stopped")
ALL, RUN_ENDED = "all", "run-ended"
FOR_PEOPLE = (
    *(RUN_ENDED, "gate-failed", "budget-80", "approval-needed", "channel-moved", "dead-letter", "sink-paused"),
)  # what a sink is told of that says nothing else
OCCASIONS = (ALL, *FOR_PEOPLE, *(f"run-{state}" for state in RUN_ENDINGS))
BUDGET_WARNED, RUN_SET_ASIDE = "run.budget_warned", "run.set_aside"  # events of the control plane
RUN_ENVIRONMENT = "environment.pinned"  # a run's first pin: {"digest", "packages": reward → names with versions}
BY_PERSON, BY_FAILURE = "person", "failing"  # why a sink is paused


@dataclass(frozen=True, slots=True)
class Rule:
    """Of which events a sink is told: `Rule(on=("run-ended",), run="sort*")`. What is empty limits nothing."""

    on: tuple[str, ...] = FOR_PEOPLE
    run: str = ""  # pattern of a run's name: * ? [abc]
    owner: str = ""  # of the run
    channel: str = ""  # that is moved, or that the run releases to
    words: bool = False  # send free text too, which an erasure does not reach there

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Rule:
        """From plain JSON.

        Raises:
            InputError: an occasion that there is not, or another field than a rule has.
        """
        for name in given:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise InputError(f"rule: must have no other field than {known}, got {name!r}")
        on = tuple(dict.fromkeys(str(word) for word in given.get("on") or FOR_PEOPLE))
        for word in on:
            if word not in OCCASIONS:
                hint = nearest(word, OCCASIONS)
                raise InputError(f"rule: on must be of {', '.join(OCCASIONS)}, got {word!r}{hint}")
        texts = {name: str(given.get(name) or "") for name in ("run", "owner", "channel")}
        return cls(on, **texts, words=bool(given.get("words")))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, without what is empty."""
        return {name: value for name, value in {**asdict(self), "on": list(self.on)}.items() if value}


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """A sink as it was added: `SinkRecord("chat", "webhook", {"url": …, "secret_env": …})`. It holds no secret."""

    name: str
    kind: str  # webhook | jsonl | email
    settings: Mapping[str, Any]  # where it is, and the NAMES of what holds its secrets
    rules: tuple[Rule, ...]  # it is told of what any of them says
    created_at: float
    actor: str  # who added it
    paused: str = ""  # empty: it delivers | person | failing


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a sink has come, and what stands in its way."""

    sink: str
    sequence: int  # of the last event that it has, or that no rule of it asks for
    failures: int = 0  # in a row
    error: str = ""  # of the last of them, one line
    failed_since: float | None = None
    not_before: float | None = None  # back-off
    at: float | None = None  # of the last delivery
    lease_owner: str | None = None
    lease_until: float | None = None


@dataclass(frozen=True, slots=True)
class SinkView:
    """How a sink stands."""

    name: str
    kind: str
    where: str  # without what could be a secret
    rules: tuple[Rule, ...]
    paused: str
    behind: int  # sealed events that it has not passed
    behind_seconds: float  # since the oldest of them
    failures: int
    error: str
    not_before: float | None
    delivered_at: float | None
    created_at: float
    actor: str
    lacks: str = ""  # what it needs and is not there, where whoever answered looked: a variable that is not set


@dataclass(frozen=True, slots=True)
class Envelope:
    """A sealed event as sinks are given it: what is kept for ever, and apart from it the words that may be erased."""

    id: int
    sequence: int
    kind: str
    subject: str
    project: str
    principal: str  # pseudonymous id
    auth: str
    request: str
    at: float
    leaf: str  # 64 hexadecimal digits
    audited: Mapping[str, Any]
    words: Mapping[str, Any] = field(default_factory=dict)  # empty: it has none, or they were erased

    @property
    def name(self) -> str:
        """The id that every delivery of it has: a receiver drops what it has already."""
        return f"evt_{self.sequence}_{self.leaf[:16]}"

    def row(self, table: str) -> Mapping[str, Any]:
        """The columns that it tells of a row of this table; empty: it tells of none."""
        return next((dict(row[3]) for row in self.audited.get("rows", ()) if row[1] == table), {})


@dataclass(frozen=True, slots=True)
class Notice:
    """What a sink is told: of one event, or a test."""

    id: str  # the same each time it is sent
    sequence: int  # in the event log; 0 of a test
    at: float
    subject: str  # for a person: one line
    lines: tuple[str, ...]  # and three more, the last with the next command
    body: Mapping[str, Any]  # for a machine: plain JSON
