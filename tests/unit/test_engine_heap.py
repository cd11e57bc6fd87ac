"""Memory that tensors leave stays the process's, within bounds."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_MEASURED = """
import resource
from posttrain.engine.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del [bytearray(8 * 2**20) for _ in range(16)][:]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_pages_are_not_mapped_anew_for_every_pass() -> None:
    done = subprocess.run([sys.executable, "-c", _MEASURED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000, "128 MiB are 32768 pages"
