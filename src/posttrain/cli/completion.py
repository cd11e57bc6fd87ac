"""What a shell may complete: runs, channels, models, assets of the nearest workspace, examples. A word that cannot be
completed is no error: whoever typed it is told when the command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from posttrain.app import examples as shelf
from posttrain.app.workspace import Workspace, open_workspace
from posttrain.domain.errors import PosttrainError

_RUNS = 200  # the newest so many


def runs(incomplete: str) -> list[str]:
    """Ids, newest first."""
    return _complete(incomplete, _run_ids)


def runs_and_channels(incomplete: str) -> list[str]:
    """Channels, then runs."""
    return _complete(incomplete, lambda w: [*w.ledger.channels(), *_run_ids(w)])


def lineages(incomplete: str) -> list[str]:
    """Channels, runs, then assets."""
    return _complete(incomplete, lambda w: [*w.ledger.channels(), *_run_ids(w), *_assets(w, None)])


def channels(incomplete: str) -> list[str]:
    """Channels, also those without a release."""
    return _complete(incomplete, lambda w: [record.name for record in w.ledger.channel_records()])


def models(incomplete: str) -> list[str]:
    """Channels, registered models and runs; behind a run's slash its stages that made a model."""
    run, slash, _ = incomplete.partition("/")
    if slash:
        return _complete(incomplete, lambda w: _stages(w, run))
    return _complete(incomplete, lambda w: [*w.ledger.channels(), *_assets(w, "model"), *_run_ids(w)])


def datasets(incomplete: str) -> list[str]:
    """Registered data sets."""
    return _complete(incomplete, lambda w: _assets(w, "dataset"))


def assets(incomplete: str) -> list[str]:
    """Registered assets of every kind."""
    return _complete(incomplete, lambda w: _assets(w, None))


def examples(incomplete: str) -> list[str]:
    """Names of examples."""
    return [folder.name for folder in shelf.examples() if folder.name.startswith(incomplete)]


def _complete(incomplete: str, known: Callable[[Workspace], Iterable[str]]) -> list[str]:
    try:
        workspace = open_workspace()
        try:
            return [word for word in dict.fromkeys(known(workspace)) if word.startswith(incomplete)]
        finally:
            workspace.close()
    except (PosttrainError, OSError):
        return []


def _run_ids(workspace: Workspace) -> list[str]:
    return [run.id for run in workspace.ledger.runs(limit=_RUNS)]


def _stages(workspace: Workspace, run: str) -> list[str]:
    rows = workspace.ledger.stages(workspace.ledger.find_run(run.removeprefix("run:")).id)
    models = {"model": "", "best": "/best"}
    return [f"{run}/{row.name}{end}" for row in rows for output, end in models.items() if output in row.outputs]


def _assets(workspace: Workspace, kind: str | None) -> list[str]:
    return [f"{asset.kind}:{asset.name}" for asset in workspace.ledger.assets(kind)]
