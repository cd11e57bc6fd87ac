"""Starts the server's child processes, which are the driver and the workers, and sends them the environment safely.

Between exec and `close_to_others`, every process of the account, even a job, can read `/proc/PID/environ`. Therefore a
child starts with the machine's variables and without keys, and receives the whole environment over a socket. Unlike a
pipe, a socket cannot be opened through `/proc/PID/fd`. The socket stays open until the server ends, which the child
detects.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from posttrain.domain.jobspec import SECRET_NAME
from posttrain.execution.processes import close_to_others, of_a_server

_LENGTH = 8  # bytes of the length that precedes the environment
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
)  # prefixes of variables that the interpreter and libc read before the environment can be sent


def start(
    module: str, words: Sequence[str], descriptor: int, passed: Collection[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `module`; return the process and the server's end of its socket.

    Args:
        descriptor: the descriptor of the child's end of the socket; 0 is the child's stdin.
        passed: further descriptors that the child inherits, all different from `descriptor`.

    Raises:
        OSError: the process cannot be started or ended immediately.
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
    """Return the part of the server's environment with which a child starts; this part contains no key."""
    early = {name for name in environment if name.startswith(_READ_AT_START) and not SECRET_NAME.search(name)}
    return of_a_server(environment) | {name: environment[name] for name in early}


def begin(inherited: int, descriptor: int) -> None:
    """Prevent other processes from reading this child, receive the environment, and run the named module."""
    close_to_others()
    if inherited != descriptor:
        os.dup2(
            inherited, descriptor, inheritable=descriptor == 0
        )  # a program that inherits no stdin would get its next file as stdin
        os.close(inherited)
    else:
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=os.dup(descriptor)) as server:
        length = int.from_bytes(server.recv(_LENGTH, socket.MSG_WAITALL))
        said = server.recv(length, socket.MSG_WAITALL)
    if not length or len(said) != length:
        raise SystemExit("the server has ended")
    os.environ.update(json.loads(said))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")


_START = "from posttrain.server.children import begin; begin({}, {})"
