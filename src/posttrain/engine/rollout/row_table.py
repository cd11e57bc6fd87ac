"""The rows that are decoded, side by side as arrays: what each has said, and how much of it the model has read.

A step touches every row, so nothing here goes from row to row but where rows enter, leave, or have a text to watch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.scheduling import RolloutCounters, Row
from posttrain.engine.samples import Floats

Indices = npt.NDArray[np.int64]

_FIRST = 64  # lines and columns that there are at first; they double


@final
class RowTable:
    """Rows by line. A row keeps its line until it leaves; a step takes the lines in the order of `arrange`.

    Args:
        ends: tokens that end a response.
    """

    def __init__(self, ends: Collection[int]) -> None:
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._line: dict[int, int] = {}  # of each row's number
        self._rows: list[Row | None] = [None] * _FIRST
        self._order: Indices = np.empty(0, np.int64)
        # by line: tokens of its prompt; at most and so far said; said and read; positions in the store
        self._prompt, self._limit, self._said, self._read, self._room = np.zeros((5, _FIRST), np.int64)
        self._heeds, self._watches = np.zeros((2, _FIRST), np.bool_)  # tokens that end it; a text that may
        self._tokens = np.zeros((_FIRST, _FIRST), np.int32)
        self._logprobs = np.zeros((_FIRST, _FIRST), np.float32)

    def __len__(self) -> int:
        return len(self._line)

    @property
    def rows(self) -> list[Row]:
        """In the order of a step."""
        return [row for line in self._order.tolist() if (row := self._rows[line]) is not None]

    @property
    def read(self) -> Indices:
        """[rows] tokens of its response that the model has read."""
        return self._read[self._order]

    @property
    def positions(self) -> Indices:
        """[rows] where the next token lies that the model reads."""
        return self._prompt[self._order] + self._read[self._order]

    @property
    def unread(self) -> Indices:
        """[rows] the next token that the model reads."""
        return self._tokens[self._order, self._read[self._order]].astype(np.int64)

    @property
    def most_left(self) -> int:
        """Steps until the last row has said all that it may."""
        return int((self._limit[self._order] - self._read[self._order]).max()) - 1

    def known(self, count: int) -> Indices | None:
        """[count, rows] what rows have said already and the model reads anew, -1 where a token is drawn; None: nowhere.

        The first is what follows the next token that is read.
        """
        read, said = self._read[self._order], self._said[self._order]
        if not (said > read + 1).any():
            return None
        at = read + 1 + np.arange(count)[:, None]
        found = self._tokens[self._order, np.minimum(at, self._tokens.shape[1] - 1)]
        return np.where(at < said, found, -1).astype(np.int64)

    def outgrowing(self, count: int) -> dict[int, int]:
        """By number, the positions that rows need for so many tokens more, where they have no room for them."""
        needed = self.positions + count
        short = np.flatnonzero(needed > self._room[self._order])
        rows = self._rows
        return {
            row.number: length
            for line, length in zip(self._order[short].tolist(), needed[short].tolist(), strict=True)
            if (row := rows[line]) is not None
        }

    def enter(self, rows: Sequence[Row], version: str) -> None:
        """They are decoded from now on, by this version of the policy; the model has read nothing of what they said."""
        free = [line for line, row in enumerate(self._rows) if row is None]
        if len(free) < len(rows):
            free += self._more_lines(len(rows) - len(free))
        for row, line in zip(rows, free, strict=False):
            self._line[row.number], self._rows[line] = line, row
            said = len(row.tokens)
            self._prompt[line], self._limit[line], self._said[line] = len(row.asked.tokens), row.asked.limit, said
            self._read[line] = 0 if said else -1
            self._heeds[line], self._watches[line] = not row.asked.sampling.ignore_eos, row.tail is not None
            self._reach(said)
            self._tokens[line, :said], self._logprobs[line, :said] = row.tokens, row.logprobs
            row.mark(version, said)

    def give_room(self, positions: Mapping[int, int]) -> None:
        """Rows, by number, have room for so many positions."""
        for number, room in positions.items():
            self._room[self._line[number]] = room

    def arrange(self, numbers: Sequence[int]) -> Indices:
        """Take these rows in this order from now on; [rows] where those that stay stood before."""
        before = np.zeros(len(self._rows), np.int64)
        before[self._order] = np.arange(len(self._order))
        self._order = np.array([self._line[number] for number in numbers], dtype=np.int64)
        return before[self._order]

    def begin(self, rows: Sequence[Row], tokens: Indices, logprobs: Floats) -> list[Row]:
        """The first token [rows] of each of these; those whom it ends.

        Raises:
            JobFailedError: see `note`.
        """
        lines = np.array([self._line[row.number] for row in rows], dtype=np.int64)
        self._read[lines] = 0
        ended = self._say(lines, tokens, logprobs)
        return [row for row, over in zip(rows, ended.tolist(), strict=True) if over]

    def note(self, tokens: Indices, logprobs: Floats, counters: RolloutCounters) -> list[Row]:
        """What was drawn, [steps, rows] in the order; the rows that have ended. What lies behind an end is dropped.

        Raises:
            JobFailedError: a log-probability that is not finite.
        """
        order, alive = self._order, np.ones(len(self._order), np.bool_)
        for chosen, probable in zip(tokens, logprobs, strict=True):
            at = np.flatnonzero(alive)
            counters.discarded_tokens += len(order) - len(at)
            self._read[order[at]] += 1
            at = at[self._read[order[at]] >= self._said[order[at]]]
            counters.recomputed_tokens += int(alive.sum()) - len(at)
            alive[at] = ~self._say(order[at], chosen[at], probable[at])
        return [row for line in order[~alive].tolist() if (row := self._rows[line]) is not None]

    def mark(self, version: str) -> None:
        """What rows say from now on is this version's."""
        for row, said in zip(self.rows, self._said[self._order].tolist(), strict=True):
            row.mark(version, said)

    def leave(self, rows: Iterable[Row]) -> None:
        """They are decoded no longer, and keep what they have said; the others are to be arranged anew."""
        for row in rows:
            line = self._line.pop(row.number)
            said = int(self._said[line])
            row.tokens, row.logprobs = self._tokens[line, :said].copy(), self._logprobs[line, :said].copy()
            self._rows[line] = None

    def clear(self) -> None:
        """Forget all rows, and what they have said."""
        self._line, self._rows, self._order = {}, [None] * len(self._rows), self._order[:0]

    def _say(self, lines: Indices, tokens: Indices, logprobs: Floats) -> npt.NDArray[np.bool_]:
        """Append a token to each of these lines; [lines] whether it ends the row."""
        if not np.isfinite(logprobs).all():
            raise JobFailedError(
                "policy logits must be finite, got NaN or infinity while sampling; the policy has diverged"
            )
        said = self._said[lines]
        self._reach(int(said.max(initial=0)))
        self._tokens[lines, said], self._logprobs[lines, said] = tokens, logprobs
        self._said[lines] = said + 1
        ended: npt.NDArray[np.bool_] = (tokens[:, None] == self._ends).any(1) & self._heeds[lines]
        over = ended | (said + 1 >= self._limit[lines])
        for at in np.flatnonzero(self._watches[lines] & ~ended).tolist():
            row = self._rows[lines[at]]
            if row is not None and row.tail is not None and row.tail.ends(int(tokens[at])):
                row.stopped = ended[at] = over[at] = True
        for line in lines[ended].tolist():
            row = self._rows[line]
            if row is not None:
                row.ended = True
        return over

    def _reach(self, column: int) -> None:
        """There is such a column."""
        while column >= self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], 1)
            self._logprobs = np.concatenate([self._logprobs, np.zeros_like(self._logprobs)], 1)

    def _more_lines(self, lacking: int) -> range:
        have = len(self._rows)
        more = max(have, lacking)
        self._rows += [None] * more

        def longer(lines: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([lines, np.zeros((more, *lines.shape[1:]), lines.dtype)])

        self._prompt, self._limit, self._said = longer(self._prompt), longer(self._limit), longer(self._said)
        self._read, self._room = longer(self._read), longer(self._room)
        self._heeds, self._watches = longer(self._heeds), longer(self._watches)
        self._tokens, self._logprobs = longer(self._tokens), longer(self._logprobs)
        return range(have, have + more)
