"""The kinds of stages: Posttrain's own, and those of installed packages (entry points `posttrain.kinds`).

Everything that depends on a stage's kind is a property of its `StageKind`: the driver, the outputs, whether the stage
measures. No other code compares a stage's kind with a name; a test checks the sources.

The contract of a stage is declared before any job runs. An evaluation also declares the range of one item's value for
each metric. A gate's limit depends on that range, so the producer of the metric declares it; it is never inferred from
the data.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from posttrain.domain.adapters import AdapterSize
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError
from posttrain.domain.placement import LEAST_STALL, Placement, Pool
from posttrain.domain.plugins import Plugin, find_plugin, plugin_names
from posttrain.domain.roles import RoleSpec, in_pools, role_named

MODEL: Final = "model"  # an output: the last model
BEST: Final = "best"  # an output: the best model according to the stage's probe
METRICS: Final = "metrics"  # an output: the measurements of an evaluation, item by item
REPORT: Final = "report"  # an output: the report of a gate
UNCHANGED: Final = "unchanged"  # a metric of a stage: no step updated weights
FORMS = ("file", "tree")
_FORM_OF = {MODEL: "tree", BEST: "tree", METRICS: "file"}
HARNESS: Final = "harness"  # a kind of assets: another program that measures models (`domain.harnesses`)
_TAKEN = ("model", "dataset", "reward", "recipe", HARNESS)
KINDS: Final = "posttrain.kinds"  # the group of entry points
CONTROL: Final = "control"  # the "trainer" of gate, release and wait stages
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
PATH: Final = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_STEPS = "lower steps or batch_size of {}"
_SAMPLES = "lower steps, prompts_per_step or max_new_tokens of {}"
_FLOW = "lower steps or tokens_per_step of {}"
_BATCHES = "lower runtime.micro_batch_tokens"
# a document is a row; an assistant turn of a conversation; or a labelled completion, of which a preference pair has two
DocumentUnit = Literal["row", "turn", "label"]


@dataclass(frozen=True, slots=True)
class ItemRange:
    """The least and the greatest value of one item: `ItemRange(1, 64)` for the tokens of a response of at most 64.

    Raises:
        ValueError: an end is not finite, `low` exceeds `high`, or a binary range has ends other than 0 and 1.
    """

    low: float  # in units of the metric
    high: float
    binary: bool = False  # values are 0 or 1 only

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"range of a metric must be two finite numbers in order, got {self.low} to {self.high}")
        if self.binary and (self.low, self.high) != (0.0, 1.0):
            raise ValueError(f"range of a binary metric must be 0 to 1, got {self.low} to {self.high}")

    @property
    def span(self) -> float:
        """The maximum distance between two values: the difference of two models' values is in [-span, span]."""
        return self.high - self.low


RATE = ItemRange(0.0, 1.0, binary=True)  # an item is right or wrong


SHARE = ItemRange(0.0, 1.0)  # a share of an item's samples


ENOUGH_SEEDS = 3  # required seeds of each setting: a third seed may contradict the first two


_COMPARED = ("accuracy", "sampled_accuracy")


QUANTITIES = (*_COMPARED, "response_tokens", "truncated", "reward", "sampled_reward", "pass@1")  # pass@k: any k


def compares(metric: str) -> bool:
    """Return whether a metric of an evaluation compares responses with the rows' answers."""
    quantity = metric.rpartition("/")[2]
    return quantity in _COMPARED or quantity.startswith("pass@")


def measurable(metric: str) -> bool:
    """Return whether an evaluation can produce a metric of this name: `heldout/accuracy`, `heldout/pass@8`."""
    quantity = metric.rpartition("/")[2]
    return quantity in QUANTITIES or (quantity.startswith("pass@") and quantity[5:].isdecimal())


def better(metric: str) -> Literal["higher", "lower"] | None:
    """Return the direction in which a metric of an evaluation improves; None: undefined, for example for lengths."""
    quantity = metric.partition("/")[2] or metric
    if quantity == "truncated":
        return "lower"
    return None if quantity == "response_tokens" else "higher"


def item_id(text: str, answer: str | None) -> str:
    """Return the id of an item of a suite: equal rows of any data sets are one item.

    Args:
        text: the item's prompt as one text.
        answer: the reference answer; None: a reward scores the item.
    """
    return digest_json({"prompt": text, "answer": answer})


def few_seeds(seeds: int) -> tuple[str, ...]:
    """Return a warning if each setting has too few seeds to distinguish settings; empty if there are enough."""
    if seeds >= ENOUGH_SEEDS:
        return ()
    return (
        f"only {seeds} seed{'s' * (seeds != 1)} of each setting {'is' if seeds == 1 else 'are'} compared: on a steep "
        f"learning curve, the seed alone can change a score more than the setting does; compare {ENOUGH_SEEDS} or more "
        f"(posttrain sweep --seeds {ENOUGH_SEEDS})",
    )


@dataclass(frozen=True, slots=True)
class Load:
    """The values of a stage's configuration that determine its memory use."""

    kind: str
    roles: tuple[RoleSpec, ...]
    placement: Placement
    device: str  # cpu | cuda | auto
    dtype: str  # float32 | bfloat16 | auto
    micro_batch_tokens: int | None  # None: chosen (`planner.sizes`)
    activation_checkpointing: bool | None = None  # None: chosen
    shard_frozen: bool | None = None  # None: chosen
    sequence_parallel: int = 1
    documents: int = 0  # documents of one optimiser step; 0: unknown, so micro-batches count as full
    rows: int = 0  # maximum number of responses that one rank decodes together
    response_tokens: int = 0
    ray_address: str | None = None
    samples: int = 0  # responses of one step, or of one batch of an evaluation
    kv_cache: int | None = None  # bytes on one rollout rank; None: chosen
    object_store: int | None = None  # bytes; None: chosen
    reward_timeout: float | None = None  # seconds; None: chosen
    start_timeout: float | None = None  # seconds; None: chosen
    call_timeout: float | None = None  # seconds; None: chosen
    scored: bool = False  # whether a reward function scores the responses
    lag: int = 0  # steps by which sampling may be ahead of training
    correction: str = ""  # correction for samples of another policy or engine: the policy computes each response again
    streams: bool = False  # gradients are summed while other groups of the step are sampled
    adapter: AdapterSize | None = None  # trained instead of the whole models

    def role(self, name: str) -> RoleSpec | None:
        """Return the role of this name; None: the stage has no such role."""
        return role_named(self.roles, name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all roles."""
        return tuple(role.name for role in self.roles)

    @property
    def trained(self) -> tuple[str, ...]:
        """The roles that learn."""
        return tuple(role.name for role in self.roles if role.trained)

    @property
    def pools(self) -> dict[str, Pool]:
        """The pools of the roles that have a model, here or on another server."""
        return self.placement.pools(in_pools(self.roles))

    def decoded(self, ranks: int) -> int:
        """Return how many responses each of `ranks` ranks decodes together: its share of a step, at most `rows`."""
        return min(self.rows, -(-(self.samples or self.rows) // ranks))


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """The requirements of a stage on a data set's rows; a plan rejects the same rows that the job would reject."""

    pairs: bool = False  # rows are preference pairs: prompt, chosen, rejected
    learn: bool = False  # rows are demonstrations; false: prompts
    labels: bool = False  # with learn: rows are labelled completions, or preference pairs, which are two of them
    max_length: int | None = None  # tokens of a demonstration; None: the model's context
    reserve: int = 0  # tokens of the context reserved for a response
    answer: bool = False  # every row needs a reference answer
    distinct: bool = False  # rows are items that a gate counts: one prompt has one answer
    whole: bool = False  # with distinct: one prompt has one row, since a reward reads all columns
    first: int | None = None  # the number of rows used; None: all


@dataclass(frozen=True, slots=True)
class Length:
    """How many documents a training stage takes from its data."""

    slot: str  # the data set
    field: str  # batch_size | prompts_per_step
    per_step: int  # documents of a step
    epochs: float | None = None  # requested passes; the plan converts them to steps and checks again
    unit: DocumentUnit = "row"  # what is one document


@dataclass(frozen=True, slots=True)
class StageContract:
    """The parameters, inputs and outputs of a stage, and its requirements."""

    params: Mapping[str, Any]  # normalised: defaults filled in
    inputs: Mapping[str, tuple[str, str]]  # slot → (asset kind, name in run.yaml): "data" → ("dataset", "train")
    outputs: Mapping[str, str]  # name → form: file | tree
    metrics: Mapping[str, ItemRange | None] = field(default_factory=dict)  # metric → range; None: gates cannot use it
    work: Mapping[str, float] = field(default_factory=dict)  # for the planner: steps, documents, max_new_tokens …
    rows: Mapping[str, RowNeeds] = field(default_factory=dict)  # data set slot → requirements of its rows
    load: Load | None = None  # its memory and devices; None: one process without training
    length: Length | None = None  # for a training stage


def refuse_malformed(contract: StageContract, told: str) -> None:
    """Check the invariants of a contract made by third-party code.

    Args:
        told: the owner of the contract in errors.

    Raises:
        InputError: the value is not a contract, its parameters are not JSON, or an input or output is invalid.
    """
    if not isinstance(contract, StageContract):
        raise InputError(f"{told}: must return a StageContract, got {type(contract).__name__}")
    try:
        digest_json(dict(contract.params))
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{told}: parameters must be JSON: {error}") from error
    runtime = contract.params.get("runtime", {})
    threads = runtime.get("threads", 1) if isinstance(runtime, Mapping) else None
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InputError(f"{told}: runtime must be a map whose threads are at least 1, got {runtime!r:.80}")
    limit = runtime.get("stall_after")
    if limit is not None and (not isinstance(limit, int | float) or isinstance(limit, bool) or limit < LEAST_STALL):
        raise InputError(
            f"{told}: runtime.stall_after must be at least {LEAST_STALL:g} seconds, as a number, got {limit!r:.80}"
        )
    if "placement" in contract.params and contract.load is None:
        raise InputError(
            f"{told}: a kind with the parameter placement must have a load; add a load, or rename the parameter"
        )
    for slot, (kind, _) in contract.inputs.items():
        if kind not in _TAKEN:
            raise InputError(f"{told}: input {slot!r} must be one of {', '.join(_TAKEN)}, got {kind!r}")
    if not contract.outputs:
        raise InputError(f"{told}: must have at least one output, got none")
    for name, form in contract.outputs.items():
        wanted = _FORM_OF.get(name)
        if form not in FORMS or wanted not in (None, form) or name == REPORT:
            words = "is for gates only" if name == REPORT else f"must be a {wanted or ' or '.join(FORMS)}, got {form!r}"
            raise InputError(f"{told}: output {name!r} {words}")
    if contract.metrics and METRICS not in contract.outputs:
        raise InputError(
            f"{told}: metrics require the output {METRICS!r}, which the contract does not declare; add the output"
        )


class Driver(StrEnum):
    """The component that drives a stage."""

    JOB = "job"  # a process that an executor launches
    CONTROL = "control"  # the reconciler itself
    WAIT = "wait"  # no process: the stage ends at a time, at a signal from a person, or after both


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """An algorithm of the engine: `AlgorithmSpec("words.config:WordsConfig", "words.algorithm:Words")`.

    Both have the form `module:Name`. The module of `config` is imported where runs are planned, so it must not need
    torch; the module of `algorithm` is imported in the job.
    """

    config: str  # the class of its parameters: a `TrainingConfig` of `posttrain.engine.config`
    algorithm: str  # the algorithm's class, which implements a protocol of `posttrain.engine.recipes.algorithm`


@dataclass(frozen=True, slots=True)
class StageKind:
    """A kind of stage: `StageKind("words", contract, Driver.JOB, {}, {"metrics": "file"}, module="words.job")`.

    A kind of an installed package requires either `algorithm`, or `contract` and `module`; its `driver` is a job.
    """

    name: str
    # parameters as written → the stage's contract; None: its trainer parses them itself
    contract: Callable[[Mapping[str, Any]], StageContract] | None = None
    driver: Driver = Driver.JOB
    outputs: Mapping[str, str] = field(default_factory=dict)  # outputs of every stage of the kind: name → file | tree
    module: str = ""  # the module of the job, which runs as `python -m MODULE ATTEMPT_DIR`
    from_nothing: bool = False  # makes a model from its parameters alone, without reporting progress
    scores: bool = False  # its model scores responses and does not generate any
    ships: bool = False  # its stages move a channel
    sizes: Mapping[str, float] = field(default_factory=dict)  # column → share of it that is read with the prompt
    cheaper: str = "make {} smaller"  # advice for a lower cost
    fitting: str = "make it smaller"  # advice for less memory
    algorithm: AlgorithmSpec | None = None  # the algorithm of the engine's own job

    @property
    def measures(self) -> bool:
        """Whether stages of this kind output measurements of items."""
        return METRICS in self.outputs

    @property
    def judges(self) -> bool:
        """Whether stages of this kind output a gate report; false for every installed kind."""
        return self.driver is Driver.CONTROL and REPORT in self.outputs


_MODEL, _STAGE = {MODEL: "tree"}, "posttrain.jobs.stage"


_PAIRS: Mapping[str, float] = {"chosen": 0.5, "rejected": 0.5}


def algorithm_kind(name: str, config: str, algorithm: str, **more: Any) -> StageKind:
    """Return a kind of training: `algorithm_kind("words", "words.config:WordsConfig", "words.algorithm:Words")`.

    Args:
        config, algorithm: see `AlgorithmSpec`.
        more: other fields of `StageKind`.
    """
    spec = AlgorithmSpec(config, algorithm)
    words = {"cheaper": _SAMPLES, "fitting": _BATCHES, "outputs": _MODEL, "module": _STAGE, **more}
    return StageKind(name, algorithm=spec, **words)


def _own(name: str, config: str, algorithm: str, **more: Any) -> StageKind:
    room = "posttrain.engine"
    return algorithm_kind(name, f"{room}.config.{config}", f"{room}.recipes.{algorithm}", **more)


def _from_rows(name: str, config: str, algorithm: str, **more: Any) -> StageKind:
    return _own(name, f"training:{config}", algorithm, **{"cheaper": _STEPS, **more})


# every algorithm has a row here, a configuration, and a file in `engine.recipes`
_ALGORITHMS = (
    _from_rows("sft", "SFTConfig", "sft:SFT", sizes={"completion": 1.0}),
    _from_rows("reward_model", "RewardModelConfig", "reward_model:RewardModel", scores=True, sizes=_PAIRS),
    _from_rows("dpo", "DPOConfig", "dpo:DPO", sizes=_PAIRS),
    _from_rows("orpo", "ORPOConfig", "orpo:ORPO", sizes=_PAIRS),
    _from_rows("simpo", "SimPOConfig", "simpo:SimPO", sizes=_PAIRS),
    _from_rows("kto", "KTOConfig", "kto:KTO", sizes={"completion": 1.0}),
    _own("grpo", "policy_gradient:GRPOConfig", "grpo:GRPO"),
    _own("dr_grpo", "policy_gradient:GroupConfig", "dr_grpo:DrGRPO"),
    _own("rloo", "policy_gradient:GroupConfig", "rloo:RLOO"),
    _own("dapo", "policy_gradient:DAPOConfig", "dapo:DAPO"),
    _own("gspo", "policy_gradient:GSPOConfig", "gspo:GSPO"),
    _own("cispo", "policy_gradient:CISPOConfig", "cispo:CISPO"),
    _own("reinforce_plus_plus", "policy_gradient:ReinforcePlusPlusConfig", "reinforce_plus_plus:ReinforcePlusPlus"),
    _own("ppo", "policy_gradient:PPOConfig", "ppo:PPO"),
    _own("pf_ppo", "policy_gradient:PFPPOConfig", "pf_ppo:PFPPO"),
    _own("vapo", "policy_gradient:VAPOConfig", "vapo:VAPO"),
    _own("distill", "sampling:DistillConfig", "distill:Distill"),
    _own("dataflow", "sampling:DataflowConfig", "dataflow:Dataflow", cheaper=_FLOW),
)  # fmt: skip


GATE: Final = StageKind("gate", driver=Driver.CONTROL, outputs={REPORT: "file"})


RELEASE: Final = StageKind("release", driver=Driver.CONTROL, ships=True)


WAIT: Final = StageKind("wait", driver=Driver.WAIT)  # its parameters: `domain.waits`


_OWN = (
    *_ALGORITHMS,
    StageKind(
        name="evaluate",
        outputs={METRICS: "file", "items": "file"},
        module=_STAGE,
        cheaper="give {} fewer items or samples",
        fitting="lower the suites' max_new_tokens",
    ),
    StageKind(
        name="init_model",
        outputs=_MODEL,
        module=_STAGE,
        from_nothing=True,
        fitting="make the model smaller",
    ),
    WAIT,
    GATE,
    RELEASE,
)


OWN: Final[Mapping[str, StageKind]] = {kind.name: kind for kind in _OWN}


WRITTEN: Final = tuple(kind.name for kind in _OWN if kind.driver is not Driver.CONTROL)  # that a run file may name


ADDED: Final = tuple(kind.name for kind in _OWN if kind.driver is Driver.CONTROL)  # kinds that a release adds


@dataclass(frozen=True, slots=True)
class InstalledKind:
    """A kind of an installed package, and the entry point that adds it."""

    kind: StageKind
    plugin: Plugin

    def check(self, params: Mapping[str, Any]) -> StageContract:
        """Return the package's contract of a stage.

        Raises:
            InputError: the package rejects the parameters.
            Exception: any other error of the package's code.
        """
        assert self.kind.contract is not None
        return self.kind.contract(params)

    def code_digest(self) -> str:
        """Return the digest of the package's sources, version and requirements, which is part of cache keys."""
        spec = self.kind.algorithm
        parts = (spec.config, spec.algorithm) if spec else (self.kind.module,)
        return self.plugin.code_digest(*dict.fromkeys(part.partition(":")[0] for part in parts))


def kind_of(name: str) -> StageKind:
    """Return the kind of an existing stage.

    If the kind's package is missing or broken, the result has defaults only, so every old run can be shown.
    """
    try:
        found = OWN.get(name) or installed_kind(name)
    except InputError:
        found = None
    return found.kind if isinstance(found, InstalledKind) else found or StageKind(name)


def installed_kind(name: str) -> InstalledKind | None:
    """Return the kind with this name in an installed package; None: the kind is Posttrain's own, or unknown.

    Raises:
        InputError: the package of the kind is broken, or two packages have the kind.
    """
    if name in OWN:
        return None
    plugin = find_plugin(KINDS, name)
    return None if plugin is None else _loaded(plugin)


def kind_names() -> list[str]:
    """Return every kind that a run file may name, Posttrain's own first."""
    return [*WRITTEN, *(name for name in plugin_names(KINDS) if name not in OWN)]


@functools.cache
def _loaded(plugin: Plugin) -> InstalledKind:
    kind = plugin.load()
    if not isinstance(kind, StageKind):
        raise InputError(f"{plugin}: must name a StageKind, got {kind!r:.80}")
    if kind.name != plugin.name:
        raise InputError(f"{plugin}: its kind must have the entry point's name, got {kind.name!r}")
    if kind.driver is not Driver.JOB:
        raise InputError(f"{plugin}: driver must be {Driver.JOB}, got {kind.driver}: only a job runs a package's code")
    wrong = {
        "not set `ships` (its stages must not move a channel)": kind.ships,
        "not set `from_nothing`": kind.from_nothing,
        "have an algorithm, or a contract and the module of a job": not (
            PATH.match(kind.algorithm.config) and PATH.match(kind.algorithm.algorithm) and kind.module == _STAGE
            if isinstance(kind.algorithm, AlgorithmSpec)
            else callable(kind.contract) and _MODULE.match(kind.module)
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise InputError(f"{plugin}: an installed kind must {what}, got {kind!r:.120}")
    return InstalledKind(kind, plugin)
