"""What was consumed, and in which order: the data cursor.

The order is an infinite stream: epoch 0's permutation, then epoch 1's, and so on, each derived from (seed, epoch).
The whole state is one number, how many documents were taken; so resuming anywhere, at an epoch boundary too, equals
never having stopped.
"""

from __future__ import annotations

import numpy as np

from posttrain.domain.errors import InputError
from posttrain.domain.seeds import derive_seed


class Journal:
    """A cursor over `documents` rows.

    Args:
        documents: rows of the data set.
        seed: the stage's seed.
        consumed: documents already taken, as a checkpoint recorded it.

    Raises:
        InputError: no documents.
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
        """Row numbers of the next `count` documents.

        A stretch may cross into the next epoch, and then may repeat a row.
        """
        return [self.row(position) for position in range(self.consumed, self.consumed + count)]

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` documents as (position in the stream, row number), and move past them.

        A position never repeats within a run, so it keys random numbers where a row number could not.
        """
        rows = self.peek(count)
        start, self.consumed = self.consumed, self.consumed + count
        return list(enumerate(rows, start))

    def row(self, position: int) -> int:
        """The row that stands at a position of the stream."""
        epoch, offset = divmod(position, self.documents)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "journal", epoch)))
            self._epoch, self._order = epoch, generator.permutation(self.documents).tolist()
        return self._order[offset]
