"""The immutable manifest, and the identities of jobs and of evaluators that are derived from it.

A manifest is a run.yaml with every name resolved to a digest. The manifest's digest is the run's identity.

The identity of a stage's cached outputs and checkpoints is a digest of exactly the values that determine its result.
Placement, checkpoint frequency and budget do not affect the result, so work under other values of these settings is the
same work and can be continued.

An evaluator, which measures a suite, is identified by one digest of code, settings and rewards, but not of the data,
the model or the seed. A channel's policy names the allowed evaluators. A different version of Posttrain is a different
evaluator, since the digest of its code differs.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from posttrain.domain.canonical import digest_json
from posttrain.domain.engines import engines_in
from posttrain.domain.errors import InputError, nearest
from posttrain.domain.gates import GateRule
from posttrain.domain.jobs import InputBlob
from posttrain.domain.jobspec import image_digest, image_reference
from posttrain.domain.kinds import BEST, METRICS, MODEL
from posttrain.domain.rewards import JUDGES, scored_slot
from posttrain.domain.runspec import Budget, Ordered, ReleaseSpec, RunRuntime
from posttrain.domain.validation import Frozen

MANIFEST_SCHEMA: Final = 1
NAMED: Final = "named"  # in an input's meta: its name in the run file, which may denote another model now
_UNDECIDING = frozenset({"placement"})
_UNDECIDING_RUNTIME = frozenset(
    {"call_timeout", "checkpoint_every", "object_store", "ray_address", "shard_frozen", "stall_after", "start_timeout"}
)
_UNDECIDING_META = frozenset({"source", NAMED})  # names of files for errors, and of models for display
SUITES: Final = "suites."  # prefix of the slots of measured data
KIND: Final = "kind:"  # prefix of an installed kind's name in the `code` of a manifest
_OF_THE_RUN_FILE = ("data", "reward")  # settings that are names in the run file; the inputs contain their digests


class InputRef(Frozen):
    """The source of a stage's input.

    It is an asset (pinned by digest), another stage, or a channel (bound when the stage starts).
    """

    source: Literal["asset", "stage", "channel"]
    name: str  # dataset:sort-train@1 | sft | prod
    digest: str | None = None  # asset only
    form: Literal["file", "tree"] = "tree"
    output: str | None = None  # stage only: which output
    meta: dict[str, Any] = Field(
        default_factory=dict
    )  # a reward's entry point: it affects results, so it is part of the digest

    @property
    def word(self) -> str:
        """The name of the model in a run file: `sft`, `grpo/best`."""
        return f"{self.name}/{BEST}" if self.source == "stage" and self.output == BEST else self.name


def model_output(word: str) -> tuple[str, str]:
    """Return stage and output of a model's name: `grpo` is the stage's last model, `grpo/best` the best by the probe.

    Raises:
        InputError: the name is neither a stage nor STAGE/best.
    """
    stage, mark, output = word.partition("/")
    if mark and output != BEST:
        meant = nearest(word, (stage, f"{stage}/{BEST}"))
        raise InputError(f"a stage's model must be named STAGE or STAGE/{BEST}, got {word!r}{meant}")
    return stage, BEST if mark else MODEL


class StageManifest(Ordered):
    """One stage with normalised parameters (defaults filled in) and resolved inputs."""

    name: str
    kind: str  # sft | grpo | evaluate | gate …: a name of `domain.kinds`
    trainer: str  # "control" for gate, release and wait stages, which need no process
    inputs: dict[str, InputRef]
    params: dict[str, Any]
    outputs: dict[str, str] = Field(default_factory=dict)  # name → file | tree

    @property
    def measures(self) -> bool:
        """Whether the stage outputs measurements of a model, item by item."""
        return METRICS in self.outputs and MODEL in self.inputs

    def upstream(self) -> set[str]:
        """Return the names of the stages that this stage waits for."""
        return {ref.name for ref in self.inputs.values() if ref.source == "stage"} | set(self.after)


class Manifest(Frozen):
    """Everything that decides a run's result, fixed before the first job is launched."""

    manifest: Literal[1] = MANIFEST_SCHEMA
    name: str
    owner: str
    seed: int
    stages: tuple[StageManifest, ...]  # topological order
    gates: tuple[GateRule, ...]
    budget: Budget
    release: ReleaseSpec | None
    code: dict[str, str]  # trainer, kind or engine → digest of the sources and engine versions that affect results
    policy: str | None = None  # digest of the channel's policy, whose gates are in `gates`; None: no policy
    runtime: RunRuntime | None = None  # None: not set in the file
    image: Annotated[str, AfterValidator(image_reference)] | None = None  # of the jobs (`image_of`); None: no container

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; `Manifest.model_validate` is the inverse. Newer fields are omitted if unset."""
        unsaid = {name for name in ("policy", "runtime", "image") if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=unsaid)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return digest_json(self.to_json())

    def unpinned(self) -> dict[str, Any] | None:
        """Return plain JSON with names of moving models (`channel:prod`) in place of digests; None: no such names."""
        if not any(NAMED in ref.meta for _, _, ref in self.assets()):
            return None
        stages = [stage.model_dump(mode="json") for stage in self.stages]
        for stage in stages:
            moving = {slot: ref for slot, ref in stage["inputs"].items() if NAMED in ref["meta"]}
            stage["inputs"] |= {slot: {"named": ref["meta"][NAMED]} for slot, ref in moving.items()}
        return {**self.to_json(), "stages": stages}

    def stage(self, name: str) -> StageManifest:
        """Return a stage by name.

        Raises:
            InputError: there is no such stage.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise InputError(f"manifest has no stage {name!r}; it has {', '.join(s.name for s in self.stages)}")

    def image_of(self, stage: StageManifest) -> str | None:
        """Return the image of a stage's jobs.

        Stages that measure a model use no image, since the image's author could otherwise write the evidence of gates.
        """
        return None if METRICS in stage.outputs else self.image

    def assets(self) -> Iterator[tuple[str, str, InputRef]]:
        """Yield `(stage, slot, ref)` of every pinned asset."""
        for stage in self.stages:
            for slot, ref in stage.inputs.items():
                if ref.source == "asset":
                    yield stage.name, slot, ref


def _circle(waiting: Mapping[str, set[str]]) -> list[str]:
    """Return a cycle of waiting stages: each waits for the next one, and the last for the first."""
    path = [next(iter(waiting))]
    while (upstream := min(waiting[path[-1]] & waiting.keys())) not in path:
        path.append(upstream)
    return [*path[path.index(upstream) :], upstream]


def topological(edges: Mapping[str, set[str]]) -> list[str]:
    """Return stage names, each after its upstream stages; ties retain the written order.

    Raises:
        InputError: the stages form a cycle.
    """
    order: list[str] = []
    waiting = dict(edges)
    while waiting:
        free = [name for name, upstream in waiting.items() if not (upstream & waiting.keys())]
        if not free:
            raise InputError(f"stages: must not wait for each other in a circle, got {' → '.join(_circle(waiting))}")
        order.append(free[0])
        del waiting[free[0]]
    return order


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """Return the manifest in a lock file.

    Raises:
        InputError: an unknown external parameter, or a different schema.
    """
    if (schema := value.get("manifest")) != 1:
        raise InputError(f"manifest: schema must be 1, got {schema!r}; lock the run again with this version")
    return Manifest.model_validate(value)


def job_identity(
    kind: str, params: Mapping[str, Any], seed: int, inputs: Mapping[str, InputBlob], image: str | None = None
) -> dict[str, Any]:
    """Return a JSON map that is equal for two jobs exactly when they must have the same result under the same code.

    A parameter counts unless it is known not to affect the result; names of stages, assets, files and images never
    count.
    """
    return {
        "kind": kind,
        "params": deciding(params),
        "seed": str(seed),  # a seed may exceed the integers of JSON
        "inputs": {slot: [blob.digest, deciding_meta(blob.meta)] for slot, blob in inputs.items()},
        **({"image": image_digest(image)} if image else {}),
    }


def deciding(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's parameters without those that do not affect its result."""
    kept = {name: value for name, value in params.items() if name not in _UNDECIDING}
    if isinstance(kept.get("runtime"), Mapping):
        kept["runtime"] = {k: v for k, v in kept["runtime"].items() if k not in _UNDECIDING_RUNTIME}
    return kept


def deciding_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input's metadata without the fields that do not affect results."""
    return {key: value for key, value in meta.items() if key not in _UNDECIDING_META}


def measured_suites(stage: StageManifest) -> Iterator[tuple[str, InputRef]]:
    """Yield name and data of every suite that a stage measures."""
    for slot, ref in stage.inputs.items():
        if slot.startswith(SUITES) and stage.measures:
            yield slot.removeprefix(SUITES), ref


def names_of(stage: StageManifest, code: Mapping[str, str]) -> list[str]:
    """Return the names in the `code` of a manifest that decide a stage's result."""
    added = (f"{KIND}{stage.kind}", *engines_in(stage.params))
    return [stage.trainer, *(name for name in added if name in code)]


def deciding_code(manifest: Manifest, stage: StageManifest) -> str | list[str]:
    """Return the code part of a stage's cache key."""
    found = list(named_code(manifest, stage).values())
    return found[0] if len(found) == 1 else found


def named_code(manifest: Manifest, stage: StageManifest) -> dict[str, str]:
    """Return the digests of the code that decides a stage's outputs, by its name in the manifest."""
    return {name: manifest.code[name] for name in names_of(stage, manifest.code)}


def suite_evaluator(stage: StageManifest, code: Mapping[str, str], suite: str) -> str:
    """Return the digest of the evaluator of one suite of a stage.

    Args:
        code: the `code` of the manifest.
    """
    params = deciding(stage.params)
    suites = params.pop("suites", {})
    settings = dict(suites.get(suite, {})) if isinstance(suites, Mapping) else {}
    named = {name: settings.pop(name, None) for name in _OF_THE_RUN_FILE}
    if isinstance(named["reward"], Mapping):  # several, with weights
        settings["reward"] = dict(named["reward"])
    rewards = {
        slot: [ref.digest, deciding_meta(ref.meta)]
        for slot, ref in stage.inputs.items()
        if slot.startswith(JUDGES) and scored_slot(slot.partition("/")[0]) == f"{SUITES}{suite}"
    }
    told: dict[str, Any] = {"kind": stage.kind, "params": params, "suite": settings, "rewards": rewards}
    return digest_json({**told, "code": {name: code[name] for name in names_of(stage, code) if name in code}})
