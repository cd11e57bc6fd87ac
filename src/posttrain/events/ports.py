"""The port of sinks, their shared base, the rules that choose a sink's events, and admission to addresses.

The rules are pure functions of an event, a sink's rules, and facts about the event's run.

Sinks of a server may connect to public addresses and to addresses that the server's administrator names. Without this
rule, a user who may add a sink could point a webhook at an address that only the server can reach, such as a cloud's
metadata service. The server's configuration assigns secrets to projects, and a sink uses only its project's secrets.

A sink opens a connection only to an admitted address, within bounded time, and closes the connection afterwards.
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
ANSWER_SECONDS = 10.0  # maximum seconds without a byte
WHOLE_SECONDS = 30.0  # maximum seconds of one delivery, even if the receiver sends single bytes slowly
VARIABLES = "POSTTRAIN_SINK_"  # prefix of the variables that a sink may name
_MOST_SECRET = 4096  # maximum bytes of a file with a secret
# Returns why a connection to an address is forbidden; empty: it is allowed. A server has its own policy.
Admit = Callable[[str], str]
_GATE_REASONS = (Reason.GATE_FAILED, Reason.GATE_INCONCLUSIVE, Reason.GATE_ERROR)
_OF_A_RUN = ("run", "stage", "attempt", "signal")  # the first word of kinds whose subject begins with a run's id


def anywhere(address: str) -> str:
    """See `Admit`: admit every address."""
    return ""


class Sink(Protocol):
    """One destination of events.

    In every implementation, `send` returns once the destination has durably stored all notices (a file is on the disk;
    a server has confirmed them), raises `SinkError` in any other case, and takes at most about half a minute. No
    resources stay open between two calls. Some notices may have arrived before an error: the caller sends all of them
    again, and the receiver drops duplicates by their ids. Errors have one line and contain no secret.
    """

    kind: ClassVar[str]
    most: ClassVar[int]  # maximum notices in one `send`

    @property
    def where(self) -> str:
        """The file or address to show to a person, without parts that could be secret."""

    def send(self, notices: Sequence[Notice]) -> None:
        """Deliver notices, in their order.

        Raises:
            SinkError: not all notices are stored durably.
        """


def encoded(notice: Notice) -> bytes:
    """Return the notice for programs: one line of JSON in ASCII, the same bytes each time."""
    return json.dumps(notice.body, separators=(",", ":"), allow_nan=False).encode("ascii")


def one_line(text: str, most: int = 200) -> str:
    """Return untrusted text on one line: at most `most` characters, all of them printable."""
    flat = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"


def secret(env: str | None, file: str | None, where: str) -> str:
    """Return a secret, from the named variable or file.

    Raises:
        SinkError: the secret is missing or empty; the message names the variable or file and never has the secret.
    """
    if env:
        found = os.environ.get(env, "")
        if not found.strip():
            raise SinkError(
                f"{where}: variable {env} is not set, or is empty, in the process that delivers events; set it to the "
                "secret"
            )
        return found.strip()
    try:
        with open(str(file), "rb") as opened:
            data = opened.read(_MOST_SECRET + 1)
    except OSError as error:
        raise SinkError(f"{where}: secret file {file} cannot be read: {error.strerror or error}") from error
    if not data.strip() or len(data) > _MOST_SECRET or not data.strip().isascii():
        raise SinkError(f"{where}: secret file {file} must contain 1-{_MOST_SECRET} ASCII characters, got {len(data)}")
    return data.decode("ascii").strip()


def refuse_variable(name: Any, field: str) -> None:
    """Reject a variable that is not meant for sinks: adding a sink must not give access to other secrets of a server.

    Raises:
        InputError: the name does not begin with `VARIABLES`.
    """
    if name and not (str(name).startswith(VARIABLES) and str(name).isidentifier()):
        raise InputError(
            f"{field} must begin with {VARIABLES}, a prefix that no job's variable and no other secret has, got "
            f"{name!a}"
        )


def absolute(path: str, field: str) -> Path:
    """Return the path; reject a relative path, because it would depend on the process's working folder.

    Raises:
        InputError: the path is not absolute.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise InputError(f"{field} must be an absolute path, got {path!r}")
    return Path(path)


class Patience:
    """The time limit of one delivery; when the time is over, the connection is closed."""

    def __init__(self, seconds: float = WHOLE_SECONDS) -> None:
        self.seconds, self.over = seconds, False
        self._handle: socket.socket | None = None
        self._lock = threading.Lock()

    def holds(self, connection: socket.socket) -> None:
        """Register a connection, with a duplicate handle that can end the connection even after TLS has wrapped it."""
        with self._lock:
            self._drop()
            self._handle = connection.dup()
            if self.over:
                self._cut()

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Apply the time limit inside this block."""
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
    """Facts about runs that events do not contain; they are queried only if a rule needs them."""

    def name(self, run_id: str) -> str:
        """Return a run's name; empty: there is no such run."""

    def owner(self, run_id: str) -> str:
        """Return a run's owner; empty: no such run, or the owner was erased."""

    def channel(self, run_id: str) -> str:
        """Return the channel to which a run releases; empty: there is no channel, or it cannot be determined."""


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
    """Return the id of the run that an event concerns; empty: no run."""
    if event.kind.partition(".")[0] in _OF_A_RUN:
        return event.subject.partition("/")[0]
    told = {"approval.requested": "approval_requests", "channel.promote": "releases", "channel.rollback": "releases"}
    return str(event.row(told[event.kind]).get("run_id") or "") if event.kind in told else ""


def channel_of(event: Envelope, facts: Facts) -> str:
    """Return the channel that an event names, or to which its run releases; empty: no channel."""
    if event.kind.startswith("channel."):
        return event.subject
    if event.kind == "approval.requested":
        return str(event.row("approval_requests").get("channel") or "")
    run = run_of(event)
    return facts.channel(run) if run else ""


def matching(rules: Sequence[Rule], event: Envelope, facts: Facts) -> Rule | None:
    """Return the matching rule of a sink for an event: the first with words, else the first; None: no rule matches."""
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


VARIABLE = "POSTTRAIN_PRIVATE_SINKS"  # networks in addition to public networks: 10.1.0.0/16,127.0.0.1/32


SECRETS = "POSTTRAIN_SECRETS"  # PROJECT/VARIABLE,…: the project whose sinks and rewards may name a variable


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
    """Reject a host with a forbidden address. A name without an address is accepted.

    Raises:
        InputError: the host has an address to which connections are forbidden.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    refused = next(filter(None, (admit(str(address[0])) for *_, address in found)), "")
    if refused:
        raise InputError(f"{where}: delivery to this address is not allowed: {refused}")


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
                f"{SECRETS} must be a comma-separated list of PROJECT/VARIABLE, got the entry {of}/{variable}; correct "
                "it"
            )
    return frozenset(variable for of, _, variable in pairs if of == project)


def refuse_foreign_secrets(project: str, name: str, settings: Mapping[str, Any]) -> None:
    """Reject a sink that names a variable which the server's configuration does not assign to the sink's project.

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
    """Return the networks in a comma-separated list.

    Raises:
        InputError: an entry is not a network.
    """
    try:
        return [ipaddress.ip_network(word.strip()) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise InputError(
            f"{VARIABLE} must be a comma-separated list of networks such as 10.1.0.0/16: {error}; correct it"
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
    """Return a connection to the first of a host's addresses that accepts a connection.

    `admit` receives the address of the connection itself, so a name that resolves to a different address a moment later
    has no effect.

    Raises:
        SinkError: connections to an address are forbidden.
        OSError: no address accepts a connection.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    trouble: OSError | None = None
    for family, kind, protocol, _, address in found:
        refused = admit(str(address[0]))
        if refused:
            raise SinkError(f"{where}: delivery to this address is not allowed: {one_line(refused)}")
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
    """A sink on the network, which delivers one notice at a time, each within bounded time.

    Args:
        settings: the values of the `fields` of the sink's kind.
        admit: returns why a connection to an address is forbidden.
        patience: maximum seconds of one delivery.

    Raises:
        InputError: the settings lack a destination or a secret.
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
        """Return a message for an error of the sink's protocol; empty for other errors."""
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
