"""Executors and trainers of installed packages (entry points `posttrain.executors` and `posttrain.trainers`).

An executor is loaded when a workspace names it, a trainer when a run names it. Each is checked against its port.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, InputError, PosttrainError, nearest
from posttrain.domain.jobs import (
    Accepted,
    Capacity,
    Exists,
    JobCommand,
    JobOrder,
    JobResult,
    LogPage,
    Observation,
    Submission,
    Unknown,
)
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.domain.kinds import CONTROL, StageContract, refuse_malformed
from posttrain.domain.plugins import EXECUTORS, TRAINERS, Plugin, find_plugin, plugin_names
from posttrain.execution.ports import Executor, Trainer
from posttrain.store.attempts import AttemptFolder

_EXECUTOR_METHODS = ("submit", "observe", "kill", "list", "logs", "capacity")
_FLAGS = ("attests", "idempotent")
_TRAINER_METHODS = ("code_digest", "check", "devices", "compile", "collect")


class InstalledExecutor:
    """A package's executor. The package is not imported before a job is submitted or observed.

    After an unexpected exception in the package's code, a submission returns Unknown, since the job may exist; every
    other call raises `InfrastructureError` and is retried.

    Args:
        own: the names of Posttrain's own executors, for hints in errors.
        runs: the folder that contains the attempt folders.
    """

    def __init__(self, name: str, own: Sequence[str], runs: Path) -> None:
        self.name, self._own, self._runs = name, own, runs
        self._made: tuple[Plugin, Executor] | None = None

    def load(self) -> Executor:
        """Import the package and return its executor.

        Raises:
            InputError: no package has this executor, or the entry point does not return an executor.
        """
        return self._load()[1]

    @property
    def remote(self) -> bool:
        """See `Executor.remote`; False by default."""
        with self._asked("remote") as made:
            return bool(getattr(made, "remote", False))

    @property
    def attests(self) -> bool:
        """See `Executor.attests`."""
        with self._asked("attests") as made:
            return bool(made.attests)

    @property
    def idempotent(self) -> bool:
        """See `Executor.idempotent`."""
        with self._asked("idempotent") as made:
            return bool(made.idempotent)

    @property
    def images(self) -> bool:
        """See `Executor.images`; False by default."""
        with self._asked("images") as made:
            return bool(getattr(made, "images", False))

    @property
    def avoids(self) -> bool:
        """See `Executor.avoids`; False by default."""
        with self._asked("avoids") as made:
            return bool(getattr(made, "avoids", False))

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`."""
        plugin, made = self._load()
        try:
            answer = made.submit(spec)
        except PosttrainError:
            raise
        except Exception as error:  # the job may or may not exist
            return Unknown(f"{plugin}: submit raised {type(error).__name__}: {_line(error)}")
        if isinstance(answer, Accepted | Exists | Unknown):
            return answer
        return Unknown(f"{plugin}: submit must return Accepted, Exists or Unknown, got {answer!r:.80}")

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        with self._asked("observe") as made:
            seen = list(made.observe(jobs))
            if len(seen) != len(jobs) or not all(isinstance(one, Observation) for one in seen):
                raise TypeError(f"must return {len(jobs)} observations, got {seen!r:.80}")
            return seen

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`."""
        with self._asked("kill") as made:
            made.kill(job)

    def list(self, prefix: str) -> list[Listed]:
        """See `Executor.list`."""
        with self._asked("list") as made:
            return list(made.list(prefix))

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """See `Executor.logs`."""
        with self._asked("logs") as made:
            return made.logs(job, cursor)

    def capacity(self) -> Capacity:
        """See `Executor.capacity`."""
        with self._asked("capacity") as made:
            return made.capacity()

    @contextmanager
    def _asked(self, verb: str) -> Iterator[Executor]:
        """Yield the executor; turn the executor's unexpected exceptions into `InfrastructureError`."""
        try:
            plugin, made = self._load()
        except InputError as error:  # the package may have been uninstalled while its jobs still run
            raise InfrastructureError(str(error)) from error
        try:
            yield made
        except InputError as error:
            raise InfrastructureError(f"{plugin}: {verb}: {error}") from error
        except PosttrainError:
            raise
        except Exception as error:
            raise InfrastructureError(
                f"{plugin}: {verb} raised {type(error).__name__}: {_line(error)}; fix the package"
            ) from error

    def _load(self) -> tuple[Plugin, Executor]:
        if self._made is None:
            plugin = find_plugin(EXECUTORS, self.name)
            if plugin is None:
                near = nearest(self.name, (*self._own, *plugin_names(EXECUTORS)))
                raise InputError(
                    f"executor {self.name!r} must be installed{near}; install its package, or choose another: "
                    "posttrain init --executor"
                )
            self._made = plugin, _make(plugin, self._runs)
        return self._made


def _make(plugin: Plugin, runs: Path) -> Executor:
    make = plugin.load()
    if not callable(make):
        raise InputError(f"{plugin}: must name a class or a function that creates an executor, got {make!r:.80}")
    with plugin.calling("making it"):
        made: Executor = make(runs)
        lacks = [verb for verb in _EXECUTOR_METHODS if not callable(getattr(made, verb, None))]
        lacks += [flag for flag in _FLAGS if not isinstance(getattr(made, flag, None), bool)]
    if lacks:
        needed = ", ".join((*_EXECUTOR_METHODS, *_FLAGS))
        raise InputError(f"{plugin}: an executor must have {needed}, this executor lacks {', '.join(lacks)}")
    if (called := getattr(made, "name", None)) != plugin.name:
        raise InputError(f"{plugin}: its executor must be named like the entry point, got {called!r}")
    return made


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


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
        if lacks := [verb for verb in _TRAINER_METHODS if not callable(getattr(self._trainer, verb, None))]:
            raise InputError(
                f"{plugin}: a trainer must have {', '.join(_TRAINER_METHODS)}, this one lacks {', '.join(lacks)}"
            )
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
