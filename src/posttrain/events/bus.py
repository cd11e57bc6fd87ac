"""The event bus, and the notices that sinks receive.

Every sink receives the sealed events that its rules name, in the log's order, at least once:

::

    step(), of the process that delivers   one thread for each sink that has work
      reads the sinks and their   ──▶      claim its cursor ─▶ read a bounded part of the log ─▶ send ─▶ move the cursor
      cursors in one statement,              │ a failure: back-off in the cursor; after a day of failures a pause
      for any number of events               ▼ another process has the cursor: no delivery

A cursor moves only after its sink has the events. If the process dies in between, the events are sent again with the
same ids. A sink that hangs delays only its own thread. No transaction is open during a delivery.

A notice contains a subject and three lines for people, and plain JSON for programs. Text and JSON contain only the
permanent values of the event log (states, numbers, digests, names of runs and channels). Free text and names of people
are added only if a rule requests them, since a sent notice cannot be erased.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from posttrain.domain.errors import InputError, PosttrainError, SinkError, StaleWriteError
from posttrain.domain.lifecycle import Reason
from posttrain.domain.ports import crashpoint
from posttrain.domain.sinks import BY_FAILURE, Cursor, Envelope, Notice, SinkRecord
from posttrain.events.ports import Sink, matching, occasions, one_line, run_of
from posttrain.store.ledger import Ledger
from posttrain.store.work import Cursors

TEST = "sink.test"  # the type of a test message
_SHOWN = 19  # characters of a digest
_Text = tuple[str, str, str, str]  # subject, what, why, next command
EVENTS = 500  # maximum events read in one pass
BACKOFF = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0)  # seconds of pause after each consecutive failure
PATIENCE = 86400.0  # seconds of failures, after which a sink is paused
_LOOK = 1.0  # seconds between two steps
_MOMENT = 0.05  # seconds between two steps while the process ends
LEAVE = 5.0  # seconds that an ending process waits for pending deliveries
Opener = Callable[[SinkRecord], Sink]


def notice(event: Envelope, words: bool) -> Notice:
    """Return the notice of an event.

    Args:
        words: whether to include free text.
    """
    subject, what, why, command = _texts(event)
    said = _message(event) if words else ""
    lines = (what, f"{why} {said}".strip(), f"Next: {command}")
    body: dict[str, Any] = {
        "id": event.name,
        "sequence": event.sequence,
        "type": event.kind,
        "at": event.at,
        "project": event.project,
        "subject": event.subject,
        "principal": event.principal,
        "auth": event.auth,
        "request": event.request,
        "leaf": event.leaf,
        "occasions": sorted(occasions(event)),
        "audited": event.audited,
        "message": {"subject": subject, "lines": list(lines)},
    }
    if words and event.words:
        body["words"] = event.words
    return Notice(event.name, event.sequence, event.at, subject, lines, body)


def trial(sink: str, project: str, number: str, at: float) -> Notice:
    """Return a message that is marked as a test."""
    ident, subject = f"test_{number}", f"test of sink {sink}"
    lines = (
        f"This is a test of sink {sink}: nothing has happened.",
        "Events that its rules select arrive in this form.",
        "Next: posttrain sink ls",
    )
    body = {"id": ident, "sequence": 0, "type": TEST, "at": at, "project": project, "subject": sink, "test": True}
    return Notice(ident, 0, at, subject, lines, {**body, "message": {"subject": subject, "lines": list(lines)}})


def _texts(event: Envelope) -> _Text:
    for occasion, texts in _TEXTS.items():
        if occasion in occasions(event):
            return texts(event)
    about = run_of(event)
    return (
        f"{event.kind} {event.subject}",
        f"{event.kind}: {event.subject}.",
        "",
        (f"posttrain get {about}" if about else "posttrain ls"),
    )


def _run_ended(event: Envelope) -> _Text:
    run, state = event.subject, event.kind.partition(".")[2]
    verb = {"succeeded": "get", "stopped": "retry"}.get(state, "why")
    return f"run {run} {state}", f"Run {run} ended: {state}.", _reason(event, "runs"), f"posttrain {verb} {run}"


def _gate_failed(event: Envelope) -> _Text:
    run, measured = run_of(event), event.row("stages").get("metrics") or {}
    numbers = [f"{name.removesuffix('/estimate')} {value:.4g}" for name, value in sorted(measured.items())]
    why = f"{_reason(event, 'stages')} Measured: {', '.join(numbers) or 'nothing'}."
    return f"gates of run {run} did not pass", f"The gates of run {run} did not pass.", why, f"posttrain why {run}"


def _budget(event: Envelope) -> _Text:
    run, told = event.subject, event.audited
    spent = [f"{told[name]:.0f} of {told[f'of_{name}']:.0f} {name}" for name in ("tokens", "seconds") if name in told]
    share = f"{100 * told.get('share', 0):.0f} %"
    return (
        f"run {run} has spent {share} of its budget",
        f"Run {run} has spent {share} of its budget.",
        f"Spent: {', '.join(spent)}.",
        f"posttrain get {run}",
    )


def _approval(event: Envelope) -> _Text:
    row, run = event.row("approval_requests"), run_of(event)
    channel, asked = row.get("channel", ""), row.get("asked") or {}
    digest = next((r[2][1] for r in event.audited.get("rows", ()) if r[1] == "approval_requests"), "")
    who = f"run {run}" if run else f"a change of channel {channel}"
    what = f"{who[:1].upper()}{who[1:]} waits for an approval on channel {channel}."
    return (
        f"{who} waits for an approval",
        what,
        f"Requested: {str(asked.get('action', '')).replace('_', ' ')}.",
        f"posttrain approve {run or digest}",
    )


def _moved(event: Envelope) -> _Text:
    channel, row = event.subject, event.row("releases")
    verb = {"channel.promote": "promoted to", "channel.rollback": "rolled back to"}[event.kind]
    model, run = str(row.get("model_digest", ""))[:_SHOWN], row.get("run_id")
    number = next((r[2][2] for r in event.audited.get("rows", ()) if r[1] == "releases"), "")
    why = (
        f"Release {number}{f', of run {run}' if run else ''}; before it: {str(event.audited.get('previous'))[:_SHOWN]}."
    )
    return (
        f"channel {channel} {verb} {model}",
        f"Channel {channel} was {verb} {model}….",
        why,
        f"posttrain get {channel}",
    )


def _dead(event: Envelope) -> _Text:
    name = event.subject
    return (
        f"{name} was set aside",
        f"Checks of {name} failed repeatedly, and it was set aside: nothing is retried until a user requests it.",
        "",
        f"posttrain dead {name}",
    )


def _sink_paused(event: Envelope) -> _Text:
    name = event.subject
    what = f"Sink {name} failed for a long time and was paused: it receives no events until a user resumes it."
    return f"sink {name} was paused", what, "", f"posttrain sink ls, then posttrain sink resume {name}"


_TEXTS: Mapping[str, Callable[[Envelope], _Text]] = {
    "run-ended": _run_ended,
    "gate-failed": _gate_failed,
    "budget-80": _budget,
    "approval-needed": _approval,
    "channel-moved": _moved,
    "dead-letter": _dead,
    "sink-paused": _sink_paused,
}


def _reason(event: Envelope, table: str) -> str:
    """Return, e.g., `Reason: GateFailed: A gate measured less than it requires.`; empty without a reason."""
    code = event.row(table).get("reason")
    if not code:
        return ""
    known = {str(one): one.meaning for one in Reason}
    return f"Reason: {code}{f': {known[code]}' if code in known else '.'}"


def _message(event: Envelope) -> str:
    """Return the free text of the changed rows."""
    found = [row.get("message") for row in event.words.get("rows", ()) if isinstance(row, Mapping)]
    return " ".join(str(text) for text in (*found, (event.words.get("said") or {}).get("error")) if text)


class RunFacts:
    """`Facts` of a ledger.

    Args:
        channel: returns the channel to which a run releases, by the run's id.
    """

    def __init__(self, ledger: Ledger, channel: Callable[[str], str]) -> None:
        self._ledger, self.channel = ledger, channel

    def name(self, run_id: str) -> str:
        """See `Facts.name`."""
        with self._ledger.snapshot() as now:
            return now.run_facts(run_id)[0]

    def owner(self, run_id: str) -> str:
        """See `Facts.owner`."""
        with self._ledger.snapshot() as now:
            return now.run_facts(run_id)[1]


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Delivers pending events to one sink."""

    cursors: Cursors
    record: SinkRecord
    opens: Opener
    facts: RunFacts
    actor: str  # the principal that pauses the sink, in events

    def go_on(self, over: Callable[[], bool] = lambda: False) -> bool:
        """Deliver a limited number of pending events; return whether more events may be pending.

        Args:
            over: returns whether to end; called after each `send`.

        Raises:
            PosttrainError: the ledger is unreachable.
        """
        held = self.cursors.claim(self.record.name)
        if held is None:
            return False
        try:
            return self._deliver(held, over)
        except StaleWriteError:  # the delivery took longer than the lease: another process delivers from the old cursor
            return False

    def _deliver(self, held: Cursor, over: Callable[[], bool]) -> bool:
        with self.cursors.ledger.snapshot() as now:
            registered = {sink.name: sink for sink in now.sinks()}.get(held.sink)
            found = now.envelopes(held.sequence, EVENTS, words=any(rule.words for rule in self.record.rules))
            sealed = now.sealed()
        if registered != self.record or self.record.paused:  # paused, removed or replaced since the claim
            self.cursors.release(held)
            return False
        more, ready = len(found) == EVENTS, list[Notice]()
        try:
            sink = self.opens(self.record)
            for event in found:
                rule = matching(self.record.rules, event, self.facts)
                if rule is not None:
                    ready.append(notice(event, rule.words))
                if len(ready) == sink.most:
                    held, ready = self._sent(held, sink, ready), []
                    if over():
                        self.cursors.release(held)
                        return False
            if ready:
                held = self._sent(held, sink, ready)
        except Exception as error:  # an error of a back-end affects only this sink
            if isinstance(error, PosttrainError) and not isinstance(error, SinkError | InputError):
                raise  # an error of the ledger
            self._failed(held, error)
            return False
        self.cursors.move(held, found[-1].sequence if more else max(sealed, held.sequence), delivered=False, keep=False)
        return more

    def _sent(self, held: Cursor, sink: Sink, ready: list[Notice]) -> Cursor:
        sink.send(ready)
        crashpoint("sink.after_send")
        return self.cursors.move(held, ready[-1].sequence, delivered=True, keep=True)

    def _failed(self, held: Cursor, error: Exception) -> None:
        said = (
            str(error) if isinstance(error, SinkError | InputError) else f"unexpected {type(error).__name__}: {error}"
        )
        known = self.cursors.failed(held, one_line(said, 500), BACKOFF[min(held.failures, len(BACKOFF) - 1)])
        ledger = self.cursors.ledger
        if ledger.clock.now() - (known.failed_since or 0.0) >= PATIENCE:
            with ledger.transaction(self.actor) as transaction:
                transaction.pause_sink(known.sink, BY_FAILURE, {"failures": known.failures}, known.error)


@dataclass(slots=True)
class _Loop:
    """The thread of one sink, which waits until the sink has work, and delivers."""

    deliveries: Deliveries
    due: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    busy: bool = False
    thread: threading.Thread | None = None

    def wake(self) -> None:
        """Notify the thread of pending events; a busy thread finds them at its next step."""
        if self.busy:
            return
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(
                target=self._run, name=f"posttrain-sink-{self.deliveries.record.name}", daemon=True
            )
            self.thread.start()
        self.due.set()

    def end(self) -> None:
        """Prevent the thread from beginning further deliveries."""
        self.over = True
        self.due.set()

    def _run(self) -> None:
        while True:
            self.due.wait()
            self.due.clear()
            self.busy = True
            try:
                with suppress(PosttrainError):  # unreachable ledger, which `step` reports; the next step notifies again
                    while not self.over and self.deliveries.go_on(lambda: self.over):
                        pass
            finally:  # if this thread ends, the next step starts another
                self.busy = False
            if self.over:
                return


class Deliverer:
    """Delivers to every sink of a project, in separate threads of its process.

    Args:
        opens: returns the back-end of a sink.
        channel: returns the channel to which a run releases, by the run's id; called only if a rule names a channel.
        owner: `host:pid:start` of this process; each delivery appends digits, so a delivery that lost its claim while
            sending does not move the cursor of the next delivery.
        alive: returns whether another owner may still be alive.
        actor: the principal that pauses a failing sink, in events.
    """

    def __init__(
        self,
        ledger: Ledger,
        opens: Opener,
        channel: Callable[[str], str],
        owner: str,
        alive: Callable[[str], bool],
        actor: str,
    ) -> None:
        self._ledger, self._opens, self._actor, self._owner, self._alive = ledger, opens, actor, owner, alive
        self._facts, self._serial = RunFacts(ledger, channel), itertools.count()
        self._loops: dict[str, _Loop] = {}
        self.behind = False  # after the last step: whether a sink may soon receive pending events

    def step(self) -> float:
        """Find the sinks with work in one statement, and notify their threads; send no event itself.

        Returns:
            Seconds until the next step.

        Raises:
            PosttrainError: the ledger is unreachable; call again later.
        """
        with self._ledger.snapshot() as now:
            found = now.sink_counts()
        self.behind, moment = False, self._ledger.clock.now()
        kept = {sink.name: sink for sink, _, _ in found if not sink.paused}
        for name in [name for name, loop in self._loops.items() if loop.deliveries.record != kept.get(name)]:
            self._loops.pop(name).end()
        for sink, cursor, sealed in found:
            if sink.paused or (cursor is not None and cursor.sequence >= sealed):
                continue
            due = 0.0 if cursor is None else cursor.not_before or 0.0
            self.behind = self.behind or due <= moment + LEAVE
            if due <= moment:
                self._loop(sink).wake()
        return _LOOK

    def _loop(self, sink: SinkRecord) -> _Loop:
        if sink.name not in self._loops:
            cursors = Cursors(self._ledger, f"{self._owner}{next(self._serial):04}", self._alive)
            self._loops[sink.name] = _Loop(Deliveries(cursors, sink, self._opens, self._facts, self._actor))
        return self._loops[sink.name]

    def finish(self, seconds: float) -> None:
        """Deliver pending events for at most `seconds` seconds. The other events remain pending."""
        until = time.monotonic() + seconds
        with suppress(PosttrainError):  # the ledger is unreachable
            while time.monotonic() < until and self.step() and self.behind:
                time.sleep(_MOMENT)
        self.close(until - time.monotonic())

    def close(self, seconds: float = LEAVE) -> None:
        """Begin no more deliveries; a running delivery may continue for `seconds`, and is possibly repeated later."""
        until = time.monotonic() + seconds
        for loop in self._loops.values():
            loop.end()
        for loop in self._loops.values():
            if loop.thread is not None:
                with suppress(RuntimeError):
                    loop.thread.join(max(0.0, until - time.monotonic()))
