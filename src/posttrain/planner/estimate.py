"""What a stage will probably cost, from its declared work and from earlier stages of its kind. Pure arithmetic.

Nothing is guessed: without history there are no seconds, and tokens only where the declared work bounds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Workload:
    """What one stage has to do: `Workload("sft", {"steps": 350, "documents": 22400}, characters=38.5)`."""

    kind: str
    # as the trainer declares it: steps, documents (read or answered), max_new_tokens, and where they differ: prompts
    # (documents of one prompt are one), trained (documents trained on after they were answered)
    work: Mapping[str, float]
    characters: float | None = None  # mean length of what is read of one row: prompt + completion, or the prompt alone

    @property
    def units(self) -> float:
        """The number that cost grows with: documents, else steps."""
        return self.work.get("documents", self.work.get("steps", 1.0))


@dataclass(frozen=True, slots=True)
class Experience:
    """What an earlier stage did and cost."""

    workload: Workload
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens and job seconds, and what they rest on. None: not known."""

    tokens: int | None
    seconds: float | None
    basis: str
    history: int = field(default=0)  # earlier stages it rests on


def estimate(workload: Workload, earlier: Sequence[Experience]) -> Estimate:
    """The cost of a stage.

    With history: the median cost per unit of earlier stages of the same kind, times the units. Without: tokens by the
    rule of `facts.Progress` at one per character, the longest responses and every document trained on (a character
    tokenizer adds a few per chat turn, a larger vocabulary needs a quarter), and no seconds.
    """
    rates = [e for e in earlier if e.workload.kind == workload.kind and e.workload.units > 0]
    if rates:
        tokens = median(e.tokens / e.workload.units for e in rates) * workload.units
        seconds = median(e.seconds / e.workload.units for e in rates) * workload.units
        noun = "stage" if len(rates) == 1 else "stages"
        return Estimate(round(tokens), seconds, f"from {len(rates)} earlier {workload.kind} {noun}", len(rates))
    if workload.characters is None or "documents" not in workload.work:
        return Estimate(None, None, "no history yet")
    longest = workload.work.get("max_new_tokens", 0.0)
    read = workload.work.get("prompts", workload.units) * workload.characters
    trained = workload.work.get("trained", 0.0) * (workload.characters + longest)
    tokens = round(read + workload.units * longest + trained)
    assumed = "one per character" + (f", responses of {longest:g}" if longest else "")
    return Estimate(tokens, None, f"no history yet; {assumed}")
