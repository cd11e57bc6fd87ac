"""The cost of reporting a fact for its process, and of the traces of long responses for a step.

    python -m benchmarks.tracing [--json FILE] [--facts N] [--steps N] [--tiny]

A job hands facts to `EventWriter`, which buffers them and writes segments of 256 (encoded, written, synced, renamed).
"said" is the call that only buffers; "written" is the whole path to the disk, synced, per fact. Process CPU time is the
cost for a training step even with a fast disk. The best of five rounds counts, because the disk and other processes
only add time.

The step is a GRPO step over one group of 8 responses of 10,000 tokens with a model of 0.1 M parameters; a larger model
takes longer for the same tokens. Tracing is all work on traced samples: choosing them, keeping their columns, reading
their text, encoding and writing them, synced. The stage has the default 10 MB for all its steps. The target is at most
1 % of the step.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from benchmarks.judging import at_most, judge
from posttrain.domain.jobs import Fact, Sample, Span
from posttrain.engine.config import GRPOConfig, InitModelConfig, TraceConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.samples import Prompt
from posttrain.engine.scores import RewardScorer
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import SampleTracer, Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import ScriptedReward
from posttrain.store.attempts import AttemptFolder, EventWriter

TARGET = 0.01  # maximum share of tracing in a step
GROUP, LENGTH = 8, 10_000
ROUNDS = 5
TOKENS = (16, 256, 4096)  # response lengths of the samples measured


@dataclass(frozen=True)
class Row:
    """One kind of fact; nanoseconds per fact, bytes on the disk per fact."""

    fact: str
    said: float
    written: float
    cpu: float
    bytes: int


@dataclass(frozen=True)
class Step:
    """One step, the part for tracing, and the bytes written."""

    step: int
    seconds: float
    tracing: float  # seconds
    samples: int
    bytes: int


def steps(count: int, length: int, most: int) -> list[Step]:
    """Measure steps of one group whose samples have `length` tokens each."""
    size = InitModelConfig(hidden_size=64, intermediate_size=128, layers=2, context_length=length + 64)
    tokenizer = character_tokenizer(size.characters)
    module = initial_model(size, tokenizer, 0)
    module.config.eos_token_id = module.generation_config.eos_token_id = None  # responses reach their limit
    config = GRPOConfig(
        data="d", reward="r", steps=count, prompts_per_step=1, group_size=GROUP, max_new_tokens=length,
        optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-6, warmup_steps=0), trace=TraceConfig(bytes=most),
    )  # fmt: skip
    pool = ResourcePool(InlineBackend())
    roles = open_roles(config, adopt_module(module), 0, lambda role: pool)
    scorer = RewardScorer(ScriptedReward(lambda call: [float(i % 2) for i in range(len(call.completions))]), tokenizer)
    prompts = [Prompt(tuple(tokenizer.encode("A: 12")), "A: 12", {"answer": "1"})]
    recipe = OnPolicy(config, GRPO(config), roles, prompts, scorer, 0)
    found = []
    with tempfile.TemporaryDirectory() as folder, EventWriter(AttemptFolder(Path(folder))) as writer:
        timed = _Timed(writer)
        for step in range(count):
            timed.seconds, timed.samples, before = 0.0, 0, _written(Path(folder))
            begin = time.perf_counter()
            recipe.step(step, Trace(timed, step))
            recipe.publish_weights(PolicyVersion(0, step + 1))
            timed.flush()
            seconds = time.perf_counter() - begin
            found.append(Step(step, seconds, timed.seconds, timed.samples, _written(Path(folder)) - before))
    return found


class _Timed:
    """A sink that adds up the time of tracing, in the sink and in the engine."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer, self._inside = writer, False
        self.seconds, self.samples = 0.0, 0
        for name in ("__post_init__", "wants", "consumed", "report"):
            setattr(SampleTracer, name, self._around(getattr(SampleTracer, name)))
        self.flush = self._around(writer.flush)
        self._say = self._around(writer)

    def __call__(self, fact: Fact) -> None:
        self.samples += isinstance(fact, Sample)
        self._say(fact)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function, assigned=())
        def timed(*given: Any, **named: Any) -> Any:
            outer, self._inside = self._inside, True
            begin = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self._inside = outer
                self.seconds += 0 if outer else time.perf_counter() - begin

        return timed


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--facts", type=int, default=2048, help="facts per round (samples: an eighth)")
    parser.add_argument("--steps", type=int, default=3, help="of long responses, with bytes for the first two")
    parser.add_argument("--tiny", action="store_true", help="eight facts a round: that it runs, no figures")
    options = parser.parse_args()
    facts = 8 if options.tiny else options.facts
    rows = [measure("hand-off span", _span, facts)]
    rows += [measure(f"call span, {n} ranks", partial(_call, ranks=n), facts) for n in (1, 8, 64)]
    rows += [measure(f"sample, {n} tokens", partial(_sample, tokens=n), facts // 8) for n in TOKENS]
    print(f"{'fact':24s} {'said':>10s} {'written':>12s} {'of it CPU':>12s} {'bytes':>8s}")
    for row in rows:
        print(f"{row.fact:24s} {row.said:7.0f} ns {row.written:9.0f} ns {row.cpu:9.0f} ns {row.bytes:8d}")
    length = 64 if options.tiny else LENGTH
    long = steps(options.steps, length, 100_000 if options.tiny else 10_000_000)
    print(f"\nstep of {GROUP} x {length} tokens  seconds  of it tracing  samples      bytes")
    for one in long:
        share = one.tracing / one.seconds
        print(f"{one.step:4d} {one.seconds:28.1f} {share:13.2%} {one.samples:9d} {one.bytes:10d}")
    if options.json:
        told = {"facts": [asdict(row) for row in rows], "steps": [asdict(one) for one in long]}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    worst = max(one.tracing / one.seconds for one in long)
    judge([at_most("tracing's share of a step", worst, TARGET, "")], full=not options.tiny)


def measure(name: str, make: Callable[[int], Fact], facts: int) -> Row:
    """Measure the cheapest of several rounds, each in a separate folder."""
    said, written, cpu, size = [], [], [], 0
    values = [make(index) for index in range(facts)]
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            attempt = AttemptFolder(Path(folder))
            patient = EventWriter(attempt, most=facts + 1)
            begin = time.perf_counter_ns()
            for value in values:
                patient(value)
            said.append((time.perf_counter_ns() - begin) / facts)
            sink = EventWriter(attempt)
            begin, work = time.perf_counter_ns(), time.process_time_ns()
            for value in values:
                sink(value)
            sink.close()
            written.append((time.perf_counter_ns() - begin) / facts)
            cpu.append((time.process_time_ns() - work) / facts)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl")) // facts
    return Row(name, min(said), min(written), min(cpu), size)


def _span(index: int) -> Span:
    return Span("update", index, 1.7e9 + index, 0.123456789, {"tokens": 2033, "response_tokens": 935})


def _call(index: int, ranks: int) -> Span:
    busy = [[rank, 1.7e9 + index + rank / 7, 0.123456789] for rank in range(ranks)]
    told = {"kind": "call", "role": "policy", "method": "update", "pool": "main", "ranks": busy}
    costs = {"bytes_out": 123456, "bytes_in": 1234, "imbalance": 1.0123456789}
    return Span("policy.update", index, 1.7e9 + index, 0.123456789, {**told, **costs})


def _sample(index: int, tokens: int) -> Sample:
    numbers = [float(f"{-((index + place) % 97) / 7.3:.7g}") for place in range(tokens)]
    return Sample(
        id=f"{index}.{index}.0",
        step=index,
        prompt="sort 3 1 2",
        response="1 2 3 " * (tokens // 4),
        prompt_tokens=list(range(32)),
        tokens=list(range(tokens)),
        behaviour_logprobs=numbers,
        truncated=False,
        versions=["0.12"],
        reward=1.0,
        fate=f"update {index}, mini-batch 0",
        components={"exact": 1.0},
        advantages=numbers,
        logprobs=numbers,
        ratios=numbers,
        clipped=[False] * tokens,
        reference_logprobs=numbers,
    )


if __name__ == "__main__":
    main()
