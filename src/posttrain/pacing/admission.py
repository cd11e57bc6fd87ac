"""Admission policies over a bounded buffer: when prompts may be sampled, and which groups are trained together.

::

    free ──start──▶ running ──complete──▶ ready ──take──▶ trained
      ▲                │
      └──────drop──────┘        (the place is free again at most `refills` times; then it stays empty)

A batch is trained by one step, and has a place for each of its prompts. This module does not use tokens, weights or
time, so tests can try any schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar, final

from posttrain.domain.errors import InputError

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt in the buffer: `Entry(key=388, batch=12, version=11, ready=False)`."""

    key: int  # its position in the data stream
    batch: int  # the step that trains it
    version: int  # version of the policy that samples it, in steps trained
    ready: bool = False  # sampled and scored
    again: int = 0  # how many groups its place has lost


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """The progress of a stage: `Pace(step=12, version=12, steps=240, prompts=32, held=(…), given_up={})`."""

    step: int  # the next step to train
    version: int  # version of the sampling policy, in steps trained
    steps: int  # number of steps of the stage
    prompts: int  # groups of a batch
    held: tuple[Entry, ...]
    given_up: tuple[int, ...] = ()  # the batch of every place that stays empty

    def filled(self, batch: int) -> int:
        """Return how many places of a batch are running, ready or given up."""
        return sum(entry.batch == batch for entry in self.held) + self.given_up.count(batch)

    def whole(self, batch: int) -> bool:
        """Return whether a batch can be trained."""
        return self.filled(batch) == self.prompts and all(e.ready for e in self.held if e.batch == batch)


@final
@dataclass(frozen=True, slots=True)
class Admitted:
    """Prompts that may start now: `Admitted(batch=12, count=3, again=True)`."""

    batch: int
    count: int
    again: bool  # whether some prompts replace dropped groups


class AdmissionPolicy(Protocol):
    """Decides from the progress of a stage alone. A prompt is assigned to one batch when the prompt starts."""

    @property
    def lag(self) -> int:
        """The maximum number of steps by which a trained sample may be behind."""

    def capacity(self, prompts: int) -> int:
        """Return the minimum capacity of the buffer in groups; a smaller buffer could wait forever."""

    def admit(self, pace: Pace) -> tuple[int, int]:
        """Return a batch and how many of its prompts may start now, possibly 0."""

    def select(self, pace: Pace) -> Sequence[int] | None:
        """Return the keys to train in `pace.step`; None: not yet."""


@final
@dataclass(frozen=True, slots=True)
class InOrder:
    """Exact lag: version max(0, t − lag) samples the whole batch t, and batches are sampled in order.

    With lag 0 a step samples the batch that it trains. The result depends on the seed only, not on the timing of calls.
    """

    lag: int = 0

    def capacity(self, prompts: int) -> int:
        """Return the number of groups in the batch that is trained and in the batches ahead."""
        return (self.lag + 1) * prompts

    def admit(self, pace: Pace) -> tuple[int, int]:
        """Return the first incomplete batch and how many prompts it lacks."""
        batch = next((b for b in range(pace.step, pace.steps) if not pace.whole(b)), pace.steps)
        if batch >= min(pace.version + self.lag + 1, pace.steps):
            return batch, 0
        return batch, pace.prompts - pace.filled(batch)

    def select(self, pace: Pace) -> Sequence[int] | None:
        """Return the complete batch in the order of the stream."""
        if not pace.whole(pace.step):
            return None
        return sorted(entry.key for entry in pace.held if entry.batch == pace.step)


@final
@dataclass(slots=True)
class Buffer(Generic[T]):
    """Groups from admission to training.

    Args:
        policy: decides which prompts start and which groups are trained.
        prompts: the number of groups of a batch.
        steps: the number of steps of the stage.
        refills: how often a place may be filled again after its group was dropped.

    Every key is started once, and then trained once or dropped once. Places that were never filled come first, then
    those that lost the fewest groups, so the result does not depend on how many prompts start at a time.
    """

    policy: AdmissionPolicy
    prompts: int
    steps: int
    refills: int = 0
    _entries: dict[int, Entry] = field(default_factory=dict)
    _values: dict[int, T] = field(default_factory=dict)
    _given_up: list[int] = field(default_factory=list)
    _newest: int = -1  # the newest key that was started
    _lost: dict[int, list[int]] = field(default_factory=dict)  # batch → refills so far of each place to fill again

    def __post_init__(self) -> None:
        """Reject a policy whose buffer is smaller than a batch, since the stage would wait forever."""
        if (room := self.policy.capacity(self.prompts)) < self.prompts:
            name = type(self.policy).__name__
            raise InputError(
                f"{name} must have room for a whole batch ({self.prompts} groups), got a capacity of {room}"
            )

    def pace(self, step: int, version: int) -> Pace:
        """Return the progress of the stage for the policy."""
        return Pace(step, version, self.steps, self.prompts, tuple(self._entries.values()), tuple(self._given_up))

    def admit(self, step: int, version: int) -> Admitted | None:
        """Return the prompts that may start now.

        Raises:
            InputError: the policy admits prompts of a past batch or of a batch beyond its lag, or more prompts than
                there are places.
        """
        pace = self.pace(step, version)
        batch, count = self.policy.admit(pace)
        if not count:
            return None
        name, free = type(self.policy).__name__, self.prompts - pace.filled(batch)
        last = min(version + self.policy.lag, self.steps - 1)
        if not step <= batch <= last:
            raise InputError(f"{name} must admit prompts of batch {step} to {last}, got batch {batch}")
        if not 0 < count <= free:
            raise InputError(f"{name} must admit the groups that a batch lacks ({free} of batch {batch}), got {count}")
        return Admitted(batch, count, again=count > free - len(self._lost.get(batch, ())))

    def start(self, keys: Sequence[int], batch: int, version: int) -> None:
        """Record that these prompts are being sampled.

        Raises:
            InputError: a prompt was started before, or has no place.
        """
        lost = self._lost.get(batch, [])
        fresh = self.prompts - self.pace(0, 0).filled(batch) - len(lost)
        for place, key in enumerate(keys):
            if key <= self._newest or key in self._entries:
                raise InputError(
                    f"prompt {key} was already started (the newest is {self._newest}); start each prompt only once"
                )
            if len(self._entries) >= self.policy.capacity(self.prompts):
                raise InputError(f"the buffer is full ({len(self._entries)} groups), so prompt {key} has no place")
            again = 0 if place < fresh or not lost else lost.pop(lost.index(min(lost))) + 1
            self._entries[key], self._newest = Entry(key, batch, version, again=again), key

    def complete(self, key: int, value: T) -> None:
        """Record that a group is sampled and scored.

        Raises:
            InputError: the group was not running.
        """
        self._entries[key], self._values[key] = replace(self._running(key), ready=True), value

    def drop(self, key: int) -> None:
        """Drop a group from training; its place is free again, or stays empty after `refills` refills.

        Raises:
            InputError: the group was not running.
        """
        gone = self._running(key)
        del self._entries[key]
        if gone.again < self.refills:
            self._lost.setdefault(gone.batch, []).append(gone.again)
        else:
            self._given_up.append(gone.batch)

    def take(self, keys: Sequence[int], step: int) -> list[T]:
        """Remove and return the groups that the policy selected for a step.

        Raises:
            InputError: a group is not ready, was taken before, is in another batch, or exceeds the policy's lag; or the
                selection omits groups of the batch, which would then never be trained.
        """
        name, lag, chosen = type(self.policy).__name__, self.policy.lag, set(keys)
        for key in keys:
            if key not in self._values:
                raise InputError(f"prompt {key} is not ready to be trained; wait until its group is complete")
            of = self._entries[key]
            if of.batch != step or of.version < step - lag:
                raise InputError(
                    f"{name} must select prompts of batch {step}, by versions of {max(0, step - lag)} and later, got "
                    f"prompt {key} of batch {of.batch} by version {of.version}"
                )
        pace = self.pace(step, 0)
        if not pace.whole(step) or len(keys) != len(chosen) or len(keys) + pace.given_up.count(step) != self.prompts:
            wanted = self.prompts - pace.given_up.count(step)
            raise InputError(
                f"{name} must select each of the {wanted} groups of batch {step} once, got {len(keys)} keys, "
                f"{len(chosen)} of them different; {pace.filled(step)} of {self.prompts} places are filled"
            )
        for key in keys:
            del self._entries[key]
        return [self._values.pop(key) for key in keys]

    def trained(self, step: int) -> None:
        """Drop the record of the empty places of a finished step."""
        self._given_up = [batch for batch in self._given_up if batch > step]
        self._lost.pop(step, None)

    def ready(self) -> list[tuple[Entry, T]]:
        """Return the groups for a checkpoint, in the order of the stream."""
        return [(self._entries[key], self._values[key]) for key in sorted(self._values)]

    @property
    def lost(self) -> Mapping[int, Sequence[int]]:
        """By batch, the number of earlier refills of each place that must be filled again."""
        return {batch: tuple(places) for batch, places in self._lost.items() if places}

    def restore(
        self,
        held: Iterable[tuple[Entry, T]],
        given_up: Sequence[int],
        newest: int,
        lost: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Continue with the groups of a checkpoint.

        Args:
            newest: the last key that was started.
            lost: see the property.
        """
        for entry, value in held:
            self._entries[entry.key], self._values[entry.key] = entry, value
        self._given_up, self._newest = list(given_up), newest
        self._lost = {batch: list(places) for batch, places in (lost or {}).items()}

    def copied(self) -> Buffer[T]:
        """Return a copy, which the caller can restore later."""
        return replace(
            self,
            _entries=dict(self._entries),
            _values=dict(self._values),
            _given_up=list(self._given_up),
            _lost={batch: list(places) for batch, places in self._lost.items()},
        )

    def _running(self, key: int) -> Entry:
        entry = self._entries.get(key)
        if entry is None or entry.ready:
            raise InputError(f"prompt {key} is not running: it was answered twice or never requested")
        return entry
