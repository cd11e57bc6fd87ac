"""The schedule of decoded rows, the intake of an engine, and the table of rows, without tensors.

The schedule is a queue in stream order, with admission by memory and preemption of the youngest row. The schedule
decides when a row is decoded, never the row's tokens. Rows are admitted only from the head of the queue, and the
youngest rows are preempted first, so decoded rows always precede waiting rows in stream order, and the oldest row
always progresses.

The intake is the state that every engine in this process has: the ids in use, whether the engine is paused, and the
sampling version.

The table contains the decoded rows as arrays: the tokens of each row, and how many of these tokens the model has read.
A step touches every row, so the table loops over rows only where rows enter, leave, or have a text to check.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import numpy.typing as npt

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.decoding import StopStrings, Tail
from posttrain.engine.rollout.port import Completion, Context, Delta, Generation, InFlight, NotFiniteError
from posttrain.engine.samples import Floats, Ints, Segment, Status, Trajectory

_REFILL_SHARE = 16  # slots are refilled when a 16th is free: a short prompt costs as much as a step
_DELAYED = 32  # rows times steps; with more rows, a prefill delays them by a smaller part of a step
_NO_TOKENS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)
Indices = npt.NDArray[np.int64]
_FIRST = 64  # initial number of lines and columns; doubled on demand
_TOGETHER = 64  # maximum number of steps that are written together
_ALL = slice(None)


@dataclass
class RolloutCounters:
    """The counters of an engine since it was opened."""

    prefilled_tokens: int = 0  # of prompts
    decoded_tokens: int = 0  # rows times steps
    discarded_tokens: int = 0  # decoded after the end of a row
    recomputed_tokens: int = 0  # read again after a preemption or an update
    continued_tokens: int = 0  # of sessions' contexts, not read again
    preemptions: int = 0
    steps: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """A submitted generation. While it is decoded, the `RowTable` has its tokens; afterwards they are stored here."""

    number: int  # in the order of the stream
    asked: Generation
    prompt: Segment  # shared by all rows that begin with it
    key: int  # key of its random numbers
    context: Context = ()  # the name of its computed prompt, while it is decoded
    copy: int = -1  # of the adapter, with which it has begun; -1: it has not begun
    tail: Tail | None = None  # end of its text; None: no stop strings
    ended: bool = False  # whether a token or a string ended it, before or at its limit
    stopped: bool = False  # whether a string ended it
    tokens: Ints = field(default_factory=lambda: _NO_TOKENS)
    logprobs: Floats = field(default_factory=lambda: _NO_LOGPROBS)
    marks: list[tuple[str, int]] = field(default_factory=list)  # (version, index of its first token)
    told: int = 0  # number of tokens that were in a delta

    def delta(self, tokens: Ints, logprobs: Floats) -> Delta | None:
        """Return the tokens after those of the last delta, given all tokens; None if there are none."""
        begin, self.told = self.told, len(tokens)
        return Delta(self.asked.id, tokens[begin:].copy(), logprobs[begin:].copy()) if self.told > begin else None

    def mark(self, version: str, begin: int) -> None:
        """Record that this version samples the tokens from index `begin`."""
        if self.marks and self.marks[-1][1] == begin:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, begin))

    def completion(self, version: str, *, aborted: bool = False) -> Completion:
        """Return the answer with the row's tokens."""
        marks = [mark for mark in self.marks if mark[1] < len(self.tokens)] or [(version, 0)]
        ends = [*(begin for _, begin in marks[1:]), len(self.tokens)]
        said = [
            Segment(self.tokens[begin:end], "sampled", self.logprobs[begin:end], by)
            for (by, begin), end in zip(marks, ends, strict=True)
        ]
        status: Status = "aborted" if aborted else "ok" if self.ended else "truncated"
        return Completion(self.asked.id, Trajectory((self.prompt, *said), status, self.stopped))


@final
class Schedule:
    """The waiting rows and the decoded rows.

    Args:
        texts: decodes tokens to text, for stop strings; None: no row has stop strings.
    """

    def __init__(self, texts: StopStrings | None = None) -> None:
        self._texts = texts
        self.waiting: deque[Row] = deque()
        self.running: dict[int, Row] = {}  # by number, in the order of admission
        self._wanted: Counter[tuple[int, ...]] = Counter()  # prompts of waiting rows
        self._next = 0
        self._waited = 0  # waiting rows, summed over the steps since the last admission

    def submit(
        self, work: Sequence[Generation], keys: Sequence[int], prompts: Mapping[tuple[int, ...], Segment]
    ) -> None:
        """Append generations to the queue, with the keys of their random numbers; see `prompt_segments`."""
        for asked, key in zip(work, keys, strict=True):
            tail = self._texts.tail(asked.sampling.stop) if self._texts and asked.sampling.stop else None
            self.waiting.append(Row(self._next, asked, prompts[asked.tokens], key, tail=tail))
            self._wanted[asked.tokens] += 1
            self._next += 1

    @property
    def begun(self) -> list[Row]:
        """The decoded rows, and those that wait to continue."""
        return [*self.running.values(), *(row for row in self.waiting if len(row.tokens))]

    def wanted(self, prompt: tuple[int, ...]) -> bool:
        """Return whether a waiting row has this prompt."""
        return self._wanted[prompt] > 0

    def refill(self, steps: int = 1) -> int:
        """Return the maximum number of rows to admit now, `steps` steps after the last call.

        Next turns arrive one by one, and a prefill of few tokens delays all decoded rows by part of a step. Next turns
        are admitted when their own delay, in rows times steps, is as long.
        """
        if not self.waiting:
            self._waited = 0
            return 0
        first, many, going = self.waiting[0].asked, len(self.waiting), len(self.running)
        free = first.sampling.batch_size - going
        enough = not going or free >= min(max(1, first.sampling.batch_size // _REFILL_SHARE), many)
        if first.session:
            self._waited += many * steps
            enough = enough and self._waited >= min(going, _DELAYED)
        return max(0, min(free, many)) if enough else 0

    def admit(self, count: int) -> list[Row]:
        """Move the first `count` rows of the queue to the decoded rows."""
        self._waited = 0
        rows = [self.waiting.popleft() for _ in range(count)]
        for row in rows:
            self._wanted[row.asked.tokens] -= 1
            self.running[row.number] = row
        self._wanted += Counter()
        return rows

    def preempt(self, rows: Iterable[Row]) -> None:
        """Move these rows back to the head of the queue, in stream order; the model reads them again later."""
        for row in sorted(rows, key=lambda row: -row.number):
            del self.running[row.number]
            self.waiting.appendleft(row)
            self._wanted[row.asked.tokens] += 1

    def youngest(self) -> Row:
        """Return the row that is preempted first."""
        return self.running[max(self.running)]

    def take(self, which: Callable[[Row], bool]) -> list[Row]:
        """Remove the matching rows, waiting or decoded; return them in stream order."""
        found = [row for row in (*self.running.values(), *self.waiting) if which(row)]
        numbers = {row.number for row in found}
        for row in found:
            if row.number not in self.running:
                self._wanted[row.asked.tokens] -= 1
            self.running.pop(row.number, None)
        self.waiting = deque(row for row in self.waiting if row.number not in numbers)
        self._wanted += Counter()
        return sorted(found, key=lambda row: row.number)


@final
class Intake:
    """Checks submitted work by the port's rules, for engines that read weights in place and are updated when paused.

    Args:
        reads_text: whether the engine has a tokenizer, which stop strings require.
        policies: names of the policies in addition to the one in training.
    """

    def __init__(
        self, name: str, context_length: int, *, reads_text: bool = False, policies: Iterable[str] = ()
    ) -> None:
        self._name, self._context_length, self._reads_text = name, context_length, reads_text
        self._sessions: dict[str, str] = {}  # unanswered generation → its session
        self.paused = False
        self.versions = dict.fromkeys(("", *policies), "")

    @property
    def version(self) -> str:
        """The sampling version of the policy in training."""
        return self.versions[""]

    def take(self, work: Sequence[Generation]) -> None:
        """Register new work.

        Raises:
            InputError: see `RolloutEngine.submit`.
        """
        ids: dict[str, str] = {}
        begun = {session for session in self._sessions.values() if session}
        for generation in work:
            self.refuse_unserved(generation.policy)
            if generation.session in begun:
                raise InputError(
                    f"session {generation.session} must have one unanswered generation, got {generation.id} too; wait "
                    "for the answer"
                )
            if generation.id in self._sessions or generation.id in ids:
                raise InputError(
                    f"generation {generation.id} must have a unique id, but another generation uses this id; choose "
                    "another"
                )
            if generation.sampling.stop and not self._reads_text:
                raise InputError(
                    f"generation {generation.id} must have no stop strings, got {generation.sampling.stop[0]!r}: "
                    f"rollout engine {self._name} was opened without a tokenizer; open the engine with a tokenizer"
                )
            if len(generation.tokens) + generation.limit > self._context_length:
                raise InputError(
                    f"generation {generation.id} must fit in the context of {self._context_length} tokens, got "
                    f"{len(generation.tokens)} + {generation.limit}; shorten the prompt or the limit"
                )
            ids[generation.id] = generation.session
            begun |= {generation.session} - {""}
        self._sessions |= ids

    def give(self, ids: Iterable[str]) -> None:
        """Release the ids of answered generations."""
        for name in ids:
            self._sessions.pop(name, None)

    def update(self, policy: str, version: str, in_flight: InFlight, begun: int) -> None:
        """See `RolloutEngine.update`; `begun` is the number of begun responses."""
        self.refuse_unserved(policy)
        if not self.paused:
            raise InputError(
                f"rollout engine {self._name} reads weights in place and must be paused to update to {version}, "
                "got a running engine; call pause first"
            )
        if begun and in_flight == "finish":
            raise InputError(
                f"rollout engine {self._name} reads weights in place and has {begun} unfinished samples, which "
                "cannot finish with the old weights; update with in_flight=recompute or keep_kv, or collect them "
                "first"
            )
        self.versions[policy] = version

    def refuse_unserved(self, policy: str) -> None:
        """Raise InputError if the engine does not serve the policy."""
        if policy not in self.versions:
            others = f" and {', '.join(sorted(self.versions.keys() - {''}))}" if len(self.versions) > 1 else ""
            raise InputError(
                f"rollout engine {self._name} serves the policy in training{others}, got {policy}; omit the policy"
            )


_NUMBERS = ("line", "prompt", "limit", "said", "read", "room", "heeds", "watches")  # see `RowTable`


@final
class RowTable:
    """The decoded rows, in the order that `arrange` sets.

    The tokens of a row are in one line of two matrices; the row keeps this line until it leaves. All other values are
    vectors over the rows: the line, the number of prompt tokens, the limit, the tokens generated, the tokens read by
    the model, the positions that the store has for the row, whether tokens can end the row, and whether its text can
    end the row. Steps that need no action are buffered and written together: with few rows, a numpy call costs more
    than its work.

    Args:
        ends: tokens that end a response.
    """

    def __init__(self, ends: Collection[int]) -> None:
        self._ends = sorted(ends)
        self._place: dict[int, int] = {}  # number → index in the order
        self._waiting: list[tuple[Indices, Floats]] = []  # unwritten tokens of all rows, by step
        self._set([], np.empty((len(_NUMBERS), 0), np.int64))
        self._free = list(range(_FIRST - 1, -1, -1))  # free lines
        self._tokens = np.zeros((_FIRST, _FIRST), np.int32)
        self._logprobs = np.zeros((_FIRST, _FIRST), np.float32)

    def _set(self, rows: list[Row], numbers: Indices) -> None:
        self.rows = rows  # in the order of a step's tensors
        self._state = numbers
        each: list[Indices] = list(numbers)
        self._line, self._prompt, self._limit, self._said, self._read, self._room, self._heeds, self._watches = each
        self._heeding, self._watching = self._heeds > 0, bool(self._watches.any())
        self._longest = int(self._said.max(initial=0))  # maximum tokens of a row
        self._steps = 0  # steps since then; next: minimum steps until a row reaches its limit, or has no room
        self._free_steps = int((self._limit - self._said).min(initial=2**31))
        self._roomy_steps = int((self._room - self._prompt - self._read).min(initial=2**31))
        self._even = bool((self._read + 1 == self._said).all())  # whether no row rereads earlier tokens

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def read(self) -> Indices:
        """The number of response tokens that the model has read, [rows]."""
        return self._read + len(self._waiting)

    @property
    def positions(self) -> Indices:
        """Position of the next token that the model reads, [rows]."""
        return self._prompt + self.read

    @property
    def unread(self) -> Indices:
        """The next token that the model reads, [rows]."""
        return self._waiting[-1][0] if self._waiting else self._tokens[self._line, self._read].astype(np.int64)

    @property
    def copies(self) -> list[int]:
        """The copy of the adapter of each row."""
        return [row.copy for row in self.rows]

    @property
    def most_left(self) -> int:
        """The number of steps until the last row reaches its limit."""
        return int((self._limit - self.read).max()) - 1

    def known(self, count: int) -> Indices | None:
        """Return the known tokens that the model rereads, [count, rows], and -1 where a token is drawn.

        The first line has the tokens after the next tokens that the model reads. None: no row rereads tokens.
        """
        if self._even:
            return None
        at = self._read + 1 + np.arange(count)[:, None]
        found = self._tokens[self._line, np.minimum(at, self._tokens.shape[1] - 1)]
        return np.where(at < self._said, found, -1).astype(np.int64)

    def outgrowing(self, count: int) -> dict[int, int]:
        """Return a map from each row that lacks room to the positions that the row needs for `count` more tokens."""
        if self._steps + count <= self._roomy_steps:
            return {}
        needed = self.positions + count
        return {self.rows[at].number: int(needed[at]) for at in np.flatnonzero(needed > self._room).tolist()}

    def held(self, rows: Iterable[Row]) -> dict[int, int]:
        """Return a map from each row to the number of positions whose keys and values the store has."""
        positions = self.positions
        return {row.number: int(positions[self._place[row.number]]) for row in rows}

    def enter(self, rows: Sequence[Row], versions: Sequence[str]) -> None:
        """Add rows, decoded by these versions of the policy; the model has read none of their response tokens."""
        self._write()
        self._more_lines(len(rows) - len(self._free))
        self._reach(max(len(row.tokens) for row in rows))
        begun = []
        for place, (row, version) in enumerate(zip(rows, versions, strict=True), len(self.rows)):
            line, said, asked = self._free.pop(), len(row.tokens), row.asked
            self._tokens[line, :said], self._logprobs[line, :said] = row.tokens, row.logprobs
            self._place[row.number] = place
            heeds, watches = not asked.sampling.ignore_eos, row.tail is not None
            begun.append((line, len(asked.tokens), asked.limit, said, 0 if said else -1, 0, heeds, watches))
            row.mark(version, said)
        self._set([*self.rows, *rows], np.concatenate([self._state, np.array(begun, np.int64).T], 1))

    def give_room(self, positions: Mapping[int, int]) -> None:
        """Set the number of positions for which rows have room: row → positions."""
        for number, room in positions.items():
            self._room[self._place[number]] = room

    def arrange(self, numbers: Sequence[int]) -> Indices:
        """Put the rows into this order; return their previous indices, [rows]."""
        self._write()
        before = np.array([self._place[number] for number in numbers], dtype=np.int64)
        self._place = {number: place for place, number in enumerate(numbers)}
        self._set([self.rows[place] for place in before.tolist()], self._state[:, before])
        return before

    def begin(self, rows: Sequence[Row], tokens: Indices, logprobs: Floats) -> list[Row]:
        """Append the first tokens [rows] of these rows; return the rows that end.

        Raises:
            NotFiniteError: see `note`.
        """
        at = np.array([self._place[row.number] for row in rows], dtype=np.int64)
        self._read[at] = 0
        return [row for row, over in zip(rows, self._say(at, tokens, logprobs).tolist(), strict=True) if over]

    def note(self, tokens: Indices, logprobs: Floats, counters: RolloutCounters) -> list[Row]:
        """Append drawn tokens, [steps, rows] in order; return the ended rows. Tokens after an end are dropped.

        Raises:
            NotFiniteError: a log-probability is not finite.
        """
        self._steps += len(tokens)
        if len(tokens) == 1 and self._nothing_ends(tokens[0], logprobs[0]):
            self._waiting.append((tokens[0], logprobs[0]))
            return []
        self._write()
        ended = np.zeros(len(self.rows), np.bool_)
        for chosen, probable in zip(tokens, logprobs, strict=True):
            self._read += ~ended
            fresh = self._read >= self._said  # whether the token is new: no known token was read
            if fresh.all():
                ended = self._say(_ALL, chosen, probable)
                continue
            at = np.flatnonzero(fresh)
            counters.discarded_tokens += int(ended.sum())
            counters.recomputed_tokens += len(ended) - int(ended.sum()) - len(at)
            ended[at] = self._say(at, chosen[at], probable[at])
        return [self.rows[at] for at in np.flatnonzero(ended).tolist()]

    def deltas(self) -> list[Delta]:
        """Return the tokens of all rows that were in no delta."""
        self._write()
        lines, said = self._line.tolist(), self._said.tolist()
        found = [
            row.delta(self._tokens[line, :count], self._logprobs[line, :count])
            for row, line, count in zip(self.rows, lines, said, strict=True)
        ]
        return [delta for delta in found if delta]

    def mark(self, version: str) -> None:
        """Attribute the further tokens of all rows to this version."""
        self._write()
        for row, said in zip(self.rows, self._said.tolist(), strict=True):
            row.mark(version, said)

    def leave(self, rows: Iterable[Row]) -> None:
        """Remove rows, which keep their tokens; the caller arranges the remaining rows again."""
        self._write()
        for row in rows:
            place = self._place.pop(row.number)
            line, said = int(self._line[place]), int(self._said[place])
            row.tokens, row.logprobs = self._tokens[line, :said].copy(), self._logprobs[line, :said].copy()
            self._free.append(line)

    def _nothing_ends(self, tokens: Indices, logprobs: Floats) -> bool:
        """Return whether the step only needs to be written: it ends no row, and no row rereads earlier tokens."""
        return (
            self._even
            and not self._watching
            and self._steps < self._free_steps
            and len(self._waiting) < _TOGETHER
            and not any((tokens == end).any() for end in self._ends)
            and math.isfinite(logprobs.sum())
        )

    def _write(self) -> None:
        """Write all buffered steps."""
        if not self._waiting:
            return
        tokens, logprobs = (np.stack(parts, 1) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        count = tokens.shape[1]
        self._longest += count
        self._reach(self._longest)
        lines, at = self._line[:, None], self._said[:, None] + np.arange(count)
        self._tokens[lines, at], self._logprobs[lines, at] = tokens, logprobs
        self._said += count
        self._read += count

    def _say(self, at: Indices | slice, tokens: Indices, logprobs: Floats) -> npt.NDArray[np.bool_]:
        """Append a token to the rows at these indices; return whether it ends each of them."""
        if not math.isfinite(logprobs.sum()):  # the sum is finite only if every term is
            rows = self.rows if isinstance(at, slice) else [self.rows[place] for place in at.tolist()]
            raise NotFiniteError.of(
                "sampling", (rows[n].asked.id for n in np.flatnonzero(~np.isfinite(logprobs)).tolist())
            )
        said, lines = self._said[at], self._line[at]
        self._longest += 1
        self._reach(self._longest)
        self._tokens[lines, said], self._logprobs[lines, said] = tokens, logprobs
        self._said[at] += 1
        ended = np.zeros(len(tokens), np.bool_)
        for end in self._ends:
            ended |= tokens == end
        ended &= self._heeding[at]
        over: npt.NDArray[np.bool_] = ended | (self._said[at] >= self._limit[at])
        if not (self._watching or ended.any()):
            return over
        rows = self.rows if isinstance(at, slice) else [self.rows[place] for place in at.tolist()]
        for place in np.flatnonzero((self._watches[at] > 0) & ~ended).tolist():
            row = rows[place]
            if row.tail is not None and row.tail.ends(int(tokens[place])):
                row.stopped = ended[place] = over[place] = True
        for place in np.flatnonzero(ended).tolist():
            rows[place].ended = True
        return over

    def _reach(self, columns: int) -> None:
        """Extend the matrices to at least `columns` columns."""
        while columns > self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], 1)
            self._logprobs = np.concatenate([self._logprobs, np.zeros_like(self._logprobs)], 1)

    def _more_lines(self, lacking: int) -> None:
        if lacking <= 0:
            return
        have, columns = self._tokens.shape
        more = max(have, lacking)
        self._tokens = np.concatenate([self._tokens, np.zeros((more, columns), np.int32)])
        self._logprobs = np.concatenate([self._logprobs, np.zeros((more, columns), np.float32)])
        self._free += range(have + more - 1, have - 1, -1)
