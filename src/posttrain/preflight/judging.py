"""Before anything runs: does the model that is to judge responses score them?"""

from __future__ import annotations

from pathlib import Path

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import OWN, kind_of
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.rendering import is_classifier
from posttrain.preflight.placing import stored_config
from posttrain.workspace.opened import OpenWorkspace

_SLOT = "reward_model"


def refuse_judges_without_scores(
    manifest: Manifest, workspace: OpenWorkspace, source: Path, model: str | None = None
) -> None:
    """Refuse a stage whose `reward_model` makes text: every response would be worth the same.

    What a channel serves is known once the stage is bound; its job asks then.

    Args:
        source: the run file or lock, for errors.
        model: how the run file names its base model; None: it is in the store.

    Raises:
        InputError: naming file, stage and judge.
    """
    for stage in manifest.stages:
        if _SLOT in stage.inputs and scores(manifest, stage, _SLOT, workspace, source, model) is False:
            raise InputError(
                f"{source}: stages.{stage.name}.{_SLOT}: must score responses, got {stage.inputs[_SLOT].name}, which "
                "is no sequence classifier; name a stage of kind reward_model, or a model that such a stage made"
            )


def scores(
    manifest: Manifest, stage: StageManifest, slot: str, workspace: OpenWorkspace, source: Path, model: str | None
) -> bool | None:
    """Whether the model in a slot scores responses; None where nobody knows yet."""
    ref = stage.inputs[slot]
    if ref.source == "stage":
        made = manifest.stage(ref.name).kind
        return kind_of(made).scores if made in OWN else None
    config, _ = stored_config(ref, workspace, source, model)
    return is_classifier(config) if config else None
