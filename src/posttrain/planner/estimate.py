"""What a stage will probably cost, from its declared work and from earlier stages of its kind. Pure arithmetic.

Nothing is guessed: without history there are no seconds, and tokens only where the declared work bounds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

_SHARED = ("prompts", "trained")  # of a stage's work, beside its documents


@dataclass(frozen=True, slots=True)
class Workload:
    """What one stage has to do: `Workload("sft", {"steps": 350, "documents": 22400}, length=38.5)`."""

    kind: str
    # as the trainer declares it: steps, documents (read or answered), max_new_tokens, and where they differ: prompts
    # (documents of one prompt are one), trained (documents trained on after they were answered), rounds (times that
    # as much may be sampled, because dropped groups are replaced), again (tokens that further turns read again)
    work: Mapping[str, float]
    length: float | None = None  # mean tokens of what is read of one document: prompt + completion, or the prompt alone
    counted: bool = False  # by the model's tokenizer; else one token is taken for every character
    longest: float | None = None  # of the longest document that was looked at

    @property
    def units(self) -> float:
        """The number that cost grows with: documents, else steps."""
        return self.work.get("documents", self.work.get("steps", 1.0))


@dataclass(frozen=True, slots=True)
class Experience:
    """What an earlier stage did and cost."""

    workload: Workload
    tokens: int  # that its result took, wherever its first steps were trained; without work that was lost
    seconds: float | None  # of its jobs; None: its first steps were trained in another run


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens and job seconds, and what they rest on. None: not known."""

    tokens: int | None
    seconds: float | None
    basis: str
    history: int = field(default=0)  # earlier stages it rests on
    most: int | None = None  # tokens that the declared work may take, as without history; None: not known


def comparable(one: Workload, other: Workload) -> bool:
    """Whether a unit of both costs the same: it does not with longer answers or more passes, nor where the number of
    one's documents is not known.
    """
    if ("documents" in one.work) != ("documents" in other.work):
        return False
    shares = [{name: w.work.get(name, 0.0) / w.units for name in _SHARED if w.units} for w in (one, other)]
    same = [[w.work.get("max_new_tokens", 0.0), w.work.get("rounds", 1.0)] for w in (one, other)]
    return one.kind == other.kind and same[0] == same[1] and shares[0] == shares[1]


def estimate(workload: Workload, earlier: Sequence[Experience]) -> Estimate:
    """The cost of a stage.

    With history: the median cost per unit of earlier comparable stages, times the units. Without: tokens by the rule of
    `facts.Progress` at what its documents take, the longest responses and every document trained on, and no seconds.
    """
    most = _most(workload)
    rates = [e for e in earlier if e.workload.units > 0 and comparable(workload, e.workload)]
    if rates:
        tokens = median(e.tokens / e.workload.units for e in rates) * workload.units
        timed = [e.seconds / e.workload.units for e in rates if e.seconds is not None]
        seconds = median(timed) * workload.units if timed else None
        noun = "stage" if len(rates) == 1 else "stages"
        return Estimate(round(tokens), seconds, f"from {len(rates)} earlier {workload.kind} {noun}", len(rates), most)
    if most is None:
        return Estimate(None, None, "no history yet")
    longest = workload.work.get("max_new_tokens", 0.0)
    assumed = ("counted by its tokenizer" if workload.counted else "one per character") + (
        f", responses of {longest:g}" if longest else ""
    )
    return Estimate(most, None, f"no history yet; {assumed}", most=most)


def _most(workload: Workload) -> int | None:
    if workload.length is None or "documents" not in workload.work:
        return None
    longest = workload.work.get("max_new_tokens", 0.0)
    read = workload.work.get("prompts", workload.units) * workload.length
    trained = workload.work.get("trained", 0.0) * (workload.length + longest)
    again = workload.work.get("again", 0.0)
    sampled = (read + workload.units * longest + again) * workload.work.get("rounds", 1.0)
    return round(sampled + trained)
