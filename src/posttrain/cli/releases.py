"""`promote`, `rollback`, `lineage`, `verify`: what is live, where it came from, and the proof."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import Output, OutputOption, branch, console, digest, emit_json, say
from posttrain.cli.driving import RunArgument
from posttrain.cli.shell import lazily
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.spelling import nearest

if TYPE_CHECKING:
    from rich.tree import Tree

    from posttrain.app.workspace import Workspace
    from posttrain.control.downstream import Downstream
    from posttrain.control.lineage import Node

_KIND_STYLES = {"release": "bold green", "run": "bold", "model": "bold cyan", "reward": "magenta", "dataset": "blue"}
_CUT = 72  # characters of a detail (a guideline, say) on a terminal's tree


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (promote, rollback, lineage, verify):
        app.command(command.__name__)(command)


def promote(
    run: RunArgument,
    channel: Annotated[str | None, typer.Option(help="By default the channel its run file names.")] = None,
    lift_quarantine: Annotated[
        str,
        typer.Option(metavar="REASON", help="Why a model that was rolled back may come back.", show_default=False),
    ] = "",
) -> None:
    """Point a channel at a run's model. Only if every gate passed and the channel has not moved since."""
    from posttrain.app import runs
    from posttrain.app.workspace import open_workspace

    workspace = open_workspace()
    handle = runs.run(run, workspace)
    release = handle.manifest.release
    if channel is None and release is None:
        raise InputError(f"promote {handle.id}: its run file names no channel; say which with --channel")
    name = channel or (release.channel if release else "")
    entry = handle.promote(name, lift_quarantine=lift_quarantine)
    workspace.seal()
    say(f"{name} points at {digest(entry.model_digest)} of run {entry.run_id} (release {entry.sequence})")
    workspace.close()


def rollback(
    channel: Annotated[str, typer.Argument(autocompletion=lazily("channels"))],
    to: Annotated[
        str | None, typer.Option(help="A release number, run id or model digest; the model before by default.")
    ] = None,
    since: Annotated[
        int | None, typer.Option("--from", help="The release that must be live: a repeated rollback goes back once.")
    ] = None,
) -> None:
    """Point a channel back at the model it served before. Waits for no gate."""
    from posttrain.app import channels
    from posttrain.app.workspace import open_workspace

    workspace = open_workspace()
    handle = channels.channel(channel, workspace)
    before = handle.live
    entry = handle.rollback(to, since=since)
    frozen = handle.record.frozen
    was = f"; it was {digest(before.model_digest)} of run {before.run_id}" if before else ""
    say(f"{channel} points at {digest(entry.model_digest)} of run {entry.run_id} (release {entry.sequence}){was}")
    if frozen:
        say(f"it stays frozen: nothing is released to it until posttrain channel unfreeze {channel}")
    workspace.close()


def lineage(
    target: Annotated[str, typer.Argument(metavar="CHANNEL|RUN|ASSET", autocompletion=lazily("lineages"))],
    output: OutputOption = Output.TEXT,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="What was made from it: stages, models, releases. Takes a digest too.")
    ] = False,
) -> None:
    """Print the tree from weights back to their sources: prompts, reward source, base model and manifest."""
    from posttrain.app.workspace import open_workspace

    workspace = open_workspace()
    found = _downstream(workspace, target) if downstream else None
    node = found.tree if found else _lineage(workspace, target)
    workspace.close()
    if output is Output.JSON:
        more = {"runs": found.runs, "releases": found.releases, "live": found.live} if found else {}
        emit_json({**_as_json(node), **{key: list(names) for key, names in more.items()}})
        return
    console().print(_tree(node))
    if found:
        say(found.words)


def verify(
    target: Annotated[str, typer.Argument(metavar="CHANNEL|RUN|ASSET", autocompletion=lazily("lineages"))],
    output: OutputOption = Output.TEXT,
) -> None:
    """Hash a lineage and the event chain again. Exit code 8 when something does not match."""
    from posttrain.app.workspace import open_workspace
    from posttrain.control.lineage import verify as verify_tree

    workspace = open_workspace()
    workspace.seal()
    report = verify_tree(workspace.wiring, _lineage(workspace, target))
    workspace.close()
    if output is Output.JSON:
        emit_json({**asdict(report), "ok": not report.problems})
    else:
        size = f"{report.bytes / 2**20:.1f} MiB"
        erased = f", of {report.erased} the words were erased" if report.erased else ""
        older = f", {report.before} of before the upgrade" if report.before else ""
        events = f"{report.events} sealed events{older}{erased}"
        say(f"{target}: hashed {report.checked} artifacts again ({size}) and {events}")
        say(*(f"  problem: {problem}" for problem in report.problems))
        if not report.problems:
            say("everything matches")
    if report.problems:
        raise IntegrityError(f"{target}: {len(report.problems)} problem(s), the first: {report.problems[0]}")


def _lineage(workspace: Workspace, target: str) -> Node:
    """Of a channel of that name, else of a run; of an asset by its ref."""
    from posttrain.control.lineage import asset_lineage, release_lineage, run_lineage
    from posttrain.data.refs import KINDS

    if target.startswith(DIGEST_PREFIX):
        raise InputError(f"{target[:24]}: a digest alone is followed downstream only; add --downstream")
    if target.partition(":")[0] in KINDS:
        return asset_lineage(workspace.wiring, workspace.catalog.find(target))
    if target in workspace.ledger.channels():
        return release_lineage(workspace.wiring, target)
    return run_lineage(workspace.wiring, _run_id(workspace, target))


def _downstream(workspace: Workspace, target: str) -> Downstream:
    """Of an asset's bytes, of bytes, of what a channel serves, else of a run."""
    from posttrain.control.downstream import of_bytes, of_run
    from posttrain.data.refs import KINDS

    if target.startswith(DIGEST_PREFIX):
        return of_bytes(workspace.wiring, workspace.ledger.find_artifact(target).digest)
    if target.partition(":")[0] in KINDS:
        asset = workspace.catalog.find(target)
        return of_bytes(workspace.wiring, asset.digest, asset.ref)
    live = workspace.ledger.channel(target)
    if live is not None:
        return of_bytes(workspace.wiring, live.model_digest, f"channel:{target}@{live.sequence}")
    return of_run(workspace.wiring, _run_id(workspace, target))


def _run_id(workspace: Workspace, target: str) -> str:
    try:
        return workspace.ledger.find_run(target).id
    except NotFoundError as error:
        if workspace.ledger.channel_record(target).generation:
            raise NotFoundError(f"channel {target}: nothing was released to it yet") from error
        hint = nearest(target, [record.name for record in workspace.ledger.channel_records()])
        raise NotFoundError(f"there is no channel or run {target!r}{hint}; `posttrain ls` shows both") from error


def _tree(node: Node) -> Tree:
    from rich.tree import Tree

    root = Tree(_label(node), guide_style="dim")
    for child in node.children:
        root.children.append(_tree(child))
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
