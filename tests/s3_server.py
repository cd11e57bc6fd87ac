"""An S3 server of this process, on loopback: moto's, over real HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


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
