"""Admission of a server's sinks to addresses and secrets, and the connections that sinks open.

Sinks may connect to public addresses and to those that the server's administrator names. Whoever may add a sink need
not own the server's network: without this rule a webhook could point at what only the server reaches, such as a cloud's
metadata. The server's configuration assigns secrets to projects, and a sink uses only those of its own project.

A sink opens a connection to an address that may be reached, within bounded time, and closes it afterwards.
"""

import http.client
import ipaddress
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from posttrain.domain.errors import InputError, SinkError
from posttrain.domain.ids import is_project
from posttrain.domain.runspec import may_be_secret
from posttrain.domain.sinks import Notice
from posttrain.events.ports import ANSWER_SECONDS, CONNECT_SECONDS, VARIABLES, Admit, Patience, one_line

VARIABLE = "POSTTRAIN_PRIVATE_SINKS"  # networks beside the public ones: 10.1.0.0/16,127.0.0.1/32
SECRETS = "POSTTRAIN_SECRETS"  # PROJECT/VARIABLE,…: which project's sinks and rewards may name a variable
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def public(environ: Mapping[str, str] = os.environ) -> Admit:
    """Admits public addresses, and the networks that the environment names.

    Raises:
        InputError: it names something that is no network.
    """
    allowed = networks(environ.get(VARIABLE, ""))

    def admit(address: str) -> str:
        for one in _meant(ipaddress.ip_address(address.partition("%")[0])):
            named = any(one in network for network in allowed if network.version == one.version)
            if not named and (not one.is_global or one.is_multicast):
                return f"{address} is no public address; whoever runs the server may name its network in {VARIABLE}"
        return ""

    return admit


def refuse_resolved(host: str, admit: Admit, where: str) -> None:
    """Refuse a host that has an address which may not be connected to. A name without an address is none of them.

    Raises:
        InputError: it has one.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    refused = next(filter(None, (admit(str(address[0])) for *_, address in found)), "")
    if refused:
        raise InputError(f"{where}: may not be reached: {refused}")


def secrets_of(project: str, environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The variables whose values the sinks and rewards of a project may use on this server.

    Raises:
        InputError: the configuration is no list of PROJECT/VARIABLE.
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
    """Refuse a sink that names a variable which the server's configuration does not give to its project.

    Raises:
        InputError: it does.
    """
    mine = secrets_of(project)
    for setting, variable in settings.items():
        if setting.endswith("_env") and variable not in mine:
            raise InputError(
                f"sink {name}: {setting} must be a secret of project {project}, got {variable!a}; whoever runs the "
                f"server adds {project}/{variable} to {SECRETS}"
            )


def networks(text: str) -> list[Network]:
    """Networks with commas between them.

    Raises:
        InputError: one is none.
    """
    try:
        return [ipaddress.ip_network(word.strip()) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise InputError(
            f"{VARIABLE} must be networks such as 10.1.0.0/16 with commas between them: {error}"
        ) from error


def _meant(address: Address) -> Iterator[Address]:
    """An address, and those that a router makes of it."""
    yield address
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        yield from (one for one in inner if one is not None)


def reach(host: str, port: int, where: str, admit: Admit, patience: Patience) -> socket.socket:
    """A connection to the first of a host's addresses that takes one.

    What is asked of `admit` is the very address that is connected to: a name that means another one a moment later
    changes nothing.

    Raises:
        SinkError: an address that may not be reached.
        OSError: none takes a connection.
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
    """A sink somewhere on the network: one notice at a time, each within bounded time.

    Args:
        settings: of its kind's `fields`.
        admit: whether an address may be connected to.
        patience: seconds of one delivery.

    Raises:
        InputError: settings that name no place or no secret.
    """

    kind: ClassVar[str]
    most: ClassVar[int] = 1
    fields: ClassVar[frozenset[str]]

    def __init__(self, settings: Mapping[str, Any], admit: Admit, patience: float) -> None:
        unknown = sorted(settings.keys() - self.fields)
        if unknown:
            known = ", ".join(sorted(self.fields))
            raise InputError(f"{self.kind}: must have no other setting than {known}, got {unknown[0]}")
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
        """Have the place take one notice."""

    def _refusal(self, error: Exception) -> str:
        """What its own protocol says of an error; empty: nothing."""
        return ""


def said(error: Exception, patience: Patience) -> str:
    """What went wrong, in a few words without the address."""
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
