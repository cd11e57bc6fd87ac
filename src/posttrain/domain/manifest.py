"""The immutable manifest, and the identities of jobs and of evaluators that are derived from it.

A manifest is a run.yaml in which every word has become a digest. Its own digest is the run's identity.

The identity of a stage's cached outputs and checkpoints is a digest of what decides its result, and of nothing else.
Where a job runs, how often it writes a checkpoint and what it may spend decide nothing, so work that was done under
another of these is the same work and can be gone on with.

An evaluator, which measured a suite, is one digest of code, settings and rewards, but not of the data, the model or the
seed. A channel's policy names the evaluators that may judge. The code's digest is part of it, so another version of
Posttrain is another evaluator.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, nearest
from posttrain.domain.gates import GateRule
from posttrain.domain.jobs import InputBlob
from posttrain.domain.kinds import BEST, METRICS, MODEL
from posttrain.domain.requests import image_digest, image_reference
from posttrain.domain.rewards import JUDGES, scored_slot
from posttrain.domain.runspec import Budget, Ordered, ReleaseSpec, RunRuntime
from posttrain.domain.validation import Frozen

MANIFEST_SCHEMA: Final = 1
NAMED: Final = "named"  # in an input's meta: the word it was named by, which may mean another model by now
_UNDECIDING = frozenset({"placement"})
_UNDECIDING_RUNTIME = frozenset(
    {"call_timeout", "checkpoint_every", "object_store", "ray_address", "stall_after", "start_timeout"}
)
_UNDECIDING_META = frozenset({"source", NAMED})  # what errors call a file, and a person a model
SUITES: Final = "suites."  # how slots of data that is measured begin
_OF_THE_RUN_FILE = ("data", "reward")  # settings that are words of the run file; what they mean is in the inputs


class InputRef(Frozen):
    """Where a stage's input comes from: an asset (pinned by digest), another stage, or a channel (bound when the
    stage starts).
    """

    source: Literal["asset", "stage", "channel"]
    name: str  # dataset:sort-train@1 | sft | prod
    digest: str | None = None  # asset only
    form: Literal["file", "tree"] = "tree"
    output: str | None = None  # stage only: which output
    meta: dict[str, Any] = Field(
        default_factory=dict
    )  # a reward's entry point: it decides results, so it is part of the digest

    @property
    def word(self) -> str:
        """How a run file names it as a model: `sft`, `grpo/best`."""
        return f"{self.name}/{BEST}" if self.source == "stage" and self.output == BEST else self.name


def model_output(word: str) -> tuple[str, str]:
    """Stage and output that a word names: `grpo` is its last model, `grpo/best` its best one by the probe.

    Raises:
        InputError: it is neither a stage nor STAGE/best.
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
    trainer: str  # "control" for gate and release, which need no process, and for what waits
    inputs: dict[str, InputRef]
    params: dict[str, Any]
    outputs: dict[str, str] = Field(default_factory=dict)  # name → file | tree

    @property
    def measures(self) -> bool:
        """Whether it leaves what it measured of a model, item by item."""
        return METRICS in self.outputs and MODEL in self.inputs

    def upstream(self) -> set[str]:
        """Names of the stages this one waits for."""
        return {ref.name for ref in self.inputs.values() if ref.source == "stage"} | set(self.after)


class Manifest(Frozen):
    """Everything that decides a run's result, frozen before anything launches."""

    manifest: Literal[1] = MANIFEST_SCHEMA
    name: str
    owner: str
    seed: int
    stages: tuple[StageManifest, ...]  # topological order
    gates: tuple[GateRule, ...]
    budget: Budget
    release: ReleaseSpec | None
    code: dict[str, str]  # trainer → digest of the sources and engine versions that decide results
    policy: str | None = None  # digest of the channel's policy, whose gates are among `gates`; None: it had none
    runtime: RunRuntime | None = None  # None: the file says nothing for all stages
    image: Annotated[str, AfterValidator(image_reference)] | None = None  # that jobs run in (`image_of`); None: in none

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `Manifest.model_validate` is its inverse. What came later is told only where it is used."""
        unsaid = {name for name in ("policy", "runtime", "image") if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=unsaid)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return digest_json(self.to_json())

    def unpinned(self) -> dict[str, Any] | None:
        """Plain JSON with the words by which models were named that move (`channel:prod`); None: there are none."""
        if not any(NAMED in ref.meta for _, _, ref in self.assets()):
            return None
        stages = [stage.model_dump(mode="json") for stage in self.stages]
        for stage in stages:
            moving = {slot: ref for slot, ref in stage["inputs"].items() if NAMED in ref["meta"]}
            stage["inputs"] |= {slot: {"named": ref["meta"][NAMED]} for slot, ref in moving.items()}
        return {**self.to_json(), "stages": stages}

    def stage(self, name: str) -> StageManifest:
        """A stage by name.

        Raises:
            InputError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise InputError(f"manifest has no stage {name!r}; it has {', '.join(s.name for s in self.stages)}")

    def image_of(self, stage: StageManifest) -> str | None:
        """The image that a stage's jobs run in. What measures a model runs in none: whoever made the image would write
        what gates judge by.
        """
        return None if METRICS in stage.outputs else self.image

    def assets(self) -> Iterator[tuple[str, str, InputRef]]:
        """`(stage, slot, ref)` of every pinned asset."""
        for stage in self.stages:
            for slot, ref in stage.inputs.items():
                if ref.source == "asset":
                    yield stage.name, slot, ref


def _circle(waiting: Mapping[str, set[str]]) -> list[str]:
    """Of stages that all wait for another of them: some that wait for the next, and the last for the first."""
    path = [next(iter(waiting))]
    while (upstream := min(waiting[path[-1]] & waiting.keys())) not in path:
        path.append(upstream)
    return [*path[path.index(upstream) :], upstream]


def topological(edges: Mapping[str, set[str]]) -> list[str]:
    """Stage names so that each comes after what it waits for; ties keep the order of writing.

    Raises:
        InputError: a cycle.
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
    """Read a locked manifest back.

    Raises:
        InputError: an unknown external parameter, or another schema.
    """
    if (schema := value.get("manifest")) != 1:
        raise InputError(f"manifest: schema must be 1, got {schema!r}; lock the run again with this version")
    return Manifest.model_validate(value)


def job_identity(
    kind: str, params: Mapping[str, Any], seed: int, inputs: Mapping[str, InputBlob], image: str | None = None
) -> dict[str, Any]:
    """A JSON map that is equal for two jobs exactly when they must come to the same result under the same code.

    A parameter counts unless it is known to decide nothing; names of stages, slots' assets and files never do, nor what
    an image is called.
    """
    return {
        "kind": kind,
        "params": deciding(params),
        "seed": str(seed),  # a seed may be more than a number of JSON can hold
        "inputs": {slot: [blob.digest, deciding_meta(blob.meta)] for slot, blob in inputs.items()},
        **({"image": image_digest(image)} if image else {}),
    }


def deciding(params: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's parameters without those that decide nothing."""
    kept = {name: value for name, value in params.items() if name not in _UNDECIDING}
    if isinstance(kept.get("runtime"), Mapping):
        kept["runtime"] = {k: v for k, v in kept["runtime"].items() if k not in _UNDECIDING_RUNTIME}
    return kept


def deciding_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of an input beside its bytes, without what decides nothing."""
    return {key: value for key, value in meta.items() if key not in _UNDECIDING_META}


def measured_suites(stage: StageManifest) -> Iterator[tuple[str, InputRef]]:
    """Name and data of every suite that a stage measures; of an installed kind, none."""
    for slot, ref in stage.inputs.items():
        if slot.startswith(SUITES) and stage.measures:
            yield slot.removeprefix(SUITES), ref


def suite_evaluator(stage: StageManifest, code: Mapping[str, str], suite: str) -> str:
    """The digest of what measures one suite of a stage.

    Args:
        code: of the manifest.
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
    named_code = (stage.trainer, f"kind:{stage.kind}")
    return digest_json({**told, "code": {name: code[name] for name in named_code if name in code}})
