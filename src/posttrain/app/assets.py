"""Approving and recalling of registered versions."""

from __future__ import annotations

from posttrain.api.values import Marked
from posttrain.app.workspace import Workspace
from posttrain.control.downstream import of_bytes
from posttrain.control.recalls import recalled, set_status
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import Asset


def mark(workspace: Workspace, asset: Asset, status: str, reason: str = "") -> Marked:
    """Say what is thought of a version: `approved`, `recalled`, or nothing any more."""
    said = set_status(workspace.wiring, asset, status, reason)
    workspace.seal()
    if said is None or said.status != "recalled":
        return Marked(said)
    wiring, made = workspace.wiring, of_bytes(workspace.wiring, asset.digest)
    found = {record.id: record for record in (wiring.ledger.run(one) for one in made.runs)}
    used = {
        one: {str(ref.digest) for stage in wiring.manifest(run).stages for ref in stage.inputs.values()}
        for one, run in found.items()
    }
    served = {one: live.model_digest for one in wiring.ledger.channels() if (live := wiring.ledger.channel(one))}
    barred = recalled(wiring, {*served.values(), *(digest for digests in used.values() for digest in digests)}).keys()
    runs = tuple(one for one, digests in used.items() if digests & barred)
    running = tuple(one for one in runs if not is_final("run", found[one].state))
    return Marked(said, runs, running, tuple(one for one, digest in served.items() if digest in barred))
