"""From run.yaml to a run: resolve the file to a manifest, and record a run of the manifest.

Names become digests, and mistakes become errors before a process starts. A second submission of the same digest
attaches to the existing run.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Protocol

from posttrain.control.channels import check_suites, refuse_recalled
from posttrain.control.jobs import code_of
from posttrain.control.release_plan import Decision
from posttrain.decision.releases import under_policy
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import ConflictError, InputError, PosttrainError, nearest
from posttrain.domain.harnesses import Harness
from posttrain.domain.kinds import CONTROL, GATE, HARNESS, MODEL, DocumentUnit, Driver, StageContract, kind_of
from posttrain.domain.lifecycle import Reason, RunState, StageState, is_final
from posttrain.domain.manifest import InputRef, Manifest, StageManifest, model_output, topological
from posttrain.domain.policies import PinnedPolicy
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import Artifact, RunRecord, StageRecord
from posttrain.domain.rewards import AS_FOUND, JUDGES, Called
from posttrain.domain.roles import DECLARED, is_frozen_input
from posttrain.domain.runspec import Passes, RunSpec, StageSpec, passes_of
from posttrain.domain.trackers import Trackers
from posttrain.domain.waits import wait_contract
from posttrain.execution.ports import Trainer
from posttrain.store.ledger import Ledger, Stores
from posttrain.store.trees import stored_sizes

_LONGEST = 55  # maximum characters of a name in an id, which has at most 64 characters
_RACES = 100  # maximum races that one `--again` may lose to other submissions


class Resolve(Protocol):
    """Resolves a written ref to a pinned input."""

    def __call__(self, kind: str, text: str, called: Called = AS_FOUND) -> InputRef:
        """Return the pinned input.

        Args:
            called: for a reward, the run file's settings of its function.

        Raises:
            InputError: the ref is invalid, or names an asset that cannot be used.
            NotFoundError: the ref names no existing object.
        """


class Count(Protocol):
    """Counts documents of a data set."""

    def __call__(self, ref: InputRef, word: str, unit: DocumentUnit) -> int:
        """Return the number of documents.

        Args:
            word: the data set in the run file's `data`.
            unit: what is one document.

        Raises:
            InputError: rows are invalid.
            NotFoundError: the bytes are missing.
            IntegrityError: the bytes are corrupt.
        """


@dataclass(frozen=True, slots=True)
class Planned:
    """A manifest and the contracts of its stages."""

    manifest: Manifest
    contracts: Mapping[str, StageContract]
    warnings: tuple[str, ...] = ()  # conditions that could not be checked before the run, and probable failures
    changes: tuple[str, ...] = ()  # suggested changes before the run is started
    passes: Mapping[str, Passes] = field(default_factory=dict)  # stage with `epochs` → the epochs as steps
    trackers: Trackers | None = None  # not in the manifest, because trackers affect no result
    policy: PinnedPolicy | None = None  # the policy of the channel to which the run releases


def plan_run(
    spec: RunSpec,
    source: str,
    resolve: Resolve,
    trainers: Mapping[str, Trainer],
    channels: Collection[str] = (),
    count: Count | None = None,
    policy: PinnedPolicy | None = None,
) -> Planned:
    """Resolve a run file.

    Args:
        source: the file's name, for errors.
        channels: the existing channels; a new channel gets a warning.
        count: counts the documents of a data set; needed for `epochs`.
        policy: the policy of the channel to which the run releases; its gates are judged together with the file's own.

    Raises:
        InputError: the run file is invalid; the message names file, field, constraint and value.
    """
    spec = _gated(spec, source, policy)
    contracts = {name: _contract(source, name, stage, trainers) for name, stage in spec.stages.items()}
    resolver = Resolver(spec, source, contracts, resolve)
    passes = _resolve_epochs(spec, source, contracts, trainers, resolver, count)
    contracts.update(dict(_measured_by_harnesses(source, contracts, resolver)))
    stages = {name: resolver.stage(name) for name in spec.stages}
    try:
        order = _after_each_other(spec, stages.values())
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    code = code_of((stage for stage in order if stage.trainer != CONTROL), trainers)
    decision = Decision(resolver, spec, source, stages, contracts)
    added = decision.stages(lambda evaluators: check_suites(evaluators, code, policy) if policy else None)
    try:
        ordered = _after_each_other(spec, [*order, *added])
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    manifest = Manifest(
        name=spec.name,
        owner=spec.owner,
        seed=spec.seed,
        stages=tuple(ordered),
        gates=spec.gates,
        budget=spec.budget,
        release=spec.release,
        code=code,
        policy=policy.digest if policy else None,
        runtime=spec.runtime,
        image=spec.image,
    )
    return Planned(
        manifest, contracts | decision.contracts, tuple(_new_channel(spec, channels)), passes=passes, policy=policy
    )


def _after_each_other(spec: RunSpec, stages: Collection[StageManifest]) -> list[StageManifest]:
    """Return the stages in an order in which each stage follows its upstream stages.

    Raises:
        InputError: there is a cycle, or an `after` names an unknown stage.
    """
    gate = {GATE.name} if spec.release else set()
    places = {f"stages.{name}": stage.after for name, stage in spec.stages.items()}
    places |= {"release": spec.release.after} if spec.release else {}
    for place, names in places.items():
        for name in names:
            if name not in spec.stages.keys() | gate:
                raise InputError(f"{place}.after: no stage {name!r}{nearest(name, spec.stages.keys() | gate)}")
    known = {stage.name: stage for stage in stages}
    return [known[name] for name in topological({name: s.upstream() & known.keys() for name, s in known.items()})]


def _gated(spec: RunSpec, source: str, policy: PinnedPolicy | None) -> RunSpec:
    """Return the run file with the gates of its channel's policy.

    Raises:
        InputError: a gate is weaker than the policy's gate of that name, or a release has no gate.
    """
    if policy is not None:
        try:
            spec = spec.model_copy(update={"gates": under_policy(spec.gates, policy)})
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
    if spec.release and not spec.gates:
        raise InputError(f"{source}: release needs at least one gate, got none; add gates")
    return spec


def _new_channel(spec: RunSpec, channels: Collection[str]) -> Iterator[str]:
    """Yield a warning if the channel is new: the name may be a typo, and a release would then have no baseline."""
    channel = spec.release.channel if spec.release else None
    if channel and channels and channel not in channels:
        known = ", ".join(sorted(channels))
        yield f"release.channel: {channel} is new, so there is no baseline yet (channels with releases: {known})"


def _contract(source: str, name: str, stage: StageSpec, trainers: Mapping[str, Trainer]) -> StageContract:
    if kind_of(stage.kind).driver is Driver.WAIT:
        if stage.trainer != StageSpec.model_fields["trainer"].default:
            raise InputError(f"{source}: stages.{name}.trainer: a wait stage has no trainer, got {stage.trainer!r}")
        return wait_contract(stage.params, f"{source}: stages.{name}")
    if stage.trainer not in trainers:
        known = nearest(stage.trainer, trainers)
        raise InputError(f"{source}: stages.{name}.trainer: unknown trainer {stage.trainer!r}{known}")
    try:
        return trainers[stage.trainer].check(stage.kind, stage.params)
    except InputError as error:
        raise InputError(f"{source}: stages.{name}: {error}") from error


def _resolve_epochs(
    spec: RunSpec,
    source: str,
    contracts: dict[str, StageContract],
    trainers: Mapping[str, Trainer],
    resolver: Resolver,
    count: Count | None,
) -> dict[str, Passes]:
    """Replace `epochs` by steps in `contracts`; return the passes by stage."""
    found: dict[str, Passes] = {}
    for name, contract in contracts.items():
        length = contract.length
        if length is None or length.epochs is None:
            continue
        if count is None:
            raise InputError(
                f"{source}: stages.{name}.epochs: needs data whose rows can be counted, got none; write steps instead"
            )
        ref = resolver.input(name, length.slot)
        try:
            documents = count(ref, contract.inputs[length.slot][1], length.unit)
        except PosttrainError as error:
            raise type(error)(f"{source}: stages.{name}.{length.slot}: {error}") from error
        found[name] = passes_of(length.epochs, documents, length.per_step)
        stage = spec.stages[name]
        params = {key: value for key, value in stage.params.items() if key != "epochs"} | {"steps": found[name].steps}
        contracts[name] = _contract(source, name, stage.model_copy(update={"params": params}), trainers)
    return found


def _measured_by_harnesses(
    source: str, contracts: Mapping[str, StageContract], resolver: Resolver
) -> Iterator[tuple[str, StageContract]]:
    """Yield the contracts of stages with a harness, whose metrics its facts name."""
    for name, contract in contracts.items():
        if HARNESS in contract.inputs:
            facts = Harness.from_json(resolver.input(name, HARNESS).meta, f"{source}: stages.{name}.harness")
            try:
                facts.refuse_foreign(contract.params)
                metrics = facts.metrics(contract.params["tasks"], contract.params["ranges"])
            except InputError as error:
                raise InputError(f"{source}: stages.{name}.{error}") from error
            yield name, replace(contract, metrics=metrics)


class Resolver:
    """Resolves the names in one run file to input refs."""

    def __init__(self, spec: RunSpec, source: str, contracts: Mapping[str, StageContract], resolve: Resolve) -> None:
        self._spec, self._source, self._contracts, self._resolve = spec, source, contracts, resolve

    def stage(self, name: str) -> StageManifest:
        contract, written = self._contracts[name], self._spec.stages[name]
        inputs = {slot: self.input(name, slot) for slot in contract.inputs}
        roles = contract.load.roles if contract.load else ()
        scoring = {role.name for role in roles if role.head == "score" and role.model.startswith(DECLARED)}
        if taken := sorted(self._spec.rewards.keys() & scoring):
            raise InputError(
                f"{self._source}: stages.{name}.roles.{taken[0]}: is also a name in `rewards`; rename one of them"
            )
        keys = {one["key"] for one in contract.params.get("models", {}).values() if one.get("key")}
        for slot, (kind, word) in contract.inputs.items():
            if kind == "reward":
                inputs |= self._reward_files(slot, word)
                inputs[slot] = _with_secrets(inputs[slot], keys)
        return StageManifest(
            name=name,
            kind=written.kind,
            trainer=CONTROL if kind_of(written.kind).driver is Driver.WAIT else written.trainer,
            after=tuple(sorted(set(written.after))),
            inputs=inputs,
            params=dict(contract.params),
            outputs=dict(contract.outputs),
        )

    def input(self, name: str, slot: str) -> InputRef:
        """Return a pinned input of a stage. A judge or a teacher may also be the ref of a registered model."""
        field, (kind, word) = f"stages.{name}.{_place(slot)}", self._contracts[name].inputs[slot]
        named = is_frozen_input(slot) and ":" in word
        return self._asset(field, kind, word) if named else self._input(field, kind, word)

    def _input(self, field: str, kind: str, word: str) -> InputRef:
        if kind == "model":
            return self.model(field, word)
        if kind in ("recipe", HARNESS):  # the run file has no section for them
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
        given = {"network": list(rewards[word].network), "secrets": sorted(set(rewards[word].secrets))}
        told = {name: words for name, words in given.items() if words}
        return found.model_copy(update={"meta": {**found.meta, **told}}) if told else found

    def _reward_files(self, slot: str, word: str) -> dict[str, InputRef]:
        """Return slots such as `reward/words.txt` for the files that a reward's code gets in addition to its source."""
        return {
            f"{slot}/{PurePath(f).name}": self._asset(f"rewards.{word}.files", "file", f)
            for f in self._spec.rewards[word].files
        }

    def model(self, field: str, word: str) -> InputRef:
        """Resolve `base`, a stage that makes a model, or `STAGE/best`.

        Raises:
            InputError: there is no such stage or no base, or the stage does not store a best model.
        """
        if word == "base":
            if self._spec.model is None:
                raise InputError(
                    f"{self._source}: {field}: `base` needs the top-level key `model`; add model: model:NAME"
                )
            return self._asset("model", "model", self._spec.model)
        try:
            name, output = model_output(word)
        except InputError as error:
            raise InputError(f"{self._source}: {field}: {error}") from error
        producers = {name for name, contract in self._contracts.items() if MODEL in contract.outputs}
        if name not in producers:
            raise InputError(
                f"{self._source}: {field}: no stage {name!r} makes a model{nearest(name, producers | {'base'})}"
            )
        if output not in self._contracts[name].outputs:
            raise InputError(
                f"{self._source}: {field}: stage {name!r} has no best model for {word!r}; add keep_best: true to it"
            )
        return InputRef(source="stage", name=name, output=output)

    def _asset(self, field: str, kind: str, ref: str, called: Called = AS_FOUND) -> InputRef:
        try:
            return self._resolve(kind, ref, called) if called else self._resolve(kind, ref)
        except InputError as error:
            raise type(error)(f"{self._source}: {field}: {error}") from error


def _with_secrets(reward: InputRef, keys: Collection[str]) -> InputRef:
    """Return the input of a reward that also gets the keys of the models which it may call."""
    secrets = sorted({*reward.meta.get("secrets", ()), *keys})
    return reward.model_copy(update={"meta": {**reward.meta, "secrets": secrets}}) if keys else reward


def _place(slot: str) -> str:
    """Return the field of a slot in a stage: `rewards.heldout:right` is `suites.heldout.reward.right`."""
    head, _, part = slot.partition(":")
    if head.startswith(JUDGES):
        head = f"suites.{head.removeprefix(JUDGES)}.reward"
    return f"{head}.{part}" if part else head


@dataclass(frozen=True, slots=True)
class Submitted:
    """The run, and whether it existed before."""

    run: RunRecord
    attached: bool
    moved: bool = False  # the target of a channel or a run's name has changed since the run's submission


def submit(stores: Stores, manifest: Manifest, *, again: bool = False, exact: bool = False) -> Submitted:
    """Record a run for this manifest, or attach to the newest run with the same digest.

    The call also attaches to an unfinished run if only the target of a name (`channel:prod`) has changed: a run may
    move its own channel, and a command repeated after a kill must find that run.

    Args:
        again: whether to start another run of the same manifest.
        exact: whether to attach only to a run of exactly this manifest, not to a run whose names have other targets.
    """
    existing = stores.ledger.runs(manifest_digest=manifest.digest)
    if existing and not again:
        return Submitted(existing[0], attached=True)
    unfinished = None if again or exact else _unfinished(stores, manifest)
    if unfinished:
        return Submitted(unfinished, attached=True, moved=True)
    digest = stores.blobs.put(canonical_json(manifest.to_json()))
    artifacts = _artifacts(stores, manifest, digest)
    repeat = existing[0].repeat + 1 if existing else 1
    for _ in range(_RACES):
        run, stages = _records(stores, manifest, digest, repeat)
        crashpoint("submit.before_commit")
        try:
            with stores.ledger.transaction(stores.actor) as transaction:
                transaction.lock_recalls()
                refuse_recalled(transaction.snapshot, manifest, f"run {manifest.name}")
                transaction.insert_run(run, stages, artifacts)
        except ConflictError:  # another submit of the same digest won the race
            won = stores.ledger.runs(manifest_digest=digest)
            if not won or won[0].repeat < repeat:
                raise
            if not again:
                return Submitted(won[0], attached=True)
            repeat = won[0].repeat + 1
            continue
        crashpoint("submit.after_commit")
        return Submitted(stores.ledger.run(run.id), attached=False)
    raise ConflictError(
        f"{manifest.name}: {_RACES} other submissions of this file were stored first; run the command again"
    )


def new_run_id(ledger: Ledger, name: str) -> str:
    """Return `NAME-<8 characters>`: forty random bits in lower-case base32; a long name is truncated."""
    return f"{name[:_LONGEST]}-{base64.b32encode(ledger.entropy(5)).decode().lower()}"


def _unfinished(stores: Stores, manifest: Manifest) -> RunRecord | None:
    """Return the newest unfinished run whose manifest differs at most in the digests to which its refs resolve."""
    words = manifest.unpinned()
    if words is None:
        return None
    for run in stores.ledger.runs():
        if run.name == manifest.name and not is_final("run", run.state) and stores.manifest(run).unpinned() == words:
            return run
    return None


def _artifacts(stores: Stores, manifest: Manifest, digest: str) -> list[Artifact]:
    """Return the artifacts of the manifest and of its inputs."""
    forms = {ref.digest: str(ref.form) for _, _, ref in manifest.assets() if ref.digest}
    sizes, now = stored_sizes(stores.blobs, {digest: "file", **forms}), stores.clock.now()
    named = [Artifact(one, form, sizes.get(one), "input", now) for one, form in forms.items()]
    return [Artifact(digest, "file", sizes.get(digest), "manifest", now), *named]


def _records(stores: Stores, manifest: Manifest, digest: str, repeat: int) -> tuple[RunRecord, list[StageRecord]]:
    run_id = new_run_id(stores.ledger, manifest.name)
    run = RunRecord(
        id=run_id,
        name=manifest.name,
        manifest_digest=digest,
        state=RunState.PENDING,
        owner=manifest.owner,
        created_at=stores.clock.now(),
        reason=Reason.SUBMITTED,
        message="waiting for a driver",
        next_action=f"posttrain run, or posttrain get {run_id} --watch",
        project=stores.ledger.project,
        repeat=repeat,
    )
    stages = [
        StageRecord(
            run_id=run_id,
            name=stage.name,
            position=position,
            kind=stage.kind,
            state=StageState.PENDING,
            reason=Reason.WAITING_FOR_INPUTS,
            message=f"waiting for {', '.join(sorted(stage.upstream())) or 'its turn'}",
            next_action="none needed",
        )
        for position, stage in enumerate(manifest.stages)
    ]
    return run, stages
