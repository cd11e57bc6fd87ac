"""Points as metrics `stage/metric` of an MLflow run, and released models as versions with the channels as aliases.

The MLflow run has the tag `posttrain.run`; its metrics are the existing points. Names contain only the characters that
MLflow allows: `@` becomes `_at_`, and any other character becomes `_`. If the result does not determine the real name
(a character became `_`, the name was cut, or the real name contains `_at_`), eight digits of the real name's SHA-256
are appended. In a file store, a truncated line is removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import unquote, urlsplit

from posttrain.domain.ports import crashpoint
from posttrain.store.atomic import make_folder
from posttrain.telemetry.tracker import (
    ChannelState,
    Cursor,
    Ending,
    Row,
    TrackedRun,
    Tracker,
    Version,
    hold,
    refuse_another,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

RUN_TAG, DIGEST_TAG, WORKSPACE_TAG = "posttrain.run", "posttrain.digest", "posttrain.workspace"
_SQLITE = "sqlite:///"
_ALIEN = re.compile(r"[^\w.\- /]", re.ASCII)
_NAME, _VALUE = 250, 6000  # MLflow's maximum lengths of a name and of a parameter
_LONGEST = _NAME - 70  # maximum length of a metric, which follows the stage's name
_MARKED = re.compile(r"-[0-9a-f]{8}\Z")  # the end of a changed name
_METRICS, _PARAMS = 500, 100  # maximum numbers per request
_STATUS = {"succeeded": "FINISHED", "rejected": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_RESERVED = re.compile(r"latest|[vV]\d+")  # names that MLflow does not allow as aliases
# by default, MLflow retries for minutes while a server is unreachable, and sends usage data to its makers
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # Posttrain's output may be JSON
    "MLFLOW_ALLOW_FILE_STORE": "true",  # the user chose a folder
}


class MlflowTracker(Tracker):
    """The `Tracker` and `Registry` of an experiment.

    Args:
        uri: the URI of the tracking server, `sqlite:///…`, or a folder.
        experiment: the experiment's name; the experiment is created if it does not exist.
        model: the registered model whose versions are releases.
    """

    kind: ClassVar[str] = "mlflow"

    def __init__(self, uri: str, experiment: str, model: str) -> None:
        self._uri, self._experiment, self._model = uri, experiment, model
        self._opened: MlflowClient | None = None
        self._id = ""
        self._status = ""

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return f"{self._uri}, experiment {self._experiment}" + (f", run {self._id}" if self._id else "")

    def name(self, metric: str) -> str:
        """See `Tracker.name`."""
        parts = _ALIEN.sub("_", metric.replace("@", "_at_")).split("/")
        plain = posixpath.join(*(part if part.strip(".") else "_" for part in parts))
        if plain.replace("_at_", "@") == metric and len(plain) <= _LONGEST and not _MARKED.search(plain):
            return plain
        mark = hashlib.sha256(metric.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return f"{plain[: _LONGEST - len(mark) - 1]}-{mark}"

    @property
    def _client(self) -> MlflowClient:
        if self._opened is None:
            for setting, value in _SETTINGS.items():
                os.environ.setdefault(setting, value)
            from mlflow.tracking import MlflowClient, set_tracking_uri

            set_tracking_uri(self._uri)  # a file store's registry reads the global URI, by default the current folder
            for library in ("mlflow", "alembic"):
                logging.getLogger(library).setLevel(logging.WARNING)
            if self._folder is not None:
                make_folder(self._folder)
            self._opened = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        return self._opened

    @property
    def _folder(self) -> Path | None:
        """The folder of a store on this machine; None for a store on a server."""
        if self._uri.startswith(_SQLITE):
            return Path(self._uri.removeprefix(_SQLITE)).parent
        return None if "://" in self._uri or self._uri.startswith("databricks") else Path(self._uri)

    def begin(self, run: TrackedRun) -> Cursor:
        """See `Tracker.begin`."""
        if self._folder is not None:  # on a server, the tag alone distinguishes runs
            make_folder(self._folder)
            mark = hashlib.sha256(f"{self._uri} {self._experiment}".encode()).hexdigest()[:8]
            lock = self._folder / f".{run.id}.{mark}.writer"
            self._held = hold(lock, run, self.where, lambda: False)  # the tag contains the workspace's identity
        experiment = self._experiment_id()
        found = self._run_of(run.id, experiment)
        if found is not None:
            refuse_another(found.data.tags.get(WORKSPACE_TAG, ""), run, self.where)
        else:
            tags = {RUN_TAG: run.id, "posttrain.manifest": run.manifest, "posttrain.owner": run.owner}
            made = self._client.create_run(experiment, round(run.created_at * 1000), tags, run.id)
            crashpoint("track.inside_log")
            found = self._client.get_run(made.info.run_id)
        if run.workspace and found.data.tags.get(WORKSPACE_TAG) != run.workspace:
            self._client.set_tag(found.info.run_id, WORKSPACE_TAG, run.workspace)
        self._id, self._status = found.info.run_id, found.info.status
        self._mend(str(found.info.artifact_uri))
        found = self._client.get_run(self._id)
        self._params(run, found)
        there = Cursor()
        for key in found.data.metrics:
            stage, _, metric = key.partition("/")
            for point in self._client.get_metric_history(self._id, key):
                there.saw(stage, point.step, metric)
        return there

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            sqlite = self._uri.startswith(_SQLITE) and self._folder is not None
            artifacts = str(Path(str(self._folder)) / "mlartifacts" / self._experiment) if sqlite else None
            try:
                return str(self._client.create_experiment(self._experiment, artifacts))
            except MlflowException:  # another run's tracker has just created the experiment
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _run_of(self, run_id: str, experiment: str) -> Run | None:
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
        return found[0] if found else None

    def _mend(self, artifacts: str) -> None:
        """Remove truncated lines, which a file store could not read."""
        if self._folder is None or self._uri.startswith(_SQLITE):
            return
        for path in (Path(unquote(urlsplit(artifacts).path)).parent / "metrics").rglob("*"):
            data = path.read_bytes() if path.is_file() else b""
            if data and not data.endswith(b"\n"):
                os.truncate(path, data.rfind(b"\n") + 1)

    def _params(self, run: TrackedRun, there: Run) -> None:
        from mlflow.entities import Param

        named = {self.name(key)[:_NAME]: str(value)[:_VALUE] for key, value in run.params.items()}
        new = [Param(key, value) for key, value in named.items() if key not in there.data.params]
        for at in range(0, len(new), _PARAMS):
            self._client.log_batch(self._id, params=new[at : at + _PARAMS])

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        from mlflow.entities import Metric

        if self._status != "RUNNING":
            self._client.update_run(self._id, status="RUNNING")
            self._status = "RUNNING"
        points = [
            Metric(f"{row.stage}/{name}", value, round(row.at * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for at in range(0, len(points), _METRICS):
            self._client.log_batch(self._id, metrics=points[at : at + _METRICS])
            crashpoint("track.inside_log")

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`."""
        tags = {"state": ending.state, "message": ending.message[:_VALUE]}
        tags |= {f"gate.{gate}": verdict for gate, verdict in ending.verdicts.items()}
        for key, value in tags.items():
            self._client.set_tag(self._id, f"posttrain.{key}", value)
        self._status = _STATUS.get(ending.state, "FINISHED")
        self._client.set_terminated(self._id, self._status, round((ending.finished_at or 0.0) * 1000))

    # --- released models ---------------------------------------------------------------------------------------------

    def follow(self, channel: ChannelState) -> None:
        """See `Registry.follow`. A version is identified by its digest tag."""
        from mlflow.exceptions import MlflowException

        versions = self._client.search_model_versions(f"name='{self._model}'", max_results=10_000)
        known = {str(one.tags.get(DIGEST_TAG)): str(one.version) for one in versions}
        for version in channel.versions:
            if version.digest not in known:
                if not known:
                    try:
                        self._client.create_registered_model(self._model)
                    except MlflowException as error:
                        if error.error_code != "RESOURCE_ALREADY_EXISTS":
                            raise
                known[version.digest] = self._register(version, channel)
                crashpoint("track.inside_log")
        alias = channel.channel if not _RESERVED.fullmatch(channel.channel) else f"channel-{channel.channel}"
        if str(self._client.get_registered_model(self._model).aliases.get(alias)) != known[channel.live]:
            self._client.set_registered_model_alias(self._model, alias, known[channel.live])

    def _register(self, version: Version, channel: ChannelState) -> str:
        run = self._run_of(version.run_id, self._experiment_id()) if version.run_id else None
        tags = {DIGEST_TAG: version.digest, **{f"posttrain.{key}": value for key, value in version.tags.items()}}
        made = self._client.create_model_version(
            self._model,
            f"posttrain:///{version.digest.replace(':', '/')}",
            run.info.run_id if run else None,
            tags,
            await_creation_for=0,
            description=f"{version.digest} of run {version.run_id}, in {channel.source}",
        )
        return str(made.version)
