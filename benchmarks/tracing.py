"""What saying a fact costs the process that says it: nanoseconds per span, call span and sample.

    python -m benchmarks.tracing [--json FILE] [--facts N] [--tiny]

A job hands facts to `EventWriter`, which buffers them and writes segments of 256 (encoded, written, synced, renamed).
"said" is the call that only buffers; "written" is the whole way to the disk, synced, per fact. Process CPU time tells
what of it a training step loses even on a fast disk. The best of five rounds, for the disk and the other processes of
a machine only ever add.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from posttrain.domain.facts import Fact, Sample, Span
from posttrain.store.attempts import AttemptFolder
from posttrain.store.event_writer import EventWriter

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


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--facts", type=int, default=2048, help="facts per round (samples: an eighth)")
    parser.add_argument("--tiny", action="store_true", help="eight facts a round: that it runs, no figures")
    options = parser.parse_args()
    facts = 8 if options.tiny else options.facts
    rows = [measure("hand-off span", _span, facts)]
    rows += [measure(f"call span, {n} ranks", partial(_call, ranks=n), facts) for n in (1, 8, 64)]
    rows += [measure(f"sample, {n} tokens", partial(_sample, tokens=n), facts // 8) for n in TOKENS]
    print(f"{'fact':24s} {'said':>10s} {'written':>12s} {'of it CPU':>12s} {'bytes':>8s}")
    for row in rows:
        print(f"{row.fact:24s} {row.said:7.0f} ns {row.written:9.0f} ns {row.cpu:9.0f} ns {row.bytes:8d}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def measure(name: str, make: Callable[[int], Fact], facts: int) -> Row:
    """The cheapest of some rounds, each in a folder of its own."""
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
