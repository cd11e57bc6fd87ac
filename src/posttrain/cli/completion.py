"""Values for shell completion: runs, channels, models and assets of the nearest workspace, and examples.

A failed completion reports no error: the command reports the problem when it runs.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from posttrain.api.control import Control
from posttrain.app import examples as shelf
from posttrain.app.control import open_control
from posttrain.domain.errors import PosttrainError
from posttrain.domain.kinds import METRICS
from posttrain.domain.runspec import read_yaml

_RUNS = 200  # maximum number of runs, newest first
_LINES, _RUN_FILES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"), (".yaml", ".yml")  # variables with the typed line


def runs(incomplete: str) -> list[str]:
    """Return run ids, newest first."""
    return _complete(incomplete, _run_ids)


def runs_and_channels(incomplete: str) -> list[str]:
    """Return channels, then runs."""
    return _complete(incomplete, lambda w: [*_live(w), *_run_ids(w)])


def lineages(incomplete: str) -> list[str]:
    """Return channels, runs, then assets."""
    return _complete(incomplete, lambda w: [*_live(w), *_run_ids(w), *_assets(w, None)])


def channels(incomplete: str) -> list[str]:
    """Return channels, including those without a release."""
    return _complete(incomplete, lambda w: [record.name for record in w.channels()])


def sinks(incomplete: str) -> list[str]:
    """Return names of sinks."""
    return _complete(incomplete, lambda w: [one.name for one in w.sinks()])


def models(incomplete: str) -> list[str]:
    """Return channels, registered models and runs; after `RUN/`, the run's stages that produced a model."""
    run, slash, _ = incomplete.partition("/")
    if slash:
        return _complete(incomplete, lambda w: _stages(w, run))
    return _complete(incomplete, lambda w: [*_live(w), *_assets(w, "model"), *_run_ids(w)])


def subjects(incomplete: str) -> list[str]:
    """Return runs; after `RUN/`, the run's stages that measured a model."""
    run, slash, _ = incomplete.partition("/")
    return _complete(incomplete, lambda w: _measured(w, run) if slash else _run_ids(w))


def fields(incomplete: str) -> list[str]:
    """Return the fields of the named run file that `--set` may change, in the form `grpo.steps=`."""
    typed = " ".join(os.environ.get(name, "") for name in _LINES).split()
    try:
        found = [path for word in typed if word.endswith(_RUN_FILES) for path in _leaves(read_yaml(Path(word)))]
    except PosttrainError:
        return []
    short = [path.removeprefix("stages.") for path in found if path.startswith("stages.")]
    return [f"{path}=" for path in (*found, *short) if path.startswith(incomplete)]


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in raw.items():
        yield from _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}"]


def datasets(incomplete: str) -> list[str]:
    """Return registered data sets."""
    return _complete(incomplete, lambda w: _assets(w, "dataset"))


def assets(incomplete: str) -> list[str]:
    """Return registered assets of every kind."""
    return _complete(incomplete, lambda w: _assets(w, None))


def examples(incomplete: str) -> list[str]:
    """Return names of examples."""
    return [folder.name for folder in shelf.examples() if folder.name.startswith(incomplete)]


def _complete(incomplete: str, known: Callable[[Control], Iterable[str]]) -> list[str]:
    try:
        with closing(open_control()) as control:  # closed here, because no command ends that would close it
            return [word for word in dict.fromkeys(known(control)) if word.startswith(incomplete)]
    except (PosttrainError, OSError):
        return []


def _live(control: Control) -> list[str]:
    return [entry.channel for entry in control.live()]


def _run_ids(control: Control) -> list[str]:
    return control.ids(_RUNS)


def _stages(control: Control, run: str) -> list[str]:
    rows = [stage.record for stage in control.status(control.run(run.removeprefix("run:")).id).stages]
    models = {"model": "", "best": "/best"}
    return [f"{run}/{row.name}{end}" for row in rows for output, end in models.items() if output in row.outputs]


def _measured(control: Control, run: str) -> list[str]:
    stages = control.status(control.run(run).id).stages
    return [f"{run}/{stage.record.name}" for stage in stages if METRICS in stage.record.outputs]


def _assets(control: Control, kind: str | None) -> list[str]:
    return [f"{asset.kind}:{asset.name}" for asset in control.assets(kind)]
