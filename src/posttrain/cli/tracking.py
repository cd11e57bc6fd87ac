"""`track`: what trackers are missing of a run or a channel, written now."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import Output, OutputOption, console, emit_json
from posttrain.cli.shell import lazily
from posttrain.domain.errors import InputError

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace
    from posttrain.trackers.tracking import TrackerState

TrackerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="KIND[=WHERE]",
        help="csv, parquet, tensorboard (=DIR), mlflow (=URI), wandb (=[ENTITY/]PROJECT); repeat it. none: no tracker.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("track")(track)


def track(
    run: Annotated[str, typer.Argument(metavar="RUN|CHANNEL", autocompletion=lazily("runs_and_channels"))],
    tracker: TrackerOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the run ends, as whoever drives a run has it done.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write what is missing in a run's trackers, or in the registries of a channel. `--tracker` writes one more."""
    from posttrain.app.workspace import open_workspace
    from posttrain.trackers import following
    from posttrain.trackers.adding import track_more
    from posttrain.trackers.registering import register_channel

    if follow and (tracker or output is Output.JSON):
        raise InputError("track: --follow goes with neither --tracker nor -o json; ask again without it")
    workspace = open_workspace()
    if run in workspace.ledger.channels():
        if follow or tracker:
            raise InputError(f"track {run}: --follow and --tracker are for runs, got a channel; leave them out")
        _told(workspace, {"channel": run}, register_channel(workspace, run), output)
        return
    run_id = workspace.ledger.find_run(run).id
    if follow:
        workspace.close()
        following.follow(partial(open_workspace, workspace.root), run_id)
        return
    chosen = read_choice(tracker) if tracker else {}
    found = track_more(workspace, run_id, chosen) if chosen else following.track(workspace, run_id)
    _told(workspace, {"run": run_id}, found, output)


def _told(workspace: Workspace, what: dict[str, str], found: list[TrackerState], output: Output) -> None:
    workspace.close()
    if output is Output.JSON:
        emit_json({**what, "trackers": [one.to_json() for one in found]})
        return
    from posttrain.cli.screens import tracker_lines

    for line in tracker_lines(found):
        console().print(line)


def read_choice(words: list[str]) -> dict[str, Any]:
    """What `--tracker` says, valid and with paths that do not depend on where a later command is typed.

    Raises:
        InputError: an unknown tracker, one named twice, or a target that it cannot have.
    """
    from posttrain.trackers.tracking import parse_choice

    return parse_choice(words, Path.cwd())


def refuse_unwritable_choice(chosen: dict[str, Any], folder: Path | None) -> None:
    """Refuse what could not be written before it is recorded.

    Raises:
        InputError: a package is missing, or a place cannot be written.
    """
    from posttrain.trackers.tracking import check_trackers, parse_trackers, resolved

    root = (folder or Path.cwd()).resolve()
    check_trackers(resolved(parse_trackers(chosen, "--tracker"), root, root), "--tracker")
