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
_STEPS = "lower steps or batch_size of {}"
_SAMPLES = "lower steps, prompts_per_step or max_new_tokens of {}"
_BATCHES = "lower runtime.micro_batch_tokens"


class Driver(StrEnum):
    """Who brings a stage to its end."""

    JOB = "job"  # a process that an executor launches
    CONTROL = "control"  # the reconciler itself, between two looks
    WAIT = "wait"  # nobody: a time that comes, or a person who sends its signal


@dataclass(frozen=True, slots=True)
class StageKind:
    """What a kind of stage is: `StageKind("words", contract, Driver.JOB, {}, {"metrics": "file"}, module="words.job")`.

    Of an installed package's kind `contract` and `module` are needed, and `driver` is a job.
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

    @property
    def measures(self) -> bool:
        """Whether its stages leave measurements of items."""
        return METRICS in self.outputs

    @property
    def judges(self) -> bool:
        """Whether its stages leave a gate's report; no installed kind does."""
        return self.driver is Driver.CONTROL and REPORT in self.outputs


_MODEL, _TRAIN = {MODEL: "tree"}, "posttrain.jobs.train"
GATE: Final = StageKind("gate", driver=Driver.CONTROL, outputs={REPORT: "file"})
RELEASE: Final = StageKind("release", driver=Driver.CONTROL, ships=True)
WAIT: Final = StageKind("wait", driver=Driver.WAIT)  # its parameters: `domain.waits`
_OWN = (
    StageKind(
        name="sft",
        phases={"update": ("policy",)},
        outputs=_MODEL,
        module=_TRAIN,
        sizes={"completion": 1.0},
        cheaper=_STEPS,
        fitting=_BATCHES,
    ),
    StageKind(
        name="reward_model",
        phases={"update": ("reward_model",)},
        outputs=_MODEL,
        module=_TRAIN,
        scores=True,
        sizes={"chosen": 0.5, "rejected": 0.5},
        cheaper=_STEPS,
        fitting=_BATCHES,
    ),
    StageKind(
        name="grpo",
        phases={
            "rollout": ("rollout",),
            "reward": ("reward",),
            "reference": ("reference",),
            "update": ("policy",),
            "weights": ("policy", "rollout"),
        },
        outputs=_MODEL,
        module=_TRAIN,
        cheaper=_SAMPLES,
        fitting=_BATCHES,
    ),
    StageKind(
        name="ppo",
        phases={
            "rollout": ("rollout",),
            "reward": ("reward", "reward_model"),
            "reference": ("reference",),
            "values": ("critic",),
            "update critic": ("critic",),
            "update policy": ("policy",),
            "weights": ("policy", "rollout"),
        },
        outputs=_MODEL,
        module=_TRAIN,
        cheaper=_SAMPLES,
        fitting=_BATCHES,
    ),
    StageKind(
        name="dataflow",
        outputs=_MODEL,
        module=_TRAIN,
        cheaper="lower steps or tokens_per_step of {}",
        fitting=_BATCHES,
    ),
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
        return self.plugin.code_digest(self.kind.module)


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
        "have a contract and the module of a job": not (callable(kind.contract) and _MODULE.match(kind.module)),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise InputError(f"{plugin}: an installed kind must {what}, got {kind!r:.120}")
    return InstalledKind(kind, plugin)
