"""Groups that were sampled and wait to be trained, in a checkpoint: arrays as safetensors, the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.numpy import load_file

from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.domain.errors import IntegrityError
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Group, Prompt, Sample, Segment, Trajectory
from posttrain.engine.weights.checkpoint import write_tensors
from posttrain.pacing.admission import Entry
from posttrain.sandbox.port import Score

_ARRAYS, _REST = "buffer.safetensors", "buffer.json"


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A group, and where it stands."""

    key: int
    batch: int
    version: int  # that sampled it, in steps trained
    group: ScoredGroup
    dropped: str = ""  # why it is not trained on; it is in its step's metrics all the same

    @property
    def entry(self) -> Entry:
        """Its place in the buffer."""
        return Entry(self.key, self.batch, self.version, ready=True)


def write_held(
    path: Path, held: Sequence[Held], given_up: Sequence[int], lost: Mapping[int, Sequence[int]]
) -> Mapping[str, str]:
    """File name → digest.

    Args:
        given_up: the batch of every place that stays empty.
        lost: batch → of each place that is to be filled again, how often it was before.
    """
    segments = [segment for one in held for segment, again in _segments(one.group) if not again]
    none = np.zeros(0, dtype=np.float32)
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(segment.tokens for segment in segments)])
    logprobs = np.concatenate([none, *(none if s.logprobs is None else s.logprobs for s in segments)])
    tensors = {"tokens": torch.tensor(tokens), "logprobs": torch.tensor(logprobs)}
    places = {str(batch): list(often) for batch, often in lost.items()}
    groups = [_written(one) for one in held]
    data = canonical_json({"groups": groups, "given_up": list(given_up), "lost": places})
    (path / _REST).write_bytes(data)
    return {_ARRAYS: write_tensors(path / _ARRAYS, tensors, {}), _REST: digest_bytes(data)}


def read_held(path: Path, prompt: Callable[[int], Prompt]) -> tuple[list[Held], list[int], dict[int, list[int]]]:
    """What `write_held` was given, which wrote it into a checkpoint that was verified.

    Args:
        prompt: that of a position in the data stream.

    Raises:
        IntegrityError: it is not there.
    """
    for name in (_ARRAYS, _REST):
        if not (path / name).is_file():
            raise IntegrityError(f"checkpoint {path} must hold {name}, what waited to be trained; resume from another")
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
        """The next one."""
        tokens, logprobs = self.tokens[self.at : self.at + size], None
        self.at += size
        if source == "sampled":
            logprobs = self.logprobs[self.sampled : self.sampled + size]
            self.sampled += size
        return Segment(tokens, source, logprobs, version, temperature)


def _segments(group: ScoredGroup) -> Iterator[tuple[Segment, bool]]:
    """Each with whether it is the prompt that the group began with, once more."""
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
