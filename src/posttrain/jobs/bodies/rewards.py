"""The user's code of a stage, opened in its cells: a reward function, several with weights, an `observe` method."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import final
from urllib.parse import unquote, urlsplit

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Note
from posttrain.domain.rewards import MODEL_PARTS, model_variable, reward_slots
from posttrain.engine.config import TurnsConfig
from posttrain.jobs.bodies.served import Reached, ServedModel
from posttrain.jobs.entry import Job
from posttrain.sandbox.observer import ProcessObserver
from posttrain.sandbox.port import Observer, RewardCall, RewardFunction, Score
from posttrain.sandbox.process import ParallelReward, WeightedReward, open_reward
from posttrain.sandbox.session import Provision


@final
class CheckedReward:
    """A reward whose scores count only while the models that it calls are served."""

    def __init__(self, reward: RewardFunction, models: Iterable[ServedModel]) -> None:
        self._reward, self._models = reward, tuple(models)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `RewardFunction.notes`."""
        return self._reward.notes

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch; see `RewardFunction.score`.

        Raises:
            InfrastructureError: a model's server has ended, so the code may have scored without it.
        """
        try:
            return self._reward.score(call, allowed, places)
        finally:
            for served in self._models:
                served.check()

    def close(self) -> None:
        """Close the reward."""
        self._reward.close()


def open_rewards(
    job: Job,
    slot: str,
    reward: str | Mapping[str, float],
    stack: ExitStack,
    *,
    timeout: float,
    ranks: int = 1,
    models: Mapping[str, Reached] = MappingProxyType({}),
) -> RewardFunction:
    """Return the reward of a slot; report what could not be confined.

    Args:
        reward: the value in the stage's parameters: a name, or name → weight.
        stack: the exit stack that closes the reward.
        timeout: seconds for one batch of completions, for each function.
        ranks: the number of processes of each function.
        models: name → a model that the functions may call.

    Raises:
        InputError: the reward cannot be called or confined.
        RewardError: the reward's code fails when it is loaded.
        InfrastructureError: a process of the reward does not start.
    """
    slots = reward_slots(slot, reward).items()
    opened = {name: _open(job, place, name, stack, timeout, ranks, models) for place, (_, name) in slots}
    if isinstance(reward, str):
        [found] = opened.values()
    else:
        found = WeightedReward({name: (weight, opened[name]) for name, weight in reward.items()})
    _tell(job, found.notes)
    served = [one.served for one in models.values() if one.served is not None]
    return CheckedReward(found, served) if served else found


def recipe_of(job: Job) -> tuple[Path, str] | None:
    """Return the file and the entry of the user's algorithm; None: the stage's algorithm is that of its kind.

    The source is written under its own name, so that workers can import it too.
    """
    if "recipe" not in job.order.params:
        return None
    meta = job.order.inputs["recipe"].meta
    file = job.folder / "recipe" / str(meta["source"])
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(job.input("recipe").read_bytes())
    return file, str(meta["entry"])


def open_observer(job: Job, config: TurnsConfig, name: str, stack: ExitStack) -> Observer:
    """Return the method `observe` of the stage's algorithm; report what could not be confined.

    Args:
        name: the method's name in errors.
        stack: the exit stack that closes the observer.

    Raises:
        InputError, RewardError, InfrastructureError: see `ProcessObserver`.
    """
    recipe = recipe_of(job)
    given = {"kind": job.order.kind, "params": dict(job.order.params)}
    opened = ProcessObserver(
        "posttrain.engine.recipes.dataflow:observe_of",
        {**given, "recipe": [recipe[0].name, recipe[1]] if recipe else []},
        timeout=config.observe_timeout,
        concurrency=config.observe_concurrency,
        source=recipe[0] if recipe else None,
        name=name,
        hidden=workspace_folders(job),
        confined=not job.order.trust_rewards,
    )
    stack.callback(opened.close)
    _tell(job, opened.notes)
    return opened


def _tell(job: Job, notes: Iterable[str]) -> None:
    for note in notes:
        job.sink(Note(note, time.time(), "warning"))


def _open(
    job: Job, slot: str, name: str, stack: ExitStack, timeout: float, ranks: int, models: Mapping[str, Reached]
) -> RewardFunction:
    meta, label = job.order.inputs[slot].meta, job.label(slot)
    beside = [other for other in job.order.inputs if other.startswith(f"{slot}/")]
    files = {other.removeprefix(f"{slot}/"): job.input(other) for other in beside}
    if lacking := [one for one in meta.get("secrets", ()) if one not in job.secrets]:
        raise InputError(f"{label} needs {', '.join(lacking)} in the environment of the run's driver; export it")
    secrets = {one: job.secrets[one] for one in meta.get("secrets", ())}
    network, variables = list(meta.get("network", ())), dict[str, str]()
    for model, reached in models.items():
        network += [reached.address] if reached.address not in network else []
        url, name_there, key_there = (model_variable(model, part) for part in MODEL_PARTS)
        variables |= {url: reached.url, name_there: reached.model}
        key = secrets[reached.variable] if reached.variable else reached.key
        secrets |= {key_there: key} if key else {}
    provision = Provision(files, tuple(network), secrets, variables)
    functions = []
    for _ in range(ranks):
        function = open_reward(
            job.input(slot),
            meta.get("entry"),
            timeout=timeout,
            dialect=meta.get("dialect") or "auto",
            name=f"{name} ({label})" if ":" in slot else label,
            source=meta.get("source") or "",
            hidden=workspace_folders(job),
            provision=provision,
            confined=not job.order.trust_rewards,
        )
        stack.callback(function.close)
        functions.append(function)
    reward = ParallelReward(functions)
    stack.callback(reward.close)
    return reward


def workspace_folders(job: Job) -> list[Path]:
    """Return the folders to hide from a reward: attempts, cached inputs, the store if it is a folder, their parent."""
    store = urlsplit(job.blobs.url)
    folders = [job.folder.resolve(), Path(job.order.cache_dir).resolve()]
    if store.scheme == "file":
        folders.append(Path(unquote(store.path)))
    return [Path(os.path.commonpath(folders[:2])), *folders]
