"""What a stage trained, as versions of an asset: `model:RUN/STAGE@1`, `model:RUN/STAGE/best@1`.

A name with a slash is never one that a person gives an asset, so neither takes the other's. RUN is the run's name, not
its id: repeated runs of one file make versions of one asset.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.control.stores import Stores
from posttrain.domain.contracts import BEST, MODEL
from posttrain.domain.kinds import kind_of
from posttrain.domain.records import Asset, StageRecord

KIND = "model"


def trained_models(
    stores: Stores, run: str, stage: StageRecord, outputs: Mapping[str, Mapping[str, str]]
) -> list[Asset]:
    """The models among the outputs of a stage, as versions that have no number yet.

    Args:
        run: its run's name.
    """
    if kind_of(stage.kind).from_nothing:  # `asset create` names what it makes
        return []
    models = []
    for output in (MODEL, BEST):
        if output in outputs:
            name = f"{run}/{stage.name}" + (f"/{BEST}" if output == BEST else "")
            meta = {"run": stage.run_id, "stage": stage.name, "output": output}
            digest, form = outputs[output]["digest"], outputs[output]["form"]
            models.append(Asset(KIND, name, 0, digest, form, stores.clock.now(), stores.actor, meta))
    return models
