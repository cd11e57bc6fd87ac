"""Changes after which a stage that does not fit in memory fits. Pure arithmetic.

The arithmetic that refuses a stage also tries changes: a change is applied to the stage, all sizes are chosen again,
and the change is suggested only if every phase then fits in the memory of its devices, estimates included. The changes
are, in this order: one setting of `runtime` or `placement`; all settings together, if no single one is enough; fewer
tokens per response; other pools on the available GPUs. If none of them fits, the smallest number of GPUs (or amount of
memory) that fits is searched. If no number up to `MOST_RANKS` fits, the largest part of the fullest rank is named.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from posttrain.domain.kinds import Load
from posttrain.domain.placement import COLLOCATED, MAIN, Placement, Pool, Resources
from posttrain.domain.roles import with_models
from posttrain.planner.residency import Residency, device_of, gib, resident, shardable, too_large, width_of
from posttrain.planner.shape import Shape
from posttrain.planner.sizes import Room, device_bytes, settle, too_much_to_load

T = TypeVar("T")
MOST_RANKS = 4096  # of the search for the smallest pool
_NAMED = 3  # maximum number of changes in one message
_LEAST_RESPONSE = 64  # tokens; shorter responses are not suggested
_POOLS = (1, 2, 4, 8)  # ranks of a new pool for roles that are not trained
_GIB, _MOST_GIB = 2**30, 2**14


@dataclass(frozen=True, slots=True)
class Trial:
    """A stage with all sizes chosen, and whether it fits."""

    load: Load  # before sizes are chosen
    residency: Residency
    refused: tuple[str, ...]  # why it certainly does not fit, one line each
    over: bool  # whether it does not fit, estimates included
    said: str  # the fullest device: `61.2 GiB of 79.6 GiB in update`


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which a stage fits: `Remedy("runtime.dtype: bfloat16", trial)`."""

    change: str  # as written in run.yaml
    trial: Trial


@dataclass(frozen=True)
class Bench:
    """Tries changes of one stage.

    Args:
        load: the stage.
        shapes: role → shape of its model.
        room: the memory of the machine; unused for a named cluster, where kinds of GPUs are known.
        gpus: number of GPUs that are available; None: unknown.
        prompts: `prompt_tokens` and `longest_prompt` of `planner.sizes.settle`.
    """

    load: Load
    shapes: Mapping[str, Shape]
    room: Room
    gpus: int | None = None
    prompts: Mapping[str, int] = field(default_factory=dict)

    def tried(self, load: Load, room: Room | None = None) -> Trial:
        """Return the stage with its sizes chosen, and whether every phase fits."""
        room = room or self.room
        named = load.ray_address is not None
        settled = settle(load, self.shapes, Room() if named else room, **self.prompts)
        found = resident(settled.load, self.shapes, gpu_there=room.gpu_there, **self.prompts)
        refused = [settled.short] if settled.short else []
        if not named:
            certain = resident(settled.load, self.shapes, gpu_there=room.gpu_there).peaks
            loads = too_much_to_load(load, self.shapes, room.memory, gpu_there=room.gpu_there)
            refused = [*too_large(certain, device=room.gpu, machine=room.memory), *loads, *refused]
        pools = load.pools
        rooms = {peak.pool: device_bytes(load, pools[peak.pool], room) for peak in found.peaks}
        tight = [(peak.bytes / size, peak, size) for peak in found.peaks if (size := rooms[peak.pool])]
        share, said = 0.0, "memory is unknown"
        if tight:
            share, peak, size = max(tight, key=lambda one: one[0])
            said = f"{gib(peak.bytes)} of {gib(size)} in {peak.phase}"
        return Trial(load, found, tuple(refused), bool(refused) or share > 1, said)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """The changes after which the stage fits on the available GPUs: settings first, then pools."""
        settings = list(self._settings())
        found = [self._remedy(words, change) for words, change in settings]
        if any(shape.stored == 4 for shape in self.shapes.values()) and self.load.dtype != "float32":
            found.append(self._remedy("runtime.dtype: float32", {"dtype": "float32"}))  # ranks share the file's pages
        if not any(found) and len(settings) > 1:
            found.append(self._together(settings))
        found.append(self._shorter())
        there = [one for one in self.pools if self.gpus is None or _gpus(one.trial.load) <= self.gpus]
        return [one for one in (*found, *there) if one]

    @cached_property
    def advice(self) -> str:
        """The next action: the changes that fit; else the smallest hardware that fits; else why none does."""
        if self.remedies:
            return "set " + ", or ".join(f"{one.change} ({one.trial.said})" for one in self.remedies[:_NAMED])
        if self.pools:
            best = self.pools[0]
            there = "" if self.gpus is None else f" ({self.gpus} are there)"
            return f"use at least {_gpus(best.trial.load)} GPUs{there}: {best.change} ({best.trial.said})"
        if self._homes or self.room.memory is None:
            return self._why_none()
        wider = lambda size: self._remedy(f"{size} GiB", self._everything, replace(self.room, memory=size * _GIB))  # noqa: E731
        least = _least(wider, 1, _MOST_GIB)
        return f"no setting fits; use a machine with {least.change} of memory" if least else self._why_none()

    @cached_property
    def pools(self) -> list[Remedy]:
        """For each way to distribute roles over pools, a number of GPUs that fits; the smallest number first.

        Roles that leave a pool get a quarter of the pool's GPUs if that fits, so that the total stays the same.
        """
        found, step = [self._smallest(name) for name in self._homes], self.load.sequence_parallel
        for home, moved in self._movable():
            size = home.ranks // 4
            same = self._placed(home.name, home.ranks - size, moved, size) if size and size % step == 0 else None
            fewer = (self._smallest(home.name, moved, size) for size in _POOLS)
            found.append(same or next(filter(None, fewer), None))
        return sorted(filter(None, found), key=lambda one: _gpus(one.trial.load))

    @property
    def _homes(self) -> list[str]:
        """The names of the pools on GPUs."""
        pools = self.load.pools.values()
        return [p.name for p in pools if device_of(self.load, p, gpu_there=self.room.gpu_there) == "cuda"]

    def _movable(self) -> Iterator[tuple[Pool, tuple[str, ...]]]:
        """Yield the pool of the first trained role with each group of roles that can get a separate pool."""
        load = self.load
        for home in (load.placement.pool_of(role) for role in load.trained[:1]):
            others = [r for r in with_models(load.roles) if r in home.roles and r not in load.trained]
            if home.name in self._homes and home.name in (MAIN, load.trained[0]):
                groups = ([r for r in others if r == "rollout"], [r for r in others if r != "rollout"], others)
                yield from dict.fromkeys((home, tuple(group)) for group in groups if group)

    def _smallest(self, name: str, moved: tuple[str, ...] = (), size: int = 0) -> Remedy | None:
        return _least(lambda ranks: self._placed(name, ranks, moved, size), self.load.sequence_parallel)

    def _placed(self, name: str, ranks: int, moved: tuple[str, ...] = (), size: int = 0) -> Remedy | None:
        """Try `ranks` GPUs for the pool `name`, with the roles `moved` in a new pool of `size` GPUs."""
        placement, pool = self.load.placement, self.load.pools[name]
        kind = pool.resources.kind
        placed: dict[str, Any] = dict(placement.placed)
        head = (self.load.trained[0] if moved else COLLOCATED) if name == MAIN else name
        placed[head] = Resources(gpus=ranks, kind=kind)
        for at, role in enumerate(moved):
            placed[role] = Resources.model_validate({"with": moved[0]}) if at else Resources(gpus=size, kind=kind)
        made = Placement.model_validate({**placed, "sleep": placement.sleep})
        return self._remedy(f"placement: {_flow(made.model_dump())}", {"placement": made})

    def _remedy(self, words: str, change: Mapping[str, Any], room: Room | None = None) -> Remedy | None:
        trial = self.tried(replace(self.load, **change), room)
        return None if trial.over else Remedy(words, trial)

    def _settings(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the settings that take less memory than those of the stage; `auto` has been tried already."""
        load = self.load
        if load.activation_checkpointing is False:
            yield "runtime.activation_checkpointing: true", {"activation_checkpointing": True}
        for name in ("micro_batch_tokens", "kv_cache"):
            if getattr(load, name) is not None:
                yield f"runtime.{name}: auto", {name: None}
        if load.shard_frozen is False and shardable(load):
            yield "runtime.shard_frozen: true", {"shard_frozen": True}
        if load.placement.sleep is not True and set(with_models(load.roles)) - {*load.trained, "rollout"}:
            yield "placement.sleep: true", {"placement": load.placement.model_copy(update={"sleep": True})}
        pools = load.pools.values()
        if any(width_of(load, device_of(load, p, gpu_there=self.room.gpu_there)) > 2 for p in pools):
            yield "runtime.dtype: bfloat16", {"dtype": "bfloat16"}

    @property
    def _everything(self) -> dict[str, Any]:
        return {name: value for _, change in self._settings() for name, value in change.items()}

    def _together(self, settings: list[tuple[str, dict[str, Any]]]) -> Remedy | None:
        """Try several settings at the same time, without those that are not necessary."""
        changes = {name: value for _, change in settings for name, value in change.items()}
        found = self._remedy(" and ".join(words for words, _ in settings), changes)
        if found is None:
            return None
        fewer = ([other for other in settings if other is not one] for one in settings)
        return next(filter(None, map(self._together, fewer)), found)

    def _shorter(self) -> Remedy | None:
        """Return the longest of the halved responses that fit."""
        tokens = self.load.response_tokens
        while tokens >= 2 * _LEAST_RESPONSE:
            tokens //= 2
            words = f"max_new_tokens so that a response has at most {tokens} tokens"
            if found := self._remedy(words, {"response_tokens": tokens}):
                return found
        return None

    def _why_none(self) -> str:
        """Return the largest part of the fullest rank, with all settings that take less memory."""
        trial = self.tried(replace(self.load, **self._everything))
        peak = max(trial.residency.peaks, key=lambda peak: peak.bytes)
        held = [one for one in trial.residency.held if (one.phase, one.pool) == (peak.phase, peak.pool)]
        most = max(held, key=lambda one: one.bytes)
        return (
            f"no setting and no number of GPUs fits: of {trial.said}, {gib(most.bytes)} is {most.part} of {most.role}; "
            "use a smaller model"
        )


def _gpus(load: Load) -> int:
    """Return the number of GPUs of all pools; a stage without `gpus` has one."""
    return sum(pool.resources.gpus for pool in load.pools.values()) or 1


def _least(fits: Callable[[int], T | None], step: int, most: int = MOST_RANKS) -> T | None:
    """Return the answer of the smallest multiple of `step` that fits, if larger multiples fit too; None: none fits."""
    high, found = step, fits(step)
    while found is None and 2 * high <= most:
        high *= 2
        found = fits(high)
    low = high // 2
    while found is not None and high - low > step:
        middle = (low + high) // 2 // step * step
        if middle == low:
            break
        one = fits(middle)
        low, high, found = (low, middle, one) if one is not None else (middle, high, found)
    return found


def _flow(value: Any) -> str:
    """Return a value as in run.yaml: `{policy: {gpus: 4}}`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
