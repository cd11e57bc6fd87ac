"""Erasing words from a workspace, and saying where copies of them are that no command empties."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.api.values import Erasure
from posttrain.app.workspace import Workspace
from posttrain.control.channels import policy_of
from posttrain.data.refs import KINDS
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.principals import NOBODY
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.erasure import Erased, erase_principal, erase_subject
from posttrain.trackers.tracking import describe, of_workspace

_PERSON = ("user:", NOBODY)


def erase(workspace: Workspace, what: str, reason: str) -> Erasure:
    """Erase the words of a run, of a version of an asset, or the name of a person.

    Args:
        what: a run as one names it, `dataset:NAME@VERSION`, `user:NAME`, or `erased:ID` to write the file anew.

    Raises:
        InputError: no reason, no version, a run that has not ended.
        NotFoundError: there is no such thing.
    """
    if not reason.strip():
        raise InputError("erase: --reason must say why, got nothing; it is kept with the event")
    head = what.partition(":")[0]
    if what.startswith(_PERSON):
        if workspace.ledger.project != DEFAULT_PROJECT:  # it takes their roles and tokens in every project
            raise InputError(
                f"erase {what}: the name of a person is erased by an admin of {DEFAULT_PROJECT}, got project "
                f"{workspace.ledger.project}; ask there: --project {DEFAULT_PROJECT}"
            )
        done = erase_principal(workspace.ledger, workspace.actor, what, reason)
        return Erasure(what, done, tuple(_left(workspace, done, what, "")))
    if head in KINDS:
        if "@" not in what:
            raise InputError(f"erase {what}: must name a version; write {workspace.catalog.find(what).ref}")
        what = workspace.catalog.find(what).ref
        done = erase_subject(workspace.ledger, workspace.actor, what, reason)
        return Erasure(what, done, tuple(_left(workspace, done, what, "")))
    run = workspace.ledger.find_run(what).id
    done = erase_subject(workspace.ledger, workspace.actor, run, reason)
    return Erasure(run, done, tuple(_left(workspace, done, run, run)))


def _left(workspace: Workspace, done: Erased, what: str, run: str) -> Iterator[str]:
    if not done.overwritten:
        again = f"{NOBODY}{done.subject}" if what.startswith(_PERSON) else what
        yield f"the ledger's file, which somebody else has open; when they are done: posttrain erase {again} --reason …"
    if what == workspace.actor:
        yield "your name, from the next thing on that you do here"
    if done.before:
        yield f"{done.before} events of before an upgrade: each is part of the next one's hash"
    for copy in sorted(workspace.root.glob("ledger-*.db")):
        yield f"a copy of the ledger that an upgrade kept: {copy}"
    if workspace.ledger_address:
        yield "the database server's own log and backups; where the database's workspace is (host and folder)"
    folder = workspace.root / "runs" / run
    if run and folder.exists():
        yield f"the run's folder, with logs, facts and report: {folder}"
    if run or what.startswith(_PERSON):
        yield "manifests in the store, whose owner is part of their digest, and models' cards that were exported"
        yield from _policies(workspace, what)
        yield from (f"tracker {kind}: {where}" for kind, where in describe(of_workspace(workspace)))
    if not run and not what.startswith(_PERSON):
        yield f"the bytes of {what} in the store, which posttrain gc deletes where nothing else needs them"


def _policies(workspace: Workspace, who: str) -> Iterator[str]:
    """Policies that name a person, or cannot be read: what waits for approvals under them says the name again."""
    for record in workspace.ledger.channel_records():
        try:
            pinned = policy_of(workspace.stores, record.name)
        except IntegrityError:
            yield f"the policy of channel {record.name}, which cannot be read"
            continue
        if pinned is not None and who in pinned.policy.approvers:
            remedy = f"posttrain channel set-policy {record.name} POLICY.yaml without it"
            yield f"the policy of channel {record.name}, which names them: while it does, what waits says so; {remedy}"
