"""What a run has before it: what is cached, what it will cost, whether its gates can tell, whether its budget reaches.

What can never succeed is refused; what will probably not is a warning that says what to change first. Nothing here
writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.app.fitting import located, read_dataset
from posttrain.app.workspace import Workspace
from posttrain.control.cache import cache_key, usable
from posttrain.control.planning import CONTROL, Planned
from posttrain.data.rows import Row, prompt_text
from posttrain.decision.power import PowerNote, gate_power
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import InputBlob
from posttrain.domain.lifecycle import StageState
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.records import StageRecord
from posttrain.domain.runspec import RunSpec
from posttrain.planner.estimate import Estimate, Experience, Workload, estimate
from posttrain.planner.prospects import Concern, certain_shortfall, time_concern, token_concern

READ_AT_MOST = 200_000  # rows of one data set that a plan reads to compare prompts
_RUNS_LOOKED_AT = 20
# stage kind → columns that a document has beside its prompt, and which share of the documents has them
_LEARNT = {"sft": {"completion": 1.0}, "reward_model": {"chosen": 0.5, "rejected": 0.5}}


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a plan knows of one data set."""

    rows: int | None
    read: tuple[Row, ...] | None  # None: too many, or its bytes are elsewhere

    @property
    def items(self) -> int | None:
        """Of a suite: rows that repeat another count once. Rows that were not read are taken to be distinct."""
        return self.rows if self.read is None else len({prompt_text(row) for row in self.read})


@dataclass(frozen=True, slots=True)
class Outlook:
    """What can be said of a run before it starts."""

    datasets: Mapping[str, Dataset]  # by digest
    cached: Mapping[str, StageRecord | None]  # stage → the earlier stage whose result will be reused
    estimates: Mapping[str, Estimate]
    least: Mapping[str, int]  # stage that will compute → tokens it spends at the least
    power: tuple[PowerNote, ...]
    concerns: tuple[Concern, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line each."""
        return (*(n.warning for n in self.power if n.warning), *(concern.warning for concern in self.concerns))

    @property
    def changes(self) -> tuple[str, ...]:
        """What to change before the run is started."""
        return (*(n.change for n in self.power if n.change), *(concern.change for concern in self.concerns))


def look_ahead(
    planned: Planned, spec: RunSpec, workspace: Workspace, source: Path, *, verified: bool = True
) -> Outlook:
    """Look at data, cache, earlier runs and gates.

    Args:
        source: the run file.
        verified: whether to count on a cached result only after every byte of it was hashed again.

    Raises:
        InputError, NotFoundError, IntegrityError: a data set cannot be read; names file, field and data set.
    """
    manifest = planned.manifest
    datasets = _datasets(planned, spec, workspace, source)
    cached, coming = _cached(manifest, workspace, verified)
    empty = manifest.release is not None and workspace.ledger.channel(manifest.release.channel) is None
    history = list(_history(workspace, manifest))
    estimates = {s.name: _estimate(planned, s, cached[s.name], datasets, history, empty) for s in manifest.stages}
    least = {
        s.name: _least(planned, s, datasets)
        for s in manifest.stages
        if estimates[s.name].tokens != 0 and s.name not in coming
    }
    budget = manifest.budget
    concerns = (
        token_concern(budget.tokens, estimates, least),
        time_concern(budget.wall_clock, [one.seconds for one in estimates.values()]),
    )
    power = tuple(_power(planned, datasets, empty))
    return Outlook(datasets, cached, estimates, least, power, tuple(c for c in concerns if c is not None))


def refuse_hopeless(manifest: Manifest, outlook: Outlook, source: Path) -> None:
    """Refuse a run that cannot end well, whatever it learns.

    Raises:
        InputError: its budget is less than it spends at the least, or not even the best evidence that its suites could
            give would pass a gate.
    """
    short = certain_shortfall(manifest.budget.tokens, outlook.least)
    if short is not None:
        raise InputError(f"{source}: {short}")
    for note in outlook.power:
        if note.refusal is not None:
            raise InputError(f"{source}: gates.{note.gate}: {note.refusal}")


def _least(planned: Planned, stage: StageManifest, datasets: Mapping[str, Dataset]) -> int:
    contract = planned.contracts.get(stage.name)
    return int(workload(stage, contract.work, datasets).work.get("least", 0)) if contract else 0


# --- what is cached ---------------------------------------------------------------------------------------------------


def _cached(
    manifest: Manifest, workspace: Workspace, verified: bool
) -> tuple[dict[str, StageRecord | None], frozenset[str]]:
    """Stage → the earlier stage whose result will be reused, as far as inputs are known now; and those stages that
    another run computes at this moment.
    """
    found: dict[str, StageRecord | None] = {}
    coming: set[str] = set()
    for stage in manifest.stages:
        inputs = None if stage.trainer == CONTROL else _bound(stage, found, workspace)
        key = cache_key(manifest, stage, inputs) if inputs is not None else None
        record = workspace.ledger.cached_stage(key) if key else None
        found[stage.name] = record if record and (not verified or usable(record, workspace.blobs)) else None
        if key and any(other.state == StageState.RUNNING for other in workspace.ledger.stages_by_key(key)):
            coming.add(stage.name)
    return found, frozenset(coming)


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


# --- cost -------------------------------------------------------------------------------------------------------------


def _estimate(
    planned: Planned,
    stage: StageManifest,
    cached: StageRecord | None,
    datasets: Mapping[str, Dataset],
    history: list[tuple[str | None, Experience]],
    channel_empty: bool,
) -> Estimate:
    if stage.trainer == CONTROL:
        return Estimate(0, 0.0, "no process")
    if cached:
        return Estimate(0, 0.0, "cached")
    if any(ref.source == "channel" for ref in stage.inputs.values()) and channel_empty:
        return Estimate(0, 0.0, "skipped: the channel is empty, so there is no baseline")
    work = workload(stage, planned.contracts[stage.name].work, datasets)
    base = _base_model(planned.manifest)
    same = [experience for model, experience in history if model == base and experience.workload.kind == stage.kind]
    return estimate(work, same[:5] or [experience for _, experience in history][:5])


def workload(stage: StageManifest, work: Mapping[str, float], datasets: Mapping[str, Dataset]) -> Workload:
    """What a stage has to do, with the sizes of its rows."""
    own = {slot: datasets[str(ref.digest)] for slot, ref in dataset_slots(stage)}
    counts = {slot: d.items if stage.kind == "evaluate" else d.rows for slot, d in own.items()}
    if stage.kind == "evaluate" and None not in counts.values():
        asked = stage.params["suites"]
        answers = {slot: 1 + asked[slot.removeprefix("suites.")]["samples"] for slot in counts}
        documents = sum((rows or 0) * answers[slot] for slot, rows in counts.items())
        work = {**work, "documents": documents, "least": documents}
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
            refs = [ref for _, ref in dataset_slots(stage)]
            datasets = {str(ref.digest): Dataset(_registered_rows(workspace, ref), None) for ref in refs}
            seconds = float(row.finished_at or 0.0) - float(row.started_at or 0.0)
            yield _base_model(earlier), Experience(workload(stage, work, datasets), row.tokens, seconds)


def _base_model(manifest: Manifest) -> str | None:
    return next((ref.digest for _, slot, ref in manifest.assets() if slot == "model"), None)


# --- data sets --------------------------------------------------------------------------------------------------------


def dataset_slots(stage: StageManifest) -> list[tuple[str, InputRef]]:
    """The data a stage works through: not its reward, its model or its probe."""
    return [(slot, ref) for slot, ref in stage.inputs.items() if slot == "data" or slot.startswith("suites.")]


def _registered_rows(workspace: Workspace, ref: InputRef) -> int | None:
    metas = [asset.meta for asset in workspace.ledger.assets_by_digest(str(ref.digest)) if "rows" in asset.meta]
    return int(metas[0]["rows"]) if metas else None


def _datasets(planned: Planned, spec: RunSpec, workspace: Workspace, source: Path) -> dict[str, Dataset]:
    """Digest → data set, for everything that stages work through."""
    found: dict[str, Dataset] = {}
    for stage in planned.manifest.stages:
        for slot, ref in dataset_slots(stage):
            if str(ref.digest) not in found:
                word = planned.contracts[stage.name].inputs[slot][1]
                with located(f"{source}: stages.{stage.name}.{slot}"):
                    found[str(ref.digest)] = _dataset(workspace, ref, spec.data[word], source.parent)
    return found


def _dataset(workspace: Workspace, ref: InputRef, word: str, base: Path) -> Dataset:
    rows = _registered_rows(workspace, ref)
    if rows is not None and rows > READ_AT_MOST:
        return Dataset(rows, None)
    read = read_dataset(workspace, ref, word, base)
    return Dataset(len(read), tuple(read))


# --- power ------------------------------------------------------------------------------------------------------------


def _power(planned: Planned, datasets: Mapping[str, Dataset], empty: bool) -> Iterator[PowerNote]:
    manifest = planned.manifest
    for rule in manifest.gates:
        for stage in manifest.stages:
            contract = planned.contracts.get(stage.name)
            possible = contract.metrics.get(rule.metric) if contract else None
            if possible is None or stage.inputs["model"].source == "channel":
                continue
            suite = stage.inputs[f"suites.{rule.metric.rpartition('/')[0]}"]
            data = datasets[str(suite.digest)]
            if data.items is None:
                continue
            note = gate_power(rule, data.items, possible, channel_empty=empty)
            repeated = (data.rows or 0) - data.items
            if note.refusal and repeated > 0:
                note = replace(note, refusal=f"{note.refusal} ({repeated} of {data.rows} rows repeat another)")
            yield note
