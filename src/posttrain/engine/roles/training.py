"""Workers of trainable and frozen roles, and the columns of their predictions.

A role that learns is the policy, a critic or a reward model; the worker of such a role does not depend on the engine.
The torch `TrainEngine` has whole parameters on one rank, and uses FSDP2 on several ranks, according to the `Sharding`
of its learner. Frozen roles, such as reference and teacher, are whole on every rank and sleep between their phases, or
are sharded over the ranks, in which case every rank keeps its shards.

A prediction is written to its column of the batch.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from posttrain.domain.engines import OWN_ENGINES, TRAIN_ENGINE, installed_engine
from posttrain.engine.algorithms.objectives import LossParts, Objective
from posttrain.engine.batch import Need, Predictions, TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.adapters import attached
from posttrain.engine.models.files import ModelSource, ScalarSource, save_model
from posttrain.engine.models.language_model import LanguageModel, adopt_classifier, adopt_module
from posttrain.engine.models.logprobs import Model, predict, predict_topk, predictable
from posttrain.engine.models.sharding import (
    FullySharded,
    Layout,
    Shard,
    Sharding,
    Unsharded,
    local,
    open_sequence_group,
)
from posttrain.engine.roles.learner import Learner
from posttrain.engine.roles.port import Division, TrainEngine, Update
from posttrain.engine.roles.remote import RemoteModel, RemoteSource
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights.checkpoint import read_role
from posttrain.engine.weights.stream import Attestation, Bucket, WeightSource, carried
from posttrain.engine.wide import TopK, WideRows, fetched
from posttrain.pacing.balance import micro_batches


def with_prediction(batch: TokenBatch, column: str, need: Need, found: Tensor) -> TokenBatch:
    """Return the batch with a prediction as a column: scores are per document, other predictions per token."""
    return batch.with_document_columns(**{column: found}) if need == "scores" else batch.with_columns(**{column: found})


class TorchEngine:
    """`TrainEngine` in torch.

    Args:
        context: the rank's context; with several ranks the parameters are sharded over them.
        model: the model, trained in place.
        optimizer, runtime, steps, seed, dropout, first: see `Learner`.
        temperature: the sampling temperature at which log-probabilities are computed.
    """

    def __init__(
        self,
        context: RankContext,
        model: Model,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        steps: int,
        seed: int,
        dropout: bool = False,
        temperature: float = 1.0,
        first: int = 0,
    ) -> None:
        self.model: Model = replace(
            model, sequence=open_sequence_group(context.rank, context.size, context.sequence_parallel)
        )
        self.learner = Learner(
            context, self.model.module, optimizer, runtime, steps=steps, seed=seed, dropout=dropout, first=first
        )
        self._temperature, self._rank = temperature, context.rank
        held = self.learner.sharding.live() if attached(model.module) else {}
        self._begun = {name: tensor.clone() for name, tensor in held.items()}

    def forward(self, batch: TokenBatch, needs: Set[Need]) -> Predictions:
        """See `TrainEngine`."""
        shards, micros = self.learner.split(batch)

        def forward(micro: TokenBatch) -> dict[str, Tensor]:
            predicted = self.predict(micro, needs)
            return {need: predicted.of(need) for need in needs}

        found = self.learner.evaluate(micros, self.learner.dummy(batch), forward)
        if not found:
            return Predictions(**{need: torch.zeros(0) for need in needs})
        parts = []
        for micro, predicted in zip(micros, found, strict=True):
            filled = replace(micro, token_columns={}, document_columns={}, wide_columns={})
            for need in needs:
                filled = with_prediction(filled, need, need, predicted[need])
            parts.append(filled)
        gathered = TokenBatch.gather(parts, shards)
        return Predictions(**{need: gathered.column(need).to(batch.device) for need in needs})

    @contextmanager
    @torch.no_grad()
    def begun(self) -> Iterator[None]:
        """Compute with the adapter of the stage's start during the block: the reference, without a second base.

        Nothing trains or samples during the block.
        """
        live = self.learner.sharding.live()
        now = {name: tensor.clone() for name, tensor in live.items()}
        try:
            for name, tensor in live.items():
                tensor.copy_(self._begun[name])
            yield
        finally:
            self.learner.sharding.write_back()
            for name, tensor in live.items():
                tensor.copy_(now[name])

    def step(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        step: int,
        part: int = 0,
        record: bool = False,
        more: bool = False,
        divide: Division | None = None,
    ) -> Update:
        """See `TrainEngine`."""
        shards, micros = self.learner.split(batch)
        seen: list[TokenBatch] = []

        def forward(micro: TokenBatch) -> LossParts:
            predicted = self.predict(micro, objective.needs)
            if record and len(seen) < len(micros):
                bare = replace(micro, wide_columns={})  # the controller receives no wide columns
                known = "logprobs" in objective.needs
                seen.append(bare.with_columns(current_logprobs=predicted.of("logprobs")) if known else bare)
            return objective(micro, predicted)

        metrics = self.learner.step(
            micros, self.learner.dummy(batch), forward, step=step, part=part, more=more, divide=divide
        )
        if not record:
            return Update(metrics)
        found = TokenBatch.gather(seen, shards) if seen else replace(batch, wide_columns={})
        return Update(metrics, found.to("cpu"))

    def predict(self, micro: TokenBatch, needs: Set[Need]) -> Predictions:
        """Return the predictions on one micro-batch, with gradients if enabled."""
        return predict(self.model, micro, needs, temperature=self._temperature)

    def export(self) -> Iterator[Shard]:
        """See `TrainEngine`."""
        return self.learner.sharding.export()

    def save(self, path: Path, role: str) -> dict[str, str]:
        """See `TrainEngine`."""
        return self.learner.save(path, role)

    def restore(self, path: Path, role: str) -> None:
        """See `TrainEngine`."""
        self.learner.restore(*read_role(path, role, self.learner.sharding.rows()))

    @torch.no_grad()
    def write_model(self, folder: Path) -> None:
        """See `TrainEngine`; rank 0 writes."""
        save_model(self.model, None, folder, self.learner.exported(), write=self._rank == 0)


@final
class TrainWorker:
    """One rank of a role that learns.

    Args:
        context: the rank's context; a single rank lends its model to a rollout engine on the same rank.
        model: a folder, or, in the controller's process, a loaded model.
        optimizer: AdamW and schedule.
        runtime: micro-batch budget and other settings.
        name: the role, which names the files in a checkpoint: policy, critic, reward_model.
        steps: number of steps of the whole stage, for the schedule.
        seed: the stage's seed, for dropout.
        dropout: whether dropout is active in training (`Learner`).
        temperature: the sampling temperature at which log-probabilities are computed.
        first: the stage step of the first update, at which the schedule begins.
        engine: torch, or the name of an engine of an installed package.
    """

    def __init__(
        self,
        context: RankContext,
        model: ModelSource | ScalarSource | Model,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        name: str = "policy",
        steps: int,
        seed: int,
        dropout: bool = False,
        temperature: float = 1.0,
        first: int = 0,
        engine: str = "torch",
    ) -> None:
        opened = model.open(context.device) if isinstance(model, ModelSource | ScalarSource) else model
        self._epsilon: float = torch.finfo(next(opened.module.parameters()).dtype).eps
        make: Callable[..., TrainEngine] = TorchEngine
        if engine not in OWN_ENGINES[TRAIN_ENGINE]:
            make = partial(installed_engine(TRAIN_ENGINE, engine).open, TrainEngine)
        self.engine = make(
            context,
            opened,
            optimizer,
            runtime,
            steps=steps,
            seed=seed,
            dropout=dropout,
            temperature=temperature,
            first=first,
        )
        self._role, self._rank = name, context.rank
        self._source = WeightSource(self.engine.export, carried(self.engine.model.module), context.device)
        context.lend(self._source)
        if context.size == 1:  # readers in place need whole weights
            context.lend(self.engine.model)

    def update(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        step: int,
        part: int = 0,
        record: bool = False,
        more: bool = False,
        divide: Division | None = None,
    ) -> Update:
        """Do one optimiser step of the whole group on a mini-batch; see `TrainEngine.step`.

        This rank has a shard of the mini-batch; the shard's rows of wide columns are fetched first.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
            InputError: the model does not predict a need of the objective.
        """
        whole = replace(batch, wide_columns=fetched(batch.wide_columns))
        return self.engine.step(whole, objective, step=step, part=part, record=record, more=more, divide=divide)

    def fill(self, batch: TokenBatch, column: str, need: Need) -> TokenBatch:
        """Return the batch with a column of the model's current predictions, without gradients or dropout."""
        found = self.engine.forward(batch, {need}).of(need)
        return with_prediction(batch, column, need, found).seen_by(self._role, self._rank)

    def recall(self, batch: TokenBatch, column: str, need: Need) -> TokenBatch:
        """Return the batch with a column of the predictions that the model made at the stage's start.

        This is the reference of a model with an adapter: the same base, with the adapter of the start. Collective.
        """
        assert isinstance(self.engine, TorchEngine), "plan refuses adapters with other engines"
        with self.engine.begun():
            found = self.engine.forward(batch, {need}).of(need)
        return with_prediction(batch, column, need, found).seen_by("reference", self._rank)

    def attest(self, layout: Layout) -> tuple[Attestation, int]:
        """Attest this rank's weights in the readers' layout; return the attestation, and the number of buckets.

        Raises:
            IntegrityError: names or shapes differ from the reader's.
        """
        return self._source.attest(layout)

    def bucket(self) -> Bucket:
        """Return the next bucket of the weights attested last; after the last bucket, an empty bucket."""
        return self._source.bucket()

    def save(self, path: Path) -> dict[str, str]:
        """Write this rank's part of a checkpoint; return a map from file name to digest."""
        return self.engine.save(path, self._role)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint (verified by the caller), written by any number of ranks.

        Raises:
            IntegrityError: the checkpoint does not fit the model.
        """
        self.engine.restore(path, self._role)

    def save_model(self, folder: Path) -> None:
        """Write weights and configuration in the Hugging Face format; rank 0 writes. Collective."""
        self.engine.write_model(folder)

    def predicts(self) -> frozenset[Need]:
        """Return the predictions that the model supports."""
        return predictable(self.engine.model)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self.engine.model.fallbacks()

    def epsilon(self) -> float:
        """Return the machine epsilon of the compute dtype, which may be less precise than the optimiser's copy."""
        return self._epsilon

    def vocabulary(self) -> int:
        """Return the size of the model's vocabulary."""
        return int(self.engine.model.config.vocab_size)

    def context_length(self) -> int:
        """Return the maximum number of tokens in a prompt with its response."""
        return self.engine.model.context_length


@final
class FrozenWorker:
    """One rank of a frozen role: a whole model with separate storage, which sleeps between phases, or a sharded model.

    The model may also be on another server (`RemoteModel`), and then takes no memory here.

    A sleeping model on a GPU moves to the host's memory. On the CPU, a model from a folder is dropped, and read again
    when needed (its pages are in the file cache); a model that cannot be read again stays in memory.

    A sharded model does not sleep: its shards stay, and its layers are gathered while they compute. Calls that compute
    are collective, so a rank without items computes on a dummy batch while other ranks still have micro-batches.

    Args:
        context: the rank's context.
        model: a folder, an address, or, in the controller's process, a model, which is copied before it changes.
        name: the role, for the provenance of the columns that it fills: reference, reward_model, teacher.
        temperature: the sampling temperature at which log-probabilities are computed.
        micro_batch_tokens: maximum tokens per forward pass.
        vocabulary: size of the learner's vocabulary, which limits the likeliest tokens; None: the model's own.
        shard: whether the model is sharded over the ranks, if there are several.

    Raises:
        InputError: the model is to be sharded over ranks that cannot communicate.
    """

    def __init__(
        self,
        context: RankContext,
        model: ModelSource | ScalarSource | Model | RemoteSource,
        *,
        name: str = "reference",
        temperature: float = 1.0,
        micro_batch_tokens: int,
        vocabulary: int | None = None,
        shard: bool = False,
    ) -> None:
        self._vocabulary, self._sharded = vocabulary, shard and context.size > 1
        if self._sharded:
            context.need_collectives(name)
        self._source, self._device, self._rank = model, torch.device(context.device), context.rank
        self._role, self._temperature, self._micro_batch_tokens = name, temperature, micro_batch_tokens
        self._remote: RemoteModel | None = model.open() if isinstance(model, RemoteSource) else None
        self._model: Model | None = None if self._remote else self._open()
        # available while the model sleeps
        self._predicts = predictable(self._model) if self._model else frozenset[Need]({"logprobs"})
        self._sharding: Sharding | None = None
        if self._sharded and self._model:
            self._sharding = FullySharded(self._model.module, context.device)

    @torch.no_grad()
    def fill(self, batch: TokenBatch, column: str, need: Need) -> TokenBatch:
        """Return the batch with a column of the model's predictions. An empty batch needs no computation."""
        if self._remote:
            logprobs = self._remote.logprobs(batch).to(batch.device)
            return with_prediction(batch, column, need, logprobs).seen_by(self._role, self._rank)
        model = self._awake()

        def forward(micro: TokenBatch) -> dict[str, Tensor]:
            return {need: predict(model, micro, {need}, temperature=self._temperature).of(need)}

        shards, parts = [], []
        for items, micro, found in self._computed(batch, forward):
            shards.append(items)
            parts.append(with_prediction(micro, column, need, found[need]))
        gathered = TokenBatch.gather(parts, shards) if parts else with_prediction(batch, column, need, torch.zeros(0))
        return gathered.seen_by(self._role, self._rank)

    @torch.no_grad()
    def hold(self, batch: TokenBatch, width: int) -> WideRows:
        """Return the `width` likeliest tokens at every response token, with their log-probabilities.

        The rows stay on this rank; processes that need the rows fetch them (`WorkerGroup.map_stored`).

        Raises:
            InputError: the model is not a language model, or its vocabulary has fewer than `width` tokens.
        """
        if self._remote:
            return self._remote.hold(batch, width, self._vocabulary)
        model = self._awake()
        counts = batch.response_lengths.tolist()
        starts, held = [0, *accumulate(counts)], TopK.empty(sum(counts), width)

        def forward(micro: TokenBatch) -> dict[str, Tensor]:
            found = predict_topk(model, micro, width, temperature=self._temperature, vocabulary=self._vocabulary)
            return {"ids": found.ids, "logprobs": found.logprobs}

        for items, _, tensors in self._computed(batch, forward):
            found, begin = TopK(tensors["ids"], tensors["logprobs"]), 0
            for document in batch.documents_of(items):
                held.rows(starts[document], starts[document + 1]).put(found.rows(begin, begin + counts[document]))
                begin += counts[document]
        return WideRows(held, tuple(counts))

    def _computed(
        self, batch: TokenBatch, forward: Callable[[TokenBatch], dict[str, Tensor]]
    ) -> Iterator[tuple[tuple[int, ...], TokenBatch, Mapping[str, Tensor]]]:
        """Yield the items of each micro-batch, the micro-batch, and the results of `forward`.

        All ranks of a sharded role call `forward` the same number of times.
        """
        shards = micro_batches(batch.item_lengths, batch.item_lengths, self._micro_batch_tokens)
        sharding = self._sharding or Unsharded(self._awake().module)
        for at in range(sharding.rounds(len(shards))):
            idle, whole = at >= len(shards), len(shards) == 1
            micro = batch.dummy() if idle else batch if whole else batch.select_items(shards[at])
            parts = sharding.compute(lambda m: LossParts(torch.zeros(()), forward(m)), micro.to(self._device))
            if not idle:
                yield shards[at], micro, parts.sums
        sharding.write_back()  # drops the gathered embedding and head

    def predicts(self) -> frozenset[Need]:
        """Return the predictions that the model supports, including likeliest tokens (`hold`) for a language model."""
        likeliest = frozenset[Need]({"topk"})
        return self._predicts | likeliest if "logprobs" in self._predicts else self._predicts

    def context_length(self) -> int:
        """Return the maximum number of tokens in a prompt with its response."""
        return self._remote.context_length if self._remote else self._awake().context_length

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return {} if self._remote else self._awake().fallbacks()

    def sleep(self) -> int:
        """Free the device's memory until the next call; return the bytes that stay resident. Shards stay."""
        if self._sharded:
            return self.resident_bytes()
        if self._model is not None and self._device.type == "cuda":
            self._model.module.to("cpu")
            torch.cuda.empty_cache()
        elif isinstance(self._source, ModelSource | ScalarSource):
            self._model = None
        return self.resident_bytes()

    def resident_bytes(self) -> int:
        """Return the bytes of weights on this rank's device (on a CPU: in this rank's memory)."""
        parameters = self._model.module.parameters() if self._model else ()
        held = (local(parameter) for parameter in parameters)
        return sum(p.numel() * p.element_size() for p in held if p.device.type == self._device.type)

    def _awake(self) -> Model:
        """Return the model on its device."""
        if self._model is None:
            self._model = self._open()
        elif next(self._model.module.parameters()).device.type != self._device.type:
            self._model.module.to(self._device)
        return self._model

    def _open(self) -> Model:
        source = self._source
        assert not isinstance(source, RemoteSource), "predictions of a server need no model here"
        if isinstance(source, ModelSource | ScalarSource):
            model = source.open(str(self._device))
            model.module.requires_grad_(False)
            return model
        module = copy.deepcopy(source.module).requires_grad_(False)
        return adopt_module(module) if isinstance(source, LanguageModel) else adopt_classifier(module)
