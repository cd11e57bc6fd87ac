"""`posttrain track RUN --tracker …`: a run written to places beside those that were chosen for it.

A tracker of a kind that the run lacks is recorded as one of its own, once its place has been opened. Another place of
a kind that it has is written there and then; where the run's own is stays as it was.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, TrackerError, WorkspaceError
from posttrain.domain.trackers import Trackers
from posttrain.store.atomic import make_folder
from posttrain.telemetry.tracking import Tracker
from posttrain.trackers.following import sole_writer, track, write
from posttrain.trackers.tracked import RunSource
from posttrain.trackers.tracking import (
    WRITTEN,
    TrackerState,
    check_trackers,
    folder_of,
    line,
    make_tracker,
    of_run,
    parse_trackers,
    record_trackers,
    refuse_unreachable,
    resolved,
    target,
)
from posttrain.workspace.opened import OpenWorkspace

_LOCK = "more.lock"  # in a run's folder: one process at a time adds places


def track_more(workspace: OpenWorkspace, run_id: str, chosen: Mapping[str, Any]) -> list[TrackerState]:
    """Write a run to these places too, now.

    Returns:
        How these stand.

    Raises:
        InputError: one cannot be written; nothing is recorded or written then.
        TrackerError: trouble with one; the others are written.
    """
    added = resolved(parse_trackers(chosen, "--tracker"), Path.cwd(), workspace.root)
    _refuse(added)
    workspace.ledger.run(run_id)  # there is one
    folder = workspace.root / "runs" / run_id
    make_folder(folder)
    found: list[TrackerState] = []
    own: list[str] = []
    troubles: list[TrackerError] = []
    with sole_writer(folder, waits=True, lock=_LOCK):
        for kind, words in added.chosen().items():
            known = of_run(workspace, run_id).chosen()
            try:
                if kind in known and known[kind] != words:
                    found.append(_write(workspace, run_id, kind, words))
                    continue
                if kind not in known:
                    _open(workspace, run_id, kind, words)
                    record_trackers(workspace, run_id, Trackers.of({**known, kind: words}))
                own.append(kind)
            except TrackerError as error:
                troubles.append(error)
    if own:
        found += [state for state in track(workspace, run_id, own) if state.kind in own]
    if troubles:
        raise troubles[0]
    return found


def _refuse(added: Trackers) -> None:
    """Refuse places that cannot be written, by making their folders.

    Raises:
        InputError: one is such.
    """
    check_trackers(added, "--tracker")
    for kind, words in added.chosen().items():
        folder = folder_of(words)
        try:
            if folder is not None:
                make_folder(folder)
        except WorkspaceError as error:
            raise InputError(f"--tracker: trackers.{kind}: {error}; choose another folder") from error


def _write(workspace: OpenWorkspace, run_id: str, kind: str, words: Any) -> TrackerState:
    """All there is of the run by now, to a place that is not recorded."""
    made: list[Tracker] = []
    source = RunSource(workspace, run_id)
    again = f"posttrain track {run_id} --tracker {shlex.quote(f'{kind}={_named(words)}')}"
    try:
        refuse_unreachable(words)
        made.append(make_tracker(kind, words))
        ended = write(made[0], source, lambda said: None, lambda: False)
        remarks = [source.remarks()] if source.remarks() else []
        if ended is None:
            remarks.insert(0, f"all there is by now; {again} writes what comes")
        return TrackerState(kind, WRITTEN, made[0].where, "; ".join(remarks))
    except Exception as error:
        said = line(error, target(words))
        raise TrackerError(f"run {run_id}: tracker {kind}: {said}; {again} tries again") from error
    finally:
        _close(made)


def _open(workspace: OpenWorkspace, run_id: str, kind: str, words: Any) -> None:
    """Find out whether a place takes the run."""
    made: list[Tracker] = []
    try:
        refuse_unreachable(words)
        made.append(make_tracker(kind, words))
        made[0].begin(RunSource(workspace, run_id).about())
    except Exception as error:
        said = line(error, target(words))
        raise TrackerError(
            f"run {run_id}: tracker {kind}: {said}; the run's trackers are as before; choose another place"
        ) from error
    finally:
        _close(made)


def _close(made: list[Tracker]) -> None:
    for tracker in made:
        with suppress(Exception):
            tracker.close()


def _named(words: Any) -> str:
    """As `--tracker` takes it."""
    entity = getattr(words, "entity", None)
    return f"{entity}/{target(words)}" if entity else target(words)
