"""The meaning of fields whose comment is missing, or is for developers: this is on the page instead."""

from __future__ import annotations

from collections.abc import Mapping

from handbook.comments import comment

# field, where the source has no comment; or Model.field, which replaces a comment → one line
MEANINGS: Mapping[str, str] = {
    "RunSpec.name": "the run's id is NAME-<8 random letters and digits>",
    "owner": "who answers for it; recorded",
    "RunSpec.seed": "every random number is derived from it; `--seed` replaces it",
    "RunSpec.data": "name in this file → ref: `dataset:NAME@VERSION`, a path, `hf:…`",
    "rewards": "name in this file → a ref, or a map with what its code gets besides",
    "stages": "name → stage; `base`, `gate`, `release` and `baseline-…` are reserved",
    "gates": "all must pass before anything is released; they need a release",
    "budget": "hard limits of the run",
    "Budget.tokens": "read, generated and trained on, in all stages together",
    "Budget.wall_clock": "the sum of job time of all stages",
    "experiment": "of MLflow; made where it is not there",
    "project": "of Weights & Biases",
    "csv": "a CSV file for each run",
    "parquet": "a Parquet file for each run",
    "tensorboard": "a folder of event files for each run",
    "mlflow": "a run of an MLflow experiment",
    "wandb": "a run of a Weights & Biases project",
    "RunSpec.runtime": "of the jobs of stages that set no other value",
    "RunSpec.release": "where the model goes; needs at least one gate, here or in the policy of its channel",
    "StageSpec.kind": "its kind, whose fields are next to it",
    "StageSpec.trainer": "what computes it",
    "at_most": "in units of the metric",
    "ReleaseSpec.channel": "the channel that is moved",
    "ReleaseSpec.model": "the stage whose model the gates judge and the channel gets",
    "model": "the initial model: `base`, or a stage of this file that makes a model",
    "EvaluateConfig.model": "the measured model: `base`, or a stage of this file that makes a model",
    "data": "a name from `data:`",
    "reward": "a name from `rewards:`",
    "PPOConfig.reward_model": "a stage of that kind; exactly one of it and `reward` is given",
    "TrainingConfig.steps": "optimiser steps, or rollout batches; set either `steps` or `epochs` (0: unset)",
    "TrainingConfig.epochs": "number of passes over the data; may be a fraction",
    "ReleaseSpec.after": "stages that must have ended before the release; `gate` is the judging of the gates",
    "PPOKLConfig.estimator": "k1 is unbiased, in the reward only; k3-corrected is for the loss only",
    "LagConfig.steps": "by which the policy that samples is behind the policy that is trained; 0: only a correction",
    "InferenceRuntimeConfig.kv_cache": "bytes of keys and values on one rollout rank; auto: the rest of its memory",
    "RuntimeConfig.start_timeout": "seconds for a role's ranks to be up with their model",
    "RuntimeConfig.call_timeout": "seconds for one call of a worker, and for an engine that does not answer",
    "RuntimeConfig.micro_batch_tokens": "tokens of one forward pass; auto: 4096 on CPU, 16384 on CUDA, and fewer where "
    "these do not fit",
    "RunSpec.image": "`REGISTRY/NAME@sha256:…`: the container image of all jobs but those that measure",
    "RewardUse.dialect": "the convention of its parameters; none: as registered, or auto",
    "prompts_per_step": "prompts that a step samples responses to",
    "max_new_tokens": "maximum tokens of a response",
    "temperature": "sampling temperature; 1 samples from the policy's own distribution",
    "clip_low": "the ratio's lower bound is 1 - this",
    "clip_high": "the ratio's upper bound is 1 + this",
    "probe": "a small measurement every `every` steps, for the training curve",
    "trace": "the groups whose samples are recorded in full",
    "optimizer": "AdamW, its rate and its schedule",
    "runtime": "device, types, checkpoints",
    "placement": "`collocated`, or which role runs in which pool",
    "advantage": "`grpo`: by the group's mean and spread; `dr_grpo`: by its mean; `rloo`: by the mean of the others",
    "aggregation": "losses are averaged over all tokens, over responses each by its length, or by `max_new_tokens`",
    "divergence": "KL(teacher ‖ student), KL(student ‖ teacher), or Jensen-Shannon's between them",
    "kl": "a penalty for leaving the starting policy; none: no reference is loaded",
    "PPOConfig.kl": "a penalty for leaving the starting policy; null: no reference is loaded",
    "gae": "how advantages come from values",
    "critic": "the value model's optimiser, clip and warm-up",
    "suites": "name → suite; the name is the first part of its metrics",
    "learning_rate": "the peak, after the warm-up",
    "betas": "AdamW's decays of first and second moment",
    "schedule": "of the rate, over the steps after the warm-up",
    "final_ratio": "where the schedule ends, as a share of the peak",
    "max_grad_norm": "a longer gradient is scaled down to it",
    "device": "auto: cuda where there is one",
    "coefficient": "weight of the penalty",
    "place": "taken off the reward of every token, or added to the loss",
    "ProbeConfig.data": "a name of `data:`; its rows need answers",
    "items": "rows that are answered, the first so many",
    "extract": "group 1 of its last match in the response is compared with the row's answer",
    "SuiteConfig.data": "a name of `data:`; its rows need prompt and answer",
    "policy": "its pool; roles that are not mentioned live here",
    "Placement.critic": "its pool, or whose it shares",
    "reference": "its pool, or whose it shares",
    "Placement.reward_model": "its pool, or whose it shares",
    "Placement.teacher": "its pool, or whose it shares",
    "rollout": "its pool, or whose it shares",
    "gpus": "of the whole pool, dealt out evenly to its ranks",
    "with": "another role, in whose pool this one lives; stands alone",
    "for": "time from the stage's turn until it ends",
    "signal": "name of the signal that ends it (`posttrain signal`)",
    "architecture": "whose modelling code of transformers it is",
    "hidden_size": "width of the residual stream; a multiple of `heads`",
    "intermediate_size": "width of the MLP",
    "layers": "transformer layers",
    "heads": "attention heads; a multiple of `kv_heads`",
    "kv_heads": "heads of keys and values",
    "context_length": "tokens of prompt and response together",
}


def meaning(model: type, name: str, word: str) -> str:
    """Return the line for a field; empty where there is none.

    Args:
        model: the model that has it.
        name: the field's name there.
        word: its name in run.yaml.
    """
    written = (MEANINGS[key] for kind in model.__mro__ if (key := f"{kind.__name__}.{word}") in MEANINGS)
    return next(written, "") or comment(model, name) or MEANINGS.get(word, "")
