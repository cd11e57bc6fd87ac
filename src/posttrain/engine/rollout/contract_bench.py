"""What the suite of the port needs of whoever runs it, and how it asks an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import Generation, RolloutEngine, SamplingParams
from posttrain.engine.samples import Trajectory

WAIT = 300.0  # seconds for the next answer, before an engine counts as one that never answers
_ROUNDING = 1e-4  # by how much a log-probability may differ where it is computed in another way


class Bench:
    """An engine's surroundings; `contract.RolloutEngineContract` is the class to derive from."""

    prompts: Sequence[tuple[int, ...]] = ((5, 4, 3), (7, 8), (9,), (4, 4, 6, 5, 8, 9, 7))
    limit = 7
    long = 30  # tokens of a response that is still on its way when one of a single token has been answered
    tolerance = 1e-4  # by how much a log-probability may differ in other company; 0: not by a bit
    ends: Collection[int] = ()  # end-of-sequence tokens of the policy; those that responses end with are known by it
    draws = True  # False: chance decides nothing of what it says, as in a script
    in_place = True  # others change the weights where it reads them; False: it takes those of a version by itself
    unheard: Collection[str] = ()  # tensors that no answer to `prompts` depends on: experts that none of them asks

    def open_engine(self) -> RolloutEngine:
        """A new engine, idle and not paused.

        Raises:
            NotImplementedError: always; a subclass gives it.
        """
        raise NotImplementedError

    def says(self, tokens: Sequence[int]) -> str | None:
        """What the engine's tokenizer decodes, special tokens included; None: it knows no text, and refuses stop
        strings. Two characters somewhere in a response should be text.
        """
        return None

    @property
    def rounding(self) -> float:
        """By how much a log-probability may differ that came about in another way."""
        return max(self.tolerance, _ROUNDING)

    def work(self, samples: int = 3, mark: str = "", limit: int | None = None, **sampling: Any) -> list[Generation]:
        """Every prompt `samples` times, with these fields of `SamplingParams`."""
        tokens = limit or self.limit
        params = SamplingParams(tokens, **{"seed": 7, **sampling})
        return [
            Generation(f"{mark}{key}.{sample}", prompt, 100 + key, params, tokens, sample)
            for key, prompt in enumerate(self.prompts)
            for sample in range(samples)
        ]

    def drain(self, engine: RolloutEngine, count: int) -> dict[str, Trajectory]:
        """The next `count` answers; none may come twice."""
        found: dict[str, Trajectory] = {}
        while len(found) < count:
            done = engine.completed(WAIT)
            require(bool(done), f"{count - len(found)} generations were not answered")
            for completion in done:
                require(completion.id not in found, f"{completion.id} was answered twice")
                found[completion.id] = completion.trajectory
        require(engine.completed(0) == [], "more was answered than was asked for")
        return found

    def ask(self, engine: RolloutEngine, work: Sequence[Generation]) -> dict[str, Trajectory]:
        """What is answered to work that is all there is."""
        engine.submit(work)
        return self.drain(engine, len(work))

    def tell(self, engine: RolloutEngine, version: str) -> None:
        """From now on this version samples; nothing is in work."""
        engine.pause()
        engine.update("", version)
        engine.resume()


def require(holds: bool, otherwise: str) -> None:
    """A promise; `otherwise` says who broke it.

    Raises:
        AssertionError: it does not hold.
    """
    if not holds:
        raise AssertionError(otherwise)


def refuses(call: Callable[[], None]) -> bool:
    """Whether the call ends in `InputError`."""
    try:
        call()
    except InputError:
        return True
    return False


def same(name: str, one: Trajectory, other: Trajectory, tolerance: float) -> None:
    """One response, however it came about.

    Raises:
        AssertionError: tokens, status or log-probabilities that differ.
    """
    require(one.response.tolist() == other.response.tolist(), f"{name} became another response")
    apart = float(np.abs(one.logprobs - other.logprobs).max(initial=0.0))
    require(apart <= tolerance, f"the log-probabilities of {name} differ by {apart:g}, allowed {tolerance:g}")
    require(one.status == other.status, f"{name} ended as {one.status} and as {other.status}")
