"""Making a base model from nothing, through the same machinery as any run: a manifest, a job, a ledger entry."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.api.control import Control
from posttrain.api.verbs import answers
from posttrain.app.driver import drive
from posttrain.app.runs import plan_spec, submit_planned
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import InputError
from posttrain.domain.records import Asset, outcome_error
from posttrain.domain.runspec import parse_run_spec, read_yaml
from posttrain.store.trees import materialise

STAGE = "init"


@answers(Control.create_model)
def create_model(workspace: Workspace, name: str, config: Path, seed: int) -> tuple[Asset, str]:
    """Run a one-stage `init_model` run and register what it makes as `model:NAME`.

    The same configuration and seed attach to the run that made it, and register nothing new.

    Args:
        config: YAML with the parameters of the `init_model` stage.

    Raises:
        InputError: an unknown or ill-typed parameter, a name that is not one.
        PosttrainError: the run's outcome, when it did not succeed.
    """
    params = read_yaml(config)
    for key in ("kind", "trainer"):
        if key in params:
            raise InputError(
                f"{config}: {key}: must be left out, got {params[key]!r}; a model file holds parameters only"
            )
    raw = {
        "name": "model-" + re.sub(r"[^a-z0-9_-]", "-", name),
        "owner": workspace.actor.removeprefix("user:"),
        "seed": seed,
        "stages": {STAGE: {"kind": "init_model", **params}},
    }
    spec = parse_run_spec(raw, str(config))
    run_id = submit_planned(plan_spec(spec, workspace, config), workspace).run.id
    record = drive(workspace, run_id)
    rows = tuple(workspace.ledger.stages(run_id))
    error = outcome_error(record, rows)
    if error:
        raise error
    digest = next(row.outputs["model"]["digest"] for row in rows if row.name == STAGE)
    folder = materialise(workspace.blobs, digest, workspace.root / "cache")
    return workspace.catalog.add_model(folder, name, origin={"run": run_id}), run_id
