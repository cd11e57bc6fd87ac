"""The table of operations, values as JSON, and errors as problem documents: both sides have the same."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.api.codec import adapter, problem, raised
from posttrain.api.control import OPERATIONS, VERBS
from posttrain.client.remote import Remote
from posttrain.domain import errors
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.server.authentication import to_json

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PosttrainError)]


def test_every_verb_is_an_operation_or_known_to_be_none() -> None:
    pages = {"report", "comparison"}  # what the server's own pages ask, of which a client gets the pages
    for verb in VERBS.keys() - OPERATIONS.keys() - pages:  # a client answers by requests of its own
        assert inspect.isfunction(vars(Remote)[f"_{verb}"]), verb
    machinery = {"asked", "body", "fetcher", "pages", "project", "read", "sender", "sent", "sweep", "transport"}
    machinery |= {"fetched", "streamed"}
    assert not machinery & VERBS.keys(), "a client would take its own machinery for what answers a verb"
    places = [(one.method, one.path) for one in OPERATIONS.values()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("verb", sorted(OPERATIONS))
def test_what_an_operation_takes_and_answers_can_be_read(verb: str) -> None:
    operation = OPERATIONS[verb]
    assert set(operation.in_path) <= set(operation.parameters)
    for one in operation.parameters.values():
        assert adapter(one.annotation).json_schema()
    if verb != "ask":  # whose answers are an iterator
        assert OPERATIONS[verb].answer.json_schema(mode="serialization")


@pytest.mark.parametrize("verb", sorted(OPERATIONS))
def test_what_only_looks_is_a_get_and_what_changes_is_none(verb: str) -> None:
    looks = VERBS[verb].needs is Role.VIEWER
    posts = {
        "compare",
        "plan",
        "plan_sweep",
        "rank",
        "lock",
        "verify",
        "recalled",
    }  # they look, and take more than a query holds, or take long
    asked_of_admins = {"members", "tokens"}
    assert (OPERATIONS[verb].method == "GET") == ((looks and verb not in posts) or verb in asked_of_admins)


@given(
    metrics=st.dictionaries(st.text(min_size=1, max_size=9), st.floats(), max_size=5),
    words=st.text(max_size=40),
    at=st.floats(0, 1e10),
)
def test_values_come_back_as_they_were(metrics: dict[str, float], words: str, at: float) -> None:
    stage = StageRecord("r", "s", 0, "sft", "running", message=words, metrics=metrics, started_at=at)
    run = RunRecord("r", words, "sha256:00", "running", words, at, message=words)
    back = adapter(StageRecord).validate_json(to_json(stage))
    assert list(back.metrics) == list(metrics)
    for name, value in metrics.items():
        assert back.metrics[name] == value or (math.isnan(value) and math.isnan(back.metrics[name]))
    assert replace(back, metrics={}) == replace(stage, metrics={})
    assert adapter(RunRecord).validate_json(to_json(run)) == run
    json.loads(to_json(stage), parse_constant=pytest.fail)  # other languages read it too


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_error_on_the_other_side(kind: type[errors.PosttrainError]) -> None:
    document: dict[str, Any] = json.loads(json.dumps(problem(kind("what, the constraint, the value"), "r1")))
    assert (document["exit_code"], document["retryable"]) == (kind.exit_code, kind.retryable)
    assert 400 <= document["status"] < 600
    back = raised(document)
    if kind is not errors.PosttrainError:
        assert type(back) is kind
        assert (str(back) == "what, the constraint, the value") == (document["status"] < 500)


@given(st.text(max_size=60))
def test_an_error_that_nobody_meant_tells_nothing(secret: str) -> None:
    document = problem(ValueError(f"password {secret}"), "r1")
    assert document == problem(KeyError(0), "r1")
    assert (document["status"], document["exit_code"]) == (500, 1)
    assert "r1" in str(raised(document))


@pytest.mark.parametrize("document", [{}, {"type": "urn:posttrain:problem:of-tomorrow"}, {"type": "x", "detail": 5}])
def test_a_problem_of_another_version_is_an_error_all_the_same(document: dict[str, Any]) -> None:
    assert isinstance(raised(document), errors.InfrastructureError)
