"""`kind: my_vapo`: the fields of VAPO (arXiv 2504.05118)."""

from pydantic import Field

from posttrain.domain.kinds import algorithm_kind
from posttrain.domain.validation import Frozen
from posttrain.engine.config import ActorCriticConfig, CriticConfig


class DecoupledConfig(Frozen):
    """Section 4.1: the critic learns with its own λ, and the policy with λ = 1 − 1/(α·length)."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    alpha: float = Field(default=0.05, gt=0, le=1e6)
    critic_lam: float = Field(default=1.0, ge=0, le=1)
    whiten: bool = True


class PretrainedConfig(CriticConfig):
    """Section 4.1: the critic learns alone in the first steps."""

    warmup: int = Field(default=50, ge=0, le=10**9)


class PositiveConfig(Frozen):
    """Section 4.3: responses with a reward above `above` are also imitated."""

    weight: float = Field(default=0.1, ge=0, le=1e6)
    above: float = Field(default=0.0, ge=-1e6, le=1e6)


class VAPOConfig(ActorCriticConfig):
    """PPO with a critic, with VAPO's sizes and clip-higher."""

    group_size: int = Field(default=16, ge=1, le=10**6)
    clip_high: float = Field(default=0.28, gt=0, le=1e6)
    gae: DecoupledConfig = DecoupledConfig()
    critic: PretrainedConfig = PretrainedConfig()
    positive: PositiveConfig = PositiveConfig()


MY_VAPO = algorithm_kind("my_vapo", "field_algorithms.vapo:VAPOConfig", "field_algorithms.vapo_algorithm:VAPO")
