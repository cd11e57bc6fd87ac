"""What the engine passes around: documents, trajectories, groups, and the packed batch a model computes on.

Everything here is frozen. A batch is packed: its documents lie end to end in one row of tokens, with no padding between
them, so the dense layers of a model compute on useful tokens only. Which tokens belong together is in `lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from posttrain.domain.errors import InputError

_COLUMNS = (
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "values",
    "rewards",
    "returns",
    "advantages",
)  # optional, [T] float32


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a batch comes from, e.g. `Provenance(step=12, role="policy", versions=("0.11", "0.12"))`."""

    step: int = 0
    role: str = ""
    rank: int = 0
    versions: tuple[str, ...] = ()  # the policy versions that sampled it, oldest first


@dataclass(frozen=True, slots=True)
class Document:
    """One prompt with its response, e.g. `Document(prompt=(1, 7), response=(9, 2), logprobs=(-0.1, -0.7))`.

    `logprobs` are those of the policy that sampled the response (the behaviour policy), one per response token.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response.

    `tokens` holds the end-of-sequence token when there is one; `truncated` says that there is none, because the token
    limit came first.
    """

    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of `tokens`, under the sampling temperature
    truncated: bool

    @property
    def document(self) -> Document:
        """The trajectory as a document with behaviour log-probabilities."""
        return Document(self.prompt, self.tokens, self.logprobs)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt, in sample order."""

    prompt_index: int
    trajectories: tuple[Trajectory, ...]

    def __len__(self) -> int:
        return len(self.trajectories)


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Groups in order of first appearance; inside a group the trajectories keep their order."""
    members: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.prompt_index, []).append(trajectory)
    return [Group(index, tuple(group)) for index, group in members.items()]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A packed batch of `documents` documents and T tokens.

    Two documents (1, 7 → 9, 2) and (1 → 2) are `tokens=[1, 7, 9, 2, 1, 2]`, `positions=[0, 1, 2, 3, 0, 1]`,
    `lengths=(4, 2)`, `response_mask=[0, 0, 1, 1, 0, 1]`.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarts at 0 in every document
    lengths: tuple[int, ...]  # [documents], sum = T
    response_mask: Tensor  # [T] bool: the log-probability of this token, predicted from the one before, enters the loss
    behaviour_logprobs: Tensor | None = None  # [T] float32, 0 outside the response: of the policy that sampled
    proximal_logprobs: Tensor | None = None  # [T] float32: of the policy that the step's first update found
    reference_logprobs: Tensor | None = None  # [T] float32: of the frozen reference
    values: Tensor | None = None  # [T] float32: the critic's, before the token
    rewards: Tensor | None = None  # [T] float32: per token
    returns: Tensor | None = None  # [T] float32: what the critic is to learn
    advantages: Tensor | None = None  # [T] float32, 0 outside the response
    sample_ids: tuple[str, ...] = ()  # [documents] or none: "<step>.<prompt>.<sample>", what a trace finds them by
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def pack(
        cls,
        documents: Sequence[Document],
        device: str | torch.device = "cpu",
        provenance: Provenance | None = None,
        sample_ids: Sequence[str] = (),
    ) -> TokenBatch:
        """Lay documents end to end.

        Raises:
            InputError: no documents, an empty prompt (its first token has nothing to be predicted from),
                log-probabilities that do not fit the response, or only some documents with log-probabilities.
        """
        scored = _check_documents(documents)
        if sample_ids and len(sample_ids) != len(documents):
            raise InputError(f"sample ids must be one per document ({len(documents)}), got {len(sample_ids)}")
        lengths = tuple(len(d.prompt) + len(d.response) for d in documents)
        tokens = list(chain.from_iterable(chain(d.prompt, d.response) for d in documents))
        prompt_lengths = torch.tensor([len(d.prompt) for d in documents])
        positions = _positions(lengths)
        behaviour: Tensor | None = None
        if scored:
            rows = (chain([0.0] * len(d.prompt), d.logprobs or ()) for d in documents)
            behaviour = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float32)
        batch = cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            positions=positions,
            lengths=lengths,
            response_mask=positions >= prompt_lengths.repeat_interleave(torch.tensor(lengths)),
            behaviour_logprobs=behaviour,
            sample_ids=tuple(sample_ids),
            provenance=provenance or Provenance(),
        )
        return batch if torch.device(device) == batch.device else batch.to(device)

    @classmethod
    def filler(cls, device: str | torch.device = "cpu") -> TokenBatch:
        """Two tokens without a response: what a rank without documents computes on, to join a collective."""
        zeros = torch.zeros(2, device=device)
        columns: dict[str, Any] = dict.fromkeys(_COLUMNS, zeros)
        return cls(
            tokens=torch.zeros(2, dtype=torch.int64, device=device),
            positions=torch.arange(2, device=device),
            lengths=(2,),
            response_mask=torch.zeros(2, dtype=torch.bool, device=device),
            **columns,
        )

    @classmethod
    def gather(cls, parts: Sequence[TokenBatch], shards: Sequence[Sequence[int]]) -> TokenBatch:
        """The batch whose document `shards[r][k]` is document k of `parts[r]`.

        Parts without documents contribute nothing. The provenance is the first part's, over all ranks.

        Raises:
            InputError: parts and shards differ in size, or parts differ in columns.
        """
        if [part.documents for part in parts] != [len(shard) for shard in shards]:
            raise InputError(
                f"gathered parts must have {[len(s) for s in shards]} documents, got {[p.documents for p in parts]}"
            )
        filled = [part for part in parts if part.documents]
        if not filled:
            return parts[0]
        merged = _concatenate(filled)
        order = list(chain.from_iterable(shards))
        return merged if order == list(range(len(order))) else merged.select(_inverse(order))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.tokens.device

    @property
    def documents(self) -> int:
        """How many documents."""
        return len(self.lengths)

    @property
    def document_index(self) -> Tensor:
        """[T] int64: the document each token belongs to."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.arange(self.documents, device=self.device).repeat_interleave(lengths)

    @property
    def response_lengths(self) -> Tensor:
        """[documents] int64: response tokens of each document."""
        return self.sum_by_document(self.response_mask.to(torch.int64))

    def sum_by_document(self, values: Tensor) -> Tensor:
        """[T] → [documents]: the sum over each document's tokens, differentiable."""
        return values.new_zeros(self.documents).index_add(0, self.document_index, values)

    def with_advantages(self, per_document: Tensor) -> TokenBatch:
        """Give every response token of a document the document's advantage.

        Args:
            per_document: [documents].

        Raises:
            InputError: another shape.
        """
        if per_document.shape != (self.documents,):
            raise InputError(
                f"advantages must have shape [{self.documents}], got {list(per_document.shape)}; give one per document"
            )
        spread = per_document.detach().to(self.device, torch.float32)[self.document_index]
        return replace(self, advantages=spread.masked_fill(~self.response_mask, 0.0))

    def with_columns(self, **columns: Tensor) -> TokenBatch:
        """A batch with these columns, each [T], put in or replaced: `batch.with_columns(values=v, returns=r)`.

        Raises:
            InputError: no such column, or another shape.
        """
        for name, values in columns.items():
            if name not in _COLUMNS:
                raise InputError(f"a batch has the columns {', '.join(_COLUMNS)}, got {name!r}; check the name")
            if values.shape != self.tokens.shape:
                raise InputError(f"column {name} must have shape {list(self.tokens.shape)}, got {list(values.shape)}")
        changes: dict[str, Any] = {name: values.detach().to(self.device) for name, values in columns.items()}
        return replace(self, **changes)

    def seen_by(self, role: str, rank: int = 0) -> TokenBatch:
        """The same batch with `role` and `rank` as its provenance."""
        return replace(self, provenance=replace(self.provenance, role=role, rank=rank))

    def select(self, documents: Sequence[int]) -> TokenBatch:
        """The named documents, in the named order; none gives the empty batch, which a rank without work gets.

        Raises:
            InputError: an index outside [0, documents).
        """
        chosen = tuple(documents)
        wrong = next((i for i in chosen if not 0 <= i < self.documents), None)
        if wrong is not None:
            raise InputError(f"documents to select must be in 0..{self.documents - 1}, got {wrong}; check the index")
        starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        spans = [torch.arange(starts[i], starts[i + 1]) for i in chosen]
        index = torch.cat(spans).to(self.device) if spans else torch.zeros(0, dtype=torch.int64, device=self.device)
        return self._take(index, chosen)

    def split(self, token_budget: int) -> list[TokenBatch]:
        """Micro-batches of contiguous documents with at most `token_budget` tokens each.

        A document that alone exceeds the budget is a micro-batch of its own. Together they are the batch.

        Raises:
            InputError: a budget below 1.
        """
        if token_budget < 1:
            raise InputError(f"token budget of a micro-batch must be >= 1, got {token_budget}")
        parts: list[TokenBatch] = []
        first, start, size = 0, 0, 0
        for index, length in enumerate([*self.lengths, math.inf]):
            if size and size + length > token_budget:
                span = torch.arange(start, start + size, device=self.device)
                parts.append(self._take(span, range(first, index)))
                first, start, size = index, start + size, 0
            if length != math.inf:
                size += int(length)
        return parts

    def to(self, device: str | torch.device) -> TokenBatch:
        """The same batch on another device."""
        changes: dict[str, Any] = {name: values.to(device) for name, values in self._tensors()}
        return replace(self, **changes)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is there, by the name of its field; each is [T]."""
        for name in ("tokens", "positions", "response_mask", *_COLUMNS):
            values = getattr(self, name)
            if values is not None:
                yield name, values

    def _take(self, index: Tensor, documents: Sequence[int]) -> TokenBatch:
        """The tokens at `index`, which are those of `documents`."""
        changes: dict[str, Any] = {name: values[index] for name, values in self._tensors()}
        ids = tuple(self.sample_ids[i] for i in documents) if self.sample_ids else ()
        return replace(self, **changes, lengths=tuple(self.lengths[i] for i in documents), sample_ids=ids)


def _concatenate(parts: Sequence[TokenBatch]) -> TokenBatch:
    if len(parts) == 1:
        return parts[0]
    columns = [dict(part._tensors()) for part in parts]
    odd = next((c.keys() ^ columns[0].keys() for c in columns if c.keys() != columns[0].keys()), None)
    if odd:
        raise InputError(f"gathered parts must have the same columns, got {min(odd)} in some only; check the method")
    changes: dict[str, Any] = {name: torch.cat([c[name] for c in columns]) for name in columns[0]}
    lengths = tuple(chain.from_iterable(part.lengths for part in parts))
    return replace(
        parts[0], **changes, lengths=lengths, sample_ids=tuple(chain.from_iterable(p.sample_ids for p in parts))
    )


def _inverse(order: Sequence[int]) -> list[int]:
    """Where each of 0, 1, … stands in `order`."""
    places = [0] * len(order)
    for place, item in enumerate(order):
        places[item] = place
    return places


def _check_documents(documents: Sequence[Document]) -> bool:
    """Whether the documents carry log-probabilities; all of them or none."""
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
    scored = sum(d.logprobs is not None for d in documents)
    if scored not in (0, len(documents)):
        raise InputError(
            f"log-probabilities must be given for all {len(documents)} documents or for none, got {scored}"
        )
    return scored > 0


def _positions(lengths: Sequence[int]) -> Tensor:
    """[T] int64: 0, 1, … restarting at every document."""
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
