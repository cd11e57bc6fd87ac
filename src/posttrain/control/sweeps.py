"""Rank the runs of a sweep: settings × seeds, on one metric of one model's evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.control.plan import Planned
from posttrain.control.scores import measurements
from posttrain.decision.gates import Evidence
from posttrain.decision.power import Ranking, rank
from posttrain.domain.errors import InputError, nearest
from posttrain.domain.gates import GateRule
from posttrain.domain.kinds import better
from posttrain.store.ledger import Stores

Runs = Mapping[int, str]  # seed → run id


def swept_model(planned: Planned, released: str | None) -> str:
    """Return the model by which settings are ranked, as named in a run file.

    This is the released model if an evaluation measures it, else the model of the last evaluation.

    Raises:
        InputError: there is no evaluation.
    """
    words = [stage.inputs["model"].word for stage in planned.manifest.stages if stage.measures]
    if not words:
        raise InputError("sweep: needs an evaluate stage whose metric compares the runs, got none; add one")
    return released if released in words and released else words[-1]


def swept_metric(planned: Planned, gates: Sequence[GateRule], model: str, named: str | None) -> str:
    """Return the ranking metric: the named metric, else the first gate's, else the evaluation's first metric.

    Args:
        model: the result of `swept_model`.

    Raises:
        InputError: no evaluation of the model has that metric.
    """
    chosen = [s for s in planned.manifest.stages if s.measures and s.inputs["model"].word == model]
    known = [metric for stage in chosen for metric in planned.contracts[stage.name].metrics]
    wanted = named or next((gate.metric for gate in gates if gate.metric in known), known[0])
    if wanted not in known:
        raise InputError(
            f"sweep: --metric must be a metric that the run file measures, got {wanted!r}{nearest(wanted, known)}"
        )
    return wanted


def metric_direction(metric: str, gates: Sequence[GateRule], named: str | None) -> str:
    """Return the direction in which the metric improves: higher or lower.

    Raises:
        InputError: the direction is unknown.
    """
    gate = next((gate for gate in gates if gate.metric == metric), None)
    gated = gate and ("higher" if gate.higher_is_better else "lower")
    found = named or gated or better(metric)
    if found is None:
        raise InputError(f"sweep: --better must be higher or lower for metric {metric}, got none; add it")
    return found


def rank_runs(
    stores: Stores, settings: Sequence[Runs], model: str, metric: str, direction: str
) -> tuple[Ranking, tuple[str, ...]]:
    """Rank settings by their runs' measurements of one model so far; also return the read errors."""
    troubles: list[str] = []
    measured: list[dict[int, Evidence]] = []
    for runs in settings:
        found = {seed: _evidence(stores, run, model, metric, troubles) for seed, run in runs.items()}
        measured.append({seed: evidence for seed, evidence in found.items() if evidence is not None})
    return rank(metric, measured, direction), tuple(troubles)


def ranking_json(ranking: Ranking, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return plain JSON.

    Args:
        settings: other facts about each setting.
    """
    rows = [
        {
            **own,
            "mean": asdict(one.mean) if one.mean else None,
            "values": {str(seed): value for seed, value in one.values.items()},
            "rank": [one.best, one.worst] if one.mean else None,
        }
        for own, one in zip(settings, ranking.settings, strict=True)
    ]
    pairs = [
        {"first": d.first, "second": d.second, "difference": d.value, "low": d.low, "high": d.high, "seeds": d.seeds}
        for d in ranking.differences
    ]
    return {
        "confidence": ranking.confidence,
        "settings": rows,
        "differences": pairs,
        "notes": list(ranking.notes),
        "warnings": list(ranking.warnings),
    }


def _evidence(stores: Stores, run_id: str, model: str, metric: str, troubles: list[str]) -> Evidence | None:
    """Return a run's measurement of the model; None if the model was not measured."""
    manifest, rows = stores.manifest(stores.ledger.run(run_id)), {row.name: row for row in stores.ledger.stages(run_id)}
    found = [
        one
        for one in measurements(stores.blobs, manifest, rows, troubles)
        if one.model.word == model and metric in one.evidence
    ]
    return found[-1].evidence[metric] if found else None
