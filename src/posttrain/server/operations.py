"""The components of a `Server`, identification of callers, operations, and requests with an idempotency key.

A `Server` contains the components of the routes: workspace, authentication, workers, peers, meters, limits, operations.
`asker` identifies the caller of a request.

An operation is a request that takes longer than its connection waits. Clients poll operations; the server cancels an
operation that no client polls. With `Prefer: respond-async`, the response to a request that a worker carries out is 202
with the location of the operation. From then on the database contains the operation's state (`store.operations`), so
any server of the ledger can report and cancel the operation. If an operation is lost with its server, the client sends
the request again with its idempotency key, and the request is carried out once.

A request with an `Idempotency-Key` is carried out once, however often it is sent, and even if a server dies. The key
determines the ids of the request's transactions, so the event log shows whether a request whose server died changed
anything. If the request did, it is not carried out again, unless its verb can continue from the changes of the earlier
try; the transactions of such a verb then get further ids of the same request.
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

from posttrain.api.codec import problem
from posttrain.api.control import Control
from posttrain.api.verbs import PREFIX
from posttrain.app.control import refuse
from posttrain.app.workspace import Workspace
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
from posttrain.execution.processes import process_alive, process_name
from posttrain.server.authentication import Asker, Authentication
from posttrain.server.connections import Peers
from posttrain.server.limits import READ, Limits, check_path, in_thread
from posttrain.server.logs import logged_problem
from posttrain.server.metrics import Meters
from posttrain.server.workers import OPERATION_SECONDS, Answers, Asking, Refused
from posttrain.store.ledger import Ledger, numbered, server_lives
from posttrain.store.operations import BEAT_SECONDS, DONE, Begun, IdempotencyKeys, Operations

_FORM = re.compile(r"[A-Za-z0-9_-]{8,64}")
_REQUEST = 26  # hexadecimal digits of a request's id
_UNKEPT = frozenset({"issue_token", "rotate_token"})  # verbs whose answers contain secrets
_GOES_ON = frozenset({"create_model"})  # verbs that write more than once; a repeat continues with its own run
_FINDS = frozenset(
    ("add_dataset", "add_external", "add_harness", "add_model", "add_reward")
)  # a repeat finds the asset
_TRIES = 256  # maximum number of tries of a request; the last digits of its id number the tries
_OK, _SERVERS = 200, 500
RUNNING, SUCCEEDED, FAILED, CANCELLED = "running", "succeeded", "failed", "cancelled"
LEFT_SECONDS = 60.0  # seconds without a poll after which an operation is ended
KEPT_SECONDS = 600.0  # seconds for which the result of an operation is stored
MOST = 256  # maximum number of operations that are stored
_WAIT, _MOST_WAIT = 10.0, 30.0  # default and maximum seconds until a request becomes an operation
_LOOK = 1.0  # seconds between two checks for polls
_ID = re.compile("[0-9a-f]{26}")
_PREFERS = re.compile(r"(?:^|[,;\s])respond-async(?:$|[,;\s])")
_WAITS = re.compile(r"(?:^|[,;\s])wait=([0-9]{1,4})(?:$|[,;\s])")


class LaterError(CapacityError):
    """The same request is being answered now."""


def used_key() -> InputError:
    """Return the error for a key that two different requests use."""
    return InputError("idempotency-key: must be new for a different request, got one that was used")


def request_id(key: str, project: str, principal: str, entropy: Callable[[int], bytes]) -> str:
    """Return the id of a request: the same id for the same key, and a random id without a key.

    Raises:
        InputError: the key is malformed.
    """
    if not key:
        return entropy(_REQUEST // 2).hex()
    if not _FORM.fullmatch(key):
        raise InputError(f"idempotency-key must be 8-64 of A-Z a-z 0-9 _ -, got {key[:80]!a}")
    return hashlib.sha256(json.dumps([project, principal, key]).encode()).hexdigest()[:_REQUEST]


class Once:
    """Carries out each keyed request of one caller once.

    Args:
        ledger: the ledger, scoped to the caller's project.
        principal: the caller's pseudonymous id.
        request: the id that `request_id` returns.
    """

    def __init__(self, ledger: Ledger, principal: str, request: str) -> None:
        self._ledger, self._request = ledger, request
        self._repeats, self._me = IdempotencyKeys(ledger, principal), process_name()

    def answer(self, key: str, verb: str, sent: Mapping[str, Any], do: Callable[[str], bytes]) -> tuple[int, bytes]:
        """Carry out a request, or repeat the stored response; return the status and body.

        Args:
            do: carries out the request; its argument is the request id for the transactions.

        Raises:
            LaterError: the same request is being carried out.
            InputError: another request used the key.
            ConflictError: the request was carried out, and its response is lost or was not stored.
        """
        body = asked_of(verb, sent)
        known = self._repeats.begin(key, verb, body, self._me)
        if known is not None:
            if known.body != body:
                raise used_key()
            if known.state == DONE:
                return self._again(verb, known.status, known.answer)
            if self._lives(known.owner) or not self._repeats.take_over(key, known.owner, self._me):
                raise LaterError(f"{verb}: the same request is being answered; try again in a second")
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
        """Allow another try, unless this try made a change that another try would repeat."""
        if not self._written(self._request):
            self._repeats.forget(key, self._me)
        elif verb in _GOES_ON:
            self._repeats.leave(key, self._me)
        else:
            self._repeats.done(key, _OK, None)

    def _number(self, verb: str) -> str:
        """Return the id of the current try; for a verb that continues an earlier try, the next free id."""
        if verb not in _GOES_ON:
            return self._request
        tries = (self._request, *(f"{self._request}{number:02x}" for number in range(1, _TRIES)))
        return next((one for one in tries if not self._written(one)), self._request)

    def _written(self, request: str) -> bool:
        """Return whether a try of the request changed anything."""
        with self._ledger.snapshot() as now:
            return now.has_request(numbered(request, 0))

    def _again(self, verb: str, status: int | None, answer: str | None) -> tuple[int, bytes]:
        if answer is None:
            words = verb.replace("_", " ")
            if verb in _FINDS:
                raise ConflictError(
                    f"{words}: the request was carried out, but its response was lost; send a new request, which "
                    "returns the existing result"
                )
            raise ConflictError(
                f"{words}: the request was begun and possibly completed, but its response was lost; check the result "
                "before you repeat the request"
            )
        if status != _OK:
            raise Refused(json.loads(answer))
        return _OK, answer.encode()

    def _lives(self, owner: str) -> bool:
        """Return whether the process that began the request may still be carrying it out."""
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
    known_as: str = ""  # pseudonymous id of the caller; set if every server should report the operation
    shared: bool = False  # whether the database contains the operation's state
    told: bool = False  # whether the database contains the outcome
    said: tuple[str, bool] = ("", False)  # progress, and whether the operation has ended, as written to the database
    said_at: float = 0.0
    progress: str = ""

    @property
    def given_over(self) -> bool:
        """Whether another server carries out the operation, so this server does not report it."""
        return self.task.done() and not self.task.cancelled() and isinstance(self.task.exception(), LaterError)

    def hear(self, piece: bytes) -> None:
        """Record the progress that the operation's worker reports."""
        said = json.loads(piece)
        if said.get("kind") == "progress":
            self.progress = str(said["value"])[:200]

    def to_json(self) -> bytes:
        """Return the state as JSON, with the answer or the problem once the operation has ended."""
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


class RunningOperations:
    """The operations that one server carries out. Only the event loop calls this class.

    Args:
        shared: the operations in the database.
    """

    def __init__(self, shared: Operations) -> None:
        self._shared = shared
        self._all: dict[str, Running] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def find(self, number: str, principal: str, project: str) -> Running | None:
        """Record a poll of a principal's operation and return it; None: this server does not carry it out."""
        found = self._all.get(number)
        if found is None or (found.principal, found.project) != (principal, project):
            return None
        found.looked = time.monotonic()
        return found

    def carries_out(self, number: str) -> bool:
        """Return whether this server carries out the operation."""
        return number in self._all

    async def share(self, one: Running, principal: str) -> None:
        """Record an operation in the database, so every server can report it.

        While another server has an operation with the same id, this operation is not recorded; `_tell` tries again.

        Args:
            principal: the caller's pseudonymous id.

        Raises:
            InputError: another server carries out a different request with this key; this operation is ended.
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
            if self._all.get(one.id) is not one:  # the operation was dropped during the await
                await in_thread(READ, self._shared.forget, one.id)

    def begin(
        self, who: Asker, number: str, verb: str, sent: Any, carry: Callable[[Asking], Coroutine[Any, Any, bytes]]
    ) -> Running:
        """Start an operation, or return the existing operation with the same id and request.

        Raises:
            BusyError: the server has too many operations.
            InputError: another request has this id.
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
        """Remove an operation whose result was sent on its own connection or has expired."""
        if self._all.get(one.id) is one:
            del self._all[one.id]

    def _make_room(self) -> None:
        over = sorted((one for one in self._all.values() if one.ended is not None), key=lambda one: one.ended or 0.0)
        for one in over[: max(0, len(self._all) - MOST + 1)]:
            self.drop(one)
        if len(self._all) >= MOST:
            raise BusyError(f"the server already carries out {MOST} operations; try again later")

    async def _watch(self, one: Running) -> None:
        """Publish an operation's state, end it when no client polls it, and drop it some time later."""
        while self._all.get(one.id) is one:
            await asyncio.wait({one.task}, timeout=_LOOK) if one.ended is None else await asyncio.sleep(_LOOK)
            if one.given_over:
                with suppress(PosttrainError):
                    await in_thread(READ, self._shared.forget, one.id)  # first, or it would look lost
                self.drop(one)  # another server carries it out and handles the next request with the key
            if one.known_as and not one.told:
                with suppress(PosttrainError):  # the database is unreachable; the next round tries again
                    await self._tell(one)
            now = time.monotonic()
            if one.task.done():
                if one.ended is None:
                    one.ended = now
                    if not one.task.cancelled():
                        one.task.exception()  # retrieved, so asyncio does not log it; polls report it
                elif now - max(one.ended, one.looked) >= KEPT_SECONDS:
                    self.drop(one)
            elif now - one.looked >= LEFT_SECONDS:
                one.asking.end()

    async def _tell(self, one: Running) -> None:
        """Write changes and a heartbeat to the database; read polls and cancellations from it."""
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
    """The components that a server's routes use."""

    workspace: Workspace
    authentication: Authentication
    workers: Answers
    ready: Callable[[], str]  # returns the reason why the server is not ready, or ""
    peers: Peers
    secure: bool = False  # whether browsers reach the server only over TLS
    behind_proxy: bool = False
    meters: Meters = field(default_factory=Meters)
    limits: Limits = field(default_factory=Limits)
    operations: Operations = field(init=False)
    running: RunningOperations = field(init=False)

    def __post_init__(self) -> None:
        ledger = self.workspace.ledger
        known = Operations(ledger.database, ledger.clock, process_name(), process_alive)
        object.__setattr__(self, "operations", known)
        object.__setattr__(self, "running", RunningOperations(known))

    def admitted(self, request: Request, verb: str) -> tuple[Asker, Control]:
        """Return the caller and a `Control`. Call this in a thread, because it reads the ledger.

        Raises:
            AccessError: the caller may not call this verb.
            InputError: a part of the path is not a valid id or name.
            AuthenticationError: the token is not valid.
        """
        who = asker(request)
        control = self.authentication.control(who)
        refuse(control, verb)
        return who, control


def asker(request: Request) -> Asker:
    """Return the caller of a request. Call this in a thread, because it reads the ledger.

    Raises:
        InputError: a part of the path is not a valid id or name.
        AuthenticationError: the token is not valid.
    """
    server: Server = request.app.state.server
    check_path(request)
    identity = server.authentication.identify(request.headers.get("authorization", ""))
    who = Asker(identity, request.path_params["project"])
    request.state.asker, request.state.principal = who, server.authentication.known_as(who)
    return who


def wait_of(request: Request) -> float | None:
    """Return the seconds after which a request becomes an operation; None if the request never does."""
    said = request.headers.get("prefer", "")
    if not _PREFERS.search(said):
        return None
    found = _WAITS.search(said)
    return min(_MOST_WAIT, float(found[1])) if found else _WAIT


def accepted(project: str, number: str, document: bytes | str) -> Response:
    """Return a 202 response with the location of the operation."""
    place = f"{PREFIX.format(project=project)}/operations/{number}"
    headers = {"location": place, "cache-control": "no-store", "preference-applied": "respond-async"}
    return Response(document, 202, headers, "application/json")


def as_now(found: Begun) -> str:
    """Return the state of another server's operation, with its seconds advanced to the current time."""
    if found.over:
        return found.document
    said = json.loads(found.document)
    return json.dumps({**said, "seconds": round(float(said.get("seconds", 0.0)) + found.ago, 1)})


def asked_of(verb: str, sent: Any) -> str:
    """Return the digest of a request's verb and parameters."""
    return digest_bytes(json.dumps([verb, sent], sort_keys=True).encode())


def add_routes(app: FastAPI, server: Server) -> None:
    """Add the routes of operations: GET returns an operation, DELETE cancels it."""
    all_of = _Looking(server)
    path = PREFIX + "/operations/{operation_id}"
    app.add_api_route(path, all_of.look, methods=["GET"], name="operation")
    app.add_api_route(path, all_of.cancel, methods=["DELETE"], name="cancel_operation")


class _Looking:
    """Handlers of the operation routes."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def look(self, request: Request) -> Response:
        who, one = await self._asked(request)
        if one is not None:
            return _shown(_said(one))
        return _shown(as_now(await in_thread(READ, self._elsewhere, request, who)))

    async def cancel(self, request: Request) -> Response:
        """Cancel an operation; an operation on another server is polled until it ends or `_MOST_WAIT` passes."""
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
        """Return the caller, and the caller's operation if this server carries it out."""
        who, _ = await in_thread(READ, self._server.admitted, request, "whoami")
        one = self._server.running.find(request.path_params["operation_id"], who.identity.principal, who.project)
        if one is not None:
            await in_thread(READ, self._server.admitted, request, one.verb)  # the role may have been removed since
        return who, one

    def _elsewhere(self, request: Request, who: Asker) -> Begun:
        """Return an operation that another server carries out or carried out.

        Raises:
            NotFoundError: the caller has no operation with this id.
            LostOperationError: the other server no longer exists.
        """
        number = request.path_params["operation_id"]
        mine = number, who.project, self._server.authentication.principal(who)
        found = self._server.operations.find(*mine) if _ID.fullmatch(number) else None  # only valid ids are looked up
        if found is None:
            raise _absent(number)
        self._server.admitted(request, found.verb)
        if found.lost:
            raise LostOperationError(
                f"operation {found.id}: the server that carried it out has ended; send the request again with the same "
                "Idempotency-Key; the request is then not carried out twice"
            )
        return found


def _said(one: Running) -> bytes:
    """Return the state of an operation of this server.

    Raises:
        NotFoundError: another server carries out the operation.
    """
    if one.given_over:
        raise _absent(one.id)
    return one.to_json()


def _absent(number: str) -> NotFoundError:
    return NotFoundError(
        f"you have no operation {number[:80]!r}; repeat the request with its Idempotency-Key, so that it is carried "
        "out once"
    )


def _shown(document: bytes | str) -> Response:
    return Response(document, headers={"cache-control": "no-store"}, media_type="application/json")
