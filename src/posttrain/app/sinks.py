"""The sinks of a workspace: back-ends, adding and testing sinks, and delivery."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.access.ports import OS
from posttrain.api.control import Control
from posttrain.api.verbs import answers
from posttrain.data.refs import is_confined
from posttrain.domain.errors import ConflictError, InputError, nearest
from posttrain.domain.sinks import BY_PERSON, Cursor, Rule, SinkRecord, SinkView
from posttrain.events.bus import LEAVE, Deliverer, trial
from posttrain.events.ports import Admit, Sink, anywhere, public, refuse_foreign_secrets, refuse_resolved
from posttrain.events.sinks.email import EmailSink
from posttrain.events.sinks.jsonl import JsonLinesSink
from posttrain.events.sinks.webhook import WebhookSink
from posttrain.execution.processes import process_alive, process_name
from posttrain.workspace.settings import OpenWorkspace

_OPENS: Mapping[str, Callable[[Mapping[str, Any], Callable[[], float], Admit], Sink]] = {
    "webhook": WebhookSink,
    "jsonl": lambda settings, _now, _admit: JsonLinesSink(settings),
    "email": lambda settings, _now, admit: EmailSink(settings, admit),
}
KINDS = tuple(_OPENS)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_ENDS = 8  # random bytes of a test's id
_SERIAL = itertools.count()  # numbers the deliverers of this process in their owner names


def open_sink(workspace: OpenWorkspace, record: SinkRecord, *, served: bool = False) -> Sink:
    """Return the back-end of a sink, without opening a connection.

    Args:
        served: whether a server delivers. A server connects to public addresses only, and uses only secrets of the
            sink's project.

    Raises:
        InputError: the kind is unknown, or the settings are invalid or name a secret of another project.
    """
    admit = public() if served else anywhere
    if served:
        refuse_foreign_secrets(workspace.ledger.project, record.name, record.settings)
    if record.kind not in _OPENS:
        raise InputError(f"sink {record.name}: kind must be one of {', '.join(KINDS)}, got {record.kind!r}")
    return _OPENS[record.kind](record.settings, workspace.ledger.clock.now, admit)


def deliverer(workspace: OpenWorkspace, *, served: bool = False) -> Deliverer:
    """Return an object that delivers events to the sinks of a workspace. The caller must seal pending events.

    Args:
        served: whether a server delivers; see `open_sink`.
    """

    @functools.lru_cache(maxsize=1024)
    def channel(run_id: str) -> str:
        found, _ = workspace.manifest_or_trouble(workspace.ledger.run(run_id))
        return found.release.channel if found is not None and found.release is not None else ""

    opens = functools.partial(open_sink, workspace, served=served)
    owner = f"{process_name()}{next(_SERIAL):06}"  # distinct: at most one deliverer delivers to a sink at a time
    return Deliverer(workspace.ledger, opens, channel, owner, process_alive, workspace.actor)


def announce(workspace: OpenWorkspace) -> None:
    """Seal recent events and deliver them to sinks for a few seconds; in a server, only the driver delivers.

    Undelivered events wait for the next driver, and `posttrain sink ls` shows their number.
    """
    workspace.seal()
    if workspace.ledger.auth == OS and not workspace.read_only:
        with suppress(KeyboardInterrupt):  # an interrupt ends the wait for sinks, not the command
            deliverer(workspace).finish(LEAVE)


@answers(Control.sinks)
def sinks(workspace: OpenWorkspace) -> list[SinkView]:
    """Return the state of every sink."""
    workspace.seal()
    ledger, found = workspace.ledger, []
    moment = ledger.clock.now()
    with ledger.snapshot() as now:
        for record, cursor, _ in now.sink_counts():
            known = cursor or Cursor(record.name, now.sink_added_at(record.name))
            behind, since = now.events_after(known.sequence)
            found.append(
                SinkView(
                    name=record.name,
                    kind=record.kind,
                    where=_where(workspace, record),
                    rules=record.rules,
                    paused=record.paused,
                    behind=behind,
                    behind_seconds=0.0 if since is None else max(0.0, moment - since),
                    failures=known.failures,
                    error=known.error,
                    not_before=known.not_before,
                    delivered_at=known.at,
                    created_at=record.created_at,
                    actor=record.actor,
                    lacks=_lacks(record),
                )
            )
    return found


def view(workspace: OpenWorkspace, name: str) -> SinkView:
    """Return the state of a sink.

    Raises:
        NotFoundError: there is no sink with this name.
    """
    workspace.ledger.sink(name)
    return next(one for one in sinks(workspace) if one.name == name)


@answers(Control.add_sink)
def add_sink(
    workspace: OpenWorkspace,
    name: str,
    kind: str,
    settings: Mapping[str, Any],
    rule: Mapping[str, Any],
    *,
    from_start: bool = False,
) -> SinkView:
    """Add a sink.

    Raises:
        InputError: the name, a setting or the rule is invalid.
        ConflictError: there is a sink with this name.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"sink: name must be 1-63 of a-z 0-9 _ - and begin with a letter or digit, got {name!a}")
    if kind not in KINDS:
        raise InputError(f"sink {name}: kind must be one of {', '.join(KINDS)}, got {kind!a}{nearest(kind, KINDS)}")
    if workspace.ledger.auth != OS and (kind == "jsonl" or "secret_file" in settings):  # the caller uses a token
        raise InputError(
            f"sink {name}: a sink that reads or writes a file can be added only on the server's machine; add it there, "
            "or use a webhook with --secret-env"
        )
    record = SinkRecord(name, kind, dict(settings), (Rule.of(rule),), 0.0, workspace.actor)
    open_sink(workspace, record, served=is_confined())
    if kind == "jsonl" and not Path(str(settings["path"])).parent.is_dir():
        raise InputError(f"sink {name}: the folder of {settings['path']} does not exist; create it")
    if is_confined():
        host = urlsplit(str(settings.get("url") or "")).hostname or str(settings.get("host") or "")
        refuse_resolved(host, public(), f"sink {name}")
    workspace.seal()
    with workspace.ledger.transaction(workspace.actor) as transaction:
        if any(one.name == name for one in transaction.snapshot.sinks()):
            raise ConflictError(f"sink {name} exists; posttrain sink remove {name} removes it, or choose another name")
        transaction.add_sink(record, 0 if from_start else transaction.snapshot.sealed())
    return view(workspace, name)


@answers(Control.test_sink)
def test_sink(workspace: OpenWorkspace, name: str) -> str:
    """Send a message marked as a test, even to a paused sink; return the sink's address.

    Raises:
        SinkError: the sink did not accept the message.
    """
    ledger = workspace.ledger
    sink = open_sink(workspace, ledger.sink(name), served=is_confined())
    sink.send([trial(name, ledger.project, ledger.entropy(_ENDS).hex(), ledger.clock.now())])
    return sink.where


def _lacks(record: SinkRecord) -> str:
    """Return the variable or file that the sink needs and this process lacks; "" if nothing is missing."""
    for setting, value in record.settings.items():
        if setting.endswith("_env") and not os.environ.get(str(value), "").strip():
            return f"variable {value} is not set"
        if setting == "secret_file" and not os.access(str(value), os.R_OK):
            return f"file {value} cannot be read"
    return ""


def lacking(workspace: OpenWorkspace) -> list[tuple[str, str]]:
    """Return (sink, missing variable or file) for every sink that is not paused and cannot deliver here."""
    with workspace.ledger.snapshot() as now:
        records = [record for record, _, _ in now.sink_counts() if not record.paused]
    return [(record.name, lacks) for record in records if (lacks := _lacks(record))]


@answers(Control.pause_sink)
def pause_sink(workspace: OpenWorkspace, name: str) -> SinkView:
    """Pause deliveries to a sink; return the sink."""
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.snapshot.sink(name)
        transaction.pause_sink(name, BY_PERSON)
    return view(workspace, name)


@answers(Control.resume_sink)
def resume_sink(workspace: OpenWorkspace, name: str, *, skip: bool = False) -> SinkView:
    """Resume deliveries to a sink; with `skip`, omit the events that have not been delivered."""
    workspace.seal()
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.snapshot.sink(name)
        transaction.resume_sink(name, transaction.snapshot.sealed() if skip else None)
    announce(workspace)
    return view(workspace, name)


@answers(Control.remove_sink)
def remove_sink(workspace: OpenWorkspace, name: str) -> None:
    """Remove a sink."""
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.snapshot.sink(name)
        transaction.remove_sink(name)


def _where(workspace: OpenWorkspace, record: SinkRecord) -> str:
    try:
        return open_sink(workspace, record).where
    except InputError as error:  # the sink's settings were erased or altered
        return str(error)
