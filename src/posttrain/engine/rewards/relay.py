"""The way from a cell to the hosts that its reward declares: the job connects for it, and to nothing else.

The listening sockets belong to the cell's network namespace, which has no other way out; accepting and connecting
happen in the job, one thread per direction. The reward names the host as usual (`/etc/hosts` of the cell leads it
here), so TLS sees the name that it asked for.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

_CONNECT_SECONDS = 10.0
_MOST = 64  # connections at a time
_CHUNK = 1 << 16


class Relay:
    """Accepts in the cell, connects outside.

    Args:
        listeners: one per destination.
        destinations: `host:port`.
    """

    def __init__(self, listeners: Sequence[socket.socket], destinations: Sequence[str]) -> None:
        self._listeners = tuple(listeners)
        self._places = threading.BoundedSemaphore(_MOST)
        self._open: set[socket.socket] = set()
        for listener, destination in zip(listeners, destinations, strict=True):
            threading.Thread(target=self._accept, args=(listener, destination), daemon=True).start()

    def close(self) -> None:
        """End every connection, and accept no more."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the threads that read

    def _accept(self, listener: socket.socket, destination: str) -> None:
        host, _, port = destination.rpartition(":")
        while True:
            try:
                inside, _ = listener.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                inside.close()
                continue
            threading.Thread(target=self._serve, args=(inside, (host, int(port))), daemon=True).start()

    def _serve(self, inside: socket.socket, destination: tuple[str, int]) -> None:
        try:
            with inside, socket.create_connection(destination, _CONNECT_SECONDS) as outside:
                outside.settimeout(None)
                self._open |= {inside, outside}
                back = threading.Thread(target=_pump, args=(outside, inside), daemon=True)
                back.start()
                _pump(inside, outside)
                back.join()
                self._open -= {inside, outside}
        except OSError:
            return  # refused or unknown: the reward sees its connection closed
        finally:
            self._places.release()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
