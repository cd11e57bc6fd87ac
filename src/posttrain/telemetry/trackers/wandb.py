"""Points as the history of a W&B run with the same id: keys `stage/metric` over `stage/step`.

Offline, the target is one folder `offline-run-…-ID`, which `wandb sync` uploads. wandb cannot append to an existing
folder, so the records of a run that continues after a kill are first copied into a new folder::

    offline-run-1-ID                            the only one: the target
    offline-run-1-ID (marked) offline-run-2-ID  copying; after a kill the marked folder is the target
    .old-offline-run-1-ID     offline-run-2-ID  copied: the rename is the commit

Online, the service stores the run, and its history contains the existing points.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.ports import crashpoint
from posttrain.foreign.wandb_export import records
from posttrain.store.atomic import make_folder, write_atomic
from posttrain.telemetry.tracker import Cursor, Ending, Row, TrackedRun, Tracker, hold, refuse_another

STEP = "step"
_MARK = "posttrain.copied"  # marks a folder whose records are being copied into a new folder
_DOT = ":"  # replaces the dot in a stage's name; no stage's name contains a colon
_STATE = "posttrain/state"
_TIME = "_timestamp"
_ARRIVING = 300.0  # seconds within which written records must be in the file
_SERVICE = "WANDB_SERVICE"  # another program's wandb service resolves paths itself, and may have ended
_WORKSPACE = "posttrain_workspace"  # key of the workspace's identity in the configuration


class WandbTracker(Tracker):
    """The `Tracker` of a project.

    Args:
        folder: the folder in which wandb creates its folder `wandb`.
        project: the project in the account.
        entity: the account or team; None: the account of the key.
        mode: `offline` or `online`.
    """

    kind: ClassVar[str] = "wandb"

    def __init__(self, folder: Path, project: str, entity: str | None, mode: str) -> None:
        self._base, self._project, self._entity, self._mode = folder, project, entity, mode
        self._run: Any = None
        self._about: TrackedRun | None = None
        self._old: Path | None = None  # the former target, until its records are copied
        self._known = 0  # number of rows that `begin` read from the former target
        self._cursor = Cursor()
        self._ended = ""

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        path = "/".join(filter(None, (self._entity, self._project, self._about.id if self._about else "")))
        return f"online {path}" if self._mode == "online" else str(self._target() or self._base / "wandb")

    def name(self, metric: str) -> str:
        """See `Tracker.name`."""
        return f"{metric}_" if metric.rstrip("_") == STEP else metric  # `step_` too: distinct from a renamed `step`

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        self._about = run
        make_folder(self._base)
        if self._mode == "online":
            self._open()
            for row in self._online():
                self._seen(row)
            return Cursor(self._cursor)
        self._held = hold(self._base / f".{run.id}.wandb.writer", run, self.where, lambda: self._target() is not None)
        self._old = self._target(tidy=True)
        if self._old is not None:
            for row in self._rows(self._old):
                self._seen(row)
                self._known += 1
        return Cursor(self._cursor)

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`. wandb writes in the background; `end` checks that the data has arrived."""
        self._open()
        for row in rows:
            self._say(row)
            crashpoint("track.inside_log")

    def _say(self, row: Row) -> None:
        stage = _told(row.stage)
        values = {f"{stage}/{name}": value for name, value in row.values.items()}
        self._run.log({f"{stage}/{STEP}": row.step, **values, _TIME: row.at})
        self._seen(row)

    def _seen(self, row: Row) -> None:
        self._cursor.saw(row.stage, row.step, *row.values)

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`."""
        if self._mode == "offline" and self._old is not None and self._run is None and self._ended == ending.state:
            return
        self._open()
        self._run.summary.update(
            {_STATE: ending.state, "posttrain/message": ending.message}
            | {_told(key): value for key, value in ending.summary.items()}
            | {f"posttrain/gate/{gate}": verdict for gate, verdict in ending.verdicts.items()}
        )
        self._finish(0 if ending.state in ("succeeded", "rejected") else 1)
        if self._mode == "offline":
            self._check_arrived()

    def _check_arrived(self) -> None:
        """Wait until the file contains all points.

        wandb writes the file later, in another process, and does not report a full disk.
        """
        target, wanted = self._target(), self._cursor
        until = time.monotonic() + _ARRIVING
        while True:
            self._cursor, self._ended = Cursor(), ""
            for row in self._rows(target) if target else ():
                self._seen(row)
            if self._cursor == wanted and self._ended:
                return
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        raise WorkspaceError(f"{target}: wandb did not write all data; check the free space on its disk")

    def close(self) -> None:
        """See `Tracker.close`."""
        self._finish(0)
        super().close()

    def _finish(self, code: int) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=code)
            self._old = self._target()

    def _open(self) -> None:
        """Start wandb's run, with the points of the target."""
        if self._run is not None:
            return
        import wandb

        assert self._about is not None
        about = self._about
        if self._old is not None:
            write_atomic(self._old / _MARK, b"")
        named = f"wandb/offline-run-{{}}-{about.id}"
        while self._mode == "offline" and (self._base / named.format(time.strftime("%Y%m%d_%H%M%S"))).exists():
            time.sleep(0.05)  # folder names contain whole seconds
        os.environ.pop(_SERVICE, None)
        quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        self._run = wandb.init(
            project=self._project, entity=self._entity, id=about.id, name=about.id, dir=str(self._base),
            mode="online" if self._mode == "online" else "offline",
            resume="allow" if self._mode == "online" else None, reinit="create_new",
            config={**about.params, "posttrain": {"manifest": about.manifest, "owner": about.owner}},
            settings=wandb.Settings(**quiet, x_disable_stats=True, x_disable_meta=True),
        )  # fmt: skip
        os.environ.pop(_SERVICE, None)
        if self._mode == "online":  # a resumed run has the configuration from the service
            try:
                refuse_another(str(self._run.config.get(_WORKSPACE, "")), about, self.where)
            except WorkspaceError:
                self._finish(0)
                raise
        if about.workspace:
            self._run.config.update({_WORKSPACE: about.workspace}, allow_val_change=True)
        for stage in map(_told, about.stages):
            self._run.define_metric(f"{stage}/{STEP}", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/{STEP}")
        if self._old is not None:
            for row in islice(self._rows(self._old), self._known):  # a killed writer's wandb may still append rows
                self._say(row)
            self._old.rename(self._old.with_name(f".old-{self._old.name}"))
            self._old = None
            self._target(tidy=True)

    # --- existing points ---------------------------------------------------------------------------------------------

    def _target(self, *, tidy: bool = False) -> Path | None:
        """Return the run's folder; with `tidy`, delete the folders that a killed writer left next to it."""
        if self._about is None:
            return None
        found = sorted((self._base / "wandb").glob(f"offline-run-*-{self._about.id}"))
        found = [path for path in found if path.name.removeprefix("offline-run-").partition("-")[2] == self._about.id]
        marked = [path for path in found if (path / _MARK).exists()]
        kept = (
            marked[0]
            if marked
            else max(found, key=lambda one: sum(p.stat().st_size for p in one.glob("*.wandb")), default=None)
        )
        if tidy and self._run is None:
            for other in found:
                if other != kept:
                    shutil.rmtree(other)
            if kept is not None:
                (kept / _MARK).unlink(missing_ok=True)
        if tidy:
            for left in (self._base / "wandb").glob(f".old-offline-run-*-{self._about.id}"):
                shutil.rmtree(left, ignore_errors=True)
        return kept

    def _rows(self, folder: Path) -> Iterator[Row]:
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined, unused-ignore]

        self._ended = state = ""
        for data in records(folder / f"run-{self._about.id if self._about else ''}.wandb"):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                row = _row({key: json.loads(value) for key, value in items.items()})
                if row is not None:
                    yield row
            elif kind == "summary":
                for item in record.summary.update:
                    if (item.key or "/".join(item.nested_key)) == _STATE:
                        state = str(json.loads(item.value_json))
            elif kind == "exit":
                self._ended = state

    def _online(self) -> Iterator[Row]:
        import wandb

        if not self._run.resumed:
            return
        history = wandb.Api().run("/".join((self._run.entity, self._run.project, self._run.id))).scan_history()
        yield from filter(None, map(_row, history))


def _row(said: Mapping[str, Any]) -> Row | None:
    """Return the row that a line of the history contains; None if the line contains no row."""
    step = next((key for key in said if key.endswith(f"/{STEP}") and key.count("/") == 1 and said[key] is not None), "")
    stage = step.removesuffix(f"/{STEP}")
    values = {key.removeprefix(f"{stage}/"): value for key, value in said.items() if key.startswith(f"{stage}/")}
    values.pop(STEP, None)
    if not step or not values:
        return None
    numbers = {name: float(value) for name, value in values.items() if value is not None}
    return Row(stage.replace(_DOT, "."), int(said[step]), float(said.get(_TIME, 0.0)), numbers)


def _told(name: str) -> str:
    """Return `stage` or `stage/metric` with `:` for a dot in the stage, which wandb would read as nesting."""
    stage, slash, metric = name.partition("/")
    return f"{stage.replace('.', _DOT)}{slash}{metric}"
