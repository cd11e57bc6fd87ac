"""One line for what pydantic says of a field that takes several forms, without pydantic's own names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.domain.validation import explain
from posttrain.engine.config import GRPOConfig

GOOD = {"data": "x", "reward": "x", "steps": 1, "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reward_timeout": "10s"}, "reward_timeout: must be a number, or 'auto', got '10s'"),
        ({"reward_timeout": -1}, "reward_timeout: must be more than 0, or 'auto', got -1"),
        ({"trace": {"groups": "most"}}, "trace.groups: must be a whole number in digits, or 'all', got 'most'"),
        ({"runtime": {"kv_cache": -3}}, "runtime.kv_cache: must be at least 1048576, or 'auto', got -3"),
        ({"steps": "many"}, "steps: must be a whole number in digits, got 'many'"),
    ],
)
def test_a_field_of_several_forms_says_them(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GRPOConfig(**{**GOOD, **wrong})
    assert str(explain(caught.value, "run.yaml", GRPOConfig)) == f"run.yaml: {words}"
