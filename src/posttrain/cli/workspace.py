"""Commands on a workspace: `init`, `erase`, `doctor`, `gc`, `backup` and `restore`.

`gc` deletes artifacts that no record needs. `backup` copies the ledger with the artifacts that it needs, and `restore`
creates a workspace from the copy.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    answer_json,
    aside,
    console,
    emit_json,
    glyph,
    lazily,
    open_control,
    plain_table,
    say,
    style,
    tinted,
)
from posttrain.cli.sinks import TrackerOption
from posttrain.domain.errors import InputError

if TYPE_CHECKING:
    from posttrain.app.executors import Probed
    from posttrain.app.workspace import Draft

UNFIT = 10  # the exit code of WorkspaceError
executors = typer.Typer(
    help="Declare, list and prove executors and the flavours of their nodes.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
_GLYPHS = {"ok": "succeeded", "warn": "stopped", "fail": "failed"}


class Rewards(StrEnum):
    """The permission for rewards to run unconfined."""

    CONFINED = "confined"
    TRUSTED = "trusted"


RewardsOption = Annotated[
    Rewards | None,
    typer.Option(
        help="trusted: rewards may run where the kernel cannot confine them. confined: rewards must not run there."
    ),
]
AdoptedOption = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--from",
        metavar="trl|verl FILE",
        help="Also write run.yaml, from a TRL script, configuration or command, or from verl's YAML or script.",
        show_default=False,
    ),
]
LedgerOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="PostgreSQL for a new ledger: postgresql://user@host/database; password: PGPASSWORD or ~/.pgpass.",
        show_default=False,
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Executor of jobs: local, podman (containers, for runs that name an image), or the executor of an "
        "installed package.",
        show_default=False,
    ),
]
MailboxesOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="mailboxes of a new workspace: s3://BUCKET/PREFIX; credentials: AWS_* variables.",
        show_default=False,
    ),
]
JobVariableOption = Annotated[
    list[str] | None,
    typer.Option(
        "--job-variable",
        metavar="NAME",
        help="Server variable that jobs get; repeatable; replaces the earlier names. none: no variable.",
        show_default=False,
    ),
]
ModelLimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-limit",
        metavar="NAME=N",
        help="Limit of a model folder: files, depth (nested folders) or bytes, e.g. files=20000. none: defaults.",
        show_default=False,
    ),
]


def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder of the workspace; default: here.", show_default=False)
    ] = None,
    rewards: RewardsOption = None,
    adopted: AdoptedOption = None,
    tracker: TrackerOption = None,
    ledger: LedgerOption = None,
    executor: ExecutorOption = None,
    mailboxes: MailboxesOption = None,
    job_variable: JobVariableOption = None,
    model_limit: ModelLimitOption = None,
) -> None:
    """Create a workspace (.posttrain), or change its settings.

    In an existing workspace, the command changes only the given settings.
    """
    from posttrain.app.workspace import (
        chosen_places,
        init_workspace,
        read_choice,
        refuse_unwritable_choice,
        workspace_above,
    )

    _refuse_beside_a_server()
    above = workspace_above(folder)
    written = _adopt(*adopted, folder or Path()) if adopted else None
    chosen = read_choice(tracker) if tracker else None
    if chosen:
        refuse_unwritable_choice(chosen, folder)
    variables = None if not job_variable else [] if job_variable == ["none"] else job_variable
    workspace = init_workspace(
        folder, rewards=rewards, trackers=chosen, ledger=ledger, executor=executor, channel=mailboxes,
        job_variables=variables, limits=model_limit,
    )  # fmt: skip
    if workspace.trusts_rewards:
        say(
            "rewards are trusted in this workspace: where the kernel cannot confine them, they run with your "
            "permissions"
        )
    say(f"workspace {workspace.root}")
    if above is not None:
        aside(f"the new workspace is below the workspace {above}; commands in this folder use the new workspace")
    if executor is not None:
        say(f"executor {workspace.jobs.executor.name}")
    if workspace.served and (rewards or executor or job_variable or chosen):
        say("its server still uses its earlier settings: restart posttrain serve")
    if mailboxes is not None:
        say(f"mailboxes {workspace.channel_address}", f"artifacts {workspace.blobs.url}")
        if workspace.blobs.url.startswith("file:"):
            aside("jobs on clusters also need the artifacts in an object store: set POSTTRAIN_STORE before init")
    if workspace.ledger_address:
        say(f"ledger {workspace.ledger_address}")
    say(*(f"tracker {kind}: {where}" for kind, where in chosen_places(workspace)))
    if written is None:
        say("next: posttrain asset add dataset:NAME FILE, or posttrain demo")
    else:
        _tell(*written)
    workspace.close()


def _refuse_beside_a_server(command: str = "init") -> None:
    """Refuse to create or change a workspace that no command would use.

    Raises:
        InputError: the environment names a server, which commands use.
    """
    from posttrain.domain.ids import SERVER_VARIABLE

    if url := os.environ.get(SERVER_VARIABLE):
        action = f"continue with the next command, or unset {SERVER_VARIABLE} and run {command} again"
        if command != "init":
            action = f"run {command} on the server's machine, in the folder of its workspace"
        raise InputError(
            f"{command}: commands use the server that {SERVER_VARIABLE} names, {url}, so they would not use a "
            f"workspace here; {action}"
        )


def _adopt(trainer: str, source: Path, folder: Path) -> tuple[Path, Draft]:
    from posttrain.app.workspace import RUN_FILE, Trainer, adopt

    if trainer not in tuple(Trainer):
        raise InputError(f"init: --from takes {' or '.join(Trainer)}, got {trainer!r}; name one of them")
    if not folder.is_dir():
        raise InputError(f"init: {folder} must be an existing folder for run.yaml; create it first")
    path = folder / RUN_FILE
    return path, adopt(Trainer(trainer), source, path)


def _tell(path: Path, draft: Draft) -> None:
    say(f"run file {path}")
    titles = {
        "carried over": draft.carried,
        "set differently": draft.changed,
        "left out (no counterpart)": draft.dropped,
        "ignored (no effect on the result)": (", ".join(draft.inert),) if draft.inert else (),
        "to do before the first run": (*draft.fill_in, f"posttrain plan {path}"),
    }
    for title, items in titles.items():
        if items:
            say(f"{title}:", *(f"  {item}" for item in items))


def erase(
    what: Annotated[str, typer.Argument(metavar="RUN|ASSET|user:NAME", autocompletion=lazily("runs"))],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason; recorded with the event.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Erase free text on a run or asset, or a person's name.

    The event log keeps the events without the text, and they can still be verified.
    """
    found = open_control().erase(what, reason)
    answer_json(output, lambda: {"target": found.target, **asdict(found.done), "left": list(found.left)})
    say(f"{found.target}: erased the free text of {found.done.events} events and {found.done.rows} rows")
    if found.left:
        say("these places may still contain the text:", *(f"  {line}" for line in found.left))


def doctor(
    probe: Annotated[
        bool, typer.Option("--probe", help="Also start the engine in another process to detect GPUs.")
    ] = False,
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="ADDRESS", help="Also check whether this Ray cluster accepts this machine."),
    ] = "",
    end_orphans: Annotated[
        bool, typer.Option("--end-orphans", help="Also end jobs of this workspace that no attempt owns.")
    ] = False,
    accept_loss: Annotated[
        str | None,
        typer.Option(
            metavar="REASON",
            help="Accept, for this reason, that the ledger lacks records that exist outside it.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check this machine, and the workspace or server that commands use. The exit code is 10 if a check fails."""
    from posttrain.app.doctor import examine

    checks = examine(probe=probe, ray=ray, end=end_orphans, accept=accept_loss)
    worst = "fail" if any(c.state == "fail" for c in checks) else "ok"
    if output is Output.JSON:
        emit_json([{"name": c.name, "state": c.state, "finding": c.finding, "remedy": c.remedy} for c in checks])
    else:
        screen = console()
        for check in checks:
            line = tinted(f"{glyph(_GLYPHS[check.state])} {check.state:4s} ", style(check.state))
            line.append(f"{check.name:11s} ", style="bold").append(check.finding, style="default")
            screen.print(line)
            if check.remedy:
                screen.print(tinted(f"       {'':11s} → {check.remedy}", "dim"))
    if worst == "fail":
        raise typer.Exit(UNFIT)


@executors.command("add")
def add_executors(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with executors, flavours and default.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Declare executors, and the flavours of their nodes. They replace those of the same names."""
    from posttrain.app.executors import declare
    from posttrain.app.workspace import open_workspace

    _refuse_beside_a_server("executor add")
    with closing(open_workspace()) as workspace:
        found = declare(workspace, file)
    answer_json(output, lambda: found.model_dump(mode="json", exclude_unset=True))
    say(*(f"flavour {name}: executor {one.executor}" for name, one in found.flavours.items()))
    say("next: posttrain executor doctor")


@executors.command("ls")
def list_executors(output: OutputOption = Output.TEXT) -> None:
    """List executors and flavours, and whether a probe has proven their nodes."""
    from posttrain.app.workspace import open_workspace

    _refuse_beside_a_server("executor ls")
    with closing(open_workspace()) as workspace:
        jobs = workspace.jobs
        proven = {name: workspace.is_proven(name) for name in jobs.cluster.flavours}
    answer_json(
        output,
        lambda: {
            "executors": [jobs.executor.name, *jobs.others],
            "default": jobs.cluster.default,
            "flavours": {
                name: one.model_dump(mode="json", exclude_unset=True) | {"proven": proven[name]}
                for name, one in jobs.cluster.flavours.items()
            },
        },
    )
    table = plain_table("flavour", "executor", "kind", "nodes", "GPUs per node", "queue", "proven")
    own = jobs.executor.name
    table.add_row("—" if jobs.cluster.default else "— (default)", own, own)
    used = {one.executor for one in jobs.cluster.flavours.values()}
    for name, declared in jobs.cluster.executors.items():
        if name not in used:
            table.add_row("— (no flavour)", name, declared.kind)
    for name, one in jobs.cluster.flavours.items():
        shown = f"{name} (default)" if name == jobs.cluster.default else name
        kind = jobs.cluster.executors[one.executor].kind
        queue = " ".join(f"{word}={value}" for word, value in one.options().items())
        nodes = (str(one.nodes), str(one.gpus_per_node), queue, "yes" if proven[name] else "no")
        table.add_row(shown, one.executor, kind, *nodes)
    console().print(table)


@executors.command("doctor")
def examine_executors(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A flavour or an executor; default: all.", show_default=False)
    ] = None,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="Longest wait for one report: 90s, 10m, 2h.")] = "10m",
    output: OutputOption = Output.TEXT,
) -> None:
    """Submit a probe job to each flavour, and show what its nodes have. The exit code is 10 if a probe fails.

    The probe reports Python, packages, accelerators, how long the store takes to answer, its clock, and its wait.
    """
    from posttrain.app.executors import probes
    from posttrain.app.workspace import open_workspace

    _refuse_beside_a_server("executor doctor")
    patience = _seconds(wait, "executor doctor: --wait")
    found = []
    with closing(open_workspace()) as workspace:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that its probes are removed
        for one in probes(workspace, name, patience):
            found.append(one)
            if output is Output.TEXT:
                say(*_probe_lines(one))
    if output is Output.JSON:
        emit_json([asdict(one) for one in found])
    if any(one.trouble for one in found):
        raise typer.Exit(UNFIT)


def _probe_lines(one: Probed) -> list[str]:
    if one.trouble:
        return [
            f"fail {one.flavour} ({one.executor}): {one.trouble}",
            *([f"     → {one.action}"] if one.action else []),
        ]
    said, times = one.report, one.report["seconds"]
    packages = ", ".join(f"{name} {version}" for name, version in said["packages"].items())
    gpus = ", ".join(said["accelerators"]) or "no accelerator"
    return [
        f"ok   {one.flavour} ({one.executor}): node {said['node']}, {gpus}, waited {one.waited:.0f} s",
        f"     Python {said['python']}, {packages}",
        f"     store: PUT {1e3 * times['put']:.0f} ms, GET {1e3 * times['get']:.0f} ms, "
        f"LIST {1e3 * times['list']:.0f} ms (1 MiB); clock {one.skew:+.1f} s",
        *([f"     warning: {one.warning}"] if one.warning else []),
    ]


def _seconds(text: str, where: str) -> float:
    from posttrain.domain.placement import parse_duration

    try:
        return float(parse_duration(text))
    except ValueError as error:
        raise InputError(f"{where} {error}") from error


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; only report the deletions.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Minimum age of deleted artifacts: 90s, 10m, 24h, 7d.")
    ] = "24h",
    output: OutputOption = Output.TEXT,
) -> None:
    """Delete artifacts that no record needs, and leftovers.

    Leftovers are unneeded cached copies, checkpoints of ended runs, and unfinished uploads. Runs may be active.
    """
    done = open_control().gc(_seconds(older_than, "gc: --older-than"), dry_run=dry_run)
    answer_json(output, lambda: asdict(done))
    verb, blobs = "would delete" if dry_run else "deleted", done.blobs
    say(
        f"{verb} {blobs.deleted} artifacts ({_size(blobs.deleted_bytes)})",
        f"{verb} {done.folders} cached copies and checkpoints of runs that ended ({_size(done.folder_bytes)})",
        f"kept {blobs.needed} artifacts that are needed ({_size(blobs.needed_bytes)})",
    )
    if blobs.young:
        size = _size(blobs.young_bytes)
        say(f"kept {blobs.young} artifacts that are not needed but are younger than {older_than} ({size})")


FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the backup.")]


def backup(folder: FolderArgument, output: OutputOption = Output.TEXT) -> None:
    """Copy the ledger and every artifact that it needs.

    Runs may be active. If the folder already contains a backup, the command copies only new data.
    """
    from posttrain.app.workspace import backup as back_up

    done = back_up(folder)
    answer_json(
        output,
        lambda: {
            "folder": str(done.folder),
            "at": done.at,
            "artifacts": len(done.blobs),
            "bytes": done.bytes,
            "added": done.added,
            "events": done.events,
        },
    )
    say(
        f"backed up to {done.folder}: {len(done.blobs)} artifacts ({_size(done.bytes)}), {done.added} of them new",
        f"verified: {done.events} sealed events, every row, and every artifact",
        "not included: logs, facts and checkpoints below runs/, and caches",
    )


def restore(folder: FolderArgument, output: OutputOption = Output.TEXT) -> None:
    """Create a workspace here (.posttrain) from a backup.

    Runs that had not ended continue with new attempts.
    """
    from posttrain.app.workspace import restore as bring_back

    done = bring_back(folder)
    answer_json(
        output,
        lambda: {
            "workspace": str(done.root),
            "at": done.found.at,
            "runs": done.runs,
            "under_way": list(done.under_way),
            "artifacts": len(done.found.blobs),
        },
    )
    say(
        f"workspace {done.root}: {done.runs} runs, {len(done.found.blobs)} artifacts, verified",
        "unexpired tokens remain valid; posttrain token ls lists them",
        *(
            f"run {run} was in progress, and its jobs are not here; posttrain attach {run} retries their stages"
            for run in done.under_way
        ),
    )


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
