"""What this process does with memory that tensors on the CPU leave.

A pass over a micro-batch leaves some dozens of MiB. By itself glibc gives them back to the kernel as soon as twice the
largest tensor lies free, and every next pass has each page of it zeroed and mapped anew: an eighth of an update of a
small model (measured). What exceeds the bounds here is given back as before. Where somebody has set glibc's own
variables, they decide.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_KEPT = 2**29  # bytes free at the end of the heap
_MAPPED = 2**25  # larger tensors have pages of their own; glibc takes no larger bound, and would come to it by itself


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
