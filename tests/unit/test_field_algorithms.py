"""VAPO, PF-PPO and GSPO outside the tree: shorter than before, from documented names alone, with roles of their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from installed import install, on_path, package_in, package_of
from test_algorithm_sizes import statements
from test_engine_critics import GIVEN, group

from posttrain.domain import plugins
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import StageContract
from posttrain.domain.roles import step_phases
from posttrain.engine.config import PFPPOConfig
from posttrain.engine.recipes.pf_ppo import PFPPO
from posttrain.execution.trainers.native import NativeTrainer

FIELD = Path(__file__).resolve().parents[1] / "field_algorithms"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "plugin.md"
BEFORE = {"vapo": 45, "pf_ppo": 13, "gspo": 19}  # statements that each took when its critic and λ were written by hand
PARAMS: dict[str, Any] = {
    **GIVEN,
    "kl": {"coefficient": 0.1},
    "reward": {"r": 1.0, "reward_model": 0.5},
    "reward_model": "m",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    on_path(monkeypatch, tmp_path / "site")
    yield tmp_path / "site"
    plugins._scan.cache_clear()


def files_of(kind: str) -> list[Path]:
    return [FIELD / "field_algorithms" / f"{kind}{part}.py" for part in ("", "_algorithm")]


def imported(file: Path) -> set[tuple[str, str]]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    taken = [(node.module or "", one.name) for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]
    return {(module, name) for module, name in taken if module.startswith("posttrain")}


def test_each_is_shorter_than_before_and_as_short_as_the_page_states() -> None:
    found = {kind: sum(statements(file) for file in files_of(kind)) for kind in BEFORE}
    longer = {kind: f"{found[kind]} statements, {most} before" for kind, most in BEFORE.items() if found[kind] >= most}
    assert not longer, longer
    stated = re.search(r"have (\d+), (\d+) and (\d+) statements", PAGE.read_text(encoding="utf-8"))
    assert stated is not None
    assert found == dict(zip(BEFORE, map(int, stated.groups()), strict=True))


def public() -> set[tuple[str, str]]:
    """The names in the page's two tables of bases and functions, each with its module."""
    part = PAGE.read_text(encoding="utf-8").partition("### Bases and functions\n")[2].partition("### Roles")[0]
    bases, names = part.split("| module | names |")
    room, found = "posttrain.engine", set()
    for line in bases.splitlines():
        if cells := re.match(r"\| `(\w+)`.*?\| `(\w+)\.(\w+)` \|", line):
            found |= {(f"{room}.config", cells[1]), (f"{room}.recipes.{cells[2]}", cells[3])}
    for line in names.splitlines():
        if cells := re.match(r"\| `([\w.]+)` \| (.*?) \|", line):
            module = cells[1] if cells[1].startswith("posttrain.") else f"{room}.{cells[1]}"
            found |= {(module, name) for name in re.findall(r"`(\w+)`", cells[2])}
    return found


def test_the_page_names_everything_that_the_package_imports() -> None:
    named = public()
    assert len(named) > 40
    assert not [f"{module}.{name}" for module, name in named if not hasattr(import_module(module), name)]
    assert set().union(*(imported(file) for kind in BEFORE for file in files_of(kind))) <= named
    assert not {name for _, name in named} & {"VAPOConfig", "PFPPOConfig", "GSPOConfig", "VAPO", "PFPPO", "GSPO"}


def phases_of(contract: StageContract) -> list[str]:
    assert contract.load is not None
    return list(step_phases(contract.load.roles))


def test_a_plan_has_the_roles_and_the_cost_of_the_built_in_kind(site: Path) -> None:
    install(site, *package_in(FIELD))
    check = NativeTrainer().check
    for kind in BEFORE:
        mine, own = check(f"my_{kind}", PARAMS), check(kind, PARAMS)
        assert mine.load is not None
        assert own.load is not None
        assert mine.load.roles == own.load.roles
        assert (mine.params, mine.inputs, mine.work) == (own.params, own.inputs, own.work)
        assert mine.load.role("reference") is not None
        assert mine.load.role("reward_model") is not None
    assert phases_of(check("my_gspo", PARAMS)) == ["rollout", "reward", "reference", "update", "weights"]
    learned = ["values", "update critic", "update policy", "weights"]
    assert phases_of(check("my_vapo", PARAMS)) == ["rollout", "reward", "reference", *learned]
    with pytest.raises(InputError, match=r"placement\.critic: my_gspo .* has no critic \(its roles: policy, reference"):
        check("my_gspo", {**PARAMS, "placement": {"critic": {}}})
    with pytest.raises(InputError, match=r"lag\.correction must be bypass with one ratio a response, got tis"):
        check("my_gspo", {**PARAMS, "lag": {"steps": 0}})


def test_pf_ppo_keeps_what_the_built_in_kind_keeps(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FIELD)
    mine = import_module("field_algorithms.pf_ppo_algorithm").PFPPO
    config = import_module("field_algorithms.pf_ppo").PFPPOConfig
    rewards: list[list[float | None]] = [[0.2, None, 0.9, 0.4, 0.9, -1.0], [None, 0.5], [None, None], [1.0, 1.0, 1.0]]
    kept = set()
    for one, seed in product(("best", "best_random", "best_worst"), range(20)):
        groups = [group(key, given) for key, given in enumerate(rewards)]
        found = mine(config(**GIVEN, filter=one)).form(groups, seed)
        assert found.sample_ids == PFPPO(PFPPOConfig(**GIVEN, filter=one)).form(groups, seed).sample_ids
        kept.add(tuple(found.sample_ids))
    assert len(kept) > 5


def test_a_package_declares_a_frozen_model_of_its_own(site: Path) -> None:
    """The kind `anchored` of the page, whose run an end-to-end test trains."""
    install(site, *package_of("docs/howto/plugin.md"))
    contract = NativeTrainer().check("anchored", {**GIVEN, "teacher": "model:large"})
    assert contract.inputs["teacher"] == ("model", "model:large")
    assert contract.params["teacher"] == "teacher"
    assert phases_of(contract)[2:5] == ["reference", "teacher", "values"]
    with pytest.raises(InputError, match=r"anchored: teacher: is required; add it"):
        NativeTrainer().check("anchored", GIVEN)
