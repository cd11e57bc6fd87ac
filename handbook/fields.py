"""A page with every field of run.yaml, from the models that read it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from handbook.comments import summary
from handbook.meanings import meaning
from handbook.tables import stacked
from handbook.types import anchor, default, described, models
from posttrain.domain.gates import GateRule
from posttrain.domain.policies import ChannelPolicy
from posttrain.domain.runspec import Budget, ReleaseSpec, RewardUse, RunRuntime, RunSpec, StageSpec
from posttrain.domain.waits import Wait
from posttrain.engine.config import STAGE_CONFIGS, HarnessConfig

_PLACES = {
    RunSpec: "The file",
    RewardUse: "rewards.NAME",
    StageSpec: "stages.NAME",
    GateRule: "gates[]",
    Budget: "budget",
    RunRuntime: "runtime",
    ReleaseSpec: "release",
    ChannelPolicy: "a channel's policy",
    Wait: "kind: wait",
}
_FLATTENED = {(StageSpec, "params")}  # written next to `kind`: the tables of the kinds


def documented() -> dict[str, type[BaseModel]]:
    """Return title → model of every section of the page, in order."""
    found: dict[str, type[BaseModel]] = {title: model for model, title in _PLACES.items()}
    for config in dict.fromkeys(STAGE_CONFIGS.values()):  # kinds may share a class
        found["kind: " + ", ".join(kind for kind, model in STAGE_CONFIGS.items() if model is config)] = config
    found["kind: evaluate with harness"] = HarnessConfig
    waiting = list(found.values())
    for model in waiting:
        for field in model.model_fields.values():
            for inner in models(field.annotation):
                if inner not in waiting:
                    waiting.append(inner)
                    found[_parts(inner)] = inner
    return found


def page() -> str:
    """Return the whole reference in Markdown."""
    return "\n\n".join(_section(title, model) for title, model in documented().items())


def rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Yield field, type with bounds, default and meaning."""
    for name, info in model.model_fields.items():
        if (model, name) not in _FLATTENED:
            word = info.alias or name
            yield word, described(info), default(info), meaning(model, name, word)


def _parts(model: type[BaseModel]) -> str:
    """Return the nested parts: `optimizer (OptimizerConfig)`; parts with equal names differ by their model."""
    users = {
        field.alias or name
        for config in (*_PLACES, *STAGE_CONFIGS.values())
        for name, field in config.model_fields.items()
        if model in models(field.annotation)
    }
    return f"{', '.join(sorted(users)) or 'resources of a role'}: {model.__name__}"


def _section(title: str, model: type[BaseModel]) -> str:
    head = f"({anchor(model)})=\n\n## {title}\n\n{summary(model)}"
    table = ["| field | value | default | meaning |", "|---|---|---|---|"]
    table += [
        f"| `{name}` | {kind} | {usual} | {said.replace('|', chr(92) + '|')} |"
        for name, kind, usual, said in rows(model)
    ]
    return f"{head}\n\n{stacked(table)}"
