"""Reader of W&B runs: the folder of a run, or an export of its history.

The folder of a run contains wandb's own file (`run-ID.wandb`): LevelDB's log format after a header, with protobuf
records that the wandb package reads. An export is a history (CSV, JSONL or Parquet with `_step`) with the run's
configuration.
"""

import csv
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from posttrain.domain.errors import InputError
from posttrain.foreign.outside import (
    FoundModel,
    OutsideRun,
    Points,
    inside,
    model_files,
    named_in_params,
    number_of,
    public_params,
    read_bytes,
    read_json,
    run_folder,
    step_of,
)

MAGIC = b":W&B"  # the first bytes of a `.wandb` file
_HEADER, _BLOCK, _CHUNK = 7, 32768, 7  # bytes of the file's header, a block, and a chunk's header
_WHOLE, _LAST = 1, 4  # kinds of a chunk that end a record
_STEP, _TIME = "_step", "_timestamp"
_OWN = (_STEP, _TIME, "_runtime", "_wandb")
_TABLES = (".csv", ".jsonl", ".ndjson", ".parquet")
_CONFIGS = ("config.yaml", "config.yml", "config.json")
_MOST_CONFIG = 2**24  # maximum bytes of a configuration
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # strings for numbers that JSON lacks
_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-.+")
_SHOWN = 8
Row = Mapping[str, Any]


def records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a file; stop before a truncated record."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        place, parts = len(file.read(_HEADER)), b""
        while True:
            left = _BLOCK - place % _BLOCK
            if left < _CHUNK:
                place += len(file.read(left))
                continue
            head = file.read(_CHUNK)
            if len(head) < _CHUNK:
                return
            _, length, kind = struct.unpack("<IHB", head)
            data = file.read(length)
            if len(data) < length or kind == 0:
                return
            place += _CHUNK + length
            parts += data
            if kind in (_WHOLE, _LAST):
                yield parts
                parts = b""


def read_wandb_export(path: Path) -> OutsideRun:
    """Return the run that the files of a W&B run contain.

    Raises:
        NotFoundError: there is no such folder.
        InputError: there is no run or several runs, wandb is needed and not installed, or a file is unreadable.
    """
    folder = _the_run(run_folder(path, "a W&B run or of an exported history"))
    notes: list[str] = []
    logs = sorted(folder.glob("*.wandb"))
    log = _Log(inside(logs[0], folder), folder) if logs else None
    source = logs[0] if logs else _table(folder)
    points = _points(log.rows if log else _rows(source, folder), f"{source.name} of {folder}", notes)
    if log and not log.ended:
        notes.append(f"{source.name} is incomplete: the run was killed or is still running")
    written, config_file = _config(folder)
    config = {**written, **(log.config if log else {})}
    params, withheld = public_params({key: value for key, value in config.items() if key != "_wandb"})
    read = {p.relative_to(folder).as_posix(): p for p in (source, config_file) if p}
    return OutsideRun(
        format="wandb-export",
        source=(log and log.name) or folder.name,
        points=points,
        tools=(log and log.tools) or _tools(config),
        params=params,
        withheld=withheld,
        model=_model(folder, notes),
        read=read,
        named=named_in_params(config, folder.parent if logs else folder),
        notes=tuple(notes),
    )


def _the_run(folder: Path) -> Path:
    """Return `folder` if it is a run's folder, else the folder of the only run in it."""
    if any(folder.glob("*.wandb")):
        return folder
    home = folder / "wandb" if (folder / "wandb").is_dir() else folder
    runs = sorted(p for p in home.iterdir() if _RUN.fullmatch(p.name) and p.is_dir() and any(p.glob("*.wandb")))
    if len(runs) > 1:
        more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
        told = ", ".join(run.name for run in runs[:_SHOWN])
        raise InputError(f"{folder}: contains {len(runs)} runs: {told}{more}; give the folder of one run")
    return runs[0].resolve() if runs else folder


def _table(folder: Path) -> Path:
    """Return the file of an exported history."""
    found = [p for where in (folder, folder / "files") if where.is_dir() for p in sorted(where.iterdir())]
    tables = [path for path in found if path.suffix.lower() in _TABLES]
    named = [path for path in tables if "history" in path.stem.lower()] or tables
    if not named:
        raise InputError(
            f"{folder}: is not a W&B run: it has no run-ID.wandb and no history as CSV, JSONL or Parquet; check "
            "the path"
        )
    if len(named) > 1:
        names = ", ".join(path.name for path in named[:_SHOWN])
        raise InputError(
            f"{folder}: must contain one history, got {names}; keep one, or name it history{named[0].suffix}"
        )
    return inside(named[0], folder)


# --- rows -------------------------------------------------------------------------------------------------------------


def _points(rows: Iterator[Row], place: str, notes: list[str]) -> Points:
    points, others = Points(), 0
    for number, row in enumerate(rows, 1):
        where = f"{place}: row {number}"
        if row.get(_STEP) is None:
            raise InputError(
                f"{where}: must have {_STEP}, got {', '.join(map(str, row))[:80]}; export the history with its steps"
            )
        step, at = step_of(row[_STEP], where), number_of(row.get(_TIME), where)
        said = {
            metric: _WORDS.get(value, value) if isinstance(value, str) else value
            for metric, value in row.items()
            if metric not in _OWN and value is not None
        }
        others += points.add_row(said, step, where, math.nan if at is None else at)
    if others:
        notes.append(f"{others} entries of its history are not numbers and were left out")
    return points


def _rows(path: Path, folder: Path) -> Iterator[Row]:
    name = f"{path.relative_to(folder)} of {folder}"
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet(path)
        elif path.suffix.lower() == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                for row in csv.DictReader(file, strict=True):
                    if None in row or None in row.values():
                        raise InputError(f"{name}: a row must have as many cells as the header; copy the file again")
                    yield {key: _cell(text) for key, text in row.items()}
        else:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    said = json.loads(line) if line.strip() else {}
                    if not isinstance(said, dict):
                        raise InputError(f"{name}: line {number} must be a JSON map, got {type(said).__name__}")
                    if said:
                        yield said
    except (
        OSError,
        ValueError,
        NotImplementedError,
        RecursionError,
        csv.Error,
    ) as error:  # pyarrow's errors are ValueErrors too
        raise InputError(f"{name}: cannot be read: {' '.join(str(error).split())[:200]}; copy it again") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _cell(text: str) -> Any:
    """Return the value of a CSV cell: a number if possible, None if it is empty."""
    if not text:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


class _Log:
    """The `.wandb` file of a run."""

    def __init__(self, path: Path, folder: Path) -> None:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise InputError(f"{path.name} of {folder}: is not a wandb file; copy the folder again")
        try:
            from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined, unused-ignore]
        except ImportError as error:
            raise InputError(f"reading {path.name} needs the wandb package; pip install 'posttrain[wandb]'") from error
        self._path, self._folder, self._record = path, folder, Record
        self.config: dict[str, Any] = {}
        self.tools: dict[str, str] = {}
        self.name, self.ended = "", False

    @property
    def rows(self) -> Iterator[Row]:
        """Yield the rows of the history; the other attributes are complete after the last row."""
        try:
            for data in records(self._path):
                record = self._record.FromString(data)
                kind = record.WhichOneof("record_type")
                if kind == "history":
                    yield {_STEP: record.history.step.num, **_items(record.history.item)}
                elif kind == "run":
                    self.name = record.run.display_name or record.run.run_id
                    version = record.run.telemetry.cli_version
                    self.tools = {"wandb": version} if version else {}
                    self._update(record.run.config)
                elif kind == "config":
                    self._update(record.config)
                self.ended = self.ended or kind == "exit"
        except InputError:
            raise
        except Exception as error:  # protobuf's DecodeError, or invalid JSON in a record
            raise InputError(
                f"{self._path.name} of {self._folder}: is damaged ({type(error).__name__}); copy the folder again"
            ) from error

    def _update(self, config: Any) -> None:
        self.config |= _items(config.update)


# --- other files ------------------------------------------------------------------------------------------------------


def _items(found: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found}


def _config(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the configuration next to the history, and the configuration's file."""
    for place in (folder / "files", folder):
        for name in _CONFIGS:
            path = place / name
            if not (path.is_symlink() or path.exists()):
                continue
            value = read_json(path, folder, _MOST_CONFIG) if name.endswith(".json") else _yaml(path, folder)
            if "architectures" not in value:  # a configuration with this key is a model's
                return {key: _unwrapped(item) for key, item in value.items() if key != "wandb_version"}, path
    return {}, None


def _yaml(path: Path, folder: Path) -> dict[str, Any]:
    data = read_bytes(path, folder, _MOST_CONFIG)
    try:
        value = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path.name} of {folder}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path.name} of {folder}: must be a map, got {type(value).__name__}; copy it again")
    return {str(key): item for key, item in value.items()}


def _unwrapped(item: Any) -> Any:
    """Return the value of a W&B item such as `lr: {desc: …, value: 0.1}`."""
    return item["value"] if isinstance(item, dict) and "value" in item and item.keys() <= {"desc", "value"} else item


def _tools(config: Mapping[str, Any]) -> dict[str, str]:
    own = config.get("_wandb")
    version = own.get("cli_version") if isinstance(own, dict) else None
    return {"wandb": version} if isinstance(version, str) else {}


def _model(folder: Path, notes: list[str]) -> FoundModel | None:
    """Return the model among the files; if there are several models, the last by path."""
    below = [path for where in (folder, folder / "files") if where.is_dir() for path in sorted(where.iterdir())]
    places = [folder, folder / "files", *(path for path in below if path.is_dir() and not path.is_symlink())]
    found = {place: files for place in dict.fromkeys(places) if (files := model_files(place, folder))}
    if not found:
        notes.append("no model in safetensors among its files: only its metrics are registered")
        return None
    place, files = list(found.items())[-1]
    where = place.relative_to(folder).as_posix()
    among = f", the last of {len(found)} models" if len(found) > 1 else ""
    return FoundModel(files, f"{'its folder' if where == '.' else where}{among}")
