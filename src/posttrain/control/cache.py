"""The stage cache: the same code, parameters, seed and input digests need not be computed twice."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.control.codes import deciding_code
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import IntegrityError, NotFoundError
from posttrain.domain.identity import job_identity
from posttrain.domain.jobs import InputBlob
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import StageRecord
from posttrain.store.trees import verify_tree


def cache_key(manifest: Manifest, stage: StageManifest, inputs: Mapping[str, InputBlob]) -> str:
    """What decides a stage's outputs, and nothing else (`domain.identity`)."""
    code = deciding_code(manifest, stage)
    decides = job_identity(stage.kind, stage.params, manifest.seed, inputs, manifest.image_of(stage))
    return digest_json({"code": code, **decides})


def usable(stage: StageRecord, blobs: BlobStore) -> bool:
    """Whether a cached stage's outputs are still there, every byte of them. A missing or corrupt blob is a miss."""
    try:
        for output in stage.outputs.values():
            if output["form"] == "tree":
                verify_tree(blobs, output["digest"])
            else:
                blobs.check(output["digest"])
    except (NotFoundError, IntegrityError):
        return False
    return bool(stage.outputs)
