"""The trackers of a run's metrics, as `trackers:` sets them in run.yaml or in the workspace.

    trackers: [csv, tensorboard]
    trackers:
      tensorboard: {logdir: curves}
      mlflow: {tracking_uri: "http://127.0.0.1:5000", experiment: sort}
      wandb: team/sort

Trackers do not affect results, so they are not part of the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, model_validator

from posttrain.domain.validation import Frozen, bare

Text = Annotated[str, Field(min_length=1, max_length=1000)]


def _named(value: str, signs: str = " ._-") -> str:
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9{re.escape(signs)}]{{0,127}}", value):
        raise ValueError(f"must be at most 128 letters, digits and {signs!r}, and begin with a letter or digit")
    return value


def _experiment(value: str) -> str:
    _named(value.removeprefix("/"), " ._/@-")
    return value


Word = Annotated[str, AfterValidator(_named)]
Experiment = Annotated[str, AfterValidator(_experiment)]
NONE = "none"  # on the command line: no tracker
_LONE = ("csv", "parquet", "tensorboard", "mlflow", "wandb")


class _Choice(Frozen):
    """The settings of one tracker. A single string is the `target`."""

    target: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {cls.target: value} if isinstance(value, str) else {} if value is None else value


class FileChoice(_Choice):
    """`csv` and `parquet`: a file for each run."""

    target = "dir"
    dir: Text | None = None  # relative to the run file; None: tracking/csv or tracking/parquet in the workspace


class TensorBoardChoice(_Choice):
    """A folder for `tensorboard --logdir`, with a subfolder for each run."""

    target = "logdir"
    logdir: Text | None = None  # None: tracking/tensorboard in the workspace


class MlflowChoice(_Choice):
    """An MLflow experiment on a tracking server, in a database file or in a folder."""

    target = "tracking_uri"
    tracking_uri: Text | None = None  # None: the SQLite file tracking/mlflow.db in the workspace
    experiment: Experiment = "posttrain"
    registered_model: Word | None = None  # MLflow's registered model for releases; None: the experiment's name

    @model_validator(mode="after")
    def _no_credentials(self) -> MlflowChoice:
        given = self.tracking_uri or ""
        if "@" in urlsplit(given).netloc:
            shown = f"{urlsplit(given).scheme}://…@{urlsplit(given).netloc.rpartition('@')[2]}"
            raise ValueError(
                f"tracking_uri must contain no credentials, got {shown}; set MLFLOW_TRACKING_USERNAME and _PASSWORD"
            )
        return self


class WandbChoice(_Choice):
    """A project of Weights & Biases."""

    target = "project"
    project: Word = "posttrain"
    entity: Word | None = None  # None: the account's own entity
    mode: Literal["offline", "online"] = "offline"  # offline needs no key; `wandb sync` uploads the run
    dir: Text | None = None  # None: `tracking` in the workspace; wandb creates its folder `wandb` there

    @model_validator(mode="before")
    @classmethod
    def _entity(cls, value: Any) -> Any:
        """Split `team/sort` into entity and project."""
        value = {"project": value} if isinstance(value, str) else value
        project = value.get("project") if isinstance(value, Mapping) else None
        if isinstance(project, str) and project.count("/") == 1 and "entity" not in value:
            entity, _, name = project.partition("/")
            return {**value, "project": name, "entity": entity}
        return value


class Trackers(Frozen):
    """The trackers of a run, by kind. A list of kinds selects each kind with its defaults."""

    csv: FileChoice | None = None
    parquet: FileChoice | None = None
    tensorboard: TensorBoardChoice | None = None
    mlflow: MlflowChoice | None = None
    wandb: WandbChoice | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_kind(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            twice = next((kind for kind in value if value.count(kind) > 1), None)
            if twice is not None:
                raise ValueError(f"must name each tracker once, got {bare(str(twice))!r} twice")
            value = {} if list(value) == [NONE] else {str(kind): {} for kind in value}
        if isinstance(value, Mapping):  # a tracker without settings is selected too
            return {kind: {} if words is None else words for kind, words in value.items()}
        return value

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Trackers:
        """Return the trackers of validated choices."""
        return cls.model_construct(None, **chosen)

    def chosen(self) -> dict[str, BaseModel]:
        """Return kind → settings of the selected trackers."""
        return {kind: words for kind in _LONE if (words := getattr(self, kind)) is not None}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; `Trackers.model_validate` is its inverse."""
        return {kind: words.model_dump(mode="json", exclude_none=True) for kind, words in self.chosen().items()}


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """Convert arguments of the command line, `["csv", "mlflow=http://…"]`, to the input of `Trackers`."""
    found: dict[str, Any] = {}
    for word in words:
        kind, _, target = word.partition("=")
        found[kind] = target or None
    return {} if set(found) == {NONE} else found
