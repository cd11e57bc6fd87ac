"""The cost of the single controller: its share of a GRPO step, tracing, and the growth of dispatch.

    python -m benchmarks.controller [--json FILE] [--steps N] [--ray] [--plot FILE.png] [--tiny]

Overhead: GRPO steps of a 0.9 M parameter model (32 prompts x 8, as in benchmarks.training) through worker groups in
one process. The controller's share of a step is the step's time minus the workers' methods and the reward function:
sampling prompts, packing, advantages, dispatch, spans. Target: at most 2 %.

Tracing: the facts of each step, including calls and recorded samples, are written through the attempt folder's
EventWriter, with flush and fsync. The figure is their time as a share of the step. Target: at most 2 %.

Growth: one `each` and one `map` on workers that do nothing, with 1 to 64 ranks and 64 to 16384 documents of log-normal
length; medians. With --ray they also run on Ray actors, in separate processes.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.empty_worker import Empty
from benchmarks.judging import at_most, judge
from benchmarks.sorting_task import exact, render, task, teach
from posttrain.domain.jobs import Fact, Sample, Span
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import GRPOConfig, InitModelConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Recorder
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.samples import Prompt
from posttrain.engine.scores import RewardScorer
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import ScriptedReward
from posttrain.store.attempts import AttemptFolder, EventWriter

SIZE = InitModelConfig(hidden_size=128, intermediate_size=384, layers=4, heads=4, kv_heads=2, context_length=512)
TARGET = 0.02  # maximum share of a step, for the controller and for tracing
RANKS = (1, 2, 4, 8, 16, 32, 64)
DOCUMENTS = (64, 256, 1024, 4096, 16384)
TINY_RANKS, TINY_DOCUMENTS = (1, 2), (16,)


@dataclass(frozen=True)
class Share:
    """Medians over steps."""

    step_seconds: float
    controller: float  # of a step
    tracing: float  # of a step
    facts: int  # per step
    samples: int


def recipe(recorder: Recorder, tiny: bool, seed: int = 0) -> OnPolicy:
    """Return GRPO on a model that was trained on the task for a few seconds."""
    tokenizer = character_tokenizer(SIZE.characters)
    module = initial_model(SIZE, tokenizer, seed)
    teach(module, tokenizer, *([2] if tiny else []))
    rng = random.Random(3)
    rows = [task(rng) for _ in range(512)]
    prompts = [Prompt(tuple(render(tokenizer, row["question"])), row["question"], row) for row in rows]
    reward = ScriptedReward(
        lambda call: [exact(c, str(row["answer"])) for c, row in zip(call.completions, call.rows, strict=True)]
    )
    optimizer = PolicyGradientOptimizerConfig(learning_rate=1e-5, warmup_steps=0)
    size = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8} if tiny else {}
    config = GRPOConfig(data="d", reward="r", steps=1000, optimizer=optimizer, **size)
    pool = ResourcePool(InlineBackend(), recorder)
    roles = open_roles(config, adopt_module(module), seed, lambda role: pool)
    return OnPolicy(config, GRPO(config), roles, prompts, RewardScorer(reward, tokenizer), seed)


def shares(steps: int, tiny: bool = False) -> Share:
    """Measure `steps` steps after a warm-up step."""
    facts: list[Fact] = []
    recorder = Recorder(facts.append)
    grpo = recipe(recorder, tiny)
    rows: list[tuple[float, float, float, int, int]] = []
    with tempfile.TemporaryDirectory() as folder, EventWriter(AttemptFolder(Path(folder))) as writer:
        for step in range(steps + 1):
            facts.clear()
            begin = time.perf_counter()
            grpo.step(step, Trace(facts.append, step))
            grpo.publish_weights(PolicyVersion(0, step + 1))
            seconds = time.perf_counter() - begin
            begin = time.perf_counter()
            for fact in facts:
                writer(fact)
            writer.flush()
            rows.append(
                (seconds, _controller(facts, seconds), time.perf_counter() - begin, len(facts), _samples(facts))
            )
    timed = rows[1:]
    return Share(
        statistics.median(r[0] for r in timed),
        statistics.median(r[1] / r[0] for r in timed),
        statistics.median(r[2] / r[0] for r in timed),
        int(statistics.median(r[3] for r in timed)),
        int(statistics.median(r[4] for r in timed)),
    )


def _controller(facts: list[Fact], seconds: float) -> float:
    spans = [fact for fact in facts if isinstance(fact, Span)]
    busy = sum(rank[2] for span in spans if span.attributes.get("kind") == "call" for rank in span.attributes["ranks"])
    return seconds - busy - sum(span.seconds for span in spans if span.name == "reward")


def _samples(facts: list[Fact]) -> int:
    return sum(isinstance(fact, Sample) for fact in facts)


def growth(open_pool: Callable[[int], ResourcePool], tiny: bool = False) -> dict[str, dict[int, float]]:
    """Return median seconds of `each` by ranks, `map` (1024 documents) by ranks, and `map` (8 ranks) by documents."""
    found: dict[str, dict[int, float]] = {"each": {}, "map": {}, "documents": {}}
    several = 2 if tiny else 8
    for ranks in TINY_RANKS if tiny else RANKS:
        with open_pool(ranks) as pool:
            group = pool.start("empty", Empty)
            batch = _batch(1024)
            found["each"][ranks] = _median(partial(group.each, Empty.nothing))
            found["map"][ranks] = _median(partial(group.map, Empty.batch, batch))
            if ranks == several:
                for documents in TINY_DOCUMENTS if tiny else DOCUMENTS:
                    some = _batch(documents)
                    found["documents"][documents] = _median(partial(group.map, Empty.batch, some))
    return found


def _batch(documents: int) -> TokenBatch:
    rng = random.Random(5)
    lengths = [min(2048, max(2, int(rng.lognormvariate(4.0, 0.99)))) for _ in range(documents)]
    return TokenBatch.pack([Document((1,), (2,) * n, (-0.5,) * n) for n in lengths])


def _median(call: Callable[[], Any], rounds: int = 7) -> float:
    call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def draw(curves: dict[str, dict[str, dict[int, float]]], path: Path) -> None:
    """Plot the growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for backend, found in curves.items():
        for name, style in (("each", "--"), ("map", "-")):
            times = [1e3 * s for s in found[name].values()]
            axes[0].plot(list(found[name]), times, style, marker="o", label=f"{backend}: {name}")
        times = [1e3 * s for s in found["documents"].values()]
        axes[1].plot(list(found["documents"]), times, marker="o", label=f"{backend}: map")
    axes[0].set(title="workers that do nothing; map: 1024 documents", xlabel="ranks", ylabel="milliseconds a call")
    axes[1].set(title="8 ranks", xlabel="documents in the batch", ylabel="milliseconds a call")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, plot; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ray", action="store_true", help="also on Ray actors")
    parser.add_argument("--plot", type=Path, help="also draw the growth into this PNG")
    parser.add_argument("--tiny", action="store_true", help="one small step, two ranks: that it runs, no figures")
    arguments = parser.parse_args()
    share = shares(1 if arguments.tiny else arguments.steps, arguments.tiny)
    print(
        f"step {share.step_seconds:.2f} s; controller {share.controller:.2%}, tracing {share.tracing:.2%} of it "
        f"({share.facts} facts, {share.samples} samples; target at most {TARGET:.0%} each)"
    )
    curves = {"inline": growth(lambda ranks: ResourcePool(InlineBackend(ranks)), arguments.tiny)}
    if arguments.ray:
        from benchmarks.ray_pools import ray_pools

        with ray_pools() as open_pool:
            curves["ray"] = growth(open_pool, arguments.tiny)
    for backend, found in curves.items():
        for name, points in found.items():
            print(f"{backend:7} {name:10}", "  ".join(f"{x}: {1e3 * s:.2f} ms" for x, s in points.items()))
    if arguments.plot:
        draw(curves, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps({"share": asdict(share), "growth": curves}, indent=1), encoding="utf-8")
    parts = {"the controller's share of a step": share.controller, "tracing's share of a step": share.tracing}
    judge([at_most(what, part, TARGET, "") for what, part in parts.items()], full=not arguments.tiny)


if __name__ == "__main__":
    main()
