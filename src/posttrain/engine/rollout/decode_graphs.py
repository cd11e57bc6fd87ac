"""Decode steps on CUDA recorded once for a size and replayed: one launch instead of some thousand.

Rows are padded to few sizes, and so are the pages that they look at. A size is recorded after it has been asked for
some steps, for recording costs about as much as they do. What a recording reads lies in tensors of its own, into which
a step is copied; weights, rotations and pages it reads where they are, so it is dropped when these are allocated anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.rollout.kv_pages import PageStore, Step, padded_size
from posttrain.engine.rollout.kv_store import Positions
from posttrain.engine.rollout.llama_decoder import LlamaDecoder
from posttrain.engine.rollout.page_attention import Looks

Run = Callable[[], Tensor]
_AFTER = 32  # steps of a size before it is recorded
_ROWS = 8  # rows are padded to multiples of this


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    inputs: tuple[Tensor, ...]
    replay: Run


@final
class GraphedSteps:
    """`LlamaDecoder.step` over pages.

    Args:
        record: gives a function that does again what a run does, on the same tensors.
    """

    def __init__(self, decoder: LlamaDecoder, store: PageStore, record: Callable[[Run], Run]) -> None:
        self._decoder, self._store, self._record = decoder, store, record
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._memory: tuple[int, int] = (0, 0)

    def step(self, tokens: Tensor, positions: Positions) -> Tensor:
        """See `LlamaDecoder.step`. The logits are good until the next step."""
        count = len(positions)
        rows = self._decoder.rows(padded_size(count, _ROWS))
        padded = np.pad(positions, (0, rows - count))
        self._store.begin_step(padded)
        step = self._store.step
        assert step is not None
        inputs = (*self._decoder.inputs(tokens, padded), *step.tensors)
        memory = (self._decoder.rotations, self._store.allocated)
        if memory != self._memory:
            self._recorded, self._memory = {}, memory
        size = tuple(map(len, inputs))
        self._asked[size] += 1
        if size not in self._recorded and self._asked[size] <= _AFTER:
            return self._decoder.decode(self._store, inputs[0], inputs[1], rows)[:count]
        if size not in self._recorded:
            self._recorded[size] = self._recording(tuple(given.clone() for given in inputs), rows)
        recorded = self._recorded[size]
        for held, given in zip(recorded.inputs, inputs, strict=True):
            held.copy_(given)
        return recorded.replay()[:count]

    def _recording(self, held: tuple[Tensor, ...], rows: int) -> _Recorded:
        tokens, places, row, page, used, writes = held
        step = Step(Looks(rows, row, page, used), writes)

        def run() -> Tensor:
            self._store.step = step
            return self._decoder.decode(self._store, tokens, places, rows)

        return _Recorded(held, self._record(run))


def cuda_recorder() -> Callable[[Run], Run]:
    """CUDA graphs that share their memory: no two of them run at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Run) -> Run:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            run()  # libraries allocate what they need on their first call, which a recording may not
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
