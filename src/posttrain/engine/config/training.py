"""The configuration of a stage, as a plan and its job read it, and that of stages that train on given rows.

Every kind of training has a length, probes, and settings for devices and computation. Plans and jobs call the methods
of `StageConfig` and never ask for the class, so a package's kind overrides what differs.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from posttrain.domain.engines import OWN_ENGINES, TRAIN_ENGINE
from posttrain.domain.kinds import DocumentUnit, ItemRange, Length, Load, RowNeeds, StageContract
from posttrain.domain.placement import Placement
from posttrain.domain.roles import POLICY, REFERENCE, RoleSpec, with_models
from posttrain.domain.validation import Frozen
from posttrain.engine.settings import (
    MOST_ROWS,
    AdapterConfig,
    EarlyStoppingConfig,
    LossProbeConfig,
    OptimizerConfig,
    Passes,
    Positive,
    Rows,
    RuntimeConfig,
    Tokens,
    TrainConfig,
    Word,
)

Reads = Literal["demonstrations", "pairs", "labels", "prompts"]
T = TypeVar("T")


class StageConfig(Frozen):
    """The parameters of a stage."""

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        return {}

    def outputs(self) -> dict[str, str]:
        """Return a map from the name of an output to its form."""
        return {"model": "tree"}

    def metrics(self) -> dict[str, ItemRange]:
        """Return a map from each metric that gates can read to the range of one item's value."""
        return {}

    def row_needs(self) -> dict[str, RowNeeds]:
        """Return a map from the slot of a data set to the requirements for its rows."""
        return {}

    def length(self) -> Length | None:
        """Return how many documents the stage takes from its data; None: it does not train."""
        return None

    def work(self) -> dict[str, float]:
        """Return the planner's factors: the steps, and the maximum numbers of documents read, sampled and trained on.

        `least` is the stage's minimum number of tokens, at one token for every document. The job does not start its
        last step unless the budget has room for the cost of that step (`recipes`).
        """
        return {"steps": 1}

    def load(self, kind: str) -> Load | None:
        """Return the memory and devices that the stage needs; None: it runs in one process without a model's steps.

        Raises:
            InputError: the placement names a role that the stage does not have.
        """
        return None

    def engines(self) -> dict[str, tuple[str, dict[str, bool]]]:
        """Return field → the name of its engine, and the needs of the stage (`domain.engines.PROVIDED`)."""
        return {}

    def contract(self, params: dict[str, Any], load: Load | None) -> StageContract:
        """Return what a plan needs of the stage.

        Args:
            params: the parameters, with slots instead of the names of inputs.
            load: the result of `load`.
        """
        return StageContract(
            params=params,
            inputs=self.inputs(),
            outputs=self.outputs(),
            metrics=self.metrics(),
            work=self.work(),
            rows=self.row_needs(),
            load=load,
            length=self.length(),
        )


class TrainingConfig(StageConfig):
    """A training stage. A plan, which has the number of rows, converts `epochs` into `steps`; jobs read `steps`.

    Batches continue across the end of a pass: N passes are the smallest number of steps that covers N × rows documents.
    """

    per_step: ClassVar[str]  # the name of the field with the number of documents per step
    more_passes: ClassVar[str] = ""  # appended to an error if `epochs` meant something else in earlier versions
    reads: ClassVar[Reads]  # the rows of `data`
    unit: ClassVar[DocumentUnit] = "row"  # what counts as one document of `data`
    selects_by: ClassVar[str] = "probe/accuracy"  # the probe's metric that selects the best model
    lower_is_better: ClassVar[bool] = False
    dropout: ClassVar[bool] = False  # train with the dropout of the model's configuration, and of an adapter

    steps: Positive = 0  # optimiser steps, or rollout batches; 0: unknown until a plan combines `epochs` with the rows
    epochs: Passes | None = None  # passes over the data
    model: Word = "base"
    data: Word
    probe: LossProbeConfig | None = None  # a held-out measurement during training; None: no probe
    early_stopping: EarlyStoppingConfig | None = None  # ends the stage when its probe stops improving; None: never
    keep_best: bool = False  # stores the model with the best probe result as a second output
    optimizer: OptimizerConfig = OptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: Placement = Placement()
    # the engine of every role that learns
    train: TrainConfig = Field(default=TrainConfig(), exclude_if=TrainConfig().__eq__)
    # trains low-rank updates beside the frozen model instead of the whole model
    adapter: AdapterConfig | None = Field(default=None, exclude_if=lambda adapter: adapter is None)

    @model_validator(mode="after")
    def _has_a_length_and_its_probe(self) -> Self:
        if (self.steps > 0) == (self.epochs is not None):
            given = "both" if self.steps else "neither"
            raise ValueError(f"exactly one of steps and epochs must be given, got {given}{self.more_passes}")
        asked = [name for name in ("early_stopping", "keep_best") if getattr(self, name)]
        if asked and self.probe is None:
            raise ValueError(f"{asked[0]} needs a probe, got none; add probe: {{data: NAME}}")
        return self

    @model_validator(mode="after")
    def _adapter_is_possible(self) -> Self:
        if self.adapter is None:
            return self
        dropout, engine = self.adapter.lora.dropout, self.train.engine
        if dropout and not self.dropout:
            raise ValueError(
                f"adapter.lora.dropout must be 0 in this kind, which trains without dropout, got {dropout:g}"
            )
        if engine not in OWN_ENGINES[TRAIN_ENGINE]:
            raise ValueError(f"adapter needs train.engine torch, got {engine}; leave one of them out")
        if self.adapter.quantize and self.reads == "prompts":
            raise ValueError(
                "adapter.quantize must be left out of a kind that samples, whose decoder reads whole weights"
            )
        ranks = max(self.placement.pool_of(role.name).ranks for role in self.roles() if role.trained)
        if self.adapter.quantize and ranks > 1:
            raise ValueError(f"adapter.quantize needs one rank: weights of 4 bits are not sharded, got {ranks} ranks")
        return self

    def recalls(self, role: RoleSpec) -> bool:
        """Return whether a role is the policy at the stage's start, which a learner with an adapter computes itself."""
        return self.adapter is not None and role == REFERENCE

    def opened(self) -> tuple[RoleSpec, ...]:
        """Return the roles that need processes: all but those that a learner recalls."""
        return tuple(role for role in self.roles() if not self.recalls(role))

    def probes(self) -> dict[str, tuple[str, str]]:
        """Return the probe's data as an input."""
        return {"probe": ("dataset", self.probe.data)} if self.probe else {}

    def inputs(self) -> dict[str, tuple[str, str]]:
        """Return a map from slot to (asset kind, the ref written in run.yaml)."""
        return {"model": ("model", self.model), "data": ("dataset", self.data)} | self.probes()

    def outputs(self) -> dict[str, str]:
        """Return the model, and the best model by the probe if the stage stores it."""
        return {"model": "tree", "best": "tree"} if self.keep_best else {"model": "tree"}

    def length(self) -> Length | None:
        """Return how many documents the stage takes from its data."""
        return Length("data", self.per_step, int(getattr(self, self.per_step)), self.epochs, self.unit)

    @property
    def documents(self) -> int:
        """The maximum number of documents in one optimiser step."""
        return int(getattr(self, self.per_step))

    @property
    def sure_steps(self) -> int:
        """The number of steps that the stage always takes."""
        if self.early_stopping is None or self.probe is None:
            return self.steps
        return min(self.steps, self.early_stopping.patience * self.probe.every)

    def load(self, kind: str) -> Load:
        """See `StageConfig.load`."""
        runtime, roles = self.runtime, self.opened()
        with_models(roles)  # checks the roles of a package
        return Load(
            kind=kind,
            roles=roles,
            placement=self.placement.for_roles([role.name for role in roles], self.described(kind)),
            device=runtime.device,
            dtype=runtime.dtype,
            micro_batch_tokens=written(runtime.micro_batch_tokens),
            activation_checkpointing=written(runtime.activation_checkpointing),
            shard_frozen=written(runtime.shard_frozen),
            sequence_parallel=runtime.sequence_parallel,
            documents=self.documents,
            ray_address=runtime.ray_address,
            kv_cache=written(runtime.kv_cache),
            object_store=written(runtime.object_store),
            start_timeout=written(runtime.start_timeout),
            call_timeout=written(runtime.call_timeout),
            adapter=self.adapter.size() if self.adapter else None,
        )

    def engines(self) -> dict[str, tuple[str, dict[str, bool]]]:
        """See `StageConfig.engines`."""
        learners = [role for role in self.roles() if role.trained]
        ranks = any(self.placement.pool_of(role.name).ranks > 1 for role in learners)
        values = any(role.head != "language" for role in learners)
        return {TRAIN_ENGINE: (self.train.engine, {"ranks": ranks, "values": values})}

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the stage's roles; the first is the model that it outputs."""
        return (POLICY,)

    def has(self, role: str) -> bool:
        """Return whether the stage has a role of this name."""
        return any(one.name == role for one in self.roles())

    def learning(self, role: str) -> tuple[OptimizerConfig, int]:
        """Return the optimiser of a trained role, and the number of initial steps in which the role does not learn."""
        return self.optimizer, 0

    def described(self, kind: str) -> str:
        """Return the stage's name for errors about roles, with the settings that decide which roles it has."""
        return kind


class RowsConfig(TrainingConfig):
    """A stage that reads demonstrations, pairs or labelled completions."""

    per_step: ClassVar[str] = "batch_size"
    reads: ClassVar[Reads] = "demonstrations"
    dropout: ClassVar[bool] = True
    batch_size: Rows = 64  # rows per optimiser step
    # maximum tokens of a prompt with its response; None: the model's context. Longer rows are rejected, never truncated
    max_length: Tokens | None = None

    @property
    def documents(self) -> int:
        """The number of documents in one optimiser step."""
        return self.batch_size * (1 if self.reads == "demonstrations" else 2)

    def row_needs(self) -> dict[str, RowNeeds]:
        """Return the requirements for the rows of the data and of the probe."""
        pairs = self.reads == "pairs"
        needs = RowNeeds(pairs=pairs, learn=not pairs, labels=self.reads == "labels", max_length=self.max_length)
        return {"data": needs, **({"probe": replace(needs, first=self.probe.items)} if self.probe else {})}

    def work(self) -> dict[str, float]:
        """Return the planner's factors; none while the number of steps is unknown."""
        if not self.steps:
            return {}
        size = self.batch_size * (2 if self.reads == "pairs" else 1)  # documents that are trained on
        return {"steps": self.steps, "documents": self.steps * size, "least": self.sure_steps * size}


class SFTConfig(RowsConfig):
    """Supervised fine-tuning on prompts with completions, or messages; the loss is a mean over completion tokens."""

    unit: ClassVar[DocumentUnit] = "turn"
    selects_by: ClassVar[str] = "probe/loss"
    lower_is_better: ClassVar[bool] = True


class RewardModelConfig(RowsConfig):
    """A scalar reward model from preference pairs (Bradley-Terry), saved as a sequence classifier with one label."""

    reads: ClassVar[Reads] = "pairs"

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the one role: the reward model."""
        return (replace(POLICY, name="reward_model", head="score"),)


class DPOConfig(RowsConfig):
    """Direct preference optimisation on pairs, against the frozen starting policy."""

    reads: ClassVar[Reads] = "pairs"
    dropout: ClassVar[bool] = False  # the reference has no dropout either
    beta: float = Field(default=0.1, gt=0, le=1e4)  # strength of the penalty for deviating from the reference
    # sigmoid: arXiv 2305.18290; ipo: arXiv 2310.12036, over mean log-probabilities of tokens; robust: arXiv 2403.00409
    loss: Literal["sigmoid", "ipo", "robust"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)  # assumed share of the pairs with inverted labels

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the default of `loss`, so that digests are the same as in Posttrain versions without the field."""
        said: dict[str, Any] = handler(self)
        return {name: value for name, value in said.items() if (name, value) != ("loss", "sigmoid")}

    @model_validator(mode="after")
    def _labels_are_read(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing needs loss: sigmoid or robust, got {self.label_smoothing:g} with ipo")
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("loss: robust needs label_smoothing > 0, the share of inverted labels, got 0")
        return self

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the policy, and its starting state as the reference."""
        return (POLICY, REFERENCE)


class ORPOConfig(RowsConfig):
    """Odds-ratio preference optimisation on pairs: supervised training on the chosen response, without a reference."""

    reads: ClassVar[Reads] = "pairs"
    dropout: ClassVar[bool] = False
    beta: float = Field(default=0.1, gt=0, le=1e4)  # weight of the odds-ratio term (λ in the paper)


class SimPOConfig(RowsConfig):
    """Simple preference optimisation on pairs: the mean log-probability of a response is its reward; no reference."""

    reads: ClassVar[Reads] = "pairs"
    dropout: ClassVar[bool] = False
    beta: float = Field(default=2.0, gt=0, le=1e4)  # scale of the implicit reward
    gamma: float = Field(default=1.0, ge=0, le=1e4)  # margin by which the chosen response should lead


class KTOConfig(RowsConfig):
    """Kahneman-Tversky optimisation on completions labelled as good or bad, against the frozen starting policy."""

    unit: ClassVar[DocumentUnit] = "label"
    reads: ClassVar[Reads] = "labels"
    dropout: ClassVar[bool] = False  # the reference has no dropout either
    selects_by: ClassVar[str] = "probe/loss"
    lower_is_better: ClassVar[bool] = True
    # labelled completions per optimiser step; each prompt is also paired with the completion of another row
    batch_size: Annotated[int, Field(ge=2, le=MOST_ROWS)] = 64
    beta: float = Field(default=0.1, gt=0, le=1e4)  # strength of the penalty for deviating from the reference
    desirable_weight: float = Field(default=1.0, gt=0, le=1e4)  # weight of the loss on rows with label true
    undesirable_weight: float = Field(default=1.0, gt=0, le=1e4)  # weight of the loss on rows with label false

    def roles(self) -> tuple[RoleSpec, ...]:
        """Return the policy, and its starting state as the reference."""
        return (POLICY, REFERENCE)


def written(value: T | Literal["auto"]) -> T | None:
    """Return a size as the run file gives it; None: the planner chooses it."""
    return None if value == "auto" else value
