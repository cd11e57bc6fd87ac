"""Checks of placements, images, adapters, teachers and judges before a run.

Each check answers a question: Is the placement of every stage possible, and which models will be resident where? Is the
run's image allowed, and can jobs run in it? Does an adapter fit the model that it is trained on? Does a teacher have
the same tokens as its student? Does the model that judges responses return scores?
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.control.plan import Planned
from posttrain.data.refs import is_confined
from posttrain.domain.adapters import (
    CONFIG as ADAPTER,
    FOLDER,
    SavedAdapter,
    base_files,
    is_linear,
)
from posttrain.domain.errors import InputError
from posttrain.domain.jobspec import allows
from posttrain.domain.kinds import OWN, Driver, Load, StageContract, kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.placement import Flavour
from posttrain.domain.rendering import CONFIG, is_classifier
from posttrain.domain.roles import DECLARED, ROLLOUT, RoleSpec, servers_of
from posttrain.domain.runspec import RunSpec
from posttrain.engine.settings import AdapterConfig
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.machine import Gpu, Machine, room_of, this_machine
from posttrain.execution.trainers.native import gpu_visible
from posttrain.planner.remedies import Bench, Trial
from posttrain.planner.residency import Residency, gib, infeasible, unfit
from posttrain.planner.shape import Shape
from posttrain.planner.sizes import Room, Size, expected, unknown_kinds
from posttrain.preflight.confinement import bytes_of
from posttrain.preflight.data import Dataset, Lengths, model_files, origin, weight_shapes, word_of
from posttrain.preflight.outlook import workload
from posttrain.workspace.served import is_served
from posttrain.workspace.settings import OpenWorkspace

_SPECIAL_TOKENS = 7  # tokens, in addition to characters, of a model that `init_model` makes
_JUDGE = "reward_model"
_SLOT, _TOKENIZER = "teacher", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Seen:
    """The plan's estimates for the memory of one stage."""

    residency: Residency
    sizes: tuple[Size, ...]
    warnings: tuple[str, ...]


def check_models(
    manifest: Manifest,
    contracts: Mapping[str, StageContract],
    workspace: OpenWorkspace,
    source: Path,
    model: str | None = None,
) -> list[str]:
    """Check the sizes, adapters, judges, teachers and placements of a run; return a line for each thing to consider.

    Args:
        contracts: stage → its contract.
        source: the run file or lock, for errors.
        model: the base model's ref in the run file; None: the model is in the store.

    Raises:
        InputError, NotFoundError, IntegrityError: see the functions that this one calls.
    """
    refuse_oversized(manifest, source)
    check_adapters(manifest, workspace, source, model)
    refuse_judges_without_scores(manifest, workspace, source, model)
    found = list(check_teachers(manifest, workspace, source, model))
    loads = {name: contract.load for name, contract in contracts.items() if contract.load}
    refuse_infeasible(manifest, loads, workspace, source, model)
    return found


def refuse_infeasible(
    manifest: Manifest, loads: Mapping[str, Load], workspace: OpenWorkspace, source: Path, model: str | None = None
) -> None:
    """Reject a run whose stages could not be started, or whose models would not fit into memory.

    For a stage that names a cluster, only constraints that do not depend on the cluster are checked; the job checks the
    cluster before it starts any process. For jobs in this environment, Ray must be installed; for jobs in an image or
    under an installed executor, `plan` only warns if Ray is missing.

    Args:
        loads: stage → load.
        source: the run file or lock, for errors.
        model: the base model's ref in the run file; None: the model is in the store.

    Raises:
        InputError: a stage is infeasible; the message contains the file, stage, role, requested and available
            resources, and the next action.
        NotFoundError: the base model's listing is missing.
        IntegrityError: the base model's listing is corrupt.
    """
    for stage in manifest.stages:
        name, flavour = workspace.jobs.flavour_of(stage)
        if flavour is not None and kind_of(stage.kind).driver is Driver.JOB:
            _refuse_flavour(workspace, stage, name, flavour, manifest.image_of(stage), source)
        elif _asks_for_a_gpu(stage) and not gpu_visible():
            raise InputError(
                f"{source}: stages.{stage.name}: runtime.device cuda needs a GPU, but no GPU is visible here; "
                "write auto or cpu, or run the file on a machine with a GPU"
            )
    for name, load in loads.items():
        kind, flavour = workspace.jobs.flavour_of(manifest.stage(name))
        shapes = role_shapes(manifest, manifest.stage(name), load, workspace, source, model)
        machine, where = _nodes(kind, flavour), "this machine" if flavour is None else f"flavour {kind}"
        found = unfit(load, shapes.get(load.names[0]))
        here = manifest.image is None and workspace.own_jobs and flavour is None
        found += _missing_ray(load) if here else []
        if load.ray_address is None:
            found = infeasible(load.placement, machine.resources(), roles=load.names, where=where) + found
            bench = Bench(load, shapes, room_of(machine), len(machine.gpus))
            refused = bench.tried(load).refused
            found += [f"{refused[0]}; {bench.advice}", *refused[1:]] if refused else []
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise InputError(f"{source}: stages.{name}: {found[0]}{more}")


def _nodes(name: str, flavour: Flavour | None) -> Machine:
    """Return the largest machine of the flavour's jobs; None: this machine."""
    if flavour is None:
        return this_machine()
    gpu = Gpu(name, flavour.gpu_memory)
    return Machine(flavour.cpus * flavour.nodes, flavour.memory, (gpu,) * flavour.gpus_per_node * flavour.nodes)


def _refuse_flavour(
    workspace: OpenWorkspace, stage: StageManifest, name: str, flavour: Flavour, image: str | None, source: Path
) -> None:
    """Reject a stage whose gang its flavour cannot provide, or whose nodes have not been proven.

    Raises:
        InputError: the stage cannot run on the flavour's nodes.
    """
    trainer = workspace.jobs.trainer(stage.trainer)
    if image is not None and not workspace.jobs.executor_for(stage).images:
        raise InputError(
            f"{source}: stages.{stage.name}: image: executor {flavour.executor} of flavour {name} cannot run images; "
            "add `container` to it (posttrain executor add), or leave image out"
        )
    try:
        flavour.gang(name, trainer.devices(stage.kind, stage.params), stage.params)
    except InputError as error:
        raise InputError(f"{source}: stages.{stage.name}: {error}") from error
    if not is_served(workspace.root) and not workspace.is_proven(name):
        raise InputError(
            f"{source}: stages.{stage.name}: a probe must show that the nodes of flavour {name} reach the store and "
            f"have this Posttrain, but none has since the last change; run posttrain executor doctor {name}"
        )


def _asks_for_a_gpu(stage: StageManifest) -> bool:
    runtime = stage.params.get("runtime")
    if stage.kind not in OWN or not isinstance(runtime, Mapping):
        return False
    return runtime.get("device") == "cuda" and not runtime.get("ray_address")


def refuse_oversized(manifest: Manifest, source: Path) -> None:
    """Reject a new model that does not fit into this machine's memory.

    Raises:
        InputError: the model does not fit; the message contains its number of parameters, its bytes and this machine's
            memory.
    """
    for stage in manifest.stages:
        shape = _made(stage)
        memory = this_machine().memory if shape else None
        if shape and memory is not None and 4 * shape.parameters > memory:
            raise InputError(
                f"{source}: stages.{stage.name}: a model of hidden_size {shape.hidden}, layers {shape.layers} and "
                f"intermediate_size {shape.intermediate} has {shape.parameters:.3g} parameters, "
                f"{gib(4 * shape.parameters)} in float32, but this machine has {gib(memory)}; make the model smaller"
            )


def memory_warnings(bench: Bench, trial: Trial) -> list[str]:
    """Return warnings if the estimate exceeds the memory; a stage that certainly does not fit was rejected before.

    For a cluster, only the kinds of GPUs are known, so no stage is rejected.
    """
    short = trial.settled.short or f"memory: {trial.said}"
    over = [f"{short}; {bench.advice}"] if trial.over else []
    return [*_missing_ray(bench.load), *unknown_kinds(bench.load), *over]


def ray_is_installed() -> bool:
    """Return whether the package ray is installed in this environment, without importing it."""
    return importlib.util.find_spec("ray") is not None


def _missing_ray(load: Load) -> list[str]:
    if (load.placement.is_inline and load.ray_address is None) or ray_is_installed():
        return []
    needed = "pools of several processes" if load.ray_address is None else f"jobs at {load.ray_address}"
    return [f"{needed} need the package ray, which is not installed here; pip install 'posttrain[ray]'"]


def residencies(
    planned: Planned, spec: RunSpec, workspace: OpenWorkspace, path: Path, datasets: Mapping[str, Dataset]
) -> Iterator[tuple[str, Seen]]:
    """Yield, for each stage with a model, the chosen sizes, the residency by phase, and warnings."""
    loads = {name: contract.load for name, contract in planned.contracts.items() if contract.load}
    lengths = Lengths(planned, spec, workspace, path)
    for name, load in loads.items():
        stage = planned.manifest.stage(name)
        shapes = role_shapes(planned.manifest, stage, load, workspace, path, spec.model)
        if shapes:
            machine = _nodes(*workspace.jobs.flavour_of(stage))
            rows = workload(stage, planned.contracts[name].work, datasets, lengths)
            room = Room() if load.ray_address is not None else room_of(machine)
            prompts = {"prompt_tokens": round(rows.length or 0), "longest_prompt": round(rows.longest or 0)}
            bench = Bench(load, shapes, room, None if load.ray_address else len(machine.gpus), prompts)
            trial = bench.tried(load)
            yield name, Seen(trial.residency, trial.settled.sizes, tuple(memory_warnings(bench, trial)))


def slower(planned: Planned, spec: RunSpec, workspace: OpenWorkspace, path: Path) -> Iterator[str]:
    """Yield one warning for each slower fall-back that a stage's model needs."""
    for stage in planned.manifest.stages:
        if contract := planned.contracts.get(stage.name):
            roles = contract.load.roles if contract.load else (ROLLOUT,)
            for warning in fallback_warnings(planned.manifest, stage, roles, workspace, path, spec.model):
                yield f"{stage.name}: {warning}"


def role_shapes(
    manifest: Manifest, stage: StageManifest, load: Load, workspace: OpenWorkspace, source: Path, model: str | None
) -> dict[str, Shape]:
    """Return the shape of each role's model; roles without a model or with a model of unknown shape are omitted."""
    slots = {role.name: role.model for role in load.roles if role.model}
    found = {role: _shape(manifest, stage, slot, workspace, source, model) for role, slot in slots.items()}
    return {role: shape for role, shape in found.items() if shape is not None}


def _shape(
    manifest: Manifest, stage: StageManifest, slot: str, workspace: OpenWorkspace, source: Path, model: str | None
) -> Shape | None:
    found = origin(manifest, stage, slot)
    if isinstance(found, StageManifest):
        return _made(found)
    return Shape.of_files(*stored_config(found, workspace, source, model))


def stored_config(
    ref: InputRef, workspace: OpenWorkspace, source: Path, model: str | None
) -> tuple[dict[str, Any], int]:
    """Return a model's `config.json` and the bytes of its weights; empty if the files are not available."""
    word = word_of(ref, model)
    if ref.digest is None or (word is None and not workspace.blobs.has(ref.digest)):
        return {}, 0
    with bytes_of(ref):
        files = model_files(workspace, ref, word, source.parent)
        config = _map(files.read(CONFIG))
    return config, sum(size for name, size in base_files(files.sizes).items() if name.endswith(".safetensors"))


def _stored_adapter(ref: InputRef, workspace: OpenWorkspace, source: Path, model: str | None) -> SavedAdapter | None:
    """Return the adapter of a registered model; None: it has none, or its files are not available.

    Raises:
        InputError: the model has more than a plain LoRA adapter.
    """
    word, name = word_of(ref, model), f"{FOLDER}/{ADAPTER}"
    if ref.digest is None or (word is None and not workspace.blobs.has(ref.digest)):
        return None
    with bytes_of(ref):
        data = model_files(workspace, ref, word, source.parent).read(name)
    return None if data is None else SavedAdapter.from_json(_map(data), f"{ref.name}: {name}")


def check_adapters(manifest: Manifest, workspace: OpenWorkspace, source: Path, model: str | None = None) -> None:
    """Reject a stage whose adapter does not fit the model that it trains.

    The stage's job checks what the plan cannot check, such as a channel's model.

    Args:
        source: the run file or lock, for errors.
        model: the base model's ref in the run file; None: the model is in the store.

    Raises:
        InputError: a whole model would be trained, but it has an adapter; the stage declares another adapter than the
            one that it continues; no layer has a targeted name; the rank is above a layer's size.
    """
    for stage in manifest.stages:
        if stage.kind not in OWN or kind_of(stage.kind).algorithm is None or "model" not in stage.inputs:
            continue
        given, place = stage.params.get("adapter"), f"{source}: stages.{stage.name}"
        _refuse_quantised(manifest, stage, workspace, source, model)
        asked, ref = AdapterConfig.model_validate(given) if given else None, stage.inputs["model"]
        before = _made_adapter(manifest, ref) or _registered_adapter(manifest, stage, workspace, source, model)
        try:
            if before is not None and asked is None:
                before.refuse_whole_training(ref.word)
            elif before is not None and asked is not None:
                before.refuse_other(asked.lora.described(), ref.word)
            elif asked is not None and (layers := _layers(manifest, stage, workspace, source, model)):
                own = {
                    name: size for name, size in layers.items() if not kind_of(stage.kind).scores or ".layers." in name
                }
                asked.lora.described().refuse_unfit(own)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error


def _refuse_quantised(
    manifest: Manifest, stage: StageManifest, workspace: OpenWorkspace, source: Path, model: str | None
) -> None:
    """Reject training of a base whose stored weights are quantised.

    Raises:
        InputError: see above.
    """
    ref = origin(manifest, stage, "model")
    config = {} if isinstance(ref, StageManifest) else stored_config(ref, workspace, source, model)[0]
    if config.get("quantization_config"):
        raise InputError(
            f"{source}: stages.{stage.name}: model {stage.inputs['model'].word} is stored quantised, so it cannot be "
            "trained; name the model that was quantised (adapter: {quantize: nf4} quantises it while an adapter trains)"
        )


def _made_adapter(manifest: Manifest, ref: InputRef) -> SavedAdapter | None:
    """Return the adapter of a model that a stage of the run makes; None: the model has none, or no stage makes it."""
    given = manifest.stage(ref.name).params.get("adapter") if ref.source == "stage" else None
    if given is None:
        return None
    return AdapterConfig.model_validate(given).lora.described()


def _registered_adapter(
    manifest: Manifest, stage: StageManifest, workspace: OpenWorkspace, source: Path, model: str | None
) -> SavedAdapter | None:
    began = stage.inputs["model"]
    return None if began.source == "stage" else _stored_adapter(began, workspace, source, model)


def _layers(
    manifest: Manifest, stage: StageManifest, workspace: OpenWorkspace, source: Path, model: str | None
) -> dict[str, int]:
    """Return the linear layers of a stage's model by name, each with the smaller of its sizes; empty: not available."""
    ref = origin(manifest, stage, "model")
    if isinstance(ref, StageManifest):
        shape = _made(ref)
        if shape is None:
            return {}
        sizes = {f"{_part(name)}.{name}": min(of) for name, of in shape.linear_layers.items()}
        linear = {f"model.layers.{n}.{name}": size for n in range(shape.layers) for name, size in sizes.items()}
        return {**linear, "lm_head": min(shape.hidden, shape.vocabulary)}
    word = word_of(ref, model)
    if ref.digest is None or (word is None and not workspace.blobs.has(ref.digest)):
        return {}
    with bytes_of(ref):
        shapes = weight_shapes(workspace, ref, word, source.parent)
    linear = {name.removesuffix(".weight"): min(of) for name, of in shapes.items() if len(of) == 2 and is_linear(name)}
    found = {name: size for name, size in linear.items() if ".layers." in name or name == "lm_head"}
    embeddings = [min(of) for name, of in shapes.items() if "embed" in name and ".layers." not in name]
    return {"lm_head": max(embeddings), **found} if found and embeddings else found  # a tied head is not stored


def _part(linear: str) -> str:
    return "self_attn" if linear in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def fallback_warnings(
    manifest: Manifest,
    stage: StageManifest,
    roles: Sequence[RoleSpec],
    workspace: OpenWorkspace,
    source: Path,
    model: str | None,
) -> list[str]:
    """Return warnings about the engine's slower fall-backs for the stage's models, as far as their config shows.

    Args:
        roles: the roles of the stage, including `rollout` if the stage generates responses.
        source: the run file or lock, for errors.
        model: the base model's ref in the run file; None: the model is in the store.
    """
    found = []
    for slot in dict.fromkeys(role.model for role in roles if role.model):
        readers = {role.name for role in roles if role.model == slot}
        began = origin(manifest, stage, slot)
        if slot not in stage.inputs or isinstance(began, StageManifest):  # models of `init_model` need no fall-back
            continue
        config, _ = stored_config(began, workspace, source, model)
        whose, text = "" if slot == "model" else f"{slot}: ", config.get("text_config")
        known = {**config, **text} if isinstance(text, dict) else config  # the text part of a multimodal model
        found += [f"{whose}falls back to {name}: {why}" for name, why in expected(known, readers).items()]
    return found


def _made(stage: StageManifest) -> Shape | None:
    """Return the shape of the model that a stage initialises; None if the stage initialises no model."""
    if not kind_of(stage.kind).from_nothing:
        return None
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    config = {names.get(name, name): value for name, value in stage.params.items()}
    words = len(str(stage.params.get("characters", ""))) + _SPECIAL_TOKENS
    return Shape.of_config({**config, "vocab_size": words, "tie_word_embeddings": True})


def _map(data: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(data or b"{}")
    except ValueError:  # the job, which loads the model, reports the error
        return {}
    return value if isinstance(value, dict) else {}


def refuse_image(image: str | None, workspace: OpenWorkspace, source: Path) -> None:
    """Reject an image that the project does not allow, or that no executor here can run.

    A request from a remote client may name only images that an admin allowed. A local user may name any image until the
    project has a list.

    Raises:
        InputError: the image is not usable; the message contains the field, constraint, value and next action.
    """
    if image is None:
        return
    allowed = workspace.ledger.images()
    if is_confined() if allowed is None else not allows(allowed, image):
        known = f"it allows {', '.join(allowed)}" if allowed else "it allows none"
        raise InputError(
            f"{source}: image: must be an image that project {workspace.ledger.project} allows, got {image} "
            f"({known}); a project admin can allow it: posttrain project allow-image {image}"
        )
    executor = next((one for one in workspace.jobs.executors if one.images), workspace.jobs.executor)
    if not executor.images:
        raise InputError(
            f"{source}: image: {image}: executor {executor.name} of this workspace cannot run images; leave image "
            "out, or choose an executor that can: posttrain init --executor podman"
        )
    if executor.remote:
        return
    if isinstance(executor, LocalExecutor) and (why := executor.trouble()):
        raise InputError(f"{source}: image: {image} cannot run here: {why}")
    away = urlsplit(workspace.blobs.url).scheme != "file" or workspace.channel_address
    if away and not is_served(workspace.root):
        raise InputError(
            f"{source}: image: a job in an image has no network, so it can reach artifacts in {workspace.blobs.url} "
            "only through a server, but no server is running; run posttrain serve"
        )


def refuse_judges_without_scores(
    manifest: Manifest, workspace: OpenWorkspace, source: Path, model: str | None = None
) -> None:
    """Reject a stage whose `reward_model` generates text, since every response would get the same reward.

    A channel's model is not known until the stage gets its inputs, so the stage's job checks such a model.

    Args:
        source: the run file or lock, for errors.
        model: the base model's ref in the run file; None: the model is in the store.

    Raises:
        InputError: a judge generates text; the message names the file, the stage and the judge.
    """
    for stage in manifest.stages:
        for slot in (_JUDGE, *_declared(stage, "score")):
            if slot in stage.inputs and scores(manifest, stage, slot, workspace, source, model) is False:
                raise InputError(
                    f"{source}: stages.{stage.name}.{slot}: must score responses, got {stage.inputs[slot].name}, which "
                    "is not a sequence classifier; name a stage of kind reward_model, or a model that such a stage made"
                )


def _declared(stage: StageManifest, *heads: str) -> Iterator[str]:
    """Yield the input slots of the models of a stage's declared roles with one of these heads."""
    roles = stage.params.get("roles") or {} if stage.kind in OWN else {}
    yield from (slot for name, role in roles.items() if role["head"] in heads and (slot := f"{DECLARED}{name}"))


def scores(
    manifest: Manifest, stage: StageManifest, slot: str, workspace: OpenWorkspace, source: Path, model: str | None
) -> bool | None:
    """Return whether the model in a slot scores responses; None if this is not known yet."""
    ref = stage.inputs[slot]
    if ref.source == "stage":
        made = manifest.stage(ref.name).kind
        return kind_of(made).scores if made in OWN else None
    config, _ = stored_config(ref, workspace, source, model)
    adapter = _stored_adapter(ref, workspace, source, model)
    return (adapter is not None and adapter.scores) or is_classifier(config) if config else None


def check_teachers(
    manifest: Manifest, workspace: OpenWorkspace, source: Path, model: str | None = None
) -> Iterator[str]:
    """Yield a warning for each teacher that is the same model as its student; reject unusable teachers.

    A teacher is unusable if it generates no text, if its tokens differ from the student's, or if it has fewer than
    `top_k` tokens. The stage's job checks what the plan cannot check: a channel's model, a model without
    `tokenizer.json`, or a teacher and a student of which this run makes exactly one.

    Args:
        source: the run file or lock, for errors.
        model: the base model's ref in the run file; None: the model is in the store.

    Raises:
        InputError: a teacher is unusable; the message names the file, the stage and the teacher.
    """
    for stage in manifest.stages:
        for slot in (_SLOT, *_declared(stage, "language", "value", "score")):
            if slot not in stage.inputs and slot not in servers_of(stage.params):
                continue
            asked = _Asked(manifest, stage, slot, workspace, source, model)
            here = slot in stage.inputs
            scoring = "" if slot in _declared(stage, "value", "score") or not here else asked.scores()
            if fault := scoring or (here and asked.speaks_otherwise()) or asked.has_fewer():
                raise InputError(f"{source}: stages.{stage.name}.{fault}")
            yield from asked.is_the_student() if here else ()


class _Asked:
    """The teacher and the student of one stage."""

    def __init__(
        self,
        manifest: Manifest,
        stage: StageManifest,
        slot: str,
        workspace: OpenWorkspace,
        source: Path,
        model: str | None,
    ) -> None:
        self._manifest, self._stage, self._slot, self._workspace = manifest, stage, slot, workspace
        self._source, self._model = source, model
        self._name = stage.inputs[slot].name if slot in stage.inputs else ""  # on another server

    def scores(self) -> str:
        """Return the fault of a teacher that scores responses instead of generating text; "" if there is no fault."""
        if not scores(self._manifest, self._stage, self._slot, self._workspace, self._source, self._model):
            return ""
        return (
            f"{self._slot}: must generate text, got {self._name}, which scores responses; name a model that generates"
        )

    def speaks_otherwise(self) -> str:
        """Return the fault of a teacher whose tokens differ from the student's; "" if no difference was found."""
        began = [origin(self._manifest, self._stage, slot) for slot in ("model", self._slot)]
        if len({type(one) for one in began}) > 1:  # the run makes only one of them; the job compares them
            return ""
        found = [self._tokens(one) for one in began]
        if None in found or found[0] == found[1]:
            return ""
        sizes = " and ".join(str(len(tokens or ())) for tokens in found)
        return (
            f"{self._slot}: must have the student's tokenizer, but {self._name} has a different one (vocabularies of "
            f"{sizes} tokens); name a model of the student's family"
        )

    def has_fewer(self) -> str:
        """Return the fault if a vocabulary has fewer than `top_k` tokens; "" if there are enough tokens."""
        asked = self._stage.params.get("top_k")
        slots = [slot for slot in ("model", self._slot) if slot in self._stage.inputs]
        sizes = [size for slot in slots if (size := self._size(slot))]
        if not isinstance(asked, int) or not sizes or asked <= min(sizes):
            return ""
        return f"top_k: must be at most {min(sizes)}, the size of the vocabulary, got {asked}; lower it"

    def is_the_student(self) -> Iterator[str]:
        """Yield a warning if teacher and student are the same model, since the student then learns nothing."""
        student, teacher = self._stage.inputs.get("model"), self._stage.inputs[self._slot]
        if student is None or student.source != teacher.source or self._slot != _SLOT:
            return
        told = (student.word, teacher.word) if student.source == "stage" else (student.digest, teacher.digest)
        if told[0] and told[0] == told[1]:
            yield f"{self._stage.name}: teacher {teacher.word} is the trained model, so the student learns nothing"

    def _size(self, slot: str) -> int | None:
        began = origin(self._manifest, self._stage, slot)
        if isinstance(began, StageManifest):
            made = _made(began)
            return made.vocabulary if made else None
        config, _ = stored_config(began, self._workspace, self._source, self._model)
        size = {**config, **(config.get("text_config") or {})}.get("vocab_size")
        return size if isinstance(size, int) else None

    def _tokens(self, began: InputRef | StageManifest) -> Mapping[str, Any] | None:
        """Return token → id, or None if unavailable; for a newly initialised model, the keys are its characters."""
        if isinstance(began, StageManifest):
            characters = began.params.get("characters")
            return dict.fromkeys(str(characters)) if characters else None
        word = word_of(began, self._model)
        if began.digest is None or (word is None and not self._workspace.blobs.has(began.digest)):
            return None
        with bytes_of(began):
            read = model_files(self._workspace, began, word, self._source.parent).read
            return _vocabulary(read(_TOKENIZER))


def _vocabulary(data: bytes | None) -> Mapping[str, Any] | None:
    try:
        found = json.loads(data or b"null")
        known, added = found["model"]["vocab"], found.get("added_tokens") or []
        tokens = known if isinstance(known, dict) else {token: at for at, (token, _) in enumerate(known)}
        return {**tokens, **{each["content"]: each["id"] for each in added}}
    except (ValueError, TypeError, KeyError):  # the job, which loads the tokenizer, reports the error
        return None
