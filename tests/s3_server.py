"""An S3 server of this process, on loopback: moto's, over real HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

KEYS = {"ACCESS_KEY_ID": "the-servers-key", "SECRET_ACCESS_KEY": "the-servers-secret", "ALLOW_HTTP": "true"}


def use_s3(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let this process and its children find a server, and no key of whoever runs the tests."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    for name in ("REGION", "DEFAULT_REGION", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@contextmanager
def s3_server(*buckets: str) -> Iterator[str]:
    """Its address; it has these buckets, with nothing in them."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        for name in buckets:
            urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT")).close()
        yield address
    finally:
        server.stop()
