"""Engines by name: Posttrain's own, and those of installed packages.

A stage that samples has `rollout: {engine: NAME}`, and a stage that trains has `train: {engine: NAME}`. An installed
engine is declared before any job runs: a plan compares what it provides with what the stage needs. Its module is
imported in the job only.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.kinds import PATH
from posttrain.domain.plugins import Plugin, find_plugin, plugin_names

ROLLOUT_ENGINE, TRAIN_ENGINE = "rollout", "train"  # the fields of a stage, which name its engines
OWN_ENGINES: Final[Mapping[str, tuple[str, ...]]] = {
    ROLLOUT_ENGINE: ("auto", "native", "module"),
    TRAIN_ENGINE: ("torch",),
}
GROUPS: Final = {field: f"posttrain.{field}_engines" for field in OWN_ENGINES}  # the groups of entry points
ENGINE: Final = "engine:"  # prefix of an installed engine's name in the `code` of a manifest: `engine:rollout/fast`
# field → what an engine may provide → what a stage needs it for
PROVIDED: Final[Mapping[str, Mapping[str, str]]] = {
    ROLLOUT_ENGINE: {
        "stop": "stop strings",
        "attest": "weights that arrive from other processes",
        "sessions": "samples with several turns, without reading earlier turns again",
    },
    TRAIN_ENGINE: {"ranks": "several ranks", "values": "a critic or a reward model"},
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine of a package: `EngineSpec("words.fast:FastRollout", provides=("stop",))`.

    `open` has the form `module:Name`, and is called with the arguments of `posttrain.engine.rollout.backends.module.
    ModuleRollout` or of `posttrain.engine.roles.training.TorchEngine`. The result implements `RolloutEngine` or
    `TrainEngine`. The module is imported in the job.
    """

    open: str
    provides: tuple[str, ...] = ()  # rollout: stop, attest, sessions; train: ranks, values


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """An engine of an installed package, and the entry point that adds it."""

    spec: EngineSpec
    plugin: Plugin

    def open(self, port: type, *given: Any, **words: Any) -> Any:
        """Import the engine and return an instance, checked for the members of its port.

        Raises:
            InputError: the module cannot be imported, or the instance lacks members.
        """
        with self.plugin.calling(f"loading {self.spec.open}"):
            make = pkgutil.resolve_name(self.spec.open)
        engine = make(*given, **words)
        refuse_partial(engine, port, str(self.plugin))
        return engine

    def code_digest(self) -> str:
        """Return the digest of the package's sources, version and requirements, which is part of cache keys."""
        return self.plugin.code_digest(self.spec.open.partition(":")[0])


def refuse_partial(engine: Any, port: type, told: str) -> None:
    """Check that an engine has all members of its port.

    Args:
        told: the engine in errors.

    Raises:
        InputError: a member is missing.
    """
    lacks = [name for name in vars(port) if not name.startswith("_") and not hasattr(engine, name)]
    if lacks:
        raise InputError(f"{told} lacks {', '.join(lacks)}, which {port.__module__}.{port.__name__} requires; add it")


def installed_engine(field: str, name: str) -> InstalledEngine:
    """Return the engine with this name in an installed package.

    Args:
        field: rollout or train.

    Raises:
        InputError: no package has the engine, two packages have it, or its package is broken.
    """
    plugin = find_plugin(GROUPS[field], name)
    if plugin is None:
        known = nearest(name, {*OWN_ENGINES[field], *plugin_names(GROUPS[field])})
        raise InputError(f"{field}.engine: unknown engine {name!r}{known}; correct the name, or install its package")
    spec = plugin.load()
    with plugin.calling("reading its EngineSpec"):
        if not isinstance(spec, EngineSpec) or not PATH.match(spec.open):
            raise InputError(f"{plugin}: must name an EngineSpec whose open is module:Name, got {spec!r:.120}")
        if odd := sorted(set(spec.provides) - PROVIDED[field].keys()):
            raise InputError(f"{plugin}: provides must be some of {', '.join(PROVIDED[field])}, got {', '.join(odd)}")
    return InstalledEngine(spec, plugin)


def refuse_unfit(field: str, name: str, needs: Mapping[str, bool]) -> None:
    """Check that an engine exists and provides what a stage needs; Posttrain's own engines provide everything.

    Args:
        field, name: see `installed_engine`.
        needs: what an engine may provide → whether the stage needs it.

    Raises:
        InputError: see `installed_engine`; the engine does not provide a need.
    """
    if name in OWN_ENGINES[field]:
        return
    engine = installed_engine(field, name)
    for need, what in PROVIDED[field].items():
        if needs[need] and need not in engine.spec.provides:
            raise InputError(
                f"{field}.engine: {engine.plugin} does not provide {need}, which the stage needs for {what}; choose "
                "another engine"
            )


def holds_sessions(name: str) -> bool:
    """Return whether a rollout engine keeps what it has read of a sample until the sample's next turn.

    Raises:
        InputError: see `installed_engine`.
    """
    if name in OWN_ENGINES[ROLLOUT_ENGINE]:
        return name != "module"
    return "sessions" in installed_engine(ROLLOUT_ENGINE, name).spec.provides


def engines_in(params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the engines that a stage's parameters name, except Posttrain's own: `engine:rollout/fast`."""
    for field, own in OWN_ENGINES.items():
        found = params.get(field)
        name = found.get("engine") if isinstance(found, Mapping) else None
        if isinstance(name, str) and name not in own:
            yield f"{ENGINE}{field}/{name}"


def engine_words(code: str) -> tuple[str, str]:
    """Return field and name of an engine in the `code` of a manifest: `("rollout", "fast")`."""
    field, _, name = code.removeprefix(ENGINE).partition("/")
    return field, name


def engine_plugin(code: str) -> Plugin | None:
    """Return the plugin of an engine in the `code` of a manifest; None: no installed package has it."""
    field, name = engine_words(code)
    return find_plugin(GROUPS[field], name)
