"""Bounds on all of a cell together: memory and the number of processes, for root too, whom rlimits do not bind.

A cgroup (version 2) does it where one may be made; else whoever waits for the cell looks at its processes ten times a
second. A look can be late: what a cell takes between two of them is bounded by the limits of each process.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

INTERVAL = 0.1  # seconds between looks
OVER_MEMORY, OVER_PROCESSES = 97, 98  # the cell's exit codes
_RESIDENT = ("RssAnon:", "RssShmem:", "VmSwap:")  # what only this process holds, in KiB
_CONTROLLERS = Path("/sys/fs/cgroup")


class Watch:
    """Looks at a process's descendants and says which bound they passed.

    Args:
        root: whose descendants.
        memory: bytes.
        processes: with their threads.
        proc: where processes are described.
    """

    def __init__(self, root: int, memory: int, processes: int, proc: Path = Path("/proc")) -> None:
        self._root, self._memory, self._processes, self._proc = root, memory, processes, proc

    def over(self) -> int | None:
        """The exit code of the bound that is passed; None while all is well."""
        tasks, held = 0, 0
        for pid in below(self._root, self._proc):
            found = _status(self._proc / str(pid))
            tasks, held = tasks + found[0], held + found[1]
        if tasks > self._processes:
            return OVER_PROCESSES
        return OVER_MEMORY if held > self._memory else None


def _status(process: Path) -> tuple[int, int]:
    """Threads, and bytes that the process holds; nothing of one that is gone."""
    try:
        lines = (process / "status").read_text(errors="replace").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(None, 1) for line in lines if line.startswith((*_RESIDENT, "Threads:")))
    held = sum(int(fields[name].split()[0]) for name in _RESIDENT if name in fields)
    return int(fields.get("Threads:", "0")), held * 1024


def below(root: int, proc: Path = Path("/proc")) -> list[int]:
    """All descendants of a process: what it started, and what was left to it."""
    found, edge = [], [root]
    while edge:
        edge = [child for pid in edge for child in _children(pid, proc)]
        found += edge
    return found


def _children(pid: int, proc: Path) -> list[int]:
    children: list[int] = []
    for task in proc.glob(f"{pid}/task/[0-9]*"):
        with contextlib.suppress(OSError):
            children += [int(word) for word in (task / "children").read_text().split()]
    return children


class Group:
    """A cgroup of its own for one cell: the kernel holds the bounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, memory: int, processes: int, root: Path = _CONTROLLERS, own: str | None = None) -> Group | None:
        """A new group below this process's; None where none with both bounds may be made.

        Args:
            memory: bytes, swap included.
            processes: with threads.
            root: where the hierarchy is mounted.
            own: this process's place in it; by default what the kernel says.
        """
        place = _own_group() if own is None else own
        if place is None or not (root / "cgroup.controllers").exists():
            return None
        here = root / place.lstrip("/")
        for parent in (here, here.parent):
            with contextlib.suppress(OSError):
                if not {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
                    continue
                folder = parent / f"posttrain-reward-{uuid.uuid4().hex[:12]}"
                folder.mkdir()
                group = cls(folder)
                try:
                    (folder / "memory.max").write_text(str(memory))
                    (folder / "pids.max").write_text(str(processes))
                    with contextlib.suppress(OSError):  # a kernel without swap accounting
                        (folder / "memory.swap.max").write_text("0")
                    (folder / "memory.oom.group").write_text("1")
                except OSError:
                    group.remove()
                    raise
                return group
        return None

    def join(self) -> None:
        """Put the calling process in; what it starts stays in."""
        (self.folder / "cgroup.procs").write_text("0")

    def passed(self) -> int | None:
        """The exit code of the bound at which the kernel killed or refused; None: none."""
        with contextlib.suppress(OSError, ValueError):
            events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            if int(events.get("oom_kill", "0")):
                return OVER_MEMORY
        return None

    def remove(self) -> None:
        """Forget it, once it is empty."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _own_group() -> str | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)
