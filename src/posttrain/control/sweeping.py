"""What the runs of a sweep measured, ranked: settings × seeds, on one metric of one model's evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.control.planning import Planned
from posttrain.control.scores import EVALUATE, estimate_json, measurements
from posttrain.control.wiring import Wiring
from posttrain.decision.gates import Evidence
from posttrain.decision.ranking import Ranking, rank
from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateRule
from posttrain.domain.measures import better
from posttrain.domain.validation import nearest

Runs = Mapping[int, str]  # seed → run id


def swept_metric(planned: Planned, gates: Sequence[GateRule], released: str | None, named: str | None) -> str:
    """The metric that settings are ranked by: as named, else the first gate's, else the evaluation's first.

    Args:
        released: the stage whose model the run file would release; None: that of the last evaluation.

    Raises:
        InputError: no evaluation, or none with that metric.
    """
    known = _declared(planned, released)
    if not known:
        raise InputError("sweep: needs an evaluation to compare by, got no evaluate stage; add one")
    wanted = named or next((gate.metric for gate in gates if gate.metric in known), known[0])
    if wanted not in known:
        raise InputError(f"sweep: --metric must be one that is measured, got {wanted!r}{nearest(wanted, known)}")
    return wanted


def metric_direction(metric: str, gates: Sequence[GateRule], named: str | None) -> str:
    """Which way the metric improves.

    Raises:
        InputError: nobody says so.
    """
    gated = next((("lower", "higher")[gate.higher_is_better] for gate in gates if gate.metric == metric), None)
    found = named or gated or better(metric)
    if found is None:
        raise InputError(f"sweep: --better must say which way {metric} improves: higher or lower")
    return found


def rank_runs(
    wiring: Wiring, settings: Sequence[Runs], released: str | None, metric: str, direction: str
) -> tuple[Ranking, tuple[str, ...]]:
    """Rank settings by what their runs measured so far, and say what could not be read."""
    troubles: list[str] = []
    measured: list[dict[int, Evidence]] = []
    for runs in settings:
        found = {seed: _evidence(wiring, run, released, metric, troubles) for seed, run in runs.items()}
        measured.append({seed: evidence for seed, evidence in found.items() if evidence is not None})
    return rank(metric, measured, direction), tuple(troubles)


def ranking_json(ranking: Ranking, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Plain JSON.

    Args:
        settings: what else is known of each.
    """
    rows = [
        {
            **own,
            "mean": estimate_json(one.mean) if one.mean else None,
            "values": {str(seed): value for seed, value in one.values.items()},
            "rank": [one.best, one.worst],
        }
        for own, one in zip(settings, ranking.settings, strict=True)
    ]
    pairs = [
        {"first": d.first, "second": d.second, "difference": d.value, "low": d.low, "high": d.high, "seeds": d.seeds}
        for d in ranking.differences
    ]
    return {"confidence": ranking.confidence, "settings": rows, "differences": pairs, "notes": list(ranking.notes)}


def _declared(planned: Planned, released: str | None) -> list[str]:
    """The metrics of the evaluations of one model, in order."""
    stages = [stage for stage in planned.manifest.stages if stage.kind == EVALUATE]
    if not stages:
        return []
    named = [stage for stage in stages if stage.inputs["model"].name == released]
    chosen = named or [stage for stage in stages if stage.inputs["model"] == stages[-1].inputs["model"]]
    return [metric for stage in chosen for metric in planned.contracts[stage.name].metrics]


def _evidence(wiring: Wiring, run_id: str, released: str | None, metric: str, troubles: list[str]) -> Evidence | None:
    run = wiring.ledger.run(run_id)
    manifest, rows = wiring.manifest(run), {row.name: row for row in wiring.ledger.stages(run_id)}
    found = [one for one in measurements(wiring, manifest, rows, troubles) if metric in one.evidence]
    named = [one for one in found if one.model.name == released]
    return (named or found)[-1].evidence[metric] if found else None
