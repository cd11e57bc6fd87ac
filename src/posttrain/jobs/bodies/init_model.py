"""Makes a randomly initialised model in Hugging Face format."""

from __future__ import annotations

import time

from posttrain.domain.canonical import derive_seed
from posttrain.domain.facts import Progress
from posttrain.domain.jobs import JobResult, Output
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.models.loading import character_tokenizer, initial_model, save_model
from posttrain.jobs.entry import Job


def body(job: Job) -> JobResult:
    """Build the model and save it to outputs/model."""
    config = InitModelConfig.model_validate(dict(job.order.params))
    tokenizer = character_tokenizer(config.characters)
    model = initial_model(config, tokenizer, derive_seed(job.order.seed, "init_model", "weights"))
    save_model(adopt_module(model), tokenizer, job.folder / "outputs" / "model")
    parameters = sum(p.numel() for p in model.parameters())
    job.sink(Progress(1, 1, "init_model", 0, time.time()))
    return JobResult("succeeded", {"model": Output("outputs/model", "tree")}, {"parameters": float(parameters)})
