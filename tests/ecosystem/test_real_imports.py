"""Runs that the real packages made, imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ecosystem
PATIENCE = 1500.0  # seconds; it ends what hangs


def posttrain(folder: Path, *arguments: str) -> Any:
    """What a command says as JSON."""
    command = [sys.executable, "-m", "posttrain", *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout) if "json" in arguments else done.stdout


def tiny(folder: Path) -> Path:
    """A model of nothing with its tokenizer, as `asset create` makes it."""
    spec = "hidden_size: 16\nlayers: 1\nheads: 2\ncontext_length: 64\n"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(spec)
    posttrain(folder, "init")
    posttrain(folder, "asset", "create", "model:tiny", "model.yaml")
    posttrain(folder, "export", "model:tiny", "base")
    return folder / "base"


def below(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(deep for child in node["children"] for deep in below(child))]


def test_what_trl_left_is_a_base_with_its_history(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    world = tmp_path / "world"
    base = tiny(world)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [{"prompt": f"{i} ", "completion": f"{i % 10}"} for i in range(16)]
    settings = SFTConfig(
        output_dir=str(world / "trl-sft"), max_steps=4, save_steps=2, logging_steps=1, per_device_train_batch_size=2,
        report_to=[], use_cpu=True, bf16=False, learning_rate=1e-3, seed=3, save_strategy="steps", max_length=32,
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    newest = posttrain(world, "import", "trl-output", "trl-sft", "-o", "json")
    assert [asset["ref"] for asset in newest["assets"]] == ["history:trl-sft@1", "model:trl-sft@1"]
    trainer.save_model()
    root = posttrain(world, "import", "trl-output", "trl-sft", "-o", "json")
    assert [asset["ref"] for asset in root["assets"]] == ["history:trl-sft@2", "model:trl-sft@2"]
    assert newest["assets"][0]["digest"] == root["assets"][0]["digest"]  # the same metrics, of another folder

    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    curves = {c["metric"]: c for c in posttrain(world, "asset", "get", "history:trl-sft", "-o", "json")["curves"]}
    assert curves["loss"]["points"] == len(logged) == 4
    assert (curves["loss"]["first"], curves["loss"]["last"]) == (logged[1], logged[4])

    nodes = below(posttrain(world, "lineage", "model:trl-sft", "-o", "json"))
    imported = next(node for node in nodes if node["kind"] == "import")
    import trl

    assert f"trl {trl.__version__}" in imported["details"]["made with"]
    assert imported["details"]["model"] == "the model at the root of the folder"
    assert nodes[-1]["name"] == "before this: unknown"
    assert posttrain(world, "verify", "model:trl-sft", "-o", "json")["ok"]

    posttrain(world, "export", "model:trl-sft", "taken")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(world / f).state_dict() for f in ("taken", "trl-sft"))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert posttrain(world, "sample", "model:trl-sft", "7 ", "--max-new-tokens", "3", "-o", "json")
