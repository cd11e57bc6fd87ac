"""`Server` and who asks it, operations of long requests, and requests that are carried out once.

A `Server` is what a server answers from: workspace, entrance, workers, peers, meters, limits and operations. `asker`
finds who asks.

Operations are requests that take longer than their connection waits. They are polled, and cancelled where nobody asks
any more. `Prefer: respond-async` lets a request that a worker carries out be answered with 202 and the place of its
operation. From then on the database holds how it stands (`store.operations`), so any server of the ledger can report
and cancel it. An operation that ended with its server is asked again with its idempotency key, which carries it out
once.

A request with an `Idempotency-Key` is carried out once, however often it is sent and whoever dies meanwhile. The key
decides the ids of the request's transactions, so for a request whose server died the event log shows whether anything
of it was written. Then it is not carried out again, except for a verb that finds what it made before: that one goes on,
under further ids of the same request.
"""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from posttrain.api.control import Control
from posttrain.api.guarding import refuse
from posttrain.api.problems import problem
from posttrain.api.verbs import PREFIX
from posttrain.app.workspace import Workspace
from posttrain.control.owners import process_alive, process_name
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import (
    BusyError,
    CapacityError,
    ConflictError,
    InputError,
    LostOperationError,
    NotFoundError,
    PosttrainError,
    StoppedError,
)
from posttrain.server.connections import Peers
from posttrain.server.entrance import Asker, Entrance
from posttrain.server.limits import READ, Limits, check_path, in_thread
from posttrain.server.logs import logged_problem
from posttrain.server.metering import Meters
from posttrain.server.workers import OPERATION_SECONDS, Answers, Asking, Refused
from posttrain.store.hosts import Ledger, numbered, server_lives
from posttrain.store.operations import BEAT_SECONDS, DONE, Begun, Operations, Repeats

_FORM = re.compile(r"[A-Za-z0-9_-]{8,64}")
_REQUEST = 26  # hexadecimal digits of a request's id
_UNKEPT = frozenset({"issue_token", "rotate_token"})  # their answers are secrets
_GOES_ON = frozenset({"create_model"})  # writes more than once; carried out again it goes on with its own run
_FINDS = frozenset(("add_dataset", "add_external", "add_model", "add_reward"))  # what it made, unless others came since
_TRIES = 256  # of a request that goes on; its transactions are numbered by what is left of the 32 digits
_OK, _SERVERS = 200, 500
RUNNING, SUCCEEDED, FAILED, CANCELLED = "running", "succeeded", "failed", "cancelled"
LEFT_SECONDS = 60.0  # without a look, after which whoever asked is taken to be gone
KEPT_SECONDS = 600.0  # that what came of one is kept
MOST = 256  # that are kept in all
_WAIT, _MOST_WAIT = 10.0, 30.0  # seconds that a request is waited for before it is an operation
_LOOK = 1.0  # seconds between two looks whether anybody is there
_ID = re.compile("[0-9a-f]{26}")
_PREFERS = re.compile(r"(?:^|[,;\s])respond-async(?:$|[,;\s])")
_WAITS = re.compile(r"(?:^|[,;\s])wait=([0-9]{1,4})(?:$|[,;\s])")


class LaterError(CapacityError):
    """The same request is being answered at this moment."""


def used_key() -> InputError:
    """What is said of a key that comes with two requests."""
    return InputError("idempotency-key: must be another one for another request, got one that was used")


def request_id(key: str, project: str, principal: str, entropy: Callable[[int], bytes]) -> str:
    """The id of a request: of one with a key always the same.

    Raises:
        InputError: a key that is none.
    """
    if not key:
        return entropy(_REQUEST // 2).hex()
    if not _FORM.fullmatch(key):
        raise InputError(f"idempotency-key must be 8-64 of A-Z a-z 0-9 _ -, got {key[:80]!a}")
    return hashlib.sha256(json.dumps([project, principal, key]).encode()).hexdigest()[:_REQUEST]


class Once:
    """Carries requests of one asker out once.

    Args:
        ledger: of the asker's project.
        principal: pseudonymous id.
        request: as `request_id` gives it.
    """

    def __init__(self, ledger: Ledger, principal: str, request: str) -> None:
        self._ledger, self._request = ledger, request
        self._repeats, self._me = Repeats(ledger, principal), process_name()

    def answer(self, key: str, verb: str, sent: Mapping[str, Any], do: Callable[[str], bytes]) -> tuple[int, bytes]:
        """Status and body.

        Args:
            do: carries it out under a request's id, by which its transactions are numbered.

        Raises:
            LaterError: it is being answered. InputError: the key was another request's.
            ConflictError: it was carried out, and its answer cannot be given any more.
        """
        body = asked_of(verb, sent)
        known = self._repeats.begin(key, verb, body, self._me)
        if known is not None:
            if known.body != body:
                raise used_key()
            if known.state == DONE:
                return self._again(verb, known.status, known.answer)
            if self._lives(known.owner) or not self._repeats.take_over(key, known.owner, self._me):
                raise LaterError(f"{verb}: the same request is being answered; ask again in a second")
            if verb not in _GOES_ON and self._written(self._request):
                self._repeats.done(key, _OK, None)
                return self._again(verb, _OK, None)
        return self._first(key, verb, do)

    def _first(self, key: str, verb: str, do: Callable[[str], bytes]) -> tuple[int, bytes]:
        number = self._number(verb)
        try:
            found = do(number)
        except (Refused, PosttrainError) as error:
            document = error.document if isinstance(error, Refused) else problem(error, self._request)
            status = int(document["status"])
            if status < _SERVERS:
                self._repeats.done(key, status, json.dumps(document))
            else:
                self._let_again(key, verb)
            raise
        except BaseException:
            self._let_again(key, verb)
            raise
        self._repeats.done(key, _OK, None if verb in _UNKEPT else found.decode())
        return _OK, found

    def _let_again(self, key: str, verb: str) -> None:
        """The next try may do better, unless something of this one was written that it would write again."""
        if not self._written(self._request):
            self._repeats.forget(key, self._me)
        elif verb in _GOES_ON:
            self._repeats.leave(key, self._me)
        else:
            self._repeats.done(key, _OK, None)

    def _number(self, verb: str) -> str:
        """The id of the present try: of one that goes on with what another one wrote, the next."""
        if verb not in _GOES_ON:
            return self._request
        tries = (self._request, *(f"{self._request}{number:02x}" for number in range(1, _TRIES)))
        return next((one for one in tries if not self._written(one)), self._request)

    def _written(self, request: str) -> bool:
        """Whether a try of the request changed anything."""
        with self._ledger.snapshot() as now:
            return now.has_request(numbered(request, 0))

    def _again(self, verb: str, status: int | None, answer: str | None) -> tuple[int, bytes]:
        if answer is None:
            words = verb.replace("_", " ")
            if verb in _FINDS:
                raise ConflictError(
                    f"{words}: was carried out, and its answer is lost; ask for it once more, as a request of its own: "
                    "what it made is found, and made no second time"
                )
            raise ConflictError(
                f"{words}: was carried out, or begun, and its answer is lost or not kept; look at what is there before "
                "you ask again"
            )
        if status != _OK:
            raise Refused(json.loads(answer))
        return _OK, answer.encode()

    def _lives(self, owner: str) -> bool:
        """Whether whoever began it may still be at it."""
        if owner.partition(":")[0] != self._me.partition(":")[0]:
            return server_lives(self._ledger.database, self._ledger.clock, owner)
        return process_alive(owner)


@dataclass
class Running:
    """One operation."""

    id: str
    verb: str
    project: str
    principal: str
    sent: Any
    asking: Asking
    task: asyncio.Task[bytes] = field(init=False)
    began: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)
    ended: float | None = None
    known_as: str = ""  # pseudonymous id of whoever asked, once every server is to tell of it
    shared: bool = False  # the database says how it stands
    told: bool = False  # and how it ended
    said: tuple[str, bool] = ("", False)  # progress, and whether it is over, as the database has them
    said_at: float = 0.0
    progress: str = ""

    @property
    def given_over(self) -> bool:
        """Whether it found that another server carries it out, so that nothing is to be told of it here."""
        return self.task.done() and not self.task.cancelled() and isinstance(self.task.exception(), LaterError)

    def hear(self, piece: bytes) -> None:
        """What its worker says meanwhile."""
        said = json.loads(piece)
        if said.get("kind") == "progress":
            self.progress = str(said["value"])[:200]

    def to_json(self) -> bytes:
        """As it stands, with what came of it."""
        said: dict[str, Any] = {"id": self.id, "verb": self.verb, "state": RUNNING, "progress": self.progress}
        said["seconds"] = round((self.ended or time.monotonic()) - self.began, 1)
        if not self.task.done():
            return json.dumps(said).encode()
        error = self.task.exception() if not self.task.cancelled() else StoppedError("the operation was cancelled")
        if error is None:
            whole = json.dumps({**said, "state": SUCCEEDED}).encode()
            return whole[:-1] + b', "answer": ' + self.task.result() + b"}"
        said["state"] = CANCELLED if self.asking.over or self.task.cancelled() else FAILED
        told = error.document if isinstance(error, Refused) else logged_problem(error, self.id, self.verb)
        return json.dumps({**said, "problem": told}).encode()


class Underway:
    """The operations that one server carries out. It is asked by the event loop alone.

    Args:
        shared: what the ledger knows of them.
    """

    def __init__(self, shared: Operations) -> None:
        self._shared = shared
        self._all: dict[str, Running] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def find(self, number: str, principal: str, project: str) -> Running | None:
        """Somebody's operation, if this server carries it out."""
        found = self._all.get(number)
        if found is None or (found.principal, found.project) != (principal, project):
            return None
        found.looked = time.monotonic()
        return found

    def carries_out(self, number: str) -> bool:
        """Whether this server does."""
        return number in self._all

    async def share(self, one: Running, principal: str) -> None:
        """Let every server tell of it; where another one tells of the same at this moment, as soon as that is over.

        Args:
            principal: pseudonymous id.

        Raises:
            InputError: another server carries out another request with its key; this one is ended.
        """
        one.known_as = principal
        if one.shared:
            return
        body, progress = asked_of(one.verb, one.sent), one.progress
        begun = (one.id, one.project, principal, one.verb, body, one.to_json().decode())
        other = await in_thread(READ, self._shared.begin, *begun)
        if other is not None and other.body != body:
            one.asking.end()
            self.drop(one)
            raise used_key()
        if other is None:
            one.shared, one.said, one.said_at = True, (progress, False), time.monotonic()
            if self._all.get(one.id) is not one:  # it was dropped meanwhile
                await in_thread(READ, self._shared.forget, one.id)

    def begin(
        self, who: Asker, number: str, verb: str, sent: Any, carry: Callable[[Asking], Coroutine[Any, Any, bytes]]
    ) -> Running:
        """Carry a request out; one that is under way with this id and asks the same is that one.

        Raises:
            BusyError: the server keeps too many. InputError: one that asks something else is known by this id.
        """
        if known := self._all.get(number):
            if (known.verb, known.sent) != (verb, sent):
                raise used_key()
            known.looked = time.monotonic()
            return known
        self._make_room()
        asking = Asking(deadline=OPERATION_SECONDS)
        made = Running(number, verb, who.project, who.identity.principal, sent, asking)
        asking.told = made.hear
        made.task = asyncio.ensure_future(carry(asking))
        self._all[number] = made
        watch = asyncio.ensure_future(self._watch(made))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return made

    def drop(self, one: Running) -> None:
        """It was answered on its own connection."""
        if self._all.get(one.id) is one:
            del self._all[one.id]

    def _make_room(self) -> None:
        over = sorted((one for one in self._all.values() if one.ended is not None), key=lambda one: one.ended or 0.0)
        for one in over[: max(0, len(self._all) - MOST + 1)]:
            self.drop(one)
        if len(self._all) >= MOST:
            raise BusyError(f"the server carries out {MOST} operations; ask again later")

    async def _watch(self, one: Running) -> None:
        """Say how it stands; end it when nobody looks any more; forget it some time after."""
        while self._all.get(one.id) is one:
            await asyncio.wait({one.task}, timeout=_LOOK) if one.ended is None else await asyncio.sleep(_LOOK)
            if one.given_over:
                with suppress(PosttrainError):
                    await in_thread(READ, self._shared.forget, one.id)  # first, or it would look lost for a moment
                self.drop(one)  # another server carries it out: whoever asks again with the key is told of that one
            if one.known_as and not one.told:
                with suppress(PosttrainError):  # a database that is away: the next time
                    await self._tell(one)
            now = time.monotonic()
            if one.task.done():
                if one.ended is None:
                    one.ended = now
                    if not one.task.cancelled():
                        one.task.exception()  # it is told to whoever looks
                elif now - max(one.ended, one.looked) >= KEPT_SECONDS:
                    self.drop(one)
            elif now - one.looked >= LEFT_SECONDS:
                one.asking.end()

    async def _tell(self, one: Running) -> None:
        """Write what changed, and now and then that this server lives; read whether somebody looks or cancelled."""
        if self._all.get(one.id) is not one:
            await in_thread(READ, self._shared.forget, one.id)
            return
        if not one.shared:
            await self.share(one, one.known_as)
            return
        now, (progress, over) = time.monotonic(), (one.progress, one.task.done())
        if (progress, over) != one.said or now - one.said_at >= BEAT_SECONDS:
            await in_thread(READ, partial(self._shared.tell, one.id, one.to_json().decode(), over=over))
            one.said, one.said_at, one.told = (progress, over), now, over
        ago, ending = await in_thread(READ, self._shared.heard, one.id)
        one.looked = max(one.looked, time.monotonic() - ago)
        if ending:
            one.asking.end()


@dataclass(frozen=True, slots=True)
class Server:
    """What a server answers from."""

    workspace: Workspace
    entrance: Entrance
    workers: Answers
    ready: Callable[[], str]  # why it is not; empty: it is
    peers: Peers
    secure: bool = False  # browsers reach it over TLS alone
    behind_proxy: bool = False
    meters: Meters = field(default_factory=Meters)
    limits: Limits = field(default_factory=Limits)
    operations: Operations = field(init=False)
    underway: Underway = field(init=False)

    def __post_init__(self) -> None:
        ledger = self.workspace.ledger
        known = Operations(ledger.database, ledger.clock, process_name(), process_alive)
        object.__setattr__(self, "operations", known)
        object.__setattr__(self, "underway", Underway(known))

    def admitted(self, request: Request, verb: str) -> tuple[Asker, Control]:
        """Who asks, and what they may ask. It reads the ledger: call it in a thread.

        Raises:
            AccessError: not this verb. As `asker`.
        """
        who = asker(request)
        control = self.entrance.control(who)
        refuse(control, verb)
        return who, control


def asker(request: Request) -> Asker:
    """Who asks. It reads the ledger: call it in a thread.

    Raises:
        InputError: a part of the path is no such id or name. AuthenticationError: nobody whom the server knows.
    """
    server: Server = request.app.state.server
    check_path(request)
    identity = server.entrance.identify(request.headers.get("authorization", ""))
    who = Asker(identity, request.path_params["project"])
    request.state.asker, request.state.principal = who, server.entrance.known_as(who)
    return who


def wait_of(request: Request) -> float | None:
    """Seconds after which a request may be answered by its operation; None: it is answered as a whole."""
    said = request.headers.get("prefer", "")
    if not _PREFERS.search(said):
        return None
    found = _WAITS.search(said)
    return min(_MOST_WAIT, float(found[1])) if found else _WAIT


def accepted(project: str, number: str, document: bytes | str) -> Response:
    """202, and where it is."""
    place = f"{PREFIX.format(project=project)}/operations/{number}"
    headers = {"location": place, "cache-control": "no-store", "preference-applied": "respond-async"}
    return Response(document, 202, headers, "application/json")


def as_now(found: Begun) -> str:
    """How an operation of another server stands: its seconds went on since that one said them."""
    if found.over:
        return found.document
    said = json.loads(found.document)
    return json.dumps({**said, "seconds": round(float(said.get("seconds", 0.0)) + found.ago, 1)})


def asked_of(verb: str, sent: Any) -> str:
    """The digest of what was asked."""
    return digest_bytes(json.dumps([verb, sent], sort_keys=True).encode())


def add_routes(app: FastAPI, server: Server) -> None:
    """GET looks at an operation, DELETE cancels it."""
    all_of = _Looking(server)
    path = PREFIX + "/operations/{operation_id}"
    app.add_api_route(path, all_of.look, methods=["GET"], name="operation")
    app.add_api_route(path, all_of.cancel, methods=["DELETE"], name="cancel_operation")


class _Looking:
    """What is answered at the paths of operations."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def look(self, request: Request) -> Response:
        who, one = await self._asked(request)
        if one is not None:
            return _shown(_said(one))
        return _shown(as_now(await in_thread(READ, self._elsewhere, request, who)))

    async def cancel(self, request: Request) -> Response:
        """What is carried out elsewhere is looked at until it ended, for so long as a request waits."""
        who, one = await self._asked(request)
        if one is not None:
            if not one.task.done():
                one.asking.end()
                await asyncio.wait({one.task})
            return _shown(_said(one))
        until, found = time.monotonic() + _MOST_WAIT, await in_thread(READ, self._elsewhere, request, who)
        if not found.over:
            await in_thread(READ, self._server.operations.cancel, found.id, found.project, found.principal)
        while not found.over and time.monotonic() < until:
            await asyncio.sleep(_LOOK)
            found = await in_thread(READ, self._elsewhere, request, who)
        return _shown(as_now(found))

    async def _asked(self, request: Request) -> tuple[Asker, Running | None]:
        """Who asks, and their operation if this server carries it out."""
        who, _ = await in_thread(READ, self._server.admitted, request, "whoami")
        one = self._server.underway.find(request.path_params["operation_id"], who.identity.principal, who.project)
        if one is not None:
            await in_thread(READ, self._server.admitted, request, one.verb)  # a role that was taken away meanwhile
        return who, one

    def _elsewhere(self, request: Request, who: Asker) -> Begun:
        """An operation that another server carries out, or did.

        Raises:
            NotFoundError: they have none of this id. LostOperationError: that server is gone.
        """
        number = request.path_params["operation_id"]
        mine = number, who.project, self._server.entrance.principal(who)
        found = self._server.operations.find(*mine) if _ID.fullmatch(number) else None  # a database takes no other
        if found is None:
            raise _absent(number)
        self._server.admitted(request, found.verb)
        if found.lost:
            raise LostOperationError(
                f"operation {found.id}: the server that carried it out is gone; ask again with the same "
                "Idempotency-Key, which carries it out once"
            )
        return found


def _said(one: Running) -> bytes:
    """How an operation of this server stands.

    Raises:
        NotFoundError: another one carries it out.
    """
    if one.given_over:
        raise _absent(one.id)
    return one.to_json()


def _absent(number: str) -> NotFoundError:
    return NotFoundError(
        f"there is no operation {number[:80]!r} of yours; ask again with the same Idempotency-Key, which carries it "
        "out once"
    )


def _shown(document: bytes | str) -> Response:
    return Response(document, headers={"cache-control": "no-store"}, media_type="application/json")
