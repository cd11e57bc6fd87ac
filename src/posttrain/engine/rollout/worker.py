"""The rollout role, the choice of its engine for a model, and a checked call to any engine.

The role samples responses with the policy's own weights if rollout and policy share a process, and otherwise with a
copy of the weights.

One call computes trajectories for prompts with any engine, and checks the answers. Without the checks, errors of a
third-party engine would enter the training: a response from different weights, an answer that is too long,
log-probabilities that are not finite. On any such error, the call fails with a one-line error that names the sample.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import ClassVar, cast, final

import numpy as np

from posttrain.domain.engines import OWN_ENGINES, ROLLOUT_ENGINE, installed_engine, refuse_partial
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
from posttrain.engine.models.files import ModelSource, load_tokenizer
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.sharding import Layout, Shard, canonical_parameters, layout_of, module_views, put
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
from posttrain.engine.rollout.sessions import Conversations
from posttrain.engine.samples import Ints, Trajectory, groups_of
from posttrain.engine.weights.probe import Attested, Challenge, Values
from posttrain.engine.weights.stream import (
    Attestation,
    AttestedWeights,
    Bucket,
    PolicyVersion,
    View,
    WeightSource,
    attest_views,
    carried,
    differing_aliases,
    exchange,
)

_CALLS = count()  # numbers calls, to recognise late answers to earlier calls
PATIENCE = 3600.0  # seconds without any answer after which the call fails
_ROUNDING = 1e-3  # maximum of a log-probability, which rounding may make positive
_LOOK = 0.25  # seconds between two offers of more prompts if no response ends
_GLANCE = 0.05  # the same, of replies to responses
_Answered = list[tuple[Generation, Trajectory]]


class EngineError(JobFailedError):
    """A rollout engine has broken a guarantee of its port."""

    failure_class: ClassVar[FailureClass] = FailureClass.BAD_INPUT  # retrying does not help


class SilentError(InfrastructureError):
    """A rollout engine has not answered in time."""


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    sampling: SamplingParams,
    prompt_keys: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    version: str = "",
    patience: float = PATIENCE,
) -> list[Trajectory]:
    """Return `samples` responses to every prompt, prompt by prompt.

    Args:
        prompts: token ids.
        prompt_keys: [prompts] keys from which random numbers are derived; by default 0, 1, 2 …. With stable keys, a
            prompt gets the same responses in any batch.
        limits: [prompts * samples] maximum tokens of each response, at most `max_new_tokens`.
        version: the policy version that must have sampled.

    Raises:
        InputError: there is no prompt; a prompt is empty, or does not fit in the context with its response; counts do
            not match.
        EngineError: an answer is unrequested, repeated, too long or empty.
        SilentError: there is no answer in time.
        JobFailedError: a logit or log-probability is not finite.
        IntegrityError: a different version answered; another component re-pointed weights that a zero-copy engine
            reads.
    """
    work = plan_generations(prompts, samples, sampling, prompt_keys, limits, context_length=engine.context_length)
    found = {asked.id: answer for some in answers(engine, work, version, patience) for asked, answer in some}
    return [found[generation.id] for generation in work]


def answers(
    engine: RolloutEngine,
    work: Sequence[Generation],
    version: str,
    patience: float = PATIENCE,
    look: float = float("inf"),
) -> Generator[list[tuple[Generation, Trajectory]], Sequence[Generation] | None, None]:
    """Yield an engine's answers as they arrive. Closing the generator aborts the remaining work.

    Args:
        work: the first generations; the caller may send more whenever the generator yields.
        look: seconds after which an empty list is yielded if there is no answer.

    Raises:
        EngineError, SilentError, JobFailedError, IntegrityError: see `generate`.
    """
    waiting, known = dict[str, Generation](), dict[str, str]()
    prompts: dict[str, Ints] = {}  # of the unanswered generations
    more: Sequence[Generation] | None = work
    end = time.monotonic() + patience
    try:
        while more or waiting:
            if more:
                segments = prompt_segments(more)
                prompts |= {generation.id: segments[generation.tokens].tokens for generation in more}
                engine.submit(more)
                waiting |= {generation.id: generation for generation in more}
                end = time.monotonic() + patience
            found: list[tuple[Generation, Trajectory]] = []
            for done in _next(engine, waiting, patience, end, look):
                asked = _asked(engine.name, done, waiting, known)
                found.append((asked, done.trajectory.sampled_with(temperature=asked.sampling.temperature)))
                _check(engine.name, done.trajectory, asked, prompts.pop(asked.id), version)
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
    *,
    context_length: int,
) -> list[Generation]:
    """Return the generations of a call of `generate`, prompt by prompt.

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
    for index, prompt in enumerate(prompts):
        longest = max(bounds[index * samples : (index + 1) * samples])
        if len(prompt) == 0:
            raise InputError(f"prompt {index} must contain at least one token, got none")
        if len(prompt) + longest > context_length:
            raise InputError(
                f"prompt {index} and its response must fit in the context of {context_length} tokens, got "
                f"{len(prompt)} + {longest}; shorten the prompt or max_new_tokens"
            )
    call = next(_CALLS)
    return [
        Generation(
            f"{call}.{place}.{sample}",
            tokens,
            keys[place],
            sampling,
            bounds[place * samples + sample],
            sample,
        )
        for place, tokens in enumerate(tuple(prompt) for prompt in prompts)
        for sample in range(samples)
    ]


def _next(
    engine: RolloutEngine, waiting: dict[str, Generation], patience: float, end: float, look: float
) -> list[Completion]:
    """Return the next answers, or none after `look` seconds; skip late answers to earlier calls.

    Raises:
        SilentError: there is no answer by `end`.
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
                f"rollout engine {engine.name} returned no sample within {patience:g} s; waiting: {len(waiting)}, "
                f"the first is {_sample(first)}; see the engine's log"
            )


def _of_an_earlier_call(found: str, asked: str) -> bool:
    """Return whether an id is from an earlier call; ids begin with the number of their call (`plan_generations`)."""
    numbers = [name.partition(".")[0] for name in (found, asked)]
    return all(number.isdecimal() for number in numbers) and int(numbers[0]) < int(numbers[1])


def _asked(engine: str, done: Completion, waiting: dict[str, Generation], known: dict[str, str]) -> Generation:
    """Return the generation of an answer and add it to `known`: id → sample, for messages.

    Raises:
        EngineError: the answer is unrequested or repeated.
    """
    if done.id in known or done.id not in waiting:  # messages name a sample by its prompt
        what = f"{known[done.id]} twice" if done.id in known else f"{done.id}, which was not requested"
        raise EngineError(f"rollout engine {engine} must answer every sample once, got {what}; fix the engine")
    known[done.id] = _sample(waiting[done.id])
    return waiting[done.id]


def _check(engine: str, answer: Trajectory, asked: Generation, prompt: Ints, version: str) -> None:
    """Check an answer against its generation.

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
                f"{version or '(any)'}, got {segment.version or 'none'}; its weights were not updated"
            )


def _fault(answer: Trajectory, asked: Generation, prompt: Ints) -> str | None:
    """Return the fault of an answer, except in its log-probabilities; None if there is no fault."""
    if answer.prompt is not prompt and not np.array_equal(answer.prompt, prompt):
        return f"must begin with its prompt of {len(prompt)} tokens, but begins differently"
    if not 1 <= answer.generated <= asked.limit:
        return f"must have 1..{asked.limit} tokens, got {answer.generated}"
    if answer.status not in ("ok", "truncated"):
        return f"must have ended by itself or at its limit, got {answer.status}"
    if np.ndim(answer.logprobs) != 1:
        return f"must have one log-probability a token, got an array of {np.ndim(answer.logprobs)} dimensions"
    return None


def _check_numbers(engine: str, found: Sequence[tuple[Generation, Trajectory]]) -> None:
    """Require that log-probabilities are finite and not above 0; checked in one operation, as most answers are short.

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
    return f"rollout engine {engine}: the answer to {_sample(asked)} {reason}; fix the engine"


def _sample(asked: Generation) -> str:
    return f"sample {asked.sample} of prompt {asked.key}"


def open_rollout(
    model: LanguageModel, kv_cache: int | None = None, *, texts: StopStrings | None = None, name: str = "auto"
) -> RolloutEngine:
    """Return an engine that samples from the model.

    Args:
        name: auto: the native zero-copy decoder if it computes what the module computes, otherwise the module's own
            engine; native, module, or an engine of an installed package.
        kv_cache: maximum bytes of keys and values (`runtime.kv_cache`); None: as many as the rows of a call need.
        texts: decodes tokens to text, for stop strings; None: generations with stop strings are rejected.

    Raises:
        InputError: the native decoder does not compute what the module computes; no package has the engine, its
            package is broken, or the engine lacks the sessions that it declares.
    """
    if name not in OWN_ENGINES[ROLLOUT_ENGINE]:
        installed = installed_engine(ROLLOUT_ENGINE, name)
        found = cast(RolloutEngine, installed.open(RolloutEngine, model, kv_cache, texts=texts))
        if "sessions" in installed.spec.provides and not found.holds_sessions:
            raise InputError(f"{installed.plugin} provides sessions, but its holds_sessions is False; fix one of them")
        return found
    why = None if name == "module" else why_not_fusable(model.module)
    if name == "native" and why is not None:
        raise InputError(f"rollout.engine: native cannot decode this model: {why}; write auto or module")
    native = name != "module" and why is None
    return NativeRollout(model, kv_cache, texts=texts) if native else ModuleRollout(model, kv_cache, texts=texts)


def decoding_fallbacks(model: LanguageModel, name: str = "auto") -> dict[str, str]:
    """Return the slower paths in use, each with its reason; empty for an engine other than auto and native.

    `module_decoder` means that `open_rollout` uses the module itself, and `plain_attention` that the native decoder
    attends with plain torch on CUDA.
    """
    if name not in ("auto", "native"):
        return {}
    why = why_not_fusable(model.module)
    if why is not None:
        return {"module_decoder": f"responses come from the module's own forward: {why}"}
    plain = why_attention_is_plain(model)
    return {} if plain is None else {"plain_attention": f"responses attend by plain torch: {plain}"}


@final
class RolloutWorker:
    """One rank of the rollout role.

    Args:
        context: the rank's context. If a `LanguageModel` is lent there, the rank decodes in place; if only a
            `WeightSource` is lent, its shards are gathered.
        source: the folder of the tokenizer, for stop strings, and of the model that the rank loads if none is lent.
        engine: an engine in the controller's process, used instead of the engine that fits the model.
        kv_cache: maximum bytes of keys and values; None: no limit.
        name: the engine that fits the model, see `open_rollout`.
        patience: seconds without any answer after which the call fails.
    """

    def __init__(
        self,
        context: RankContext,
        source: ModelSource | None = None,
        engine: RolloutEngine | None = None,
        *,
        kv_cache: int | None = None,
        reads_text: bool = False,
        name: str = "auto",
        patience: float = PATIENCE,
    ) -> None:
        lent = context.borrow(LanguageModel)
        model = source.open(context.device) if lent is None and source else lent
        if model is None:
            raise InputError(
                f"rollout rank {context.rank} needs a model, got neither a shared model nor a source; place the "
                "rollout with policy"
            )
        self._neighbour = context.borrow(WeightSource)
        beside: View = "copy" if self._neighbour is None else "neighbour"
        self._view: View = beside if lent is None else "alias"
        self._module = model.module
        texts = self._texts(source, context.rank) if source and reads_text else None
        if engine is not None:
            refuse_partial(engine, RolloutEngine, f"rollout engine {engine.name}")
        self._engine = engine or open_rollout(model, kv_cache, texts=texts, name=name)
        self._fallbacks = {} if engine else decoding_fallbacks(model, name)
        self._patience = patience
        self._rank, self._version = context.rank, PolicyVersion()
        self._open: Generator[_Answered, Sequence[Generation], None] | None = None  # of `feed`
        self._fed: Conversations | None = None  # what `feed` has not passed on
        self._served: tuple[str, Attestation] | None = None
        self._base: Attestation | None = None
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
        """Return names, shapes and dtypes of the weights that the engine decodes with; publications must match them."""
        return layout_of(self._module)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return dict(self._fallbacks)

    def samples_with(self, version: PolicyVersion) -> Attested:
        """Sample as `version` from now on. An alias first checks that it still reads the policy's memory.

        The result is "probe" if a probe must attest the engine, and "none" if the engine can prove nothing.

        Raises:
            IntegrityError: the engine decodes with a tensor that is neither the policy's tensor nor equal to it.
        """
        found: Attested = "none"
        views = None
        with suppress(InputError):
            views = self._engine.attest(()).views
            found = "probe" if views is None else "exact"
        if views is not None and self._neighbour is not None:
            odd = differing_aliases(self._neighbour.export(), views)
            if odd:
                raise IntegrityError(
                    f"rollout rank {self._rank} must decode with the policy's weights, got {len(odd)} "
                    f"tensors that are not version {version}'s: {odd[0]}; reopen the rollout engine"
                )
        self._say(version)
        return found

    def offer(self, layout: Layout) -> tuple[Attestation, int]:
        """Attest this rank's weights for replaced ranks of the rollout; see `WeightSource.attest`."""
        self._given = WeightSource(self._shards, carried(self._module))
        return self._given.attest(layout)

    def bucket(self) -> Bucket:
        """Return the next bucket of the offered weights."""
        return self._given.bucket()

    def take(self, arriving: Sequence[Stored[Bucket]]) -> None:
        """Copy one bucket of every rank of the policy into place."""
        for stored in arriving:
            self._put(stored.value())

    def exchange(self, count: int) -> None:
        """Copy the shards of the policy's ranks into place, `count` buckets from each. Collective."""
        if self._neighbour is None:
            raise InputError(
                f"rollout rank {self._rank} is not in a process of the policy; send the weights in buckets"
            )
        exchange(self._neighbour, count, self._put)

    def attest(self) -> AttestedWeights:
        """Attest the tensors that this engine decodes with or, if it exposes none, those from which it takes them.

        Raises:
            InputError: the engine has neither tensors nor log-probabilities.
        """
        views = self._engine.attest(()).views
        shown = list(module_views(self._module) if views is None else views)
        frozen = {shard.name for shard in self._shards() if shard.frozen}
        if self._base is None:  # a base with an adapter never changes, so its tensors are hashed once
            self._base = attest_views((name, tensor) for name, tensor in shown if name in frozen)
        found = self._base + attest_views((name, tensor) for name, tensor in shown if name not in frozen)
        version, before = self._served or (None, None)
        return AttestedWeights(found, version, changed=found != before, exact=views is not None)

    def probe(self, texts: Challenge) -> Values:
        """Return the engine's log-probabilities of every token of the texts except the first of each, [places].

        Raises:
            EngineError: a value is missing, left over or not finite.
        """
        found = [np.asarray(one, dtype=np.float64) for one in self._engine.attest(texts).logprobs]
        shapes, wanted = [one.shape for one in found], [(len(text),) for text in texts]
        values = np.concatenate([one[1:] for one in found]) if shapes == wanted else np.empty(0)
        odd = int((~np.isfinite(values)).sum())
        if shapes != wanted or odd:
            raise EngineError(
                f"rollout engine {self._engine.name} of rank {self._rank} must attest with one finite "
                f"log-probability for each of {sum(map(len, texts))} tokens in {len(texts)} texts, got "
                f"{sum(one.size for one in found)} numbers in {len(found)} texts, {odd} of them not finite; fix it"
            )
        return values

    def accept(self, version: PolicyVersion, found: Attestation) -> str:
        """Accept the attested weights as `version`, and sample with it from now on."""
        self._served = (str(version), found)
        self._say(version)
        return str(version)

    def generate(self, prompts: PromptBatch, sampling: SamplingParams, samples: int) -> Rollouts:
        """Return `samples` responses to every prompt.

        Raises:
            InputError, EngineError, SilentError, JobFailedError, IntegrityError: see the function `generate` above.
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
            version=str(self._version),
            patience=self._patience,
        )
        return Rollouts(groups_of(found, prompts.keys, samples), provenance, self._counted(before))

    def feed(self, prompts: PromptBatch, sampling: SamplingParams, samples: int, turns: int = 1) -> Iterator[Rollouts]:
        """Add prompts and replies, and yield what has ended since, or nothing if nothing ends for a moment.

        Unfinished groups stay, paused until the next call. All calls until the last group have equal arguments, except
        for `prompts`.

        Args:
            turns: maximum number of responses of a sample. Samples with fewer that have not reached their limit wait
                for replies (`Rollouts.waiting`).

        Raises:
            InputError, EngineError, SilentError, JobFailedError, IntegrityError: see the function `generate` above.
        """
        _refuse_truncated(sampling)
        engine, work, before = self._engine, list[Generation](), self._engine.counts()
        if len(prompts):
            work = plan_generations(
                prompts.tokens, samples, sampling, prompts.keys, context_length=engine.context_length
            )
        fed = self._fed = self._fed or Conversations(samples, turns, sampling, together=not engine.holds_sessions)
        work = fed.begin(prompts.keys, work) + fed.replied(prompts.replies, next(_CALLS))
        if not fed.any:
            self._fed = None
            return
        try:
            if fed.sampling:
                fed.take(self._answers(work, _LOOK if turns == 1 else _GLANCE))
            groups, waiting, over = fed.passed()
            engine.release(over)
        except BaseException:
            self._open = self._fed = None
            raise
        if self._open and not fed.sampling:
            self._open.close()
            self._open = None
        self._fed = fed if fed.any else None
        told = Provenance(role="rollout", rank=self._rank)
        yield Rollouts(groups, told, self._counted(before), waiting, idle=fed.resting)

    def holds_sessions(self) -> bool:
        """See `RolloutEngine.holds_sessions`."""
        return self._engine.holds_sessions

    def _answers(self, work: Sequence[Generation], look: float) -> _Answered:
        """Submit work to the engine; return the answers that have arrived, after waiting for a moment."""
        if self._open is not None:
            return self._open.send(work)
        self._open = answers(self._engine, work, str(self._version), self._patience, look)
        return next(self._open)

    def _counted(self, before: Mapping[str, int]) -> dict[str, int]:
        return {name: count - before.get(name, 0) for name, count in self._engine.counts().items()}

    def _say(self, version: PolicyVersion) -> None:
        """Sample with this version from now on; between two calls the engine is idle."""
        self._engine.pause()
        self._engine.update("", str(version))
        self._engine.resume()
        self._version = version

    def _shards(self) -> Iterator[Shard]:
        adapts = carried(self._module) is not None
        own = canonical_parameters(self._module)
        return (Shard(n, tuple(p.shape), p.detach(), frozen=adapts and not p.requires_grad) for n, p in own)

    def _put(self, bucket: Bucket) -> None:
        """Copy a bucket into place; a separate function, so no reference is left when the next bucket arrives."""
        held = dict(canonical_parameters(self._module))
        for shard in bucket.shards():
            put(held, shard)


def _refuse_truncated(sampling: SamplingParams) -> None:
    if sampling.truncates:
        raise InputError(
            "training must sample from the whole distribution, got top_k, top_p or min_p: the loss would compare "
            "probabilities of different distributions; use these settings only in evaluation"
        )
