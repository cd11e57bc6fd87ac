"""What a rank holds while a model is loaded and sharded, and in what type engines leave it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import families
import pytest
import sharded_loading
import torch
from safetensors.torch import load_file

from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.roles.training import TorchEngine
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    folder = tmp_path_factory.mktemp("loading")
    sharded_loading.write_models(folder)
    command = [sys.executable, sharded_loading.__file__]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(err for _, err in said)
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_rank_holds_the_whole_model_in_float32(ranks: list[dict[str, dict[str, int]]], dtype: str) -> None:
    """Opening maps the file; sharding makes this rank's rows, a layer at a time."""
    for found in (rank[dtype] for rank in ranks):
        assert found["opened"] < found["whole"] / 4
        assert found["shard"] <= 0.51 * found["whole"]
        assert found["shard"] <= found["peak"] < 0.75 * found["whole"]


@pytest.mark.slow
def test_a_frozen_base_keeps_its_type_and_is_saved_with_what_learned(ranks: list[dict[str, dict[str, int]]]) -> None:
    assert all("frozen" in rank for rank in ranks), "held in the ranks themselves"


@pytest.mark.parametrize("saved", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_whole_engine_leaves_the_type_that_is_asked_for(
    saved: str, computed: str, frozen: bool, tmp_path: Path
) -> None:
    """Every tensor of the model, those that are frozen too; of several ranks: `test_sharded_roles`."""
    model = adopt_module(families.build("qwen3").to(getattr(torch, computed)))
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(not frozen or "norm" in name)
    runtime = RuntimeConfig.model_validate({"save_dtype": saved})
    TorchEngine(RankContext(), model, OptimizerConfig(), runtime, steps=1, seed=0).write_model(tmp_path)
    dtype = computed if saved == "auto" else saved
    written = load_file(tmp_path / "model.safetensors")
    named = dict(model.module.named_parameters())
    assert written.keys() >= named.keys()
    assert {str(tensor.dtype) for tensor in written.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "config.json").read_bytes())["dtype"] == dtype
    for name, parameter in named.items():
        assert torch.equal(written[name], parameter.detach().to(getattr(torch, dtype))), name
