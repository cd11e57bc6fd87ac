"""A world with a clock of its own: actors that take turns, one at a time, as a seed decides.

An actor is a greenlet: it goes on until it comes to a point (before and after a transaction, an outside action) and the
dice let another one go on, or until it waits. When nobody can act, time jumps to the next moment at which somebody
can. Everything that is decided is drawn from one generator, so a seed is a whole history.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from random import Random

from greenlet import getcurrent, greenlet

SHOWN = 250  # lines of a failing history
FOREVER = 1e12


class Killed(BaseException):
    """Ends an actor where it stands, as SIGKILL does: no handler of the product catches it."""


class ViolationError(AssertionError):
    """Something happened that must never happen."""


class Actor:
    """Somebody who acts: a driver, a job, a person, the weather."""

    def __init__(self, world: World, name: str, body: Callable[[], None], at: float, *, driver: bool = False) -> None:
        self.world, self.name, self.driver = world, name, driver
        self.wake_at = at
        self.listening = False  # whether a signal ends its wait
        self.doomed = False  # killed: it acts no more
        self.over = False
        self.at_end: Callable[[], None] = lambda: None
        self._body = body
        self._greenlet: greenlet = greenlet(self._run, parent=world.hub)

    def go_on(self) -> None:
        """Let it act until it comes to a pause."""
        self.world.current = self
        if self.doomed and not self._greenlet:  # it never began
            self._finish()
        elif self.doomed:
            self._greenlet.throw(Killed())
        else:
            self._greenlet.switch()
        self.world.current = None

    def kill(self) -> None:
        """It acts no more; its greenlet unwinds in its next turn."""
        self.doomed, self.wake_at, self.listening = True, self.world.time, False

    def freeze(self, seconds: float) -> None:
        """Suspend it, as SIGSTOP does."""
        self.listening = False
        until = self.world.time + seconds
        self.wake_at = until if self.wake_at > self.world.end else max(self.wake_at, until)

    def _run(self) -> None:
        try:
            self._body()
        except Killed:
            pass
        except Exception as error:
            self.world.failed(self, error)
        self._finish()

    def _finish(self) -> None:
        self.over = True
        self.world.actors.remove(self)
        self.at_end()


class World:
    """Time, actors, dice and what happened.

    Args:
        seed: decides everything.
        hours: of virtual time.
        calm_after: hours after which no fault comes any more.
    """

    def __init__(self, seed: int, hours: float = 24.0, calm_after: float = 16.0, folder: str = "") -> None:
        self.seed, self.random = seed, Random(seed)
        self.folder = folder  # of the workspace: its path differs between two histories of one seed
        self.time, self.jumped = 0.0, 0.0
        self.end, self.calm_after = hours * 3600, calm_after * 3600
        self.hub = getcurrent()
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.depth = 0  # transactions that are open
        self.switches = 0.25  # share of points at which others may go on
        self.fatal = 0.0  # share of points at which a driver is killed, or freezes
        self.lease = 15.0
        self.steps = 0
        self.before_jump: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._lines: deque[str] = deque(maxlen=SHOWN)
        self._digest = hashlib.sha256()

    @property
    def calm(self) -> bool:
        """Whether no fault comes any more."""
        return self.time >= self.calm_after

    def now(self) -> float:
        """What every clock of this world shows: seconds since the epoch."""
        return 1_000_000.0 + self.time + self.jumped

    def say(self, what: str) -> None:
        """A line of the history."""
        who = self.current.name if self.current else "world"
        line = f"{self.time:10.3f}  {who:<12} {what.replace(self.folder, 'WORKSPACE') if self.folder else what}"
        self._digest.update(line.encode() + b"\n")
        self._lines.append(line)

    def digest(self) -> str:
        """Of the whole history."""
        return self._digest.hexdigest()

    def story(self) -> str:
        """The end of the history, for a person."""
        return "\n".join(self._lines)

    def add(self, name: str, body: Callable[[], None], after: float = 0.0, *, driver: bool = False) -> Actor:
        """A new actor, who begins after so many seconds."""
        actor = Actor(self, name, body, self.time + after, driver=driver)
        self.actors.append(actor)
        return actor

    def failed(self, actor: Actor, error: Exception) -> None:
        """An actor raised what it never should."""
        self._error = self._error or error
        self.say(f"raised {type(error).__name__}: {error}")

    def must(self, holds: bool, what: str) -> None:
        """Something that must always hold."""
        if not holds:
            self.say(f"VIOLATION {what}")
            raise ViolationError(what)

    def run(self) -> None:
        """Until the end of time.

        Raises:
            Exception: what an actor raised.
        """
        while True:
            ready = [actor for actor in self.actors if actor.wake_at <= self.time]
            if ready:
                self.steps += 1
                (ready[0] if len(ready) == 1 else self.random.choice(ready)).go_on()
                if self._error is not None:
                    raise self._error
                continue
            following = min((actor.wake_at for actor in self.actors), default=FOREVER)
            if following > self.end:
                self.time = self.end
                return
            self.time = following
            self.before_jump()

    def close(self) -> None:
        """End everybody who still waits."""
        for actor in list(self.actors):
            actor.doomed = True
            actor.at_end = lambda: None
            actor.go_on()

    def pause(self, seconds: float, *, listening: bool = False) -> None:
        """The current actor waits; others act."""
        actor = self.current
        if actor is None or self.depth:
            return
        if actor.doomed:
            raise Killed
        actor.wake_at, actor.listening = self.time + seconds, listening
        self.hub.switch()
        actor.listening = False

    def signal(self, name: str) -> None:
        """End the wait of whoever listens by that name."""
        for actor in self.actors:
            if actor.name == name and actor.listening:
                actor.wake_at = min(actor.wake_at, self.time)

    def point(self) -> None:
        """Here another actor may go on, and here a driver may die or freeze."""
        actor = self.current
        if actor is None or self.depth:
            return
        if actor.doomed:
            raise Killed
        dice = self.random.random()
        if actor.driver and not self.calm and dice < self.fatal:
            if dice < self.fatal / 2:
                self.say("is killed")
                actor.doomed = True
                raise Killed
            seconds = self.lease * self.random.uniform(0.5, 4.0)
            self.say(f"freezes for {seconds:.0f} s")
            self.pause(seconds)
        elif dice > 1.0 - self.switches:
            self.pause(0.0 if dice > 1.0 - self.switches * 0.8 else self.random.uniform(0.0, 3.0))


class SimClock:
    """`Clock` of a world: who sleeps lets others act."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        """See `Clock.now`."""
        return self._world.now()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self._world.pause(seconds)
