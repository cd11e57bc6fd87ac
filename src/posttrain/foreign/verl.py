"""verl's hydra settings (YAML or command-line overrides; its names and defaults as of version 0.6) as a run.yaml.

If a default in verl differs from the default in run.yaml, the value is written out.
"""

import re
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.runspec import passes_of
from posttrain.domain.validation import NOT_HERE
from posttrain.foreign.settings import Draft, Settings, plainly, share_of_steps

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "gae": "", "rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_ESTIMATES = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"}
_CHANGES = {
    **dict.fromkeys((f"{_ROLLOUT}.top_p", f"{_ROLLOUT}.top_k"), "training samples from the whole distribution"),
    "stop_token_ids": NOT_HERE["stop_token_ids"],
    "entropy_coeff": "there is no entropy bonus",
    "clip_ratio_c": "there is no dual clipping",
    "loss_mode": "the loss is the clipped PPO loss",
    **dict.fromkeys(
        ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "bypass_mode"),
        "responses are sampled with the trained weights; lag (even with steps: 0) has the fields correction and cap",
    ),
    **dict.fromkeys(
        ("staleness_threshold", "trigger_parameter_sync_step", "partial_rollout", "require_batches"),
        "lag: {steps: N} samples exactly N steps ahead, in a separate pool",
    ),
    "use_pf_ppo": "resamples the whole batch; kind: pf_ppo filters each group",
    "kl_ctrl.type": "the coefficient is fixed",
    "multi_turn.enable": "kind: dataflow has several turns per sample; your class gives the observations between them",
    "reward_model.enable": "write reward_model: with a model of kind: reward_model instead of reward",
    **dict.fromkeys(
        ("val_kwargs.top_p", "val_kwargs.top_k", "val_kwargs.temperature", "val_kwargs.n", "val_kwargs.do_sample"),
        "a suite of an evaluate stage has samples, temperature, top_k and top_p",
    ),
    "reward_manager": "the reward is your function, called by the names of its parameters",
    "overlong_buffer.enable": "kind: dapo has overlong: {buffer, penalty}",
    "filter_groups.enable": "kind: dapo replaces groups without a learning signal",
    "n_gpus_per_node": "placement: assigns devices to roles",
    "nnodes": "placement: assigns devices to roles",
    "total_training_steps": "the field steps sets this number",
    "custom_cls.path": "rows are read unchanged; write another file",
    "val_files": "add an evaluate stage with a suite, and a gate on it",
}
_HARMLESS = frozenset(  # settings without effect on the result
    (  # noqa: SIM905
        "strategy use_dynamic_bsz ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu param_offload optimizer_offload offload_policy fsdp_size forward_prefetch "
        "reshard_after_forward use_remove_padding gpu_memory_utilization tensor_model_parallel_size enforce_eager "
        "free_cache_engine max_num_batched_tokens max_num_seqs max_model_len enable_chunked_prefill load_format "
        "name mode project_name logger val_before_train val_batch_size default_local_dir default_hdfs_dir "
        "save_freq test_freq resume_mode max_actor_ckpt_to_keep max_critic_ckpt_to_keep log_val_generations "
        "balance_batch num_workers filter_overlong_prompts max_prompt_length truncation prompt_key reward_fn_key "
        "return_raw_chat shuffle trust_remote_code dtype hybrid_engine nccl_timeout use_shm use_liger device "
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu "
        "calculate_log_probs image_key video_key return_raw_input_ids do_sample total_epochs enable min_num_params "
        "_target_ "
    ).split()
)


def from_verl(settings: Settings, rows: int | None = None) -> Draft:
    """Return a draft of a run file with one stage that trains as the verl settings do.

    Args:
        rows: number of rows of the training data; None if unknown: shares of the steps then become placeholders.

    Raises:
        InputError: the advantage estimator has no counterpart in Posttrain, or a value is not a number.
    """
    name = str(settings.take("trainer.experiment_name", default=Path(settings.source).stem))
    name = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:40] or "verl"
    draft = Draft(settings.source, "verl", {"name": name, "owner": "me", "seed": 1})
    estimator = str(settings.take("algorithm.adv_estimator", default="gae"))
    if estimator not in _ESTIMATORS:
        raise InputError(
            f"{settings.source}: algorithm.adv_estimator: must be one of {', '.join(_ESTIMATORS)}, got {estimator!r}"
        )
    kind = "grpo" if _ESTIMATORS[estimator] else "ppo"
    path = settings.take(f"{_MODEL}.path")
    draft.run["model"] = draft.model(settings, path, "main")
    if path:
        draft.carry(f"{_MODEL}.path", path, "model", draft.run["model"])
    draft.run["data"] = {"train": _data(settings, draft)}
    draft.run["rewards"] = {"reward": _reward(settings, draft)}
    stage = _stage(settings, draft, kind)
    if kind == "grpo":
        stage["advantage"] = _ESTIMATORS[estimator]
        if not settings.flag("algorithm.norm_adv_by_std_in_grpo", default=True) and estimator.startswith("grpo"):
            stage["advantage"] = "dr_grpo"
        stage["aggregation"] = str(settings.take(f"{_ACTOR}.loss_agg_mode", default="token-mean"))
        if stage["aggregation"] not in _AGGREGATIONS:
            draft.changed.append(f"loss_agg_mode: {stage['aggregation']}: is not supported; token-mean is used")
            stage["aggregation"] = "token-mean"
    else:
        _critic(settings, stage)
    _kl(settings, draft, stage, kind)
    if rank := settings.count(f"{_MODEL}.lora_rank", default=0):
        targets = settings.take(f"{_MODEL}.target_modules", default="all-linear")
        names = [targets] if isinstance(targets, str) else targets
        stage["adapter"] = {
            "lora": {
                "rank": rank,
                "alpha": settings.number(f"{_MODEL}.lora_alpha", default=16),
                "targets": "auto" if list(names) == ["all-linear"] else sorted(names),
            }
        }
        draft.carry(f"{_MODEL}.lora_rank", rank, "adapter.lora.rank", rank)
    steps = _length(settings, draft, stage, rows)
    stage["optimizer"] = _optimizer(settings, draft, f"{_ACTOR}.", 1e-6, steps)
    if kind == "ppo":
        stage["critic"]["optimizer"] = _optimizer(settings, draft, "critic.", 1e-5, steps)
        _carry_optimizer(draft, "critic.optim", "critic.optimizer", stage["critic"]["optimizer"])
    _carry_optimizer(draft, f"{_ACTOR}.optim", "optimizer", stage["optimizer"])
    runtime = _runtime(settings)
    draft.run["stages"] = {kind: {**stage, **({"runtime": runtime} if runtime else {})}}
    return draft.close(settings, _CHANGES, _HARMLESS)


def _carry_optimizer(draft: Draft, theirs: str, ours: str, became: dict[str, Any]) -> None:
    rate = f"{became['learning_rate']:g}"
    draft.carry(theirs, f"lr {rate}", ours, f"learning_rate {rate}, schedule {became['schedule']}")


def _data(settings: Settings, draft: Draft) -> str:
    files = settings.take("data.train_files")
    names = [str(one) for one in (files if isinstance(files, list) else [files]) if one]
    if len(names) == 1 and "$" not in names[0]:
        draft.carry("data.train_files", names[0], "data.train", names[0])
        return names[0] if names[0].startswith((".", "/", "~")) else f"./{names[0]}"
    draft.fill_in.append(f"register the training rows: posttrain asset add dataset:train {' '.join(names) or 'FILE'}")
    return "dataset:train"


def _reward(settings: Settings, draft: Draft) -> str:
    path = settings.take("custom_reward_function.path", "reward.custom_reward_function.path")
    name = settings.take("custom_reward_function.name", "reward.custom_reward_function.name", default="compute_score")
    if not path:
        draft.changed.append(
            "reward: verl chooses a reward by data_source; here the reward is a file: write compute_score, or copy "
            "verl's function"
        )
    draft.fill_in.append(f"register the reward: posttrain asset add reward:reward {path or 'reward.py'} --entry {name}")
    return "reward:reward"


def _stage(settings: Settings, draft: Draft, kind: str) -> dict[str, Any]:
    prompts = settings.count("data.train_batch_size", "data.gen_batch_size", default=1024)
    group = settings.count(f"{_ROLLOUT}.n", default=1)
    mini = settings.count(f"{_ACTOR}.ppo_mini_batch_size", default=256)
    stage: dict[str, Any] = {
        **{"kind": kind, "data": "train", "reward": "reward", "prompts_per_step": prompts},
        "group_size": max(group, 2) if kind == "grpo" else group,
        "mini_batches": max(1, prompts // mini),
        "max_new_tokens": settings.count("data.max_response_length", f"{_ROLLOUT}.response_length", default=512),
        "temperature": settings.number(f"{_ROLLOUT}.temperature", default=1.0),
    }
    if stage["group_size"] != group:
        draft.changed.append(f"{_ROLLOUT}.n: {group}: a group of one response has no baseline, so group_size is 2")
    draft.stops(settings, stage, f"{_ROLLOUT}.stop")
    both = settings.number(f"{_ACTOR}.clip_ratio", default=0.2)
    stage["clip_low"] = settings.number(f"{_ACTOR}.clip_ratio_low", default=both)
    stage["clip_high"] = settings.number(f"{_ACTOR}.clip_ratio_high", default=both)
    epochs = settings.count(f"{_ACTOR}.ppo_epochs", default=1)
    if kind == "ppo":
        stage["ppo_epochs"] = epochs
    elif epochs > 1:
        draft.changed.append(f"{_ACTOR}.ppo_epochs: {epochs}: each rollout batch is used once")
    draft.carry("data.train_batch_size", prompts, "prompts_per_step", prompts)
    draft.carry(f"{_ROLLOUT}.n", group, "group_size", stage["group_size"])
    draft.carry(f"{_ACTOR}.ppo_mini_batch_size", mini, "mini_batches", stage["mini_batches"])
    draft.carry("data.max_response_length", stage["max_new_tokens"], "max_new_tokens", stage["max_new_tokens"])
    return stage


def _critic(settings: Settings, stage: dict[str, Any]) -> None:
    stage |= {
        "gae": {
            "gamma": settings.number("algorithm.gamma", default=1.0),
            "lam": settings.number("algorithm.lam", default=1.0),
        },
        "critic": {
            "clip": settings.number("critic.cliprange_value", default=0.5),
            "warmup": settings.count("trainer.critic_warmup", default=0),
        },
    }


def _kl(settings: Settings, draft: Draft, stage: dict[str, Any], kind: str) -> None:
    coefficient = settings.number(f"{_ACTOR}.kl_loss_coef", default=0.001)
    written = str(settings.take(f"{_ACTOR}.kl_loss_type", default="low_var_kl")).rstrip("+")
    estimator = _ESTIMATES.get(written, "k3")
    in_reward = settings.number("algorithm.kl_ctrl.kl_coef", default=0.001)
    penalty = str(settings.take("algorithm.kl_penalty", default="kl")).rstrip("+")
    if kind == "ppo":
        stage["kl"] = None
    if settings.flag(f"{_ACTOR}.use_kl_loss"):
        estimator = "k3" if estimator == "k1" else estimator  # k1 has no gradient in the loss
        stage["kl"] = {"coefficient": coefficient, "estimator": estimator}
        stage["kl"] |= {"place": "loss"} if kind == "ppo" else {}
        draft.carry(f"{_ACTOR}.kl_loss_coef", coefficient, "kl.coefficient", coefficient)
    elif settings.flag("algorithm.use_kl_in_reward"):
        if kind == "grpo":
            draft.changed.append("use_kl_in_reward: grpo has the penalty in the loss; kl: {coefficient: …} enables it")
        else:
            stage["kl"] = {"coefficient": in_reward, "estimator": _ESTIMATES.get(penalty, "k1"), "place": "reward"}


def _length(settings: Settings, draft: Draft, stage: dict[str, Any], rows: int | None) -> int | None:
    """Set `steps` or `epochs` of the stage; return the number of steps, or None if it is unknown."""
    most = settings.count("trainer.total_training_steps", default=-1)
    epochs = settings.number("trainer.total_epochs", default=30.0)
    if most > 0:
        draft.carry("trainer.total_training_steps", most, "steps", most)
        stage["steps"] = most
        return most
    per_step = int(stage["prompts_per_step"])
    stage["epochs"] = plainly(epochs)
    draft.carry("trainer.total_epochs", plainly(epochs), "epochs", plainly(epochs))
    if rows is None or rows % per_step:
        draft.changed.append(
            f"total_epochs: {epochs:g}: verl drops the last rows of an epoch that do not fill a step; here the step "
            "is filled from the next epoch"
        )
    return passes_of(epochs, rows, per_step).steps if rows else None


def _optimizer(settings: Settings, draft: Draft, place: str, rate: float, steps: int | None) -> dict[str, Any]:
    style = str(settings.take(f"{place}optim.warmup_style", f"{place}optim.lr_scheduler_type", default="constant"))
    warmup = settings.count(f"{place}optim.lr_warmup_steps", default=-1)
    share = settings.number(f"{place}optim.lr_warmup_steps_ratio", default=0.0)
    return {
        "learning_rate": settings.number(f"{place}optim.lr", default=rate),
        "betas": [0.9, 0.999],
        "weight_decay": settings.number(f"{place}optim.weight_decay", default=0.01),
        "warmup_steps": warmup
        if warmup >= 0
        else share_of_steps(draft, f"{place}optim.lr_warmup_steps_ratio", share, steps),
        "schedule": "cosine" if style == "cosine" else "constant",
        "final_ratio": settings.number(f"{place}optim.min_lr_ratio", default=0.0) if style == "cosine" else 1.0,
        "max_grad_norm": settings.number(f"{place}grad_clip", default=1.0),
    }


def _runtime(settings: Settings) -> dict[str, Any]:
    recomputed = settings.flag(f"{_MODEL}.enable_gradient_checkpointing")
    parallel = settings.count(f"{_ACTOR}.ulysses_sequence_parallel_size", default=1)
    return {
        **({"activation_checkpointing": True} if recomputed else {}),
        **({"sequence_parallel": parallel} if parallel > 1 else {}),
    }
