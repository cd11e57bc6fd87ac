"""What a model answered in an evaluation, item by item: read from `items.parquet`.

Texts are read in batches and only those that were chosen are kept, so long responses cost no memory.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.domain.errors import IntegrityError

_LIGHT = ("suite", "item_id", "kind", "sample_index", "correct", "truncated", "tokens")
_TEXTS = ("prompt", "answer", "response", "extracted")
_REWARD, _COMPONENTS = "reward", "components"  # the second as JSON
_BATCH = 512  # rows


@dataclass(frozen=True, slots=True)
class Answered:
    """One response without its texts."""

    row: int  # in the file
    suite: str
    item_id: str
    kind: str  # greedy | sample
    sample: int
    correct: bool | None  # None: there is no answer to compare with
    truncated: bool
    tokens: int
    reward: float | None = None  # None: the suite has none


@dataclass(frozen=True, slots=True)
class Response:
    """One response with its texts."""

    answered: Answered
    prompt: str
    answer: str  # what it is compared with
    response: str
    extracted: str | None  # what of the response was compared; None: nothing was found in it
    components: Mapping[str, float] = field(default_factory=dict)  # of its reward


class Responses:
    """The responses of one evaluation.

    Args:
        data: of `items.parquet`.
        source: how errors call it.

    Raises:
        IntegrityError: it is not such a file.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self._source = source
        try:
            self._file = pq.ParquetFile(io.BytesIO(data))
            missing = [name for name in (*_LIGHT, *_TEXTS) if name not in self._file.schema_arrow.names]
            if missing:
                raise ValueError(f"column {missing[0]} is missing")
            known = self._file.schema_arrow.names
            self._scored = [name for name in (_REWARD, _COMPONENTS) if name in known]  # earlier versions had none
            columns = self._file.read(columns=[*_LIGHT, *self._scored[:1]]).to_pydict()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise IntegrityError(f"{source}: responses cannot be read: {error}; evaluate again") from error
        rows = zip(*columns.values(), strict=True)
        self.all: Sequence[Answered] = [Answered(place, *row) for place, row in enumerate(rows)]

    def greedy(self, suite: str) -> list[Answered]:
        """The greedy answers to a suite, one per item, in its order."""
        return [one for one in self.all if one.suite == suite and one.kind == "greedy"]

    @property
    def suites(self) -> list[str]:
        """Their names."""
        return list(dict.fromkeys(one.suite for one in self.all))

    def texts(self, chosen: Collection[Answered]) -> dict[int, Response]:
        """Row → the whole response.

        Raises:
            IntegrityError: the file is damaged.
        """
        wanted = {one.row: one for one in chosen}
        found: dict[int, Response] = {}
        if not wanted:
            return found
        try:
            for start, batch in self._batches():
                for row in range(start, start + len(batch["prompt"])):
                    if row in wanted:
                        said: dict[str, Any] = {name: batch[name][row - start].as_py() for name in _TEXTS}
                        prompt, answer, response = (said[name] or "" for name in _TEXTS[:3])
                        parts = batch[_COMPONENTS][row - start].as_py() if _COMPONENTS in self._scored else None
                        found[row] = Response(
                            wanted[row], prompt, answer, response, said["extracted"], json.loads(parts or "{}")
                        )
        except (OSError, ValueError, pa.ArrowException) as error:
            raise IntegrityError(f"{self._source}: responses cannot be read: {error}; evaluate again") from error
        return found

    def _batches(self) -> Iterator[tuple[int, Any]]:
        start = 0
        for batch in self._file.iter_batches(batch_size=_BATCH, columns=[*_TEXTS, *self._scored[1:]]):
            yield start, batch
            start += batch.num_rows


def spread(rows: Sequence[Answered], most: int) -> list[Answered]:
    """At most so many, evenly from the first to the last: the beginning of a suite need not be like the rest."""
    if len(rows) <= most:
        return list(rows)
    return [rows[place * (len(rows) - 1) // max(1, most - 1)] for place in range(most)]
