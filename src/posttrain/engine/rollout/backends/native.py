"""The native rollout engine for Llama, Qwen2 and Qwen3 weights, and its store of computed prompts.

The engine reads weights without a copy, batches continuously, and allocates memory on demand. The loop of `completed`
runs until a row has ended::

    ┌─▶ admit from the head of the queue while the budget has room: compute each prompt once for all its rows,
    │   long ones in chunks; draw the first token
    │   make room for the next tokens: rows that outgrow their slot move, the youngest are preempted if necessary
    │   decode one token for every row, or n tokens if checks are expensive; drop tokens after the end of a row
    └── rows that ended free their slots

A preempted row waits at the head of the queue. After it is readmitted, its prompt is computed again, and the model
reads the row's earlier tokens one by one in the same steps as the other rows. The row then continues as if it had not
been preempted.

Computed prompts are kept for rows that begin with them. Long prompts are computed in chunks. The keys and values of a
session are taken out of the store when its row ends, and become the beginning of the next turn's prompt.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import final

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.batch import free_bytes, keep_freed_memory
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.rollout.decoding import StopStrings, prompt_logprobs
from posttrain.engine.rollout.kv_pages import GraphedSteps, PageStore, Run, cuda_recorder
from posttrain.engine.rollout.kv_slots import SlotStore
from posttrain.engine.rollout.llama_decoder import LlamaDecoder, Prefix, fuse_weights, why_not_fusable
from posttrain.engine.rollout.port import (
    Completion,
    Context,
    Delta,
    Generation,
    InFlight,
    KVShape,
    KVStore,
    PromptLogprobs,
    Proof,
    prompt_segments,
)
from posttrain.engine.rollout.sampling import RowDraws, generation_keys
from posttrain.engine.rollout.schedule import Indices, Intake, RolloutCounters, Row, RowTable, Schedule
from posttrain.engine.rollout.sessions import HeldSessions
from posttrain.engine.samples import Floats

_PREFILL_TOKENS = 8192  # prompt tokens computed between two decoding steps
_RESERVE_SHARE = 16  # a 16th of the budget is reserved for growing rows
_UNSEEN = 16  # maximum steps between two checks
_AHEAD = 64  # tokens whose random numbers are computed together
Unread = tuple[Sequence[int], list[Tensor], int]  # tokens to compute, earlier keys and values by layer, and the copy


@final
class KeptPrompts:
    """Computed prompts: the store contains their keys and values, and this object contains their last hidden states.

    Args:
        counters: counts computed tokens.
    """

    def __init__(self, decoder: LlamaDecoder, store: KVStore, counters: RolloutCounters) -> None:
        self._decoder, self._store, self._counters = decoder, store, counters
        self._hidden: dict[Context, tuple[Tensor, int]] = {}  # [1, hidden] after each prompt, and its copy
        self._begun: tuple[Sequence[int], Context, Prefix] | None = None  # the computed beginning of a long prompt

    def __contains__(self, prompt: Context) -> bool:
        return prompt in self._hidden

    def __iter__(self) -> Iterator[Context]:
        return iter(list(self._hidden))

    @property
    def any(self) -> bool:
        """Whether any prompt, or the beginning of any prompt, is kept."""
        return bool(self._hidden or self._begun)

    @property
    def begun_bytes(self) -> int:
        """Bytes of the beginning of a long prompt, which is not in the store yet."""
        return 0 if self._begun is None else self._decoder.shape.position_bytes * len(self._begun[2].pairs[0])

    def logits(self, prompts: Sequence[Context]) -> Tensor:
        """Return the logits after each prompt, [prompts, vocabulary]."""
        hidden, copies = zip(*(self._hidden[prompt] for prompt in prompts), strict=True)
        return self._decoder.logits(torch.cat(hidden), copies)

    def compute(self, prompts: Mapping[Context, Unread]) -> None:
        """Compute these prompts: those of one copy without a past together, and those with a past together."""
        for begun, copy in sorted({(bool(past), copy) for _, past, copy in prompts.values()}):
            some = {name: one for name, one in prompts.items() if (bool(one[1]), one[2]) == (begun, copy)}
            pieces, pasts = [list(piece) for piece, *_ in some.values()], [past for _, past, _ in some.values() if past]
            self._counters.prefilled_tokens += sum(map(len, pieces))
            self._keep(list(some), self._decoder.prefill(pieces, pasts, copy), copy)

    def advance(self, name: Context, prompt: Sequence[int], past: Callable[[], list[Tensor]], copy: int) -> bool:
        """Compute the next chunk of a long prompt, which begins after its past; return whether it was the last."""
        begun = self._begun is not None and self._begun[:2] == (prompt, name)
        pairs = self._begun[2].pairs if self._begun is not None and begun else past()
        begin = len(pairs[0]) if pairs else 0
        piece = prompt[begin : begin + self._decoder.chunk(begin)]
        prefix = self._decoder.prefill([piece], [pairs] if pairs else [], copy)
        self._counters.prefilled_tokens += len(piece)
        if begin + len(piece) < len(prompt):
            self._begun = (prompt, name, prefix)
            return False
        self._begun = None
        self._keep([name], prefix, copy)
        return True

    def forget(self, prompts: Collection[Context]) -> None:
        """Drop the stored keys and values of these prompts; rows in progress that begin with such a prompt remain."""
        self._store.forget(prompts)
        for prompt in prompts:
            del self._hidden[prompt]

    def forget_all(self) -> None:
        """Drop all prompts, including the beginning of a long prompt."""
        self.forget(list(self._hidden))
        self._begun = None

    def _keep(self, prompts: Sequence[Context], computed: Prefix, copy: int) -> None:
        self._store.keep(dict(zip(prompts, computed.spans, strict=True)), computed.pairs)
        self._hidden |= {prompt: (computed.hidden[at : at + 1], copy) for at, prompt in enumerate(prompts)}


class NativeRollout:
    """`RolloutEngine` with the weights of a `LanguageModel`, read in place, except an adapter, which is copied.

    Opening the engine re-points the module's parameters at fused buffers; the parameters' values, names and shapes do
    not change. With an adapter, an update leaves begun responses their copy of it, and they finish with the old version
    beside those of the new one; a copy is used again after its last response has ended.
    On the CPU in float32, a response and its log-probabilities are bit-identical in any batch and after preemptions.

    Args:
        kv_cache: maximum bytes of keys and values; None: half of the memory that is free when work arrives. One row is
            always decoded, even if its slots, which have fixed sizes, take slightly more.
        read_every: steps between two checks for ended rows, at most 16; by default 1 on the CPU, else 16.
        store: creates the key-value store from a shape and a budget; by default pages on CUDA, contiguous slots
            elsewhere.
        record: records a step over pages, so that it can be repeated on the same tensors; by default with CUDA graphs
            on CUDA, and not at all elsewhere.
        texts: decodes tokens to text, for stop strings; None: generations with stop strings are rejected.

    Raises:
        InputError: `why_not_fusable` returns a reason for the model; `read_every` is outside 1..16.
    """

    name = "native"
    holds_sessions = True

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: int | None = None,
        *,
        read_every: int | None = None,
        store: Callable[[KVShape, int], KVStore] | None = None,
        record: Callable[[Run], Run] | None = None,
        texts: StopStrings | None = None,
    ) -> None:
        reason = why_not_fusable(model.module)
        if reason is not None:
            raise InputError(
                f"native rollout needs a plain Llama, Qwen2 or Qwen3 model, got {reason}; use the module rollout"
            )
        if read_every is not None and not 1 <= read_every <= _UNSEEN:
            raise InputError(f"native read_every must be from 1 to {_UNSEEN} steps, got {read_every}; change it")
        if model.device.type == "cpu":
            keep_freed_memory()
        self._model, self.context_length = model, model.context_length
        self._weights = fuse_weights(model.module)
        self._decoder = LlamaDecoder(self._weights)
        self._read_every = read_every or (1 if model.device.type == "cpu" else _UNSEEN)
        self._given_bytes, self._budget = kv_cache, kv_cache or 0
        self._intake = Intake("native", model.context_length, reads_text=texts is not None)
        self._schedule = Schedule(texts)
        self._table, self._arranged = RowTable(model.eos_token_ids), True
        self._open_store = store or (PageStore if model.device.type == "cuda" else SlotStore)
        self._record = record or (cuda_recorder() if model.device.type == "cuda" else None)
        self.counters = RolloutCounters()
        self._sessions = HeldSessions(self._decoder.shape)
        self._fresh = False  # whether the weights are unchanged since the last check
        self._copy = 0  # of the adapter, for rows that begin
        self._versions = {0: ""}  # of the copies
        self._kept: dict[str, int] = {}  # policy → its copy, which never changes
        self._begin_store()
        self._done: list[Completion] = []
        self._draws: RowDraws | None = None

    def counts(self) -> Mapping[str, int]:
        """See `RolloutEngine.counts`."""
        return dict(vars(self.counters))

    def keep(self, policy: str) -> None:
        """Serve the adapter's present values under a name of their own from now on; they are copied.

        Raises:
            InputError: the model has no adapter, the name is taken, or the engine has work.
        """
        if not self._weights.adapted or policy in self._intake.versions:
            raise InputError(
                f"policy {policy!r} must be a new name for an adapter, but the model has no adapter or the name is "
                "taken; attach an adapter, or choose another name"
            )
        if self._schedule.running or self._schedule.waiting:
            raise InputError(f"policy {policy!r} must be kept by an engine without work; collect the responses first")
        self._kept[policy] = copy = 1 + len(self._kept)
        self._weights.forget_copies(copy)
        self._weights.refresh(copy)
        self._versions[copy] = self._intake.versions[policy] = policy

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        """See `RolloutEngine.attest`."""
        if self._intake.paused:  # the adapter may have changed, and begun rows keep theirs
            self._part()
        return Proof(self._weights.views(self._copy))

    def submit(self, work: Sequence[Generation]) -> None:
        """See `RolloutEngine.submit`.

        Raises:
            InputError: see `RolloutEngine.submit`; also, the keys and values of one generation exceed `kv_cache`, or
                a generation of a kept policy has a session.
        """
        if odd := next((one.id for one in work if one.session and one.policy in self._kept), None):
            raise InputError(f"generation {odd} of a kept policy must have no session; leave the session out")
        if self._given_bytes is not None:
            self._refuse_longer(work, self._given_bytes)
        prompts = prompt_segments(work)
        self._intake.take(work)
        if not (self._schedule.running or self._schedule.waiting):
            free = free_bytes(self._model.device) + self._sessions.used
            self._budget = self._given_bytes or free // 2
            self._begin_store()
            self._table, self._fresh = RowTable(self._model.eos_token_ids), False
        if work:
            sizes = {(len(asked.tokens), asked.limit) for asked in work}
            longest = max(prompt + limit + self._read_every for prompt, limit in sizes)
            self._store.reach(longest, min(len(work), max(asked.sampling.batch_size for asked in work)))
            self._budget = max(
                self._budget,
                *(self._store.bytes_alone(prompt + limit + self._read_every, prompt) for prompt, limit in sizes),
            )
            self._store.allow(self._budget)
            self._schedule.submit(work, generation_keys(work), prompts)

    def _begin_store(self) -> None:
        """Open an empty store with the budget, of an engine without work; only one copy of an adapter is left."""
        self._weights.forget_copies(1 + len(self._kept))
        kept = {copy: policy for policy, copy in self._kept.items()}
        self._versions, self._copy, self._fresh = {0: self._versions[self._copy], **kept}, 0, False
        self._store = store = self._open_store(self._decoder.shape, self._budget)
        self._prompts = KeptPrompts(self._decoder, store, self.counters)
        self._step: Callable[[Tensor, Indices, list[int] | None], Tensor] = partial(self._decoder.step, store)
        if isinstance(store, PageStore) and self._record is not None:
            self._step = GraphedSteps(self._decoder, store, self._record).step

    @torch.inference_mode()
    def completed(self, timeout: float) -> list[Completion]:
        """See `RolloutEngine.completed`."""
        end = time.monotonic() + timeout
        schedule = self._schedule
        with self._whole():
            while not self._done and not self._intake.paused and (schedule.running or schedule.waiting):
                self._look_at_weights()
                self._admit()
                if schedule.running:
                    self._decode()
                if time.monotonic() >= end:
                    break
        if not (schedule.running or schedule.waiting):
            self._forget_all()
        done, self._done = self._done, []
        self._intake.give(completion.id for completion in done)
        return done

    def progress(self) -> list[Delta]:
        """See `RolloutEngine.progress`."""
        waiting = [row.delta(row.tokens, row.logprobs) for row in self._schedule.waiting]
        return self._table.deltas() + [delta for delta in waiting if delta]

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        """See `RolloutEngine.score`."""
        self._intake.refuse_unserved(policy)
        self._weights.check()
        if policy not in self._kept:
            return prompt_logprobs(self._model, prompts, top)
        with self._weights.showing(self._kept[policy]):
            return prompt_logprobs(self._model, prompts, top)

    def release(self, sessions: Collection[str]) -> None:
        """See `RolloutEngine.release`."""
        self._sessions.release(sessions)
        for row in (*self._schedule.running.values(), *self._schedule.waiting):
            if row.asked.session in sessions:
                row.asked = replace(row.asked, session="")

    @torch.inference_mode()
    def abort(self, ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        names = set(ids)
        running = dict(self._schedule.running)
        taken = self._schedule.take(lambda row: row.asked.id in names)
        with self._whole():
            self._drop([row for row in taken if row.number in running])
        self._done += [row.completion(self._intake.version, aborted=True) for row in taken]
        self._forget_unwanted()

    def pause(self) -> None:
        """See `RolloutEngine.pause`."""
        self._intake.paused = True

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._intake.paused, self._fresh = False, False

    @torch.inference_mode()
    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        """See `RolloutEngine.update`."""
        if self._kept:
            raise InputError(f"rollout engine native keeps {', '.join(self._kept)} and cannot be updated; open another")
        begun = self._schedule.begun
        finishes = in_flight == "finish" and self._weights.adapted
        self._intake.update(policy, version, in_flight, 0 if finishes else len(begun))
        self._prompts.forget_all()
        if in_flight == "recompute":
            with self._whole():
                self._preempt(list(self._schedule.running.values()))
        if in_flight != "keep_kv":
            self._sessions.clear()
        self._arrange()
        if finishes:
            self._part()
            for row in begun:  # the next turn has another version, which computes all of it
                row.asked = replace(row.asked, session="")
        else:
            for row in begun:
                row.copy = self._copy
            self._table.mark(version)
        self._versions[self._copy] = version

    def _part(self) -> None:
        """Leave the adapter's copy to the begun rows that have it, and give another copy to those that begin."""
        used = {row.copy for row in self._schedule.begun}
        if self._weights.adapted and self._copy in used:
            before, self._copy = self._copy, next(copy for copy in range(len(used) + 1) if copy not in used)
            self._versions[self._copy], self._fresh = self._versions[before], False

    def _look_at_weights(self) -> None:
        """Check the weights, which may have changed while the engine was idle or paused.

        Raises:
            IntegrityError: another component re-pointed the weights.
        """
        if not self._fresh:
            self._weights.check()
            self._decoder.refresh(self._copy)
            self._fresh = True

    def _refuse_longer(self, work: Sequence[Generation], most: int) -> None:
        for asked in work:
            tokens = len(asked.tokens) + asked.limit
            needed = tokens * self._decoder.shape.position_bytes
            if needed > most:
                raise InputError(
                    f"runtime.kv_cache must hold the {tokens} tokens of generation {asked.id} ({needed} bytes), "
                    f"got {most} bytes; raise runtime.kv_cache, or lower max_new_tokens"
                )

    def _admit(self) -> None:
        """Begin rows from the head of the queue."""
        count = self._admissible()
        if not count:
            return
        rows = self._schedule.admit(count)
        for row in rows:
            row.copy = self._copy_of(row)
        ended = self._begin(rows, [row for row in rows if not len(row.tokens)])
        over = {row.number for row in ended}
        going = {row.number: row for row in rows if row.number not in over or row.asked.session}
        self._store.add({number: (row.context, self._first_length(row)) for number, row in going.items()})
        self._table.give_room({number: self._store.capacity(number) for number in going})
        self._sessions.release([row.context for row in rows if isinstance(row.context, str)])
        self._complete(ended, [row.number for row in ended if row.number in going])
        self._forget_unwanted()
        self._arranged = False

    def _begin(self, rows: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
        """Add rows to the table and draw the first token of each `fresh` row; return the rows that this token ends."""
        alone, others = not len(self._table), self._draws
        self._table.enter(rows, [self._versions[row.copy] for row in rows])
        self._draws = None
        if not fresh:
            return []
        draws = self._draw(fresh, [0] * len(fresh), _AHEAD if others is None else others.left + 1)
        logits = self._prompts.logits([row.context for row in fresh])
        ended = self._table.begin(fresh, *_on_host(*draws.next(logits)))
        if others is not None and len(fresh) == len(rows):
            others.join(draws)
            self._draws = others
        elif alone and len(fresh) == len(rows):
            self._draws = draws
        return ended

    def _copy_of(self, row: Row) -> int:
        """Return the copy of the adapter with which a row begins, or has begun."""
        return self._kept.get(row.asked.policy, self._copy) if row.copy < 0 else row.copy

    def _first_length(self, row: Row) -> int:
        return len(row.asked.tokens) + max(1, len(row.tokens)) + self._read_every

    def _admissible(self) -> int:
        """Return how many rows at the queue's head can begin: their prompts are computed, and the budget has room."""
        schedule, store, kept, sessions = self._schedule, self._store, self._prompts, self._sessions
        most = schedule.refill(self._read_every)
        if not most:
            return 0
        planned, tokens, count = store.used + kept.begun_bytes, 0, 0
        missing: dict[Context, Unread] = {}
        for row in islice(schedule.waiting, most):
            prompt, session = row.asked.tokens, row.asked.session
            held = sessions.continued(session, row.prompt.tokens) if session else 0
            copy = self._copy_of(row)
            if row.asked.policy in self._kept:
                row.context = -1 - copy, *prompt  # no prompt begins so: its keys and values are of this adapter
            else:
                row.context = f"\0{row.number}" if copy != self._copy else session if held else prompt
            new = row.context not in kept and row.context not in missing
            planned += store.row_bytes(self._first_length(row), len(prompt))
            planned += store.prompt_bytes(len(prompt)) if new else 0
            alone = not schedule.running and not count
            most_bytes = self._budget - (0 if alone else self._budget // _RESERVE_SHARE)
            sessions.spill(planned + sessions.used - most_bytes)
            if alone and planned > self._budget:
                kept.forget([other for other in kept if other != row.context])
            if not alone and planned > most_bytes:
                break
            past = partial(sessions.past, session, held) if held else list
            if new and len(prompt) - held > self._decoder.chunk(held):  # a long prompt, computed in chunks
                if count or not kept.advance(row.context, prompt, past, copy):
                    break
            elif new:
                tokens += len(prompt) - held
                if tokens > _PREFILL_TOKENS and count:
                    break
                missing[row.context] = prompt[held:], past(), copy
            self.counters.continued_tokens += held
            count += 1
        kept.compute(missing)
        return count

    def _forget_unwanted(self) -> None:
        """Drop the prompts that no waiting row shares."""
        wanted = self._schedule.wanted
        self._prompts.forget([name for name in self._prompts if isinstance(name, str) or not wanted(name)])

    def _decode(self) -> None:
        """Decode a few tokens for every row, and process them."""
        self._make_room()
        self._arrange()
        table = self._table
        if not len(table):
            return
        count = min(self._read_every, table.most_left) if self._read_every > 1 else 1
        known = table.known(count) if count > 1 else None
        forced = None if known is None else torch.from_numpy(known).to(self._model.device)
        tokens, positions = torch.from_numpy(table.unread), table.positions
        if self._draws is None or self._draws.left < count:
            self._draws = self._draw(table.rows, (table.read + 1).tolist(), _AHEAD)
        copies = table.copies if self._weights.adapted else None
        said: list[tuple[Tensor, Tensor]] = []
        for step in range(count):
            chosen, logprobs = self._draws.next(self._step(tokens, positions, copies))
            positions = positions + 1
            said.append((chosen, logprobs))
            tokens = chosen if forced is None else torch.where(forced[step] < 0, chosen, forced[step])
        self.counters.steps += count
        self.counters.decoded_tokens += count * len(table)
        self._note(said)

    def _draw(self, rows: Sequence[Row], first: Sequence[int], ahead: int) -> RowDraws:
        """Return the draws of these rows, beginning with the token `first`."""
        sampling, keys = [row.asked.sampling for row in rows], [row.key for row in rows]
        return RowDraws(sampling, keys, first, self._model.device, ahead)

    def _note(self, said: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Record drawn tokens; ended rows free their slots, and other rows keep their draws."""
        tokens, logprobs = (
            torch.stack(parts) if len(parts) > 1 else parts[0][None] for parts in zip(*said, strict=True)
        )
        ended = self._table.note(*_on_host(tokens, logprobs), self.counters)
        if not ended:
            return
        self._complete(ended, [row.number for row in ended])
        self._arranged = False
        self._arrange()

    def _arrange(self) -> None:
        """Put the table and the draws into the order of the store's rows."""
        if self._arranged:
            return
        kept = self._table.arrange(self._store.order).tolist()
        if not kept:
            self._draws = None
        elif self._draws is not None:
            self._draws.select(kept)
        self._arranged = True

    def _complete(self, rows: Sequence[Row], stored: Sequence[int]) -> None:
        """Answer ended rows, of which the store has the rows with the numbers `stored`."""
        rows = sorted(rows, key=lambda row: row.number)
        held = self._table.held(row for row in rows if row.asked.session)
        self._table.leave(rows)
        self._hold({row: held[row.number] for row in rows if row.number in held})
        self._store.remove([number for number in stored if number not in held])
        self._done += [row.completion(self._intake.version) for row in rows]
        for row in rows:
            del self._schedule.running[row.number]

    def _make_room(self) -> None:
        """Make room for the next tokens of every row; if the budget has no room, preempt the youngest rows."""
        store, running = self._store, self._schedule.running
        self._arrange()
        needs = self._table.outgrowing(self._read_every)
        if not needs:
            return

        def lacking() -> int:
            return store.used + self._prompts.begun_bytes + store.growth_bytes(needs) - self._budget

        while lacking() > 0:
            if self._prompts.any:  # prompts are cheaper to recompute than rows
                self._prompts.forget_all()
                continue
            if len(running) == 1:
                break
            victim = self._schedule.youngest()
            needs.pop(victim.number, None)
            self._preempt([victim])
        self._sessions.spill(lacking() + self._sessions.used)
        store.extend(needs)
        self._table.give_room({number: store.capacity(number) for number in needs})
        self._arranged = False

    def _preempt(self, rows: Sequence[Row]) -> None:
        self._drop(rows)
        self._schedule.preempt(rows)
        self.counters.preemptions += len(rows)

    def _drop(self, rows: Sequence[Row]) -> None:
        """Stop decoding rows that have not ended; their sessions hold what the model has read."""
        held = self._table.held(row for row in rows if row.asked.session)
        self._table.leave(rows)
        self._hold({row: held[row.number] for row in rows if row.asked.session})
        self._store.remove([row.number for row in rows if row.number not in held])
        self._draws, self._arranged = None, False

    def _hold(self, rows: Mapping[Row, int]) -> None:
        """Move rows from the store to their sessions: row → number of positions; a row is in both for a moment."""
        store, sessions, gone, used = self._store, self._sessions, list[int](), self._store.used
        for place, (row, count) in enumerate(rows.items(), 1):
            tokens = np.concatenate([row.prompt.tokens, row.tokens])[:count]
            sessions.hold(row.asked.session, tokens, store.read(row.number, count))
            gone.append(row.number)
            if used + sessions.used > self._budget or place == len(rows):
                store.remove(gone)
                used, gone = store.used, []
                sessions.spill(used + sessions.used - self._budget)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """After an error, forget all rows and sessions: some of them may be half removed."""
        try:
            yield
        except BaseException:
            self._forget_all()
            self._sessions.clear()
            raise

    def _forget_all(self) -> None:
        """Free the memory; remaining rows are lost, and their ids are released."""
        self._intake.give(row.asked.id for row in self._schedule.take(lambda row: True))
        self._store.clear()
        self._begin_store()
        self._table = RowTable(self._model.eos_token_ids)
        self._draws, self._arranged = None, True


def _on_host(tokens: Tensor, logprobs: Tensor) -> tuple[Indices, Floats]:
    return tokens.cpu().numpy(), logprobs.float().cpu().numpy()
