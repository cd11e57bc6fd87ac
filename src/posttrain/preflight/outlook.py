"""Outlook of a run: cached stages, its cost, the power of its gates, and whether its budget suffices.

A run that can never succeed is rejected. A run that will probably fail gets a warning that names the first change to
make. This module writes nothing.

Before any job runs, `gates_power` computes whether gates can decide with the items of their suites. If training uses
stop strings that the evaluation does not use, a warning is given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.control.launch import cache_key, tokens_inherited, usable
from posttrain.control.plan import Planned
from posttrain.control.release_plan import ADDED, dataset_slots, measures, selected_on
from posttrain.control.verdicts import gate_looks
from posttrain.decision.gates import NOT_TESTED, Look
from posttrain.decision.power import ENOUGH, PowerNote, gate_power, unknown_power
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.gates import GateRule
from posttrain.domain.harnesses import Harness
from posttrain.domain.jobs import InputBlob
from posttrain.domain.kinds import HARNESS, OWN, Driver, ItemRange, compares, kind_of
from posttrain.domain.lifecycle import RunState, StageState
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import StageRecord
from posttrain.domain.runspec import RunSpec
from posttrain.domain.waits import wait_of
from posttrain.planner.prospects import (
    Concern,
    Estimate,
    Experience,
    Workload,
    certain_shortfall,
    comparable,
    estimate,
    time_concern,
    token_concern,
)
from posttrain.preflight.data import Dataset, Lengths, read_datasets, registered_rows, unanswered
from posttrain.workspace.settings import OpenWorkspace

_RUNS_LOOKED_AT = 20
_STAGES_LOOKED_AT = 5  # maximum number of comparable stages that are read
_COMING = (StageState.READY, StageState.RUNNING)  # READY: in back-off or about to start
_GOING_ON = (RunState.PENDING, RunState.RUNNING, RunState.STOPPING)
_NOW = " computes it now"


def gates_power(
    planned: Planned, datasets: Mapping[str, Dataset], empty: bool, looks: Mapping[str, Look]
) -> Iterator[PowerNote]:
    """Yield the power of each gate.

    Args:
        empty: whether the release channel is empty.
        looks: gate → the run's look at the gate's items.
    """
    manifest = planned.manifest
    for rule in manifest.gates:
        for name in measures(rule, manifest.stage("gate"), planned.contracts):
            stage, possible = manifest.stage(name), planned.contracts[name].metrics[rule.metric]
            if possible is None:
                continue
            suite = stage.inputs.get(f"suites.{rule.metric.rpartition('/')[0]}")
            if suite is None:  # the number of items is unknown, but for a harness
                documents = _documents(stage, rule.metric)
                if documents is not None:
                    yield _looked(rule, documents, possible, empty, looks.get(rule.name))
                continue
            data = datasets[str(suite.digest)]
            items = data.answered if compares(rule.metric) else data.items
            if data.items is None or items is None:
                continue
            note = _looked(rule, items, possible, empty, looks.get(rule.name))
            if not items:
                why = f"{rule.metric} requires answers, and {suite.name} has none; gate the suite's reward instead"
                note = replace(note, refusal=why)
            repeated = (data.rows or 0) - data.items
            if note.refusal and repeated > 0:
                note = replace(note, refusal=f"{note.refusal} ({repeated} of {data.rows} rows repeat another)")
            yield note


def _documents(stage: StageManifest, metric: str) -> int | None:
    """Return the number of documents of a harness's metric; None: the stage has no harness."""
    if HARNESS not in stage.inputs:
        return None
    facts = Harness.from_json(stage.inputs[HARNESS].meta, stage.name)
    counts = facts.documents(stage.params["tasks"], stage.params["limit"])
    return next((count for task, count in counts.items() if metric.startswith(f"{task}/")), None)


def _looked(rule: GateRule, items: int, possible: ItemRange, empty: bool, look: Look | None) -> PowerNote:
    """Return the power at the confidence of this look, with a warning if the look is not corrected."""
    if look is None:
        return _forecast(rule, items, possible, empty)
    judged = look.rule(rule)
    note = _forecast(judged, items, possible, empty)
    if look.spent:
        return replace(note, refusal=f"this would be {look.words}, and the policy allows {look.budget}; use new items")
    if judged.confidence != rule.confidence:
        return replace(
            note, assumption=f"{note.assumption}; {look.words}, judged at confidence {judged.confidence:.6g}"
        )
    if look.number == 1 or note.test == NOT_TESTED:
        return note
    needed = _forecast(replace(look, budget="corrected").rule(rule), items, possible, empty).needed
    said = (
        f"gate {rule.name}: this is {look.words}: if every look is judged at confidence {rule.confidence:g}, the "
        f"probability that at least one of {look.number} models at the threshold passes is up to "
        f"{look.inflated(rule.confidence):.0%}; use new items, or set `looks` in the channel's policy"
    )
    said += f" (then {needed} items give {ENOUGH:.0%})" if needed is not None else ""
    return replace(note, warning="; ".join(filter(None, (note.warning, said))))


def _forecast(rule: GateRule, items: int, possible: ItemRange, empty: bool) -> PowerNote:
    """Return the power; after an arithmetic error it is unknown, because the gate can judge without this forecast."""
    try:
        return gate_power(rule, items, possible, channel_empty=empty)
    except (ArithmeticError, ValueError) as error:
        return unknown_power(rule, items, f"{type(error).__name__}: {error}")


def other_stops(manifest: Manifest) -> Iterator[str]:
    """Yield one warning for each suite whose stop strings differ from those in the training of its model.

    A suite inherits no settings from the stage whose model it measures. Without the stop strings, the model generates
    until its end-of-sequence token, which the training never required.
    """
    for stage in manifest.stages:
        model, suites = stage.inputs.get("model"), stage.params.get("suites")
        if not stage.measures or stage.name.startswith(ADDED) or model is None or model.source != "stage":
            continue
        trained = _stops(manifest.stage(model.name).params)
        for name, suite in suites.items() if trained and isinstance(suites, Mapping) else ():
            own = _stops(suite if isinstance(suite, Mapping) else {})
            if own != trained:
                yield (
                    f"{stage.name}: responses to suite {name} end at {_said(own)}, but responses in the training of "
                    f"{model.name} end at {_said(trained)}; add stop: {trained} to the suite, unless this is intended"
                )


def without_decay(manifest: Manifest) -> Iterator[str]:
    """Yield a line for each stage whose length-adaptive λ, 1 − 1/(α·length), is at most ½ for its longest response."""
    for stage in manifest.stages:
        gae, longest = stage.params.get("gae"), stage.params.get("max_new_tokens", 0)
        alpha = gae.get("alpha") if stage.kind in OWN and isinstance(gae, Mapping) else None
        if alpha and longest and alpha * longest <= 2:
            yield (
                f"{stage.name}: gae.alpha {alpha:g} makes λ {max(0.0, 1 - 1 / (alpha * longest)):.2g} for responses of "
                f"max_new_tokens ({longest}) and lower for shorter ones, so advantages are nearly one-step temporal "
                f"differences; raise gae.alpha to about {20 / longest:.2g} (λ 0.95)"
            )


def _stops(params: Mapping[str, Any]) -> list[str]:
    stop = params.get("stop")
    return sorted(map(str, stop)) if isinstance(stop, list | tuple) else []


def _said(stop: list[str]) -> str:
    return " or ".join(map(repr, stop)) or "no strings"


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecast of a run before it starts."""

    datasets: Mapping[str, Dataset]  # digest → data set
    cached: Mapping[str, StageRecord | None]  # stage → the earlier stage of the reused result
    estimates: Mapping[str, Estimate]
    least: Mapping[str, int]  # stage that will certainly be computed → minimum number of tokens
    power: tuple[PowerNote, ...]
    concerns: tuple[Concern, ...]
    unanswered: tuple[str, ...] = ()  # lines about suites that have rows without answers
    selected: tuple[str, ...] = ()  # lines about probes that select a model by rows of a suite or of the training data
    stops: tuple[str, ...] = ()  # lines about suites whose stop strings differ from training
    decays: tuple[str, ...] = ()  # lines about stages whose responses are too short for their length-adaptive λ

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, one line each."""
        return (
            *self.unanswered,
            *self.selected,
            *self.stops,
            *self.decays,
            *(n.warning for n in self.power if n.warning),
            *(concern.warning for concern in self.concerns),
        )

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes to make before the run starts."""
        return (*(n.change for n in self.power if n.change), *(c.change for c in self.concerns if c.change))


def look_ahead(
    planned: Planned, spec: RunSpec | None, workspace: OpenWorkspace, source: Path, *, verified: bool = True
) -> Outlook:
    """Return the outlook of a run, from its data and gates, the cache and earlier runs.

    Args:
        spec: the parsed run file; None for a locked manifest, whose data is in the store.
        source: the run file.
        verified: whether a cached result counts only after all its bytes were hashed again.

    Raises:
        InputError: a data set is invalid; the message names the file, the field and the data set.
        NotFoundError: bytes of a data set are missing; the message names the file, the field and the data set.
        IntegrityError: bytes of a data set are corrupt; the message names the file, the field and the data set.
    """
    manifest = planned.manifest
    datasets = read_datasets(planned, spec, workspace, source)
    cache_states = _cache_states(manifest, workspace, verified)
    empty = manifest.release is not None and workspace.ledger.channel(manifest.release.channel) is None
    history = list(_history(workspace, manifest))
    lengths = Lengths(planned, spec, workspace, source)
    estimates = {
        s.name: _estimate(planned, s, cache_states[s.name], datasets, lengths, history, empty) for s in manifest.stages
    }
    least = {s.name: _least(planned, s, datasets) for s in manifest.stages if estimates[s.name].tokens != 0}
    sure = {name: tokens for name, tokens in least.items() if not cache_states[name].doubtful}
    kinds = {stage.name: stage.kind for stage in manifest.stages}
    budget, doubtful = manifest.budget, len(sure) < len(least)
    concerns = (
        token_concern(budget.tokens, estimates, least, kinds, doubtful=doubtful),
        time_concern(budget.wall_clock, estimates, kinds, doubtful=doubtful),
    )
    cached = {name: state.record for name, state in cache_states.items()}
    rows = {name: record for name, record in cached.items() if record}
    written = {digest: dataset.ids for digest, dataset in datasets.items()}
    looks = gate_looks(workspace.stores, manifest, planned.policy, rows, written=written)
    return Outlook(
        datasets,
        cached,
        estimates,
        least=sure,
        power=tuple(gates_power(planned, datasets, empty, looks)),
        concerns=tuple(concern for concern in concerns if concern is not None),
        unanswered=tuple(unanswered(planned, datasets)),
        selected=tuple(selected_on(manifest, {digest: dataset.read for digest, dataset in datasets.items()})),
        stops=tuple(other_stops(manifest)),
        decays=tuple(without_decay(manifest)),
    )


def refuse_hopeless(manifest: Manifest, outlook: Outlook, source: Path) -> None:
    """Reject a run that cannot succeed, whatever its model learns.

    Raises:
        InputError: the budget is below the run's minimum number of tokens, or even the best possible evidence would not
            pass a gate.
    """
    kinds = {stage.name: stage.kind for stage in manifest.stages}
    if short := certain_shortfall(manifest.budget.tokens, outlook.least, kinds):
        raise InputError(f"{source}: {short}")
    if refused := next((note for note in outlook.power if note.refusal is not None), None):
        raise InputError(f"{source}: gates.{refused.gate}: {refused.refusal}")


def _least(planned: Planned, stage: StageManifest, datasets: Mapping[str, Dataset]) -> int:
    contract = planned.contracts.get(stage.name)
    return int(workload(stage, contract.work, datasets).work.get("least", 0)) if contract else 0


# --- cached results ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CacheState:
    """The cache state of a stage before its run starts."""

    key: str | None = None  # equal for stages with equal results; None: the inputs are unknown yet
    record: StageRecord | None = None  # the earlier stage of the reused result
    free: str = ""  # the reason why the stage costs nothing although its result does not exist yet
    doubtful: bool = False  # whether reuse is uncertain because an input's bytes are not known yet


def _cache_states(manifest: Manifest, workspace: OpenWorkspace, verified: bool) -> dict[str, _CacheState]:
    """Return stage → cache state, as far as the stages' inputs are known now."""
    found: dict[str, _CacheState] = {}
    first: dict[str, str] = {}  # key → first stage with this key
    for stage in manifest.stages:
        if kind_of(stage.kind).driver is not Driver.JOB:
            found[stage.name] = _CacheState()
            continue
        above = [found[ref.name] for ref in stage.inputs.values() if ref.source == "stage"]
        doubtful = any(one.doubtful or one.free.endswith(_NOW) for one in above)
        inputs = _bound(stage, found, workspace)
        if inputs is None:
            found[stage.name] = _CacheState(doubtful=doubtful)
            continue
        key = cache_key(manifest, stage, inputs)
        twin = first.setdefault(key, stage.name)
        if twin != stage.name and found[twin].record is None:
            found[stage.name] = replace(found[twin], free=found[twin].free or f"the same as {twin}")
        else:
            found[stage.name] = _looked_up(key, doubtful, workspace, verified)
    return found


def _looked_up(key: str, doubtful: bool, workspace: OpenWorkspace, verified: bool) -> _CacheState:
    record, same = workspace.ledger.computed(key)
    if record and (not verified or usable(record, workspace.blobs)):
        return _CacheState(key, record)
    for other in workspace.ledger.stages_by_key(key) if record else same:
        if other.state in _COMING and workspace.ledger.run(other.run_id).state in _GOING_ON:
            return _CacheState(key, free=f"{other.run_id}/{other.name}{_NOW}")
    return _CacheState(key, doubtful=doubtful or record is not None)  # a damaged result is computed again


def _bound(
    stage: StageManifest, found: Mapping[str, _CacheState], workspace: OpenWorkspace
) -> dict[str, InputBlob] | None:
    """Return the inputs that the stage would get now; None: an input is not known yet.

    An output that does not exist yet is represented by a placeholder, derived from the cache key of its stage and used
    only for comparison.
    """
    inputs: dict[str, InputBlob] = {}
    for slot, ref in stage.inputs.items():
        upstream = found.get(ref.name, _CacheState()) if ref.source == "stage" else _CacheState()
        made = upstream.record.outputs if upstream.record else {}
        live = workspace.ledger.channel(ref.name) if ref.source == "channel" else None
        if ref.digest is not None:
            inputs[slot] = InputBlob(ref.digest, ref.form, ref.name, ref.meta)
        elif ref.output in made:
            output = made[str(ref.output)]
            inputs[slot] = InputBlob(output["digest"], output["form"], ref.name)
        elif upstream.key:
            inputs[slot] = InputBlob(f"{upstream.key}/{ref.output}", ref.form, ref.name)
        elif live:
            inputs[slot] = InputBlob(live.model_digest, "tree", ref.name)
        else:
            return None
    return inputs


# --- cost -------------------------------------------------------------------------------------------------------------


def _estimate(
    planned: Planned,
    stage: StageManifest,
    state: _CacheState,
    datasets: Mapping[str, Dataset],
    lengths: Lengths,
    history: list[tuple[str | None, Experience]],
    channel_empty: bool,
) -> Estimate:
    if kind_of(stage.kind).driver is Driver.WAIT:
        return Estimate(0, 0.0, wait_of(planned.manifest, stage.name).words)
    if kind_of(stage.kind).driver is Driver.CONTROL:
        return Estimate(0, 0.0, "no process")
    if state.record or state.free:
        return Estimate(0, 0.0, state.free or "cached")
    if any(ref.source == "channel" for ref in stage.inputs.values()) and channel_empty:
        return Estimate(0, 0.0, "skipped: the channel is empty, so there is no baseline")
    work = workload(stage, planned.contracts[stage.name].work, datasets, lengths)
    base = _base_model(planned.manifest)
    fitting = [(model, experience) for model, experience in history if comparable(work, experience.workload)]
    same = [experience for model, experience in fitting if model == base]
    return estimate(work, (same or [experience for _, experience in fitting])[:_STAGES_LOOKED_AT])


def workload(
    stage: StageManifest, work: Mapping[str, float], datasets: Mapping[str, Dataset], lengths: Lengths | None = None
) -> Workload:
    """Return the work of a stage with the lengths of its documents; without `lengths`, only the amount of work."""
    own = {slot: datasets[str(ref.digest)] for slot, ref in dataset_slots(stage)}
    counts = {slot: d.items if stage.measures else d.rows for slot, d in own.items()}
    if stage.measures and None not in counts.values():
        documents = sum((rows or 0) * _answers(stage, slot) for slot, rows in counts.items())
        work = {"documents": documents, "least": documents, **work}
    if lengths is None:
        return Workload(stage.kind, work)
    read = {slot: dataset.read for slot, dataset in own.items() if dataset.read}
    found = {slot: seen for slot, rows in read.items() if (seen := lengths.of_rows(stage, slot, rows)) is not None}
    weight = sum(len(read[slot]) for slot in found)
    length = sum(mean * len(read[slot]) for slot, (mean, _) in found.items()) / weight if weight else None
    longest = max((most for _, most in found.values()), default=None)
    return Workload(stage.kind, work, length, lengths.counted(stage), longest)


def _answers(stage: StageManifest, slot: str) -> int:
    """Return the number of responses that an evaluation generates for each item of a suite."""
    suites = stage.params.get("suites")
    suite = suites.get(slot.removeprefix("suites.")) if isinstance(suites, Mapping) else None
    return 1 + int(suite.get("samples", 0)) if isinstance(suite, Mapping) else 1


def _history(workspace: OpenWorkspace, manifest: Manifest) -> Iterator[tuple[str | None, Experience]]:
    """Yield (base model of the run, experience) for earlier stages that computed their results, newest first."""
    wanted = {s.kind for s in manifest.stages if kind_of(s.kind).driver is Driver.JOB}
    for run in workspace.ledger.runs(limit=_RUNS_LOOKED_AT):
        earlier, _ = workspace.manifest_or_trouble(run)
        if earlier is None:
            continue
        for row in workspace.ledger.stages(run.id):
            cost = _cost(workspace, row) if row.kind in wanted else None
            if cost is None:
                continue
            stage = earlier.stage(row.name)
            try:
                work = workspace.jobs.trainers[stage.trainer].check(stage.kind, stage.params).work
            except (InputError, KeyError):  # the stage has the parameters of another version
                continue
            refs = [ref for _, ref in dataset_slots(stage)]
            datasets = {str(ref.digest): Dataset(registered_rows(workspace, ref), None) for ref in refs}
            yield _base_model(earlier), Experience(workload(stage, work, datasets), *cost)


def _cost(workspace: OpenWorkspace, row: StageRecord) -> tuple[int, float | None] | None:
    """Return the tokens and job seconds of a stage that computed its result; None for any other stage."""
    attempts = workspace.ledger.attempts(row.run_id, row.name)
    if row.state != StageState.SUCCEEDED or row.cached_from or not attempts:
        return None
    last, inherited = attempts[-1], 0
    if last.resume is not None:
        try:
            inherited = tokens_inherited(workspace.blobs, last)
        except (InputError, IntegrityError):  # the checkpoint was deleted or is damaged
            return None
    seconds = sum(attempt.seconds for attempt in attempts) if attempts[0].resume is None else None
    return inherited + last.tokens, seconds


def _base_model(manifest: Manifest) -> str | None:
    return next((ref.digest for _, slot, ref in manifest.assets() if slot == "model"), None)
