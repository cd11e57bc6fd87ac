"""What a policy observes between two of its responses: a tool's answer, another speaker, a game's next state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from transformers import PreTrainedTokenizerBase

from posttrain.domain.errors import InputError
from posttrain.engine.models.chat import decode_turn
from posttrain.engine.samples import Prompt, Trajectory

Observe = Callable[[Mapping[str, Any], Sequence[str]], str | None]


class Environment(Protocol):
    """Answers what was sampled. What it says is a function of what it is given, so a step can be done again."""

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Trajectory]) -> Sequence[Sequence[int] | None]:
        """Tokens that each sample observes next; None: it has ended. `prompts` is parallel to `samples`."""


@final
class TextEnvironment:
    """An environment made of a function over texts: `observe(row, responses)` → the next observation, or None.

    An observation is tokenised as it stands, marks of a chat template included; nothing is added.

    Args:
        observe: given the row, and what the policy has said so far, in turn.
        tokenizer: the policy's.
        most: tokens that an observation may have.
    """

    def __init__(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self._observe, self._tokenizer, self._most = observe, tokenizer, most

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Trajectory]) -> list[list[int] | None]:
        """See `Environment`.

        Raises:
            InputError: an observation is no text, or longer than declared.
        """
        return [self._next(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]

    def _next(self, prompt: Prompt, sample: Trajectory) -> list[int] | None:
        said = [decode_turn(self._tokenizer, segment.tokens.tolist()) for segment in sample.turns]
        seen = self._observe(prompt.row, said)
        if seen is None:
            return None
        if not isinstance(seen, str):
            raise InputError(f"observe must give text or None, got {type(seen).__name__}; fix the recipe")
        tokens: list[int] = self._tokenizer.encode(seen, add_special_tokens=False)
        if not 1 <= len(tokens) <= self._most:
            raise InputError(
                f"an observation must have 1 to {self._most} tokens, got {len(tokens)}: {seen[:60]!r}; raise "
                "observation_tokens of the stage, or shorten it"
            )
        return tokens
