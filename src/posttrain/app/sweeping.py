"""A sweep: one run file under several settings and seeds, each point a run like any other.

A sweep is no object of the ledger. Its points are the runs that its words name, so the same command attaches to them,
goes on where a kill left it, and shows the table of what is there; stages that two points share are computed once, by
the stage cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.api.control import Control
from posttrain.api.values import Point, Ranked, Submitted, Sweep
from posttrain.api.verbs import answers
from posttrain.app.runs import MAX_SEED, plan_spec, submit_planned
from posttrain.app.workspace import Workspace
from posttrain.control.planning import Planned
from posttrain.control.sweeping import metric_direction, rank_runs, swept_metric, swept_model
from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.overrides import Override, Setting, setting_words, settings
from posttrain.domain.runspec import RunSpec, load_run_spec
from posttrain.preflight.locks import refuse_lock

MOST_RUNS = 1000
_KEPT = "a sweep ships nothing: release and gates of the file are left out; ship what you choose with posttrain run"


@answers(Control.plan_sweep)
def plan_sweep(
    workspace: Workspace,
    path: Path,
    overrides: Sequence[Override],
    *,
    seeds: int,
    metric: str | None,
    better: str | None,
) -> Sweep:
    """Resolve every point of a sweep. Writes nothing; one point that cannot run refuses the sweep.

    Args:
        overrides: those of `seed` are the seeds of every setting.
        seeds: of each setting: the file's own, and others derived from it.
        metric: to rank by; None: the first gate's, else the evaluation's first.
        better: "higher" or "lower"; None: as a gate or the metric itself says.

    Raises:
        InputError: as `plan`, naming the setting; nothing to vary, too many points, or no metric to rank by.
    """
    refuse_lock(path)
    named = next((one.values for one in overrides if one.path == "seed"), None)
    if seeds > 1 and named is not None:
        raise InputError("sweep: --seeds and --set seed=… say the same; give one of them")
    chosen, count = list(settings([one for one in overrides if one.path != "seed"])), len(named or range(seeds))
    if len(chosen) * count < 2:
        raise InputError("sweep: needs something that varies, got one point; give --set PATH=A,B or --seeds 3")
    if len(chosen) * count > MOST_RUNS:
        raise InputError(f"sweep: must be at most {MOST_RUNS} runs, got {len(chosen)} settings x {count} seeds")
    points: list[Point] = []
    gated, specs = False, [load_run_spec(path, setting) for setting in chosen]  # words first: they cost nothing
    for place, (setting, spec) in enumerate(zip(chosen, specs, strict=True)):
        gated = gated or spec.release is not None
        for seed in named or _seeds(spec, seeds):
            bare = spec.model_copy(update={"gates": (), "release": None})
            points.append(Point(place, setting, seed, _planned(bare, workspace, path, setting, seed)))
    _refuse_equal(points)
    first = specs[0]
    model = swept_model(points[0].planned, first.release.model if first.release else None)
    name = swept_metric(points[0].planned, first.gates, model, metric)
    direction = metric_direction(name, first.gates, better)
    warnings = dict.fromkeys(line for point in points for line in point.planned.warnings)
    notes = (*warnings, *([_KEPT] if gated else []))
    return Sweep(path, tuple(points), name, direction, model, notes)


@answers(Control.submit_point)
def submit_point(workspace: Workspace, point: Point) -> Submitted:
    """The run of a point: a new one, or the one that exists."""
    return submit_planned(point.planned, workspace)


@answers(Control.rank)
def rank(workspace: Workspace, sweep: Sweep, runs: Mapping[tuple[int, int], str]) -> Ranked:
    """The settings, ranked by what was measured so far.

    Args:
        runs: (place of a setting, seed) → run id, of the points that were submitted.
    """
    by_setting = [
        {seed: runs[place, seed] for seed in sweep.seeds if (place, seed) in runs}
        for place in range(len(sweep.settings))
    ]
    return Ranked(*rank_runs(workspace.stores, by_setting, sweep.model, sweep.metric, sweep.better))


def sent_point(control: Control, place: int, seed: int, **words: Any) -> dict[str, Any]:
    """The point that a client means, of a sweep that is planned again: it is what it was, or another one is refused.

    Raises:
        InputError: the sweep has no such point.
    """
    for point in control.plan_sweep(**words).points:
        if (point.place, point.seed) == (place, seed):
            return {"point": point}
    raise InputError(f"sweep: has no point of place {place} and seed {seed}; plan it again")


def sent_sweep(control: Control, runs: Sequence[tuple[int, int, str]], **words: Any) -> dict[str, Any]:
    """The sweep that a client means, planned again, and its runs."""
    return {"sweep": control.plan_sweep(**words), "runs": {(place, seed): run for place, seed, run in runs}}


def _seeds(spec: RunSpec, count: int) -> list[int]:
    return [spec.seed, *(derive_seed(spec.seed, "sweep", place) % MAX_SEED for place in range(1, count))]


def _planned(spec: RunSpec, workspace: Workspace, source: Path, setting: Setting, seed: Any) -> Planned:
    if type(seed) is not int:
        raise InputError(f"--set seed: must be whole numbers, got {seed!r}")
    try:
        found = plan_spec(spec, workspace, source, seed=seed)
    except PosttrainError as error:
        if not setting:
            raise
        raise type(error)(f"{setting_words(setting)}: {error}") from error
    return replace(found, changes=())


def _refuse_equal(points: Sequence[Point]) -> None:
    """Refuse two points of one manifest: they would be one run, counted twice.

    Raises:
        InputError: naming both.
    """
    known: dict[str, Point] = {}
    for point in points:
        other = known.setdefault(point.planned.manifest.digest, point)
        if other is not point:
            raise InputError(
                f"sweep: settings must differ in what they run, got {setting_words(other.setting)} and "
                f"{setting_words(point.setting)}, which are the same run; leave one out"
            )
