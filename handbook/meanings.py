"""Meanings of fields whose comment is missing or meant for developers; pages show these instead."""

from __future__ import annotations

from collections.abc import Mapping

from handbook.comments import comment

# field (if the source has no comment) or Model.field (replaces a comment) → one line
MEANINGS: Mapping[str, str] = {
    "RunSpec.name": "the run's id is NAME-<8 random letters and digits>",
    "owner": "the responsible person; recorded",
    "RunSpec.seed": "every random number is derived from it; `--seed` replaces it",
    "RunSpec.data": "name in this file → ref: `dataset:NAME@VERSION`, a path, `hf:…`",
    "rewards": "name in this file → a ref, or a map with further inputs of its code",
    "stages": "name → stage; `base`, `gate`, `release` and `baseline-…` are reserved",
    "gates": "all must pass before anything is released; requires `release`",
    "budget": "hard limits of the run",
    "Budget.tokens": "tokens that are read, generated and trained on, in all stages together",
    "Budget.wall_clock": "the sum of job time of all stages",
    "RunSpec.trackers": "a list of trackers, or a map with their settings; none: the workspace's trackers",
    "experiment": "MLflow's experiment; created if it does not exist",
    "project": "the project in Weights & Biases",
    "csv": "a CSV file for each run",
    "parquet": "a Parquet file for each run",
    "tensorboard": "a folder of event files for each run",
    "mlflow": "a run of an MLflow experiment",
    "wandb": "a run of a Weights & Biases project",
    "RunSpec.runtime": "settings for the jobs of all stages that do not set their own",
    "RunSpec.release": "the channel that receives the model; requires a gate, in this file or in the channel's policy",
    "StageSpec.kind": "the kind of the stage; the fields of that kind are set next to this field",
    "StageSpec.trainer": "the trainer that computes the stage",
    "at_least": "required minimum, in units of the metric",
    "at_most": "allowed maximum, in units of the metric",
    "GateRule.by": "required gain, in units of the metric; default for `better_than`: 0",
    "GateRule.margin": "allowed loss, in units of the metric; required by `not_worse_than`",
    "GateRule.direction": "which direction is better; default for `better_than` and `not_worse_than`: `higher`",
    "GateRule.if_channel_empty": "the verdict if the channel has no release; only with `channel`; default: `fail`",
    "GateRule.confidence": "of the one-sided limit; 0.95 is the lower end of a two-sided 90 % interval",
    "SuiteConfig.temperature": "of the sampled responses; the next three fields also apply only to them",
    "SuiteConfig.pass_at": "the values of k for pass@k, each <= samples",
    "TraceConfig.bytes": "maximum bytes that a stage records; later samples are only counted",
    "LagConfig.cap": "maximum weight of a token with `tis`; none: 2.0",
    "RuntimeConfig.checkpoint_every": "steps between checkpoints",
    "RuntimeConfig.save_dtype": "dtype of the output model; auto: the dtype in which the stage computes",
    "RewardUse.network": "hosts and ports (`HOST:PORT`) to which the reward may connect",
    "RewardUse.files": "files next to run.yaml, which the reward can read next to its source",
    "OverlongConfig.buffer": "number of tokens before the limit, over which the penalty grows",
    "OverlongConfig.penalty": "the penalty at the limit",
    "EarlyStoppingConfig.min_delta": "a gain counts as an improvement if it exceeds this, in units of the metric",
    "LossProbeConfig.items": "number of rows that are measured, beginning with the first",
    "LossProbeConfig.every": "steps between measurements; there is also one before the first step and one at the end",
    "AdvantageConfig.gamma": "discount per token; below 1, late rewards count less",
    "OptimizerConfig.warmup_steps": "steps of linear warm-up; Adam needs them, as its moments are zero at the start",
    "Resources.cpus": "cores reserved for the pool; none: no reservation, and ranks share the cores of the machine",
    "Resources.ranks": "number of processes; none: one per GPU, else one per CPU, else one",
    "Budget.attempts": "maximum attempts per stage, for infrastructure failures",
    "ReleaseSpec.channel": "the channel that is moved",
    "ReleaseSpec.model": "the stage whose model the gates judge and the channel receives",
    "model": "the initial model: `base`, or a stage of this file that outputs a model",
    "EvaluateConfig.model": "the measured model: `base`, or a stage of this file that outputs a model",
    "data": "a name from `data:`",
    "reward": "a name from `rewards:`",
    "PPOConfig.reward_model": "a stage of kind `reward_model`; set either this or `reward`",
    "TrainingConfig.steps": "number of optimiser steps (kinds that sample: of rollout batches); set either `steps` or "
    "`epochs` (0: unset)",
    "TrainingConfig.epochs": "number of passes over the data; may be a fraction",
    "ReleaseSpec.after": "stages that must have ended before the release; `gate` stands for the gate report",
    "PPOKLConfig.estimator": "k1 is unbiased and allowed in the reward only; k3-corrected is allowed in the loss only",
    "LagConfig.steps": "steps by which the sampling policy is behind the trained policy; 0: only a correction",
    "InferenceRuntimeConfig.kv_cache": "bytes of keys and values on one rollout rank; auto: the memory that other "
    "uses of the rank leave free",
    "RuntimeConfig.start_timeout": "maximum seconds until the ranks of a role have started and loaded their model",
    "RuntimeConfig.call_timeout": "maximum seconds of one call of a worker, and of a rollout engine's silence",
    "RuntimeConfig.micro_batch_tokens": "tokens of one forward pass; auto: 4096 on CPU, 16384 on CUDA, and fewer if "
    "these do not fit",
    "RunSpec.image": "`REGISTRY/NAME@sha256:…`: the container image of all jobs but those that measure",
    "RewardUse.dialect": "the convention of the function's parameters; none: as registered, or auto",
    "prompts_per_step": "prompts for which a step samples responses",
    "max_new_tokens": "maximum tokens of a response",
    "temperature": "sampling temperature; 1 samples from the policy's own distribution",
    "clip_low": "the ratio's lower bound is 1 - this",
    "clip_high": "the ratio's upper bound is 1 + this",
    "probe": "a small measurement every `every` steps, for the training curve",
    "trace": "number of groups whose samples are recorded in full",
    "optimizer": "AdamW, its learning rate and its schedule",
    "runtime": "device, dtypes, checkpoints",
    "placement": "`collocated`, or a map of roles to pools",
    "advantage": "`grpo`: relative to the group's mean, in standard deviations; `dr_grpo`: relative to that mean; "
    "`rloo`: relative to the mean of the group's other samples",
    "aggregation": "mean over all tokens, or over responses, each divided by its length or by `max_new_tokens`",
    "divergence": "KL(teacher ‖ student), KL(student ‖ teacher), or the Jensen-Shannon divergence between them",
    "kl": "a penalty for leaving the starting policy; none: no reference is loaded",
    "PPOConfig.kl": "a penalty for leaving the starting policy; null: no reference is loaded",
    "gae": "how advantages are computed from values",
    "critic": "the value model's optimiser, clip and warm-up",
    "suites": "name → suite; the name is the first part of its metrics",
    "learning_rate": "the peak, after the warm-up",
    "betas": "AdamW's decays of first and second moment",
    "schedule": "shape of the learning rate over the steps after the warm-up",
    "final_ratio": "final learning rate, as a share of the peak",
    "max_grad_norm": "a longer gradient is scaled down to this norm",
    "device": "auto: cuda if the machine has a GPU",
    "coefficient": "weight of the penalty",
    "place": "subtracted from the reward of every token, or added to the loss",
    "ProbeConfig.data": "a name of `data:`; its rows need answers",
    "items": "number of rows that are answered, beginning with the first",
    "extract": "group 1 of the last match of this expression in the response is compared with the row's answer",
    "SuiteConfig.data": "a name of `data:`; its rows need prompt and answer",
    "policy": "the pool of this role; roles that are not mentioned share it",
    "Placement.critic": "the pool of this role, or `with`: a role whose pool it shares",
    "reference": "the pool of this role, or `with`: a role whose pool it shares",
    "Placement.reward_model": "the pool of this role, or `with`: a role whose pool it shares",
    "Placement.teacher": "the pool of this role, or `with`: a role whose pool it shares",
    "rollout": "the pool of this role, or `with`: a role whose pool it shares",
    "gpus": "GPUs of the whole pool, divided evenly among its ranks",
    "with": "a role whose pool this role shares; excludes the other fields",
    "for": "time from the beginning of the wait until the stage ends",
    "signal": "name of the signal that ends the stage (`posttrain signal`)",
    "architecture": "the model family whose code in transformers is used",
    "hidden_size": "width of the residual stream; a multiple of `heads`",
    "intermediate_size": "width of the MLP",
    "layers": "transformer layers",
    "heads": "attention heads; a multiple of `kv_heads`",
    "kv_heads": "heads of keys and values",
    "context_length": "maximum tokens of prompt and response together",
}


def meaning(model: type, name: str, word: str) -> str:
    """Return the line for a field, or an empty text.

    Args:
        model: the model with the field.
        name: the field's name in the model.
        word: the field's name in run.yaml.
    """
    written = (MEANINGS[key] for kind in model.__mro__ if (key := f"{kind.__name__}.{word}") in MEANINGS)
    return next(written, "") or comment(model, name) or MEANINGS.get(word, "")
