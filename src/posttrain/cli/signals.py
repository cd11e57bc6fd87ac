"""`signal`: a run goes on where it waits for a word."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.console import ago, open_control, say
from posttrain.cli.driving import RunArgument


def signal(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal, as the run file calls it.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log.")] = "",
) -> None:
    """Let a run go on where a stage waits for a signal. Sent before the stage is reached it counts; twice is once."""
    control = open_control()
    sent, new = control.signal(control.run(run).id, name, reason)
    before = "" if new else f" {ago(sent.at)} already, by {sent.actor}"
    say(f"run {sent.run_id}: signal {sent.name} sent{before}", f"next: posttrain get {sent.run_id}")
