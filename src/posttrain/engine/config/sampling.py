"""Configuration of stages that train on responses that their policy samples.

It covers the lag between sampling and training and its correction, samples of several responses, user-defined
algorithms, and distillation from a teacher.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from posttrain.domain.placement import ROLE_NAME
from posttrain.domain.rewards import reward_slots
from posttrain.domain.roles import (
    CRITIC,
    DECLARED,
    POLICY,
    REFERENCE,
    REWARD,
    REWARD_MODEL,
    ROLLOUT,
    TEACHER,
    RoleSpec,
    Work,
    with_models,
)
from posttrain.domain.validation import Frozen
from posttrain.domain.weights import Reward
from posttrain.engine.config.training import TrainingConfig
from posttrain.engine.settings import (
    MOST_ROWS,
    Few,
    NonNegative,
    OptimizerConfig,
    PolicyGradientOptimizerConfig,
    ProbeConfig,
    Rows,
    Seconds,
    Stop,
    Temperature,
    Tokens,
    Word,
)

TRACE_BYTES = 10_000_000
_TAKEN = ("policy", "rollout", "reward", "main", "collocated", "sleep", "start", "values", "update", "weights")


def _free(role: str) -> str:
    if role in _TAKEN:
        raise ValueError(f"must be a name other than {', '.join(_TAKEN)}, got {role!r}")
    return role


RoleWord = Annotated[str, Field(pattern=ROLE_NAME), AfterValidator(_free)]


class LagConfig(Frozen):
    """Sampling runs ahead of training by exactly `steps` steps, in separate pools (`pacing.admission`).

    With 0 steps, a step trains on its own samples, in any placement. The correction then covers differences between
    rollout and training with the same weights: in bfloat16, or in a third-party engine.
    """

    steps: Annotated[int, Field(ge=0, le=64)] = 1  # steps by which the sampling policy is behind the trained policy
    # tis: the weight of a token is min(π at the step's beginning / π that sampled, cap); decoupled: that ratio without
    # a cap; bypass: tokens have no weights, and the policy that sampled is the old policy of the loss's ratio (arXiv
    # 2505.24298)
    correction: Literal["tis", "decoupled", "bypass"] = "tis"
    cap: float | None = Field(default=None, gt=0, le=1e6)  # maximum weight of a token with tis; None: 2.0

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.cap is not None and self.correction != "tis":
            raise ValueError(f"cap requires correction: tis, got cap {self.cap:g} with {self.correction}; remove cap")
        if not self.steps and self.correction == "bypass":
            raise ValueError(
                "lag.correction must be tis or decoupled with lag.steps: 0, got bypass; change correction or remove lag"
            )
        return self

    @property
    def truncation(self) -> float | None:
        """The cap on the weights of tokens; None: tokens have no weights."""
        if self.correction == "bypass":
            return None
        return math.inf if self.correction == "decoupled" else 2.0 if self.cap is None else self.cap


class TraceConfig(Frozen):
    """The number of samples that are traced completely (`posttrain trace RUN --sample ID`)."""

    groups: NonNegative | Literal["all"] = 1  # prompts per step whose samples are all traced; all: every prompt
    bytes: Annotated[int, Field(ge=0, le=10**12)] = TRACE_BYTES  # maximum per stage; later samples are only counted

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the default of `bytes`, so that digests are the same as in Posttrain versions without the field."""
        said: dict[str, Any] = handler(self)
        return {name: value for name, value in said.items() if name != "bytes" or value != TRACE_BYTES}

    def followed(self, prompts: int) -> int:
        """Return the number of groups to trace in a step with this number of prompts."""
        return prompts if self.groups == "all" else min(self.groups, prompts)


class KLConfig(Frozen):
    """KL penalty against the frozen starting policy, in the loss. k1 is rejected: its expected gradient is zero."""

    coefficient: float = Field(gt=0, le=1e6)
    # k3 (the default of TRL and verl) estimates KL(policy ‖ reference), but has the gradient of KL(reference ‖ policy);
    # k3-corrected (k3 times the policy's ratio) has the value and the gradient of KL(policy ‖ reference); k2 has the
    # gradient of KL(policy ‖ reference) on-policy
    estimator: Literal["k2", "k3", "k3-corrected"] = "k3"


class RewardKLConfig(Frozen):
    """KL penalty against the frozen starting policy, subtracted from the reward; no gradient flows through it."""

    coefficient: float = Field(default=0.01, gt=0, le=1e6)
    estimator: Literal["k1", "k2", "k3"] = "k1"  # k1 is unbiased, and may be negative


class PPOKLConfig(Frozen):
    """KL penalty against the frozen starting policy: in the reward of every token (as in PPO) or in the loss."""

    coefficient: float = Field(default=0.01, gt=0, le=1e6)
    estimator: Literal["k1", "k2", "k3", "k3-corrected"] = (
        "k1"  # in the reward, k1 is unbiased; for the loss, see KLConfig
    )
    place: Literal["reward", "loss"] = "reward"

    @model_validator(mode="after")
    def _has_a_gradient(self) -> PPOKLConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("kl.estimator must be k2 or k3 in the loss, got k1, whose expected gradient is zero there")
        if self.place == "reward" and self.estimator == "k3-corrected":
            raise ValueError(
                "kl.estimator must be k1, k2 or k3 in the reward, got k3-corrected, which corrects a gradient that a "
                "reward does not have"
            )
        return self


class AdvantageConfig(Frozen):
    """Generalised advantage estimation (arXiv 1506.02438)."""

    gamma: float = Field(default=1.0, gt=0, le=1)  # discount per token; below 1, late rewards count less
    lam: float = Field(default=0.95, ge=0, le=1)  # 1: Monte Carlo returns; 0: one-step temporal difference
    whiten: bool = True  # scales the advantages of a rollout batch to mean 0 and standard deviation 1


class CriticConfig(Frozen):
    """The value model: the starting policy's backbone with a head that is zero at the start."""

    optimizer: PolicyGradientOptimizerConfig = PolicyGradientOptimizerConfig()
    # a value that has moved further than this towards its return in one rollout batch gets no gradient; None: no limit
    clip: float | None = Field(default=0.2, gt=0, le=1e6)
    warmup: NonNegative = 0  # initial steps in which only the critic learns; the policy's schedule begins after them


class SamplingConfig(TrainingConfig):
    """The samples of a step: their number, their length and their scoring."""

    per_step: ClassVar[str] = "prompts_per_step"
    prompts_per_step: Rows = 32
    group_size: Rows = 8  # samples per prompt
    max_new_tokens: Tokens = 64
    temperature: Temperature = 1.0
    # a response, of the stage or of its probe, ends with the token that completes one of these strings in its text
    stop: Stop = ()
    reward: Reward | None = None
    # maximum seconds to score one batch of completions; auto: 10 s, or 20 µs for each token that the batch can contain,
    # if that is more
    reward_timeout: Seconds | Literal["auto"] = "auto"
    reward_errors_max: float = Field(default=0.01, ge=0, le=1)  # share of a step's completions whose scoring may fail
    probe: ProbeConfig | None = None
    optimizer: PolicyGradientOptimizerConfig = PolicyGradientOptimizerConfig()

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that digests are the same as in Posttrain versions with fewer fields."""
        said: dict[str, Any] = handler(self)
        return {name: value for name, value in said.items() if value or name not in ("stop", "stream_gradients")}

    @property
    def samples(self) -> int:
        """The number of samples in a step."""
        return self.prompts_per_step * self.group_size

    @property
    def documents(self) -> int:
        """The maximum number of documents in one optimiser step."""
        return self.samples

    @property
    def rounds(self) -> int:
        """The maximum number of times that a step samples the number of responses on which it trains."""
        return 1

    @property
    def passes(self) -> int:
        """The maximum number of times that a response is trained on, over all roles."""
        return 1

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        return super().inputs() | reward_slots("reward", self.functions)

    @property
    def reward_models(self) -> tuple[str, ...]:
        """The frozen roles that score responses."""
        return ()

    @property
    def functions(self) -> str | dict[str, float] | None:
        """The reward functions: `reward` without the terms that are roles of the stage."""
        if not isinstance(self.reward, dict):
            return None if self.reward in self.reward_models else self.reward
        return {name: weight for name, weight in self.reward.items() if name not in self.reward_models} or None

    @property
    def terms(self) -> dict[str, float]:
        """Role that scores responses → its weight in the reward."""
        given = self.reward if isinstance(self.reward, dict) else {self.reward: 1.0}
        return {name: given[name] for name in self.reward_models if name in given}

    @property
    def response_tokens(self) -> int:
        """The maximum number of tokens in a sample without its prompt: all turns and the observations between them."""
        return self.turns_most * self.max_new_tokens + (self.turns_most - 1) * self.observed_most

    @property
    def sampled_tokens(self) -> int:
        """The maximum number of tokens in all responses of a sample, without the observations between them."""
        return self.turns_most * self.max_new_tokens

    @property
    def turns_most(self) -> int:
        """The maximum number of responses in a sample."""
        return 1

    @property
    def observed_most(self) -> int:
        """The maximum number of tokens in an observation between two responses."""
        return 0

    @property
    def read_again(self) -> int:
        """The maximum number of tokens that the later turns of a sample read in addition to the prompt.

        Each turn reads all earlier responses and observations.
        """
        return sum(turn * (self.max_new_tokens + self.observed_most) for turn in range(1, self.turns_most))

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the policy, the rollout, and the reward if there is one."""
        return (POLICY, ROLLOUT, *([REWARD] if self.functions else []))


class OnPolicyConfig(SamplingConfig):
    """A policy gradient over samples that are scored by a reward function or by the model of a `reward_model` stage."""

    # the reason why gradients cannot be summed group by group; empty: they can, because all terms of the loss share a
    # denominator and a group's credit depends on that group alone
    not_streamable: ClassVar[str] = (
        "credit that is assigned to each group separately, which this kind does not declare; remove stream_gradients"
    )

    # a stage or a registered model that scores responses, instead of `reward` or as its term `reward_model`
    reward_model: Word | None = None
    mini_batches: Rows = 1  # optimiser steps per rollout batch (in ppo, per pass over the rollout batch)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    lag: LagConfig | None = None  # lets sampling run ahead of training; None: a step trains on its own samples
    stream_gradients: bool = False  # sums gradients while other groups of the step are still sampled
    trace: TraceConfig = TraceConfig()

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        term = isinstance(self.reward, dict) and REWARD_MODEL.name in self.reward
        if term and self.reward_model is None:
            raise ValueError(
                f"reward.{REWARD_MODEL.name} needs a model, got none; set reward_model, or rename the reward function"
            )
        if not term and isinstance(self.reward, dict) and self.reward_model:
            raise ValueError(
                f"reward needs the term {REWARD_MODEL.name}, the weight of the reward model, got the terms "
                f"{', '.join(self.reward)}; add {REWARD_MODEL.name}: WEIGHT, or remove the field {REWARD_MODEL.name}"
            )
        if not term and (self.reward is None) == (self.reward_model is None):
            given = "neither" if self.reward is None else "both"
            raise ValueError(
                f"exactly one of reward and reward_model must be given, got {given}; to add them, give weights: "
                f"reward: {{exact: 1.0, {REWARD_MODEL.name}: 0.5}}"
            )
        return self

    @model_validator(mode="after")
    def _lag_has_pools(self) -> Self:
        if self.lag is None or not self.lag.steps:
            return self
        at = {role: self.placement.pool_of(role).name for role in ("policy", "rollout")}
        if at["policy"] == at["rollout"]:
            raise ValueError(
                f"lag needs separate pools for the policy and the rollout, but both are in the pool {at['rollout']}; "
                "write placement: {policy: {…}, rollout: {…}}"
            )
        if self.steps and self.lag.steps >= self.steps:
            raise ValueError(
                f"lag.steps must be less than steps ({self.steps}), got {self.lag.steps}; otherwise no batch is "
                "sampled by a trained policy; lower lag.steps"
            )
        roles = [role for role in with_models(self.roles()) if role not in ("policy", "rollout")]
        busy = [role for role in roles if self.placement.pool_of(role).name == at["rollout"]]
        if busy:
            raise ValueError(
                f"lag needs a rollout whose pool has no other roles, got {', '.join(busy)} in the rollout's pool "
                f"{at['rollout']}; write placement: {{{busy[0]}: {{with: policy}}}}"
            )
        return self

    @model_validator(mode="after")
    def _gradients_can_stream(self) -> Self:
        if not self.stream_gradients:
            return self
        at = {role: self.placement.pool_of(role).name for role in ("policy", "rollout")}
        reason = self.not_streamable
        if not reason and self.mini_batches > 1:
            reason = f"mini_batches: 1, got {self.mini_batches}; set mini_batches to 1"
        if not reason and self.lag:
            wanted = "a rollout that samples what the step trains" if self.lag.steps else "samples without a correction"
            reason = f"{wanted}, but lag is set (lag.steps: {self.lag.steps}); remove lag or stream_gradients"
        if not reason and at["policy"] == at["rollout"]:
            reason = (
                f"a rollout in its own pool, but the rollout is in the policy's pool {at['rollout']}; write placement: "
                "{policy: {…}, rollout: {…}}"
            )
        roles = [role.name for role in self.roles() if role.model and not role.trained and role != ROLLOUT]
        busy = [role for role in roles if self.placement.pool_of(role).name == at["rollout"]]
        if not reason and busy:
            reason = (
                f"roles that compute while the rollout works, got {', '.join(busy)} in the rollout's pool "
                f"{at['rollout']}; write placement: {{{busy[0]}: {{with: policy}}}}"
            )
        if reason:
            raise ValueError(f"stream_gradients needs {reason}")
        return self

    @property
    def documents(self) -> int:
        """The maximum number of documents in one optimiser step."""
        return -(-self.samples // self.mini_batches)

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        return super().inputs() | ({"reward_model": ("model", self.reward_model)} if self.reward_model else {})

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the policy, the reference of a KL penalty, the rollout, and the judge."""
        reference = (REFERENCE,) if getattr(self, "kl", None) else ()
        return (
            POLICY,
            *reference,
            ROLLOUT,
            *([REWARD] if self.functions else []),
            *([REWARD_MODEL] if self.reward_models else []),
        )

    @property
    def reward_models(self) -> tuple[str, ...]:
        """The reward model, if there is one."""
        return (REWARD_MODEL.name,) if self.reward_model else ()

    @property
    def terms(self) -> dict[str, float]:
        """The reward model and its weight: 1, unless `reward` has weights."""
        return super().terms if self.reward else dict.fromkeys(self.reward_models, 1.0)

    def described(self, kind: str) -> str:
        """See `TrainingConfig.described`."""
        judge = "a reward function" if self.functions else "a reward model"
        return f"{kind} with {judge}" + ("" if getattr(self, "kl", None) else " without kl")


class GroupConfig(OnPolicyConfig):
    """A baseline from the other samples of the same prompt, and an optional KL penalty in the reward."""

    not_streamable: ClassVar[str] = ""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; one sample alone has no baseline
    kl: RewardKLConfig | None = None


class GRPOConfig(OnPolicyConfig):
    """GRPO with clip-higher (DAPO). Groups whose rewards are equal have no policy gradient and are not computed."""

    not_streamable: ClassVar[str] = ""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; one sample alone has no baseline
    clip_high: float = Field(default=0.28, gt=0, le=1e6)
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    # the samples that count in the denominator of the loss; sampled: all samples of a step, as in GRPO's paper and TRL;
    # signal: only groups whose rewards differ, so that their gradient does not shrink as other groups are solved
    denominator: Literal["sampled", "signal"] = "sampled"
    kl: KLConfig | None = None


class GSPOConfig(OnPolicyConfig):
    """GSPO: one importance ratio for each response, with a narrow clip."""

    not_streamable: ClassVar[str] = ""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; a group of one has no baseline
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0, le=1e6)
    kl: KLConfig | None = None

    @model_validator(mode="after")
    def _one_ratio(self) -> Self:
        if self.lag and not self.lag.steps:
            raise ValueError("gspo has one ratio for each response, so it has no correction of tokens; remove lag")
        if self.lag and self.lag.correction != "bypass":
            raise ValueError(
                f"gspo has one ratio for each response, so lag.correction must be bypass, got {self.lag.correction}"
            )
        return self


class CISPOConfig(OnPolicyConfig):
    """CISPO: the weights of tokens are clipped, and no token loses its gradient."""

    not_streamable: ClassVar[str] = ""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; a group of one has no baseline
    clip_low: float = Field(default=1.0, gt=0, le=1)  # 1: weights have no lower limit, as in the paper
    clip_high: float = Field(default=4.0, gt=0, le=1e6)  # weights are at most 1 + clip_high
    kl: KLConfig | None = None


class OverlongConfig(Frozen):
    """A penalty on responses near the token limit (DAPO, arXiv 2503.14476, eq. 13)."""

    buffer: Tokens  # number of tokens before the limit, over which the penalty grows
    penalty: float = Field(default=1.0, gt=0, le=1e6)  # the penalty at the limit


class DAPOConfig(OnPolicyConfig):
    """DAPO: clip-higher, token mean, replacement of groups whose rewards are equal, penalty on overlong responses."""

    not_streamable: ClassVar[str] = ""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 16  # samples per prompt
    clip_high: float = Field(default=0.28, gt=0, le=1e6)
    refills: NonNegative = 3  # maximum number of times that each dropped group is replaced
    overlong: OverlongConfig | None = None  # penalises long responses; None: length does not change a reward

    @property
    def rounds(self) -> int:
        """The first round of sampling, and one round for each refill."""
        return 1 + self.refills

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.overlong and self.overlong.buffer > self.sampled_tokens:
            raise ValueError(
                f"overlong.buffer must be <= the tokens of a sample ({self.sampled_tokens}), got {self.overlong.buffer}"
            )
        return self


class ReinforcePlusPlusConfig(OnPolicyConfig):
    """REINFORCE++: no critic; returns of penalised rewards, normalised over the whole step."""

    not_streamable: ClassVar[str] = (
        "credit that is assigned to each group separately, but reinforce_plus_plus normalises over the whole step; "
        "remove stream_gradients"
    )

    group_size: Rows = 1  # samples per prompt
    baseline: Literal["none", "group"] = "none"  # group: the group's mean is subtracted before normalising
    gamma: float = Field(default=1.0, gt=0, le=1)  # discount per token; below 1, late rewards count less
    kl: RewardKLConfig | None = RewardKLConfig()

    @model_validator(mode="after")
    def _baseline_has_members(self) -> Self:
        if self.baseline == "group" and self.group_size < 2:
            raise ValueError(f"baseline: group needs group_size >= 2, got {self.group_size}")
        return self


class PPOConfig(OnPolicyConfig):
    """PPO with a critic."""

    not_streamable: ClassVar[str] = (
        "one update whose terms share a denominator, but ppo updates a policy and a critic, and computes advantages "
        "over the whole step; remove stream_gradients"
    )

    more_passes: ClassVar[str] = (
        "; epochs counts passes over the prompts, and ppo_epochs counts passes over a rollout batch"
    )
    group_size: Rows = 4  # samples per prompt; PPO computes no baseline from the group, so 1 is enough
    ppo_epochs: Few = 1  # number of passes over each rollout batch
    gae: AdvantageConfig = AdvantageConfig()
    kl: PPOKLConfig | None = PPOKLConfig()
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="after")
    def _policy_learns(self) -> Self:
        if self.steps and self.critic.warmup >= self.steps:
            raise ValueError(
                f"critic.warmup must be < steps ({self.steps}), got {self.critic.warmup}: the policy would never learn"
            )
        return self

    @property
    def passes(self) -> int:
        """The passes of the policy plus the passes of the critic."""
        return 2 * self.ppo_epochs

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the roles of `OnPolicyConfig` and a critic."""
        policy, *others = super().roles()
        return (policy, CRITIC, *others)

    def learning(self, role: str) -> tuple[OptimizerConfig, int]:
        """Return the role's optimiser; the policy does not learn while the critic warms up."""
        return (self.critic.optimizer, 0) if role == "critic" else (self.optimizer, self.critic.warmup)


class TurnsConfig(SamplingConfig):
    """Several responses per sample; between them come observations from the algorithm's `observe(row, responses)`.

    A package's algorithm with turns lists this class before its other base class:
    `class TalkConfig(TurnsConfig, PPOConfig)`.
    """

    turns: Annotated[int, Field(ge=1, le=64)] = 1  # maximum responses of a sample
    observation_tokens: NonNegative = 0  # maximum tokens of an observation between two responses

    @model_validator(mode="after")
    def _turns_observe(self) -> Self:
        if (self.turns > 1) != (self.observation_tokens > 0):
            raise ValueError(
                f"turns and observation_tokens must be set together, got turns {self.turns} and observation_tokens "
                f"{self.observation_tokens}; set both, or neither"
            )
        return self

    @property
    def turns_most(self) -> int:
        """Maximum responses of a sample, as configured."""
        return self.turns

    @property
    def observed_most(self) -> int:
        """Maximum tokens of an observation, as configured."""
        return self.observation_tokens


class RoleConfig(Frozen):
    """A further role of a dataflow: a model that predicts, scores responses, or learns."""

    model: Word | None = None  # its initial model; None: the stage's
    head: Literal["language", "value", "score"] = "language"  # what it predicts: tokens, values of tokens, or one score
    trained: bool = False  # whether the dataflow's updates train it
    optimizer: PolicyGradientOptimizerConfig | None = None  # of a trained role; None: the stage's

    @model_validator(mode="after")
    def _learns_what_it_can(self) -> Self:
        if self.head == "score" and self.model is None:
            raise ValueError("a role with head: score needs a model, got none; name a reward model")
        if self.trained and self.head == "score":
            raise ValueError("a role with head: score cannot be trained here; train it in a reward_model stage")
        if self.optimizer and not self.trained:
            raise ValueError("optimizer needs trained: true, got a frozen role; remove optimizer")
        return self

    def spec(self, name: str) -> RoleSpec:
        """Return the role."""
        work: tuple[Work, ...] = ("score",) if self.head == "score" else ("predict",)
        model = f"{DECLARED}{name}" if self.model else "model"
        return RoleSpec(name, model, self.head, self.trained, (*work, "update") if self.trained else work)


class DataflowConfig(TurnsConfig):
    """A user-defined algorithm: a class derived from `recipes.dataflow.Dataflow`."""

    # the class, as my_module:MyAlgorithm; my_module.py is next to run.yaml
    recipe: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(:[A-Za-z_]\w*)?$")]
    settings: dict[str, Any] = Field(default_factory=dict)  # passed to the class; no other code reads these settings
    trace: TraceConfig = TraceConfig()
    tokens_per_step: Annotated[int, Field(ge=1, le=10**12)] | None = (
        None  # maximum tokens that a step may spend; None: enough to train each role on each response once
    )

    # its further roles, such as reference, critic, teacher or reward models, whose predictions the class requires
    declared: dict[RoleWord, RoleConfig] = Field(default_factory=dict, alias="roles", max_length=16)

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the roles as in run.yaml; leave out default values, as `SamplingConfig` does."""
        said: dict[str, Any] = handler(self)
        said["roles"] = said.pop("declared")
        return {name: value for name, value in said.items() if value or name not in ("stop", "roles")}

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        own = {f"{DECLARED}{name}": ("model", role.model) for name, role in self.declared.items() if role.model}
        return super().inputs() | {"recipe": ("recipe", self.recipe)} | own

    @model_validator(mode="after")
    def _terms_score(self) -> Self:
        terms = self.reward if isinstance(self.reward, dict) else {self.reward: 1.0}
        odd = next((name for name, role in self.declared.items() if name in terms and role.head != "score"), None)
        if odd is not None:
            raise ValueError(f"reward.{odd} is the role {odd}, which needs head: score, got {self.declared[odd].head}")
        return self

    @property
    def passes(self) -> int:
        """The number of trained roles: by default, each is trained once on a response."""
        return sum(role.trained for role in self.roles())

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the roles of `SamplingConfig`, and the declared roles."""
        policy, *others = super().roles()
        return (policy, *(role.spec(name) for name, role in self.declared.items()), *others)

    @property
    def reward_models(self) -> tuple[str, ...]:
        """The declared roles that score responses."""
        return tuple(name for name, role in self.declared.items() if role.head == "score")

    def learning(self, role: str) -> tuple[OptimizerConfig, int]:
        """Return the role's own optimiser, or else that of the stage."""
        own = self.declared[role].optimizer if role in self.declared else None
        return own or self.optimizer, 0


class DistillConfig(SamplingConfig):
    """Distillation on the student's own responses (arXiv 2306.13649).

    No reward is needed; a given reward is reported and does not affect training.
    """

    group_size: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 1  # samples per prompt; not compared with each other
    teacher: Word  # the frozen model to learn from; it must have the student's tokenizer
    # number of the teacher's likeliest tokens at every position; all other tokens count as one outcome. 64 tokens have
    # nearly all of the probability, and take 512 bytes for each response token
    top_k: Annotated[int, Field(ge=1, le=10**6)] = 64
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float | None = Field(default=None, gt=0, lt=1)  # with jsd, the teacher's share of the mixture; None: 0.5
    mini_batches: Rows = 1  # optimiser steps per rollout batch
    trace: TraceConfig = TraceConfig()

    @model_validator(mode="after")
    def _beta_is_of_jsd(self) -> Self:
        if self.beta is not None and self.divergence != "jsd":
            raise ValueError(
                f"beta requires divergence: jsd, got beta {self.beta:g} with {self.divergence}; remove beta"
            )
        return self

    @property
    def documents(self) -> int:
        """The maximum number of documents in one optimiser step."""
        return -(-self.samples // self.mini_batches)

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        return super().inputs() | {"teacher": ("model", self.teacher)}

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the roles of `SamplingConfig` and a teacher; a token's id and log-probability take four bytes each."""
        policy, *others = super().roles()
        return (policy, replace(TEACHER, wide=8 * self.top_k), *others)
