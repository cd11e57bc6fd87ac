"""Packed batches of documents, models' predictions on them, positions in a packed row, and memory of the process.

All classes are frozen. A batch is packed: its documents are concatenated in one row of tokens without padding, so the
dense layers of a model compute on useful tokens only. `lengths` records the document boundaries.

`Predictions` names the quantities that models can predict, and contains their values. Positions in a packed row are
computed for all documents in one operation. Precision: the pure functions of algorithms return float32 columns, or
float64 if an input is float64.

The module also measures this process's peak memory and the free memory, and controls the reuse of memory that CPU
tensors free. A pass over a micro-batch frees some dozens of MiB. By default glibc returns this memory to the kernel as
soon as twice the largest tensor is free, and the kernel zeroes and maps each page again in the next pass, which takes
an eighth of the time of a small model's update (measured). Memory beyond the limits set here is still returned. glibc's
own environment variables, if set, take precedence.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.wide import TopK, WideColumn, joined, rows_of

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)
Tokens = Sequence[int] | npt.NDArray[np.int32]
# topk fills a wide column; candidates are a model's log-probabilities of the tokens in the wide column `candidates`
Need = Literal["logprobs", "entropy", "values", "scores", "topk", "candidates"]
CANDIDATES: Final = "candidates"
_MIB = 2**20
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in one unit of getrusage
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_KEPT = 2**29  # bytes that may stay free at the end of the heap
_MAPPED = 2**25  # larger tensors are mapped separately; glibc accepts no larger limit


def precision(*inputs: Tensor) -> torch.dtype:
    """Return float64 if an input is float64, else float32 (also for bfloat16): `precision(rewards, values)`."""
    return torch.float64 if any(one.dtype == torch.float64 for one in inputs) else torch.float32


def concatenated(parts: Iterable[Any], kind: type[T]) -> npt.NDArray[T]:
    """Join sequences or arrays end to end."""
    # arrays of another type, e.g. a rollout's int32, are cast in one operation
    arrays = [part if isinstance(part, np.ndarray) else np.asarray(part, kind) for part in parts]
    return np.concatenate(arrays, dtype=kind, casting="unsafe")


def ranges(sizes: Ints, starts: Ints) -> Ints:
    """Return the concatenation of ranges; range i has `sizes[i]` numbers from `starts[i]`."""
    counted: Ints = np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
    return counted


def positions(lengths: Sequence[int]) -> Ints:
    """Return 0, 1, … restarting at every document, [T]."""
    sizes = np.array(lengths, dtype=np.int64)
    return ranges(sizes, np.zeros_like(sizes))


def tokens_of(lengths: Sequence[int], chosen: Sequence[int]) -> Ints:
    """Return the indices of the tokens of the chosen documents, in the order of `chosen`."""
    rows, every = np.array(chosen, dtype=np.int64), np.array(lengths, dtype=np.int64)
    return ranges(every[rows], (every.cumsum() - every)[rows])


def responses(places: Ints, prompts: Iterable[int], lengths: Sequence[int]) -> Flags:
    """Return which tokens come after their document's prompt, [T] bool; positions count from the document's start."""
    behind: Flags = places >= np.repeat(list(prompts), lengths)
    return behind


def sampled_of(response: Flags, sampled: Sequence[Any], sizes: Sequence[int]) -> Flags:
    """Return which of the response tokens were sampled, [T].

    Args:
        sampled: for each document, the flags of its response tokens; None: all were sampled.
        sizes: the lengths of the responses, tokens.
    """
    if all(flags is None for flags in sampled):
        return response
    kept = ([True] * size if flags is None else flags for flags, size in zip(sampled, sizes, strict=True))
    found = response.copy()
    found[response] = concatenated(kept, np.bool_)
    return found


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a batch, e.g. `Provenance(step=12, role="policy")`."""

    step: int = 0
    role: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One prompt with its response, e.g. `Document(prompt=(1, 7), response=(9, 2), logprobs=(-0.1, -0.7))`."""

    prompt: Tokens
    response: Tokens
    logprobs: Sequence[float] | npt.NDArray[np.float32] | None = None  # one per token
    sampled: Sequence[bool] | npt.NDArray[np.bool_] | None = None  # which response tokens were sampled; None: all
    versions: tuple[str, ...] = ()  # versions of the policies that sampled the response, oldest first
    temperature: float | None = None  # the sampling temperature of the response; None: the stage's


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A packed batch of D documents and T tokens.

    Two documents (1, 7 → 9, 2) and (1 → 2) are `tokens=[1, 7, 9, 2, 1, 2]`, `positions=[0, 1, 2, 3, 0, 1]`,
    `lengths=(4, 2)`, `response_mask=[0, 0, 1, 1, 0, 1]`.

    Any component can add a column under a name; other components read the column by that name. The algorithms in this
    package use these columns:

    ==================  ===========================================================================
    behaviour_logprobs  of the policy that sampled the token; 0 outside the response
    proximal_logprobs   of the policy before the step's first update
    current_logprobs    of the policy at each update, if recorded for traces
    reference_logprobs  of the frozen reference
    values              of the critic, before the token
    token_scores        the part of a document's reward earned before its last token, if the reward reports it
    rewards             per token
    returns             the critic's target
    advantages          0 outside the response
    candidates          wide: a teacher's likeliest tokens and their log-probabilities
    temperature         per document: the divisor of its logits; without the column, the stage's temperature
    ==================  ===========================================================================
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarts at 0 in every document
    lengths: tuple[int, ...]  # [D], sum = T
    response_mask: Tensor  # [T] bool: the token's log-probability, predicted from the tokens before, enters the loss
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)  # [T] each
    document_columns: Mapping[str, Tensor] = field(default_factory=dict)  # [D] each
    wide_columns: Mapping[str, WideColumn] = field(default_factory=dict)  # [R, k] each, or handles to the rows
    units: tuple[int, ...] | None = None  # documents in each unit; None: each document is a unit
    unit: int = 2  # documents in a dummy: the number per unit, if all units have the same number
    sample_ids: tuple[str, ...] = ()  # [D] or empty: "<step>.<prompt>.<sample>", identify documents in traces
    versions: tuple[tuple[str, ...], ...] = ()  # [D] or empty: versions of the policies that sampled, oldest first
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def pack(
        cls,
        documents: Sequence[Document],
        device: str | torch.device = "cpu",
        provenance: Provenance | None = None,
        sample_ids: Sequence[str] = (),
        unit: int | None = None,
    ) -> TokenBatch:
        """Return a batch of the documents, concatenated.

        Args:
            unit: the number of documents in a unit, e.g. 2 for pairs; None: each document is separate.

        Raises:
            InputError: there are no documents; a prompt is empty (the first response token would have no context);
                log-probabilities do not fit the response; only some documents have log-probabilities or a
                temperature; the number of documents is not a multiple of `unit`.
        """
        scored = _check_documents(documents)
        if sample_ids and len(sample_ids) != len(documents):
            raise InputError(f"sample ids must be one per document ({len(documents)}), got {len(sample_ids)}")
        if unit is not None and (unit < 1 or len(documents) % unit):
            raise InputError(f"documents of a batch in units must be a multiple of {unit}, got {len(documents)}")
        lengths = tuple(len(d.prompt) + len(d.response) for d in documents)
        places = positions(lengths)
        response = responses(places, (len(d.prompt) for d in documents), lengths)
        logprobs = np.zeros(len(response), dtype=np.float32)
        if scored:
            logprobs[response] = concatenated((d.logprobs for d in documents), np.float32)
        batch = cls(
            tokens=torch.from_numpy(
                concatenated((part for d in documents for part in (d.prompt, d.response)), np.int64)
            ),
            positions=torch.from_numpy(places),
            lengths=lengths,
            response_mask=torch.from_numpy(
                sampled_of(response, [d.sampled for d in documents], [len(d.response) for d in documents])
            ),
            token_columns={"behaviour_logprobs": torch.from_numpy(logprobs)} if scored else {},
            document_columns=_temperatures(documents),
            units=None if unit is None else (unit,) * (len(documents) // unit),
            unit=unit or 2,
            sample_ids=tuple(sample_ids),
            versions=tuple(d.versions for d in documents) if any(d.versions for d in documents) else (),
            provenance=provenance or Provenance(),
        )
        return batch if torch.device(device) == batch.device else batch.to(device)

    @classmethod
    def gather(cls, parts: Sequence[TokenBatch], shards: Sequence[Sequence[int]]) -> TokenBatch:
        """Return the batch whose unit `shards[r][k]` is unit k of `parts[r]`.

        Parts without units contribute nothing. The provenance is that of the first part with documents.

        Raises:
            InputError: parts and shards differ in size; parts differ in their columns, units or ids.
        """
        if [len(part.item_lengths) for part in parts] != [len(shard) for shard in shards]:
            raise InputError(
                f"gathered parts must have {[len(s) for s in shards]} units, got "
                f"{[len(p.item_lengths) for p in parts]}; gather each part with the shard that it was computed from"
            )
        filled = [part for part in parts if part.documents]
        if not filled:
            return parts[0]
        merged = _concatenate(filled)
        order = list(chain.from_iterable(shards))
        return merged if order == list(range(len(order))) else merged.select_items(np.argsort(order).tolist())

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tokens.device

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.lengths)

    @property
    def document_index(self) -> Tensor:
        """The document of each token, [T] int64."""
        return torch.from_numpy(np.repeat(np.arange(self.documents), self.lengths)).to(self.device)

    @property
    def response_lengths(self) -> Tensor:
        """Response tokens of each document, [D] int64."""
        return self.sum_by_document(self.response_mask.to(torch.int64))

    @property
    def item_lengths(self) -> tuple[int, ...]:
        """Tokens in every unit, [units]: the sizes by which batches are split."""
        if self.units is None:
            return self.lengths
        sizes = iter(self.lengths)
        return tuple(sum(islice(sizes, unit)) for unit in self.units)

    def column(self, name: str) -> Tensor:
        """Return a token column, [T], or a document column, [D].

        Raises:
            InputError: the batch does not have the column.
        """
        found = self.token_columns.get(name, self.document_columns.get(name))
        if found is None:
            had = ", ".join([*self.token_columns, *self.document_columns]) or "none"
            raise InputError(f"the batch must have a column {name}, got {had}; compute the column first")
        return found

    def total(self, name: str) -> float:
        """Return the sum of a column over all response tokens, or over all documents.

        Raises:
            InputError: the batch does not have the column.
        """
        values = self.column(name).double()
        return float((values[self.response_mask] if name in self.token_columns else values).sum())

    def wide(self, name: str) -> TopK:
        """Return the rows of a wide column, [R, k]: one for each response token, in order; on the batch's device.

        Raises:
            InputError: the batch does not have the column; its rows are in another process.
        """
        return rows_of(self.wide_columns, name, self.device)

    def sum_by_document(self, values: Tensor) -> Tensor:
        """Sum over each document's tokens, differentiable: [T] → [D]."""
        return values.new_zeros(self.documents).index_add(0, self.document_index, values)

    def spread(self, per_document: Tensor) -> Tensor:
        """Return, for each response token, the value of its document, and 0 for other tokens: [T].

        The result is float64 if a token column of the batch is float64, else float32.

        Raises:
            InputError: the values are not [D].
        """
        if per_document.shape != (self.documents,):
            raise InputError(
                f"numbers to spread must have shape [{self.documents}], got {list(per_document.shape)}; "
                "give one number per document"
            )
        dtype = precision(*self.token_columns.values())
        return per_document.detach().to(self.device, dtype)[self.document_index].masked_fill(~self.response_mask, 0.0)

    def with_columns(self, **columns: Tensor) -> TokenBatch:
        """Return a batch with these token columns added or replaced: `batch.with_columns(values=v, returns=r)`.

        Raises:
            InputError: a column is not [T], or a document column has the same name.
        """
        return replace(self, token_columns=self._columns(self.token_columns, columns, self.document_columns, "[T]"))

    def with_document_columns(self, **columns: Tensor) -> TokenBatch:
        """Return a batch with these document columns added or replaced: `batch.with_document_columns(labels=l)`.

        Raises:
            InputError: a column is not [D], or a token column has the same name.
        """
        return replace(self, document_columns=self._columns(self.document_columns, columns, self.token_columns, "[D]"))

    def with_wide(self, name: str, column: WideColumn) -> TokenBatch:
        """Return a batch with this wide column added or replaced.

        Raises:
            InputError: the column does not have one row for each response token of each document.
        """
        column.check(name, self.response_lengths.tolist())
        return replace(self, wide_columns={**self.wide_columns, name: column})

    def seen_by(self, role: str, rank: int = 0) -> TokenBatch:
        """Return the same batch with `role` and `rank` as its provenance."""
        return replace(self, provenance=replace(self.provenance, role=role, rank=rank))

    def select(self, documents: Sequence[int]) -> TokenBatch:
        """Return the documents with these indices, in this order; without indices, the empty batch of a rank.

        Raises:
            InputError: an index is outside [0, D); the documents of the batch form units.
        """
        if self.units is not None:
            raise InputError(
                "documents of one unit must stay together, so single documents cannot be selected; use select_items"
            )
        return self._select(documents, None)

    def select_items(self, items: Sequence[int], /) -> TokenBatch:
        """Return the units with these indices, in this order; the result may be empty.

        Raises:
            InputError: an index is outside [0, units).
        """
        if self.units is None:
            return self._select(items, None)
        _refuse_outside(items, len(self.units), "a unit")
        return self._select(self.documents_of(items), tuple(self.units[item] for item in items))

    def documents_of(self, items: Sequence[int]) -> Sequence[int]:
        """Return the documents of the units with these indices, in this order."""
        if self.units is None:
            return items
        starts = [0, *accumulate(self.units)]
        return [document for item in items for document in range(starts[item], starts[item + 1])]

    def dummy(self) -> TokenBatch:
        """Return one unit of documents with two tokens and no response, with the same columns.

        Without units, the result has two such documents.


        A rank without documents computes on this batch, because every rank must take part in a collective.
        """
        size = self.unit
        return TokenBatch(
            tokens=torch.zeros(2 * size, dtype=torch.int64, device=self.device),
            positions=torch.arange(2, device=self.device).repeat(size),
            lengths=(2,) * size,
            response_mask=torch.zeros(2 * size, dtype=torch.bool, device=self.device),
            token_columns={name: values.new_zeros(2 * size) for name, values in self.token_columns.items()},
            document_columns={name: values.new_zeros(size) for name, values in self.document_columns.items()},
            wide_columns={name: column.dummy(size) for name, column in self.wide_columns.items()},
            units=None if self.units is None else (size,),
            unit=size,
        )

    def to(self, device: str | torch.device) -> TokenBatch:
        """Return the same batch on another device."""
        return self._each(lambda values: values.to(device), lambda values: values.to(device))

    def _columns(
        self, own: Mapping[str, Tensor], added: Mapping[str, Tensor], others: Mapping[str, Tensor], shape: str
    ) -> dict[str, Tensor]:
        size = len(self.tokens) if shape == "[T]" else self.documents
        for name, values in added.items():
            if name in others:
                raise InputError(f"column {name} exists both per token and per document; rename one of the two")
            if values.shape != (size,):
                raise InputError(f"column {name} must have shape {shape} = [{size}], got {list(values.shape)}")
        return {**own, **{name: values.detach().to(self.device) for name, values in added.items()}}

    def _select(self, documents: Sequence[int], units: tuple[int, ...] | None) -> TokenBatch:
        chosen = tuple(documents)
        _refuse_outside(chosen, self.documents, "a document")
        index = torch.from_numpy(tokens_of(self.lengths, chosen)).to(self.device)
        places = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        taken = self._each(lambda values: values[index], lambda values: values[places])
        ids = tuple(self.sample_ids[i] for i in chosen) if self.sample_ids else ()
        versions = tuple(self.versions[i] for i in chosen) if self.versions else ()
        lengths = tuple(self.lengths[i] for i in chosen)
        wide = {name: column.select(chosen) for name, column in self.wide_columns.items()}
        return replace(taken, lengths=lengths, sample_ids=ids, versions=versions, units=units, wide_columns=wide)

    def _each(self, token: Callable[[Tensor], Tensor], document: Callable[[Tensor], Tensor]) -> TokenBatch:
        """Return a batch with one function applied to every [T] tensor and the other to every [D] tensor."""
        return replace(
            self,
            tokens=token(self.tokens),
            positions=token(self.positions),
            response_mask=token(self.response_mask),
            token_columns={name: token(values) for name, values in self.token_columns.items()},
            document_columns={name: document(values) for name, values in self.document_columns.items()},
        )


def _refuse_outside(chosen: Sequence[int], count: int, what: str) -> None:
    wrong = next((i for i in chosen if not 0 <= i < count), None)
    if wrong is not None:
        raise InputError(f"index of {what} must be in 0..{count - 1}, got {wrong}")


def _concatenate(parts: Sequence[TokenBatch]) -> TokenBatch:
    if len(parts) == 1:
        return parts[0]
    for what in ("units", "sample_ids", "versions"):  # a field that only some parts have would be lost or misassigned
        if len({bool(getattr(part, what)) for part in parts}) > 1:
            raise InputError(f"gathered parts must all have {what} or none, got some with and some without")
    return replace(
        parts[0],
        tokens=torch.cat([part.tokens for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        response_mask=torch.cat([part.response_mask for part in parts]),
        lengths=tuple(chain.from_iterable(part.lengths for part in parts)),
        token_columns=_joined([part.token_columns for part in parts]),
        document_columns=_joined([part.document_columns for part in parts]),
        wide_columns=joined([part.wide_columns for part in parts]),
        units=None if parts[0].units is None else tuple(chain.from_iterable(part.units or () for part in parts)),
        sample_ids=tuple(chain.from_iterable(part.sample_ids for part in parts)),
        versions=tuple(chain.from_iterable(part.versions for part in parts)),
    )


def _joined(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    odd = next((c.keys() ^ columns[0].keys() for c in columns if c.keys() != columns[0].keys()), None)
    if odd:
        raise InputError(
            f"gathered parts must have the same columns, but only some parts have {min(odd)}; let the called method "
            "return the same columns on every rank"
        )
    return {name: torch.cat([c[name] for c in columns]) for name in columns[0]}


def _temperatures(documents: Sequence[Document]) -> dict[str, Tensor]:
    """Return the column `temperature`, [D] float64, or no column if no document has a temperature.

    Raises:
        InputError: only some of the documents have a temperature.
    """
    found = [d.temperature for d in documents if d.temperature is not None]
    if len(found) not in (0, len(documents)):
        raise InputError(
            f"a temperature must be given for all {len(documents)} documents or for none, but is given for {len(found)}"
        )
    return {"temperature": torch.tensor(found, dtype=torch.float64)} if found else {}


def _check_documents(documents: Sequence[Document]) -> bool:
    """Check the documents, and return whether they have log-probabilities.

    Raises:
        InputError: there are no documents; a prompt is empty; log-probabilities or `sampled` do not fit the response;
            only some of the documents have log-probabilities.
    """
    if not documents:
        raise InputError("a batch needs at least one document, got none")
    for index, document in enumerate(documents):
        if len(document.prompt) == 0:
            raise InputError(f"document {index} has an empty prompt; begin it with at least one token")
        if document.logprobs is not None and len(document.logprobs) != len(document.response):
            raise InputError(
                f"document {index} must have one log-probability per response token ({len(document.response)}), "
                f"got {len(document.logprobs)}"
            )
        if document.sampled is not None and len(document.sampled) != len(document.response):
            raise InputError(
                f"document {index} must have one `sampled` flag per response token ({len(document.response)}), "
                f"got {len(document.sampled)}"
            )
    scored = sum(d.logprobs is not None for d in documents)
    if scored not in (0, len(documents)):
        raise InputError(
            f"log-probabilities must be given for all {len(documents)} documents or for none, but are given for "
            f"{scored}"
        )
    return scored > 0


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """A model's predictions on a batch. Predictions that were not requested are None."""

    logprobs: Tensor | None = None  # [T] float32: of the response tokens, at the sampling temperature; 0 elsewhere
    entropy: Tensor | None = None  # [T] float32, nats: of the distribution of each response token
    values: Tensor | None = None  # [T] float32: V before each response token
    scores: Tensor | None = None  # [D] float32: output of the scalar head at each document's last token
    candidates: Tensor | None = None  # [R, k] float32: log-probabilities of the tokens in the wide column `candidates`

    def of(self, need: Need) -> Tensor:
        """Return one prediction.

        Raises:
            InputError: the prediction was not requested, or is `topk`, which exists only as a wide column.
        """
        found: Tensor | None = getattr(self, need, None)
        if found is None:
            raise InputError(f"the model must predict {need} for this loss, got none; name it in the objective's needs")
        return found


def peak_memory() -> dict[str, float]:
    """Return the peak memory of this process since its start, MiB.

    The keys are `memory/peak_resident_mib` and, with CUDA, `memory/peak_allocated_mib` for the device with the highest
    peak. Reward workers and ranks on Ray are separate processes and are not included.
    """
    found = {"memory/peak_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT / _MIB}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        allocated = max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
        found["memory/peak_allocated_mib"] = allocated / _MIB
    return found


def free_bytes(device: torch.device) -> int:
    """Return the unused memory, bytes; for a GPU this includes memory that torch caches for reuse."""
    if device.type == "cuda":
        held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held_back
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Make this process's heap keep, from this call on, the memory that tensors free.

    Allocators other than glibc's have no such settings and stay unchanged.
    """
    if any(name in os.environ for name in _OWN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # set both: setting one disables glibc's adaptation of the other
    if mallopt(_MMAP_THRESHOLD, _MAPPED):
        mallopt(_TRIM_THRESHOLD, _KEPT)
