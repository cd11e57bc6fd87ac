"""What the end-to-end tests run: a tiny model, tiny data and a reward that a dozen steps can learn; and how a workspace
with it is made once for all workers of a test session.
"""

from __future__ import annotations

import fcntl
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench import Workbench

_SEED = "3"  # of data and model
MODEL = {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "context_length": 96}
SHORT = '''
def score(completion: str) -> float:
    """Guideline: the shorter the better."""
    return -len(completion) / 24
'''
RUN: dict[str, Any] = {
    "name": "tiny",
    "owner": "e2e",
    "seed": 5,
    "model": "model:tiny",
    "data": {"train": "dataset:train", "heldout": "dataset:heldout"},
    "rewards": {"length": "reward:length"},
    "stages": {
        "sft": {
            "kind": "sft",
            "data": "train",
            "steps": 12,
            "batch_size": 8,
            "optimizer": {"learning_rate": 5e-3, "warmup_steps": 2},
            "runtime": {"checkpoint_every": 5},
        },
        "grpo": {
            "kind": "grpo",
            "model": "sft",
            "data": "train",
            "reward": "length",
            "steps": 8,
            "prompts_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 24,
            "reward_timeout": 60.0,
            "optimizer": {"learning_rate": 2e-2, "warmup_steps": 0},
            "runtime": {"checkpoint_every": 3},
        },
        "evaluate": {
            "kind": "evaluate",
            "model": "grpo",
            "suites": {"heldout": {"data": "heldout", "max_new_tokens": 24}},
        },
    },
    "gates": [
        {"name": "room", "metric": "heldout/response_tokens", "at_most": 23.9},
        {
            "name": "length",
            "metric": "heldout/response_tokens",
            "direction": "lower",
            "not_worse_than": "channel",
            "margin": 3,
            "if_channel_empty": "pass",
        },
    ],
    "budget": {"tokens": "5e6", "wall_clock": "30m", "attempts": 20},
    "release": {"channel": "prod", "model": "grpo"},
}


def once(
    folder: Path, make: Callable[[Workbench], dict[str, Any]], origin: Workbench | None = None
) -> tuple[Workbench, dict[str, Any]]:
    """A workspace made by the first process of the session that asks for it, and what is known of it."""
    known = folder.with_suffix(".json")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not known.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            if origin:
                origin.copy(folder)
            else:
                folder.mkdir()
            known.write_text(json.dumps(make(Workbench(folder))))
    return Workbench(folder), json.loads(known.read_text())


def make_template(bench: Workbench, *init: str) -> dict[str, Any]:
    rng = random.Random(3)
    for name, count in (("train", 64), ("heldout", 30)):
        bench.write(f"{name}.jsonl", "".join(json.dumps(training_row(rng)) + "\n" for _ in range(count)))
    bench.write("model.yaml", MODEL)
    bench.write("reward.py", SHORT)
    bench.write("run.yaml", RUN)
    bench.run("init", *init)
    bench.run("asset", "create", "model:tiny", "model.yaml", "--seed", _SEED)
    bench.run("asset", "add", "dataset:train", "train.jsonl")
    bench.run("asset", "add", "dataset:heldout", "heldout.jsonl")
    bench.run("asset", "add", "reward:length", "reward.py")
    return {}


def training_row(rng: random.Random) -> dict[str, Any]:
    """Digits to sort; answers of 2 to 6 characters, so that every length is likely before a reward prefers one."""
    digits = "".join(rng.choices("0123456789", k=rng.randint(2, 6)))
    answer = "".join(sorted(digits))
    prompt, completion = {"role": "user", "content": f"Q: sort {digits}"}, {"role": "assistant", "content": answer}
    return {"prompt": [prompt], "completion": [completion], "answer": answer}
