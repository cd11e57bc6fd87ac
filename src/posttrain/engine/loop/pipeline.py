"""The sampling pipeline: sampling ahead of training, the rollout call, scores, and columns that an algorithm requires.

Prompts that the admission policy admits are sampled, scored, and kept or replaced:

::

    admit ──▶ rollout (other processes continue during the training) ───▶ scores ──▶ keep ──▶ buffer
      ▲                                                                        │ drop: its place is free again
      └────────────────────────────────────────────────────────────────────────┘

One call of the rollout runs at a time. Its groups are kept or dropped in the order of the data stream, and the
replacement of a dropped group joins the call immediately. The result is therefore a function of the seed and the
policies, and does not depend on the duration of a call.

The groups of a running call arrive as they end, and are scored while other groups are sampled:

::

    rollout ─▶ groups, in any order ─▶ stretches of the stream, each when its last group arrives ─▶ groups, in order

In samples with several turns, an environment observes each response as soon as it has ended, and the rank that has the
sample continues it: no sample waits for another one.

The data stream, never the clock, decides which groups are scored together and in which order they are passed on. The
stretch that ends first is scored first: a long response delays only its own stretch.

Columns are filled in stretches of a step's kept groups while other groups are still sampled. Such a stretch has as many
kept groups, in the order of the data stream, as fill a micro-batch on every rank of the computing role. The samples,
never the speed of a process, decide which documents are computed together, and one process computes the same results as
several processes. Roles in the rollout's pool compute after the rollout has ended.

A role stores the wide columns that it computes for a batch, and the batch gets handles to their rows.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import final

import torch

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Note, Span
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import StoredShard
from posttrain.engine.groups.worker_group import Feed, Future
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.recipe import Held, Journal, read_held, write_held
from posttrain.engine.recipes.algorithm import Algorithm, Column, RolloutAlgorithm, ScoredGroup
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.port import PromptBatch, Reply, Rollouts, SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Group, Prompt
from posttrain.engine.scores import Environment, Observations, Scorer, Stretch, may_fail
from posttrain.engine.trace import Trace
from posttrain.engine.wide import RowsHandle, WideColumn, WideRows, joined
from posttrain.pacing.admission import Buffer, Pace
from posttrain.sandbox.port import Score

_PATIENCE = 60.0  # seconds between two reads of the feed, which has its own deadline
_LOOK = 0.02  # seconds between two reads when scores or gradients may arrive
Ask = Callable[[int, int, bool], bool]  # (spent tokens, further tokens, raise if over the budget)
Form = Callable[[Sequence[ScoredGroup]], TokenBatch | None]


@final
@dataclass(slots=True)
class Incoming:
    """The groups of one call of the rollout that are not in the buffer yet.

    Args:
        batch: the step that trains on the groups.
        keys: positions of the call's prompts, in the order of the data stream.
        prompts: the prompts, parallel to `keys`.
        feed: the call.
        samples: number of samples per prompt.
        scorer: scores the groups; None: no scores.
        together: number of groups that are scored in one call.
        early: whether groups are scored while the rollout works; otherwise they are scored after the rollout has ended.
        grows: whether prompts may be added during the call, because groups are kept or dropped while other groups are
            sampled.
        observations: the environment's, if samples have several turns.
        failed: called after the call if the environment failed for some samples.
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
    observations: Observations | None = None
    failed: Callable[[str, int, int, Trace], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)  # from the rollout's engine, see `RolloutEngine`
    _begun: tuple[float, float] = field(default_factory=lambda: (time.time(), time.perf_counter()))
    _came: dict[int, Group] = field(default_factory=dict)
    _sampled: bool = False
    _stretches: list[range] = field(init=False)  # ranges of indices into `keys`
    _stretch: dict[int, int] = field(init=False)  # key → stretch
    _place: dict[int, int] = field(init=False)  # key → its index in `keys`
    _lacking: Counter[int] = field(init=False)  # groups that have not arrived yet, by stretch
    _told: int = 0  # number of keys whose sampling a span covers
    _next: int = 0  # the next stretch to pass on
    _whole: list[int] = field(default_factory=list)  # stretches ready for the scorer
    _scoring: dict[int, tuple[list[ScoredGroup], Future[Sequence[Score]]]] = field(default_factory=dict)
    _taken: int = 0
    _first: int = field(init=False)  # number of keys at the start
    _waits: tuple[float, float] | None = None  # start of the wait in which only scores were missing

    def __post_init__(self) -> None:
        self._first = count = len(self.keys)
        size = self.together
        self._stretches = [range(first, min(first + size, count)) for first in range(0, count, size)]
        self._place = {key: place for place, key in enumerate(self.keys)}
        self._stretch = {key: place // size for key, place in self._place.items()}
        self._lacking = Counter(self._stretch.values())

    def add(self, key: int, prompt: Prompt) -> None:
        """Sample one more prompt, in the place of a dropped group; the new group forms a separate stretch."""
        if self._sampled:
            self._sampled, self._begun, self._waits = False, (time.time(), time.perf_counter()), None
        self._stretch[key], self._lacking[len(self._stretches)] = len(self._stretches), 1
        self._stretches.append(range(len(self.keys), len(self.keys) + 1))
        self._place[key] = len(self.keys)
        self.keys.append(key)
        self.prompts.append(prompt)
        self.feed.add(PromptBatch((tuple(prompt.tokens),), (key,)))

    @property
    def over(self) -> bool:
        """Whether every group was taken, and the rollout has ended."""
        return self._sampled and self._taken == len(self.keys)

    def take(self, trace: Trace, *, busy: bool = False) -> list[ScoredGroup]:
        """Return the groups scored since the last call, in the order of the data stream.

        The call waits for the rollout and, after the rollout has ended, for scores.

        Args:
            busy: whether other work is in progress that must be polled soon.

        Raises:
            Exception: raised by the rollout, an environment or the reward.
        """
        ended = self._sampled
        if not ended:
            self._receive(trace, _LOOK if busy or self._next in self._scoring else _PATIENCE)
        self._give()
        return self._scored(trace, wait=ended)

    def look(self, trace: Trace, seconds: float) -> tuple[list[ScoredGroup], bool]:
        """Like `take`, without waiting for a score; also return whether the rollout continues."""
        if not self._sampled:
            self._receive(trace, seconds)
        if self.early:  # otherwise the scorer is in the rollout's pool, and waits until the rollout has ended
            self._give()
        return self._scored(trace, wait=False), not self._sampled

    def _receive(self, trace: Trace, seconds: float) -> None:
        seen = self.observations
        try:
            came = self.feed.take(min(seconds, _LOOK) if seen and seen.running else seconds)
            if seen:
                self._reply(seen, came, seconds)
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
        if seen and seen.begun:
            trace.sink(seen.span(trace.step, self.batch))
            self.observations = seen.fresh()
        if seen and self.failed and (failures := seen.failures):
            self.failed(*failures, trace)

    def _reply(self, seen: Observations, came: Sequence[Rollouts], seconds: float) -> None:
        """Begin the observations of new responses, and send those that have ended to the ranks of their samples."""
        for found in came:
            for sample in found.waiting:
                seen.begin(self.prompts[self._place[sample.key]], sample)
        if self.feed.resting:
            seen.wait(seconds)
        replies: dict[int, list[Reply]] = {}
        for reply in seen.replies():
            if (rank := self.feed.rank_of(reply.key)) is None:
                seen.forget(reply)
            else:
                replies.setdefault(rank, []).append(reply)
        if self.scorer:
            seen.refuse(may_fail(self.scorer.errors_max, len(self.keys) * self.samples))
        for rank, some in replies.items():
            self.feed.send(rank, PromptBatch((), (), tuple(some)))

    def _tell_failures(self, trace: Trace) -> None:
        """Report failed scores of stretches that will not be passed on."""
        for _, (_, answer) in sorted(self._scoring.items()):
            if answer.done():
                try:
                    answer.result()
                except Exception as error:  # a different error already ends the call
                    line = str(error).partition("\n")[0]
                    trace.sink(Note(f"before the rollout ended, scoring had failed: {line}", time.time(), "warning"))
                    return

    def _give(self) -> None:
        """Pass complete stretches to the scorer."""
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
        total = max(self._first, places.stop)  # each added group is included when it is scored
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
        if found and self._taken == len(self.keys) and self.scorer:  # the time spent on scoring after the rollout
            started, begin = self._waits or (time.time(), time.perf_counter())
            trace.sink(Span("reward", trace.step, started, time.perf_counter() - begin, {"batch": self.batch}))
        return found


@final
@dataclass(frozen=True, slots=True)
class _BufferState:
    buffer: Buffer[ScoredGroup]
    dropped: dict[int, list[tuple[ScoredGroup, str]]]


@final
@dataclass
class Collector:
    """Keeps a stage's buffer as full as the admission policy allows.

    Args:
        algorithm: decides how much is sampled, and which groups are kept.
        roles: the roles, with a rollout.
        prompts: every row of the data set.
        scorer: scores responses; None: no scores.
        seed: the stage's seed.
        journal: the position in the data.
        buffer: the groups that wait for training.
        environment: returns the observations between two responses; None: one response per sample.
        kept: called with every kept group, in the order of the data stream.
        watch: polls the computations of a step's kept groups; returns whether some of them are in progress.
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
    version: int = 0  # version of the sampling policy: the number of steps trained
    spent: int = 0  # tokens spent since the last `mark`
    counts: Counter[str] = field(default_factory=Counter)  # counts of the rollout's engine since the last `mark`
    dropped: dict[int, list[tuple[ScoredGroup, str]]] = field(default_factory=dict)  # by batch, with reasons
    _running: Incoming | None = None
    _marked: _BufferState | None = None
    _taken: list[ScoredGroup] = field(default_factory=list)  # groups that the current step trains on
    _told: bool = False  # whether a failed environment was reported
    _asked: tuple[int, Ask] = (0, lambda spent, more, refuse: True)  # the latest step, and its budget check

    def collected(self, step: int, trace: Trace, reserve: Ask) -> list[ScoredGroup]:
        """Return a step's groups in the order of the data stream, after sampling of later groups has begun.

        Raises:
            BudgetExceededError: dropped groups cannot be replaced.
            InputError: the policy's weights were not published.
        """
        self._enter(step)
        while (keys := self.buffer.policy.select(self._pace(step))) is None:
            self._begin(step, trace, reserve)
            if self._running is not None:
                self._settle(trace, self._running)
            elif self.buffer.policy.select(self._pace(step)) is None:
                raise InputError(
                    f"policy version {self.version} is too old to sample batch {step}; publish newer weights"
                )
        self._taken = groups = self.buffer.take(keys, step)
        self.buffer.trained(step)
        self._begin(step + 1, trace, reserve)
        return groups

    def finish(self, step: int, trace: Trace, reserve: Ask) -> None:
        """Wait until all groups that this version of the policy may sample after `step` are sampled."""
        self._begin(step + 1, trace, reserve)  # the running call may have ended
        while self._running is not None:
            self._settle(trace, self._running)
            self._begin(step + 1, trace, reserve)
        self._taken = []

    @cached_property
    def reads_again(self) -> bool:
        """Whether a later turn of a sample reads all earlier tokens again, because some engine keeps no sessions."""
        return self.algorithm.source.turns > 1 and not all(self.roles.sampler.each(RolloutWorker.holds_sessions))

    def price(self, row: int) -> int:
        """Return the maximum tokens that the samples of a row's prompt cost."""
        return self.algorithm.source.sampling(len(self.prompts[row].tokens), again=self.reads_again)

    def missing(self, step: int) -> int:
        """Return the number of prompts still to sample until the end of a step, without replacements."""
        self._enter(step)
        pace = self._pace(step)
        ahead = range(step, min(pace.version + self.buffer.policy.lag + 1, pace.steps))
        return sum(pace.prompts - pace.filled(batch) for batch in ahead)

    def waiting(self, step: int) -> list[ScoredGroup]:
        """Return the groups of a step that are ready or already taken."""
        return [*self._taken, *(group for entry, group in self.buffer.ready() if entry.batch == step)]

    def mark(self) -> None:
        """Mark the beginning of a step."""
        self.spent, self.counts = 0, Counter()
        dropped = {batch: list(found) for batch, found in self.dropped.items()}
        self._marked = _BufferState(self.buffer.copied(), dropped)

    def rewind(self) -> None:
        """Drop all groups sampled since `mark`; no call may be running."""
        assert self._marked is not None
        self._taken = []
        self.buffer, self.dropped = self._marked.buffer, self._marked.dropped

    def lacking(self, step: int) -> int:
        """Return how many more prompts a step may train on."""
        if self._taken:
            return 0
        pace = self._pace(step)
        given_up = pace.given_up.count(step)
        return pace.prompts - given_up - sum(entry.batch == step and entry.ready for entry in pace.held)

    def save(self, path: Path) -> Mapping[str, str]:
        """Write the waiting groups; return a map from file name to digest.

        No call may be running. With lag 0 no group waits.
        """
        if not self.buffer.policy.lag:
            return {}
        held = [Held(entry.key, entry.batch, entry.version, group) for entry, group in self.buffer.ready()]
        held += [Held(g.group.key, batch, 0, g, why) for batch, found in self.dropped.items() for g, why in found]
        return write_held(path, held, self.buffer.pace(0, 0).given_up, self.buffer.lost)

    def restore(self, path: Path) -> None:
        """Restore the groups of a checkpoint.

        Raises:
            IntegrityError: the checkpoint is from a stage that sampled ahead, but does not contain the waiting groups.
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
        """Set the sampler's version; with lag 0 the sampler has the weights of the last update."""
        if not self.buffer.policy.lag:
            self.version = step

    def _pace(self, step: int) -> Pace:
        return self.buffer.pace(step, self.version)

    def _begin(self, step: int, trace: Trace, reserve: Ask) -> None:
        """Start admitted prompts, unless a call is running."""
        self._asked = step, reserve
        if self._running is None and (admitted := self.buffer.admit(step, self.version)):
            if admitted.again:
                rows = self.journal.peek(self.missing(step))  # this call's prompts, and later prompts
                more = sum(map(self.price, rows))
                if not reserve(self.spent, more, True):
                    return  # these groups are of the next step, which is rejected before it begins
            self._running = self._sampling(admitted.batch, admitted.count)

    def _sampling(self, batch: int, count: int) -> Incoming:
        source, taken, scorer = self.algorithm.source, self.journal.take(count), self.scorer
        keys = tuple(position for position, _ in taken)
        chosen = tuple(self.prompts[row] for _, row in taken)
        self.buffer.start(keys, batch, self.version)
        asked = PromptBatch(tuple(tuple(prompt.tokens) for prompt in chosen), keys)
        longest = max(source.document(len(prompt)) for prompt in asked.tokens)
        early = scorer is None or scorer.early
        seen = Observations(self.environment) if self.environment and source.turns > 1 else None
        return Incoming(
            batch,
            list(keys),
            list(chosen),
            self.roles.sampler.feed(_covers, RolloutWorker.feed, asked, self._drawn(), source.samples, source.turns),
            source.samples,
            scorer,
            together=scorer.groups(count, longest * source.samples) if scorer else 1,
            early=early,
            grows=early and source.refills > 0,
            observations=seen,
            failed=self._tell_failed,
        )

    def _drawn(self) -> SamplingParams:
        source, seed = self.algorithm.source, derive_seed(self.seed, "rollout")  # positions in the stream never repeat
        most, warmth = source.max_tokens, source.temperature
        return SamplingParams(max_new_tokens=most, temperature=warmth, seed=seed, stop=source.stop)

    def _tell_failed(self, line: str, failed: int, observed: int, trace: Trace) -> None:
        """Report a failed environment once, if no scorer reports it.

        Raises:
            InputError: the environment failed for all samples, and no scorer counts failures.
        """
        many = f"{line}; {failed} of {observed} samples end there"
        if self.scorer is None and failed == observed:
            raise InputError(many)
        if self.scorer is None and not self._told:
            self._told = True
            line = f"{many} and are not trained on; later failures are counted in turns/errors"
            trace.sink(Note(line, time.time(), "warning"))

    def _settle(self, trace: Trace, running: Incoming) -> None:
        """Wait for the running call, and keep or drop its groups."""
        busy = False
        while not running.over:
            self._keep(running, running.take(trace, busy=busy))
            busy = self.watch(running.batch)
        self._ended(running)
        if self.scorer and not self.scorer.early:
            self.roles.rest()

    def look(self, trace: Trace, seconds: float) -> bool:
        """Take arrived groups, in at most `seconds`; return whether more will arrive."""
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
            self.spent += group.tokens + (group.read_again if self.reads_again else 0)
            verdict = self.algorithm.keep(group)
            if verdict is None:
                self.buffer.complete(group.group.key, group)
                self.kept(group)
            else:
                self.buffer.drop(group.group.key)
                self.dropped.setdefault(running.batch, []).append((group, verdict.reason))
                self._replace(running)

    def _replace(self, running: Incoming) -> None:
        """Sample the replacement of a dropped group while other groups are in progress.

        If the budget may be too small for a replacement, the replacement waits until the cost of the other groups is
        known.
        """
        step, reserve = self._asked
        admitted = self.buffer.admit(step, self.version) if running.grows else None
        if admitted is None or admitted.batch != running.batch:
            return
        going = [self.journal.row(entry.key) for entry in self._pace(step).held if not entry.ready]
        rows = [*going, *self.journal.peek(self.missing(step))]
        if not reserve(self.spent, sum(map(self.price, rows)), False):
            return
        for key, row in self.journal.take(admitted.count):
            self.buffer.start((key,), running.batch, self.version)
            running.add(key, self.prompts[row])

    def _ended(self, running: Incoming) -> None:
        self.counts.update(running.counts)
        self._running = None


def _covers(found: Rollouts) -> tuple[int, list[int], bool]:
    return found.provenance.rank, [group.key for group in found.groups], found.idle


def refuse_odd(columns: Sequence[Column], roles: Roles, algorithm: str) -> None:
    """Raise for a wide column that no role can fill.

    Args:
        algorithm: name of the algorithm that requires the columns, for the error.

    Raises:
        InputError: a top-k column has no width; a column other than a top-k column has a width; a wide column is from a
            role that learns.
    """
    for column in columns:
        if (column.need == "topk") != (column.wide > 0):
            raise InputError(
                f"{algorithm} needs the column {column.name} of {column.need}, got wide={column.wide}; set wide to 1 "
                "or more for topk, and to 0 for any other column"
            )
        if column.wide and column.role in roles.learners:
            raise InputError(
                f"{algorithm} needs the wide column {column.name} from a frozen role, got {column.role}, which is "
                "trained; request it from a role that is not trained"
            )


def hold(roles: Roles, batch: TokenBatch, column: Column) -> Future[TokenBatch]:
    """Request a wide column. The answer is the batch with handles to the column's rows, which stay with the role."""
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
    """Documents whose columns are being computed."""

    batch: TokenBatch
    answers: Mapping[Column, Future[TokenBatch]]

    def filled(self) -> TokenBatch:
        """Wait for all columns; return the documents with their columns."""
        batch = self.batch
        for column, answer in self.answers.items():
            batch = _with(batch, column, [answer.result()])
        return batch

    def ready(self, columns: Sequence[Column]) -> bool:
        """Return whether all of these columns are available."""
        return all(column in self.answers and self.answers[column].done() for column in columns)


def ask(roles: Roles, batch: TokenBatch, columns: Sequence[Column]) -> Asked:
    """Request every column from its role, concurrently where roles have separate devices."""
    answers: dict[Column, Future[TokenBatch]] = {}
    for column in columns:
        words = (batch, column.name, column.need)
        if column.wide:
            answers[column] = hold(roles, batch, column)
        elif column.role in roles.frozen:
            answers[column] = roles.frozen[column.role].nonblocking.map(FrozenWorker.fill, *words)
        elif column.role in roles.recalled:
            answers[column] = roles.recalled[column.role].nonblocking.map(TrainWorker.recall, *words)
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
    """The columns that the steps of one stage require.

    Args:
        algorithm: requires the columns.
        roles: the roles that fill the columns.
        lag: number of steps by which sampling may be ahead; with a lag, only frozen roles can predict early.
        always: form stretches even if no column is required.
    """

    def __init__(self, algorithm: Algorithm, roles: Roles, lag: int = 0, *, always: bool = False) -> None:
        self._algorithm, self._roles, self._lag, self._always = algorithm, roles, lag, always
        self._coming: dict[int, list[_Stretch]] = {}  # by step

    def offer(self, group: ScoredGroup, form: Form) -> None:
        """Add a kept group, in the order of the data stream.

        If the group completes a stretch, request the stretch's columns from roles that can answer during sampling.

        Args:
            form: forms the documents of given groups, each group separately.
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
        """Drop the requests of a step, or of all steps, because their groups will not be trained on."""
        if step is None:
            self._coming.clear()
        else:
            self._coming.pop(step, None)

    def whole(self, step: int) -> list[Asked]:
        """Return the complete stretches of a step, in order, with the columns requested for them."""
        return [stretch.asked for stretch in self._coming.get(step, []) if stretch.asked]

    def fill(
        self, batch: TokenBatch, step: int, groups: Sequence[ScoredGroup] = (), form: Form | None = None
    ) -> TokenBatch:
        """Return the documents of a step with its columns; see `parts`."""
        parts = [part.filled() for part in self.parts(batch, step, groups, form)]
        return attached(batch, parts, self._algorithm.requires(step), type(self._algorithm).__name__)

    def parts(self, batch: TokenBatch, step: int, groups: Sequence[ScoredGroup], form: Form | None) -> list[Asked]:
        """Return the stretches of a step, with all their columns requested.

        Args:
            batch: the step's documents.
            groups: the groups that the documents were formed from, in the order of the data stream.
            form: forms the documents of given groups, each group separately; None: the algorithm cannot do this.
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
        """Request the remaining columns of a stretch."""
        batch = asked.batch if asked else form(stretch.groups)
        if batch is None:
            return None
        there = asked.answers if asked else {}
        rest = ask(self._roles, batch, [column for column in columns if column not in there])
        return Asked(batch, {**there, **rest.answers})

    def _early(self, step: int) -> list[Column]:
        """Return the columns that can be filled while the rollout works."""
        return [
            column
            for column in self._algorithm.requires(step)
            if self._roles.early(column.role) and (not self._lag or column.role in self._roles.frozen)
        ]

    def _size(self, step: int) -> int:
        """Return the tokens that fill a micro-batch on every rank of the roles that fill columns; 0: no such role."""
        ranks = [self._roles.group(column.role).ranks for column in self._algorithm.requires(step)]
        ranks += [self._roles.made.ranks] if self._always else []
        return self._roles.micro_batch_tokens * max(ranks, default=0)


def _put(stretches: list[_Stretch], group: ScoredGroup, size: int) -> _Stretch:
    """Add a group to the last stretch, or to a new stretch if the last stretch is full."""
    if not stretches or stretches[-1].tokens >= size:
        stretches.append(_Stretch())
    stretches[-1].groups.append(group)
    stretches[-1].tokens += sum(map(len, group.answers))
    return stretches[-1]


def credited(algorithm: Algorithm, batch: TokenBatch) -> TokenBatch:
    """Return the batch with credit; token columns computed in float64 are stored in float32."""
    found = algorithm.credit(batch)
    wide = {name: column.float() for name, column in found.token_columns.items() if column.dtype == torch.float64}
    return found.with_columns(**wide) if wide else found


def attached(batch: TokenBatch, parts: Sequence[TokenBatch], columns: Sequence[Column], name: str) -> TokenBatch:
    """Return the whole batch with the columns of its parts.

    Raises:
        InputError: the parts have different documents.
    """
    ids, lengths = [i for part in parts for i in part.sample_ids], [n for part in parts for n in part.lengths]
    if ids != list(batch.sample_ids) or lengths != list(batch.lengths):
        raise InputError(
            f"{name} declares groupwise documents, so a step must have the documents of its groups in order, but the "
            f"step's {len(batch.lengths)} documents differ from the {len(lengths)} of its groups; set groupwise to "
            "False"
        )
    for column in columns:
        batch = _with(batch, column, parts)
    return batch


def _with(batch: TokenBatch, column: Column, parts: Sequence[TokenBatch]) -> TokenBatch:
    """Add a column from the parts, which are the batch's documents in order."""
    if column.wide:
        return batch.with_wide(column.name, joined([part.wide_columns for part in parts])[column.name])
    found = torch.cat([part.column(column.name) for part in parts])
    put = batch.with_document_columns if column.need == "scores" else batch.with_columns
    return put(**{column.name: found})
