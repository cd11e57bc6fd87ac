"""What measured a suite, as one digest: code, settings and rewards, but not the data, the model or the seed.

A channel's policy names the evaluators that may judge. The code's digest is part of it, so another version of Posttrain
is another evaluator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from posttrain.domain.canonical import digest_json
from posttrain.domain.identity import deciding, deciding_meta
from posttrain.domain.manifest import InputRef, StageManifest
from posttrain.domain.rewards import JUDGES, scored_slot

SUITES: Final = "suites."  # how slots of data that is measured begin
_OF_THE_RUN_FILE = ("data", "reward")  # settings that are words of the run file; what they mean is in the inputs


def measured_suites(stage: StageManifest) -> Iterator[tuple[str, InputRef]]:
    """Name and data of every suite that a stage measures; of an installed kind, none."""
    for slot, ref in stage.inputs.items():
        if slot.startswith(SUITES) and stage.measures:
            yield slot.removeprefix(SUITES), ref


def suite_evaluator(stage: StageManifest, code: Mapping[str, str], suite: str) -> str:
    """The digest of what measures one suite of a stage.

    Args:
        code: of the manifest.
    """
    params = deciding(stage.params)
    suites = params.pop("suites", {})
    settings = dict(suites.get(suite, {})) if isinstance(suites, Mapping) else {}
    named = {name: settings.pop(name, None) for name in _OF_THE_RUN_FILE}
    if isinstance(named["reward"], Mapping):  # several, with weights
        settings["reward"] = dict(named["reward"])
    rewards = {
        slot: [ref.digest, deciding_meta(ref.meta)]
        for slot, ref in stage.inputs.items()
        if slot.startswith(JUDGES) and scored_slot(slot.partition("/")[0]) == f"{SUITES}{suite}"
    }
    told: dict[str, Any] = {"kind": stage.kind, "params": params, "suite": settings, "rewards": rewards}
    named_code = (stage.trainer, f"kind:{stage.kind}")
    return digest_json({**told, "code": {name: code[name] for name in named_code if name in code}})
