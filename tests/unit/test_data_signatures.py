"""How a reward is called, read from its source: as Python itself says once it is loaded, and by one table."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from posttrain.data.refs import signature_of
from posttrain.domain.rewards import DIALECTS, NO_COLUMNS, Signature, SignatureError, detect, refuse_missing
from posttrain.sandbox import dialects
from posttrain.sandbox.dialects import as_function

SOURCE = textwrap.dedent("""
    import functools
    from functools import partial

    def plain(completion, answer, *rest, weight=1, **row): ...
    async def later(completions, *, level, power=2): ...
    def nameless(a, completion, b=1, /, c=2): ...
    @functools.lru_cache(maxsize=3)
    def cached(completion): ...
    class Called:
        def __init__(self, scale=1): ...
        def __call__(self, prompts, completions, **kwargs): ...
    class Nameless:
        def __call__(self, completion, /): ...
    made = Called(2)
    alias = plain
    again: object = alias
    first = partial(plain, "x")
    named = functools.partial(later, level=3)
    both = partial(plain, "x", answer="y")
    twice = partial(both, weight=2)
    small = lambda completion, answer="1": 0.0
""")
LATER = textwrap.dedent("""
    import functools
    from trl.rewards import accuracy_reward
    def decorate(function):
        return functools.wraps(function)(lambda *a, **k: 0.0)
    @decorate
    def wrapped(completion): ...
    class Child(dict): ...
    made = decorate(len)
    chosen = wrapped if made else Child
    spread = functools.partial(wrapped, *[1])
    if made:
        def either(completion): ...
    else:
        def either(completions): ...
""")


@pytest.mark.parametrize(
    "entry",
    [
        "plain",
        "later",
        "nameless",
        "cached",
        "Called",
        "Nameless",
        "made",
        "alias",
        "again",
        "first",
        "named",
        "both",
        "twice",
        "small",
    ],
)
def test_as_python_says_once_it_is_loaded(entry: str) -> None:
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)  # noqa: S102 - the test's own
    function, _ = as_function(namespace[entry], namespace)
    assert signature_of(ast.parse(SOURCE), entry) == dialects.signature_of(function)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("accuracy_reward", "accuracy_reward is imported"),
        ("wrapped", "wrapped is decorated by decorate"),
        ("Child", "class Child does not define its __call__ here"),
        ("made", "made is the result of calling decorate"),
        ("chosen", "chosen is assigned from an expression"),
        ("spread", "wrapped is decorated by decorate"),
        ("either", "either is assigned more than once"),
    ],
)
def test_what_only_its_code_knows(entry: str, reason: str) -> None:
    assert signature_of(ast.parse(LATER), entry) == reason


@pytest.mark.parametrize("name", DIALECTS)
def test_the_table_says_what_the_worker_gives(name: str) -> None:
    row = {"prompt": "Q", "answer": "1", "level": 3, "completion": "x", "messages": [], "extra_info": {}, "info": {}}
    call = {"prompts": ["Q"], "completions": ["1"], "rows": [row], "prompt_ids": [[1]], "completion_ids": [[2]]}
    batched, single = dialects.BATCHED.get(name), dialects.SINGLE.get(name)
    given = batched(call) if batched else single(call, 0) if single else {}
    columns = {"answer", "level", "extra_info", "info"} if DIALECTS[name].columns else set()
    assert set(given) == {*DIALECTS[name].offers, *columns}
    assert DIALECTS[name].batched == (batched is not None)
    assert not set(NO_COLUMNS) & columns


@pytest.mark.parametrize(
    ("names", "dialect"),
    [
        (("solution_str", "ground_truth"), "verl"),
        (("solution_strs",), "verl_batch"),
        (("completion", "info"), "verifiers"),
        (("completions", "log_extra"), "trl"),
        (("completion", "answer"), "row"),
    ],
)
def test_a_dialect_is_told_by_names(names: tuple[str, ...], dialect: str) -> None:
    assert detect(Signature(names)) == dialect


def test_what_nobody_offers() -> None:
    refuse_missing(Signature(("completions", "solution"), ("completions", "solution")), "trl", ["solution"])
    with pytest.raises(
        SignatureError, match=r"parameter 'solution' is neither a column .* known: answer, completion_ids"
    ):
        refuse_missing(Signature(("completions", "solution"), ("completions", "solution")), "trl", ["answer"])
    with pytest.raises(SignatureError, match="parameter 'level'"):
        refuse_missing(Signature(("solution_str", "level"), ("solution_str", "level")), "verl", ["level"])
    with pytest.raises(SignatureError, match=r"parameters \(x, \*\*kw\) match no known dialect"):
        detect(Signature(("x",), ("x",), "kw"))
    with pytest.raises(SignatureError, match="parameter 'a' is positional-only"):
        detect(Signature(("completion",), (), "", ("a",)))
