"""What cannot be had is refused with role, amount asked, amount there and the next action; what can be is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.domain.kinds import Load
from posttrain.domain.placement import ROLES, Placement
from posttrain.domain.roles import POLICY, REWARD, ROLLOUT, RoleSpec
from posttrain.planner.residency import Peak, gib, infeasible, too_large, unfit
from posttrain.planner.shape import Shape

GRPO = ("policy", "rollout", "reward")
CLUSTER = {"CPU": 32.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 1e11, "node:10.0.0.1": 1.0}
LAPTOP = {"CPU": 2.0, "GPU": 0.0}
SHAPE = Shape(1000, layers=2, hidden=48, intermediate=8, heads=12, kv_heads=4, head_dim=4, vocabulary=10, tied=True)


def refusals(value: Any, available: dict[str, float] = CLUSTER, roles: tuple[str, ...] = GRPO) -> list[str]:
    return infeasible(Placement.model_validate(value), available, roles=roles, where="the cluster")


def test_one_process_asks_for_nothing() -> None:
    assert refusals("collocated", {}) == []


@pytest.mark.parametrize(
    "value",
    [
        {"collocated": {"gpus": 8, "kind": "h100"}},
        {"policy": {"gpus": 4}, "rollout": {"gpus": 4}, "reward": {"cpus": 24}},
        {"policy": {"cpus": 32, "ranks": 2}},
    ],
)
def test_what_fits_exactly_is_not_refused(value: Any) -> None:
    assert refusals(value) == []


def test_too_many_gpus_of_all_pools_together() -> None:
    assert refusals({"policy": {"gpus": 4}, "rollout": {"gpus": 5}}) == [
        "placement: policy and rollout request 9 gpus (policy 4, rollout 5), but the cluster has 8; "
        "request fewer, or name a cluster with runtime.ray_address"
    ]
    (line,) = refusals({"collocated": {"gpus": 1}}, LAPTOP)
    assert line.startswith("placement: collocated requests 1 gpus, but the cluster has 0;")


def test_too_many_cpus_of_all_pools_together() -> None:
    assert refusals({"policy": {"cpus": 2}, "reward": {"cpus": 31}}) == [
        "placement: policy and reward request 33 cpus (policy 2, reward 31), but the cluster has 32; "
        "request fewer, or put roles together with {with: policy}"
    ]
    (line,) = refusals({"collocated": {"cpus": 3}}, LAPTOP)
    assert line == "placement: collocated requests 3 cpus, but the cluster has 2; request fewer"


def test_ranks_that_ask_for_no_cpus_share_what_there_is() -> None:
    assert refusals({"collocated": {"ranks": 3}}, LAPTOP) == []


def test_pools_of_roles_that_the_stage_does_not_have_are_not_asked_for() -> None:
    value = {"policy": {"gpus": 8}, "critic": {"gpus": 8}}
    assert refusals(value) == []
    assert len(refusals(value, roles=ROLES)) == 1


def test_a_kind_that_is_not_there_is_named_beside_what_is() -> None:
    assert refusals({"policy": {"gpus": 1, "kind": "l40s"}}) == [
        "placement: policy requests 1 gpus of kind l40s, but the cluster has h100; change kind or leave it out"
    ]
    (line,) = refusals({"policy": {"gpus": 1, "kind": "l40s"}}, {"CPU": 4.0, "GPU": 2.0})
    assert "GPUs of no known kind" in line
    (line,) = refusals({"policy": {"gpus": 1, "kind": "l40s"}}, LAPTOP)  # the number says it already
    assert "has 0" in line


def load(placement: Any, parallel: int = 1, roles: tuple[RoleSpec, ...] = (POLICY, ROLLOUT, REWARD)) -> Load:
    placed = Placement.model_validate(placement)
    return Load("grpo", roles, placed, "auto", "auto", None, sequence_parallel=parallel)


@pytest.mark.parametrize(
    ("placement", "parallel", "words"),
    [
        ("collocated", 2, ("sequence_parallel", "ranks of collocated (1)", "got 2")),
        ({"policy": {"ranks": 6}}, 4, ("ranks of policy (6)", "got 4")),
        ({"policy": {"ranks": 8}}, 8, ("12 attention heads", "got 8")),
        ({"policy": {"ranks": 6}}, 6, ("4 key-value heads", "got 6")),
        ({"policy": {"gpus": 4, "ranks": 2}}, 1, ("policy has 4 gpus for 2 ranks", "request 2 gpus")),
    ],
)
def test_ranks_that_cannot_do_the_work(placement: Any, parallel: int, words: tuple[str, ...]) -> None:
    found = unfit(load(placement, parallel), SHAPE)
    assert len(found) == 1
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(("ranks", "parallel"), [(4, 4), (4, 2), (12, 12), (2, 1)])
def test_ranks_that_can(ranks: int, parallel: int) -> None:
    assert unfit(load({"policy": {"ranks": ranks}}, parallel), SHAPE) == []


def test_sequence_parallelism_asks_nothing_of_pools_that_only_sample_or_score() -> None:
    spread = {"policy": {"ranks": 2}, "rollout": {"ranks": 3}, "reward": {"cpus": 5}}
    assert unfit(load(spread, 2), SHAPE) == []
    assert unfit(load({"policy": {"ranks": 8}}, 8), None) == []  # heads are not known


GPU = Peak("policy", "cuda", 4, "update", bytes=90 * 2**30, certain=70 * 2**30)
CPU = Peak("main", "cpu", 2, "update", bytes=6 * 2**30, certain=4 * 2**30)


def test_only_what_is_certain_is_refused() -> None:
    assert too_large([GPU], device=80 * 2**30, machine=None) == []
    assert too_large([GPU], device=None, machine=1) == []
    (line,) = too_large([GPU], device=40 * 2**30, machine=None)
    assert line == "memory: one rank of policy needs at least 70.0 GiB on its GPU, which has 40.0 GiB"


def test_ranks_on_cpus_share_the_machine() -> None:
    assert too_large([CPU, GPU], device=None, machine=8 * 2**30) == []
    (line,) = too_large([CPU], device=None, machine=8 * 2**30 - 1)
    assert "at least 8.0 GiB (main 2 × 4.0 GiB)" in line


def test_sizes_in_words() -> None:
    assert [gib(n) for n in (0, 1, 3 * 2**20, 3 * 2**29)] == ["0 MiB", "1 MiB", "3 MiB", "1.5 GiB"]


pools = st.dictionaries(
    st.sampled_from(ROLES), st.fixed_dictionaries({"gpus": st.integers(0, 4), "cpus": st.integers(1, 4)}), min_size=1
).map(lambda found: {r: {"gpus": g["gpus"], "cpus": g["cpus"] * max(g["gpus"], 1)} for r, g in found.items()})


@given(pools)
def test_a_cluster_of_just_what_is_asked_is_enough_and_one_less_is_not(value: dict[str, Any]) -> None:
    placement = Placement.model_validate(value)
    found = placement.pools().values()
    gpus = sum(pool.resources.gpus for pool in found)
    cpus = sum(pool.resources.cpus_per_rank * pool.resources.rank_count for pool in found)
    assert infeasible(placement, {"CPU": cpus, "GPU": gpus}) == []
    assert len(infeasible(placement, {"CPU": cpus - 1, "GPU": gpus})) == 1
    assert all("\n" not in line for line in infeasible(placement, {}))
    if gpus:
        assert len(infeasible(placement, {"CPU": cpus, "GPU": gpus - 1})) == 1
