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
    "rewards": "name in this file → a ref, or a map of the ref and further inputs of the reward's code",
    "stages": "name → stage; `base`, `gate`, `release` and `baseline-…` are reserved",
    "gates": "all must pass before anything is released; requires `release`",
    "budget": "hard limits of the run",
    "Budget.tokens": "maximum number of tokens that all stages together read, generate and train on",
    "Budget.wall_clock": "maximum sum of the job times of all stages",
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
    "GateRule.margin": "allowed decrease in quality, in units of the metric; required by `not_worse_than`",
    "GateRule.direction": "which direction is better; default for `better_than` and `not_worse_than`: `higher`",
    "GateRule.if_channel_empty": "the verdict if the channel has no release; only with `channel`; default: `fail`",
    "GateRule.confidence": "confidence of the one-sided limit; at 0.95, the limit is one end of a two-sided 90 % "
    "interval",
    "SuiteConfig.temperature": "temperature of the sampled responses; the next three fields also apply only to sampled "
    "responses",
    "SuiteConfig.pass_at": "the values of k for pass@k, each at most `samples`",
    "TraceConfig.bytes": "maximum bytes that a stage records; later samples are only counted",
    "LagConfig.cap": "maximum weight of a token with `tis`; none: 2.0",
    "RuntimeConfig.checkpoint_every": "steps between checkpoints",
    "RuntimeConfig.save_dtype": "dtype of the output model; auto: the dtype in which the stage computes",
    "RewardUse.network": "hosts and ports (`HOST:PORT`) to which the reward may connect",
    "RewardUse.files": "files next to run.yaml that are placed, read-only, next to the reward's source",
    "OverlongConfig.buffer": "number of tokens before `max_new_tokens` over which the penalty grows",
    "OverlongConfig.penalty": "the penalty of a response with `max_new_tokens` tokens",
    "EarlyStoppingConfig.min_delta": "a gain counts as an improvement if it exceeds this value, in units of the metric",
    "LossProbeConfig.items": "number of rows on which the model is measured, beginning with the first",
    "LossProbeConfig.every": "steps between measurements; further measurements are made before the first step and at "
    "the end",
    "AdvantageConfig.gamma": "discount per token; below 1, late rewards count less",
    "OptimizerConfig.warmup_steps": "steps of linear warm-up; Adam needs a warm-up because its moments are zero at the "
    "start",
    "Resources.cpus": "cores reserved for the pool; none: no reservation, and ranks share the cores of the machine",
    "Resources.ranks": "number of processes; none: one per GPU; without GPUs, one per CPU; with neither, one",
    "Budget.attempts": "maximum number of attempts of a stage whose jobs end because of infrastructure failures",
    "ReleaseSpec.channel": "the channel that the release moves",
    "ReleaseSpec.model": "the stage whose model the gates judge and the channel receives",
    "model": "the initial model: `base`, or a stage of this file that outputs a model",
    "EvaluateConfig.model": "the measured model: `base`, or a stage of this file that outputs a model",
    "HarnessConfig.model": "the measured model: `base`, or a stage of this file that outputs a model",
    "HarnessConfig.tasks": "tasks or groups; none: all tasks for which the harness was fetched",
    "ServedConfig.key": "with url: the variable of the driver's environment with the key, which only the callers of "
    "the model get",
    "ServedConfig.url": "the address of another server, such as that of vLLM or SGLang, up to `/v1`",
    "ServedConfig.runtime": "with serve: device, dtype, threads, and the memory of keys and values",
    "data": "a name from `data:`",
    "reward": "a name from `rewards:`",
    "TrainingConfig.steps": "number of optimiser steps or, in kinds that sample, of rollout batches; set either "
    "`steps` or `epochs` (0: not set)",
    "TrainingConfig.epochs": "number of passes over the data; may be a fraction",
    "ReleaseSpec.after": "stages that must have ended before the release; `gate` stands for the gate report",
    "PPOKLConfig.estimator": "k1 is unbiased and allowed in the reward only; k3-corrected is allowed in the loss only",
    "LagConfig.steps": "steps by which the sampling policy is behind the trained policy; 0: no lag, only the "
    "correction",
    "InferenceRuntimeConfig.kv_cache": "maximum bytes of keys and values on one rollout rank; auto: the memory that "
    "the rank does not use otherwise",
    "RuntimeConfig.start_timeout": "maximum seconds until the ranks of a role have started and loaded their model",
    "RuntimeConfig.call_timeout": "maximum seconds for one call of a worker, and maximum time in which a rollout "
    "engine returns nothing",
    "RuntimeConfig.micro_batch_tokens": "tokens of one forward pass; auto: 4096 on CPU, 16384 on CUDA, and fewer if "
    "these do not fit",
    "RunSpec.image": "`REGISTRY/NAME@sha256:…`: the container image of all jobs except those that measure a model",
    "RewardUse.dialect": "the convention of the function's parameters; none: the registered dialect, or else auto",
    "prompts_per_step": "prompts for which a step samples responses",
    "max_new_tokens": "maximum tokens of a response",
    "temperature": "sampling temperature; at 1, responses are drawn from the policy's own distribution",
    "CISPOConfig.clip_low": "the weight of a token is at least 1 - `clip_low`; 1: no lower limit, as in the paper",
    "CISPOConfig.clip_high": "the weight of a token is at most 1 + `clip_high`",
    "clip_low": "the ratio's lower bound is 1 - `clip_low`",
    "clip_high": "the ratio's upper bound is 1 + `clip_high`",
    "probe": "a small measurement every `every` steps, for the training curve",
    "trace": "number of groups whose samples are recorded in full",
    "optimizer": "AdamW, its learning rate and its schedule",
    "runtime": "device, dtypes, checkpoints",
    "placement": "`collocated`, or a map of roles to pools",
    "advantage": "`grpo`: relative to the group's mean, in standard deviations; `dr_grpo`: relative to that mean; "
    "`rloo`: relative to the mean of the group's other samples",
    "aggregation": "mean over all tokens, or over responses whose loss is divided by the response's length or by "
    "`max_new_tokens`",
    "divergence": "KL(teacher ‖ student), KL(student ‖ teacher), or the Jensen-Shannon divergence between them",
    "kl": "a penalty for deviating from the starting policy; none: no reference is loaded",
    "PPOConfig.kl": "a penalty for deviating from the starting policy; null: no reference is loaded",
    "gae": "how advantages are computed from values",
    "critic": "the value model's optimiser, clip and warm-up",
    "suites": "name → suite; the names of the suite's metrics begin with this name",
    "learning_rate": "the peak, after the warm-up",
    "betas": "AdamW's decay rates for the first and second moments",
    "schedule": "shape of the learning rate over the steps after the warm-up",
    "final_ratio": "final learning rate, as a share of the peak",
    "max_grad_norm": "a gradient with a larger norm is scaled down to this norm",
    "device": "auto: cuda if the machine has a GPU",
    "coefficient": "weight of the penalty",
    "place": "reward: the penalty is subtracted from the reward of every token; loss: the penalty is added to the loss",
    "ProbeConfig.data": "a name from `data:`; its rows need answers if the kind samples, else the training columns",
    "items": "number of rows that are answered, beginning with the first",
    "extract": "group 1 of the last match of this expression in the response is compared with the row's answer",
    "SuiteConfig.data": "a name from `data:`; the rows of this data set need a prompt and an answer",
    "policy": "the pool of this role; roles that are not mentioned share this pool",
    "Placement.critic": "the pool of this role, or `with` and a role whose pool this role shares",
    "reference": "the pool of this role, or `with` and a role whose pool this role shares",
    "Placement.reward_model": "the pool of this role, or `with` and a role whose pool this role shares",
    "Placement.teacher": "the pool of this role, or `with` and a role whose pool this role shares",
    "rollout": "the pool of this role, or `with` and a role whose pool this role shares",
    "RoleConfig.model": "the role's initial model: a stage of this file, a ref such as `model:NAME`, or a model on "
    "another server; none: the stage's initial model",
    "RoleConfig.head": "what the role predicts: tokens, the value of each token, or one score",
    "RoleConfig.trained": "whether the updates of the dataflow train this role",
    "RoleConfig.optimizer": "the optimiser of a trained role; none: the stage's optimiser",
    "DataflowConfig.roles": "further roles of the stage, such as reference, critic, teacher or reward models, whose "
    "predictions the class uses",
    "Placement.reward": "the pool of this role; the pool's ranks are processes that score in parallel",
    "LagConfig.correction": "tis: the weight of a token is its probability under the policy at the step's beginning, "
    "divided by its probability under the policy that sampled the token, and at most `cap`; decoupled: the same weight "
    "without a cap; bypass: tokens have no weights, and the policy that sampled the tokens is the old policy of the "
    "loss's ratio (arXiv 2505.24298)",
    "CriticConfig.warmup": "initial steps in which only the critic learns; the policy's schedule begins after these "
    "steps",
    "DistillConfig.group_size": "samples per prompt; these samples are not compared with each other",
    "DistillConfig.teacher": "the frozen model to learn from: a stage, a ref, or a model on another server; it must "
    "have the student's tokenizer",
    "DistillConfig.beta": "the teacher's share of the mixture, only for `jsd`; none: 0.5",
    "GRPOConfig.denominator": "the samples that count in the denominator of the loss; sampled: all samples of a step, "
    "as in the GRPO paper and in TRL; signal: only groups whose rewards differ, so that the gradient does not shrink "
    "as the rewards of other groups become equal",
    "gpus": "GPUs of the whole pool, divided evenly among its ranks",
    "with": "a role whose pool this role shares; cannot be combined with other fields",
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
