"""Queries about runs and their origins. Each function imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.control import Control, RunWatch
from posttrain.api.values import RunDiff, Why
from posttrain.api.verbs import answers
from posttrain.data.refs import KINDS, refuse_afar
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, NotFoundError, nearest
from posttrain.domain.gates import Outcome
from posttrain.domain.records import DEFAULT_PROJECT, AssetStatus

if TYPE_CHECKING:
    from posttrain.api.values import (
        ComparePage,
        Comparison,
        Downstream,
        LogFile,
        Node,
        RunDriver,
        Scores,
        TrackerState,
        VerifyReport,
    )
    from posttrain.app.workspace import Workspace
    from posttrain.domain.manifest import Manifest

_CHANNEL = "channel:"  # prefix that names a channel even if a run or an asset has the same name


@answers(Control.ids)
def ids(workspace: Workspace, limit: int, before: str | None = None) -> list[str]:
    return [run.id for run in workspace.ledger.runs(limit, before=before)]


@answers(Control.manifest)
def manifest(workspace: Workspace, run_id: str) -> Manifest:
    return workspace.stores.manifest(workspace.ledger.run(run_id))


@answers(Control.scores)
def scores(workspace: Workspace, run_id: str) -> Scores:
    from posttrain.views.status import read_status, run_scores

    return run_scores(workspace, read_status(workspace, run_id))


@answers(Control.driver)
def driver(workspace: Workspace, run_id: str) -> RunDriver | None:
    from posttrain.workspace.background import run_driver

    ledger = workspace.ledger
    return run_driver(workspace.root, ledger.run(run_id), ledger.clock.now())


@answers(Control.why)
def why(workspace: Workspace, run_id: str) -> Why:
    from posttrain.control.verdicts import explain_run
    from posttrain.views.status import RunWatcher, baseline_run, run_scores

    watcher = RunWatcher(workspace, run_id, cached=True)
    found, status = explain_run(workspace.stores, run_id), watcher.read()
    scores, other = (
        run_scores(workspace, status),
        baseline_run(workspace, manifest(workspace, run_id), found.report),
    )
    action = status.next_action
    if found.report and found.report.outcome is Outcome.INCONCLUSIVE:
        action = "register more rows for the suite (posttrain asset add), then submit the run file again"
    elif action.startswith("posttrain why"):
        action = f"posttrain diff {other} {run_id}" if other else f"posttrain get {run_id} --report"
    told, symptoms = tuple(trackers(workspace, run_id)), tuple(watcher.findings(status))
    return Why(status, found.report, found.lost, scores, other, action, told, symptoms)


@answers(Control.diff)
def diff(workspace: Workspace, first: str, second: str) -> RunDiff:
    from posttrain.control.comparison import compare

    one, two = (workspace.ledger.find_run(words).id for words in (first, second))
    mine = manifest(workspace, one)
    differences = compare(workspace.ledger, mine, manifest(workspace, two))
    measured = frozenset(stage.name for stage in mine.stages if stage.measures)
    return RunDiff(one, two, tuple(differences), (_metrics(workspace, one), _metrics(workspace, two)), measured)


def _metrics(workspace: Workspace, run_id: str) -> dict[str, float]:
    stages = workspace.ledger.stages(run_id)
    return {f"{stage.name}/{name}": value for stage in stages for name, value in stage.metrics.items()}


@answers(Control.compare)
def compare(workspace: Workspace, words: Sequence[str], page: Path | None = None) -> Comparison:
    from posttrain.app.models import measured_word
    from posttrain.views.series import compare_runs, write_comparison

    found = compare_runs(workspace, [measured_word(workspace, word) for word in words])
    if page is not None:
        write_comparison(workspace, found, page)
    return found


@answers(Control.comparison)
def comparison(workspace: Workspace, words: Sequence[str]) -> ComparePage:
    from posttrain.views.series import compare_runs, comparison

    return comparison(workspace, compare_runs(workspace, words))


@answers(Control.logs)
def logs(
    workspace: Workspace, run_id: str, stage: str | None, follow: RunWatch | None = None
) -> Iterator[tuple[LogFile, str]]:
    from posttrain.views import logs

    if follow is None:
        return logs.read_all(workspace, run_id, stage)
    return logs.follow(workspace, run_id, stage, follow.look)


@answers(Control.trackers)
def trackers(workspace: Workspace, run_id: str) -> list[TrackerState]:
    from posttrain.trackers.choice import states

    return states(workspace, workspace.ledger.run(run_id))


@answers(Control.track)
def track(workspace: Workspace, run_id: str, chosen: Mapping[str, Any]) -> list[TrackerState]:
    if chosen:
        refuse_afar("track: a server writes only the trackers of its workspace; leave --tracker out")
        from posttrain.trackers.writer import track_more

        return track_more(workspace, run_id, chosen)
    from posttrain.trackers.writer import track

    return track(workspace, run_id)


@answers(Control.follow)
def follow(workspace: Workspace, run_id: str) -> None:
    from functools import partial

    from posttrain.app.workspace import open_workspace
    from posttrain.trackers.writer import follow

    workspace.close()  # each thread opens the workspace itself
    follow(partial(open_workspace, workspace.root), run_id)


@answers(Control.asset_status)
def asset_status(workspace: Workspace) -> list[AssetStatus]:
    return [said for said, _ in workspace.ledger.asset_status()]


@answers(Control.recalled)
def recalled(workspace: Workspace, *digests: str) -> dict[str, AssetStatus]:
    from posttrain.control import channels as recalls

    return recalls.recalled(workspace.ledger, digests)


@answers(Control.lineage)
def lineage(workspace: Workspace, target: str) -> Node:
    from posttrain.control.lineage import asset_lineage, release_lineage, run_lineage

    if target.startswith(DIGEST_PREFIX):
        raise InputError(f"{target[:24]}: for a digest, lineage needs --downstream; add --downstream")
    if target.partition(":")[0] in KINDS:
        return asset_lineage(workspace.stores, workspace.catalog.find(target))
    if target.startswith(_CHANNEL) or target in workspace.ledger.channels():
        return release_lineage(workspace.stores, target.removeprefix(_CHANNEL))
    return run_lineage(workspace.stores, _run_id(workspace, target))


@answers(Control.downstream)
def downstream(workspace: Workspace, target: str, limit: int = 200) -> Downstream:
    from posttrain.control.lineage import of_bytes, of_run

    if target.startswith(DIGEST_PREFIX):
        return of_bytes(workspace.ledger, workspace.ledger.find_artifact(target).digest, limit=limit)
    if target.partition(":")[0] in KINDS:
        asset = workspace.catalog.find(target)
        return of_bytes(workspace.ledger, asset.digest, asset.ref, limit)
    name = target.removeprefix(_CHANNEL)
    live = workspace.ledger.channel(name)
    if live is not None:
        return of_bytes(workspace.ledger, live.model_digest, f"{_CHANNEL}{name}@{live.sequence}", limit)
    return of_run(workspace.ledger, _run_id(workspace, target), limit)


@answers(Control.verify)
def verify(workspace: Workspace, target: str = "") -> VerifyReport:
    from posttrain.control.verification import verify, verify_live

    workspace.seal()
    stores = workspace.stores
    channel = target.startswith(_CHANNEL) or target in stores.ledger.channels()
    run_id = "" if not target or channel or target.partition(":")[0] in KINDS else _run_id(workspace, target)
    named = bool(run_id) or stores.ledger.projects() == [DEFAULT_PROJECT]  # run ids of other projects are not revealed
    lost = replace(workspace.lost(run_id or "*"), named=named)
    return verify(stores, lambda: lineage(workspace, target), lost, run_id) if target else verify_live(stores, lost)


def _run_id(workspace: Workspace, target: str) -> str:
    ledger = workspace.ledger
    try:
        return ledger.find_run(target).id
    except NotFoundError as error:
        if ledger.channel_record(target).generation:
            raise NotFoundError(f"channel {target} has no release yet") from error
        known = [record.name for record in ledger.channel_records()]
        if target.removeprefix(_CHANNEL).partition("@")[0] in known:  # a release of a channel
            raise
        hint = nearest(target, known)
        raise NotFoundError(
            f"there is no channel or run {target!r}{hint}; `posttrain ls` lists runs and channels"
        ) from error
