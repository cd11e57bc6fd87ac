"""The rollout role, the choice of its engine for a model, and the checked call of any engine.

The role samples responses, from the policy's own weights where it stands beside them, else from a copy.

One call takes prompts to trajectories over any engine, and checks what can be checked. An error of an engine of
somebody else's would otherwise be trained on: an answer of other weights, one that is
too long, log-probabilities that are no numbers. Each ends the call in one line that names the sample.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import count
from typing import ClassVar, final

import numpy as np

from posttrain.domain.errors import (
    FailureClass,
    InfrastructureError,
    InputError,
    IntegrityError,
    JobFailedError,
    NotFoundError,
)
from posttrain.engine.batch import Provenance
from posttrain.engine.groups.port import RankContext, Stored
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.loading import ModelSource, load_tokenizer
from posttrain.engine.models.sharding import Layout, Shard, layout_of, put
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.llama_decoder import why_attention_is_plain, why_not_fusable
from posttrain.engine.rollout.port import (
    Completion,
    Generation,
    PromptBatch,
    RolloutEngine,
    Rollouts,
    SamplingParams,
    prompt_segments,
)
from posttrain.engine.samples import Group, Ints, Trajectory, groups_of
from posttrain.engine.weights.stream import (
    Attestation,
    Bucket,
    PolicyVersion,
    Standing,
    View,
    WeightSource,
    attest_views,
    differing_aliases,
    exchange,
)

_CALLS = count()  # an answer that comes late is of another call
PATIENCE = 3600.0  # seconds without any answer after which an engine is given up
_ROUNDING = 1e-3  # a log-probability may lie above 0 by that much
_LOOK = 0.25  # seconds until more prompts can be taken on, where nothing ends
_Rows = dict[int, dict[int, Trajectory]]  # key → number of a sample → what has come
_Answered = list[tuple[Generation, Trajectory]]


class EngineError(JobFailedError):
    """A rollout engine does not keep what its port promises."""

    failure_class: ClassVar[FailureClass] = FailureClass.BAD_INPUT  # who brings the engine mends it


class SilentError(InfrastructureError):
    """A rollout engine does not answer."""


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    sampling: SamplingParams,
    prompt_keys: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
    version: str = "",
    patience: float = PATIENCE,
) -> list[Trajectory]:
    """`samples` responses to every prompt, prompt by prompt.

    Args:
        prompts: token ids.
        prompt_keys: [prompts] the names of the prompts in the random numbers; 0, 1, 2 … by default. Give stable keys,
            and a prompt gets the same responses in any batch.
        limits: [prompts * samples] tokens at most for each response, at most `max_new_tokens`.
        first: [prompts] the number of each prompt's first sample; 0 by default.
        version: of the policy that must have sampled.

    Raises:
        InputError: no prompt, an empty prompt, a prompt that does not fit the context together with its response,
            counts that do not match.
        EngineError: an answer that was not asked for, came twice, is too long or empty.
        SilentError: no answer at all.
        JobFailedError: logits or log-probabilities that are not finite.
        IntegrityError: another version answered; somebody re-pointed weights that a zero-copy engine reads.
    """
    work = plan_generations(
        prompts, samples, sampling, prompt_keys, limits, first, context_length=engine.context_length
    )
    found = {asked.id: answer for some in answers(engine, work, version, patience) for asked, answer in some}
    return [found[generation.id] for generation in work]


def answers(
    engine: RolloutEngine,
    work: Sequence[Generation],
    version: str,
    patience: float = PATIENCE,
    look: float = float("inf"),
) -> Generator[list[tuple[Generation, Trajectory]], Sequence[Generation] | None, None]:
    """What an engine answers, as it does. What was not taken when this is closed is taken back.

    Args:
        work: what it answers; more of it may be sent whenever something is yielded.
        look: seconds after which nothing is yielded, where nothing was answered.

    Raises:
        EngineError, SilentError, JobFailedError, IntegrityError: see `generate`.
    """
    waiting, known = dict[str, Generation](), dict[str, Generation]()
    prompts: dict[tuple[int, ...], Ints] = {}
    more: Sequence[Generation] | None = work
    end = time.monotonic() + patience
    try:
        while more or waiting:
            if more:
                prompts |= {tokens: segment.tokens for tokens, segment in prompt_segments(more).items()}
                engine.submit(more)
                waiting |= {generation.id: generation for generation in more}
            found: list[tuple[Generation, Trajectory]] = []
            for done in _next(engine, waiting, patience, end, look):
                asked = _asked(engine.name, done, waiting, known)
                found.append((asked, done.trajectory.sampled_with(temperature=asked.sampling.temperature)))
                _check(engine.name, done.trajectory, asked, prompts[asked.tokens], version)
            if found:
                _check_numbers(engine.name, found)
                end = time.monotonic() + patience
            for asked, _ in found:
                del waiting[asked.id]
            more = yield found
    finally:
        if waiting:
            engine.abort(list(waiting))
            engine.completed(0)


def plan_generations(
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: SamplingParams,
    prompt_keys: Sequence[int] | None,
    limits: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
    *,
    context_length: int,
) -> list[Generation]:
    """The generations that such a call means, prompt by prompt.

    Raises:
        InputError: see `generate`.
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
    begin = tuple(first or (0,) * len(prompts))
    if len(begin) != len(prompts):
        raise InputError(f"first samples must be one per prompt ({len(prompts)}), got {len(begin)}")
    for index, prompt in enumerate(prompts):
        longest = max(bounds[index * samples : (index + 1) * samples])
        if len(prompt) == 0:
            raise InputError(f"prompt {index} must hold at least one token, got none")
        if len(prompt) + longest > context_length:
            raise InputError(
                f"prompt {index} and its response must fit the context of {context_length} tokens, "
                f"got {len(prompt)} + {longest}; shorten the prompt or max_new_tokens"
            )
    call = next(_CALLS)
    return [
        Generation(
            f"{call}.{place}.{sample}",
            tokens,
            keys[place],
            sampling,
            bounds[place * samples + sample],
            begin[place] + sample,
        )
        for place, tokens in enumerate(tuple(prompt) for prompt in prompts)
        for sample in range(samples)
    ]


def _next(
    engine: RolloutEngine, waiting: dict[str, Generation], patience: float, end: float, look: float
) -> list[Completion]:
    """The next answers, or none after `look` seconds; those to earlier calls, which were taken back or answered, are
    passed over.

    Raises:
        SilentError: none until `end`.
    """
    asked, until = next(iter(waiting)), time.monotonic() + look
    while True:
        came = engine.completed(max(0.0, min(end, until) - time.monotonic()))
        found = [done for done in came if not _of_an_earlier_call(done.id, asked)]
        if found or until <= time.monotonic() < end:
            return found
        if time.monotonic() >= end:
            first = next(iter(waiting.values()))
            raise SilentError(
                f"rollout engine {engine.name} must answer every sample, got none in {patience:g} s with "
                f"{len(waiting)} waiting, first {_sample(first)}; see its log"
            )


def _of_an_earlier_call(found: str, asked: str) -> bool:
    """Whether an id is older: the number of a call is in its ids (`plan_generations`)."""
    numbers = [name.partition(".")[0] for name in (found, asked)]
    return all(number.isdecimal() for number in numbers) and int(numbers[0]) < int(numbers[1])


def _asked(engine: str, done: Completion, waiting: dict[str, Generation], known: dict[str, Generation]) -> Generation:
    """What an answer answers, from now on among those that are known.

    Raises:
        EngineError: it was not asked for, or came before.
    """
    if done.id in known or done.id not in waiting:  # an id is one call's, so a sample is named by its prompt
        what = f"{_sample(known[done.id])} twice" if done.id in known else f"{done.id} without being asked"
        raise EngineError(f"rollout engine {engine} must answer every sample once, got {what}; mend it")
    known[done.id] = waiting[done.id]
    return known[done.id]


def _check(engine: str, answer: Trajectory, asked: Generation, prompt: Ints, version: str) -> None:
    """Hold an answer against what was asked for.

    Raises:
        EngineError, IntegrityError: see `generate`.
    """
    reason = _fault(answer, asked, prompt)
    if reason is not None:
        raise EngineError(_faulty(engine, asked, reason))
    for segment in answer.segments:
        if segment.source == "sampled" and segment.version != version:
            raise IntegrityError(
                f"rollout engine {engine}: the answer to {_sample(asked)} must be sampled by policy "
                f"{version or '(any)'}, got {segment.version or 'none'}; its weights were not brought up to date"
            )


def _fault(answer: Trajectory, asked: Generation, prompt: Ints) -> str | None:
    """What is wrong with an answer by itself, but for its numbers."""
    if answer.prompt is not prompt and not np.array_equal(answer.prompt, prompt):
        return f"must continue its {len(prompt)} tokens, got another beginning"
    if not 1 <= answer.generated <= asked.limit:
        return f"must have 1..{asked.limit} tokens, got {answer.generated}"
    if answer.status not in ("ok", "truncated"):
        return f"must have ended by itself or at its limit, got {answer.status}"
    if np.ndim(answer.logprobs) != 1:
        return f"must have one log-probability a token, got an array of {np.ndim(answer.logprobs)} dimensions"
    return None


def _check_numbers(engine: str, found: Sequence[tuple[Generation, Trajectory]]) -> None:
    """Log-probabilities are finite and not above 0; looked at together, for most answers are short.

    Raises:
        EngineError, JobFailedError: see `generate`.
    """
    told = [np.asarray(answer.logprobs) for _, answer in found]
    everything = np.concatenate(told)
    if np.isfinite(everything).all() and everything.max() <= _ROUNDING:
        return
    for (asked, _), logprobs in zip(found, told, strict=True):
        odd = logprobs[~np.isfinite(logprobs)]
        if len(odd):
            raise JobFailedError(_faulty(engine, asked, f"must have finite log-probabilities, got {odd[0]}"))
        if (logprobs > _ROUNDING).any():
            raise EngineError(_faulty(engine, asked, f"must have log-probabilities <= 0, got {logprobs.max():g}"))


def _faulty(engine: str, asked: Generation, reason: str) -> str:
    return f"rollout engine {engine}: the answer to {_sample(asked)} {reason}; mend the engine"


def _sample(asked: Generation) -> str:
    return f"sample {asked.sample} of prompt {asked.key}"


def open_rollout(
    model: LanguageModel, kv_cache: int | None = None, *, texts: StopStrings | None = None
) -> RolloutEngine:
    """The native zero-copy decoder where it computes what the module computes, otherwise the module itself.

    Args:
        kv_cache: bytes that keys and values may take (`runtime.kv_cache`); None: as many as the rows of a call need.
        texts: what the model's tokens say; None: generations with stop strings are refused.
    """
    native = why_not_fusable(model.module) is None
    return NativeRollout(model, kv_cache, texts=texts) if native else ModuleRollout(model, kv_cache, texts=texts)


def decoding_fallbacks(model: LanguageModel) -> dict[str, str]:
    """What is slower, and why.

    `module_decoder`, where `open_rollout` takes the module itself; `plain_attention`, where the native decoder attends
    with plain torch on CUDA.
    """
    why = why_not_fusable(model.module)
    if why is not None:
        return {"module_decoder": f"responses come from the module's own forward: {why}"}
    plain = why_attention_is_plain(model)
    return {} if plain is None else {"plain_attention": f"responses attend by plain torch: {plain}"}


@final
class RolloutWorker:
    """One rank of the rollout role.

    Args:
        context: where it stands; a `LanguageModel` lent there is decoded from in place, a `WeightSource` alone is a
            neighbour whose shards are gathered.
        source: where it loads a copy of its own from, where no model is lent; its tokenizer, for stop strings.
        engine: instead of the one that fits the model, in the controller's process.
        kv_cache: bytes that keys and values may take; None: not bounded.
        patience: seconds without any answer after which its engine is given up.
    """

    def __init__(
        self,
        context: RankContext,
        source: ModelSource | None = None,
        engine: RolloutEngine | None = None,
        *,
        kv_cache: int | None = None,
        reads_text: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        lent = context.borrow(LanguageModel)
        model = source.open(context.device) if lent is None and source else lent
        if model is None:
            raise InputError(
                f"rollout rank {context.rank} needs a model, got none lent and no source; place it by policy"
            )
        self._neighbour = context.borrow(WeightSource)
        beside: View = "copy" if self._neighbour is None else "neighbour"
        self._view: View = beside if lent is None else "alias"
        self._module = model.module
        texts = self._texts(source, context.rank) if source and reads_text else None
        if engine is not None and not hasattr(engine, "counts"):
            raise InputError(f"rollout engine {engine.name} must have counts(), got none; see RolloutEngine.counts")
        self._engine = engine or open_rollout(model, kv_cache, texts=texts)
        self._fallbacks = {} if engine else decoding_fallbacks(model)
        self._patience = patience
        self._rank, self._version = context.rank, PolicyVersion()
        self._open: Generator[_Answered, Sequence[Generation], None] | None = None  # of `feed`
        self._rows: _Rows = {}  # of prompts that `feed` has in work
        self._served: tuple[str, Attestation] | None = None
        self._say(self._version)

    @staticmethod
    def _texts(source: ModelSource, rank: int) -> StopStrings:
        try:
            return StopStrings(load_tokenizer(source.folder))
        except (InputError, NotFoundError) as error:
            raise type(error)(f"rollout rank {rank} needs a tokenizer to end responses at strings: {error}") from error

    def view(self) -> View:
        """See `View`."""
        return self._view

    def layout(self) -> Layout:
        """What it decodes with: names, shapes and types that a publication has to have."""
        return layout_of(self._module)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return dict(self._fallbacks)

    def samples_with(self, version: PolicyVersion) -> str:
        """From now on say that `version` samples. An alias looks first whether it still reads the policy's memory.

        Raises:
            IntegrityError: the engine decodes with a tensor that is neither the policy's own nor equal to it.
        """
        views = self._engine.views() if self._view == "alias" else None
        if views is not None and self._neighbour is not None:
            odd = differing_aliases(self._neighbour.export(), views)
            if odd:
                raise IntegrityError(
                    f"rollout rank {self._rank} must decode with the policy's weights as they are, got {len(odd)} "
                    f"tensors that are not version {version}'s: {odd[0]}; reopen the rollout engine"
                )
        self._say(version)
        return str(version)

    def offer(self, layout: Layout) -> tuple[Attestation, int]:
        """What it decodes with, for ranks of the rollout that were replaced; see `WeightSource.attest`."""
        self._given = WeightSource(self._shards)
        return self._given.attest(layout)

    def bucket(self) -> Bucket:
        """The next bucket of what was offered."""
        return self._given.bucket()

    def take(self, arriving: Sequence[Stored[Bucket]]) -> None:
        """Copy one bucket of every rank of the policy to where it belongs."""
        for stored in arriving:
            self._put(stored.value())

    def exchange(self, count: int) -> None:
        """Copy what the policy's ranks hold to where it belongs, `count` buckets from each. Collective."""
        if self._neighbour is None:
            raise InputError(f"rollout rank {self._rank} must stand beside a policy, has no neighbour; send it buckets")
        exchange(self._neighbour, count, self._put)

    def attest(self) -> Standing:
        """What this engine decodes with now, by the views that it decodes from.

        Raises:
            InputError: an engine that cannot say.
        """
        views = self._engine.views()
        if views is None:
            raise InputError(
                f"rollout engine {self._engine.name} of rank {self._rank} must attest its weights, and cannot; use one "
                "that can, or place it beside the policy"
            )
        found = attest_views(views)
        if self._served is None:
            return Standing(found, None, changed=True)
        version, before = self._served
        return Standing(found, version, changed=found != before)

    def accept(self, version: PolicyVersion, found: Attestation) -> str:
        """What was attested is what `version` is: from now on it samples."""
        self._served = (str(version), found)
        self._say(version)
        return str(version)

    def generate(self, prompts: PromptBatch, sampling: SamplingParams, samples: int) -> Rollouts:
        """`samples` responses to every prompt.

        Raises:
            InputError, EngineError, SilentError, JobFailedError, IntegrityError: see `generating.generate`.
        """
        _refuse_truncated(sampling)
        provenance = Provenance(role="rollout", rank=self._rank)
        if not len(prompts):
            return Rollouts((), provenance)
        before = self._engine.counts()
        found = generate(
            self._engine,
            prompts.tokens,
            samples=samples,
            sampling=sampling,
            prompt_keys=prompts.keys,
            first=prompts.first,
            version=str(self._version),
            patience=self._patience,
        )
        return Rollouts(groups_of(found, prompts.keys, samples), provenance, self._counted(before))

    def feed(self, prompts: PromptBatch, sampling: SamplingParams, samples: int) -> Iterator[Rollouts]:
        """Take prompts on besides those in work, and yield what ends first, or nothing after a moment. The rest stays
        in work for the next call, until which it stands still.

        Raises:
            InputError, EngineError, SilentError, JobFailedError, IntegrityError: see `generating.generate`.
        """
        _refuse_truncated(sampling)
        if prompts.first:
            raise InputError("samples that go on are asked for one by one, got them fed; generate them")
        engine, work, before = self._engine, list[Generation](), self._engine.counts()
        if len(prompts):
            work = plan_generations(
                prompts.tokens, samples, sampling, prompts.keys, context_length=engine.context_length
            )
        if not (work or self._rows):
            return
        self._rows |= {key: {} for key in prompts.keys}
        try:
            if self._open is None:
                self._open = answers(engine, work, str(self._version), self._patience, _LOOK)
                found = next(self._open)
            else:
                found = self._open.send(work)
        except BaseException:
            self._open = None
            self._rows.clear()
            raise
        groups = _whole(self._rows, found, samples)
        if not self._rows:
            self._open.close()
            self._open = None
        yield Rollouts(groups, Provenance(role="rollout", rank=self._rank), self._counted(before))

    def _counted(self, before: Mapping[str, int]) -> dict[str, int]:
        return {name: count - before.get(name, 0) for name, count in self._engine.counts().items()}

    def _say(self, version: PolicyVersion) -> None:
        """From now on this version samples; nothing is in work between two calls."""
        self._engine.pause()
        self._engine.update("", str(version))
        self._engine.resume()
        self._version = version

    def _shards(self) -> Iterator[Shard]:
        return (Shard(name, tuple(p.shape), p.detach()) for name, p in self._module.named_parameters())

    def _put(self, bucket: Bucket) -> None:
        """In a call of its own, so that nothing of a bucket is left when the next one comes."""
        held = dict(self._module.named_parameters())
        for shard in bucket.shards():
            put(held, shard)


def _whole(rows: _Rows, found: Sequence[tuple[Generation, Trajectory]], samples: int) -> tuple[Group, ...]:
    """The groups whose last sample is among what was found; they leave `rows`."""
    for asked, answer in found:
        rows[asked.key][asked.sample] = answer
    whole = [key for key in dict.fromkeys(asked.key for asked, _ in found) if len(rows[key]) == samples]
    ended = {key: rows.pop(key) for key in whole}
    return groups_of([ended[key][sample] for key in whole for sample in range(samples)], whole, samples)


def _refuse_truncated(sampling: SamplingParams) -> None:
    if sampling.truncates:
        raise InputError(
            "training must sample from the whole distribution, got top_k, top_p or min_p: the ratio of the loss would "
            "be of another one; leave them to evaluation"
        )
