"""The `posttrain` command: the table of verbs, and the handler that turns an error into one line and an exit code.

This module imports nothing heavy: each command imports its dependencies when it runs, and no command imports the
engine.
"""

import errno
import functools
import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer.main
import typer.utils
from typer.core import TyperGroup
from typer.exceptions import TyperException

from posttrain._version import __version__
from posttrain.cli import (
    assets,
    chat,
    demo,
    drive,
    models,
    releases,
    runs,
    service,
    sinks,
    sweep,
    trace,
    workspace,
)
from posttrain.cli.console import OPENED, aside, ask_at, harmless
from posttrain.cli.usage import CODES, EXAMPLES, GROUPS, HINTS, VERBS
from posttrain.domain.errors import ConflictError, InputError, PosttrainError, unwritable

_BUG = 1
_UNREAD = 128 + signal.SIGPIPE
_ROOT = Path(__file__).parents[1]
_LONGEST = 900  # characters of an error message
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_A_MACHINE = {
    *("init", "demo", "examples", "backup", "restore", "doctor", "executor", "serve", "login", "logout", "gate"),
}


class Commands(TyperGroup):
    """A group of commands that reports an error as one line on stderr and ends with the error's exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the groups."""
        return sorted(super().list_commands(ctx), key=VERBS.index)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group under its title, with the first sentence of each command's help."""
        for title, verbs in GROUPS.items():
            commands = [(verb, self.get_command(ctx, verb)) for verb in verbs]
            with formatter.section(title):
                formatter.write_dl(
                    [(verb, one.get_short_help_str(formatter.width - 14)) for verb, one in commands if one]
                )

    def make_context(self, *words: Any, **options: Any) -> Any:
        """Parse the options before the command; report an error as one line."""
        try:
            return super().make_context(*words, **options)
        except TyperException as error:
            _refuse_usage(error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the named command; reject a name from another tool, with a hint that names the matching command."""
        hint = None if self.get_command(ctx, args[0]) else HINTS.get(args[0].lower())
        if hint:
            ctx.fail(f"No such command {args[0]!r}: {hint}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command and turn its errors into exit codes."""
        try:
            with OPENED:
                return super().invoke(ctx)
        except PosttrainError as error:
            if os.environ.get("POSTTRAIN_DEBUG"):
                traceback.print_exc()
            aside(f"error: {_one_line(error)}")
            raise SystemExit(error.exit_code) from error
        except (RecursionError, UnicodeError) as error:  # only input can be nested too deeply or not be text
            aside(f"error: {_unreadable(error)}")
            raise SystemExit(InputError.exit_code) from error
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise SystemExit(drive.DETACHED) from None
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:  # the reader closed the pipe, as in `posttrain ls | head -1`: no error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # receives output that is still buffered
            raise SystemExit(_UNREAD) from None
        except OSError as error:
            what = error.filename or "the file"
            refused = InputError(f"{what}: {error.strerror or error}; check the path")
            told = unwritable(what, error) if error.errno in _OF_THE_DISK else refused
            aside(f"error: {_one_line(told)}")
            raise SystemExit(told.exit_code) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("click", "typer"):
                _refuse_usage(error)
            changed = _changed(error)
            aside(f"error: {_replaced(changed, error) if changed else _bug(error)}")
            raise SystemExit(ConflictError.exit_code if changed else _BUG) from error


def _exit_codes() -> Iterator[tuple[int, str]]:
    """Yield each error class's exit code and its meaning, which is the class's docstring."""
    yield 0, "success"
    yield _BUG, "an unexpected error: a bug in Posttrain"
    waiting = [PosttrainError]
    while waiting:
        for kind in waiting.pop(0).__subclasses__():
            waiting.append(kind)
            if "exit_code" in vars(kind):
                yield kind.exit_code, (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")
    yield _UNREAD, "the reader of the output closed the pipe (128 + SIGPIPE)"
    yield (
        drive.DETACHED,
        "ended by Ctrl-C: the run continues in the background; without a terminal, only its running jobs continue",
    )


_LINES = {code: f"  {code:3d}  {meaning[:1].lower()}{meaning[1:]}" for code, meaning in sorted(set(_exit_codes()))}
EPILOG = "\b\n" + "\n".join(
    [
        "Exit codes:",
        *_LINES.values(),
        "",
        "\b",
        "Environment:",
        "  POSTTRAIN_WORKSPACE  the workspace folder; default: the nearest .posttrain, here or above",
        "  POSTTRAIN_STORE      the artifact store: a folder or an object-store URL; recorded by init",
        "  POSTTRAIN_SERVER     the server that commands use, with POSTTRAIN_TOKEN and POSTTRAIN_PROJECT",
        "  POSTTRAIN_DEBUG=1    show tracebacks        NO_COLOR=1  no colours",
    ]
)


def _epilog(name: str, typed: str) -> str:
    """Return the end of a command's help: its examples and its exit codes, including those that all commands share."""
    examples = "\n".join(f"  {line}" for line in EXAMPLES[typed])
    own = CODES.get(typed, CODES.get(name, ()))
    codes = "\n".join(["Exit codes: 0, 1, 2, 10, 13 (posttrain --help explains them)", *map(_LINES.__getitem__, own)])
    return f"\b\nExamples:\n{examples}\n\n\b\n{codes}"


app = typer.Typer(
    cls=Commands,
    name="posttrain",
    help="Train, evaluate, release and roll back language models; one run file declares a post-training run.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"posttrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Server to use instead of a local workspace.")
    ] = None,
    project: Annotated[str | None, typer.Option(metavar="NAME", help="Project of the server or workspace.")] = None,
) -> None:
    """Train, evaluate, release and roll back language models; one run file declares a post-training run."""
    for variable, value in (("POSTTRAIN_SERVER", server), ("POSTTRAIN_PROJECT", project)):
        if value is not None:  # this command and its child processes read the variable
            os.environ[variable] = value
    ask_at({"--server": server, "--project": project}, [verb for verb in VERBS if verb not in _OF_A_MACHINE])


for command in (
    *(workspace.init, workspace.erase, workspace.doctor, workspace.gc, workspace.backup, workspace.restore),
    *(demo.demo, demo.examples, drive.plan, drive.lock, drive.run, drive.attach, drive.stop, drive.retry),
    *(runs.signal, runs.dead, sweep.sweep, sweep.compare),
    *(runs.ls, runs.get, runs.logs, runs.why, runs.diff, runs.note),
    *(models.sample, models.evaluate, models.export, releases.promote, releases.rollback, releases.lineage),
    *(releases.verify, releases.approve, releases.reject, trace.trace, sinks.track),
    *(service.serve, service.login, service.logout, service.whoami, service.serve_model, chat.chat),
):
    app.command("eval" if command is models.evaluate else command.__name__.replace("_", "-"))(command)
_GROUPS = {
    "import": assets.imports,
    "channel": releases.app,
    "gate": releases.gate_app,
    "asset": assets.app,
    "harness": assets.harnesses,
    "sink": sinks.app,
    "executor": workspace.executors,
    "project": service.project_app,
    "member": service.member_app,
    "token": service.token_app,
}
for group, part in _GROUPS.items():
    app.add_typer(part, name=group)
for group, part in {"": app, **_GROUPS}.items():
    for verb in part.registered_commands:
        name = str(verb.name or getattr(verb.callback, "__name__", ""))
        verb.epilog = _epilog(name, f"{group} {name}".strip())


def main() -> None:
    """Run the `posttrain` command."""
    # typer evaluates the annotations of all commands three times, which takes a third of the time of `--help`
    skipped, parameters = _not_typed(), typer.utils.get_params_from_function
    vars(typer.main)["get_params_from_function"] = functools.cache(lambda of: {} if of in skipped else parameters(of))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a command must not fail on an ASCII terminal
    app(prog_name="posttrain")


def _not_typed() -> set[Any]:
    """Return the functions of all commands whose name is not among the words of the command line."""
    if "_POSTTRAIN_COMPLETE" in os.environ:  # the words that the shell completes are in the environment
        return set()
    parts = {"": app, **_GROUPS}.items()
    commands = [(group, command) for group, part in parts for command in part.registered_commands]
    typed = {command.callback for group, command in commands if {group or command.name, command.name} <= {*sys.argv}}
    return {command.callback for _, command in commands} - typed


def _one_line(error: BaseException) -> str:
    """Return a message on one line; a very long message is shortened to its beginning and end."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 3 :]}"


def _refuse_usage(error: Any) -> NoReturn:
    """End the command with one line about an error of its words, which typer raised; typer prints help itself."""
    from pydantic import BaseModel, ValidationError

    from posttrain.domain.validation import explain, masked

    refusal = isinstance(error, TyperException) and type(error).__name__ != "NoArgsIsHelpError"  # has no public name
    if not refusal:
        raise error
    within, cause = getattr(error, "ctx", None), error.__cause__
    command = within.command_path if within else "posttrain"
    if isinstance(cause, ValidationError):
        named = error.param.opts[0] if error.param.opts[0].startswith("-") else error.param.metavar or "the value"
        own = cause.errors()[0].get("ctx", {}).get("error")  # typer's own error, whose message quotes the value
        told = f"{named}: {masked(str(own).rstrip('.'))}" if own else str(explain(cause, named, BaseModel))
    else:
        said = masked(harmless(error.format_message()))
        said = re.sub(r"\.? (?:Did you mean (.*)\?|\(Possible options: (.*)\))$", r" (did you mean \1\2?)", said)
        told = f"{said[:1].lower()}{said[1:].rstrip('.')}"
    refused = InputError(f"{told}; {command} -h shows what it takes")
    aside(f"error: {_one_line(refused)}")
    raise SystemExit(refused.exit_code) from error


def _unreadable(error: RecursionError | UnicodeError) -> str:
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read; flatten it"
    return f"the input must be text in UTF-8: {_one_line(error)[:200]}; write it again"


def _sources() -> dict[str, tuple[int, int]]:
    """Return every source file of this package with its modification time and size, which an upgrade changes.

    The inode's change time is not used, because a new hard link or file mode changes that time too.
    """
    found = {}
    for folder, _, names in os.walk(_ROOT):
        for path in (f"{folder}/{name}" for name in names if name.endswith(".py")):
            try:
                state = os.stat(path)
            except FileNotFoundError:  # deleted since the listing
                continue
            found[path] = (state.st_mtime_ns, state.st_size)
    return found


_AT_START = _sources()


def _changed(error: Exception) -> str:
    """Return a source file of this package that was replaced or removed since the command started, or ""."""
    now = _sources()
    other = next((Path(path).name for path, state in _AT_START.items() if now.get(path) != state), "")
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    return missing if other and missing.startswith("posttrain.") else other


def _replaced(source: str, error: Exception) -> str:
    return (
        f"posttrain itself was changed while this command ran ({source}), so it cannot continue "
        f"({type(error).__name__}: {_one_line(error)}; {_reported()}); nothing is lost; run the same command again"
    )


def _bug(error: Exception) -> str:
    return (
        f"unexpected {type(error).__name__}: {_one_line(error)}; this is a bug in Posttrain: "
        f"please report it with {_reported()}"
    )


def _reported() -> str:
    """Write the traceback of the current error to a new file; return the file's name."""
    text = traceback.format_exc()
    if os.environ.get("POSTTRAIN_DEBUG"):
        sys.stderr.write(text)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with tempfile.NamedTemporaryFile("w", prefix=f"posttrain-{stamp}-", suffix=".txt", delete=False) as file:
        file.write(text)
    return file.name
