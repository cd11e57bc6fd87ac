"""The optimiser of every trainable role, and the learning rate as a pure function of the step.

Every trainable role runs AdamW with a schedule over micro-batches; its parameters are whole or sharded over ranks. The
split of a mini-batch into shards and micro-batches changes only memory and rounding: losses are weighted sums over
global denominators (see `algorithms.objectives`), so gradients add up. With dropout the split also changes the masks,
because every micro-batch draws a separate mask. A run is then reproducible only with the same micro-batch budget and
number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import FailureClass, IntegrityError, JobFailedError
from posttrain.engine.algorithms.objectives import LossParts
from posttrain.engine.batch import TokenBatch, keep_freed_memory
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.adapters import attached
from posttrain.engine.models.backbone import cost_model
from posttrain.engine.models.sharding import FullySharded, Unsharded, checkpoint_activations, local
from posttrain.engine.roles.port import Division
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights.checkpoint import write_role
from posttrain.pacing.balance import micro_batches

_MICRO_BATCH_TOKENS = {
    "cpu": 4096,
    "cuda": 16384,
}  # on a CPU, 16384 is 15 % slower with 1 M parameters, because it exceeds the caches
_SAVED = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(step: int, total: int, *, peak: float, warmup: int, schedule: str, final_ratio: float) -> float:
    """Return the learning rate: linear warm-up to the peak, then decay over the remaining steps.

    ::

        warm-up   (step + 1) / warmup        while step < warmup
        constant  1
        linear    1 − (1 − final)·x          x = (step − warmup) / (total − warmup)
        cosine    final + (1 − final)·(1 + cos(π·x))/2

    If the warm-up is as long as the stage, there is no decay.

    Args:
        step: 0-based optimiser step.
        total: steps of the whole stage.
        peak: learning rate at full scale.
        warmup: number of steps; the last warm-up step is the first step at the peak.
        final_ratio: rate at the end as a share of the peak.

    Raises:
        ValueError: the schedule is unknown.
    """
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = max(step - warmup, 0) / max(total - warmup, 1)
    if schedule == "constant":
        decay = 1.0
    elif schedule == "linear":
        decay = 1.0 - (1.0 - final_ratio) * done
    elif schedule == "cosine":
        decay = final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise ValueError(f"schedule must be constant, linear or cosine, got {schedule!r}")
    return peak * ramp * decay


class DivergedError(JobFailedError):
    """Training produced NaN or infinity; the role's weights and moments are as they were before the mini-batch."""

    failure_class: ClassVar[FailureClass] = FailureClass.DIVERGED


def micro_batch_tokens(runtime: RuntimeConfig, device: str) -> int:
    """Return the micro-batch budget on a device, tokens."""
    tokens = runtime.micro_batch_tokens
    return _MICRO_BATCH_TOKENS.get(torch.device(device).type, 4096) if tokens == "auto" else tokens


@final
class Learner:
    """A module's optimiser.

    Parameters in half precision get a float32 master copy, which the optimiser updates: at post-training learning
    rates, most updates of a bfloat16 weight would be rounded away.

    Args:
        context: the rank's context; with several ranks the parameters are sharded over them.
        module: updated in place, so every zero-copy reader reads the new weights immediately.
        optimizer: AdamW and schedule.
        runtime: micro-batch budget, sequence parallelism, activation checkpointing.
        steps: number of steps of the whole stage, for the schedule.
        seed: the stage's seed, for dropout.
        dropout: whether dropout is active in training. It is off for policy gradients: the ratio of a policy to itself
            must be 1.
        first: the stage step of the first update, at which the schedule begins.
    """

    def __init__(
        self,
        context: RankContext,
        module: nn.Module,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        steps: int,
        seed: int,
        dropout: bool = False,
        first: int = 0,
    ) -> None:
        context.need_collectives(type(module).__name__)
        if torch.device(context.device).type == "cpu":
            keep_freed_memory()
        self._costs = cost_model(module)  # counted before sharding
        if runtime.activation_checkpointing is True:  # a job has resolved `auto` (`planner.sizes`)
            checkpoint_activations(module)
        self.sharding = Unsharded(module) if context.size == 1 else FullySharded(module, context.device)
        self.token_budget = micro_batch_tokens(runtime, context.device)
        self._config, self._seed, self._dropout = optimizer, seed, dropout
        self._saved_as = _SAVED[runtime.save_dtype]
        self._steps, self._first = steps, first
        self._device = torch.device(context.device)
        self._rank, self._sequence_parallel = context.rank, context.sequence_parallel
        self._optimizer = torch.optim.AdamW(
            decay_groups(self.sharding.parameters(), optimizer.weight_decay),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            fused=context.size == 1,
        )
        self._module = module
        self._kept: dict[str, Tensor] = {}  # sums of the parts of an incomplete update
        module.train(dropout)

    def split(self, batch: TokenBatch) -> tuple[tuple[tuple[int, ...], ...], list[TokenBatch]]:
        """Return the units of each micro-batch of this rank, and the micro-batches on its device.

        Micro-batches are within the token budget and balanced by the model's cost.
        """
        placed = batch if batch.device == self._device else batch.to(self._device)
        lengths = placed.item_lengths
        if lengths and sum(lengths) <= self.token_budget:  # everything fits in one micro-batch
            return (tuple(range(len(lengths))),), [placed]
        shards = micro_batches(lengths, self._costs.costs(lengths), self.token_budget)
        return shards, [placed] if len(shards) == 1 else [placed.select_items(shard) for shard in shards]

    def dummy(self, batch: TokenBatch) -> TokenBatch:
        """Return `TokenBatch.dummy` on this rank's device."""
        return batch.dummy().to(self._device)

    def step(
        self,
        micros: Sequence[TokenBatch],
        dummy: TokenBatch,
        forward: Callable[[TokenBatch], LossParts],
        *,
        step: int,
        part: int = 0,
        more: bool = False,
        divide: Division | None = None,
    ) -> dict[str, float]:
        """Do one optimiser step, or a part of one.

        Args:
            micros: this rank's micro-batches; may be empty.
            dummy: computed without effect while other ranks still have micro-batches.
            forward: called once per micro-batch.
            step: 0-based stage step, for the schedule and the dropout key.
            part: number of the mini-batch in the step, or of the part in a mini-batch.
            more: whether parts follow: gradients and sums are kept for the next call, and no weight is updated.
            divide: the divisor of gradients and sums, including those kept from earlier parts.

        Returns:
            `loss`, `grad_norm` (before clipping), `learning_rate`, and the objective's sums, each computed over all
            ranks; empty with `more`.

        Raises:
            DivergedError: loss or gradient is NaN or infinite on any rank; no rank has changed weights or moments, and
                all gradients are cleared.
        """
        if divide is None and not (more and part):  # a new mini-batch: an incomplete earlier one is dropped
            self._kept = {}
            self._optimizer.zero_grad(set_to_none=True)
        sums, self._kept = self._kept, {}
        for index in range(self.sharding.rounds(len(micros))):
            idle = index >= len(micros)
            with self._dropout_key(step, part, index):
                parts = self.sharding.compute(forward, dummy if idle else micros[index])
            (parts.loss * 0.0 if idle else parts.loss).backward()  # type: ignore[no-untyped-call]
            self.sharding.collect_gradients()
            # a sharding that scales the loss returns the unscaled loss in the sums
            for name, value in {"loss": parts.loss.detach(), **parts.sums}.items():
                value = torch.zeros_like(value) if idle else value
                sums[name] = sums[name] + value if name in sums else value
        if more:
            self._kept = sums
            return {}
        if divide:
            sums = self._divided(sums, divide)
        norm = self.sharding.clip_gradients(self._config.max_grad_norm)
        report = self._totals(sums)
        if not (math.isfinite(report["loss"]) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise DivergedError(
                f"training diverged at step {step + 1}: loss {report['loss']:.4g}, gradient norm {norm:.4g} must be "
                f"finite; lower optimizer.learning_rate (now {self._config.learning_rate:g}) or raise warmup_steps"
            )
        return {**report, "grad_norm": norm, "learning_rate": self._apply(step)}

    @torch.no_grad()
    def evaluate(
        self, micros: Sequence[TokenBatch], dummy: TokenBatch, forward: Callable[[TokenBatch], Mapping[str, Tensor]]
    ) -> list[Mapping[str, Tensor]]:
        """Return the results of `forward` for each micro-batch of this rank, by name, without gradients or dropout.

        Every rank calls `forward` the same number of times.
        """
        self._module.eval()
        try:
            given = [*micros, *[dummy] * (self.sharding.rounds(len(micros)) - len(micros))]
            found = [
                self.sharding.compute(lambda micro: LossParts(torch.zeros(()), forward(micro)), one) for one in given
            ]
            return [parts.sums for parts in found[: len(micros)]]
        finally:
            self._module.train(self._dropout)

    def parameters(self) -> dict[str, Tensor]:
        """Return trained parameters by name at the optimiser's precision, whole or this rank's rows (not copies)."""
        return {name: local(p.detach()) for name, p in self.sharding.parameters().items()}

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW state by `<parameter>/exp_avg`, `/exp_avg_sq`, `/step` (not copies); empty before any update."""
        state, trained = self._optimizer.state, self.sharding.parameters()
        return {f"{name}/{key}": local(state[p][key]) for name, p in trained.items() if p in state for key in _MOMENTS}

    def save(self, path: Path, role: str) -> dict[str, str]:
        """Write this rank's part of a checkpoint; return a map from file name to digest."""
        sharding = self.sharding
        return write_role(path, role, sharding.rank, sharding.ranks, self.parameters(), self.moments(), sharding.rows())

    def exported(self) -> dict[str, Tensor] | None:
        """Return the weights for a saved model, on rank 0; None: use the module's current weights. Collective."""
        whole = self.sharding.ranks == 1 and self._saved_as is None
        return None if whole else self.sharding.gathered(self._saved_as, trained=attached(self._module) is not None)

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Restore parameters and moments bit for bit, in place, so zero-copy readers stay valid.

        A parameter that never had a gradient has no moments, in the checkpoint and after it is restored.

        Raises:
            IntegrityError: names or shapes differ from this model's, or moments are incomplete.
        """
        own = self.parameters()
        wanted = {name: tuple(p.shape) for name, p in own.items()}
        given = {name: tuple(p.shape) for name, p in parameters.items()}
        if wanted != given:
            odd = sorted(set(wanted.items()) ^ set(given.items()))[0][0]
            raise IntegrityError(
                f"checkpoint does not fit the model: parameter {odd} differs in name or shape; start without the "
                "checkpoint"
            )
        begun = {name.rpartition("/")[0] for name in moments}
        missing = {f"{name}/{key}" for name in begun & wanted.keys() for key in _MOMENTS} ^ moments.keys()
        if missing:
            raise IntegrityError(
                f"checkpoint does not fit the model: moment {min(missing)} differs; start without the checkpoint"
            )
        for name, trained in self.sharding.parameters().items():
            own[name].copy_(parameters[name])
            if name in begun:
                self._optimizer.state[trained] = {
                    key: _like(trained, moments[f"{name}/{key}"], whole=key == "step") for key in _MOMENTS
                }
        self.sharding.write_back()

    @torch.no_grad()
    def _divided(self, sums: Mapping[str, Tensor], divide: Division) -> dict[str, Tensor]:
        for parameter in self.sharding.parameters().values():
            if parameter.grad is not None:
                parameter.grad.div_(divide.loss)
        return {name: value / (divide.loss if name == "loss" else divide.metrics) for name, value in sums.items()}

    def _totals(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return sums over the micro-batches of all ranks. Names are equal on all ranks, dummies included."""
        if not sums:
            return {"loss": 0.0}
        names = sorted(sums)
        stacked = torch.stack([sums[name].detach().double() for name in names])
        summed = self.sharding.total(stacked) / self._sequence_parallel  # ranks of a sequence group have the same loss
        return dict(zip(names, summed.tolist(), strict=True))

    @torch.no_grad()
    def _apply(self, step: int) -> float:
        c = self._config
        rate = learning_rate(
            step - self._first,
            self._steps - self._first,
            peak=c.learning_rate,
            warmup=c.warmup_steps,
            schedule=c.schedule,
            final_ratio=c.final_ratio,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.sharding.write_back()
        return rate

    @contextmanager
    def _dropout_key(self, step: int, part: int, micro: int) -> Iterator[None]:
        """Seed dropout for the block: masks are a function of (seed, step, mini-batch, micro-batch, rank).

        Ranks of a sequence group compute different tokens, and in attention different heads, so their masks differ as
        well. The global generators are unchanged afterwards.
        """
        if not self._dropout:
            yield
            return
        devices = [self._device] if self._device.type == "cuda" else []
        rank = [self._rank] if self._rank else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self._seed, "dropout", step, part, micro, *rank))
            yield


def decay_groups(parameters: Mapping[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: weight decay on matrices only.

    Vectors, which are norms and biases, are not penalised for their size.
    """
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def _like(parameter: Tensor, value: Tensor, *, whole: bool) -> Tensor:
    """Return a moment with the layout of its parameter."""
    copy = value.to(parameter.device).clone()
    if whole or not isinstance(parameter, DTensor):
        return copy
    return DTensor.from_local(
        copy, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
