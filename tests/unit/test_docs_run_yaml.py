"""docs/run-yaml.md states defaults: they are the configuration's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from posttrain.domain.placement import ROLES, Placement, Resources
from posttrain.engine.config import GRPOConfig, SFTConfig

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "run-yaml.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("kind", "config"), [("sft", SFTConfig), ("grpo", GRPOConfig)])
def test_the_optimizers_of_the_reference_are_the_defaults(kind: str, config: type[SFTConfig | GRPOConfig]) -> None:
    written = re.search(rf"[Ff]or `{kind}`: `(\{{.*?\}})`", TEXT)
    assert written
    expected = config.model_fields["optimizer"].default.model_dump(mode="json")
    assert yaml.safe_load(written.group(1)) == expected


def _section(title: str) -> str:
    return re.split(r"^#{2,3} ", TEXT.split(f"### {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_placements_of_the_reference_are_valid_and_every_key_is_explained() -> None:
    section = _section("Placement")
    examples = [line for line in section.splitlines() if line.startswith("placement: ")]
    assert len(examples) == 4
    for line in examples:
        Placement.model_validate(yaml.safe_load(line)["placement"])
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE))))
    assert explained == {field.alias or name for name, field in Resources.model_fields.items()} | {"sleep"}
    assert {f"`{role}`" for role in ROLES} <= set(re.findall(r"`\w+`", section))
