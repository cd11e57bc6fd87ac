"""The gain from work during sampling: GRPO with a slow reward and a reference, two pools, emulated decode time.

    python -m benchmarks.meanwhile [--json FILE] [--steps N] [--tiny]

Three ways of one step, interleaved: everything after the last response (`waits`), scores and the reference's
log-probabilities as groups end (`streams`), and gradients as well (`gradients`). Loop, training and reference are real
(0.9 M parameters, 16 prompts x 8). The rollout's pool is a thread whose groups arrive as from another machine, with a
quarter of the rows decoded at a time; the reward sleeps in a separate thread. In the ideal step, a stretch of groups is
scored when its last group has arrived and the reward is free, and its share of the rest is computed after the earlier
stretches of the data stream; groups arrive at the measured times. Medians of wall-clock seconds.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.elsewhere import Elsewhere
from benchmarks.overlap import SIZE, run
from benchmarks.sorting_task import exact, render, task, teach
from posttrain.engine.config import GRPOConfig, KLConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, character_tokenizer, initial_model
from posttrain.engine.recipes.algorithm import RolloutAlgorithm
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.rollout.port import Rollouts
from posttrain.engine.samples import Prompt
from posttrain.engine.scores import RewardScorer
from posttrain.engine.settings import PolicyGradientOptimizerConfig, RuntimeConfig
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import RewardCall, ScriptedReward

WAYS = ("waits", "streams", "gradients")
SHARES = (0.0, 0.5, 1.0)  # the reward's time, of the decode time, which is twice that of the rest


class Late(RewardScorer):
    """A scorer that begins after the rollout has ended."""

    early = False  # as if it shared the rollout's memory


@dataclass(frozen=True)
class Result:
    """Medians over steps, in seconds."""

    decode_seconds: float  # emulated
    reward_seconds: float  # emulated
    rest_seconds: float  # of a step, measured
    waits: float
    streams: float
    gradients: float
    ideal: float


@dataclass
class Side:
    """One of the three ways."""

    recipe: OnPolicy
    away: Elsewhere
    slow: dict[str, float]


def recipe(folder: Path, tokenizer: PreTrainedTokenizerFast, way: str, tiny: bool, steps: int) -> Side:
    """Return GRPO with a reference, in two pools."""
    rng = random.Random(3)
    rows = [task(rng) for _ in range(512)]
    prompts = [Prompt(tuple(render(tokenizer, row["question"])), row["question"], row) for row in rows]
    size = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8} if tiny else {"prompts_per_step": 16}
    config = GRPOConfig(
        **{"data": "d", "reward": "r", "steps": steps, **size},
        placement={"policy": {"cpus": 1}, "rollout": {"cpus": 1}},
        kl=KLConfig(coefficient=0.01),
        stream_gradients=way == "gradients",
        runtime=RuntimeConfig(micro_batch_tokens=32 if tiny else 512, kv_cache=8 * 2**20),  # 32 rows at a time
        optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-5, warmup_steps=0),
    )
    slow = {"seconds": 0.0}

    def score(call: RewardCall) -> list[float]:
        time.sleep(slow["seconds"] * len(call) / config.samples)
        return [exact(c, str(row["answer"])) for c, row in zip(call.completions, call.rows, strict=True)]

    away, here = Elsewhere("rollout"), ResourcePool(InlineBackend(pool="policy"))
    pools = {"rollout": ResourcePool(away)}
    roles = open_roles(config, ModelSource(folder, "float32"), 0, lambda role: pools.get(role, here))
    scorer = (Late if way == "waits" else RewardScorer)(ScriptedReward(score), tokenizer)
    algorithm = GRPO(config)
    if way == "waits":
        algorithm.groupwise = RolloutAlgorithm.groupwise  # so that no column is asked for before all groups are there
    made = OnPolicy(config, algorithm, roles, prompts, scorer, 0)
    made.publish_weights(PolicyVersion(0, 0))
    return Side(made, away, slow)


def ideal(arrived: Sequence[tuple[float, Rollouts]], stretches: int, reward: float, rest: float) -> float:
    """Return the seconds of the ideal step (see the module)."""
    came = {group.key: at for at, found in arrived for group in found.groups}
    keys, size = sorted(came), len(came) // stretches
    there = [max(came[key] for key in keys[at : at + size]) for at in range(0, len(keys), size)]
    now, scored = 0.0, dict[int, float]()
    for stretch in sorted(range(stretches), key=there.__getitem__):
        scored[stretch] = now = max(now, there[stretch]) + reward / stretches
    done = 0.0
    for stretch in range(stretches):
        done = max(done, scored[stretch]) + rest / stretches
    return done


def measure(folder: Path, tokenizer: PreTrainedTokenizerFast, share: float, steps: int, tiny: bool) -> Result:
    """Measure interleaved steps of the three ways; the first two of each are not timed."""
    sides = [recipe(folder, tokenizer, way, tiny, steps + 2) for way in WAYS]
    for side in sides:
        run(side.recipe, 0)
    rest = run(sides[0].recipe, 1) - sides[0].away.generated
    for side in sides[1:]:
        run(side.recipe, 1)
    decode = max(2 * rest, sides[0].away.generated)
    for side in sides:
        side.away.decode_seconds, side.slow["seconds"] = decode, share * decode
    stretches = 2 if tiny else 8
    times = []
    for step in range(2, steps + 2):
        took = [run(side.recipe, step) for side in sides]
        times.append([*took, ideal(sides[-1].away.arrived, stretches, share * decode, rest)])
    return Result(decode, share * decode, rest, *(statistics.median(side) for side in zip(*times, strict=True)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What is done while others are sampled")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="one step of a few rows: that it runs, no figures")
    options = parser.parse_args()
    disable_progress_bar()
    tokenizer = character_tokenizer(SIZE.characters)
    module = initial_model(SIZE, tokenizer, 0)
    teach(module, tokenizer, *([2] if options.tiny else []))
    with tempfile.TemporaryDirectory() as name:
        module.save_pretrained(name)
        tokenizer.save_pretrained(name)
        steps = 1 if options.tiny else options.steps
        shares = SHARES[1:2] if options.tiny else SHARES
        results = [measure(Path(name), tokenizer, share, steps, options.tiny) for share in shares]
    print("decode s  reward s  rest s  waits s  streams s   ratio  gradients s   ratio  ideal")
    for r in results:
        print(
            f"{r.decode_seconds:>8.2f} {r.reward_seconds:>9.2f} {r.rest_seconds:>7.2f} {r.waits:>8.2f} "
            f"{r.streams:>10.2f}  {r.waits / r.streams:>5.2f}x {r.gradients:>12.2f}  {r.waits / r.gradients:>5.2f}x "
            f"{r.waits / r.ideal:>5.2f}x"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
