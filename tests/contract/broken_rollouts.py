"""A rollout engine that keeps every promise, and engines that answer otherwise than they should."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import families
import numpy as np

from posttrain.domain.errors import InputError
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.port import Completion, Delta, Generation, InFlight, PromptLogprobs
from posttrain.engine.samples import Segment, Trajectory

ENDS = (families.EOS, 17)


@cache
def model() -> LanguageModel:
    return ending_with(*ENDS)


def ending_with(*tokens: int) -> LanguageModel:
    module = families.build("qwen3")
    module.generation_config.eos_token_id = list(tokens)
    return adopt_module(module)


class Honest:
    """An engine that keeps every promise; those below break one each."""

    def __init__(self) -> None:
        self._inner = NativeRollout(model(), texts=StopStrings(families.tokenizer()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def edited(done: Completion, change: Callable[[Segment], Segment], **status: Any) -> Completion:
    """The same answer, its response changed."""
    prompt, *rest = done.trajectory.segments
    found = replace(done.trajectory, segments=(prompt, *map(change, rest)), **status)
    return Completion(done.id, found)


class Lossy(Honest):
    """Never answers the last sample, and forgets it."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit(work[:-1])


class Twice(Honest):
    def completed(self, timeout: float) -> list[Completion]:
        return [done for one in self._inner.completed(timeout) for done in (one, one)]


class Elsewhere(Honest):
    """Answers to the prompt without its first token."""

    def completed(self, timeout: float) -> list[Completion]:
        def shorter(trajectory: Trajectory) -> Trajectory:
            first, *rest = trajectory.segments
            return replace(trajectory, segments=(Segment(first.tokens[1:], "prompt"), *rest))

        return [Completion(done.id, shorter(done.trajectory)) for done in self._inner.completed(timeout)]


class Chatty(Honest):
    """Goes on behind the limit."""

    def completed(self, timeout: float) -> list[Completion]:
        def longer(s: Segment) -> Segment:
            assert s.logprobs is not None
            return replace(s, tokens=np.append(s.tokens, s.tokens), logprobs=np.append(s.logprobs, s.logprobs))

        return [edited(done, longer) for done in self._inner.completed(timeout)]


class Certain(Honest):
    """Reports probabilities for log-probabilities."""

    def completed(self, timeout: float) -> list[Completion]:
        def exp(s: Segment) -> Segment:
            assert s.logprobs is not None
            return replace(s, logprobs=np.exp(s.logprobs) + np.float32(0.01))

        return [edited(done, exp) for done in self._inner.completed(timeout)]


class Cutting(Honest):
    """Says of all that they were cut."""

    def completed(self, timeout: float) -> list[Completion]:
        return [edited(done, lambda s: s, status="truncated") for done in self._inner.completed(timeout)]


class Forgetful(Honest):
    """Counts anew at every look."""

    def counts(self) -> dict[str, int]:
        found = dict(self._inner.counts())
        return {name: -count for name, count in found.items()}


class Sociable(Honest):
    """Random numbers by the place in a submission."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit([replace(one, key=place) for place, one in enumerate(work)])


class Deaf(Honest):
    """Knows no limit but the params'."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit([replace(one, limit=one.sampling.max_new_tokens) for one in work])


class Unstoppable(Honest):
    """Takes stop strings and knows none."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit([replace(one, sampling=replace(one.sampling, stop=())) for one in work])


class Headlong(Honest):
    """Ends a response one token late."""

    def completed(self, timeout: float) -> list[Completion]:
        return [
            edited(done, lambda s: s, stopped=False, status="ok") if done.trajectory.stopped else done
            for done in self._inner.completed(timeout)
        ]


class Stubborn(Honest):
    """Drops what is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: set[str] = set()

    def abort(self, ids: Collection[str]) -> None:
        self._gone |= set(ids)
        self._inner.abort(ids)

    def completed(self, timeout: float) -> list[Completion]:
        return [done for done in self._inner.completed(timeout) if done.id not in self._gone]


class Restless(Honest):
    def pause(self) -> None:
        """Goes on."""


class Outdated(Honest):
    """Says for ever that the first version sampled."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        self._inner.update(policy, "0.1", in_flight=in_flight)


class Obliging(Honest):
    """Takes the part of a submission that it can answer."""

    def submit(self, work: Sequence[Generation]) -> None:
        for one in work:
            try:
                self._inner.submit([one])
            except InputError:
                if len(work) == 1:
                    raise


class Repeating(Honest):
    """Reports all tokens so far as new."""

    def progress(self) -> list[Delta]:
        for row in self._inner._schedule.running.values():
            row.told = 0
        return self._inner.progress()


class Erasing(Honest):
    """Answers what was aborted without its tokens."""

    def completed(self, timeout: float) -> list[Completion]:
        def none(s: Segment) -> Segment:
            assert s.logprobs is not None
            return replace(s, tokens=s.tokens[:0], logprobs=s.logprobs[:0])

        return [
            edited(done, none) if done.trajectory.status == "aborted" else done
            for done in self._inner.completed(timeout)
        ]


class Rereading(Honest):
    """Reads the whole context of every turn."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit([replace(one, session="") for one in work])


class Trusting(Honest):
    """Continues what a session holds, whatever the context."""

    def __init__(self) -> None:
        super().__init__()
        held = self._inner._sessions
        kept = held._held
        held.continued = lambda name, context: min(len(kept[name].tokens), len(context) - 1) if name in kept else 0  # type: ignore[method-assign]


class Clinging(Honest):
    """Never frees a session."""

    def release(self, sessions: Collection[str]) -> None:
        pass


class Stale(Honest):
    """Holds sessions over an update."""

    def __init__(self) -> None:
        super().__init__()
        self._inner._sessions.clear = lambda: None  # type: ignore[method-assign]


class Smudging(Honest):
    """Holds other keys and values than it computed."""

    def __init__(self) -> None:
        super().__init__()
        held = self._inner._sessions
        hold = held.hold
        held.hold = lambda name, tokens, pairs: hold(name, tokens, [pair + 0.5 for pair in pairs])  # type: ignore[method-assign]


class Sharing(Honest):
    """Takes several generations of a session at a time."""

    def submit(self, work: Sequence[Generation]) -> None:
        taken = set(self._inner._intake._sessions.values())
        for one in work:
            self._inner.submit([replace(one, session="") if one.session in taken else one])
            taken.add(one.session)


class Anyone(Honest):
    """Answers for any policy with the one in training."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit([replace(one, policy="") for one in work])


class Shifted(Honest):
    """Scores each token as the token before it."""

    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        found = self._inner.score(prompts, top)
        return [replace(one, logprobs=np.roll(one.logprobs, 1)) for one in found]


class Distracted(Honest):
    """Scores otherwise while it samples."""

    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        busy = np.float32(0.25 * bool(self._inner._schedule.running))
        return [replace(one, logprobs=one.logprobs - busy) for one in self._inner.score(prompts, top)]
