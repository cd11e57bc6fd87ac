"""One contract for every back-end of worker groups: in this process, and in Ray actors on this machine."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import group_workers as gw
import psutil
import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.domain.errors import DeadlineError, InfrastructureError, InputError, PosttrainError, raised_by
from posttrain.domain.jobs import Fact, Span
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Backend, Recorder, RemoteTraceback, WorkerError, WorkerLostError
from posttrain.engine.groups.worker_group import Feed, ResourcePool

Opening = Callable[..., ResourcePool]
T = TypeVar("T")

BOTH = pytest.mark.parametrize("kind", ["inline", pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
RAY = pytest.mark.parametrize("kind", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[], object]]:
    """The module's one Ray cluster, opened by the first test that needs it."""
    with ExitStack() as stack:
        opened: list[object] = []

        def cluster() -> object:
            if not opened:
                from posttrain.engine.groups.cluster import open_cluster

                opened.append(stack.enter_context(open_cluster(cpus=8, store_bytes=200_000_000)))
            return opened[0]

        yield cluster


@pytest.fixture(scope="module")
def standing(clusters: Callable[[], object]) -> Iterator[dict[str, Backend]]:
    """Pools that no test breaks live as long as the module: processes take a second each."""
    backends: dict[str, Backend] = {}
    yield backends
    for backend in backends.values():
        backend.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _backend(kind: str, clusters: Callable[[], object], ranks: int, pool: str) -> Backend:
    if kind == "inline":
        return InlineBackend(ranks, pool=pool)
    from posttrain.engine.groups.cluster import Cluster

    cluster = clusters()
    assert isinstance(cluster, Cluster)
    return cluster.backend(pool, ranks, cpus=1, start_seconds=300, collective_seconds=300)


@pytest.fixture
def pools(kind: str, clusters: Callable[[], object]) -> Iterator[Opening]:
    """Pools of the test's own, closed after it."""
    with ExitStack() as stack:

        def open_pool(ranks: int = 2, pool: str = "main", recorder: Recorder | None = None) -> ResourcePool:
            return stack.enter_context(ResourcePool(_backend(kind, clusters, ranks, pool), recorder))

        yield open_pool


@pytest.fixture
def shared(kind: str, clusters: Callable[[], object], standing: dict[str, Backend]) -> Callable[..., ResourcePool]:
    """The standing pool of two ranks; roles started in it replace those of earlier tests."""

    def pool(recorder: Recorder | None = None, ranks: int = 2) -> ResourcePool:
        name = f"{kind}-{ranks}"
        if name not in standing:
            standing[name] = _backend(kind, clusters, ranks, name)
        return ResourcePool(standing[name], recorder)

    return pool


LENGTHS = ([], [5], [3, 9], [4, 4, 4, 4, 4], [100, 1, 1, 1, 50, 2, 9])


@BOTH
@pytest.mark.parametrize("ranks", [1, 2])
def test_map_splits_and_gathers_in_order(shared: Opening, ranks: int) -> None:
    policy = shared(ranks=ranks).start("policy", gw.Policy, 100)
    for lengths in LENGTHS:
        got = policy.map(gw.Policy.shifted, gw.Items.of(lengths), by=1000)
        assert got == gw.Items(tuple(lengths), tuple(1100 + i for i in range(len(lengths))))


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 7))
def test_map_on_any_batch_and_any_number_of_ranks(lengths: list[int], ranks: int) -> None:
    with ResourcePool(InlineBackend(ranks)) as pool:
        policy = pool.start("policy", gw.Policy)
        assert policy.map(gw.Policy.shifted, gw.Items.of(lengths)) == gw.Items.of(lengths)
        sizes = policy.map(gw.Policy.shard_sizes, gw.Items.of(lengths)).values
        assert not lengths or len(lengths) >= ranks or set(sizes) == {1}


@BOTH
def test_a_token_batch_comes_back_whole(shared: Opening) -> None:
    documents = [Document((1,) * n, (2, 3), (-0.5, -1.0)) for n in (3, 8, 1)]
    batch = TokenBatch.pack(documents, sample_ids=["0.0.0", "0.0.1", "0.0.2"])
    policy = shared().start("policy", gw.Policy)
    got = policy.map(gw.of_this_batch, batch)
    assert got.lengths == batch.lengths
    assert got.sample_ids == batch.sample_ids
    assert torch.equal(got.tokens, batch.tokens)
    assert torch.equal(got.column("behaviour_logprobs"), batch.column("behaviour_logprobs") + 1)


def answers(found: tuple[int, int]) -> tuple[int, list[int], bool]:
    """By which rank a value is, and of which item."""
    rank, value = found
    return rank, [value % 100], False


def drained(feed: Feed[gw.Items, T], found: list[T] | None = None) -> list[T]:
    found = [] if found is None else found
    while not feed.ended:
        found += feed.take(0.5)
    return found


@BOTH
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_feed_gives_what_every_rank_yields(shared: Opening, ranks: int) -> None:
    facts: list[Fact] = []
    policy = shared(Recorder(facts.append, step=4), ranks=ranks).start("policy", gw.Policy, 100)
    for lengths in LENGTHS:
        facts.clear()
        feed = policy.feed(answers, gw.Policy.each_value, gw.Items.of(lengths))
        found = drained(feed)
        assert sorted(value for _, value in found) == [100 + i for i in range(len(lengths))]
        assert {rank for rank, _ in found} == set(range(min(ranks, len(lengths))))
        assert feed.take(60.0) == [], "it has ended"
        (span,) = [fact for fact in facts if isinstance(fact, Span)]
        assert (span.name, span.step) == ("policy.each_value", 4)
        assert [rank for rank, _, _ in span.attributes["ranks"]] == list(range(ranks))


@BOTH
def test_a_feed_raises_what_a_rank_raised_after_what_it_yielded(shared: Opening) -> None:
    policy = shared().start("policy", gw.Policy)
    feed, found = policy.feed(answers, gw.Policy.each_value, gw.Items.of([9] * 8), fail_after=2), list[object]()
    with pytest.raises(InputError, match="value must be small") as raised:
        drained(feed, found)
    assert "policy rank" in raised_by(raised.value)
    assert "in each_value" in raised_by(raised.value)
    assert len(found) >= 2
    assert policy.each(gw.Policy.noted, "on") == [["on"]] * 2, "others may go on"


@RAY
def test_a_feed_goes_on_while_nobody_takes_and_can_be_looked_at(pools: Opening, tmp_path: Path) -> None:
    policy = pools(1).start("policy", gw.Policy)
    feed = policy.feed(answers, gw.Policy.waits, gw.Items.of([1, 1]), tmp_path / "fence")
    assert feed.take(60.0) == [(0, 0)]
    assert feed.take(0.0) == [], "nothing there yet, and nobody waits"
    (tmp_path / "fence").touch()
    assert drained(feed) == [(0, 1)]


@RAY
def test_a_feed_of_a_process_that_is_gone_says_so(pools: Opening) -> None:
    policy = pools(2).start("policy", gw.Policy)
    feed = policy.feed(answers, gw.Policy.vanish_after, gw.Items.of([1] * 4), 1)
    line = (
        r"policy rank \d was lost: process \d+ on .* ended during vanish_after; its pool is given up, because its ranks"
    )
    with pytest.raises(WorkerLostError, match=line):
        drained(feed)
    with pytest.raises(WorkerLostError, match="given up"):
        policy.each(gw.Policy.noted, "on")


@RAY
def test_a_feed_that_says_nothing_has_a_deadline(pools: Opening, tmp_path: Path) -> None:
    policy = pools(1).start("policy", gw.Policy).within(0.2)
    feed = policy.feed(answers, gw.Policy.waits, gw.Items.of([1, 1]), tmp_path / "fence")
    with pytest.raises(DeadlineError, match=r"policy must answer waits within 0.2 seconds, but did not answer for"):
        drained(feed)
    with pytest.raises(WorkerLostError, match="given up, policy did not answer waits"):
        policy.each(gw.Policy.noted, "on")


@BOTH
def test_each_and_one(shared: Opening) -> None:
    policy = shared().start("policy", gw.Policy)
    assert [rank for _, rank, _, _ in policy.each(gw.Policy.identity)] == [0, 1]
    assert policy.one(gw.Policy.identity)[1] == 0
    assert policy.each(gw.of_this_module) == ["Policy", "Policy"]


@BOTH
def test_calls_of_a_rank_run_in_the_order_they_were_made(shared: Opening) -> None:
    policy = shared().start("policy", gw.Policy)
    futures = [policy.nonblocking.each(gw.Policy.noted, word) for word in "abc"]
    assert futures[2].result() == [["a", "b", "c"]] * 2
    assert futures[2].done()
    assert futures[0].result() == [["a"]] * 2
    assert futures[0].result() == [["a"]] * 2


@BOTH
def test_roles_share_a_process_and_lend_without_sharing_a_class(shared: Opening) -> None:
    pool = shared()
    policy = pool.start("policy", gw.Policy)
    engine = pool.start("rollout", gw.Engine)
    assert [pid for pid, *_ in policy.each(gw.Policy.identity)] == [pid for pid, _ in engine.each(gw.Engine.identity)]
    assert {name for _, name in engine.each(gw.Engine.identity)} == {"Engine"}
    assert engine.each(gw.Engine.borrowed) == [41, 42]


@BOTH
def test_a_failure_is_the_workers_own(shared: Opening) -> None:
    policy = shared().start("policy", gw.Policy)
    with pytest.raises(InputError, match=r"shape must be \[4\], got \[1\]") as caught:
        policy.each(gw.Policy.fail, [1])
    assert "policy rank 1" in raised_by(caught.value)
    assert "in fail" in raised_by(caught.value)
    printed = "".join(traceback.format_exception(caught.value))
    assert "group_workers.py" in printed
    assert "raise InputError" in printed
    assert policy.each(gw.Policy.fail, []) == [0, 1], "a failure that everybody survived breaks nothing"


@BOTH
def test_a_failing_constructor_names_role_and_rank(shared: Opening) -> None:
    with pytest.raises(InputError, match="offset must suit rank 1") as caught:
        shared().start("critic", gw.Policy, 7, fail_on=1)
    assert "critic rank 1, in __init__" in raised_by(caught.value)


@BOTH
def test_the_deadline_of_a_call(pools: Opening) -> None:
    policy = pools(2, "slow").start("policy", gw.Policy)
    assert policy.within(30).each(gw.Policy.sleep, 0.01) == [0.01, 0.01]
    with pytest.raises(DeadlineError, match=r"policy.*must answer sleep_on"):
        policy.within(0.3).each(gw.Policy.sleep_on, 1, 1.5)
    with pytest.raises(InputError, match="must be > 0"):
        policy.within(0)


@BOTH
def test_a_value_is_stored_and_handed_on(shared: Opening, pools: Opening) -> None:
    spans: list[Span] = []

    def sink(fact: Fact) -> None:
        assert isinstance(fact, Span)
        spans.append(fact)

    size = 500_000
    policy = shared(Recorder(sink)).start("policy", gw.Policy)
    rollout = pools(1, "rollout", Recorder(sink)).start("rollout", gw.Engine)
    weights = policy.each_stored(gw.Policy.weights, size)[0]
    assert rollout.each(gw.Engine.load, 3, {"policy": weights}) == [(3, 1.0, size)]
    assert weights.value()["w"].numel() == size
    assert all(int(str(span.attributes["bytes_in"])) < 10_000 for span in spans)
    assert all(int(str(span.attributes["bytes_out"])) < 10_000 for span in spans)


@BOTH
def test_what_ranks_keep_of_a_batch_is_named_by_its_items(shared: Opening) -> None:
    """A batch is split as ever; the answers stay, and other ranks read them by reference."""
    spans: list[Span] = []

    def sink(fact: Fact) -> None:
        assert isinstance(fact, Span)
        spans.append(fact)

    policy = shared(Recorder(sink)).start("policy", gw.Policy, 100)
    lengths = [5, 900, 3, 7]
    shards = policy.nonblocking.map_stored(gw.Policy.shifted, gw.Items.of(lengths), by=1000).result()
    assert sorted(item for shard in shards for item in shard.items) == [0, 1, 2, 3]
    for shard in shards:
        assert shard.part.value().values == tuple(1100 + item for item in shard.items)
    assert policy.each(gw.read_items, [shard.part for shard in shards]) == [[1100, 1101, 1102, 1103]] * 2
    few = policy.nonblocking.map_stored(gw.Policy.shifted, gw.Items.of([4]), by=0).result()
    assert [shard.items for shard in few] == [(0,)], "a rank without items is called, and keeps nothing for anyone"
    assert all(int(str(span.attributes["bytes_in"])) < 1000 for span in spans)


@BOTH
def test_closing_frees_and_may_be_repeated(pools: Opening) -> None:
    pool = pools(2, "short")
    pids = {process.pid for process in pool.processes} - {os.getpid()}
    policy = pool.start("policy", gw.Policy)
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkerLostError, match="closed"):
        policy.one(gw.Policy.identity)


@BOTH
def test_every_call_is_a_span(shared: Opening) -> None:
    facts: list[Fact] = []
    policy = shared(Recorder(facts.append, step=4)).start("policy", gw.Policy)
    begin = time.time()
    policy.map(gw.Policy.shifted, gw.Items.of([8, 4, 4]))
    (span,) = facts
    assert isinstance(span, Span)
    assert (span.name, span.step, span.attributes["method"]) == ("policy.shifted", 4, "shifted")
    ranks = span.attributes["ranks"]
    assert isinstance(ranks, list)
    assert [rank for rank, _, _ in ranks] == [0, 1]
    assert all(begin - 5 < started < time.time() + 5 and seconds >= 0 for _, started, seconds in ranks)


@RAY
def test_ranks_are_processes_of_their_own(shared: Opening) -> None:
    pool = shared()
    pids = [pid for pid, *_ in pool.start("policy", gw.Policy).each(gw.Policy.identity)]
    assert pids == [process.pid for process in pool.processes]
    assert len({*pids, os.getpid()}) == 3
    listening = [
        c.laddr.ip for p in pids for c in psutil.Process(p).net_connections() if c.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert all(ip.removeprefix("::ffff:") == "127.0.0.1" for ip in listening)


@RAY
def test_every_pool_is_a_process_group_of_its_own(shared: Opening, pools: Opening) -> None:
    first = shared().start("policy", gw.Policy)
    second = pools(3, "other").start("policy", gw.Policy)
    slow = first.nonblocking.each(gw.Policy.rank_sum, 10.0)
    fast = second.nonblocking.each(gw.Policy.rank_sum, 0.5)
    assert fast.result() == [(4.5, rank, 3) for rank in range(3)]
    assert slow.result() == [(21.0, rank, 2) for rank in range(2)]


@RAY
def test_pools_work_at_the_same_time(shared: Opening, pools: Opening, tmp_path: Path) -> None:
    facts: list[Fact] = []
    recorder = Recorder(facts.append)
    first = shared(recorder).start("policy", gw.Policy)
    second = pools(1, "beside", recorder).start("rollout", gw.Policy)
    calls = [first.nonblocking.each(gw.Policy.meet, tmp_path, 3), second.nonblocking.each(gw.Policy.meet, tmp_path, 3)]
    assert [call.result() for call in calls] == [[3, 3], [3]], "each waits for the others, who must be there meanwhile"
    busy = [row for fact in facts if isinstance(fact, Span) for row in fact.attributes["ranks"]]  # type: ignore[attr-defined]
    assert max(started for _, started, _ in busy) < min(started + seconds for _, started, seconds in busy)


@RAY
def test_bytes_are_counted_as_they_cross(shared: Opening) -> None:
    facts: list[Fact] = []
    policy = shared(Recorder(facts.append)).start("policy", gw.Policy)
    tensor = torch.arange(250_000, dtype=torch.float32)
    assert torch.equal(policy.one(gw.Policy.doubled, tensor), tensor * 2)
    assert tensor[3] == 3.0, "the controller's tensor is its own"
    assert policy.each(gw.Policy.accept, tensor) == [250_000] * 2
    one, both = (fact.attributes for fact in facts if isinstance(fact, Span))
    assert 1_000_000 < int(str(one["bytes_out"])) < 1_010_000
    assert 1_000_000 < int(str(one["bytes_in"])) < 1_010_000
    assert 2_000_000 < int(str(both["bytes_out"])) < 2_020_000
    assert 0 < int(str(both["bytes_in"])) < 2_000


@RAY
def test_what_cannot_travel(shared: Opening) -> None:
    policy = shared().start("policy", gw.Policy)
    with pytest.raises(WorkerError, match="UnpicklableError: strange thing") as caught:
        policy.one(gw.Policy.fail_strangely)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "fail_strangely" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="generator"):
        policy.one(gw.Policy.answer_strangely)
    with pytest.raises(InputError, match="must be importable by name"):
        policy.one(lambda worker: worker.place.rank)

    def local(worker: gw.Policy) -> int:
        return worker.place.rank

    with pytest.raises(InputError, match="top level of a module"):
        policy.one(local)
    with pytest.raises(InputError, match=r"arguments of policy\.accept cannot be sent to another process"):
        policy.one(gw.Policy.accept, open(os.devnull))  # type: ignore[arg-type]  # noqa: SIM115


@RAY
def test_the_first_failure_wins_and_a_stuck_rank_breaks_the_pool(pools: Opening) -> None:
    policy = pools(2, "stuck").start("policy", gw.Policy)
    with pytest.raises(InputError, match=r"got \[1\]") as caught:
        policy.each(gw.Policy.fail_beside_a_collective)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    with pytest.raises(WorkerLostError, match="given up, policy rank 0 did not answer"):
        policy.each(gw.Policy.identity)


@RAY
def test_a_missed_deadline_breaks_the_pool(pools: Opening) -> None:
    policy = pools(2, "late").start("policy", gw.Policy)
    with pytest.raises(DeadlineError, match="policy rank 1 must answer sleep_on"):
        policy.within(0.5).each(gw.Policy.sleep_on, 1, 60.0)
    with pytest.raises(WorkerLostError, match="did not answer in time"):
        policy.one(gw.Policy.identity)


@RAY
def test_a_killed_worker_is_named(pools: Opening) -> None:
    pool = pools(2, "mortal")
    policy = pool.start("policy", gw.Policy)
    pid = pool.processes[1].pid
    with pytest.raises(WorkerLostError, match=rf"policy rank 1 was lost: process {pid} .* during die"):
        policy.each(gw.Policy.die, 1)
    with pytest.raises(WorkerLostError, match="given up"):
        policy.one(gw.Policy.identity)


@RAY
def test_a_worker_killed_from_outside(pools: Opening) -> None:
    pool = pools(1, "killed")
    policy = pool.start("policy", gw.Policy)
    waiting = policy.nonblocking.one(gw.Policy.sleep, 60.0)
    os.kill(pool.processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="policy rank 0 was lost"):
        waiting.result()


@RAY
def test_what_the_cluster_could_never_hold_is_refused_at_once(pools: Opening, clusters: Callable[[], object]) -> None:
    with pytest.raises(
        InputError, match=r"pool huge does not fit .* 99 ranks of 1 CPU were requested, but the cluster has 8 CPU"
    ):
        pools(99, "huge")
    with pytest.raises(InputError, match=r"1 GPU \+ 0\.001 accelerator_type:H100"):
        clusters().backend("gpu", gpus=1, kind="h100")  # type: ignore[attr-defined]


@RAY
def test_a_full_cluster_names_who_is_in_the_way(pools: Opening, clusters: Callable[[], object]) -> None:
    pools(1, "hog")
    with pytest.raises(InfrastructureError, match=r"are free, and .*hog.* uses the rest"):
        clusters().backend("late", 8, start_seconds=1)  # type: ignore[attr-defined]


@RAY
def test_the_environment_of_a_rank(shared: Opening) -> None:
    policy = shared().start("policy", gw.Policy)
    names = ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONHASHSEED", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"]
    assert policy.each(gw.Policy.environment, names) == [["1", "passive", "0", "1", "false"]] * 2


def test_errors_stay_in_the_tree() -> None:
    assert issubclass(WorkerLostError, PosttrainError)
    assert WorkerLostError.retryable
    assert not WorkerError.retryable
