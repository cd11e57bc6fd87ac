"""What a stage trained, as versions of an asset: `model:RUN/STAGE@1`, `model:RUN/STAGE/best@1`.

A name with a slash is never one that a person gives an asset, so neither takes the other's. RUN is the run's name, not
its id: repeated runs of one file make versions of one asset.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.control.stores import Stores
from posttrain.domain.contracts import BEST, MODEL
from posttrain.domain.errors import ConflictError
from posttrain.domain.kinds import kind_of
from posttrain.domain.records import Asset, StageRecord
from posttrain.store.transaction import Transaction

KIND = "model"
_RACES = 20  # that one version may lose to runs of the same name that end at the same moment


def register_trained(
    transaction: Transaction,
    stores: Stores,
    run: str,
    stage: StageRecord,
    outputs: Mapping[str, Mapping[str, str]],
    sizes: Mapping[str, int],
) -> None:
    """Register the models of a stage that has succeeded. One that is registered already, under whatever name, is that
    version.

    Args:
        run: its run's name.
    """
    found = [output for output in (MODEL, BEST) if output in outputs]
    if not found or kind_of(stage.kind).from_nothing:  # `asset create` names what it makes
        return
    for output in found:
        digest, form = outputs[output]["digest"], outputs[output]["form"]
        if any(asset.kind == KIND for asset in transaction.snapshot.assets_by_digest(digest)):
            continue
        name = f"{run}/{stage.name}" + (f"/{BEST}" if output == BEST else "")
        meta = {"run": stage.run_id, "stage": stage.name, "output": output}
        new = Asset(KIND, name, 0, digest, form, stores.clock.now(), stores.actor, meta)
        for race in range(_RACES):
            try:
                transaction.insert_asset(new, sizes)
                break
            except ConflictError:
                if race == _RACES - 1:
                    raise
