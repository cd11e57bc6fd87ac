"""Processes that are looked for by what they were started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.execution import processes


def test_a_process_that_may_not_be_looked_at_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/proc` mounted with hidepid shows that a process of somebody else is there, and neither state nor variables."""
    for pid, written in (("7", b"A=1\0TOKEN=x\0"), ("8", b"TOKEN=y\0"), ("9", None)):
        (tmp_path / pid).mkdir()
        for name, data in (("stat", f"{pid} (job) S 1 {pid} 1 ".encode() + b"0 " * 30), ("environ", written)):
            if written is None:
                (tmp_path / pid / name).mkdir()  # whoever reads it gets an error, root too
            else:
                (tmp_path / pid / name).write_bytes(data or b"")
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert processes.carrying("TOKEN", "x") == [7]
    assert processes.carrying("TOKEN", "z") == []
