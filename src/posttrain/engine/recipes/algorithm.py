"""The interface of algorithms: required columns, kept groups, documents, credit and objectives.

::

    groups ─keep─▶ groups ─form─▶ batch ─(columns it requires)─▶ batch ─credit─▶ batch ─updates─▶ optimiser steps

Every method is a function of its arguments and the algorithm's configuration, so a step can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import Objective, Totals
from posttrain.engine.batch import Need, TokenBatch
from posttrain.engine.samples import Group, Prompt, Sample, Trajectory
from posttrain.sandbox.port import Score


@final
@dataclass(frozen=True, slots=True)
class PromptSource:
    """The source of an algorithm that samples: `PromptSource(prompts=32, samples=8, max_tokens=64)`."""

    prompts: int  # groups of one step
    samples: int  # of each prompt
    max_tokens: int  # of a response
    temperature: float = 1.0  # stored with each sample; the learner divides its logits by it
    refills: int = 0  # maximum refills of a dropped group's place
    turns: int = 1  # maximum responses per sample, with an observation between two responses
    observed: int = 0  # maximum tokens of one observation
    stop: tuple[str, ...] = ()  # strings that end a response
    trained: int | None = None  # maximum samples of a prompt that become documents; None: all

    def sampling(self, prompt: int, *, again: bool = False) -> int:
        """Return the maximum tokens that a prompt's samples cost, by the rule of `jobs.Progress`.

        Args:
            prompt: tokens of the prompt.
            again: whether each turn reads all earlier tokens again.
        """
        response = self.max_tokens + self.observed
        read = sum(prompt + turn * response - self.observed for turn in range(1, self.turns)) if again else 0
        return prompt + self.samples * (self.turns * response - self.observed + read)

    def document(self, prompt: int) -> int:
        """Return the maximum tokens of a sample, including its prompt of `prompt` tokens."""
        return prompt + self.turns * self.max_tokens + (self.turns - 1) * self.observed


@final
@dataclass(frozen=True, slots=True)
class RowSource:
    """The source of an algorithm that learns from given rows: `RowSource(rows=64)`."""

    rows: int  # rows of one step


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A column that the loop fills before credit is assigned: `Column("values", role="critic", need="values")`."""

    name: str
    role: str
    need: Need
    wide: int = 0  # numbers per token, which stay on the workers (the batch has handles); 0: one number, in the batch


REFERENCE = Column("reference_logprobs", "reference", "logprobs")
VALUES = Column("values", "critic", "values")
PROXIMAL = Column("proximal_logprobs", "policy", "logprobs")


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """The scored samples of one prompt."""

    prompt: Prompt
    group: Group
    scores: tuple[Score, ...]  # one per sample
    step: int = 0  # the step that trains on the group

    @property
    def answers(self) -> tuple[Trajectory, ...]:
        """The last sequence of each sample, [samples]."""
        return tuple(sample.last for sample in self.group.samples)

    @property
    def ids(self) -> list[str]:
        """The samples' ids in traces, [samples]: `<step>.<prompt's position in the data stream>.<sample>`."""
        return [self.id_of(sample) for sample in self.group.samples]

    def id_of(self, sample: Sample) -> str:
        """Return the id of one sample."""
        return f"{self.step}.{self.group.key}.{sample.index}"

    @property
    def tokens(self) -> int:
        """The prompt's tokens, once, and the tokens of the responses and of the observations between them."""
        return len(self.prompt.tokens) + sum(len(answer) - len(answer.prompt) for answer in self.answers)

    @property
    def read_again(self) -> int:
        """The tokens that an engine without sessions reads again for further responses."""
        return sum(answer.read_again for answer in self.answers)

    def scored(self, scores: tuple[Score, ...]) -> ScoredGroup:
        """Return the same samples with these scores."""
        return replace(self, scores=scores)

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """The rewards, [samples], NaN without a score."""
        return np.array([np.nan if s.score is None else s.score for s in self.scores], dtype=np.float64)


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """The decision not to train on a group but to replace it: `Drop("all rewards are equal")`."""

    reason: str


def every_item(batch: TokenBatch) -> Sequence[int]:
    """Return all items: the default of `Update.computes`."""
    return range(len(batch.item_lengths))


@final
@dataclass(frozen=True, slots=True)
class Update:
    """The objective of one role on a step's batch.

    The loss of a mini-batch is divided by totals of all its items, computed or not. Items without a gradient may
    therefore be left out of `computes` without changing the result.
    """

    role: str
    objective: Callable[[Totals], Objective]  # totals of a mini-batch → objective
    epochs: int = 1  # passes over the batch
    mini_batches: int = 1  # optimiser steps per pass
    # whether credit is assigned to each group separately: if the objective also has a single denominator, gradients may
    # be summed as groups arrive, and divided later
    by_group: bool = False
    computes: Callable[[TokenBatch], Sequence[int]] = every_item  # items that have a gradient
    clip: tuple[float, float] | None = None  # clip of the ratio below and above 1, for traces; None: no clip


R_contra = TypeVar("R_contra", contravariant=True)


class Algorithm(Protocol):
    """The interface of every algorithm."""

    def requires(self, step: int) -> Sequence[Column]:
        """Return the columns that `credit` and the objectives read besides those of the samples; default: none."""
        return ()

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add the columns that the objectives use as weights: advantages, returns, labels; default: none."""
        return batch

    def updates(self, step: int) -> Sequence[Update]:
        """Return which roles learn in this step, and their objectives."""


class RolloutAlgorithm(Algorithm, Protocol):
    """An algorithm that learns from its own policy's samples. By default, every sample is a document."""

    # whether `form` forms the documents of each group separately, in order: columns of a step are then filled while its
    # groups are sampled
    groupwise: bool = False
    # whether a token is credited with the score earned at that token, if the reward reports scores by token; otherwise
    # only the sum of the scores counts
    reads_token_scores: bool = False

    @property
    def source(self) -> PromptSource:
        """The number and limits of a step's samples."""

    def keep(self, group: ScoredGroup) -> Drop | None:
        """Return why a group is dropped and replaced; None: the group is trained on."""
        return None

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Return the documents of a step; None if no group has anything to train on."""
        return pack(groups)

    def report(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Return the algorithm's own metrics over all groups that a step sampled."""
        return {}

    def unused(self, step: int) -> str:
        """Return why a scored sample is in no update, for its trace."""
        return "not chosen"


class RowAlgorithm(Algorithm, Protocol[R_contra]):
    """An algorithm that learns from rows."""

    @property
    def source(self) -> RowSource:
        """The number of rows of a step."""

    def form(self, rows: Sequence[R_contra], seed: int) -> TokenBatch:
        """Return the documents of a step."""

    def max_tokens(self, row: R_contra) -> int:
        """Return the number of tokens of a row's documents."""


def every_sample(group: ScoredGroup) -> Sequence[int]:
    """Return all samples of a group whose environment did not fail."""
    return [i for i, answer in enumerate(group.answers) if answer.status != "error"]


def pack(
    groups: Sequence[ScoredGroup], which: Callable[[ScoredGroup], Sequence[int]] = every_sample
) -> TokenBatch | None:
    """Return samples as documents.

    The batch has the document columns `reward` ([D] float64, NaN without a score) and `group`, and the column
    `token_scores` if a reward reports scores by token.

    Args:
        which: selects the samples of a group; by default all samples whose environment did not fail.

    Returns:
        None if no sample is selected.

    Raises:
        InputError: a sample has several sequences; the algorithm must define which of them are trained with which
            reward.
    """
    taken = [(at, group, list(which(group))) for at, group in enumerate(groups)]
    samples = [(group, group.group.samples[i]) for _, group, chosen in taken for i in chosen]
    if not samples:
        return None
    if many := next(((group.id_of(s), len(s.sequences)) for group, s in samples if len(s.sequences) != 1), None):
        raise InputError(
            f"sample {many[0]} must be one sequence to be trained, got {many[1]} sequences; build documents from "
            "them in form()"
        )
    ids = [group.id_of(sample) for group, sample in samples]
    batch = TokenBatch.pack([sample.last.document for _, sample in samples], sample_ids=ids)
    rewards = np.concatenate([group.rewards[chosen] for _, group, chosen in taken if chosen])
    numbers = torch.tensor([at for at, _, chosen in taken for _ in chosen])
    batch = batch.with_document_columns(reward=torch.from_numpy(rewards), group=numbers)
    scores = [group.scores[i] for _, group, chosen in taken for i in chosen]
    return _earned(batch, [len(sample.last.prompt) for _, sample in samples], scores)


def with_temperature(batch: TokenBatch | None, groups: Sequence[ScoredGroup]) -> TokenBatch | None:
    """Add the groups' temperature to documents that an algorithm formed without one.

    Raises:
        InputError: the groups were sampled at different temperatures.
    """
    if batch is None or "temperature" in batch.document_columns:
        return batch
    told = {answer.temperature for group in groups for answer in group.answers}
    found = sorted(one for one in told if one is not None)
    if len(found) > 1:
        raise InputError(
            f"documents of groups sampled at several temperatures must each have a temperature, got {found} and a "
            "batch without the column temperature; create the documents with Trajectory.document"
        )
    every = [torch.full((len(batch),), one, dtype=torch.float64) for one in found]
    return batch.with_document_columns(temperature=every[0]) if every else batch


def _earned(batch: TokenBatch, prompts: Sequence[int], scores: Sequence[Score]) -> TokenBatch:
    """Add the column `token_scores`, if any score has per-token values."""
    if not any(score.at for score in scores):
        return batch
    column = torch.zeros(len(batch.tokens))
    for start, prompt, score in zip(accumulate(batch.lengths, initial=0), prompts, scores, strict=False):
        for token, value in score.at.items():
            column[start + prompt + token] = value
    return batch.with_columns(token_scores=column)
