"""Memory that tensors leave stays the process's, within bounds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_MEASURED = """
import resource
from posttrain.engine.batch import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del [bytearray(8 * 2**20) for _ in range(16)][:]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")


def faults(**variables: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _MEASURED]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=own | variables).stdout)


@pytest.mark.slow
@glibc
def test_pages_are_not_mapped_anew_for_every_pass() -> None:
    assert faults() < 1000, "128 MiB are 32768 pages"


@glibc
@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [{"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}]
)
def test_what_somebody_has_set_stays(variables: dict[str, str]) -> None:
    assert faults(**variables) > 16_000
