"""Runs of other programs: the result of every reader in this package, and the folder that transports the result.

Readers read a folder without changing it; they open no pickle and run no code in the folder.

A run that was read on one machine is written to a folder, which is registered on another machine:

::

    run.json        the reader's result, with the names of the files below
    files/0/NAME …  the files and folders that it names
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, NotFoundError

MODEL_FILES = re.compile(  # a model's files in a folder in Hugging Face format; all others belong to the trainer
    r"(?!adapter_).*\.safetensors(\.index\.json)?|(generation_|tokenizer_|preprocessor_|processor_)?config\.json"
    r"|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|spiece\.model"
    r"|chat_template\.(jinja|json)|README\.md|LICENSE(\.\w+)?|NOTICE(\.\w+)?"
)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_MOST_STEP = 2**53
_MOST_TEXT = 2000  # maximum characters of a parameter
_SECRET_NAME = re.compile(
    r"(.*[./])?token|(.*[._\-/])?(api_?key|secret(_?key)?|(client_)?secret|passw(or)?d|passphrase|credentials?|private_?key"
    r"|authorization|(hub|access|auth|bearer|refresh|api|hf|hugging_?face|wandb|github|push_to_hub)_token)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]*:[^/\s@]+@"
)
FORMAT = "posttrain.outside/1"
RUN = "run.json"
_MOST = 512 << 20  # maximum bytes of run.json
_FILES = "files"


@dataclass(slots=True)
class Points:
    """Metrics by step, in the order of recording; the metric of entry i is `names[metric[i]]`."""

    names: list[str] = field(default_factory=list)
    metric: array[int] = field(default_factory=lambda: array("l"))
    step: array[int] = field(default_factory=lambda: array("q"))
    at: array[float] = field(default_factory=lambda: array("d"))  # seconds since the epoch; NaN: unknown
    value: array[float] = field(default_factory=lambda: array("d"))
    strange: int = 0  # number of values that are NaN or infinite; they are retained
    _places: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.value)

    def add(self, metric: str, step: int, value: float, at: float = math.nan) -> None:
        """Append one value."""
        place = self._places.get(metric)
        if place is None:
            place = self._places[metric] = len(self.names)
            self.names.append(metric)
        self.metric.append(place)
        self.step.append(step)
        self.at.append(at)
        self.value.append(value)
        self.strange += not math.isfinite(value)

    def add_row(self, row: Mapping[str, Any], step: int, place: str, at: float = math.nan) -> int:
        """Append the numbers in a row, metric → value; return how many entries are not numbers.

        Raises:
            InputError: a number is beyond the range of floats.
        """
        found = {metric: number_of(value, place) for metric, value in row.items()}
        for metric, number in found.items():
            if number is not None:
                self.add(metric, step, number, at)
        return sum(number is None for number in found.values())


@dataclass(frozen=True, slots=True)
class Named:
    """A base model or data set that the run names, either by name only or as a local file."""

    role: str  # base model | data set
    name: str
    path: Path | None = None  # the local file or folder
    said: str = ""  # further information that the run contains about it


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The files of a run's model."""

    files: Mapping[str, Path]  # name in a folder in Hugging Face format → file
    place: str  # description and reason of the choice: `checkpoint-20, the newest of 2 checkpoints`


@dataclass(frozen=True, slots=True)
class OutsideRun:
    """The result of a reader."""

    format: str  # trl-output | mlflow | wandb-export
    source: str  # the folder's or the run's name
    points: Points
    stage: str = "train"
    tools: Mapping[str, str] = field(default_factory=dict)  # program → version, according to the files
    params: Mapping[str, str] = field(default_factory=dict)  # without secrets
    withheld: tuple[str, ...] = ()  # names of parameters that may be secrets
    model: FoundModel | None = None
    read: Mapping[str, Path] = field(default_factory=dict)  # the files that were read, by name
    named: tuple[Named, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)  # omitted file → reason
    notes: tuple[str, ...] = ()


def public_params(params: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return parameters as text by dotted names, and the names of withheld parameters, which may be secrets."""
    kept: dict[str, str] = {}
    withheld = []
    for name, value in flat(params):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        empty = value in (None, "", False)
        if (_SECRET_NAME.fullmatch(name) and not empty) or _SECRET_VALUE.search(text) or _SECRET_VALUE.search(name):
            withheld.append(_SECRET_VALUE.sub("…", name))
        else:
            kept[name] = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
    return kept, tuple(sorted(withheld))


def flat(value: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of a map and of nested maps, by dotted names."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


_BASES = ("model_name_or_path", "_name_or_path", "base_model", "model_name", "pretrained_model_name_or_path")
_SETS = (
    *("dataset", "dataset_name", "dataset_path", "dataset_id", "train_dataset", "train_file", "train_files"),
    *("data_path", "data_files", "eval_dataset", "validation_file", "val_files"),
)


def named_in_params(params: Mapping[str, Any], base: Path | None) -> tuple[Named, ...]:
    """Return the base model and the data sets that a run's parameters name under the usual keys of trainers."""
    found: dict[tuple[str, str], Named] = {}
    for key, value in flat(params):
        word = re.split(r"[./]", key)[-1]
        role = "base model" if word in _BASES else "data set" if word in _SETS else ""
        for name in value if isinstance(value, list) else [value]:
            usable = isinstance(name, str) and 0 < len(name.strip()) <= 300 and name.lower() not in ("none", "null")
            if role and usable and not _SECRET_VALUE.search(name):
                path = local_data(name, base) if role == "data set" else None
                found.setdefault((role, name), Named(role, name, path, f"by its parameter {key}"))
    return tuple(found.values())


def local_data(name: str, base: Path | None) -> Path | None:
    """Return the existing file or folder that a run names as data, by its path or relative to the run's folder."""
    try:
        path = Path(name.removeprefix("file://")).expanduser()
        places = [path] if path.is_absolute() else [folder / path for folder in (base, base and base.parent) if folder]
        return next((place for place in places if place.exists()), None)
    except (OSError, RuntimeError, ValueError):
        return None


def step_of(value: Any, place: str) -> int:
    """Return a step as a whole number.

    Raises:
        InputError: the value is not a step.
    """
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    if not whole or not 0 <= value < _MOST_STEP:
        raise InputError(f"{place}: step must be a whole number from 0, got {value!r:.40}; fix the file")
    return int(value)


def number_of(value: Any, place: str) -> float | None:
    """Return a number as a float; None for any other value.

    Raises:
        InputError: the number is beyond the range of floats.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(
            f"{place}: a value must be in the range of a 64-bit float, got a larger value; fix the file"
        ) from error


# --- folders ----------------------------------------------------------------------------------------------------------


def run_folder(path: Path, what: str) -> Path:
    """Return the resolved path of a folder to read.

    Raises:
        NotFoundError: the folder does not exist.
        InputError: the folder cannot be listed.
    """
    try:
        folder = path.expanduser().resolve()
        if folder.is_dir():
            os.scandir(folder).close()
            return folder
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; check the path") from error
    raise NotFoundError(f"{path}: no such folder; give the folder of {what}")


def inside(path: Path, folder: Path) -> Path:
    """Return `path` after checking that it, with links resolved, is a plain file in `folder`.

    Raises:
        InputError: the file is outside the folder or not a plain file.
    """
    name = os.path.relpath(path, folder)
    try:
        real, plain = path.resolve(), path.is_file()
    except (OSError, RuntimeError) as error:
        raise InputError(f"{name} of {folder}: cannot be read: {error}; check it") from error
    if not real.is_relative_to(folder):
        raise InputError(
            f"{name} of {folder}: must not be a link out of the folder; replace it with a copy of the file"
        )
    if not plain:
        raise InputError(f"{name} of {folder}: must be a plain file; replace it with a copy")
    return path


def read_bytes(path: Path, folder: Path, most: int) -> bytes:
    """Return the bytes of a file in the folder.

    Raises:
        InputError: the file is a link out of the folder, is not readable, or is larger than `most` bytes.
    """
    name = os.path.relpath(path, folder)
    try:
        size = inside(path, folder).stat().st_size
        if size > most:
            raise InputError(f"{name} of {folder}: must have at most {most} bytes, got {size}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{name} of {folder}: cannot be read: {error.strerror}; check it") from error


def read_json(path: Path, folder: Path, most: int) -> dict[str, Any]:
    """Return the JSON map in a file of the folder; NaN and Infinity, which Python writes, are accepted.

    Raises:
        InputError: the file is a link out of the folder, unreadable, larger than `most` bytes, truncated or not a map.
    """
    name, data = os.path.relpath(path, folder), read_bytes(path, folder, most)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} of {folder}: is not JSON or is truncated: {error}; copy the folder again") from error
    if not isinstance(value, dict):
        raise InputError(f"{name} of {folder}: must be a JSON map, got {type(value).__name__}; copy the folder again")
    return value


def model_files(place: Path, folder: Path) -> dict[str, Path]:
    """Return the files of a model at `place` in `folder`; empty if there is no model.

    Raises:
        InputError: the model is an adapter, has only pickled weights, or contains a link out of the folder.
    """
    names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    where = place.name if place != folder else "the folder"
    if "adapter_config.json" in names and "config.json" not in names:
        raise InputError(
            f"{folder}: {where} contains an adapter (adapter_config.json), not a whole model; register it with"
            " posttrain asset add model:NAME FOLDER --base MODEL, or merge it into its base model (peft:"
            " merge_and_unload(), save_pretrained(NEW)) and register the result"
        )
    if "config.json" not in names:
        return {}
    if not any(name.endswith(".safetensors") and MODEL_FILES.fullmatch(name) for name in names):
        if pickle := next((name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")), ""):
            raise InputError(
                f"{folder}: {where} has its weights as a pickle ({pickle}), which Posttrain never reads; save them as"
                " safetensors (save_pretrained does) and import again"
            )
        return {}
    return {name: inside(place / name, folder) for name in names if MODEL_FILES.fullmatch(name)}


def why_left_out(name: str) -> str:
    """Return why a file next to a model is omitted."""
    return "a pickle, which Posttrain never opens" if name.endswith(PICKLES) else "not part of a model"


def carry(run: OutsideRun, folder: Path) -> Path:
    """Write a run into an empty folder, in which the run's files are links to the originals."""
    laid: list[Path] = []

    def place(path: Path) -> str:
        if path not in laid:
            link = folder / _FILES / str(len(laid)) / path.name
            link.parent.mkdir(parents=True)
            link.symlink_to(path.resolve())
            laid.append(path)
        return f"{_FILES}/{laid.index(path)}/{path.name}"

    points, model = run.points, run.model
    said: dict[str, Any] = {
        "format": FORMAT,
        "of": run.format,
        "source": run.source,
        "stage": run.stage,
        "points": {
            "names": points.names,
            **{name: getattr(points, name).tolist() for name in ("metric", "step", "at", "value")},
        },
        **{name: dict(getattr(run, name)) for name in ("tools", "params", "left_out")},
        **{name: list(getattr(run, name)) for name in ("withheld", "notes")},
        "model": model and {"place": model.place, "files": {name: place(path) for name, path in model.files.items()}},
        "read": {name: place(path) for name, path in run.read.items()},
        "named": [[one.role, one.name, one.path and place(one.path), one.said] for one in run.named],
    }
    (folder / RUN).write_text(json.dumps(said), "utf-8")
    return folder


def carried(folder: Path) -> OutsideRun:
    """Return the run that `carry` wrote.

    Raises:
        InputError: the folder does not contain a run, or the run names files outside the folder.
    """
    folder = folder.resolve()
    said = read_json(folder / RUN, folder, _MOST)
    if said.get("format") != FORMAT:
        raise InputError(
            f"{RUN}: must be a run of format {FORMAT}, got {str(said.get('format'))[:40]!r}; update posttrain"
        )
    try:
        return _run(said, folder)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"{RUN}: is not a valid run: {type(error).__name__} {str(error)[:80]}") from error


def _run(said: Mapping[str, Any], folder: Path) -> OutsideRun:
    points = Points()
    columns = [said["points"][name] for name in ("metric", "step", "value", "at")]
    names = [str(name) for name in said["points"]["names"]]
    for metric, step, value, at in zip(*columns, strict=True):
        if not 0 <= metric < len(names):
            raise ValueError("a point without a metric")
        points.add(names[metric], int(step), float(value), float(at))
    model = said["model"]
    return OutsideRun(
        format=str(said["of"]),
        source=str(said["source"]),
        points=points,
        stage=str(said["stage"]),
        tools=_texts(said["tools"]),
        params=_texts(said["params"]),
        withheld=tuple(map(str, said["withheld"])),
        model=model and FoundModel(_files(model["files"], folder), str(model["place"])),
        read=_files(said["read"], folder),
        named=tuple(
            Named(str(role), str(name), path and _file(str(path), folder), str(more))
            for role, name, path, more in said["named"]
        ),
        left_out=_texts(said["left_out"]),
        notes=tuple(map(str, said["notes"])),
    )


def _texts(said: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in said.items()}


def _files(said: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    return {str(name): _file(str(place), folder) for name, place in said.items()}


def _file(place: str, folder: Path) -> Path:
    path = folder / place
    if os.path.isabs(place) or ".." in Path(place).parts or not path.exists():
        raise NotFoundError(f"{RUN}: names {place[:80]!a}, which the request does not include")
    return path if path.is_dir() else inside(path, folder)
