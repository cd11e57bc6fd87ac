"""Configuration of every kind of stage that the engine runs, by the kind's name.

It contains the measurements of an evaluation, the parameters of a randomly initialised model, and a stage's demands on
memory and devices. The module is torch-free, because both a plan and the stage's job read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from posttrain.domain.engines import ROLLOUT_ENGINE
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import (
    OWN,
    RATE,
    SHARE,
    AlgorithmSpec,
    Driver,
    ItemRange,
    Load,
    RowNeeds,
    StageKind,
    installed_kind,
)
from posttrain.domain.placement import Placement
from posttrain.domain.rewards import JUDGES, reward_slots
from posttrain.domain.roles import ROLLOUT
from posttrain.domain.validation import Frozen
from posttrain.engine.config.sampling import DECODED_TOGETHER, SamplingConfig
from posttrain.engine.config.training import RowsConfig, StageConfig, TrainingConfig, written
from posttrain.engine.settings import (
    MOST_ROWS,
    MOST_TOKENS,
    Extract,
    Few,
    InferenceRuntimeConfig,
    Models,
    Positive,
    Reward,
    RolloutConfig,
    Seconds,
    Stop,
    SuiteName,
    Temperature,
    Tokens,
    Width,
    Word,
    Worth,
    served_slots,
)

DRAWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # defaults of sampled responses


class SuiteConfig(Frozen):
    """One evaluation suite: rows with prompts and answers, or rows with prompts whose responses a reward scores."""

    data: Word
    extract: Extract = r"(?s)(.*)"
    samples: Annotated[int, Field(ge=0, le=MOST_ROWS)] = 0  # sampled responses per item, besides the greedy response
    temperature: Temperature = 1.0  # of the sampled responses; the next three fields also apply only to them
    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0  # sample from the k likeliest tokens; 0: from all tokens
    top_p: float = Field(default=1.0, gt=0, le=1)  # sample from the likeliest tokens with this total probability
    # sample from the tokens with at least this share of the likeliest token's probability
    min_p: float = Field(default=0.0, ge=0, lt=1)
    pass_at: tuple[Positive, ...] = ()  # the values of k for pass@k, each <= samples
    max_new_tokens: Tokens = 64
    # a response, greedy or sampled, ends with the token that completes one of these strings in its text
    stop: Stop = ()
    reward: Reward | None = None  # a reward that scores every response; rows then need no answer
    reward_range: tuple[Worth, Worth] = (0.0, 1.0)  # the minimum and the maximum score of a response
    # maximum seconds to score one batch of responses; auto: 10 s, or 20 µs for each token that the batch can contain,
    # if that is more
    reward_timeout: Seconds | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _has_what_it_is_told(self) -> SuiteConfig:
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range must be two numbers, the smaller one first, got [{low:g}, {high:g}]")
        for name in ("reward_range", "reward_timeout"):
            if self.reward is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs a reward, got none; name the suite's reward")
        for name, unsaid in DRAWN.items():
            given = getattr(self, name)
            if not self.samples and given != unsaid:
                raise ValueError(f"{name} needs samples >= 1, got {given} with samples: 0; set samples")
        for k in self.pass_at:
            if k > self.samples:
                raise ValueError(f"every k of pass_at must be <= samples ({self.samples}), got {k}")
        return self

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that digests are the same as in Posttrain versions with fewer fields."""
        said: dict[str, Any] = handler(self)
        unsaid = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) == DRAWN[name]]
        unsaid += [] if self.stop else ["stop"]
        return {name: value for name, value in said.items() if name not in unsaid}

    @property
    def worth(self) -> ItemRange:
        """The range of a response's score."""
        return ItemRange(*self.reward_range)

    def metrics(self, suite: str) -> dict[str, ItemRange]:
        """Return a map from metric name to the range of one item's value.

        A response has at least one token, its end token.
        """
        ranges = {"accuracy": RATE, "response_tokens": ItemRange(1.0, self.max_new_tokens), "truncated": RATE}
        if self.samples:
            ranges["sampled_accuracy"] = SHARE
        ranges |= {f"pass@{k}": SHARE for k in self.pass_at}
        if self.reward:
            ranges |= dict.fromkeys(["reward", *(["sampled_reward"] if self.samples else [])], self.worth)
        return {f"{suite}/{name}": possible for name, possible in ranges.items()}


class EvaluateConfig(StageConfig):
    """Greedy and sampled evaluation of one model on suites; the results per item are stored as Parquet."""

    model: Word
    suites: dict[SuiteName, SuiteConfig] = Field(min_length=1)
    # models that the rewards call
    models: Models = Field(default_factory=dict, exclude_if=lambda models: not models)
    runtime: InferenceRuntimeConfig = InferenceRuntimeConfig()
    # the engine that samples
    rollout: RolloutConfig = Field(default=RolloutConfig(), exclude_if=RolloutConfig().__eq__)

    @model_validator(mode="after")
    def _models_are_called(self) -> EvaluateConfig:
        if self.models and not any(suite.reward for suite in self.suites.values()):
            raise ValueError(f"models.{next(iter(self.models))} needs a suite with a reward that calls it; add one")
        return self

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        slots = {"model": ("model", self.model)} | {f"suites.{n}": ("dataset", s.data) for n, s in self.suites.items()}
        for name, suite in self.suites.items():
            slots |= reward_slots(f"{JUDGES}{name}", suite.reward)
        return slots | served_slots(self.models)

    def outputs(self) -> dict[str, str]:
        """Return the measurements of the suites and of their items."""
        return {"metrics": "file", "items": "file"}

    def metrics(self) -> dict[str, ItemRange]:
        """Return the metrics of all suites."""
        return {name: possible for suite, c in self.suites.items() for name, possible in c.metrics(suite).items()}

    def row_needs(self) -> dict[str, RowNeeds]:
        """Return the requirements for the items of every suite."""
        return {
            f"suites.{name}": RowNeeds(
                reserve=s.max_new_tokens, answer=not s.reward, distinct=True, whole=bool(s.reward)
            )
            for name, s in self.suites.items()
        }

    def engines(self) -> dict[str, tuple[str, dict[str, bool]]]:
        """See `StageConfig.engines`."""
        needs = {"stop": any(suite.stop for suite in self.suites.values()), "attest": False, "sessions": False}
        return {ROLLOUT_ENGINE: (self.rollout.engine, needs)}

    @property
    def response_tokens(self) -> int:
        """The maximum number of tokens in a response of any suite."""
        return max(suite.max_new_tokens for suite in self.suites.values())

    def work(self) -> dict[str, float]:
        """Return the planner's factors: one step for each suite."""
        samples = sum(1 + suite.samples for suite in self.suites.values())
        return {"steps": len(self.suites), "samples": samples, "max_new_tokens": self.response_tokens}

    def load(self, kind: str) -> Load:
        """Return the needs of a rollout, the only role."""
        runtime = self.runtime
        return Load(
            kind=kind,
            roles=(ROLLOUT,),
            placement=Placement(),
            device=runtime.device,
            dtype=runtime.dtype,
            micro_batch_tokens=None,
            rows=DECODED_TOGETHER,
            response_tokens=self.response_tokens,
            kv_cache=written(runtime.kv_cache),
        )


class HarnessConfig(StageConfig):
    """An evaluation of one model by a harness, whose tasks ask the served model; the results per item are stored.

    The metrics follow from the facts of the harness (`domain.harnesses`), which only a plan can read.
    """

    model: Word
    harness: Word  # its asset: harness:NAME@VERSION, or the name alone
    # tasks or groups; (): all tasks for which the harness was fetched
    tasks: Annotated[tuple[Word, ...], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = ()
    limit: Positive | None = None  # the first documents of each task; None: all
    num_fewshot: Annotated[int, Field(ge=0, le=MOST_ROWS)] | None = None  # examples in a prompt; None: the task's
    chat: bool = False  # lm-eval: render prompts with the model's chat template; Inspect always does
    add_bos_token: bool = False  # lm-eval: encode texts with the tokenizer's special tokens
    max_length: Tokens | None = None  # tokens of a prompt with its response; None: the model's context
    max_new_tokens: Tokens = 256  # maximum tokens of a response, if the task has no limit
    temperature: float = Field(default=0.0, ge=0, le=1000)  # Inspect: of its responses; 0: greedy
    # metric → least and greatest value of an item, where the harness declares none
    ranges: dict[Annotated[str, Field(pattern=r"^\S{1,400}$")], tuple[Worth, Worth]] = Field(default_factory=dict)
    timeout: Seconds = 600.0  # maximum seconds between two requests of the harness
    runtime: InferenceRuntimeConfig = InferenceRuntimeConfig()

    @model_validator(mode="after")
    def _has_ranges_in_order(self) -> HarnessConfig:
        for metric, (low, high) in self.ranges.items():
            if not low < high:
                raise ValueError(f"ranges.{metric} must be two numbers, the smaller one first, got [{low:g}, {high:g}]")
        return self

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        named = self.harness if ":" in self.harness else f"harness:{self.harness}"
        return {"model": ("model", self.model), "harness": ("harness", named)}

    def outputs(self) -> dict[str, str]:
        """Return the measurements of the tasks and of their items."""
        return {"metrics": "file", "items": "file"}

    def load(self, kind: str) -> Load:
        """Return the needs of a rollout, the only role."""
        runtime, rows = self.runtime, DECODED_TOGETHER
        return Load(
            kind=kind, roles=(ROLLOUT,), placement=Placement(), device=runtime.device, dtype=runtime.dtype,
            micro_batch_tokens=None, rows=rows, response_tokens=self.max_new_tokens, kv_cache=written(runtime.kv_cache),
        )  # fmt: skip


class InitModelConfig(StageConfig):
    """A randomly initialised model in Hugging Face format with a character tokenizer and a chat template.

    `hidden_size` must be a multiple of `heads`, `heads` must be a multiple of `kv_heads`, and no character may occur
    twice in `characters`. The context length is in tokens; the sizes are numbers of units.
    """

    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    characters: str = (
        "0123456789+-*/=();:,.<>? \nabcdefghijklmnopqrstuvwxyzQAS"  # the vocabulary without special tokens
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
            raise ValueError("characters must not contain a character twice")
        return self


def named(path: str) -> Any:
    """Import `module` and return its object `Name`, for `module:Name`.

    Raises:
        ImportError: the module does not exist.
        AttributeError: the module has no such object.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def algorithm_config(spec: AlgorithmSpec) -> type[TrainingConfig]:
    """Return the class of the parameters of a training kind.

    Raises:
        InputError: the spec names an object that is not a class of training parameters.
    """
    found = named(spec.config)
    if not (isinstance(found, type) and issubclass(found, RowsConfig | SamplingConfig)):
        raise InputError(
            f"algorithm {spec.algorithm}: the class of its parameters must be derived from RowsConfig or "
            f"SamplingConfig, got {spec.config}"
        )
    return found


def _own(kind: StageKind) -> type[StageConfig]:
    if kind.algorithm:
        return algorithm_config(kind.algorithm)
    return EvaluateConfig if kind.measures else InitModelConfig


STAGE_CONFIGS: dict[str, type[StageConfig]] = {
    name: _own(kind) for name, kind in OWN.items() if kind.driver is Driver.JOB
}


def config_class(kind: str, params: Mapping[str, Any]) -> type[StageConfig] | None:
    """Return the class of a stage's parameters; None: the engine has no such kind.

    The parameters of an evaluation with a harness differ from those of one with suites.

    Raises:
        InputError: the package that provides the kind cannot be loaded.
    """
    own = STAGE_CONFIGS.get(kind)
    if own is EvaluateConfig and "harness" in params:
        return HarnessConfig
    found = None if own else installed_kind(kind)
    if found is None or found.kind.algorithm is None:
        return own
    with found.plugin.calling(f"loading {found.kind.algorithm.config}"):
        return algorithm_config(found.kind.algorithm)


def stage_config(kind: str, params: dict[str, Any]) -> StageConfig:
    """Validate the parameters of a stage.

    Raises:
        InputError: the kind is unknown.
        pydantic.ValidationError: a parameter is unknown or has a wrong type or value.
    """
    found = config_class(kind, params)
    if found is None:
        raise InputError(f"kind must be a kind that the engine implements, got {kind!r}; see posttrain plan")
    config: StageConfig = found.model_validate(params)
    return config


def training_config(kind: str, params: dict[str, Any]) -> TrainingConfig:
    """Validate the parameters of a training stage.

    Raises:
        InputError: the kind does not train.
        pydantic.ValidationError: a parameter is unknown or has a wrong type or value.
    """
    config = stage_config(kind, params)
    if not isinstance(config, TrainingConfig):
        raise InputError(f"posttrain.jobs.stage trains models, got a stage of kind {kind}")
    return config
