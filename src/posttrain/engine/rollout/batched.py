"""An engine built from a function that decodes one batch to its end; work that arrives during a batch waits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import Completion, Generation, InFlight
from posttrain.engine.rollout.schedule import Intake
from posttrain.engine.samples import Trajectory

Decode = Callable[[Sequence[Generation]], list[Trajectory]]  # sampling is equal for all; answers are in order


class BatchedEngine:
    """`RolloutEngine` with a function that answers a batch.

    `completed` decodes one batch of waiting work to its end: generations with equal sampling, shortest prompts first,
    at most `batch_size` rows and no more than fit in the cache. Every response is therefore sampled with one version of
    the weights.

    Args:
        kv_cache: maximum bytes of a batch's keys and values; None: no limit.
        token_bytes: bytes of one token's keys and values in all layers; None: unknown, so `kv_cache` has no effect.
        reads_text: whether `decode` ends responses at `sampling.stop`; if not, generations with stop strings are
            rejected.
    """

    def __init__(
        self,
        name: str,
        context_length: int,
        decode: Decode,
        *,
        kv_cache: int | None = None,
        token_bytes: int | None = None,
        reads_text: bool = False,
    ) -> None:
        self._cached = None if kv_cache is None or token_bytes is None else (kv_cache, token_bytes)
        self.name, self.context_length, self._decode = name, context_length, decode
        self._intake = Intake(name, context_length, reads_text=reads_text)
        self._waiting: list[Generation] = []
        self._done: list[Completion] = []

    def counts(self) -> Mapping[str, int]:
        """See `RolloutEngine.counts`; a function has no counters."""
        return {}

    def views(self) -> Iterable[tuple[str, Tensor]] | None:
        """See `RolloutEngine.views`; a function exposes no weights."""
        return None

    def submit(self, work: Sequence[Generation]) -> None:
        """See `RolloutEngine.submit`."""
        for generation in work:
            self._refuse_longer(generation)
        self._intake.take(work)
        self._waiting += work

    def completed(self, timeout: float) -> list[Completion]:
        """See `RolloutEngine.completed`; a batch is decoded to its end, without a time limit."""
        if not self._done and self._waiting and not self._intake.paused:
            self._answer_batch()
        done, self._done = self._done, []
        self._intake.give(completion.id for completion in done)
        return done

    def abort(self, ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`; only work that has not begun can be aborted."""
        for generation in self._waiting:
            if generation.id in ids:
                none = Trajectory.answer(generation.tokens, [], [], truncated=False, version=self._intake.version)
                self._done.append(Completion(generation.id, none.ended("aborted")))
        self._waiting = [generation for generation in self._waiting if generation.id not in ids]

    def pause(self) -> None:
        """See `RolloutEngine.pause`."""
        self._intake.paused = True

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._intake.paused = False

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        """See `RolloutEngine.update`."""
        self._intake.update(policy, version, in_flight, begun=0)

    def _answer_batch(self) -> None:
        sampling = self._waiting[0].sampling
        alike = sorted((g for g in self._waiting if g.sampling == sampling), key=lambda g: len(g.tokens))
        batch = self._holding(alike[: sampling.batch_size])
        answers = self._decode(batch)
        taken = {generation.id for generation in batch}
        self._waiting = [generation for generation in self._waiting if generation.id not in taken]
        version = self._intake.version
        self._done += [Completion(g.id, a.sampled_with(version=version)) for g, a in zip(batch, answers, strict=True)]

    def _refuse_longer(self, generation: Generation) -> None:
        tokens = len(generation.tokens) + generation.limit
        if self._cached is not None and tokens * self._cached[1] > self._cached[0]:
            raise InputError(
                f"runtime.kv_cache must hold the {tokens} tokens of generation {generation.id} "
                f"({tokens * self._cached[1]} bytes), got {self._cached[0]} bytes; raise runtime.kv_cache, or lower "
                "max_new_tokens"
            )

    def _holding(self, batch: list[Generation]) -> list[Generation]:
        """Return the first generations, shortest prompts first, whose padded keys and values fit in the cache."""
        if self._cached is None:
            return batch
        budget, token_bytes = self._cached
        longest = limit = 0
        for count, generation in enumerate(batch):
            longest, limit = max(longest, len(generation.tokens)), max(limit, generation.limit)
            if count and (count + 1) * (longest + limit) * token_bytes > budget:
                return batch[:count]
        return batch
