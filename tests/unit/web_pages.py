"""Runs whose jobs leave everything that a page can show, and texts that would like to be more than text."""

from __future__ import annotations

import io
import math
import random
import time
from pathlib import Path

import cli_world
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_world import ITEMS, RUN, World, make_world

from posttrain.domain.jobs import JobOrder, JobResult, Metric, Output, Progress, Sample, Span
from posttrain.store.attempts import AttemptFolder, EventWriter

EVIL = (
    "</pre></style></title><script>document.title='pwned'</script><img src=x onerror=document.title='pwned'>\"'{{7*7}}&"
)
LONG = "https://an.example/" + "x" * 400  # a word that no line can break
SAID = f"{EVIL} {LONG} \u202etxt.exe \x1b[31m"
TWO = RUN.replace(
    "  evaluate:", "  base-eval: {kind: evaluate, model: base, suites: {heldout: {data: heldout}}}\n  evaluate:"
)
# more steps than a page has points
LONG_RUN = TWO.replace("steps: 6", "steps: 1500").replace("every: 2", "every: 100")


def rich_train(folder: AttemptFolder, order: JobOrder) -> None:
    """What a training job says: every kind of metric, spans of roles, samples with reward components."""
    steps, grpo = int(order.params.get("steps", 1)), order.kind == "grpo"
    rng, at = random.Random(7), time.time()
    with EventWriter(folder) as sink:
        for step in range(1, steps + 1):
            noise = rng.gauss(0, 1)
            learned = {
                "loss": 0.002 * noise if grpo else 3 / step + 0.1,
                "grad_norm": 1 + abs(noise),
                "learning_rate": 1e-3,
            }
            extra = {"entropy": 1 / step, "kl": 0.01 * step, "clip_fraction": 0.001, "truncated": 0.1}
            reward = {"reward/mean": 0.5 + 0.3 * step / steps + 0.02 * noise, "reward/std": 0.3, "reward/stderr": 0.02}
            sampled = {**extra, **reward, "response_tokens/mean": 12 + noise, f"own/{SAID[:40]}": noise}
            sink(
                Metric(
                    step,
                    {
                        **learned,
                        **(sampled if grpo else {}),
                        "tokens_per_second": 900 + 10 * noise,
                        "memory/peak_resident_mib": 700.0 + step,
                    },
                    at + step,
                )
            )
            if grpo and step % 100 == 0:
                sink(Metric(step, {"probe/accuracy": step / steps}, at + step))
            busy = [[0, at + step, 0.4], [1, at + step, 0.3]]
            call = {"kind": "call", "role": "rollout", "method": "generate", "pool": "main", "ranks": busy}
            sink(Span("rollout.generate", step, at + step, 0.4, {**call, "bytes_out": 10, "bytes_in": 20}))
            sink(Span("rollout", step, at + step, 0.5))
            sink(Span("update", step, at + step + 0.5, 0.3))
            if grpo and step in (1, 2, steps):
                for member in range(3):
                    sink(_sample(step, member))
            sink(Progress(step, steps, order.kind, step * 100, at + step))
    cli_world.write_model(folder.outputs / "model", 0.98 if grpo else 0.5)
    folder.write_result(
        JobResult("succeeded", {"model": Output("outputs/model", "tree")}, {"loss": 0.1}, steps * 100, 1.0)
    )


def _sample(step: int, member: int) -> Sample:
    return Sample(
        id=f"{step}.7.{member}",
        step=step,
        prompt=f"Q: {SAID}",
        response=SAID * 3,
        prompt_tokens=[1],
        tokens=[2, 3],
        behaviour_logprobs=[-0.1, -0.2],
        truncated=member == 2,
        versions=["0.0"],
        reward=None if member == 1 else 0.5 * member,
        fate=EVIL,
        components={"exact": float(member), EVIL: 0.25},
        status="error" if member == 1 else "ok",
    )


def rich_items(right: int) -> bytes:
    """Responses that are no text one would want to meet."""
    rows = [
        {
            "suite": "heldout",
            "item_id": f"i{i}",
            "prompt": f"Q: sort {1000 + i} {SAID}",
            "answer": SAID,
            "kind": "greedy",
            "sample_index": 0,
            "response": "" if i % 3 == 0 else SAID * (1 + i % 4),
            "extracted": None if i % 2 else SAID,
            "correct": i < right,
            "tokens": 4,
            "truncated": i % 5 == 0,
            "logprob": -math.inf,
        }
        for i in range(ITEMS)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def rich_world(folder: Path, monkeypatch: pytest.MonkeyPatch, run: str = TWO) -> World:
    """A world whose jobs are those above; nothing has run yet."""
    monkeypatch.setattr(cli_world, "train", rich_train)
    monkeypatch.setattr(cli_world, "items_table", rich_items)
    world = make_world(folder, monkeypatch)
    world.prepare()
    world.write("run.yaml", run)
    return world
