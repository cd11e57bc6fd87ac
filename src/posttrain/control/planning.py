"""From run.yaml to the manifest: every word becomes a digest, every mistake an error before a process starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

from posttrain.domain.errors import InputError
from posttrain.domain.manifest import InputRef, Manifest, StageManifest, topological
from posttrain.domain.measures import ItemRange
from posttrain.domain.rewards import AS_FOUND, Called
from posttrain.domain.runspec import RunSpec, StageSpec
from posttrain.domain.validation import nearest
from posttrain.execution.ports import StageContract, Trainer

CONTROL = "control"  # the "trainer" of stages that need no process


class Resolve(Protocol):
    """From a ref as written to the pinned input."""

    def __call__(self, kind: str, text: str, called: Called = AS_FOUND) -> InputRef:
        """Raises InputError or NotFoundError.

        Args:
            called: of a reward, what the run file says of its function.
        """


@dataclass(frozen=True, slots=True)
class Planned:
    """A manifest and what the trainers said of its stages."""

    manifest: Manifest
    contracts: Mapping[str, StageContract]
    warnings: tuple[str, ...] = ()  # what could not be checked before the run, or will probably not do
    changes: tuple[str, ...] = ()  # what to change before the run is started


def plan_run(
    spec: RunSpec,
    source: str,
    resolve: Resolve,
    trainers: Mapping[str, Trainer],
    channels: Collection[str] = (),
) -> Planned:
    """Resolve a run file.

    Args:
        source: the file's name, for errors.
        channels: those that exist; of a new one beside them a warning tells.

    Raises:
        InputError: naming file, field, constraint and value.
    """
    contracts = {name: _contract(source, name, stage, trainers) for name, stage in spec.stages.items()}
    resolver = _Resolver(spec, source, contracts, resolve)
    stages = {name: resolver.stage(name) for name in spec.stages}
    try:
        order = topological({name: stage.upstream() for name, stage in stages.items()})
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    ordered = [stages[name] for name in order]
    ordered += _decision_stages(spec, source, stages, contracts)
    manifest = Manifest(
        name=spec.name,
        owner=spec.owner,
        seed=spec.seed,
        stages=tuple(ordered),
        gates=spec.gates,
        budget=spec.budget,
        release=spec.release,
        code={name: trainers[name].code_digest() for name in sorted({s.trainer for s in spec.stages.values()})},
    )
    return Planned(
        manifest,
        contracts | {s.name: contracts[s.name.removeprefix("baseline-")] for s in _baselines(ordered)},
        tuple(_new_channel(spec, channels)),
    )


def _new_channel(spec: RunSpec, channels: Collection[str]) -> Iterator[str]:
    """A new channel is nobody's mistake, but a slip would find an empty one and no baseline: so it is told."""
    channel = spec.release.channel if spec.release else None
    if channel and channels and channel not in channels:
        known = ", ".join(sorted(channels))
        yield f"release.channel: {channel} is new, so there is no baseline yet (channels with releases: {known})"


def _contract(source: str, name: str, stage: StageSpec, trainers: Mapping[str, Trainer]) -> StageContract:
    if stage.trainer not in trainers:
        known = nearest(stage.trainer, trainers)
        raise InputError(f"{source}: stages.{name}.trainer: unknown trainer {stage.trainer!r}{known}")
    try:
        return trainers[stage.trainer].check(stage.kind, stage.params)
    except InputError as error:
        raise InputError(f"{source}: stages.{name}: {error}") from error


class _Resolver:
    """Turns the words of one run file into input refs."""

    def __init__(self, spec: RunSpec, source: str, contracts: Mapping[str, StageContract], resolve: Resolve) -> None:
        self._spec, self._source, self._contracts, self._resolve = spec, source, contracts, resolve

    def stage(self, name: str) -> StageManifest:
        contract, written = self._contracts[name], self._spec.stages[name]
        inputs = {slot: self._input(f"stages.{name}.{slot}", *wanted) for slot, wanted in contract.inputs.items()}
        for slot, (kind, word) in contract.inputs.items():
            if kind == "reward":
                inputs |= self._reward_files(slot, word)
        return StageManifest(
            name=name,
            kind=written.kind,
            trainer=written.trainer,
            inputs=inputs,
            params=dict(contract.params),
            outputs=dict(contract.outputs),
        )

    def _input(self, field: str, kind: str, word: str) -> InputRef:
        if kind == "model":
            return self._model(field, word)
        if kind == "recipe":  # code lies beside the run file: there is no section for it
            return self._asset(field, kind, word)
        if kind == "reward":
            return self._reward(field, word)
        if word not in self._spec.data:
            raise InputError(f"{self._source}: {field}: {word!r} is not in `data`{nearest(word, self._spec.data)}")
        return self._asset(f"data.{word}", kind, self._spec.data[word])

    def _reward(self, field: str, word: str) -> InputRef:
        rewards = self._spec.rewards
        if word not in rewards:
            raise InputError(f"{self._source}: {field}: {word!r} is not in `rewards`{nearest(word, rewards)}")
        found = self._asset(f"rewards.{word}", "reward", rewards[word].ref, rewards[word].called)
        network = rewards[word].network
        return found.model_copy(update={"meta": {**found.meta, "network": list(network)}}) if network else found

    def _reward_files(self, slot: str, word: str) -> dict[str, InputRef]:
        """`reward/words.txt`: a slot for every file that a reward's code gets besides its source."""
        files = self._spec.rewards[word].files
        return {f"{slot}/{PurePath(f).name}": self._asset(f"rewards.{word}.files", "file", f) for f in files}

    def _model(self, field: str, word: str) -> InputRef:
        if word == "base":
            if self._spec.model is None:
                raise InputError(
                    f"{self._source}: {field}: `base` needs the top-level key `model`; add model: model:NAME"
                )
            return self._asset("model", "model", self._spec.model)
        producers = {name for name, contract in self._contracts.items() if "model" in contract.outputs}
        if word not in producers:
            raise InputError(
                f"{self._source}: {field}: no stage {word!r} makes a model{nearest(word, producers | {'base'})}"
            )
        return InputRef(source="stage", name=word, output="model")

    def _asset(self, field: str, kind: str, ref: str, called: Called = AS_FOUND) -> InputRef:
        try:
            return self._resolve(kind, ref, called) if called else self._resolve(kind, ref)
        except InputError as error:
            raise type(error)(f"{self._source}: {field}: {error}") from error


def _decision_stages(
    spec: RunSpec, source: str, stages: Mapping[str, StageManifest], contracts: Mapping[str, StageContract]
) -> list[StageManifest]:
    """The stages a release adds: the baseline's evaluation where a gate compares, the gate, the release."""
    if spec.release is None:
        return []
    released, channel = spec.release.model, spec.release.channel
    producers = {name for name, stage in stages.items() if "model" in stage.outputs}
    if released not in producers:
        raise InputError(f"{source}: release.model: no stage {released!r} makes a model{nearest(released, producers)}")
    evaluators = [s for s in stages.values() if s.kind == "evaluate" and s.inputs["model"].name == released]
    _check_metrics(spec, source, evaluators, contracts)
    candidate = InputRef(source="stage", name=released, output="model")
    evidence = {
        f"evidence.{s.name}": InputRef(source="stage", name=s.name, output="metrics", form="file") for s in evaluators
    }
    added: list[StageManifest] = []
    if any(gate.needs_baseline for gate in spec.gates):
        live = InputRef(source="channel", name=channel)
        for stage in evaluators:
            inputs = {**stage.inputs, "model": live}
            added.append(stage.model_copy(update={"name": f"baseline-{stage.name}", "inputs": inputs}))
        evidence |= {
            f"baseline.{s.name}": InputRef(source="stage", name=f"baseline-{s.name}", output="metrics", form="file")
            for s in evaluators
        }
    gate_inputs = {"candidate": candidate, "channel": InputRef(source="channel", name=channel), **evidence}
    report = InputRef(source="stage", name="gate", output="report", form="file")
    added.append(_control_stage("gate", gate_inputs, {"report": "file"}))
    added.append(_control_stage("release", {"candidate": candidate, "report": report}, {}))
    return added


def _control_stage(name: str, inputs: dict[str, InputRef], outputs: dict[str, str]) -> StageManifest:
    return StageManifest(name=name, kind=name, trainer=CONTROL, inputs=inputs, params={}, outputs=outputs)


def _check_metrics(
    spec: RunSpec, source: str, evaluators: list[StageManifest], contracts: Mapping[str, StageContract]
) -> None:
    made: dict[str, str] = {}
    ranges: dict[str, ItemRange | None] = {}
    for stage in evaluators:
        ranges |= contracts[stage.name].metrics
        for metric in contracts[stage.name].metrics:
            if metric in made:
                raise InputError(
                    f"{source}: stages.{stage.name}: {metric!r} is already made by {made[metric]!r}; rename a suite"
                )
            made[metric] = stage.name
    for gate in spec.gates:
        if gate.metric not in made:
            raise InputError(
                f"{source}: gates.{gate.name}.metric: no evaluate stage of the released model makes {gate.metric!r}"
                f"{nearest(gate.metric, made)}"
            )
        possible = ranges[gate.metric]
        if possible is None:
            raise InputError(
                f"{source}: gates.{gate.name}.metric: {gate.metric!r} must declare the range of its values to be"
                f" judged, and stage {made[gate.metric]!r} declares none; gate another metric"
            )
        try:
            gate.check_range(possible)
        except InputError as error:
            raise InputError(f"{source}: gates.{gate.name}: {error}") from error


def _baselines(stages: list[StageManifest]) -> Iterator[StageManifest]:
    return (stage for stage in stages if stage.inputs.get("model", None) and stage.inputs["model"].source == "channel")


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """Read a locked manifest back.

    Raises:
        InputError: an unknown external parameter, or another schema.
    """
    from_schema = value.get("manifest")
    if from_schema != 1:
        raise InputError(f"manifest: schema must be 1, got {from_schema!r}; lock the run again with this version")
    return Manifest.model_validate(value)
