"""The port of sinks, what every back-end of it needs, and the rules that choose a sink's events.

The rules are pure functions of an event, a sink's rules, and what is known of the event's run.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Protocol

from posttrain.domain.errors import InputError, SinkError
from posttrain.domain.lifecycle import Reason
from posttrain.domain.sinks import (
    ALL,
    BUDGET_WARNED,
    BY_FAILURE,
    RUN_ENDED,
    RUN_ENDINGS,
    RUN_SET_ASIDE,
    Envelope,
    Notice,
    Rule,
)
from posttrain.store.writing import SINK_PAUSED

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # without a byte
WHOLE_SECONDS = 30.0  # of one delivery: a receiver that answers a byte now and then is slow, too
VARIABLES = "POSTTRAIN_SINK_"  # how variables begin that a sink may name
_MOST_SECRET = 4096  # bytes of a file that holds one
# Whether an address may be connected to: empty, or why not. A workspace asks nobody; a server has its own policy.
Admit = Callable[[str], str]
_GATE_REASONS = (Reason.GATE_FAILED, Reason.GATE_INCONCLUSIVE, Reason.GATE_ERROR)
_OF_A_RUN = ("run", "stage", "attempt", "signal")  # the first word of kinds whose subject begins with a run's id


def anywhere(address: str) -> str:
    """See `Admit`: every address will do."""
    return ""


class Sink(Protocol):
    """One place that is told of events.

    Every implementation: `send` returns when the place has all of them for good (a file: on the disk; a server: it
    said so), raises `SinkError` in any other case, and comes back within about half a minute. Nothing is
    held between two of them. Some may have arrived
    before it raised: whoever delivers sends all again, and each has its id, by which the receiver drops doubles. Errors
    are one line, in which no secret stands.
    """

    kind: ClassVar[str]
    most: ClassVar[int]  # notices in one `send`

    @property
    def where(self) -> str:
        """For a person: the file or address, without what could be a secret."""

    def send(self, notices: Sequence[Notice]) -> None:
        """Deliver these, in their order.

        Raises:
            SinkError: not all of them are there for good.
        """


def encoded(notice: Notice) -> bytes:
    """The notice for a machine: one line of JSON in ASCII, the same bytes each time."""
    return json.dumps(notice.body, separators=(",", ":"), allow_nan=False).encode("ascii")


def one_line(text: str, most: int = 200) -> str:
    """Words of others on one line, printable ones, not too many."""
    flat = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"


def secret(env: str | None, file: str | None, where: str) -> str:
    """A secret, from the variable or the file that is named.

    Raises:
        SinkError: it is not there, or empty; says the name, never the secret.
    """
    if env:
        found = os.environ.get(env, "")
        if not found.strip():
            raise SinkError(f"{where}: variable {env} must hold the secret where events are delivered, and is not set")
        return found.strip()
    try:
        with open(str(file), "rb") as opened:
            data = opened.read(_MOST_SECRET + 1)
    except OSError as error:
        raise SinkError(f"{where}: secret file {file} cannot be read: {error.strerror or error}") from error
    if not data.strip() or len(data) > _MOST_SECRET or not data.strip().isascii():
        raise SinkError(f"{where}: secret file {file} must hold 1-{_MOST_SECRET} ASCII characters, got {len(data)}")
    return data.decode("ascii").strip()


def refuse_variable(name: Any, field: str) -> None:
    """Refuse a variable that was not made for sinks: whoever may add a sink must not read all that a server knows.

    Raises:
        InputError: it is one.
    """
    if name and not (str(name).startswith(VARIABLES) and str(name).isidentifier()):
        raise InputError(
            f"{field} must begin with {VARIABLES}, which no job gets and no other secret has, got {name!a}"
        )


def absolute(path: str, field: str) -> Path:
    """A path that means the same in every process.

    Raises:
        InputError: it does not.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise InputError(f"{field} must be an absolute path, got {path!r}")
    return Path(path)


class Patience:
    """How long one delivery may take, whatever the other side does; then its connection is cut."""

    def __init__(self, seconds: float = WHOLE_SECONDS) -> None:
        self.seconds, self.over = seconds, False
        self._handle: socket.socket | None = None
        self._lock = threading.Lock()

    def holds(self, connection: socket.socket) -> None:
        """There is a connection now; a handle of our own ends it also once TLS has wrapped it away."""
        with self._lock:
            self._drop()
            self._handle = connection.dup()
            if self.over:
                self._cut()

    @contextmanager
    def runs(self) -> Iterator[None]:
        """The time runs inside this block."""
        timer = threading.Timer(self.seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._drop()

    def _end(self) -> None:
        with self._lock:
            self.over = True
            self._cut()

    def _cut(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class Facts(Protocol):
    """What is known of runs beside their events; asked only where a rule asks."""

    def name(self, run_id: str) -> str:
        """Of a run; empty: there is none."""

    def owner(self, run_id: str) -> str:
        """Of a run; empty: there is none, or it was erased."""

    def channel(self, run_id: str) -> str:
        """That it releases to; empty: none, or it cannot be told."""


def occasions(event: Envelope) -> frozenset[str]:
    """The occasions that an event is."""
    kind, _, what = event.kind.partition(".")
    reason = event.row("stages").get("reason")
    ended = kind == "run" and what in RUN_ENDINGS
    said = {
        ALL: True,
        RUN_ENDED: ended,
        f"run-{what}": ended,
        "gate-failed": event.kind == "stage.rejected" and reason in _GATE_REASONS,
        "budget-80": event.kind == BUDGET_WARNED,
        "approval-needed": event.kind == "approval.requested",
        "channel-moved": event.kind in ("channel.promote", "channel.rollback"),
        "dead-letter": event.kind == RUN_SET_ASIDE or (event.kind == "stage.updated" and reason == Reason.SET_ASIDE),
        "sink-paused": event.kind == SINK_PAUSED and event.row("sinks").get("paused") == BY_FAILURE,
    }
    return frozenset(occasion for occasion, so in said.items() if so)


def run_of(event: Envelope) -> str:
    """The id of the run that an event is about; empty: none."""
    if event.kind.partition(".")[0] in _OF_A_RUN:
        return event.subject.partition("/")[0]
    told = {"approval.requested": "approval_requests", "channel.promote": "releases", "channel.rollback": "releases"}
    return str(event.row(told[event.kind]).get("run_id") or "") if event.kind in told else ""


def channel_of(event: Envelope, facts: Facts) -> str:
    """The channel that an event is about, by itself or by its run; empty: none."""
    if event.kind.startswith("channel."):
        return event.subject
    if event.kind == "approval.requested":
        return str(event.row("approval_requests").get("channel") or "")
    run = run_of(event)
    return facts.channel(run) if run else ""


def matching(rules: Sequence[Rule], event: Envelope, facts: Facts) -> Rule | None:
    """The rule by which a sink is told of an event: the first, or the first that sends words; None: it is not told."""
    what = occasions(event)
    found = [rule for rule in rules if _says(rule, event, what, facts)]
    return next((rule for rule in found if rule.words), found[0] if found else None)


def _says(rule: Rule, event: Envelope, what: frozenset[str], facts: Facts) -> bool:
    if not what.intersection(rule.on):
        return False
    run = run_of(event)
    if rule.run and not (run and fnmatchcase(facts.name(run), rule.run)):
        return False
    if rule.owner and not (run and facts.owner(run) == rule.owner):
        return False
    return not rule.channel or channel_of(event, facts) == rule.channel
