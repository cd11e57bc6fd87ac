"""Trainers of installed packages (entry points `posttrain.trainers`).

A trainer is loaded when a run names it, and is checked against the port.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobCommand, JobOrder, JobResult
from posttrain.domain.kinds import CONTROL, StageContract, refuse_malformed
from posttrain.domain.plugins import TRAINERS, Plugin, find_plugin, plugin_names
from posttrain.execution.ports import Trainer
from posttrain.store.attempts import AttemptFolder

_VERBS = ("code_digest", "check", "devices", "compile", "collect")


class InstalledTrainer:
    """A package's trainer. An exception in the package's code becomes a one-line error that names the package.

    The package's sources and version are always part of its code digest.

    Args:
        plugin: the entry point: a class or function that returns the trainer and needs no arguments.

    Raises:
        InputError: the entry point returns no valid trainer, or a trainer with another name.
    """

    def __init__(self, plugin: Plugin) -> None:
        self.plugin, self.name = plugin, plugin.name
        make = plugin.load()
        if not callable(make):
            raise InputError(f"{plugin}: must name a class or a function that creates a trainer, got {make!r:.80}")
        with plugin.calling("making it"):
            self._trainer: Trainer = make()
        if lacks := [verb for verb in _VERBS if not callable(getattr(self._trainer, verb, None))]:
            raise InputError(f"{plugin}: a trainer must have {', '.join(_VERBS)}, this one lacks {', '.join(lacks)}")
        if (called := getattr(self._trainer, "name", None)) != plugin.name:
            raise InputError(f"{plugin}: its trainer must be named like the entry point, got {called!r}")

    def code_digest(self) -> str:
        """See `Trainer.code_digest`; the digest includes the package."""
        with self.plugin.calling("code_digest"):
            own = str(self._trainer.code_digest())
        return digest_json({"own": own, "package": self.plugin.code_digest(type(self._trainer).__module__)})

    def check(self, kind: str, params: Mapping[str, Any]) -> StageContract:
        """See `Trainer.check`."""
        with self.plugin.calling(f"check of kind {kind!r}"):
            contract = self._trainer.check(kind, params)
        refuse_malformed(contract, str(self.plugin))
        return contract

    def devices(self, kind: str, params: Mapping[str, Any]) -> int:
        """See `Trainer.devices`."""
        with self.plugin.calling("devices"):
            return self._trainer.devices(kind, params)

    def compile(self, order: JobOrder) -> JobCommand:
        """See `Trainer.compile`."""
        with self.plugin.calling("compile"):
            return self._trainer.compile(order)

    def collect(self, attempt: AttemptFolder) -> JobResult | None:
        """See `Trainer.collect`."""
        with self.plugin.calling("collect"):
            return self._trainer.collect(attempt)


class Trainers(Mapping[str, Trainer]):
    """The available trainers: `own`, and the trainers of installed packages, each loaded on first access.

    Access to a trainer of a broken package raises InputError, not KeyError; the other trainers remain available.
    """

    def __init__(self, own: Sequence[Trainer]) -> None:
        self._known: dict[str, Trainer] = {trainer.name: trainer for trainer in own}

    def __getitem__(self, name: str) -> Trainer:
        if name not in self._known:
            plugin = find_plugin(TRAINERS, name) if name != CONTROL else None
            if plugin is None:
                raise KeyError(name)
            self._known[name] = InstalledTrainer(plugin)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._known, *plugin_names(TRAINERS))))

    def __len__(self) -> int:
        return sum(1 for _ in self)
