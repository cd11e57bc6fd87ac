"""The policy: the model that learns, its AdamW and its schedule.

`update` is one optimiser step. How the batch is cut into micro-batches is decided here and changes nothing but memory
and rounding: losses arrive as weighted sums over global denominators (see `algorithms.aggregation`). With dropout it
also changes which masks are drawn, since every micro-batch draws its own; so a run is reproducible for one micro-batch
budget, and another budget is another sample of the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.domain.errors import FailureClass, IntegrityError, JobFailedError
from posttrain.domain.seeds import derive_seed
from posttrain.engine.algorithms.schedule import learning_rate
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import OptimizerConfig, RuntimeConfig
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.logprobs import token_logprobs

_MICRO_BATCH_TOKENS = {
    "cpu": 4096,
    "cuda": 16384,
}  # 16384 on a CPU is 15 % slower at 1 M parameters: it leaves the caches
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class DivergedError(JobFailedError):
    """Training produced NaN or infinity; the weights of the step before are untouched."""

    failure_class: ClassVar[FailureClass] = FailureClass.DIVERGED


@dataclass(frozen=True, slots=True)
class LossParts:
    """A micro-batch's share of the step's loss, and sums to report: `LossParts(loss, {"clipped": tensor(3.)})`."""

    loss: Tensor  # scalar, differentiable
    sums: Mapping[str, Tensor]  # scalars without gradient; they add up over micro-batches


LossFunction = Callable[[TokenBatch, Tensor], LossParts]  # (micro-batch, its log-probabilities [T])


class Policy:
    """A model with its optimiser.

    Parameters below float32 get a float32 master copy which the optimiser updates: at a post-training learning rate a
    bfloat16 weight would round most updates away.

    Args:
        model: the model; updated in place, so every zero-copy reader sees the new weights at once.
        optimizer: AdamW and schedule.
        runtime: micro-batch budget.
        steps: of the whole stage, for the schedule.
        seed: the stage's seed, for dropout.
        dropout: whether the model's dropout is on while training. Off for policy gradients: the ratio of a policy to
            itself must be 1.
        temperature: log-probabilities are taken at this sampling temperature.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        steps: int,
        seed: int,
        dropout: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.model = model
        self._config, self._steps, self._seed = optimizer, steps, seed
        tokens = runtime.micro_batch_tokens
        self._micro_batch_tokens = _MICRO_BATCH_TOKENS.get(model.device.type, 4096) if tokens == "auto" else tokens
        self._dropout, self._temperature = dropout, temperature
        self._live = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._trained = {name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self._live.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        model.module.train(dropout)

    def update(self, batch: TokenBatch, loss: LossFunction, *, step: int, part: int = 0) -> dict[str, float]:
        """One optimiser step on `batch`.

        Args:
            batch: the whole mini-batch.
            loss: called once per micro-batch.
            step: 0-based stage step, for the schedule and the dropout key.
            part: which mini-batch of the step.

        Returns:
            `loss`, `grad_norm` (before clipping), `learning_rate`, and the loss function's sums over the batch.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
        """
        sums: dict[str, Tensor] = {}
        for index, micro in enumerate(batch.split(self._micro_batch_tokens)):
            with self._dropout_key(step, part, index):
                logprobs = token_logprobs(self.model, micro, temperature=self._temperature, response_only=True)
                parts = loss(micro, logprobs)
            parts.loss.backward()  # type: ignore[no-untyped-call]
            self._collect_gradients()
            for name, value in {"loss": parts.loss.detach(), **parts.sums}.items():
                sums[name] = sums[name] + value if name in sums else value
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained.values(), self._config.max_grad_norm))
        report = {name: float(value) for name, value in sums.items()}
        if not (math.isfinite(report["loss"]) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise DivergedError(
                f"training diverged at step {step + 1}: loss {report['loss']:.4g}, gradient norm {norm:.4g} must be "
                f"finite; lower optimizer.learning_rate (now {self._config.learning_rate:g}) or raise warmup_steps"
            )
        rate = self._step(step)
        return {**report, "grad_norm": norm, "learning_rate": rate}

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by name at the optimiser's precision (not copies)."""
        return {name: p.detach() for name, p in self._trained.items()}

    def moments(self) -> dict[str, Tensor]:
        """AdamW state by `<parameter>/exp_avg`, `/exp_avg_sq`, `/step` (not copies); empty before the first update."""
        state = self._optimizer.state
        return {f"{name}/{key}": state[p][key] for name, p in self._trained.items() if p in state for key in _MOMENTS}

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint bit for bit. Parameters are copied in place, so zero-copy readers stay valid.

        A parameter that never had a gradient has no moments, here as there.

        Raises:
            IntegrityError: names or shapes differ from this model's, or moments are incomplete.
        """
        wanted = {name: tuple(p.shape) for name, p in self._trained.items()}
        given = {name: tuple(p.shape) for name, p in parameters.items()}
        if wanted != given:
            odd = sorted(set(wanted.items()) ^ set(given.items()))[0][0]
            raise IntegrityError(
                f"checkpoint does not fit the model: parameter {odd} differs in name or shape; start afresh"
            )
        begun = {name.rpartition("/")[0] for name in moments}
        missing = {f"{name}/{key}" for name in begun & wanted.keys() for key in _MOMENTS} ^ moments.keys()
        if missing:
            raise IntegrityError(f"checkpoint does not fit the model: moment {min(missing)} is odd; start afresh")
        for name, trained in self._trained.items():
            trained.copy_(parameters[name])
            if trained is not self._live[name]:
                self._live[name].copy_(trained)
            self._optimizer.state.pop(trained, None)
            if name in begun:
                state = {key: moments[f"{name}/{key}"].to(trained.device).clone() for key in _MOMENTS}
                self._optimizer.state[trained] = state

    @torch.no_grad()
    def _step(self, step: int) -> float:
        c = self._config
        rate = learning_rate(
            step,
            self._steps,
            peak=c.learning_rate,
            warmup=c.warmup_steps,
            schedule=c.schedule,
            final_ratio=c.final_ratio,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for name, trained in self._trained.items():
            if trained is not self._live[name]:
                self._live[name].copy_(trained)
        return rate

    def _collect_gradients(self) -> None:
        """Add gradients of low-precision parameters to their masters in float32."""
        for name, trained in self._trained.items():
            live = self._live[name]
            if trained is not live and live.grad is not None:
                gradient = live.grad.float()
                trained.grad = gradient if trained.grad is None else trained.grad.add_(gradient)
                live.grad = None

    @contextmanager
    def _dropout_key(self, step: int, part: int, micro: int) -> Iterator[None]:
        """Dropout masks are a function of (seed, step, mini-batch, micro-batch).

        The global generators are left as they were.
        """
        if not self._dropout:
            yield
            return
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self._seed, "dropout", step, part, micro))
            yield
