"""What a rollout takes and gives: prompts by their place in the data stream, and groups of trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Provenance
from posttrain.engine.samples import Group, Trajectory


@final
@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts to sample from: `PromptBatch(tokens=((1, 5, 9),), keys=(388,))`.

    Random numbers are a function of key and sample, so a prompt gets the same responses on any rank and in any company.
    """

    tokens: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]  # position in the data stream; repeats only where samples go on by themselves
    first: tuple[int, ...] = ()  # the number of each prompt's first sample, where a sample goes on by itself; else 0

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tokens) or len(self.first) not in (0, len(self.tokens)):
            given = f"{len(self.keys)} and {len(self.first)}"
            raise InputError(f"keys and first samples must be one per prompt ({len(self.tokens)}), got {given}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def item_lengths(self) -> tuple[int, ...]:
        """Tokens of every prompt."""
        return tuple(len(prompt) for prompt in self.tokens)

    def select_items(self, items: Sequence[int], /) -> PromptBatch:
        """The named prompts, in the named order; may be none."""
        first = tuple(self.first[i] for i in items) if self.first else ()
        return PromptBatch(tuple(self.tokens[i] for i in items), tuple(self.keys[i] for i in items), first)


@final
@dataclass(frozen=True, slots=True)
class Rollouts:
    """One group of samples per prompt, in the order of the prompts."""

    groups: tuple[Group, ...]
    provenance: Provenance = field(default_factory=Provenance)
    counts: Mapping[str, int] = field(default_factory=dict)  # see `RolloutEngine.counts`, of these groups

    @classmethod
    def gather(cls, parts: Sequence[Rollouts], shards: Sequence[Sequence[int]], /) -> Rollouts:
        """The groups of all ranks in the order of the prompts.

        Raises:
            InputError: a rank returned another number of groups than it had prompts.
        """
        if [len(part.groups) for part in parts] != [len(shard) for shard in shards]:
            raise InputError(
                f"ranks must return one group per prompt ({[len(s) for s in shards]}), "
                f"got {[len(p.groups) for p in parts]}"
            )
        placed = {
            prompt: group
            for part, shard in zip(parts, shards, strict=True)
            for group, prompt in zip(part.groups, shard, strict=True)
        }
        filled = next((part for part in parts if part.groups), parts[0])
        counts = Counter[str]()
        for part in parts:
            counts.update(part.counts)  # keeps what is 0
        return cls(tuple(placed[prompt] for prompt in sorted(placed)), replace(filled.provenance, rank=0), counts)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The answer of every sample, prompt by prompt."""
        return tuple(sample.last for group in self.groups for sample in group.samples)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(sample.generated for group in self.groups for sample in group.samples)
