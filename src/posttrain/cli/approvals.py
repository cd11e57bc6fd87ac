"""`approve`, `reject`: what a channel's policy leaves to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import Output, OutputOption, emit_json, open_control, say
from posttrain.cli.shell import lazily
from posttrain.domain.approvals import WITHDRAWN
from posttrain.domain.canonical import DIGEST_PREFIX

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.domain.approvals import Standing

WhatArgument = Annotated[
    str,
    typer.Argument(metavar="RUN|REQUEST", help="A run, or sha256:… as get shows it.", autocompletion=lazily("runs")),
]
ChannelOption = Annotated[str | None, typer.Option(help="Of a run, another one than its run file names.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (approve, reject):
        app.command(command.__name__)(command)


def approve(
    what: WhatArgument, channel: ChannelOption = None, reason: ReasonOption = "", output: OutputOption = Output.TEXT
) -> None:
    """Approve a release, or another request, as an approver that the channel's policy names. Not one's own."""
    control = open_control()
    found = control.approve(_named(control, what), channel, reason)
    control.close()
    if output is Output.JSON:
        emit_json(found.to_json())
        return
    missing = f"; {found.words}" if found.missing else ": it has all approvals that it needs"
    said = "rejection withdrawn" if found.said == WITHDRAWN else found.said
    say(f"{_what(found)} {said}{missing}", *([_next(found)] if not found.missing else []))


def reject(
    what: WhatArgument, channel: ChannelOption = None, reason: ReasonOption = "", output: OutputOption = Output.TEXT
) -> None:
    """Reject a release, or another request: the release stage that waits for it ends. `approve` takes it back."""
    control = open_control()
    found = control.reject(_named(control, what), channel, reason)
    control.close()
    if output is Output.JSON:
        emit_json(found.to_json())
        return
    say(f"{_what(found)} rejected")


def _named(control: Control, what: str) -> str:
    return what if what.startswith(DIGEST_PREFIX) else control.run(what).id


def _what(found: Standing) -> str:
    return f"channel {found.request.channel}: {found.request.words}"


def _next(found: Standing) -> str:
    run = found.request.run_id
    return f"next: posttrain get {run}" if run else "next: whoever asked for it asks again"
