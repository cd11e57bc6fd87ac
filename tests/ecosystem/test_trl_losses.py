"""TRL's own trainers beside ours: the same weights, responses and rewards give the same loss and the same gradient.

TRL scores, credits and pads by itself; ours gives credit and packs. Policies sampled with other weights than they are
trained with, so ratios leave the clip, and the reference is a third model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import (
    CISPOConfig,
    DPOConfig,
    GroupConfig,
    GRPOConfig,
    GSPOConfig,
    InitModelConfig,
    KLConfig,
    KTOConfig,
    RewardModelConfig,
    SFTConfig,
)
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.adapters import attach, trained_parameters
from posttrain.engine.models.files import LabelledRow, PreferencePair, character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_classifier, adopt_module
from posttrain.engine.models.logprobs import predict
from posttrain.engine.models.sharding import canonical
from posttrain.engine.recipes.algorithm import Algorithm, ScoredGroup
from posttrain.engine.recipes.cispo import CISPO
from posttrain.engine.recipes.dpo import DPO
from posttrain.engine.recipes.dr_grpo import DrGRPO
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.recipes.gspo import GSPO
from posttrain.engine.recipes.kto import KTO
from posttrain.engine.recipes.reward_model import RewardModel
from posttrain.engine.recipes.sft import SFT
from posttrain.engine.roles.training import TorchEngine
from posttrain.engine.samples import Prompt, Trajectory, groups_of
from posttrain.engine.settings import LoraConfig, OptimizerConfig, RuntimeConfig
from posttrain.sandbox.port import Score

pytestmark = pytest.mark.ecosystem
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
LETTERS = "abcdefghij"
LIMIT, SAMPLES, CLIP = 12, 4, (0.2, 0.28)
BETA = 0.3
GRADIENT = 2e-6  # of its norm: both sides compute in float32, one padded, one packed
TOKENIZER = character_tokenizer(LETTERS)
MODEL = InitModelConfig(hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2, context_length=64)
PROMPTS = ["abc", "jihgf", "d"]


def noisy(module: nn.Module, seed: int, scale: float) -> nn.Module:
    """The module, its weights moved a little."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=draw))
    return module


def weights(seed: int = 0) -> Any:
    return noisy(initial_model(MODEL, TOKENIZER, seed), seed + 100, 0.1).eval()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def responses() -> list[list[int]]:
    draw = np.random.default_rng(3)
    end, first = TOKENIZER.eos_token_id, ids("a")[0]
    made = []
    for _ in range(len(PROMPTS) * SAMPLES):
        length = int(draw.integers(1, LIMIT + 1))
        body = [first + int(t) for t in draw.integers(0, len(LETTERS), length)]
        made.append(body if length == LIMIT else [*body, end])
    return made


def quiet(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False, "fp16": False,
        "disable_tqdm": True, "save_strategy": "no", **options,
    }  # fmt: skip


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}


def ours(module: Any, algorithm: Algorithm, batch: TokenBatch, columns: Mapping[str, Tensor]) -> Tensor:
    """The loss of an algorithm's one update."""
    batch = algorithm.credit(batch.with_columns(**columns))
    (update,) = algorithm.updates(0)
    objective = update.objective(Totals.of(batch))
    return objective(batch, predict(adopt_module(module), batch, objective.needs)).loss


def logprobs(module: Any, batch: TokenBatch) -> Tensor:
    found = predict(adopt_module(module), batch, frozenset({"logprobs"})).of("logprobs").detach()
    return found.masked_fill(~batch.response_mask, 0.0)


def agree(module: nn.Module, theirs: Tensor, mine: Tensor) -> None:
    assert float(mine) == pytest.approx(float(theirs), rel=1e-6, abs=1e-6)
    expected, found = gradients(module, theirs), gradients(module, mine)
    assert found.keys() == expected.keys()
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert norm > 1e-3, "there is something to compare"
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= GRADIENT * norm, name


# --- policy gradients -------------------------------------------------------------------------------------------------


def worth(completion: str) -> float:
    return len(set(completion)) / 4 - 0.1 * completion.count("c")


def sampled_batch(policy: Any, made: Sequence[Sequence[int]], algorithm: Any) -> TokenBatch:
    """What our loop forms of the responses, with the rewards that TRL is given."""
    prompts = [Prompt(tuple(ids(text)), text) for text in PROMPTS]
    asked = [p for p in prompts for _ in range(SAMPLES)]
    plain = TokenBatch.pack([Document(p.tokens, r) for p, r in zip(asked, made, strict=True)])
    behaviour = logprobs(policy, plain)
    starts = np.cumsum([0, *plain.lengths])
    answers = [
        Trajectory.answer(p.tokens, r, behaviour[end - len(r) : end].numpy(), truncated=len(r) == LIMIT)
        for p, r, end in zip(asked, made, starts[1:], strict=True)
    ]
    groups = groups_of(answers, range(len(prompts)), SAMPLES)
    scores = [Score(worth(TOKENIZER.decode(r, skip_special_tokens=True))) for r in made]
    scored = [
        ScoredGroup(prompt, group, tuple(scores[at * SAMPLES : (at + 1) * SAMPLES]))
        for at, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]
    batch: TokenBatch = algorithm.form(scored, 0)
    return batch


def trl_policy(tmp_path: Path, made: Sequence[Sequence[int]], policy: Any, adapter: Any = None, **options: Any) -> Any:
    """TRL's trainer, which is given these responses."""
    from datasets import Dataset

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        del trainer
        return {"prompt_ids": [ids(p) for p in prompts], "completion_ids": [list(r) for r in made], "logprobs": None}

    def reward(completions: list[str], **columns: Any) -> list[float]:
        del columns
        return [worth(text) for text in completions]

    clip = {"epsilon": CLIP[0], "epsilon_high": CLIP[1]}
    config = trl.GRPOConfig(**quiet(
        tmp_path, per_device_train_batch_size=len(made), num_generations=SAMPLES, max_completion_length=LIMIT,
        temperature=1.0, num_iterations=2, **clip | options,
    ))  # fmt: skip
    return trl.GRPOTrainer(
        model=copy.deepcopy(policy), reward_funcs=reward, args=config, processing_class=TOKENIZER,
        train_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS]), rollout_func=rollout, peft_config=adapter,
    )  # fmt: skip


def grpo(aggregation: str, kl: str = "") -> GRPO:
    penalty = KLConfig(coefficient=BETA, estimator=kl) if kl else None
    common = {"data": "d", "reward": "r", "steps": 1, "prompts_per_step": len(PROMPTS), "group_size": SAMPLES}
    options: dict[str, Any] = {**common, "max_new_tokens": LIMIT, "kl": penalty, "aggregation": aggregation}
    return GRPO(GRPOConfig(**options, clip_low=CLIP[0], clip_high=CLIP[1]))


def dr_grpo() -> DrGRPO:
    common = {"data": "d", "reward": "r", "steps": 1, "prompts_per_step": len(PROMPTS), "group_size": SAMPLES}
    options: dict[str, Any] = {**common, "max_new_tokens": LIMIT}
    return DrGRPO(GroupConfig(**options, clip_low=CLIP[0], clip_high=CLIP[1]))


def clipped(config: Any, algorithm: Any, low: float, high: float, kl: str = "") -> Any:
    common = {"data": "d", "reward": "r", "steps": 1, "prompts_per_step": len(PROMPTS), "group_size": SAMPLES}
    penalty = KLConfig(coefficient=BETA, estimator=kl) if kl else None
    return algorithm(config(**common, max_new_tokens=LIMIT, clip_low=low, clip_high=high, kl=penalty))


SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
NARROW: dict[str, Any] = {"epsilon": 0.01, "epsilon_high": 0.02}
NO_KL: dict[str, Any] = {"beta": 0.0}
K3: dict[str, Any] = {"beta": BETA, "use_bias_correction_kl": False}
CORRECTED: dict[str, Any] = {"beta": BETA, "use_bias_correction_kl": True}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dapo": (lambda: grpo("token-mean"), {"loss_type": "dapo", **NO_KL}),
    "dapo, k3": (lambda: grpo("token-mean", "k3"), {"loss_type": "dapo", **K3}),
    "dapo, k3-corrected": (lambda: grpo("token-mean", "k3-corrected"), {"loss_type": "dapo", **CORRECTED}),
    "bnpo": (lambda: grpo("token-mean"), {"loss_type": "bnpo", **NO_KL}),
    "grpo": (lambda: grpo("seq-mean-token-mean"), {"loss_type": "grpo", **NO_KL}),
    "grpo, k3": (lambda: grpo("seq-mean-token-mean", "k3"), {"loss_type": "grpo", **K3}),
    "dr_grpo": (dr_grpo, {"loss_type": "dr_grpo", "scale_rewards": "none", **NO_KL}),
    "gspo": (lambda: clipped(GSPOConfig, GSPO, 0.01, 0.02), {**SEQUENCE, **NARROW, **NO_KL}),
    "gspo, k3": (lambda: clipped(GSPOConfig, GSPO, 0.01, 0.02, "k3"), {**SEQUENCE, **NARROW, **K3}),
    "cispo": (lambda: clipped(CISPOConfig, CISPO, 1.0, 0.28), {"loss_type": "cispo", "epsilon_high": 1.28, **NO_KL}),
}


@pytest.mark.parametrize("case", CASES)
def test_policy_gradients(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    algorithm, policy, reference, made = make(), weights(), weights(5), responses()
    reference.save_pretrained(tmp_path / "reference")
    policy.config._name_or_path = str(tmp_path / "reference")  # where TRL finds its own
    trainer = trl_policy(tmp_path, made, policy, **options)
    inputs = [{"prompt": p} for p in PROMPTS for _ in range(SAMPLES)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    given = trainer._generate_and_score_completions(inputs)
    batch = sampled_batch(policy, made, algorithm)
    columns = {"reference_logprobs": logprobs(reference, batch)} if options["beta"] else {}

    moved = noisy(trainer.model, 9, 0.02)
    theirs = trainer._compute_loss(moved, given)
    credited = algorithm.credit(batch.with_columns(**columns))
    ends = np.cumsum(credited.lengths) - 1
    assert credited.column("advantages")[ends].tolist() == pytest.approx(given["advantages"].tolist(), abs=1e-5)
    mine = ours(moved, algorithm, batch, columns)
    metric = "cispo_clip_ratio" if case == "cispo" else "clip_ratio/region_mean"
    assert trainer._metrics["train"][metric][-1] > 0.05, "ratios leave the clip"
    agree(moved, theirs, mine)


# --- rows -------------------------------------------------------------------------------------------------------------


def collated(rows: Sequence[Mapping[str, Any]], trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = trainer.data_collator([dict(row) for row in rows])
    return found


def test_sft(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [
        {"prompt": "abc", "completion": "cba"},
        {"prompt": "j", "completion": "abcdefg"},
        {"prompt": "dd", "completion": "d"},
    ]
    config = trl.SFTConfig(**quiet(tmp_path, per_device_train_batch_size=3, completion_only_loss=True, max_length=None))
    trainer = trl.SFTTrainer(
        model=weights(), args=config, train_dataset=Dataset.from_list(rows), processing_class=TOKENIZER
    )
    inputs = collated(list(trainer.train_dataset), trainer)
    theirs = trainer.compute_loss(trainer.model, inputs)
    end = TOKENIZER.eos_token_id
    batch = TokenBatch.pack([Document(ids(r["prompt"]), [*ids(r["completion"]), end]) for r in rows])
    config_ = SFTConfig(data="d", steps=1, batch_size=3)
    agree(trainer.model, theirs, ours(trainer.model, SFT(config_), batch, {}))


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("ipo", 0.0), ("robust", 0.1)])
def test_dpo(loss: str, smoothing: float, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [
        {"prompt": "abc", "chosen": "cba", "rejected": "abcabcab"},
        {"prompt": "j", "chosen": "abcdefg", "rejected": "j"},
        {"prompt": "dd", "chosen": "d", "rejected": "dddd"},
    ]  # fmt: skip
    config = trl.DPOConfig(
        **quiet(
            tmp_path, per_device_train_batch_size=3, beta=0.4, max_length=None, loss_type=loss,
            label_smoothing=smoothing,
        )
    )  # fmt: skip
    reference = weights(5)
    trainer = trl.DPOTrainer(
        model=weights(), ref_model=copy.deepcopy(reference), args=config, train_dataset=Dataset.from_list(rows),
        processing_class=TOKENIZER,
    )  # fmt: skip
    inputs = collated(list(trainer.train_dataset), trainer)
    theirs = trainer._compute_loss(trainer.model, inputs, False)
    end = TOKENIZER.eos_token_id
    batch = TokenBatch.pack(
        [Document(ids(r["prompt"]), [*ids(r[side]), end]) for r in rows for side in ("chosen", "rejected")], unit=2
    )
    options: dict[str, Any] = {"data": "d", "steps": 1, "batch_size": 3, "beta": 0.4}
    made = DPO(DPOConfig(**options, loss=loss, label_smoothing=smoothing))
    columns = {"reference_logprobs": logprobs(reference, batch)}
    agree(trainer.model, theirs, ours(trainer.model, made, batch, columns))


@pytest.mark.parametrize("seeds", [(0, 5), (5, 0)], ids=["point is 0", "point above 0"])
@pytest.mark.parametrize("labels", [(True, False, True, False), (False, False, False, False)], ids=["both", "one"])
def test_kto(labels: tuple[bool, ...], seeds: tuple[int, int], tmp_path: Path) -> None:
    """TRL pairs a prompt with the previous completion, ours (as the paper) with the next: TRL's rows are reversed.

    TRL cuts documents at `max_length`, which is the length of the longest row here, where ours cuts.
    """
    from datasets import Dataset

    texts = [("abc", "cba"), ("jihgfedc", "abcdefg"), ("j", "abcabcab"), ("dd", "d")]
    rows = [{"prompt": p, "completion": c, "label": label} for (p, c), label in zip(texts, labels, strict=True)]
    end = TOKENIZER.eos_token_id
    own = [LabelledRow((*ids(p),), (*ids(c), end), label) for (p, c), label in zip(texts, labels, strict=True)]
    longest = max(len(row.prompt) + len(row.completion) for row in own)
    assert any(len(a.prompt) + len(b.completion) > longest for a, b in pairwise(own)), "one is cut"
    config = trl.KTOConfig(
        **quiet(
            tmp_path, per_device_train_batch_size=4, beta=0.4, desirable_weight=1.5, undesirable_weight=0.75,
            max_length=longest,
        )
    )  # fmt: skip
    reference = weights(seeds[1])
    trainer = trl.KTOTrainer(
        model=weights(seeds[0]), ref_model=copy.deepcopy(reference), args=config,
        train_dataset=Dataset.from_list(rows[::-1]), processing_class=TOKENIZER,
    )  # fmt: skip
    theirs = trainer._compute_loss(trainer.model, collated(list(trainer.train_dataset), trainer), False)
    options: dict[str, Any] = {"data": "d", "steps": 1, "batch_size": 4, "beta": 0.4}
    made = KTO(KTOConfig(**options, desirable_weight=1.5, undesirable_weight=0.75))
    batch = made.form(own, 0)
    columns = {
        "reference_logprobs": logprobs(reference, batch),
        "proximal_logprobs": logprobs(trainer.model, batch),
    }
    batch = made.credit(batch.with_columns(**columns))
    [point] = trainer._metrics["train" if trainer.model.training else "eval"]["kl"]
    assert float(batch.column("point")[0]) == pytest.approx(point, abs=1e-5)
    assert (point > 1) == (seeds == (5, 0)), "the same sum with both signs, so one of the two points is 0"
    [update] = made.updates(0)
    rows_only = batch.select_items(update.computes(batch))
    objective = update.objective(Totals.of(batch, rows_only, update.objective(Totals.ones()).denominators))
    mine = objective(rows_only, predict(adopt_module(trainer.model), rows_only, objective.needs)).loss
    agree(trainer.model, theirs, mine)


# --- adapters ---------------------------------------------------------------------------------------------------------

SFT_ROWS = [{"prompt": "abc", "completion": "cba"}, {"prompt": "j", "completion": "abcdefg"}]
LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapter_of(module: nn.Module, scale: float) -> dict[str, Tensor]:
    """The parameters of peft's adapter, moved a little: with B at 0, A has no gradient."""
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert found
    assert all(".lora_" in name for name in found)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in found.values():
            weight.add_(scale * torch.randn(weight.shape, generator=draw))
    return found


def sft_trainer(tmp_path: Path, **options: Any) -> Any:
    from datasets import Dataset

    config = trl.SFTConfig(
        **quiet(tmp_path, per_device_train_batch_size=2, completion_only_loss=True, max_length=None, **options)
    )
    return trl.SFTTrainer(
        model=weights(), args=config, train_dataset=Dataset.from_list(SFT_ROWS), processing_class=TOKENIZER,
        peft_config=peft.LoraConfig(**LORA),
    )  # fmt: skip


def sft_batch() -> list[Document]:
    return [Document(ids(r["prompt"]), [*ids(r["completion"]), TOKENIZER.eos_token_id]) for r in SFT_ROWS]


def test_sft_with_an_adapter_of_peft(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path)
    adapter_of(trainer.model, 0.2)
    theirs = trainer.compute_loss(trainer.model, collated(list(trainer.train_dataset), trainer))
    module = trainer.model.get_base_model()
    agree(trainer.model, theirs, ours(module, SFT(SFTConfig(data="d", steps=1)), TokenBatch.pack(sft_batch()), {}))


def test_dpo_with_an_adapter_of_peft(tmp_path: Path) -> None:
    """TRL's reference is the base with the adapter switched off; ours is the adapter of the start, whose B is 0."""
    from datasets import Dataset

    rows = [{"prompt": "abc", "chosen": "cba", "rejected": "abcabc"}, {"prompt": "j", "chosen": "ab", "rejected": "j"}]
    config = trl.DPOConfig(**quiet(tmp_path, per_device_train_batch_size=2, beta=0.4, max_length=None))
    trainer = trl.DPOTrainer(
        model=weights(), args=config, train_dataset=Dataset.from_list(rows), processing_class=TOKENIZER,
        peft_config=peft.LoraConfig(**LORA),
    )  # fmt: skip
    adapter_of(trainer.model, 0.2)
    theirs = trainer._compute_loss(trainer.model, collated(list(trainer.train_dataset), trainer), False)
    end = TOKENIZER.eos_token_id
    batch = TokenBatch.pack(
        [Document(ids(r["prompt"]), [*ids(r[side]), end]) for r in rows for side in ("chosen", "rejected")], unit=2
    )
    made = DPO(DPOConfig(data="d", steps=1, batch_size=2, beta=0.4))
    columns = {"reference_logprobs": logprobs(weights(), batch)}
    agree(trainer.model, theirs, ours(trainer.model.get_base_model(), made, batch, columns))


def test_grpo_with_an_adapter_of_peft(tmp_path: Path) -> None:
    """The policy samples with the base, whose adapter is 0, and is compared with it: that is the reference."""
    algorithm, policy, made = grpo("token-mean", "k3"), weights(), responses()
    trainer = trl_policy(tmp_path, made, policy, peft.LoraConfig(**LORA), loss_type="dapo", **K3)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    given = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(SAMPLES)])
    batch = sampled_batch(policy, made, algorithm)
    adapter_of(trainer.model, 0.2)
    theirs = trainer._compute_loss(trainer.model, given)
    module = trainer.model.get_base_model()
    agree(trainer.model, theirs, ours(module, algorithm, batch, {"reference_logprobs": logprobs(policy, batch)}))


def test_kto_with_an_adapter_of_peft(tmp_path: Path) -> None:
    from datasets import Dataset

    texts = [("abc", "cba", True), ("jihg", "abcd", False), ("j", "abca", True), ("dd", "d", False)]
    rows = [{"prompt": p, "completion": c, "label": label} for p, c, label in texts]
    own = [LabelledRow((*ids(p),), (*ids(c), TOKENIZER.eos_token_id), label) for p, c, label in texts]
    config = trl.KTOConfig(**quiet(tmp_path, per_device_train_batch_size=4, beta=0.4, max_length=None))
    trainer = trl.KTOTrainer(
        model=weights(), args=config, train_dataset=Dataset.from_list(rows[::-1]), processing_class=TOKENIZER,
        peft_config=peft.LoraConfig(**LORA),
    )  # fmt: skip
    adapter_of(trainer.model, 0.2)
    theirs = trainer._compute_loss(trainer.model, collated(list(trainer.train_dataset), trainer), False)
    made, module = KTO(KTOConfig(data="d", steps=1, batch_size=4, beta=0.4)), trainer.model.get_base_model()
    batch = made.form(own, 0)
    columns = {"reference_logprobs": logprobs(weights(), batch), "proximal_logprobs": logprobs(module, batch)}
    batch = made.credit(batch.with_columns(**columns))
    [update] = made.updates(0)
    some = batch.select_items(update.computes(batch))
    objective = update.objective(Totals.of(batch, some, update.objective(Totals.ones()).denominators))
    agree(trainer.model, theirs, objective(some, predict(adopt_module(module), some, objective.needs)).loss)


def test_a_reward_model_with_an_adapter_of_peft(tmp_path: Path) -> None:
    """Its head is trained beside the adapter."""
    from datasets import Dataset

    rows = [{"chosen": "abccba", "rejected": "abcabc"}, {"chosen": "jab", "rejected": "jj"}]
    config = trl.RewardConfig(**quiet(tmp_path, per_device_train_batch_size=2, max_length=None))
    torch.manual_seed(3)
    shape = copy.deepcopy(weights().config)
    shape.num_labels = 1
    base = AutoModelForSequenceClassification.from_config(shape)
    noisy(base, 11, 0.1).eval()
    own, trainer = copy.deepcopy(base), trl.RewardTrainer(
        model=base, args=config, train_dataset=Dataset.from_list(rows), processing_class=TOKENIZER,
        peft_config=peft.LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"]),
    )  # fmt: skip
    attach(own, LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "down_proj")), seed=0)
    mine = dict(trained_parameters(own))
    draw = torch.Generator().manual_seed(7)
    theirs = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    names = {n: canonical(n).removeprefix("base_model.model.").replace("modules_to_save.", "") for n in theirs}
    assert set(names.values()) == set(mine)
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.add_(0.2 * torch.randn(weight.shape, generator=draw))
            mine[names[name]].copy_(weight)
    loss = trainer.compute_loss(trainer.model, collated(list(trainer.train_dataset), trainer))
    made, end = RewardModel(RewardModelConfig(data="d", steps=1, batch_size=2)), TOKENIZER.eos_token_id
    texts = [[[*ids(row[side]), end] for side in ("chosen", "rejected")] for row in rows]
    batch = made.form([PreferencePair(n, (a[0],), (*a[1:],), (*b[1:],)) for n, (a, b) in enumerate(texts)], 0)
    (update,) = made.updates(0)
    objective = update.objective(Totals.of(batch))
    found = objective(batch, predict(adopt_classifier(own), batch, objective.needs)).loss
    assert float(found) == pytest.approx(float(loss), rel=1e-6, abs=1e-6)
    expected, own_gradients = gradients(trainer.model, loss), gradients(own, found)
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert norm > 1e-3
    for name, gradient in expected.items():
        (other,) = (one for key, one in own_gradients.items() if canonical(key) == names[name])
        assert float((other - gradient).norm()) <= GRADIENT * norm, name


def test_three_updates_of_an_adapter_are_those_of_trl_and_peft(tmp_path: Path) -> None:
    rate, decay, limit = 3e-2, 0.1, 0.5
    trainer = sft_trainer(
        tmp_path, max_steps=3, learning_rate=rate, weight_decay=decay, max_grad_norm=limit, adam_beta2=0.95,
        lr_scheduler_type="constant",
    )  # fmt: skip
    own = weights()
    attach(own, LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "down_proj")), seed=0)
    theirs = adapter_of(trainer.model, 0.2)
    mine = dict(trained_parameters(own))
    with torch.no_grad():
        for name, weight in theirs.items():
            mine[canonical(name).removeprefix("base_model.model.")].copy_(weight)
    before = {name: weight.detach().clone() for name, weight in mine.items()}
    trainer.train()
    optimizer = OptimizerConfig(
        learning_rate=rate, betas=(0.9, 0.95), weight_decay=decay, max_grad_norm=limit, warmup_steps=0,
        schedule="constant",
    )  # fmt: skip
    engine = TorchEngine(RankContext(), adopt_module(own), optimizer, RuntimeConfig(), steps=3, seed=0)
    batch = TokenBatch.pack(sft_batch())
    for step in range(3):
        engine.step(batch, SupervisedObjective(Totals.of(batch)), step=step)
    for name, weight in theirs.items():
        found = mine[canonical(name).removeprefix("base_model.model.")]
        moved = float((weight - before[canonical(name).removeprefix("base_model.model.")]).abs().max())
        assert moved > rate, "three updates were made"
        torch.testing.assert_close(found, weight, atol=2e-4 * moved, rtol=0)
