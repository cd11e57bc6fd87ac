"""Reader of a run in an MLflow store (a folder, an SQLite file, a server), with the mlflow package.

The store is not changed: SQLite files are read through a copy, folders through links.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.foreign.outside import (
    MODEL_FILES,
    FoundModel,
    Named,
    OutsideRun,
    Points,
    inside,
    local_data,
    model_files,
    named_in_params,
    public_params,
    step_of,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_SQLITE = "sqlite:///"
_RUNS = 1000
_SHOWN = 8  # maximum number of runs that an error lists
_MOST_FOLDERS = 10_000  # maximum number of folders among a run's artifacts
_PRIVATE_TAGS = ("mlflow.user", "mlflow.log-model.history", "mlflow.note.content")
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


def read_mlflow(where: str, run: str | None) -> OutsideRun:
    """Return an MLflow run.

    Args:
        where: a folder with `mlruns` or `mlflow.db`, an SQLite file, or a tracking URI.
        run: the run's id or name; None: the only run of the store.

    Raises:
        InputError: mlflow is not installed, there is no store or no such run, several runs match, or an artifact is an
            adapter.
    """
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise InputError("import mlflow needs the mlflow package; pip install 'posttrain[mlflow]'") from error
    with _client(where, MlflowClient) as (client, base):
        try:
            return _read(client, base, where, run)
        except MlflowException as error:
            raise InputError(f"{where}: mlflow cannot read it: {' '.join(str(error).split())[:300]}") from error


@contextmanager
def _client(where: str, make: type[MlflowClient]) -> Iterator[tuple[MlflowClient, Path | None]]:
    """Yield a client of the store, and the store's folder."""
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)
    for library in ("mlflow", "alembic"):
        logging.getLogger(library).setLevel(logging.ERROR)
    place = _place(where)
    with tempfile.TemporaryDirectory(prefix="posttrain-import-") as work:
        if place is None:
            yield make(tracking_uri=where, registry_uri=where), None
            return
        if place.is_dir():
            uri = f"{work}/mlruns"
            os.mkdir(uri)
            for child in place.iterdir():
                if child.name != ".trash":
                    Path(uri, child.name).symlink_to(child)
        else:
            _copied(place, Path(work, "mlflow.db"))
            uri = f"{_SQLITE}{work}/mlflow.db"
        yield make(tracking_uri=uri, registry_uri=uri), place if place.is_dir() else place.parent


def _place(where: str) -> Path | None:
    """Return the folder of a file store, or the SQLite file; None if the store is on a server.

    Raises:
        NotFoundError: the path does not exist.
        InputError: the path is not a store.
    """
    if "://" in where and not where.startswith(("sqlite:", "file:")):
        return None
    path = Path(where.removeprefix(_SQLITE) if where.startswith(_SQLITE) else unquote(where.removeprefix("file://")))
    try:
        path = path.expanduser().resolve()
        if path.is_file():
            return path
        for place in (path / "mlflow.db", path / "mlruns"):
            if place.exists():
                return place
        if any(path.glob("*/meta.yaml")):
            return path
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{where}: cannot be read: {error}; check the path") from error
    if not path.is_dir():
        raise NotFoundError(f"{where}: no such folder or file; give MLflow's folder, SQLite file or URI")
    raise InputError(f"{where}: is not an MLflow store: it has no mlflow.db, mlruns or experiment; check the path")


def _copied(file: Path, copy: Path) -> None:
    try:
        with (
            closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            if not source.execute("select 1 from sqlite_master where name = 'experiments'").fetchone():
                raise InputError(f"{file}: is not an MLflow store: it has no table of experiments; check the path")
            source.backup(target)
    except sqlite3.Error as error:
        raise InputError(f"{file}: is not a readable SQLite file: {error}; check the path") from error


def _read(client: MlflowClient, base: Path | None, where: str, wanted: str | None) -> OutsideRun:
    run = _the_run(client, where, wanted)
    points = Points()
    for metric in sorted(run.data.metrics):
        for entry in client.get_metric_history(run.info.run_id, metric):
            step = step_of(entry.step, f"{where}: metric {metric}")
            points.add(metric, step, float(entry.value), entry.timestamp / 1000)
    tags = {f"tag.{key}": value for key, value in run.data.tags.items() if key not in _PRIVATE_TAGS}
    params, withheld = public_params({**run.data.params, **tags})
    notes: list[str] = []
    model = _model(client, run, base, notes)
    version = run.data.params.get("transformers_version")
    return OutsideRun(
        format="mlflow",
        source=str(run.info.run_name or run.info.run_id),
        points=points,
        tools={"transformers": version} if version else {},
        params={**params, "mlflow.run_id": str(run.info.run_id), "mlflow.status": str(run.info.status)},
        withheld=withheld,
        model=model,
        named=(*_inputs(run, base), *named_in_params(run.data.params, base)),
        notes=tuple(notes),
    )


def _the_run(client: MlflowClient, where: str, wanted: str | None) -> Run:
    experiments = {str(e.experiment_id): str(e.name) for e in client.search_experiments()}
    found = list(client.search_runs(list(experiments), max_results=_RUNS)) if experiments else []
    chosen = [run for run in found if wanted in (None, run.info.run_id)]
    chosen = chosen or [run for run in found if wanted == run.info.run_name]
    if len(chosen) == 1:
        return chosen[0]
    if not found:
        raise InputError(f"{where}: contains no runs; check the path")
    told = "; ".join(
        f"{run.info.run_id} ({run.info.run_name}, experiment {experiments[str(run.info.experiment_id)]},"
        f" {run.info.status})"
        for run in (chosen or found)[:_SHOWN]
    )
    more = len(chosen or found) - _SHOWN
    rest = f" and {more} more" if more > 0 else ""
    if not chosen:
        raise NotFoundError(f"{where}: has no run {wanted!r}; it contains {told}{rest}")
    raise InputError(f"{where}: contains {len(chosen)} runs; name a run with --run ID: {told}{rest}")


# --- data sets --------------------------------------------------------------------------------------------------------


def _inputs(run: Run, base: Path | None) -> Iterator[Named]:
    for entry in run.inputs.dataset_inputs if run.inputs else ():
        data = entry.dataset
        context = next((tag.value for tag in entry.tags if tag.key == "mlflow.data.context"), "")
        try:
            source = json.loads(data.source)
        except (TypeError, ValueError, RecursionError):
            source = {}
        source = source if isinstance(source, Mapping) else {}
        place = source.get("uri") or source.get("path") or ""
        said = ", ".join(filter(None, (context, f"MLflow's digest {data.digest}", f"source {data.source_type}")))
        yield Named("data set", str(data.name or place), local_data(str(place), base) if place else None, said)


# --- the model --------------------------------------------------------------------------------------------------------


def _model(client: MlflowClient, run: Run, base: Path | None, notes: list[str]) -> FoundModel | None:
    """Return the model among the artifacts: the newest checkpoint, or else the last model by name."""
    found: list[tuple[int, str, Path, Path]] = []
    for location in _locations(client, run):
        root = _local(location, base, run)
        if root is None:
            scheme = urlsplit(location).scheme
            away = scheme not in ("", "file")
            notes.append(
                f"its artifacts ({scheme}) were not fetched" if away else "its artifact folder does not exist here"
            )
            continue
        for place in _folders(root):
            if model_files(place, root):
                match = _CHECKPOINT.fullmatch(place.name)
                found.append((int(match[1]) if match else -1, os.path.relpath(place, root), place, root))
    if not found:
        notes.append("no model in safetensors among its artifacts: only its metrics are registered")
        return None
    _, name, place, root = max(found)
    files = model_files(place, root)
    tokenizer = place.parent / "components" / "tokenizer"  # where MLflow's transformers flavour stores it
    for path in sorted(tokenizer.iterdir()) if place.name == "model" and tokenizer.is_dir() else ():
        if MODEL_FILES.fullmatch(path.name) and path.name not in files:
            files[path.name] = inside(path, root)
    among = f", the last of {len(found)} models" if len(found) > 1 else ""
    return FoundModel(files, f"artifact {name if name != '.' else 'root'}{among}")


def _locations(client: MlflowClient, run: Run) -> list[str]:
    """Return the locations of a run's artifacts, and of the models that MLflow 3 stores separately."""
    outputs: Sequence[Any] = run.outputs.model_outputs if run.outputs else ()
    models = [str(client.get_logged_model(output.model_id).artifact_location) for output in outputs]
    return [str(run.info.artifact_uri), *models]


def _local(location: str, base: Path | None, run: Run) -> Path | None:
    """Return the local folder of a location; if the store was moved, the corresponding folder in the store."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file"):
        return None
    named = Path(unquote(parts.path))
    places = [named]
    if base is not None:
        tail = named.parts[-3:]
        places += [base.joinpath(*tail), base / "mlruns" / Path(*tail), base / "mlartifacts" / Path(*tail)]
        places.append(base / str(run.info.experiment_id) / str(run.info.run_id) / "artifacts")
    return next((place.resolve() for place in places if place.is_dir()), None)


def _folders(root: Path) -> Iterator[Path]:
    for count, (folder, below, _) in enumerate(os.walk(root)):
        below.sort()
        if count >= _MOST_FOLDERS:
            raise InputError(
                f"{root}: must have at most {_MOST_FOLDERS} artifact folders, got more; register only its model: "
                "posttrain asset add model:NAME DIR"
            )
        yield Path(folder)
