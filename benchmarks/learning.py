"""Compares algorithms at equal numbers of tokens, each with the baseline of its family, on six paired seeds.

    python -m benchmarks.learning [--json FILE] [--only NAME,NAME] [--tiny]    # or: make learning

The comparisons are VAPO and PF-PPO with PPO, GSPO and CISPO with GRPO, and KTO, ORPO and SimPO with DPO; and adapters
of rank 16 (`-lora`) with training of whole models, for SFT, GRPO, DPO and ORPO.

Task: sort 3 to 6 digits, with a Qwen3 model of 0.1 M parameters. A seed decides everything random: the initial weights,
the supervised steps before the comparison, the training questions, the preference pairs, the held-out questions, and
the sampling. All algorithms share these for a seed, so scores are compared within a seed. The hash of a question
decides whether the question is for training or held out. The score is the share of held-out questions whose greedy
answer is exactly right.

Equal tokens: a run ends after the first step at which it has spent the tokens of its family. Tokens are counted as in a
budget (`posttrain.domain.jobs.Progress`): a prompt once for each group, every sampled token, and every token of a
document once for each optimiser step that trains on it, of the policy and of the critic. Passes of the frozen reference
and evaluations are not counted. Steps, samples and seconds differ. The table shows the tokens spent, which exceed the
budget by less than one step. The preference pairs are the same for all algorithms, so their sampling is not counted: a
pair is a right and a wrong response of the starting model to one question. KTO reads a pair as two labelled rows.

Learning rate: each algorithm has a grid of three rates. Each rate is tried on the tuning seeds, and the rate with the
highest mean score is used on the other seeds, which alone are compared. `*` marks a rate at an end of its grid: a rate
outside the grid could be better. Settings other than those in `ALGORITHMS` and `parameters` are the defaults.

Intervals: Student's t over the differences within a seed, 95 % for each comparison separately. Each seed draws its own
held-out questions, so the spread over seeds includes the spread over questions.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import copy
import json
import math
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from transformers.utils.logging import disable_progress_bar

from benchmarks.sorting_task import exact, one_process, render, task, teach
from posttrain.domain.kinds import kind_of
from posttrain.engine.batch import Document
from posttrain.engine.config import InitModelConfig
from posttrain.engine.config.stages import named, training_config
from posttrain.engine.loop.controller import FromRows, open_learner, open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.recipe import Recipe
from posttrain.engine.models.adapters import attach
from posttrain.engine.models.files import (
    LabelledRow,
    PreferencePair,
    ScalarSource,
    character_tokenizer,
    initial_model,
)
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import generate, open_rollout
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import RewardScorer, response_text
from posttrain.engine.settings import LoraConfig
from posttrain.engine.trace import Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import ScriptedReward

SIZE = InitModelConfig(hidden_size=64, intermediate_size=192, layers=2, heads=2, kv_heads=1, context_length=128)
CONFIDENCE = 0.95
HELD_OUT_SHARE = 5  # one question in five is held out
NEW_TOKENS = 24
SAMPLES = 256  # responses in a step of an algorithm that samples
PAIRS = 32  # preference pairs in a step
Row = dict[str, str]


@dataclass(frozen=True)
class Algorithm:
    """A kind of stage, its baseline's name (empty: it is a baseline), its grid of learning rates, and its settings."""

    kind: str
    baseline: str
    rates: tuple[float, float, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: LoraConfig | None = None

    @property
    def name(self) -> str:
        """The name in tables: the kind, or the kind with an adapter."""
        return self.kind if self.adapter is None else f"{self.kind}-lora"


LORA = LoraConfig(rank=16, alpha=32.0)
CRITIC = {"optimizer": {"learning_rate": 1e-3, "schedule": "constant"}}
ALGORITHMS = (
    Algorithm("ppo", "", (1e-4, 3e-4, 1e-3), {"critic": CRITIC}),
    # the defaults are for answers of thousands of tokens: 50 steps of warm-up, and λ = 0 up to 20 tokens
    Algorithm("vapo", "ppo", (1e-4, 3e-4, 1e-3), {"critic": {**CRITIC, "warmup": 10}, "gae": {"alpha": 1.0}}),
    Algorithm("pf_ppo", "ppo", (1e-4, 3e-4, 1e-3), {"critic": CRITIC}),
    Algorithm("grpo", "", (1e-4, 3e-4, 1e-3)),
    Algorithm("gspo", "grpo", (1e-4, 3e-4, 1e-3)),
    Algorithm("cispo", "grpo", (1e-4, 3e-4, 1e-3)),
    # the default β of 0.1 is for answers of hundreds of tokens, whose log-ratios are sums of many terms
    Algorithm("dpo", "", (1e-5, 3e-5, 1e-4), {"beta": 1.0}),
    Algorithm("kto", "dpo", (3e-5, 1e-4, 3e-4), {"beta": 1.0}),
    Algorithm("orpo", "dpo", (1e-4, 3e-4, 1e-3)),
    Algorithm("simpo", "dpo", (1e-5, 3e-5, 1e-4)),
    Algorithm("sft", "", (1e-4, 3e-4, 1e-3)),
    Algorithm("sft", "sft", (3e-4, 1e-3, 3e-3), adapter=LORA),
    Algorithm("grpo", "grpo", (3e-4, 1e-3, 3e-3), adapter=LORA),
    Algorithm("dpo", "dpo", (3e-5, 1e-4, 3e-4), {"beta": 1.0}, adapter=LORA),
    Algorithm("orpo", "orpo", (3e-4, 1e-3, 3e-3), adapter=LORA),
)


@dataclass(frozen=True)
class Scale:
    """The amount of work."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    tuning_seeds: tuple[int, ...] = (101, 102)
    sampling_tokens: int = 1_000_000  # of a run that samples
    preference_tokens: int = 400_000  # of a run on preferences
    teaching_steps: int = 150
    questions: int = 2000
    held_out: int = 500


TINY = Scale((1,), (101,), 1, 1, 60, 64, 4)


@dataclass(frozen=True)
class Run:
    """The result of one algorithm on one seed."""

    score: float
    tokens: int
    steps: int


Train = Callable[[Algorithm, float, int], Run]  # (algorithm, learning rate, seed) → result


@dataclass(frozen=True)
class Learned:
    """An algorithm with its chosen rate, and its runs, by seed."""

    algorithm: Algorithm
    rate: float
    tuning: dict[float, list[float]]  # rate → scores on the tuning seeds
    runs: list[Run]

    @property
    def score(self) -> float:
        """The mean score."""
        return statistics.fmean(run.score for run in self.runs)

    @property
    def tokens(self) -> float:
        """The mean number of tokens spent."""
        return statistics.fmean(run.tokens for run in self.runs)

    def __str__(self) -> str:
        ends = self.algorithm.rates[0], self.algorithm.rates[-1]
        return f"{self.rate:g}" + "*" * (self.rate in ends)


def questions(rng: random.Random, *, held_out: bool) -> Iterator[Row]:
    """Yield rows whose questions are held out, or are not."""
    while True:
        row = task(rng, longest=6, repeats=1)
        if (zlib.crc32(row["question"].encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield row


class World:
    """The starting model and the data of one seed, which all algorithms share."""

    def __init__(self, seed: int, scale: Scale) -> None:
        self.seed = seed
        self.tokenizer = character_tokenizer(SIZE.characters)
        self.module = initial_model(SIZE, self.tokenizer, seed)
        steps, draw = scale.teaching_steps, lambda rng: next(questions(rng, held_out=False))
        teach(self.module, self.tokenizer, steps, draw=draw, seed=seed)
        self._folder = tempfile.TemporaryDirectory()  # the starting model, from which critics are opened
        self.module.save_pretrained(self._folder.name)
        train, held_out = (questions(random.Random(f"{seed} {name}"), held_out=name == "held out") for name in PARTS)
        self.prompts = [self._prompt(row) for row in islice(train, scale.questions)]
        self.held_out = [self._prompt(row) for row in islice(held_out, scale.held_out)]
        self.start = self.score(adopt_module(self.module))
        self.pairs = list(self._preferences())
        self.labelled = [
            LabelledRow(pair.prompt, response, response is pair.chosen)
            for pair in self.pairs
            for response in (pair.chosen, pair.rejected)
        ]

    @property
    def shown(self) -> list[Document]:
        """The right answer to each training question."""
        answers = self.tokenizer([str(one.row["answer"]) for one in self.prompts], add_special_tokens=False)[
            "input_ids"
        ]
        end = self.tokenizer.eos_token_id
        return [Document(one.tokens, [*tokens, end]) for one, tokens in zip(self.prompts, answers, strict=True)]

    def _prompt(self, row: Row) -> Prompt:
        return Prompt(tuple(render(self.tokenizer, row["question"])), row["question"], row)

    def _answers(self, model: LanguageModel, prompts: Sequence[Prompt], samples: int, greedy: bool) -> list[Trajectory]:
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, greedy=greedy, seed=self.seed)
        return generate(open_rollout(model), [one.tokens for one in prompts], samples=samples, sampling=sampling)

    def _right(self, prompt: Prompt, answer: Trajectory) -> bool:
        return exact(response_text(self.tokenizer, answer), str(prompt.row["answer"])) == 1

    def score(self, model: LanguageModel) -> float:
        """Return the share of held-out questions that the model answers greedily and exactly."""
        answers = self._answers(model, self.held_out, 1, greedy=True)
        return statistics.fmean(map(self._right, self.held_out, answers))

    def _preferences(self, samples: int = 8) -> Iterator[PreferencePair]:
        """Yield a pair for each question to which the starting model gave a right and a wrong response."""
        answers = self._answers(adopt_module(self.module), self.prompts, samples, greedy=False)
        for number, prompt in enumerate(self.prompts):
            ended = [one for one in answers[number * samples : (number + 1) * samples] if one.closed]
            found = {self._right(prompt, one): tuple(one.response.tolist()) for one in ended}
            if len(found) == 2:
                yield PreferencePair(number, tuple(prompt.tokens), found[True], found[False])

    def recipe(self, model: LanguageModel, algorithm: Algorithm, rate: float) -> Recipe:
        """Return the stage of an algorithm."""
        config: Any = training_config(algorithm.kind, parameters(algorithm, rate))
        spec = kind_of(algorithm.kind).algorithm
        assert spec is not None
        made = named(spec.algorithm)(config)
        if config.reads == "prompts":
            reward = ScriptedReward(
                lambda call: [exact(c, str(r["answer"])) for c, r in zip(call.completions, call.rows, strict=True)]
            )
            critic = {"critic": ScalarSource(Path(self._folder.name), "float32")}
            roles = open_roles(config, model, self.seed, one_process(), sources=critic)
            return OnPolicy(config, made, roles, self.prompts, RewardScorer(reward, self.tokenizer), self.seed)
        known: dict[str, Sequence[Any]] = {"labels": self.labelled, "demonstrations": self.shown, "pairs": self.pairs}
        return FromRows(
            config, made, open_learner(config, model, self.seed, one_process()), known[config.reads], self.seed
        )


PARTS = ("train", "held out")


def samples(algorithm: Algorithm) -> bool:
    """Return whether an algorithm samples responses."""
    return algorithm.kind not in ("sft", "dpo", "kto", "orpo", "simpo")


def parameters(algorithm: Algorithm, rate: float) -> dict[str, Any]:
    """Return the parameters of a stage: the algorithms of a family have equal steps and a constant learning rate.

    A step that samples makes four optimiser steps; with only one, the ratios of the policies would all be 1.
    """
    optimizer = {"learning_rate": rate, "schedule": "constant"}
    given = {"data": "x", "steps": 10**6, "optimizer": optimizer, **algorithm.settings}
    if algorithm.adapter is not None:
        given["adapter"] = {"lora": algorithm.adapter.model_dump()}
    if not samples(algorithm):
        return {**given, "batch_size": PAIRS * (2 if algorithm.kind == "kto" else 1)}
    group = {"ppo": 4, "vapo": 16}.get(algorithm.kind, 8)  # the defaults
    sizes = {"group_size": group, "prompts_per_step": SAMPLES // group, "max_new_tokens": NEW_TOKENS}
    return {**given, **sizes, "reward": "x", "mini_batches": 4, "trace": {"groups": 0}}


def spend(recipe: Recipe, tokens: int) -> tuple[int, int]:
    """Run steps until they have spent the tokens; return the tokens spent and the number of steps."""
    spent = step = 0
    while spent < tokens:
        recipe.publish_weights(PolicyVersion(0, step))
        spent += recipe.step(step, Trace(lambda fact: None, step)).tokens
        step += 1
    return spent, step


def trained(world: World, algorithm: Algorithm, rate: float, tokens: int) -> Run:
    """Train from the seed's starting model until the tokens are spent; return the result."""
    module = copy.deepcopy(world.module)
    if algorithm.adapter is not None:
        attach(module, algorithm.adapter, world.seed)
    model = adopt_module(module)
    spent, steps = spend(world.recipe(model, algorithm, rate), tokens)
    return Run(world.score(model), spent, steps)


def chosen(scores: Mapping[float, Sequence[float]]) -> float:
    """Return the rate with the highest mean score; of equal means, the smallest rate."""
    return min(scores, key=lambda rate: (-statistics.fmean(scores[rate]), rate))


def measure(scale: Scale, train: Train, algorithms: Sequence[Algorithm] = ALGORITHMS) -> dict[str, Learned]:
    """Choose each algorithm's rate on the tuning seeds, and train with this rate on the others; return by name."""
    found = {}
    for algorithm in algorithms:
        tuning = {rate: [train(algorithm, rate, seed).score for seed in scale.tuning_seeds] for rate in algorithm.rates}
        rate = chosen(tuning)
        runs = [train(algorithm, rate, seed) for seed in scale.seeds]
        found[algorithm.name] = Learned(algorithm, rate, tuning, runs)
    return found


@dataclass(frozen=True)
class Difference:
    """An algorithm's score minus its baseline's: the mean over seeds, and its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """Return the paired difference of scores in [0, 1] with Student's interval, within [-1, 1].

    With one seed, the interval is [-1, 1].
    """
    gains = [score - other for score, other in zip(scores, others, strict=True)]
    mean, half = statistics.fmean(gains), math.inf
    if len(gains) > 1:
        quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(gains) - 1))
        half = quantile * statistics.stdev(gains) / math.sqrt(len(gains))
    return Difference(mean, max(-1.0, mean - half), min(1.0, mean + half))


def compared(found: Mapping[str, Learned]) -> dict[str, Difference]:
    """Return the difference of each algorithm that has a baseline."""
    return {
        kind: difference(*([run.score for run in one.runs] for one in (learned, found[learned.algorithm.baseline])))
        for kind, learned in found.items()
        if learned.algorithm.baseline in found
    }


def shown(found: Mapping[str, Learned]) -> str:
    """Return the Markdown table. The second value of a cell is the value of the baseline."""
    lines = [
        "| algorithm | baseline | learning rates | scores | difference (95 %) | million tokens | steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, gain in compared(found).items():
        both = found[kind], found[found[kind].algorithm.baseline]
        rates, scores, tokens, steps = (
            ", ".join(cells)
            for cells in zip(
                *((str(one), f"{one.score:.3f}", f"{one.tokens / 1e6:.3f}", f"{one.runs[0].steps}") for one in both),
                strict=True,
            )
        )
        lines.append(f"| {kind} | {both[1].algorithm.name} | {rates} | {scores} | {gain} | {tokens} | {steps} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Algorithms at equal numbers of tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores of every run")
    parser.add_argument(
        "--tiny", action="store_true", help="one step of each algorithm on one seed: that it runs, no figures"
    )
    parser.add_argument("--only", metavar="NAME,NAME", help="only these, such as grpo,grpo-lora; default: all")
    options = parser.parse_args()
    known = {one.name: one for one in ALGORITHMS}
    asked = options.only.split(",") if options.only else list(known)
    if odd := sorted(set(asked) - known.keys()):
        parser.error(f"--only must name some of {', '.join(known)}, got {odd[0]}")
    torch.set_num_threads(1)
    disable_progress_bar()
    scale, began = TINY if options.tiny else Scale(), time.process_time()
    worlds = {seed: World(seed, scale) for seed in (*scale.tuning_seeds, *scale.seeds)}

    def train(algorithm: Algorithm, rate: float, seed: int) -> Run:
        tokens = scale.sampling_tokens if samples(algorithm) else scale.preference_tokens
        run = trained(worlds[seed], algorithm, rate, tokens)
        seconds = time.process_time() - began
        print(f"{seconds:7.0f} s  {algorithm.name} {rate:g} seed {seed}: {run}", file=sys.stderr, flush=True)
        return run

    found = measure(scale, train, [known[name] for name in asked])
    start = statistics.fmean(worlds[seed].start for seed in scale.seeds)
    print(shown(found))
    print(f"starting models: {start:.3f}; seeds: {len(scale.seeds)}; CPU seconds: {time.process_time() - began:.0f}")
    if options.json:
        gains = {kind: asdict(gain) for kind, gain in compared(found).items()}
        learned = {kind: asdict(one) for kind, one in found.items()}
        told = {"scale": asdict(scale), "start": start, "learned": learned, "differences": gains}
        options.json.write_text(json.dumps(told, indent=1, default=LoraConfig.model_dump) + "\n")


if __name__ == "__main__":
    main()
