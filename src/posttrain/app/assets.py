"""Registration of data sets, models, rewards and imported run histories, and the marks that people give to versions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from posttrain.api.control import Control
from posttrain.api.values import Marked
from posttrain.api.verbs import answers
from posttrain.app.workspace import Workspace
from posttrain.control import channels as recalls
from posttrain.control.downstream import of_bytes
from posttrain.data import importing
from posttrain.data.refs import is_confined
from posttrain.decision.releases import moves
from posttrain.domain.errors import InputError
from posttrain.domain.lifecycle import RunState, is_final
from posttrain.domain.records import Asset, ReleaseEntry, RunRecord
from posttrain.foreign.outside import OutsideRun
from posttrain.foreign.trl_output import read_trl_output
from posttrain.store.trees import scratch


@answers(Control.add_external)
def add_external(workspace: Workspace, uri: str, name: str, *, checksum: str, version: str) -> Asset:
    from posttrain.store.external import external

    place = external(uri, version)
    with scratch(workspace.root / "cache" / "scratch", "posttrain-external-") as scratched:
        return workspace.catalog.add_external(place, checksum, name, scratched)


@answers(Control.mark)
def mark(workspace: Workspace, ref: str, status: str, reason: str) -> tuple[Asset, Marked]:
    asset, ledger = workspace.catalog.find(ref), workspace.ledger
    said = recalls.set_status(workspace.stores, asset, status, reason)
    if status != recalls.RECALLED:
        return asset, Marked(said, still=recalls.recalled(ledger, [asset.digest]).get(asset.digest))
    found = {run.id: run for run in _that_may_use(workspace, asset)}
    used = {
        one: {str(ref.digest) for stage in workspace.stores.manifest(run).stages for ref in stage.inputs.values()}
        for one, run in found.items()
    }
    histories = {one: history for one in ledger.channels() if (history := ledger.history(one))}
    served = {entry.model_digest for history in histories.values() for entry in history}
    barred = recalls.recalled(ledger, served.union(*used.values())).keys()
    runs = tuple(one for one, digests in used.items() if digests & barred)
    return asset, Marked(
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
    yield from (workspace.ledger.run(one) for one in of_bytes(workspace.ledger, asset.digest).runs)
    for state in RunState:
        if not is_final("run", state):
            yield from workspace.ledger.runs(state=state)


def _before(history: list[ReleaseEntry], barred: Collection[str]) -> int | None:
    """The newest release that a channel may go back to."""
    return next((entry.sequence for entry in reversed(moves(history)) if entry.model_digest not in barred), None)


@answers(Control.import_trl_output)
def import_trl_output(workspace: Workspace, folder: Path, name: str | None) -> importing.Imported:
    """Register what a TRL or transformers trainer left in its `output_dir`.

    Raises:
        InputError: no such run, or nothing that can be used. WorkspaceError: the workspace cannot be written.
    """
    return _imported(workspace, read_trl_output(folder), name)


@answers(Control.import_mlflow)
def import_mlflow(workspace: Workspace, where: str, run: str | None, name: str | None) -> importing.Imported:
    """Register a run of an MLflow store, or what a client read of one. Raises as `import_trl_output`; InputError too
    where mlflow is missing.
    """
    if is_confined():  # the client read it where the store is, and sent what it found
        from posttrain.foreign.outside import carried

        return _imported(workspace, carried(Path(where)), name)
    from posttrain.foreign.mlflow_run import read_mlflow

    return _imported(workspace, read_mlflow(where, run), name)


def what_was_read(control: Control, folder: Path, name: str | None) -> dict[str, Any]:
    """What a client read of an MLflow store, as `import_mlflow` takes it."""
    return {"where": str(folder), "run": None, "name": name}


@answers(Control.import_wandb_export)
def import_wandb_export(workspace: Workspace, folder: Path, name: str | None) -> importing.Imported:
    """Register a W&B run's files. Raises as `import_trl_output`; InputError too where wandb is missing and needed."""
    from posttrain.foreign.wandb_export import read_wandb_export

    return _imported(workspace, read_wandb_export(folder), name)


@answers(Control.curves)
def curves(workspace: Workspace, ref: str) -> list[importing.Curve]:
    """The metrics of an imported run.

    Raises:
        InputError: it is no history. NotFoundError, IntegrityError: its bytes are missing or corrupt.
    """
    history = workspace.catalog.find(ref)
    if history.kind != "history":
        raise InputError(f"{history.ref}: must be a history, got a {history.kind}; posttrain asset ls --kind history")
    return list(importing.curves(workspace.blobs.get(history.digest)))


def _imported(workspace: Workspace, found: OutsideRun, name: str | None) -> importing.Imported:
    return importing.import_run(workspace.catalog, workspace.blobs, workspace.root / "cache", found, name)
