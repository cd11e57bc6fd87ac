"""Handles of the Python API: a run and a release channel, over any `Control`.

A handle contains a name and no state: each access reads the current state.
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
    from posttrain.domain.approvals import ApprovalStatus
    from posttrain.domain.lifecycle import ReleaseState
    from posttrain.domain.manifest import Manifest
    from posttrain.domain.policies import PinnedPolicy
    from posttrain.domain.records import ChannelRecord, Event, ReleaseEntry, RunRecord


_LOOK = 2.0  # seconds between two checks of whether a run waits for a person


class Bound(Generic[P, R]):
    """A verb of a handle, which passes its run or channel as the verb's first argument."""

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
    attached: bool = False  # the run was submitted before, and this call of `submit` started nothing
    warnings: tuple[str, ...] = ()  # from planning, or from attaching

    @property
    def word(self) -> str:
        """The first argument of the run's verbs."""
        return self.id

    @property
    def record(self) -> RunRecord:
        """The current record of the run."""
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
        """`stage/metric` → value, for every stage that has ended."""
        stages = [stage.record for stage in self.control.status(self.id).stages]
        return {f"{stage.name}/{name}": value for stage in stages for name, value in stage.metrics.items()}

    def wait(
        self, timeout: float | None = None, *, check: bool = False, watch: Callable[[RunRecord], None] | None = None
    ) -> RunRecord:
        """Drive the run until it ends, or watch while another process drives it.

        Args:
            timeout: seconds; None: no limit. Then only a `wall_clock` budget bounds the jobs.
            check: raise if the run did not succeed.
            watch: called about ten times a second with the run.

        Warns:
            RuntimeWarning: the run waits for a person; the warning contains the command that continues it.

        Raises:
            DeadlineError: `timeout` passed; this does not stop the run.
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
        """Continue a stopped or failed run; call `wait()` afterwards."""
        self.control.retry(self.id)
        return self

    def diff(self, other: Run) -> list[Difference]:
        """Return the differences between the manifests of two runs."""
        return list(self.control.diff(self.id, other.id).differences)

    def approve(self, reason: str = "", *, channel: str | None = None) -> ApprovalStatus:
        """Approve the release of the run's model, as the principal of the control.

        Args:
            channel: overrides the channel that the run file names.
        """
        return self.control.approve(self.id, channel, reason)

    def reject(self, reason: str = "", *, channel: str | None = None) -> ApprovalStatus:
        """Reject the release of the run's model; arguments as for `approve`."""
        return self.control.reject(self.id, channel, reason)


class _Asked:
    """Warns a waiting Python caller that the run waits for a person's action, once for each action."""

    def __init__(self, control: Control, run_id: str) -> None:
        self._control, self._run_id, self._at = control, run_id, -_LOOK
        self._told: set[str] = set()

    def look(self) -> None:
        """Check the run, at most once in `_LOOK` seconds."""
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
    """A handle on one release channel, which need not exist yet."""

    control: Control = field(repr=False)
    name: str

    @property
    def word(self) -> str:
        """The first argument of the channel's verbs."""
        return self.name

    @property
    def _view(self) -> ChannelView:
        return self.control.channel(self.name)

    @property
    def live(self) -> ReleaseEntry | None:
        """The live release; None: the channel has never had a release."""
        return self._view.live

    @property
    def history(self) -> list[ReleaseEntry]:
        """Every move of the channel, oldest first."""
        return [move.entry for move in reversed(self.control.history(self.name))]

    @property
    def states(self) -> Mapping[str, ReleaseState]:
        """Model digest → `live`, `superseded` or `rolled_back`."""
        return self._view.states

    @property
    def record(self) -> ChannelRecord:
        """The channel's protection, freeze and policy digest."""
        return self.control.channel_record(self.name)

    @property
    def policy(self) -> PinnedPolicy | None:
        """The policy that every release must pass; None: a release must pass only the gates of its run."""
        return self.control.policy(self.name)

    @property
    def policies(self) -> list[Event]:
        """The events that set or removed the policy, oldest first: `payload["set"]["policy"]` is the digest."""
        return self.control.policies(self.name)

    def told(self, kind: str) -> Event | None:
        """Return the last event of one kind about the channel, such as `channel.frozen`; None: no such event."""
        return next(reversed(self.control.channel_events(self.name, kind)), None)

    def set_policy(self, path: str | Path) -> ChannelRecord:
        """Set the policy of the channel from a YAML file. Setting the same policy again changes nothing.

        Raises:
            InputError: the policy file is invalid; the message names file, field, constraint and value.
            ApprovalError: the channel is protected and the change is not approved yet; this call requests the approval.
            ChannelClosedError: the channel is protected, and no approver is named.
        """
        self.control.set_policy(self.name, Path(path))
        return self.record

    remove_policy = Bound(Control.remove_policy)
    protect = Bound(Control.protect)
    freeze = Bound(Control.freeze)
    unfreeze = Bound(Control.unfreeze)
    rollback = Bound(Control.rollback)

    def lineage(self) -> Node:
        """Return the lineage of the live weights, back to prompts, reward source, base model and manifest."""
        return self.control.lineage(f"channel:{self.name}")

    def verify(self) -> VerifyReport:
        """Verify the whole lineage by hashing it again."""
        return self.control.verify(f"channel:{self.name}")
