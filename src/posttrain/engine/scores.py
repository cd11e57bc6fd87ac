"""Scores of trajectories, by a reward function on text or a reward model on tokens, and environments.

Responses that are sampled together are scored in stretches of the data stream, each as soon as its last response is
complete. The stage's settings alone determine the length of a stretch, so the contents of a call do not depend on the
speed of a response.

An environment returns the observation between two responses of a policy: a tool's answer, another speaker, a game's
next state.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, final

from transformers import PreTrainedTokenizerBase

from posttrain.domain.jobs import Span
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.worker_group import Future, WorkerGroup
from posttrain.engine.models.files import decode_response, decode_turn
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.training import FrozenWorker
from posttrain.engine.rollout.port import OpenSample, Reply
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.sandbox.port import (
    ObserveError,
    Observer,
    RewardCall,
    RewardError,
    RewardFunction,
    Score,
    error_line,
    probe_call,
    refuse_failures,
    shortened,
    try_out,
    weighted,
)
from posttrain.sandbox.protocol import AnswerError, refuse_places

_STRETCHES = 8  # maximum number of stretches per call of the rollout


def _held_against(trajectory: Trajectory, score: Score) -> Score:
    """Return the score, or a failure if the environment failed or scores were earned at tokens that were not sampled.

    A failure keeps the score's parts and components.
    """
    fault = trajectory.fault if trajectory.status == "error" else ""
    if score.at and not fault:
        try:
            refuse_places(score.at, trajectory.sampled.tolist())
        except AnswerError as error:
            fault = f"the reward must return {error} (found by the job, not by the reward's worker)"
    return replace(score, score=None, status="error", message=fault, at={}) if fault else score


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of the responses that are sampled together: `Stretch(first=64, total=256)`."""

    first: int
    total: int


def may_fail(share: float, samples: int) -> int:
    """Return how many of these samples may fail, given the maximum share."""
    return int(share * samples + 1e-9)


def response_text(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> str:
    """Return the text of a response."""
    return decode_response(tokenizer, trajectory.response.tolist(), ended=trajectory.closed)


class Scorer(Protocol):
    """Scores responses with a reward function and the tokenizer, or with a reward model."""

    def groups(self, prompts: int, tokens: int) -> int:
        """Return the number of groups to score together, of `prompts` groups with at most `tokens` tokens each."""

    @property
    def early(self) -> bool:
        """Whether the scorer can work at the same time as the rollout, without using the rollout's memory."""

    @property
    def errors_max(self) -> float:
        """The maximum share of a step's samples that may fail."""

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """Begin to score; the result has one score per trajectory. `prompts` is parallel to `trajectories`.

        Stretches arrive in any order, each one once; their results are read in order.
        """

    def text(self, trajectory: Trajectory) -> str:
        """Return a response as text."""


class RewardScorer:
    """A reward function as a `Scorer`.

    Args:
        reward: the reward function.
        tokenizer: decodes tokens.
        errors_max: maximum share of a step's completions whose scoring may fail.
        processes: number of processes that score concurrently.
        placed: whether the algorithm uses the tokens at which a score was earned.
        turns: maximum number of turns of a response.
        name: the reward's name in errors.
        tell: called with one line when completions failed but the step continues, and when the algorithm ignores the
            tokens at which scores were earned; at most once for each of these two events.
    """

    early = True  # rewards run in separate processes

    def __init__(
        self,
        reward: RewardFunction,
        tokenizer: PreTrainedTokenizerBase,
        *,
        errors_max: float = 0.0,
        processes: int = 1,
        placed: bool = True,
        turns: int = 1,
        name: str = "the reward",
        tell: Callable[[str], None] = lambda _: None,
        alone: bool = True,
    ) -> None:
        self._reward, self._tokenizer, self._processes = reward, tokenizer, processes
        self.errors_max, self._tell, self._told = errors_max, tell, False
        self._placed, self._told_placed, self._most = placed, False, turns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")  # one call at a time
        self._scored: list[Score] = []  # of the stretches so far
        self._alone = alone
        self._name, self._step = name, 0  # responses of a step

    def groups(self, prompts: int, tokens: int) -> int:
        """See `Scorer`; at least one group for each process."""
        return max(-(-prompts // _STRETCHES), self._processes)

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """See `Scorer`; failed completions are left out of their groups.

        `result` raises RewardError if more completions failed than allowed, or if all completions that were sampled
        together failed; see `RewardFunction.score`.
        """
        call = RewardCall(
            prompts=[prompt.text for prompt in prompts],
            completions=[self.text(t) for t in trajectories],
            rows=[prompt.row for prompt in prompts],
            prompt_ids=[t.prompt.tolist() for t in trajectories],
            completion_ids=[t.response.tolist() for t in trajectories],
            **self._turns(trajectories),
        )
        places = range(stretch.first, stretch.first + len(call))
        whole, allowed = len(call) == stretch.total, may_fail(self.errors_max, stretch.total)
        answer = self._thread.submit(self._reward.score, call, allowed, None if whole else places)

        def wait() -> Sequence[Score]:
            scores = [_held_against(t, score) for t, score in zip(trajectories, answer.result(), strict=True)]
            self._accept(scores, stretch, allowed)
            return scores

        return Future(wait, answer.done)

    def _turns(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Return the texts of the policy's turns, and the end of each turn; nothing if every response has one turn."""
        if all(len(t.segments) <= 2 for t in trajectories):
            return {}
        said = [[decode_turn(self._tokenizer, s.tokens.tolist()) for s in t.turns] for t in trajectories]
        return {"turns": said, "turn_spans": [t.turn_spans for t in trajectories]}

    def _accept(self, scores: Sequence[Score], stretch: Stretch, allowed: int) -> None:
        """Check the failures of a step over all its stretches so far.

        Raises:
            RewardError: too many or all responses failed, or the reward declined every response.
        """
        self._scored = [*(self._scored if stretch.first else ()), *scores]
        last = len(self._scored) == stretch.total
        if not (self._placed or self._told_placed) and any(score.at for score in scores):
            self._told_placed = True
            self._tell(
                "the reward returned scores of single tokens, but this algorithm gives each response one advantage, so "
                "only the sum of the scores counts; ppo and reinforce_plus_plus credit each token with the scores that "
                "follow it"
            )
        refuse_failures(self._scored, stretch.total if last else None, allowed)
        self._step = max(self._step, stretch.total)  # a call for replacements has fewer responses than a step
        none = self._alone and all(score.score is None for score in self._scored)
        if last and stretch.total == self._step and none:
            raise RewardError(
                f"{self._name} gave no number to any of the {stretch.total} responses of this step, so nothing can "
                "be learnt from the step; the reward returns None for responses that it cannot score: return a "
                "number for some of them"
            )
        failed = [score for score in self._scored if score.failed]
        if last and failed and not self._told:
            self._told = True
            self._tell(
                f"{failed[0].message}; {len(failed)} of {stretch.total} completions of this step are left out of their "
                "groups; later failures are counted in reward/errors and reward/timeouts"
            )

    def text(self, trajectory: Trajectory) -> str:
        """Return a response as the reward reads it."""
        return response_text(self._tokenizer, trajectory)

    def smoke_test(self, prompts: Sequence[Prompt]) -> None:
        """Call the reward once on the first rows, with their answers as completions, before anything is generated.

        A reward that fails on all of these rows is broken.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        end = self._tokenizer.eos_token_id
        call = probe_call(
            [prompt.text for prompt in prompts],
            [prompt.row for prompt in prompts],
            [prompt.tokens for prompt in prompts],
            lambda text: [*self._tokenizer.encode(text, add_special_tokens=False), *([] if end is None else [end])],
            turns=self._most,
        )
        try_out(self._reward, call)


@final
class ModelScorer:
    """A reward model as a `Scorer`.

    Args:
        judge: the reward model's worker group.
        tokenizer: decodes tokens.
        tokens: tokens that fill a micro-batch on each rank.
        early: whether the model may work while the rollout works (`Roles.early`).
    """

    errors_max = 1.0  # it scores whatever the environment has observed

    def __init__(
        self,
        judge: WorkerGroup[FrozenWorker],
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokens: int = 16384,
        early: bool = False,
    ) -> None:
        self._judge, self._tokenizer, self._tokens, self.early = judge, tokenizer, tokens * judge.ranks, early

    def groups(self, prompts: int, tokens: int) -> int:
        """See `Scorer`; as many groups as fill a micro-batch on every rank."""
        return max(-(-prompts // _STRETCHES), -(-self._tokens // tokens))

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """See `Scorer`; the score is read after the last token.

        `result` raises DivergedError if a score is not finite. Such a model is unusable, so single responses are not
        left out.
        """
        batch = TokenBatch.pack([Document(t.prompt, t.response) for t in trajectories])
        judged = self._judge.nonblocking.map(FrozenWorker.fill, batch, "scores", "scores")

        def wait() -> Sequence[Score]:
            scores: list[float] = judged.result().column("scores").tolist()
            odd = next((place for place, value in enumerate(scores) if not math.isfinite(value)), None)
            if odd is not None:
                raise DivergedError(
                    f"the reward model must return finite scores, got {scores[odd]} for response {stretch.first + odd}"
                )
            return [_held_against(t, Score(value)) for t, value in zip(trajectories, scores, strict=True)]

        return Future(wait, judged.done)

    def text(self, trajectory: Trajectory) -> str:
        """Return a response as text."""
        return response_text(self._tokenizer, trajectory)


@final
class SumScorer:
    """The weighted sum of reward functions and reward models as a `Scorer`.

    Args:
        functions: scores with the weighted functions; None: there are only models.
        models: role → scorer.
        weights: name of a function or role → weight.
    """

    def __init__(
        self, functions: RewardScorer | None, models: Mapping[str, ModelScorer], weights: Mapping[str, float]
    ) -> None:
        self._functions, self._models, self._weights = functions, models, weights
        self._all: list[Scorer] = [*([functions] if functions else []), *models.values()]
        self.early, self.errors_max = all(one.early for one in self._all), min(one.errors_max for one in self._all)

    def groups(self, prompts: int, tokens: int) -> int:
        """See `Scorer`; the most that any part scores together."""
        return max(one.groups(prompts, tokens) for one in self._all)

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """See `Scorer`; `result` raises what the parts raise."""
        called = self._functions.begin(prompts, trajectories, stretch) if self._functions else None
        asked = {name: one.begin(prompts, trajectories, stretch) for name, one in self._models.items()}

        def wait() -> Sequence[Score]:
            parts: list[dict[str, Score]] = [dict(one.parts) for one in called.result()] if called else []
            parts = parts or [{} for _ in trajectories]
            for name, answer in asked.items():
                for mine, score in zip(parts, answer.result(), strict=True):
                    mine[name] = score
            return [
                _held_against(t, weighted(self._weights, mine)) for t, mine in zip(trajectories, parts, strict=True)
            ]

        return Future(wait, lambda: all(one.done() for one in (*asked.values(), *([called] if called else []))))

    def text(self, trajectory: Trajectory) -> str:
        """Return a response as text."""
        return self._all[0].text(trajectory)


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """A failed observation: the sample ends with the status `error`, and has no score."""

    line: str  # one line: the cause


Observed = Sequence[int] | Failed | None


class Environment(Protocol):
    """Computes the observations after sampled responses: equal ones for equal inputs, so a step can be repeated."""

    def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
        """Begin to observe; the result has the tokens of the next observation, or is None if the sample has ended."""

    def wait(self, seconds: float) -> None:
        """Return when a running observation ends, or after `seconds`."""


@final
class Observations:
    """The environment's observations in one call of the rollout, each begun when its response has ended.

    Args:
        environment: computes observations.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        # (key, sample) → the prompt, the turn, its observation
        self._running: dict[tuple[int, int], tuple[Prompt, int, Future[Observed]]] = {}
        self._samples: set[tuple[int, int]] = set()
        self._faults: dict[tuple[int, int], str] = {}
        self._count, self._began, self._waited = 0, 0.0, 0.0

    @property
    def running(self) -> bool:
        """Whether an observation is running, or its reply was not returned."""
        return bool(self._running)

    def fresh(self) -> Self:
        """Return the observations of further samples; none may be running."""
        return type(self)(self._environment)

    @property
    def begun(self) -> bool:
        """Whether there was an observation."""
        return self._began > 0

    def begin(self, prompt: Prompt, sample: OpenSample) -> None:
        """Begin to observe a sample."""
        self._began = self._began or time.time()
        observed = self._environment.begin(prompt, sample.so_far)
        self._running[sample.key, sample.sample] = prompt, sample.turn, observed
        self._faults.pop((sample.key, sample.sample), None)  # of a rank that was lost later

    def wait(self, seconds: float) -> None:
        """Wait for an observation while nothing is sampled."""
        if self._running and not any(observed.done() for *_, observed in self._running.values()):
            begin = time.perf_counter()
            self._environment.wait(seconds)
            self._waited += time.perf_counter() - begin

    def replies(self) -> list[Reply]:
        """Return the replies to samples whose observations have ended since the last call."""
        ended = [(place, *running) for place, running in self._running.items() if running[-1].done()]
        found: list[Reply] = []
        for place, prompt, turn, answer in ended:
            del self._running[place]
            seen = answer.result()
            self._count += 1
            self._samples.add(place)
            if isinstance(seen, Failed):
                self._faults[place] = line = f"{seen.line} (turn {turn} of prompt {shortened(prompt.text)})"
                found.append(Reply(*place, turn, None, line))
            else:
                found.append(Reply(*place, turn, None if seen is None else tuple(seen)))
        return found

    def forget(self, reply: Reply) -> None:
        """Forget a failure whose sample will be observed again, because its rank was lost."""
        self._faults.pop((reply.key, reply.sample), None)

    def refuse(self, allowed: int) -> None:
        """Check that at most `allowed` samples have failed.

        Raises:
            RewardError: more samples have failed, so the step will fail, however the others end.
        """
        if len(self._faults) > allowed:
            refuse_failures([Score.failure("error", line) for _, line in sorted(self._faults.items())], None, allowed)

    def span(self, step: int, batch: int) -> Span:
        """Return the span of the call's observations; its seconds are those in which nothing was sampled."""
        told = {"observations": self._count, "samples": len(self._samples), "failed": len(self._faults), "batch": batch}
        return Span("environment", step, self._began, self._waited, told)

    @property
    def failures(self) -> tuple[str, int, int] | None:
        """The failure of the first sample, and the numbers of failed and of observed samples; None: no failure."""
        faults = self._faults
        return (faults[min(faults)], len(faults), len(self._samples)) if faults else None


@final
class TextEnvironment:
    """An environment built from an observer of texts: `observe(row, responses)` returns the next observation or None.

    An observation is tokenised unchanged, including marks of a chat template; no tokens are added.

    Args:
        observer: receives the row, and the texts of the policy's responses so far, in order; closed by the caller.
        tokenizer: the policy's tokenizer.
        most: maximum tokens of an observation.
    """

    def __init__(self, observer: Observer, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self._observer, self._tokenizer, self._most = observer, tokenizer, most
        self._running: set[futures.Future[str | None]] = set()

    def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
        """See `Environment`; if `observe` raises, or returns no text or too many tokens, the other samples continue."""
        said = [decode_turn(self._tokenizer, segment.tokens.tolist()) for segment in sample.turns]
        answer = self._observer.begin(prompt.row, said)
        self._running.add(answer)
        return Future(lambda: self._seen(answer), answer.done)

    def wait(self, seconds: float) -> None:
        """See `Environment`; also returns if an observation has ended since the last call, or if none is running."""
        self._running = futures.wait(self._running, seconds, futures.FIRST_COMPLETED).not_done

    def _seen(self, answer: futures.Future[str | None]) -> Observed:
        self._running.discard(answer)
        try:
            seen = answer.result()
        except ObserveError as error:
            return Failed(str(error))
        if seen is None:
            return None
        where = self._observer.where
        try:
            tokens: list[int] = self._tokenizer.encode(seen, add_special_tokens=False)
        except Exception as error:  # for instance, of half a surrogate pair
            return Failed(
                f"{where} must return text that can be tokenised, got {error_line(error)}; fix it, or the row"
            )
        if not tokens:
            return Failed(
                f"{where} must return non-empty text or None, got {seen[:60]!r}; return None to end the sample"
            )
        if len(tokens) > self._most:
            return Failed(
                f"{where} must return at most {self._most} tokens, got {len(tokens)}: {seen[:60]!r}; raise "
                "observation_tokens of the stage, or shorten it"
            )
        return tokens
