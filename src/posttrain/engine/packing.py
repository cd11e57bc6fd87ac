"""Where things stand in a packed row, computed for all of its documents at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)


def concatenated(parts: Iterable[Any], kind: type[T]) -> npt.NDArray[T]:
    """Join sequences or arrays end to end."""
    # arrays of another type, as of a rollout's int32, are cast all at once
    arrays = [part if isinstance(part, np.ndarray) else np.asarray(part, kind) for part in parts]
    return np.concatenate(arrays, dtype=kind, casting="unsafe")


def ranges(sizes: Ints, starts: Ints) -> Ints:
    """Count on from each start as far as its size says: ranges, one after the other."""
    counted: Ints = np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
    return counted


def positions(lengths: Sequence[int]) -> Ints:
    """[T]: 0, 1, … restarting at every document."""
    sizes = np.array(lengths, dtype=np.int64)
    return ranges(sizes, np.zeros_like(sizes))


def tokens_of(lengths: Sequence[int], chosen: Sequence[int]) -> Ints:
    """Where the tokens of the chosen documents stand, in the order of `chosen`."""
    rows, every = np.array(chosen, dtype=np.int64), np.array(lengths, dtype=np.int64)
    return ranges(every[rows], (every.cumsum() - every)[rows])


def responses(places: Ints, prompts: Iterable[int], lengths: Sequence[int]) -> Flags:
    """[T]: which tokens, at these places of their documents, come after a prompt of so many tokens."""
    behind: Flags = places >= np.repeat(list(prompts), lengths)
    return behind


def sampled_of(response: Flags, sampled: Sequence[Any], sizes: Sequence[int]) -> Flags:
    """[T]: of the response tokens those that were sampled.

    Args:
        sampled: of each document the flags of its response; None: all of them.
        sizes: of the responses.
    """
    if all(flags is None for flags in sampled):
        return response
    kept = ([True] * size if flags is None else flags for flags, size in zip(sampled, sizes, strict=True))
    found = response.copy()
    found[response] = concatenated(kept, np.bool_)
    return found
