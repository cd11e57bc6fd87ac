"""Runs that other programs made, registered: `posttrain import`."""

from __future__ import annotations

from pathlib import Path

from posttrain.app.workspace import Workspace
from posttrain.data.importing import Curve, Imported, curves, import_run
from posttrain.domain.errors import InputError
from posttrain.domain.records import Asset
from posttrain.foreign.trl_output import read_trl_output


def import_trl_output(workspace: Workspace, folder: Path, name: str | None = None) -> Imported:
    """Register what a TRL or transformers trainer left in its `output_dir`.

    Raises:
        InputError: no such run, or nothing that can be used. WorkspaceError: the workspace cannot be written.
    """
    return import_run(workspace.catalog, workspace.blobs, workspace.root / "cache", read_trl_output(folder), name)


def import_mlflow(workspace: Workspace, where: str, run: str | None = None, name: str | None = None) -> Imported:
    """Register a run of an MLflow store. Raises as `import_trl_output`; InputError too where mlflow is missing."""
    from posttrain.foreign.mlflow_run import read_mlflow

    return import_run(workspace.catalog, workspace.blobs, workspace.root / "cache", read_mlflow(where, run), name)


def import_carried(workspace: Workspace, folder: Path, name: str | None = None) -> Imported:
    """Register a run that was read on another machine. Raises as `import_trl_output`."""
    from posttrain.foreign.carrying import carried

    return import_run(workspace.catalog, workspace.blobs, workspace.root / "cache", carried(folder), name)


def import_wandb_export(workspace: Workspace, folder: Path, name: str | None = None) -> Imported:
    """Register a W&B run's files. Raises as `import_trl_output`; InputError too where wandb is missing and needed."""
    from posttrain.foreign.wandb_export import read_wandb_export

    return import_run(workspace.catalog, workspace.blobs, workspace.root / "cache", read_wandb_export(folder), name)


def history_curves(workspace: Workspace, history: Asset) -> list[Curve]:
    """The metrics of an imported run.

    Raises:
        InputError: it is no history. NotFoundError, IntegrityError: its bytes are missing or corrupt.
    """
    if history.kind != "history":
        raise InputError(f"{history.ref}: must be a history, got a {history.kind}; posttrain asset ls --kind history")
    return list(curves(workspace.blobs.get(history.digest)))
