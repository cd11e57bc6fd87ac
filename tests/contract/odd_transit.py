"""What goes wrong on the way of weights in real processes: run on a rank, as a worker's method is."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.stream import Bucket


def flip_what_arrives(worker: RolloutWorker) -> None:
    """One bit of the first bucket that comes next."""
    inner: Any = worker
    honest = inner._put

    def put(bucket: Bucket) -> None:
        inner._put = honest
        if bucket.data is not None:
            bucket = Bucket(bucket.pieces, bucket.data.clone())
            assert bucket.data is not None
            bucket.data.view(torch.uint8)[0] ^= 1
        honest(bucket)

    inner._put = put


def lose_what_arrives(worker: RolloutWorker) -> None:
    """All that comes from now on."""
    inner: Any = worker
    inner._put = lambda bucket: None


def serves(worker: RolloutWorker) -> str:
    """The version that it says it samples with."""
    return str(worker._version)
