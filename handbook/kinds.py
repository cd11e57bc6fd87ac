"""The tables on the pages of docs/run-yaml: one row for each field of a kind of stage or of a part of run.yaml.

A nested map has a row for each of its fields (`kl.coefficient`). If another page documents the map, its type is a link
to that page instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from handbook import fields
from handbook.types import models
from posttrain.domain.gates import GateRule
from posttrain.domain.placement import Placement, Resources
from posttrain.domain.runspec import Budget, ReleaseSpec, RewardUse, RunSpec, StageSpec
from posttrain.domain.trackers import Trackers
from posttrain.domain.waits import Wait
from posttrain.engine.config import STAGE_CONFIGS, HarnessConfig, TraceConfig
from posttrain.engine.config.policy_gradient import LagConfig
from posttrain.engine.config.sampling import RoleConfig
from posttrain.engine.settings import (
    AdapterConfig,
    EarlyStoppingConfig,
    LossProbeConfig,
    OptimizerConfig,
    PolicyGradientOptimizerConfig,
    ProbeConfig,
    RolloutConfig,
    RuntimeConfig,
    ServedConfig,
    TrainConfig,
)

# the name in `<!-- fields:NAME -->` → the model whose fields are the rows
TABLES: Mapping[str, type[BaseModel]] = {
    **STAGE_CONFIGS,
    "harness": HarnessConfig,
    "served-model": ServedConfig,
    "wait": Wait,
    "file": RunSpec,
    "stage": StageSpec,
    "budget": Budget,
    "gate": GateRule,
    "release": ReleaseSpec,
    "reward": RewardUse,
    "probe": ProbeConfig,
    "early_stopping": EarlyStoppingConfig,
    "optimizer-of-rows": OptimizerConfig,
    "optimizer-of-samples": PolicyGradientOptimizerConfig,
    "runtime": RuntimeConfig,
    "rollout": RolloutConfig,
    "train": TrainConfig,
    "adapter": AdapterConfig,
    "lag": LagConfig,
    "trace": TraceConfig,
    "placement": Placement,
    "role": RoleConfig,
    "pool": Resources,
}
_DOCUMENTED: Mapping[type[BaseModel], str] = {  # model → the page and anchor below docs/ with its table
    StageSpec: "run-yaml.md#stages",
    Budget: "run-yaml/budget.md",
    GateRule: "run-yaml/gates.md#gates",
    ReleaseSpec: "run-yaml/gates.md#release",
    RewardUse: "run-yaml/rewards.md#fields",
    LossProbeConfig: "run-yaml/training.md#probe",
    ProbeConfig: "run-yaml/training.md#probe",
    EarlyStoppingConfig: "run-yaml/training.md#early-stopping",
    OptimizerConfig: "run-yaml/training.md#optimizer",
    PolicyGradientOptimizerConfig: "run-yaml/training.md#optimizer",
    RuntimeConfig: "run-yaml/training.md#runtime",
    RolloutConfig: "run-yaml/sampling.md#rollout-engine",
    TrainConfig: "run-yaml/training.md#training-engine",
    AdapterConfig: "run-yaml/training.md#adapter",
    LagConfig: "run-yaml/sampling.md#lag",
    TraceConfig: "run-yaml/sampling.md#trace",
    Placement: "run-yaml/placement.md#roles",
    RoleConfig: "run-yaml/dataflow.md#roles",
    Resources: "run-yaml/placement.md#pools",
    ServedConfig: "run-yaml/rewards.md#models-that-rewards-call",
    Trackers: "trackers.md",
}
_FIRST = ("model", "data", "steps", "epochs")
_LAST = (
    "probe",
    "early_stopping",
    "keep_best",
    "optimizer",
    "runtime",
    "placement",
    "rollout",
    "train",
    "adapter",
    "lag",
    "stream_gradients",
    "trace",
)
_MODEL = re.compile(r"\[(\w+)\]\(#fields-\w+\)")


def table(name: str, page: str) -> str:
    """Return the table of a kind or part as Markdown.

    Args:
        name: a key of `TABLES`.
        page: the page below docs/ that contains the table; links are relative to this page.
    """
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    places = {model.__name__: os.path.relpath(at, os.path.dirname(page)) for model, at in _DOCUMENTED.items()}
    rows = _rows(TABLES[name])
    for field, kind, usual, meaning in sorted(rows, key=lambda row: _rank(row[0])) if name in STAGE_CONFIGS else rows:
        linked = _MODEL.sub(lambda found: f"[map]({places[found[1]]})" if found[1] in places else "map", kind)
        lines.append(f"| `{field}` | {linked} | {usual} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    annotations = {info.alias or name: info.annotation for name, info in model.model_fields.items()}
    for name, kind, usual, meaning in fields.rows(model):
        yield prefix + name, kind, usual.replace("as below", "the fields' defaults"), meaning
        for inner in dict.fromkeys(models(annotations[name])):
            if inner not in _DOCUMENTED:
                yield from _rows(inner, f"{prefix}{name}.{'NAME.' * kind.startswith('map of names')}")


def _rank(field: str) -> int:
    """Return 0 for fields that readers need first, 1 for the kind's own fields, 2 for fields that every kind has."""
    outer = field.partition(".")[0]
    return 0 if outer in _FIRST else 2 if outer in _LAST else 1
