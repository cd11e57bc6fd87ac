"""Samples of several turns: tokens read for each token of a sample, and observations beside decoding.

    python -m benchmarks.turns [--json FILE] [--rounds N] [--tiny]

256 samples of 8 turns. A turn of the policy is short (about 6 tokens) or long (about 50); an observation is one token,
and takes 0.25 s in the sandbox, where 256 calls may run at a time. The same samples are taken with observations that
take no time, which is decoding alone. The bound is the longer of decoding alone and of the turns times 0.25 s. Rounds
are interleaved; medians of wall-clock seconds.

32 turns of about 128 tokens, of which about 19 are sampled: tokens that the engine computed for each token of a sample.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.judging import at_most, judge
from benchmarks.sorting_task import one_process
from posttrain.engine.config import GRPOConfig, InitModelConfig
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.pipeline import Collector
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.recipe import Journal
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.algorithm import PromptSource, ScoredGroup
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.samples import Prompt
from posttrain.engine.scores import TextEnvironment
from posttrain.engine.trace import Trace
from posttrain.pacing.admission import Buffer, InOrder
from posttrain.sandbox.observer import ProcessObserver

OBSERVED = 0.25  # seconds of an observation
WORDS = {"short": "7", "long": "0123456789+-*/=();:,.<>? abcdefghijklmnopqrstuvwxyz"}  # of a uniform policy
SLOWER = 1.2  # maximum seconds, as a multiple of the bound
READ = 1.1  # maximum computed tokens for each token of a sample
TOOL = '''
import asyncio

def build(folder, seconds, text):
    """Return an observation that takes a while."""
    async def observe(row, responses):
        await asyncio.sleep(seconds)
        return text
    return observe
'''


@dataclass(frozen=True)
class Result:
    """Medians over rounds."""

    responses: str
    samples: int
    turns: int
    tokens_per_turn: float
    decode_seconds: float  # without the time of observations
    observe_seconds: float  # turns times the time of an observation
    seconds: float  # with both
    decode_steps: float  # decoding steps without the time of observations
    steps: float  # with both


class Talking(GRPO):  # type: ignore[misc]
    """GRPO over samples of several turns."""

    turns, observed = 8, 1

    @property
    def source(self) -> PromptSource:
        """See `Sampling.source`."""
        return replace(super().source, turns=self.turns, observed=self.observed)


@contextmanager
def tool(seconds: float, text: str, concurrency: int) -> Iterator[ProcessObserver]:
    """Yield an observation in the sandbox that takes some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "slow_tool.py")
        file.write_text(TOOL)
        words = {"seconds": seconds, "text": text}
        with ProcessObserver("slow_tool:build", words, timeout=60.0, concurrency=concurrency, source=file) as opened:
            yield opened


def collector(words: str, prompts: int, turns: int, observed: str, limit: int) -> tuple[Collector, Roles]:
    """Return what samples groups of 8 with a policy that draws all tokens alike, without an environment."""
    size = InitModelConfig(
        hidden_size=128, intermediate_size=384, layers=4, heads=4, kv_heads=2, characters=words, context_length=32768
    )
    tokenizer = character_tokenizer(size.characters)
    module = initial_model(size, tokenizer, 0)
    module.get_output_embeddings().weight.data.mul_(1e-3)
    config = GRPOConfig(data="d", reward="r", steps=99, prompts_per_step=prompts, group_size=8, max_new_tokens=limit)
    algorithm = Talking(config)
    algorithm.turns, algorithm.observed = turns, len(observed)
    roles = open_roles(config, adopt_module(module), 0, one_process())
    rows = [Prompt(tuple(tokenizer.encode(words[:1] * (1 + at % 5)))) for at in range(512)]
    buffer: Buffer[ScoredGroup] = Buffer(InOrder(0), prompts, config.steps, 0)
    return Collector(algorithm, roles, rows, None, 0, Journal(len(rows), 0), buffer), roles


def sampled(made: Collector, step: int) -> tuple[float, int, int]:
    """Return the seconds of a step's samples, their tokens, and the responses."""
    begin = time.perf_counter()
    made.mark()
    groups = made.collected(step, Trace(lambda fact: None, step), lambda spent, more, refuse: True)
    seconds = time.perf_counter() - begin
    answers = [answer for group in groups for answer in group.answers]
    return seconds, sum(map(len, answers)), sum(len(answer.turns) for answer in answers)


def beside(responses: str, rounds: int, tiny: bool) -> Result:
    """Measure observations beside decoding, in interleaved rounds; the first is not timed."""
    words, prompts, turns = WORDS[responses], 2 if tiny else 32, 2 if tiny else Talking.turns
    tokenizer, mixed = character_tokenizer(words), list[tuple[int, float, int]]()
    with tool(0.0, words[0], 256) as quick, tool(0.01 if tiny else OBSERVED, words[0], 256) as slow:
        made, _ = collector(words, prompts, turns, words[0], 2000)
        tokens = responded = 0
        for step in range(2 * (rounds + 1)):
            made.environment = TextEnvironment(slow if step % 2 else quick, tokenizer, 1)
            seconds, some, count = sampled(made, step)
            mixed = [*mixed, (step % 2, seconds, made.counts["steps"])]
            tokens, responded = tokens + some, responded + count
    plain, both, *steps = (
        statistics.median(one[of] for one in mixed[2:] if one[0] == side) for of in (1, 2) for side in (0, 1)
    )
    return Result(responses, 8 * prompts, turns, tokens / responded, plain, turns * OBSERVED, both, *steps)


def read_per_token(tiny: bool) -> float:
    """Return the tokens that the engine computes for each token of samples of 32 turns."""
    words = "0123456789abcdef"
    seen = words[:10] * 11
    made, _ = collector(words, 1, 2 if tiny else 32, seen, 400)
    with tool(0.0, seen, 8) as quick:
        made.environment = TextEnvironment(quick, character_tokenizer(words), len(seen))
        _, tokens, _ = sampled(made, 0)
    return (made.counts["prefilled_tokens"] + made.counts["decoded_tokens"]) / tokens


def main() -> None:
    """Print the table; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Samples of several turns")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one round of a few samples: that it runs, no figures")
    options = parser.parse_args()
    disable_progress_bar()
    results = [beside(name, 1 if options.tiny else options.rounds, options.tiny) for name in WORDS]
    read = read_per_token(options.tiny)
    print("responses  tokens per turn  decoding s  observing s  both s  of the longer  steps alone, both")
    for r in results:
        bound = max(r.decode_seconds, r.observe_seconds)
        print(
            f"{r.responses:<9} {r.tokens_per_turn:>16.1f} {r.decode_seconds:>11.2f} {r.observe_seconds:>12.2f} "
            f"{r.seconds:>7.2f} {r.seconds / bound:>13.2f}x {r.decode_steps:>12.0f}, {r.steps:.0f}"
        )
    print(f"32 turns: {read:.3f} computed tokens for each token")
    if options.json:
        options.json.write_text(json.dumps([*map(asdict, results), {"read": read}], indent=2) + "\n")
    claims = [
        at_most(f"{r.responses} responses", r.seconds / max(r.decode_seconds, r.observe_seconds), SLOWER)
        for r in results
    ]
    judge([*claims, at_most("computed tokens for each token", read, READ)], full=not options.tiny)


if __name__ == "__main__":
    main()
