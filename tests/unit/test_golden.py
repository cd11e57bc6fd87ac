"""What the outside sees, held against tests/golden/: `make golden` writes the files anew, and the diff is reviewed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_world import BAD_REWARD, World, make_world, metrics_table
from golden_files import FOLDER, Mask, check, in_order, laid_out, once_each
from test_channel_policies import policy_file
from test_cli_trace import say
from typer.main import get_command
from typer.testing import CliRunner

import posttrain
from posttrain.api.codec import problem
from posttrain.app.workspace import open_workspace
from posttrain.cli.main import app
from posttrain.domain import errors
from posttrain.domain.errors import FailureClass, PosttrainError
from posttrain.domain.lifecycle import TABLES, Reason
from posttrain.server.openapi import document
from posttrain.store.attempts import AttemptFolder

SOURCE = Path(posttrain.__file__).parent
TOKEN = "user:cy"  # who is issued one
GATE = {"name": "floor", "metric": "heldout/accuracy", "at_least": 0.5}
COMPARED = {"name": "same", "metric": "heldout/accuracy", "not_worse_than": "base", "margin": 0.05}


def test_the_openapi_document() -> None:
    described = document()
    described["info"]["version"] = "<version>"
    usual: dict[str, Any] = {}
    for methods in described["paths"].values():
        for operation in methods.values():
            answers = operation.get("responses", {})
            same = [
                status for status, one in answers.items() if status >= "400" and usual.setdefault(status, one) == one
            ]
            operation["responses"] = {name: one for name, one in answers.items() if name not in same}
            operation["usual problems"] = " ".join(same)
    described["usual problems"] = usual
    check("openapi.json", laid_out(once_each(described)))


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name in getattr(command, "commands", {}):
        yield from _commands(command.commands[name], (*words, name))


def test_the_help_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    told = []
    for words, _ in _commands(get_command(app)):
        shown = CliRunner().invoke(app, [*words, "--help"])
        assert shown.exit_code == 0, words
        lines = (re.sub(r"[─╭╮╰╯]{2,}|│", " ", line).strip() for line in shown.stdout.splitlines())
        told.append("\n  ".join([f"$ {' '.join(('posttrain', *words, '--help'))}", *filter(None, lines)]))
    check("help.txt", "\n\n".join(told))


# --- one recorded workspace -------------------------------------------------------------------------------------------


def record(world: World) -> dict[str, str]:
    """A workspace with something of everything; name → run id."""
    world.prepare(by_commands=True)
    world.ok("run", "run.yaml")
    runs = {"shipped": world.newest()}
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD))
    assert world("run", "run.yaml").exit_code == 3
    runs["rejected"] = world.newest()
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD.replace("0.3", "0.975")))
    world.broken = {"sft": [-9]}  # its first attempt is lost
    world.ok("run", "run.yaml", "--seed", "18")
    runs["second"] = world.newest()
    world.ok("rollback", "prod", "--reason", "customers prefer the first")
    world.ok(
        "rollback", "prod", "--to", "2", "--lift-quarantine", "they changed their minds", "--reason", "as they wish"
    )
    for name, role in (("user:ann", "approver"), (TOKEN, "viewer")):
        world.ok("member", "set", name, role)
    world.ok("member", "set", "user:eve", "admin")
    world.ok("token", "issue", TOKEN)
    terms = {"approvers": ["user:ann", "user:bob"], "approvals": 1, "gates": [GATE]}
    world.ok("channel", "set-policy", "prod", policy_file(world, **terms))
    world.ok("channel", "set-policy", "beta", "policy.yaml")
    world.ok("channel", "freeze", "beta", "--reason", "a holiday")
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD.replace("0.3", "0.978")))
    waits = world("run", "run.yaml", "--seed", "19", "--timeout", "200")
    assert waits.exit_code == 12, (waits.stdout, waits.stderr)
    runs["waiting"] = world.newest()
    world.ok("sink", "add", "file", "--jsonl", str(world.root / "told.jsonl"), "--on", "all")
    world.ok("sink", "pause", "file")
    world.ok("asset", "recall", "reward:sort@2", "--reason", "it rewards confidence")
    world.write("gates.yaml", f"gates: {json.dumps([GATE, COMPARED])}")
    (world.root / "results.parquet").write_bytes(metrics_table(196))
    return runs


READING: Mapping[str, str] = {
    "ls": "ls",
    "get a run": "get {second}",
    "get a run that was rejected": "get {rejected}",
    "get a run that waits": "get {waiting}",
    "get a channel": "get prod",
    "logs": "logs {shipped}",
    "why": "why {rejected}",
    "diff": "diff {shipped} {rejected}",
    "compare": "compare {shipped} {second}",
    "dead": "dead",
    "plan": "plan run.yaml",
    "lock": "lock run.yaml",
    "sweep": "sweep run.yaml --seeds 2 --dry-run",
    "lineage": "lineage prod",
    "lineage downstream": "lineage dataset:train --downstream",
    "verify": "verify prod",
    "gate check": "gate check gates.yaml --results results.parquet --against results.parquet",
    "asset ls": "asset ls",
    "asset get": "asset get reward:sort@2",
    "channel policy": "channel policy prod",
    "channel policy history": "channel policy prod --history",
    "sink ls": "sink ls",
    "gc": "gc --dry-run",
    "whoami": "whoami",
    "project ls": "project ls",
    "project images": "project images",
    "member ls": "member ls",
    "token ls": "token ls",
    "doctor": "doctor",
    "executor ls": "executor ls",
    "examples": "examples",
    "track": "track {shipped} --tracker csv",
    "trace": "trace {shipped}",
    "trace samples": "trace {shipped} --samples",
}
OF_THE_MACHINE = {"doctor": ("finding", "remedy", "state")}  # fields that tell of it


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, str]]]:
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("golden"), patch)
        patch.setattr("posttrain.access.authenticators.system.login_name", lambda: "eve")
        runs = record(world)
        say(AttemptFolder(world.root / ".posttrain" / "runs" / runs["shipped"] / "grpo" / "001"))
        yield world, runs


def test_what_every_reading_verb_prints(recorded: tuple[World, dict[str, str]]) -> None:
    world, runs = recorded
    token = str(world.json("token", "ls")[0]["id"])
    names = {run: f"RUN-{name}" for name, run in runs.items()} | {str(world.root): "FOLDER", token: "TOKEN"}
    told = {}
    for title, line in READING.items():
        words = line.format(**runs).split()
        mask = Mask(names, OF_THE_MACHINE.get(words[0], ()))
        arranged = in_order if title.startswith("lineage") else lambda value: value
        told[title] = arranged(mask(json.JSONDecoder().raw_decode(world.ok(*words, "-o", "json"))[0]))
    check("reading.json", laid_out(told))


def test_every_verb_that_prints_json_and_changes_nothing_is_read() -> None:
    changing = {
        *(
            "run",
            "attach",
            "retry",
            "eval",
            "sample",
            "export",
            "promote",
            "rollback",
            "approve",
            "reject",
            "note",
            "harness fetch",
            "import mlflow",
        ),
        *(
            "import wandb-export",
            "import trl-output",
            "backup",
            "restore",
            "erase",
            "executor add",
            "executor doctor",
            "token issue",
            "token rotate",
            "chat",
        ),
    }
    prints = {
        " ".join(words)
        for words, command in _commands(get_command(app))
        if any(one.name == "output" and "-o" in one.opts and one.metavar != "DIR" for one in command.params)
    }
    read = {name for name in prints if any(f"{line} ".startswith(f"{name} ") for line in READING.values())}
    assert prints - read == changing


def test_the_readme_shows_the_digests_of_the_demo() -> None:
    """CI plays the demo, and tells where it makes others."""
    known = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))
    shown = set(re.findall(r"sha256:([0-9a-f]{12})", (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")))
    assert len(shown) >= 4
    assert shown <= set(known.values()), "make golden DEMO=1, and the README's block"


# --- events, errors ---------------------------------------------------------------------------------------------------

_ROWS = r"run|stage|attempt|signal|channel|asset|approval|role|token|principal|project|ledger|workspace|sink"
_KIND = re.compile(rf"(?:{_ROWS}|environment|orphans|gc|words|release|budget|operation)\.[a-z]+(?:[_-][a-z]+)*")
_NO_EVENTS = {"workspace.background", "project.images", "release.model"}


def _kinds_in_the_source() -> set[str]:
    """Every constant that reads like an event's kind, files' names aside."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _KIND.fullmatch(node.value):
                found.add(node.value)
    return {
        kind
        for kind in found
        if not re.search(r"\.(json|yaml|py|txt|lock|log|sock|db|html|id|name|project|(after|before)_.*)$", kind)
    }


def _shape(payload: Any) -> Any:
    """The names of the fields of a payload, of rows their columns."""
    if isinstance(payload, Mapping):
        return {name: _shape(one) for name, one in sorted(payload.items())}
    if isinstance(payload, list):
        return [_shape(payload[0])] if payload else []
    return type(payload).__name__


def test_the_kinds_of_events(recorded: tuple[World, dict[str, str]]) -> None:
    with closing(open_workspace()) as workspace:
        events = list(workspace.ledger.events())
    seen: dict[str, Any] = {}
    for event in events:
        seen.setdefault(event.kind, _shape(event.payload))
    states = {f"{machine}.{state}" for machine, table in TABLES.items() for state in table if machine != "release"}
    known = (_kinds_in_the_source() | states | set(seen)) - _NO_EVENTS
    assert len(seen) > 20
    check("events.json", laid_out({kind: seen.get(kind) for kind in sorted(known)}))


def test_the_codes_of_errors() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PosttrainError)]
    told = {"errors": {}, "failures": {}, "reasons": [one.value for one in Reason]}
    for kind in sorted(kinds, key=lambda one: one.__name__):
        said = problem(kind("what"))
        told["errors"][kind.__name__] = {
            name: said[name] for name in ("type", "title", "status", "exit_code", "retryable")
        }
    for failure in FailureClass:
        told["failures"][failure.value] = {"retried": failure.retried, "error": failure.error.__name__}
    check("errors.json", laid_out(told))
