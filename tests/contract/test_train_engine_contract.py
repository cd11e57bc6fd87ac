"""The contract of training engines over both of ours: whole in this process, FSDP2 in two; and the suite itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_engine
from safetensors.torch import load_file

from posttrain.engine.groups.port import RankContext
from posttrain.engine.roles import contract
from posttrain.engine.roles.contract import HELD, Bench, learned
from posttrain.engine.roles.port import TrainEngine

Opening = Callable[[RankContext, int], TrainEngine]
OPENED = (train_engine.open_torch, train_engine.open_adapter)


@pytest.mark.parametrize("opened", OPENED, ids=lambda opened: opened.__name__)
@pytest.mark.parametrize("held", HELD, ids=lambda held: held.__name__)
def test_the_whole_engine(held: Callable[[Bench], None], opened: Opening, tmp_path: Path) -> None:
    held(Bench(opened, RankContext(), tmp_path))


def test_an_adapter_recalls_its_start(tmp_path: Path) -> None:
    train_engine.recalls_its_start(Bench(train_engine.open_adapter, RankContext(), tmp_path))


class Broken:
    """An engine that breaks a promise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Forgetful(Broken):
    def export(self) -> Iterator[Any]:
        return iter(list(self._inner.export())[1:])


class Twice(Broken):
    def export(self) -> Iterator[Any]:
        return iter([*self._inner.export(), next(self._inner.export())])


class Learning(Broken):
    def forward(self, *words: Any) -> Any:
        found = self._inner.forward(*words)
        with torch.no_grad():
            next(self._inner.export()).tensor.add_(1e-3)
        return found


class Amnesic(Broken):
    def restore(self, folder: Path, role: str) -> None:
        """Forgets to."""


class Credulous(Broken):
    def step(self, *words: Any, **options: Any) -> Any:
        try:
            return self._inner.step(*words, **options)
        except Exception:
            return None


class Impatient(Broken):
    """Updates with every part."""

    def step(self, *words: Any, more: bool = False, **options: Any) -> Any:
        return self._inner.step(*words, **options)


@pytest.mark.parametrize(
    ("broken", "held"),
    [
        (Forgetful, contract.exports_every_element_once),
        (Twice, contract.exports_every_element_once),
        (Learning, contract.predicts_in_the_order_of_the_batch),
        (Amnesic, contract.goes_on_from_a_checkpoint),
        (Credulous, contract.leaves_nothing_of_a_diverged_step),
        (Impatient, contract.sums_what_comes_in_parts),
    ],
)
def test_an_engine_that_breaks_a_promise_is_found(
    broken: type[Broken], held: Callable[[Bench], None], tmp_path: Path
) -> None:
    bench: Any = Bench(lambda context, seed: broken(train_engine.open_torch(context, seed)), RankContext(), tmp_path)  # type: ignore[arg-type,return-value]
    with pytest.raises(AssertionError, match="a training engine must"):
        held(bench)


def two_ranks(opened: Opening, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What two processes learn together, after the suite."""
    command = [sys.executable, train_engine.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path), f"train_engine:{opened.__name__}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(err for _, err in said)
    assert [out.splitlines()[-1] for out, _ in said] == ["held", "held"]
    return load_file(tmp_path / "learned.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("opened", OPENED, ids=lambda opened: opened.__name__)
def test_the_sharded_engine_learns_what_the_whole_one_does(opened: Opening, tmp_path: Path) -> None:
    one, two = learned(Bench(opened, RankContext(), tmp_path)), two_ranks(opened, tmp_path)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_two_ranks_compute_the_function_of_one_in_bfloat16(tmp_path: Path) -> None:
    """Masters in float32 and the same cast: updates agree but for the order of sums, which Adam enlarges at first."""
    start = {s.name: s.tensor.detach().clone() for s in train_engine.open_half(RankContext(), 0).export()}
    one, two = (
        learned(Bench(train_engine.open_half, RankContext(), tmp_path)),
        two_ranks(train_engine.open_half, tmp_path),
    )
    assert one.keys() == two.keys() == start.keys()
    for name, before in start.items():
        if "lora" not in name:
            assert torch.equal(one[name], before)
            assert torch.equal(two[name], before)
            continue
        assert one[name].dtype == two[name].dtype == torch.float32
        moved, apart = (one[name] - before.float()).norm(), (one[name] - two[name]).norm()
        assert apart < 0.2 * moved, name
