"""What a stage leaves open is chosen from the machine: as the plan says it, as the job does it, and refused in a line.

The machines are pretended; that a job on this machine chooses what its plan said, and takes the memory that was said,
is `tests/e2e/test_sizes.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.domain.kinds import Load
from posttrain.domain.manifest import deciding
from posttrain.execution.machine import Gpu, Machine
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.planner.residency import resident
from posttrain.planner.shape import Shape
from posttrain.planner.sizes import Room, Settled, loading, settle, too_much_to_load

H100 = Gpu("NVIDIA H100 80GB HBM3", 81_559 * 2**20)
NODE = Machine(64, 2**41, (H100,) * 8)
# Qwen2.5-7B's and Llama-3.1-8B's config.json
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen": {
        **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    },
    "llama": {
        **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
    },
}
TOGETHER, APART = {"collocated": {"gpus": 8}}, {"policy": {"gpus": 4}, "rollout": {"gpus": 4}}
LONG = {"max_new_tokens": 10000}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo with kl": ("grpo", {**LONG, "reward": "exact", "kl": {"coefficient": 0.01}}),
    "ppo with a critic": ("ppo", {**LONG, "reward": "exact"}),
    "ppo with a reward model": ("ppo", {**LONG, "reward_model": "judge"}),
    "sft": ("sft", {}),
    "reward model": ("reward_model", {}),
    "distill": ("distill", {**LONG, "teacher": "big"}),
}


def load(kind: str, **params: Any) -> Load:
    found = NativeTrainer().check(kind, {"data": "train", "steps": 5, **params}).load
    assert found is not None
    return found


def shape(name: str = "qwen") -> Shape:
    found = Shape.of_config(CONFIGS[name])
    assert found is not None
    return found


def settled(of: Load, model: str = "qwen", machine: Machine = NODE, **given: Any) -> Settled:
    shapes = {role.name: shape(model) for role in of.roles if role.model}
    return settle(of, shapes, Room(machine.gpu_memory, machine.memory, bool(machine.gpus)), **given)


def size(of: Settled, name: str) -> float:
    return of.values()[name]


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("placement", [TOGETHER, APART], ids=["collocated", "two pools"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_7b_with_long_answers_starts_on_eight_gpus_with_every_default(stage: str, placement: Any, model: str) -> None:
    kind, params = STAGES[stage]
    if "rollout" in placement and kind in ("sft", "reward_model"):
        placement = {"collocated": {"gpus": 4}}
    of = load(kind, **params, placement=placement)
    found = settled(of, model, prompt_tokens=500)
    assert found.short == ""
    shapes = {role.name: shape(model) for role in of.roles if role.model}
    table = resident(found.load, shapes, prompt_tokens=500, gpu_there=True)
    usable = 0.9 * H100.memory - 2**30  # type: ignore[operator]
    for peak in table.peaks:
        if peak.device == "cuda":
            assert peak.bytes <= usable, peak
    if of.role("rollout"):  # at least as many rows at once as the design counts on: 66 in 40 GB of Qwen's
        rows = size(found, "kv_cache") // (10_500 * shape(model).kv_values * 2)
        assert rows >= 16
        assert model != "qwen" or rows >= 58


def test_without_checkpointing_the_usual_micro_batch_would_not_fit() -> None:
    """What 0.1 did: 104 GiB of activations."""
    of = load("sft", placement=TOGETHER, runtime={"activation_checkpointing": False, "micro_batch_tokens": 16384})
    [peak] = resident(settled(of).load, {"policy": shape()}, gpu_there=True).peaks
    assert peak.bytes > 100 * 2**30
    chosen = settled(load("sft", placement=TOGETHER))
    assert (size(chosen, "micro_batch_tokens"), size(chosen, "activation_checkpointing")) == (16384, 1.0)


def test_the_smallest_micro_batch_is_an_answer_and_an_answer_can_be_too_long() -> None:
    long = settled(load("grpo", reward="exact", max_new_tokens=300_000, placement=TOGETHER))
    many = "with the smallest micro-batches, 300000 tokens, with activation checkpointing; one GPU has 79.6 GiB"
    assert many in long.short
    assert long.short.endswith("one GPU has 79.6 GiB"), "`test_planner_remedies` has the next action"
    narrow = settled(load("grpo", reward="exact", max_new_tokens=10_000, runtime={"dtype": "float32"}), "llama")
    assert narrow.short
    tight = Machine(64, 2**41, (Gpu("", 19 * 2**30),) * 8)
    no_row = settled(load("grpo", reward="exact", max_new_tokens=60_000, placement=APART), "llama", tight)
    assert "the key-value cache of one row of 60000 tokens takes 7.3 GiB" in no_row.short or "memory:" in no_row.short


def test_long_answers_and_large_weights_have_time_and_room() -> None:
    found = settled(load("grpo", **LONG, reward="exact", placement=APART))
    assert size(found, "reward_timeout") == pytest.approx(32 * 8 * 10_000 * 20e-6)
    assert size(found, "object_store") == 2 * 2 * shape().parameters
    little = Machine(64, 64 * 2**30, NODE.gpus)  # whose memory a store must not fill
    assert size(settled(load("grpo", **LONG, reward="exact", placement=APART), machine=little), "object_store") == (
        int(0.3 * 64 * 2**30)
    )


def test_deadlines_grow_with_what_is_read_and_sampled() -> None:
    whole = 2 * shape().parameters
    together = settled(load("grpo", **LONG, reward="exact", placement=TOGETHER))
    assert size(together, "start_timeout") == pytest.approx(10 * 8 * whole / 2**30, abs=0.1)
    assert size(together, "call_timeout") == 3600, "eight ranks sample 320,000 tokens each"
    few = settled(load("grpo", **LONG, reward="exact", placement={"policy": {"gpus": 7}, "rollout": {"gpus": 1}}))
    assert size(few, "call_timeout") == pytest.approx(0.01 * 256 * 10_000), "all of them on one"
    assert size(few, "start_timeout") == pytest.approx(10 * 7 * whole / 2**30, abs=0.1)
    tiny = settled(load("sft", placement={"collocated": {"cpus": 2, "ranks": 2}}), machine=Machine(8, 2**36))
    assert (size(tiny, "start_timeout"), size(tiny, "call_timeout")) == (
        pytest.approx(10 * 2 * 2 * whole / 2**30, abs=0.1),
        3600,
    )
    given = {"start_timeout": "20m", "call_timeout": 90}
    written = settled(load("grpo", **LONG, reward="exact", placement=TOGETHER, runtime=given))
    assert (size(written, "start_timeout"), size(written, "call_timeout")) == (1200, 90)
    assert not any(one.chosen for one in written.sizes if one.name.endswith("l_timeout"))
    alone = settled(load("sft"), machine=Machine(8, 2**36))
    assert "start_timeout" not in alone.values(), "nobody starts"
    assert alone.load.start_timeout is not None


def test_ranks_that_convert_side_by_side_need_the_machines_memory() -> None:
    """In the type of the file they read its pages, which are there once."""
    of, wide = load("sft", placement=TOGETHER), load("sft", placement=TOGETHER, runtime={"dtype": "float32"})
    whole = 2 * shape().parameters
    stored = {width: {"policy": replace(shape(), stored=width)} for width in (0, 2, 4)}
    assert list(loading(of, stored[2], gpu_there=True)) == [("policy", 8, whole)]
    for same, width in ((of, 2), (wide, 4), (of, 0)):
        assert too_much_to_load(same, stored[width], 64 * 2**30, gpu_there=True) == []
    [line] = too_much_to_load(of, stored[4], 64 * 2**30, gpu_there=True)
    assert line == (
        "memory: 8 ranks of policy convert their models at the same time, which takes 8 × 14.2 GiB, but this machine "
        "has 64.0 GiB"
    )
    assert too_much_to_load(of, stored[4], 8 * whole, gpu_there=True) == []
    assert len(too_much_to_load(wide, stored[2], 8 * whole, gpu_there=True)) == 1, "twice as wide"
    assert too_much_to_load(of, stored[4], None, gpu_there=True) == []
    file = Shape.of_files({**CONFIGS["qwen"], "dtype": "bfloat16"}, whole)
    assert file is not None
    assert file.stored == 2
    apart = load("grpo", **LONG, reward="exact", placement=APART, kl={"coefficient": 0.1})
    found = {role: ranks for role, ranks, _ in loading(apart, dict.fromkeys(apart.names, shape()), gpu_there=True)}
    assert found == {"policy": 4, "rollout": 4, "reference": 4}
    assert not [
        role for role, *_ in loading(load("grpo", reward="r", placement={}), {"rollout": shape()}, gpu_there=True)
    ], "a rollout beside its policy reads the weights where they are"


def test_what_is_written_is_taken_and_the_rest_is_chosen_around_it() -> None:
    found = settled(load("sft", placement=TOGETHER, runtime={"activation_checkpointing": False}))
    assert size(found, "activation_checkpointing") == 0.0
    assert size(found, "micro_batch_tokens") < 16384
    few = settled(load("grpo", **LONG, reward="exact", placement=TOGETHER, runtime={"kv_cache": "10GiB"}))
    assert size(few, "kv_cache") == 10 * 2**30
    assert [s.chosen for s in few.sizes if s.name == "kv_cache"] == [False]
    stored = settled(load("grpo", **LONG, reward="exact", placement=APART, runtime={"object_store": "20GB"}))
    assert size(stored, "object_store") == 20 * 10**9


def test_less_memory_takes_more_computation_then_smaller_micro_batches() -> None:
    seen = []
    for memory in (160, 79, 24, 19):
        gpu = Machine(64, 2**41, (Gpu("", memory * 2**30),) * 8)
        found = settled(load("sft", placement=TOGETHER), machine=gpu)
        seen.append((size(found, "activation_checkpointing"), size(found, "micro_batch_tokens")))
    assert seen == sorted(seen, key=lambda way: (way[0], -way[1]))
    assert seen[0] == (0.0, 16384)
    assert len(set(seen)) == 3 or len(set(seen)) == 4


def test_frozen_roles_are_sharded_only_where_whole_copies_do_not_fit() -> None:
    """Before anything is computed again, and not where the copy sleeps while the fullest phase works."""
    names = ("shard_frozen", "activation_checkpointing", "micro_batch_tokens")

    def chosen(sleep: bool, memory: int, shard: Any = "auto") -> tuple[Any, ...]:
        placement = {"policy": {"gpus": 4}, "rollout": {"gpus": 4}, "sleep": sleep}
        given = {"kl": {"coefficient": 0.1}, "placement": placement, "runtime": {"shard_frozen": shard}}
        gpu = Machine(64, 2**41, (Gpu("", memory * 2**30),) * 8)
        found = settled(load("grpo", **LONG, reward="exact", **given), machine=gpu)
        return (*(size(found, name) for name in names), bool(found.short))

    awake = {memory: chosen(False, memory) for memory in (160, 79, 64, 56)}
    assert awake == {
        **{160: (0, 1, 16384, False), 79: (0, 1, 16384, False)},
        **{64: (1, 1, 16384, False), 56: (1, 1, 16384, False)},
    }
    assert chosen(False, 64, False) == (0, 1, 8192, False), "which would take smaller micro-batches"
    assert chosen(False, 52, False)[3]
    assert chosen(False, 52) == (1, 1, 8192, False), "which would not fit at all"
    asleep = {memory: chosen(True, memory) for memory in (79, 64, 56, 48, 44)}
    assert [found[0] for found in asleep.values()] == [0] * 5
    assert chosen(True, 44, True)[3]
    assert not asleep[44][3], "shards, which stay, would not fit"
    whole = settled(load("grpo", reward="exact", placement={"policy": {"gpus": 1}, "rollout": {"gpus": 1}}))
    assert "shard_frozen" not in whole.values(), "one rank has nobody to share with"


def test_the_object_store_has_room_for_a_teachers_tokens() -> None:
    """Of a step: 512 responses of 10,000 tokens, 64 of the teacher's at each of them, 8 bytes for each of these."""
    placement = {"policy": {"gpus": 4}, "teacher": {"gpus": 4}}
    taught = {**LONG, "teacher": "big", "prompts_per_step": 512}
    found = settled(load("distill", **taught, placement=placement))
    assert [role.wide for role in load("distill", **taught).roles if role.wide] == [512]
    assert size(found, "object_store") == 2 * 2 * shape().parameters + 512 * 10_000 * 64 * 8
    (why,) = [one.why for one in found.sizes if one.name == "object_store"]
    assert why == "twice the 14.2 GiB of weights sent to rollouts, and 2.4 GiB of a teacher's tokens", why


def test_small_models_have_what_they_always_had() -> None:
    of = load("grpo", reward="exact")
    tiny = Shape.of_config({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60})
    assert tiny is not None
    shapes = {role.name: tiny for role in of.roles if role.model}
    cpu = settle(of, shapes, Room(memory=8 * 2**30)).values()
    assert (cpu["micro_batch_tokens"], cpu["activation_checkpointing"], cpu["reward_timeout"]) == (4096, 0.0, 10.0)
    assert "object_store" not in cpu
    assert settle(of, shapes, Room(H100.memory, 2**40, True)).values()["micro_batch_tokens"] == 16384


def test_a_cluster_is_as_large_as_the_kinds_that_it_is_asked_for() -> None:
    far = {"runtime": {"ray_address": "10.0.0.1:6379"}, **LONG, "reward": "exact"}
    named = load("grpo", **far, placement={"collocated": {"gpus": 8, "kind": "h100"}})
    found = settle(named, {role.name: shape() for role in named.roles if role.model}, Room())
    assert size(found, "activation_checkpointing") == 1.0
    assert size(found, "kv_cache") > 30 * 2**30
    unnamed = load("grpo", **far, placement=TOGETHER)
    found = settle(unnamed, {role.name: shape() for role in unnamed.roles if role.model}, Room())
    assert "name their kind" in found.sizes[0].why
    assert "kv_cache" not in found.values()


RUN = """\
name: sort
owner: ada
seed: 17
data: {train: dataset:train}
rewards: {exact: reward:sort}
stages:
  init: {kind: init_model, hidden_size: 4096, intermediate_size: 14336, layers: 32, heads: 32, kv_heads: 8,
         context_length: 20000}
  sft: {kind: sft, model: init, data: train, steps: 4, placement: {collocated: {gpus: 8}}}
  grpo: {kind: grpo, model: sft, data: train, reward: exact, steps: 6, max_new_tokens: 10000, GIVEN}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One workspace for all: nothing here may change it."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("sizes"), patch)
        made.prepare()
        yield made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machine that commands find, with Ray."""
    found = [NODE]
    monkeypatch.setattr("posttrain.preflight.placements.this_machine", lambda: found[-1])
    monkeypatch.setattr("posttrain.preflight.placements.gpu_visible", lambda: bool(found[-1].gpus))
    monkeypatch.setattr("posttrain.preflight.placements.ray_is_installed", lambda: True)
    return found


def test_plan_shows_the_arithmetic_of_every_default(world: World, machine: list[Machine]) -> None:
    name = world.write("long.yaml", RUN.replace("GIVEN", "placement: {collocated: {gpus: 8}}"))
    shown = " ".join(world.ok("plan", name, "-v").replace("│", " ").split())
    assert "micro_batch_tokens: 16384 tokens: " in shown
    assert "activation_checkpointing: on" in shown
    assert "70.7 GiB of 79.6 GiB usable on one GPU less" in shown
    assert "128 KiB for each token" in shown
    (numbers,) = re.findall(r"kv_cache: ([\d.]+) GiB: ([\d.]+) GiB of 79.6 GiB usable on one GPU less ([\d.]+)", shown)
    cache, usable, held = map(float, numbers)
    assert cache == pytest.approx(usable - held, abs=0.2)
    assert held > 13.0, "the weights"
    assert "reward_timeout: 51.2 s: 10 s, or 20 µs for each of at most 2560000 tokens" in shown
    planned = world.json("plan", name)["stages"]
    sizes = {size["name"]: size for size in planned[2]["sizes"]}
    assert set(sizes) == {
        *("micro_batch_tokens", "activation_checkpointing", "kv_cache", "object_store", "reward_timeout"),
        *("start_timeout", "call_timeout"),
    }
    assert "start_timeout: 1040.1 s: 5 min, or 10 s for each GiB of 8 × 13.0 GiB (policy) if that is more" in shown
    assert "call_timeout: 3600 s: 1 h, or 10 ms for each of the 320000 tokens of a rank's longest call" in shown
    assert all(size["chosen"] and size["why"] for size in sizes.values())
    assert "sizes" not in planned[0]  # a model from nothing has none to choose
    peaks = {stage["name"]: stage["residency"]["peaks"] for stage in planned[1:]}
    assert all(peak["bytes"] < H100.memory for found in peaks.values() for peak in found if peak["device"] == "cuda")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "placement: {collocated: {gpus: 1}}",
            ("memory: one rank of collocated needs at least", "has 79.6 GiB; set placement: {collocated: {gpus: 2}}"),
        ),
        (
            "placement: {collocated: {gpus: 8}}, runtime: {kv_cache: 512MiB}",
            ("runtime.kv_cache must hold one row of 10", "got 512 MiB; set runtime.kv_cache: auto ("),
        ),
        (
            "placement: {collocated: {gpus: 8}}, runtime: {kv_cache: 40}",
            ("runtime.kv_cache", "1048576", "40"),
        ),
        (
            "placement: {collocated: {gpus: 8}}, runtime: {kv_cache: lots}",
            ("an amount of memory such as 40GiB", "lots"),
        ),
        ("placement: {collocated: {gpus: 8}}, runtime: {object_store: -1}", ("runtime.object_store",)),
        ("runtime: {ray_address: 'h:1', object_store: 8GiB}", ("object_store applies only to a cluster",)),
        ("runtime: {call_timeout: -1}", ("runtime.call_timeout", "at least 1")),
        ("runtime: {start_timeout: soon}", ("runtime.start_timeout", "soon")),
        ("reward_timeout: soon", ("reward_timeout", "soon")),
        ("runtime: {activation_checkpointing: maybe}", ("activation_checkpointing", "maybe")),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    world: World, machine: list[Machine], given: str, words: tuple[str, ...]
) -> None:
    name = world.write("long.yaml", RUN.replace("GIVEN", given))
    for verb in ("plan", "run"):
        result = world(verb, name)
        assert result.exit_code == 2, result.stdout
        line = result.stderr.strip()
        assert line.startswith("error: long.yaml: stages.grpo: "), line
        assert "\n" not in line
        assert all(word in line for word in words), line


def test_the_size_of_the_object_store_decides_no_result() -> None:
    """Whoever raises it goes on from the checkpoint."""
    sizes = [{"runtime": {"object_store": size, "dtype": "float32"}} for size in ("auto", 2**33)]
    assert deciding(sizes[0]) == deciding(sizes[1]) == {"runtime": {"dtype": "float32"}}
