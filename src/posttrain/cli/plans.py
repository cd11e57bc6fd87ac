"""`plan` and `lock`: look before a process starts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import Output, OutputOption, answer_json, console, lazily, open_control, say
from posttrain.domain.overrides import single

FileArgument = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run file.")]
SeedOption = Annotated[int | None, typer.Option(help="Instead of the file's seed.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Instead of the file's, e.g. grpo.steps=100; repeat it.",
        autocompletion=lazily("fields"),
    ),
]


def changes(seed: int | None, sets: Sequence[str] | None) -> str:
    """The options that change a run file, as typed."""
    words = [f"--seed {seed}"] if seed is not None else []
    return "".join(f" {word}" for word in (*words, *(f"--set {shlex.quote(one)}" for one in sets or ())))


def plan(
    file: FileArgument, seed: SeedOption = None, sets: SetOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Validate a run file; show stages, cache, cost, power. Writes nothing."""
    view = open_control().plan(file, seed=seed, setting=single(sets or ()))
    answer_json(output, view.to_json)
    from posttrain.cli.screens import plan_lines, plan_tree

    screen = console()
    screen.print(plan_tree(view))
    for line in plan_lines(view):
        screen.print(line)
    if not view.existing:
        say(f"next:     {_first(view.changes, f'posttrain run {file}{changes(seed, sets)}')}")


def lock(
    file: FileArgument,
    out: Annotated[
        Path | None, typer.Option(help="A name ending in .lock.json; by default RUN.lock.json beside the run file.")
    ] = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write the immutable manifest. The SHA-256 of the file is the run's identity."""
    planned = open_control().lock(file, seed=seed, setting=single(sets or ()))
    manifest = planned.manifest
    path = out or planned.place
    planned.write(path)
    answer_json(output, lambda: {"digest": manifest.digest, "path": str(path)})
    say(f"{manifest.digest}  {path}", *(f"warning: {warning}" for warning in planned.warnings))
    again = [f"{change} and lock again" for change in planned.changes[-1:]]
    say(f"next: {_first((*planned.changes[:-1], *again), f'posttrain run {path}')}")


def _first(changes: Sequence[str], command: str) -> str:
    """What to do next: the command, after what should be changed before it."""
    return f"{'; '.join(changes)}; then {command}" if changes else command
