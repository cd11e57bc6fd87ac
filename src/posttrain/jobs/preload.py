"""Imports the modules that every job imports, for the executor's fork server.

Importing torch, transformers and the engine takes seconds.

No module here may start a thread or open a device, because jobs are forked from this process.
"""

import os
from pathlib import Path

from posttrain.domain.errors import PosttrainError
from posttrain.jobs.entry import settle_environment
from posttrain.store.attempts import AttemptFolder

_GIVEN = os.environ.get("OMP_NUM_THREADS", "")  # the number for the first job: OpenMP reads it when torch is loaded
_THREADS = int(_GIVEN) if _GIVEN.isdigit() and int(_GIVEN) > 0 else 1
settle_environment(_THREADS)

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import posttrain.engine.recipes.grpo  # noqa: E402
import posttrain.engine.recipes.ppo  # noqa: E402
import posttrain.engine.recipes.reward_model  # noqa: E402
import posttrain.engine.recipes.sft  # noqa: E402
import posttrain.jobs.bodies.evaluation  # noqa: E402
import posttrain.jobs.bodies.training  # noqa: E402,F401

_LOADED = (AutoModelForCausalLM, AutoTokenizer)  # lazy names of transformers, imported by this access


def ready(attempt_dir: str) -> bool:
    """Return whether a job can run in a fork of this process, which requires torch's number of threads."""
    try:
        order = AttemptFolder(Path(attempt_dir)).read_order()
    except PosttrainError:
        return False  # the job reports the error of its order
    runtime = order.params.get("runtime", {})
    return isinstance(runtime, dict) and runtime.get("threads", 1) == _THREADS
