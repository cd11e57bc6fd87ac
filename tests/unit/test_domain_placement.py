"""What may be written under `placement`, which pools it makes, and that it reads back as itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from posttrain.domain.errors import InputError
from posttrain.domain.placement import ROLES, Placement, Resources
from posttrain.domain.validation import explain

SPREAD = {"policy": {"gpus": 4, "kind": "h100"}, "rollout": {"gpus": 12, "kind": "l40s"}, "reward": {"cpus": 32}}


def placed(value: Any) -> Placement:
    return Placement.model_validate(value)


def refusal(value: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        placed(value)
    line = str(explain(caught.value, "run.yaml", Placement))
    assert "\n" not in line
    return line


def ranks(placement: Placement) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {name: (pool.resources.rank_count, pool.roles) for name, pool in placement.pools().items()}


def test_the_default_is_one_process_for_every_role() -> None:
    assert Placement().is_inline
    assert ranks(Placement()) == {"main": (1, ROLES)}
    assert placed("collocated") == Placement() == placed({}) == placed({"collocated": {}})
    assert Placement().model_dump(mode="json") == "collocated"


def test_collocated_ranks_are_one_pool_and_no_longer_one_process() -> None:
    two = placed({"collocated": {"ranks": 2}})
    assert ranks(two) == {"main": (2, ROLES)}
    assert not two.is_inline


def test_roles_with_resources_head_pools_and_the_others_live_with_the_policy() -> None:
    spread = placed(SPREAD)
    assert ranks(spread) == {
        "policy": (4, ("policy", "critic", "reference", "reward_model", "teacher")),
        "rollout": (12, ("rollout",)),
        "reward": (32, ("reward",)),
    }
    assert spread.pool_of("critic").name == "policy"
    assert not spread.is_inline


def test_with_puts_a_role_into_the_pool_of_another_over_any_number_of_steps() -> None:
    chained = placed({"rollout": {"gpus": 2}, "reference": {"with": "rollout"}, "critic": {"with": "reference"}})
    assert chained.pool_of("critic").roles == ("critic", "reference", "rollout")
    assert chained.pool_of("policy").resources == Resources()
    hosted = placed({"rollout": {"gpus": 2}, "policy": {"with": "rollout"}})
    assert ranks(hosted) == {"rollout": (2, ROLES)}  # who lives with the policy moves with it


def test_pools_are_made_for_the_roles_that_a_stage_has() -> None:
    assert list(placed(SPREAD).pools(("policy", "rollout"))) == ["policy", "rollout"]
    assert list(placed(SPREAD).pools(("reward_model",))) == ["policy"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, (1, 0, 0)),
        ({"gpus": 4}, (4, 1, 0)),
        ({"cpus": 8}, (8, 0, 1)),
        ({"cpus": 8, "ranks": 2}, (2, 0, 4)),
        ({"gpus": 4, "cpus": 16, "kind": "h100"}, (4, 1, 4)),
        ({"gpus": 4, "ranks": 2}, (2, 2, 0)),
    ],
)
def test_ranks_are_one_per_gpu_else_one_per_cpu(written: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = Resources.model_validate(written)
    assert (found.rank_count, found.gpus_per_rank, found.cpus_per_rank) == expected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("colocated", ("collocated", "colocated")),
        ({"Polcy": {}}, ("Polcy", "must be a role")),
        ({"policy": {"gpu": 1}}, ("policy.gpu", "gpus")),
        ({"policy": {"gpus": 3, "ranks": 2}}, ("policy", "gpus", "multiple of ranks (2)", "3")),
        ({"policy": {"gpus": 2, "cpus": 3}}, ("policy", "cpus", "multiple of ranks (2)", "3")),
        ({"policy": {"gpus": -1}}, ("policy.gpus", "-1")),
        ({"policy": {"ranks": 0}}, ("policy.ranks", "0")),
        ({"policy": {"kind": "h100"}}, ("kind", "h100", "gpus")),
        ({"policy": {"gpus": 1, "kind": "H100"}}, ("policy.kind", "H100")),
        ({"policy": None}, ("policy", "nothing")),
        ({"critic": {"with": "Polcy"}}, ("critic.with", "Polcy")),
        ({"critic": {"with": "policy", "gpus": 1}}, ("`with` must be the only field", "gpus")),
        ({"critic": {"with": "critic"}}, ("circle",)),
        ({"policy": {"with": "rollout"}}, ("policy with rollout with policy", "circle")),
        ({"collocated": {"gpus": 1}, "critic": {"gpus": 1}}, ("collocated", "critic", "write policy")),
        ({"collocated": {"with": "policy"}}, ("collocated", "policy")),
        ({"sleep": "sometimes"}, ("sleep", "sometimes")),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(wrong: Any, words: tuple[str, ...]) -> None:
    line = refusal(wrong)
    assert all(word in line for word in words), line


def test_a_role_that_the_stage_does_not_have_is_refused() -> None:
    assert placed(SPREAD).for_roles(("policy", "rollout", "reward"), "grpo") == placed(SPREAD)
    with pytest.raises(InputError, match=r"placement\.critic: sft has no critic \(its roles: policy\)"):
        placed({"critic": {"gpus": 1}}).for_roles(("policy",), "sft")
    with pytest.raises(InputError, match=r"placement\.policy: sft has no rollout"):
        placed({"rollout": {"gpus": 1}, "policy": {"with": "rollout"}}).for_roles(("policy",), "sft")
    with pytest.raises(
        InputError, match=r"placement\.polcy: sft has no polcy \(its roles: policy\); remove it, or corr"
    ):
        placed({"polcy": {}}).for_roles(("policy",), "sft")


def test_a_role_of_its_own_has_a_pool_like_any_other() -> None:
    written = {"policy": {"ranks": 2}, "helpful": {"with": "safe"}, "safe": {"ranks": 3}}
    found = placed(written)
    assert found.model_dump() == written
    assert placed(found.model_dump()) == found
    mine = ("policy", "rollout", "brief", "helpful", "safe")
    assert {name: (pool.ranks, pool.roles) for name, pool in found.for_roles(mine, "flow").pools(mine).items()} == {
        "policy": (2, ("policy", "rollout", "brief")),
        "safe": (3, ("helpful", "safe")),
    }


amounts = st.builds(
    lambda ranks, gpus, cpus, said: {
        **({"gpus": gpus * ranks} if gpus else {}),
        **({"cpus": cpus * ranks} if cpus else {}),
        **({"ranks": ranks} if said or not (gpus or cpus) else {}),
    },
    st.integers(1, 8),
    st.integers(0, 1),
    st.integers(0, 4),
    st.booleans(),
).filter(lambda given: not (given.get("gpus") and "ranks" not in given and given.get("cpus", 0) % given["gpus"]))
companions = st.sampled_from(ROLES).map(lambda role: {"with": role})
maps = st.dictionaries(st.sampled_from(ROLES), amounts | companions)
sleeps = st.sampled_from([{}, {"sleep": "auto"}, {"sleep": True}, {"sleep": False}])


def valid(value: dict[str, Any]) -> bool:
    try:
        placed(value)
    except ValidationError:
        return False
    return True


@given(st.one_of(st.builds(lambda a, b: {**a, **b}, maps, sleeps), amounts.map(lambda a: {"collocated": a})))
def test_what_is_valid_reads_back_as_itself_and_every_role_has_one_pool(value: dict[str, Any]) -> None:
    if not valid(value):
        return
    placement = placed(value)
    written = placement.model_dump(mode="json")
    assert placed(json.loads(json.dumps(written))) == placement
    assert placed(written).model_dump(mode="json") == written
    homes = [role for pool in placement.pools().values() for role in pool.roles]
    assert sorted(homes) == sorted(ROLES)
    assert all(pool.resources.with_ is None for pool in placement.pools().values())
    assert all(role in placement.pool_of(role).roles for role in ROLES)
