"""What the port promises of weights: which are read, when they may change, and what becomes of begun responses.

The suite changes the tensors that an engine shows, where they are, and gives them back. Of an engine that shows none
it can only hold what it says of versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.contract_bench import WAIT, Bench, refuses, require, same
from posttrain.engine.rollout.port import Generation, InFlight, RolloutEngine
from posttrain.engine.samples import Trajectory

_OLD, _NEW = "0.1", "0.2"
_FINISH: InFlight = "finish"
_GOING_ON: tuple[InFlight, ...] = ("recompute", "keep_kv")


class WeightContract(Bench):
    """The tests of weights."""

    def shown(self, engine: RolloutEngine) -> list[tuple[str, Tensor]]:
        """The tensors that can be changed where they are, each place in memory once."""
        views = engine.views() if self.in_place else None
        places = {(held.data_ptr(), held.shape, held.stride()): (name, held) for name, held in views or ()}
        return list(places.values())

    def test_what_it_shows_is_what_it_decodes_with(self) -> None:
        """Each tensor alone changes what it says, and what it said comes back with the tensor."""
        engine = self.open_engine()
        work = self.work(samples=1, greedy=True)
        before = self.ask(engine, work)
        for name, held in self.shown(engine):
            if name in self.unheard:
                continue
            with changed([held], _noisy):
                self.tell(engine, _NEW)
                found = self.ask(engine, work)
            heard = any(_differ(before[asked], answer, self.tolerance) for asked, answer in found.items())
            require(heard, f"it shows {name} and must decode with it, but says the same when that changes")
        self.tell(engine, _OLD)
        for asked, answer in self.ask(engine, work).items():
            same(asked, before[asked], answer, self.tolerance)

    def test_logits_that_are_not_finite_end_the_job(self) -> None:
        """Whatever the tokens are chosen by."""
        for sampling in ({}, {"greedy": True}, {"top_k": 2}):
            engine = self.open_engine()
            shown = [held for _, held in self.shown(engine)]
            if not shown:
                return
            with changed(shown, lambda held: torch.full_like(held, torch.nan)):
                self.tell(engine, _NEW)
                work = self.work(samples=1, **sampling)
                said = _answered(partial(self.ask, engine, work))
            require(said is None, f"logits that are no numbers must end in JobFailedError, got {said} answers")

    def test_weights_that_are_read_in_place_change_while_it_is_paused(self) -> None:
        """An update at any other time is refused and changes nothing, and so is one of a policy that nobody serves."""
        engine = self.open_engine()
        self.tell(engine, _OLD)
        if self.in_place:
            require(refuses(partial(engine.update, "", _NEW)), "an update was taken by an engine that was not paused")
        engine.pause()
        require(refuses(partial(engine.update, "opponent", _NEW)), "an update of a policy that nobody serves was taken")
        engine.resume()
        for name, answer in self.ask(engine, self.work(samples=1)).items():
            require(answer.versions == (_OLD,), f"{name} was sampled by {answer.versions} after a refused update")

    def test_what_has_begun_goes_on_as_an_update_says(self) -> None:
        """Under new weights, with what it had said computed again or not. An engine that answers whole batches has
        nothing that has begun.
        """
        for in_flight in _GOING_ON if self.in_place else (_FINISH, *_GOING_ON):
            engine = self.open_engine()
            self.tell(engine, _OLD)
            work = self.work(samples=1, limit=self.long, greedy=True, ignore_eos=True)
            whole = self.ask(engine, work)
            left = self._begin(engine, work)
            refused = self.in_place and refuses(partial(engine.update, "", _NEW))
            shown = [held for _, held in self.shown(engine)]
            with changed(shown, _noisy):
                engine.update("", _NEW, in_flight=in_flight)
                engine.resume()
                found = self.drain(engine, len(left))
                finished = in_flight == _FINISH or (self.in_place and not refused)
                for asked in left:
                    self._goes_on(asked.id, whole[asked.id], found[asked.id], finished=finished)
                begun = [answer for answer in found.values() if answer.versions[0] == _OLD]
                require(bool(begun) or not refused, f"none of what had begun says that {_OLD} began it")
                if shown:
                    self._reads_again(engine, begun, in_flight)

    def _begin(self, engine: RolloutEngine, work: Sequence[Generation]) -> list[Generation]:
        """Pause when a short response has been answered; what is left."""
        short = Generation("short", self.prompts[0], 99, work[0].sampling, 1)
        engine.submit([short, *work])
        answered: set[str] = set()
        while short.id not in answered:
            done = engine.completed(WAIT)
            require(bool(done), "a response of one token was not answered")
            answered |= {completion.id for completion in done}
        engine.pause()
        return [asked for asked in work if asked.id not in answered]

    def _goes_on(self, name: str, whole: Trajectory, found: Trajectory, *, finished: bool) -> None:
        """What one version began and the other went on with; `finished`: an update to `finish` was taken."""
        versions = found.versions
        require(versions in ((_OLD,), (_OLD, _NEW), (_NEW,)), f"{name} was sampled by {versions}")
        require(len(versions) == 1 or not finished, f"{name} must be finished by the version that began it")
        require(found.generated == whole.generated, f"{name} must have {whole.generated} tokens, got {found.generated}")
        old = _said_by(_OLD, found)
        beginning = found.response.tolist()[:old] == whole.response.tolist()[:old]
        require(beginning, f"{name} has tokens of {_OLD} that {_OLD} does not say")

    def _reads_again(self, engine: RolloutEngine, begun: Sequence[Trajectory], in_flight: InFlight) -> None:
        """The first token under new weights, held against one that a new generation begins with."""
        both = [answer for answer in begun if _NEW in answer.versions]
        params = self.work(greedy=True, ignore_eos=True)[0].sampling
        apart: list[float] = []
        for place, answer in enumerate(both):
            old = _said_by(_OLD, answer)
            read = (*answer.prompt.tolist(), *answer.response.tolist()[:old])
            fresh = self.ask(engine, [Generation(f"fresh {place}", read, place, params, 1)])
            (logprob,) = (float(one.logprobs[0]) for one in fresh.values())
            apart.append(abs(logprob - float(answer.logprobs[old])))
        if in_flight == "recompute":
            most = max(apart, default=0.0)
            require(most <= self.rounding, f"what had been said must be computed again, got a token {most:g} away")
        else:  # what had to wait meanwhile has lost its keys and values
            kept = not apart or max(apart) > self.rounding
            require(kept, "keys and values of the old weights must be kept, got what the new ones say")


@contextmanager
def changed(held: Sequence[Tensor], other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """These tensors hold other values, where they are."""
    kept = [one.clone() for one in held]
    try:
        _fill(held, [other(one) for one in kept])
        yield
    finally:
        _fill(held, kept)


@torch.no_grad()
def _fill(held: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for one, value in zip(held, values, strict=True):
        one.copy_(value)


def _noisy(held: Tensor) -> Tensor:
    """As large as it was, or larger where it was small, and not a multiple of it, which a norm would undo."""
    noise = torch.randn(held.shape, generator=torch.Generator().manual_seed(held.numel())).to(held)
    return held + noise * (0.1 + held.abs().mean())


def _differ(one: Trajectory, other: Trajectory, tolerance: float) -> bool:
    try:
        same("", one, other, tolerance)
    except AssertionError:
        return True
    return False


def _answered(call: Callable[[], dict[str, Trajectory]]) -> int | None:
    """How many answers came; None: it ended in `JobFailedError`."""
    try:
        return len(call())
    except JobFailedError:
        return None


def _said_by(version: str, answer: Trajectory) -> int:
    return sum(len(turn.tokens) for turn in answer.turns if turn.version == version)
