"""Every number of run.yaml has a most, beyond which it is a slip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cli_world import RUN, World, make_world

from posttrain.domain.runspec import RunSpec
from posttrain.engine.config import STAGE_CONFIGS

# in the units of a metric, whose range bounds them (`GateRule.check_range`); confidence is bounded in `GateRule` itself
ELSEWHERE = {f"GateRule.{name}" for name in ("at_least", "at_most", "margin", "by", "confidence")}
BUDGET = {"Budget.tokens": "9007199254740992", "Budget.wall_clock": "315360001"}  # what stands behind a word's reading


def unbounded(schema: Any, place: str) -> Iterator[str]:
    """Numbers of a JSON schema that have no most."""
    if isinstance(schema, list):
        for part in schema:
            yield from unbounded(part, place)
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & schema.keys():
        yield place
    for name, part in schema.get("$defs", {}).items():
        yield from unbounded(part, name)
    for name, part in schema.get("properties", {}).items():
        yield from unbounded(part, f"{place}.{name}")
    for key in ("anyOf", "oneOf", "items", "prefixItems", "additionalProperties"):
        yield from unbounded(schema.get(key), place)


@pytest.mark.parametrize("model", [RunSpec, *STAGE_CONFIGS.values()])
def test_every_number_has_a_most(model: Any) -> None:
    assert set(unbounded(model.model_json_schema(), model.__name__)) - ELSEWHERE - BUDGET.keys() == set()


@pytest.mark.parametrize(("field", "more"), BUDGET.items())
def test_a_budget_has_a_most(world: World, field: str, more: str) -> None:
    name = field.partition(".")[2]
    world.write("run.yaml", RUN + f"budget: {{{name}: {more}}}\n")
    assert f"budget.{name}: must be " in world("plan", "run.yaml").stderr
    world.write("run.yaml", RUN + f"budget: {{{name}: {int(more) - 1}}}\n")
    world.ok("plan", "run.yaml")


def test_more_items_than_anybody_has_are_refused(world: World) -> None:
    world.write("run.yaml", RUN.replace("at_least: 0.9}", "at_least: 0.9, min_items: 10000000000000000000000}"))
    result = world("plan", "run.yaml")
    assert result.exit_code == 2
    assert "gates.0.min_items: must be at most 10000000, got 10000000000000000000000" in result.stderr
    world.write("run.yaml", RUN.replace("at_least: 0.9}", "at_least: 0.9, min_items: 10000000}"))
    assert "requires min_items: 10000000 to be judged, but its suite has 200 items" in world("plan", "run.yaml").stderr


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made
