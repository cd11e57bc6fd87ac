"""Approving and recalling of registered versions.

Runs that other programs made, registered: `posttrain import`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from posttrain.api.values import Marked
from posttrain.app.workspace import Workspace
from posttrain.control.downstream import of_bytes
from posttrain.control.recalls import RECALLED, recalled, set_status
from posttrain.data.importing import Curve, Imported, curves, import_run
from posttrain.decision.releases import moves
from posttrain.domain.errors import InputError
from posttrain.domain.lifecycle import RunState, is_final
from posttrain.domain.records import Asset, ReleaseEntry, RunRecord
from posttrain.foreign.trl_output import read_trl_output


def mark(workspace: Workspace, asset: Asset, status: str, reason: str = "") -> Marked:
    """Say what is thought of a version: `approved`, `recalled`, or nothing any more."""
    said = set_status(workspace.stores, asset, status, reason)
    workspace.seal()
    if status != RECALLED:
        return Marked(said, still=recalled(workspace.ledger, [asset.digest]).get(asset.digest))
    ledger = workspace.ledger
    found = {run.id: run for run in _that_may_use(workspace, asset)}
    used = {
        one: {str(ref.digest) for stage in workspace.stores.manifest(run).stages for ref in stage.inputs.values()}
        for one, run in found.items()
    }
    histories = {one: history for one in ledger.channels() if (history := ledger.history(one))}
    served = {entry.model_digest for history in histories.values() for entry in history}
    barred = recalled(ledger, served.union(*used.values())).keys()
    runs = tuple(one for one, digests in used.items() if digests & barred)
    return Marked(
        said,
        runs,
        tuple(one for one in runs if not is_final("run", found[one].state)),
        tuple(
            (one, _before(history, barred))
            for one, history in histories.items()
            if (live := ledger.channel(one)) and live.model_digest in barred
        ),
    )


def _that_may_use(workspace: Workspace, asset: Asset) -> Iterator[RunRecord]:
    """Runs that used the bytes, and every unfinished one: what its stages will use stands in its manifest alone."""
    made = of_bytes(workspace.ledger, asset.digest).runs
    yield from (workspace.ledger.run(one) for one in made)
    for state in RunState:
        if not is_final("run", state):
            yield from workspace.ledger.runs(state=state)


def _before(history: list[ReleaseEntry], barred: Collection[str]) -> int | None:
    """The newest release that a channel may go back to."""
    return next((entry.sequence for entry in reversed(moves(history)) if entry.model_digest not in barred), None)


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
    from posttrain.foreign.outside import carried

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
