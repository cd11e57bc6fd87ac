"""A worker of the server, a process that `workers.start` starts: carries out verbs that read files or compute.

A worker carries out one verb at a time. It reads requests as JSON lines from descriptor 3 and writes results to the
same descriptor. Gates, row checks and everything else that loads numpy, pyarrow or tokenizers run in workers, so the
server itself stays small, and a request that takes all memory ends a worker and not the server. A worker ends when the
server ends.
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
from posttrain.app.workspace import Workspace, serve_jobs
from posttrain.server.authentication import Asker, Authentication, Told, arguments, call, telling, to_json
from posttrain.server.console import CONSOLE
from posttrain.server.logs import Logging, Printed, begin, logged_problem
from posttrain.server.uploads import Bundles, Uploads
from posttrain.server.workers import DESCRIPTOR, PIECE

INTERFACE = "openapi"  # the request for the OpenAPI document, which is not a verb


class Worker:
    """Carries out requests in one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._authentication = Authentication(self._workspace)

    def answer(self, asked: dict[str, Any], told: Told = lambda *_: None) -> tuple[bool, bytes]:
        """Carry out a request; return whether it succeeded, and its result or problem as JSON.

        Args:
            told: receives the reports of progress.
        """
        try:
            if asked["verb"] == INTERFACE:
                from posttrain.server.openapi import document  # imports the types of every value

                return True, to_json(document())
            asker = Asker.from_json(asked["asker"])
            control = self._authentication.control(asker, asked["request"])
            if asked["verb"] == CONSOLE:
                from posttrain.server.console.parts import drawn  # loads the drawing and judging modules

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
        """Carry out requests until the server closes its end of the socket."""
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
    """End this process when the server ends, even during a request, because the request may be repeated elsewhere."""
    gone = select.poll()
    gone.register(server, select.POLLRDHUP)
    gone.poll()
    os._exit(1)


def main() -> None:
    """Carry out requests until the server has ended."""
    begin(Logging.of(sys.argv[2:]))
    sys.stdout = sys.stderr = Printed()
    threading.Thread(target=_end_with, args=(DESCRIPTOR,), name="lifeline", daemon=True).start()
    with socket.socket(fileno=DESCRIPTOR) as server:
        workspace = Workspace(Path(sys.argv[1]))
        serve_jobs(workspace)  # the jobs of verbs that drive a run themselves
        Worker(workspace).run(server)


if __name__ == "__main__":
    main()
