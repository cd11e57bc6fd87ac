"""Planning, submission and sweeps of runs, and objects that were set aside.

A plan (`posttrain plan`) shows the manifest, the cached stages, the cost of the run, and whether its gates can decide.
Planning writes nothing.

A sweep is one run file with several settings and seeds. Each combination is a point of the sweep, and a run like any
other. The ledger has no record of a sweep: the same command resolves the same points, attaches to their runs, continues
these runs after the command was killed, and shows the table of results. A stage that two points share is computed once,
because of the stage cache.

An object is set aside after repeated failures, until a person resumes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.api.control import Control
from posttrain.api.values import Dead, Locked, PlanView, Point, Ranked, StagePlan, Submitted, Sweep
from posttrain.api.verbs import answers
from posttrain.app.sinks import lacking
from posttrain.app.workspace import Workspace
from posttrain.control import actions, attempts, channels
from posttrain.control.approvals import terms
from posttrain.control.channels import recall_of, refuse_recalled
from posttrain.control.comparison import metric_direction, rank_runs, swept_metric, swept_model
from posttrain.control.decide import stall_after
from posttrain.control.lineage import made_model
from posttrain.control.plan import Planned, Resolve, plan_run, submit as submit_manifest
from posttrain.data.refs import Source, parse_ref, refuse_afar
from posttrain.decision.releases import origin
from posttrain.domain.canonical import derive_seed
from posttrain.domain.engines import engine_plugin, engines_in
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError
from posttrain.domain.ids import is_lock, lock_path
from posttrain.domain.kinds import Driver, installed_kind, kind_of
from posttrain.domain.lifecycle import Reason, RunState
from posttrain.domain.manifest import InputRef, Manifest, StageManifest, measured_suites, suite_evaluator
from posttrain.domain.overrides import Override, Setting, setting_words, settings
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.domain.rewards import AS_FOUND, Called
from posttrain.domain.runspec import RunSpec, load_run_spec
from posttrain.domain.trackers import Trackers
from posttrain.execution.installed import InstalledTrainer
from posttrain.preflight.confinement import check_surroundings
from posttrain.preflight.data import check_fit, counter, repeated, seen_in_training, wide_steps
from posttrain.preflight.locks import read_lock, refuse_lock
from posttrain.preflight.outlook import look_ahead, refuse_hopeless
from posttrain.preflight.placements import (
    check_models,
    refuse_image,
    residencies,
    slower,
)
from posttrain.trackers.choice import check_trackers, describe, of_workspace, record_trackers, resolved

_MOVED = "a model that the run file names has changed; this run continues with the model with which it began"
MAX_SEED = 2**53  # JSON readers represent larger integers inexactly
MOST_RUNS = 1000
_KEPT = "a sweep releases nothing: the file's release and gates are left out; release your choice with posttrain run"


@answers(Control.lock)
def lock(workspace: Workspace, path: Path, *, seed: int | None = None, setting: Setting = ()) -> Locked:
    planned = plan(path, workspace, seed=seed, setting=setting)
    return Locked(planned.manifest, planned.warnings, planned.changes, lock_path(path))


@answers(Control.retry)
def retry(workspace: Workspace, run_id: str) -> RunRecord:
    return actions.retry(workspace.stores, workspace.jobs.folders, run_id)


def plan(path: str | Path, workspace: Workspace, *, seed: int | None = None, setting: Setting = ()) -> Planned:
    """Validate a run file and resolve it to a manifest, without writing anything.

    Args:
        seed: replaces the seed in the file.
        setting: values that replace those in the file.

    Raises:
        InputError: the run file is invalid; the message names the file, the field, the constraint and the value.
    """
    source = Path(path)
    refuse_lock(source)
    return plan_spec(load_run_spec(source, setting), workspace, source, seed=seed)


def plan_spec(spec: RunSpec, workspace: Workspace, source: Path, *, seed: int | None = None) -> Planned:
    """Resolve a parsed run file; reject a run that can never succeed, unless the run exists already.

    Raises:
        InputError: the file cannot be resolved (see `resolve_spec`), or no run could meet its budgets and gates.
    """
    planned = resolve_spec(spec, workspace, source, seed=seed)
    manifest = planned.manifest
    if workspace.ledger.runs(manifest_digest=manifest.digest):
        return planned
    ahead = look_ahead(planned, spec, workspace, source, verified=False)
    refuse_hopeless(manifest, ahead, source)
    return replace(planned, warnings=(*ahead.warnings, *planned.warnings), changes=ahead.changes)


def resolve_spec(spec: RunSpec, workspace: Workspace, source: Path, *, seed: int | None = None) -> Planned:
    """Return the manifest of a parsed run file; relative paths in the file start at its folder.

    Raises:
        InputError: a value or ref is invalid, rows do not fit the model or the stage that reads them, or a placement is
            infeasible.
    """
    if seed is not None:
        if not 0 <= seed < MAX_SEED:
            raise InputError(f"seed must be a whole number from 0 to 2^53 - 1, got {seed}")
        spec = spec.model_copy(update={"seed": seed})
    workspace.refuse_missing_executor()
    refuse_image(spec.image, workspace, source)
    resolve = _resolver(spec, workspace, source)
    count, known = counter(workspace, spec, source), workspace.ledger.channels()
    policy = channels.policy_of(workspace.stores, spec.release.channel) if spec.release else None
    planned = plan_run(spec, str(source), resolve, workspace.jobs.trainers, known, count, policy)
    barred = tuple(_recalled(workspace, planned.manifest, source))
    same = check_models(planned.manifest, planned.contracts, workspace, source, spec.model)
    around = check_surroundings(planned, workspace, source)
    unfit = check_fit(planned, spec, workspace, source)
    beside = workspace.catalog.not_taken
    apart = dict.fromkeys(beside[ref.digest] for _, _, ref in planned.manifest.assets() if ref.digest in beside)
    unheard = (
        f"sink {name}: {lacks}, so the sink receives nothing; set the variable or file where the run is driven"
        for name, lacks in lacking(workspace)
    )
    found = (
        *same,
        *around,
        *unfit,
        *apart,
        *_frozen(spec, workspace),
        *barred,
        *unheard,
    )
    return replace(planned, warnings=(*planned.warnings, *found), trackers=_trackers(spec, workspace, source))


def _recalled(workspace: Workspace, manifest: Manifest, source: Path) -> Iterator[str]:
    """Reject recalled assets in a new run; yield a warning for an existing run.

    Raises:
        InputError: an asset was recalled, and no run of this manifest exists.
    """
    with workspace.ledger.snapshot() as now:
        if not now.runs(manifest_digest=manifest.digest):
            refuse_recalled(now, manifest, str(source))
        told = recall_of(now, manifest)
    if told:
        yield f"{told}; its run already exists, but neither --again nor retry starts another"


def _frozen(spec: RunSpec, workspace: Workspace) -> Iterator[str]:
    """Yield a warning for a frozen channel; this is no error, since the channel may be unfrozen when the run ends."""
    channel = spec.release.channel if spec.release else ""
    if channel and workspace.ledger.channel_record(channel).frozen:
        yield (
            f"release.channel: {channel} is frozen: if the run ends before the channel is unfrozen (posttrain channel "
            f"unfreeze {channel}), it is rejected and must be promoted by hand"
        )


def _trackers(spec: RunSpec, workspace: Workspace, source: Path) -> Trackers | None:
    """Return the run file's trackers, each with its place; None: the run uses the workspace's trackers.

    The trackers that the run uses are checked in either case.

    Raises:
        InputError: a tracker could not be written.
    """
    if spec.trackers is None:
        check_trackers(of_workspace(workspace), str(workspace.root))
        return None
    refuse_afar(f"{source}: trackers: runs on a server use the trackers of its workspace; leave the section out")
    named = resolved(spec.trackers, source.absolute().parent, workspace.root)
    check_trackers(named, str(source))
    return named


def _refuse_bare_word(text: str, workspace: Workspace, folder: Path) -> None:
    """Reject a bare channel or run name with a message that contains the ref for a run file.

    Raises:
        InputError: the text is such a name.
    """
    if ":" in text or text.startswith((".", "~", "/")) or (folder / text).exists():
        return
    if text.partition("@")[0] in workspace.ledger.channels():
        raise InputError(f"ref {text!r}: is a channel; write channel:{text}")
    try:
        workspace.ledger.find_run(text.partition("/")[0])
    except InputError:  # no such run, or several such runs; the parser reports the error
        return
    raise InputError(f"ref {text!r}: is a run; write run:{text}")


def _resolver(spec: RunSpec, workspace: Workspace, source: Path) -> Resolve:
    """Return a resolver of refs to pinned inputs; the ledger has models made by runs, the catalog all assets."""
    of_assets = workspace.catalog.resolver(source.parent, boxed=spec.image is not None)

    def resolve(kind: str, text: str, called: Called = AS_FOUND) -> InputRef:
        if kind == "model":
            _refuse_bare_word(text, workspace, source.parent)
        ref = parse_ref(text, kind) if kind == "model" else None
        if ref is None or not ref.made:
            return of_assets(kind, text, called)
        made = made_model(workspace.stores, ref)
        own = made.run_id is not None and workspace.ledger.run(made.run_id).name == spec.name
        if ref.source is Source.RUN and own and ref.name != made.run_id:
            raise InputError(
                f"ref {text!r}: must name a run of {spec.name} by its full id, since this file creates runs of that "
                f"name; write run:{made.run_id}/{made.word}"
            )
        if ref.source is Source.REGISTRY and own and ref.version is None:
            raise InputError(
                f"ref {text!r}: must name a version, since this file ({spec.name}) creates further versions; write "
                f"{made.name}"
            )
        return made.pinned(text)

    return resolve


@answers(Control.submit)
def submit(
    workspace: Workspace,
    path: Path,
    *,
    again: bool = False,
    seed: int | None = None,
    setting: Setting = (),
    note: str = "",
    tags: Sequence[str] = (),
) -> Submitted:
    """Record a run of a run file or of a locked manifest; if it was submitted before, return the existing run.

    Raises:
        InputError: the run file (see `plan`), the locked manifest (see `read_lock`), the note or a tag (see
            `actions.check_note`) is invalid, or a seed or setting was given for a locked manifest.
    """
    actions.check_note(note, tags)
    if is_lock(path) and seed is not None:
        raise InputError(
            f"{path}: --seed cannot change a locked manifest, got {seed}; lock the run file again with this seed"
        )
    if is_lock(path) and setting:
        raise InputError(f"{path}: --set cannot change a locked manifest, got {setting[0][0]}; lock the run file again")
    lock = is_lock(path)
    with workspace.blobs.holding():  # garbage collection must not delete bytes that planning found
        locked = read_lock(path, workspace, again=again) if lock else None
        planned = locked or plan(path, workspace, seed=seed, setting=setting)
        found = submit_planned(planned, workspace, again=again, exact=lock)
    if note.strip() or tags:
        actions.note(workspace.stores, found.run.id, note, tags)
    return found


def submit_planned(planned: Planned, workspace: Workspace, *, again: bool = False, exact: bool = False) -> Submitted:
    """Record a run of a resolved manifest, or retry the manifest's run if it was stopped or all its attempts were lost.

    See `control.plan.submit`.
    """
    with workspace.blobs.holding():
        workspace.catalog.publish(planned.manifest)
        submitted = submit_manifest(workspace.stores, planned.manifest, again=again, exact=exact)
    makes_model = all(kind_of(stage.kind).from_nothing for stage in planned.manifest.stages)  # reports no metrics
    trackers = Trackers() if makes_model else planned.trackers
    record_trackers(workspace, submitted.run.id, trackers, attached=submitted.attached)
    retried = submitted.run.state == RunState.STOPPED or submitted.run.reason == Reason.ATTEMPTS_EXHAUSTED
    if retried:
        actions.retry(workspace.stores, workspace.jobs.folders, submitted.run.id)
    warnings = () if submitted.attached else planned.warnings
    run = workspace.ledger.run(submitted.run.id) if retried else submitted.run
    return Submitted(run, submitted.attached, (_MOVED,) if submitted.moved else warnings)


def _where(workspace: Workspace, stage: StageManifest) -> str:
    """Return the flavour of a stage's nodes, and their executor; empty: its jobs have no flavour, or it has none."""
    if kind_of(stage.kind).driver is not Driver.JOB:
        return ""
    name, flavour = workspace.jobs.flavour_of(stage)
    return f"{name} ({flavour.executor})" if flavour else ""


@answers(Control.plan)
def view_plan(workspace: Workspace, path: Path, *, seed: int | None = None, setting: Setting = ()) -> PlanView:
    """Validate a run file, and estimate the cost of its run and the power of its gates.

    Raises:
        InputError: the run file is invalid; the message names the file, the field, the constraint and the value.
    """
    refuse_lock(path)
    spec = load_run_spec(path, setting)
    planned = resolve_spec(spec, workspace, path, seed=seed)
    existing = workspace.ledger.runs(manifest_digest=planned.manifest.digest)
    ahead = look_ahead(planned, spec, workspace, path)
    if not existing:
        refuse_hopeless(planned.manifest, ahead, path)
    found = dict(residencies(planned, spec, workspace, path, ahead.datasets))
    stages = tuple(
        StagePlan(
            stage.name,
            stage.kind,
            tuple((slot, _shown(ref), ref.digest) for slot, ref in stage.inputs.items()),
            _origin(ahead.cached[stage.name]),
            ahead.estimates[stage.name],
            planned.contracts[stage.name].load if stage.name in planned.contracts else None,
            found[stage.name].residency if stage.name in found else None,
            planned.passes.get(stage.name),
            stall_after(planned.manifest, stage.name) if kind_of(stage.kind).driver is Driver.JOB else None,
            tuple(_packages(stage, workspace)),
            found[stage.name].sizes if stage.name in found else (),
            _where(workspace, stage),
        )
        for stage in planned.manifest.stages
    )
    warnings = (
        *ahead.warnings,
        *planned.warnings,
        *repeated(planned, ahead.datasets),
        *seen_in_training(planned, ahead.datasets),
        *wide_steps(planned, ahead.datasets),
        *(f"{name}: {warning}" for name, seen in found.items() for warning in seen.warnings),
        *slower(planned, spec, workspace, path),
    )
    gates = tuple((rule.name, origin(rule, planned.policy)) for rule in planned.manifest.gates if planned.policy)
    gates += tuple(("suggested", line) for line in channels.unguarded(planned.manifest))
    return PlanView(
        planned.manifest,
        stages,
        ahead.power,
        warnings,
        ahead.changes,
        tuple(describe(planned.trackers or of_workspace(workspace))),
        existing[0] if existing else None,
        gates,
        tuple(  # every evaluator of the released model, in the form that a policy contains
            (suite, suite_evaluator(stage, planned.manifest.code, suite))
            for stage in channels.released_evaluators(planned.manifest)
            for suite, _ in measured_suites(stage)
        ),
        *_approvals(planned, workspace),
    )


def _approvals(planned: Planned, workspace: Workspace) -> tuple[int, tuple[str, ...]]:
    """Return how many approvals the release needs, and who may give them."""
    release = planned.manifest.release
    if release is None:
        return 0, ()
    with workspace.ledger.snapshot() as now:
        found = terms(now, now.channel_record(release.channel), planned.policy, workspace.actor)
    return (found.needed, found.approvers) if found else (0, ())


def _packages(stage: StageManifest, workspace: Workspace) -> Iterator[str]:
    """Yield `posttrain-words 1.0` for each plugin that a stage uses."""
    kind = installed_kind(stage.kind)
    trainer = workspace.jobs.trainers.get(stage.trainer)
    plugins = [kind.plugin if kind else None, trainer.plugin if isinstance(trainer, InstalledTrainer) else None]
    plugins += map(engine_plugin, engines_in(stage.params))
    yield from dict.fromkeys(plugin.distribution for plugin in plugins if plugin)


def _origin(record: StageRecord | None) -> str | None:
    return (record.cached_from or f"{record.run_id}/{record.name}") if record else None


def _shown(ref: InputRef) -> str:
    called = f" ({ref.meta['entry']})" if "dialect" in ref.meta and ref.name.startswith("path:") else ""
    return {"stage": f"stage {ref.word}", "channel": f"channel {ref.name}"}.get(ref.source, ref.name + called)


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
    """Resolve every point of a sweep, without writing anything; if one point cannot run, the sweep is rejected.

    Args:
        overrides: the values to combine; the values of `seed` are the seeds of every setting.
        seeds: the number of seeds of each setting: the seed in the file, and others derived from it.
        metric: the metric to rank by; None: the first gate's metric, or else the evaluation's first metric.
        better: "higher" or "lower"; None: the direction of a gate or of the metric itself.

    Raises:
        InputError: a point is invalid (the message names its setting), nothing varies, there are too many points, or
            there is no metric to rank by.
    """
    refuse_lock(path)
    named = next((one.values for one in overrides if one.path == "seed"), None)
    if seeds > 1 and named is not None:
        raise InputError("sweep: --seeds and --set seed=… both set the seed; give one of them")
    chosen, count = list(settings([one for one in overrides if one.path != "seed"])), len(named or range(seeds))
    if len(chosen) * count < 2:
        raise InputError("sweep: needs a setting that varies, got one point; give --set PATH=A,B or --seeds 3")
    if len(chosen) * count > MOST_RUNS:
        raise InputError(f"sweep: must have at most {MOST_RUNS} runs, got {len(chosen)} settings x {count} seeds")
    points: list[Point] = []
    gated, specs = False, [load_run_spec(path, setting) for setting in chosen]  # all are parsed first, which is cheap
    for place, (setting, spec) in enumerate(zip(chosen, specs, strict=True)):
        gated = gated or spec.release is not None
        more = (derive_seed(spec.seed, "sweep", number) % MAX_SEED for number in range(1, seeds))
        for seed in named or (spec.seed, *more):
            bare = spec.model_copy(update={"gates": (), "release": None})
            points.append(Point(place, setting, seed, _planned(bare, workspace, path, setting, seed)))
    _refuse_equal(points)
    first = specs[0]
    planned = points[0].planned
    model = swept_model(planned.manifest, first.release.model if first.release else None)
    name = swept_metric(planned.manifest, planned.contracts, first.gates, model, metric)
    direction = metric_direction(name, first.gates, better)
    warnings = dict.fromkeys(line for point in points for line in point.planned.warnings)
    return Sweep(path, tuple(points), name, direction, model, (*warnings, *([_KEPT] if gated else [])))


@answers(Control.submit_point)
def submit_point(workspace: Workspace, point: Point) -> Submitted:
    """Record the run of a point, or attach to the existing run."""
    return submit_planned(point.planned, workspace)


@answers(Control.rank)
def rank(workspace: Workspace, sweep: Sweep, runs: Mapping[tuple[int, int], str]) -> Ranked:
    """Return the settings, ranked by the measurements so far.

    Args:
        runs: (index of the setting, seed) → run id, for the points that were submitted.
    """
    by_setting = [
        {seed: runs[place, seed] for seed in sweep.seeds if (place, seed) in runs}
        for place in range(len(sweep.settings))
    ]
    return Ranked(*rank_runs(workspace.stores, by_setting, sweep.model, sweep.metric, sweep.better))


def sent_point(control: Control, place: int, seed: int, **words: Any) -> dict[str, Any]:
    """Plan the sweep of a client's request again; return the arguments for the point that the request names.

    Raises:
        InputError: the sweep has no such point.
    """
    for point in control.plan_sweep(**words).points:
        if (point.place, point.seed) == (place, seed):
            return {"point": point}
    raise InputError(f"sweep: the sweep has no point number {place} with seed {seed}; plan the sweep again")


def sent_sweep(control: Control, runs: Sequence[tuple[int, int, str]], **words: Any) -> dict[str, Any]:
    """Return the arguments for a client's request: the sweep, which is planned again, and the sweep's runs."""
    return {"sweep": control.plan_sweep(**words), "runs": {(place, seed): run for place, seed, run in runs}}


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
    """Reject two points with the same manifest, since their one run would be counted twice.

    Raises:
        InputError: two points are equal; the message names both.
    """
    known: dict[str, Point] = {}
    for point in points:
        other = known.setdefault(point.planned.manifest.digest, point)
        if other is not point:
            raise InputError(
                f"sweep: settings must lead to different runs, got {setting_words(other.setting)} and "
                f"{setting_words(point.setting)}, which lead to the same run; leave one out"
            )


@answers(Control.dead)
def dead(workspace: Workspace, within: str | None) -> list[Dead]:
    """Return objects that were set aside: all of them, or those of one run or stage.

    Args:
        within: RUN or RUN/STAGE, where RUN is a name or an id.

    Raises:
        NotFoundError: there is no such run, or none of its objects was set aside.
    """
    rows = [
        Dead(one.object, one.kind, one.failures, one.failed_since, one.dead_at or 0.0, one.error, one.traceback)
        for one in workspace.reconciler.queue.rows(dead=True)
    ]
    if within is None:
        return rows
    named = _named(workspace, within)
    found = [one for one in rows if one.object == named or one.object.startswith(f"{named}/")]
    if not found:
        raise NotFoundError(f"no object of {named} was set aside; posttrain dead lists the objects set aside")
    return found


@answers(Control.look_again)
def look_again(workspace: Workspace, within: str) -> list[Dead]:
    """Resume the objects of a run, or of one stage, that were set aside; return them.

    Raises:
        NotFoundError: there is no such run, or none of its objects was set aside.
    """
    found = dead(workspace, within)
    for one in found:
        workspace.reconciler.queue.revive(one.kind, one.object)
    return found


@answers(Control.assume_dead)
def assume_dead(workspace: Workspace, stage: str) -> AttemptRecord:
    """Record a person's statement that the job of RUN/STAGE is dead; see `control.attempts`.

    Raises:
        InputError: the text does not name a stage, or the stage's job can be observed.
        NotFoundError: there is no such run or stage.
    """
    run, _, name = _named(workspace, stage).partition("/")
    if not name:
        raise InputError(f"dead: --assume-dead needs RUN/STAGE, got {stage!r}; posttrain why {run} names the stage")
    return attempts.assume_dead(workspace.stores, workspace.jobs, run, name)


def _named(workspace: Workspace, text: str) -> str:
    run, _, stage = text.partition("/")
    found = workspace.ledger.find_run(run).id
    return f"{found}/{stage}" if stage else found
