"""Stop strings that a stage is trained with and that whoever evaluates it does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.control.deciding import ADDED
from posttrain.domain.manifest import Manifest


def other_stops(manifest: Manifest) -> Iterator[str]:
    """One warning for each suite whose responses end otherwise than those that its model was trained by.

    A suite takes nothing over from the stage that it measures, so one without the strings lets the model go on to its
    end of sequence, which it never had to say.
    """
    for stage in manifest.stages:
        model, suites = stage.inputs.get("model"), stage.params.get("suites")
        if not stage.measures or stage.name.startswith(ADDED) or model is None or model.source != "stage":
            continue
        trained = _stops(manifest.stage(model.name).params)
        for name, suite in suites.items() if trained and isinstance(suites, Mapping) else ():
            own = _stops(suite if isinstance(suite, Mapping) else {})
            if own != trained:
                yield (
                    f"{stage.name}: responses of suite {name} end at {_said(own)}, those that {model.name} trains on "
                    f"at {_said(trained)}; write stop: {trained} in the suite too, or leave it where that is meant"
                )


def _stops(params: Mapping[str, Any]) -> list[str]:
    stop = params.get("stop")
    return sorted(map(str, stop)) if isinstance(stop, list | tuple) else []


def _said(stop: list[str]) -> str:
    return " or ".join(map(repr, stop)) or "no strings"
