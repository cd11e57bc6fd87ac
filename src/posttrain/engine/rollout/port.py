"""What every rollout engine is asked for, and what it must honour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.domain.errors import InputError
from posttrain.engine.samples import Floats, Ints, Trajectory


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are drawn, e.g. `SamplingParams(max_new_tokens=64, temperature=1.0, seed=7)`.

    Raises:
        InputError: a field outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0  # logits are divided by it; reported log-probabilities are under it, greedy or not
    greedy: bool = False  # take the most likely token; on a tie the one with the lower index
    seed: int = 0
    batch_size: int = 256  # rows decoded together; changes speed and memory, not what is drawn
    ignore_eos: bool = False  # decode to the limit; for measurements

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"sampling {name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.temperature < float("inf"):
            raise InputError(
                f"sampling temperature must be > 0, got {self.temperature}; for the most likely token set greedy"
            )


class RolloutEngine(Protocol):
    """Samples responses from a policy.

    Every implementation: draws token t of sample s of a prompt with key k from random numbers that depend on (seed,
    k, s, t) only, so neither the other prompts nor their order nor `batch_size` changes a response (up to rounding of
    the logits); reads the weights as they are when `generate` is called; reports log-probabilities under the sampling
    temperature; ends a response after the first end-of-sequence token, which it keeps, or at the limit.
    """

    @property
    def name(self) -> str:
        """Which implementation this is."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        sampling: SamplingParams,
        prompt_keys: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """`samples` responses to every prompt, prompt by prompt.

        Args:
            prompts: token ids.
            prompt_keys: [prompts] the names of the prompts in the random numbers; 0, 1, 2 … by default. Give stable
                keys, and a prompt gets the same responses in any batch.
            limits: [prompts * samples] tokens at most for each response, at most `max_new_tokens`.

        Raises:
            InputError: no prompt, an empty prompt, a prompt that does not fit the context together with its response,
                counts that do not match.
            JobFailedError: the model gave logits that are not finite.
            IntegrityError: somebody re-pointed weights that a zero-copy engine reads.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call of `generate`, laid out by rows: one row per response, prompt-major."""

    prompts: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]  # [prompts]
    samples: int
    limits: tuple[int, ...]  # [rows]
    sampling: SamplingParams

    @property
    def rows(self) -> int:
        """Responses asked for."""
        return len(self.prompts) * self.samples

    def chunks(self) -> list[list[int]]:
        """Rows decoded together: at most `batch_size`, prompts of similar length side by side."""
        order = sorted(range(self.rows), key=lambda row: len(self.prompts[row // self.samples]))
        size = self.sampling.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def trajectory(
        self, row: int, tokens: Sequence[int] | Ints, logprobs: Sequence[float] | Floats, *, ended: bool
    ) -> Trajectory:
        """The answer for one row; `ended`: by an end-of-sequence token."""
        return Trajectory.answer(self.prompts[row // self.samples], tokens, logprobs, truncated=not ended)


def check_request(
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: SamplingParams,
    prompt_keys: Sequence[int] | None,
    limits: Sequence[int] | None,
    *,
    context_length: int,
) -> Request:
    """Check the arguments of `generate`.

    Raises:
        InputError: see `RolloutEngine.generate`.
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
    for index, prompt in enumerate(prompts):
        longest = max(bounds[index * samples : (index + 1) * samples])
        if len(prompt) == 0:
            raise InputError(f"prompt {index} must hold at least one token, got none")
        if len(prompt) + longest > context_length:
            raise InputError(
                f"prompt {index} and its response must fit the context of {context_length} tokens, "
                f"got {len(prompt)} + {longest}; shorten the prompt or max_new_tokens"
            )
    return Request(tuple(tuple(p) for p in prompts), keys, samples, bounds, sampling)
