"""What a control plane launches jobs with, and where each attempt has its folder and its channel.

Whoever only reads what jobs left takes the folders and no executor. Nothing here names a concrete back-end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.control.codes import trainer_of
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.records import AttemptRecord
from posttrain.execution.ports import Executor, Trainer
from posttrain.store.attempts import AttemptFolder
from posttrain.store.hosts import Hosts


@dataclass(frozen=True, slots=True)
class AttemptFolders:
    """Where the attempts of one workspace are."""

    root: Path  # the workspace folder
    channels: Callable[[], str] = lambda: ""  # URL below which new attempts have their channels; empty: their folders

    def path(self, run_id: str, stage: str, number: int) -> Path:
        """Where attempt `number` lives."""
        return self.root / "runs" / run_id / stage / f"{number:03d}"

    def of(self, attempt: AttemptRecord) -> AttemptFolder:
        """The attempt's folder."""
        return AttemptFolder(self.root / attempt.folder, self.known(attempt), otherwise=self.channel(attempt))

    def known(self, attempt: AttemptRecord) -> str | None:
        """URL of an attempt's channel, empty: its folder, by what its job cannot have written.

        None: a release before planned it, and only its order says whether its channel is in a store.
        """
        return "" if attempt.channel is None and not self.channels() else attempt.channel

    def channel(self, attempt: AttemptRecord) -> str:
        """URL of the channel that an attempt gets with its order; empty: its folder."""
        if attempt.channel is not None:
            return attempt.channel
        return self.channel_of(attempt.run_id, attempt.stage, attempt.number)

    def channel_of(self, run_id: str, stage: str, number: int) -> str:
        """URL of the channel that an attempt gets when it is planned; empty: its folder."""
        base = self.channels()
        return f"{base}/{run_id}/{stage}/{number:03d}" if base else ""


class Access(Protocol):
    """Lets the jobs of a server read what they need, and nothing else."""

    def give(self, attempt: AttemptRecord, folder: Path, *, boxed: bool = False) -> None:
        """Write into an attempt's folder what lets its job in, until the attempt ends.

        Args:
            boxed: the job runs in an image, without a network.
        """


@dataclass(frozen=True, slots=True)
class Jobs:
    """Executor, trainers and attempt folders of one control plane, and what its jobs may."""

    executor: Executor
    trainers: Mapping[str, Trainer]
    folders: AttemptFolders
    slots: int = 1  # jobs of this host at a time, whatever their runs and projects
    beside: int = 0  # threads for what takes long; none: whoever decides does it
    trust_rewards: bool = False  # rewards may run where the kernel cannot confine them
    workspace: Callable[[], str] = lambda: ""  # what tells it from others and from its copies, on its jobs
    hosts: Hosts | None = None  # that share the ledger; None: it has one
    access: Access | None = None  # how jobs reach their inputs; None: by the store, with the user's own rights

    @property
    def host(self) -> str | None:
        """Whose drivers alone can reach these jobs; None: the ledger has one host."""
        return self.hosts.id if self.hosts else None

    def elsewhere(self, attempt: AttemptRecord) -> bool:
        """Whether an attempt's job and folder are on another host.

        An attempt of a release that knew no hosts is of the one that has its folder.
        """
        if attempt.host is None and self.hosts is not None and attempt.state == AttemptState.LAUNCHED:
            return not (self.folders.root / attempt.folder).is_dir()
        return attempt.host not in (None, self.host)

    def trainer(self, name: str) -> Trainer:
        """A trainer that a manifest names.

        Raises:
            InputError: it is not installed any more, or its package is broken.
        """
        return trainer_of(name, self.trainers)
