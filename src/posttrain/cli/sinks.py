"""Commands for sinks and trackers.

`sink` manages external receivers of events. `track` immediately writes the records that are missing in the trackers of
a run or a channel.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    ago,
    answer_json,
    console,
    duration,
    lazily,
    moment,
    open_control,
    say,
    show,
)
from posttrain.domain.errors import InputError
from posttrain.domain.sinks import ALL, FOR_PEOPLE, Rule, SinkView

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import TrackerState

app = typer.Typer(
    help="Send events to webhooks, files of JSON lines and e-mail.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
SinkArgument = Annotated[str, typer.Argument(metavar="NAME", autocompletion=lazily("sinks"), show_default=False)]
TrackerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="KIND[=WHERE]",
        help="csv, parquet, tensorboard (=DIR), mlflow (=URI), wandb (=[ENTITY/]PROJECT); repeatable. none: no "
        "tracker.",
        show_default=False,
    ),
]


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Name of the sink.")],
    webhook: Annotated[str, typer.Option(metavar="URL", help="URL that receives each event by POST.")] = "",
    webhook_env: Annotated[str, typer.Option(metavar="VAR", help="Variable with the URL, if it is secret.")] = "",
    secret_env: Annotated[str, typer.Option(metavar="VAR", help="Variable with the signing secret.")] = "",
    secret_file: Annotated[str, typer.Option(metavar="PATH", help="File with the signing secret.")] = "",
    jsonl: Annotated[str, typer.Option(metavar="PATH", help="File that receives one line for each event.")] = "",
    email: Annotated[str, typer.Option(metavar="TO", help="Address that receives a mail for each event.")] = "",
    smtp: Annotated[str, typer.Option(metavar="HOST:PORT", help="SMTP server that sends the mail.")] = "",
    sender: Annotated[str, typer.Option("--from", metavar="ADDRESS", help="Sender of the mail.")] = "",
    smtp_security: Annotated[str, typer.Option(metavar="starttls|none", help="Security of SMTP.")] = "starttls",
    smtp_user_env: Annotated[str, typer.Option(metavar="VAR", help="Variable with the SMTP user.")] = "",
    smtp_password_env: Annotated[str, typer.Option(metavar="VAR", help="Variable with the SMTP password.")] = "",
    on: Annotated[
        str,
        typer.Option(
            metavar="WHAT,…",
            help="Events: run-ended (run-succeeded, run-failed, run-rejected, run-stopped), gate-failed, budget-80, "
            "approval-needed, channel-moved, dead-letter, sink-paused; or all. Default: all for a file; otherwise the "
            "names outside the parentheses.",
        ),
    ] = "",
    run: Annotated[str, typer.Option(metavar="GLOB", help="Only events of runs with a matching name.")] = "",
    owner: Annotated[str, typer.Option(help="Only events of runs of this owner.")] = "",
    channel: Annotated[str, typer.Option(help="Only events of this channel, and of runs that release to it.")] = "",
    words: Annotated[
        bool, typer.Option("--words", help="Also send free text, which erase cannot remove at the receiver.")
    ] = False,
    from_start: Annotated[bool, typer.Option("--from-start", help="Also send every earlier event of the log.")] = False,
) -> None:
    """Add a sink, which receives events from now on.

    Options name the variable or file that contains a secret; the process that delivers events reads the secret.
    """
    web = {"url": webhook, "url_env": webhook_env, "secret_env": secret_env, "secret_file": _absolute(secret_file)}
    mail = {"to": email, "from": sender, "security": smtp_security if email else ""}
    mail |= {"user_env": smtp_user_env, "password_env": smtp_password_env}
    given = {"webhook": webhook or webhook_env, "jsonl": jsonl, "email": email}
    kinds = [kind for kind, said in given.items() if said]
    if len(kinds) != 1:
        raise InputError(
            f"sink add {name}: needs exactly one of --webhook, --webhook-env, --jsonl and --email, got "
            f"{' and '.join(kinds) or 'none'}"
        )
    _refuse_others(name, kinds[0], web, {**mail, "smtp": smtp})
    settings: dict[str, Any] = {"webhook": web, "jsonl": {"path": _absolute(jsonl)}, "email": mail}[kinds[0]]
    settings = {key: value for key, value in settings.items() if value}
    if kinds[0] == "email":
        settings |= _server(smtp)
    chosen = [word.strip() for word in on.split(",") if word.strip()] or ([ALL] if jsonl else [])
    rule = {"on": chosen, "run": run, "owner": owner, "channel": channel, "words": words}
    found = open_control().add_sink(name, kinds[0], settings, rule, from_start=from_start)
    say(f"sink {name}: {found.kind} {found.where}, receives {_told(found.rules)}")
    if found.lacks:
        say(f"warning: {found.lacks}, so nothing is delivered; set the variable or file where runs are driven")
    say(f"next: posttrain sink test {name}")


def _refuse_others(name: str, kind: str, web: dict[str, str], mail: dict[str, str]) -> None:
    """Refuse options of another kind of sink, which would have no effect."""
    others = {"webhook": mail, "jsonl": web | mail, "email": web}[kind]
    strange = next((option for option, said in others.items() if said), None)
    if strange is not None:
        raise InputError(f"sink add {name}: a sink of kind {kind} takes no {strange.replace('_', ' ')}; leave it out")


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _server(smtp: str) -> dict[str, Any]:
    host, _, port = smtp.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"sink add: --smtp must be HOST:PORT, got {smtp!r}; most servers use port 587")
    return {"host": host.strip("[]"), "port": int(port)}


@app.command("ls")
def ls(output: OutputOption = Output.TEXT) -> None:
    """List the sinks, with their events, backlog and last error."""
    from dataclasses import asdict

    from posttrain.cli.screens import Column, Grid

    found = open_control().sinks()
    answer_json(output, lambda: [{**asdict(one), "rules": [rule.to_json() for rule in one.rules]} for one in found])
    if not found:
        say("there is no sink; next: posttrain sink add NAME --webhook URL --secret-env VAR")
        return
    grid = Grid([Column("SINK"), Column("WHERE", wraps=True), Column("EVENTS", wraps=True), Column("STATE")])
    for one in found:
        grid.row(one.name, f"{one.kind} {one.where}", _told(one.rules), _state(one))
    console().print(grid)
    for one in found:
        if one.error:
            again = "" if one.paused or one.not_before is None else f"; again at {moment(one.not_before)}"
            say(f"{one.name}: {one.failures} failures, the last: {one.error}{again}")
        if one.lacks:
            say(f"{one.name}: {one.lacks}, so nothing is delivered; set the variable or file where runs are driven")
        if one.paused:
            say(f"{one.name}: paused; next: posttrain sink resume {one.name}")


@app.command("test")
def test(name: SinkArgument) -> None:
    """Send a sink a message that is marked as a test."""
    say(f"sink {name}: {open_control().test_sink(name)} accepted a test message")


@app.command("pause")
def pause(name: SinkArgument) -> None:
    """Pause a sink. `resume` delivers the events that occurred during the pause."""
    open_control().pause_sink(name)
    say(f"sink {name} is paused; next: posttrain sink resume {name}")


@app.command("resume")
def resume(
    name: SinkArgument,
    skip: Annotated[bool, typer.Option("--skip", help="Skip the events that were not delivered so far.")] = False,
) -> None:
    """Resume a sink. Delivery starts immediately, even if the next try after a failure is not due yet."""
    found = open_control().resume_sink(name, skip=skip)
    say(f"sink {name} delivers again, {_behind(found)}")


@app.command("remove")
def remove(name: SinkArgument) -> None:
    """Remove a sink. Delivered events remain at the receiver."""
    open_control().remove_sink(name)
    say(f"sink {name} is removed")


def _told(rules: tuple[Rule, ...]) -> str:
    """Return a description of the rules such as `run-ended, gate-failed of runs sort*, with words`."""
    said = []
    for rule in rules:
        what = "the default events" if rule.on == FOR_PEOPLE else ", ".join(rule.on)
        limits = [("runs", rule.run), ("owner", rule.owner), ("channel", rule.channel)]
        of = "".join(f" of {name} {value}" for name, value in limits if value)
        said.append(f"{what}{of}{', with words' if rule.words else ''}")
    return "; ".join(said) or "nothing"


def _state(one: SinkView) -> str:
    if one.paused:
        return f"paused ({one.paused}), {_behind(one)}"
    told = f", last delivery {ago(one.delivered_at)}" if one.delivered_at else ""
    word = "failing" if one.failures else "cannot deliver" if one.lacks else "delivers"
    return f"{word}, {_behind(one)}{told}"


def _behind(one: SinkView) -> str:
    if not one.behind:
        return "nothing waits"
    return f"{one.behind} event{'s' if one.behind > 1 else ''} behind, the oldest for {duration(one.behind_seconds)}"


def track(
    run: Annotated[str, typer.Argument(metavar="RUN|CHANNEL", autocompletion=lazily("runs_and_channels"))],
    tracker: TrackerOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue to write records until the run ends.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write missing records to the trackers of a run or channel.

    The trackers of a channel are model registries. With `--tracker`, records are written to one more tracker.
    """
    if follow and (tracker or output is Output.JSON):
        raise InputError("track: --follow cannot be combined with --tracker or -o json; leave it out")
    control = open_control()
    if any(entry.channel == run for entry in control.live()):
        if follow or tracker:
            raise InputError(f"track {run}: --follow and --tracker are for runs, got a channel; leave them out")
        _tracking_told(control, {"channel": run}, control.track_channel(run), output)
        return
    run_id = control.run(run).id
    if follow:
        control.follow(run_id)
        return
    chosen: dict[str, Any] = {}
    if tracker:
        from posttrain.app.workspace import read_choice

        chosen = read_choice(tracker)
    _tracking_told(control, {"run": run_id}, control.track(run_id, chosen), output)


def _tracking_told(control: Control, what: dict[str, str], found: list[TrackerState], output: Output) -> None:
    answer_json(output, lambda: {**what, "trackers": [one.to_json() for one in found]})
    from posttrain.cli.screens import tracker_lines

    show(*tracker_lines(found))
