"""`kind: my_pf_ppo`: the fields of PF-PPO (arXiv 2409.06957)."""

from typing import Literal

from pydantic import Field

from posttrain.domain.kinds import algorithm_kind
from posttrain.engine.config import PPOConfig


class PFPPOConfig(PPOConfig):
    """PPO, and the responses of each group on which it trains."""

    group_size: int = Field(default=8, ge=2, le=10**6)
    filter: Literal["best", "best_random", "best_worst"] = "best_worst"

    @property
    def trained_samples(self) -> int:
        """The maximum number of samples in a step that are trained on."""
        return self.prompts_per_step * (1 if self.filter == "best" else 2)


MY_PF_PPO = algorithm_kind(
    "my_pf_ppo", "field_algorithms.pf_ppo:PFPPOConfig", "field_algorithms.pf_ppo_algorithm:PFPPO"
)
