"""Where things stand in a packed row, computed for all of its documents at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)


def laid(parts: Iterable[Any], kind: type[T]) -> npt.NDArray[T]:
    """Sequences or arrays end to end."""
    # arrays of another type, as of a rollout's int32, are cast all at once
    arrays = [part if isinstance(part, np.ndarray) else np.asarray(part, kind) for part in parts]
    return np.concatenate(arrays, dtype=kind, casting="unsafe")


def stretches(sizes: Ints, starts: Ints) -> Ints:
    """Stretches of these sizes one after the other, each counted on from its start."""
    counted: Ints = np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
    return counted


def positions(lengths: Sequence[int]) -> Ints:
    """[T]: 0, 1, … restarting at every document."""
    sizes = np.array(lengths, dtype=np.int64)
    return stretches(sizes, np.zeros_like(sizes))


def tokens_of(lengths: Sequence[int], chosen: Sequence[int]) -> Ints:
    """Where the tokens of the chosen documents stand, in the order of `chosen`."""
    rows, every = np.array(chosen, dtype=np.int64), np.array(lengths, dtype=np.int64)
    return stretches(every[rows], (every.cumsum() - every)[rows])


def responses(places: Ints, prompts: Iterable[int], lengths: Sequence[int]) -> Flags:
    """[T]: which tokens, at these places of their documents, come after a prompt of so many tokens."""
    behind: Flags = places >= np.repeat(list(prompts), lengths)
    return behind
