"""`init`, `upgrade`, `erase` and `doctor`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import Output, OutputOption, aside, console, emit_json, glyph, open_control, say, style
from posttrain.cli.shell import lazily
from posttrain.cli.tracking import TrackerOption
from posttrain.domain.errors import InputError

if TYPE_CHECKING:
    from posttrain.app.adopting import Adopted

UNFIT = 10  # the exit code of WorkspaceError
_GLYPHS = {"ok": "succeeded", "warn": "stopped", "fail": "failed"}


class Rewards(StrEnum):
    """Whether rewards may run unconfined."""

    CONFINED = "confined"
    TRUSTED = "trusted"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("init")(init)
    app.command("upgrade")(upgrade)
    app.command("erase")(erase)
    app.command("doctor")(doctor)


RewardsOption = Annotated[
    Rewards | None,
    typer.Option(help="trusted: they may run where the kernel cannot confine them. confined: they may not."),
]
AdoptedOption = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--from",
        metavar="trl|verl FILE",
        help="Also write run.yaml: what a TRL script, configuration or command, or verl's YAML or script asks for.",
        show_default=False,
    ),
]
LedgerOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="PostgreSQL for a new ledger: postgresql://user@host/database; password by PGPASSWORD or ~/.pgpass.",
        show_default=False,
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Who runs its jobs: local, podman (in containers, where a run names an image), or one of a package.",
        show_default=False,
    ),
]
AttemptChannelsOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where jobs and drivers of a new workspace talk: s3://BUCKET/PREFIX; credentials by AWS_….",
        show_default=False,
    ),
]
JobVariableOption = Annotated[
    list[str] | None,
    typer.Option(
        "--job-variable",
        metavar="NAME",
        help="A variable that jobs get of their server's environment, in place of those named before; none: no other.",
        show_default=False,
    ),
]
ModelLimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-limit",
        metavar="NAME=N",
        help="Most files, depth (folders in each other) or bytes of a model folder, as files=20000; none: defaults.",
        show_default=False,
    ),
]


def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where; here by default.", show_default=False)
    ] = None,
    rewards: RewardsOption = None,
    adopted: AdoptedOption = None,
    tracker: TrackerOption = None,
    ledger: LedgerOption = None,
    executor: ExecutorOption = None,
    attempt_channels: AttemptChannelsOption = None,
    job_variable: JobVariableOption = None,
    model_limit: ModelLimitOption = None,
) -> None:
    """Make a workspace (.posttrain); doing it again changes nothing but what is given."""
    from posttrain.app.choices import chosen_places, read_choice, refuse_unwritable_choice
    from posttrain.app.workspace import init_workspace, workspace_above

    _refuse_beside_a_server()
    above = workspace_above(folder)
    written = _adopt(*adopted, folder or Path()) if adopted else None
    chosen = read_choice(tracker) if tracker else None
    if chosen:
        refuse_unwritable_choice(chosen, folder)
    variables = None if not job_variable else [] if job_variable == ["none"] else job_variable
    workspace = init_workspace(
        folder, rewards=rewards, trackers=chosen, ledger=ledger, executor=executor, channel=attempt_channels,
        job_variables=variables, limits=model_limit,
    )  # fmt: skip
    if workspace.trusts_rewards:
        say("its rewards are trusted: where the kernel cannot confine them they run with your rights")
    say(f"workspace {workspace.root}")
    if above is not None:
        aside(f"it lies below the workspace {above}: commands typed here ask the new one")
    if executor is not None:
        say(f"executor {workspace.jobs.executor.name}")
    if workspace.served and (rewards or executor or job_variable or chosen):
        say("its server goes on by what it read when it began: restart posttrain serve")
    if attempt_channels is not None:
        say(f"attempt channels {workspace.channel_address}")
    if workspace.ledger_address:
        say(f"ledger {workspace.ledger_address}")
    say(*(f"tracker {kind}: {where}" for kind, where in chosen_places(workspace)))
    if written is None:
        say("next: posttrain asset add dataset:NAME FILE, or posttrain demo")
    else:
        _tell(written)
    workspace.close()


def _refuse_beside_a_server() -> None:
    """A workspace that no command would look into.

    Raises:
        InputError: the environment names a server, which commands ask.
    """
    from posttrain.domain.places import SERVER_VARIABLE

    if url := os.environ.get(SERVER_VARIABLE):
        raise InputError(
            f"init: commands ask the server that {SERVER_VARIABLE} names, {url}, and would not look into a workspace "
            f"here; go on with the next command, or unset {SERVER_VARIABLE} and make one"
        )


def _adopt(trainer: str, source: Path, folder: Path) -> Adopted:
    from posttrain.app.adopting import RUN_FILE, Trainer, adopt

    if trainer not in tuple(Trainer):
        raise InputError(f"init: --from takes {' or '.join(Trainer)}, got {trainer!r}; name one of them")
    if not folder.is_dir():
        raise InputError(f"init: {folder} must be a folder that is there, for run.yaml to go to; make it first")
    return adopt(Trainer(trainer), source, folder / RUN_FILE)


def _tell(written: Adopted) -> None:
    say(f"run file {written.path}")
    titles = {
        "carried over": written.carried,
        "not as it was there": written.changed,
        "left out, without a counterpart here": written.dropped,
        "without a meaning for the result": (", ".join(written.inert),) if written.inert else (),
        "to do before the first run": (*written.fill_in, f"posttrain plan {written.path}"),
    }
    for title, items in titles.items():
        if items:
            say(f"{title}:", *(f"  {item}" for item in items))


def upgrade(output: OutputOption = Output.TEXT) -> None:
    """Bring a workspace of an older Posttrain to this one. A copy of its ledger is kept; running jobs go on."""
    from dataclasses import asdict

    from posttrain.app.workspace import upgrade_workspace

    done = upgrade_workspace(aside)
    if output is Output.JSON:
        emit_json(asdict(done))
    elif not done.copy:
        say(f"the ledger has schema {done.schema} already; nothing to do")
    else:
        say(
            f"upgraded the ledger from schema {done.came_from} to {done.schema}: {done.runs} runs",
            f"copy of before: {done.copy}",
            f"verified: {done.events} events of before the upgrade, and every row",
        )


def erase(
    what: Annotated[str, typer.Argument(metavar="RUN|ASSET|user:NAME", autocompletion=lazily("runs"))],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; kept with the event.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Erase what people wrote about a run or a version, or a person's name. That it happened stays, and is proved."""
    from dataclasses import asdict

    control = open_control()
    found = control.erase(what, reason)
    control.close()
    if output is Output.JSON:
        emit_json({"target": found.target, **asdict(found.done), "left": list(found.left)})
        return
    say(f"{found.target}: erased the words of {found.done.events} events; {found.done.rows} rows say less now")
    if found.left:
        say("not erased, if it says anything:", *(f"  {line}" for line in found.left))


def doctor(
    probe: Annotated[
        bool, typer.Option("--probe", help="Also start the engine in another process to ask for GPUs.")
    ] = False,
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="ADDRESS", help="Also ask this Ray cluster whether it takes this machine in."),
    ] = "",
    end_orphans: Annotated[
        bool, typer.Option("--end-orphans", help="Also end jobs of this workspace that no attempt owns.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check this machine, and the workspace or server that commands ask; exit code 10 when one forbids running."""
    from posttrain.app.doctor import examine

    checks = examine(probe=probe, ray=ray, end=end_orphans)
    worst = "fail" if any(c.state == "fail" for c in checks) else "ok"
    if output is Output.JSON:
        emit_json([{"name": c.name, "state": c.state, "finding": c.finding, "remedy": c.remedy} for c in checks])
    else:
        from rich.text import Text

        screen = console()
        for check in checks:
            line = Text(f"{glyph(_GLYPHS[check.state])} {check.state:4s} ", style=style(check.state))
            line.append(f"{check.name:11s} ", style="bold").append(check.finding, style="default")
            screen.print(line)
            if check.remedy:
                screen.print(Text(f"       {'':11s} → {check.remedy}", style="dim"))
    if worst == "fail":
        raise typer.Exit(UNFIT)
