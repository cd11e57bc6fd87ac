"""How much memory this process has taken at the most."""

from __future__ import annotations

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
