"""What a model says of itself in its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG = "config.json"


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether it gives a response a number and makes none: `architectures` names a sequence classifier."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)
