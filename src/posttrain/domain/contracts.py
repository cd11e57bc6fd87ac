"""What is said of a stage before anything runs: its contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from posttrain.domain.amounts import LEAST_STALL
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError
from posttrain.domain.measures import ItemRange
from posttrain.domain.placement import Placement

MODEL: Final = "model"  # an output: the last model
BEST: Final = "best"  # the best one by the stage's probe
METRICS: Final = "metrics"  # what an evaluation measured, item by item
REPORT: Final = "report"  # what a gate judged
UNCHANGED: Final = "unchanged"  # a metric of a stage: no step updated weights
FORMS = ("file", "tree")
_FORM_OF = {MODEL: "tree", BEST: "tree", METRICS: "file"}
_TAKEN = ("model", "dataset", "reward", "recipe")


@dataclass(frozen=True, slots=True)
class Load:
    """What a stage's configuration makes of memory."""

    kind: str
    roles: tuple[str, ...]
    placement: Placement
    device: str  # cpu | cuda | auto
    dtype: str  # float32 | bfloat16 | auto
    micro_batch_tokens: int | None  # None: chosen (`planner.sizes`)
    activation_checkpointing: bool | None = None  # None: chosen
    sequence_parallel: int = 1
    documents: int = 0  # of one optimiser step; 0: not known, so micro-batches are taken to be full
    rows: int = 0  # responses that one rank decodes together, at the most
    response_tokens: int = 0
    ray_address: str | None = None
    samples: int = 0  # responses of one step, or of one batch of an evaluation
    kv_cache: int | None = None  # bytes of one rollout rank; None: chosen
    object_store: int | None = None  # bytes; None: chosen
    reward_timeout: float | None = None  # seconds; None: chosen
    start_timeout: float | None = None  # seconds; None: chosen
    call_timeout: float | None = None  # seconds; None: chosen
    scored: bool = False  # by a reward function
    lag: int = 0  # steps that it samples ahead of training
    correction: str = ""  # of what another policy, or engine, sampled; its policy reads every response once more
    streams: bool = False  # gradients are summed while other groups of the step are sampled
    wide: int = 0  # bytes, for each response token, of columns that stay where they are computed

    def decoded(self, ranks: int) -> int:
        """Responses that each of so many ranks decodes together: its part of a step's, up to `rows`."""
        return min(self.rows, -(-(self.samples or self.rows) // ranks))


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """What a stage asks of a data set's rows: what its job would refuse, a plan refuses before anything runs."""

    pairs: bool = False  # rows are preference pairs: prompt, chosen, rejected
    learn: bool = False  # rows are demonstrations to learn from; else prompts to respond to
    max_length: int | None = None  # tokens of a demonstration; None: the model's context
    reserve: int = 0  # tokens of the context kept free for a response
    answer: bool = False  # every row needs a reference answer
    distinct: bool = False  # rows are items that a gate counts: one prompt has one answer
    whole: bool = False  # with distinct: one prompt has one row, since a reward reads all of it
    first: int | None = None  # only so many rows are used; None: all


@dataclass(frozen=True, slots=True)
class Length:
    """How a training stage goes through its data."""

    slot: str  # the data set
    field: str  # batch_size | prompts_per_step
    per_step: int  # documents that a step takes
    epochs: float | None = None  # passes that were asked for; the plan turns them into steps and asks again with these
    turns: bool = False  # of a conversation every assistant turn is a document; else a row is one


@dataclass(frozen=True, slots=True)
class StageContract:
    """What a stage takes and leaves."""

    params: Mapping[str, Any]  # normalised: defaults filled in
    inputs: Mapping[str, tuple[str, str]]  # slot → (asset kind, word of run.yaml), e.g. "data" → ("dataset", "train")
    outputs: Mapping[str, str]  # name → form: file | tree
    metrics: Mapping[str, ItemRange | None] = field(default_factory=dict)  # it will produce; None: no gate may read it
    work: Mapping[str, float] = field(default_factory=dict)  # for the planner: steps, documents, max_new_tokens …
    rows: Mapping[str, RowNeeds] = field(default_factory=dict)  # data set slot → what its rows must be
    load: Load | None = None  # what it makes of memory and asks of devices; None: one process that trains nothing
    length: Length | None = None  # of a training stage


def refuse_malformed(contract: StageContract, told: str) -> None:
    """Hold a contract that somebody else's code made to what everything behind it relies on.

    Args:
        told: whose it is, for errors.

    Raises:
        InputError: it is none, its parameters are no JSON, an input or output is not what it must be.
    """
    if not isinstance(contract, StageContract):
        raise InputError(f"{told}: must give a StageContract, got {type(contract).__name__}")
    try:
        digest_json(dict(contract.params))
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{told}: parameters must be JSON: {error}") from error
    runtime = contract.params.get("runtime", {})
    threads = runtime.get("threads", 1) if isinstance(runtime, Mapping) else None
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InputError(f"{told}: runtime must be a map whose threads are at least 1, got {runtime!r:.80}")
    limit = runtime.get("stall_after")
    if limit is not None and (not isinstance(limit, int | float) or isinstance(limit, bool) or limit < LEAST_STALL):
        raise InputError(
            f"{told}: runtime.stall_after must be at least {LEAST_STALL:g} seconds, as a number, got {limit!r:.80}"
        )
    if "placement" in contract.params and contract.load is None:
        raise InputError(f"{told}: placement decides no result and needs a load; call the parameter otherwise")
    for slot, (kind, _) in contract.inputs.items():
        if kind not in _TAKEN:
            raise InputError(f"{told}: input {slot!r} must be one of {', '.join(_TAKEN)}, got {kind!r}")
    if not contract.outputs:
        raise InputError(f"{told}: must leave at least one output, got none")
    for name, form in contract.outputs.items():
        wanted = _FORM_OF.get(name)
        if form not in FORMS or wanted not in (None, form) or name == REPORT:
            words = "is a gate's alone" if name == REPORT else f"must be a {wanted or ' or '.join(FORMS)}, got {form!r}"
            raise InputError(f"{told}: output {name!r} {words}")
    if contract.metrics and METRICS not in contract.outputs:
        raise InputError(f"{told}: metrics are in the output {METRICS!r}, which it does not leave")
