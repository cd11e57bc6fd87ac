"""Several rewards of one stage with their weights, as in run.yaml: `reward: {right: 1.0, brief: 0.2}`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from posttrain.domain.runspec import Name

MOST_WEIGHT = 1e6
MOST_REWARDS = 16  # maximum number of rewards of one stage
_ALONE, _WEIGHTED = "function-alone", "function-weighted"  # tags of pydantic that do not appear in errors


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would read it as 1 or 0
        raise ValueError(f"must be a number, got {str(value).lower()}; write the number")
    return value


def _weighing(weights: dict[str, float]) -> dict[str, float]:
    if not any(weights.values()):
        got = f"only {', '.join(weights)}: 0" if weights else "an empty map"
        raise ValueError(f"at least one reward must have a weight other than 0, got {got}; change a weight")
    return weights


# name → weight; the score is the sum of weight times reward
Weights = Annotated[
    dict[Name, Annotated[float, BeforeValidator(_number), Field(ge=-MOST_WEIGHT, le=MOST_WEIGHT)]],
    Field(max_length=MOST_REWARDS),
    AfterValidator(_weighing),
]
_Either = Annotated[
    Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]*$"), Tag(_ALONE)]
    | Annotated[Weights, Tag(_WEIGHTED)],
    Discriminator(lambda value: _WEIGHTED if isinstance(value, dict) else _ALONE),
]


def _name_or_map(value: Any) -> Any:
    if not isinstance(value, str | dict):
        given = "a list" if isinstance(value, list) else f"{value!r:.60}"
        raise ValueError(f"must be a name, or names with weights such as {{right: 1.0, brief: 0.2}}, got {given}")
    return value


Reward = Annotated[_Either, BeforeValidator(_name_or_map)]  # one name, or names with weights
