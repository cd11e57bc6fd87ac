"""Folders as other trainers leave them, small."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli_world import safetensors, write_model

CARD = """\
---
base_model: Qwen/Qwen3-0.6B
library_name: transformers
model_name: out
tags:
- generated_from_trainer
- sft
- trl
datasets: trl-lib/Capybara
licence: license
---

# Model Card for out

## Training procedure

This model was trained with SFT.

### Framework versions

- TRL: 1.16.0
- Transformers: 5.23.0

## Citations

- Transformers: 9.9.9
"""


def log(steps: int) -> list[dict[str, Any]]:
    """What a trainer logs: a row per step, one of an evaluation, one of the end."""
    rows = [{"epoch": s / steps, "learning_rate": 1e-3, "loss": 1 / s, "step": s} for s in range(1, steps + 1)]
    return [*rows, {"eval_loss": 0.25, "step": steps}, {"train_runtime": 12.5, "step": steps}]


def state(steps: int, rows: Sequence[Any] | None = None, **others: Any) -> str:
    """`trainer_state.json` after that many steps."""
    said = {"global_step": steps, "max_steps": 8, "train_batch_size": 4, "best_model_checkpoint": None, **others}
    return json.dumps({**said, "log_history": log(steps) if rows is None else rows})


def trl_output(folder: Path, *, steps: Sequence[int] = (2, 4), **others: Any) -> Path:
    """An `output_dir` with a checkpoint at each of these steps, how good it is being its step."""
    for step in steps:
        place = folder / f"checkpoint-{step}"
        write_model(place, float(step))
        (place / "optimizer.pt").write_bytes(b"\x80\x04a pickle")
        (place / "training_args.bin").write_bytes(b"\x80\x04a pickle")
        (place / "trainer_state.json").write_text(state(step, **others))
    (folder / "README.md").write_text(CARD)
    return folder


def with_model(folder: Path, quality: float) -> Path:
    """The model that the end of training saves beside its checkpoints."""
    made = folder.with_name(f"{folder.name}-made")
    write_model(made, quality)
    for path in made.iterdir():
        path.rename(folder / path.name)
    made.rmdir()
    return folder


def weights(quality: float) -> bytes:
    """The only file of weights that `write_model` writes."""
    return safetensors(quality)


def children(node: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Everything of a kind below a node of a lineage."""
    found = [child for child in node["children"] if child["kind"] == kind]
    return found + [deep for child in node["children"] for deep in children(child, kind)]
