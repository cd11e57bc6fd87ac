"""`track`: what trackers are missing of a run or a channel, written now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import Output, OutputOption, console, emit_json, lazily, open_control
from posttrain.domain.errors import InputError

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import TrackerState

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
    if follow and (tracker or output is Output.JSON):
        raise InputError("track: --follow goes with neither --tracker nor -o json; ask again without it")
    control = open_control()
    if any(entry.channel == run for entry in control.live()):
        if follow or tracker:
            raise InputError(f"track {run}: --follow and --tracker are for runs, got a channel; leave them out")
        _told(control, {"channel": run}, control.track_channel(run), output)
        return
    run_id = control.run(run).id
    if follow:
        control.follow(run_id)
        return
    chosen: dict[str, Any] = {}
    if tracker:
        from posttrain.app.choices import read_choice

        chosen = read_choice(tracker)
    _told(control, {"run": run_id}, control.track(run_id, chosen), output)


def _told(control: Control, what: dict[str, str], found: list[TrackerState], output: Output) -> None:
    control.close()
    if output is Output.JSON:
        emit_json({**what, "trackers": [one.to_json() for one in found]})
        return
    from posttrain.cli.screens import tracker_lines

    for line in tracker_lines(found):
        console().print(line)
