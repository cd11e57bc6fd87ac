"""An S3 server of this process, on loopback: moto's, over real HTTP."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    put, one_at_a_time = S3Response._key_response_put, threading.Lock()

    def atomic(self: S3Response, query: dict[str, Any], key_name: str) -> Any:
        """As S3 does: moto looks whether there is an object, and writes it some time later."""
        with one_at_a_time:
            return put(self, query, key_name)

    S3Response._key_response_put = atomic  # type: ignore[method-assign]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    threading.Thread(target=server.start, daemon=True).start()  # which waits for ever for a server that cannot listen
    if not server._server_ready_event.wait(300.0):
        raise TimeoutError("no S3 server")
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        for name in buckets:
            urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT"), timeout=300.0).close()
        yield address
    finally:
        S3Response._key_response_put = put  # type: ignore[method-assign]
        server.stop()
