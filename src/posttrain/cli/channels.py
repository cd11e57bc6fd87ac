"""`channel`: what every release of a channel must pass, and who may move it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    answer_json,
    aside,
    digest,
    harmless,
    lazily,
    moment,
    open_control,
    say,
)

if TYPE_CHECKING:
    from posttrain.domain.policies import PinnedPolicy
    from posttrain.domain.records import Event

app = typer.Typer(
    help="Say what every release of a channel must pass, and whether it may move.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
ChannelArgument = Annotated[str, typer.Argument(autocompletion=lazily("channels"))]
ReasonOption = Annotated[str, typer.Option(help="Why; kept in the event log.", show_default=False)]


@app.command("policy")
def policy(
    channel: ChannelArgument,
    history: Annotated[bool, typer.Option("--history", help="Every policy that it had, and who set it.")] = False,
    asked: Annotated[
        str | None, typer.Option("--asked", metavar="REQUEST", help="The one that an approval request asks for.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print a channel's policy, as a file that `set-policy` takes."""
    control = open_control()
    pinned, told = control.policy(channel, asked), control.policies(channel) if history else []
    shown = {"digest": pinned.digest, "policy": pinned.policy.to_json()} if pinned else {"digest": None, "policy": None}
    past = {"history": [_set_by(event) for event in told]} if history else {}
    answer_json(output, lambda: {"channel": channel, **shown, **past})
    if history:
        say(*(_history_line(event) for event in told))
        if not told:
            say(f"channel {channel} never had a policy")
    elif pinned is None:
        say(f"channel {channel} has no policy; next: posttrain channel set-policy {channel} POLICY.yaml")
    else:
        say(f"# channel {channel}, policy {pinned.digest}", harmless(_yaml(pinned)).rstrip(), quoted=True)


@app.command("set-policy")
def set_policy(
    channel: ChannelArgument,
    file: Annotated[Path, typer.Argument(metavar="POLICY.yaml", help="Gates, suites, approvers.")],
) -> None:
    """Let every release of a channel pass a policy from now on. What was judged under another must be judged again."""
    control = open_control()
    before = control.channel_record(channel)
    pinned, notes = control.set_policy(channel, file)
    now = control.channel(channel)
    aside(*(f"warning: {note}" for note in notes))
    if now.record == before:
        say(f"channel {channel} has this policy already ({digest(pinned.digest)})")
        return
    gates, suites = len(pinned.policy.gates), len(pinned.policy.suites)
    counted = f"{gates} gate{'s' if gates > 1 else ''} on {suites} suite{'s' if suites > 1 else ''}"
    say(f"channel {channel}: policy {digest(pinned.digest)}, {counted}")
    if now.live is not None:
        say(f"release {now.live.sequence} stays live; the policy holds from the next release on")


@app.command("remove-policy")
def remove_policy(channel: ChannelArgument) -> None:
    """Let releases pass what their run files say, and nothing else."""
    control = open_control()
    had = control.channel_record(channel).policy
    control.remove_policy(channel)
    say(f"channel {channel} has no policy{f' any more; it was {digest(had)}' if had else ''}")


@app.command("protect")
def protect(channel: ChannelArgument, reason: ReasonOption = "") -> None:
    """Make releases to a channel, and changes of its policy and quarantine, wait for another person's approval."""
    open_control().protect(channel, protected=True, why=reason)
    say(f"channel {channel} is protected: releases and changes of its policy wait for another person's approval")


@app.command("unprotect")
def unprotect(channel: ChannelArgument, reason: ReasonOption = "") -> None:
    """End the protection of a channel; another person approves that first."""
    open_control().protect(channel, protected=False, why=reason)
    say(f"channel {channel} is not protected")


@app.command("freeze")
def freeze(
    channel: ChannelArgument,
    reason: ReasonOption = "",
    rollbacks: Annotated[bool, typer.Option("--rollbacks", help="No rollback either.")] = False,
) -> None:
    """Let nothing be released to a channel; rollbacks go on, unless --rollbacks stops them too."""
    from posttrain.cli.screens import frozen_by

    control = open_control()
    before = control.channel_record(channel)
    after = control.freeze(channel, rollbacks=rollbacks, why=reason)
    told = control.channel(channel).frozen
    still = "rollbacks are stopped too" if rollbacks else "rollbacks go on"
    if after == before and told is not None:
        say(f"channel {channel} was frozen already, {frozen_by(told)}; {still}")
        if reason:
            aside("warning: the reason is not recorded, for nothing changed; posttrain channel unfreeze comes first")
        return
    say(f"channel {channel} is frozen; {still}")


@app.command("unfreeze")
def unfreeze(channel: ChannelArgument, reason: ReasonOption = "") -> None:
    """Let a channel move again."""
    control = open_control()
    before = control.channel_record(channel)
    after = control.unfreeze(channel, why=reason)
    if after == before:
        say(f"channel {channel} was not frozen")
        return
    say(f"channel {channel} may move")


def _yaml(pinned: PinnedPolicy) -> str:
    import yaml

    return str(yaml.safe_dump(pinned.policy.to_json(), sort_keys=False, allow_unicode=True))


def _set_by(event: Event) -> dict[str, Any]:
    return {"digest": event.payload["set"]["policy"], "by": event.actor, "at": event.at}


def _history_line(event: Event) -> str:
    found = _set_by(event)
    return f"{moment(event.at)}  {digest(found['digest']) if found['digest'] else 'no policy'}  {event.actor}"
