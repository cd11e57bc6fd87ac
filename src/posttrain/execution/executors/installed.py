"""Executors of installed packages (entry points `posttrain.executors`).

An executor is loaded when a workspace names it, and is checked against the port.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from posttrain.domain.errors import InfrastructureError, InputError, PosttrainError, nearest
from posttrain.domain.jobs import Accepted, Capacity, Exists, LogPage, Observation, Submission, Unknown
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.domain.plugins import EXECUTORS, Plugin, find_plugin, plugin_names
from posttrain.execution.ports import Executor

_VERBS = ("submit", "observe", "kill", "list", "logs", "capacity")
_FLAGS = ("attests", "idempotent")


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
        lacks = [verb for verb in _VERBS if not callable(getattr(made, verb, None))]
        lacks += [flag for flag in _FLAGS if not isinstance(getattr(made, flag, None), bool)]
    if lacks:
        raise InputError(
            f"{plugin}: an executor must have {', '.join((*_VERBS, *_FLAGS))}, this executor lacks {', '.join(lacks)}"
        )
    if (called := getattr(made, "name", None)) != plugin.name:
        raise InputError(f"{plugin}: its executor must be named like the entry point, got {called!r}")
    return made


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
