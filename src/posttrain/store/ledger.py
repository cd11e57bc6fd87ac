"""The ledger: runs, stages, attempts, assets, releases, and the events that tell how they came about.

Reading: each method of `Ledger` is a snapshot of its own; `snapshot()` asks several questions of one moment.
Writing: `transaction(actor)`. Keep it short and do no work inside: on SQLite it holds the only write lock.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from posttrain.domain.errors import ConflictError, InfrastructureError
from posttrain.domain.ports import Clock
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.database import Database, LostAnswerError, SystemClock
from posttrain.store.journal import Author, Entropy, new_request
from posttrain.store.snapshot import Snapshot
from posttrain.store.transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")
_DIGITS = 32  # of a transaction's id
_WRITTEN: ContextVar[list[Any] | None] = ContextVar("posttrain_written", default=None)


def numbered(request: str, number: int) -> str:
    """The id of one of a request's transactions: 32 hexadecimal digits, the last of them its number, from 0."""
    return f"{request}{number:0{_DIGITS - len(request)}x}"


def _read(query: Callable[Concatenate[Snapshot, P], R]) -> Callable[Concatenate[Ledger, P], R]:
    """The method of `Ledger` that asks one question of a snapshot of its own."""

    def asked(self: Ledger, /, *words: P.args, **options: P.kwargs) -> R:
        with self.snapshot() as now:
            found: R = getattr(now, query.__name__)(*words, **options)
        return found

    functools.update_wrapper(asked, query)
    return asked


class Ledger:
    """The state of record, over one database.

    Every method raises WorkspaceError (read-only, disk full, damaged) and DeadlineError (locked for too long).

    Args:
        project: what is read and written belongs to it; nothing of another is seen.
        auth: how whoever acts through it was known, as events say it.
        entropy: so many random bytes, for ids and salts.
        request: what asks; its transactions have numbered ids, so that events and logs tell which they were. Empty:
            each transaction has an id of its own.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        project: str = DEFAULT_PROJECT,
        entropy: Entropy = os.urandom,
        auth: str = "os",
        request: str = "",
    ) -> None:
        self.database = database.of(project)
        self.clock: Clock = clock or SystemClock()
        self.project, self.entropy, self.auth = project, entropy, auth
        self._request, self._numbers = request, itertools.count()
        self._principals: dict[str, str] = {}  # whose name acted through it before → their id

    @contextmanager
    def transaction(self, actor: str) -> Iterator[Transaction]:
        """One write transaction. It commits when the block ends and leaves nothing when the block raises.

        A lost answer to the commit is resolved by what is there afterwards.

        Args:
            actor: whose principal is named in every event, e.g. `user:ann` or `reconciler`.

        Raises:
            InfrastructureError: the connection was lost and nothing was written.
            ConflictError: somebody wrote what this was to write; or the name of whoever acts was erased by another
                process since they acted last, and whoever has it now is somebody else: do it again.
        """
        request = numbered(self._request, next(self._numbers)) if self._request else new_request(self.entropy)
        author = Author(actor, request, self.auth, self.entropy, self._principals)
        try:
            with self.database.write() as connection:
                transaction = Transaction(connection, author, self.clock, self.project)
                if self._request and request == numbered(self._request, 0):
                    transaction.refuse_repeated(request)
                yield transaction
                transaction.flush()
        except LostAnswerError as error:
            if not self._committed(author.request):
                raise InfrastructureError(
                    f"ledger {self.database.place}: the connection was lost before a commit; nothing was written, "
                    "run the command again"
                ) from error
        except ConflictError:
            self._principals.pop(actor, None)
            raise
        self._principals |= {name: found for name, found in transaction.principals.items() if name == actor}
        written = _WRITTEN.get()
        if written is not None:
            written += transaction.written

    @contextmanager
    def untold(self) -> Iterator[Connection]:
        """A write transaction over rows of which no event tells.

        Raises:
            InfrastructureError: the answer to its commit was lost: whoever wrote looks again.
        """
        try:
            with self.database.write() as connection:
                yield connection
        except LostAnswerError as error:
            raise InfrastructureError(f"{error}; looking again") from error

    @contextmanager
    def written(self) -> Iterator[list[Any]]:
        """The records of runs, stages and attempts that this thread's transactions in the block commit."""
        found, outer = list[Any](), _WRITTEN.get()
        kept = _WRITTEN.set(found)
        try:
            yield found
        finally:
            _WRITTEN.reset(kept)
            if outer is not None:
                outer += found

    def forget_principals(self) -> None:
        """Look up the ids of principals anew: a name was erased, and whoever has it from now on is somebody else."""
        self._principals.clear()

    def _committed(self, request: str) -> bool:
        """Whether a transaction whose answer was lost is there."""
        with self.snapshot() as now:
            return now.has_request(request)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Several reads of one moment."""
        with self.database.read() as connection:
            yield Snapshot(connection, self.project)

    run = _read(Snapshot.run)
    runs = _read(Snapshot.runs)
    find_run = _read(Snapshot.find_run)
    stages = _read(Snapshot.stages)
    attempts = _read(Snapshot.attempts)
    asset = _read(Snapshot.asset)
    assets = _read(Snapshot.assets)
    assets_by_digest = _read(Snapshot.assets_by_digest)
    find_artifact = _read(Snapshot.find_artifact)
    sink = _read(Snapshot.sink)
    channel = _read(Snapshot.channel)
    channel_record = _read(Snapshot.channel_record)
    channel_records = _read(Snapshot.channel_records)
    deployments = _read(Snapshot.deployments)
    events_about = _read(Snapshot.events_about)
    history = _read(Snapshot.history)
    asset_status = _read(Snapshot.asset_status)
    notes = _read(Snapshot.notes)
    signals = _read(Snapshot.signals)
    quarantine = _read(Snapshot.quarantine)
    channels = _read(Snapshot.channels)
    stages_by_key = _read(Snapshot.stages_by_key)
    cached_stage = _read(Snapshot.cached_stage)
    computed = _read(Snapshot.computed)
    events = _read(Snapshot.events)
    images = _read(Snapshot.images)
    projects = _read(Snapshot.projects)
    roles = _read(Snapshot.roles)
    roles_of = _read(Snapshot.roles_of)
    tokens = _read(Snapshot.tokens)
    token_of = _read(Snapshot.token_of)
    artifacts = _read(Snapshot.artifacts)
    pending_events = _read(Snapshot.pending_events)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
