"""What a job says of its memory, against the kernel's own record, and on devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from posttrain.engine.batch import peak_memory


def _highest() -> float:
    """MiB, as the kernel has it in another place."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def test_the_peak_is_the_kernels_and_stays() -> None:
    before = peak_memory()["memory/peak_resident_mib"]
    assert before == pytest.approx(_highest(), rel=0.05)
    large = bytearray(256 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    after = peak_memory()["memory/peak_resident_mib"]
    assert after == pytest.approx(_highest(), rel=0.05)
    del large
    assert peak_memory()["memory/peak_resident_mib"] >= after
    assert after >= 256


def test_a_device_is_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("memory/peak_allocated_mib" in peak_memory()) == torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: [3, 5][device] * 2**20)
    assert peak_memory()["memory/peak_allocated_mib"] == 5.0


@pytest.mark.gpu
def test_what_a_device_had_at_the_most() -> None:
    torch.zeros(64 * 2**20, device="cuda", dtype=torch.uint8)
    assert peak_memory()["memory/peak_allocated_mib"] >= 64
