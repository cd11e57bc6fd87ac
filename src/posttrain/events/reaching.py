"""Connections that sinks open: to an address that may be reached, within bounded time, ended when that is over."""

from __future__ import annotations

import socket
import ssl

from posttrain.domain.errors import SinkError
from posttrain.events.ports import ANSWER_SECONDS, CONNECT_SECONDS, Admit, Patience, one_line


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
