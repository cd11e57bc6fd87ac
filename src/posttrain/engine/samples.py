"""The output of a rollout: samples, which consist of sequences of segments. Tokens are arrays, never lists.

A sequence begins with its prompt, followed alternately by the policy's responses and an environment's observations.
These types also cover turns and tools, templates that rewrite history (a sample has several sequences) and responses
that newer weights continued (segments have several versions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar, final

import numpy as np
import numpy.typing as npt

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Source = Literal["prompt", "sampled", "observed"]
Status = Literal["ok", "truncated", "error", "aborted"]  # error: the sample's environment failed


@final
@dataclass(frozen=True, slots=True)
class Prompt:
    """One row, ready to sample from: `Prompt(tokens=(1, 5, 9), text="user: Q: sort 31", row={"answer": "13", …})`."""

    tokens: Sequence[int]
    text: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens of one origin: `Segment(tokens=[9, 2], source="sampled", logprobs=[-0.5, -1.5], version="0.12")`."""

    tokens: Ints  # [n]
    source: Source
    logprobs: Floats | None = None  # [n], if sampled: under the sampling policy, at the sampling temperature
    version: str = ""  # of the sampling policy
    temperature: float | None = None  # the temperature at which tokens were sampled; None: unknown

    def __post_init__(self) -> None:
        given = None if self.logprobs is None else len(self.logprobs)
        wanted = len(self.tokens) if self.source == "sampled" else None
        if given != wanted:
            raise InputError(
                f"a {self.source} segment must have {wanted} log-probabilities, got {given}; check what wrote the "
                "segment"
            )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sequence: a prompt, then segments that were sampled or observed.

    A response that ended includes its end-of-sequence token. A response with the status `truncated` reached the token
    limit and has no such token. A response that ended at a stop string is `stopped` and has no such token either; its
    last token is text.
    """

    segments: tuple[Segment, ...]
    status: Status = "ok"
    stopped: bool = False  # whether the response ended at a stop string
    fault: str = ""  # one line, if the status is `error`

    def __post_init__(self) -> None:
        sources = [segment.source for segment in self.segments]
        if not sources or sources[0] != "prompt" or "prompt" in sources[1:]:
            raise InputError(
                "a sequence must begin with a prompt and have no other prompt, got segments "
                f"{', '.join(sources) or 'none'}"
            )

    @classmethod
    def answer(
        cls,
        prompt: Sequence[int] | Ints,
        tokens: Sequence[int] | Ints,
        logprobs: Sequence[float] | Floats,
        *,
        truncated: bool,
        stopped: bool = False,
        version: str = "",
    ) -> Trajectory:
        """Return a prompt with one sampled response."""
        sampled = Segment(_ints(tokens), "sampled", np.asarray(logprobs, dtype=np.float32), version)
        return cls((Segment(_ints(prompt), "prompt"), sampled), "truncated" if truncated else "ok", stopped)

    def sampled_with(self, **told: Any) -> Trajectory:
        """Return a copy with the sampling policy's `version` and the `temperature` in every sampled segment."""
        marked = tuple(replace(s, **told) if s.source == "sampled" else s for s in self.segments)
        return replace(self, segments=marked)

    def ended(self, status: Status, fault: str = "") -> Trajectory:
        """Return a copy with this status."""
        return replace(self, status=status, fault=fault)

    def __len__(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def prompt(self) -> Ints:
        """The tokens of the prompt, [p]."""
        return self.segments[0].tokens

    @property
    def response(self) -> Ints:
        """All tokens after the prompt, observations included, [r]."""
        return _joined([segment.tokens for segment in self.segments[1:]], np.int32)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Which tokens of the response the policy sampled, [r]; only these are trained."""
        return _joined([np.full(len(s.tokens), s.source == "sampled") for s in self.segments[1:]], np.bool_)

    @property
    def logprobs(self) -> Floats:
        """Log-probabilities under the sampling policy, [r]; 0 at observed tokens."""
        kind = np.float32
        parts = [np.zeros(len(s.tokens), kind) if s.logprobs is None else s.logprobs for s in self.segments[1:]]
        return _joined(parts, kind)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of the sampling policies, in the order of the response."""
        return tuple(dict.fromkeys(s.version for s in self.segments if s.source == "sampled" and s.version))

    @property
    def temperature(self) -> float | None:
        """The sampling temperature; None: unknown.

        Raises:
            InputError: turns were sampled at different temperatures.
        """
        found = list(dict.fromkeys(s.temperature for s in self.segments if s.source == "sampled"))
        if len(found) > 1:
            told = ", ".join(map(str, found))
            raise InputError(
                f"all turns of a sample must have the same temperature, got {told}; set one temperature in `source`"
            )
        return found[0] if found else None

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended the sequence."""
        return self.status == "truncated"

    @property
    def closed(self) -> bool:
        """Whether the last token is an end of sequence, which is not part of the text."""
        return not (self.truncated or self.stopped)

    @property
    def generated(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(segment.tokens) for segment in self.segments if segment.source == "sampled")

    @property
    def turns(self) -> tuple[Segment, ...]:
        """The policy's responses, in order."""
        return tuple(segment for segment in self.segments if segment.source == "sampled")

    @property
    def turn_spans(self) -> list[tuple[int, int]]:
        """The span of each turn among the response's tokens: [first, one after the last]."""
        each = zip(accumulate(len(segment.tokens) for segment in self.segments[1:]), self.segments[1:], strict=True)
        return [(end - len(s.tokens), end) for end, s in each if s.source == "sampled"]

    @property
    def read_again(self) -> int:
        """The tokens that an engine without sessions reads again: for each later response, all until the one before."""
        each = zip(accumulate(len(segment.tokens) for segment in self.segments), self.segments[:-1], strict=False)
        return sum(end for end, segment in each if segment.source == "sampled")

    def went_on(self, observed: Sequence[int], answered: Trajectory) -> Trajectory:
        """Return the sequence with an observation and the response to it appended.

        Args:
            answered: a sequence whose prompt is this whole sequence followed by the observation.
        """
        seen = Segment(_ints(observed), "observed")
        return Trajectory((*self.segments, seen, *answered.segments[1:]), answered.status, answered.stopped)

    @property
    def document(self) -> Document:
        """Return the sequence as a document with behaviour log-probabilities; observed tokens are not trained."""
        sampled = self.sampled if any(segment.source == "observed" for segment in self.segments) else None
        return Document(self.prompt, self.response, self.logprobs, sampled, self.versions, self.temperature)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One answer to a prompt: one sequence, or several if a template rewrote the history."""

    index: int  # number among the samples of the prompt
    sequences: tuple[Trajectory, ...]

    @property
    def last(self) -> Trajectory:
        """The sequence that ends with the answer."""
        return self.sequences[-1]

    @property
    def status(self) -> Status:
        """The status of the last sequence."""
        return self.last.status

    @property
    def generated(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(sequence.generated for sequence in self.sequences)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one prompt, in order."""

    key: int  # the prompt's position in the data stream
    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)


def groups_of(answers: Sequence[Trajectory], keys: Sequence[int], samples: int) -> tuple[Group, ...]:
    """Return single sequences, prompt by prompt, as groups of `samples`.

    Raises:
        InputError: the number of sequences is not the number of prompts times `samples`.
    """
    if len(answers) != len(keys) * samples:
        raise InputError(
            f"{len(keys)} prompts must have {samples} samples each, got {len(answers)} samples; check the engine"
        )
    return tuple(
        Group(key, tuple(Sample(i, (answer,)) for i, answer in enumerate(answers[at * samples : (at + 1) * samples])))
        for at, key in enumerate(keys)
    )


def _ints(tokens: Sequence[int] | Ints) -> Ints:
    return np.asarray(tokens, dtype=np.int32)


T = TypeVar("T", bound=np.generic)


def _joined(parts: Sequence[npt.NDArray[T]], kind: type[T]) -> npt.NDArray[T]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=kind), *parts])
