"""Changes after which a stage that does not fit in memory fits. Pure arithmetic.

The arithmetic that refuses a stage also tries changes: a change is applied to the stage, all sizes are chosen again,
and the change is suggested only if every phase then fits in the memory of its devices, estimates included. The changes
are, in this order: the smallest sets of settings of `runtime` and `placement`; fewer tokens per response; other pools
on the available GPUs. If none of them fits, the smallest number of GPUs that fits is searched. If no number up to
`MOST_RANKS` fits, the missing memory and the largest part of the fullest rank are named.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, takewhile
from typing import Any

from posttrain.domain.kinds import Load
from posttrain.domain.placement import COLLOCATED, MAIN, Placement, Pool, Resources
from posttrain.domain.roles import with_models
from posttrain.planner.residency import Residency, called, device_of, gib, resident, shardable, too_large, width_of
from posttrain.planner.shape import Shape
from posttrain.planner.sizes import Room, Settled, device_bytes, settle, too_much_to_load

MOST_RANKS = 1024  # of the search for the smallest pool
_NAMED = 3  # maximum number of changes in one message
_LEAST_RESPONSE = 64  # tokens; shorter responses are not suggested
_POOLS = (1, 2, 4, 8)  # ranks of a new pool for roles that are not trained


@dataclass(frozen=True, slots=True)
class Trial:
    """A stage with all sizes chosen, and whether it fits."""

    load: Load  # before sizes are chosen
    settled: Settled
    residency: Residency
    refused: tuple[str, ...]  # why it certainly does not fit, one line each
    missing: int  # bytes by which the fullest device is exceeded, estimates included; at most 0: all fit
    said: str  # the fullest device: `policy takes 61.2 GiB of 79.6 GiB in update`

    @property
    def over(self) -> bool:
        """Whether the stage does not fit, estimates included."""
        return bool(self.refused) or self.missing > 0


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
        room: the memory of the machine; empty for a named cluster, where kinds of GPUs are known.
        gpus: number of GPUs that are available; None: unknown.
        prompts: `prompt_tokens` and `longest_prompt` of `planner.sizes.settle`.
    """

    load: Load
    shapes: Mapping[str, Shape]
    room: Room
    gpus: int | None = None
    prompts: Mapping[str, int] = field(default_factory=dict)

    def tried(self, load: Load) -> Trial:
        """Return the stage with its sizes chosen, and whether every phase fits."""
        room, pools = self.room, load.pools
        settled = settle(load, self.shapes, room, **self.prompts)
        found = resident(settled.load, self.shapes, gpu_there=room.gpu_there, **self.prompts)
        certain = too_large(found.peaks, device=room.gpu, machine=room.memory)
        loads = too_much_to_load(load, self.shapes, room.memory, gpu_there=room.gpu_there)
        total = sum(peak.bytes * peak.ranks for peak in found.peaks if peak.device == "cpu")
        devices = [("ranks on CPUs take", total, room.memory, "")] + [
            (f"{called(peak.pool)} takes", peak.bytes, device_bytes(load, pools[peak.pool], room), f" in {peak.phase}")
            for peak in found.peaks
            if peak.device == "cuda"
        ]
        missing, said = max(
            (
                (size - whole, f"{who} {gib(size)} of {gib(whole)}{phase}")
                for who, size, whole, phase in devices
                if size and whole
            ),
            default=(0, "memory is unknown"),
        )
        return Trial(load, settled, found, tuple(filter(None, (*certain, *loads, settled.short))), missing, said)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """The changes after which the stage fits on the available GPUs: settings first, then pools."""
        there = [one for one in self.pools if self.gpus is None or _gpus(one.trial.load) <= self.gpus]
        return [one for one in (*self._eased, self._shorter(), *there[:1]) if one]

    @cached_property
    def _eased(self) -> list[Remedy]:
        """The smallest sets of settings with which the stage fits."""
        settings = list(self._settings())
        sets = (combinations(settings, count) for count in range(1, len(settings) + 1))
        tried = ([self._remedy(" and ".join(w for w, _ in some), _merged(some)) for some in each] for each in sets)
        return [one for one in next(filter(any, tried), []) if one]

    @cached_property
    def advice(self) -> str:
        """The next action: the changes that fit; else the smallest hardware that fits; else why none does."""
        if self.remedies:
            return "set " + ", or ".join(f"{one.change} ({one.trial.said})" for one in self.remedies[:_NAMED])
        if self.pools:
            best = self.pools[0]
            there = "" if self.gpus is None else f" ({self.gpus} are there)"
            return f"use at least {_gpus(best.trial.load)} GPUs{there}: {best.change} ({best.trial.said})"
        return self._why_none()

    @cached_property
    def pools(self) -> list[Remedy]:
        """For each way to distribute roles over pools, a number of GPUs that fits; the smallest number first.

        If no such way and no settings are enough alone, all settings are changed as well.
        """
        every = list(self._settings())
        words = "".join(f"{words} and " for words, _ in every if not words.startswith("placement"))
        if (found := self._pools()) or self._eased or not every:
            return found
        eased = replace(self, load=replace(self.load, **_merged(every)))
        return [Remedy(words + one.change, one.trial) for one in eased._pools()]

    def _pools(self) -> list[Remedy]:
        """See `pools`.

        Roles that leave a pool take GPUs of this pool if that fits, a quarter if possible, so that the total stays the
        same.
        """
        step, on_gpus = self.load.sequence_parallel, [pool for pool in self.load.pools.values() if self._on_gpu(pool)]
        found = [self._smallest(pool.name) for pool in on_gpus]
        for home, moved in self._movable(on_gpus):
            sizes = (home.ranks // 4 or 1, *_POOLS)
            left = {size: home.ranks - size for size in sizes if home.ranks > size and (home.ranks - size) % step == 0}
            same = (self._placed(home.name, ranks, moved, size) for size, ranks in left.items())
            most = 1 if moved == ("rollout",) else len(_POOLS)  # a rollout is whole on every rank
            fewer = (self._smallest(home.name, moved, size) for size in _POOLS[:most])
            found.append(next(filter(None, chain(same, fewer)), None))
        return sorted(filter(None, found), key=lambda one: _gpus(one.trial.load))

    def _on_gpu(self, pool: Pool) -> bool:
        return device_of(self.load, pool, gpu_there=self.room.gpu_there) == "cuda"

    def _movable(self, pools: list[Pool]) -> Iterator[tuple[Pool, tuple[str, ...]]]:
        """Yield the pool of the first trained role with each group of roles that can get a separate pool."""
        for home in pools:
            if self.load.trained[:1] == (home.name,) or (home.name == MAIN and self.load.trained):
                others = [r for r in with_models(self.load.roles) if r in home.roles and r not in self.load.trained]
                groups = ([r for r in others if r == "rollout"], [r for r in others if r != "rollout"], others)
                yield from dict.fromkeys((home, tuple(group)) for group in groups if group)

    def _smallest(self, name: str, moved: tuple[str, ...] = (), size: int = 0) -> Remedy | None:
        """Try numbers of GPUs for the pool `name`: double them until they fit, then search below."""
        step, fits = self.load.sequence_parallel, lambda ranks: self._placed(name, ranks, moved, size) is not None
        doubled = takewhile(lambda ranks: ranks <= MOST_RANKS, (step << n for n in range(MOST_RANKS.bit_length())))
        most = next(filter(fits, doubled), 0)
        below = range(most // 2 // step * step + step, most, step)
        return self._placed(name, [*below, most][bisect_left(below, True, key=fits)], moved, size) if most else None

    def _placed(self, name: str, ranks: int, moved: tuple[str, ...], size: int) -> Remedy | None:
        """Try `ranks` GPUs for the pool `name`, with the roles `moved` in a new pool of `size` GPUs."""
        placement, kind = self.load.placement, self.load.pools[name].resources.kind
        head = (self.load.trained[0] if moved else COLLOCATED) if name == MAIN else name
        placed: dict[str, Any] = {**placement.placed, head: Resources(gpus=ranks, kind=kind)}
        for role in moved:
            own = role == moved[0]
            placed[role] = Resources(gpus=size, kind=kind) if own else Resources.model_validate({"with": moved[0]})
        made = Placement.model_validate({**placed, "sleep": placement.sleep})
        return self._remedy(f"placement: {_flow(made.model_dump())}", {"placement": made})

    def _remedy(self, words: str, change: Mapping[str, Any]) -> Remedy | None:
        trial = self.tried(replace(self.load, **change))
        return None if trial.over else Remedy(words, trial)

    def _settings(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the settings that may take less memory than those of the stage; `auto` has been tried already."""
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
        if any(width_of(load, "cuda" if self._on_gpu(pool) else "cpu") > 2 for pool in load.pools.values()):
            yield "runtime.dtype: bfloat16", {"dtype": "bfloat16"}
        elif any(shape.stored == 4 for shape in self.shapes.values()):  # ranks then share the file's pages
            yield "runtime.dtype: float32", {"dtype": "float32"}

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
        """Return the missing memory, with all settings that take less, and the largest part of the fullest rank."""
        trial = self.tried(replace(self.load, **_merged(self._settings())))
        peak = max(trial.residency.peaks, key=lambda peak: peak.bytes)
        held = [one for one in trial.residency.held if (one.phase, one.pool) == (peak.phase, peak.pool)]
        most = max(held, key=lambda one: one.bytes)
        more = "and no number of GPUs " if peak.device == "cuda" else ""
        short = f", {gib(trial.missing)} too much" if trial.missing > 0 else ""
        return (
            f"no setting {more}fits: {trial.said}{short}; the largest part of a rank is {most.part} of {most.role}, "
            f"{gib(most.bytes)}; use a smaller model, or devices with more memory"
        )


def _merged(settings: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return {name: value for _, change in settings for name, value in change.items()}


def _gpus(load: Load) -> int:
    """Return the number of GPUs of all pools; a stage without `gpus` has one."""
    return sum(pool.resources.gpus for pool in load.pools.values()) or 1


def _flow(value: Any) -> str:
    """Return a value as in run.yaml: `{policy: {gpus: 4}}`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
