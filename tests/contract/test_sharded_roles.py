"""A policy, a critic and a reward model sharded over two ranks learn what they learn on one, whatever shard of the
batch a rank has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import families
import pytest
import sharded_roles
import torch
from safetensors.torch import load_file
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.language_model import adopt_module, put_scalar_head
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.roles.training import FrozenWorker
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.planner.residency import resident
from posttrain.planner.shape import Shape


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, sharded_roles.__file__]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=500)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return folder


@cache
def one_rank(family: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    return sharded_roles.train(RankContext(), family, sharded_roles.make_batch(), sharded_roles.make_pairs())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("case", sharded_roles.SHARDS)
def test_two_ranks_equal_one(two_ranks: Path, case: str, family: str) -> None:
    """Traps 1 and 15: fewer micro-batches than the other rank, or none at all; weight decay on, clipping active."""
    weights, metrics = one_rank(family)
    found = load_file(two_ranks / f"{case}-{family}.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[name] / scale, tensor / scale, atol=1e-5, rtol=0, msg=lambda m, n=name: n + m)
    reported = json.loads((two_ranks / f"{case}-{family}.json").read_text())
    assert reported == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", sharded_roles.SHARDS)
def test_dropout_masks_differ_by_rank(two_ranks: Path, case: str) -> None:
    """Also where two ranks share one batch: they have other tokens of it, and in attention other heads."""
    one, two = (json.loads((two_ranks / f"{case}-dropout-{rank}.json").read_text()) for rank in range(2))
    for draws in (one, two):
        assert draws[0] == draws[1] != draws[2]  # a function of the step
    assert one[0] != two[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ragged", "empty"])
def test_a_sharded_frozen_role_holds_the_bytes_that_the_planner_counts(two_ranks: Path, case: str) -> None:
    """In float32 and bfloat16. Its predictions are compared in the ranks themselves."""
    one, two = (json.loads((two_ranks / f"{case}-frozen-{rank}.json").read_text()) for rank in range(2))
    assert one.keys() == two.keys()
    assert len(one) == 8
    for name in one:
        family, need, dtype = name.split()
        module = families.build(family) if need == "logprobs" else put_scalar_head(families.build(family))
        shape = Shape.of_config(module.config.to_dict(), sum(p.numel() for p in module.parameters()))
        assert shape is not None
        params = {"data": "train", "steps": 1, "placement": {"collocated": {"ranks": 2}}}
        load = NativeTrainer().check("dpo", {**params, "runtime": {"shard_frozen": True, "dtype": dtype}}).load
        assert load is not None
        held = resident(load, dict.fromkeys(("policy", "reference"), shape)).held
        [counted] = {h.bytes for h in held if (h.role, h.part) == ("reference", "weights")}
        width = 4 if dtype == "float32" else 2
        padding = sum(width * p[0].numel() for p in module.parameters()) // 2  # FSDP2 pads tensors to equal rows
        for size in (one[name], two[name]):
            assert counted <= size <= counted + padding, name


def test_a_frozen_role_is_not_sharded_over_ranks_that_cannot_communicate() -> None:
    model = adopt_module(families.build("qwen3"))
    with pytest.raises(InputError, match="teacher on 2 ranks needs a process group"):
        FrozenWorker(RankContext(size=2), model, name="teacher", micro_batch_tokens=20, shard=True)
    whole = FrozenWorker(RankContext(), model, micro_batch_tokens=20, shard=True)
    assert whole.sleep() > 0  # one rank has it whole


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "dtype"), [("auto", "bfloat16"), ("float32", "float32")])
def test_a_model_of_several_ranks_says_in_what_type_it_was_saved(two_ranks: Path, saved: str, dtype: str) -> None:
    folder = two_ranks / "ragged-exported" / saved
    assert json.loads((folder / "config.json").read_bytes())["dtype"] == dtype
    assert {str(w.dtype) for w in load_file(folder / "model.safetensors").values()} == {f"torch.{dtype}"}


def test_a_batch_without_responses_takes_part_in_the_policy_too() -> None:
    """What the idle rank computes: every parameter gets a gradient of zero."""
    model = adopt_module(families.build("qwen3"))
    logprobs = token_logprobs(model, sharded_roles.make_batch().dummy(), response_only=True)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.tolist() == [0] * 4
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in model.module.parameters())
