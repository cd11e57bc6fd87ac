"""The contract of training engines over both of ours: whole in this process, FSDP2 in two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import train_engine
from safetensors.torch import load_file

from posttrain.engine.groups.place import Place


@pytest.mark.parametrize("held", train_engine.HELD, ids=lambda held: held.__name__)
def test_the_whole_engine(held: Callable[[train_engine.Bench], None], tmp_path: Path) -> None:
    held(train_engine.Bench(train_engine.open_torch, Place(), tmp_path))


def test_an_engine_that_exports_too_little_is_found(tmp_path: Path) -> None:
    """The suite itself: an engine whose export forgets a tensor does not pass."""

    class Forgetful:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def export(self) -> object:
            return iter(list(self._inner.export())[1:])  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    bench = train_engine.Bench(lambda place, seed: Forgetful(train_engine.open_torch(place, seed)), Place(), tmp_path)  # type: ignore[arg-type,return-value]
    with pytest.raises(AssertionError):
        train_engine.exports_every_element_once(bench)


@pytest.mark.slow
def test_the_sharded_engine_learns_what_the_whole_one_does(tmp_path: Path) -> None:
    command = [sys.executable, train_engine.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(err for _, err in said)
    assert [out.splitlines()[-1] for out, _ in said] == ["held", "held"]
    one = train_engine.learned(train_engine.Bench(train_engine.open_torch, Place(), tmp_path))
    two = load_file(tmp_path / "learned.safetensors")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=0)
