"""What a job says while it runs: values, streamed as JSON lines into the attempt folder's event segments.

The engine makes them and knows neither store nor telemetry; whoever reads them back gets the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from posttrain.domain.errors import IntegrityError
from posttrain.domain.shapes import shaped


@dataclass(frozen=True, slots=True)
class Metric:
    """Numbers of one step, e.g. `Metric(step=12, values={"reward/mean": 0.41}, at=1.7e9)`."""

    step: int
    values: Mapping[str, float]
    at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is. `step` is the liveness counter: it grows while the job lives, whatever the clocks say.

    `tokens` is what a budget meters, counted by one rule for every kind of job:

    * a prompt's tokens, once each time the prompt is read to be answered: samples of one prompt share that reading;
    * every generated token;
    * every token of a document trained on, prompt and response, once per optimiser step that it is part of.

    So supervised fine-tuning counts what it trains on, an evaluation what it reads and writes, and GRPO both: responses
    of groups with signal are generated and then trained on. Passes that neither answer nor train (the frozen reference
    of a KL penalty) are not counted.
    """

    step: int
    total: int
    phase: str  # "sft", "grpo", "evaluate" …
    tokens: int  # spent so far by this attempt's lineage
    at: float


@dataclass(frozen=True, slots=True)
class Span:
    """A timed hand-off: `[started, started + seconds)`."""

    name: str
    step: int
    started: float
    seconds: float
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """One line for a person: a warning, or what is going on."""

    message: str
    at: float
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Sample:
    """One response's whole way through a step, from the prompt to the update that consumed it.

    Sequences are per response token, 0 at those that were observed, or empty where the role is absent or nothing was
    trained on it.
    """

    id: str  # "<step>.<prompt's position in the data stream>.<sample>", e.g. "12.388.3"; steps count from 0
    step: int
    prompt: str
    response: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    behaviour_logprobs: Sequence[float]
    truncated: bool
    versions: Sequence[str]  # policy versions that sampled it, "<incarnation>.<step>"
    reward: float | None
    fate: str  # "update 12, mini-batch 0" | "dropped: no score" | "dropped: group without signal", or another reason
    components: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"  # the reward's: ok | timeout | error | none
    advantages: Sequence[float] = ()
    logprobs: Sequence[float] = ()  # of the policy as the update found it
    ratios: Sequence[float] = ()  # exp(logprobs - old), the old being what the loss divides by
    clipped: Sequence[bool] = ()
    reference_logprobs: Sequence[float] = ()
    values: Sequence[float] = ()
    returns: Sequence[float] = ()
    earned: Sequence[float] = ()  # what of the reward stands where; empty: all of it at the end
    observed: Sequence[bool] = ()  # whether the policy did not sample it; empty: it sampled all
    temperature: float | None = None  # that it was sampled at, and that its log-probabilities are of; None: not known


Fact = Metric | Progress | Span | Note | Sample
FactSink = Callable[[Fact], None]
_KINDS: dict[str, type[Any]] = {"metric": Metric, "progress": Progress, "span": Span, "note": Note, "sample": Sample}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """A JSON object whose `type` names the fact."""
    # not asdict, which copies every number of every list: a millisecond for a sample of 256 tokens
    return {"type": _NAMES[type(fact)], **{f.name: getattr(fact, f.name) for f in fields(fact)}}


def fact_from_json(value: Mapping[str, Any]) -> Fact:
    """The inverse of `fact_to_json`.

    Raises:
        IntegrityError: an unknown `type` or a missing field.
    """
    try:
        given = {key: item for key, item in value.items() if key != "type"}
        fact: Fact = shaped(_KINDS[value["type"]], given)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"event segment holds a fact that cannot be read: {error}; the job's version differs"
        ) from error
    return fact
