"""A worker of the server (`children.start`): answers verbs that read files or compute, one at a time.

It reads requests as JSON lines from descriptor 3 and writes answers to it. Gates, row checks and everything else that
loads numpy, pyarrow or tokenizers run here, so the server itself stays small, and a request that takes all memory ends
a worker and not the server. A worker ends when the server does.
"""

import json
import os
import select
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from posttrain.api.control import OPERATIONS
from posttrain.app.workspace import Workspace
from posttrain.server.authentication import Asker, Authentication, Told, arguments, call, telling, to_json
from posttrain.server.console import CONSOLE
from posttrain.server.logs import Logging, Printed, begin, logged_problem
from posttrain.server.uploads import Bundles, Uploads

DESCRIPTOR = 3
PIECE = "2"  # the mark of a report, instead of 0 or 1 for an answer
INTERFACE = "openapi"  # the request for the OpenAPI document, which is not a verb


class Worker:
    """Answers requests over one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._authentication = Authentication(self._workspace)

    def answer(self, asked: dict[str, Any], told: Told = lambda *_: None) -> tuple[bool, bytes]:
        """Return whether a request was answered, and its answer or problem as JSON.

        Args:
            told: receives the reports.
        """
        try:
            if asked["verb"] == INTERFACE:
                from posttrain.server.openapi import document  # it imports the types of every value

                return True, to_json(document())
            asker = Asker.from_json(asked["asker"])
            control = self._authentication.control(asker, asked["request"])
            if asked["verb"] == CONSOLE:
                from posttrain.server.console.parts import drawn  # it loads the drawing and judging modules

                return True, json.dumps(drawn(control, asked["sent"])).encode()
            seen = self._workspace.seen_by(asker.identity.principal, asker.project, asker.identity.auth)
            named = arguments(OPERATIONS[asked["verb"]], asked["sent"])
            with telling(told):
                return True, to_json(call(control, asked["verb"], named, Bundles(seen, Uploads(seen)), asker.project))
        except BaseException as error:
            found = logged_problem(error, asked["request"], asked["verb"])
            if not isinstance(error, Exception):
                raise
            return False, json.dumps(found).encode()

    def run(self, server: socket.socket) -> None:
        """Answer requests until the server closes its end."""
        with server.makefile("rwb") as stream:

            def write(kind: str, body: bytes) -> None:
                stream.write(b"%s %d\n" % (kind.encode(), len(body)))
                stream.write(body)
                stream.flush()

            def told(kind: str, value: Any) -> None:
                write(PIECE, to_json({"kind": kind, "value": value}))

            for line in stream:
                done, body = self.answer(json.loads(line), told)
                write(str(int(done)), body)


def _end_with(server: int) -> None:
    """End when the server does, also during a request: a repeat of the request must not be carried out twice."""
    gone = select.poll()
    gone.register(server, select.POLLRDHUP)
    gone.poll()
    os._exit(1)


def main() -> None:
    """Answer requests until the server has ended."""
    begin(Logging.of(sys.argv[2:]))
    sys.stdout = sys.stderr = Printed()
    threading.Thread(target=_end_with, args=(DESCRIPTOR,), name="lifeline", daemon=True).start()
    with socket.socket(fileno=DESCRIPTOR) as server:
        Worker(Workspace(Path(sys.argv[1]))).run(server)


if __name__ == "__main__":
    main()
