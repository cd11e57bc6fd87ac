"""Configuration of stages that train on responses that their policy samples.

It covers samples of several responses, user-defined algorithms, and distillation from a teacher.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from posttrain.domain.engines import ROLLOUT_ENGINE, holds_sessions
from posttrain.domain.kinds import Load, RowNeeds
from posttrain.domain.placement import ROLE_NAME
from posttrain.domain.rewards import reward_slots
from posttrain.domain.roles import DECLARED, POLICY, REWARD, ROLLOUT, TEACHER, RoleSpec, Work
from posttrain.domain.validation import Frozen
from posttrain.engine.config.training import Reads, TrainingConfig, written
from posttrain.engine.settings import (
    MOST_ROWS,
    Models,
    NonNegative,
    OptimizerConfig,
    PolicyGradientOptimizerConfig,
    ProbeConfig,
    Reward,
    RoleModel,
    RolloutConfig,
    Rows,
    Seconds,
    ServedConfig,
    Stop,
    Temperature,
    Tokens,
    served_slots,
)

TRACE_BYTES = 10_000_000
DECODED_TOGETHER = 256  # rows; equals `rollout.port.SamplingParams.batch_size` (a test compares them)
_TAKEN = ("policy", "rollout", "reward", "main", "collocated", "sleep", "start", "values", "update", "weights")


def _free(role: str) -> str:
    if role in _TAKEN:
        raise ValueError(f"must be a name other than {', '.join(_TAKEN)}, got {role!r}")
    return role


RoleWord = Annotated[str, Field(pattern=ROLE_NAME), AfterValidator(_free)]


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


class SamplingConfig(TrainingConfig):
    """The samples of a step: their number, their length and their scoring."""

    per_step: ClassVar[str] = "prompts_per_step"
    reads: ClassVar[Reads] = "prompts"
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
    # models that the rewards call
    models: Models = Field(default_factory=dict, exclude_if=lambda models: not models)
    probe: ProbeConfig | None = None
    optimizer: PolicyGradientOptimizerConfig = PolicyGradientOptimizerConfig()
    trace: TraceConfig = TraceConfig()
    # the engine that samples
    rollout: RolloutConfig = Field(default=RolloutConfig(), exclude_if=RolloutConfig().__eq__)

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that digests are the same as in Posttrain versions with fewer fields."""
        said: dict[str, Any] = handler(self)
        return {name: value for name, value in said.items() if value or name not in ("stop", "stream_gradients")}

    @model_validator(mode="after")
    def _models_are_called(self) -> Self:
        if self.models and not self.functions:
            raise ValueError(
                f"models.{next(iter(self.models))} needs a reward function that calls it, got none; add one"
            )
        return self

    @model_validator(mode="after")
    def _servers_use_temperature_1(self) -> Self:
        if self.remote and self.temperature != 1:
            raise ValueError(
                f"temperature must be 1 with {next(iter(self.remote))} at a url, whose server computes "
                f"log-probabilities at 1, got {self.temperature:g}; set temperature: 1, or name a model of this project"
            )
        return self

    @property
    def samples(self) -> int:
        """The number of samples in a step."""
        return self.prompts_per_step * self.group_size

    @property
    def trained_samples(self) -> int:
        """The maximum number of samples in a step that are trained on."""
        return self.samples

    @property
    def documents(self) -> int:
        """The maximum number of documents in one optimiser step."""
        return self.trained_samples

    @property
    def rounds(self) -> int:
        """The maximum number of times that a step samples the number of responses on which it trains."""
        return 1

    @property
    def passes(self) -> int:
        """The maximum number of times that a response is trained on, over all roles."""
        return 1

    @property
    def step_tokens(self) -> int | None:
        """The maximum number of tokens that a step may spend; None: enough for every sample and every update."""
        return None

    @property
    def lagging(self) -> int:
        """The number of steps by which sampling runs ahead of training."""
        return 0

    @property
    def correction(self) -> str:
        """The correction of samples of another policy or engine, whose tokens are computed again; empty: none."""
        return ""

    @property
    def streams(self) -> bool:
        """Whether gradients are summed while other groups of the step are still sampled."""
        return False

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        return super().inputs() | reward_slots("reward", self.functions) | served_slots(self.models)

    def row_needs(self) -> dict[str, RowNeeds]:
        """Return the requirements for the rows of the data and of the probe."""
        found = {"data": RowNeeds(reserve=self.response_tokens)}
        if self.probe:
            found["probe"] = RowNeeds(reserve=self.max_new_tokens, answer=True, first=self.probe.items)
        return found

    def work(self) -> dict[str, float]:
        """Return the planner's factors; none while the number of steps is unknown."""
        if not self.steps:
            return {}
        samples, steps = self.samples, self.steps
        again = 0 if holds_sessions(self.rollout.engine) else self.turns_most - 1  # turns that read earlier ones again
        return {
            "steps": steps,
            "documents": steps * samples,
            "prompts": steps * (self.prompts_per_step + again * samples),
            **({"again": steps * samples * self.read_again} if again else {}),
            "trained": steps * self.trained_samples * self.passes,
            "max_new_tokens": self.response_tokens,
            **({"rounds": self.rounds} if self.rounds > 1 else {}),
            "least": self.least_tokens,
        }

    @property
    def least_tokens(self) -> int:
        """The least tokens before the last step, and the most of the last step: see `StageConfig.work`."""
        return (self.sure_steps - 1) * (self.prompts_per_step + self.samples) + self.last_step

    @property
    def last_step(self) -> int:
        """The maximum number of tokens in a step, at one token for each prompt."""
        trained = self.trained_samples * (1 + self.response_tokens)
        return self.prompts_per_step + self.samples * self.response_tokens + self.passes * trained

    def load(self, kind: str) -> Load:
        """See `StageConfig.load`."""
        scored = self.functions is not None
        return replace(
            super().load(kind),
            rows=DECODED_TOGETHER,
            response_tokens=self.response_tokens,
            samples=self.samples,
            reward_timeout=written(self.reward_timeout) if scored else None,
            scored=scored,
            lag=self.lagging,
            correction=self.correction,
            streams=self.streams,
        )

    def engines(self) -> dict[str, tuple[str, dict[str, bool]]]:
        """See `StageConfig.engines`; only a rollout in the process of the whole policy reads the policy's weights."""
        policy, rollout = (self.placement.pool_of(role.name) for role in (POLICY, ROLLOUT))
        needs = {"stop": bool(self.stop), "attest": policy != rollout or policy.ranks > 1, "sessions": False}
        return super().engines() | {ROLLOUT_ENGINE: (self.rollout.engine, needs)}

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
        """The maximum tokens that later turns of a sample read again, without its prompt, if there are no sessions."""
        each = self.max_new_tokens + self.observed_most
        return sum(turn * each - self.observed_most for turn in range(1, self.turns_most))

    @property
    def remote(self) -> dict[str, ServedConfig]:
        """The roles whose models are on other servers."""
        return {}

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the policy, the rollout, and the reward if there is one."""
        return (POLICY, ROLLOUT, *([REWARD] if self.functions else []))

    def _placed(self, role: RoleSpec) -> RoleSpec:
        given = self.remote.get(role.name)
        return replace(role, model="", url=str(given.url)) if given else role


class TurnsConfig(SamplingConfig):
    """Several responses per sample; between them come observations from the algorithm's `observe(row, responses)`.

    A package's algorithm with turns lists this class before its other base class:
    `class TalkConfig(TurnsConfig, PPOConfig)`.
    """

    turns: Annotated[int, Field(ge=1, le=64)] = 1  # maximum responses of a sample
    observation_tokens: NonNegative = 0  # maximum tokens of an observation between two responses
    # maximum seconds for one call of observe; a call that takes longer ends only its own sample
    observe_timeout: Seconds = Field(default=60.0, exclude_if=(60.0).__eq__)
    # maximum number of calls of observe at a time, in threads of one process; with more than 1, observe must be
    # thread-safe and must not use the global random generators
    observe_concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(default=1, exclude_if=(1).__eq__)

    @model_validator(mode="after")
    def _turns_observe(self) -> Self:
        if (self.turns > 1) != (self.observation_tokens > 0):
            raise ValueError(
                f"turns and observation_tokens must be set together, got turns {self.turns} and observation_tokens "
                f"{self.observation_tokens}; set both, or neither"
            )
        for name in ("observe_timeout", "observe_concurrency"):
            if self.turns == 1 and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs turns >= 2, got turns 1; set turns, or remove {name}")
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

    model: RoleModel | None = None  # its initial model, or a model on another server; None: the stage's
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
        if isinstance(self.model, ServedConfig) and (self.trained or self.head != "language"):
            raise ValueError("a role with a url needs head: language and trained: false; name a model of this project")
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
        named = {name: role.model for name, role in self.declared.items() if isinstance(role.model, str)}
        own = {f"{DECLARED}{name}": ("model", model) for name, model in named.items()}
        return super().inputs() | {"recipe": ("recipe", self.recipe)} | own

    @property
    def remote(self) -> dict[str, ServedConfig]:
        """The declared roles that are on other servers."""
        return {name: role.model for name, role in self.declared.items() if isinstance(role.model, ServedConfig)}

    @model_validator(mode="after")
    def _terms_score(self) -> Self:
        terms = self.reward if isinstance(self.reward, dict) else {self.reward: 1.0}
        odd = next((name for name, role in self.declared.items() if name in terms and role.head != "score"), None)
        if odd is not None:
            raise ValueError(f"reward.{odd} is the role {odd}, which needs head: score, got {self.declared[odd].head}")
        return self

    @property
    def step_tokens(self) -> int | None:
        """The maximum number of tokens that a step may spend, as configured."""
        return self.tokens_per_step

    @property
    def least_tokens(self) -> int:
        """The most tokens of the last step; the class decides which documents it trains on in the other steps."""
        return self.tokens_per_step or self.last_step

    @property
    def passes(self) -> int:
        """The number of trained roles: by default, each is trained once on a response."""
        return sum(role.trained for role in self.roles())

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the roles of `SamplingConfig`, and the declared roles."""
        policy, *others = super().roles()
        return (policy, *(self._placed(role.spec(name)) for name, role in self.declared.items()), *others)

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
    # the frozen model to learn from; it must have the student's tokenizer
    teacher: RoleModel
    # number of the teacher's likeliest tokens at every position; all other tokens count as one outcome. 64 tokens
    # account for nearly all of the probability mass, and take 512 bytes for each response token
    top_k: Annotated[int, Field(ge=1, le=10**6)] = 64
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float | None = Field(default=None, gt=0, lt=1)  # with jsd, the teacher's share of the mixture; None: 0.5
    mini_batches: Rows = 1  # optimiser steps per rollout batch

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
        return super().inputs() | ({"teacher": ("model", self.teacher)} if isinstance(self.teacher, str) else {})

    @property
    def remote(self) -> dict[str, ServedConfig]:
        """The teacher, if it is on another server."""
        return {"teacher": self.teacher} if isinstance(self.teacher, ServedConfig) else {}

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the roles of `SamplingConfig` and a teacher; a token's id and log-probability take four bytes each."""
        policy, *others = super().roles()
        return (policy, self._placed(replace(TEACHER, wide=8 * self.top_k)), *others)
