"""The interface between controller and recipe, the data cursor, and the checkpoint form of waiting groups.

The data cursor records which documents were consumed, and in which order. The order is an infinite stream: epoch 0's
permutation, then epoch 1's, and so on, each derived from (seed, epoch). The whole state is one number, the count of
documents read, so a job that resumes anywhere, even at an epoch boundary, reads the same documents as an
uninterrupted job.

A checkpoint contains the sampled groups that wait for training: arrays as safetensors, the rest as JSON.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from safetensors.numpy import load_file

from posttrain.domain.canonical import canonical_json, derive_seed, digest_bytes
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.loop.publication import Roles
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Group, Prompt, Sample, Segment, Trajectory
from posttrain.engine.trace import StepReport, Trace
from posttrain.engine.weights.checkpoint import write_tensors
from posttrain.engine.weights.probe import Attested
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.pacing.admission import Entry
from posttrain.sandbox.port import Score

_ARRAYS, _REST = "buffer.safetensors", "buffer.json"


class Journal:
    """A cursor over `documents` rows.

    Args:
        documents: number of rows of the data set.
        seed: the stage's seed.
        consumed: number of documents already read, as recorded by a checkpoint.

    Raises:
        InputError: there are no documents.
    """

    def __init__(self, documents: int, seed: int, consumed: int = 0) -> None:
        if documents < 1:
            raise InputError(f"a data set must have at least 1 row to train on, got {documents}")
        self.documents = documents
        self.consumed = consumed
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def peek(self, count: int) -> list[int]:
        """Return the row numbers of the next `count` documents.

        The documents may extend into the next epoch, and may then contain a row twice.
        """
        return [self.row(position) for position in range(self.consumed, self.consumed + count)]

    def take(self, count: int) -> list[tuple[int, int]]:
        """Read the next `count` documents; return each document's position in the stream and row number.

        A position never repeats within a stage, so random numbers are derived from positions and not from row numbers.
        """
        rows = self.peek(count)
        start, self.consumed = self.consumed, self.consumed + count
        return list(enumerate(rows, start))

    def row(self, position: int) -> int:
        """Return the row at a position of the stream."""
        epoch, offset = divmod(position, self.documents)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "journal", epoch)))
            self._epoch, self._order = epoch, generator.permutation(self.documents).tolist()
        return self._order[offset]


class Reserve(Protocol):
    """A budget check, called before a step costs more than its declared maximum."""

    def __call__(self, spent: int, more: int, *, refuse: bool = True) -> bool:
        """Return whether the tokens that a step has spent and its further tokens are within the budget.

        Args:
            refuse: raise if the tokens exceed the budget; the step must not have trained yet.

        Raises:
            BudgetExceededError: the budget would be exceeded; the step's work was dropped and a checkpoint was written.
        """


def free(spent: int, more: int, *, refuse: bool = True) -> bool:
    """Return True: any cost is within the budget."""
    return True


class Recipe(Protocol):
    """A training method.

    In every implementation, the effect of step N is a function of (seed, N, weights, moments, journal position) alone,
    and `max_tokens` is at least the number of tokens that `step` then reports.
    """

    phase: str  # "sft", "grpo"
    steps: int
    journal: Journal
    roles: Roles  # the recipe changes their weights

    def max_tokens(self, step: int) -> int:
        """Return the maximum number of tokens that the next step may spend."""

    def step(self, step: int, trace: Trace, reserve: Reserve = ...) -> StepReport:
        """Run training step `step` (0-based): sample, score, update.

        Args:
            reserve: called before the tokens of the step exceed what `max_tokens` returned.
        """

    def publish_weights(self, version: PolicyVersion) -> Attested | None:
        """Publish the current policy to the rollout under this version; return how it was attested, if one samples."""

    def rewind(self) -> None:
        """Drop the work of a step that has not trained yet; a resumed job repeats it."""

    def save(self, path: Path) -> Mapping[str, str]:
        """Write the groups that wait for training into a checkpoint; return a map from file name to digest."""

    def restore(self, path: Path) -> None:
        """Restore the groups that `save` wrote; the journal is at the checkpoint's position."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Measure the policy after `step` steps, if a probe is due, without changing any state."""

    def probe_max_tokens(self, step: int) -> int:
        """Return the maximum number of tokens that `probe(step)` may spend; 0 if no probe is due."""


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A group and its place in the buffer."""

    key: int
    batch: int
    version: int  # of the sampling policy: the number of steps trained
    group: ScoredGroup
    dropped: str = ""  # why the group is not trained on; the step's metrics include the group

    @property
    def entry(self) -> Entry:
        """The group's buffer entry."""
        return Entry(self.key, self.batch, self.version, ready=True)


def write_held(
    path: Path, held: Sequence[Held], given_up: Sequence[int], lost: Mapping[int, Sequence[int]]
) -> Mapping[str, str]:
    """Write groups into a checkpoint; return a map from file name to digest.

    Args:
        given_up: the batch number of every place that stays empty.
        lost: batch → for each place to be refilled, the number of earlier refills.
    """
    segments = [segment for one in held for segment, again in _segments(one.group) if not again]
    none = np.zeros(0, dtype=np.float32)
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(segment.tokens for segment in segments)])
    logprobs = np.concatenate([none, *(none if s.logprobs is None else s.logprobs for s in segments)])
    tensors = {"tokens": torch.tensor(tokens), "logprobs": torch.tensor(logprobs)}
    places = {str(batch): list(often) for batch, often in lost.items()}
    data = canonical_json({"groups": [_written(one) for one in held], "given_up": list(given_up), "lost": places})
    (path / _REST).write_bytes(data)
    return {_ARRAYS: write_tensors(path / _ARRAYS, tensors, {}), _REST: digest_bytes(data)}


def read_held(path: Path, prompt: Callable[[int], Prompt]) -> tuple[list[Held], list[int], dict[int, list[int]]]:
    """Return the groups, `given_up` and `lost` that `write_held` wrote into a verified checkpoint.

    Args:
        prompt: returns the prompt at a position in the data stream.

    Raises:
        IntegrityError: a file is missing.
    """
    for name in (_ARRAYS, _REST):
        if not (path / name).is_file():
            raise IntegrityError(
                f"checkpoint {path} lacks {name} (samples that wait for training); resume from another checkpoint"
            )
    found, arrays = json.loads((path / _REST).read_bytes()), load_file(path / _ARRAYS)
    cursor = _Cursor(arrays["tokens"], arrays["logprobs"])
    lost = {int(batch): often for batch, often in found.get("lost", {}).items()}
    return [_read(one, prompt, cursor) for one in found["groups"]], list(found["given_up"]), lost


@final
@dataclass(slots=True)
class _Cursor:
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    at: int = 0
    sampled: int = 0

    def segment(self, source: Any, size: int, version: str, temperature: float | None = None) -> Segment:
        """Return the next segment."""
        tokens, logprobs = self.tokens[self.at : self.at + size], None
        self.at += size
        if source == "sampled":
            logprobs = self.logprobs[self.sampled : self.sampled + size]
            self.sampled += size
        return Segment(tokens, source, logprobs, version, temperature)


def _segments(group: ScoredGroup) -> Iterator[tuple[Segment, bool]]:
    """Yield each segment, and whether it repeats the prompt that the group began with."""
    first: Segment | None = None
    for sample in group.group.samples:
        for sequence in sample.sequences:
            for at, segment in enumerate(sequence.segments):
                yield segment, first is not None and not at and np.array_equal(segment.tokens, first.tokens)
                first = first or segment


def _written(one: Held) -> dict[str, Any]:
    places = iter(_segments(one.group))

    def place() -> list[Any] | None:
        segment, again = next(places)
        return None if again else [segment.source, len(segment.tokens), segment.version, segment.temperature]

    samples = [
        [
            {
                "status": q.status,
                "segments": [place() for _ in q.segments],
                **({"stopped": True} if q.stopped else {}),
            }
            for q in sample.sequences
        ]
        for sample in one.group.group.samples
    ]
    stands = {"key": one.key, "batch": one.batch, "version": one.version, "dropped": one.dropped}
    return {**stands, "samples": samples, "scores": [_score_written(score) for score in one.group.scores]}


def _read(one: Mapping[str, Any], prompt: Callable[[int], Prompt], cursor: _Cursor) -> Held:
    first: Segment | None = None

    def segment(said: list[Any] | None) -> Segment:
        nonlocal first
        if said is None:
            assert first is not None
            return first
        found = cursor.segment(*said)
        first = first or found
        return found

    def sequence(said: Mapping[str, Any]) -> Trajectory:
        return Trajectory(tuple(segment(s) for s in said["segments"]), said["status"], said.get("stopped", False))

    samples = tuple(Sample(index, tuple(sequence(q) for q in found)) for index, found in enumerate(one["samples"]))
    scores = tuple(_score_read(score) for score in one["scores"])
    group = ScoredGroup(prompt(one["key"]), Group(one["key"], samples), scores, one["batch"])
    return Held(one["key"], one["batch"], one["version"], group, one["dropped"])


def _score_written(score: Score) -> dict[str, Any]:
    parts = {name: _score_written(part) for name, part in score.parts.items()}
    said = {"score": score.score, "components": dict(score.components), "status": score.status}
    at = {"at": [[token, value] for token, value in score.at.items()]} if score.at else {}
    return {**said, "message": score.message, "parts": parts, **at}


def _score_read(said: Mapping[str, Any]) -> Score:
    parts = {name: _score_read(part) for name, part in said["parts"].items()}
    return Score(said["score"], said["components"], said["status"], said["message"], parts, dict(said.get("at", ())))
