"""Processes as owners of a lease: a name that tells a process from a later one with its pid."""

import os
import socket

import psutil


def process_name() -> str:
    """`host:pid:start` of this process: it tells a reused pid from the same process."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def process_alive(owner: str) -> bool:
    """Whether the process `owner` names may still live. A process of another host may."""
    host, pid, started = [*owner.rsplit(":", 2), "", ""][:3]
    if host != socket.gethostname() or not pid.isdigit():
        return True
    try:
        process = psutil.Process(int(pid))
        gone = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # not reaped yet, by whoever started it
        return not gone and abs(process.create_time() - float(started)) < 0.05
    except (psutil.NoSuchProcess, ValueError):
        return False
