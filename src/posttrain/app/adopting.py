"""A run file from another trainer's: `posttrain init --from`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from posttrain.data.catalog import inspect_dataset
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.runspec import parse_run_spec
from posttrain.foreign.settings import Draft, read_settings
from posttrain.foreign.trl import from_trl
from posttrain.foreign.verl import from_verl
from posttrain.store.atomic import unwritable

RUN_FILE = "run.yaml"


class Trainer(StrEnum):
    """Whose file it is."""

    TRL = "trl"
    VERL = "verl"


_READERS = {Trainer.TRL: from_trl, Trainer.VERL: from_verl}


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was written, and what of the other file it does not say."""

    path: Path
    carried: tuple[str, ...]
    changed: tuple[str, ...]
    dropped: tuple[str, ...]
    inert: tuple[str, ...]
    fill_in: tuple[str, ...]


def adopt(trainer: Trainer, source: Path, target: Path) -> Adopted:
    """Write a run file that asks for the training which `source` asks `trainer` for.

    Nothing of the source is executed.

    Args:
        source: a TRL script, configuration or command; verl's YAML or a script with its overrides.
        target: the run file; must not be there.

    Raises:
        InputError: the source cannot be read, has no counterpart here, or something is at `target`.
        WorkspaceError: `target` cannot be written.
    """
    draft = _READERS[trainer](read_settings(source), None)
    place, rows = _rows(draft, target.absolute().parent)
    if rows is not None:
        draft = _READERS[trainer](read_settings(source), rows)
        draft.run["data"] = {"train": place}
    model = Path(draft.run["model"]).expanduser()
    if model.is_dir() and not model.is_absolute():
        draft.run["model"] = _seen_from(target.absolute().parent, model)
    parse_run_spec(draft.run, str(target))  # whatever it says, it is a run file
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(draft.text())
    except FileExistsError as error:
        raise InputError(f"{target}: is there already; move it away, or go on with posttrain plan {target}") from error
    except OSError as error:
        raise unwritable(target, error) from error
    said: dict[str, Any] = {
        name: tuple(getattr(draft, name)) for name in ("carried", "changed", "dropped", "inert", "fill_in")
    }
    return Adopted(target, **said)


def _rows(draft: Draft, folder: Path) -> tuple[str, int | None]:
    """Where the training data lie, seen from the run file, and how many rows they have; None: not here."""
    named = str(draft.run["data"]["train"])
    path = Path(named).expanduser()
    if named.startswith("dataset:") or not path.exists():
        return named, None
    try:
        rows = int(inspect_dataset(path)["rows"])
    except (InputError, NotFoundError):  # `plan` says what is wrong with them
        return named, None
    return _seen_from(folder, path), rows


def _seen_from(folder: Path, path: Path) -> str:
    """A path as a run file in `folder` writes it."""
    relative = os.path.relpath(path.absolute(), folder)
    return relative if relative.startswith(".") else f"./{relative}"
