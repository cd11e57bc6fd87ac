"""What a plan suggests to a stage that does not fit has been tried: applied, it fits, and the smallest number is it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml
from hypothesis import assume, given, settings, strategies as st

from posttrain.domain.kinds import Load
from posttrain.domain.placement import Placement
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.planner.remedies import Bench
from posttrain.planner.residency import gib, resident, too_large
from posttrain.planner.shape import Shape
from posttrain.planner.sizes import Room, settle

GPU = 80 * 2**30
CLUSTER = {"ray_address": "10.0.0.1:6379"}
LONG = {"max_new_tokens": 4096, "reward": "exact", "kl": {"coefficient": 0.01}}
# Qwen2.5-32B's and Llama-3.1-70B's config.json
CONFIGS: dict[str, dict[str, Any]] = {
    "32B": {
        **{"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8},
        **{"intermediate_size": 27648, "vocab_size": 152064},
    },
    "70B": {
        **{"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"intermediate_size": 28672, "vocab_size": 128256},
    },
}


def load(kind: str = "grpo", **params: Any) -> Load:
    given = LONG if kind == "grpo" else {}
    found = NativeTrainer().check(kind, {"data": "train", "steps": 5, **given, **params}).load
    assert found is not None
    return found


def bench(of: Load, config: dict[str, Any], room: Room, gpus: int | None = None) -> Bench:
    shape = Shape.of_config(config)
    assert shape is not None
    return Bench(of, {role.name: shape for role in of.roles if role.model}, room, gpus)


def fits(of: Load, at: Bench) -> bool:
    """By each pool's own peak against each device: nothing of `remedies` but the load that it made."""
    if settle(of, at.shapes, at.room).short:
        return False
    peaks = resident(settle(of, at.shapes, at.room).load, at.shapes, gpu_there=at.room.gpu_there).peaks
    cpus = sum(peak.ranks for peak in peaks if peak.device == "cpu")
    for peak in peaks:
        whole = at.room.gpu if peak.device == "cuda" else (at.room.memory or 0) // cpus
        if peak.bytes > (whole or 0):
            return False
    return too_large(peaks, device=at.room.gpu, machine=at.room.memory) == []


def applying(change: str, kind: str, params: dict[str, Any]) -> Load:
    """The stage after what is printed was written to run.yaml."""
    short, _, tokens = change.partition(" so that a response has at most ")
    for words in [f"{short}: {tokens.split()[0]}"] if tokens else change.split(" and "):
        for name, value in yaml.safe_load(words).items():
            *inside, field = name.split(".")
            params = {**params, inside[0]: {**params[inside[0]], field: value}} if inside else {**params, field: value}
    return load(kind, **params)


def gpus(of: Load) -> int:
    return sum(pool.resources.gpus for pool in of.pools.values())


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["grpo", "dpo", "sft"]),
    layers=st.sampled_from([8, 32, 64]),
    hidden=st.sampled_from([512, 4096, 5120]),
    placement=st.sampled_from([
        {}, {"collocated": {"gpus": 2}}, {"collocated": {"gpus": 8}}, {"policy": {"gpus": 4}, "sleep": False},
        {"collocated": {"ranks": 2}},
    ]),
    runtime=st.fixed_dictionaries({}, optional={
        "activation_checkpointing": st.just(False), "micro_batch_tokens": st.sampled_from([2048, 65536]),
        "dtype": st.just("float32"), "shard_frozen": st.just(False),
    }),
    memory=st.sampled_from([8, 24, 80]),
    there=st.integers(0, 8),
)  # fmt: skip
def test_every_remedy_that_is_suggested_fits(
    kind: str, layers: int, hidden: int, placement: Any, runtime: dict[str, Any], memory: int, there: int
) -> None:
    config = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8, "vocab_size": 32000}
    of = load(kind, placement=placement, runtime=runtime)
    tried = bench(of, config, Room(memory * 2**30 if there else None, 2**37, there > 0), there)
    assume(there or not gpus(of))
    trial = tried.tried(of)
    assert trial.over != fits(of, tried)
    if not trial.over:
        return
    for remedy in (*tried.remedies, *tried.pools):
        applied = applying(remedy.change, kind, {"placement": placement, "runtime": runtime})
        assert applied == remedy.trial.load
        assert fits(applied, tried), remedy.change
        assert applied != of
    assert all(gpus(one.trial.load) <= max(1, there) for one in tried.remedies if "placement: {" in one.change)
    named = [one.change for one in tried.remedies[:3]] or [one.change for one in tried.pools[:1]]
    assert all(change in tried.advice for change in named)
    assert "\n" not in tried.advice


def test_a_32b_on_four_nodes_fits_once_the_rollout_has_its_own_pool() -> None:
    """With a reference, which is sharded: a copy on every rank beside the policy's shards would not fit awake."""
    kind = {"kind": "h100"}
    together = bench(load(placement={"collocated": {"gpus": 32, **kind}}, runtime=CLUSTER), CONFIGS["32B"], Room())
    assert "125.9 GiB" in together.tried(together.load).refused[0]
    placed = "{policy: {gpus: 24, kind: h100}, rollout: {gpus: 8, kind: h100}}"
    assert together.advice == f"set placement: {placed} (policy takes 66.1 GiB of 74.5 GiB in start)"
    apart = {"policy": {"gpus": 24, **kind}, "rollout": {"gpus": 8, **kind}}
    of = load(placement=apart, runtime=CLUSTER)
    found = settle(of, together.shapes, Room())
    assert not found.short
    assert found.values()["shard_frozen"] == 1
    assert found.values()["micro_batch_tokens"] == 16384, "of which the opening of the model takes nothing"
    [why] = [size.why for size in found.sizes if size.name == "shard_frozen"]
    assert why == "reference takes 61.0 GiB whole, 2.5 GiB on each of 24 ranks"
    whole = load(placement={**apart, "sleep": False}, runtime={**CLUSTER, "shard_frozen": False})
    kept = bench(whole, CONFIGS["32B"], Room())
    assert kept.tried(whole).over
    assert kept.advice.startswith(
        "set runtime.shard_frozen: true (policy takes 66.1 GiB of 74.5 GiB in start), or placement: "
    )


def test_the_smallest_number_of_gpus_is_enough_and_one_less_is_not() -> None:
    room = Room(GPU, 2**41, True)
    few = bench(load(placement={"collocated": {"gpus": 8}}), CONFIGS["32B"], room, 8)
    assert few.remedies == []
    assert few.advice.startswith(
        "use at least 10 GPUs (8 are there): placement: {policy: {gpus: 9}, rollout: {gpus: 1}} ("
    )
    least = few.pools[0].trial.load
    assert fits(least, few)
    for policy, rollout in ((8, 1), (7, 2), (5, 4), (1, 8)):
        nine = Placement.model_validate({"policy": {"gpus": policy}, "rollout": {"gpus": rollout}})
        assert not fits(replace(least, placement=nine), few), nine
    assert not fits(replace(least, placement=Placement.model_validate({"collocated": {"gpus": 9}})), few)


def test_settings_and_pools_that_help_only_together_are_named_together() -> None:
    config = {**CONFIGS["70B"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    wide = {"dtype": "float32", "activation_checkpointing": False, "micro_batch_tokens": 2**15}
    params = {**LONG, "max_new_tokens": 64, "placement": {"collocated": {"gpus": 8}}, "runtime": wide}
    few, many = (bench(load(**params), config, Room(24 * 2**30, 2**41, True), there) for there in (8, 16))
    [change] = [one.change for one in many.remedies]
    assert change == (
        "runtime.activation_checkpointing: true and runtime.micro_batch_tokens: auto and runtime.dtype: bfloat16 and "
        "placement: {policy: {gpus: 8}, rollout: {gpus: 1}, sleep: true}"
    )
    assert few.remedies == []
    assert few.advice.startswith(f"use at least 9 GPUs (8 are there): {change} (policy takes ")
    assert fits(applying(change, "grpo", params), many)


def test_no_number_of_gpus_fits_a_model_that_no_gpu_holds_while_it_is_opened() -> None:
    many = bench(load(placement={"collocated": {"gpus": 8}}), CONFIGS["70B"], Room(GPU, 2**42, True), 8)
    assert many.pools == []
    assert many.advice == (
        "no setting and no number of GPUs fits: collocated takes 300.5 GiB of 80.0 GiB in update, 220.5 GiB too much; "
        "the largest part of a rank is copy of rollout, 131.4 GiB; use a smaller model, or devices with more memory"
    )


def test_on_cpus_the_missing_memory_is_named() -> None:
    """By the sum over ranks, as two pools may be of different sizes."""
    config = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8, "vocab_size": 32000}
    small = bench(load(placement={"collocated": {"ranks": 2}}), config, Room(memory=4 * 2**30), 0)
    everything = {"dtype": "bfloat16", "placement": small.load.placement.model_copy(update={"sleep": True})}
    trial = small.tried(replace(small.load, **everything))
    total = sum(2 * peak.bytes for peak in trial.residency.peaks)
    assert trial.over
    assert small.remedies == []
    assert trial.missing == total - 4 * 2**30
    assert small.advice == (
        f"no setting fits: ranks on CPUs take {gib(total)} of 4.0 GiB, {gib(trial.missing)} too much; the largest part "
        "of a rank is optimizer of policy, 4.5 GiB; use a smaller model, or devices with more memory"
    )
    written = {"kv_cache": "2GiB", "micro_batch_tokens": 1024, "activation_checkpointing": True}
    apart = load(placement={"policy": {"ranks": 1}, "rollout": {"ranks": 3}}, runtime=written)
    policy, rollout = bench(apart, config, Room(memory=2**40), 0).tried(apart).residency.peaks
    needs = policy.bytes + 3 * rollout.bytes
    assert policy.bytes > needs // 3
    assert not bench(apart, config, Room(memory=needs), 0).tried(apart).over
    assert bench(apart, config, Room(memory=needs - 1), 0).tried(apart).missing == 1


def test_settings_that_help_only_together_are_named_together() -> None:
    """An 8B in float32; without those that are not necessary."""
    config = {**CONFIGS["70B"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    runtime = {"activation_checkpointing": False, "micro_batch_tokens": 8192, "dtype": "float32"}
    named = {}
    for memory in (24, 32, 40):
        tried = bench(
            load("sft", placement={"collocated": {"gpus": 8}}, runtime=runtime),
            config,
            Room(memory * 2**30, 2**41, True),
            8,
        )
        named[memory] = [one.change for one in tried.remedies]
        assert all(fits(one.trial.load, tried) for one in tried.remedies)
    checkpointing, micro = "runtime.activation_checkpointing: true", "runtime.micro_batch_tokens: auto"
    half = "runtime.dtype: bfloat16"
    pairs = [f"{checkpointing} and {micro}", f"{checkpointing} and {half}", f"{micro} and {half}"]
    assert named == {24: [f"{checkpointing} and {micro} and {half}"], 32: pairs, 40: [checkpointing, micro]}
