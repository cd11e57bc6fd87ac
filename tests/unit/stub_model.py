"""A served model that repeats what it is told, for tests of those who talk to one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DIGEST = "sha256:" + "ab" * 32
KEY = "stub-key"


@dataclass
class StubModel:
    """Its address, and the requests that it got."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    breaks: bool = False  # whether it ends in the middle of an answer


@contextmanager
def stub_model() -> Iterator[StubModel]:
    """A server on loopback that answers each message with itself, twice, in pieces."""
    found = StubModel()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.asked.append(body)
            refused = self.headers.get("authorization") != f"Bearer {KEY}"
            self.send_response(401 if refused else 200)
            self.send_header("posttrain-model-digest", DIGEST)
            self.end_headers()
            if refused:
                self.wfile.write(json.dumps({"error": {"message": "wrong key"}}).encode())
                return
            text = body["messages"][-1]["content"]
            for piece in (text, " / ", text):
                said = {"choices": [{"delta": {"content": piece}}]}
                self.wfile.write(b"data: " + json.dumps(said).encode() + b"\n\n")
                self.wfile.flush()
                if found.breaks:
                    return
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
