"""`dead`: what was set aside because looks at it failed again and again."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.console import Output, OutputOption, ago, answer_json, console, harmless, lazily, open_control, say
from posttrain.domain.errors import InputError


def dead(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN[/STAGE]]",
            help="Only this run or stage, with what was raised.",
            autocompletion=lazily("runs"),
            show_default=False,
        ),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Look at it again: its cause is mended.")] = False,
    assume_dead: Annotated[
        bool, typer.Option("--assume-dead", help="The job of RUN/STAGE, of which nothing is seen, is dead.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """What a driver set aside after it failed again and again, and why; --retry has it looked at again."""
    from dataclasses import asdict

    if retry and name is None:
        raise InputError("dead: --retry needs the run or stage that is looked at again; posttrain dead lists them")
    if assume_dead and (retry or name is None):
        raise InputError("dead: --assume-dead needs RUN/STAGE and no --retry; posttrain why RUN names the stage")
    control = open_control()
    if assume_dead and name:
        attempt = control.assume_dead(name)
        answer_json(output, lambda: asdict(attempt))
        say(f"{attempt.name} is taken for dead", f"next: posttrain attach {attempt.run_id}")
        return
    found = control.look_again(name) if retry and name else control.dead(name)
    answer_json(output, lambda: [asdict(one) for one in found])
    if retry:
        run = found[0].object.partition("/")[0]
        say(*(f"{one.object}: will be looked at again" for one in found), f"next: posttrain attach {run}")
    elif not found:
        say("nothing was set aside")
    for one in found if not retry else ():
        console().print(
            f"{one.object}: {one.tries} tries, set aside {ago(one.set_aside_at)}: {one.error}", markup=False
        )
        if name:
            say(*harmless(one.traceback).splitlines(), quoted=True)
        say(f"  → posttrain dead {one.object} --retry")
