"""The cost of the controller per million tokens, by the mean length of the responses.

    python -m benchmarks.per_token [--json FILE] [--steps N] [--tiny]

GRPO steps without traces (`trace: {groups: 0}`), with response lengths that are log-normal with p99/median = 10 and
means of 28, 500 and 5,000 tokens. An engine that immediately returns such responses replaces the rollout; the policy
has two dimensions. Measured is the controller: a step minus its workers' methods, that is prompts, groups, packing,
advantages, metrics and dispatch. `scoring` is the additional time of the scorer, which decodes the responses and calls
a function that returns 1 or 0. Both are in processor seconds per million tokens of prompts and responses, medians over
steps. The bound is 0; the target for the controller is at most 0.1 s at 500 tokens and more.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judging import at_most, judge
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Fact
from posttrain.engine.config import GRPOConfig, InitModelConfig, TraceConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Call, Flow, Stored
from posttrain.engine.groups.worker_group import Future, ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.rollout.port import Completion, Delta, Generation, InFlight, PromptLogprobs, Proof
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import RewardScorer, Stretch
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import Score, ScriptedReward

TARGET = 0.1  # maximum processor seconds of the controller per million tokens, without scoring
FROM = 500  # mean tokens per response from which the target holds; below, costs are per document
LENGTHS = {28: (32, 8), 500: (32, 8), 5000: (8, 8)}  # mean → prompts and samples of a step
TINY = {28: (2, 2)}
PROMPT = 64  # tokens
SPREAD = 0.99  # sigma of the log-normal lengths: p99/median = 10


@dataclass(frozen=True)
class Row:
    """Medians over steps."""

    mean: int
    documents: int
    tokens: int  # per step, prompts and responses
    controller_seconds: float  # per million tokens
    scoring_seconds: float  # per million tokens


class Timed:
    """A pool in this process that counts the processor seconds of its workers' methods."""

    def __init__(self) -> None:
        self.busy = 0.0
        self._inner = InlineBackend()
        self.name, self.pool, self.ranks = self._inner.name, self._inner.pool, self._inner.ranks
        self.contexts, self.processes = self._inner.contexts, self._inner.processes
        self.start, self.wait, self.close = self._inner.start, self._inner.wait, self._inner.close
        self.give_up, self.replace = self._inner.give_up, self._inner.replace

    def submit(self, *words: Any, **named: Any) -> list[Call[Any]]:
        """See `InlineBackend`."""
        return self._counted(self._inner.submit, *words, **named)

    def submit_stored(self, *words: Any, **named: Any) -> list[Call[Stored[Any]]]:
        """See `InlineBackend`."""
        return self._counted(self._inner.submit_stored, *words, **named)

    def submit_stream(self, *words: Any, **named: Any) -> list[Flow[Any]]:
        """See `InlineBackend`."""
        found: list[Flow[Any]] = self._counted(self._inner.submit_stream, *words, **named)
        return found

    def take(self, *words: Any, **named: Any) -> list[Any]:
        """See `InlineBackend`."""
        found: list[Any] = self._counted(self._inner.take, *words, **named)
        return found

    def _counted(self, submit: Callable[..., Any], *words: Any, **named: Any) -> Any:
        begin = time.process_time()
        try:
            return submit(*words, **named)
        finally:
            self.busy += time.process_time() - begin


class Scored(RewardScorer):
    """A scorer whose processor seconds are counted."""

    seconds = 0.0

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """Score immediately."""
        begin = time.process_time()
        try:
            answer = super().begin(prompts, trajectories, stretch)
            answer.result()
            return answer
        finally:
            self.seconds += time.process_time() - begin


class Scripted:
    """Answers every generation immediately; key and sample determine the number of tokens."""

    name, holds_sessions = "scripted", False

    def __init__(self, mean: int, longest: int, tokens: Sequence[int]) -> None:
        self.context_length = PROMPT + longest
        self._mean, self._longest, self._tokens = mean, longest, np.asarray(tokens, dtype=np.int32)
        self._done: list[Completion] = []
        self._version = ""

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        """Raise InputError: there are no weights."""
        raise InputError("the scripted engine has no weights")

    def counts(self) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def submit(self, work: Sequence[Generation]) -> None:
        """Answer."""
        for asked in work:
            dice = np.random.default_rng((asked.key, asked.sample))
            median = self._mean / np.exp(SPREAD**2 / 2)
            length = int(min(max(1, dice.lognormal(np.log(median), SPREAD)), asked.limit))
            tokens, logprobs = dice.choice(self._tokens, length), -dice.random(length, dtype=np.float32)
            answer = Trajectory.answer(asked.tokens, tokens, logprobs, truncated=True, version=self._version)
            self._done.append(Completion(asked.id, answer))

    def completed(self, timeout: float) -> list[Completion]:
        """Return all answers."""
        done, self._done = self._done, []
        return done

    def progress(self) -> list[Delta]:
        """Return nothing: every generation is answered immediately."""
        return []

    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        """Return nothing: no benchmark scores."""
        return []

    def release(self, sessions: Collection[str]) -> None:
        """Do nothing: no session is held."""

    def abort(self, ids: Collection[str]) -> None:
        """Do nothing: every generation is answered immediately."""

    def pause(self) -> None:
        """Do nothing: every generation is answered immediately."""

    def resume(self) -> None:
        """Do nothing: every generation is answered immediately."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        """Answer as this version."""
        self._version = version


def recipe(mean: int, prompts: int, samples: int, backend: Timed) -> tuple[OnPolicy, Scored]:
    """Return GRPO with a policy that computes almost nothing, and its scorer."""
    longest = 10 * mean
    size = InitModelConfig(
        hidden_size=2, intermediate_size=2, layers=1, heads=1, kv_heads=1, context_length=PROMPT + longest
    )
    tokenizer = character_tokenizer(size.characters)
    letters = tokenizer.encode("0123456789abcdef", add_special_tokens=False)
    rng = random.Random(3)
    rows = [Prompt(tuple(rng.choices(letters, k=PROMPT)), "", {"row": n}) for n in range(8 * prompts)]
    config = GRPOConfig(
        data="d",
        reward="r",
        steps=1000,
        prompts_per_step=prompts,
        group_size=samples,
        max_new_tokens=longest,
        optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-5, warmup_steps=0),
        trace=TraceConfig(groups=0),
    )
    pool = ResourcePool(backend)
    engine = Scripted(mean, longest, letters)
    model = adopt_module(initial_model(size, tokenizer, 0))
    roles = open_roles(config, model, 0, lambda role: pool, engine=engine)
    reward = ScriptedReward(lambda call: [float(text[:1] in "01234567") for text in call.completions])
    scorer = Scored(reward, tokenizer)
    return OnPolicy(config, GRPO(config), roles, rows, scorer, 0), scorer


def measure(mean: int, prompts: int, samples: int, steps: int) -> Row:
    """Measure `steps` steps after a warm-up step."""
    backend, facts = Timed(), list[Fact]()
    loop, scorer = recipe(mean, prompts, samples, backend)
    found: list[tuple[int, float, float]] = []
    for step in range(steps + 1):
        facts.clear()
        backend.busy = scorer.seconds = 0.0
        begin = time.process_time()
        report = loop.step(step, Trace(facts.append, step))
        loop.publish_weights(PolicyVersion(0, step + 1))
        seconds = time.process_time() - begin - backend.busy - scorer.seconds
        tokens = round(prompts * samples * (PROMPT + report.metrics["response_tokens/mean"]))
        found.append((tokens, seconds * 1e6 / tokens, scorer.seconds * 1e6 / tokens))
    tokens, controller, scored = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return Row(mean, prompts * samples, int(tokens), controller, scored)


def main() -> None:
    """Print the table; exit 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="one step of four short responses: that it runs")
    options = parser.parse_args()
    print("mean length  documents  tokens a step  controller s/M tokens  scoring s/M tokens")
    rows = []
    for mean, (prompts, samples) in (TINY if options.tiny else LENGTHS).items():
        row = measure(mean, prompts, samples, 1 if options.tiny else options.steps)
        costs = f"{row.controller_seconds:21.3f}  {row.scoring_seconds:18.3f}"
        print(f"{row.mean:11}  {row.documents:9}  {row.tokens:13}  {costs}", flush=True)
        rows.append(row)
    print(f"target: the controller at most {TARGET:g} s at {FROM} tokens and more; the bound is 0")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    judged = [row for row in rows if row.mean >= FROM]
    claims = [
        at_most(f"the controller at {r.mean} tokens", r.controller_seconds, TARGET, " s/M tokens") for r in judged
    ]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
