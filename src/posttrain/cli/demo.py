"""`demo` plays an example on this machine, using public commands only. `examples` lists and copies examples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import Output, OutputOption, answer_json, duration, lazily, open_control, say
from posttrain.domain.errors import AccessError, InputError, WorkspaceError
from posttrain.domain.ids import Role

if TYPE_CHECKING:
    from posttrain.app.examples import DemoPlan, DemoRun

FOLDER = ".demo"
_MARKER = ".posttrain-demo"  # marks a folder that a demo created and may therefore empty
_MADE_BY = "made by `posttrain demo`, which empties this folder when it plays again\n"
_VARIABLE, _SERVER = "POSTTRAIN_WORKSPACE", "POSTTRAIN_SERVER"


def demo(
    task: Annotated[
        str | None,
        typer.Option(help="Example, or the start of its name; default: 01-sort.", autocompletion=lazily("examples")),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data, model and runs; default: the example's.")] = None,
    workspace: Annotated[
        Path, typer.Option(help="Folder of the demo; a folder that an earlier demo created is emptied.")
    ] = Path(FOLDER),
) -> None:
    """Play an example: train, gate, release, roll back.

    Every step is a public command, which is printed before it runs. With a server, the demo uses the server's project.
    """
    from posttrain.app.examples import OWN, copy_example, find_example, load_demo, overlaid

    started = time.monotonic()
    served = bool(os.environ.get(_SERVER))
    example = find_example(task)
    plan = load_demo(example)
    if served:
        _refuse_lesser()
    _make_folder(workspace)
    if example.parent == OWN:
        copy_example(example, workspace / example.name)  # next to the demo's outputs, so that paths are short
        example = workspace / example.name
        plan = load_demo(example)
    stage = _Stage(workspace, example, plan, plan.seed if seed is None else seed, served)
    say(f"{plan.title} ({example.name}, seed {stage.seed}) in {workspace}/", f"$ cd {workspace}")
    stage.prepare()
    for run in plan.runs:
        stage.play(run)
    stage.release()
    if served:
        say(
            "",
            f"done in {duration(time.monotonic() - started)}",
            *(f"  run {key}   {run}" for key, run in stage.ids.items()),
        )
        say("  look around: posttrain ls")
        return
    runs = [(f"run {label}", run) for label, run in stage.ids.items()]
    picture = overlaid(workspace, runs, workspace / "curves.png", plan.title)  # all runs in one picture
    say("", f"done in {duration(time.monotonic() - started)}")
    say(
        *(
            f"  run {label}   {run_id}: {workspace}/.posttrain/runs/{run_id}/report.html"
            for label, run_id in stage.ids.items()
        )
    )
    say(f"  curves  {picture}", f"  look around: cd {workspace} && posttrain ls")


def examples(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Example to copy here, or the start of its name.", autocompletion=lazily("examples")
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="New folder; default: a folder with the example's name, here.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the examples, or copy an example here to edit it. `demo --task` plays an example."""
    from posttrain.app import examples as shelf

    if name is None:
        if to is not None:
            raise InputError(
                f"examples: --to needs the name of the example to copy to {to}; posttrain examples lists the names"
            )
        plans = {folder.name: shelf.load_demo(folder) for folder in shelf.examples()}
        answer_json(output, lambda: [{"name": name, "title": plan.title} for name, plan in plans.items()])
        width = max(map(len, plans), default=0)
        say(*(f"{name:{width}s}  {plan.title}" for name, plan in plans.items()))
        say("next:   posttrain examples NAME copies an example here; posttrain demo --task NAME plays an example")
        return
    folder = shelf.find_example(name)
    target = to or Path(folder.name)
    files = shelf.copy_example(folder, target)
    plan = shelf.load_demo(target)
    made = shelf.preparation(plan, str(target), plan.seed)
    steps = [["posttrain", "init"], *made, ["posttrain", "run", f"{target}/{plan.runs[0].file}"]]
    answer_json(output, lambda: {"name": folder.name, "folder": str(target), "files": files, "steps": steps})
    say(f"{folder.name}: {plan.title}; {len(files)} files in {target}/", "commands to run:")
    say(*(f"  {' '.join(step)}" for step in steps))


class _Stage:
    """The demo's folder, in which the commands run, and the demo's runs so far."""

    def __init__(self, folder: Path, example: Path, plan: DemoPlan, seed: int, served: bool) -> None:
        self._folder, self._plan, self.seed, self._served = folder, plan, seed, served
        self._example = os.path.relpath(example, folder)
        self.ids: dict[str, str] = {}  # label → run id
        self._environment = {key: value for key, value in os.environ.items() if key != _VARIABLE}

    def prepare(self) -> None:
        """Create data, workspace, base model and assets."""
        from posttrain.app.examples import confined, preparation

        _headline(
            f"Data, {'' if self._served else 'a workspace, '}a randomly initialised base model, and versioned assets"
        )
        if self._served:
            self._posttrain("whoami")
        else:
            found = confined()
            if not found.whole:
                say(f"This machine cannot confine rewards: {'; '.join(found.notes)}.")
                say("The demo's rewards are harmless, so its workspace trusts them; a normal workspace does not.")
            # the folder is given, because the demo's folder may be below a user's workspace
            self._posttrain("init", ".", *(() if found.whole else ("--rewards", "trusted")))
        for step in preparation(self._plan, self._example, self.seed):
            self._step(step)
        self._posttrain("plan", f"{self._example}/{self._plan.runs[0].file}", "--seed", str(self.seed))

    def play(self, run: DemoRun) -> None:
        """Submit a run; if the run releases nothing, show why."""
        _headline(f"Run {run.label}: {run.say}")
        if run.before:
            self._posttrain("asset", "add", f"reward:{run.before.reward}", f"{self._example}/{run.before.file}")
        self._posttrain("run", f"{self._example}/{run.file}", "--seed", str(self.seed), expected=run.exit)
        self.ids[run.label] = self._newest()
        if run.exit:
            say(f"(exit code {run.exit}, as expected)")
            self._posttrain("why", self.ids[run.label])
            first = next(iter(self.ids.values()))
            if first != self.ids[run.label]:
                self._posttrain("diff", first, self.ids[run.label])

    def release(self) -> None:
        """Roll back to the previous model, print its lineage and verify it."""
        channel = self._plan.channel
        _headline(f"Roll back to the previous model in one command; verify the model of {channel}")
        for verb in ("rollback", "lineage", "verify"):
            self._posttrain(verb, channel)

    def _posttrain(self, *words: str, expected: int = 0) -> None:
        self._step(["posttrain", *words], expected)

    def _step(self, shown: list[str], expected: int = 0) -> None:
        """Print a command and run it: a `posttrain` command or a Python script."""
        say(f"$ {' '.join(shown)}")
        command = [sys.executable, *(["-m", "posttrain"] if shown[0] == "posttrain" else []), *shown[1:]]
        sys.stdout.flush()
        # without a terminal on stdin, Ctrl-C starts no background driver that would continue the run
        code = subprocess.run(
            command, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, check=False
        ).returncode
        if code != expected:
            typer.echo(
                f"error: demo stopped: `{' '.join(shown)}` ended with exit code {code}, expected {expected}; "
                f"see: cd {self._folder} && posttrain ls",
                err=True,
            )
            raise typer.Exit(code if code > 0 else 1)

    def _newest(self) -> str:
        command = [sys.executable, "-m", "posttrain", "ls", "--limit", "1", "-o", "json"]
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return str(json.loads(done.stdout)["runs"][0]["id"])


def _refuse_lesser() -> None:
    """Check that the caller may roll back, which the demo does at its end.

    Raises:
        AccessError: the caller may not roll back on the server.
    """
    found = open_control().whoami()
    if found.role not in (Role.APPROVER, Role.ADMIN):
        raise AccessError(
            f"demo: its last step is a rollback, which needs the role approver in {found.project}; {found.principal} "
            f"has the role {found.role or 'none'} there; ask an admin, or run the demo without a server"
        )


def _headline(text: str) -> None:
    say("", f"── {text} " + "─" * max(3, 76 - len(text)))


def _make_folder(folder: Path) -> None:
    """Create an empty folder, or empty a folder that an earlier demo created.

    Raises:
        InputError: the folder has other contents.
        WorkspaceError: the folder cannot be created.
    """
    if folder.exists() and not (folder.is_dir() and (_is_ours(folder) or not any(folder.iterdir()))):
        raise InputError(f"demo: {folder} must be empty or created by a demo; choose another --workspace")
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / _MARKER).write_text(_MADE_BY, encoding="utf-8")
    except OSError as error:
        raise WorkspaceError(
            f"demo: {folder} cannot be recreated: {error.strerror}; choose another --workspace"
        ) from error


def _is_ours(folder: Path) -> bool:
    try:
        return (folder / _MARKER).read_bytes() == _MADE_BY.encode()
    except OSError:
        return False
