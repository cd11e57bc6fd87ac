"""Which addresses the sinks of a server may be reached at: public ones, and those that its administrator names.

Whoever may add a sink is not whoever owns the server's network: without this a webhook could be pointed at what only
the server reaches, such as a cloud's metadata.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping

from posttrain.domain.errors import InputError
from posttrain.events.ports import Admit

VARIABLE = "POSTTRAIN_PRIVATE_SINKS"  # networks beside the public ones: 10.1.0.0/16,127.0.0.1/32
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
