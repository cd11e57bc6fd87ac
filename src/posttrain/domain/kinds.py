"""The kinds of stages: Posttrain's own, and those of installed packages (entry points `posttrain.kinds`).

Everything that depends on what a stage is asks its kind here, by a property: who drives it, what it leaves, whether it
measures. Nothing else compares a stage's kind with a word; a test reads the sources for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from posttrain.domain.contracts import METRICS, MODEL, REPORT, StageContract
from posttrain.domain.errors import InputError
from posttrain.domain.plugins import Plugin, find_plugin, plugin_names

KINDS: Final = "posttrain.kinds"  # the group of entry points
CONTROL: Final = "control"  # the "trainer" of stages that need no process, and of those that wait
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_STEPS = "lower steps or batch_size of {}"
_SAMPLES = "lower steps, prompts_per_step or max_new_tokens of {}"
_FLOW = "lower steps or tokens_per_step of {}"
_BATCHES = "lower runtime.micro_batch_tokens"


class Driver(StrEnum):
    """Who brings a stage to its end."""

    JOB = "job"  # a process that an executor launches
    CONTROL = "control"  # the reconciler itself, between two looks
    WAIT = "wait"  # nobody: a time that comes, or a person who sends its signal


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """What the engine trains by: `AlgorithmSpec("words.config:WordsConfig", "words.algorithm:Words")`.

    Both are `module:Name`. The first is imported where runs are planned, so it needs no torch; the second in the job.
    """

    config: str  # its parameters: a `TrainingConfig` of `posttrain.engine.config`
    algorithm: str  # made of them: an algorithm of `posttrain.engine.recipes.algorithm`


@dataclass(frozen=True, slots=True)
class StageKind:
    """What a kind of stage is: `StageKind("words", contract, Driver.JOB, {}, {"metrics": "file"}, module="words.job")`.

    Of an installed package's kind either `algorithm` or `contract` and `module` are needed, and `driver` is a job.
    """

    name: str
    # parameters as written → what the stage takes and leaves; None: its trainer reads them in its own way
    contract: Callable[[Mapping[str, Any]], StageContract] | None = None
    driver: Driver = Driver.JOB
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a step → roles that work in it, if known
    outputs: Mapping[str, str] = field(default_factory=dict)  # that every stage of it leaves: name → file | tree
    module: str = ""  # of a job: run as `python -m MODULE ATTEMPT_DIR`
    from_nothing: bool = False  # makes a model from its parameters alone, and reports nothing on the way
    scores: bool = False  # its model gives responses a number, and makes none
    ships: bool = False  # moves a channel
    sizes: Mapping[str, float] = field(default_factory=dict)  # column → share of it that is read besides the prompt
    cheaper: str = "make {} smaller"  # what to do so that a stage of it costs less
    fitting: str = "make it smaller"  # what to do when memory did not do
    algorithm: AlgorithmSpec | None = None  # that the engine's own job trains by

    @property
    def measures(self) -> bool:
        """Whether its stages leave measurements of items."""
        return METRICS in self.outputs

    @property
    def judges(self) -> bool:
        """Whether its stages leave a gate's report; no installed kind does."""
        return self.driver is Driver.CONTROL and REPORT in self.outputs


_MODEL, _TRAIN = {MODEL: "tree"}, "posttrain.jobs.train"
_SAMPLED: Mapping[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "reward": ("reward", "reward_model"),
    "reference": ("reference",),
    "update": ("policy",),
    "weights": ("policy", "rollout"),
}
_CRITICAL: Mapping[str, tuple[str, ...]] = {
    **{phase: roles for phase, roles in _SAMPLED.items() if phase not in ("update", "weights")},
    "values": ("critic",),
    "update critic": ("critic",),
    "update policy": ("policy",),
    "weights": ("policy", "rollout"),
}
_TAUGHT: Mapping[str, tuple[str, ...]] = {
    **{phase: _SAMPLED[phase] for phase in ("rollout", "reward")},
    "teacher": ("teacher",),
    **{phase: _SAMPLED[phase] for phase in ("update", "weights")},
}
_PAIRS: Mapping[str, float] = {"chosen": 0.5, "rejected": 0.5}


def algorithm_kind(
    name: str, config: str, algorithm: str, phases: Mapping[str, tuple[str, ...]] = _SAMPLED, **more: Any
) -> StageKind:
    """A kind of training: `algorithm_kind("words", "words.config:WordsConfig", "words.algorithm:Words")`.

    Args:
        config, algorithm: see `AlgorithmSpec`.
        phases: of a step; by default those of an algorithm that samples and has no critic.
        more: other fields of `StageKind`.
    """
    spec = AlgorithmSpec(config, algorithm)
    words = {"cheaper": _SAMPLES, "fitting": _BATCHES, "outputs": _MODEL, "module": _TRAIN, **more}
    return StageKind(name, algorithm=spec, phases=phases, **words)


def _own(name: str, config: str, algorithm: str, **more: Any) -> StageKind:
    room = "posttrain.engine"
    return algorithm_kind(name, f"{room}.config.{config}", f"{room}.recipes.{algorithm}", **more)


def _from_rows(name: str, config: str, algorithm: str, **more: Any) -> StageKind:
    return _own(name, f"rows:{config}", algorithm, **{"phases": {"update": ("policy",)}, "cheaper": _STEPS, **more})


# Every algorithm: a row here, a configuration, a file in `engine.recipes`.
_ALGORITHMS = (
    _from_rows("sft", "SFTConfig", "sft:SFT", sizes={"completion": 1.0}),
    _from_rows(
        *("reward_model", "RewardModelConfig", "reward_model:RewardModel"),
        phases={"update": ("reward_model",)}, scores=True, sizes=_PAIRS,
    ),
    _from_rows(
        *("dpo", "DPOConfig", "dpo:DPO"), phases={"reference": ("reference",), "update": ("policy",)}, sizes=_PAIRS
    ),
    _own("grpo", "sampling:GRPOConfig", "grpo:GRPO"),
    _own("dr_grpo", "sampling:GroupConfig", "dr_grpo:DrGRPO"),
    _own("rloo", "sampling:GroupConfig", "rloo:RLOO"),
    _own("dapo", "sampling:DAPOConfig", "dapo:DAPO"),
    _own("reinforce_plus_plus", "sampling:ReinforcePlusPlusConfig", "reinforce_plus_plus:ReinforcePlusPlus"),
    _own("ppo", "sampling:PPOConfig", "ppo:PPO", phases=_CRITICAL),
    _own("distill", "distillation:DistillConfig", "distill:Distill", phases=_TAUGHT),
    _own("dataflow", "dataflow:DataflowConfig", "dataflow:Dataflow", phases={}, cheaper=_FLOW),
)  # fmt: skip
GATE: Final = StageKind("gate", driver=Driver.CONTROL, outputs={REPORT: "file"})
RELEASE: Final = StageKind("release", driver=Driver.CONTROL, ships=True)
WAIT: Final = StageKind("wait", driver=Driver.WAIT)  # its parameters: `domain.waits`
_OWN = (
    *_ALGORITHMS,
    StageKind(
        name="evaluate",
        outputs={METRICS: "file", "items": "file"},
        module="posttrain.jobs.evaluate",
        cheaper="give {} fewer items or samples",
        fitting="lower the suites' max_new_tokens",
    ),
    StageKind(
        name="init_model",
        outputs=_MODEL,
        module="posttrain.jobs.init_model",
        from_nothing=True,
        fitting="make the model smaller",
    ),
    WAIT,
    GATE,
    RELEASE,
)
OWN: Final[Mapping[str, StageKind]] = {kind.name: kind for kind in _OWN}
WRITTEN: Final = tuple(kind.name for kind in _OWN if kind.driver is not Driver.CONTROL)  # that a run file may name
ADDED: Final = tuple(kind.name for kind in _OWN if kind.driver is Driver.CONTROL)  # that a release adds


@dataclass(frozen=True, slots=True)
class InstalledKind:
    """A kind, and the package that it comes from."""

    kind: StageKind
    plugin: Plugin

    def check(self, params: Mapping[str, Any]) -> StageContract:
        """What the package says of a stage.

        Raises:
            InputError: it refuses the parameters.
            Exception: whatever else its code raises.
        """
        assert self.kind.contract is not None
        return self.kind.contract(params)

    def code_digest(self) -> str:
        """Digest of its sources, its version and what it requires: part of the cache key of its stages."""
        spec = self.kind.algorithm
        parts = (spec.config, spec.algorithm) if spec else (self.kind.module,)
        return self.plugin.code_digest(*dict.fromkeys(part.partition(":")[0] for part in parts))


def kind_of(name: str) -> StageKind:
    """The kind of a stage that is there already. Of a package that is gone or broken: one of which nothing is known, so
    that every old run can be looked at.
    """
    try:
        found = OWN.get(name) or installed_kind(name)
    except InputError:
        found = None
    if isinstance(found, InstalledKind):
        return found.kind
    return found or StageKind(name)


def installed_kind(name: str) -> InstalledKind | None:
    """The kind of that name of an installed package; None: Posttrain's own, or nobody's.

    Raises:
        InputError: its package is broken, or two packages have it.
    """
    if name in OWN:
        return None
    plugin = find_plugin(KINDS, name)
    return None if plugin is None else _loaded(plugin)


def kind_names() -> list[str]:
    """Every kind that a run file may name, Posttrain's own first."""
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
        "ship nothing": kind.ships,
        "say its models' sizes, so none is from_nothing": kind.from_nothing,
        "have an algorithm, or a contract and the module of a job": not (
            _PATH.match(kind.algorithm.config) and _PATH.match(kind.algorithm.algorithm) and kind.module == _TRAIN
            if isinstance(kind.algorithm, AlgorithmSpec)
            else callable(kind.contract) and _MODULE.match(kind.module)
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise InputError(f"{plugin}: an installed kind must {what}, got {kind!r:.120}")
    return InstalledKind(kind, plugin)
