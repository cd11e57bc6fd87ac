"""Names of processes that own leases; such a name distinguishes a process from a later process with the same pid."""

import os
import socket

import psutil


def process_name() -> str:
    """Return `host:pid:start` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def process_alive(owner: str) -> bool:
    """Return whether the process `owner` may still be alive; always True for another host."""
    host, pid, started = [*owner.rsplit(":", 2), "", ""][:3]
    if host != socket.gethostname() or not pid.isdigit():
        return True
    try:
        process = psutil.Process(int(pid))
        gone = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # not reaped yet by its parent
        return not gone and abs(process.create_time() - float(started)) < 0.05
    except (psutil.NoSuchProcess, ValueError):
        return False
