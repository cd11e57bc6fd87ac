"""How much memory this process has taken at the most, and how much is free.

What this process does with memory that tensors on the CPU leave.

A pass over a micro-batch leaves some dozens of MiB. By itself glibc gives them back to the kernel as soon as twice the
largest tensor lies free, and every next pass has each page of it zeroed and mapped anew: an eighth of an update of a
small model (measured). What exceeds the bounds here is given back as before. Where somebody has set glibc's own
variables, they decide.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

_MIB = 2**20
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage counts in
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_KEPT = 2**29  # bytes free at the end of the heap
_MAPPED = 2**25  # larger tensors have pages of their own; glibc takes no larger bound, and would come to it by itself


def peak_memory() -> dict[str, float]:
    """`memory/peak_resident_mib` of this process and, where it computes on CUDA, `memory/peak_allocated_mib` of the
    device that has most; MiB, since the process began. Reward workers and ranks on Ray are other processes.
    """
    found = {"memory/peak_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT / _MIB}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        allocated = max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
        found["memory/peak_allocated_mib"] = allocated / _MIB
    return found


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses; of a GPU also what torch holds back for the next who asks."""
    if device.type == "cuda":
        held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held_back
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Keep what tensors leave in this process's heap, from now on.

    Other allocators than glibc's have no such settings, and are left as they are.
    """
    if any(name in os.environ for name in _OWN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # both or none: who sets one of them ends the adaption of the other
    if mallopt(_MMAP_THRESHOLD, _MAPPED):
        mallopt(_TRIM_THRESHOLD, _KEPT)
