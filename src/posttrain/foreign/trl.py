"""TRL's scripts, configurations and command lines (its names and defaults as of version 1.16) as a run.yaml.

If a default in TRL differs from the default in run.yaml, the value is written out, so that even a short TRL file gives
the same training.
"""

import math
import re
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import OWN
from posttrain.domain.runspec import passes_of
from posttrain.domain.validation import KINDS, NOT_HERE
from posttrain.foreign.settings import WHOLE, Draft, Settings, plainly, share_of_steps

_TRAINERS = {"sft": "sft", "grpo": "grpo", "reward": "reward_model", "rloo": "grpo", "dpo": "dpo", "kto": "kto"}
_OTHERS = ("orpo", "cpo", "ppo", "gkd", "distillation", "online_dpo", "onlinedpo", "xpo", "nash")
_RATES = {"sft": 2e-5, "grpo": 1e-6, "reward": 1e-4, "rloo": 1e-6, "dpo": 1e-6, "kto": 1e-6}
_AGGREGATIONS = {
    **dict.fromkeys(("dapo", "bnpo"), "token-mean"),
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_BUILDERS = ("json", "csv", "parquet", "arrow")  # builders for `load_dataset`, which read `data_files`
_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # functions in trl.rewards
_PROBE = "write probe: {data: NAME} into the stage, with keep_best: true or early_stopping"
_LOSS = {  # trainer → the loss that is used in place of others
    "dpo": "the loss on a pair is the sigmoid loss, with beta and label_smoothing",
    "kto": "the loss is that of KTO",
}
_POINT = (
    "kto: every pass has its own order of rows, and the reference point is estimated on all rows of a step; TRL keeps "
    "the order of the file and estimates on each device's batch"
)
_CORRECTED = (
    "responses are sampled with the trained weights; lag: {steps: 0, correction: tis, cap: …} applies the same "
    "correction"
)
_NEVER_CUT = "`plan` refuses a longer row; rows are never truncated"
_WHY = {  # reason → settings that change the result or the output for people
    "an adapter is plain LoRA on linear layers": (
        "lora_target_parameters lora_modules_to_save use_dora peft_config peft_config.modules_to_save peft_config.bias "
        "peft_config.use_dora peft_config.target_parameters peft_config.rank_pattern peft_config.alpha_pattern "
        "peft_config.layers_to_transform peft_config.init_lora_weights peft_config.exclude_modules"
    ),
    "weights are trained without quantisation": (
        "load_in_8bit load_in_4bit quantization_config bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"
    ),
    "training samples from the whole distribution": "top_p top_k min_p repetition_penalty generation_kwargs",
    _PROBE: "load_best_model_at_end metric_for_best_model greater_is_better",
    f"callbacks are not run, although they may change the training; in place of EarlyStoppingCallback, {_PROBE}": (
        "callbacks"
    ),
    "placement: assigns devices to roles": "deepspeed fsdp fsdp_config parallelism_config",
    "there is no entropy bonus": (
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "aggregation, clip_low and clip_high define the loss": (
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
        "top_entropy_quantile off_policy_mask_threshold"
    ),
    _LOSS["dpo"]: "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau",
    _CORRECTED: (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min"
    ),
    "an epoch covers all rows once, in an order that seed determines; a batch may span two epochs": (
        "shuffle_dataset train_sampling_strategy data_seed dataloader_drop_last ignore_data_skip"
    ),
    "put the tokenizer or template into the model's folder, in the form that save_pretrained writes": (
        "processing_class tokenizer eos_token chat_template_path"
    ),
    "the optimiser is AdamW, with the fields of optimizer:": (
        "optim optim_args optim_target_modules optimizers optimizer_cls_and_kwargs"
    ),
    "epsilon is 1e-8": "adam_epsilon",
    "the schedule has warmup_steps and final_ratio, and no other field": "lr_scheduler_kwargs",
    "kind: dataflow has several turns per sample; your class gives the observations between them": (
        "tools rollout_func environment_factory max_tool_calling_iterations"
    ),
    _NEVER_CUT: "truncation_mode",
    "batch_size counts rows, where TRL counts sequences of max_length that several rows fill": (
        "packing packing_strategy"
    ),
    "rows are read unchanged; write the converted rows to the data file": "formatting_func dataset_kwargs",
    "a row is rendered by the model's chat template; a custom mask has no counterpart": "data_collator",
    "the loss is that of the stage's kind": "compute_loss_func label_names",
    "a suite of an evaluate stage measures": "compute_metrics preprocess_logits_for_metrics",
    "code that comes with a model is never run": "trust_remote_code",
    "add an evaluate stage with a suite, or probe: to the stage": "eval_dataset eval_strategy",
    "register the rows of this split only": "dataset_config dataset_train_split",
    "these files are in another split, which is not converted": "data_files",
    "this argument is not read; write the rows to JSON lines": "load_dataset",
    "the model is read from its folder; only dtype and revision can be set": "model_init_kwargs",
    "repeating the command resumes; a run does not start from another run's checkpoint": "resume_from_checkpoint",
    NOT_HERE["stop_token_ids"]: "stop_token_ids",
    "the chat template receives only the messages": "chat_template_kwargs",
    "sampling is not constrained by a grammar": "vllm_structured_outputs_regex",
    "each rollout batch is used once; there are no importance ratios of old batches": "num_iterations",
    "truncated responses are scored and trained on": "mask_truncated_completions",
    "there is no two-sided clipping": "delta",
    "rewards are summed by their weights before they are normalised": "multi_objective_aggregation",
    "rewards are used unchanged": "normalize_advantages reward_clip_range",
    "a reward model uses the tokenizer in its folder": "reward_processing_classes",
    "rewards are not centred": "center_rewards_coefficient",
    "the head computes in the stage's dtype": "cast_lm_head_to_fp32",
    "there is no auxiliary loss on the load of experts": "router_aux_loss_coef",
    "dropout applies only in sft and reward_model, as the model's configuration sets it": "disable_dropout",
    "lag: {steps: N} samples ahead, in a separate pool": "max_staleness weight_sync_steps",
    "the contents of that file are not read; convert the file with posttrain init --from trl THAT.yaml": "config",
    "the reference is the starting policy and stays fixed": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "the reference is the starting policy": "ref_model",
    "the loss covers only the tokens of the assistant": "assistant_only_loss",
    "the loss covers the completion, not the prompt": "completion_only_loss",
    "the columns must be text, prompt and completion, or messages": "dataset_text_field",
    "there is no noise on embeddings": "neftune_noise_alpha",
    "there is no label smoothing": "label_smoothing_factor",
    "a step's loss is divided by the tokens of all devices": "average_tokens_across_devices",
    "the batch size is fixed; micro_batch_tokens bounds the memory": "auto_find_batch_size",
    "float16 is not supported; dtype: float32 or bfloat16": "fp16",
}
_CHANGES = {name: why for why, names in _WHY.items() for name in names.split()}
_SAME = {  # values, in addition to empty values, that match Posttrain's behaviour
    **WHOLE,
    **dict.fromkeys(("completion_only_loss", "average_tokens_across_devices", "shuffle_dataset"), (True,)),
    "vllm_importance_sampling_correction": (False,),
    **dict.fromkeys(("num_iterations", "top_entropy_quantile"), (1,)),
    **dict.fromkeys(("entropy_coef", "label_smoothing_factor", "neftune_noise_alpha", "router_aux_loss_coef"), (0,)),
    "adam_epsilon": (1e-8,),
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw_hf"),
    "eval_strategy": ("no",),
    "train_sampling_strategy": ("random",),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "f_divergence_type": ("reverse_kl",),
    "dataset_text_field": ("text",),
    "dataset_train_split": ("train",),
}
_BECOMES = {  # fields of the run file → the TRL settings that determine them
    "prompts_per_step batch_size": (
        "per_device_train_batch_size gradient_accumulation_steps num_processes nproc_per_node"
    ),
    "model": "model_name_or_path model model_name model_revision model_init_kwargs.revision",
    "data.train": "dataset_name dataset train_file train_dataset data_files",
    "group_size": "num_generations",
    "prompts_per_step": "generation_batch_size",
    "mini_batches prompts_per_step": "steps_per_generation",
    "max_new_tokens": "max_completion_length",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "kl.coefficient beta": "beta",
    "kl.estimator": "use_bias_correction_kl",
    "clip_low": "epsilon",
    "clip_high": "epsilon_high",
    "advantage": "scale_rewards",
    "aggregation kind loss": "loss_type",
    "kind": "importance_sampling_level",
    "optimizer.warmup_steps": "warmup_steps warmup_ratio",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.final_ratio": "lr_scheduler_kwargs.min_lr lr_scheduler_kwargs.min_lr_rate",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.max_grad_norm": "max_grad_norm",
    "runtime.dtype": "bf16 dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype mixed_precision",
    "runtime.activation_checkpointing": "gradient_checkpointing activation_checkpointing",
    "runtime.checkpoint_every": "save_steps",
    "reward": "reward_funcs reward_func reward_model_name_or_path reward_weights",
    "seed": "seed",
    "max_length": "max_length max_seq_length",
    "temperature": "temperature",
    "label_smoothing": "label_smoothing",
    "desirable_weight": "desirable_weight",
    "undesirable_weight": "undesirable_weight",
    "adapter.lora.rank": "lora_r peft_config.r",
    "adapter.lora.alpha": "lora_alpha peft_config.lora_alpha",
    "adapter.lora.dropout": "lora_dropout peft_config.lora_dropout",
    "adapter.lora.targets": "lora_target_modules peft_config.target_modules",
    "adapter.lora.rslora": "use_rslora peft_config.use_rslora",
    "adapter.quantize": "load_in_4bit bnb_4bit_quant_type",
    "adapter": "use_peft lora_task_type peft_config.task_type peft_config.peft_type",
}
_OURS = {name: fields for fields, names in _BECOMES.items() for name in names.split()}
_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_config.bias": ("none",),
    "peft_config.use_dora": (False,),
    "peft_config.init_lora_weights": (True,),
    "peft_config.modules_to_save": (["score"],),  # which trains in full here too
}
_HARMLESS = frozenset(  # settings without effect on the result
    (  # noqa: SIM905
        "output_dir overwrite_output_dir logging_steps logging_strategy logging_first_step report_to run_name "
        "do_train do_eval do_predict push_to_hub hub_model_id hub_strategy hub_always_push hub_private_repo "
        "hub_revision hub_token save_strategy save_total_limit save_on_each_node save_only_model eval_steps eval_delay "
        "eval_on_start eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
        "bf16_full_eval fp16_full_eval include_for_metrics prediction_loss_only num_generations_eval eval_packing "
        "per_device_eval_batch_size dataloader_num_workers dataloader_in_order dataloader_multiprocessing_context "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc "
        "dataset_streaming disable_tqdm use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode "
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length attn_implementation "
        "cache_implementation use_cache use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_offloading "
        "ddp_timeout ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
        "ds3_gather_for_generation tf32 padding_free pad_to_multiple_of pad_token use_liger_kernel liger_kernel_config "
        "precompute_ref_log_probs precompute_ref_batch_size log_completions log_completions_hub_repo log_multimodal "
        "log_unique_prompts num_completions_to_print log_level log_level_replica log_on_each_node "
        "logging_nan_inf_filter include_num_input_tokens_seen length_column_name config_file num_machines "
        "machine_rank main_process_port remove_unused_columns accelerator_config torch_compile torch_compile_backend "
        "torch_compile_mode torch_empty_cache_steps dataset_test_split ignore_bias_buffers enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint full_determinism local_rank debug project skip_memory_metrics "
        "trackio_bucket_id trackio_space_id trackio_static_space_id use_cpu no_cuda"
    ).split()
)


def from_trl(settings: Settings, rows: int | None = None) -> Draft:
    """Return a draft of a run file with one stage that trains as the TRL file does.

    Args:
        rows: number of rows of the training data; None if unknown: shares of the steps then become placeholders.

    Raises:
        InputError: the trainer has no counterpart in Posttrain, or a value is not a number.
    """
    kind = _trainer(settings)
    name = re.sub(r"[^a-z0-9_-]+", "-", Path(settings.source).stem.lower()).strip("-_") or kind
    draft = Draft(settings.source, "TRL", {"name": name[:40], "owner": "me"})
    draft.run["seed"] = settings.count("seed", default=42)
    name = settings.take("model_name_or_path", "model", "model_name")
    draft.run["model"] = draft.model(
        settings, name, settings.take("model_revision", "model_init_kwargs.revision", default="main")
    )
    draft.run["data"] = {"train": _data(settings, draft)}
    stage: dict[str, Any] = {"kind": _TRAINERS[kind], "data": "train"}
    per_step = _batch(settings, draft)
    if kind in ("grpo", "rloo"):
        _on_policy(settings, draft, stage, per_step, kind)
        draft.run["rewards"] = _rewards(settings, draft, stage)
    else:
        stage["batch_size"] = per_step
        if settings.given("max_length", "max_seq_length"):
            stage["max_length"] = settings.count("max_length", "max_seq_length", default=1024)
            draft.fill_in.append(f"max_length {stage['max_length']}: {_NEVER_CUT}; drop or split such rows")
        _losses_of_rows(settings, draft, stage, kind)
    steps = _length(settings, draft, stage, rows)
    # the kind of the stage decides the task; without an adapter, its settings have no effect
    settings.taken.update(
        name for name, place in _OURS.items() if place == "adapter" or place.startswith("adapter.lora")
    )
    if settings.flag("use_peft") or any(name.startswith("peft_config.") for name in settings.values):
        stage["adapter"] = {"lora": _lora(settings, draft, kind)}
        nf4 = settings.values.get("bnb_4bit_quant_type", "nf4") == "nf4"
        if settings.values.get("load_in_4bit") and nf4 and kind not in ("grpo", "rloo"):
            stage["adapter"]["quantize"] = "nf4"
            settings.take("load_in_4bit", "bnb_4bit_quant_type")
    elif settings.given("peft_config") or "peft_config" in settings.unknown:
        draft.fill_in.append("adapter: none was written, since peft_config is not LoRA; all weights are trained")
    stage["optimizer"] = _optimizer(settings, draft, kind, steps, int(stage.get("mini_batches", 1)))
    runtime = _runtime(settings, draft, int(stage.get("mini_batches", 1)))
    draft.run["stages"] = {kind: {**stage, **({"runtime": runtime} if runtime else {})}}
    same = {**_SAME, **_PLAIN_LORA, "disable_dropout": (kind in ("dpo", "kto", "grpo", "rloo"),)}
    if kind not in ("grpo", "rloo"):
        same["shuffle_dataset"] = (True, False)  # TRL's trainer shuffles each pass with any value
    return draft.close(settings, _CHANGES, _HARMLESS, _OURS, same)


def _losses_of_rows(settings: Settings, draft: Draft, stage: dict[str, Any], kind: str) -> None:
    """Convert the settings for the loss on demonstrations, pairs or labelled rows."""
    known = {"dpo": ("sigmoid", "ipo", "robust"), "kto": ("kto",), "sft": ("nll", "chunked_nll")}.get(kind, ())
    loss = settings.take("loss_type", default=known[0] if known else "")
    names = [str(one) for one in (loss if isinstance(loss, list) else [loss])]
    if settings.given("loss_type"):
        fits = len(names) == 1 and names[0] in known
        draft.carry("loss_type", loss, "kind", stage["kind"]) if fits else draft.changed.append(
            f"loss_type: {loss}: is not supported; {_LOSS.get(kind, 'the loss is the mean over tokens')}"
        )
    if kind in ("dpo", "kto"):
        stage["beta"] = settings.number("beta", default=0.1)
    if kind == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            stage[name] = settings.number(name, default=1.0)
        draft.changed.append(_POINT)
    if kind == "dpo":
        smoothing = settings.number("label_smoothing", default=0.0)
        stage["label_smoothing"] = 0.0 if names == ["ipo"] else smoothing
        if names == ["ipo"] or (names == ["robust"] and smoothing):
            stage["loss"] = names[0]


def _trainer(settings: Settings) -> str:
    words = [word.lower() for word in settings.words]
    classes = {
        word.removesuffix("trainer").removesuffix("config") for word in words if word.endswith(("trainer", "config"))
    }
    named = classes | set(words) | {Path(word).stem for word in words if word.endswith(".py")}
    for other in _OTHERS:
        if other in named:
            kind = other.removeprefix("online").removeprefix("_")
            by_hand = f"is kind: {kind} here, but is not converted yet; write the stage by hand"
            told = by_hand if other in OWN else KINDS.get(kind, "is not supported yet")
            raise InputError(f"{settings.source}: trains with {other.upper()}, which {told}")
    if found := next((kind for kind in _TRAINERS if kind in named), None):
        return found
    return "grpo" if settings.values.keys() & {"num_generations", "reward_funcs", "max_completion_length"} else "sft"


def _data(settings: Settings, draft: Draft) -> str:
    """Return the ref of the training rows: a local file, or a data set that a person must register."""
    name = settings.take("dataset_name", "dataset", "train_file", "train_dataset")
    split = str(settings.values.get("dataset_train_split") or "train")
    files = _files(settings, split.partition("[")[0]) if name in _BUILDERS else [name]
    path = files[0] if len(files) == 1 and isinstance(files[0], str) else ""
    if path and (name in _BUILDERS or Path(path).suffix in (".json", ".jsonl", ".parquet", ".csv")):
        return path if path.startswith((".", "/", "~")) else f"./{path}"
    if settings.given("datasets"):
        draft.changed.append("datasets: a mixture is one data set here; write all its rows to one file")
    told = " ".join(str(one) for one in files) if name in _BUILDERS and files else "FILE"
    fetch = f"hf download --repo-type dataset {name}, then " if isinstance(name, str) and "/" in name else ""
    draft.fill_in.append(f"register the training rows: {fetch}posttrain asset add dataset:train {told}")
    return "dataset:train"


def _files(settings: Settings, split: str) -> list[Any]:
    """Return the `data_files` of a split, even if the settings name several splits."""
    given = settings.take("data_files") or settings.take(f"data_files.{split}")
    return given if isinstance(given, list) else [given] if given else []


def _batch(settings: Settings, draft: Draft) -> int:
    """Return the number of documents (or completions) per optimiser step."""
    processes = settings.count("num_processes", "nproc_per_node", default=1)
    size = settings.count("per_device_train_batch_size", default=8)
    accumulated = settings.count("gradient_accumulation_steps", default=1)
    if not settings.given("num_processes", "nproc_per_node"):
        draft.changed.append(
            "devices: one device is assumed, since the file sets no number of processes; with several, multiply the "
            "batch size"
        )
    return max(1, size * accumulated * processes)


def _on_policy(settings: Settings, draft: Draft, stage: dict[str, Any], per_step: int, kind: str) -> None:
    group = settings.count("num_generations", default=2 if kind == "rloo" else 8)
    accumulated = settings.count("gradient_accumulation_steps", default=1)
    generated = settings.count("generation_batch_size", default=0)
    steps = settings.count("steps_per_generation", default=accumulated)
    generated = generated or per_step * steps // max(1, accumulated)
    stage |= {"reward": "reward", "prompts_per_step": max(1, generated // group), "group_size": group}
    if generated % per_step:
        draft.changed.append(
            f"{generated} completions per generation: not a multiple of the {per_step} per optimiser step; here "
            "every step trains on all its samples, so the gradients differ"
        )
    if generated // per_step > 1:
        stage["mini_batches"] = generated // per_step
    stage["max_new_tokens"] = settings.count("max_completion_length", default=512)
    stage["temperature"] = settings.number("temperature", default=1.0)
    draft.stops(settings, stage, "generation_kwargs.stop", "generation_kwargs.stop_strings")
    low = settings.number("epsilon", default=0.2)
    stage["clip_low"], stage["clip_high"] = low, settings.number("epsilon_high", default=low)
    beta = settings.number("beta", default=0.05 if kind == "rloo" else 0.0)
    corrected = settings.flag("use_bias_correction_kl", default=True) and kind == "grpo"
    if beta:
        stage["kl"] = {"coefficient": beta, "estimator": "k3-corrected" if corrected else "k3"}
    if kind == "rloo":
        stage["advantage"] = "rloo"
        if beta:
            draft.changed.append(
                "beta: TRL subtracts the KL penalty from the reward; here the penalty is in the loss (kind: rloo "
                "supports both)"
            )
        return
    loss = str(settings.take("loss_type", default="dapo"))
    level = str(settings.take("importance_sampling_level", default="token"))
    scale = str(settings.take("scale_rewards", default="group")).lower()
    if level not in ("token", "sequence"):
        draft.changed.append(f"importance_sampling_level: {level}: is not supported; ratios are per token")
    if level == "sequence" or loss == "cispo":
        _one_ratio(draft, stage, loss, level)
        if scale not in ("group", "true"):
            draft.changed.append(f"scale_rewards: {scale}: {stage['kind']} divides by the spread of the group")
        return
    stage["aggregation"] = _AGGREGATIONS.get(loss, "token-mean")
    if loss not in _AGGREGATIONS:
        draft.changed.append(f"loss_type: {loss}: is not supported yet; token-mean, the aggregation of dapo, is used")
    stage["advantage"] = "dr_grpo" if scale in ("none", "false") else "grpo"
    if scale == "batch":
        draft.changed.append("scale_rewards: batch: rewards are scaled by the spread of their group")


def _one_ratio(draft: Draft, stage: dict[str, Any], loss: str, level: str) -> None:
    """Convert the loss of GSPO or CISPO, which are kinds."""
    stage["kind"] = "gspo" if level == "sequence" else "cispo"
    if level == "sequence":
        draft.carry("importance_sampling_level", level, "kind", "gspo")
        if loss != "grpo":
            draft.changed.append(f"loss_type: {loss}: gspo has the mean over responses, which is loss_type grpo")
        if loss == "cispo":
            stage["clip_high"] = stage["clip_low"]  # TRL's epsilon_high is the limit of a weight there
        return
    draft.carry("loss_type", loss, "kind", "cispo")
    stage["clip_low"], stage["clip_high"] = 1.0, stage["clip_high"] - 1.0  # TRL's epsilon_high is the limit of a weight
    if stage["clip_high"] <= 0:
        draft.changed.append(f"epsilon_high: the limit of a weight must exceed 1: {stage['clip_high'] + 1:g} became 5")
        stage["clip_high"] = 4.0


def _length(settings: Settings, draft: Draft, stage: dict[str, Any], rows: int | None) -> int | None:
    """Set `steps` or `epochs` of the stage; return the number of steps, or None if it is unknown."""
    most = settings.count("max_steps", default=-1)
    epochs = settings.number("num_train_epochs", default=3.0)
    if most > 0:  # TRL counts optimiser steps, of which a step in Posttrain has `mini_batches`
        stage["steps"] = steps = -(-most // int(stage.get("mini_batches", 1)))
        return steps
    per_step = int(stage.get("batch_size") or stage["prompts_per_step"])
    stage["epochs"] = plainly(epochs)
    return passes_of(epochs, rows, per_step).steps if rows else None


def _optimizer(settings: Settings, draft: Draft, kind: str, steps: int | None, parts: int) -> dict[str, Any]:
    """Return the optimiser settings for a stage with `parts` optimiser steps per step."""
    rate = settings.number("learning_rate", default=_RATES[kind])
    schedule = str(settings.take("lr_scheduler_type", default="linear"))
    known = {"linear": ("linear", 0.0), "cosine": ("cosine", 0.0), "constant": ("constant", 1.0)}
    known |= {"constant_with_warmup": ("constant", 1.0), "cosine_with_min_lr": ("cosine", 0.1)}
    ours, final = known.get(schedule, ("linear", 0.0))
    if schedule not in known:
        draft.changed.append(f"lr_scheduler_type: {schedule}: is not supported; the schedule is linear")
    warmup = settings.number("warmup_steps", default=0.0)
    share = settings.number("warmup_ratio", default=0.0)
    if 0 < warmup < 1:  # the number is a share of the steps, as in transformers 5
        warmup, share = 0.0, warmup
    warmup = math.ceil(warmup / parts) or share_of_steps(draft, "warmup", share, steps)
    if schedule == "cosine_with_min_lr":
        least = settings.number("lr_scheduler_kwargs.min_lr", default=final * rate)
        final = settings.number("lr_scheduler_kwargs.min_lr_rate", default=least / rate)
    return {
        "learning_rate": rate,
        "betas": [settings.number("adam_beta1", default=0.9), settings.number("adam_beta2", default=0.999)],
        "weight_decay": settings.number("weight_decay", default=0.0),
        "warmup_steps": round(warmup),
        "schedule": ours,
        "final_ratio": final,
        "max_grad_norm": settings.number("max_grad_norm", default=1.0) or 1e12,  # in TRL, 0 means no clipping
    }


def _lora(settings: Settings, draft: Draft, kind: str) -> dict[str, Any]:
    """Return the adapter: from the arguments of TRL's ModelConfig, or of peft's LoraConfig, whose defaults differ."""
    own = any(name.startswith("peft_config") for name in settings.values)
    rank, alpha, dropout = (8, 8, 0.0) if own else (16, 32, 0.05)
    targets = settings.take("peft_config.target_modules", "lora_target_modules")
    names = [targets] if isinstance(targets, str) else targets
    if isinstance(targets, str) and targets != "all-linear" and not re.fullmatch(r"\w+", targets):
        names = ["all-linear"]
        draft.fill_in.append(f"adapter.lora.targets: name the layers that the pattern {targets!r} matches")
    if names is None:
        names = ["q_proj", "v_proj"]
        draft.fill_in.append(
            "adapter.lora.targets: [q_proj, v_proj] is peft's default for Llama, Qwen, Mistral and Gemma; name the "
            "layers of another model"
        )
    found = {
        "rank": settings.count("peft_config.r", "lora_r", default=rank),
        "alpha": settings.number("peft_config.lora_alpha", "lora_alpha", default=alpha),
        "dropout": settings.number("peft_config.lora_dropout", "lora_dropout", default=dropout),
        "targets": "auto" if list(names) == ["all-linear"] else sorted(names),
        "rslora": settings.flag("peft_config.use_rslora", "use_rslora"),
    }
    if found["dropout"] and kind not in ("sft", "reward"):
        draft.changed.append(
            f"lora_dropout: {found['dropout']:g}: is 0 in {kind}, which trains without dropout: the ratio of a policy "
            "to itself must be 1"
        )
        found["dropout"] = 0.0
    return found


def _runtime(settings: Settings, draft: Draft, parts: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    written = str(settings.take(*names, default="")).rpartition(".")[2]
    mixed = str(settings.take("mixed_precision", default=""))
    said = written or {"bf16": "bfloat16", "no": "float32"}.get(mixed, mixed)
    said = "bfloat16" if settings.flag("bf16") else "float32" if settings.given("bf16") else said
    if said in ("bfloat16", "float32"):
        found["dtype"] = said
    elif said:
        name = next(name for name in (*names, "mixed_precision") if settings.given(name))
        draft.changed.append(f"{name}: {said}: is not supported; dtype: float32 or bfloat16")
    if settings.given("activation_checkpointing", "gradient_checkpointing"):
        found["activation_checkpointing"] = settings.flag("activation_checkpointing", "gradient_checkpointing")
    if settings.given("save_steps"):
        found["checkpoint_every"] = max(1, settings.count("save_steps", default=500) // parts)
    return found


def _rewards(settings: Settings, draft: Draft, stage: dict[str, Any]) -> dict[str, Any]:
    """Return `rewards` for the run file; set the stage's reward, or its rewards with their weights.

    Raises:
        InputError: the number of weights differs from the number of functions.
    """
    given = settings.take("reward_funcs", "reward_func", "reward_model_name_or_path")
    functions = [one if one is None else str(one) for one in (given if isinstance(given, list) else [given])]
    weights = settings.take("reward_weights")
    weights = weights if isinstance(weights, list) else [1.0] * len(functions) if weights is None else [weights]
    numbers = [_weight(settings, weight) for weight in weights]
    if len(numbers) != len(functions):
        raise InputError(
            f"{settings.source}: reward_weights must have one number for each of the {len(functions)} reward_funcs, "
            f"got {len(numbers)}; fix the list"
        )
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
    if not any(numbers):
        draft.fill_in.append("reward: give at least one reward a weight; with all at 0 the model learns nothing")
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
    """Return the source for one of several reward functions: a package, or `reward.py` next to the run file."""
    module, _, name = (function or "").rpartition(".")
    if function in _REWARDS or (module and "/" not in module):
        return _installed(draft, f"{module or 'trl.rewards'}:{name}")
    entry = name if name.isidentifier() else f"reward_{number}"
    if function and "/" in function:
        draft.changed.append(f"reward_funcs: {function}: is a model; write a function {entry}, or use kind: ppo")
    elif function is None:
        draft.changed.append(f"reward_funcs: number {number} is computed in the script; write it as {entry}")
    draft.fill_in.append(f"put {entry} into reward.py: {_alone(settings)}")
    return {"ref": "reward.py", "entry": entry}


def _alone(settings: Settings) -> str:
    """Return the reason why a reward must be copied out of its script."""
    if settings.starts:
        return f"importing {settings.source} would start the training"
    return "a reward is a separate file that contains everything it needs"


def _installed(draft: Draft, ref: str) -> str:
    draft.fill_in.append(f"the reward {ref} is in a package; install it: pip install {re.split('[:.]', ref)[0]}")
    return ref


def _reward(settings: Settings, draft: Draft, function: str) -> str:
    module, _, name = function.rpartition(".")
    if function in _REWARDS or module:
        return _installed(draft, f"{module or 'trl.rewards'}:{name}")
    if settings.source.endswith(".py"):
        draft.fill_in.append(f"copy {name or 'the reward'} into reward.py: {_alone(settings)}")
    entry = f" --entry {name}" if name else ""
    draft.fill_in.append(f"register the reward: posttrain asset add reward:reward reward.py{entry}")
    return "reward:reward"
