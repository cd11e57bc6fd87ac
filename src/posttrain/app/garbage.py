"""Garbage collection and erasure in a workspace.

Collection deletes artifacts that no row needs, and other leftovers. Erasure removes free text from a workspace, and
lists the places that may still contain copies of the text, which the user must delete.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Container, Iterator
from pathlib import Path

from posttrain.api.control import Control
from posttrain.api.values import Collected, Erasure
from posttrain.api.verbs import answers
from posttrain.app.workspace import Workspace, join_store
from posttrain.control.channels import policy_of
from posttrain.data.refs import KINDS
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import ConflictError, InputError, IntegrityError
from posttrain.domain.ids import NOBODY
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.atomic import files_below
from posttrain.store.blobs import USERS, ObjectBlobs, open_blobs
from posttrain.store.direct import open_direct
from posttrain.store.erasure import Erased, erase_principal, erase_subject
from posttrain.store.garbage import PATIENCE, Marker, adoptable, ended_runs, forget_answers, sweep
from posttrain.store.operations import PartStore, forget_parts, forget_pending_uploads, named_parts
from posttrain.store.staging import StagingArea
from posttrain.store.trees import scratch
from posttrain.trackers.choice import describe, of_workspace

ANSWERS_SECONDS = 86400.0  # the time for which an HTTP response is stored, for a client that repeats the request
_CACHED = ("trees", "files", "harnesses")  # folders of the cache whose entries have digests as names
_AT_ONCE = 200  # staged objects that are deleted while nothing can be adopted
_PERSON = ("user:", NOBODY)


@answers(Control.gc)
def collect_garbage(workspace: Workspace, older_than: float, *, dry_run: bool) -> Collected:
    """Delete artifacts that no row of any project needs.

    Args:
        older_than: seconds; younger artifacts are kept.
        dry_run: whether to delete nothing and only report what would be deleted.

    Raises:
        InputError: the project is not the default project.
        ConflictError: another workspace uses the same store.
        IntegrityError, DeadlineError, WorkspaceError: see `store.garbage.sweep`.
    """
    project = workspace.ledger.project
    if project != DEFAULT_PROJECT:  # all projects share the store, so an admin of only one project must not sweep it
        raise InputError(
            f"gc: the store of all projects can be swept only in the project {DEFAULT_PROJECT}, by an admin, but the "
            f"project is {project}; use --project {DEFAULT_PROJECT}"
        )
    blobs = open_blobs(workspace.blobs.url, workspace.lock)
    _refuse_shared(workspace, blobs)
    actor, ledger = workspace.actor, workspace.ledger
    kept = max(older_than, ANSWERS_SECONDS)  # a client that did not receive a response may repeat the request
    answers = forget_answers(ledger, ledger.clock.now() - kept, dry_run=dry_run)
    if dry_run:
        leftovers = list(_leftovers(workspace, Marker(ledger, blobs).mark().needed, older_than))
        folders, size = len(leftovers), sum(_size(path) for path in leftovers)
    else:
        folders, size = _clear(workspace, blobs, older_than)  # first: no stored response may name deleted bytes
    folders += _end_unfinished(workspace, blobs.url, older_than, dry_run)
    objects, staged = _unstage(workspace, blobs.url, older_than, dry_run)
    folders, size = folders + objects, size + staged
    done = sweep(ledger, blobs, workspace.lock, actor, older_than=older_than, dry_run=dry_run)
    return Collected(dry_run, done, folders, size, answers)


def _refuse_shared(workspace: Workspace, blobs: ObjectBlobs) -> None:
    """Refuse to sweep a store that another ledger refers to, since this ledger does not contain its references.

    Raises:
        ConflictError: another workspace is registered in the store.
    """
    join_store(workspace, blobs)
    own = {one.id for one in workspace.hosts.all()} if workspace.hosts else set()
    others = {name: where for name, where in blobs.notes(USERS).items() if name not in {workspace.identity(), *own}}
    for name, where in sorted(others.items()):
        raise ConflictError(
            f"gc: artifact store {blobs.url} is also used by the workspace {where}, whose artifacts would be deleted; "
            f"if that workspace no longer exists, delete the object workspaces/{name} in the store"
        )


def _end_unfinished(workspace: Workspace, url: str, older_than: float, dry_run: bool) -> int:
    """End unfinished multipart uploads and unfinished uploads of clients in a store; return their number."""
    ledger, store, direct = workspace.ledger, PartStore(url), open_direct(url)
    forgotten = frozenset(forget_parts(ledger, ledger.clock.now() - older_than, dry_run=dry_run))
    late = {name for name, at in store.stored().items() if at < time.time() - older_than}
    gone = forgotten | (late - named_parts(ledger))
    begun = direct.unfinished(time.time() - older_than) if direct is not None else []
    for name in gone if not dry_run else ():
        store.drop(name)
    for one in begun if not dry_run else ():
        if direct is not None:
            direct.end(one)
    return len(gone) + len(begun)


def _unstage(workspace: Workspace, url: str, older_than: float, dry_run: bool) -> tuple[int, int]:
    """Delete staged files that no driver will adopt; return the numbers of objects and of bytes."""
    area = StagingArea(url)
    found = list(area.stored())  # listed first: an attempt is in the ledger before its job stages anything
    kept = adoptable(workspace.ledger)
    gone = [(key, size) for name, key, at, size in found if name not in kept and at < time.time() - older_than]
    for start in range(0, 0 if dry_run else len(gone), _AT_ONCE):
        with workspace.lock.alone(PATIENCE):  # no file is being adopted
            for key, _ in gone[start : start + _AT_ONCE]:
                area.drop(key)
    return len(gone), sum(size for _, size in gone)


def _clear(workspace: Workspace, blobs: ObjectBlobs, older_than: float) -> tuple[int, int]:
    """Delete leftovers; return the numbers of files and folders, and of bytes.

    The leftovers are moved away while no process can start to use them, and deleted afterwards. The records of unused
    uploads are deleted first, so no client uses an upload whose bytes are deleted later.
    """
    with scratch(workspace.root / "cache" / "scratch", ".gc-") as bin_:
        with workspace.lock.alone(PATIENCE):
            needed = Marker(workspace.ledger, blobs).mark().needed
            found = list(_leftovers(workspace, needed, older_than))
            forget_pending_uploads(workspace.ledger, needed, workspace.ledger.clock.now() - older_than)
            for number, path in enumerate(found):
                shutil.move(path, bin_ / str(number))
        return len(found), _size(bin_)


def _leftovers(workspace: Workspace, needed: Container[str], older_than: float) -> Iterator[Path]:
    """Yield cached copies that no row needs, and checkpoints of runs that ended permanently."""
    for kind in _CACHED:
        for path in sorted((workspace.root / "cache" / kind).glob("[0-9a-f]*")):
            if DIGEST_PREFIX + path.name not in needed and path.stat().st_mtime < time.time() - older_than:
                yield path
    for run in ended_runs(workspace.ledger, workspace.ledger.clock.now() - older_than):
        yield from sorted((workspace.root / "runs" / run).glob("*/[0-9]*/checkpoints"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(map(_bytes, files_below(path, sys.maxsize)))


def _bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # the path is too long or was deleted
        return 0


@answers(Control.erase)
def erase(workspace: Workspace, what: str, reason: str) -> Erasure:
    """Erase the free text of a run or of an asset's version, or the name of a person.

    Args:
        what: a run's name or id, `dataset:NAME@VERSION`, `user:NAME`, or `erased:ID` to rewrite the ledger's file for
            a person whose name was already erased.

    Raises:
        InputError: the reason or the version is missing, or the run has not ended.
        NotFoundError: there is no such subject.
    """
    if not reason.strip():
        raise InputError("erase: --reason must not be empty; give the reason, which is stored with the event")
    if what.startswith(_PERSON):
        if workspace.ledger.project != DEFAULT_PROJECT:  # this removes the person's roles and tokens in every project
            raise InputError(
                f"erase {what}: a person's name can be erased only in the project {DEFAULT_PROJECT}, by an admin, but "
                f"the project is {workspace.ledger.project}; use --project {DEFAULT_PROJECT}"
            )
        done = erase_principal(workspace.ledger, workspace.actor, what, reason)
        return Erasure(what, done, tuple(_left(workspace, done, what, "")))
    run = ""
    if what.partition(":")[0] in KINDS:
        if "@" not in what:
            raise InputError(f"erase {what}: must name a version; write {workspace.catalog.find(what).ref}")
        what = workspace.catalog.find(what).ref
    else:
        what = run = workspace.ledger.find_run(what).id
    done = erase_subject(workspace.ledger, workspace.actor, what, reason)
    return Erasure(what, done, tuple(_left(workspace, done, what, run)))


def _left(workspace: Workspace, done: Erased, what: str, run: str) -> Iterator[str]:
    if not done.overwritten:
        again = f"{NOBODY}{done.subject}" if what.startswith(_PERSON) else what
        yield (
            "the ledger's file, which another process has open; after that process ends: "
            f"posttrain erase {again} --reason …"
        )
    if what == workspace.actor:
        yield "your name, which your next action here records again"
    if workspace.ledger_address:
        yield "the database server's log and backups, and the database's record of this workspace's host and folder"
    folder = workspace.root / "runs" / run
    if run and folder.exists():
        yield f"the run's folder, with logs, facts and report: {folder}"
    if run and (tags := workspace.ledger.notes(run, tags=True)):
        yield f"its tags, {', '.join(one.tag for one in tags)}: posttrain note {run} --untag TAG removes one"
    if run or what.startswith(_PERSON):
        yield "manifests in the store, whose digests cover the owner, and exported model cards"
        yield from _policies(workspace, what)
        yield from (f"tracker {kind}: {where}" for kind, where in describe(of_workspace(workspace)))
    if not run and not what.startswith(_PERSON):
        yield f"the bytes of {what} in the store, which posttrain gc deletes if nothing else needs them"


def _policies(workspace: Workspace, who: str) -> Iterator[str]:
    """Yield a line for each policy that names a person or cannot be read.

    Pending approvals under a policy that names a person contain the name too.
    """
    for record in workspace.ledger.channel_records():
        try:
            pinned = policy_of(workspace.stores, record.name)
        except IntegrityError:
            yield f"the policy of channel {record.name}, which cannot be read"
            continue
        if pinned is not None and who in pinned.policy.approvers:
            yield (
                f"the policy of channel {record.name}, which contains the name; pending approvals contain it too; set "
                f"a policy without the name: posttrain channel set-policy {record.name} POLICY.yaml"
            )
