"""Samples of one or several turns on one rank of the rollout, from their first generation to whole groups.

A sample with several turns is one sequence, in which an environment replies to each response except the last one:

::

    generation ─▶ response ─▶ the last turn, or cut at its limit ─────▶ ended
                      │
                      └─▶ waits for the reply ─▶ the end, or a fault ─▶ ended
                                   └─▶ an observation ─▶ the next generation, in the same session of the engine

No sample waits for another one: the next turn of a sample begins as soon as its reply arrives. The exception is an
engine without sessions, which decodes the waiting generations as one batch. There, the next turns begin when all
replies have arrived, so that no clock decides which samples are in a batch. A group is passed on when all its samples
have ended.

Between two turns, a session of the native engine holds keys and values. It contains the keys and values of the tokens
that the model has read: the context of the last turn and its response, without the response's last token. The next turn
computes only what was added. Prefill and decoding round differently, so what is held is never recomputed: if the budget
has no room, the oldest sessions are moved, bit for bit, to host memory (on CUDA) or to a file (on the CPU).
"""

import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.port import Generation, KVShape, OpenSample, Reply, SamplingParams
from posttrain.engine.samples import Group, Ints, Trajectory, groups_of

_Place = tuple[int, int]  # key and sample


@final
class Conversations:
    """The groups of one rank that have not been passed on.

    Args:
        samples: number of samples of each prompt.
        turns: maximum number of responses of a sample.
        sampling: of the first turns; a later turn has its own seed, derived from this one and the turn.
        together: whether next turns begin together.
    """

    def __init__(self, samples: int, turns: int, sampling: SamplingParams, *, together: bool = False) -> None:
        self._samples, self._turns, self._sampling, self._together = samples, turns, sampling, together
        self._ready: list[Generation] = []  # next turns that have not begun
        self._ended: dict[int, dict[int, Trajectory]] = {}  # key → sample → its sequence
        self._waiting: dict[_Place, Trajectory] = {}
        self._observed: dict[_Place, tuple[Trajectory, tuple[int, ...]]] = {}  # sequences that are being continued
        self._came: list[OpenSample] = []
        self._over: list[str] = []
        self._later: dict[int, SamplingParams] = {}  # of later turns
        self.sampling = 0  # number of unanswered generations

    @property
    def any(self) -> bool:
        """Whether there is a group."""
        return bool(self._ended)

    @property
    def resting(self) -> bool:
        """Whether nothing can be sampled before a reply arrives."""
        return bool(self._waiting) and not self.sampling

    def begin(self, keys: Collection[int], work: Sequence[Generation]) -> list[Generation]:
        """Begin groups; return their generations, with sessions if a sample has several turns."""
        self._ended |= {key: {} for key in keys}
        self.sampling += len(work)
        return [replace(one, session=_session(one.key, one.sample)) for one in work] if self._turns > 1 else list(work)

    def replied(self, replies: Sequence[Reply], call: int) -> list[Generation]:
        """Return the next generations of samples that were observed; samples without an observation end.

        A reply to a turn that no sample waits for is ignored: a process that was lost had sampled the turn, this one
        samples it again, and the reply will come again.

        Args:
            call: a number for the ids of the generations.
        """
        for reply in replies:
            place = reply.key, reply.sample
            so_far = self._waiting.get(place)
            if so_far is None or len(so_far.turns) != reply.turn:
                continue
            del self._waiting[place]
            if reply.observed is None:
                self._end(place, so_far.ended("error", reply.fault) if reply.fault else so_far)
                continue
            self._observed[place] = so_far, reply.observed
            tokens = (*so_far.prompt.tolist(), *so_far.response.tolist(), *reply.observed)
            drawn = self._sampled_at(reply.turn)
            words = _session(*place), tokens, reply.key, drawn, drawn.max_new_tokens, reply.sample
            self._ready.append(Generation(*words, session=_session(*place)))
        if self._together and (self._waiting or self.sampling):
            return []
        found = [
            replace(one, id=f"{call}.{one.id}") for one in sorted(self._ready, key=lambda one: (one.key, one.sample))
        ]
        self._ready = []
        self.sampling += len(found)
        return found

    def take(self, answers: Sequence[tuple[Generation, Trajectory]]) -> None:
        """Take the answers of an engine."""
        self.sampling -= len(answers)
        for asked, answer in answers:
            place = asked.key, asked.sample
            so_far, observed = self._observed.pop(place, (None, ()))
            whole = answer if so_far is None else so_far.went_on(observed, answer)
            if whole.status == "ok" and len(whole.turns) < self._turns:
                self._waiting[place] = whole
                self._came.append(OpenSample(*place, whole))
            else:
                self._end(place, whole)

    def passed(self) -> tuple[tuple[Group, ...], tuple[OpenSample, ...], list[str]]:
        """Return whole groups, samples that have begun to wait, and sessions that have ended; each of them once."""
        whole = [key for key, samples in self._ended.items() if len(samples) == self._samples]
        ended = {key: self._ended.pop(key) for key in whole}
        rows = [ended[key][sample] for key in whole for sample in range(self._samples)]
        came, over, self._came, self._over = self._came, self._over, [], []
        return groups_of(rows, whole, self._samples), tuple(came), over

    def _sampled_at(self, turn: int) -> SamplingParams:
        if turn not in self._later:
            self._later[turn] = replace(self._sampling, seed=derive_seed(self._sampling.seed, "turn", turn))
        return self._later[turn]

    def _end(self, place: _Place, whole: Trajectory) -> None:
        key, sample = place
        self._ended[key][sample] = whole
        if self._turns > 1:
            self._over.append(_session(key, sample))


def _session(key: int, sample: int) -> str:
    return f"{key}.{sample}"


@dataclass(slots=True, eq=False)
class _Session:
    tokens: Ints  # that the model has read, [n]
    pairs: list[Tensor]  # by layer, [n, 2, kv_heads, head_dim]; empty: in the file
    inside: bool = True  # whether the pairs count towards the budget
    begin: int = 0  # in the file


@final
class _Spilled:
    """A temporary file without a name, whose free ranges are used again: one for any number of sessions."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- `close` closes it
        self._free: list[tuple[int, int]] = []  # [begin, end), in order, none adjacent to another
        self.end = 0

    def put(self, parts: Sequence[Tensor], size: int) -> int:
        """Write tensors of `size` bytes; return where they begin."""
        found = next(((begin, end) for begin, end in self._free if end - begin >= size), (self.end, self.end + size))
        begin = found[0]
        self._free = [span for span in self._free if span != found]
        self.end = max(self.end, begin + size)
        if found[1] > begin + size:
            self._free = sorted([*self._free, (begin + size, found[1])])
        self._file.seek(begin)
        for part in parts:
            self._file.write(part.contiguous().view(torch.uint8).numpy().data)
        self._file.flush()
        return begin

    def get(self, begin: int, size: int) -> bytearray:
        """Return the bytes that were written at `begin`."""
        self._file.seek(begin)
        return bytearray(self._file.read(size))

    def free(self, begin: int, size: int) -> None:
        """Free a range; free space at the end leaves the file."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._free, (begin, begin + size)]):
            first = merged.pop()[0] if merged and merged[-1][1] == first else first
            merged.append((first, last))
        if merged[-1][1] == self.end:
            self.end = merged.pop()[0]
            self._file.truncate(self.end)
        self._free = merged

    def close(self) -> None:
        """Close the file; what was not written to a full disk is dropped."""
        with suppress(OSError):
            self._file.close()


@final
class HeldSessions:
    """The sessions of one engine, the oldest first."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._held: dict[str, _Session] = {}
        self._file: _Spilled | None = None
        self.used = 0  # bytes of the budget that sessions occupy

    def continued(self, name: str, context: Ints) -> int:
        """Return how many tokens of the context [n] are held, at most n - 1; 0 if they differ from the session's.

        At least the last token is computed, because its hidden state predicts the next token. The session of a
        preempted row is longer than the row's context.
        """
        one = self._held.get(name)
        count = 0 if one is None else min(len(one.tokens), len(context) - 1)
        return count if one is not None and np.array_equal(one.tokens[:count], context[:count]) else 0

    def hold(self, name: str, tokens: Ints, pairs: list[Tensor]) -> None:
        """Hold the keys and values of these tokens as the newest session."""
        self.release([name])
        self._held[name] = _Session(tokens, pairs)
        self.used += self._shape.position_bytes * len(tokens)

    def past(self, name: str, count: int) -> list[Tensor]:
        """Return the keys and values of the first `count` tokens, by layer [count, 2, kv_heads, head_dim]."""
        one, device = self._held[name], self._shape.device
        pairs = one.pairs or self._load(one)
        return [pair[:count].to(device) for pair in pairs]

    def release(self, names: Collection[str]) -> None:
        """Free these sessions; skip unknown names."""
        for name in names:
            if (one := self._held.pop(name, None)) is None:
                continue
            if one.inside:
                self.used -= self._bytes(one)
            elif self._file and not one.pairs:
                self._file.free(one.begin, self._bytes(one))

    def clear(self) -> None:
        """Free all sessions, and the file, which may be unusable after an error."""
        self.release(list(self._held))
        if self._file is not None:
            self._file.close()
            self._file = None

    def spill(self, needed: int) -> int:
        """Move the oldest sessions out of the budget until `needed` bytes are free; return the number moved.

        Raises:
            JobFailedError: the file system has no room for them.
        """
        moved = 0
        for name, one in self._held.items():
            if needed <= 0:
                break
            if one.inside:
                if self._shape.device.type == "cuda":
                    one.pairs = [pair.cpu() for pair in one.pairs]
                else:
                    one.begin, one.pairs = self._written(name, one), []
                needed, self.used = needed - self._bytes(one), self.used - self._bytes(one)
                moved, one.inside = moved + 1, False
        return moved

    def _bytes(self, one: _Session) -> int:
        return self._shape.position_bytes * len(one.tokens)

    def _written(self, name: str, one: _Session) -> int:
        try:
            self._file = self._file or _Spilled()
            return self._file.put(one.pairs, self._bytes(one))
        except OSError as error:
            raise JobFailedError(
                f"session {name} must be written to a temporary file when runtime.kv_cache has no room for it, but "
                f"{error.strerror or error}; free space in {tempfile.gettempdir()}, or raise runtime.kv_cache"
            ) from error

    def _load(self, one: _Session) -> list[Tensor]:
        shape = self._shape
        assert self._file is not None, "a session without pairs is in the file"
        raw = torch.frombuffer(self._file.get(one.begin, self._bytes(one)), dtype=shape.dtype)
        return list(raw.view(shape.layers, len(one.tokens), 2, shape.kv_heads, shape.head_dim))
