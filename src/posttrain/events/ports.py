"""The port of sinks, their shared base, the rules that choose a sink's events, and admission to addresses.

The rules are pure functions of an event, a sink's rules, and facts about the event's run.

Sinks of a server may connect to public addresses and to those that the server's administrator names. A user who may add
a sink need not own the server's network: without this rule a webhook could point at what only the server reaches, such
as a cloud's metadata. The server's configuration assigns secrets to projects, and a sink uses only those of its
project.

A sink opens a connection to an address that may be reached, within bounded time, and closes it afterwards.
"""

import http.client
import ipaddress
import json
import os
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Protocol

from posttrain.domain.errors import InputError, SinkError
from posttrain.domain.ids import is_project
from posttrain.domain.lifecycle import Reason
from posttrain.domain.runspec import may_be_secret
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
from posttrain.store.writer import SINK_PAUSED

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # without a byte
WHOLE_SECONDS = 30.0  # of one delivery: also bounds a receiver that sends a byte now and then
VARIABLES = "POSTTRAIN_SINK_"  # prefix of the variables that a sink may name
_MOST_SECRET = 4096  # bytes of a secret's file
# Returns why an address may not be connected to; empty: it may. A server has its own policy.
Admit = Callable[[str], str]
_GATE_REASONS = (Reason.GATE_FAILED, Reason.GATE_INCONCLUSIVE, Reason.GATE_ERROR)
_OF_A_RUN = ("run", "stage", "attempt", "signal")  # the first word of kinds whose subject begins with a run's id


def anywhere(address: str) -> str:
    """See `Admit`: admit every address."""
    return ""


class Sink(Protocol):
    """One place that receives events.

    Every implementation: `send` returns when the place has durably stored all of them (a file: on the disk; a server:
    it confirmed that), raises `SinkError` in any other case, and returns within about half a minute. It holds nothing
    between two calls. Some events may have arrived before it raised: the caller sends all again, and each has its id,
    by which the receiver drops duplicates. Errors are one line without any secret.
    """

    kind: ClassVar[str]
    most: ClassVar[int]  # notices in one `send`

    @property
    def where(self) -> str:
        """The file or address for a person, without parts that could be secret."""

    def send(self, notices: Sequence[Notice]) -> None:
        """Deliver these, in their order.

        Raises:
            SinkError: not all of them are stored durably.
        """


def encoded(notice: Notice) -> bytes:
    """Return the notice for a machine: one line of JSON in ASCII, the same bytes each time."""
    return json.dumps(notice.body, separators=(",", ":"), allow_nan=False).encode("ascii")


def one_line(text: str, most: int = 200) -> str:
    """Return foreign text on one line: printable characters, at most `most`."""
    flat = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"


def secret(env: str | None, file: str | None, where: str) -> str:
    """Return a secret, from the named variable or file.

    Raises:
        SinkError: it is missing or empty; the message contains the name, never the secret.
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
    """Refuse a variable that is not meant for sinks: adding a sink must not give access to other secrets of a server.

    Raises:
        InputError: it does not begin with `VARIABLES`.
    """
    if name and not (str(name).startswith(VARIABLES) and str(name).isidentifier()):
        raise InputError(
            f"{field} must begin with {VARIABLES}, which no job gets and no other secret has, got {name!a}"
        )


def absolute(path: str, field: str) -> Path:
    """Return an absolute path, which is the same in every process.

    Raises:
        InputError: it is not absolute.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise InputError(f"{field} must be an absolute path, got {path!r}")
    return Path(path)


class Patience:
    """The time limit of one delivery; when it passes, the connection is cut."""

    def __init__(self, seconds: float = WHOLE_SECONDS) -> None:
        self.seconds, self.over = seconds, False
        self._handle: socket.socket | None = None
        self._lock = threading.Lock()

    def holds(self, connection: socket.socket) -> None:
        """Register a connection; a duplicate handle can end it also after TLS has wrapped it."""
        with self._lock:
            self._drop()
            self._handle = connection.dup()
            if self.over:
                self._cut()

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Run the time limit inside this block."""
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
    """Facts about runs that events do not contain; queried only where a rule needs them."""

    def name(self, run_id: str) -> str:
        """Return a run's name; empty: there is no such run."""

    def owner(self, run_id: str) -> str:
        """Return a run's owner; empty: no such run, or the owner was erased."""

    def channel(self, run_id: str) -> str:
        """Return the channel that a run releases to; empty: none, or it cannot be determined."""


def occasions(event: Envelope) -> frozenset[str]:
    """Return the occasions that an event matches."""
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
    """Return the id of the run that an event is about; empty: none."""
    if event.kind.partition(".")[0] in _OF_A_RUN:
        return event.subject.partition("/")[0]
    told = {"approval.requested": "approval_requests", "channel.promote": "releases", "channel.rollback": "releases"}
    return str(event.row(told[event.kind]).get("run_id") or "") if event.kind in told else ""


def channel_of(event: Envelope, facts: Facts) -> str:
    """Return the channel that an event names itself or by its run; empty: none."""
    if event.kind.startswith("channel."):
        return event.subject
    if event.kind == "approval.requested":
        return str(event.row("approval_requests").get("channel") or "")
    run = run_of(event)
    return facts.channel(run) if run else ""


def matching(rules: Sequence[Rule], event: Envelope, facts: Facts) -> Rule | None:
    """Return the rule by which a sink receives an event: the first that sends words, else the first; None: no rule."""
    what = occasions(event)
    found = [rule for rule in rules if _says(rule, event, what, facts)]
    return next((rule for rule in found if rule.words), found[0] if found else None)


def _says(rule: Rule, event: Envelope, what: frozenset[str], facts: Facts) -> bool:
    run = run_of(event)
    return (
        not what.isdisjoint(rule.on)
        and (not rule.run or (run != "" and fnmatchcase(facts.name(run), rule.run)))
        and (not rule.owner or (run != "" and facts.owner(run) == rule.owner))
        and (not rule.channel or channel_of(event, facts) == rule.channel)
    )


VARIABLE = "POSTTRAIN_PRIVATE_SINKS"  # networks in addition to the public ones: 10.1.0.0/16,127.0.0.1/32


SECRETS = "POSTTRAIN_SECRETS"  # PROJECT/VARIABLE,…: which project's sinks and rewards may name a variable


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def public(environ: Mapping[str, str] = os.environ) -> Admit:
    """Return a policy that admits public addresses and the networks in the environment.

    Raises:
        InputError: the environment names an invalid network.
    """
    allowed = networks(environ.get(VARIABLE, ""))

    def admit(address: str) -> str:
        for one in _meant(ipaddress.ip_address(address.partition("%")[0])):
            named = any(one in network for network in allowed if network.version == one.version)
            if not named and (not one.is_global or one.is_multicast):
                return (
                    f"{address} is not a public address; the server's administrator may name its network in {VARIABLE}"
                )
        return ""

    return admit


def refuse_resolved(host: str, admit: Admit, where: str) -> None:
    """Refuse a host with an address that may not be connected to. A name without an address is accepted.

    Raises:
        InputError: it has such an address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    refused = next(filter(None, (admit(str(address[0])) for *_, address in found)), "")
    if refused:
        raise InputError(f"{where}: may not be reached: {refused}")


def secrets_of(project: str, environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the variables whose values the sinks and rewards of a project may use on this server.

    Raises:
        InputError: the configuration is not a list of PROJECT/VARIABLE.
    """
    pairs = [word.strip().partition("/") for word in environ.get(SECRETS, "").split(",") if word.strip()]
    for of, _, variable in pairs:
        good = variable.isidentifier() if variable.startswith(VARIABLES) else may_be_secret(variable)
        if not is_project(of) or not good:
            raise InputError(
                f"{SECRETS} must be PROJECT/VARIABLE with commas between them, got {of}/{variable}; correct it"
            )
    return frozenset(variable for of, _, variable in pairs if of == project)


def refuse_foreign_secrets(project: str, name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a sink that names a variable which the server's configuration does not assign to its project.

    Raises:
        InputError: a setting names such a variable.
    """
    mine = secrets_of(project)
    for setting, variable in settings.items():
        if setting.endswith("_env") and variable not in mine:
            raise InputError(
                f"sink {name}: {setting} must be a secret of project {project}, got {variable!a}; the administrator of "
                f"the server adds {project}/{variable} to {SECRETS}"
            )


def networks(text: str) -> list[Network]:
    """Return networks from a list with commas.

    Raises:
        InputError: one is not a network.
    """
    try:
        return [ipaddress.ip_network(word.strip()) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise InputError(
            f"{VARIABLE} must be networks such as 10.1.0.0/16 with commas between them: {error}"
        ) from error


def _meant(address: Address) -> Iterator[Address]:
    """Yield an address, and the IPv4 addresses embedded in it."""
    yield address
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        yield from (one for one in inner if one is not None)


def reach(host: str, port: int, where: str, admit: Admit, patience: Patience) -> socket.socket:
    """Return a connection to the first of a host's addresses that accepts one.

    `admit` receives the address that is connected to, so a name that resolves to another one a moment later changes
    nothing.

    Raises:
        SinkError: an address that may not be reached.
        OSError: no address accepts a connection.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    trouble: OSError | None = None
    for family, kind, protocol, _, address in found:
        refused = admit(str(address[0]))
        if refused:
            raise SinkError(f"{where}: may not be reached: {one_line(refused)}")
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(address)
            connection.settimeout(ANSWER_SECONDS)
            patience.holds(connection)
        except OSError as error:
            connection.close()
            trouble = error
        else:
            return connection
    raise trouble or OSError("it has no address")


class NetworkSink(ABC):
    """A sink on the network: one notice at a time, each within bounded time.

    Args:
        settings: of its kind's `fields`.
        admit: whether an address may be connected to.
        patience: seconds of one delivery.

    Raises:
        InputError: settings without a place or a secret.
    """

    kind: ClassVar[str]
    most: ClassVar[int] = 1
    fields: ClassVar[frozenset[str]]

    def __init__(self, settings: Mapping[str, Any], admit: Admit, patience: float) -> None:
        unknown = sorted(settings.keys() - self.fields)
        if unknown:
            known = ", ".join(sorted(self.fields))
            raise InputError(f"{self.kind}: settings must be among {known}, got {unknown[0]}")
        self._admit, self._seconds = admit, patience

    @property
    @abstractmethod
    def where(self) -> str:
        """See `Sink.where`."""

    def send(self, notices: Sequence[Notice]) -> None:
        """See `Sink.send`."""
        for notice in notices:
            patience = Patience(self._seconds)
            try:
                with patience.runs():
                    self._hand_over(notice, patience)
            except (OSError, http.client.HTTPException) as error:
                refusal = "" if patience.over else self._refusal(error)
                raise SinkError(f"{self.where}: {refusal or said(error, patience)}") from error

    @abstractmethod
    def _hand_over(self, notice: Notice, patience: Patience) -> None:
        """Deliver one notice."""

    def _refusal(self, error: Exception) -> str:
        """Return a message for an error of the sink's protocol; empty: another kind of error."""
        return ""


def said(error: Exception, patience: Patience) -> str:
    """Return a short description of an error, without the address."""
    if patience.over:
        return f"no answer within {patience.seconds:g} s"
    if isinstance(error, socket.gaierror):
        return "its host cannot be found"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be trusted ({one_line(error.verify_message)})"
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_SECONDS:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection ({one_line(error.reason or type(error).__name__)})"
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror).lower()
    return f"no proper answer ({type(error).__name__})"
