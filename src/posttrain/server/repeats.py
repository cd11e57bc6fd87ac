"""A request with an `Idempotency-Key` is carried out once, however often it is sent and whoever dies meanwhile.

The key decides the ids of the request's transactions, so the event log tells of a request whose server died whether
anything of it was written. Then it is not carried out again, but for a verb that finds what it made before: that one
goes on, under further ids of the same request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.api.problems import problem
from posttrain.app.collecting import ANSWERS_SECONDS
from posttrain.control.owners import process_alive, process_name
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import CapacityError, ConflictError, InputError, PosttrainError
from posttrain.server.workers import Refused
from posttrain.store.hosts import server_lives
from posttrain.store.ledger import Ledger, numbered
from posttrain.store.operations import DONE, Repeats

KEPT_SECONDS = ANSWERS_SECONDS
_FORM = re.compile(r"[A-Za-z0-9_-]{8,64}")
_REQUEST = 26  # hexadecimal digits of a request's id
_UNKEPT = frozenset({"issue_token", "rotate_token"})  # their answers are secrets
_GOES_ON = frozenset({"create_model"})  # writes more than once; carried out again it goes on with its own run
_FINDS = frozenset(("add_dataset", "add_external", "add_model", "add_reward"))  # what it made, unless others came since
_TRIES = 256  # of a request that goes on; its transactions are numbered by what is left of the 32 digits
_OK, _SERVERS = 200, 500


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
        body = digest_bytes(json.dumps([verb, sent], sort_keys=True).encode())
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
