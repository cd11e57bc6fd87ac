"""Workspaces with small models of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench import Workbench

from posttrain.app.workspace import init_workspace
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import character_tokenizer, initial_model

TINY = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, context_length=64)


def with_models(
    folder: Path, models: Mapping[str, InitModelConfig], rows: Iterable[Mapping[str, Any]] = ()
) -> Workbench:
    """A workspace with these models, drawn from the seeds 1, 2 and so on, and a file `rows.jsonl`."""
    workspace = init_workspace(folder)
    for seed, (name, config) in enumerate(models.items(), start=1):
        tokenizer = character_tokenizer(config.characters)
        initial_model(config, tokenizer, seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        workspace.catalog.add_model(folder / name, name)
    workspace.close()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Workbench(folder)
