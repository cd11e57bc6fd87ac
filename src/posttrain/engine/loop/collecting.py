"""The sampling pipeline: sampling ahead of training, the rollout call, scores, and columns that an algorithm requires.

What the admission policy lets start is sampled, scored, and kept or replaced:

::

    admit ──▶ rollout (other processes work on while this one trains) ──▶ scores ──▶ keep ──▶ buffer
      ▲                                                                        │ drop: its place is free again
      └────────────────────────────────────────────────────────────────────────┘

One call of the rollout runs at a time. Its groups are kept or dropped in the order of the data stream, and what takes a
dropped group's place joins the call at once; so the result is a function of the seed and the policies, and never of how
long a call takes.

The groups of a running call come as they end, and are scored while others are sampled:

::

    rollout ─▶ groups, in any order ─▶ stretches of the stream, each when its last group is there ─▶ groups, in order

What is scored together, and the order in which groups are handed on, follow the data stream and never the clock. Which
stretch is scored first follows who ended first: one long response holds up its own stretch and no other.

Columns are filled in stretches of a step's kept groups while others are still sampled. Such a stretch holds as many
kept groups, in the order of the data stream, as fill a micro-batch on every rank of the role that predicts. So the
samples decide which documents are computed together, never the speed of a process, and one process computes them as
several do. Roles that share the rollout's pool compute when it has ended.

A role computes the wide columns of a batch and keeps them, and the batch gets the places of their rows.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import final

import torch

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Note, Span
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import StoredShard
from posttrain.engine.groups.worker_group import Feed, Future
from posttrain.engine.loop.publishing import Roles
from posttrain.engine.loop.recipe import Held, Journal, read_held, write_held
from posttrain.engine.recipes.algorithm import Algorithm, Column, RolloutAlgorithm, ScoredGroup
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.port import PromptBatch, Rollouts, SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Group, Prompt, Trajectory
from posttrain.engine.scoring import Environment, Failed, Scorer, Stretch
from posttrain.engine.tracing import Trace
from posttrain.engine.wide import RowsHandle, WideColumn, WideRows, joined
from posttrain.pacing.admission import Buffer, Pace
from posttrain.sandbox.port import Score

_PATIENCE = 60.0  # seconds between two looks at the feed, which has a deadline of its own
_LOOK = 0.02  # where scores or gradients may come meanwhile
Ask = Callable[[int, int, bool], bool]  # tokens spent here, and those that may be; raise where the budget lacks them
Form = Callable[[Sequence[ScoredGroup]], TokenBatch | None]


@final
@dataclass(slots=True)
class Incoming:
    """What one call of the rollout samples, on its way to the buffer.

    Args:
        batch: the step that it is to be trained in.
        keys: of its prompts, in the order of the data stream.
        prompts: parallel to them.
        feed: the call.
        samples: of each prompt.
        scorer: None: nobody scores.
        together: groups that are scored in one call.
        early: whether they are while the rollout works; else when it has ended.
        grows: whether prompts may be added while it goes on: what is sampled is judged meanwhile.
        went_on: what becomes of all of them before they are scored, where samples have several turns.
    """

    batch: int
    keys: list[int]
    prompts: list[Prompt]
    feed: Feed[PromptBatch, Rollouts]
    samples: int
    scorer: Scorer | None
    together: int
    early: bool
    grows: bool = False
    went_on: Callable[[list[Group], Trace], list[Group]] | None = None
    counts: Counter[str] = field(default_factory=Counter)  # of the rollout's engine, see `RolloutEngine`
    _begun: tuple[float, float] = field(default_factory=lambda: (time.time(), time.perf_counter()))
    _came: dict[int, Group] = field(default_factory=dict)
    _sampled: bool = False
    _stretches: list[range] = field(init=False)  # of places among the keys
    _stretch: dict[int, int] = field(init=False)  # of keys
    _lacking: Counter[int] = field(init=False)  # groups that have not come yet, by stretch
    _told: int = 0  # keys whose sampling a span covers
    _next: int = 0  # the stretch that is handed on next
    _whole: list[int] = field(default_factory=list)  # stretches that the scorer may have
    _scoring: dict[int, tuple[list[ScoredGroup], Future[Sequence[Score]]]] = field(default_factory=dict)
    _taken: int = 0
    _first: int = field(init=False)  # keys that it began with
    _waits: tuple[float, float] | None = None  # since when only scores are waited for

    def __post_init__(self) -> None:
        self._first = count = len(self.keys)
        size = self.together
        self._stretches = [range(first, min(first + size, count)) for first in range(0, count, size)]
        self._stretch = {key: place // size for place, key in enumerate(self.keys)}
        self._lacking = Counter(self._stretch.values())

    def add(self, key: int, prompt: Prompt) -> None:
        """Sample one prompt more, in the place of a group that was dropped; it is a stretch of its own."""
        if self._sampled:
            self._sampled, self._begun, self._waits = False, (time.time(), time.perf_counter()), None
        self._stretch[key], self._lacking[len(self._stretches)] = len(self._stretches), 1
        self._stretches.append(range(len(self.keys), len(self.keys) + 1))
        self.keys.append(key)
        self.prompts.append(prompt)
        self.feed.add(PromptBatch((tuple(prompt.tokens),), (key,)))

    @property
    def over(self) -> bool:
        """Whether every group was taken, and the rollout has ended."""
        return self._sampled and self._taken == len(self.keys)

    def take(self, trace: Trace, *, busy: bool = False) -> list[ScoredGroup]:
        """Groups with their scores, in the order of the data stream; those that are known since.

        Waits for the rollout; where it has ended, for scores.

        Args:
            busy: something else goes on that is to be looked at soon.

        Raises:
            Exception: what the rollout, an environment or the reward raised.
        """
        ended = self._sampled
        if not ended:
            self._receive(trace, _LOOK if busy or self._next in self._scoring else _PATIENCE)
        self._give()
        return self._scored(trace, wait=ended)

    def look(self, trace: Trace, seconds: float) -> tuple[list[ScoredGroup], bool]:
        """As `take`, without waiting for a score; and whether the rollout goes on."""
        if not self._sampled:
            self._receive(trace, seconds)
        if self.early:  # who shares memory with what goes on meanwhile waits for its end
            self._give()
        return self._scored(trace, wait=False), not self._sampled

    def _receive(self, trace: Trace, seconds: float) -> None:
        try:
            came = self.feed.take(seconds)
        except Exception:
            self._tell_failures(trace)
            raise
        for found in came:
            self.counts.update(found.counts)
            self._came |= {group.key: group for group in found.groups}
            for group in found.groups:
                stretch = self._stretch[group.key]
                self._lacking[stretch] -= 1
                if not self._lacking[stretch]:
                    self._whole.append(stretch)
        if not self.feed.ended:
            return
        self._sampled = True
        groups = [self._came[key] for key in self.keys[self._told :]]
        self._told = len(self.keys)
        rows = [sample for group in groups for sample in group.samples]
        told = {"trajectories": len(rows), "tokens": sum(row.generated for row in rows), "batch": self.batch}
        started, begin = self._begun
        trace.sink(Span("rollout", trace.step, started, time.perf_counter() - begin, told))
        self._waits = time.time(), time.perf_counter()
        if self.went_on:
            self._came = {group.key: group for group in self.went_on(groups, trace)}

    def _tell_failures(self, trace: Trace) -> None:
        """Of stretches whose turn does not come any more."""
        for _, (_, answer) in sorted(self._scoring.items()):
            if answer.done():
                try:
                    answer.result()
                except Exception as error:  # whatever it is, it is not what ends the call
                    line = str(error).partition("\n")[0]
                    trace.sink(Note(f"before the rollout ended, scoring had failed: {line}", time.time(), "warning"))
                    return

    def _give(self) -> None:
        """Hand whole stretches to the scorer."""
        if not (self._sampled or self.early):
            return
        for stretch in sorted(self._whole):
            chosen = self._stretches[stretch]
            none = (Score(None),) * self.samples
            groups = [ScoredGroup(self.prompts[at], self._came[self.keys[at]], none, self.batch) for at in chosen]
            self._scoring[stretch] = groups, self._begin(groups, chosen)
        self._whole.clear()

    def _begin(self, groups: Sequence[ScoredGroup], places: range) -> Future[Sequence[Score]]:
        scores = [score for group in groups for score in group.scores]
        if self.scorer is None:
            return Future(lambda: scores, lambda: True)
        prompts = [group.prompt for group in groups for _ in group.scores]
        answers = [answer for group in groups for answer in group.answers]
        total = max(self._first, places.stop)  # of those added later each counts when it is scored
        stretch = Stretch(places.start * self.samples, total * self.samples)
        return self.scorer.begin(prompts, answers, stretch)

    def _scored(self, trace: Trace, *, wait: bool) -> list[ScoredGroup]:
        found: list[ScoredGroup] = []
        while self._next in self._scoring:
            groups, answer = self._scoring[self._next]
            if not (wait or answer.done()):
                break
            del self._scoring[self._next]
            scores = iter(answer.result())
            found += [group.scored(tuple(next(scores) for _ in group.scores)) for group in groups]
            self._taken += len(groups)
            self._next += 1
        if found and self._taken == len(self.keys) and self.scorer:  # what scoring takes when the rollout has ended
            started, begin = self._waits or (time.time(), time.perf_counter())
            trace.sink(Span("reward", trace.step, started, time.perf_counter() - begin, {"batch": self.batch}))
        return found


@final
@dataclass(frozen=True, slots=True)
class _Standing:
    buffer: Buffer[ScoredGroup]
    dropped: dict[int, list[tuple[ScoredGroup, str]]]


@final
@dataclass(slots=True)
class Collector:
    """Keeps a stage's buffer as full as its policy lets it.

    Args:
        algorithm: how much is sampled, and what is kept.
        roles: among them, who samples.
        prompts: every row of the data set.
        scorer: None: nobody scores.
        seed: the stage's.
        journal: where it is in the data.
        buffer: what waits to be trained.
        environment: what is observed between two responses; None: there is one response.
        kept: told of every group that is, in the order of the data stream.
        watch: looks at what was begun of a step's kept groups; whether something goes on.
    """

    algorithm: RolloutAlgorithm
    roles: Roles
    prompts: Sequence[Prompt]
    scorer: Scorer | None
    seed: int
    journal: Journal
    buffer: Buffer[ScoredGroup]
    environment: Environment | None = None
    kept: Callable[[ScoredGroup], None] = lambda group: None
    watch: Callable[[int], bool] = lambda step: False
    version: int = 0  # that samples, in steps trained
    spent: int = 0  # tokens, since the last `mark`
    counts: Counter[str] = field(default_factory=Counter)  # of the rollout's engine since then, see `RolloutEngine`
    dropped: dict[int, list[tuple[ScoredGroup, str]]] = field(default_factory=dict)  # by batch, each with the reason
    _running: Incoming | None = None
    _marked: _Standing | None = None
    _taken: list[ScoredGroup] = field(default_factory=list)  # by the step that goes on
    _told: bool = False  # that an environment failed
    _asked: tuple[int, Ask] = (0, lambda spent, more, refuse: True)  # the step that was begun last, and its budget

    def collected(self, step: int, trace: Trace, reserve: Ask) -> list[ScoredGroup]:
        """The groups that a step trains, in the order of the data stream; when it returns the next ones are sampled.

        Raises:
            BudgetExceededError: dropped groups cannot be replaced.
            InputError: the weights that they are sampled with were not published.
        """
        self._enter(step)
        while (keys := self.buffer.policy.select(self._pace(step))) is None:
            self._begin(step, trace, reserve)
            if self._running is not None:
                self._settle(trace, self._running)
            elif self.buffer.policy.select(self._pace(step)) is None:
                raise InputError(f"policy version {self.version} may not sample batch {step}; publish newer weights")
        self._taken = groups = self.buffer.take(keys, step)
        self.buffer.trained(step)
        self._begin(step + 1, trace, reserve)
        return groups

    def finish(self, step: int, trace: Trace, reserve: Ask) -> None:
        """Wait until everything is there that this version of the policy may sample after `step`."""
        self._begin(step + 1, trace, reserve)  # what ran may have ended meanwhile
        while self._running is not None:
            self._settle(trace, self._running)
            self._begin(step + 1, trace, reserve)
        self._taken = []

    def missing(self, step: int) -> int:
        """Prompts that are sampled from now to the end of a step, replacements apart."""
        self._enter(step)
        pace = self._pace(step)
        ahead = range(step, min(pace.version + self.buffer.policy.lag + 1, pace.steps))
        return sum(pace.prompts - pace.filled(batch) for batch in ahead)

    def waiting(self, step: int) -> list[ScoredGroup]:
        """What is there already of a step's groups, or was taken for it."""
        return [*self._taken, *(group for entry, group in self.buffer.ready() if entry.batch == step)]

    def mark(self) -> None:
        """A step begins."""
        self.spent, self.counts = 0, Counter()
        dropped = {batch: list(found) for batch, found in self.dropped.items()}
        self._marked = _Standing(self.buffer.copied(), dropped)

    def rewind(self) -> None:
        """Forget what was sampled since `mark`; nothing runs."""
        assert self._marked is not None
        self._taken = []
        self.buffer, self.dropped = self._marked.buffer, self._marked.dropped

    def lacking(self, step: int) -> int:
        """Prompts that a step may train on besides."""
        if self._taken:
            return 0
        pace = self._pace(step)
        given_up = pace.given_up.count(step)
        return pace.prompts - given_up - sum(entry.batch == step and entry.ready for entry in pace.held)

    def save(self, path: Path) -> Mapping[str, str]:
        """Write what waits; file name → digest. Nothing runs then, and with lag 0 nothing waits."""
        if not self.buffer.policy.lag:
            return {}
        held = [Held(entry.key, entry.batch, entry.version, group) for entry, group in self.buffer.ready()]
        held += [Held(g.group.key, batch, 0, g, why) for batch, found in self.dropped.items() for g, why in found]
        return write_held(path, held, self.buffer.pace(0, 0).given_up, self.buffer.lost)

    def restore(self, path: Path) -> None:
        """Go on with what a checkpoint held.

        Raises:
            IntegrityError: it is of a stage that sampled ahead, and does not say what waited.
        """
        if not self.buffer.policy.lag:
            return
        held, given_up, lost = read_held(path, lambda key: self.prompts[self.journal.row(key)])
        waiting = [(one.entry, one.group) for one in held if not one.dropped]
        self.buffer.restore(waiting, given_up, self.journal.consumed - 1, lost)
        for one in held:
            if one.dropped:
                self.dropped.setdefault(one.batch, []).append((one.group, one.dropped))

    def _enter(self, step: int) -> None:
        """With lag 0 whoever samples reads what the last update left, or was given it."""
        if not self.buffer.policy.lag:
            self.version = step

    def _pace(self, step: int) -> Pace:
        return self.buffer.pace(step, self.version)

    def _begin(self, step: int, trace: Trace, reserve: Ask) -> None:
        """Start what may start, unless something runs."""
        source, self._asked = self.algorithm.source, (step, reserve)
        if self._running is None and (admitted := self.buffer.admit(step, self.version)):
            if admitted.again:
                rows = self.journal.peek(self.missing(step))  # it, and what is begun after it
                more = sum(source.sampling(len(self.prompts[row].tokens)) for row in rows)
                if not reserve(self.spent, more, True):
                    return  # the next step, which lacks it, is refused before it begins
            self._running = self._sampling(admitted.batch, admitted.count)

    def _sampling(self, batch: int, count: int) -> Incoming:
        source, taken, scorer = self.algorithm.source, self.journal.take(count), self.scorer
        keys = tuple(position for position, _ in taken)
        chosen = tuple(self.prompts[row] for _, row in taken)
        self.buffer.start(keys, batch, self.version)
        asked = PromptBatch(tuple(tuple(prompt.tokens) for prompt in chosen), keys)
        drawn = self._drawn(derive_seed(self.seed, "rollout"))  # a position in the stream never repeats
        longest = max(source.document(len(prompt)) for prompt in asked.tokens)
        early = source.turns == 1 and (scorer is None or scorer.early)
        return Incoming(
            batch,
            list(keys),
            list(chosen),
            self.roles.sampler.feed(_covers, RolloutWorker.feed, asked, drawn, source.samples),
            source.samples,
            scorer,
            together=scorer.groups(count, longest * source.samples) if scorer else 1,
            early=early,
            grows=early and source.refills > 0,
            went_on=partial(self._all_turns, chosen) if source.turns > 1 else None,
        )

    def _drawn(self, seed: int) -> SamplingParams:
        source = self.algorithm.source
        most, warmth = source.max_tokens, source.temperature
        return SamplingParams(max_new_tokens=most, temperature=warmth, seed=seed, stop=source.stop)

    def _went_on(self, groups: Sequence[Group], prompts: Sequence[Prompt], turn: int, trace: Trace) -> list[Group]:
        """Samples that the environment lets go on have one response more; the others stay as they are."""
        assert self.environment is not None
        open_ = [(at, s) for at, group in enumerate(groups) for s in group.samples if s.status == "ok"]
        with trace.span("environment") as span:
            seen = self.environment([prompts[at] for at, _ in open_], [sample.last for _, sample in open_])
            told = [(at, s, o) for (at, s), o in zip(open_, seen, strict=True) if o is not None]
            failed = [(at, s, o.line) for at, s, o in told if isinstance(o, Failed)]
            going = [(at, s, o) for at, s, o in told if not isinstance(o, Failed)]
            span |= {"turn": turn, "samples": len(open_), "going on": len(going), "failed": len(failed)}
        if failed:
            self._tell_failed(failed[0][2], len(failed), len(open_), trace)
            groups = _replaced(groups, {(at, s.index): s.last.ended("error", line) for at, s, line in failed})
        if not going:
            return list(groups)
        asked = PromptBatch(
            tuple((*s.last.prompt.tolist(), *s.last.response.tolist(), *o) for _, s, o in going),
            tuple(groups[at].key for at, _, _ in going),
            tuple(s.index for _, s, _ in going),
        )
        with trace.span("rollout") as span:
            drawn = self._drawn(derive_seed(self.seed, "rollout", turn))
            found = self.roles.sampler.map(RolloutWorker.generate, asked, drawn, 1)
            span |= {"trajectories": len(found.trajectories), "tokens": found.tokens, "turn": turn}
        self.counts.update(found.counts)
        answers = zip(going, found.trajectories, strict=True)
        return _replaced(groups, {(at, s.index): s.last.went_on(o, answer) for (at, s, o), answer in answers})

    def _tell_failed(self, line: str, failed: int, asked: int, trace: Trace) -> None:
        """Say so once, where no scorer does.

        Raises:
            InputError: all of them failed, and nobody scores, who would count failures.
        """
        many = f"{line}; {failed} of {asked} samples end there"
        if self.scorer is None and failed == asked:
            raise InputError(many)
        if self.scorer is None and not self._told:
            self._told = True
            line = f"{many}, untrained; later ones are counted as turns/errors"
            trace.sink(Note(line, time.time(), "warning"))

    def _all_turns(self, prompts: Sequence[Prompt], groups: list[Group], trace: Trace) -> list[Group]:
        for turn in range(1, self.algorithm.source.turns):
            groups = self._went_on(groups, prompts, turn, trace)
        return groups

    def _settle(self, trace: Trace, running: Incoming) -> None:
        """Wait for what runs, keep or drop it."""
        busy = False
        while not running.over:
            self._keep(running, running.take(trace, busy=busy))
            busy = self.watch(running.batch)
        self._ended(running)
        if self.scorer and not self.scorer.early:
            self.roles.rest()

    def look(self, trace: Trace, seconds: float) -> bool:
        """Take what has come meanwhile, in at most so many seconds; whether more is on its way."""
        running = self._running
        if running is None:
            return False
        found, more = running.look(trace, seconds)
        self._keep(running, found)
        if running.over:
            self._ended(running)
        return more

    def _keep(self, running: Incoming, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            self.spent += group.tokens
            verdict = self.algorithm.keep(group)
            if verdict is None:
                self.buffer.complete(group.group.key, group)
                self.kept(group)
            else:
                self.buffer.drop(group.group.key)
                self.dropped.setdefault(running.batch, []).append((group, verdict.reason))
                self._replace(running)

    def _replace(self, running: Incoming) -> None:
        """Sample what takes the place of a dropped group while others go on. What the budget does not surely have waits
        until it is known what they cost.
        """
        (step, reserve), source = self._asked, self.algorithm.source
        admitted = self.buffer.admit(step, self.version) if running.grows else None
        if admitted is None or admitted.batch != running.batch:
            return
        going = [self.journal.row(entry.key) for entry in self._pace(step).held if not entry.ready]
        rows = [*going, *self.journal.peek(self.missing(step))]
        if not reserve(self.spent, sum(source.sampling(len(self.prompts[row].tokens)) for row in rows), False):
            return
        for key, row in self.journal.take(admitted.count):
            self.buffer.start((key,), running.batch, self.version)
            running.add(key, self.prompts[row])

    def _ended(self, running: Incoming) -> None:
        self.counts.update(running.counts)
        self._running = None


def _covers(found: Rollouts) -> tuple[int, list[int]]:
    return found.provenance.rank, [group.key for group in found.groups]


def _replaced(groups: Sequence[Group], last: Mapping[tuple[int, int], Trajectory]) -> list[Group]:
    """The groups, where samples, by group and index, end with other sequences."""
    return [
        replace(
            group,
            samples=tuple(
                replace(s, sequences=(*s.sequences[:-1], last.get((at, s.index), s.last))) for s in group.samples
            ),
        )
        for at, group in enumerate(groups)
    ]


def refuse_odd(columns: Sequence[Column], roles: Roles, algorithm: str) -> None:
    """Refuse a wide column that nobody can fill.

    Args:
        algorithm: whose columns they are, for the error.

    Raises:
        InputError: one without a width, a width of something else, or one of a role that learns.
    """
    for column in columns:
        if (column.need == "topk") != (column.wide > 0):
            raise InputError(
                f"{algorithm} needs the column {column.name} of {column.need}, got wide={column.wide}; topk is wide, "
                "by one number or more, and nothing else is"
            )
        if column.wide and column.role in roles.learners:
            raise InputError(
                f"{algorithm} needs the wide column {column.name} of a frozen role, got {column.role}, which learns; "
                "ask a role that never does"
            )


def hold(roles: Roles, batch: TokenBatch, column: Column) -> Future[TokenBatch]:
    """Ask for a wide column. The answer is the batch with the places of its rows, which stay with whoever computes."""
    kept = roles.frozen[column.role].nonblocking.map_stored(FrozenWorker.hold, batch, column.wide)
    return Future(lambda: _placed(batch, column, kept.result()), kept.done)


def _placed(batch: TokenBatch, column: Column, shards: Sequence[StoredShard[WideRows]]) -> TokenBatch:
    counts, places = batch.response_lengths.tolist(), dict[int, RowsHandle]()
    for shard in shards:
        for at, document in enumerate(batch.documents_of(shard.items)):
            places[document] = RowsHandle(shard.part, at, counts[document])
    held = tuple(places[document] for document in range(batch.documents))
    return batch.with_wide(column.name, WideColumn(column.wide, held))


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """Columns of some documents that are being computed."""

    batch: TokenBatch
    answers: Mapping[Column, Future[TokenBatch]]

    def filled(self) -> TokenBatch:
        """The documents with their columns, when all are there."""
        batch = self.batch
        for column, answer in self.answers.items():
            batch = _with(batch, column, [answer.result()])
        return batch

    def ready(self, columns: Sequence[Column]) -> bool:
        """Whether all of these are there."""
        return all(column in self.answers and self.answers[column].done() for column in columns)


def ask(roles: Roles, batch: TokenBatch, columns: Sequence[Column]) -> Asked:
    """Every column by its role, side by side where they have devices of their own."""
    answers: dict[Column, Future[TokenBatch]] = {}
    for column in columns:
        words = (batch, column.name, column.need)
        if column.wide:
            answers[column] = hold(roles, batch, column)
        elif column.role in roles.frozen:
            answers[column] = roles.frozen[column.role].nonblocking.map(FrozenWorker.fill, *words)
        else:
            answers[column] = roles.learners[column.role].nonblocking.map(TrainWorker.fill, *words)
    return Asked(batch, answers)


@final
@dataclass(slots=True)
class _Stretch:
    """Groups whose documents are computed together."""

    groups: list[ScoredGroup] = field(default_factory=list)
    tokens: int = 0
    asked: Asked | None = None

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(group.group.key for group in self.groups)


@final
class Columns:
    """What the steps of one stage require.

    Args:
        algorithm: says which columns.
        roles: fill them.
        lag: steps that sampling may be ahead; where it is, only frozen roles know what they will say.
        always: stretches are formed where no column is required, too.
    """

    def __init__(self, algorithm: Algorithm, roles: Roles, lag: int = 0, *, always: bool = False) -> None:
        self._algorithm, self._roles, self._lag, self._always = algorithm, roles, lag, always
        self._coming: dict[int, list[_Stretch]] = {}  # by step

    def offer(self, group: ScoredGroup, form: Form) -> None:
        """A group was kept, in the order of the data stream: what it makes whole is asked for, of those who can answer
        while others are sampled.

        Args:
            form: makes the documents of some groups, of each by itself.
        """
        early, size = self._early(group.step), self._size(group.step)
        if not ((early or self._always) and size):
            return
        stretch = _put(self._coming.setdefault(group.step, []), group, size)
        if stretch.tokens < size:
            return
        batch = form(stretch.groups)
        if batch is not None:
            stretch.asked = ask(self._roles, batch, early)

    def forget(self, step: int | None = None) -> None:
        """What was asked for of a step, or of all, is not trained on."""
        if step is None:
            self._coming.clear()
        else:
            self._coming.pop(step, None)

    def whole(self, step: int) -> list[Asked]:
        """The stretches of a step that are whole, in order, with what was asked for."""
        return [stretch.asked for stretch in self._coming.get(step, []) if stretch.asked]

    def fill(
        self, batch: TokenBatch, step: int, groups: Sequence[ScoredGroup] = (), form: Form | None = None
    ) -> TokenBatch:
        """The documents of a step with its columns; see `parts`."""
        parts = [part.filled() for part in self.parts(batch, step, groups, form)]
        return attached(batch, parts, self._algorithm.requires(step), type(self._algorithm).__name__)

    def parts(self, batch: TokenBatch, step: int, groups: Sequence[ScoredGroup], form: Form | None) -> list[Asked]:
        """The stretches of a step, all of whose columns are asked for.

        Args:
            batch: its documents.
            groups: that they were formed of, in the order of the data stream.
            form: makes the documents of some of them, of each by itself; None: nobody can.
        """
        columns, known, size = self._algorithm.requires(step), self._coming.pop(step, []), self._size(step)
        stretches: list[_Stretch] = []
        for group in groups if form and size else ():
            _put(stretches, group, size)
        asked = {stretch.keys: stretch.asked for stretch in known}
        if form is None or (not asked.keys() & {stretch.keys for stretch in stretches} and len(stretches) < 2):
            return [ask(self._roles, batch, columns)]
        parts = [self._part(stretch, asked.get(stretch.keys), columns, form) for stretch in stretches]
        return [part for part in parts if part]

    def _part(self, stretch: _Stretch, asked: Asked | None, columns: Sequence[Column], form: Form) -> Asked | None:
        """The rest of a stretch's columns, asked for besides."""
        batch = asked.batch if asked else form(stretch.groups)
        if batch is None:
            return None
        there = asked.answers if asked else {}
        rest = ask(self._roles, batch, [column for column in columns if column not in there])
        return Asked(batch, {**there, **rest.answers})

    def _early(self, step: int) -> list[Column]:
        """The columns that can be filled while the rollout works."""
        return [
            column
            for column in self._algorithm.requires(step)
            if self._roles.early(column.role) and (not self._lag or column.role in self._roles.frozen)
        ]

    def _size(self, step: int) -> int:
        """Tokens that fill a micro-batch on every rank of those who are asked; 0: nobody is."""
        ranks = [self._roles.group(column.role).ranks for column in self._algorithm.requires(step)]
        ranks += [self._roles.made.ranks] if self._always else []
        return self._roles.micro_batch_tokens * max(ranks, default=0)


def _put(stretches: list[_Stretch], group: ScoredGroup, size: int) -> _Stretch:
    """Into the last stretch, or into a new one where that is full."""
    if not stretches or stretches[-1].tokens >= size:
        stretches.append(_Stretch())
    stretches[-1].groups.append(group)
    stretches[-1].tokens += sum(map(len, group.answers))
    return stretches[-1]


def credited(algorithm: Algorithm, batch: TokenBatch) -> TokenBatch:
    """The batch with credit given; columns of tokens that were computed more precisely are kept in float32."""
    found = algorithm.credit(batch)
    wide = {name: column.float() for name, column in found.token_columns.items() if column.dtype == torch.float64}
    return found.with_columns(**wide) if wide else found


def attached(batch: TokenBatch, parts: Sequence[TokenBatch], columns: Sequence[Column], name: str) -> TokenBatch:
    """The columns of the parts, in the documents of the whole.

    Raises:
        InputError: those are others.
    """
    ids, lengths = [i for part in parts for i in part.sample_ids], [n for part in parts for n in part.lengths]
    if ids != list(batch.sample_ids) or lengths != list(batch.lengths):
        raise InputError(
            f"{name} says that it forms documents by group, so those of a step must be those of its groups one after "
            f"the other, got {len(batch.lengths)} documents and {len(lengths)}; set groupwise to False"
        )
    for column in columns:
        batch = _with(batch, column, parts)
    return batch


def _with(batch: TokenBatch, column: Column, parts: Sequence[TokenBatch]) -> TokenBatch:
    """A column of the parts, which are the batch's documents one after the other."""
    if column.wide:
        return batch.with_wide(column.name, joined([part.wide_columns for part in parts])[column.name])
    found = torch.cat([part.column(column.name) for part in parts])
    put = batch.with_document_columns if column.need == "scores" else batch.with_columns
    return put(**{column.name: found})
