"""Release channels: their live releases, moves, and the policies that releases must pass.

Modules that load numpy are imported when a verb needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.api.control import Control
from posttrain.api.values import ChannelView
from posttrain.api.verbs import answers
from posttrain.control import channels
from posttrain.decision.releases import release_states
from posttrain.domain.approvals import APPROVED, REJECTED, ApprovalStatus
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, meant_name, nearest
from posttrain.domain.ids import Role
from posttrain.domain.kinds import QUANTITIES, kind_of, measurable
from posttrain.domain.manifest import SUITES
from posttrain.domain.policies import ChannelPolicy, PinnedPolicy, load_policy
from posttrain.domain.records import ChannelRecord, Event, Look, ReleaseEntry, stage_end
from posttrain.store.writer import POLICY_SET

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace
    from posttrain.store.ledger import Ledger


@answers(Control.live)
def live(workspace: Workspace) -> list[ReleaseEntry]:
    ledger = workspace.ledger
    return [entry for name in ledger.channels() if (entry := ledger.channel(name))]


@answers(Control.channel)
def channel(workspace: Workspace, name: str) -> ChannelView:
    ledger = workspace.ledger
    record, history, live = ledger.channel_record(name), ledger.history(name), ledger.channel(name)
    return ChannelView(
        record,
        live,
        len(history),
        release_states(history),
        tuple(ledger.deployments(name)),
        tuple(ledger.quarantine(name)),
        _looks_at_items_of(ledger, live),
        next(reversed(ledger.events_about(name, "channel.frozen")), None) if record.frozen else None,
    )


@answers(Control.promote)
def promote(workspace: Workspace, run_id: str, channel: str, lift_quarantine: str = "") -> ReleaseEntry:
    from posttrain.control.actions import promote

    return _announced(workspace, promote(workspace.stores, run_id, channel, lift_quarantine))


@answers(Control.rollback)
def rollback(
    workspace: Workspace,
    channel: str,
    to: str | None = None,
    since: int | None = None,
    reason: str = "",
    lift_quarantine: str = "",
) -> ReleaseEntry:
    from posttrain.control.actions import rollback

    entry = rollback(workspace.stores, channel, to, since=since, reason=reason, lift_quarantine=lift_quarantine)
    return _announced(workspace, entry)


def _announced(workspace: Workspace, entry: ReleaseEntry) -> ReleaseEntry:
    """Notify registries and sinks of a move of a channel; return the release."""
    from posttrain.app import sinks
    from posttrain.trackers.rows import announce

    announce(workspace, entry.channel)
    sinks.announce(workspace)
    return entry


@answers(Control.approve)
def approve(workspace: Workspace, what: str, channel: str | None, reason: str) -> ApprovalStatus:
    return _said(workspace, what, channel, APPROVED, reason)


@answers(Control.reject)
def reject(workspace: Workspace, what: str, channel: str | None, reason: str) -> ApprovalStatus:
    return _said(workspace, what, channel, REJECTED, reason)


def _said(workspace: Workspace, what: str, channel: str | None, verdict: str, reason: str) -> ApprovalStatus:
    from posttrain.control.actions import find_release, find_request, say

    stores = workspace.stores
    named = what.startswith(DIGEST_PREFIX)
    request = find_request(stores, what) if named else find_release(stores, what, channel)
    return say(stores, request, verdict, reason)


@answers(Control.approval_requests)
def approval_requests(workspace: Workspace, channel: str) -> list[ApprovalStatus]:
    found = channels.approval_statuses(workspace.stores, channel=channel)
    return [one for one in found if not (one.outdated or one.done)]


@answers(Control.policy)
def policy(workspace: Workspace, name: str, request: str | None = None) -> PinnedPolicy | None:
    if request is None:
        return channels.policy_of(workspace.stores, name)
    from posttrain.control.actions import asked_policy

    return asked_policy(workspace.stores, name, request)


@answers(Control.channel_events)
def channel_events(workspace: Workspace, name: str, kind: str) -> list[Event]:
    return workspace.ledger.events_about(name, kind)


@answers(Control.policies)
def policies(workspace: Workspace, name: str) -> list[Event]:
    return workspace.ledger.events_about(name, POLICY_SET)


@answers(Control.set_policy)
def set_policy(workspace: Workspace, name: str, path: Path) -> tuple[PinnedPolicy, list[str]]:
    known = [record.name for record in workspace.ledger.channel_records()]
    with workspace.blobs.holding():
        channels.set_policy(workspace.stores, name, pinned_policy(load_policy(path), path, workspace))
    pinned = policy(workspace, name)
    assert pinned is not None
    with workspace.ledger.snapshot() as now:
        people = now.people() if pinned.policy.approvers else set()
        roles = now.roles()
    return pinned, list(policy_notes(pinned, known, people, roles))


@answers(Control.remove_policy)
def remove_policy(workspace: Workspace, name: str) -> ChannelRecord:
    return channels.set_policy(workspace.stores, name, None)


@answers(Control.protect)
def protect(workspace: Workspace, name: str, *, protected: bool = True, why: str = "") -> ChannelRecord:
    return channels.protect(workspace.stores, name, protected=protected, why=why)


@answers(Control.freeze)
def freeze(workspace: Workspace, name: str, *, rollbacks: bool = False, why: str = "") -> ChannelRecord:
    frozen = channels.EVERYTHING if rollbacks else channels.RELEASES
    return channels.freeze(workspace.stores, name, frozen, why)


@answers(Control.unfreeze)
def unfreeze(workspace: Workspace, name: str, *, why: str = "") -> ChannelRecord:
    return channels.freeze(workspace.stores, name, "", why)


def _looks_at_items_of(ledger: Ledger, live: ReleaseEntry | None) -> tuple[Look, ...]:
    """Return every evaluation of the data that the live release was judged on, oldest first.

    A gate also counts evaluations of other files with the same items. Those evaluations are omitted here, because
    finding them requires reading results.
    """
    if live is None or live.run_id is None:
        return ()
    with ledger.snapshot() as now:
        ends = [stage_end(row.run_id, row.name) for row in now.stages(live.run_id) if kind_of(row.kind).measures]
        items = {edge.digest for edge in now.used(*ends) if edge.slot.startswith(SUITES)}
        found = {look for digest in items for look in now.looks(digest) if kind_of(look.kind).measures}
    return tuple(sorted(found, key=lambda look: (look.at, look.run_id, look.stage)))


def pinned_policy(policy: ChannelPolicy, source: Path, workspace: Workspace) -> ChannelPolicy:
    """Return a policy with the digest of every suite's data; relative paths start at the folder of the policy's file.

    Raises:
        InputError: data is missing, or its digest differs from the digest in the policy.
    """
    find, suites = workspace.catalog.resolver(source.parent), {}
    for name, suite in policy.suites.items():
        try:
            found = find("dataset", suite.data)
        except InputError as error:
            raise type(error)(f"{source}: suites.{name}.data: {error}") from error
        if found.name.startswith("path:"):
            raise InputError(
                f"{source}: suites.{name}.data: must be a registered data set, got the file {suite.data}; register "
                "it with posttrain asset add; run files may then name the data set or the file"
            )
        if suite.digest not in (None, found.digest):
            raise InputError(
                f"{source}: suites.{name}.digest: must be {found.digest}, the digest of {found.name}, got "
                f"{suite.digest}; leave the line out, and the digest is filled in"
            )
        suites[name] = suite.model_copy(update={"data": found.name, "digest": found.digest})
    return policy.model_copy(update={"suites": suites})


def policy_notes(
    pinned: PinnedPolicy, known: Iterable[str], people: Collection[str], roles: Mapping[str, Role]
) -> Iterator[str]:
    """Yield hints about the limits of a policy that was just set.

    Args:
        known: channels that existed before the policy was set.
        people: principals who have a role in the project or have acted in it.
        roles: principal → role, for the project's members; if it is empty, any user of the workspace may do everything.
    """
    names = list(known)
    if pinned.channel not in names:
        yield f"channel {pinned.channel} is new: it has no release yet{nearest(pinned.channel, names)}"
    for person in pinned.policy.approvers:
        role = roles.get(person)
        if roles and person in people and not (role and role.covers(Role.APPROVER)):
            yield (
                f"approvers: {person} {f'is {role}' if role else 'has no role'} here and may not approve; "
                f"posttrain member set {person} {Role.APPROVER}"
            )
        if person not in people:
            hint = meant_name(person, people)
            yield f"approvers: {person} has done nothing in this project so far{hint}; check the name"
    for name, suite in pinned.policy.suites.items():
        if suite.evaluators == "any":
            yield (
                f"suites.{name}: any evaluator is accepted, so a run chooses the settings and rewards; "
                "posttrain plan RUN.yaml -v shows the digest that pins them"
            )
    for gate in pinned.policy.gates:
        if not measurable(gate.metric):
            of, _, quantity = gate.metric.rpartition("/")
            yield (
                f"gates.{gate.name}.metric: no evaluate stage measures {quantity!r} on {of}"
                f"{nearest(quantity, QUANTITIES)}; no release passes until a stage measures it"
            )
