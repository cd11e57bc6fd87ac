"""Command `harness`: programs that measure a served model on tasks of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.assets import as_json
from posttrain.cli.console import Output, OutputOption, answer_json, aside, digest, open_control, said_after, say

app = typer.Typer(help="Fetch lm-eval or Inspect for evaluate stages.", no_args_is_help=True, rich_markup_mode=None)
_QUIET = 1.0  # seconds before the first progress message


@app.callback()
def harness() -> None:
    """Fetch lm-eval or Inspect for evaluate stages."""


@app.command("fetch")
def fetch(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="lm-eval or inspect.")],
    tasks: Annotated[list[str], typer.Argument(metavar="TASK...", help="Tasks or groups; Inspect: FILE.py@TASK.")],
    name: Annotated[str, typer.Option(help="Name of the asset; default: the program's name.")] = "",
    version: Annotated[str, typer.Option(help="Version of the program; default: the tested one.")] = "",
    include: Annotated[Path | None, typer.Option(help="Folder with further tasks and their data.")] = None,
    packages: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="Further package for tasks; repeatable.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Fetch a harness with its packages and the data of its tasks, and register it as an asset.

    A stage of kind evaluate uses it with harness: NAME. Its jobs need no network.
    """
    from posttrain.app.harnesses import fetch_harness

    control = open_control()
    with tempfile.TemporaryDirectory(prefix="posttrain-harness-") as folder:
        made = Path(folder)
        facts = fetch_harness(
            program, tasks, made, version=version, include=include, packages=packages or (), say=aside
        )
        with said_after(_QUIET, "registering"):
            asset = control.add_harness(made, name or program)
    answer_json(output, lambda: as_json(asset))
    say(f"{asset.ref}  {digest(asset.digest)}  {facts.program} {facts.version}, {len(facts.packages)} packages")
    for task, one in facts.tasks.items():
        metrics = ", ".join(f"{task}/{metric}" for metric in one.metrics)
        say(f"  {task}  version {one.version}, {one.documents} documents: {metrics}")
    say(f"next, in a run file: {{kind: evaluate, model: …, harness: {name or program}}}")
