"""Sinks: external receivers of events, and the rules that select their events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.domain.errors import InputError, nearest

RUN_ENDINGS = ("succeeded", "failed", "rejected", "stopped")
ALL, RUN_ENDED = "all", "run-ended"
FOR_PEOPLE = (
    *(RUN_ENDED, "gate-failed", "budget-80", "approval-needed", "channel-moved", "dead-letter", "sink-paused"),
)  # the default occasions of a sink
OCCASIONS = (ALL, *FOR_PEOPLE, *(f"run-{state}" for state in RUN_ENDINGS))
BUDGET_WARNED, RUN_SET_ASIDE = "run.budget_warned", "run.set_aside"  # events of the control plane
RUN_ENVIRONMENT = "environment.pinned"  # a run's first pin: {"digest", "packages": reward → names with versions}
BY_PERSON, BY_FAILURE = "person", "failing"  # why a sink is paused


@dataclass(frozen=True, slots=True)
class Rule:
    """The events that a sink receives: `Rule(on=("run-ended",), run="sort*")`. An empty field limits nothing."""

    on: tuple[str, ...] = FOR_PEOPLE
    run: str = ""  # pattern of a run's name: * ? [abc]
    owner: str = ""  # the owner of the run
    channel: str = ""  # the moved channel, or the run's release channel
    words: bool = False  # whether to send free text too, which an erasure cannot remove from the receiver

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Rule:
        """Return the rule that plain JSON describes.

        Raises:
            InputError: an occasion or field is unknown.
        """
        for name in given:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise InputError(f"rule: fields must be among {known}, got {name!r}")
        on = tuple(dict.fromkeys(str(word) for word in given.get("on") or FOR_PEOPLE))
        for word in on:
            if word not in OCCASIONS:
                hint = nearest(word, OCCASIONS)
                raise InputError(f"rule: on must be one of {', '.join(OCCASIONS)}, got {word!r}{hint}")
        texts = {name: str(given.get(name) or "") for name in ("run", "owner", "channel")}
        return cls(on, **texts, words=bool(given.get("words")))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON without empty fields."""
        return {name: value for name, value in {**asdict(self), "on": list(self.on)}.items() if value}


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """The settings of a sink, without secrets: `SinkRecord("chat", "webhook", {"url": …, "secret_env": …})`."""

    name: str
    kind: str  # webhook | jsonl | email
    settings: Mapping[str, Any]  # its address, and the NAMES of the variables that contain its secrets
    rules: tuple[Rule, ...]  # it receives the events that any rule selects
    created_at: float
    actor: str  # the principal that added the sink
    paused: str = ""  # why it is paused: person | failing; empty: not paused


@dataclass(frozen=True, slots=True)
class Cursor:
    """The delivery position of a sink, and its last failure."""

    sink: str
    sequence: int  # number of the last event that was delivered or that its rules skipped
    failures: int = 0  # consecutive failures
    error: str = ""  # the last failure, in one line
    failed_since: float | None = None
    not_before: float | None = None  # back-off: the earliest time of the next delivery
    at: float | None = None  # time of the last delivery
    lease_owner: str | None = None
    lease_until: float | None = None


@dataclass(frozen=True, slots=True)
class SinkView:
    """The status of a sink."""

    name: str
    kind: str
    where: str  # the address, without parts that may be secret
    rules: tuple[Rule, ...]
    paused: str
    behind: int  # sealed events after its cursor
    behind_seconds: float  # age of the oldest such event
    failures: int
    error: str
    not_before: float | None
    delivered_at: float | None
    created_at: float
    actor: str
    lacks: str = ""  # a requirement that the answering host does not meet: a variable that is not set


@dataclass(frozen=True, slots=True)
class Envelope:
    """A sealed event in the form that sinks receive: the permanent values and, separately, the erasable free text."""

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
    words: Mapping[str, Any] = field(default_factory=dict)  # empty: the rule excludes free text, or the text was erased

    @property
    def name(self) -> str:
        """The id that all deliveries of this event have, so that a receiver can drop duplicates."""
        return f"evt_{self.sequence}_{self.leaf[:16]}"

    def row(self, table: str) -> Mapping[str, Any]:
        """Return the columns that the event records for a row of this table; empty: the event records none."""
        return next((dict(row[3]) for row in self.audited.get("rows", ()) if row[1] == table), {})


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to a sink about one event, or a test message."""

    id: str  # the same each time the message is sent
    sequence: int  # in the event log; 0: a test
    at: float
    subject: str  # one line for people
    lines: tuple[str, ...]  # three more lines, of which the last contains the next command
    body: Mapping[str, Any]  # plain JSON for programs
