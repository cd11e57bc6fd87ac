"""Keys and values of conversations between two turns.

A session contains the keys and values of the tokens that the model has read: the context of the last turn and its
response, without the response's last token. The next turn computes only what was added. Prefill and decoding round
differently, so what is held is never recomputed: if the budget has no room, the oldest sessions are moved, bit for bit,
to host memory (on CUDA) or to a file (on the CPU).
"""

import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.port import KVShape
from posttrain.engine.samples import Ints


@dataclass(slots=True, eq=False)
class _Session:
    tokens: Ints  # that the model has read, [n]
    pairs: list[Tensor]  # by layer, [n, 2, kv_heads, head_dim]; empty: in the file
    inside: bool = True  # whether the pairs count towards the budget
    begin: int = 0  # in the file


@final
class _Spilled:
    """A temporary file without a name, whose free ranges are used again: one for any number of sessions."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- `close` closes it
        self._free: list[tuple[int, int]] = []  # [begin, end), in order, none adjacent to another
        self.end = 0

    def put(self, parts: Sequence[Tensor], size: int) -> int:
        """Write tensors of `size` bytes; return where they begin."""
        found = next(((begin, end) for begin, end in self._free if end - begin >= size), (self.end, self.end + size))
        begin = found[0]
        self._free = [span for span in self._free if span != found]
        self.end = max(self.end, begin + size)
        if found[1] > begin + size:
            self._free = sorted([*self._free, (begin + size, found[1])])
        self._file.seek(begin)
        for part in parts:
            self._file.write(part.contiguous().view(torch.uint8).numpy().data)
        self._file.flush()
        return begin

    def get(self, begin: int, size: int) -> bytearray:
        """Return the bytes that were written at `begin`."""
        self._file.seek(begin)
        return bytearray(self._file.read(size))

    def free(self, begin: int, size: int) -> None:
        """Free a range; free space at the end leaves the file."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._free, (begin, begin + size)]):
            first = merged.pop()[0] if merged and merged[-1][1] == first else first
            merged.append((first, last))
        if merged[-1][1] == self.end:
            self.end = merged.pop()[0]
            self._file.truncate(self.end)
        self._free = merged

    def close(self) -> None:
        """Close the file; what was not written to a full disk is dropped."""
        with suppress(OSError):
            self._file.close()


@final
class HeldSessions:
    """The sessions of one engine, the oldest first."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._held: dict[str, _Session] = {}
        self._file: _Spilled | None = None
        self.used = 0  # bytes of the budget that sessions occupy

    def continued(self, name: str, context: Ints) -> int:
        """Return how many tokens of the context [n] are held, at most n - 1; 0 if they differ from the session's.

        At least the last token is computed, because its hidden state predicts the next token. The session of a
        preempted row is longer than the row's context.
        """
        one = self._held.get(name)
        count = 0 if one is None else min(len(one.tokens), len(context) - 1)
        return count if one is not None and np.array_equal(one.tokens[:count], context[:count]) else 0

    def hold(self, name: str, tokens: Ints, pairs: list[Tensor]) -> None:
        """Hold the keys and values of these tokens as the newest session."""
        self.release([name])
        self._held[name] = _Session(tokens, pairs)
        self.used += self._shape.position_bytes * len(tokens)

    def past(self, name: str, count: int) -> list[Tensor]:
        """Return the keys and values of the first `count` tokens, by layer [count, 2, kv_heads, head_dim]."""
        one, device = self._held[name], self._shape.device
        pairs = one.pairs or self._load(one)
        return [pair[:count].to(device) for pair in pairs]

    def release(self, names: Collection[str]) -> None:
        """Free these sessions; skip unknown names."""
        for name in names:
            if (one := self._held.pop(name, None)) is None:
                continue
            if one.inside:
                self.used -= self._bytes(one)
            elif self._file and not one.pairs:
                self._file.free(one.begin, self._bytes(one))

    def clear(self) -> None:
        """Free all sessions, and the file, which may be unusable after an error."""
        self.release(list(self._held))
        if self._file is not None:
            self._file.close()
            self._file = None

    def spill(self, needed: int) -> int:
        """Move the oldest sessions out of the budget until `needed` bytes are free; return the number moved.

        Raises:
            JobFailedError: the file system has no room for them.
        """
        moved = 0
        for name, one in self._held.items():
            if needed <= 0:
                break
            if one.inside:
                if self._shape.device.type == "cuda":
                    one.pairs = [pair.cpu() for pair in one.pairs]
                else:
                    one.begin, one.pairs = self._written(name, one), []
                needed, self.used = needed - self._bytes(one), self.used - self._bytes(one)
                moved, one.inside = moved + 1, False
        return moved

    def _bytes(self, one: _Session) -> int:
        return self._shape.position_bytes * len(one.tokens)

    def _written(self, name: str, one: _Session) -> int:
        try:
            self._file = self._file or _Spilled()
            return self._file.put(one.pairs, self._bytes(one))
        except OSError as error:
            raise JobFailedError(
                f"session {name} must be written to a temporary file when runtime.kv_cache has no room for it, but "
                f"{error.strerror or error}; free space in {tempfile.gettempdir()}, or raise runtime.kv_cache"
            ) from error

    def _load(self, one: _Session) -> list[Tensor]:
        shape = self._shape
        assert self._file is not None, "a session without pairs is in the file"
        raw = torch.frombuffer(self._file.get(one.begin, self._bytes(one)), dtype=shape.dtype)
        return list(raw.view(shape.layers, len(one.tokens), 2, shape.kv_heads, shape.head_dim))
