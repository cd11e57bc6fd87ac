"""The lists of mutants fit the sources and the tests that they name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutants.catalogue import Mutant, check, load

IN_CONTRACT = "contract/test_rollout_stream.py::TestNative::test_a_stop_string_ends_a_response_or_is_refused"


@pytest.fixture(scope="module")
def everything() -> list[Mutant]:
    return load()


def test_audit_24_every_mutant_stands_in_its_source_and_names_tests_that_exist(everything: list[Mutant]) -> None:
    assert check(everything) == []
    assert any(IN_CONTRACT in mutant.tests for mutant in everything), "also a method that a class of tests inherits"


@pytest.mark.parametrize(
    "test",
    [
        "unit/test_nowhere.py",
        "unit/test_limits.py::test_nowhere",
        "unit/test_limits.py::Slow::test_nowhere",
        "contract/test_rollout_stream.py::TestNative::test_nowhere",
        "unit/test_limits.py::MOST",
    ],
)
def test_audit_24_a_mutant_whose_test_does_not_exist_is_refused(everything: list[Mutant], test: str) -> None:
    (problem,) = check([replace(everything[0], tests=(test,))])
    assert test.partition("::")[0] in problem
    assert "\n" not in problem
