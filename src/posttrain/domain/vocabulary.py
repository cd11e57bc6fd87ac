"""Words of other trainers for what run.yaml calls otherwise, so that a hint names the field that was meant."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# word elsewhere (TRL, verl, OpenRLHF, transformers) → our words, the first that the place has
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("lr", "learning-rate", "actor_lr", "critic_lr"), ("learning_rate",)),
        **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), ("schedule",)),
        **dict.fromkeys(("warmup", "warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio"), ("warmup_steps",)),
        **dict.fromkeys(("min_lr_ratio", "min_lr"), ("final_ratio",)),
        **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), ("betas",)),
        **dict.fromkeys(("grad_clip", "gradient_clipping", "clip_grad_norm", "max_norm"), ("max_grad_norm",)),
        **dict.fromkeys(("max_steps", "num_steps", "total_training_steps"), ("steps",)),
        **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs", "max_epochs"), ("epochs",)),
        **dict.fromkeys(
            ("per_device_train_batch_size", "train_batch_size", "rollout_batch_size"),
            ("batch_size", "prompts_per_step"),
        ),
        **dict.fromkeys(("ppo_mini_batch_size", "num_mini_batches"), ("mini_batches",)),
        **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "num_iterations"), ("ppo_epochs", "mini_batches")),
        **dict.fromkeys(
            ("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"),
            ("micro_batch_tokens",),
        ),
        **dict.fromkeys(
            ("num_generations", "n", "num_samples", "n_samples_per_prompt", "num_return_sequences", "rollout_n"),
            ("group_size", "samples"),
        ),
        **dict.fromkeys(
            ("max_completion_length", "max_response_length", "response_length", "max_tokens", "max_gen_toks"),
            ("max_new_tokens",),
        ),
        **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_sequence", "until"), ("stop",)),
        **dict.fromkeys(("max_seq_length", "max_seq_len", "cutoff_len", "max_prompt_length"), ("max_length",)),
        **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta"), ("coefficient", "kl")),
        **dict.fromkeys(("kl_estimator", "kl_loss_type", "kl_penalty"), ("estimator", "kl")),
        **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), ("kl",)),
        **dict.fromkeys(("epsilon", "clip_ratio", "clip_ratio_low", "cliprange", "eps_clip"), ("clip_low",)),
        **dict.fromkeys(("epsilon_high", "clip_ratio_high"), ("clip_high",)),
        **dict.fromkeys(("cliprange_value", "value_clip"), ("clip", "critic")),
        **dict.fromkeys(
            ("staleness", "max_staleness", "staleness_threshold", "off_policy_steps", "async", "asynchronous"), ("lag",)
        ),
        **dict.fromkeys(("bypass_mode", "rollout_is", "importance_sampling"), ("correction", "lag")),
        **dict.fromkeys(("rollout_is_threshold", "tis_cap", "importance_sampling_cap"), ("cap", "lag")),
        **dict.fromkeys(("loss_type", "loss_agg_mode"), ("aggregation",)),
        **dict.fromkeys(("adv_estimator", "advantage_estimator", "scale_rewards"), ("advantage",)),
        **dict.fromkeys(("lambd", "lambda", "gae_lambda"), ("lam",)),
        **dict.fromkeys(
            ("reward_funcs", "reward_func", "reward_fn", "reward_function", "reward_weights"), ("reward", "rewards")
        ),
        **dict.fromkeys(("reward_model_path", "reward_pretrain", "rm"), ("reward_model",)),
        **dict.fromkeys(("teacher_model", "teacher_model_name_or_path", "teacher_path"), ("teacher",)),
        **dict.fromkeys(
            ("dataset", "datasets", "train_dataset", "dataset_name", "train_files", "prompt_data", "data_files"),
            ("data",),
        ),
        **dict.fromkeys(("eval_dataset", "val_files", "validation"), ("probe", "data")),
        **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrain", "path"), ("model",)),
        **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), ("activation_checkpointing",)),
        **dict.fromkeys(("ulysses_sequence_parallel_size", "sp_size", "ring_attn_size"), ("sequence_parallel",)),
        **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision", "mixed_precision"), ("dtype",)),
        **dict.fromkeys(("save_steps", "save_freq", "checkpoint_interval"), ("checkpoint_every",)),
        **dict.fromkeys(("eval_steps", "test_freq"), ("every", "probe")),
        **dict.fromkeys(("early_stopping_patience",), ("patience", "early_stopping")),
        **dict.fromkeys(("early_stopping_threshold",), ("min_delta", "early_stopping")),
        **dict.fromkeys(("load_best_model_at_end", "save_best", "best"), ("keep_best",)),
        **dict.fromkeys(("gate", "checks"), ("gates",)),
        **dict.fromkeys(("report_to", "logger", "loggers", "tracker", "log_with", "use_wandb"), ("trackers",)),
        **dict.fromkeys(("uri", "tracking-uri"), ("tracking_uri",)),
        **dict.fromkeys(("experiment_name", "run_name"), ("experiment",)),
        **dict.fromkeys(("project_name", "wandb_project"), ("project",)),
        **dict.fromkeys(("log_dir", "logging_dir", "tensorboard_dir"), ("logdir",)),
        **dict.fromkeys(("max_tokens_total", "token_budget"), ("tokens", "budget")),
        **dict.fromkeys(("timeout", "time_limit", "max_time"), ("wall_clock", "reward_timeout", "budget")),
    }
)

# words whose number is in another unit than the field's
UNITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio"), "a number of steps, not a share"),
        **dict.fromkeys(("ppo_mini_batch_size",), "a number of optimiser steps, not a size"),
        **dict.fromkeys(("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size"), "in tokens"),
    }
)

_WHOLE = "is of a suite with samples; training samples from the whole distribution, which its log-probabilities are of"
# words of run.yaml, or of others, that a place does not have → why
NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("top_p", "top_k", "min_p"), _WHOLE),
        **dict.fromkeys(
            ("repetition_penalty", "presence_penalty", "frequency_penalty"),
            "responses are drawn without penalties, from the distribution that the log-probabilities are of",
        ),
        "lag": "is of a policy gradient, which alone weighs what an older policy sampled",
        "stop": "is of a stage that samples, whose probe it holds for too, and of a suite",
        "stop_token_ids": "a response ends at the tokens that the model's generation_config.json names, and at stop",
    }
)

_BY_PAIRS = "is not there yet; kind: dpo is nearest, or a judge from pairs (kind: reward_model) and kind: ppo"
# kinds that people know → what there is instead
KINDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("ipo", "orpo", "simpo", "cpo", "kto"), _BY_PAIRS),
        "vapo": "is not there yet; kind: ppo is nearest",
        "reinforce": "is kind: rloo with a group's baseline, or kind: reinforce_plus_plus without groups",
        **dict.fromkeys(("reinforce++", "reinforce-plus-plus"), "is kind: reinforce_plus_plus"),
        "dr-grpo": "is kind: dr_grpo",
        "gspo": "is not there yet; kind: grpo is nearest",
        **dict.fromkeys(("rl", "rlvr", "online"), "is kind: grpo, or kind: ppo with a critic"),
        **dict.fromkeys(("rm", "reward", "reward-model"), "is kind: reward_model"),
        **dict.fromkeys(("eval", "test", "benchmark"), "is kind: evaluate"),
        **dict.fromkeys(("finetune", "fine-tune", "finetuning", "train", "supervised"), "is kind: sft"),
        **dict.fromkeys(
            ("custom", "user", "best_of_n", "rejection_sampling"), "is kind: dataflow, an algorithm of yours"
        ),
        **dict.fromkeys(("gkd", "distillation", "on_policy_distillation"), "is kind: distill"),
    }
)
