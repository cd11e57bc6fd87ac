"""How often the items of a run's gates were evaluated before. `decision.looks` draws the consequence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from posttrain.control.deciding import EVIDENCE
from posttrain.decision.looks import Look
from posttrain.domain.contracts import MODEL
from posttrain.domain.evaluators import measured_suites
from posttrain.domain.gates import GateRule
from posttrain.domain.kinds import kind_of
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.policies import LookBudget, PinnedPolicy, suite_of
from posttrain.domain.records import StageRecord
from posttrain.domain.rewards import JUDGES
from posttrain.store.snapshot import Snapshot


def gate_looks(
    now: Snapshot,
    manifest: Manifest,
    pinned: PinnedPolicy | None,
    rows: Mapping[str, StageRecord],
    run_id: str | None = None,
) -> dict[str, Look]:
    """The look of every rule at its items; rules whose items are not known are left out.

    Evaluations of the same run that the gate compares with are part of its look, and not looks before it.

    Args:
        pinned: the policy that the run was planned under. Where it has no `looks`, a project with roles, as every
            server has them, corrects for the number of looks, and an embedded workspace warns.
        rows: stages of the run; before there is one, stages whose cached results it will reuse. An evaluation that is
            not there is the next look.
        run_id: the run; None: it is not submitted.
    """
    gate = next((stage for stage in manifest.stages if kind_of(stage.kind).judges), None)
    if gate is None:
        return {}
    budget: LookBudget = "corrected" if now.roles() else "warn"
    if pinned is not None and pinned.policy.looks is not None:
        budget = pinned.policy.looks
    named = {slot: ref.name for slot, ref in gate.inputs.items() if ref.source == "stage"}
    judged = [manifest.stage(name) for slot, name in named.items() if slot.startswith(EVIDENCE)]
    own = {(run_id, name) for slot, name in named.items() if not slot.startswith(EVIDENCE)}
    return {
        rule.name: Look(max(_place(now, items, stage, rows, own) for stage, items in found), budget)
        for rule in manifest.gates
        if (found := [(stage, items) for stage in judged for items in _items(stage, rule)])
    }


def _items(stage: StageManifest, rule: GateRule) -> Iterator[str]:
    """Digests of the data that a rule judges: its suite's, or of a kind without suites everything that it reads."""
    suites = {name: ref.digest for name, ref in measured_suites(stage)}
    if suites:
        wanted = suites.get(suite_of(rule.metric))
        yield from [wanted] if wanted else []
        return
    for slot, ref in stage.inputs.items():
        if slot != MODEL and not slot.startswith(JUDGES) and ref.digest:
            yield ref.digest


def _place(
    now: Snapshot,
    items: str,
    stage: StageManifest,
    rows: Mapping[str, StageRecord],
    own: Collection[tuple[str | None, str]],
) -> int:
    """The number of an evaluation among those of its items; of one that is still to come, the next number."""
    row, number = rows.get(stage.name), 1
    mine = (row.cached_from or f"{row.run_id}/{row.name}") if row else ""
    for look in now.looks(items):
        if f"{look.run_id}/{look.stage}" == mine:
            break
        number += kind_of(look.kind).measures and (look.run_id, look.stage) not in own
    return number
