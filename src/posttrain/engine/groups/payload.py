"""How arguments and answers travel between processes: pickled, with tensors beside the pickle and not inside it.

A tensor's own pickling writes a whole file format into the pickle and copies the data several times. Here its memory is
handed over as a buffer (PEP 574), which a transport copies once; the receiver gets memory of its own, writable.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from posttrain.domain.errors import InputError

R = TypeVar("R")

Fetch = Callable[[Any], "Parcel"]  # from the handle of a stored value to the value, packed


@final
@dataclass(frozen=True, slots=True)
class Parcel:
    """A value ready to travel: the pickle and the memory it refers to, and handles of the stored values in it."""

    buffers: tuple[Any, ...]  # bytes-like; the first is the pickle
    handles: tuple[Any, ...]
    size: int  # bytes of all buffers


@final
@dataclass(frozen=True)
class StoredAway(Generic[R]):
    """`Stored` by a handle: packed in an argument, only the handle travels."""

    handle: Any
    fetch: Fetch

    @property
    def here(self) -> bool:
        """Never: it is fetched anew each time."""
        return False

    def value(self) -> R:
        """Fetch the value: a copy, the caller's own."""
        value: R = unpack(self.fetch(self.handle), self.fetch)
        return value


def pack(value: object) -> Parcel:
    """Make a parcel. It refers to the value's memory: a transport must copy before the value changes.

    Tensors lose their graph, and arrive on the CPU.

    Raises:
        Exception: what pickle raises for things it cannot do, PicklingError, AttributeError or TypeError.
    """
    file, buffers, handles = io.BytesIO(), list[pickle.PickleBuffer](), list[Any]()
    _Pickler(file, buffers, handles).dump(value)
    parts = (pickle.PickleBuffer(file.getvalue()), *buffers)
    return Parcel(parts, tuple(handles), sum(part.raw().nbytes for part in parts))


def unpack(parcel: Parcel, fetch: Fetch) -> Any:
    """What was packed; its tensors and arrays own their memory."""
    pickled, *buffers = parcel.buffers
    # copies: the transport's memory is shared and read-only
    return _Unpickler(io.BytesIO(pickled), [bytearray(buffer) for buffer in buffers], parcel.handles, fetch).load()


def check_importable(function: Callable[..., object], what: str) -> None:
    """Refuse what another process could not import: a lambda, a local function, a class of the main script.

    Raises:
        InputError: such a thing.
    """
    name = getattr(function, "__qualname__", repr(function))
    module = getattr(function, "__module__", None)
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        reachable = False
    else:
        reachable = module not in (None, "__main__")
    if not reachable:
        raise InputError(
            f"{what} must be importable by name in another process, got {name} of {module}; "
            "define it at the top level of a module"
        )


@final
class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], handles: list[Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._handles = handles

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is Tensor or kind is torch.nn.Parameter:
            return _reduced(thing)
        if kind is StoredAway:
            self._handles.append(thing.handle)
            return _stored, (len(self._handles) - 1,)
        return NotImplemented


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[bytearray], handles: tuple[Any, ...], fetch: Fetch) -> None:
        super().__init__(file, buffers=buffers)
        self._held = [StoredAway[Any](handle, fetch) for handle in handles]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_stored.__module__, _stored.__name__):
            return self._held.__getitem__
        return super().find_class(module, name)


def _stored(index: int) -> StoredAway[Any]:
    """Stands in the pickle for the stored value with this index."""
    raise pickle.UnpicklingError(f"stored value {index} outside a parcel")


def _reduced(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return NotImplemented
    plain = tensor.detach().cpu().contiguous()
    memory: Any = plain.reshape(-1).view(torch.uint8).numpy()  # CPython's gc crashes on buffers of memoryviews
    wanted = tensor.requires_grad and tensor.is_leaf
    kind = type(tensor) is torch.nn.Parameter
    return _tensor, (pickle.PickleBuffer(memory), plain.dtype, tuple(plain.shape), wanted, kind)


def _tensor(memory: bytearray, dtype: torch.dtype, shape: tuple[int, ...], wanted: bool, parameter: bool) -> Tensor:
    # of no memory at all frombuffer makes nothing
    tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape) if memory else torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, requires_grad=wanted) if parameter else tensor.requires_grad_(wanted)
