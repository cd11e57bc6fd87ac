"""TRL's scripts, configurations and command lines (its names and defaults as of version 1.16) as a run.yaml.

What TRL's default decides and run.yaml's decides otherwise is written out, so that a file that says little asks for the
same training here.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import OWN
from posttrain.domain.passes import passes_of
from posttrain.domain.vocabulary import KINDS, NOT_HERE
from posttrain.foreign.settings import Draft, Settings, plainly, share_of_steps

_TRAINERS = {"sft": "sft", "grpo": "grpo", "reward": "reward_model", "rloo": "grpo"}
_OTHERS = ("dpo", "kto", "orpo", "cpo", "ppo", "gkd", "distillation", "online_dpo", "xpo", "nash")
_RATES = {"sft": 2e-5, "grpo": 1e-6, "reward": 1e-4, "rloo": 1e-6}
_AGGREGATIONS = {
    **dict.fromkeys(("dapo", "bnpo"), "token-mean"),
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # of trl.rewards
_NO_ADAPTERS = "there are no adapters yet: all weights are trained, which takes more memory and other learning rates"
_CHANGES = {
    **dict.fromkeys(("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "peft_config"), _NO_ADAPTERS),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), "weights are trained as they are"),
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), "training samples from the whole distribution"),
    "stop_token_ids": NOT_HERE["stop_token_ids"],
    "num_iterations": "a rollout batch is passed over once; importance ratios of old batches do not arise",
    "mask_truncated_completions": "truncated responses are scored and learnt from",
    "entropy_coef": "there is no entropy bonus",
    "delta": "there is no second clip",
    "importance_sampling_level": "ratios are per token",
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
        "the weights that train sample; lag: {steps: 0, correction: tis, cap: …} weighs as this does",
    ),
    **dict.fromkeys(("max_staleness", "weight_sync_steps"), "lag: {steps: N} samples ahead, in a pool of its own"),
    "config": "what stands in that file is not read: posttrain init --from trl THAT.yaml reads it",
    "sync_ref_model": "the reference is the starting policy and stays",
    "assistant_only_loss": "the loss is always on what the assistant wrote, and on nothing else",
    "chat_template_path": "put chat_template.jinja into the model's folder",
    "dataset_text_field": "the column must be called text, or prompt and completion, or messages",
    "eval_strategy": "add an evaluate stage with a suite, or probe: to grpo",
    "neftune_noise_alpha": "there is no noise on embeddings",
    "label_smoothing_factor": "there is no label smoothing",
    "optim": "the optimiser is AdamW",
    "deepspeed": "placement: says which roles take which devices",
    "fsdp": "placement: says which roles take which devices",
}
_HARMLESS = frozenset(  # they decide no result
    (  # noqa: SIM905
        "output_dir overwrite_output_dir logging_steps logging_strategy logging_first_step report_to run_name "
        "do_train do_eval push_to_hub hub_model_id hub_strategy save_strategy save_total_limit eval_steps "
        "per_device_eval_batch_size dataloader_num_workers dataset_num_proc disable_tqdm use_vllm vllm_mode "
        "vllm_server_host vllm_server_port vllm_gpu_memory_utilization vllm_tensor_parallel_size "
        "vllm_max_model_length attn_implementation gradient_checkpointing_kwargs ddp_timeout tf32 packing "
        "packing_strategy padding_free eval_packing pad_to_multiple_of use_liger_kernel log_completions "
        "num_completions_to_print config_file num_machines machine_rank main_process_port mixed_precision "
        "processing_class tokenizer eval_dataset trust_remote_code remove_unused_columns callbacks "
        "accelerator_config torch_compile dataset_config dataset_train_split dataset_test_split shuffle_dataset "
        "truncation_mode load_best_model_at_end metric_for_best_model greater_is_better formatting_func "
        "data_collator compute_metrics use_cpu no_cuda "
    ).split()
)


def from_trl(settings: Settings, rows: int | None = None) -> Draft:
    """A run file of one stage that trains as the TRL file does.

    Args:
        rows: of the training data, where it is known; None: shares of the steps cannot be turned into steps.

    Raises:
        InputError: a trainer that has no counterpart here, or a value that is no number.
    """
    kind = _trainer(settings)
    name = re.sub(r"[^a-z0-9_-]+", "-", Path(settings.source).stem.lower()).strip("-_") or kind
    draft = Draft(settings.source, "TRL", {"name": name[:40], "owner": "me"})
    draft.run["seed"] = settings.count("seed", default=42)
    draft.run["model"] = _model(settings, draft)
    draft.run["data"] = {"train": _data(settings, draft)}
    stage: dict[str, Any] = {"kind": _TRAINERS[kind], "data": "train"}
    per_step = _batch(settings, draft)
    if kind in ("grpo", "rloo"):
        _on_policy(settings, draft, stage, per_step, kind)
        draft.run["rewards"] = _rewards(settings, draft, stage)
    else:
        stage["batch_size"] = per_step
        draft.carry("per_device_train_batch_size × devices × accumulation", per_step, "batch_size", per_step)
        if settings.given("max_length", "max_seq_length"):
            stage["max_length"] = settings.count("max_length", "max_seq_length", default=1024)
            draft.changed.append("max_length: a longer row is refused by `plan`, never cut; drop or split it")
    steps = _length(settings, draft, stage, rows)
    stage["optimizer"] = _optimizer(settings, draft, kind, steps, int(stage.get("mini_batches", 1)))
    runtime = _runtime(settings, int(stage.get("mini_batches", 1)))
    draft.run["stages"] = {kind: {**stage, **({"runtime": runtime} if runtime else {})}}
    return draft.close(settings, _CHANGES, _HARMLESS)


def _trainer(settings: Settings) -> str:
    words = [word.lower() for word in settings.words]
    classes = {
        word.removesuffix("trainer").removesuffix("config") for word in words if word.endswith(("trainer", "config"))
    }
    named = classes | set(words) | {Path(word).stem for word in words if word.endswith(".py")}
    for other in _OTHERS:
        if other in named:
            kind = other.removeprefix("online_")
            by_hand = f"is kind: {kind} here, and not read from there yet; write the stage by hand"
            told = by_hand if other in OWN else KINDS.get(kind, "is not there yet")
            raise InputError(f"{settings.source}: trains by {other.upper()}, which {told}")
    found = next((kind for kind in _TRAINERS if kind in named), None)
    if found:
        return found
    return "grpo" if settings.values.keys() & {"num_generations", "reward_funcs", "max_completion_length"} else "sft"


def _model(settings: Settings, draft: Draft) -> str:
    name = settings.take("model_name_or_path", "model", "model_name")
    revision = settings.take("model_revision", default="main")
    if not isinstance(name, str):
        draft.fill_in.append("model: name the base model")
        return "model:base"
    ref = name if name.startswith((".", "/", "~")) else f"hf:{name}@{revision}"
    draft.carry("model_name_or_path", name, "model", ref)
    if ref.startswith("hf:"):
        draft.fill_in.append(f"fetch the model: hf download {name} --revision {revision}")
    return ref


def _data(settings: Settings, draft: Draft) -> str:
    name = settings.take("dataset_name", "dataset", "train_file", "train_dataset")
    if isinstance(name, str) and Path(name).suffix in (".json", ".jsonl", ".parquet", ".csv"):
        draft.carry("dataset_name", name, "data.train", name)
        return name if name.startswith((".", "/", "~")) else f"./{name}"
    if settings.given("datasets"):
        draft.changed.append("datasets: a mixture is one data set here; write its rows into one file")
    fetch = f"hf download --repo-type dataset {name}, then " if isinstance(name, str) and "/" in name else ""
    draft.fill_in.append(f"register the training rows: {fetch}posttrain asset add dataset:train FILE")
    return "dataset:train"


def _batch(settings: Settings, draft: Draft) -> int:
    """Documents (or completions) of an optimiser step."""
    processes = settings.count("num_processes", "nproc_per_node", default=1)
    size = settings.count("per_device_train_batch_size", default=8)
    accumulated = settings.count("gradient_accumulation_steps", default=1)
    if not settings.given("num_processes", "nproc_per_node"):
        draft.changed.append(
            "devices: counted as one, since the file names no number of processes; multiply the batch otherwise"
        )
    return max(1, size * accumulated * processes)


def _on_policy(settings: Settings, draft: Draft, stage: dict[str, Any], per_step: int, kind: str) -> None:
    group = settings.count("num_generations", default=2 if kind == "rloo" else 8)
    accumulated = settings.count("gradient_accumulation_steps", default=1)
    generated = settings.count("generation_batch_size", default=0)
    steps = settings.count("steps_per_generation", default=accumulated)
    generated = generated or per_step * steps // max(1, accumulated)
    stage |= {"reward": "reward", "prompts_per_step": max(1, generated // group), "group_size": group}
    draft.carry("num_generations", group, "group_size", group)
    draft.carry("completions of a generation", generated, "prompts_per_step", stage["prompts_per_step"])
    if generated % per_step:
        draft.changed.append(
            f"{generated} completions of a generation: are no multiple of the {per_step} of an optimiser step; here "
            "every step trains on all that it samples, so the sums differ"
        )
    if generated // per_step > 1:
        stage["mini_batches"] = generated // per_step
        draft.carry("optimiser steps of a generation", generated // per_step, "mini_batches", generated // per_step)
    stage["max_new_tokens"] = settings.count("max_completion_length", default=512)
    draft.carry("max_completion_length", stage["max_new_tokens"], "max_new_tokens", stage["max_new_tokens"])
    stage["temperature"] = settings.number("temperature", default=1.0)
    _generation(settings, draft, stage)
    low = settings.number("epsilon", default=0.2)
    stage["clip_low"], stage["clip_high"] = low, settings.number("epsilon_high", default=low)
    beta = settings.number("beta", default=0.05 if kind == "rloo" else 0.0)
    if beta:
        stage["kl"] = {"coefficient": beta, "estimator": "k3"}
        draft.carry("beta", beta, "kl.coefficient", beta)
    if kind == "rloo":
        stage["advantage"] = "rloo"
        return
    loss = str(settings.take("loss_type", default="dapo"))
    stage["aggregation"] = _AGGREGATIONS.get(loss, "token-mean")
    if loss not in _AGGREGATIONS:
        draft.changed.append(f"loss_type: {loss}: is not there yet; token-mean is what dapo does")
    scale = str(settings.take("scale_rewards", default="group")).lower()
    stage["advantage"] = "dr_grpo" if scale in ("none", "false") else "grpo"
    if scale == "batch":
        draft.changed.append("scale_rewards: batch: rewards are scaled by the spread of their own group")
    ours = f"{stage['aggregation']}, {stage['advantage']}"
    draft.carry("loss_type, scale_rewards", f"{loss}, {scale}", "aggregation, advantage", ours)


def _generation(settings: Settings, draft: Draft, stage: dict[str, Any]) -> None:
    """`generation_kwargs`: arguments of vLLM's or transformers' own sampling; only where responses end has a place."""
    given = settings.values.get("generation_kwargs")
    if isinstance(given, dict):
        settings.taken.add("generation_kwargs")
        settings.values |= {f"generation_kwargs.{name}": value for name, value in given.items()}
    draft.stops(settings, stage, "generation_kwargs.stop", "generation_kwargs.stop_strings")


def _length(settings: Settings, draft: Draft, stage: dict[str, Any], rows: int | None) -> int | None:
    """`steps` or `epochs` of the stage; how many steps that are, where it is known."""
    most = settings.count("max_steps", default=-1)
    epochs = settings.number("num_train_epochs", default=3.0)
    if most > 0:  # TRL counts optimiser steps, of which a step here has `mini_batches`
        stage["steps"] = steps = -(-most // int(stage.get("mini_batches", 1)))
        draft.carry("max_steps", most, "steps", steps)
        return steps
    per_step = int(stage.get("batch_size") or stage["prompts_per_step"])
    stage["epochs"] = plainly(epochs)
    draft.carry("num_train_epochs", plainly(epochs), "epochs", plainly(epochs))
    return passes_of(epochs, rows, per_step).steps if rows else None


def _optimizer(settings: Settings, draft: Draft, kind: str, steps: int | None, parts: int) -> dict[str, Any]:
    """The optimiser of a stage whose steps have so many optimiser steps each."""
    rate = settings.number("learning_rate", default=_RATES[kind])
    schedule = str(settings.take("lr_scheduler_type", default="linear"))
    known = {"linear": ("linear", 0.0), "cosine": ("cosine", 0.0), "constant": ("constant", 1.0)}
    known |= {"constant_with_warmup": ("constant", 1.0), "cosine_with_min_lr": ("cosine", 0.1)}
    ours, final = known.get(schedule, ("linear", 0.0))
    if schedule not in known:
        draft.changed.append(f"lr_scheduler_type: {schedule}: is linear here")
    warmup = settings.number("warmup_steps", default=0.0)
    share = settings.number("warmup_ratio", default=0.0)
    if 0 < warmup < 1:  # a share of the steps, as of transformers 5
        warmup, share = 0.0, warmup
    if warmup and parts > 1:
        draft.carry("warmup_steps", plainly(warmup), "warmup_steps", math.ceil(warmup / parts))
    warmup = math.ceil(warmup / parts) or share_of_steps(draft, "warmup", share, steps)
    draft.carry("learning_rate, lr_scheduler_type", f"{rate:g}, {schedule}", "optimizer", f"{rate:g}, {ours}")
    return {
        "learning_rate": rate,
        "betas": [settings.number("adam_beta1", default=0.9), settings.number("adam_beta2", default=0.999)],
        "weight_decay": settings.number("weight_decay", default=0.0),
        "warmup_steps": round(warmup),
        "schedule": ours,
        "final_ratio": final,
        "max_grad_norm": settings.number("max_grad_norm", default=1.0),
    }


def _runtime(settings: Settings, parts: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if settings.flag("bf16") or str(settings.take("dtype", "torch_dtype", default="")) == "bfloat16":
        found["dtype"] = "bfloat16"
    if settings.flag("gradient_checkpointing"):
        found["activation_checkpointing"] = True
    if settings.given("save_steps"):
        found["checkpoint_every"] = max(1, settings.count("save_steps", default=500) // parts)
    return found


def _rewards(settings: Settings, draft: Draft, stage: dict[str, Any]) -> dict[str, Any]:
    """`rewards` of the run file; the stage is told its one, or each with its weight.

    Raises:
        InputError: other weights than functions.
    """
    given = settings.take("reward_funcs", "reward_func", "reward_model_name_or_path")
    functions = [one if one is None else str(one) for one in (given if isinstance(given, list) else [given])]
    weights = settings.take("reward_weights")
    weights = weights if isinstance(weights, list) else [1.0] * len(functions) if weights is None else [weights]
    numbers = [_weight(settings, weight) for weight in weights]
    if len(numbers) != len(functions):
        wanted = f"one for each of {len(functions)} reward_funcs"
        raise InputError(f"{settings.source}: reward_weights must be {wanted}, got {len(numbers)}; mend the list")
    if numbers == [1.0]:
        return {"reward": _reward(settings, draft, functions[0] or "")}
    found: dict[str, Any] = {}
    stage["reward"] = {}
    for number, (function, weight) in enumerate(zip(functions, numbers, strict=True), start=1):
        name = re.sub(r"[^a-z0-9_-]+", "-", (function or "").rpartition(".")[2].lower()).strip("-_")[:40]
        name = name or f"reward-{number}"
        while name in found:
            name += "-again"
        found[name] = _one_of_several(settings, draft, function, number)
        stage["reward"][name] = weight
        draft.carry("reward_funcs, reward_weights", f"{function}, {weight:g}", f"reward.{name}", weight)
    if not any(numbers):
        draft.fill_in.append("reward: give one of them a weight; where all are 0 nothing is learnt")
        stage["reward"][next(iter(found))] = 1.0
    return found


def _weight(settings: Settings, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{settings.source}: reward_weights must be finite numbers, got {value!r}; write the numbers")
    return number


def _one_of_several(settings: Settings, draft: Draft, function: str | None, number: int) -> Any:
    """Where one of several functions comes from: a package, or `reward.py` beside the run file."""
    module, _, name = (function or "").rpartition(".")
    if function in _REWARDS or (module and "/" not in module):
        return _installed(draft, f"{module or 'trl.rewards'}:{name}")
    entry = name if name.isidentifier() else f"reward_{number}"
    if function and "/" in function:
        draft.changed.append(f"reward_funcs: {function}: is a model; write a function {entry}, or use kind: ppo")
    elif function is None:
        draft.changed.append(f"reward_funcs: number {number} is computed in the script; write it as {entry}")
    draft.fill_in.append(f"put {entry} into reward.py: importing {settings.source} would start the training")
    return {"ref": "reward.py", "entry": entry}


def _installed(draft: Draft, ref: str) -> str:
    package = ref.partition(":")[0].partition(".")[0]
    draft.fill_in.append(f"the reward {ref} comes from an installed package: pip install {package}")
    return ref


def _reward(settings: Settings, draft: Draft, function: str) -> str:
    module, _, name = function.rpartition(".")
    if function in _REWARDS or module:
        ref = f"{module or 'trl.rewards'}:{name}"
        draft.carry("reward_funcs", function, "rewards.reward", ref)
        return _installed(draft, ref)
    if settings.source.endswith(".py"):
        draft.fill_in.append(
            f"copy {name or 'the reward'} into reward.py: importing {settings.source} would start the training"
        )
    entry = f" --entry {name}" if name else ""
    draft.fill_in.append(f"register the reward: posttrain asset add reward:reward reward.py{entry}")
    return "reward:reward"
