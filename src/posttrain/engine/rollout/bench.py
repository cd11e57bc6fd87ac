"""The test bench of rollout engines: the members that a test class of an engine defines, and helpers that query it."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import Delta, Generation, RolloutEngine, SamplingParams
from posttrain.engine.samples import Trajectory

WAIT = 300.0  # seconds to wait for the next answer before the engine counts as hung
APART = 1e-3  # allowed difference between the log-probabilities of sampling and of scoring
_ROUNDING = 1e-4  # allowed difference of a log-probability between two paths of computation


class Bench:
    """The test bench of an engine; derive test classes from `contract.RolloutEngineContract`."""

    prompts: Sequence[tuple[int, ...]] = ((5, 4, 3), (7, 8), (9,), (4, 4, 6, 5, 8, 9, 7))
    limit = 7
    long = 30  # tokens of a response that still runs when a one-token response has been answered
    tolerance = 1e-4  # allowed difference of a log-probability between batches; 0: bit-identical
    ends: Collection[int] = ()  # end-of-sequence tokens of the policy; tokens that end responses are added
    draws = True  # False: responses do not depend on random numbers, as in a script
    in_place = True  # whether weights change where the engine reads them; False: the engine loads each version
    turns = 3  # further turns of a session
    streams = True  # whether `progress` returns tokens before their answer
    scores = True  # whether the engine has weights, to score texts with and to attest
    keeps = True  # whether the engine can keep keys and values of old weights (`keep_kv`)
    others: Sequence[str] = ()  # policies that the engine serves in addition to the one in training
    unheard: Collection[str] = ()  # tensors without effect on the answers to `prompts`, e.g. unused experts

    def held(self) -> Sequence[Tensor]:
        """Return the tensors from which engines that expose none take their weights when opened and at an update."""
        return ()

    def open_engine(self) -> RolloutEngine:
        """Return a new engine, idle and not paused.

        Raises:
            NotImplementedError: always; a subclass implements it.
        """
        raise NotImplementedError

    def says(self, tokens: Sequence[int]) -> str | None:
        """Return the text that the engine's tokenizer decodes, special tokens included.

        None: the engine has no tokenizer and rejects stop strings. Some response should have at least two characters.
        """
        return None

    @property
    def rounding(self) -> float:
        """The allowed difference of a log-probability between two paths of computation."""
        return max(self.tolerance, _ROUNDING)

    def work(self, samples: int = 3, mark: str = "", limit: int | None = None, **sampling: Any) -> list[Generation]:
        """Return every prompt `samples` times, with these fields of `SamplingParams`."""
        tokens = limit or self.limit
        params = SamplingParams(tokens, **{"seed": 7, **sampling})
        return [
            Generation(f"{mark}{key}.{sample}", prompt, 100 + key, params, tokens, sample)
            for key, prompt in enumerate(self.prompts)
            for sample in range(samples)
        ]

    def drain(self, engine: RolloutEngine, count: int) -> dict[str, Trajectory]:
        """Return the next `count` answers; no generation may be answered twice."""
        found: dict[str, Trajectory] = {}
        while len(found) < count:
            done = engine.completed(WAIT)
            require(bool(done), f"{count - len(found)} generations were not answered")
            for completion in done:
                require(completion.id not in found, f"{completion.id} was answered twice")
                found[completion.id] = completion.trajectory
        require(engine.completed(0) == [], "the engine returned more completions than requests")
        return found

    def ask(self, engine: RolloutEngine, work: Sequence[Generation]) -> dict[str, Trajectory]:
        """Submit all the work of an idle engine and return its answers."""
        engine.submit(work)
        return self.drain(engine, len(work))

    def first_tokens(self, engine: RolloutEngine) -> list[Delta]:
        """Return the first progress of submitted work that no answer has."""
        end = time.monotonic() + WAIT
        while not (found := engine.progress()):
            answered = engine.completed(0.0)
            slow = "completed(0.0) must return after about one token of each response, but it returned whole answers"
            require(not answered, f"{slow}; set `streams` to False if the engine cannot")
            require(time.monotonic() < end, f"no progress within {WAIT:g} s")
        return found

    def tell(self, engine: RolloutEngine, version: str) -> None:
        """Make an idle engine sample with this version from now on."""
        engine.pause()
        engine.update("", version)
        engine.resume()


def require(holds: bool, otherwise: str) -> None:
    """Require a condition; `otherwise` is the error message.

    Raises:
        AssertionError: the condition does not hold.
    """
    if not holds:
        raise AssertionError(otherwise)


def refuses(call: Callable[[], object]) -> bool:
    """Return whether the call raises `InputError`."""
    try:
        call()
    except InputError:
        return True
    return False


def same(name: str, one: Trajectory, other: Trajectory, tolerance: float) -> None:
    """Require that two answers are the same response.

    Raises:
        AssertionError: tokens, status or log-probabilities differ.
    """
    require(one.response.tolist() == other.response.tolist(), f"{name} became another response")
    apart = float(np.abs(one.logprobs - other.logprobs).max(initial=0.0))
    require(apart <= tolerance, f"the log-probabilities of {name} differ by {apart:g}, allowed {tolerance:g}")
    require(one.status == other.status, f"{name} ended as {one.status} and as {other.status}")
