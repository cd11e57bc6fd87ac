"""Evaluation of a model on its suites, probes during training, and the extraction of answers.

A model answers a suite with greedy and sampled responses, item by item. An item is a prompt with a reference answer,
identified by the digest of both, so two models (or two versions of a suite) can be compared item by item. Items of a
suite are distinct: a model gives equal items the same answer, which would wrongly count as additional evidence. The
random draws for an item depend on the seed, the suite and the item, never on the other items.

A regular expression extracts the answer from a response, so a gate's numbers need no judge model. A reward function can
score responses instead: every response gets a number in the declared range. pass@k of one item is a pure function.

A probe is a measurement of a few held-out items during training: for the learning curve, and for selection within the
stage. No gate reads probes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, final

import regex
from transformers import PreTrainedTokenizerBase

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import BudgetExceededError, InputError
from posttrain.domain.jobs import tokens_short
from posttrain.domain.kinds import ItemRange, compares, item_id
from posttrain.engine.config import SuiteConfig
from posttrain.engine.config.stages import DRAWN
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.files import encode_prompts
from posttrain.engine.rollout.port import PromptBatch, RolloutEngine, SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker, generate
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import response_text
from posttrain.engine.settings import LossProbeConfig
from posttrain.engine.trace import StepReport, Trace
from posttrain.sandbox.port import RewardCall, RewardError, RewardFunction, Score, probe_call, shortened, try_out

_SECONDS = 5.0  # maximum time to find the answer in one response, 100,000 times the usual time
ROWS_PER_CALL = 512  # responses between two checks of budget and stop orders
W_contra = TypeVar("W_contra", contravariant=True)
W = TypeVar("W")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of `k` samples is correct, given `samples` draws with `correct` hits.

    The estimate is unbiased: 1 - C(n - c, k) / C(n, k), computed as a product that stays in floating-point range (Chen
    et al. 2021, arXiv 2107.03374, equation 1).

    Args:
        samples: n, >= k.
        correct: c, in [0, n].

    Raises:
        ValueError: a count is out of range.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples, got {k=}, {samples=}, {correct=}"
        )
    if samples - correct < k:
        return 1.0
    miss = 1.0
    for i in range(samples - correct + 1, samples + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss


def reference_answer(row: Mapping[str, Any], name: str, number: int) -> str:
    """Return the reference answer that responses to this row are compared with.

    Args:
        name, number: the data set's name and the row's number (from 1), for errors.

    Raises:
        InputError: the row's `answer` is missing, or not text.
    """
    answer = row.get("answer")
    if isinstance(answer, str):
        return answer
    found = f"columns {', '.join(sorted(row))}" if answer is None else f"{answer!r:.60}"
    raise InputError(
        f"{name} row {number} needs an `answer`: the text or number with which responses are compared, got {found}"
    )


def is_correct(extracted: str | None, answer: str) -> bool:
    """Return whether the extracted text equals the answer; a response without extracted text is always wrong."""
    return extracted is not None and extracted == answer


class Extractor:
    """Extracts an answer from a response with a regular expression that has a group.

    Args:
        extract: a regular expression in the syntax of Python's `re`.

    Raises:
        InputError: `extract` is not a regular expression.
    """

    def __init__(self, extract: str) -> None:
        try:
            self._pattern = regex.compile(extract)
        except (regex.error, RecursionError) as error:
            raise InputError(f"extract must be a regular expression, got {extract!r}: {error}; fix it") from error

    def __call__(self, response: str) -> str | None:
        """Return group 1 of the last non-empty match; None if there is no match.

        Empty matches are skipped because an expression such as `(.*)` matches once more at the very end.

        Raises:
            InputError: the search took too long.
        """
        last: str | None = None
        try:
            for match in self._pattern.finditer(response, timeout=_SECONDS):
                if match.group(0):
                    last = match.group(1)
        except TimeoutError:
            raise InputError(
                f"extract must search a response in at most {_SECONDS:g} s, but {self._pattern.pattern!r} took "
                f"longer for a response of {len(response)} characters; avoid nested repetitions"
            ) from None
        return last


@dataclass(frozen=True, slots=True)
class Item:
    """One task of a suite: `Item("sha256:…", "Q: sort 31", (1, 3, …), "13")`."""

    id: str
    text: str
    prompt: tuple[int, ...]
    answer: str | None  # None: no reference answer, so a reward scores the response
    row: Mapping[str, Any] = field(default_factory=dict)  # the input of a reward


@dataclass(frozen=True, slots=True)
class Response:
    """One response to an item."""

    item: Item
    kind: str  # greedy | sample
    sample: int  # 0 for greedy
    text: str
    extracted: str | None
    correct: bool | None  # None: the item has no answer
    tokens: int
    truncated: bool  # the token limit ended the response
    logprob: float  # of the whole response, at the sampling temperature
    reward: float | None = None  # None: the suite has no reward
    components: Mapping[str, float] = field(default_factory=dict)  # parts of the reward, by name


# (items, texts, trajectories) → one score per response; the three sequences are parallel
Judge = Callable[[Sequence[Item], Sequence[str], Sequence[Trajectory]], Sequence[Score]]


@dataclass(slots=True)
class Meter:
    """Counts the tokens spent, by the rule of `jobs.Progress`, and compares them with the limits.

    Args:
        limit: tokens; None for no limit.
        deadline: seconds since the epoch; None for no deadline.
        say: called before each call of the engine with the tokens spent and the maximum cost of the call.
        declared: the run's token budget, of which `limit` tokens were left.
        late: the beginning of the error message if the deadline has passed.
    """

    limit: int | None = None
    deadline: float | None = None
    say: Callable[[int, int], None] = lambda spent, reserved: None
    declared: int | None = None
    late: str = "deadline passed"
    tokens: int = 0

    def admit(self, worst: int) -> None:
        """Raise if a call could exceed a limit.

        Raises:
            BudgetExceededError: `worst` more tokens would exceed the limit, or the deadline has passed.
        """
        if self.limit is not None and self.tokens + worst > self.limit:
            short = tokens_short("the next answers", worst, self.tokens, self.limit, self.declared)
            raise BudgetExceededError(f"{short}; raise budget.tokens")
        if self.deadline is not None and time.time() >= self.deadline:
            raise BudgetExceededError(f"{self.late} during evaluation; raise budget.wall_clock")
        self.say(self.tokens, worst)

    def add(self, tokens: int) -> None:
        """Count the cost of the last admitted call."""
        self.tokens += tokens
        self.say(self.tokens, 0)


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """All responses to a suite, greedy responses first."""

    suite: str
    config: SuiteConfig
    items: Sequence[Item]
    responses: Sequence[Response] = field(repr=False)

    def items_of(self, metric: str) -> Sequence[Item]:
        """Return the items that have a value of this metric; a metric of correctness needs items with an answer."""
        return [item for item in self.items if item.answer is not None] if compares(metric) else self.items

    def metrics(self) -> dict[str, list[float]]:
        """Return a map from metric name to one value for each of `items_of(name)`.

        The names are those of `SuiteConfig.metrics`, without metrics that no item has.
        """
        greedy = [r for r in self.responses if r.kind == "greedy"]
        values = {
            "accuracy": [float(r.correct) for r in greedy if r.correct is not None],
            "response_tokens": [float(r.tokens) for r in greedy],
            "truncated": [float(r.truncated) for r in greedy],
            "reward": [r.reward for r in greedy if r.reward is not None],
        }
        n, sampled = self.config.samples, [r for r in self.responses if r.kind == "sample"]
        if n:
            hits, asked = Counter(r.item.id for r in sampled if r.correct), self.items_of("accuracy")
            values["sampled_accuracy"] = [hits[item.id] / n for item in asked]
            values |= {f"pass@{k}": [pass_at_k(n, hits[i.id], k) for i in asked] for k in self.config.pass_at}
            worth: dict[str, list[float]] = {}
            for response in sampled:
                if response.reward is not None:
                    worth.setdefault(response.item.id, []).append(response.reward)
            values["sampled_reward"] = [_mean(worth[item.id]) for item in self.items if item.id in worth]
        return {f"{self.suite}/{name}": column for name, column in values.items() if column}


def suite_items(
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: SuiteConfig,
    *,
    name: str,
    context: int,
) -> list[Item]:
    """Return the items of a suite, one per row.

    Args:
        rows: canonical rows.
        texts: the rows' prompts as reports and item digests contain them.
        name: the data set's name in errors.
        context: the model's context length, tokens.

    Raises:
        InputError: a row has no usable answer, and the suite has no reward; a prompt with its response does not fit in
            the context; two rows are equal.
    """
    answers = [
        None if config.reward and not isinstance(row.get("answer"), str) else reference_answer(row, name, number)
        for number, row in enumerate(rows, start=1)
    ]
    prompts = encode_prompts(tokenizer, rows, name=name, limit=context, reserve=config.max_new_tokens)
    items = [
        Item(item_id(text, answer), text, prompt, answer, row)
        for answer, text, prompt, row in zip(answers, texts, prompts, rows, strict=True)
    ]
    twice = next((row for row, count in Counter(item.id for item in items).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{name}: rows of a suite must be distinct, got item {twice} more than once; drop one")
    return items


def evaluate_suite(
    suite: str,
    config: SuiteConfig,
    items: Sequence[Item],
    rollout: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    meter: Meter,
    between: Callable[[int], bool] = lambda _: True,
    judge: Judge | None = None,
) -> SuiteResult | None:
    """Answer every item: greedily once, then `config.samples` times by sampling.

    Args:
        seed: the stage's seed.
        meter: raises before a call that could exceed the budget, and counts spent tokens.
        between: called after every batch with its number of responses; returning False stops the evaluation.
        judge: scores every response, batch by batch.

    Returns:
        All responses; None if `between` stopped the evaluation.

    Raises:
        BudgetExceededError: the next batch could exceed a limit.
    """
    limit = config.max_new_tokens
    greedy = SamplingParams(max_new_tokens=limit, greedy=True, stop=config.stop)
    seed = derive_seed(seed, "evaluate", suite)
    drawn: dict[str, Any] = {name: getattr(config, name) for name in DRAWN}
    sampled = SamplingParams(max_new_tokens=limit, seed=seed, stop=config.stop, **drawn)
    extract = Extractor(config.extract)
    responses: list[Response] = []
    for kind, samples, sampling in (("greedy", 1, greedy), ("sample", config.samples, sampled)):
        size = max(1, ROWS_PER_CALL // max(1, samples))
        for start in range(0, len(items) if samples else 0, size):
            chunk = items[start : start + size]
            read = sum(len(item.prompt) for item in chunk)
            meter.admit(read + len(chunk) * samples * limit)
            keys = [derive_seed(0, item.id) for item in chunk]
            found = generate(rollout, [i.prompt for i in chunk], samples=samples, sampling=sampling, prompt_keys=keys)
            meter.add(read + sum(t.generated for t in found))
            said = [
                _read_back(chunk[at // samples], kind, at % samples, t, response_text(tokenizer, t), extract)
                for at, t in enumerate(found)
            ]
            responses += _judged(said, found, judge) if judge else said
            if not between(len(found)):
                return None
    return SuiteResult(suite, config, items, responses)


def _judged(responses: Sequence[Response], trajectories: Sequence[Trajectory], judge: Judge) -> list[Response]:
    scores = judge([r.item for r in responses], [r.text for r in responses], trajectories)
    return [
        replace(response, reward=score.score, components=score.components)
        for response, score in zip(responses, scores, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    """Return the mean, clamped to the range of the values, so that rounding cannot violate the declared range."""
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _read_back(item: Item, kind: str, sample: int, trajectory: Trajectory, text: str, extract: Extractor) -> Response:
    """Return the response in a trajectory, with its extracted answer."""
    extracted = extract(text)
    return Response(
        item=item,
        kind=kind,
        sample=sample,
        text=text,
        extracted=extracted,
        correct=None if item.answer is None else is_correct(extracted, item.answer),
        tokens=trajectory.generated,
        truncated=trajectory.truncated,
        logprob=float(trajectory.logprobs.sum(dtype="float64")),
    )


@final
class RewardJudge:
    """Scores responses of one suite.

    A gate uses the range that the suite declares (ADR 0011), so a value outside the range is an error and is never
    clipped. An item without a value is also an error: otherwise the model could choose which items count.

    Args:
        reward: the reward function.
        suite: the suite's name, for errors.
        possible: the range of a response's score.
    """

    def __init__(self, reward: RewardFunction, suite: str, possible: ItemRange) -> None:
        self._reward, self._suite, self._possible = reward, suite, possible

    def smoke_test(self, items: Sequence[Item]) -> None:
        """Call the reward once on the first items, before anything is generated.

        Raises:
            RewardError: the reward fails on all of these items.
        """
        try_out(self._reward, probe_call([i.text for i in items], [i.row for i in items], [i.prompt for i in items]))

    def __call__(
        self, items: Sequence[Item], texts: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> Sequence[Score]:
        """Return one score per response; the arguments are parallel.

        Raises:
            RewardError: a response could not be scored, was declined, or has a score outside the range. The error names
                the item and the value.
        """
        call = RewardCall(
            prompts=[item.text for item in items],
            completions=list(texts),
            rows=[item.row for item in items],
            prompt_ids=[t.prompt.tolist() for t in trajectories],
            completion_ids=[t.response.tolist() for t in trajectories],
        )
        scores = self._reward.score(call, len(call), range(len(call)))  # failures are reported by `_refuse`
        for item, text, score in zip(items, texts, scores, strict=True):
            self._refuse(item, text, score)
        return scores

    def _refuse(self, item: Item, text: str, score: Score) -> None:
        what = f"suite {self._suite}: item {item.id[:19]}… ({shortened(item.text)})"
        if score.failed:
            raise RewardError(f"{what}: {score.message}; an evaluation needs a score for every item")
        if score.score is None:
            raise RewardError(
                f"{what}: the reward returned no score for {shortened(text)}; return a score for every response"
            )
        low, high = self._possible.low, self._possible.high
        if not low <= score.score <= high:
            raise RewardError(
                f"{what}: must have a score from {low:g} to {high:g} (reward_range), got {score.score:.17g} for "
                f"{shortened(text)}; fix the reward, or declare its range"
            )


class Measurement(Protocol[W_contra]):
    """A held-out measurement during training, computed by the stage's workers."""

    max_tokens: int  # maximum tokens of one measurement

    def __call__(self, workers: W_contra, /) -> StepReport:
        """Measure with at most `max_tokens` tokens, and return the metrics."""


Probe = Measurement[WorkerGroup[RolloutWorker]]


@final
@dataclass(frozen=True, slots=True)
class ProbeSchedule(Generic[W]):
    """The steps at which a recipe measures its model: before the first step, every `every` steps, and at the end.

    Args:
        probe: the measurement; None: never measure.
        every: steps between measurements.
        last: the number of steps of the stage.
    """

    probe: Measurement[W] | None
    every: int
    last: int

    @classmethod
    def of(cls, probe: Measurement[W] | None, config: LossProbeConfig | None, last: int) -> ProbeSchedule[W]:
        """Return the schedule of the stage's configuration."""
        return cls(probe, config.every, last) if config else cls(None, 1, last)

    def max_tokens(self, step: int) -> int:
        """Return the maximum number of tokens of the probe after `step` steps; 0 if no probe is due."""
        return self.probe.max_tokens if self.probe and self._due(step) else 0

    def measure(self, step: int, trace: Trace, workers: W) -> StepReport | None:
        """Measure the model after `step` steps, if a probe is due."""
        if self.probe is None or not self._due(step):
            return None
        with trace.span("probe"):
            return self.probe(workers)

    def _due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last


@final
class AccuracyProbe:
    """The probe of an algorithm that samples: greedy answers to fixed items.

    Args:
        items: prompts whose rows have an `answer`.
        extract: a regular expression with a group around the answer.
        max_new_tokens: maximum tokens per answer.
        stop: strings that end an answer.
        name: the data set's name in errors.

    Raises:
        InputError: a row has no usable answer.
    """

    def __init__(
        self,
        items: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        extract: str,
        max_new_tokens: int,
        stop: tuple[str, ...] = (),
        name: str = "probe",
    ) -> None:
        self._items, self._tokenizer = items, tokenizer
        self._extract, self._limit, self._stop = Extractor(extract), max_new_tokens, stop
        self._answers = [reference_answer(item.row, name, number) for number, item in enumerate(items, start=1)]
        self.max_tokens = sum(len(item.tokens) + max_new_tokens for item in items)

    def __call__(self, rollout: WorkerGroup[RolloutWorker], /) -> StepReport:
        """Return the greedy accuracy of the current weights."""
        prompts = PromptBatch(tuple(tuple(item.tokens) for item in self._items), tuple(range(len(self._items))))
        sampling = SamplingParams(max_new_tokens=self._limit, greedy=True, stop=self._stop)
        found = rollout.map(RolloutWorker.generate, prompts, sampling, 1).trajectories
        answered = zip(found, self._answers, strict=True)
        correct = sum(is_correct(self._extract(response_text(self._tokenizer, t)), answer) for t, answer in answered)
        tokens = sum(len(t.prompt) + t.generated for t in found)
        return StepReport(tokens, {"probe/accuracy": correct / len(self._items)})
