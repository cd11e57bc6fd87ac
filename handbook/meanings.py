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
    "gates": "all must pass before anything is released; they need a release",
    "budget": "hard limits of the run",
    "Budget.tokens": "read, generated and trained on, in all stages together",
    "Budget.wall_clock": "the sum of job time of all stages",
    "experiment": "MLflow's experiment; created if it does not exist",
    "project": "the project in Weights & Biases",
    "csv": "a CSV file for each run",
    "parquet": "a Parquet file for each run",
    "tensorboard": "a folder of event files for each run",
    "mlflow": "a run of an MLflow experiment",
    "wandb": "a run of a Weights & Biases project",
    "RunSpec.runtime": "for the jobs of stages that do not set their own",
    "RunSpec.release": "the channel for the model; needs at least one gate, here or in the policy of the channel",
    "StageSpec.kind": "the kind of the stage; the fields of that kind are next to this field",
    "StageSpec.trainer": "the trainer that computes the stage",
    "at_most": "in units of the metric",
    "ReleaseSpec.channel": "the channel that is moved",
    "ReleaseSpec.model": "the stage whose model the gates judge and the channel receives",
    "model": "the initial model: `base`, or a stage of this file that makes a model",
    "EvaluateConfig.model": "the measured model: `base`, or a stage of this file that makes a model",
    "data": "a name from `data:`",
    "reward": "a name from `rewards:`",
    "PPOConfig.reward_model": "a stage of that kind; set either this or `reward`",
    "TrainingConfig.steps": "optimiser steps, or rollout batches; set either `steps` or `epochs` (0: unset)",
    "TrainingConfig.epochs": "number of passes over the data; may be a fraction",
    "ReleaseSpec.after": "stages that must have ended before the release; `gate` is the judging of the gates",
    "PPOKLConfig.estimator": "k1 is unbiased, in the reward only; k3-corrected is for the loss only",
    "LagConfig.steps": "steps by which the sampling policy is behind the trained policy; 0: only a correction",
    "InferenceRuntimeConfig.kv_cache": "bytes of keys and values on one rollout rank; auto: the rest of its memory",
    "RuntimeConfig.start_timeout": "seconds until a role's ranks must have loaded their model",
    "RuntimeConfig.call_timeout": "maximum seconds of one call of a worker, and of an engine without an answer",
    "RuntimeConfig.micro_batch_tokens": "tokens of one forward pass; auto: 4096 on CPU, 16384 on CUDA, and fewer if "
    "these do not fit",
    "RunSpec.image": "`REGISTRY/NAME@sha256:…`: the container image of all jobs but those that measure",
    "RewardUse.dialect": "the convention of its parameters; none: as registered, or auto",
    "prompts_per_step": "prompts for which a step samples responses",
    "max_new_tokens": "maximum tokens of a response",
    "temperature": "sampling temperature; 1 samples from the policy's own distribution",
    "clip_low": "the ratio's lower bound is 1 - this",
    "clip_high": "the ratio's upper bound is 1 + this",
    "probe": "a small measurement every `every` steps, for the training curve",
    "trace": "the groups whose samples are recorded in full",
    "optimizer": "AdamW, its rate and its schedule",
    "runtime": "device, types, checkpoints",
    "placement": "`collocated`, or a map of roles to pools",
    "advantage": "`grpo`: by the group's mean and spread; `dr_grpo`: by its mean; `rloo`: by the mean of the others",
    "aggregation": "mean over all tokens, or over responses that are divided by their length or by `max_new_tokens`",
    "divergence": "KL(teacher ‖ student), KL(student ‖ teacher), or Jensen-Shannon's between them",
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
    "items": "number of rows that are answered, from the first",
    "extract": "group 1 of its last match in the response is compared with the row's answer",
    "SuiteConfig.data": "a name of `data:`; its rows need prompt and answer",
    "policy": "the pool of this role; roles that are not mentioned share it",
    "Placement.critic": "the pool of this role, or a role whose pool it shares",
    "reference": "the pool of this role, or a role whose pool it shares",
    "Placement.reward_model": "the pool of this role, or a role whose pool it shares",
    "Placement.teacher": "the pool of this role, or a role whose pool it shares",
    "rollout": "the pool of this role, or a role whose pool it shares",
    "gpus": "GPUs of the whole pool, divided evenly among its ranks",
    "with": "a role whose pool this role shares; excludes the other fields",
    "for": "time from the stage's turn until it ends",
    "signal": "name of the signal that ends it (`posttrain signal`)",
    "architecture": "the model family whose code in transformers is used",
    "hidden_size": "width of the residual stream; a multiple of `heads`",
    "intermediate_size": "width of the MLP",
    "layers": "transformer layers",
    "heads": "attention heads; a multiple of `kv_heads`",
    "kv_heads": "heads of keys and values",
    "context_length": "tokens of prompt and response together",
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
