"""What a sink is told of an event: a subject and three lines for a person, plain JSON for a machine.

Both are made of what the event log keeps for ever (states, numbers, digests, names of runs and channels). Free text
and names of people are added only where a rule says so: what was sent cannot be erased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.domain.lifecycle import Reason
from posttrain.domain.sinks import Envelope, Notice
from posttrain.events.rules import occasions, run_of

TEST = "sink.test"  # the type of a message that tells of nothing
_SHOWN = 19  # characters of a digest
_Text = tuple[str, str, str, str]  # subject, what, why, next command


def notice(event: Envelope, words: bool) -> Notice:
    """What is said of an event.

    Args:
        words: free text is sent too.
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
    """A message that is marked as a test."""
    ident, subject = f"test_{number}", f"test of sink {sink}"
    lines = (
        f"This is a test of sink {sink}: nothing has happened.",
        "Events that its rules name arrive like this.",
        "Next: posttrain sink ls",
    )
    body = {"id": ident, "sequence": 0, "type": TEST, "at": at, "project": project, "subject": sink, "test": True}
    return Notice(ident, 0, at, subject, lines, {**body, "message": {"subject": subject, "lines": list(lines)}})


def _texts(event: Envelope) -> _Text:
    for occasion, texts in _TEXTS.items():
        if occasion in occasions(event):
            return texts(event)
    about = run_of(event)
    command = f"posttrain get {about}" if about else "posttrain ls"
    return f"{event.kind} {event.subject}", f"{event.kind}: {event.subject}.", "", command


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
    what = f"Run {run} has spent {share} of its budget."
    return f"run {run} has spent {share} of its budget", what, f"Spent: {', '.join(spent)}.", f"posttrain get {run}"


def _approval(event: Envelope) -> _Text:
    row, run = event.row("approval_requests"), run_of(event)
    channel, asked = row.get("channel", ""), row.get("asked") or {}
    digest = next((r[2][1] for r in event.audited.get("rows", ()) if r[1] == "approval_requests"), "")
    who = f"run {run}" if run else f"a change of channel {channel}"
    what = f"{who[:1].upper()}{who[1:]} waits for an approval on channel {channel}."
    command = f"posttrain approve {run or digest}"
    return (
        f"{who} waits for an approval",
        what,
        f"Asked for: {str(asked.get('action', '')).replace('_', ' ')}.",
        command,
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
    what = f"Looks at {name} failed again and again, and it was set aside: nothing is tried until a person says so."
    return f"{name} was set aside", what, "", f"posttrain dead {name}"


def _sink_paused(event: Envelope) -> _Text:
    name = event.subject
    what = f"Sink {name} failed for long and was paused: it is told of nothing until a person says so."
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
    """`Reason: GateFailed: A gate measured less than it asks for.`; empty where none is told."""
    code = event.row(table).get("reason")
    if not code:
        return ""
    known = {str(one): one.meaning for one in Reason}
    return f"Reason: {code}{f': {known[code]}' if code in known else '.'}"


def _message(event: Envelope) -> str:
    """The free text of what changed."""
    found = [row.get("message") for row in event.words.get("rows", ()) if isinstance(row, Mapping)]
    return " ".join(str(text) for text in (*found, (event.words.get("said") or {}).get("error")) if text)
