"""What lies in memory when: small cases by hand, parameters and activations against torch, invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from posttrain.domain.adapters import AdapterSize
from posttrain.domain.kinds import Load
from posttrain.domain.placement import Placement
from posttrain.domain.roles import CRITIC, POLICY, REFERENCE, REWARD, REWARD_MODEL, ROLLOUT, TEACHER, RoleSpec
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import InitModelConfig, RewardModelConfig
from posttrain.engine.config.sampling import DECODED_TOGETHER
from posttrain.engine.models.adapters import attach
from posttrain.engine.models.backbone import cost_model
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.rollout.backends import native
from posttrain.engine.rollout.kv_pages import PAGE, PageStore
from posttrain.engine.rollout.kv_slots import SlotStore
from posttrain.engine.rollout.port import KVShape, SamplingParams
from posttrain.engine.settings import AdapterConfig, LoraConfig
from posttrain.pacing.balance import CostModel
from posttrain.planner.residency import (
    KV_AHEAD,
    KV_PAGE,
    KV_RESERVE,
    PREFILL_TOKENS,
    Residency,
    resident,
    row_positions,
    shared_weights,
)
from posttrain.planner.shape import Shape

N = 1000
SHAPE = Shape(N, layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10, tied=True)
GRPO = (POLICY, REFERENCE, ROLLOUT, REWARD)
PPO = (POLICY, CRITIC, REFERENCE, ROLLOUT, REWARD_MODEL)


def load(kind: str = "grpo", roles: tuple[RoleSpec, ...] = GRPO, placement: Any = "collocated", **given: Any) -> Load:
    settings = {"device": "auto", "dtype": "auto", "micro_batch_tokens": 16, "rows": 6, "response_tokens": 5, **given}
    return Load(kind, roles, Placement.model_validate(placement), **settings)


def table(of: Load, *, gpu: bool = False, prompt: int = 0) -> Residency:
    return resident(of, {role.name: SHAPE for role in of.roles if role.model}, prompt_tokens=prompt, gpu_there=gpu)


def sure(found: Residency, phase: str, role: str) -> dict[str, int]:
    return {h.part: h.bytes for h in found.held if (h.phase, h.role) == (phase, role) and not h.estimated}


@pytest.mark.parametrize("targets", ["auto", ("down_proj", "k_proj")])
def test_an_adapter_has_the_parameters_that_peft_gives_it(targets: Any) -> None:
    size = InitModelConfig(hidden_size=48, heads=4, kv_heads=2, layers=3)
    lora = LoraConfig(rank=3, targets=targets)
    module = initial_model(size, character_tokenizer(size.characters), 0)
    shape = Shape.of_config(module.config.to_dict())
    assert shape is not None
    attach(module, lora, seed=0)
    counted = AdapterConfig(lora=lora).size()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert counted.parameters(shape.linear_layers, shape.layers) == trained


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_an_adapter_is_trained_beside_one_frozen_base(ranks: int, dtype: str) -> None:
    placement: Any = {"collocated": {"ranks": ranks}} if ranks > 1 else "collocated"
    whole = load(placement=placement, dtype=dtype, roles=(POLICY, ROLLOUT, REWARD))
    found = sure(table(replace(whole, adapter=AdapterSize(rank=1))), "update", "policy")
    own, base = 2 * (8 + 6 + 6 + 8 + 3 * 12), N  # of two layers: q, k, v, o, and the MLP's three
    width = 4 if dtype == "float32" else 2
    assert found["weights"] == (width * (base + own) if ranks == 1 else width * base // 2 + 4 * own // 2)
    assert found["optimizer"] == 8 * own // ranks
    assert found.get("masters", 0) == (4 * own if ranks == 1 and width == 2 else 0)
    assert found["gradients"] == 4 * own // ranks + (2 * own if ranks == 1 and width == 2 else 0)


def test_four_bits_are_half_a_byte_and_the_scale_of_a_block() -> None:
    linear = 2 * (16 + 8 + 8 + 16 + 3 * 32)  # weights of two layers: q, k, v, o, and the MLP's three
    quantised = replace(load(roles=(POLICY,)), adapter=AdapterSize(rank=1, quantised=True))
    own = AdapterSize(rank=1).parameters(SHAPE.linear_layers, SHAPE.layers)
    weights = sure(table(quantised), "update", "policy")["weights"]
    assert weights == 4 * (N - linear) + linear // 2 + 4 * linear // 64 + 4 * own


def test_supervised_training_on_one_cpu_holds_sixteen_bytes_a_parameter() -> None:
    found = table(load("sft", (POLICY,), rows=0, response_tokens=0))
    assert found.phases == ("update",)
    assert sure(found, "update", "policy") == {"weights": 4 * N, "optimizer": 8 * N, "gradients": 4 * N}
    (peak,) = found.peaks
    assert (peak.pool, peak.device, peak.ranks, peak.phase, peak.certain) == ("main", "cpu", 1, "update", 16 * N)
    assert peak.bytes > peak.certain


def test_mixed_precision_on_a_gpu_adds_masters_and_a_micro_batch_of_gradients() -> None:
    found = table(load("sft", (POLICY,)), gpu=True)
    expected = {"weights": 2 * N, "masters": 4 * N, "optimizer": 8 * N, "gradients": 6 * N}
    assert sure(found, "update", "policy") == expected
    assert sum(expected.values()) == 20 * N
    assert found.peaks[0].device == "cuda"
    assert table(load("sft", (POLICY,), device="cpu"), gpu=True).peaks[0].device == "cpu"


def test_shards_are_a_share_of_everything_and_a_unit_is_gathered() -> None:
    found = table(load("sft", (POLICY,), {"policy": {"gpus": 4}}))
    held = sure(found, "update", "policy")
    assert {part: held[part] for part in ("weights", "optimizer", "gradients")} == {
        "weights": N,
        "optimizer": 2 * N,
        "gradients": N,
    }
    assert held["gathered"] == 2 * SHAPE.unit_parameters
    assert "masters" not in held


def test_every_rank_opens_a_model_in_the_type_it_computes_in_before_it_is_sharded() -> None:
    """Next to the weights of the policy and the rollout, which are open by then."""
    spread = load("ppo", PPO, {"policy": {"gpus": 32}})
    shapes = {role.name: SHAPE for role in PPO if role.model}
    found = resident(spread, {**shapes, "critic": replace(SHAPE, parameters=3 * N)})
    assert found.phases[0] == "start"
    opened = {(h.role, h.part): h.bytes for h in found.held if h.phase == "start"}
    policy = 4 * -(-N // 32)
    assert opened == {("policy", "weights"): policy, ("rollout", "copy"): 2 * N, ("critic", "whole"): 6 * N}
    assert "start" not in table(load()).phases


def test_a_sharded_frozen_role_holds_its_share_and_the_layers_that_compute() -> None:
    """Also between its phases, as it does not sleep; where the pool has one rank, it is whole."""
    four = {"policy": {"gpus": 4}, "rollout": {"gpus": 1}}
    found = table(load(placement=four, shard_frozen=True))
    assert sure(found, "update", "reference") == {"weights": 2 * N // 4}
    assert sure(found, "reference", "reference") == {"weights": 2 * N // 4, "gathered": 2 * SHAPE.unit_parameters}
    whole = table(load(placement=four))
    assert sure(whole, "reference", "reference") == {"weights": 2 * N}
    alone = {"policy": {"gpus": 4}, "rollout": {"gpus": 1}, "reference": {"gpus": 1}}
    assert table(load(placement=alone, shard_frozen=True)).held == table(load(placement=alone)).held


def test_a_role_opens_beside_the_weights_of_the_roles_before_it() -> None:
    """The policy, then the rollout, then the others, each whole until it is sharded."""
    shapes = {role.name: SHAPE for role in PPO if role.model}
    for shard, role, before in (
        (False, "critic", {"policy": 4 * N // 4, "rollout": 2 * N}),
        (True, "reward_model", {"policy": N, "rollout": 2 * N, "critic": N, "reference": 2 * N // 4}),
    ):
        found = resident(load("ppo", PPO, {"collocated": {"gpus": 4}}, shard_frozen=shard), shapes)
        held = {h.role: h.bytes for h in found.held if h.phase == "start" and h.part != "whole"}
        [opened] = [h for h in found.held if h.phase == "start" and h.part == "whole"]
        assert (opened.role, opened.bytes, held) == (role, 2 * N, before)


def test_a_collocated_rollout_reads_the_policys_weights_and_holds_only_its_cache() -> None:
    alone = load()
    found = table(alone, prompt=3)
    assert shared_weights(alone)
    assert "weights" not in found.phases  # nothing has to be sent
    assert sure(found, "rollout", "rollout") == {}
    cache = {h.part: h.bytes for h in found.held if h.role == "rollout"}
    slots = 6 * 32 * (2 * 2 * 1 * 2 * 4)  # rows × positions × (2 × layers × kv_heads × dim × 4)
    assert cache["kv cache"] == slots + slots // 2  # and one of two layers twice, while slots are added


def test_a_rollout_elsewhere_holds_a_copy_and_its_rows_are_dealt_out() -> None:
    spread = load(placement={"policy": {"gpus": 2}, "rollout": {"gpus": 3}})
    found = table(spread, prompt=3)
    assert not shared_weights(spread)
    assert found.phases[-1] == "weights"
    assert sure(found, "update", "rollout") == {"copy": 2 * N}
    assert found.total("rollout", "rollout", "rollout") > found.total("update", "rollout", "rollout")
    caches = [h.bytes for h in found.held if h.part == "kv cache"]
    assert caches == [2 * 2 * KV_PAGE * (2 * 2 * 1 * 2 * 2)]


def test_two_ranks_share_no_weights() -> None:
    assert not shared_weights(load(placement={"collocated": {"ranks": 2}}))
    assert not shared_weights(load("sft", (POLICY,)))


def test_idle_frozen_roles_sleep_on_a_gpu_and_what_is_trained_stays() -> None:
    found = table(load(), gpu=True)
    assert sure(found, "rollout", "policy") == {"weights": 2 * N, "masters": 4 * N, "optimizer": 8 * N}
    assert sure(found, "reference", "reference") == {"weights": 2 * N}
    assert sure(found, "update", "reference") == {}
    awake = table(load(placement={"sleep": False}), gpu=True)
    assert sure(awake, "update", "reference") == {"weights": 2 * N}
    assert awake.peaks[0].certain == found.peaks[0].certain + 2 * N


def test_on_a_cpu_frozen_roles_are_dropped_when_asked_to() -> None:
    found = table(load("ppo", PPO, {"sleep": True}))
    assert sure(found, "update policy", "reference") == sure(found, "update policy", "reward_model") == {}
    assert sure(found, "update policy", "critic") == {"weights": 4 * N, "optimizer": 8 * N}
    kept = table(load("ppo", PPO))
    assert sure(kept, "update policy", "reference") == {"weights": 4 * N}


def test_a_role_alone_in_its_pool_has_nobody_to_sleep_for() -> None:
    found = table(load(placement={"policy": {"gpus": 1}, "reference": {"gpus": 1}}))
    assert sure(found, "update", "reference") == {"weights": 2 * N}


DISTILL = (POLICY, replace(TEACHER, wide=16), ROLLOUT)


def rows_held(found: Residency) -> dict[tuple[str, str], int]:
    return {(h.phase, h.role): h.bytes for h in found.held if h.part == "rows"}


def test_a_teacher_sleeps_and_its_tokens_stay_until_the_update_is_done() -> None:
    """Two responses of 5 tokens at 16 bytes."""
    given = {"samples": 4, "documents": 2}
    alone = table(load("distill", DISTILL, **given))
    assert alone.phases == ("rollout", "teacher", "update")
    assert sure(alone, "teacher", "teacher") == sure(alone, "update", "teacher") == {"weights": 4 * N}
    part = 4 * 5 * 16
    assert rows_held(alone) == {("teacher", "teacher"): part, ("update", "teacher"): part}, "one process has them once"
    assert any(h.part == "logits" for h in alone.held if (h.phase, h.role) == ("teacher", "teacher"))
    gone = table(load("distill", DISTILL, {"sleep": True}, **given))
    assert sure(gone, "update", "teacher") == {}
    apart = table(load("distill", DISTILL, {"policy": {"ranks": 2}, "teacher": {"ranks": 2}}, **given))
    half, fetched = part // 2, 5 * 16 + part // 2  # a document of its own, and a part of the teacher's at a time
    assert rows_held(apart) == {
        ("teacher", "teacher"): half, ("update", "teacher"): half, ("update", "policy"): fetched
    }  # fmt: skip
    assert rows_held(table(load("distill", DISTILL, **given), gpu=True)) == {}, "in the machine's memory, not the GPU's"


def test_the_phases_of_ppo_and_of_a_dataflow_nobody_knows() -> None:
    spread = {"rollout": {"gpus": 1}}
    assert table(load("ppo", PPO, spread)).phases == (
        "rollout",
        "reward",
        "reference",
        "values",
        "update critic",
        "update policy",
        "weights",
    )
    assert table(load("mine", (POLICY, ROLLOUT))).phases == ("rollout", "update")
    assert table(load("reward_model", RewardModelConfig(steps=1, data="d").roles())).phases == ("update",)


def test_a_role_whose_model_is_not_known_is_left_out() -> None:
    assert resident(load(), {}).peaks == ()
    assert {h.role for h in resident(load(), {"rollout": SHAPE}).held} == {"rollout"}


def test_checkpointing_and_sequence_parallelism_take_activations_down() -> None:
    def activations(**given: Any) -> int:
        ranks = {"policy": {"ranks": 2}}
        return sum(h.bytes for h in table(load("sft", (POLICY,), ranks, **given)).held if h.part == "activations")

    assert activations(activation_checkpointing=True) < activations()
    assert activations(sequence_parallel=2) * 2 == activations()


def test_a_batch_that_does_not_fill_a_micro_batch_takes_no_more_than_itself() -> None:
    def activations(prompt: int) -> int:
        few = load("sft", (POLICY,), documents=2, response_tokens=0)
        return sum(h.bytes for h in table(few, prompt=prompt).held if h.part == "activations")

    assert activations(2) * 4 == activations(8) == activations(80) == activations(0)


@given(
    kind=st.sampled_from(["grpo", "ppo", "mine"]),
    ranks=st.integers(1, 8),
    gpu=st.booleans(),
    sleep=st.sampled_from(["auto", True, False]),
    parameters=st.integers(1, 10**9),
)
def test_sleep_never_costs_and_ranks_never_raise_what_is_trained(
    kind: str, ranks: int, gpu: bool, sleep: Any, parameters: int
) -> None:
    roles = PPO if kind == "ppo" else GRPO
    shape = Shape(parameters, 2, 4, 8, 2, 1, 2, 10, True)
    shapes = {role.name: shape for role in roles if role.model}

    def peak(count: int, naps: Any) -> int:
        pool = {"gpus": count} if gpu else {"ranks": count}
        found = resident(load(kind, roles, {"collocated": pool, "sleep": naps}), shapes)
        assert all(h.bytes > 0 for h in found.held)
        (only,) = found.peaks
        assert only.certain <= only.bytes == max(found.of_pool(phase, "main") for phase in found.phases)
        return only.bytes

    assert peak(ranks, sleep) <= peak(ranks, False)

    def state(count: int) -> int:
        found = resident(load(kind, roles, {"collocated": {"ranks": count}}), shapes)
        return max(h.bytes for h in found.held if h.part == "optimizer")

    assert state(ranks) >= state(ranks + 1)
    assert state(ranks) * ranks >= 8 * parameters


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    config = InitModelConfig(
        architecture=request.param, hidden_size=64, intermediate_size=160, layers=4, heads=4, kv_heads=2
    )
    return adopt_module(initial_model(config, character_tokenizer(config.characters), seed=1))


def test_parameters_computed_from_a_configuration(model: LanguageModel) -> None:
    shape = Shape.of_config(model.module.config.to_dict())
    assert shape is not None
    counted = sum(p.numel() for p in model.module.parameters())
    assert shape.parameters == pytest.approx(counted, rel=0.01)  # biases and norms of heads are left out
    assert Shape.of_config(model.module.config.to_dict(), counted).parameters == counted  # type: ignore[union-attr]
    assert Shape.of_config({"hidden_size": 4}) is None
    assert Shape.of_config({"text_config": model.module.config.to_dict()}) == shape


_SMALL = {
    **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 96, "num_experts_per_tok": 2},
    **{"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 1},
}
_ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
MIXTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "every second layer": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
    ),
    "all layers but one": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "mlp_only_layers": [2]},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
    "a gated shared expert": (
        transformers.Qwen2MoeConfig,
        {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "shared experts": (transformers.Glm4MoeConfig, {**_ROUTED, "head_dim": 16, "n_shared_experts": 1}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_all_experts_are_held_and_those_of_a_token_compute(name: str) -> None:
    kind, more = MIXTURES[name]
    config = kind(**{**_SMALL, **more})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    shape = Shape.of_config(config.to_dict())
    assert shape is not None
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    outside = sum(size for name, size in sizes.items() if "_norm.weight" in name or name.endswith("_proj.bias"))
    counted = sum(sizes.values())
    assert shape.parameters == counted - outside  # norms of heads and biases are left out
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    experts = more.get("n_routed_experts") or more.get("num_local_experts") or more["num_experts"]
    assert shape.idle == routed - routed * 2 // experts
    layers = [sum(s for n, s in sizes.items() if f".layers.{at}." in n) for at in range(4)]
    assert shape.layer_parameters == pytest.approx(max(layers), rel=0.01)
    files = Shape.of_files({**config.to_dict(), "dtype": "bfloat16"}, 2 * counted)
    assert files is not None
    assert (files.parameters, files.active) == (counted, counted - shape.idle)
    assert cost_model(module) == CostModel.of_model(parameters=files.active, layers=4, attention_width=4 * 16)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["all layers but one", "mixtral"])
def test_a_mixtures_activations_are_those_of_the_experts_of_a_token(name: str, implementation: str) -> None:
    kind, more = MIXTURES[name]
    config = kind(**{**_SMALL, **more, "mlp_only_layers": []}, experts_implementation=implementation)
    torch.manual_seed(0)
    mixture = adopt_module(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert_activations_to_a_fifth(mixture)


def test_activations_are_what_autograd_keeps_to_a_fifth(model: LanguageModel) -> None:
    assert_activations_to_a_fifth(model)


def assert_activations_to_a_fifth(model: LanguageModel) -> None:
    batch = TokenBatch.pack([Document((5,) * 10, (6,) * n) for n in (90, 40, 60, 190)])
    own = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        token_logprobs(model, batch, response_only=True)
    real = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)
    shape = Shape.of_config(model.module.config.to_dict())
    assert shape is not None
    found = resident(load("sft", (POLICY,), micro_batch_tokens=len(batch.tokens)), {"policy": shape})
    guessed = sum(h.bytes for h in found.held if h.part in ("activations", "logits"))
    assert 0.8 < real / guessed < 1.05


def test_the_rows_decoded_together_are_the_engines() -> None:
    assert SamplingParams(max_new_tokens=1, seed=0).batch_size == DECODED_TOGETHER


def test_the_pages_are_the_engines() -> None:
    """What a plan counts for a row, beside its prompt, is what the store takes for it."""
    shape = KVShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16, device=torch.device("cpu"))
    store = PageStore(shape, 2**30)
    assert (KV_PAGE, KV_AHEAD, KV_RESERVE) == (PAGE, native._UNSEEN, native._RESERVE_SHARE)
    for tokens in (1, 127, 128, 129, 10_500):
        taken = store.row_bytes(tokens + KV_AHEAD, 0) + PAGE * shape.position_bytes  # and its prompt's last page
        assert row_positions(tokens, "cuda") * shape.position_bytes == taken


@given(tokens=st.integers(1, 3000), more=st.integers(0, 3000))
def test_the_slots_are_the_engines(tokens: int, more: int) -> None:
    """What a plan counts for a row on a CPU is the slot that it ends in beside the longest row of its call."""
    shape = KVShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    store = SlotStore(shape, 2**30, tokens + more + 1)
    assert row_positions(tokens, "cpu", tokens + more) * shape.position_bytes == store.row_bytes(tokens + 1, 0)
    assert row_positions(tokens, "cpu") <= row_positions(tokens, "cpu", tokens + more)


def test_prompts_are_read_beside_the_cache() -> None:
    """As many at a time as the engine reads, with what one layer holds of them."""
    assert native._PREFILL_TOKENS == PREFILL_TOKENS
    of = load("evaluate", (ROLLOUT,), rows=256)
    held = {prompt: {h.part: h.bytes for h in table(of, prompt=prompt).held} for prompt in (0, 4, 100)}
    token = 4 * (SHAPE.kv_values + 2 * 4 + 24)  # of an MLP three times as wide as 8
    assert held[4]["prefill"] == 256 * 4 * token
    assert held[0]["prefill"] == held[100]["prefill"] == PREFILL_TOKENS * token
    slot = 32 * 4 * SHAPE.kv_values  # of 9 tokens, and half of that while slots are added
    assert held[4]["kv cache"] == 256 * slot + 128 * slot


def test_slots_are_doubled_and_left_behind_as_far_as_the_cache_has_room() -> None:
    """81 prompts of 100 tokens are read at a time, and rows of 150 go on from slots of 128 to those of 160."""
    position = 4 * SHAPE.kv_values
    for limit, slots, left in ((5, 324 * 112, 0), (50, 324 * 160, 256 * 128)):
        of = load("evaluate", (ROLLOUT,), rows=256, response_tokens=limit)
        last = 112 if limit == 5 else 160
        [cache] = [h.bytes for h in table(of, prompt=100).held if h.part == "kv cache"]
        assert cache == (slots + left + 256 * last // 2) * position
        tight = replace(of, kv_cache=256 * last * position)
        [cache] = [h.bytes for h in table(tight, prompt=100).held if h.part == "kv cache"]
        assert cache == (256 * last + 256 * last // 2) * position
