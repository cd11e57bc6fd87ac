"""Prompts in, trajectories out: one call over any engine, which is believed nothing that can be checked.

What an engine of somebody else's gets wrong would otherwise be trained on: an answer of other weights, one that is
too long, log-probabilities that are no numbers. Each ends the call in one line that names the sample.
"""

import time
from collections.abc import Generator, Sequence
from itertools import count
from typing import ClassVar

import numpy as np

from posttrain.domain.errors import FailureClass, InfrastructureError, InputError, IntegrityError, JobFailedError
from posttrain.engine.rollout.port import Completion, Generation, RolloutEngine, SamplingParams, prompt_segments
from posttrain.engine.samples import Ints, Trajectory

_CALLS = count()  # an answer that comes late is of another call
PATIENCE = 3600.0  # seconds without any answer after which an engine is given up
_ROUNDING = 1e-3  # a log-probability may lie above 0 by that much


class EngineError(JobFailedError):
    """A rollout engine does not keep what its port promises."""

    failure_class: ClassVar[FailureClass] = FailureClass.BAD_INPUT  # who brings the engine mends it


class SilentError(InfrastructureError):
    """A rollout engine does not answer."""


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    sampling: SamplingParams,
    prompt_keys: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
    version: str = "",
    patience: float = PATIENCE,
) -> list[Trajectory]:
    """`samples` responses to every prompt, prompt by prompt.

    Args:
        prompts: token ids.
        prompt_keys: [prompts] the names of the prompts in the random numbers; 0, 1, 2 … by default. Give stable keys,
            and a prompt gets the same responses in any batch.
        limits: [prompts * samples] tokens at most for each response, at most `max_new_tokens`.
        first: [prompts] the number of each prompt's first sample; 0 by default.
        version: of the policy that must have sampled.

    Raises:
        InputError: no prompt, an empty prompt, a prompt that does not fit the context together with its response,
            counts that do not match.
        EngineError: an answer that was not asked for, came twice, is too long or empty.
        SilentError: no answer at all.
        JobFailedError: logits or log-probabilities that are not finite.
        IntegrityError: another version answered; somebody re-pointed weights that a zero-copy engine reads.
    """
    work = plan_generations(
        prompts, samples, sampling, prompt_keys, limits, first, context_length=engine.context_length
    )
    found = {asked.id: answer for some in answers(engine, work, version, patience) for asked, answer in some}
    return [found[generation.id] for generation in work]


def answers(
    engine: RolloutEngine,
    work: Sequence[Generation],
    version: str,
    patience: float = PATIENCE,
    look: float = float("inf"),
) -> Generator[list[tuple[Generation, Trajectory]], Sequence[Generation] | None, None]:
    """What an engine answers, as it does. What was not taken when this is closed is taken back.

    Args:
        work: what it answers; more of it may be sent whenever something is yielded.
        look: seconds after which nothing is yielded, where nothing was answered.

    Raises:
        EngineError, SilentError, JobFailedError, IntegrityError: see `generate`.
    """
    waiting, known = dict[str, Generation](), dict[str, Generation]()
    prompts: dict[tuple[int, ...], Ints] = {}
    more: Sequence[Generation] | None = work
    end = time.monotonic() + patience
    try:
        while more or waiting:
            if more:
                prompts |= {tokens: segment.tokens for tokens, segment in prompt_segments(more).items()}
                engine.submit(more)
                waiting |= {generation.id: generation for generation in more}
            found: list[tuple[Generation, Trajectory]] = []
            for done in _next(engine, waiting, patience, end, look):
                asked = _asked(engine.name, done, waiting, known)
                found.append((asked, done.trajectory.sampled_with(temperature=asked.sampling.temperature)))
                _check(engine.name, done.trajectory, asked, prompts[asked.tokens], version)
            if found:
                _check_numbers(engine.name, found)
                end = time.monotonic() + patience
            for asked, _ in found:
                del waiting[asked.id]
            more = yield found
    finally:
        if waiting:
            engine.abort(list(waiting))
            engine.completed(0)


def plan_generations(
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: SamplingParams,
    prompt_keys: Sequence[int] | None,
    limits: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
    *,
    context_length: int,
) -> list[Generation]:
    """The generations that such a call means, prompt by prompt.

    Raises:
        InputError: see `generate`.
    """
    if not prompts:
        raise InputError("generate needs at least one prompt, got none")
    if samples < 1:
        raise InputError(f"samples per prompt must be >= 1, got {samples}")
    keys = tuple(range(len(prompts))) if prompt_keys is None else tuple(prompt_keys)
    if len(keys) != len(prompts):
        raise InputError(f"prompt keys must be one per prompt ({len(prompts)}), got {len(keys)}")
    rows = len(prompts) * samples
    bounds = (sampling.max_new_tokens,) * rows if limits is None else tuple(limits)
    if len(bounds) != rows or not all(1 <= bound <= sampling.max_new_tokens for bound in bounds):
        raise InputError(
            f"limits must be {rows} numbers in 1..{sampling.max_new_tokens}, got {len(bounds)} numbers: {bounds[:4]}…"
        )
    begin = tuple(first or (0,) * len(prompts))
    if len(begin) != len(prompts):
        raise InputError(f"first samples must be one per prompt ({len(prompts)}), got {len(begin)}")
    for index, prompt in enumerate(prompts):
        longest = max(bounds[index * samples : (index + 1) * samples])
        if len(prompt) == 0:
            raise InputError(f"prompt {index} must hold at least one token, got none")
        if len(prompt) + longest > context_length:
            raise InputError(
                f"prompt {index} and its response must fit the context of {context_length} tokens, "
                f"got {len(prompt)} + {longest}; shorten the prompt or max_new_tokens"
            )
    call = next(_CALLS)
    return [
        Generation(
            f"{call}.{place}.{sample}",
            tokens,
            keys[place],
            sampling,
            bounds[place * samples + sample],
            begin[place] + sample,
        )
        for place, tokens in enumerate(tuple(prompt) for prompt in prompts)
        for sample in range(samples)
    ]


def _next(
    engine: RolloutEngine, waiting: dict[str, Generation], patience: float, end: float, look: float
) -> list[Completion]:
    """The next answers, or none after `look` seconds; those to earlier calls, which were taken back or answered, are
    passed over.

    Raises:
        SilentError: none until `end`.
    """
    asked, until = next(iter(waiting)), time.monotonic() + look
    while True:
        came = engine.completed(max(0.0, min(end, until) - time.monotonic()))
        found = [done for done in came if not _of_an_earlier_call(done.id, asked)]
        if found or until <= time.monotonic() < end:
            return found
        if time.monotonic() >= end:
            first = next(iter(waiting.values()))
            raise SilentError(
                f"rollout engine {engine.name} must answer every sample, got none in {patience:g} s with "
                f"{len(waiting)} waiting, first {_sample(first)}; see its log"
            )


def _of_an_earlier_call(found: str, asked: str) -> bool:
    """Whether an id is older: the number of a call is in its ids (`plan_generations`)."""
    numbers = [name.partition(".")[0] for name in (found, asked)]
    return all(number.isdecimal() for number in numbers) and int(numbers[0]) < int(numbers[1])


def _asked(engine: str, done: Completion, waiting: dict[str, Generation], known: dict[str, Generation]) -> Generation:
    """What an answer answers, from now on among those that are known.

    Raises:
        EngineError: it was not asked for, or came before.
    """
    if done.id in known or done.id not in waiting:  # an id is one call's, so a sample is named by its prompt
        what = f"{_sample(known[done.id])} twice" if done.id in known else f"{done.id} without being asked"
        raise EngineError(f"rollout engine {engine} must answer every sample once, got {what}; mend it")
    known[done.id] = waiting[done.id]
    return known[done.id]


def _check(engine: str, answer: Trajectory, asked: Generation, prompt: Ints, version: str) -> None:
    """Hold an answer against what was asked for.

    Raises:
        EngineError, IntegrityError: see `generate`.
    """
    reason = _fault(answer, asked, prompt)
    if reason is not None:
        raise EngineError(_faulty(engine, asked, reason))
    for segment in answer.segments:
        if segment.source == "sampled" and segment.version != version:
            raise IntegrityError(
                f"rollout engine {engine}: the answer to {_sample(asked)} must be sampled by policy "
                f"{version or '(any)'}, got {segment.version or 'none'}; its weights were not brought up to date"
            )


def _fault(answer: Trajectory, asked: Generation, prompt: Ints) -> str | None:
    """What is wrong with an answer by itself, but for its numbers."""
    if answer.prompt is not prompt and not np.array_equal(answer.prompt, prompt):
        return f"must continue its {len(prompt)} tokens, got another beginning"
    if not 1 <= answer.generated <= asked.limit:
        return f"must have 1..{asked.limit} tokens, got {answer.generated}"
    if answer.status not in ("ok", "truncated"):
        return f"must have ended by itself or at its limit, got {answer.status}"
    if np.ndim(answer.logprobs) != 1:
        return f"must have one log-probability a token, got an array of {np.ndim(answer.logprobs)} dimensions"
    return None


def _check_numbers(engine: str, found: Sequence[tuple[Generation, Trajectory]]) -> None:
    """Log-probabilities are finite and not above 0; looked at together, for most answers are short.

    Raises:
        EngineError, JobFailedError: see `generate`.
    """
    told = [np.asarray(answer.logprobs) for _, answer in found]
    everything = np.concatenate(told)
    if np.isfinite(everything).all() and everything.max() <= _ROUNDING:
        return
    for (asked, _), logprobs in zip(found, told, strict=True):
        odd = logprobs[~np.isfinite(logprobs)]
        if len(odd):
            raise JobFailedError(_faulty(engine, asked, f"must have finite log-probabilities, got {odd[0]}"))
        if (logprobs > _ROUNDING).any():
            raise EngineError(_faulty(engine, asked, f"must have log-probabilities <= 0, got {logprobs.max():g}"))


def _faulty(engine: str, asked: Generation, reason: str) -> str:
    return f"rollout engine {engine}: the answer to {_sample(asked)} {reason}; mend the engine"


def _sample(asked: Generation) -> str:
    return f"sample {asked.sample} of prompt {asked.key}"
