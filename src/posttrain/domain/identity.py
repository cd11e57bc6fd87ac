"""What decides a stage's result, and nothing else: the identity of its cached outputs and of its checkpoints.

Where a job runs, how often it writes a checkpoint and what it may spend decide nothing, so work that was done under
another of these is the same work and can be gone on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.domain.images import image_digest
from posttrain.domain.jobs import InputBlob
from posttrain.domain.manifest import NAMED

_UNDECIDING = frozenset({"placement"})
_UNDECIDING_RUNTIME = frozenset(
    {"call_timeout", "checkpoint_every", "object_store", "ray_address", "stall_after", "start_timeout"}
)
_UNDECIDING_META = frozenset({"source", NAMED})  # what errors call a file, and a person a model


def job_identity(
    kind: str, params: Mapping[str, Any], seed: int, inputs: Mapping[str, InputBlob], image: str | None = None
) -> dict[str, Any]:
    """A JSON map that is equal for two jobs exactly when they must come to the same result under the same code.

    A parameter counts unless it is known to decide nothing; names of stages, slots' assets and files never do, nor what
    an image is called.
    """
    return {
        "kind": kind,
        "params": deciding(params),
        "seed": str(seed),  # a seed may be more than a number of JSON can hold
        "inputs": {slot: [blob.digest, deciding_meta(blob.meta)] for slot, blob in inputs.items()},
        **({"image": image_digest(image)} if image else {}),
    }


def deciding(params: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's parameters without those that decide nothing."""
    kept = {name: value for name, value in params.items() if name not in _UNDECIDING}
    if isinstance(kept.get("runtime"), Mapping):
        kept["runtime"] = {k: v for k, v in kept["runtime"].items() if k not in _UNDECIDING_RUNTIME}
    return kept


def deciding_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of an input beside its bytes, without what decides nothing."""
    return {key: value for key, value in meta.items() if key not in _UNDECIDING_META}
