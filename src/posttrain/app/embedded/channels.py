"""Release channels and the records that prove them. What a verb needs is imported when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.api.values import ChannelView
from posttrain.domain.approvals import APPROVED, REJECTED
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, NotFoundError, nearest
from posttrain.domain.records import DEFAULT_PROJECT

if TYPE_CHECKING:
    from posttrain.api.values import Collected, Dead, Erasure
    from posttrain.app.workspace import Workspace
    from posttrain.control.downstream import Downstream
    from posttrain.control.lineage import Node
    from posttrain.control.verifying import VerifyReport
    from posttrain.domain.approvals import Standing
    from posttrain.domain.policies import PinnedPolicy
    from posttrain.domain.records import AttemptRecord, ChannelRecord, Event, Look, ReleaseEntry
    from posttrain.store.ledger import Ledger
    from posttrain.trackers.tracking import TrackerState
    from posttrain.views.moves import Move

_CHANNEL = "channel:"  # before the name of one, where a run or an asset could be meant too


class Channels:
    """See `api.control.Channels`."""

    workspace: Workspace

    def channels(self) -> list[ChannelRecord]:
        """See `Channels.channels`."""
        return self.workspace.ledger.channel_records()

    def live(self) -> list[ReleaseEntry]:
        """See `Channels.live`."""
        ledger = self.workspace.ledger
        return [entry for name in ledger.channels() if (entry := ledger.channel(name))]

    def channel_record(self, name: str) -> ChannelRecord:
        """See `Channels.channel_record`."""
        return self.workspace.ledger.channel_record(name)

    def channel(self, name: str) -> ChannelView:
        """See `Channels.channel`."""
        from posttrain.decision.releases import release_states

        ledger = self.workspace.ledger
        record, history, live = ledger.channel_record(name), ledger.history(name), ledger.channel(name)
        return ChannelView(
            record,
            live,
            len(history),
            release_states(history),
            tuple(ledger.deployments(name)),
            tuple(ledger.quarantine(name)),
            _looks_at_items_of(ledger, live),
            next(reversed(self.channel_events(name, "channel.frozen")), None) if record.frozen else None,
        )

    def history(self, name: str, limit: int | None = None, before: str | None = None) -> list[Move]:
        """See `Channels.history`."""
        from posttrain.views.moves import moves

        return moves(self.workspace.ledger, name, limit, before)

    def channel_events(self, name: str, kind: str) -> list[Event]:
        """See `Channels.channel_events`."""
        return self.workspace.ledger.events_about(name, kind)

    def channel_trackers(self, name: str) -> list[TrackerState]:
        """See `Channels.channel_trackers`."""
        from posttrain.trackers.registering import channel_states

        return channel_states(self.workspace, name)

    def track_channel(self, name: str) -> list[TrackerState]:
        """See `Channels.track_channel`."""
        from posttrain.trackers.registering import register_channel

        return register_channel(self.workspace, name)

    def promote(self, run_id: str, channel: str, lift_quarantine: str = "") -> ReleaseEntry:
        """See `Channels.promote`."""
        from posttrain.app import courier
        from posttrain.control.actions import promote
        from posttrain.trackers.registering import announce

        entry = promote(self.workspace.stores, run_id, channel, lift_quarantine)
        announce(self.workspace, channel)
        self.workspace.seal()
        courier.announce(self.workspace)
        return entry

    def rollback(
        self, channel: str, to: str | None, since: int | None, reason: str = "", lift_quarantine: str = ""
    ) -> ReleaseEntry:
        """See `Channels.rollback`."""
        from posttrain.app import courier
        from posttrain.control.actions import rollback
        from posttrain.trackers.registering import announce

        stores = self.workspace.stores
        entry = rollback(stores, channel, to, since=since, reason=reason, lift_quarantine=lift_quarantine)
        self.workspace.seal()
        announce(self.workspace, channel)
        courier.announce(self.workspace)
        return entry

    def approve(self, what: str, channel: str | None, reason: str) -> Standing:
        """See `Channels.approve`."""
        return self._said(what, channel, APPROVED, reason)

    def reject(self, what: str, channel: str | None, reason: str) -> Standing:
        """See `Channels.reject`."""
        return self._said(what, channel, REJECTED, reason)

    def _said(self, what: str, channel: str | None, verdict: str, reason: str) -> Standing:
        from posttrain.control.actions import find_release, find_request, say

        stores = self.workspace.stores
        named = what.startswith(DIGEST_PREFIX)
        request = find_request(stores, what) if named else find_release(stores, what, channel)
        found = say(stores, request, verdict, reason)
        self.workspace.seal()
        return found

    def approval_requests(self, channel: str) -> list[Standing]:
        """See `Channels.approval_requests`."""
        from posttrain.control.channels import standings

        found = standings(self.workspace.stores, channel=channel)
        return [one for one in found if not (one.outdated or one.done)]

    def policy(self, name: str, request: str | None = None) -> PinnedPolicy | None:
        """See `Channels.policy`."""
        if request is None:
            from posttrain.control.channels import policy_of

            return policy_of(self.workspace.stores, name)
        from posttrain.control.actions import asked_policy

        return asked_policy(self.workspace.stores, name, request)

    def policies(self, name: str) -> list[Event]:
        """See `Channels.policies`."""
        from posttrain.store.releasing import POLICY_SET

        return self.channel_events(name, POLICY_SET)

    def set_policy(self, name: str, path: Path) -> tuple[PinnedPolicy, list[str]]:
        """See `Channels.set_policy`."""
        from posttrain.app.channels import pinned_policy, policy_notes
        from posttrain.control.channels import set_policy
        from posttrain.domain.policies import load_policy

        known = [record.name for record in self.channels()]
        with self.workspace.blobs.holding():
            policy = pinned_policy(load_policy(path), path, self.workspace)
            self._changed(set_policy(self.workspace.stores, name, policy))
        pinned = self.policy(name)
        assert pinned is not None
        with self.workspace.ledger.snapshot() as now:
            people = now.people() if pinned.policy.approvers else set()
            roles = now.roles()
        return pinned, list(policy_notes(pinned, known, people, roles))

    def remove_policy(self, name: str) -> ChannelRecord:
        """See `Channels.remove_policy`."""
        from posttrain.control.channels import set_policy

        return self._changed(set_policy(self.workspace.stores, name, None))

    def protect(self, name: str, *, protected: bool, why: str) -> ChannelRecord:
        """See `Channels.protect`."""
        from posttrain.control.channels import protect

        return self._changed(protect(self.workspace.stores, name, protected=protected, why=why))

    def freeze(self, name: str, *, rollbacks: bool, why: str) -> ChannelRecord:
        """See `Channels.freeze`."""
        from posttrain.control.channels import EVERYTHING, RELEASES, freeze

        frozen = EVERYTHING if rollbacks else RELEASES
        return self._changed(freeze(self.workspace.stores, name, frozen, why))

    def unfreeze(self, name: str, *, why: str) -> ChannelRecord:
        """See `Channels.unfreeze`."""
        from posttrain.control.channels import freeze

        return self._changed(freeze(self.workspace.stores, name, "", why))

    def _changed(self, record: ChannelRecord) -> ChannelRecord:
        self.workspace.seal()
        return record


def _looks_at_items_of(ledger: Ledger, live: ReleaseEntry | None) -> tuple[Look, ...]:
    """Every evaluation of the data that the live release was judged on, oldest first.

    The gate also counts evaluations of other files with the same items: finding these takes reading results.
    """
    if live is None or live.run_id is None:
        return ()
    from posttrain.domain.edges import stage_end
    from posttrain.domain.evaluators import SUITES
    from posttrain.domain.kinds import kind_of

    with ledger.snapshot() as now:
        ends = [stage_end(row.run_id, row.name) for row in now.stages(live.run_id) if kind_of(row.kind).measures]
        items = {edge.digest for edge in now.used(*ends) if edge.slot.startswith(SUITES)}
        found = {look for digest in items for look in now.looks(digest) if kind_of(look.kind).measures}
    return tuple(sorted(found, key=lambda look: (look.at, look.run_id, look.stage)))


class Records:
    """See `api.control.Records`."""

    workspace: Workspace

    def lineage(self, target: str) -> Node:
        """See `Records.lineage`."""
        from posttrain.control.lineage import asset_lineage, release_lineage, run_lineage
        from posttrain.data.refs import KINDS

        workspace = self.workspace
        if target.startswith(DIGEST_PREFIX):
            raise InputError(f"{target[:24]}: a digest alone is followed downstream only; add --downstream")
        if target.partition(":")[0] in KINDS:
            return asset_lineage(workspace.stores, workspace.catalog.find(target))
        if target.startswith(_CHANNEL) or target in workspace.ledger.channels():
            return release_lineage(workspace.stores, target.removeprefix(_CHANNEL))
        return run_lineage(workspace.stores, self._run_id(target))

    def downstream(self, target: str, limit: int = 200) -> Downstream:
        """See `Records.downstream`."""
        from posttrain.control.downstream import of_bytes, of_run
        from posttrain.data.refs import KINDS

        workspace = self.workspace
        if target.startswith(DIGEST_PREFIX):
            return of_bytes(workspace.ledger, workspace.ledger.find_artifact(target).digest, limit=limit)
        if target.partition(":")[0] in KINDS:
            asset = workspace.catalog.find(target)
            return of_bytes(workspace.ledger, asset.digest, asset.ref, limit)
        name = target.removeprefix(_CHANNEL)
        live = workspace.ledger.channel(name)
        if live is not None:
            return of_bytes(workspace.ledger, live.model_digest, f"{_CHANNEL}{name}@{live.sequence}", limit)
        return of_run(workspace.ledger, self._run_id(target), limit)

    def verify(self, target: str = "") -> VerifyReport:
        """See `Records.verify`."""
        from posttrain.control.verifying import verify, verify_live
        from posttrain.data.refs import KINDS

        self.workspace.seal()
        stores = self.workspace.stores
        channel = target.startswith(_CHANNEL) or target in stores.ledger.channels()
        run_id = "" if not target or channel or target.partition(":")[0] in KINDS else self._run_id(target)
        with stores.ledger.snapshot() as now:
            named = bool(run_id) or now.projects() == [DEFAULT_PROJECT]  # run ids of other projects are not told
        lost = replace(self.workspace.lost(run_id or "*"), named=named)
        return verify(stores, lambda: self.lineage(target), lost, run_id) if target else verify_live(stores, lost)

    def dead(self, within: str | None) -> list[Dead]:
        """See `Records.dead`."""
        from posttrain.app.dead import dead

        return dead(self.workspace, within)

    def look_again(self, within: str) -> list[Dead]:
        """See `Records.look_again`."""
        from posttrain.app.dead import look_again

        return look_again(self.workspace, within)

    def assume_dead(self, stage: str) -> AttemptRecord:
        """See `Records.assume_dead`."""
        from posttrain.app.dead import assume_dead

        return assume_dead(self.workspace, stage)

    def erase(self, what: str, reason: str) -> Erasure:
        """See `Records.erase`."""
        from posttrain.app.collecting import erase

        found = erase(self.workspace, what, reason)
        self.workspace.seal()
        return found

    def gc(self, older_than: float, *, dry_run: bool) -> Collected:
        """See `Records.gc`."""
        from posttrain.app.collecting import collect_garbage

        project = self.workspace.ledger.project
        if project != DEFAULT_PROJECT:  # the store is everybody's: an admin of one project does not sweep it
            raise InputError(
                f"gc is asked by an admin of {DEFAULT_PROJECT}, got project {project}: it sweeps the store of all"
            )
        return collect_garbage(self.workspace, older_than, dry_run=dry_run)

    def _run_id(self, target: str) -> str:
        ledger = self.workspace.ledger
        try:
            return ledger.find_run(target).id
        except NotFoundError as error:
            if ledger.channel_record(target).generation:
                raise NotFoundError(f"channel {target}: nothing was released to it yet") from error
            known = [record.name for record in ledger.channel_records()]
            if target.removeprefix(_CHANNEL).partition("@")[0] in known:  # a release of one
                raise
            hint = nearest(target, known)
            raise NotFoundError(f"there is no channel or run {target!r}{hint}; `posttrain ls` shows both") from error
