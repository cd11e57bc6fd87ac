"""Rollout engines that draw otherwise than they are asked to, or end responses elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from broken_rollouts import ENDS, Honest, edited, ending_with

from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.port import Completion, Generation, SamplingParams
from posttrain.engine.samples import Segment


class Altering(Honest):
    """Draws in another way than it is asked to."""

    def submit(self, work: Sequence[Generation]) -> None:
        self._inner.submit([self.altered(one) for one in work])

    def altered(self, asked: Generation) -> Generation:
        return replace(asked, sampling=self.params(asked.sampling))

    def params(self, sampling: SamplingParams) -> SamplingParams:
        return sampling


class Sure(Altering):
    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, greedy=True)


class Seedless(Altering):
    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, seed=0)


class Keyless(Altering):
    def altered(self, asked: Generation) -> Generation:
        return replace(asked, key=0)


class Unanimous(Altering):
    """All samples of a prompt are its first."""

    def altered(self, asked: Generation) -> Generation:
        return replace(asked, sample=0)


class Stuck(Honest):
    """One random number for all tokens of a response."""

    def completed(self, timeout: float) -> list[Completion]:
        def repeating(s: Segment) -> Segment:
            return replace(s, tokens=np.full_like(s.tokens, s.tokens[0]))

        return [edited(done, repeating) for done in self._inner.completed(timeout)]


class Lukewarm(Altering):
    """Knows no temperature but 1."""

    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=1.0)


class Cold(Altering):
    """Takes the temperature away where the most likely token is taken."""

    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=1.0) if sampling.greedy else sampling


class Generous(Altering):
    """Draws among all tokens, whatever was to be left out."""

    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_k=0, top_p=1.0, min_p=0.0)


class Renormalised(Honest):
    """Log-probabilities of what truncation left: nothing but the token, the narrowest case."""

    def __init__(self) -> None:
        super().__init__()
        self._cut: set[str] = set()

    def submit(self, work: Sequence[Generation]) -> None:
        self._cut = {one.id for one in work if one.sampling.truncates}
        self._inner.submit(work)

    def completed(self, timeout: float) -> list[Completion]:
        def certain(s: Segment) -> Segment:
            assert s.logprobs is not None
            return replace(s, logprobs=np.zeros_like(s.logprobs))

        return [edited(done, certain) if done.id in self._cut else done for done in self._inner.completed(timeout)]


class HalfDeaf(Honest):
    """Knows one of two tokens that end a response."""

    def __init__(self) -> None:
        self._inner = NativeRollout(ending_with(ENDS[0]))


class Unending(Altering):
    """Goes on to the limit, whatever it says."""

    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, ignore_eos=True)


class Brief(Altering):
    """Ends also where it should not."""

    def params(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, ignore_eos=False)


class Clipping(Honest):
    """Does not keep the token that ends a response."""

    def completed(self, timeout: float) -> list[Completion]:
        def clipped(s: Segment) -> Segment:
            assert s.logprobs is not None
            return replace(s, tokens=s.tokens[:-1], logprobs=s.logprobs[:-1])

        done = self._inner.completed(timeout)
        return [edited(one, clipped) if one.trajectory.status == "ok" else one for one in done]
