"""docs/run-yaml.md states defaults: they are the configuration's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from posttrain.engine.config import GRPOConfig, SFTConfig

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "run-yaml.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("config", [SFTConfig, GRPOConfig], ids=lambda config: config.kind)
def test_the_optimizers_of_the_reference_are_the_defaults(config: type[SFTConfig | GRPOConfig]) -> None:
    written = re.search(rf"[Ff]or `{config.kind}`: `(\{{.*?\}})`", TEXT)
    assert written
    expected = config.model_fields["optimizer"].default.model_dump(mode="json")
    assert yaml.safe_load(written.group(1)) == expected
