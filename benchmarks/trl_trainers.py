"""Set-up and timing of TRL's trainers, for the benchmark of training."""

from __future__ import annotations

import statistics
import time
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from posttrain.engine.settings import OptimizerConfig


class Clock(TrainerCallback):
    """CPU time at the end of every step of a Hugging Face trainer."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.process_time())

    @property
    def seconds(self) -> float:
        """Return the seconds per step, without the first step."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def trainer_options(steps: int, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return options: one step more than is timed, Posttrain's optimizer settings, no saving, no logging."""
    return {
        "max_steps": steps + 1,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": 0.0,
        "max_grad_norm": optimizer.max_grad_norm,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


def seconds_of(trainer: Any, clock: Clock) -> float:
    """Train; return the seconds per step."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.seconds


def mean_loss(trainer: Any) -> float:
    """Return the mean loss of the timed steps."""
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return statistics.mean(losses[1:])
