"""Policy, buffer and journal of the loop under hundreds of schedules: nothing here knows tokens, weights or time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from admission_policies import Few
from hypothesis import given, settings, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.loop.recipe import Journal
from posttrain.pacing.admission import AdmissionPolicy, Buffer, InOrder, Pace


@dataclass
class World:
    """A stage whose calls end when a schedule says so; `refills` more rounds for what is dropped of a batch."""

    lag: int
    prompts: int
    steps: int
    refills: int
    most: int = 0  # prompts at once; 0: as many as a batch lacks
    buffer: Buffer[int] = field(init=False)
    step: int = 0  # trained next
    version: int = 0
    journal: Journal = field(default_factory=lambda: Journal(5, 7))
    rows: dict[int, int] = field(default_factory=dict)  # key → row of the data set
    running: list[int] = field(default_factory=list)
    batch_of: dict[int, int] = field(default_factory=dict)
    version_of: dict[int, int] = field(default_factory=dict)
    trained: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    begun: Counter[int] = field(default_factory=Counter)  # prompts of each batch

    def __post_init__(self) -> None:
        policy: AdmissionPolicy = Few(self.lag, self.most) if self.most else InOrder(self.lag)
        self.buffer = Buffer(policy, self.prompts, self.steps, self.refills)

    def start(self) -> bool:
        admitted = None if self.running else self.buffer.admit(self.step, self.version)
        if not admitted:
            return False
        self.begun[admitted.batch] += admitted.count
        batch = admitted.batch
        taken = self.journal.take(admitted.count)
        self.rows |= dict(taken)
        keys = [key for key, _ in taken]
        self.buffer.start(keys, batch, self.version)
        self.running = keys
        self.batch_of |= dict.fromkeys(keys, batch)
        self.version_of |= dict.fromkeys(keys, self.version)
        return True

    def end_one(self, drop: bool) -> bool:
        if not self.running:
            return False
        key = self.running.pop()
        if drop:
            self.buffer.drop(key)
            self.dropped.append(key)
        else:
            self.buffer.complete(key, key)
        return True

    def train(self) -> bool:
        keys = self.buffer.policy.select(self.buffer.pace(self.step, self.version)) if self.step < self.steps else None
        if keys is None:
            return False
        self.trained.append(self.buffer.take(keys, self.step))
        self.buffer.trained(self.step)
        self.step += 1
        return True

    def die(self) -> bool:
        """Between two steps, when nothing runs; another process goes on with what the checkpoint says."""
        if self.running:
            return False
        held, given_up, lost = self.buffer.ready(), self.buffer.pace(0, 0).given_up, self.buffer.lost
        self.journal = Journal(5, 7, self.journal.consumed)
        self.buffer = Buffer(self.buffer.policy, self.prompts, self.steps, self.refills)
        self.buffer.restore(held, given_up, self.journal.consumed - 1, lost)
        return True

    def publish(self) -> bool:
        """Only when nothing runs and nothing more may start: then a batch is of one version."""
        if self.version == self.step or self.running:
            return False
        if self.buffer.admit(self.step, self.version):
            return False
        self.version += 1
        return True


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    lag=st.integers(0, 4),
    prompts=st.integers(1, 4),
    steps=st.integers(1, 6),
    refills=st.integers(0, 2),
    most=st.integers(0, 3),
    choices=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=300),
)
def test_whatever_the_schedule_a_batch_is_of_one_version_and_nothing_is_lost(
    lag: int, prompts: int, steps: int, refills: int, most: int, choices: list[tuple[int, bool]]
) -> None:
    world = World(lag, prompts, steps, refills, most)
    schedule = iter(choices)
    for _ in range(10_000):
        if world.step == steps and not world.running:
            break
        which, drop = next(schedule, (0, False))
        if which == 4:
            world.die()
        actions = [world.start, lambda drop=drop: world.end_one(drop), world.train, world.publish]
        moved = any(actions[(which + turn) % 4]() for turn in range(4))
        assert moved, "a deadlock"
        assert len(world.buffer.pace(0, 0).held) <= InOrder(lag).capacity(prompts)
    assert len(world.trained) == steps
    taken = [key for batch in world.trained for key in batch]
    assert len(set(taken)) == len(taken), "nothing is trained twice"
    assert not set(taken) & set(world.dropped), "nor is what was dropped"
    left = {entry.key for entry, _ in world.buffer.ready()}
    started = set(range(world.journal.consumed))
    assert {*taken, *world.dropped, *left} == started == world.rows.keys(), "what was started is accounted for"
    undisturbed = Journal(5, 7).take(world.journal.consumed)
    assert world.rows == dict(undisturbed), "every row of the stream, in its place, once"
    assert all(count <= prompts * (1 + refills) for count in world.begun.values())
    for step, batch in enumerate(world.trained):
        assert {world.version_of[key] for key in batch} <= {max(0, step - lag)}, "exact lag"
        assert batch == sorted(batch)
        if refills and not world.dropped:
            assert len(batch) == prompts


@settings(max_examples=200, deadline=None)
@given(
    lag=st.integers(0, 3),
    prompts=st.integers(1, 5),
    refills=st.integers(0, 3),
    most=st.integers(1, 4),
    odd=st.sets(st.integers(0, 60)),
)
def test_how_many_start_at_once_changes_nothing(lag: int, prompts: int, refills: int, most: int, odd: set[int]) -> None:
    """What is dropped follows from the prompt alone; then the same prompts are trained, whoever starts them."""

    def trained(few: int) -> tuple[list[list[int]], list[int], int]:
        world = World(lag, prompts, 4, refills, few)
        while world.step < 4:
            if world.running:
                world.end_one(world.running[-1] in odd)
            elif not (world.start() or world.train() or world.publish()):
                raise AssertionError("a deadlock")
        return world.trained, sorted(world.dropped), world.journal.consumed

    assert trained(most) == trained(0)


def test_what_happens_twice_is_refused() -> None:
    buffer: Buffer[str] = Buffer(InOrder(), 2, 4)
    buffer.start([0, 1], 0, 0)
    with pytest.raises(InputError, match=r"prompt 1 was already started \(the newest is 1\)"):
        buffer.start([1], 0, 0)
    with pytest.raises(InputError, match=r"the buffer is full \(2 groups\), so prompt 2 has"):
        buffer.start([2], 0, 0)
    buffer.complete(0, "a")
    with pytest.raises(InputError, match="prompt 0 is not running"):
        buffer.complete(0, "a")
    with pytest.raises(InputError, match="prompt 1 is not ready to be trained"):
        buffer.take([1], 0)
    buffer.drop(1)
    with pytest.raises(InputError, match="prompt 1 is not running"):
        buffer.drop(1)
    assert buffer.take([0], 0) == ["a"]
    with pytest.raises(InputError, match="prompt 0 is not ready"):
        buffer.take([0], 0)


def test_a_batch_is_begun_when_the_one_before_is_whole() -> None:
    buffer: Buffer[str] = Buffer(InOrder(1), 2, 4, refills=1)
    buffer.start([0, 1], 0, 0)
    assert buffer.policy.admit(buffer.pace(0, 0)) == (0, 0), "what runs may be dropped, and is replaced first"
    buffer.complete(0, "a")
    buffer.drop(1)
    assert buffer.policy.admit(buffer.pace(0, 0)) == (0, 1)
    buffer.start([2], 0, 0)
    buffer.complete(2, "b")
    assert buffer.policy.admit(buffer.pace(0, 0)) == (1, 2)


def test_a_policy_that_asks_for_more_than_there_is_place_for_is_refused() -> None:
    class Greedy(Few):
        def admit(self, pace: Pace) -> tuple[int, int]:
            return batch, self.most

    batch = 0
    for most in (3, -1):
        with pytest.raises(InputError, match=rf"must admit the groups that a batch lacks \(2 of batch 0\), got {most}"):
            Buffer[str](Greedy(0, most), 2, 4).admit(0, 0)
    for batch in (1, 4, 9):
        with pytest.raises(InputError, match=rf"Greedy must admit prompts of batch 2 to 3, got batch {batch}"):
            Buffer[str](Greedy(1, 1), 2, 9).admit(2, 2)
    batch = 3
    with pytest.raises(InputError, match="Greedy must admit prompts of batch 2 to 2, got batch 3"):
        Buffer[str](Greedy(1, 1), 2, 3).admit(2, 2)


def test_a_policy_that_selects_another_batch_or_a_part_of_one_is_refused() -> None:
    buffer: Buffer[str] = Buffer(InOrder(1), 2, 4)
    buffer.start([0, 1], 0, 0)
    buffer.start([2, 3], 1, 0)
    for key in range(4):
        buffer.complete(key, "abcd"[key])
    with pytest.raises(
        InputError, match="InOrder must select prompts of batch 0, by versions of 0 and later, got prom"
    ):
        buffer.take([0, 2], 0)
    for keys in ([0], [], [0, 0], [0, 1, 1]):
        told = rf"InOrder must select each of the 2 groups of batch 0 once, got {len(keys)} keys"
        with pytest.raises(InputError, match=told):
            buffer.take(keys, 0)
    assert buffer.take([1, 0], 0) == ["b", "a"], "who was refused took nothing"
    with pytest.raises(InputError, match="got 0 keys, 0 of them different; 0 of 2 places are filled"):
        buffer.take([], 2)
    late: Buffer[str] = Buffer(InOrder(1), 2, 9)
    late.start([0, 1], 4, 2)
    for key in range(2):
        late.complete(key, "ab"[key])
    with pytest.raises(InputError, match="by versions of 3 and later, got prompt 0 of batch 4 by version 2"):
        late.take([0, 1], 4)


def test_a_policy_without_room_for_a_batch_is_refused() -> None:
    class Narrow(Few):
        def capacity(self, prompts: int) -> int:
            return prompts - 1

    with pytest.raises(InputError, match=r"Narrow must have room for a whole batch \(2 groups\), got a capacity of 1"):
        Buffer[str](Narrow(0, 1), 2, 4)


def test_what_waits_goes_on_from_where_it_was() -> None:
    buffer: Buffer[str] = Buffer(InOrder(1), 2, 4)
    buffer.start([0, 1], 1, 0)
    buffer.complete(0, "a")
    buffer.drop(1)
    again: Buffer[str] = Buffer(InOrder(1), 2, 4)
    again.restore(buffer.ready(), buffer.pace(0, 0).given_up, 1)
    assert again.pace(1, 1) == buffer.pace(1, 1)
    assert again.policy.select(again.pace(1, 1)) == [0]
    with pytest.raises(InputError, match="start each prompt only once"):
        again.start([1], 2, 1)
