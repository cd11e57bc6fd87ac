"""What a training or evaluation job reads. Torch-free, so that a plan can be checked on the control side.

One class per stage kind. A field's comment gives meaning, unit and the reason for its default.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.domain.measures import RATE, SHARE, ItemRange
from posttrain.domain.placement import Placement
from posttrain.domain.rewards import JUDGES, reward_slots
from posttrain.domain.validation import Frozen
from posttrain.domain.weights import Reward
from posttrain.engine.settings import (
    MOST_ROWS,
    EarlyStoppingConfig,
    Extract,
    Few,
    InferenceRuntimeConfig,
    LossProbeConfig,
    NonNegative,
    OptimizerConfig,
    Passes,
    PolicyGradientOptimizerConfig,
    Positive,
    ProbeConfig,
    Rows,
    RuntimeConfig,
    Seconds,
    SuiteName,
    Temperature,
    Tokens,
    Width,
    Word,
    Worth,
)


class _TrainingConfig(Frozen):
    """How long every kind of training is. `epochs` needs the rows, so a plan turns it into `steps`, which jobs read.

    Batches go on over the end of a pass, so N passes are the least number of steps that take N × rows documents.
    """

    per_step: ClassVar[str]  # the field that says how many documents a step takes
    more_passes: ClassVar[str] = ""  # what an error adds where `epochs` was another word before
    selects_by: ClassVar[str] = "probe/accuracy"  # the probe's metric
    lower_is_better: ClassVar[bool] = False

    steps: Positive = 0  # optimiser steps, or rollout batches; 0: not known before `epochs` is held against the rows
    epochs: Passes | None = None  # passes over the data
    probe: LossProbeConfig | None = None  # a held-out measurement while it trains; None: none
    early_stopping: EarlyStoppingConfig | None = None  # ends the stage when its probe stops improving; None: never
    keep_best: bool = False  # the best model by the probe, as a second output of the stage

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps > 0) == (self.epochs is not None):
            given = "both" if self.steps else "neither"
            raise ValueError(f"exactly one of steps and epochs must be given, got {given}{self.more_passes}")
        return self

    @model_validator(mode="after")
    def _selects_by_a_probe(self) -> Self:
        asked = [name for name in ("early_stopping", "keep_best") if getattr(self, name)]
        if asked and self.probe is None:
            raise ValueError(f"{asked[0]} needs a probe to go by, got none; add probe: {{data: NAME}}")
        return self

    def probes(self) -> dict[str, tuple[str, str]]:
        """The probe's data as an input."""
        return {"probe": ("dataset", self.probe.data)} if self.probe else {}


class SFTConfig(_TrainingConfig):
    """Supervised fine-tuning on prompt + completion (or messages) rows; loss on completion tokens, token mean."""

    kind: ClassVar[str] = "sft"
    per_step: ClassVar[str] = "batch_size"
    selects_by: ClassVar[str] = "probe/loss"
    lower_is_better: ClassVar[bool] = True
    model: Word = "base"
    data: Word
    batch_size: Rows = 64  # documents per optimiser step
    max_length: Tokens | None = None  # tokens; None: the model's context. A longer row is refused, never cut
    optimizer: OptimizerConfig = OptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: Placement = Placement()

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return {"model": ("model", self.model), "data": ("dataset", self.data)} | self.probes()


class TraceConfig(Frozen):
    """Which samples leave their whole way in the trace (`posttrain trace RUN --sample ID`)."""

    groups: NonNegative | Literal["all"] = 1  # prompts per step, with all their samples

    def followed(self, prompts: int) -> int:
        """Groups to follow of a step with so many prompts."""
        return prompts if self.groups == "all" else min(self.groups, prompts)


class KLConfig(Frozen):
    """KL penalty against the frozen starting policy, in the loss. k1 as a loss has no expected gradient."""

    coefficient: float = Field(gt=0, le=1e6)
    # k3 (TRL's and verl's default): its value is KL(policy ‖ reference), its gradient that of KL(reference ‖ policy).
    # k3-corrected (k3 times the ratio): value and gradient of KL(policy ‖ reference). k2: that gradient, on-policy
    estimator: Literal["k2", "k3", "k3-corrected"] = "k3"


class _OnPolicyConfig(_TrainingConfig):
    """What every recipe has that learns from responses which its own policy sampled."""

    per_step: ClassVar[str] = "prompts_per_step"
    model: Word = "base"
    data: Word
    prompts_per_step: Rows = 32
    max_new_tokens: Tokens = 64
    temperature: Temperature = 1.0
    mini_batches: Rows = 1  # optimiser steps per rollout batch (and epoch)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    # seconds for one batch of completions; auto: 10, or 20 µs for each token that they may have
    reward_timeout: Seconds | Literal["auto"] = "auto"
    reward_errors_max: float = Field(default=0.01, ge=0, le=1)  # share of a step's completions that may fail
    probe: ProbeConfig | None = None
    trace: TraceConfig = TraceConfig()
    optimizer: PolicyGradientOptimizerConfig = PolicyGradientOptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: Placement = Placement()

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return {"model": ("model", self.model), "data": ("dataset", self.data)} | self.probes()


class GRPOConfig(_OnPolicyConfig):
    """GRPO with clip-higher (DAPO); groups without reward spread have no policy gradient and are not computed."""

    kind: ClassVar[str] = "grpo"
    reward: Reward
    group_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 8  # samples per prompt; a group of one has no baseline
    clip_high: float = Field(default=0.28, gt=0, le=1e6)
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    # what the loss is divided by: all that a step sampled (GRPO's paper, TRL), or only the groups with a signal, whose
    # gradient then does not shrink as the others are solved
    denominator: Literal["sampled", "signal"] = "sampled"
    kl: KLConfig | None = None

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return super().inputs() | reward_slots("reward", self.reward)


class PPOKLConfig(Frozen):
    """KL penalty against the frozen starting policy: in the reward of every token (PPO's own place) or in the loss."""

    coefficient: float = Field(default=0.01, gt=0, le=1e6)
    estimator: Literal["k1", "k2", "k3", "k3-corrected"] = (
        "k1"  # in the reward k1 is unbiased; in the loss see KLConfig
    )
    place: Literal["reward", "loss"] = "reward"

    @model_validator(mode="after")
    def _has_a_gradient(self) -> PPOKLConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("kl.estimator must be k2 or k3 in the loss, got k1, whose expected gradient is zero there")
        if self.place == "reward" and self.estimator == "k3-corrected":
            raise ValueError(
                "kl.estimator must be k1, k2 or k3 in the reward, got k3-corrected: there is no gradient there"
            )
        return self


class AdvantageConfig(Frozen):
    """Generalised advantage estimation (arXiv 1506.02438)."""

    gamma: float = Field(default=1.0, gt=0, le=1)  # per token; below 1 a long response is worth less
    lam: float = Field(default=0.95, ge=0, le=1)  # 1: Monte Carlo returns; 0: one-step temporal difference
    whiten: bool = True  # advantages of a rollout batch to mean 0 and standard deviation 1


class CriticConfig(Frozen):
    """The value model: the starting policy's backbone under a head that begins at zero."""

    optimizer: PolicyGradientOptimizerConfig = PolicyGradientOptimizerConfig()
    clip: float | None = Field(default=0.2, gt=0, le=1e6)  # how far a value may move in one rollout batch; None: freely
    warmup: NonNegative = 0  # first steps in which only the critic learns; the policy's schedule begins after them


class PPOConfig(_OnPolicyConfig):
    """PPO with a critic; scored by a reward function, or by a reward model that a `reward_model` stage trained."""

    kind: ClassVar[str] = "ppo"
    more_passes: ClassVar[str] = "; epochs are passes over the prompts, and those over a rollout batch are ppo_epochs"
    reward: Reward | None = None
    reward_model: Word | None = None
    group_size: Rows = 4  # samples per prompt; no baseline comes from them, so one is enough
    ppo_epochs: Few = 1  # passes over a rollout batch
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    gae: AdvantageConfig = AdvantageConfig()
    kl: PPOKLConfig | None = PPOKLConfig()
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="after")
    def _one_judge(self) -> PPOConfig:
        if (self.reward is None) == (self.reward_model is None):
            given = "neither" if self.reward is None else "both"
            raise ValueError(f"exactly one of reward and reward_model must be given, got {given}")
        if self.steps and self.critic.warmup >= self.steps:
            raise ValueError(
                f"critic.warmup must be < steps ({self.steps}), got {self.critic.warmup}: the policy would never learn"
            )
        return self

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        judge = {"reward_model": ("model", self.reward_model)} if self.reward_model else {}
        return super().inputs() | reward_slots("reward", self.reward) | judge


class DataflowConfig(_TrainingConfig):
    """A dataflow of the user's own: a Python function over the roles policy and rollout (`recipes.dataflow`)."""

    kind: ClassVar[str] = "dataflow"
    per_step: ClassVar[str] = "prompts_per_step"
    recipe: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(:[A-Za-z_]\w*)?$")]  # my_module:my_dataflow, beside run.yaml
    model: Word = "base"
    data: Word
    reward: Reward | None = None
    prompts_per_step: Rows = 32
    group_size: Rows = 8  # samples per prompt
    max_new_tokens: Tokens = 64
    temperature: Temperature = 1.0
    settings: dict[str, Any] = Field(default_factory=dict)  # for the function; nothing else reads them
    tokens_per_step: Annotated[int, Field(ge=1, le=10**12)] | None = (
        None  # what a step may spend; None: each response trained on once, at the most
    )
    # seconds for one batch of completions; auto: 10, or 20 µs for each token that they may have
    reward_timeout: Seconds | Literal["auto"] = "auto"
    reward_errors_max: float = Field(default=0.01, ge=0, le=1)  # share of a step's completions that may fail
    probe: ProbeConfig | None = None
    optimizer: PolicyGradientOptimizerConfig = PolicyGradientOptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: Placement = Placement()

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        slots = {"model": ("model", self.model), "data": ("dataset", self.data), "recipe": ("recipe", self.recipe)}
        slots |= reward_slots("reward", self.reward)
        return slots | self.probes()


class RewardModelConfig(_TrainingConfig):
    """A scalar reward model from preference pairs (Bradley-Terry), saved as a sequence classifier of one label."""

    kind: ClassVar[str] = "reward_model"
    per_step: ClassVar[str] = "batch_size"
    model: Word = "base"
    data: Word  # rows of prompt, chosen and rejected
    batch_size: Rows = 64  # pairs per optimiser step
    max_length: Tokens | None = None  # tokens of prompt and response; None: the model's context. Never cut
    optimizer: OptimizerConfig = OptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: Placement = Placement()

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        return {"model": ("model", self.model), "data": ("dataset", self.data)} | self.probes()


class SuiteConfig(Frozen):
    """One evaluation suite: rows with a prompt and an answer, or with a prompt and a reward that scores responses."""

    data: Word
    extract: Extract = r"(?s)(.*)"
    samples: Annotated[int, Field(ge=0, le=MOST_ROWS)] = 0  # sampled responses per item beside the greedy one
    temperature: Temperature = 1.0  # of the sampled responses
    pass_at: tuple[Positive, ...] = ()  # k values, each <= samples
    max_new_tokens: Tokens = 64
    reward: Reward | None = None  # scores every response; then rows may be without an answer
    reward_range: tuple[Worth, Worth] = (0.0, 1.0)  # the least and the most that a response may be worth
    # seconds for one batch of responses; auto: 10, or 20 µs for each token that they may have
    reward_timeout: Seconds | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _rewards_have_a_range(self) -> SuiteConfig:
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range must be the least and the greatest value, got [{low:g}, {high:g}]")
        for name in ("reward_range", "reward_timeout"):
            if self.reward is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs a reward, got one without; name the suite's reward")
        return self

    @model_validator(mode="after")
    def _sampling_is_consumed(self) -> SuiteConfig:
        if not self.samples and self.temperature != 1.0:
            raise ValueError(f"temperature needs samples >= 1, got {self.temperature} with samples: 0; set samples")
        for k in self.pass_at:
            if k > self.samples:
                raise ValueError(f"pass_at must be <= samples ({self.samples}), got {k}")
        return self

    @property
    def worth(self) -> ItemRange:
        """What a response may be worth."""
        return ItemRange(*self.reward_range)

    def metrics(self, suite: str) -> dict[str, ItemRange]:
        """Metric name → what one item can be. A response has at least its end, so one token."""
        ranges = {"accuracy": RATE, "response_tokens": ItemRange(1.0, self.max_new_tokens), "truncated": RATE}
        if self.samples:
            ranges["sampled_accuracy"] = SHARE
        ranges |= {f"pass@{k}": SHARE for k in self.pass_at}
        if self.reward:
            ranges |= dict.fromkeys(["reward", *(["sampled_reward"] if self.samples else [])], self.worth)
        return {f"{suite}/{name}": possible for name, possible in ranges.items()}


class EvaluateConfig(Frozen):
    """Greedy and sampled evaluation of one model on suites; per-item results as Parquet."""

    kind: ClassVar[str] = "evaluate"
    model: Word
    suites: dict[SuiteName, SuiteConfig] = Field(min_length=1)
    runtime: InferenceRuntimeConfig = InferenceRuntimeConfig()

    def inputs(self) -> dict[str, tuple[str, str]]:
        """slot → (asset kind, the word written in run.yaml)."""
        slots = {"model": ("model", self.model)} | {f"suites.{n}": ("dataset", s.data) for n, s in self.suites.items()}
        for name, suite in self.suites.items():
            slots |= reward_slots(f"{JUDGES}{name}", suite.reward)
        return slots


class InitModelConfig(Frozen):
    """A randomly initialised model in Hugging Face format with a character tokenizer and chat template: no download."""

    kind: ClassVar[str] = "init_model"
    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    characters: str = (
        "0123456789+-*/=();:,.<>? \nabcdefghijklmnopqrstuvwxyzQAS"  # the vocabulary besides special tokens
    )
    hidden_size: Width = 64
    intermediate_size: Width = 192
    layers: Few = 2
    heads: Few = 2
    kv_heads: Few = 1
    context_length: Tokens = 512

    @model_validator(mode="after")
    def _shapes_fit(self) -> InitModelConfig:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size must be a multiple of heads ({self.heads}), got {self.hidden_size}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}")
        if len(set(self.characters)) != len(self.characters):
            raise ValueError("characters must not repeat")
        return self

    def inputs(self) -> dict[str, tuple[str, str]]:
        """A model from nothing has no inputs."""
        return {}


TrainingConfig = SFTConfig | RewardModelConfig | GRPOConfig | PPOConfig | DataflowConfig
StageConfig = TrainingConfig | EvaluateConfig | InitModelConfig
STAGE_CONFIGS: dict[str, type[StageConfig]] = {
    c.kind: c
    for c in (SFTConfig, RewardModelConfig, GRPOConfig, PPOConfig, DataflowConfig, EvaluateConfig, InitModelConfig)
}


def stage_config(kind: str, params: dict[str, Any]) -> StageConfig:
    """Validate the parameters of a stage.

    Raises:
        KeyError: an unknown kind.
        pydantic.ValidationError: an unknown or ill-typed parameter.
    """
    return STAGE_CONFIGS[kind].model_validate(params)
