"""Distribution of a trainable module over ranks, sequence parallelism, exported weights, activation checkpointing.

A trainable module is whole if its pool has one rank, and is otherwise sharded over all ranks by FSDP2. Losses are
weighted by totals of the whole step, so gradients are *summed* over ranks, never averaged.

Sequence parallelism follows Ulysses (arXiv 2309.14509), for packed batches. The ranks of a sequence group share the
tokens of one batch. In the dense layers each rank computes a slice of the packed row. For attention, tokens and heads
are swapped (all-to-all): each rank gets all tokens of its share of the heads, so documents may cross the borders of
slices. The swap is then reversed. Losses are unaffected: log-probabilities and values of all tokens arrive on every
rank, and the gradient of each token goes to the rank that computed the token.

A training engine exports weights as canonical tensors by name, in the pieces that its ranks have.

Activation checkpointing stores only the input of a decoder layer, and recomputes the rest in the backward pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.algorithms.objectives import LossParts

M = TypeVar("M")


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """A canonical tensor in a reader's layout: `Entry("lm_head.weight", (151936, 1024), torch.bfloat16)`."""

    name: str  # of the Hugging Face module's parameter; tied parameters occur once, under their first name
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = tuple[Entry, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A piece of a canonical tensor, viewed as a matrix [first axis, all others]; a vector is one column."""

    name: str
    shape: tuple[int, ...]  # shape of the whole tensor
    tensor: Tensor  # the piece, [rows, …]; a copy only if its dtype was converted
    row: int = 0  # first row of the piece in the whole tensor
    column: int = 0  # first column; for engines that split matrices by columns
    frozen: bool = False  # True: training never changes the tensor

    def matrix(self) -> Tensor:
        """Return the piece as [rows, columns]."""
        return as_matrix(self.tensor)


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the tensor as [first axis, all others], without a copy if the memory layout allows it."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)


def canonical(name: str) -> str:
    """Return the canonical name of a parameter: its name without the parts that peft adds (`models.adapters`)."""
    return name.replace(".base_layer.", ".").replace(".default.weight", ".weight")


def canonical_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's parameters by canonical name, tied ones once."""
    return ((canonical(name), parameter) for name, parameter in module.named_parameters())


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of a module's parameters, tied tensors once."""
    return tuple(Entry(name, tuple(p.shape), p.dtype) for name, p in canonical_parameters(module))


def module_views(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module's forward reads; tied tensors once per place, always under their first name."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield names.setdefault(id(parameter), canonical(name)), parameter.detach()


def dtypes_of(layout: Layout, shards: Iterable[Shard]) -> dict[str, torch.dtype]:
    """Return the dtype in which the reader has each tensor of a sender.

    Raises:
        IntegrityError: names or shapes differ from the reader's.
    """
    wanted = {entry.name: entry.shape for entry in layout}
    for shard in shards:
        expected = wanted.get(shard.name)
        if expected != shard.shape:
            odd = f"has shape {shard.shape}, expected {expected}"
            raise IntegrityError(
                f"published weights must match the reader's model: {shard.name} "
                f"{'is not in that model' if expected is None else odd}; give both roles the same model"
            )
    return {entry.name: entry.dtype for entry in layout}


@torch.no_grad()
def put(into: Mapping[str, Tensor], shard: Shard) -> None:
    """Copy a piece into the reader's tensor, converted to the reader's dtype."""
    target = as_matrix(into[shard.name])
    piece = shard.matrix()
    target[shard.row : shard.row + piece.shape[0], shard.column : shard.column + piece.shape[1]].copy_(piece)


@final
class Unsharded:
    """A whole module on one rank. Parameters in half precision have a float32 copy, which `parameters` returns."""

    rank, ranks = 0, 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._live = {name: p for name, p in canonical_parameters(module) if p.requires_grad}
        self._trained = {n: p if p.dtype == torch.float32 else p.detach().float() for n, p in self._live.items()}

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the tensors that the optimiser updates, by name: whole, or this rank's rows."""
        return self._trained

    def rows(self) -> Mapping[str, tuple[int, int]]:
        """Return a map from parameter to the rows [start, stop) of this rank; empty if the rank has all rows."""
        return {}

    def compute(self, forward: Callable[[M], LossParts], micro: M) -> LossParts:
        """Run a forward pass. Collective."""
        return forward(micro)

    def rounds(self, mine: int) -> int:
        """Return the largest `mine` of all ranks, the number of times that every rank must compute. Collective."""
        return mine

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over ranks. Collective."""
        return values

    def collect_gradients(self) -> None:
        """Add the module's gradients to those of `parameters`, after a backward pass."""
        for name, trained in self._trained.items():
            live = self._live[name]
            if trained is not live and live.grad is not None:
                gradient = live.grad.float()
                trained.grad = gradient if trained.grad is None else trained.grad.add_(gradient)
                live.grad = None

    def clip_gradients(self, limit: float) -> float:
        """Scale all gradients to a global norm of at most `limit`; return the norm before scaling. Collective."""
        return float(torch.nn.utils.clip_grad_norm_(self._trained.values(), limit))

    def write_back(self) -> None:
        """Copy `parameters` into the module, after an optimiser step."""
        for name, trained in self._trained.items():
            if trained is not self._live[name]:
                self._live[name].copy_(trained)

    def export(self) -> Iterator[Shard]:
        """Yield this rank's pieces of the module's parameters, at the optimiser's precision, without copying them."""
        for name, parameter in canonical_parameters(self._module):
            held = self._trained.get(name, parameter).detach()
            yield Shard(name, tuple(parameter.shape), held, frozen=name not in self._trained)

    def gathered(self, dtype: torch.dtype | None = None, *, trained: bool = False) -> dict[str, Tensor]:
        """Return whole parameters by name, in the module's precision or in `dtype`; empty except on rank 0. Collective.

        The optimiser's parameters are rounded once. Parameters that are not rounded are not copied.

        Args:
            trained: whether to leave out frozen parameters.
        """
        if dtype is None:
            return {n: p.detach() for n, p in canonical_parameters(self._module) if n in self._live or not trained}
        return {shard.name: shard.tensor.to(dtype) for shard in self.export() if not (trained and shard.frozen)}

    def live(self) -> Mapping[str, Tensor]:
        """Return the tensors with which the module computes, of the trained parameters: whole, or this rank's rows."""
        return {name: parameter.detach() for name, parameter in self._live.items()}


class _Root(nn.Module):
    """A module whose call runs the learner's function, because FSDP gathers parameters when a module is called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, compute: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, dict[str, Tensor]]:
        return compute()


@final
class FullySharded:
    """FSDP2 over the process group: every decoder layer is gathered when it computes, other parameters with the root.

    Trained parameters are float32 shards; frozen parameters keep their dtype. On CUDA, and with a frozen base, the
    layers compute in the module's dtype. A layer is widened when it is sharded, so no rank has the whole model in
    float32.

    Raises:
        InputError: the decoder layers of the model cannot be found.
    """

    def __init__(self, module: nn.Module, device: str) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        layers = getattr(getattr(module, "base_model", None), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise InputError(f"{type(module).__name__} cannot be sharded: it has no list of decoder layers; use 1 rank")
        self._dtype = next(module.parameters()).dtype
        kind = torch.device(device).type
        options: dict[str, Any] = {"mesh": init_device_mesh(kind, (self.ranks,))}
        if kind == "cuda" or not all(p.requires_grad for p in module.parameters()):
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, **options)
            _widen(layer)
        self._root = _Root(module)
        self._sharded_root: FSDPModule = fully_shard(self._root, **options)
        _widen(module)
        self._module, self._device = module, torch.device(device)
        # stored here, because after a forward pass without a backward pass the module has whole parameters instead
        self._held = dict(canonical_parameters(module))
        self._parameters = {name: p for name, p in self._held.items() if p.requires_grad}

    def parameters(self) -> Mapping[str, Tensor]:
        """See `Unsharded`."""
        return self._parameters

    def rows(self) -> Mapping[str, tuple[int, int]]:
        """See `Unsharded`."""
        return {name: self._rows(parameter) for name, parameter in self._parameters.items()}

    def compute(self, forward: Callable[[M], LossParts], micro: M) -> LossParts:
        """See `Unsharded`. FSDP averages over ranks, so the loss is multiplied by the number of ranks to give a sum."""

        def inner() -> tuple[Tensor, dict[str, Tensor]]:
            parts = forward(micro)
            return parts.loss * self.ranks, dict(parts.sums)

        loss, sums = self._root(inner)
        return LossParts(loss, {**sums, "loss": loss.detach() / self.ranks})

    def rounds(self, mine: int) -> int:
        """See `Unsharded`."""
        most = torch.tensor(mine, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def total(self, values: Tensor) -> Tensor:
        """See `Unsharded`."""
        summed = values.to(self._device)
        dist.all_reduce(summed)
        return summed

    def collect_gradients(self) -> None:
        """Do nothing: FSDP has already reduced the gradients."""

    def clip_gradients(self, limit: float) -> float:
        """See `Unsharded`."""
        whole: Any = torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        return float(whole.full_tensor() if isinstance(whole, DTensor) else whole)

    def write_back(self) -> None:
        """Drop gathered copies of parameters that a forward pass without a backward pass left.

        Nothing is written: the optimiser updates the module's own shards.
        """
        self._sharded_root.reshard()

    def export(self) -> Iterator[Shard]:
        """See `Unsharded`; a rank without rows of a parameter yields no piece of this parameter."""
        for name, parameter in self._held.items():
            start, stop = self._rows(parameter)
            if start < stop:
                frozen = name not in self._parameters
                yield Shard(name, tuple(parameter.shape), local(parameter.detach()), start, frozen=frozen)

    def _rows(self, parameter: Tensor) -> tuple[int, int]:
        """Return the rows of this rank by torch.chunk's arithmetic, which FSDP2 uses."""
        chunk = -(-parameter.shape[0] // self.ranks)
        start = min(self.rank * chunk, parameter.shape[0])
        return start, min(start + chunk, parameter.shape[0])

    def live(self) -> Mapping[str, Tensor]:
        """See `Unsharded`."""
        return {name: local(parameter.detach()) for name, parameter in self._parameters.items()}

    def gathered(self, dtype: torch.dtype | None = None, *, trained: bool = False) -> dict[str, Tensor]:
        """See `Unsharded`; one parameter at a time."""
        whole: dict[str, Tensor] = {}
        for name, parameter in (self._parameters if trained else self._held).items():
            held: Any = parameter.detach()
            full: Tensor = held.full_tensor() if isinstance(held, DTensor) else held
            if self.rank == 0:
                whole[name] = full.to("cpu", dtype or self._dtype)
        return whole


# The placement of a learner's parameters. `compute` gives the forward pass whole parameters; gradients of all ranks and
# micro-batches add up in `parameters`; a "collective" method is called by every rank or by none
Sharding = Unsharded | FullySharded


def _widen(module: nn.Module) -> None:
    """Convert trained parameters to float32, and buffers too, because rotary frequencies must not be rounded."""
    buffers = {id(buffer) for buffer in module.buffers()}
    trained = lambda t: t.is_floating_point() and (t.requires_grad or id(t) in buffers)  # noqa: E731
    module._apply(lambda t: t.float() if trained(t) else t)  # type: ignore[no-untyped-call]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or the tensor if it is not sharded, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """Consecutive ranks that work on one batch together: `SequenceGroup(group, rank=1, size=2)`."""

    group: Any  # a torch.distributed process group
    rank: int
    size: int

    def stretch(self, total: int) -> tuple[int, int]:
        """Return the packed tokens [start, stop) of this rank, as if the row were padded to a multiple of `size`."""
        chunk = -(-total // self.size)
        return self.rank * chunk, (self.rank + 1) * chunk

    def owns(self, index: Tensor, total: int) -> Tensor:
        """Return which packed indices this rank computes: [N] → [N] bool."""
        start, stop = self.stretch(total)
        return (index >= start) & (index < stop)

    def slice(self, row: Tensor) -> Tensor:
        """Return this rank's range of a row [T], padded with zeros."""
        start, stop = self.stretch(len(row))
        part = row[start:stop]
        return torch.cat([part, part.new_zeros(stop - start - len(part))])

    def spread(self, part: Tensor, total: int) -> Tensor:
        """Return this rank's range [chunk, …] as [total, …], with zeros in the other ranks' ranges."""
        start, stop = self.stretch(total)
        whole = part.new_zeros(self.size * len(part), *part.shape[1:])
        return whole.index_copy(0, torch.arange(start, stop, device=part.device), part)[:total]

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over ranks.

        All ranks compute the same loss; the backward pass gives each rank the gradient of its part.
        """
        summed: Tensor = _SumOnce.apply(part, self.group)  # type: ignore[no-untyped-call]
        return summed

    def to_heads(self, states: Tensor) -> Tensor:
        """Swap [chunk, heads, head_dim] of all heads to [size · chunk, heads / size, head_dim] of all tokens."""
        swapped: Tensor = _Swapped.apply(states, self.group, self.size, _to_heads, _to_tokens)  # type: ignore[no-untyped-call]
        return swapped

    def to_tokens(self, states: Tensor) -> Tensor:
        """Inverse of `to_heads`: [size · chunk, heads / size, head_dim] → [chunk, heads, head_dim]."""
        swapped: Tensor = _Swapped.apply(states, self.group, self.size, _to_tokens, _to_heads)  # type: ignore[no-untyped-call]
        return swapped

    def shared_heads(self, states: Tensor) -> Tensor:
        """Return key-value heads, repeated if there are fewer heads than ranks.

        Raises:
            InputError: heads cannot be divided evenly among ranks.
        """
        heads = states.shape[1]
        if heads % self.size == 0:
            return states
        if self.size % heads:
            raise InputError(
                f"sequence_parallel must divide the number of heads ({heads}) or be a multiple of it, got {self.size}"
            )
        return states.repeat_interleave(self.size // heads, 1)


def open_sequence_group(rank: int, ranks: int, size: int) -> SequenceGroup | None:
    """Return this rank's group of `size` consecutive ranks; None without sequence parallelism. Collective.

    Raises:
        InputError: the number of ranks is not a multiple of `size`.
    """
    if size == 1:
        return None
    if ranks % size:
        raise InputError(f"sequence_parallel must divide the pool's {ranks} ranks, got {size}")
    found: SequenceGroup | None = None
    for start in range(0, ranks, size):  # every rank takes part in creating every group
        group = dist.new_group(list(range(start, start + size)))
        if start <= rank < start + size:
            found = SequenceGroup(group, rank - start, size)
    return found


class _SumOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        summed = part.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


_Way = Callable[[Tensor, Any, int], Tensor]


class _Swapped(torch.autograd.Function):
    """Swaps tokens and heads in the forward pass, and reverses the swap for gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any, size: int, way: _Way, back: _Way) -> Tensor:
        ctx.group, ctx.size, ctx.back = group, size, back
        return way(states, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(gradients[0], ctx.group, ctx.size), None, None, None, None


def _to_heads(states: Tensor, group: Any, size: int) -> Tensor:
    chunk, heads, width = states.shape
    outgoing = states.reshape(chunk, size, heads // size, width).transpose(0, 1).contiguous()
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing, group=group)
    return arrived.reshape(size * chunk, heads // size, width)


def _to_tokens(states: Tensor, group: Any, size: int) -> Tensor:
    total, share, width = states.shape
    outgoing = states.reshape(size, total // size, share, width).contiguous()
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing, group=group)
    return arrived.transpose(0, 1).reshape(total // size, size * share, width)


def checkpoint_activations(module: nn.Module) -> None:
    """Recompute every decoder layer in the backward pass. Names and parameters do not change.

    The call must precede sharding.

    Source: Chen et al., arXiv 1604.06174.

    Raises:
        InputError: the decoder layers of the model cannot be found.
    """
    layers = getattr(getattr(module, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(
            f"activation_checkpointing needs a model with a list of decoder layers, got {type(module).__name__}; "
            "turn it off"
        )
    for layer in layers:
        checkpoint(layer)
