"""Wide columns: several numbers for every response token, which stay in the process that computed them.

A teacher's 64 likeliest tokens at ten million positions are 5 GB, too much for a controller. The process that computes
these rows keeps them (`WideRows`); a batch has, for each document, a handle to its rows (`RowsHandle`); a process that
computes with the batch fetches the rows of its shard (`fetched`), one part at a time.

Invariant: a document has one row for each of its response tokens, in order. Selecting documents, gathering batches and
sending batches between processes move only handles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from posttrain.domain.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """k tokens at each of R positions, the likeliest first: `TopK(ids=[[7, 2]], logprobs=[[-0.1, -2.5]])`."""

    ids: Tensor  # [R, k] int32
    logprobs: Tensor  # [R, k] float32, of the whole distribution, so probabilities do not add up to 1

    @classmethod
    def empty(cls, rows: int, width: int) -> TopK:
        """Return uninitialised rows."""
        return cls(torch.empty(rows, width, dtype=torch.int32), torch.empty(rows, width))

    def rows(self, start: int, stop: int) -> TopK:
        """Return some of the rows, not copied."""
        return TopK(self.ids[start:stop], self.logprobs[start:stop])

    def put(self, rows: TopK) -> None:
        """Overwrite all rows with those of another `TopK`, from any device."""
        self.ids.copy_(rows.ids)
        self.logprobs.copy_(rows.logprobs)

    def copy(self) -> TopK:
        """Return a copy."""
        return TopK(self.ids.clone(), self.logprobs.clone())


@dataclass(frozen=True, slots=True, eq=False)
class WideRows:
    """The part of a wide column on one worker: `WideRows(TopK(…), counts=(2, 3))` has five rows for two documents."""

    held: TopK  # [sum of counts, k]
    counts: tuple[int, ...]  # rows of each document

    def documents(self) -> tuple[TopK, ...]:
        """Return the rows of each document, without copies."""
        starts = [0, *accumulate(self.counts)]
        return tuple(self.held.rows(start, start + count) for start, count in zip(starts, self.counts, strict=False))


class Source(Protocol):
    """A part that stays on the rank that computed it (`groups.port.Stored`)."""

    @property
    def here(self) -> bool:
        """Whether `value` returns the object itself, in this process, instead of a copy."""

    def value(self) -> WideRows:
        """Fetch the part."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsHandle:
    """A reference to the rows of one document: `RowsHandle(part, document=3, count=17)`."""

    part: Source
    document: int  # index within the part
    count: int  # rows


@dataclass(frozen=True, slots=True, eq=False)
class WideColumn:
    """The rows of every document of a batch, or handles to them."""

    width: int  # k
    documents: tuple[RowsHandle | TopK, ...]  # [D]

    @property
    def counts(self) -> list[int]:
        """Rows of each document, [D]."""
        return [entry.count if isinstance(entry, RowsHandle) else len(entry.ids) for entry in self.documents]

    def check(self, name: str, wanted: Sequence[int]) -> None:
        """Raise if the column does not fit the batch.

        Raises:
            InputError: the column does not have one row for each response token of each document.
        """
        if self.counts != list(wanted):
            raise InputError(
                f"wide column {name} must have one row for each response token: expected {list(wanted)} rows per "
                f"document, got {self.counts}; fill the column from this batch"
            )

    def select(self, documents: Sequence[int]) -> WideColumn:
        """Return the column for the documents with these indices, in this order."""
        return WideColumn(self.width, tuple(self.documents[i] for i in documents))

    def dummy(self, documents: int) -> WideColumn:
        """Return a column of `documents` documents without a response."""
        return WideColumn(self.width, (TopK.empty(0, self.width),) * documents)

    def fetched(self) -> WideColumn:
        """Return the column with every row in this process.

        Parts are fetched one by one, and each part is released before the next is fetched: in addition to the batch's
        own rows, at most one part is in memory. Rows of this process are not copied.
        """
        wanted: dict[Source, list[int]] = {}
        for at, entry in enumerate(self.documents):
            if isinstance(entry, RowsHandle):
                wanted.setdefault(entry.part, []).append(at)
        found = list(self.documents)
        for part, places in wanted.items():
            for at, rows in zip(places, self._rows(part, places), strict=True):
                found[at] = rows
        return WideColumn(self.width, tuple(found))

    def _rows(self, part: Source, places: Sequence[int]) -> list[TopK]:
        documents = part.value().documents()
        entries = [entry for at in places if isinstance(entry := self.documents[at], RowsHandle)]
        own = part.here or len({entry.document for entry in entries}) == len(documents)  # a view would keep the part
        return [documents[entry.document] if own else documents[entry.document].copy() for entry in entries]

    def rows(self, name: str, device: torch.device) -> TopK:
        """Return all rows of the batch, [R, k], on a device.

        Args:
            name: the column's name, for the error.

        Raises:
            InputError: some rows are in other processes.
        """
        here = [entry for entry in self.documents if isinstance(entry, TopK)]
        if len(here) < len(self.documents):
            raise InputError(
                f"the rows of the wide column {name} must be in this process to be read, but the rows of "
                f"{len(self.documents) - len(here)} documents are elsewhere; fetch them first"
            )
        parts = here or [TopK.empty(0, self.width)]
        whole = TopK(torch.cat([part.ids for part in parts]), torch.cat([part.logprobs for part in parts]))
        return TopK(whole.ids.to(device), whole.logprobs.to(device))


def joined(columns: Sequence[Mapping[str, WideColumn]]) -> dict[str, WideColumn]:
    """Return the columns of several batches, concatenated.

    Raises:
        InputError: a column is missing in some batches, or its widths differ.
    """
    first = columns[0]
    for other in columns:
        odd = first.keys() ^ other.keys() or {n for n in first if first[n].width != other[n].width}
        if odd:
            raise InputError(
                f"gathered parts must have the same wide columns, but in some parts {min(odd)} is missing or has "
                "another width; let the called method return the same columns on every rank"
            )
    return {
        name: WideColumn(column.width, tuple(chain.from_iterable(other[name].documents for other in columns)))
        for name, column in first.items()
    }


def fetched(columns: Mapping[str, WideColumn]) -> dict[str, WideColumn]:
    """See `WideColumn.fetched`."""
    return {name: column.fetched() for name, column in columns.items()}


def rows_of(columns: Mapping[str, WideColumn], name: str, device: torch.device) -> TopK:
    """Return the rows of one column, [R, k], on a device.

    Raises:
        InputError: the batch does not have the column; its rows are in another process.
    """
    found = columns.get(name)
    if found is None:
        had = ", ".join(columns) or "none"
        raise InputError(f"the batch must have a wide column {name}, got {had}; request the column from a role")
    return found.rows(name, device)
