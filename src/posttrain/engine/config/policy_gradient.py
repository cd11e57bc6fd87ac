"""Configuration of policy gradients: baselines, clips, penalties, and the lag of sampling with its correction."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.domain.roles import CRITIC, POLICY, REFERENCE, REWARD, REWARD_MODEL, ROLLOUT, RoleSpec, with_models
from posttrain.domain.validation import Frozen
from posttrain.engine.config.sampling import SamplingConfig
from posttrain.engine.settings import (
    MOST_ROWS,
    Few,
    NonNegative,
    OptimizerConfig,
    PolicyGradientOptimizerConfig,
    Rows,
    Tokens,
    Word,
)


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


class OnPolicyConfig(SamplingConfig):
    """A policy gradient over samples that are scored by a reward function or by the model of a `reward_model` stage."""

    # the reason why gradients cannot be summed group by group; empty: they can, because all terms of the loss share a
    # denominator and a group's credit depends on that group alone
    not_streamable: ClassVar[str] = (
        "credit that is assigned to each group separately, which this kind does not declare; remove stream_gradients"
    )

    # a stage or a registered model that scores responses, instead of `reward` or as its term `reward_model`
    reward_model: Word | None = None
    mini_batches: Rows = 1  # optimiser steps per pass over a rollout batch
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    lag: LagConfig | None = None  # lets sampling run ahead of training; None: a step trains on its own samples
    stream_gradients: bool = False  # sums gradients while other groups of the step are still sampled

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
        return -(-self.trained_samples // self.mini_batches)

    @property
    def lagging(self) -> int:
        """The number of steps by which sampling runs ahead of training, as configured."""
        return self.lag.steps if self.lag else 0

    @property
    def correction(self) -> str:
        """The correction of the samples, as configured."""
        return self.lag.correction if self.lag and self.lag.correction != "bypass" else ""

    @property
    def streams(self) -> bool:
        """Whether gradients are summed while other groups are still sampled, as configured."""
        return self.stream_gradients

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

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; a group of one has no baseline
    kl: RewardKLConfig | None = None


class GRPOConfig(OnPolicyConfig):
    """GRPO with clip-higher (DAPO). Groups whose rewards are equal have no policy gradient and are not computed."""

    not_streamable: ClassVar[str] = ""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; a group of one has no baseline
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

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 16  # samples per prompt; a group of one has no baseline
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


class ActorCriticConfig(OnPolicyConfig):
    """A policy gradient with a critic."""

    not_streamable: ClassVar[str] = (
        "one update whose terms share a denominator, but this kind updates a policy and a critic, and computes "
        "advantages over the whole step; remove stream_gradients"
    )

    more_passes: ClassVar[str] = (
        "; epochs counts passes over the prompts, and ppo_epochs counts passes over a rollout batch"
    )
    ppo_epochs: Few = 1  # number of passes over each rollout batch
    kl: PPOKLConfig | None = None
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="after")
    def _policy_learns(self) -> Self:
        if self.steps and self.critic.warmup >= self.steps:
            raise ValueError(
                f"critic.warmup must be < steps ({self.steps}), got {self.critic.warmup}, so the policy would never "
                "learn; lower critic.warmup or raise steps"
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


class PPOConfig(ActorCriticConfig):
    """PPO with a critic."""

    group_size: Rows = 4  # samples per prompt; PPO computes no baseline from the group, so 1 is enough
    gae: AdvantageConfig = AdvantageConfig()
    kl: PPOKLConfig | None = PPOKLConfig()


class PFPPOConfig(PPOConfig):
    """PF-PPO: PPO on the responses of each group whose rewards are most reliable."""

    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; a step trains on one or two
    # the responses of a group that a step trains on: the best one alone, the best one and a random other one, or the
    # best one and the worst one
    filter: Literal["best", "best_random", "best_worst"] = "best_worst"

    @property
    def trained_samples(self) -> int:
        """The maximum number of samples in a step that are trained on."""
        return self.prompts_per_step * (1 if self.filter == "best" else 2)


class LengthAdaptiveConfig(Frozen):
    """Generalised advantage estimation with λ = 1 − 1/(α·length) for the policy, and another λ for the critic."""

    gamma: float = Field(default=1.0, gt=0, le=1)  # discount per token; below 1, late rewards count less
    # α; a larger α gives a larger λ. Responses of at most 1/α tokens have λ = 0
    alpha: float = Field(default=0.05, gt=0, le=1e6)
    critic_lam: float = Field(default=1.0, ge=0, le=1)  # 1: the critic learns from Monte Carlo returns
    whiten: bool = True  # scales the advantages of a rollout batch to mean 0 and standard deviation 1


class PretrainedCriticConfig(CriticConfig):
    """A value model that is trained before the policy."""

    warmup: NonNegative = 50  # initial steps in which only the critic learns; the policy's schedule begins after them


class PositiveConfig(Frozen):
    """Imitation of responses with a high reward: the mean of −log π over their tokens is added to the loss."""

    weight: float = Field(default=0.1, ge=0, le=1e6)  # weight of this term in the loss; 0: no imitation
    above: float = Field(default=0.0, ge=-1e6, le=1e6)  # a response with a larger reward is positive


class VAPOConfig(ActorCriticConfig):
    """VAPO: a critic that is trained first, length-adaptive advantages, and imitation of positive responses."""

    group_size: Rows = 16  # samples per prompt
    clip_high: float = Field(default=0.28, gt=0, le=1e6)
    gae: LengthAdaptiveConfig = LengthAdaptiveConfig()
    critic: PretrainedCriticConfig = PretrainedCriticConfig()
    positive: PositiveConfig = PositiveConfig()  # imitation of the responses with a high reward
