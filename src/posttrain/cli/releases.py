"""Commands for channels and releases: moves, origins, approvals and policies.

`promote` and `rollback` move a channel. `lineage` shows a model's origin, and `verify` checks the origin. `approve` and
`reject` decide requests that wait for a person. `channel` sets the gates that every release to a channel must pass, and
protects or freezes the channel. `gate check` judges gates on results of evaluations elsewhere, without a workspace.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    answer_json,
    aside,
    branch,
    console,
    digest,
    emit_json,
    harmless,
    lazily,
    moment,
    open_control,
    say,
    show,
    tinted,
)
from posttrain.cli.drive import RunArgument
from posttrain.domain.approvals import WITHDRAWN, ApprovalStatus
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, IntegrityError

if TYPE_CHECKING:
    from rich.tree import Tree

    from posttrain.api.control import Control
    from posttrain.api.values import Node
    from posttrain.domain.policies import PinnedPolicy
    from posttrain.domain.records import Event

_KIND_STYLES = {"release": "bold green", "run": "bold", "model": "bold cyan", "reward": "magenta", "dataset": "blue"}
_CUT = 72  # maximum characters of a detail, such as a guideline, in a tree on a terminal
WhatArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|REQUEST",
        help="Run, or digest of a request, sha256:…, as shown by get.",
        autocompletion=lazily("runs"),
    ),
]
ChannelOption = Annotated[str | None, typer.Option(help="With a run: overrides the channel of its run file.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; recorded in the event log.")]
gate_app = typer.Typer(
    help="Judge gates on results of evaluations elsewhere.", no_args_is_help=True, rich_markup_mode=None
)
app = typer.Typer(
    help="Set the policy, protection and freeze of a channel.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
ChannelArgument = Annotated[str, typer.Argument(autocompletion=lazily("channels"))]
WhyOption = Annotated[str, typer.Option(help="Reason; recorded in the event log.", show_default=False)]


def promote(
    run: RunArgument,
    channel: Annotated[str | None, typer.Option(help="Channel; default: the one that the run file names.")] = None,
    lift_quarantine: Annotated[
        str | None,
        typer.Option(
            metavar="REASON",
            help="Lift the quarantine of a model that was rolled back, for this reason.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Point a channel at a run's model.

    Every gate must have passed, and the channel must not have moved since the gates were judged.
    """
    lift = _reason(lift_quarantine)
    control = open_control()
    run_id = control.run(run).id
    release = control.manifest(run_id).release
    if channel is None and release is None:
        raise InputError(f"promote {run_id}: its run file names no channel; name one with --channel")
    name = channel or (release.channel if release else "")
    entry = control.promote(run_id, name, lift)
    answer_json(output, lambda: asdict(entry))
    say(f"{name} points at {digest(entry.model_digest)} of run {entry.run_id} (release {entry.sequence})")


def _reason(given: str | None) -> str:
    """Return the reason for lifting a quarantine; "" if the option was not given."""
    if given is not None and not given.strip():
        raise InputError("--lift-quarantine must give a reason, got an empty text")
    return given or ""


def rollback(
    channel: Annotated[str, typer.Argument(autocompletion=lazily("channels"))],
    to: Annotated[
        str | None,
        typer.Option(
            help="Release number, run id or model digest; default: the newest earlier one that is not quarantined."
        ),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option("--from", help="Release that must be live, so that a repeated command rolls back once."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason; recorded in the event log.")] = "",
    lift_quarantine: Annotated[
        str | None,
        typer.Option(
            metavar="REASON", help="Lift the quarantine of the model of --to, for this reason.", show_default=False
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Point a channel back at an earlier release.

    The channel then points at the release that --to names. Without --to, it points at the newest earlier
    release that is not quarantined; a quarantined release needs --to and --lift-quarantine. No gate is judged.
    """
    lift = _reason(lift_quarantine)
    control = open_control()
    before = control.channel(channel).live
    entry = control.rollback(channel, to, since, reason, lift)
    answer_json(output, lambda: asdict(entry))
    if before and before.sequence == entry.sequence:
        say(f"{channel} already serves {digest(entry.model_digest)} (release {entry.sequence}); nothing changed")
        return
    now = control.channel(channel)
    frozen = now.record.frozen
    gone = before and any(one.model_digest == before.model_digest and not one.lifted_at for one in now.quarantine)
    was = f"; it was {digest(before.model_digest)} of run {before.run_id}" if before else ""
    say(f"{channel} points at {digest(entry.model_digest)} of run {entry.run_id} (release {entry.sequence}){was}")
    if before and gone:
        back = f"posttrain rollback {channel} --to {before.sequence} --lift-quarantine REASON"
        say(f"{digest(before.model_digest)} is quarantined in this channel; this command releases it again: {back}")
    if frozen:
        say(f"channel {channel} stays frozen; posttrain channel unfreeze {channel} allows releases again")


def lineage(
    target: Annotated[str, typer.Argument(metavar="CHANNEL|RUN|ASSET", autocompletion=lazily("lineages"))],
    output: OutputOption = Output.TEXT,
    downstream: Annotated[
        bool,
        typer.Option(
            "--downstream",
            help="Show everything made from the object: stages, models, releases. The object may also be a digest.",
        ),
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=10**6, help="With --downstream: maximum number of objects, nearest first.")
    ] = 200,
) -> None:
    """Print the tree from weights back to their sources.

    The sources are the prompts, the reward's source, the base model and the manifest.
    """
    control = open_control()
    found = control.downstream(target, limit) if downstream else None
    node = found.tree if found else control.lineage(target)
    names = ("runs", "releases", "live", "left_off") if found else ()
    answer_json(output, lambda: {**_as_json(node), **{name: getattr(found, name) for name in names}})
    console().print(_tree(node))
    if found:
        say(found.words)


def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHANNEL|RUN|ASSET]",
            help="Default: the models that channels point at.",
            autocompletion=lazily("lineages"),
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Verify the hashes of a lineage and of the event log. The exit code is 8 if a hash does not match."""
    report = open_control().verify(target or "")
    target = target or (f"channels {', '.join(report.channels)}" if report.channels else "no channel has a release")
    if output is Output.JSON:
        emit_json({**asdict(report), "ok": not report.problems})
    else:
        size = f"{report.bytes / 2**20:.1f} MiB"
        erased = f", {report.erased} of them with erased words" if report.erased else ""
        say(f"{target}: hashed {report.checked} artifacts again ({size}) and {report.events} sealed events{erased}")
        say(*(f"  problem: {problem}" for problem in report.problems))
        say(*(f"  not verified here: {line}" for line in report.elsewhere))
        if not report.problems:
            say("everything else matches" if report.elsewhere else "everything matches")
    if report.problems:
        raise IntegrityError(f"{target}: {len(report.problems)} problem(s), the first: {report.problems[0]}")


def _tree(node: Node) -> Tree:
    from rich.tree import Tree

    root = Tree(_label(node), guide_style="dim")
    root.children.extend(map(_tree, node.children))
    return root


def _label(node: Node) -> Any:
    from rich.text import Text

    label = Text.assemble((node.kind, _KIND_STYLES.get(node.kind, "default")), f" {node.name}")
    if node.digest:
        label.append(f"  {digest(node.digest)}", style="dim")
    for key, value in node.details:
        flat = digest(value) if value.startswith("sha256:") else " ".join(value.split())
        whole = len(flat) <= _CUT or not sys.stdout.isatty()
        label.append(f"  {key}: {flat if whole else flat[: _CUT - 1] + '…'}", style="dim")
    return branch(label)


def _as_json(node: Node) -> dict[str, Any]:
    return {
        "kind": node.kind,
        "name": node.name,
        "digest": node.digest,
        "details": dict(node.details),
        "children": [_as_json(child) for child in node.children],
    }


def approve(
    what: WhatArgument, channel: ChannelOption = None, reason: ReasonOption = "", output: OutputOption = Output.TEXT
) -> None:
    """Approve a release or another request.

    If the channel's policy names approvers, you must be among them; otherwise you need the role approver or admin. You
    cannot approve your own request.
    """
    control = open_control()
    named = _named(control, what)
    card = None if output is Output.JSON or named.startswith(DIGEST_PREFIX) else control.why(named)  # read first
    found = control.approve(named, channel, reason)
    answer_json(output, found.to_json)
    from posttrain.cli.screens import card_lines

    console().print(*card_lines(card), sep="\n", end="\n" if card else "")
    missing = f"; {found.words}" if found.missing else ": it has all approvals that it needs"
    said = "rejection withdrawn" if found.said == WITHDRAWN else found.said
    say(f"{_what(found)} {said}{missing}", *([_next(found)] if not found.missing else []))


def reject(
    what: WhatArgument, channel: ChannelOption = None, reason: ReasonOption = "", output: OutputOption = Output.TEXT
) -> None:
    """Reject a release or another request.

    A release stage that waits for the approval ends. `approve` withdraws the rejection.
    """
    control = open_control()
    found = control.reject(_named(control, what), channel, reason)
    answer_json(output, found.to_json)
    say(f"{_what(found)} rejected")


def _named(control: Control, what: str) -> str:
    return what if what.startswith(DIGEST_PREFIX) else control.run(what).id


def _what(found: ApprovalStatus) -> str:
    return f"channel {found.request.channel}: {found.request.words}"


def _next(found: ApprovalStatus) -> str:
    run = found.request.run_id
    return f"next: posttrain get {run}" if run else "next: the requester must repeat the command"


@app.command("policy")
def policy(
    channel: ChannelArgument,
    history: Annotated[
        bool, typer.Option("--history", help="List every policy that the channel had, and who set it.")
    ] = False,
    asked: Annotated[
        str | None,
        typer.Option("--asked", metavar="REQUEST", help="Print the policy that an approval request proposes."),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print a channel's policy as a file for `set-policy`."""
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
    file: Annotated[Path, typer.Argument(metavar="POLICY.yaml", help="File with gates, suites and approvers.")],
) -> None:
    """Set the policy that every release of a channel must pass.

    The policy applies from the next release on. A model that was judged under another policy must be judged again.
    """
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
        say(f"release {now.live.sequence} stays live; the policy applies from the next release")


@app.command("remove-policy")
def remove_policy(channel: ChannelArgument) -> None:
    """Remove a channel's policy. Releases then need to pass only the gates of their run files."""
    control = open_control()
    had = control.channel_record(channel).policy
    control.remove_policy(channel)
    say(f"channel {channel} has no policy{f' now; it was {digest(had)}' if had else ''}")


@app.command("protect")
def protect(channel: ChannelArgument, reason: WhyOption = "") -> None:
    """Require another person's approval for changes to a channel.

    Releases, and changes of the policy and the quarantine, wait for the approval. Protection requires a second member
    with the role approver (`posttrain member set`), who logs in to a server (`posttrain serve`).
    """
    open_control().protect(channel, protected=True, why=reason)
    say(f"channel {channel} is protected: releases and changes of its policy wait for another person's approval")


@app.command("unprotect")
def unprotect(channel: ChannelArgument, reason: WhyOption = "") -> None:
    """End the protection of a channel. Another person must approve this change first."""
    open_control().protect(channel, protected=False, why=reason)
    say(f"channel {channel} is not protected")


@app.command("freeze")
def freeze(
    channel: ChannelArgument,
    reason: WhyOption = "",
    rollbacks: Annotated[bool, typer.Option("--rollbacks", help="Stop rollbacks too.")] = False,
) -> None:
    """Stop releases to a channel. Rollbacks remain possible, unless --rollbacks stops them too."""
    from posttrain.cli.screens import frozen_by

    control = open_control()
    before = control.channel_record(channel)
    after = control.freeze(channel, rollbacks=rollbacks, why=reason)
    told = control.channel(channel).frozen
    still = "rollbacks are stopped too" if rollbacks else "rollbacks are allowed"
    if after == before and told is not None:
        say(f"channel {channel} was frozen already, {frozen_by(told)}; {still}")
        if reason:
            aside("warning: the reason is not recorded, since nothing changed; run posttrain channel unfreeze first")
        return
    say(f"channel {channel} is frozen; {still}")


@app.command("unfreeze")
def unfreeze(channel: ChannelArgument, reason: WhyOption = "") -> None:
    """Allow releases to a frozen channel again."""
    control = open_control()
    before = control.channel_record(channel)
    if control.unfreeze(channel, why=reason) == before:
        say(f"channel {channel} was not frozen")
        return
    say(f"channel {channel} is no longer frozen")


def _yaml(pinned: PinnedPolicy) -> str:
    import yaml

    return str(yaml.safe_dump(pinned.policy.to_json(), sort_keys=False, allow_unicode=True))


def _set_by(event: Event) -> dict[str, Any]:
    return {"digest": event.payload["set"]["policy"], "by": event.actor, "at": event.at}


def _history_line(event: Event) -> str:
    found = _set_by(event)
    return f"{moment(event.at)}  {digest(found['digest']) if found['digest'] else 'no policy'}  {event.actor}"


@gate_app.command("check")
def check_gates(
    gates: Annotated[Path, typer.Argument(metavar="GATES.yaml", help="File with gates, as in run.yaml.")],
    results: Annotated[
        list[Path],
        typer.Option(
            metavar="PATH",
            help="Results of the model: metrics.parquet, a results file of lm-eval, a log of Inspect, or a folder of "
            "these; repeat for several.",
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Results of the model with which gates compare; repeat for several.",
            show_default=False,
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with the verdicts.", show_default=False)
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Judge gates on results of evaluations elsewhere. The command needs no workspace.

    The command ends with 0 if every gate passes, with 4 if a gate is inconclusive, with 3 if a gate fails, and with 2
    if a gate cannot be judged on these results.
    """
    from posttrain.app.gates import check_gates, write_gate_page
    from posttrain.cli.screens import verdict_lines

    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--page: must be the name of an .html file, got {page}; rename it")
    found = check_gates(gates, results, against or ())
    if output is Output.JSON:
        emit_json(found.to_json())
    else:
        show(*verdict_lines(found.report.verdicts), *(tinted(line, "dim") for line in found.unjudged))
    aside(*(f"note: {note}" for note in found.notes))
    if page is not None:
        write_gate_page(page, found, gates)
        aside(f"page: {page}")
    if found.outcome:
        raise found.outcome
