"""A cluster of a simulated world: production agents on nodes that reach nothing but the object store, and its faults.

A node loses its network, or freezes, while its agent goes on; the scheduler then calls it lost, or starts its job anew
on another node while the first one still computes. Requests arrive late, or their answers are lost; the store becomes
full. Drivers are on hosts that share no disk.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

from sim_day import Simulation
from sim_jobs import Jobs, SimJob
from sim_ports import Outside, SimExecutor, SimFolders, SimObjects, Weather
from sim_world import Actor, World

from posttrain.app.garbage import _unstage
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import InfrastructureError, PosttrainError, UnavailableError, WorkspaceError
from posttrain.domain.jobs import NODE_FAILED, Cause, JobOrder
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.records import AttemptRecord
from posttrain.execution.agent import Agent, Relay, _Beat
from posttrain.store.attempts import AttemptFolder, spending
from posttrain.store.blobs import ObjectBlobs, backend_of
from posttrain.store.ledger import Stores
from posttrain.store.mailbox import Mailbox
from posttrain.store.retries import RefusedError
from posttrain.store.staging import PartObjects, StagedAttempt, StoredParts, Uploads

T = TypeVar("T")
HEARS = 90.0  # seconds from the moment at which a node can hear that its job is over to the end of the job
SPACE = "space"  # in the store
_LATE, _UNANSWERED = 0.01, 0.02  # shares of a node's requests that arrive late, or whose answer is lost
_SLICES = 4  # of a step, after each of which the agent looks at its job
_KILLED = -9


@dataclass(eq=False)
class Node:
    """What one incarnation of a job reaches."""

    world: World
    weather: Weather
    job: SimJob
    cut: float = 0.0  # until when it has no network, seconds of the world
    zombie: bool = False  # the scheduler calls the job ended, or has started it elsewhere
    actors: list[Actor] = field(default_factory=list)  # its threads
    agent: SimAgent | None = None

    def ask(self, action: Callable[[], T], *, writes: bool = False) -> T:
        """Do it at the store, unless the network or the store is away."""
        world = self.world
        world.point()
        if self.cut > world.time or self.weather.is_away("channel"):
            world.pause(world.random.uniform(1.0, 30.0))
            raise UnavailableError("the store does not answer; try again")
        if writes and self.weather.is_away(SPACE):
            raise WorkspaceError("the store is full; free some space")
        dice = 1.0 if world.calm else world.random.random()
        if writes and dice < _LATE:
            world.pause(world.random.uniform(0.0, 40.0))
        found = action()
        world.point()
        if _LATE < dice < _LATE + _UNANSWERED:
            raise UnavailableError("no answer; try again")
        return found

    def each(self) -> list[Actor]:
        """The job's actor and its threads."""
        return [self.job.actor, *(one for one in self.actors if not one.over)]


class NodeObjects(SimObjects):
    """An attempt's mailbox as a node reaches it."""

    def __init__(
        self, node: Node, outside: Outside, held: dict[str, bytes], place: str, wrote: Any, started: Any
    ) -> None:
        super().__init__(outside, held, place)
        self._node, self._wrote, self._started = node, wrote, started

    def create(self, key: str, data: bytes) -> bool:
        """See `MailboxObjects.create`."""
        return self._node.ask(lambda: self._noted(key, data), writes=True)

    def overwrite(self, key: str, data: bytes) -> None:
        """See `MailboxObjects.overwrite`."""
        self._node.ask(lambda: self._held.__setitem__(key, data), writes=True)

    def get(self, key: str) -> bytes | None:
        """See `MailboxObjects.get`."""
        return self._node.ask(lambda: self._held.get(key))

    def remove(self, key: str) -> None:
        """See `MailboxObjects.remove`."""
        self._node.ask(lambda: self._held.pop(key, None))

    def numbers(self, folder: str) -> list[int]:
        """See `MailboxObjects.numbers`."""
        return self._node.ask(lambda: super(NodeObjects, self).numbers(folder))

    def _noted(self, key: str, data: bytes) -> bool:
        made = self._put(key, data)
        if made:
            self._started(self.place, key, data)
            self._wrote(self._node, key)
        return made


class NodeParts:
    """An attempt's staging area as a node reaches it."""

    def __init__(self, node: Node, parts: PartObjects) -> None:
        self._node, self._parts = node, parts

    def get(self, key: str) -> bytes:
        """See `PartObjects.get`."""
        return self._node.ask(lambda: self._parts.get(key))

    def put(self, key: str, data: bytes) -> None:
        """See `PartObjects.put`."""
        self._node.ask(lambda: self._parts.put(key, data), writes=True)


class ClusterBlobs(ObjectBlobs):
    """An artifact store as drivers reach it."""

    def __init__(self, url: str, outside: Outside, weather: Weather, lock: Any) -> None:
        super().__init__(backend_of(url), lock)
        self._outside, self._weather = outside, weather

    def put(self, data: bytes) -> str:
        """See `ObjectBlobs.put`."""
        return self._write(lambda: super(ClusterBlobs, self).put(data))

    def get(self, digest: str) -> bytes:
        """See `ObjectBlobs.get`."""
        return self._outside.act(lambda: super(ClusterBlobs, self).get(digest))

    def check(self, digest: str) -> int:
        """See `ObjectBlobs.check`."""
        return len(self.get(digest))

    def size(self, digest: str) -> int:
        """See `ObjectBlobs.size`."""
        return self._outside.act(lambda: super(ClusterBlobs, self).size(digest))

    def adopt(self, digest: str, keys: Sequence[str], size: int, part: int) -> str:
        """See `ObjectBlobs.adopt`."""
        with self.holding():
            return self._write(lambda: ObjectBlobs(self._backend).adopt(digest, keys, size, part))

    def _write(self, action: Callable[[], T]) -> T:
        if self._weather.is_away(SPACE):
            self._outside.world.point()
            raise WorkspaceError("the store is full; free some space")
        found, world = self._outside.act(action), self._outside.world
        if not world.calm and world.random.random() < _UNANSWERED:
            raise UnavailableError("no answer; try again")
        return found


class SimLock:
    """A store's lock among actors."""

    def __init__(self, world: World) -> None:
        self._world, self._shared, self._alone = world, 0, False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See `StoreLock.shared`."""
        while self._alone:
            self._world.pause(1.0)
        self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1

    @contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """See `StoreLock.alone`."""
        while self._alone or self._shared:
            self._world.pause(1.0)
        self._alone = True
        try:
            yield
        finally:
            self._alone = False


class DriverObjects(SimObjects):
    """An attempt's mailbox as a driver reaches it."""

    def __init__(self, outside: Outside, held: dict[str, bytes], place: str, started: Any) -> None:
        super().__init__(outside, held, place)
        self._started = started

    def _put(self, key: str, data: bytes) -> bool:
        made = super()._put(key, data)
        if made:
            self._started(self.place, key, data)
        return made


class SimStaged(StagedAttempt):
    """An attempt elsewhere whose mailbox is in memory."""

    def __init__(
        self, path: Path, channel: str, name: str, store: str, outside: Outside, held: Any, started: Any
    ) -> None:
        super().__init__(path, channel, name, store)
        objects = DriverObjects(outside, held.setdefault(channel, {}), channel, started)
        self.mailbox = Mailbox(objects, outside.world.pause)


class SimAgent(Agent):
    """The production agent; its node is simulated, and its job is a script."""

    cluster: ClusterJobs
    node: Node
    request: JobSpec

    def _mailbox(self, folder: Path) -> Mailbox:
        return self.cluster.mailbox(self.node, self.url)

    def _parts(self, folder: Path, order: JobOrder) -> PartObjects:
        return NodeParts(self.node, StoredParts(order.store_url, order.name))

    def _output(self, log: Path) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def _signals(self, attempt: AttemptFolder) -> AbstractContextManager[None]:  # type: ignore[override]
        self.attempt = attempt
        return nullcontext()

    def _fetch(
        self, outside: Mailbox, order: JobOrder, attempt: AttemptFolder, folder: Path, parts: PartObjects
    ) -> tuple[int, float]:
        newest = self.cluster.newest(order.name, of_zombies=False)  # when this incarnation begins to read
        found = super()._fetch(outside, replace(order, inputs={}), attempt, folder, parts)
        step = attempt.read_order().resumed_step
        self.node.world.must(step >= newest, f"{order.name} goes on at step {step}, and step {newest} is staged")
        return found

    def _supervise(self, spec: JobSpec, attempt: AttemptFolder, relay: Relay, uploads: Uploads) -> tuple[int, bool]:
        beat, self.relay = _Beat(self, relay, uploads), relay
        try:
            return self.cluster.compute(self, attempt, beat), False
        finally:
            beat.close()
            if self.lost:
                self.cluster.count_unreported(self)

    def _publish(self, outside: Mailbox, attempt: AttemptFolder, *values: Any) -> int:
        try:
            return super()._publish(outside, attempt, *values)
        finally:
            self.cluster.count_unreported(self)


class ClusterJobs(Jobs):
    """All jobs of a simulated cluster."""

    def __init__(self, world: World, weather: Weather, root: Path, channels: dict[str, dict[str, bytes]], rows: Any):
        super().__init__(world, lambda path: AttemptFolder(path, ""), rows)
        self._weather, self._root, self._channels = weather, root, channels
        self._outside = Outside(world, weather, "channel")
        self._nodes: dict[str, Node] = {}  # actor → node
        self._restarts: dict[tuple[str, int], int] = {}
        self._beats: dict[str, Callable[[], None]] = {}
        self.fenced: dict[str, tuple[float, str]] = {}  # mailbox → when its newest start came, and the token of it
        self.listed: list[tuple[str, int, float, bool]] = []  # attempt, step, when (of clocks), whether by a zombie

    def mailbox(self, node: Node, url: str) -> Mailbox:
        """An attempt's mailbox as this node reaches it."""
        held = self._channels.setdefault(url, {})
        objects = NodeObjects(node, self._outside, held, url, self._wrote, self.note_start)
        return Mailbox(objects, self._world.pause)

    def newest(self, name: str, *, before: float = float("inf"), of_zombies: bool = True) -> int:
        """The step of an attempt's furthest checkpoint that was listed."""
        return max((s for n, s, at, z in self.listed if n == name and at < before and (of_zombies or not z)), default=0)

    def current(self) -> Node | None:
        """The node of the actor who acts."""
        actor = self._world.current
        return next((node for node in self._nodes.values() if actor in (node.job.actor, *node.actors)), None)

    def is_zombie(self, job: SimJob) -> bool:
        """See `Jobs.is_zombie`."""
        node = self._nodes.get(job.actor.name)
        return node is not None and node.zombie

    def ended(self, name: str, number: int | None) -> None:
        """See `Jobs.ended`; what the scheduler does not reach goes on."""
        for job in self.all:
            if job.lives and job.name == name and number in (None, job.number) and not self.is_zombie(job):
                self._die(job)
                self.changed(job.stage.partition("/")[0])

    def _computes(self, job: SimJob) -> bool:
        """Whether a job computes that the scheduler reaches; one that its agent gave up is dead at once."""
        agent = self._nodes[job.actor.name].agent if job.computes else None
        return agent is not None and not agent.lost and not self.is_zombie(job)

    def strike(self, dice: Random) -> None:
        """See `Jobs.strike`."""
        living = [job for job in self.all if job.lives and not self.is_zombie(job)]
        if not living:
            return
        job = dice.choice(living)
        node = self._nodes[job.actor.name]
        what = dice.choice(("killed", "node lost", "requeued", "cut off", "frozen", "terminated", "abandoned"))
        self._world.say(f"{job.name} is {what}")
        if what == "killed":
            self.executor.finish(job.name, _KILLED, job.number)
        elif what == "node lost":
            self.executor.lose(job.name, Cause.NODE_LOST, job.number)
        elif what == "requeued":
            self._die(job)
            self._requeue(job)
        elif what == "terminated":
            self._world.add("scheduler", lambda: self._terminate(job, node))
        else:
            seconds = dice.expovariate(1 / 700)
            node.cut = max(node.cut, self._world.time + seconds)
            for actor in node.each() if what != "cut off" else ():
                actor.freeze(seconds)
            if what == "abandoned" or dice.random() < 0.5:
                after = dice.uniform(0.0, min(seconds, 60.0))
                self._world.add("scheduler", lambda: self._abandon(job, node), after)

    def compute(self, agent: SimAgent, attempt: AttemptFolder, beat: Callable[[], None]) -> int:
        """Do what the job does; the agent looks at it after each slice of a step."""
        node, order = agent.node, attempt.read_order()
        job = node.job
        twins = [one.name for one in self.all if one.stage == job.stage and self._computes(one)]
        self._world.must(not twins or node.zombie, f"two jobs of {job.stage} compute: {twins}, {job.name}")
        right = order.epoch == agent.request.epoch
        self._world.must(right, f"{job.name} is of epoch {agent.request.epoch}, told {order.epoch}")
        job.computes = not node.zombie
        self._beats[job.actor.name] = beat
        began = self._world.time
        try:
            result = self._work(attempt, job, order)
        except _GivenUpError:
            return _KILLED
        finally:
            job.computes = False
        if result is None:
            return 3
        self._world.say(f"{job.name} ({job.actor.name}) says {result.status}")
        attempt.write_result(replace(result, seconds=self._world.time - began))
        return 0

    def _rest(self, job: SimJob, seconds: float) -> None:
        node = self._nodes[job.actor.name]
        for _ in range(_SLICES):
            self._world.pause(seconds / _SLICES)
            self._beats[job.actor.name]()
            self._heed(node)
            if node.agent is not None and node.agent.lost:
                self._world.say(f"{job.name} ({job.actor.name}) is given up: {node.agent.lost}")
                raise _GivenUpError

    def _start(self, request: JobSpec, number: int) -> None:
        super()._start(request, number)
        job = self.all[-1]
        self._nodes[job.actor.name] = Node(self._world, self._weather, job)

    def _heed(self, node: Node) -> None:
        """A job whose attempt has ended, or has a later incarnation, is given up soon after its node can hear of it."""
        agent, world = node.agent, self._world
        over = self.fenced.get(agent.url if agent else "", (0.0, ""))
        if agent is None or agent.lost or over[1] in ("", agent._token):
            return
        deaf = max(node.cut, self._weather.away.get("channel", 0.0), self._weather.away.get(SPACE, 0.0), over[0])
        late = world.time - deaf
        world.must(late < HEARS, f"{node.job.name} ({node.job.actor.name}) computes {late:.0f} s after it was fenced")

    def _live(self, request: JobSpec, job: SimJob) -> None:
        node = self._nodes[job.actor.name]
        shown = self.executor._jobs[job.name][job.number]  # a scheduler shows what runs
        shown.visible = min(shown.visible, self._world.now())
        incarnation = self._restarts.get((job.name, job.number), 0)
        agent = node.agent = SimAgent(request.mailbox, incarnation, self._root / "nodes" / job.actor.name.strip("job "))
        agent.cluster, agent.node, agent.request = self, node, request
        try:
            code = agent.run()
        except PosttrainError as error:
            self._world.say(f"{job.name} ({job.actor.name}) ends: {type(error).__name__} {error}")
            passes = isinstance(error, InfrastructureError) and not isinstance(error, RefusedError)
            code = NODE_FAILED if passes else error.exit_code
        if node.zombie:
            job.lives = False
            return
        result = self._channels[request.mailbox].get("result.json", b"")
        if code == 0 and b'"succeeded"' in result:
            self.answered.append(job.name)
        self.executor.finish(job.name, code, job.number)

    def _die(self, job: SimJob) -> None:
        """SIGKILL to the agent; its job and its threads die with it."""
        job.lives = job.computes = False
        node = self._nodes.get(job.actor.name)
        if node is not None and node.agent is not None:
            self.count_unreported(node.agent)
        for actor in node.each() if node is not None else [job.actor]:
            if self._world.current is not actor:
                actor.kill()

    def count_unreported(self, agent: SimAgent) -> None:
        """Tokens of which the store never heard, because the agent died before it relayed them, count as not spent."""
        relay, attempt = getattr(agent, "relay", None), getattr(agent, "attempt", None)
        if relay is None or attempt is None or agent.node.zombie:
            return
        inside = max(0, spending(attempt.mailbox.metered() or _meter(attempt)) or 0) + relay.spent
        held = self._channels[agent.url]
        outside = spending(held.get(max((key for key in held if key.startswith("meters/")), default=""), b"")) or 0
        run_id = agent.node.job.stage.partition("/")[0]
        self.spent[run_id] = self.spent.get(run_id, 0) - max(0, inside - outside)
        agent.relay = None  # type: ignore[assignment]

    def _requeue(self, job: SimJob) -> None:
        request = next(one for one in self.executor.launched if one.name == job.name)
        self._restarts[job.name, job.number] = self._restarts.get((job.name, job.number), 0) + 1
        self.executor.requeue(job.name, job.number)
        self._start(request, job.number)

    def _terminate(self, job: SimJob, node: Node) -> None:
        """A preemption: SIGTERM, time to write a checkpoint, SIGKILL, and the job waits for another node."""
        agent = node.agent
        if job.lives and not node.zombie and agent is not None and hasattr(agent, "attempt"):
            agent.told = 15
            agent.attempt.request_stop()
        self._world.pause(self._world.random.uniform(5.0, 120.0))
        if job.lives and not node.zombie:
            self._die(job)
            self._requeue(job)

    def _abandon(self, job: SimJob, node: Node) -> None:
        """The scheduler does not reach the node: it starts the job elsewhere, or calls it lost. The node goes on."""
        if not job.lives or node.zombie:
            return
        if node.agent is not None:
            self.count_unreported(node.agent)
        node.zombie = True
        job.computes = False
        if self._world.random.random() < 0.5:
            self._requeue(job)
        else:
            self.executor.lose(job.name, Cause.NODE_LOST, job.number)

    def note_start(self, url: str, key: str, data: bytes) -> None:
        """An attempt has a new start, or a tombstone."""
        if key == "start.json" or key.startswith("starts/"):
            self.fenced[url] = (self._world.time, str(json.loads(data)["token"]))

    def _wrote(self, node: Node, key: str) -> None:
        folder, _, name = key.partition("/")
        if folder == "checkpoints":
            self._world.say(f"{node.job.name} lists step {int(name.partition('.')[0])}")
            self.listed.append((node.job.name, int(name.partition(".")[0]), self._world.now(), node.zombie))


class _GivenUpError(Exception):
    """The agent has ended its job."""


def _meter(attempt: AttemptFolder) -> bytes:
    path = attempt.path / "meter"
    return path.read_bytes() if path.exists() else b""


class _Pool:
    """A pool of threads whose work is done at once, by whoever gives it."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, act: Callable[..., T], *values: Any) -> Future[T]:
        """See `Executor.submit`."""
        done = Future[T]()
        try:
            done.set_result(act(*values))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: object) -> None:
        """Nothing runs."""


class _Thread:
    """`threading.Thread` whose work an actor does."""

    def __init__(self, world: World, begun: Callable[[Actor], None], target: Any, args: Sequence[Any] = ()) -> None:
        self._world, self._begun, self._act = world, begun, lambda: target(*args)
        self._actor: Actor | None = None

    def start(self) -> None:
        """See `Thread.start`."""
        self._actor = self._world.add("thread", self._act)
        self._begun(self._actor)

    def is_alive(self) -> bool:
        """See `Thread.is_alive`."""
        return self._actor is not None and not self._actor.over

    def join(self) -> None:
        """See `Thread.join`."""
        while self.is_alive():
            self._world.pause(1.0)


class _Event:
    def __init__(self, world: World) -> None:
        self._world, self._set = world, False

    def set(self) -> None:
        self._set = True

    def wait(self, seconds: float) -> bool:
        if not self._set:
            self._world.pause(seconds)
        return self._set


def _threading(world: World, begun: Callable[[Actor], None]) -> Any:
    """`threading` of this world."""

    def thread(target: Any, args: Sequence[Any] = (), **_: object) -> _Thread:
        return _Thread(world, begun, target, args)

    return SimpleNamespace(**{**vars(threading), "Thread": thread, "Event": lambda: _Event(world)})


class ClusterDay(Simulation):
    """A day of drivers on hosts without a common disk, and of a cluster."""

    jobs: ClusterJobs

    def __init__(self, seed: int, root: Path) -> None:
        self.lock: SimLock
        super().__init__(seed, root)
        self.faults.places.append(SPACE)
        self.world.add("gc", self._collect_garbage)

    def _made_executor(self) -> type[SimExecutor]:
        return ClusterExecutor

    def _made_blobs(self) -> ClusterBlobs:
        self.lock = SimLock(self.world)
        outside = Outside(self.world, self.weather, "store")
        blobs = ClusterBlobs((self.root / "store").as_uri(), outside, self.weather, self.lock)
        for text in ("model:tiny", "dataset:train", "dataset:heldout"):
            ObjectBlobs.put(blobs, canonical_json(text))
        return blobs

    def _made_jobs(self) -> ClusterJobs:
        return ClusterJobs(self.world, self.weather, self.root, self.channels, lambda: self.rows)

    def _folders(self, host: str) -> SimFolders:
        (self.root / host).mkdir(exist_ok=True)
        made = ClusterFolders(self.root / host, lambda: "memory://mail", lambda _: True, self.blobs.url)
        object.__setattr__(made, "outside", self.channel)
        object.__setattr__(made, "held", self.channels)
        object.__setattr__(made, "started", self.jobs.note_start)
        return made

    def _patches(self) -> list[Any]:
        world, jobs = self.world, self.jobs
        clock = SimpleNamespace(monotonic=lambda: world.time, time=world.now, sleep=world.pause)

        def begun(actor: Actor) -> None:
            if (node := jobs.current()) is not None:
                node.actors.append(actor)

        def host() -> str:
            node = jobs.current()
            return "driver" if node is None else f"node of {node.job.actor.name}"

        return [
            *super()._patches(),
            patch("posttrain.execution.agent.time", clock),
            patch("posttrain.execution.agent.threading", _threading(world, begun)),
            patch("posttrain.execution.agent._refuse_other_code", lambda order: None),
            patch("posttrain.control.wakeups.threading", _threading(world, lambda actor: None)),
            patch("posttrain.store.staging.ThreadPoolExecutor", _Pool),
            patch("posttrain.store.mailbox.socket", SimpleNamespace(gethostname=host)),
        ]

    def _collect_garbage(self) -> None:
        """Somebody runs `posttrain gc` now and then, and waits for nothing to become old."""
        ledger = self._process("gc").stores.ledger
        place = cast(Any, SimpleNamespace(ledger=ledger, lock=self.lock))
        while True:
            self.world.pause(self.world.random.expovariate(1 / 4000))
            try:
                objects, _ = _unstage(place, self.blobs.url, 0.0, dry_run=False)
                self.world.say(f"gc: {objects} staged objects")
            except PosttrainError as error:
                self.world.say(f"gc: {error}")

    def _end(self, stores: Stores) -> dict[str, int]:
        counts = super()._end(stores)
        for (run_id,) in self.rows.all("SELECT id FROM runs"):
            for stage in stores.ledger.stages(run_id):
                self._check_checkpoints(stores.ledger.attempts(run_id, stage.name))
        for job in self.jobs.all:
            self.world.must(not (job.lives and self.jobs.is_zombie(job)), f"a node still computes {job.name}")
        return counts

    def _check_checkpoints(self, attempts: Sequence[AttemptRecord]) -> None:
        """An attempt begins at the furthest checkpoint that earlier ones had listed when they ended."""
        for number, attempt in enumerate(attempts[1:], 1):
            listed = [self.jobs.newest(one.name, before=(one.finished_at or 0.0) - 10) for one in attempts[:number]]
            step = attempt.resumed_step or 0
            self.world.must(step >= max(listed), f"{attempt.name} begins at {step}; before it, {listed} were staged")


class ClusterExecutor(SimExecutor):
    """The scheduler of a cluster."""

    remote = True


class ClusterFolders(SimFolders):
    """Attempts on nodes."""

    __slots__ = ("started",)

    started: Any

    def of(self, attempt: AttemptRecord) -> AttemptFolder:
        """See `AttemptFolders.of`."""
        channel = str(attempt.channel)
        where = self.root / attempt.folder
        return SimStaged(where, channel, attempt.name, self.store, self.outside, self.held, self.started)
