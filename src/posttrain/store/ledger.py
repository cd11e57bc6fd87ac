"""The ledger: runs, stages, attempts, assets, releases, and the events that tell how they came about.

Reading: each method of `Ledger` is a snapshot of its own; `snapshot()` asks several questions of one moment.
Writing: `transaction(actor)`. Keep it short and do no work inside: on SQLite it holds the only write lock.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.domain.errors import ConflictError, InfrastructureError
from posttrain.domain.ports import Clock
from posttrain.domain.records import (
    DEFAULT_PROJECT,
    Artifact,
    Asset,
    AssetStatus,
    AttemptRecord,
    ChannelRecord,
    Deployment,
    Event,
    Quarantine,
    ReleaseEntry,
    RunRecord,
    Signal,
    StageRecord,
)
from posttrain.store.clock import SystemClock
from posttrain.store.database import Database, LostAnswerError
from posttrain.store.journal import Author, Entropy, new_request
from posttrain.store.snapshot import Snapshot
from posttrain.store.transaction import Transaction

_DIGITS = 32  # of a transaction's id


def numbered(request: str, number: int) -> str:
    """The id of one of a request's transactions: 32 hexadecimal digits, the last of them its number, from 0."""
    return f"{request}{number:0{_DIGITS - len(request)}x}"


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
        self.database = database
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

    def run(self, run_id: str) -> RunRecord:
        """See `Snapshot.run`."""
        with self.snapshot() as now:
            return now.run(run_id)

    def runs(
        self, limit: int | None = None, state: str | None = None, manifest_digest: str | None = None
    ) -> list[RunRecord]:
        """See `Snapshot.runs`."""
        with self.snapshot() as now:
            return now.runs(limit, state, manifest_digest)

    def find_run(self, prefix: str) -> RunRecord:
        """See `Snapshot.find_run`."""
        with self.snapshot() as now:
            return now.find_run(prefix)

    def stages(self, run_id: str) -> list[StageRecord]:
        """See `Snapshot.stages`."""
        with self.snapshot() as now:
            return now.stages(run_id)

    def attempts(self, run_id: str, stage: str | None = None) -> list[AttemptRecord]:
        """See `Snapshot.attempts`."""
        with self.snapshot() as now:
            return now.attempts(run_id, stage)

    def asset(self, kind: str, name: str, version: int | None = None) -> Asset:
        """See `Snapshot.asset`."""
        with self.snapshot() as now:
            return now.asset(kind, name, version)

    def assets(self, kind: str | None = None, name: str | None = None) -> list[Asset]:
        """See `Snapshot.assets`."""
        with self.snapshot() as now:
            return now.assets(kind, name)

    def assets_by_digest(self, digest: str) -> list[Asset]:
        """See `Snapshot.assets_by_digest`."""
        with self.snapshot() as now:
            return now.assets_by_digest(digest)

    def find_artifact(self, prefix: str) -> Artifact:
        """See `Snapshot.find_artifact`."""
        with self.snapshot() as now:
            return now.find_artifact(prefix)

    def channel(self, name: str) -> ReleaseEntry | None:
        """See `Snapshot.channel`."""
        with self.snapshot() as now:
            return now.channel(name)

    def channel_record(self, name: str) -> ChannelRecord:
        """See `Snapshot.channel_record`."""
        with self.snapshot() as now:
            return now.channel_record(name)

    def channel_records(self) -> list[ChannelRecord]:
        """See `Snapshot.channel_records`."""
        with self.snapshot() as now:
            return now.channel_records()

    def deployments(self, name: str) -> list[Deployment]:
        """See `Snapshot.deployments`."""
        with self.snapshot() as now:
            return now.deployments(name)

    def channel_events(self, name: str, kind: str) -> list[Event]:
        """See `Snapshot.channel_events`."""
        with self.snapshot() as now:
            return now.channel_events(name, kind)

    def history(self, name: str) -> list[ReleaseEntry]:
        """See `Snapshot.history`."""
        with self.snapshot() as now:
            return now.history(name)

    def asset_status(self, status: str | None = None) -> list[tuple[AssetStatus, str]]:
        """See `Snapshot.asset_status`."""
        with self.snapshot() as now:
            return now.asset_status(status)

    def signals(self, run_id: str) -> list[Signal]:
        """See `Snapshot.signals`."""
        with self.snapshot() as now:
            return now.signals(run_id)

    def quarantine(self, name: str) -> list[Quarantine]:
        """See `Snapshot.quarantine`."""
        with self.snapshot() as now:
            return now.quarantine(name)

    def channels(self) -> list[str]:
        """See `Snapshot.channels`."""
        with self.snapshot() as now:
            return now.channels()

    def stages_by_key(self, cache_key: str) -> list[StageRecord]:
        """See `Snapshot.stages_by_key`."""
        with self.snapshot() as now:
            return now.stages_by_key(cache_key)

    def cached_stage(self, cache_key: str) -> StageRecord | None:
        """See `Snapshot.cached_stage`."""
        with self.snapshot() as now:
            return now.cached_stage(cache_key)

    def events(self, after: int = 0, subject_prefix: str | None = None, limit: int = 1000) -> list[Event]:
        """See `Snapshot.events`."""
        with self.snapshot() as now:
            return now.events(after, subject_prefix, limit)

    def pending_events(self, subject_prefix: str | None = None, limit: int = 1000) -> list[Event]:
        """See `Snapshot.pending_events`."""
        with self.snapshot() as now:
            return now.pending_events(subject_prefix, limit)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
