"""The stages that a release adds to a run, and the model selection by a probe.

A release adds three kinds of stages: evaluations of the models with which gates compare, the gate, and the release.

A gate compares item by item, so the evaluators of the released model also measure its baselines. These stages are named
`baseline-EVALUATE` (for the channel's model) or `baseline-MODEL.EVALUATE` (for other models; `/` becomes a dot).
No stage of a run file has a dot in its name. An equal evaluate stage of the run replaces such a stage.

With `keep_best` and `early_stopping` a probe decides which model a stage outputs; that model is measured and released.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from posttrain.data.rows import Row, contamination
from posttrain.domain.errors import InputError, nearest
from posttrain.domain.gates import CHANNEL, GateRule
from posttrain.domain.kinds import (
    BEST,
    CONTROL,
    GATE,
    MODEL,
    RELEASE,
    REPORT,
    UNCHANGED,
    ItemRange,
    StageContract,
    StageKind,
    kind_of,
)
from posttrain.domain.manifest import InputRef, Manifest, StageManifest, deciding
from posttrain.domain.runspec import ReleaseSpec, RunSpec

ADDED = "baseline-"  # prefix of evaluations that are not in the run file
EVIDENCE, BASELINE, RIVAL = "evidence.", "baseline.", "against."  # prefixes of the gate's inputs


class Models(Protocol):
    """Resolves names of models."""

    def model(self, field: str, word: str) -> InputRef:
        """Resolve `base`, or a stage that makes a model; reject any other name for `field`."""


class Decision:
    """The stages for a run file's gates and release.

    Args:
        models: resolves the names of models in the file.
        source: the file's name, for errors.
        stages: the resolved stages of the file.
        contracts: the contracts of these stages, from their trainers.
    """

    def __init__(
        self,
        models: Models,
        spec: RunSpec,
        source: str,
        stages: Mapping[str, StageManifest],
        contracts: Mapping[str, StageContract],
    ) -> None:
        self._models, self._spec, self._source = models, spec, source
        self._stages, self._known = stages, contracts
        self.contracts: dict[str, StageContract] = {}  # contracts of the added evaluations

    def stages(self, check: Callable[[list[StageManifest]], None]) -> list[StageManifest]:
        """Return the stages that the release adds; empty without a release.

        Args:
            check: called with the stages that measure the released model; raises InputError.

        Raises:
            InputError: a gate or the release names an unknown model, or a metric cannot be judged.
        """
        release = self._spec.release
        if release is None:
            return []
        candidate = self._candidate(release)
        evaluators = [s for s in self._stages.values() if s.measures and s.inputs[MODEL] == candidate]
        try:
            check(evaluators)
        except InputError as error:
            raise InputError(f"{self._source}: {error}") from error
        made = _judged_metrics(self._spec, self._source, evaluators, self._known)
        live = InputRef(source="channel", name=release.channel)
        inputs = {"candidate": candidate, CHANNEL: live} | {EVIDENCE + s.name: _metrics_of(s) for s in evaluators}
        added: list[StageManifest] = []
        if any(rule.meets_channel for rule in self._spec.gates):
            for stage in evaluators:
                added.append(self._baseline(stage, live, ADDED + stage.name))
                inputs[BASELINE + stage.name] = _metrics_of(added[-1])
        for rival, rules in _by_rival(self._spec.gates).items():
            model = self._rival(rules[0], candidate)
            inputs[RIVAL + rival] = model
            for name in dict.fromkeys(made[rule.metric] for rule in rules):
                stage = self._measured(self._stages[name], model, rival)
                inputs[f"{RIVAL}{rival}.{name}"] = _metrics_of(stage)
                added += [stage] if stage.name not in self._stages else []
        report = InputRef(source="stage", name=GATE.name, output=REPORT, form="file")
        added.append(_control_stage(GATE, inputs))
        added.append(
            _control_stage(RELEASE, {"candidate": candidate, REPORT: report}, tuple(sorted(set(release.after))))
        )
        return added

    def _candidate(self, release: ReleaseSpec) -> InputRef:
        producers = {name for name, stage in self._stages.items() if MODEL in stage.outputs}
        if release.model.partition("/")[0] not in producers:
            known = nearest(release.model, producers)
            raise InputError(f"{self._source}: release.model: no stage {release.model!r} makes a model{known}")
        return self._models.model("release.model", release.model)

    def _rival(self, rule: GateRule, candidate: InputRef) -> InputRef:
        """Return the model with which a rule compares the candidate."""
        rival = str(rule.rival)
        field = f"gates.{rule.name}.{'better_than' if rule.strict else 'not_worse_than'}"
        model = self._models.model(field, rival)
        if model == candidate:
            raise InputError(
                f"{self._source}: {field}: must be a model other than the released one, got {rival!r}; "
                "name another stage, base or channel"
            )
        if model.source == "stage" and kind_of(self._stages[model.name].kind).scores:
            raise InputError(
                f"{self._source}: {field}: must be a model that generates, got {rival!r}, which is a reward model; "
                "name another stage, base or channel"
            )
        return model

    def _measured(self, evaluator: StageManifest, model: InputRef, rival: str) -> StageManifest:
        """Return the same evaluation of another model: an existing stage of the run, else a new stage."""
        wanted = (evaluator.kind, evaluator.trainer, deciding(evaluator.params), {**evaluator.inputs, "model": model})
        for stage in self._stages.values():
            if (stage.kind, stage.trainer, deciding(stage.params), stage.inputs) == wanted:
                return stage
        return self._baseline(evaluator, model, f"{ADDED}{rival.replace('/', '.')}.{evaluator.name}", rival)

    def _baseline(self, evaluator: StageManifest, model: InputRef, name: str, word: str | None = None) -> StageManifest:
        contract = self._known[evaluator.name]
        if word is not None:
            contract = replace(contract, inputs={**contract.inputs, "model": ("model", word)})
        self.contracts[name] = contract
        return evaluator.model_copy(update={"name": name, "inputs": {**evaluator.inputs, "model": model}})


def _by_rival(rules: tuple[GateRule, ...]) -> dict[str, list[GateRule]]:
    """Return the rules that compare with models of this run, by model."""
    found: dict[str, list[GateRule]] = {}
    for rule in rules:
        if rule.rival is not None and not rule.meets_channel:
            found.setdefault(rule.rival, []).append(rule)
    return found


def _metrics_of(stage: StageManifest) -> InputRef:
    return InputRef(source="stage", name=stage.name, output="metrics", form="file")


def _control_stage(kind: StageKind, inputs: dict[str, InputRef], after: tuple[str, ...] = ()) -> StageManifest:
    return StageManifest(
        name=kind.name,
        kind=kind.name,
        trainer=CONTROL,
        inputs=inputs,
        params={},
        outputs=dict(kind.outputs),
        after=after,
    )


def _judged_metrics(
    spec: RunSpec, source: str, evaluators: list[StageManifest], contracts: Mapping[str, StageContract]
) -> dict[str, str]:
    """Return the stage that measures each metric of the released model; check that every gate can be judged."""
    made: dict[str, str] = {}
    ranges: dict[str, ItemRange | None] = {}
    for stage in evaluators:
        ranges |= contracts[stage.name].metrics
        for metric in contracts[stage.name].metrics:
            if metric in made:
                raise InputError(
                    f"{source}: stages.{stage.name}: {metric!r} is already measured by {made[metric]!r}; rename a suite"
                )
            made[metric] = stage.name
    for gate in spec.gates:
        if gate.metric not in made:
            raise InputError(
                f"{source}: gates.{gate.name}.metric: no evaluate stage of the released model measures {gate.metric!r}"
                f"{nearest(gate.metric, made)}; add a suite or a task, or correct the name"
            )
        possible = ranges[gate.metric]
        if possible is None:
            raise InputError(
                f"{source}: gates.{gate.name}.metric: {gate.metric!r} has no declared range in stage"
                f" {made[gate.metric]!r}, so no gate can judge it; use another metric, or "
                "declare its range in `ranges` if it is a mean of items"
            )
        try:
            gate.check_range(possible)
        except InputError as error:
            raise InputError(f"{source}: gates.{gate.name}: {error}") from error
    return made


def measures(rule: GateRule, gate: StageManifest, contracts: Mapping[str, StageContract]) -> Iterator[str]:
    """Yield the evaluations of the released model that measure a rule's metric.

    Args:
        gate: the run's gate stage.
    """
    for slot, ref in gate.inputs.items():
        contract = contracts.get(ref.name)
        if slot.startswith(EVIDENCE) and contract and rule.metric in contract.metrics:
            yield ref.name


_SELECTED = "rows that selected the model are no evidence for it; probe other rows"


_LEARNT = "a memorised answer scores best; probe rows that the stage does not train on"


_STEP = "best/step"  # metric: the step after which the best model was stored


def dataset_slots(stage: StageManifest) -> list[tuple[str, InputRef]]:
    """Return the data inputs of a stage, without reward, model and probe."""
    return [(slot, ref) for slot, ref in stage.inputs.items() if slot == "data" or slot.startswith("suites.")]


def selects(stage: StageManifest) -> bool:
    """Return whether the stage's probe selects the stage's model or ends the stage early."""
    return "probe" in stage.inputs and bool(stage.params.get("keep_best") or stage.params.get("early_stopping"))


def selected_on(manifest: Manifest, rows: Mapping[str, Sequence[Row] | None]) -> Iterator[str]:
    """Yield a warning for each selecting probe whose rows a suite measures or the stage trains on.

    Args:
        rows: digest of a data set → its rows; None: the rows were not read, so only the digests are compared.
    """
    suites = {str(ref.digest): ref for stage in manifest.stages if stage.measures for _, ref in dataset_slots(stage)}
    for stage in filter(selects, manifest.stages):
        probe, data = stage.inputs["probe"], stage.inputs["data"]
        read = rows.get(str(probe.digest))
        asked = None if read is None else read[: int(stage.params["probe"]["items"])]
        for digest, other in {**suites, str(data.digest): data}.items():
            place, known = f"{stage.name}: the probe's {probe.name}", rows.get(digest)
            trained = digest == str(data.digest)
            little = _LEARNT if trained else _SELECTED
            if digest == str(probe.digest):
                yield f"{place} is {'the training data of the stage' if trained else 'the data of a suite'}: {little}"
            elif asked is not None and known is not None:
                report = contamination(known, asked)
                if report.found:
                    yield f"{place} against {other.name}: {report}: {little}"


def choice_warnings(manifest: Manifest, metrics: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield warnings about probes on used rows, stages that changed no weights, and an untrained best model's release.

    Args:
        metrics: stage that has ended → its metrics.
    """
    yield from selected_on(manifest, {})
    for name, measured in metrics.items():
        if measured.get(UNCHANGED):
            yield f"{name}: no step updated the weights, so its output is the model it began with; check its rewards"
    if manifest.release is None:
        return
    stages = {stage.name: stage for stage in manifest.stages}
    name, _, output = manifest.release.model.partition("/")  # an older manifest may contain a name that is rejected now
    while name in stages:
        if output == BEST and metrics.get(name, {}).get(_STEP) == 0:
            yield (
                f"{name}: the best model by the probe is the model with which the stage began (step 0), so no update "
                f"of {name} is released"
            )
        ref = stages[name].inputs.get("model")
        if ref is None or ref.source != "stage":
            return
        name, output = ref.name, str(ref.output)


def selected(metrics: Mapping[str, float]) -> str:
    """Return, e.g., `probe/accuracy 0.91 at step 40` for a stage whose probe selected a model; else empty."""
    found = [name for name in metrics if name.startswith("best/probe/")]
    return f"{found[0].removeprefix('best/')} {metrics[found[0]]:.4g} at step {metrics['best/step']:g}" if found else ""


def selection_words(metrics: Mapping[str, float]) -> str:
    """Return, e.g., `best: probe/accuracy 0.91 at step 40; stopped early at step 60`; empty if no probe selected."""
    early = f"; stopped early at step {metrics['stopped_early/step']:g}" if "stopped_early/step" in metrics else ""
    return f"best: {selected(metrics)}{early}" if selected(metrics) else ""
