"""An outside run that was read on one machine, as a folder that is registered on another.

::

    run.json        what the reader found, with the names that the files below have
    files/0/NAME …  the files and folders that it names
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.foreign.outside import FoundModel, Named, OutsideRun, Points, inside, read_json

FORMAT = "posttrain.outside/1"
RUN = "run.json"
_MOST = 512 << 20  # bytes of what the reader found
_FILES = "files"


def carry(run: OutsideRun, folder: Path) -> Path:
    """Put a run into an empty folder; its files are links to where they lie."""
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
    """What `carry` put there.

    Raises:
        InputError: it is none, or names files that are not in the folder.
    """
    folder = folder.resolve()
    said = read_json(folder / RUN, folder, _MOST)
    if said.get("format") != FORMAT:
        raise InputError(f"{RUN}: must be a run of format {FORMAT}, got {str(said.get('format'))[:40]!r}; update")
    try:
        return _run(said, folder)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"{RUN}: is no run that was read: {type(error).__name__} {str(error)[:80]}") from error


def _run(said: Mapping[str, Any], folder: Path) -> OutsideRun:
    points = Points()
    columns = [said["points"][name] for name in ("metric", "step", "value", "at")]
    names = [str(name) for name in said["points"]["names"]]
    for metric, step, value, at in zip(*columns, strict=True):
        if not 0 <= metric < len(names):
            raise ValueError("a point of no metric")
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
        raise NotFoundError(f"{RUN}: names {place[:80]!a}, which was not sent along")
    return path if path.is_dir() else inside(path, folder)
