"""Looks at the pages that a server draws itself, in a process of its own, and says what large things that loaded."""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn

from posttrain.app.workspace import Workspace
from posttrain.server.app import build
from posttrain.server.authentication import Authentication
from posttrain.server.connections import Peers
from posttrain.server.operations import Server

LARGE = {"numpy", "scipy", "pyarrow", "matplotlib", "tokenizers", "torch", "transformers", "pandas"}


class NoWorkers:
    """Whoever asks them would load something."""

    def ask(self, asker: Mapping[str, Any], verb: str, sent: Mapping[str, Any], request: str) -> bytes:
        raise AssertionError(verb)


def visited(root: Path, run: str, token: str) -> list[str]:
    """Those of LARGE that are loaded afterwards."""
    workspace = Workspace(root)
    app = build(Server(workspace, Authentication(workspace), NoWorkers(), lambda: "", Peers(workspace.hosts)))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    here = {"origin": f"http://127.0.0.1:{port}", "content-type": "application/x-www-form-urlencoded"}

    def ask(method: str, path: str, cookie: str, body: str = "") -> tuple[int, str, str]:
        connection = HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request(method, path, body or None, {**here, "cookie": cookie})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), (answer.getheader("set-cookie") or "").partition(";")[0]
        connection.close()
        return found

    _, page, cookie = ask("GET", "/login", "")
    field = re.search(r'name="form_token" value="(\w+)"', page)
    assert field is not None
    status, _, cookie = ask("POST", "/login", cookie, urlencode({"form_token": field[1], "token": token}))
    assert status == 303
    for path in ("/runs", f"/runs/{run}", "/compare", "/channels", "/channels/prod", "/channels/guarded"):
        status, page, _ = ask("GET", f"/projects/default{path}", cookie)
        assert status == 200, (path, page)
    assert ask("GET", "/projects/default/channels/prod/rollback?to=1", cookie)[0] in (200, 422)
    server.should_exit = True
    thread.join()
    return sorted(LARGE & set(sys.modules))


if __name__ == "__main__":
    print(visited(Path(sys.argv[1]), *sys.argv[2:]))
