"""The writer of a run's trackers: one process for each run, started by the run's driver or by `posttrain track`.

::

    driver ──starts──▶ posttrain track RUN --follow   holds trackers.lock while it lives
      │ checks periodically that it        │ a thread for each tracker: one that hangs or fails delays no other
      ▼ lives; never waits for it          ▼ reads ledger and event segments ──▶ target; tracking.json: its state

The writer ends when every tracker has the run's ending, when errors continue after the end of the run, or when no
process drives the run. The writer may be killed at any point: the next writer reads from each target which points the
target contains.

`posttrain track RUN --tracker …` writes a run to further places. If the run has no tracker of that kind, the tracker is
recorded as one of the run's trackers after its place has been opened. If the run already has a tracker of that kind,
the further place is written immediately and not recorded, and the run's own place is unchanged.
"""

import fcntl
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, PosttrainError, TrackerError, WorkspaceError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.domain.trackers import Trackers
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.telemetry.tracker import Tracker, missing
from posttrain.trackers.choice import (
    LOCK,
    STATES,
    TROUBLE,
    WRITING,
    WRITTEN,
    TrackerState,
    check_trackers,
    describe,
    folder_of,
    line,
    of_run,
    opened,
    parse_trackers,
    record_trackers,
    resolved,
    sole_writer,
    start_writer,
    states,
    target,
)
from posttrain.trackers.rows import REGISTRIES, RunSource, register_channel
from posttrain.workspace.background import driven
from posttrain.workspace.settings import OpenWorkspace

_ROWS = 500  # rows per write
_MORE = "more.lock"  # lock in a run's folder, so only one process at a time adds places
_POLL = 1.0  # seconds between checks of a run that has not ended
_ALONE = 60.0  # seconds without a driver of the run, after which the run's writer ends
_PATIENCE = 600.0  # seconds that a tracker may take after the end of the run
_BACKOFF = (1.0, 2.0, 5.0, 15.0, 60.0)  # seconds between tries
_HANDED = "POSTTRAIN_TRACKERS_LOCK"  # the descriptor of the lock that a new writer inherits
_STARTS = 3  # maximum number of starts by one driver; more would not help
Reopen = Callable[[], OpenWorkspace]


# --- one tracker ------------------------------------------------------------------------------------------------------


def write(tracker: Tracker, source: RunSource, wrote: Callable[[str], None], wait: Callable[[], bool]) -> float | None:
    """Write a run to one tracker until the run ends.

    Args:
        wrote: called after each write with the remarks for people, which are usually empty.
        wait: waits for new rows; returns False to stop writing.

    Returns:
        The time at which the run ended; None if the run has not ended and `wait` returned False.

    Raises:
        Exception: any error of the target.
    """
    cursor = tracker.begin(source.about())
    crashpoint("track.after_begin")
    while True:
        rows, ending = source.read()
        named = (replace(row, values={tracker.name(one): value for one, value in row.values.items()}) for row in rows)
        fresh = missing(named, cursor)
        while batch := list(islice(fresh, _ROWS)):
            tracker.log(batch)
            crashpoint("track.after_log")
            wrote(source.remarks())
        if ending is not None:
            crashpoint("track.before_end")
            tracker.end(ending)
            crashpoint("track.after_end")
            wrote(source.remarks())
            return ending.finished_at or 0.0
        tracker.flush()
        wrote(source.remarks())
        if not wait():
            return None


class StateFile:
    """`tracking.json`: the state of each tracker. Several threads write it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / STATES, threading.Lock()
        self._said: dict[str, Any] = read_json(self._path) or {}

    def tell(self, kind: str, state: str, where: str, message: str = "", finished_at: float | None = None) -> None:
        """Record a tracker's state; the file is written only when the state changes."""
        told = {"state": state, "where": where, "message": message, "finished_at": finished_at}
        with self._lock:
            if self._said.get(kind) != told:
                self._said[kind] = told
                write_json(self._path, self._said)


def _attempt(
    workspace: OpenWorkspace, run_id: str, kind: str, words: Any, states: StateFile, wait: Callable[[], bool]
) -> None:
    """Write one tracker once.

    Raises:
        PosttrainError: the tracker could not be written; `tracking.json` also contains the message.
    """
    tracker: Tracker | None = None
    try:
        check_trackers(Trackers.of({kind: words}), f"run {run_id}")
        with opened(kind, words) as made:
            tracker, source = made, RunSource(workspace, run_id)
            ended = write(made, source, lambda said: states.tell(kind, WRITING, made.where, said), wait)
            if ended is not None:
                if kind in REGISTRIES:
                    _register(workspace, run_id)
                states.tell(kind, WRITTEN, made.where, source.remarks(), ended)
    except Exception as error:
        said = line(error, target(words))
        states.tell(kind, TROUBLE, tracker.where if tracker else "", said)
        raise TrackerError(f"run {run_id}: tracker {kind}: {said}; posttrain track {run_id} tries again") from error


def _register(workspace: OpenWorkspace, run_id: str) -> None:
    """Update the registries of each channel whose live release this run made."""
    for name in workspace.ledger.channels():
        live = workspace.ledger.channel(name)
        if live is not None and live.run_id == run_id:
            register_channel(workspace, name)


# --- a run's trackers -------------------------------------------------------------------------------------------------


def track(workspace: OpenWorkspace, run_id: str, only: Collection[str] | None = None) -> list[TrackerState]:
    """Write the points that are missing in each of a run's trackers immediately.

    If the run has not ended and another process writes its trackers, nothing is written here.

    Args:
        only: the kinds of trackers to write; None: all kinds.

    Returns:
        The states of the trackers.

    Raises:
        NotFoundError: there is no such run.
        InputError: the run has no tracker.
        TrackerError: a tracker could not be written; the other trackers were written.
    """
    ended = is_final("run", workspace.ledger.run(run_id).state)
    chosen = _chosen(workspace, run_id)
    folder = workspace.root / "runs" / run_id
    make_folder(folder)
    with sole_writer(folder, waits=ended) as sole:
        if sole:
            state_file, troubles = StateFile(folder), []
            for kind, words in chosen.chosen().items():
                if only is not None and kind not in only:
                    continue
                try:
                    _attempt(workspace, run_id, kind, words, state_file, lambda: False)
                except TrackerError as error:
                    troubles.append(error)
            if troubles:
                raise troubles[0]
    return states(workspace, workspace.ledger.run(run_id))


def follow(reopen: Reopen, run_id: str) -> None:
    """Write a run's metrics to its trackers until the run ends; return immediately if another process does this.

    Args:
        reopen: opens the workspace; called once here and once in each tracker's thread.
    """
    workspace = reopen()
    chosen = _chosen(workspace, run_id)
    folder = workspace.root / "runs" / run_id
    with sole_writer(folder, waits=False, handed=_handed_lock()) as sole:
        if not sole:
            return
        states = StateFile(folder)
        for kind, where in describe(chosen):
            states.tell(kind, WRITING, where)
        threads = [
            threading.Thread(target=_keep_at_it, args=(reopen, run_id, kind, words, states), daemon=True)
            for kind, words in chosen.chosen().items()
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(_POLL / 4)
            run = workspace.ledger.run(run_id)
            if run.finished_at and is_final("run", run.state) and time.time() - run.finished_at > _PATIENCE:
                for (kind, words), thread in zip(chosen.chosen().items(), threads, strict=True):
                    if thread.is_alive():
                        where = dict(describe(Trackers.of({kind: words})))[kind]
                        late = f"writing did not finish within {_PATIENCE:g} s after the end of the run"
                        states.tell(kind, TROUBLE, where, late)
                os._exit(TrackerError.exit_code)  # a thread that hangs would keep the process alive
    workspace.close()


def _keep_at_it(reopen: Reopen, run_id: str, kind: str, words: Any, states: StateFile) -> None:
    """Write one tracker, and try again after errors until the run is over."""
    workspace = reopen()
    clock, tries = workspace.ledger.clock, 0
    driven_at = clock.now()

    def goes_on() -> bool:
        nonlocal driven_at
        run, now = workspace.ledger.run(run_id), clock.now()
        if driven(run, now):
            driven_at = now
        return is_final("run", run.state) or now - driven_at < _ALONE

    def wait() -> bool:
        nonlocal tries
        tries = 0
        clock.sleep(_POLL)
        return goes_on()

    while True:
        try:
            _attempt(workspace, run_id, kind, words, states, wait)
            return
        except TrackerError:
            over = is_final("run", workspace.ledger.run(run_id).state)
            if not goes_on() or (over and tries >= len(_BACKOFF) - 1):
                return
            clock.sleep(_BACKOFF[min(tries, len(_BACKOFF) - 1)])
            tries += 1


def _chosen(workspace: OpenWorkspace, run_id: str) -> Trackers:
    chosen = of_run(workspace, run_id)
    if not chosen.chosen():
        raise InputError(
            f"run {run_id}: has no tracker; name one: posttrain track {run_id} --tracker csv, "
            "or for all later runs: posttrain init --tracker csv"
        )
    return chosen


def _handed_lock() -> int | None:
    """Return the descriptor of a lock that this process inherited from its parent."""
    given = os.environ.pop(_HANDED, "")
    if not given.isdecimal():
        return None
    os.set_inheritable(int(given), False)  # processes started by a tracker's library must not hold the lock
    return int(given)


# --- additional places ------------------------------------------------------------------------------------------------


def track_more(workspace: OpenWorkspace, run_id: str, chosen: Mapping[str, Any]) -> list[TrackerState]:
    """Write a run to the chosen places immediately, in addition to the run's own places.

    Returns:
        The states of the chosen places.

    Raises:
        InputError: a place cannot be written; in this case nothing is recorded or written.
        TrackerError: a place raised an error; the other places were written.
    """
    added = resolved(parse_trackers(chosen, "--tracker"), Path.cwd(), workspace.root)
    _refuse(added)
    workspace.ledger.run(run_id)  # raises if there is no such run
    folder = workspace.root / "runs" / run_id
    make_folder(folder)
    found: list[TrackerState] = []
    own: list[str] = []
    troubles: list[TrackerError] = []
    with sole_writer(folder, waits=True, lock=_MORE):
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
    """Create the folders of places, and reject places that cannot be written.

    Raises:
        InputError: a tracker cannot be used, or a folder cannot be created.
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
    """Write all current rows of the run to a place that is not recorded."""
    source = RunSource(workspace, run_id)
    again = f"posttrain track {run_id} --tracker {shlex.quote(f'{kind}={_typed(words)}')}"
    try:
        with opened(kind, words) as tracker:
            ended = write(tracker, source, lambda said: None, lambda: False)
            remarks = [source.remarks()] if source.remarks() else []
            if ended is None:
                remarks.insert(0, f"all data so far; {again} writes later data")
            return TrackerState(kind, WRITTEN, tracker.where, "; ".join(remarks))
    except Exception as error:
        raise TrackerError(
            f"run {run_id}: tracker {kind}: {line(error, target(words))}; {again} tries again"
        ) from error


def _open(workspace: OpenWorkspace, run_id: str, kind: str, words: Any) -> None:
    """Check that a place accepts the run."""
    try:
        with opened(kind, words) as tracker:
            tracker.begin(RunSource(workspace, run_id).about())
    except Exception as error:
        raise TrackerError(
            f"run {run_id}: tracker {kind}: {line(error, target(words))}; the run's trackers are unchanged; choose "
            "another location"
        ) from error


def _typed(words: Any) -> str:
    """Return a choice in the form of the option `--tracker`."""
    entity = getattr(words, "entity", None)
    return f"{entity}/{target(words)}" if entity else target(words)


# --- next to a driver -------------------------------------------------------------------------------------------------


class Scribe:
    """Starts the writer of a run's trackers while this process drives the run. No method waits or raises an error."""

    def __init__(self, workspace: OpenWorkspace, run_id: str) -> None:
        self._workspace, self._id = workspace, run_id
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._next = 0.0  # time of the next try
        self.start()

    def start(self) -> None:
        """Start the writer if there is something to write and it has not been started too often."""
        self._next = time.monotonic() + _POLL
        if self._workspace.read_only or self._starts >= _STARTS or self.done():
            self._starts = _STARTS
            return
        folder = self._workspace.root / "runs" / self._id
        with suppress(OSError), ExitStack() as held:  # on an error, `get` reports that the trackers are not written
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another process holds the lock
            self._starts += 1
            self._process = start_writer(self._workspace, [self._id, "--follow"], folder, {_HANDED: str(lock)}, lock)

    def keep(self) -> None:
        """Start the writer again if it was killed, or if it was not started yet."""
        if time.monotonic() < self._next or (self._process is not None and self._process.poll() in (None, 0)):
            return
        self._process = None
        self.start()

    def done(self) -> bool:
        """Return whether nothing is left to write, since there is no tracker or every tracker has the run's ending."""
        try:
            found = states(self._workspace, self._workspace.ledger.run(self._id))
        except PosttrainError:
            return True
        return all(state.state == WRITTEN for state in found)
