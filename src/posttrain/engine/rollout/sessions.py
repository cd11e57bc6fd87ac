"""Keys and values of conversations between two turns.

A session contains the keys and values of the tokens that the model has read: the context of the last turn and its
response, without the response's last token. The next turn computes only what was added. Prefill and decoding round
differently, so what is held is never recomputed: if the budget has no room, the oldest sessions are moved, bit for bit,
to host memory (on CUDA) or to a file (on the CPU).
"""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import IO, final

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.port import KVShape
from posttrain.engine.samples import Ints


@dataclass(slots=True, eq=False)
class _Session:
    tokens: Ints  # that the model has read, [n]
    pairs: list[Tensor]  # by layer, [n, 2, kv_heads, head_dim]; empty: in `file`
    file: IO[bytes] | None = None
    inside: bool = True  # whether the pairs count towards the budget


@final
class HeldSessions:
    """The sessions of one engine, the oldest first."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._held: dict[str, _Session] = {}
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
        pairs = one.pairs if one.file is None else self._load(one.file, len(one.tokens))
        return [pair[:count].to(device) for pair in pairs]

    def release(self, names: Collection[str]) -> None:
        """Free these sessions; skip unknown names."""
        for name in names:
            one = self._held.pop(name, None)
            if one is not None and one.inside:
                self.used -= self._shape.position_bytes * len(one.tokens)
            if one is not None and one.file is not None:
                one.file.close()

    def clear(self) -> None:
        """Free all sessions."""
        self.release(list(self._held))

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
                    one.file, one.pairs = self._written(name, one.pairs), []
                count = self._shape.position_bytes * len(one.tokens)
                needed, self.used = needed - count, self.used - count
                moved, one.inside = moved + 1, False
        return moved

    def _written(self, name: str, pairs: Sequence[Tensor]) -> IO[bytes]:
        file: IO[bytes] | None = None
        try:
            file = tempfile.TemporaryFile()  # noqa: SIM115 -- `release` closes it
            for pair in pairs:
                file.write(pair.contiguous().view(torch.uint8).numpy().data)
            file.flush()
        except OSError as error:
            if file is not None:
                file.close()
            raise JobFailedError(
                f"session {name} must be written to a temporary file when runtime.kv_cache has no room for it, but "
                f"{error.strerror or error}; free space in {tempfile.gettempdir()}, or raise runtime.kv_cache"
            ) from error
        return file

    def _load(self, file: IO[bytes], tokens: int) -> list[Tensor]:
        shape = self._shape
        file.seek(0)
        raw = torch.frombuffer(bytearray(file.read()), dtype=shape.dtype)
        return list(raw.view(shape.layers, tokens, 2, shape.kv_heads, shape.head_dim))
