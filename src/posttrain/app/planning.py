"""What `posttrain plan` shows: the manifest, what is cached, what it will cost, whether its gates can tell.

Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.app.fitting import located, read_dataset
from posttrain.app.locks import refuse_lock
from posttrain.app.machine import this_machine
from posttrain.app.placing import fallback_warnings, memory_warnings, role_shapes, stage_residency
from posttrain.app.runs import plan_spec
from posttrain.app.workspace import Workspace
from posttrain.control.cache import cache_key, usable
from posttrain.control.planning import CONTROL, Planned
from posttrain.data.contamination import contamination
from posttrain.data.rows import Row, prompt_text, repeated_rows
from posttrain.decision.power import PowerNote, gate_power
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import InputBlob
from posttrain.domain.lifecycle import StageState
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.domain.runspec import RunSpec, load_run_spec
from posttrain.planner.estimate import Estimate, Experience, Workload, estimate
from posttrain.planner.residency import Load, Residency

_READ_AT_MOST = 200_000  # rows of one data set that a plan reads to compare prompts
_RUNS_LOOKED_AT = 20
_INPUT = ("slot", "name", "digest")
# stage kind → columns that a document has beside its prompt, and which share of the documents has them
_LEARNT = {"sft": {"completion": 1.0}, "reward_model": {"chosen": 0.5, "rejected": 0.5}}


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage before it runs."""

    name: str
    kind: str
    inputs: tuple[tuple[str, str, str | None], ...]  # slot, name, digest (None: known when the stage starts)
    cached_from: str | None  # "<run>/<stage>" whose result will be reused
    estimate: Estimate
    load: Load | None = None  # of a training stage: its placement
    residency: Residency | None = None  # what is resident when; None: trains nothing, or a model of unknown shape


@dataclass(frozen=True, slots=True)
class PlanView:
    """Everything `posttrain plan` prints."""

    manifest: Manifest
    stages: tuple[StagePlan, ...]
    power: tuple[PowerNote, ...]
    warnings: tuple[str, ...]
    existing: RunRecord | None  # a run of this very manifest: submitting attaches to it

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "name": self.manifest.name,
            "digest": self.manifest.digest,
            "existing": self.existing.id if self.existing else None,
            "stages": [_stage_json(stage) for stage in self.stages],
            "power": [asdict(note) for note in self.power],
            "warnings": list(self.warnings),
            "manifest": self.manifest.to_json(),
        }


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    plain = {
        "name": stage.name,
        "kind": stage.kind,
        "inputs": [dict(zip(_INPUT, row, strict=True)) for row in stage.inputs],
        "cached_from": stage.cached_from,
        "estimate": asdict(stage.estimate),
    }
    if stage.load is None:
        return plain
    pools = stage.load.placement.pools(stage.load.roles)
    placed = [{"pool": name, "ranks": p.ranks, "roles": list(p.roles)} for name, p in pools.items()]
    return {**plain, "pools": placed, "residency": asdict(stage.residency) if stage.residency else None}


@dataclass(frozen=True, slots=True)
class _Dataset:
    """What a plan knows of one data set."""

    rows: int | None
    read: tuple[Row, ...] | None  # None: too many, or its bytes are elsewhere

    @property
    def items(self) -> int | None:
        """Of a suite: rows that repeat another count once. Rows that were not read are taken to be distinct."""
        return self.rows if self.read is None else len({prompt_text(row) for row in self.read})


def view_plan(path: Path, workspace: Workspace, *, seed: int | None = None) -> PlanView:
    """Validate a run file and look ahead.

    Raises:
        InputError: naming file, field, constraint and value.
    """
    refuse_lock(path)
    spec = load_run_spec(path)
    planned = plan_spec(spec, workspace, path, seed=seed)
    datasets = _datasets(planned, spec, workspace, path)
    existing = workspace.ledger.runs(manifest_digest=planned.manifest.digest)
    history = list(_history(workspace, planned.manifest))
    cached = _cached(planned.manifest, workspace)
    release = planned.manifest.release
    empty = release is not None and workspace.ledger.channel(release.channel) is None
    residencies = dict(_residencies(planned, spec, workspace, path, datasets))
    stages = tuple(
        StagePlan(
            stage.name,
            stage.kind,
            tuple((slot, _shown(ref), ref.digest) for slot, ref in stage.inputs.items()),
            _origin(cached[stage.name]),
            _estimate(planned, stage, cached[stage.name], datasets, history, empty),
            planned.contracts[stage.name].load if stage.name in planned.contracts else None,
            residencies.get(stage.name, (None, []))[0],
        )
        for stage in planned.manifest.stages
    )
    power = tuple(_power(planned, datasets, empty))
    warnings = [note.warning for note in power if note.warning]
    warnings += [*planned.warnings, *_repeated(planned, datasets), *_seen_in_training(planned, datasets)]
    warnings += [f"{name}: {warning}" for name, (_, found) in residencies.items() for warning in found]
    warnings += _slower(planned, spec, workspace, path)
    return PlanView(planned.manifest, stages, power, tuple(warnings), existing[0] if existing else None)


# --- what is cached ---------------------------------------------------------------------------------------------------


def _cached(manifest: Manifest, workspace: Workspace) -> dict[str, StageRecord | None]:
    """Stage → the earlier stage whose result will be reused, as far as inputs are known now."""
    found: dict[str, StageRecord | None] = {}
    for stage in manifest.stages:
        inputs = None if stage.trainer == CONTROL else _bound(stage, found, workspace)
        key = cache_key(manifest, stage, inputs) if inputs is not None else None
        record = workspace.ledger.cached_stage(key) if key else None
        found[stage.name] = record if record and usable(record, workspace.blobs) else None
    return found


def _bound(
    stage: StageManifest, cached: Mapping[str, StageRecord | None], workspace: Workspace
) -> dict[str, InputBlob] | None:
    """The inputs as the stage would get them now; None when one of them is not known yet."""
    inputs: dict[str, InputBlob] = {}
    for slot, ref in stage.inputs.items():
        upstream = cached.get(ref.name) if ref.source == "stage" else None
        live = workspace.ledger.channel(ref.name) if ref.source == "channel" else None
        if ref.digest is not None:
            inputs[slot] = InputBlob(ref.digest, ref.form, ref.name, ref.meta)
        elif upstream and ref.output and ref.output in upstream.outputs:
            output = upstream.outputs[ref.output]
            inputs[slot] = InputBlob(output["digest"], output["form"], ref.name)
        elif live:
            inputs[slot] = InputBlob(live.model_digest, "tree", ref.name)
        else:
            return None
    return inputs


def _origin(record: StageRecord | None) -> str | None:
    return (record.cached_from or f"{record.run_id}/{record.name}") if record else None


def _shown(ref: InputRef) -> str:
    return {"stage": f"stage {ref.name}", "channel": f"channel {ref.name}"}.get(ref.source, ref.name)


# --- cost -------------------------------------------------------------------------------------------------------------


def _estimate(
    planned: Planned,
    stage: StageManifest,
    cached: StageRecord | None,
    datasets: Mapping[str, _Dataset],
    history: list[tuple[str | None, Experience]],
    channel_empty: bool,
) -> Estimate:
    if stage.trainer == CONTROL:
        return Estimate(0, 0.0, "no process")
    if cached:
        return Estimate(0, 0.0, "cached")
    if any(ref.source == "channel" for ref in stage.inputs.values()) and channel_empty:
        return Estimate(0, 0.0, "skipped: the channel is empty, so there is no baseline")
    workload = _workload(stage, planned.contracts[stage.name].work, datasets)
    base = _base_model(planned.manifest)
    same = [experience for model, experience in history if model == base and experience.workload.kind == stage.kind]
    return estimate(workload, same[:5] or [experience for _, experience in history][:5])


def _workload(stage: StageManifest, work: Mapping[str, float], datasets: Mapping[str, _Dataset]) -> Workload:
    own = {slot: datasets[str(ref.digest)] for slot, ref in _dataset_slots(stage)}
    counts = {slot: d.items if stage.kind == "evaluate" else d.rows for slot, d in own.items()}
    if stage.kind == "evaluate" and None not in counts.values():
        asked = stage.params["suites"]
        answers = {slot: 1 + asked[slot.removeprefix("suites.")]["samples"] for slot in counts}
        work = {**work, "documents": sum((rows or 0) * answers[slot] for slot, rows in counts.items())}
    read = [row for dataset in own.values() if dataset.read for row in dataset.read]
    parts = _LEARNT.get(stage.kind, {})
    sizes = [len(prompt_text(row)) + sum(_size(row, name) * share for name, share in parts.items()) for row in read]
    return Workload(stage.kind, work, sum(sizes) / len(sizes) if sizes else None)


def _size(row: Row, column: str) -> int:
    text = row.get(column) or ""
    return len(text) if isinstance(text, str) else sum(len(str(m.get("content"))) for m in text)


def _history(workspace: Workspace, manifest: Manifest) -> Iterator[tuple[str | None, Experience]]:
    """Earlier stages that really ran, newest first, each with the base model of its run."""
    wanted = {stage.kind for stage in manifest.stages if stage.trainer != CONTROL}
    for run in workspace.ledger.runs(limit=_RUNS_LOOKED_AT):
        earlier, _ = workspace.manifest_or_trouble(run)
        if earlier is None:
            continue
        for row in workspace.ledger.stages(run.id):
            ran = row.state == StageState.SUCCEEDED and not row.cached_from and row.started_at and row.finished_at
            if row.kind not in wanted or not ran:
                continue
            stage = earlier.stage(row.name)
            try:
                work = workspace.wiring.trainers[stage.trainer].check(stage.kind, stage.params).work
            except (InputError, KeyError):  # written by a version with other parameters
                continue
            refs = [ref for _, ref in _dataset_slots(stage)]
            datasets = {str(ref.digest): _Dataset(_registered_rows(workspace, ref), None) for ref in refs}
            seconds = float(row.finished_at or 0.0) - float(row.started_at or 0.0)
            yield _base_model(earlier), Experience(_workload(stage, work, datasets), row.tokens, seconds)


def _residencies(
    planned: Planned, spec: RunSpec, workspace: Workspace, path: Path, datasets: Mapping[str, _Dataset]
) -> Iterator[tuple[str, tuple[Residency | None, list[str]]]]:
    """Training stage → what is resident when, and warnings of estimates that go beyond the memory there is."""
    loads = {name: contract.load for name, contract in planned.contracts.items() if contract.load}
    machine = this_machine() if loads else None
    for name, load in loads.items():
        stage = planned.manifest.stage(name)
        shapes = role_shapes(planned.manifest, stage, load, workspace, path, spec.model)
        if shapes and machine:
            prompt = _workload(stage, planned.contracts[name].work, datasets).characters
            residency = stage_residency(load, shapes, machine, prompt)
            yield name, (residency, memory_warnings(load, residency, machine))


def _slower(planned: Planned, spec: RunSpec, workspace: Workspace, path: Path) -> Iterator[str]:
    """One warning for every fall-back of a stage's model."""
    for stage in planned.manifest.stages:
        contract = planned.contracts.get(stage.name)
        if contract is not None:
            roles = contract.load.roles if contract.load else ("rollout",)
            for warning in fallback_warnings(planned.manifest, stage, roles, workspace, path, spec.model):
                yield f"{stage.name}: {warning}"


def _base_model(manifest: Manifest) -> str | None:
    return next((ref.digest for _, slot, ref in manifest.assets() if slot == "model"), None)


# --- data sets --------------------------------------------------------------------------------------------------------


def _dataset_slots(stage: StageManifest) -> list[tuple[str, InputRef]]:
    """The data a stage works through: not its reward, its model or its probe."""
    return [(slot, ref) for slot, ref in stage.inputs.items() if slot == "data" or slot.startswith("suites.")]


def _registered_rows(workspace: Workspace, ref: InputRef) -> int | None:
    metas = [asset.meta for asset in workspace.ledger.assets_by_digest(str(ref.digest)) if "rows" in asset.meta]
    return int(metas[0]["rows"]) if metas else None


def _datasets(planned: Planned, spec: RunSpec, workspace: Workspace, source: Path) -> dict[str, _Dataset]:
    """Digest → data set, for everything that stages work through."""
    found: dict[str, _Dataset] = {}
    for stage in planned.manifest.stages:
        for slot, ref in _dataset_slots(stage):
            if str(ref.digest) not in found:
                word = planned.contracts[stage.name].inputs[slot][1]
                with located(f"{source}: stages.{stage.name}.{slot}"):
                    found[str(ref.digest)] = _dataset(workspace, ref, spec.data[word], source.parent)
    return found


def _dataset(workspace: Workspace, ref: InputRef, word: str, base: Path) -> _Dataset:
    rows = _registered_rows(workspace, ref)
    if rows is not None and rows > _READ_AT_MOST:
        return _Dataset(rows, None)
    read = read_dataset(workspace, ref, word, base)
    return _Dataset(len(read), tuple(read))


def _repeated(planned: Planned, datasets: Mapping[str, _Dataset]) -> Iterator[str]:
    """One line per evaluation suite with rows that repeat another."""
    suites = [ref for stage in planned.manifest.stages if stage.kind == "evaluate" for _, ref in _dataset_slots(stage)]
    for ref in {ref.digest: ref for ref in suites}.values():
        found = datasets[str(ref.digest)]
        if found.rows and found.items is not None and found.items < found.rows:
            yield repeated_rows(ref.name, found.rows, found.items)


def _seen_in_training(planned: Planned, datasets: Mapping[str, _Dataset]) -> Iterator[str]:
    """One warning per evaluation suite whose prompts stand in a training set."""
    train: dict[str, InputRef] = {}
    suites: dict[str, InputRef] = {}
    for stage in planned.manifest.stages:
        for _, ref in _dataset_slots(stage):
            (suites if stage.kind == "evaluate" else train)[str(ref.digest)] = ref
    for digest, suite in suites.items():
        for other, source in train.items():
            known, asked = datasets[other].read, datasets[digest].read
            if known is None or asked is None:
                yield f"{suite.name} was not compared with {source.name}: more than {_READ_AT_MOST} rows"
                continue
            report = contamination(known, asked)
            if report.exact:
                yield f"{suite.name} against {source.name}: {report}; its scores say little about unseen prompts"


# --- power ------------------------------------------------------------------------------------------------------------


def _power(planned: Planned, datasets: Mapping[str, _Dataset], empty: bool) -> Iterator[PowerNote]:
    manifest = planned.manifest
    for rule in manifest.gates:
        for stage in manifest.stages:
            contract = planned.contracts.get(stage.name)
            possible = contract.metrics.get(rule.metric) if contract else None
            if possible is None or stage.inputs["model"].source == "channel":
                continue
            suite = stage.inputs[f"suites.{rule.metric.rpartition('/')[0]}"]
            items = datasets[str(suite.digest)].items
            if items is not None:
                yield gate_power(rule, items, possible, channel_empty=empty)
