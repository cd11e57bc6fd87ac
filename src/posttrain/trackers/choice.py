"""Trackers of a run: their choice, a check that they can be written, and their states.

::

    .posttrain/workspace.json          "trackers": those of every run whose file names none
    .posttrain/runs/ID/trackers.json   trackers of this run, with absolute paths; written at submission
                      tracking.json    the state of each tracker, recorded by the writer
                      trackers.lock    held by the writer, one process for each run
                      track.log        the output of that process

A tracker's server is probed before its client library is used, because the library may retry for minutes.
"""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from posttrain.domain.errors import InputError, IntegrityError, PosttrainError, TrackerError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord
from posttrain.domain.trackers import NONE, MlflowChoice, TensorBoardChoice, Trackers, WandbChoice, from_words
from posttrain.domain.validation import bare, validated
from posttrain.store.atomic import is_held, make_folder, read_json, taken, write_json
from posttrain.telemetry.tracker import Tracker
from posttrain.telemetry.trackers.csv import CsvTracker
from posttrain.telemetry.trackers.mlflow import MlflowTracker
from posttrain.telemetry.trackers.parquet import ParquetTracker
from posttrain.telemetry.trackers.tensorboard import TensorBoardTracker
from posttrain.telemetry.trackers.wandb import WandbTracker
from posttrain.workspace.settings import SETTINGS, VARIABLE, OpenWorkspace

_SECONDS = 5.0  # seconds within which a server must accept a connection
_PORTS = {"http": 80, "https": 443}
RECORD, STATES, LOCK, LOG = "trackers.json", "tracking.json", "trackers.lock", "track.log"
PLACE = "tracking"  # the default folder for trackers in the workspace
KEY = "WANDB_API_KEY"
WRITING, WRITTEN, TROUBLE, UNWRITTEN = "writing", "written", "trouble", "not written"
_PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
_LONGEST = 400  # maximum characters of an error
_MAKES: Mapping[str, Callable[[Any], Tracker]] = {
    "csv": lambda words: CsvTracker(Path(words.dir)),
    "parquet": lambda words: ParquetTracker(Path(words.dir)),
    "tensorboard": lambda words: TensorBoardTracker(Path(words.logdir)),
    "mlflow": lambda words: MlflowTracker(words.tracking_uri, words.experiment, words.registered_model),
    "wandb": lambda words: WandbTracker(Path(words.dir), words.project, words.entity, words.mode),
}
_SCHEMES = ("http", "https", "sqlite", "file", "postgresql", "mysql", "mssql", "databricks", "databricks-uc")


def refuse_unreachable(words: Any) -> None:
    """Reject a tracking server that accepts no connection; a server behind a proxy is not checked.

    Raises:
        TrackerError: the server accepts no connection; the message contains the cause.
    """
    from urllib.request import getproxies, proxy_bypass  # imported here, because only the writer needs it

    uri = str(getattr(words, "tracking_uri", None) or "")
    parts = urlsplit(uri)
    host = parts.hostname
    if parts.scheme not in _PORTS or not host or (parts.scheme in getproxies() and not proxy_bypass(host)):
        return
    try:
        socket.create_connection((host, parts.port or _PORTS[parts.scheme]), _SECONDS).close()
    except (OSError, ValueError) as error:
        raise TrackerError(f"cannot reach {uri}: {unreachable(error) or error}") from error


def unreachable(error: BaseException) -> str:
    """Return the network error in an error's chain of causes; "" if the cause is another error."""
    for cause in _causes(error):
        if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror):
            return (cause.strerror or str(cause) or "no answer").lower()
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        yield found
        reason = getattr(found, "reason", None)  # urllib3 stores the cause there
        found = reason if isinstance(reason, BaseException) else found.__cause__ or found.__context__


@dataclass(frozen=True, slots=True)
class TrackerState:
    """The state of one tracker of a run."""

    kind: str
    state: str  # writing | written | trouble | waiting (for the run's driver) | not written (and not due)
    where: str
    message: str = ""  # for an error, one line with the next action; otherwise remarks for people, or ""

    @property
    def in_trouble(self) -> bool:
        """Whether a person should check the tracker."""
        return self.state == TROUBLE

    @property
    def under_way(self) -> bool:
        """Whether a process is writing the tracker now."""
        return self.state == WRITING

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return asdict(self)


# --- chosen trackers --------------------------------------------------------------------------------------------------


def resolved(trackers: Trackers, base: Path, root: Path) -> Trackers:
    """Return the trackers with a place for each.

    Args:
        base: the folder at which relative paths start.
        root: the workspace folder.
    """

    def place(given: str | None, default: str) -> str:
        return str((base / Path(given).expanduser()).resolve() if given else root / PLACE / default)

    made: dict[str, Any] = {}
    for kind, words in trackers.chosen().items():
        if isinstance(words, MlflowChoice):
            uri = _tracking_uri(words.tracking_uri, base, root)
            model = words.registered_model or re.sub(r"[^A-Za-z0-9 ._-]", "-", words.experiment).strip("-")
            made[kind] = words.model_copy(update={"tracking_uri": uri, "registered_model": model})
        else:
            folder = "logdir" if isinstance(words, TensorBoardChoice) else "dir"
            where = place(getattr(words, folder), "" if isinstance(words, WandbChoice) else kind)
            made[kind] = words.model_copy(update={folder: where})
    return Trackers.of(made)


def _tracking_uri(given: str | None, base: Path, root: Path) -> str:
    """Return a tracking URI that is valid in every folder."""
    if given is None:
        return f"sqlite:///{root / PLACE / 'mlflow.db'}"
    if given.startswith("sqlite:///"):
        return f"sqlite:///{(base / given.removeprefix('sqlite:///')).resolve()}"
    if given.startswith("file:"):
        return str(Path(unquote(urlsplit(given).path)))
    return given if ":" in given else str((base / Path(given).expanduser()).resolve())


def parse_trackers(raw: Any, source: str) -> Trackers:
    """Return validated trackers.

    Raises:
        InputError: a tracker or setting is unknown; the message names the field.
    """
    return validated(Trackers, raw, source)


def read_choice(words: Sequence[str]) -> dict[str, Any]:
    """Return the recorded form of a choice such as `["csv=logs", "mlflow"]`, with absolute paths.

    Raises:
        InputError: a tracker is unknown or named twice, or a target is invalid.
    """
    kinds = [word.partition("=")[0] for word in words]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None or (NONE in kinds and len(kinds) > 1):
        raise InputError(
            "--tracker: each tracker must be named once, and `none` cannot be combined with others, got "
            f"{' '.join(map(bare, words))}"
        )
    chosen = parse_trackers(from_words(list(words)), "--tracker")
    given, full = chosen.to_json(), resolved(chosen, Path.cwd(), Path.cwd()).to_json()
    for kind, place in (("csv", "dir"), ("parquet", "dir"), ("tensorboard", "logdir"), ("mlflow", "tracking_uri")):
        if place in given.get(kind, {}):
            given[kind][place] = full[kind][place]
    return given


def of_workspace(workspace: OpenWorkspace) -> Trackers:
    """Return the workspace's trackers with their locations; they apply to every run whose file names no tracker.

    Raises:
        InputError: the trackers in workspace.json are not valid.
    """
    chosen = parse_trackers(workspace.settings.get("trackers", {}), f"{workspace.root / SETTINGS}: trackers")
    return resolved(chosen, workspace.root, workspace.root)


def of_run(workspace: OpenWorkspace, run_id: str) -> Trackers:
    """Return the trackers recorded when the run was submitted, or without a record those of the workspace.

    Raises:
        InputError, IntegrityError: the record cannot be read.
    """
    path = workspace.root / "runs" / run_id / RECORD
    recorded = read_json(path)
    return of_workspace(workspace) if recorded is None else parse_trackers(recorded, str(path))


def record_trackers(
    workspace: OpenWorkspace, run_id: str, trackers: Trackers | None, *, attached: bool = False
) -> None:
    """Record a run's trackers.

    Args:
        trackers: resolved trackers; None if the run file names none: an earlier record or the workspace's apply.
        attached: whether the run was submitted before.
    """
    folder = workspace.root / "runs" / run_id
    if trackers is None and (attached and (folder / RECORD).exists()):
        return
    wanted = (of_workspace(workspace) if trackers is None else trackers).to_json()
    known = read_json(folder / RECORD)
    if wanted != known and (wanted or known is not None or trackers is not None):
        make_folder(folder)
        write_json(folder / RECORD, wanted)


# --- whether they can be written --------------------------------------------------------------------------------------


def check_trackers(trackers: Trackers, source: str) -> None:
    """Reject a tracker that could not be written.

    Args:
        trackers: resolved trackers.
        source: the file or option that chooses them, for errors.

    Raises:
        InputError: the package of a tracker is missing, its place cannot be written, or its key is not set.
    """
    for kind, words in trackers.chosen().items():
        package = _PACKAGES.get(kind)
        if package and not _installed(package):
            raise InputError(
                f"{source}: trackers.{kind}: needs the package {package}, which is not installed; "
                f"pip install 'posttrain[{kind}]'"
            )
        if isinstance(words, WandbChoice) and words.mode == "online" and not os.environ.get(KEY):
            raise InputError(
                f"{source}: trackers.wandb: mode online needs a key and {KEY} is not set; set it, "
                "or write mode: offline"
            )
        folder = folder_of(words)
        if folder is not None:
            _refuse_unwritable(folder, f"{source}: trackers.{kind}")


def _installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # a mere folder, such as wandb creates, is no package


def folder_of(words: Any) -> Path | None:
    """Return the folder into which a tracker writes; None if it does not write into a folder."""
    if isinstance(words, MlflowChoice):
        uri = str(words.tracking_uri)
        if uri.startswith("sqlite:///"):
            return Path(uri.removeprefix("sqlite:///")).parent
        scheme = uri.partition(":")[0] if ":" in uri else ""
        if scheme and scheme.partition("+")[0] not in _SCHEMES:
            raise InputError(
                f"trackers.mlflow: tracking_uri must be a folder or begin with {', '.join(_SCHEMES[:4])}, got {uri!r}"
            )
        return None if scheme else Path(uri)
    return Path(str(words.logdir if isinstance(words, TensorBoardChoice) else words.dir))


def _refuse_unwritable(folder: Path, what: str) -> None:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise InputError(f"{what}: {folder} cannot be created, since {there} is a file; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{what}: {folder} cannot be written, since {there} is read-only; choose another folder")


def target(words: Any) -> str:
    """Return the target in a tracker's choice: a folder, an address or a project."""
    return str(getattr(words, type(words).target))


def describe(trackers: Trackers) -> Iterator[tuple[str, str]]:
    """Yield the kind and the target of each tracker, for a person."""
    for kind, words in trackers.chosen().items():
        if isinstance(words, MlflowChoice):
            yield kind, f"{words.tracking_uri}, experiment {words.experiment}"
        elif isinstance(words, WandbChoice):
            project = "/".join(filter(None, (words.entity, words.project)))
            yield (
                kind,
                f"project {project}, " + ("online" if words.mode == "online" else f"offline in {words.dir}/wandb"),
            )
        else:
            yield kind, str(folder_of(words))


@contextmanager
def opened(kind: str, words: Any) -> Iterator[Tracker]:
    """Yield the back-end of a resolved choice after checking its server; close it at the end of the block."""
    refuse_unreachable(words)
    made = _MAKES[kind](words)  # the tracker's package is imported when it begins
    try:
        yield made
    finally:
        with suppress(Exception):
            made.close()


@contextmanager
def sole_writer(folder: Path, *, waits: bool, handed: int | None = None, lock: str = LOCK) -> Iterator[bool]:
    """Yield whether this process is the only one that writes the trackers of a run or a channel.

    Args:
        lock: the name of the lock file; places that are not the run's own have another lock file.
        waits: whether to wait until another writing process has ended, instead of yielding False.
        handed: a descriptor of the lock that this process holds already.
    """
    handle = os.open(folder / lock, os.O_RDWR | os.O_CREAT, 0o600) if handed is None else handed
    try:
        yield taken(handle, seconds=float("inf") if waits else 0.0)
    finally:
        os.close(handle)


def start_writer(
    workspace: OpenWorkspace, words: Sequence[str], folder: Path, environment: Mapping[str, str], *handed: int
) -> subprocess.Popen[bytes]:
    """Start a separate process `posttrain track WORDS`, with its log in `folder`.

    Args:
        handed: descriptors that the process inherits.
    """
    log = os.open(folder / LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", "posttrain", "track", *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=handed,
            env={**os.environ, VARIABLE: str(workspace.root), **environment},
        )  # fmt: skip
    finally:
        os.close(log)


def line(error: Exception, where: str) -> str:
    """Return a target's error as one line of limited length; for an unreachable target, only the cause."""
    away = "" if isinstance(error, PosttrainError) else unreachable(error)
    if away:
        return f"cannot reach {where}: {away}"
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, PosttrainError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


# --- states -----------------------------------------------------------------------------------------------------------


def states(workspace: OpenWorkspace, run: RunRecord) -> list[TrackerState]:
    """Return the state of each tracker of a run; for an unreadable record, one state with an error."""
    folder = workspace.root / "runs" / run.id
    try:
        chosen, said = of_run(workspace, run.id), read_json(folder / STATES) or {}
    except (InputError, IntegrityError) as error:
        return [TrackerState("trackers", TROUBLE, str(folder), str(error))]
    held, recorded = is_held(folder / LOCK), (folder / RECORD).exists()
    return [_state(kind, where, said.get(kind, {}), run, held, recorded) for kind, where in describe(chosen)]


def _state(kind: str, where: str, said: Mapping[str, Any], run: RunRecord, held: bool, recorded: bool) -> TrackerState:
    where = str(said.get("where") or where)
    remedy = f"posttrain track {run.id} writes the missing data"
    ended = is_final("run", run.state)
    if said.get("state") == WRITTEN and said.get("finished_at") == run.finished_at and ended:
        return TrackerState(kind, WRITTEN, where, str(said.get("message", "")))
    if said.get("state") == TROUBLE:
        if held:
            remedy = f"posttrain track {run.id} writes it later" if ended else "it is being tried again"
        return TrackerState(kind, TROUBLE, where, f"{said.get('message')}; {remedy}")
    if held:
        return TrackerState(kind, WRITING, where, str(said.get("message", "")))
    if ended and not recorded and not said:
        late = f"the tracker was chosen after the run was submitted; posttrain track {run.id} writes the data"
        return TrackerState(kind, UNWRITTEN, where, late)
    if ended:
        return TrackerState(kind, TROUBLE, where, f"not all data of the run was written; {remedy}")
    return TrackerState(kind, "waiting", where, str(said.get("message", "")))
