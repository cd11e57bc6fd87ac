"""What a policy observes between two of its responses: a tool's answer, another speaker, a game's next state."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from transformers import PreTrainedTokenizerBase

from posttrain.engine.models.chat import decode_turn
from posttrain.engine.samples import Prompt, Trajectory

Observe = Callable[[Mapping[str, Any], Sequence[str]], str | None]


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing can be observed: the sample ends with the status `error`, and has no score."""

    line: str  # what happened


Observed = Sequence[int] | Failed | None


class Environment(Protocol):
    """Answers what was sampled. What it says is a function of what it is given, so a step can be done again."""

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Trajectory]) -> Sequence[Observed]:
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

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Trajectory]) -> list[Observed]:
        """See `Environment`; where `observe` raises, or says no text, or more than declared, the others go on."""
        return [self._next(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]

    def _next(self, prompt: Prompt, sample: Trajectory) -> Observed:
        said = [decode_turn(self._tokenizer, segment.tokens.tolist()) for segment in sample.turns]
        try:
            seen = self._observe(prompt.row, said)
            if seen is None:
                return None
            if not isinstance(seen, str):
                return Failed(f"{self._where} must give text or None, got {type(seen).__name__}; fix it")
            tokens: list[int] = self._tokenizer.encode(seen, add_special_tokens=False)
        except (Exception, SystemExit) as error:  # whatever it is: the step's other samples go on
            return Failed(f"observe: {self._place(error)} raised {_line(error)}; fix it, or the row")
        if not tokens:
            return Failed(f"{self._where} must give some text or None, got {seen[:60]!r}; give None to end the sample")
        if len(tokens) > self._most:
            return Failed(
                f"{self._where} must give at most {self._most} tokens, got {len(tokens)}: {seen[:60]!r}; raise "
                "observation_tokens of the stage, or shorten it"
            )
        return tokens

    @property
    def _where(self) -> str:
        """`observe (guess.py:7)`."""
        return f"observe ({self._defined})"

    @property
    def _defined(self) -> str:
        """`guess.py:7`: the line of its definition."""
        code = getattr(inspect.unwrap(self._observe), "__code__", None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else "of no file"

    def _place(self, error: BaseException) -> str:
        """`guess.py:12`: the innermost frame in the folder of `observe`, or its definition."""
        code = getattr(inspect.unwrap(self._observe), "__code__", None)
        folder = Path(code.co_filename).parent if code else None
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).parent == folder]
        return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else self._defined


def _line(error: BaseException) -> str:
    """`ValueError: text` without line breaks, whatever the exception makes of itself."""
    try:
        said = str(error)
    except Exception:
        said = "its text cannot be read"
    return " ".join(f"{type(error).__name__}: {said}".encode("utf-8", "replace").decode().split())[:300].rstrip(": ")
