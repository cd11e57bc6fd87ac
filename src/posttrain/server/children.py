"""Starts the server's own processes, driver and workers, and hands them its environment once they are closed to others.

Between exec and `close_to_others` every process of the account, so a job as well, can read `/proc/PID/environ`. So a
child starts with what the machine needs and without keys, and is sent the whole environment over a socket: unlike a
pipe, nobody can open that by `/proc/PID/fd`. The socket stays open as the child's lifeline.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from posttrain.domain.requests import SECRET_NAME
from posttrain.execution.processes import close_to_others, of_a_server

_LENGTH = 8  # bytes
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
)  # by interpreter and libc, before anybody could send them


def start(
    module: str, words: Sequence[str], descriptor: int, passed: Collection[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs this module, and the server's end of its socket.

    Args:
        descriptor: where the child has its end; 0 is its stdin.
        passed: descriptors that it inherits besides; none of them is `descriptor`.

    Raises:
        OSError: it cannot be started, or ended at once.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _START.format(number, descriptor), module, *words],
                stdin=subprocess.DEVNULL, pass_fds=(number, *passed), cwd="/", start_new_session=True,
                env=at_start(os.environ),
            )  # fmt: skip
        try:
            said = json.dumps(dict(os.environ)).encode()
            ours.sendall(len(said).to_bytes(_LENGTH) + said)
        except OSError:
            process.kill()
            process.wait()
            raise
    except OSError:
        ours.close()
        raise
    return process, ours


def at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the server's environment a child of it starts with: no key."""
    early = {name for name in environment if name.startswith(_READ_AT_START) and not SECRET_NAME.search(name)}
    return of_a_server(environment) | {name: environment[name] for name in early}


def begin(inherited: int, descriptor: int) -> None:
    """In the child, first of all: close it to others, take the environment, and run the module that was named."""
    close_to_others()
    if inherited != descriptor:
        os.dup2(
            inherited, descriptor, inheritable=descriptor == 0
        )  # a program without stdin takes the next file for it
        os.close(inherited)
    else:
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=os.dup(descriptor)) as server:
        length = int.from_bytes(server.recv(_LENGTH, socket.MSG_WAITALL))
        said = server.recv(length, socket.MSG_WAITALL)
    if not length or len(said) != length:
        raise SystemExit("the server is gone")
    os.environ.update(json.loads(said))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")


_START = "from posttrain.server.children import begin; begin({}, {})"
