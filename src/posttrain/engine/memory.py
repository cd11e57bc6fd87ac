"""How much memory this process has taken at the most, and how much is free."""

from __future__ import annotations

import os
import resource
import sys

import torch

_MIB = 2**20
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage counts in


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
