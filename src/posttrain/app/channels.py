"""Release channels: what is live, what every release must pass, who may move it. The CLI prints what these return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.app.workspace import Workspace, open_workspace
from posttrain.control import actions, channels
from posttrain.control.lineage import Node, VerifyReport, release_lineage, verify
from posttrain.decision.releases import release_states
from posttrain.domain.errors import InputError
from posttrain.domain.lifecycle import ReleaseState
from posttrain.domain.measures import QUANTITIES, measurable
from posttrain.domain.policies import ChannelPolicy, PinnedPolicy, load_policy
from posttrain.domain.records import ChannelRecord, Event, ReleaseEntry
from posttrain.domain.spelling import nearest
from posttrain.store.releasing import POLICY_SET
from posttrain.trackers.registering import announce


@dataclass(frozen=True, slots=True)
class Channel:
    """A handle on one release channel."""

    workspace: Workspace
    name: str

    @property
    def live(self) -> ReleaseEntry | None:
        """What it points at; None when nothing was ever promoted."""
        return self.workspace.ledger.channel(self.name)

    @property
    def history(self) -> list[ReleaseEntry]:
        """Every move, oldest first."""
        return self.workspace.ledger.history(self.name)

    @property
    def states(self) -> dict[str, ReleaseState]:
        """Model digest → `live`, `superseded` or `rolled_back`."""
        return release_states(self.history)

    @property
    def record(self) -> ChannelRecord:
        """Whether it is protected or frozen, and the digest of its policy."""
        return self.workspace.ledger.channel_record(self.name)

    @property
    def policy(self) -> PinnedPolicy | None:
        """What every release of it must pass; None: what its run says."""
        return channels.policy_of(self.workspace.stores, self.name)

    @property
    def policies(self) -> list[Event]:
        """Every time its policy was set or removed, oldest first: `payload["set"]["policy"]` is the digest."""
        return self.workspace.ledger.channel_events(self.name, POLICY_SET)

    def told(self, kind: str) -> Event | None:
        """The last event of one kind about it, such as `channel.frozen`."""
        return next(reversed(self.workspace.ledger.channel_events(self.name, kind)), None)

    def set_policy(self, path: str | Path) -> ChannelRecord:
        """Let it have the policy in a YAML file from now on. Asking twice changes nothing.

        Raises:
            InputError: naming file, field, constraint and value.
            ChannelClosedError: it is protected.
        """
        policy = pinned_policy(load_policy(Path(path)), Path(path), self.workspace)
        return self._sealed(channels.set_policy(self.workspace.stores, self.name, policy))

    def remove_policy(self) -> ChannelRecord:
        """Take its policy away: releases pass what their runs say."""
        return self._sealed(channels.set_policy(self.workspace.stores, self.name, None))

    def protect(self, *, protected: bool = True, why: str = "") -> ChannelRecord:
        """Let its policy and quarantine be changed by approval only; `protected=False` takes that back."""
        return self._sealed(channels.protect(self.workspace.stores, self.name, protected=protected, why=why))

    def freeze(self, *, rollbacks: bool = False, why: str = "") -> ChannelRecord:
        """Let nothing be released to it.

        Args:
            rollbacks: let it not be rolled back either.
        """
        frozen = channels.EVERYTHING if rollbacks else channels.RELEASES
        return self._sealed(channels.freeze(self.workspace.stores, self.name, frozen, why))

    def unfreeze(self, *, why: str = "") -> ChannelRecord:
        """Let it move again."""
        return self._sealed(channels.freeze(self.workspace.stores, self.name, "", why))

    def _sealed(self, record: ChannelRecord) -> ChannelRecord:
        self.workspace.seal()
        return record

    def rollback(self, to: str | None = None, *, since: int | None = None) -> ReleaseEntry:
        """Point it back at the model before, or at `to` (release number, run id, digest prefix).

        Args:
            since: the release that must be live now; makes a bare rollback safe to repeat.
        """
        entry = actions.rollback(self.workspace.stores, self.name, to, since=since)
        self.workspace.seal()
        announce(self.workspace, self.name)
        return entry

    def lineage(self) -> Node:
        """From its weights back to prompts, reward source, base model and manifest."""
        return release_lineage(self.workspace.stores, self.name)

    def verify(self) -> VerifyReport:
        """Hash all of the lineage again."""
        self.workspace.seal()
        return verify(self.workspace.stores, self.lineage())


def channel(name: str, workspace: Workspace | None = None) -> Channel:
    """A release channel; it need not exist yet."""
    return Channel(workspace or open_workspace(), name)


def pinned_policy(policy: ChannelPolicy, source: Path, workspace: Workspace) -> ChannelPolicy:
    """A policy with the digest of every suite's data; relative paths in it start at its folder.

    Raises:
        InputError: data that there is not, or that is not what a written digest says.
    """
    find, suites = workspace.catalog.resolver(source.parent), {}
    for name, suite in policy.suites.items():
        try:
            found = find("dataset", suite.data)
        except InputError as error:
            raise type(error)(f"{source}: suites.{name}.data: {error}") from error
        if found.name.startswith("path:"):
            raise InputError(
                f"{source}: suites.{name}.data: must be a registered data set, got the file {suite.data}; posttrain "
                "asset add registers it, and runs may then name either"
            )
        if suite.digest not in (None, found.digest):
            raise InputError(
                f"{source}: suites.{name}.digest: must be that of {found.name}, {found.digest}, got {suite.digest}; "
                "leave it out, it is filled in"
            )
        suites[name] = suite.model_copy(update={"data": found.name, "digest": found.digest})
    return policy.model_copy(update={"suites": suites})


def policy_notes(pinned: PinnedPolicy, known: Iterable[str]) -> Iterator[str]:
    """What a policy that was just set does not do, in words.

    Args:
        known: channels that there were before.
    """
    names = list(known)
    if pinned.channel not in names:
        yield f"channel {pinned.channel} is new: nothing was released to it yet{nearest(pinned.channel, names)}"
    for name, suite in pinned.policy.suites.items():
        if suite.evaluators == "any":
            yield (
                f"suites.{name}: any evaluator may judge, so a run chooses its settings and rewards; "
                "posttrain plan RUN.yaml shows the digest that pins them"
            )
    for gate in pinned.policy.gates:
        if not measurable(gate.metric):
            of, _, quantity = gate.metric.rpartition("/")
            yield (
                f"gates.{gate.name}.metric: no evaluate stage measures {quantity!r} on {of}"
                f"{nearest(quantity, QUANTITIES)}; nothing passes until some stage does"
            )
