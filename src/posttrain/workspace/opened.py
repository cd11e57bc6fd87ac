"""A workspace that is open: one folder with a ledger, blobs, attempt folders and a cache, and what works on them.

`app.workspace` opens one and chooses its back-ends; whoever is given it does not know which they are.
"""

from __future__ import annotations

import copy
import functools
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from posttrain.control.jobs import Jobs
from posttrain.control.owners import process_alive, process_name
from posttrain.control.stores import Stores
from posttrain.data.assets import ModelLimits
from posttrain.data.catalog import Catalog
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, PosttrainError, WorkspaceError
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord
from posttrain.execution.executors.installed import InstalledExecutor
from posttrain.store.atomic import read_json, write_json
from posttrain.store.blobs import ObjectBlobs, blobs_url
from posttrain.store.hosts import Hosts
from posttrain.store.hosts import Ledger
from posttrain.store.sealer import Lost, accept_loss, find_lost, keep_head, seal
from posttrain.workspace.served import is_served
from posttrain.workspace.settings import (
    CHANNEL,
    LIMITS,
    OWN_STORE,
    SETTINGS,
    TRUSTED,
    fresh_record,
    recorded,
    settings_lock,
)

if TYPE_CHECKING:
    from posttrain.control.reconciler import Reconciler

_PLACE_DIGITS = 32
_MOST_MANIFESTS = 1024  # that are kept


class OpenWorkspace:
    """The control plane over one folder."""

    root: Path
    actor: str  # who acts, as the audit log names it
    settings: Mapping[str, Any]  # of workspace.json
    ledger: Ledger
    blobs: ObjectBlobs
    stores: Stores
    jobs: Jobs
    catalog: Catalog
    hosts: Hosts | None = None  # of its ledger; None where it is this folder's alone

    @property
    def served(self) -> bool:
        """Whether a server has it, which goes by the settings that it read when it began."""
        return is_served(self.root)

    @property
    def trusts_rewards(self) -> bool:
        """Whether rewards may run where the kernel cannot confine them."""
        return self.settings.get("rewards") == TRUSTED

    def manifest_or_trouble(self, run: RunRecord) -> tuple[Manifest | None, str]:
        """A run's manifest, or one line that says why it cannot be read: a look at many runs survives a bad one."""
        known = self._manifests.get(run.manifest_digest)
        if known is not None:
            return known, ""
        try:
            found = self.stores.manifest(run)
            if len(self._manifests) < _MOST_MANIFESTS:  # bytes by their digest: they never change
                self._manifests[run.manifest_digest] = found
            return found, ""
        except (PosttrainError, ValueError) as error:  # bytes gone or corrupt, or a manifest of another version
            return None, f"manifest unreadable: {str(error).splitlines()[0]}"

    @functools.cached_property
    def reconciler(self) -> Reconciler:
        """This process as a reconciler."""
        from posttrain.control.reconciler import Reconciler  # here: it loads numpy and pyarrow, which `ls` does without

        return Reconciler(self.stores, self.jobs, process_name(), process_alive)

    @functools.cached_property
    def _manifests(self) -> dict[str, Manifest]:
        """Digest → manifest, of those that were read."""
        return {}

    @property
    def ledger_address(self) -> str | None:
        """The address of its ledger in PostgreSQL; None where it is a file of its own."""
        return recorded(self.root, self.settings)

    @functools.cached_property
    def channels(self) -> str:
        """The URL below which new attempts have their channels; empty: in their folders. Copies have another."""
        url = str(self.settings.get(CHANNEL, ""))
        return f"{url}/{self.place()}" if url else ""

    @property
    def channel_address(self) -> str | None:
        """Where jobs and drivers talk, where that is not the attempts' folders."""
        return self.settings.get(CHANNEL)

    @property
    def read_only(self) -> bool:
        """Whether it may only be read: another user's, or on a read-only mount."""
        return self.ledger.database.read_only

    def identity(self) -> str:
        """What tells this workspace from others, also moved or copied: 32 random hexadecimal digits in workspace.json.

        Raises:
            WorkspaceError: it has none yet and cannot be written.
        """
        path = self.root / SETTINGS
        with settings_lock(self.root):  # the writers of several runs may ask at once
            record = read_json(path) or fresh_record(self.root, self.blobs.url)
            if not record.get("id"):
                record = {**record, "id": uuid.uuid4().hex}
                write_json(path, record)
        return str(record["id"])

    def refuse_missing_executor(self) -> None:
        """Before anything is submitted.

        Raises:
            InputError: the package of its executor is not installed any more, or broken.
        """
        if isinstance(self.jobs.executor, InstalledExecutor):
            self.jobs.executor.load()

    @property
    def own_jobs(self) -> bool:
        """Whether jobs are started in this environment; those of an installed executor may be anywhere."""
        return not isinstance(self.jobs.executor, InstalledExecutor)

    def place(self) -> str:
        """What tells its jobs from those of other workspaces: a digest of its identity and of where it is.

        A copy has another, so it never ends the jobs of what it was copied from; so has one that was moved.

        Raises:
            WorkspaceError: as `identity`.
        """
        return digest_json([self.identity(), socket.gethostname(), str(self.root)]).partition(":")[2][:_PLACE_DIGITS]

    @functools.cached_property
    def log(self) -> str:
        """What tells the event log from others that keep heads in the same store; a store in the folder has one."""
        if self.ledger_address is not None:
            return digest_json([self.ledger.database.place]).partition(":")[2][:_PLACE_DIGITS]
        return "own" if self.blobs.url == blobs_url(self.root / OWN_STORE) else self.place()

    def lost(self, run_id: str = "*") -> Lost:
        """What is kept outside the ledger and missing in it: of the log, and of one run's folder or of all."""
        return find_lost(self.ledger, self.blobs, self.log, self.root, run_id)

    def accept_loss(self, reason: str) -> Lost:
        """See `store.heads.accept_loss`; what was accepted."""
        lost = accept_loss(self.ledger, self.blobs, self.log, self.root, self.actor, reason)
        self.seal()
        return lost

    def seal(self, *, keep: bool = True) -> None:
        """Chain the events committed so far; whoever may only read leaves that to the next who writes.

        Args:
            keep: also keep the head in the store. Loops that seal every few seconds leave that to what ends runs.
        """
        if self.read_only:
            return
        seal(self.ledger)
        if keep and self.root.is_dir():  # where a folder was removed or moved, a store in it is not made again
            with suppress(InfrastructureError, WorkspaceError):  # what was done stands; the next one keeps a newer head
                keep_head(self.ledger, self.blobs, self.log)

    def seen_by(self, actor: str, project: str, auth: str, request: str = "") -> Self:
        """The same workspace as another principal sees it, in another project perhaps; this one closes its database.

        Args:
            auth: how it was made sure who that is, as events say it.
            request: what they ask, by which events tell its transactions.
        """
        other = copy.copy(self)
        for cached in ("reconciler", "channels"):
            other.__dict__.pop(cached, None)
        other.actor = actor
        mine = self.ledger
        other.ledger = Ledger(
            mine.database, mine.clock, project=project, entropy=mine.entropy, auth=auth, request=request
        )
        other.stores = Stores(other.ledger, self.blobs, other.ledger.clock, actor)
        other.catalog = Catalog(other.ledger, self.blobs, actor, ModelLimits(**self.settings.get(LIMITS, {})))
        return other

    def close(self) -> None:
        """Close the database."""
        self.ledger.close()
