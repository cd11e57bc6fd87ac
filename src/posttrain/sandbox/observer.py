"""An `observe` method in a separate process, with a deadline for each call and several calls at a time.

One thread of the job owns the worker process. The thread sends at most `concurrency` calls at a time, and reads their
answers in any order. So the deadline of a call begins when the worker receives the call, not while the call waits:

::

    begin ─▶ queue ─▶ running ─▶ answered, late, or the cause of its process's end
                ▲         │
                └─────────┘   its process ended for another reason: the call is repeated
       suspects ◀─────────┘   its process ended, and any running call can be the cause: each is repeated alone
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.sandbox.port import ObserveError, RewardError
from posttrain.sandbox.process import TRUST
from posttrain.sandbox.protocol import End, Fault, MalformedError, Message, Observed, Opened
from posttrain.sandbox.session import (
    EndedError,
    LateError,
    Log,
    NotConfinedError,
    Provision,
    Scratch,
    Session,
    lay_out,
)

ENGINE_TIMEOUT = 120.0  # seconds for importing the user's code and the engine, on a busy machine
PING_TIMEOUT = 10.0  # seconds for a worker to answer a ping, on a busy machine
_KILLED_MOST = 3  # consecutive kills from outside that are tolerated while the worker is started
_KILLED_OFTEN = 3  # kills of the process of a call that runs alone, after which the call can be the cause
_KILLED_TOGETHER = 2  # kills after which each running call is repeated alone
_UNANSWERED = 9  # consecutive kills without an answer that are tolerated
_PAUSE = 0.2  # seconds before a restart


@dataclass(slots=True, eq=False)
class _Call:
    """A call of `observe` that has not ended."""

    request: Mapping[str, Any]
    answer: Future[str | None] = field(default_factory=Future)
    due: float = math.inf  # `time.monotonic`, while it runs
    kills: int = 0  # of its process, by a signal, since it runs alone or together
    answered: int = 0  # number of answers before the first of these kills
    alone: bool = False  # whether it must be the only running call


class ProcessObserver:
    """An `observe` method in a worker process; the caller closes it when the job ends. See `Observer`.

    The method runs in a cell like a reward (`sandbox.process.open_reward`), without declared files, hosts and secrets.
    With a concurrency of 1, the calls run in the main thread, and the global generators of Python, numpy and torch
    are seeded from the call. The worker and its descendants end when the observer is closed, and when the job ends.

    Args:
        build: the function that returns the method, as `module:name`; it receives the folder of `source` in the cell,
            and `given`.
        given: keyword arguments of `build`: JSON values.
        timeout: seconds for each call.
        concurrency: maximum number of calls at a time.
        source: the file that contains the method; None: it is in an installed package.
        name: the observer's name in errors that are not about one call.
        hidden: folders that are empty for the method, such as the workspace.
        confined: whether to reject the method if the kernel cannot confine it completely.

    Raises:
        InputError: the user's code cannot be imported, or raises while the method is built; it is not confined.
        RewardError: the user's code ends its process, or takes too long to load.
        InfrastructureError: the process is repeatedly killed from outside.
    """

    notes: tuple[str, ...]  # missing restrictions, as text
    where: str  # observe (guess.py:7)

    def __init__(
        self,
        build: str,
        given: Mapping[str, Any],
        *,
        timeout: float,
        concurrency: int = 1,
        source: Path | None = None,
        name: str = "observe",
        hidden: Sequence[Path] = (),
        confined: bool = False,
    ) -> None:
        self._order = {"op": "observer", "build": build, "given": given, "concurrency": concurrency}
        self._timeout, self._concurrency, self._name, self._must_be_confined = timeout, concurrency, name, confined
        self._queue, self._suspects = deque[_Call](), deque[_Call]()
        self._running: dict[int, _Call] = {}
        self._session: Session | None = None
        self._log, self._scratch = Log(), Scratch()
        self._killed = 0  # in a row, while the worker was started
        self._kills = 0  # in a row, without an answer
        self._answered = 0  # number of answers
        self._lock = threading.Lock()  # guards the fault, and the queue's end
        self._fault: Exception | None = None  # raised by all calls that have not ended
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._notified = False  # whether the thread has a notification that it has not read
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(opened,), name="observer", daemon=True)
        try:
            self._plan = lay_out(
                *(self._scratch.path, source, source.name if source else ""),
                hidden=hidden, provision=Provision({}), concurrency=concurrency,
            )  # fmt: skip
            self._thread.start()
            opened.result()
        except BaseException:
            self.close()
            raise

    def begin(self, row: Mapping[str, Any], responses: Sequence[str]) -> Future[str | None]:
        """See `Observer.begin`."""
        call = _Call({"op": "observe", "row": row, "responses": list(responses)})
        call.answer.set_running_or_notify_cancel()
        with self._lock:
            if self._fault:
                raise self._fault
            self._queue.append(call)
        self._notify()
        return call.answer

    def close(self) -> None:
        """Kill the worker and all its descendants; remove its scratch folder."""
        self._end(InputError(f"{self._name} is closed; open it again"))
        if session := self._session:  # ends a wait for the rest of a message
            session.close()
        if self._thread.ident:
            self._thread.join()
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread that owns the worker ------------------------------------------------------------------------------

    def _work(self, opened: Future[None]) -> None:
        try:
            self._opened()
            opened.set_result(None)
            while not self._fault:
                self._turn()
        except Exception as error:
            self._end(error)
        if self._session:
            self._session.close()
        assert self._fault is not None, "the loop ends with a fault"
        if not opened.done():
            opened.set_exception(self._fault)
        for call in (*self._running.values(), *self._suspects, *self._queue):
            call.answer.set_exception(self._fault)

    def _end(self, fault: Exception) -> None:
        """Accept no more calls; the thread ends."""
        with self._lock:
            self._fault = self._fault or fault
        self._notified = False
        self._notify()

    def _notify(self) -> None:
        if not self._notified:  # a burst of calls wakes the thread once
            self._notified = True
            with suppress(BlockingIOError):  # then the thread has not read earlier notifications yet
                self._wake.send(b"1")

    def _turn(self) -> None:
        """Send the calls that may run, then wait for an answer, another call, or a deadline."""
        try:
            try:
                self._send()
                self._wait()
            except LateError:
                self._late()
        except EndedError as error:
            self._died(error)
        except MalformedError as error:
            raise self._forged(error) from None

    def _wait(self) -> None:
        due = min((call.due for call in self._running.values()), default=math.inf)
        left = None if due == math.inf else max(due - time.monotonic(), 0.0)
        session = self._session.fileno() if self._session else -1
        ready = wait([self._woken.fileno(), *([session] if self._session else [])], left)
        if self._woken.fileno() in ready:
            self._woken.recv(1 << 16)
            self._notified = False  # after the read and before `_send`: a call that came in between is found there
        if self._session and session in ready:
            self._take(self._session.hear(self._running, time.monotonic() + PING_TIMEOUT))
        elif due <= time.monotonic():
            raise LateError

    def _next(self) -> _Call | None:
        """Return the next call that may run; None: the call must wait, or there is none."""
        if self._suspects:
            return None if self._running else self._suspects.popleft()
        if not self._queue or any(call.alone for call in self._running.values()):
            return None
        room = len(self._running) < (1 if self._queue[0].alone else self._concurrency)
        return self._queue.popleft() if room else None

    def _send(self) -> None:
        while call := self._next():
            try:
                session = self._opened()
                due = time.monotonic() + self._timeout
                self._running[session.tell(call.request, due)] = call
                call.due = due
            except (ValueError, TypeError) as error:
                fault = f"{self.where} received values that are not JSON: {error}; fix the data set"
                call.answer.set_exception(ObserveError(fault))
            except LateError:
                self._running[0], call.due = call, due  # no request has this id
                raise
            except Exception:
                (self._suspects if call.alone else self._queue).appendleft(call)
                raise

    def _take(self, message: Message) -> None:
        if not isinstance(message, Observed):
            raise MalformedError("with a message that is not an observation")
        self._kills, self._answered = 0, self._answered + 1
        call = self._running.pop(message.request)
        if message.error is None:
            call.answer.set_result(message.seen)
        else:
            call.answer.set_exception(ObserveError(message.error))

    # --- failures -----------------------------------------------------------------------------------------------------

    def _late(self) -> None:
        """End the process of a late call; the late calls fail, and the other running calls are repeated.

        If the worker does not even answer a ping, one call may hold up the others, for instance in a regular expression
        that holds Python's lock. Then each running call is repeated alone.
        """
        assert self._session is not None, "a call is running"
        killed = self._session.fileno() < 0  # it did not read a call, or did not end an answer
        alike = len(self._running) > 1 and (killed or not self._answers(self._session))
        late = [call for call in self._running.values() if call.due <= time.monotonic()]
        if not (alike or late or killed):
            return  # the late call has ended after all
        self._session.close()
        self._session = None
        if alike:
            self._suspect()
            return
        for call in [] if late else list(self._running.values()):
            self._fail(call, f"did not end its answer within {PING_TIMEOUT:g} s and was killed; fix it")
        for call in late:
            why = f"took longer than observe_timeout ({self._timeout:g} s) and was killed"
            self._fail(call, f"{why}; make it faster, or raise observe_timeout of the stage")
        self._repeat()

    def _answers(self, session: Session) -> bool:
        """Return whether the worker answers a ping; observations that arrive first are accepted."""
        moment = time.monotonic() + PING_TIMEOUT
        try:
            ping = session.tell({"op": "ping"}, moment)
            while not isinstance(message := session.hear({ping, *self._running}, moment), End):
                self._take(message)
        except LateError:
            return False
        return True

    def _died(self, error: EndedError) -> None:
        """Repeat the running calls, or find the call that ended its process."""
        self._session = None
        calls = list(self._running.values())
        if error.killed:
            self._was_killed(error, calls)
        elif all(call.alone for call in calls):
            for call in calls:
                self._fail(call, f"{error}; fix it, or the row")
        else:  # also a single call, since a call that has been answered can be the cause
            self._suspect()

    def _was_killed(self, error: EndedError, calls: Sequence[_Call]) -> None:
        """Repeat the calls of a process that was killed, by the code or from outside.

        A call is the cause if its process is killed whenever the call runs alone, although other calls are answered, or
        there are none. Until then, other calls run first.
        """
        self._kills += 1
        if self._kills > _UNANSWERED:
            self._refuse_kill(error, self._kills)
        time.sleep(_PAUSE)
        for call in calls:
            call.answered = call.answered if call.kills else self._answered
            call.kills += 1
        if len(calls) != 1:
            self._repeat() if all(call.kills < _KILLED_TOGETHER for call in calls) else self._suspect()
            return
        [call] = calls
        others = self._answered > call.answered or not (self._queue or self._suspects)
        if call.kills >= _KILLED_OFTEN and others:
            why = "fix it or the row, or give the machine more memory"
            self._fail(call, f"{error}, {call.kills} times, each time alone; {why}")
            return
        call.alone, call.due, self._running = True, math.inf, {}
        self._queue.append(call)

    def _fail(self, call: _Call, why: str) -> None:
        self._running = {number: other for number, other in self._running.items() if other is not call}
        call.answer.set_exception(ObserveError(f"{self.where} {why}"))

    def _repeat(self) -> None:
        for call in reversed(self._running.values()):
            call.due = math.inf
            (self._suspects if call.alone else self._queue).appendleft(call)
        self._running = {}

    def _suspect(self) -> None:
        for call in self._running.values():
            call.alone, call.kills = True, 0
        self._repeat()

    def _refuse_kill(self, error: EndedError, times: int) -> None:
        raise InfrastructureError(
            f"{self._name} {error}, {times} times in a row; check the machine's memory, then retry"
        ) from None

    def _forged(self, error: MalformedError) -> RewardError:
        return RewardError(f"{self._name} answered {error}; observe must not write to its worker's socket")

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _opened(self) -> Session:
        """Return the worker with the user's code loaded, starting it if necessary."""
        while self._session is None:
            if self._fault:
                raise self._fault
            try:
                session = Session(self._plan, log=self._log)
                try:
                    self._load(session)
                except BaseException:
                    session.close()
                    raise
                self._session, self._killed = session, 0
            except EndedError as error:
                if not error.killed:
                    raise RewardError(f"{self._name} {error} while it was imported") from None
                self._killed += 1
                if self._killed > _KILLED_MOST:
                    self._refuse_kill(error, self._killed)
                time.sleep(_PAUSE)
            except NotConfinedError as error:
                raise InfrastructureError(f"{self._name}: {error}; check the machine's load, then retry") from None
            except LateError:
                raise RewardError(
                    f"{self._name} took longer than {ENGINE_TIMEOUT:g} s to load and was killed; make it load faster"
                ) from None
            except MalformedError as error:
                raise self._forged(error) from None
        return self._session

    def _load(self, session: Session) -> None:
        if self._must_be_confined and not session.confined:
            raise InputError(f"{self._name} must be confined: {'; '.join(session.notes)}; {TRUST}")
        answer = next(session.ask(self._order, ENGINE_TIMEOUT))
        if isinstance(answer, Fault):
            raise InputError(f"{self._name}: {answer.message}")
        if not isinstance(answer, Opened):
            raise MalformedError("with a message that is not the report of its import")
        self.notes, self.where = session.notes, answer.where
