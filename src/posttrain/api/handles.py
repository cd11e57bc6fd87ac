"""Handles of the Python API: a run and a release channel, over whatever `Control` they are given.

A handle holds a name and asks when it is touched, so it never tells of a moment that is over.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Generic, overload

from posttrain.api.control import Control
from posttrain.api.verbs import P, R, Verb
from posttrain.domain.waits import waiting

if TYPE_CHECKING:
    from posttrain.api.values import ChannelView, Difference, Node, VerifyReport
    from posttrain.domain.approvals import Standing
    from posttrain.domain.lifecycle import ReleaseState
    from posttrain.domain.manifest import Manifest
    from posttrain.domain.policies import PinnedPolicy
    from posttrain.domain.records import ChannelRecord, Event, ReleaseEntry, RunRecord


_LOOK = 2.0  # seconds between two looks whether a run waits for a person


class Bound(Generic[P, R]):
    """A verb of a handle: the verb's first parameter is what the handle names."""

    def __init__(self, verb: Verb[Concatenate[str, P], R]) -> None:
        self.verb, self.__doc__ = verb, verb.function.__doc__

    @overload
    def __get__(self, handle: None, kind: type) -> Bound[P, R]: ...

    @overload
    def __get__(self, handle: Run | Channel, kind: type) -> Callable[P, R]: ...

    def __get__(self, handle: Run | Channel | None, kind: type) -> Bound[P, R] | Callable[P, R]:
        return self if handle is None else self.verb.bound(handle.control.asks, handle.word)


@dataclass(frozen=True, slots=True)
class Run:
    """A handle on one run."""

    control: Control = field(repr=False)
    id: str
    attached: bool = False  # submitted before: this submit started nothing
    warnings: tuple[str, ...] = ()  # of the plan that this submit made, or of what it attached to

    @property
    def word(self) -> str:
        """As verbs name it."""
        return self.id

    @property
    def record(self) -> RunRecord:
        """The run as it is now."""
        return self.control.run(self.id)

    @property
    def state(self) -> str:
        """`pending`, `running`, `succeeded`, `rejected`, `failed`, `stopping` or `stopped`."""
        return self.record.state

    @property
    def manifest(self) -> Manifest:
        """The locked manifest."""
        return self.control.manifest(self.id)

    @property
    def metrics(self) -> dict[str, float]:
        """`stage/metric` → value, of every stage that has ended."""
        stages = [stage.record for stage in self.control.status(self.id).stages]
        return {f"{stage.name}/{name}": value for stage in stages for name, value in stage.metrics.items()}

    def wait(
        self, timeout: float | None = None, *, check: bool = False, watch: Callable[[RunRecord], None] | None = None
    ) -> RunRecord:
        """Drive the run until it ends (or watch, while somebody else drives it).

        Args:
            timeout: seconds; None: as long as it takes. Only a `wall_clock` budget bounds the jobs then.
            check: raise when it did not succeed.
            watch: called about ten times a second with the run.

        Warns:
            RuntimeWarning: it waits for a person, with the command that lets it go on.

        Raises:
            DeadlineError: `timeout` passed; the run is not stopped by that.
            PosttrainError: with `check`, the error of the run's outcome.
        """
        asked = _Asked(self.control, self.id)

        def look(run: RunRecord) -> None:
            asked.look()
            if watch:
                watch(run)

        record = self.control.drive(self.id, timeout=timeout, watch=look)
        error = self.control.status(self.id).outcome if check else None
        if error:
            raise error
        return record

    detach = Bound(Control.detach)
    why = Bound(Control.why)
    signal = Bound(Control.signal)
    note = Bound(Control.note)
    stop = Bound(Control.stop)
    promote = Bound(Control.promote)

    def retry(self) -> Run:
        """Let a stopped or failed run go on; then `wait()`."""
        self.control.retry(self.id)
        return self

    def diff(self, other: Run) -> list[Difference]:
        """What differs in the manifests."""
        return list(self.control.diff(self.id, other.id).differences)

    def approve(self, reason: str = "", *, channel: str | None = None) -> Standing:
        """Approve the release of its model, as whoever the control takes you for.

        Args:
            channel: another one than its run file names.
        """
        return self.control.approve(self.id, channel, reason)

    def reject(self, reason: str = "", *, channel: str | None = None) -> Standing:
        """Reject it; as `approve`."""
        return self.control.reject(self.id, channel, reason)


class _Asked:
    """Warns whoever waits for a run in Python when it asks a person for something; once for each thing it asks."""

    def __init__(self, control: Control, run_id: str) -> None:
        self._control, self._run_id, self._at = control, run_id, -_LOOK
        self._told: set[str] = set()

    def look(self) -> None:
        """Look now and then."""
        if time.monotonic() - self._at < _LOOK:
            return
        self._at = time.monotonic()
        for stage in self._control.status(self._run_id).stages:
            asks = f"{stage.record.name} {stage.next_action}"
            if waiting(stage.record) and "posttrain " in stage.next_action and asks not in self._told:
                self._told.add(asks)
                words = f"run {self._run_id}: {stage.record.name} {stage.reason}; {stage.next_action}"
                warnings.warn(words, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class Channel:
    """A handle on one release channel; it need not exist yet."""

    control: Control = field(repr=False)
    name: str

    @property
    def word(self) -> str:
        """As verbs name it."""
        return self.name

    @property
    def _view(self) -> ChannelView:
        return self.control.channel(self.name)

    @property
    def live(self) -> ReleaseEntry | None:
        """What it points at; None when nothing was ever promoted."""
        return self._view.live

    @property
    def history(self) -> list[ReleaseEntry]:
        """Every move, oldest first."""
        return [move.entry for move in reversed(self.control.history(self.name))]

    @property
    def states(self) -> Mapping[str, ReleaseState]:
        """Model digest → `live`, `superseded` or `rolled_back`."""
        return self._view.states

    @property
    def record(self) -> ChannelRecord:
        """Whether it is protected or frozen, and the digest of its policy."""
        return self.control.channel_record(self.name)

    @property
    def policy(self) -> PinnedPolicy | None:
        """What every release of it must pass; None: what its run says."""
        return self.control.policy(self.name)

    @property
    def policies(self) -> list[Event]:
        """Every time its policy was set or removed, oldest first: `payload["set"]["policy"]` is the digest."""
        return self.control.policies(self.name)

    def told(self, kind: str) -> Event | None:
        """The last event of one kind about it, such as `channel.frozen`."""
        return next(reversed(self.control.channel_events(self.name, kind)), None)

    def set_policy(self, path: str | Path) -> ChannelRecord:
        """Let it have the policy in a YAML file from now on. Asking twice changes nothing.

        Raises:
            InputError: naming file, field, constraint and value.
            ApprovalError: it is protected, and approvers have not approved the change yet; it is asked for then.
            ChannelClosedError: it is protected, and nobody is named who could approve.
        """
        self.control.set_policy(self.name, Path(path))
        return self.record

    remove_policy = Bound(Control.remove_policy)
    protect = Bound(Control.protect)
    freeze = Bound(Control.freeze)
    unfreeze = Bound(Control.unfreeze)
    rollback = Bound(Control.rollback)

    def lineage(self) -> Node:
        """From its weights back to prompts, reward source, base model and manifest."""
        return self.control.lineage(f"channel:{self.name}")

    def verify(self) -> VerifyReport:
        """Hash all of the lineage again."""
        return self.control.verify(f"channel:{self.name}")
