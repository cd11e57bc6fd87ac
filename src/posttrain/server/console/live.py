"""Pages that follow: a stream tells a browser that what it shows is another by now, and the browser asks for the page.

What is told is that something changed, never what: so a stream holds nothing that a page would have to escape. Many
who look at the same cost what one of them does.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from posttrain.domain.errors import BusyError, InputError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.server.console.pages import PAGE
from posttrain.server.console.visiting import HEADERS
from posttrain.server.lanes import FOLLOW, READ, in_thread
from posttrain.server.streams import Followed, is_ending

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import RunStatus
    from posttrain.server.console.visiting import Visit

MOST = 200  # browsers that follow at a time; the others ask again and again
_EVERY = 1.0  # seconds between two looks
_AGAIN = 5.0  # seconds between two looks whether whoever follows still may
_SILENT = 15.0  # seconds after which a comment keeps the connection open
_LONGEST = 900.0  # seconds of one stream; the browser opens another one
_KEPT = 256  # marks
_RUN = "run/"


class Live:
    """Marks of what pages show, shared by all who follow it."""

    def __init__(self) -> None:
        self._marks: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()
        self.followers = 0

    def mark(self, visit: Visit, of: str) -> str:
        """What stands for the present state of a page.

        Raises:
            InputError: there is no such page.
        """
        does = _LOOKS.get(of.partition("/")[0])
        if does is None:
            raise InputError(f"live: of must be runs, run/ID, channels or channel/NAME, got {of[:80]!a}")
        key = visit.project, of
        with self._lock:
            at, known = self._marks.get(key, (-_EVERY, ""))
        if time.monotonic() - at < _EVERY / 2:
            return known
        found = hashlib.sha256(repr(does(visit.control, of.partition("/")[2])).encode("utf-8", "replace")).hexdigest()
        with self._lock:
            self._marks[key] = time.monotonic(), found
            self._marks.move_to_end(key)
            while len(self._marks) > _KEPT:
                self._marks.popitem(last=False)
        return found

    async def follow(self, request: Request, enter: Callable[[Request], Visit]) -> Response:
        """A stream of events `changed`."""
        of = request.query_params.get("of", "")
        visit = await in_thread(READ, enter, request)
        if of.startswith(_RUN):
            run_id = of.removeprefix(_RUN)
            found = await visit.server.peers.answer(
                request, lambda: visit.server.entrance.ledger(visit.asker), run_id, visit.asker.identity
            )
            if found is not None:
                found.headers.update(HEADERS)
                return found
        told = await in_thread(READ, self.mark, visit, of)
        if self.followers >= MOST:
            raise BusyError("too many follow pages of this server; reload instead")
        counted = visit.server.limits.taken(visit.asker.identity.principal, FOLLOW)
        stream = Followed(self._told(request, enter, visit, of, told), counted)
        stream.headers.update(HEADERS)
        return stream

    async def _told(
        self, request: Request, enter: Callable[[Request], Visit], visit: Visit, of: str, told: str
    ) -> AsyncIterator[bytes]:
        self.followers += 1
        begun = asked = said = time.monotonic()
        try:
            yield b": following\n\n"
            while not (await request.is_disconnected() or is_ending(request)):
                await asyncio.sleep(_EVERY)
                now = time.monotonic()
                if now - begun > _LONGEST:
                    return
                if now - asked >= _AGAIN:
                    visit, asked = await in_thread(READ, enter, request), now
                mark = await in_thread(READ, self.mark, visit, of)
                if mark != told:
                    told, said = mark, now
                    yield b"event: changed\ndata: {}\n\n"
                elif now - said >= _SILENT:
                    said = now
                    yield b": still here\n\n"
        except PosttrainError:  # over: the browser asks for the page, and is told why
            yield b"event: changed\ndata: {}\n\n"
        finally:
            self.followers -= 1


def _brief(one: RunStatus) -> Any:
    return one.run.id, one.run.state, one.why, one.under_way, one.tokens, str(one.driver)


def _runs(control: Control, _: str) -> Any:
    return [_brief(one) for one in (*control.queue(PAGE), *control.ls(PAGE))]


def _run(control: Control, run_id: str) -> Any:
    status = control.watcher(run_id).read()
    stages = [
        (one.record.generation, one.record.state, one.reason, one.progress.step, one.progress.at, len(one.attempts))
        for one in status.stages
    ]
    over = is_final("run", status.run.state)
    return status.run.generation, over, _brief(status), stages, status.signals, status.approvals


def _channels(control: Control, _: str) -> Any:
    return control.channels(), control.live()


def _channel(control: Control, name: str) -> Any:
    return control.channel(name), control.approval_requests(name)


# each asks what whoever is logged in may look at, which is why nobody is asked again where a mark is known
_LOOKS: dict[str, Callable[[Control, str], Any]] = {
    "runs": _runs,
    "run": _run,
    "channels": _channels,
    "channel": _channel,
}
