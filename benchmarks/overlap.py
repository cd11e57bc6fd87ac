"""Sampling ahead: GRPO with exact lag 1 against the synchronous step, two pools, emulated decode time.

    python -m benchmarks.overlap [--json FILE] [--steps N] [--tiny]

The loop, the buffer and the training are real (0.9 M parameters, 16 prompts x 8). The rollout's pool is a thread of
this process whose calls end a given time after their start, like those of another machine; the real decoding is short
and included. Decode times are half, equal to and twice the time of the rest of a step, which is measured first. The
ideal is
the best ratio of two machines: the sum of both times over the longer one. Steps are interleaved; medians of wall-clock
seconds are reported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.elsewhere import Elsewhere
from benchmarks.judging import at_least, judge
from benchmarks.sorting_task import exact, render, task, teach
from posttrain.engine.config import GRPOConfig, InitModelConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, character_tokenizer, initial_model
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.samples import Prompt
from posttrain.engine.scores import RewardScorer
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import ScriptedReward

SIZE = InitModelConfig(hidden_size=128, intermediate_size=384, layers=4, heads=4, kv_heads=2, context_length=512)
TARGET = 0.9  # minimum share of the ideal ratio
SHARES = (0.5, 1.0, 2.0)  # decode time as a share of the rest of a step


@dataclass(frozen=True)
class Result:
    """Seconds are medians over steps."""

    decode_seconds: float  # emulated
    synchronous_seconds: float
    lag_seconds: float
    ratio: float
    ideal: float


def recipe(
    folder: Path, tokenizer: PreTrainedTokenizerFast, lag: int, tiny: bool, steps: int
) -> tuple[OnPolicy, Elsewhere]:
    """Return GRPO in two pools, and the pool that samples."""
    rng = random.Random(3)
    rows = [task(rng) for _ in range(512)]
    prompts = [Prompt(tuple(render(tokenizer, row["question"])), row["question"], row) for row in rows]
    reward = ScriptedReward(
        lambda call: [exact(c, str(row["answer"])) for c, row in zip(call.completions, call.rows, strict=True)]
    )
    size = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8} if tiny else {"prompts_per_step": 16}
    ahead: dict[str, Any] = {"lag": {"steps": lag, "correction": "bypass"}} if lag else {}
    config = GRPOConfig(
        **{"data": "d", "reward": "r", "steps": steps, **size, **ahead},
        placement={"policy": {"cpus": 1}, "rollout": {"cpus": 1}},
        optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-5, warmup_steps=0),
    )
    away = Elsewhere("rollout")
    pools = {"rollout": ResourcePool(away)}
    here = ResourcePool(InlineBackend(pool="policy"))
    roles = open_roles(config, ModelSource(folder, "float32"), 0, lambda role: pools.get(role, here))
    return OnPolicy(config, GRPO(config), roles, prompts, RewardScorer(reward, tokenizer), 0), away


def run(made: OnPolicy, step: int) -> float:
    """Return the seconds of a step with its publication."""
    begin = time.perf_counter()
    made.step(step, Trace(lambda fact: None, step))
    made.publish_weights(PolicyVersion(0, step + 1))
    return time.perf_counter() - begin


def measure(folder: Path, tokenizer: PreTrainedTokenizerFast, share: float, steps: int, tiny: bool) -> Result:
    """Measure interleaved steps of both; the first of each is not timed."""
    total = steps + 2
    (plain, slow), (ahead, away) = (recipe(folder, tokenizer, lag, tiny, total) for lag in (0, 1))
    for made in (plain, ahead):
        made.publish_weights(PolicyVersion(0, 0))
    run(plain, 0)
    run(ahead, 0)
    rest = run(plain, 1) - slow.generated
    run(ahead, 1)
    slow.decode_seconds = away.decode_seconds = decode = max(share * rest, slow.generated)
    times = [(run(plain, step), run(ahead, step)) for step in range(2, total - 1)]  # the last one samples nothing ahead
    synchronous, lagged = (statistics.median(side) for side in zip(*times, strict=True))
    return Result(decode, synchronous, lagged, synchronous / lagged, synchronous / max(synchronous - decode, decode))


def main() -> None:
    """Print the table; exit 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="Exact lag 1 against the synchronous step")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="one step of a few rows: that it runs, no figures")
    options = parser.parse_args()
    disable_progress_bar()
    tokenizer = character_tokenizer(SIZE.characters)
    module = initial_model(SIZE, tokenizer, 0)
    teach(module, tokenizer, *([2] if options.tiny else []))
    with tempfile.TemporaryDirectory() as name:
        module.save_pretrained(name)
        tokenizer.save_pretrained(name)
        steps = 2 if options.tiny else options.steps + 1
        shares = SHARES[:1] if options.tiny else SHARES
        results = [measure(Path(name), tokenizer, share, steps, options.tiny) for share in shares]
    print("decode s  synchronous s  lag 1 s  ratio  ideal  of ideal")
    for r in results:
        print(
            f"{r.decode_seconds:>8.2f} {r.synchronous_seconds:>14.2f} {r.lag_seconds:>8.2f}  {r.ratio:>4.2f}x "
            f"{r.ideal:>5.2f}x {r.ratio / r.ideal:>8.0%}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    claims = [
        at_least(f"lag 1 at {r.decode_seconds:.2f} s", r.ratio / r.ideal, TARGET, " of the ideal") for r in results
    ]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
