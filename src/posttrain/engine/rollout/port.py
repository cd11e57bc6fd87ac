"""The ports of rollout engines and of key-value stores, and the inputs and outputs of a rollout.

The port of engines defines the calls that every engine answers, and their guarantees. A rollout receives prompts with
their positions in the data stream and returns groups of trajectories. A key-value store contains keys and values of the
decoded rows, within a budget of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.domain.errors import InputError, JobFailedError
from posttrain.domain.rendering import LEAST_TEMPERATURE, stop_fault
from posttrain.engine.batch import Provenance
from posttrain.engine.samples import Floats, Group, Ints, Segment, Trajectory

InFlight = Literal["finish", "recompute", "keep_kv"]
Context = tuple[int, ...] | str  # computed tokens: themselves, or the session that holds their beginning
Positions = npt.NDArray[np.int64]  # [rows]


class NotFiniteError(JobFailedError):
    """The model returned logits that are not finite."""

    def __init__(self, message: str, ids: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.ids = frozenset(ids)  # the generations with such logits

    @classmethod
    def of(cls, doing: str, ids: Iterable[str] = ()) -> Self:
        """Return the error with its message; the message alone makes it again in another process."""
        return cls(f"policy logits must be finite, got NaN or infinity while {doing}; the policy has diverged", ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling, e.g. `SamplingParams(max_new_tokens=64, temperature=1.0, seed=7)`.

    Raises:
        InputError: a field is outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0  # divides logits; log-probabilities are at this temperature, greedy or not
    greedy: bool = False  # draw the likeliest token; of equally likely tokens, the one with the lower index
    seed: int = 0
    batch_size: int = 256  # rows decoded together; changes speed and memory, never the draws
    ignore_eos: bool = False  # always decode to the limit; for measurements
    # three filters, applied in this order and never in training
    top_k: int = 0  # keeps the k likeliest tokens; 0: all
    top_p: float = 1.0  # keeps the likeliest of the remaining tokens, up to this share of the probability
    min_p: float = 0.0  # keeps the remaining tokens with at least this share of the likeliest token's probability
    stop: tuple[str, ...] = ()  # a response ends with the token that completes one of these strings

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"sampling {name} must be >= 1, got {getattr(self, name)}")
        if not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise InputError(
                f"sampling temperature must be at least {LEAST_TEMPERATURE:g}, got {self.temperature:g}; to take the "
                "most likely token, set greedy"
            )
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise InputError(
                "sampling top_k must be >= 0, top_p in (0, 1] and min_p in [0, 1), "
                f"got {self.top_k}, {self.top_p} and {self.min_p}; change the value that is out of range"
            )
        if not isinstance(self.stop, tuple) or not all(isinstance(one, str) for one in self.stop):
            raise InputError(f"sampling stop must be a tuple of strings, got {self.stop!r}; write (…,)")
        if fault := stop_fault(self.stop):
            raise InputError(f"sampling stop {fault}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn. Log-probabilities are always of the whole distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def distribution(self) -> tuple[float, ...]:
        """What determines the probability of each token, given the logits."""
        return self.greedy, self.temperature, self.top_k, self.top_p, self.min_p


@dataclass(frozen=True, slots=True)
class Generation:
    """One requested response: `Generation("388.2", tokens=(1, 5, 9), key=388, sample=2, …)`.

    Raises:
        InputError: there are no tokens, or the limit is outside 1..max_new_tokens.
    """

    id: str  # identifies the answer; unique among unanswered generations
    tokens: tuple[int, ...]  # the context that the response continues
    key: int  # position in the data stream, from which random numbers are derived
    sampling: SamplingParams
    limit: int  # maximum tokens of the response
    sample: int = 0  # number among the samples of its prompt
    policy: str = ""  # "": the policy in training; other names are of adapters, opponents, older versions
    session: str = ""  # the conversation that this generation begins or continues; "": none

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError(
                f"generation {self.id} must have a prompt of at least one token, got none; give it a prompt"
            )
        if not 1 <= self.limit <= self.sampling.max_new_tokens:
            raise InputError(
                f"the limit of generation {self.id} must be in 1..{self.sampling.max_new_tokens}, got {self.limit}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The answer to the generation with this id."""

    id: str
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """New tokens of a generation that is not answered yet: `Delta("388.2", tokens=[9, 2], logprobs=[-0.5, -1.5])`."""

    id: str
    tokens: Ints  # [n], n ≥ 1
    logprobs: Floats  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a given text, at temperature 1: of each token after the tokens before it.

    The first token has no log-probability: it has NaN, and the tokens -1.
    """

    logprobs: Floats  # [n]
    top_tokens: Ints  # [n, top]: the likeliest tokens at each place, the likeliest first
    top_logprobs: Floats  # [n, top]; a token that is also the text's has the same float as in `logprobs`
    next_tokens: Ints  # [max(1, top)]: the likeliest tokens after the text, the likeliest first
    next_logprobs: Floats  # [max(1, top)]


def prompt_segments(work: Sequence[Generation]) -> dict[tuple[int, ...], Segment]:
    """Return one segment per prompt, shared by all generations that begin with it.

    Raises:
        InputError: a token id is outside every vocabulary.
    """
    found: dict[tuple[int, ...], Segment] = {}
    for asked in work:
        if asked.tokens not in found:
            try:
                found[asked.tokens] = Segment(np.array(asked.tokens, dtype=np.int32), "prompt")
            except OverflowError as error:
                raise InputError(
                    f"the prompt of generation {asked.id} must contain tokens below 2^31, got {max(asked.tokens)}; "
                    "check what encoded it"
                ) from error
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """The proof of the weights with which an engine decodes: the tensors themselves, or their log-probabilities."""

    views: Iterable[tuple[str, Tensor]] | None = None  # (name, tensor); None: the engine cannot expose its tensors
    logprobs: Sequence[Floats] = ()  # without `views`: `PromptLogprobs.logprobs` of each text of the challenge


class RolloutEngine(Protocol):
    """Samples responses from a policy; work and answers are streams.

    Every implementation:

    - draws token t of sample s of a prompt with key k from random numbers that depend on (seed, k, s, t) only: other
      generations, the order and interruptions never change a response (up to rounding of the logits; the native engine
      on the CPU is bit-identical);
    - reports log-probabilities of the whole distribution at the sampling temperature;
    - ends a response after the first end-of-sequence token, which is part of the response, or at its limit (status
      `truncated`);
    - ends a response earlier at the first token after which the response's text, decoded with special tokens, contains
      a string of `sampling.stop`. The token is kept as sampled, even if its text continues after the string; the status
      is `ok` and the sequence is `stopped`. Later tokens are dropped. An engine without a tokenizer rejects such
      generations;
    - answers every generation once, and records in each sampled segment the version that sampled it;
    - answers an aborted generation with the tokens so far, at least none, and the status `aborted`. These tokens are a
      beginning of the whole response;
    - remembers a session from the answer of a generation with `session` until the next generation of the session, its
      release, or an update (except `keep_kv`). If the tokens of the next generation begin with those of the answer,
      the engine need not read them again. Otherwise, it reads all tokens. Either way, the response is the same, up to
      rounding. On the native engine on the CPU, a session's responses have the same bits in any company and with any
      amount of memory. A session has one unanswered generation at a time.

    `contract.RolloutEngineContract` tests this list and the docstrings below for any engine.
    """

    @property
    def name(self) -> str:
        """The name of the implementation."""

    @property
    def context_length(self) -> int:
        """The maximum number of tokens in a prompt with its response."""

    @property
    def holds_sessions(self) -> bool:
        """Whether the engine keeps the keys and values of sessions; if not, it reads all tokens of a session again."""

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        """Prove with which weights the engine decodes since the last update.

        An exact proof has the tensors (not copies), unfused, by Hugging Face parameter names. A tied tensor is
        returned under its first name, once for each place that reads it. Any other proof, for example that of a server
        or of a quantised copy, has log-probabilities: `Proof(logprobs=[one.logprobs for one in
        self.score(challenge)])`.

        Args:
            challenge: texts, each of at least two tokens; without texts, only the kind of the proof is requested.

        Raises:
            InputError: the engine has neither tensors nor log-probabilities.
        """

    def counts(self) -> Mapping[str, int]:
        """Return the engine's counters since it was opened; empty if it has none.

        The counters are `prefilled_tokens` of prompts, without what a session holds of them, `continued_tokens` that it
        holds, `steps` of decoding, `decoded_tokens` (rows times steps), `preemptions`, `recomputed_tokens` (read again
        after a preemption or an update), and `discarded_tokens` after the end of a response.
        """

    def submit(self, work: Sequence[Generation]) -> None:
        """Accept generations, in the order of the stream; return immediately.

        Raises:
            InputError: an id or a session already has an unanswered generation; the engine does not serve the policy; a
                prompt and its limit do not fit in the context; there are stop strings but the engine has no tokenizer.
                None of `work` is then accepted.
        """

    def completed(self, timeout: float) -> list[Completion]:
        """Return the responses that have ended since the last call, in the order of their ends; wait for at least one.

        With a timeout of 0, an engine that streams computes about one token of each response. The list is empty after
        `timeout` seconds without a response, and immediately if the engine is idle or paused.

        Raises:
            NotFiniteError: the model returned logits that are not finite.
            IntegrityError: another component re-pointed weights that a zero-copy engine reads.
        """

    def progress(self) -> list[Delta]:
        """Return the tokens that unanswered generations have got since the last call; empty deltas are left out.

        An answer contains all tokens of its generation, those in earlier deltas included. An engine may report nothing
        before an answer; `contract.Bench.streams` is False for it.
        """

    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        """Return the log-probabilities of given texts under a policy, without changing submitted work.

        Args:
            prompts: token ids, at least one each.
            top: number of likeliest tokens at each place.
            policy: see `Generation.policy`.

        Raises:
            InputError: a text is empty or longer than the context; `top` is negative or larger than the vocabulary; the
                engine does not serve the policy.
            NotFiniteError: the model returned logits that are not finite.
        """

    def release(self, sessions: Collection[str]) -> None:
        """Free what these sessions hold, and what their unanswered generations would hold; skip unknown names."""

    def abort(self, ids: Collection[str]) -> None:
        """End these generations, which complete with their tokens so far and the status `aborted`; skip unknown ids."""

    def pause(self) -> None:
        """Stop computing until `resume`; keep submitted work."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        """Sample with `version` of `policy` from now on. Weights that are read in place have already changed.

        Args:
            in_flight: the handling of begun responses. `finish`: the old version ends them, which is impossible if the
                weights that change are read in place (an adapter may be copied); `recompute`: they continue under the
                new weights, and their earlier tokens are computed again; `keep_kv`: they continue with keys and values
                of the old weights.

        Raises:
            InputError: the engine reads weights in place, and is not paused or would have to `finish` begun responses;
                the engine does not serve the policy.
        """


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's reply to a response: an observation, after which the policy responds again, or the end."""

    key: int
    sample: int
    turn: int  # number of responses that the sample has
    observed: tuple[int, ...] | None  # tokens; None: the sample has ended
    fault: str = ""  # why the environment failed: one line; the sample has then ended with the status `error`


@final
@dataclass(frozen=True, slots=True, eq=False)
class OpenSample:
    """A sample that waits for a reply to its last response."""

    key: int
    sample: int
    so_far: Trajectory

    @property
    def turn(self) -> int:
        """The number of responses that the sample has."""
        return len(self.so_far.turns)


@final
@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts to sample from: `PromptBatch(tokens=((1, 5, 9),), keys=(388,))`, and replies to samples of earlier ones.

    Random numbers are a function of key and sample, so a prompt gets the same responses on any rank and in any batch.
    """

    tokens: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]  # positions in the data stream
    replies: tuple[Reply, ...] = ()  # only of `feed`

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tokens):
            raise InputError(f"keys must be one per prompt ({len(self.tokens)}), got {len(self.keys)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def item_lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(len(prompt) for prompt in self.tokens)

    def select_items(self, items: Sequence[int], /) -> PromptBatch:
        """Return the prompts with these indices, in this order, without replies; the result may be empty."""
        return PromptBatch(tuple(self.tokens[i] for i in items), tuple(self.keys[i] for i in items))


@final
@dataclass(frozen=True, slots=True)
class Rollouts:
    """One group of samples per prompt, in the order of the prompts."""

    groups: tuple[Group, ...]
    provenance: Provenance = field(default_factory=Provenance)
    counts: Mapping[str, int] = field(default_factory=dict)  # `RolloutEngine.counts` for these groups
    waiting: tuple[OpenSample, ...] = ()  # samples that have begun to wait for a reply
    idle: bool = False  # whether everything that is left on the rank waits for replies

    @classmethod
    def gather(cls, parts: Sequence[Rollouts], shards: Sequence[Sequence[int]], /) -> Rollouts:
        """Return the groups of all ranks in the order of the prompts.

        Raises:
            InputError: a rank's numbers of groups and prompts differ.
        """
        if [len(part.groups) for part in parts] != [len(shard) for shard in shards]:
            raise InputError(
                f"ranks must return one group per prompt ({[len(s) for s in shards]}), "
                f"got {[len(p.groups) for p in parts]}"
            )
        placed = {
            prompt: group
            for part, shard in zip(parts, shards, strict=True)
            for group, prompt in zip(part.groups, shard, strict=True)
        }
        filled = next((part for part in parts if part.groups), parts[0])
        counts = Counter[str]()
        for part in parts:
            counts.update(part.counts)  # keeps zero counts, unlike +
        return cls(tuple(placed[prompt] for prompt in sorted(placed)), replace(filled.provenance, rank=0), counts)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The last trajectory of every sample, prompt by prompt."""
        return tuple(sample.last for group in self.groups for sample in group.samples)

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return sum(sample.generated for group in self.groups for sample in group.samples)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of the keys and values at one position of one row."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def position_bytes(self) -> int:
        """Bytes of one position: all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVStore(Protocol):
    """Keys and values of kept prompts and of rows that begin with these prompts.

    Before adding or extending rows, a caller reads the rows' size (`row_bytes`, `growth_bytes`) and stays within the
    budget. Rows are identified by numbers, prompts by their `Context`. `order` is the order of the rows in a step.
    """

    @property
    def order(self) -> list[int]:
        """The rows, in the order of a step."""

    @property
    def used(self) -> int:
        """Bytes that rows and kept prompts occupy."""

    def reach(self, longest: int, rows: int) -> None:
        """Prepare for rows of up to `longest` positions, about `rows` at a time."""

    def allow(self, budget: int) -> None:
        """Set the budget, bytes."""

    def keep(self, prompts: Mapping[Context, tuple[int, int]], pairs: Sequence[Tensor]) -> None:
        """Keep computed prompts: [begin, end) of packed keys and values, by layer [tokens, 2, kv_heads, head_dim]."""

    def forget(self, prompts: Collection[Context]) -> None:
        """Drop these prompts; the rows that began with them stay."""

    def prompt_bytes(self, length: int) -> int:
        """Return the bytes of a kept prompt with `length` tokens."""

    def row_bytes(self, length: int, prompt: int) -> int:
        """Return the bytes of a row with room for `length` positions, excluding its kept prompt of `prompt` tokens."""

    def growth_bytes(self, lengths: Mapping[int, int]) -> int:
        """Return the bytes that `extend` takes in addition to `used`."""

    def bytes_alone(self, length: int, prompt: int) -> int:
        """Return the maximum bytes of one row of `length` positions until its end, including its kept prompt."""

    def add(self, rows: Mapping[int, tuple[Context, int]]) -> None:
        """Add rows, each with its kept prompt and room for this number of positions."""

    def read(self, row: int, length: int) -> list[Tensor]:
        """Return copies of the row's first `length` keys and values, by layer [length, 2, kv_heads, head_dim]."""

    def capacity(self, row: int) -> int:
        """Return how many positions the row has room for."""

    def extend(self, lengths: Mapping[int, int]) -> None:
        """Make room for more positions of these rows; the order may change."""

    def remove(self, rows: Collection[int]) -> None:
        """Remove rows; the order of the other rows may change."""

    def clear(self) -> None:
        """Remove everything and free the memory."""

    def begin_step(self, positions: Positions) -> None:
        """Begin a step: every row, in order, writes its next key at its position and attends up to this position."""

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Write keys and values and attend: [rows, heads + 2 kv_heads, head_dim] → [rows, heads * head_dim].

        The heads are those of the query (already scaled), of the key and of the value, in this order.
        """
