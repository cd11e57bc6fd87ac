"""`gc`, `backup` and `restore`: what nobody needs is deleted, what is needed is kept twice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import Output, OutputOption, emit_json, open_control, say
from posttrain.domain.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gc")(gc)
    app.command("backup")(backup)
    app.command("restore")(restore)


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; say what would be.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="What is younger stays: 90s, 10m, 24h, 7d.")
    ] = "24h",
    output: OutputOption = Output.TEXT,
) -> None:
    """Delete artifacts that nothing recorded needs, and what else is left over. Runs may go on meanwhile."""
    from dataclasses import asdict

    from posttrain.domain.amounts import parse_duration

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


FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the backup.")]


def backup(folder: FolderArgument, output: OutputOption = Output.TEXT) -> None:
    """Copy the ledger and every artifact that it needs, while runs go on. Into an older backup: what is new."""
    from posttrain.app.backing import backup as back_up

    done = back_up(folder)
    if output is Output.JSON:
        told = {"artifacts": len(done.blobs), "bytes": done.bytes, "added": done.added, "events": done.events}
        emit_json({"folder": str(done.folder), "at": done.at, **told})
        return
    say(
        f"backed up to {done.folder}: {len(done.blobs)} artifacts ({_size(done.bytes)}), {done.added} of them new",
        f"verified: {done.events} sealed events, every row, and every artifact",
        "not in it: logs, facts and checkpoints below runs/, and caches",
    )


def restore(folder: FolderArgument, output: OutputOption = Output.TEXT) -> None:
    """Make a workspace here (.posttrain) of a backup. Runs that were under way go on with new attempts."""
    from posttrain.app.backing import restore as bring_back

    done = bring_back(folder)
    if output is Output.JSON:
        told = {"runs": done.runs, "under_way": list(done.under_way), "artifacts": len(done.found.blobs)}
        emit_json({"workspace": str(done.root), "at": done.found.at, **told})
        return
    say(
        f"workspace {done.root}: {done.runs} runs, {len(done.found.blobs)} artifacts, verified",
        "tokens that had not expired still count; posttrain token ls lists them",
    )
    for run in done.under_way:
        say(f"run {run} was under way: its jobs are not here; posttrain attach {run} tries their stages again")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
