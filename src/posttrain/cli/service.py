"""Commands `serve`, `serve-model`, `login`, `logout`, and those for roles: `whoami`, `project`, `member`, `token`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import Output, OutputOption, answer_json, aside, moment, open_control, say
from posttrain.cli.models import DeviceOption, DtypeOption, ModelArgument, ThreadsOption
from posttrain.domain.errors import InputError, nearest
from posttrain.domain.ids import PROJECT_VARIABLE, SERVER_VARIABLE

if TYPE_CHECKING:
    from posttrain.api.assets import Issued
    from posttrain.domain.records import Token


project_app = typer.Typer(
    help="Manage the projects of a server and their images.", no_args_is_help=True, rich_markup_mode=None
)
member_app = typer.Typer(
    help="Manage the roles of people and services in a project.", no_args_is_help=True, rich_markup_mode=None
)
token_app = typer.Typer(
    help="Manage the tokens that identify callers to a server.", no_args_is_help=True, rich_markup_mode=None
)
ServerArgument = Annotated[str, typer.Argument(metavar="URL", help="Server, as http://127.0.0.1:8460 or https://HOST.")]
PrincipalArgument = Annotated[str, typer.Argument(metavar="PRINCIPAL", help="user:NAME or service:NAME.")]
DaysOption = Annotated[float, typer.Option(help="Days until the token expires; at most 366.")]
_IMAGE = typer.Argument(metavar="IMAGE", help="REGISTRY/NAME@sha256:…, or REGISTRY/NAME@* for every digest.")


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8460,
    tls_certificate: Annotated[Path | None, typer.Option(help="TLS certificate: PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate: PEM file.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of the server terminates TLS.")
    ] = False,
    advertise: Annotated[
        str, typer.Option(metavar="URL", help="Address at which servers of other hosts reach this server.")
    ] = "",
    log_format: Annotated[str, typer.Option(help="json or text; default: text on a terminal, else json.")] = "",
    log_level: Annotated[str, typer.Option(help="Lowest level: debug, info, warning or error.")] = "info",
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Do not print the first token, for output that is stored.")
    ] = False,
) -> None:
    """Serve the workspace to a team over HTTP. The server offers the same operations and drives every run."""
    from posttrain.app.workspace import open_workspace

    try:
        from posttrain.server.logs import Logging
        from posttrain.server.service import Bind, Telling, serve
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve needs the extra `server` ({error.name} is missing): pip install -e '.[server]' -c constraints.txt"
        ) from error
    with closing(open_workspace()) as workspace:
        bind = Bind(host, port, tls_certificate, tls_key, behind_proxy, advertise)
        serve(workspace, bind, _say_now, Telling(Logging(log_format, log_level), token=not no_token))


def login(
    url: ServerArgument,
    project: Annotated[
        str | None, typer.Option(help="Project of later commands; default: the token's.", show_default=False)
    ] = None,
) -> None:
    """Store a token for a project of a server.

    The command prompts for the token, or reads the token from stdin if stdin is not a terminal.
    """
    from posttrain.client.logins import log_in, login_of, project_of
    from posttrain.client.remote import remote_control
    from posttrain.client.transport import Transport

    Transport(url, "").look("/v1/version")  # without a server, fail before the prompt
    token = str(typer.prompt("token", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()).strip()
    project = project_of(Transport(url, token), project or os.environ.get(PROJECT_VARIABLE, ""))
    found = remote_control(url, token, project).whoami()
    log_in(url, token, project)
    say(f"logged in to {url} as {found.principal}, {found.role or 'no role'} of {project}")
    others = [name for name in login_of(url).tokens if name != project]
    if others:
        say(f"also logged in there to {', '.join(others)}; commands without --project use {project}")
    if os.environ.get(SERVER_VARIABLE, "").rstrip("/") != url.rstrip("/"):
        say(f"next: export {SERVER_VARIABLE}={url}")


def logout(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Server; default: POSTTRAIN_SERVER.", show_default=False)
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="Project; default: that of commands without --project.", show_default=False)
    ] = None,
) -> None:
    """Delete the stored token for a project of a server. The token stays valid until `token revoke`."""
    from posttrain.client.logins import TOKEN_VARIABLE, log_out, login_of, servers

    url = url or os.environ.get(SERVER_VARIABLE)
    known = servers()
    if not url:
        which = f"you are logged in to {', '.join(known)}" if known else "you are logged in nowhere"
        raise InputError(f"logout: name the URL of a server, because {SERVER_VARIABLE} is not set; {which}")
    project = project or os.environ.get(PROJECT_VARIABLE, "")
    found, left = log_out(url, project), login_of(url).tokens
    if found:
        say(f"the token of {found} for {url} was deleted")
    elif left:
        say(f"there was no token of {project} for {url}{nearest(project, left)}")
    else:
        say(f"there was no token for {url}{nearest(url, known)}")
    if found and left:
        say(f"you are still logged in there to {', '.join(left)}: --project NAME selects the one to leave")
    if os.environ.get(TOKEN_VARIABLE):
        aside(f"warning: {TOKEN_VARIABLE} is set, and commands still use that token; unset it")


def whoami(output: OutputOption = Output.TEXT) -> None:
    """Show who you are, and what you may do."""
    found = open_control().whoami()
    answer_json(output, lambda: asdict(found))
    say(f"{found.principal}, {found.role or 'no role'} of {found.project} (identified by {found.auth})")
    others = [f"{role} of {name}" for name, role in found.projects.items() if name != found.project]
    if others:
        say(f"also {', '.join(others)}")


@project_app.command("add")
def project_add(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Create a project and become its admin. The caller must be an admin of the project `default`."""
    open_control().add_project(name)
    say(f"project {name} created; commands with --project {name}, or POSTTRAIN_PROJECT={name}, use it")


@project_app.command("ls")
def project_ls(output: OutputOption = Output.TEXT) -> None:
    """List the projects in which you have a role."""
    found = open_control().whoami()
    known = {found.project: found.role or "none", **found.projects}
    answer_json(output, lambda: known)
    say(*(f"{name}  {role}" for name, role in sorted(known.items())))


@project_app.command("images")
def project_images(output: OutputOption = Output.TEXT) -> None:
    """List the images that run files of the project may name."""
    found = open_control().images()
    answer_json(output, lambda: found)
    if found is None:
        say(
            "no list of images is set: runs submitted over a server must not name an image; runs submitted in the "
            "workspace's folder may name any image"
        )
    else:
        say(*(found or ["none"]))


@project_app.command("allow-image")
def project_allow_image(image: Annotated[str, _IMAGE]) -> None:
    """Allow runs of the project to name an image. Over a server, such runs may also bring their own recipe."""
    open_control().allow_image(image)
    say(f"runs may name {image}")


@project_app.command("remove-image")
def project_remove_image(image: Annotated[str, _IMAGE]) -> None:
    """Stop allowing new runs of the project to name an image.

    Runs that were submitted before keep their image; `posttrain stop` ends such a run.
    """
    open_control().remove_image(image)
    say(f"no new run may name {image}")


@member_app.command("ls")
def member_ls(output: OutputOption = Output.TEXT) -> None:
    """List everyone with a role in the project."""
    found = open_control().members()
    answer_json(output, lambda: found)
    say(*(f"{name}  {role}" for name, role in found.items()))
    if not found:
        say("no one has a role, so every user who can open the workspace is an admin")


@member_app.command("set")
def member_set(
    principal: PrincipalArgument,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="viewer, submitter, approver or admin.")],
) -> None:
    """Give a person or service a role in the project. The new role replaces an earlier role."""
    open_control().set_member(principal, role)
    say(
        f"{principal} is {role}; tokens that were issued before keep their role; issue a new token: posttrain token "
        f"issue {principal}"
    )


@member_app.command("remove")
def member_remove(principal: PrincipalArgument) -> None:
    """Remove a person's or service's role. Tokens of that principal become invalid in this project immediately."""
    open_control().set_member(principal, None)
    say(f"{principal} no longer has a role")


@token_app.command("issue")
def token_issue(
    principal: PrincipalArgument,
    role: Annotated[str | None, typer.Option(help="Highest role of the token; default: the member's.")] = None,
    days: DaysOption = 30.0,
    channel: Annotated[
        str | None, typer.Option(help="Issue a key that only calls the served model of this channel.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Issue a token for a person or service. The command shows the token once and does not store it."""
    control = open_control()
    issued = control.issue_token(principal, role, days, channel)
    if channel is None and principal not in control.members():
        aside(f"warning: {principal} has no role here; the token grants nothing until posttrain member set {principal}")
    _show(issued, output)


@token_app.command("rotate")
def token_rotate(
    token: Annotated[str, typer.Argument(metavar="ID")], days: DaysOption = 30.0, output: OutputOption = Output.TEXT
) -> None:
    """Replace a token with a new token. The old token becomes invalid immediately."""
    _show(open_control().rotate_token(token, days), output)


@token_app.command("revoke")
def token_revoke(token: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a token. The token becomes invalid immediately; a served model rejects it within five seconds."""
    open_control().revoke_token(token)
    say(f"token {token} is revoked")


@token_app.command("ls")
def token_ls(output: OutputOption = Output.TEXT) -> None:
    """List the tokens of the project. The secrets of tokens are not stored and therefore not shown."""
    found = open_control().tokens()
    answer_json(output, lambda: [asdict(one) for one in found])
    say(*(_line(one) for one in found) if found else ["no tokens; posttrain token issue PRINCIPAL issues one"])


def _show(issued: Issued, output: Output) -> None:
    token = issued.token
    answer_json(output, lambda: {"secret": issued.secret, **asdict(token)})
    until, key = moment(token.expires_at), _permits(token).startswith("calls ")
    say(
        f"token {token.id} of {token.actor}, {'' if key else 'with at most the role '}{_permits(token)}, valid until "
        f"{until}; it is shown only once:",
        issued.secret,
    )


def _line(token: Token) -> str:
    what = (
        "revoked" if token.revoked_at else f"ends {moment(token.expires_at)}"
    )  # whether the token has ended depends on the server's clock
    return f"{token.id}  {token.actor}  {_permits(token)}  {what}"


def _permits(token: Token) -> str:
    """Return what a token permits."""
    from posttrain.domain.records import CALLS

    [(project, scope)] = token.scopes.items()
    called = scope.removeprefix(CALLS)
    return f"{scope} of {project}" if called == scope else f"calls channel {called} of {project}"


def _say_now(line: str) -> None:
    """Print a line and flush it, so that a reader of a pipe gets it immediately."""
    say(line)
    sys.stdout.flush()


def serve_model(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8470,
    name: Annotated[str, typer.Option(help="Name of the model in requests; default: the channel or the ref.")] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=MODEL", help="Further adapter of the model's base; repeatable."),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Callers need a key: see posttrain token issue.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Responses that are computed at a time.")] = 256,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; others get status 429.")] = 1024,
    context: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of a prompt with its response; default: the model's.")
    ] = None,
    kv_cache: Annotated[
        float | None,
        typer.Option(min=0.001, help="Maximum GiB of keys and values of each model; default: half of the free memory."),
    ] = None,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for requests in progress after SIGTERM.")] = 60,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = 1,
    tls_certificate: Annotated[Path | None, typer.Option(help="TLS certificate: PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate: PEM file.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of the server terminates TLS.")
    ] = False,
    log_format: Annotated[str, typer.Option(help="json or text; default: text on a terminal, else json.")] = "",
    log_level: Annotated[str, typer.Option(help="Lowest level: debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over an OpenAI-compatible API.

    The server of a channel follows it: it loads each new release beside the old one, and answers with it from the next
    request on.
    """
    from posttrain.app.control import open_here

    try:
        from posttrain.server.logs import Logging
        from posttrain.server.service import Bind
        from posttrain.serving.app import Limits
        from posttrain.serving.service import Serving, serve_model
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve-model needs the extra `server` ({error.name} is missing): pip install -e '.[server]' -c "
            "constraints.txt"
        ) from error
    if os.environ.get(SERVER_VARIABLE):
        raise InputError("serve-model: reads the workspace's folder, got a server; run it on a host of the workspace")
    limits = Limits(concurrency, queue, context or Limits().context)
    runtime = {"device": device, "dtype": dtype, "threads": threads}
    bind = Bind(host, port, tls_certificate, tls_key, behind_proxy)
    named, form = _adapters(adapter or ()), Logging(log_format, log_level)
    cache = None if kv_cache is None else int(kv_cache * 2**30)
    how = Serving(bind, limits, runtime, cache, name=name, adapters=named, keys=keys, drain=drain, log=form)
    with closing(open_here()) as workspace:
        serve_model(workspace, model, how, _say_now)


def _adapters(words: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, mark, model = word.partition("=")
        if not (name and mark and model) or name in found:
            raise InputError(f"serve-model: --adapter must be NAME=MODEL with a new name, got {word!r}; change it")
        found[name] = model
    return found
