"""`gc`: what nobody needs is deleted."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.console import Output, OutputOption, emit_json, say
from posttrain.domain.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gc")(gc)


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; say what would be.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="What is younger stays: 90s, 10m, 24h, 7d.")
    ] = "24h",
    output: OutputOption = Output.TEXT,
) -> None:
    """Delete artifacts that nothing recorded needs, and what else is left over. Runs may go on meanwhile."""
    from dataclasses import asdict

    from posttrain.app.embedded.control import open_control
    from posttrain.domain.durations import parse_duration

    try:
        seconds = float(parse_duration(older_than))
    except ValueError as error:
        raise InputError(f"gc: --older-than {error}") from error
    control = open_control()
    done = control.gc(seconds, dry_run=dry_run)
    control.close()
    if output is Output.JSON:
        emit_json(asdict(done))
        return
    verb, blobs = "would delete" if dry_run else "deleted", done.blobs
    say(
        f"{verb} {blobs.deleted} artifacts ({_size(blobs.deleted_bytes)})",
        f"{verb} {done.folders} cached copies and checkpoints of runs that ended ({_size(done.folder_bytes)})",
        f"kept {blobs.needed} artifacts that are needed ({_size(blobs.needed_bytes)})",
    )
    if blobs.young:
        say(f"kept {blobs.young} that are not, but younger than {older_than} ({_size(blobs.young_bytes)})")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
