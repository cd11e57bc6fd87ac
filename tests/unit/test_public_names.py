"""What people build on is frozen: verbs, options, exported names, exit codes.

Changing one fails a test, so that it is done on purpose (and noted in the changelog).
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import typer.main

import posttrain
from posttrain.cli.main import app
from posttrain.domain import errors

COMMANDS = {
    "init": [
        "--mailboxes",
        "--executor",
        "--from",
        "--job-variable",
        "--model-limit",
        "--ledger",
        "--rewards",
        "--tracker",
        "[DIR]",
    ],
    "demo": ["--seed", "--task", "--workspace"],
    "examples": ["--output", "--to", "-o", "[NAME]"],
    "plan": ["--output", "--seed", "--set", "--verbose", "-o", "-v", "RUN.yaml"],
    "lock": ["--out", "--output", "--seed", "--set", "-o", "RUN.yaml"],
    "run": [
        *("--again", "--detach", "--note", "--output", "-o", "--seed", "--set", "--tag", "--timeout", "RUN.yaml"),
    ],
    "ls": ["--limit", "--output", "--tag", "-o"],
    "get": ["--output", "--report", "--timeout", "--watch", "-o", "RUN|CHANNEL"],
    "logs": ["--follow", "--output", "--timeout", "-f", "-o", "[STAGE]", "run"],
    "why": ["--output", "-o", "run"],
    "diff": ["--output", "-o", "A", "B"],
    "sweep": ["--better", "--dry-run", "--metric", "--output", "--seeds", "--set", "-o", "RUN.yaml"],
    "compare": ["--html", "--output", "-o", "A B [C …]"],
    "note": ["--output", "--tag", "--untag", "-o", "TEXT", "run"],
    "signal": ["--reason", "NAME", "run"],
    "attach": ["--detach", "--output", "-o", "--timeout", "run"],
    "stop": ["run"],
    "retry": ["--detach", "--output", "-o", "--timeout", "run"],
    "dead": ["--assume-dead", "--output", "--retry", "-o", "[RUN[/STAGE]]"],
    "sample": [
        *("--chat", "--device", "--dtype", "--max-new-tokens", "--min-p", "--output", "--samples", "--seed", "--stop"),
        *("--system", "--temperature", "--text", "--threads", "--timeout", "--top-k", "--top-p", "-n", "-o"),
        *("MODEL", "PROMPT..."),
    ],
    "eval": [
        *("--again", "--device", "--dialect", "--dtype", "--entry", "--extract", "--max-new-tokens", "--output"),
        *("--min-p", "--network", "--pass-at", "--reward", "--reward-range", "--reward-timeout", "--samples"),
        *("--secret", "--seed", "--stop"),
        *("--temperature", "--threads", "--timeout", "--top-k", "--top-p", "-n", "-o", "MODEL", "SUITE..."),
    ],
    "export": ["--adapter", "--dtype", "--merged", "--output", "-o", "DIR", "MODEL"],
    "promote": ["--channel", "--lift-quarantine", "--output", "-o", "run"],
    "rollback": ["--from", "--lift-quarantine", "--reason", "--to", "--output", "-o", "channel"],
    "approve": ["--channel", "--reason", "--output", "-o", "RUN|REQUEST"],
    "reject": ["--channel", "--reason", "--output", "-o", "RUN|REQUEST"],
    "gate check": ["--against", "--output", "--page", "--results", "-o", "GATES.yaml"],
    "channel policy": ["--asked", "--history", "--output", "-o", "channel"],
    "channel set-policy": ["POLICY.yaml", "channel"],
    "channel remove-policy": ["channel"],
    "channel protect": ["--reason", "channel"],
    "channel unprotect": ["--reason", "channel"],
    "channel freeze": ["--reason", "--rollbacks", "channel"],
    "channel unfreeze": ["--reason", "channel"],
    "lineage": ["--downstream", "--limit", "--output", "-o", "CHANNEL|RUN|ASSET"],
    "verify": ["--output", "-o", "[CHANNEL|RUN|ASSET]"],
    "trace": ["--out", "--output", "--sample", "--samples", "--stage", "--step", "-o", "run"],
    "track": ["--follow", "--output", "--tracker", "-o", "RUN|CHANNEL"],
    "import mlflow": ["--name", "--output", "--run", "-o", "DIR|URI"],
    "import wandb-export": ["--name", "--output", "-o", "DIR"],
    "import trl-output": ["--name", "--output", "-o", "DIR"],
    "asset add": [
        *(
            "--base",
            "--checksum",
            "--dialect",
            "--entry",
            "--external",
            "--guideline",
            "--version",
            "KIND:NAME",
            "PATH...",
        ),
    ],
    "harness fetch": ["--include", "--name", "--output", "--version", "--with", "-o", "PROGRAM", "TASK..."],
    "asset create": ["--seed", "MODEL.yaml", "model:NAME"],
    "asset ls": ["--output", "-o", "[KIND]"],
    "asset get": ["--output", "-o", "ref"],
    **{f"asset {verb}": ["--reason", "ref"] for verb in ("approve", "recall", "restore")},
    "sink add": [
        *("--webhook", "--webhook-env", "--secret-env", "--secret-file", "--jsonl", "--email", "--smtp", "--from"),
        *("--smtp-security", "--smtp-user-env", "--smtp-password-env", "--on", "--run", "--owner", "--channel"),
        *("--words", "--from-start", "name"),
    ],
    "sink ls": ["--output", "-o"],
    "sink test": ["NAME"],
    "sink pause": ["NAME"],
    "sink resume": ["--skip", "NAME"],
    "sink remove": ["NAME"],
    "backup": ["--output", "-o", "FOLDER"],
    "restore": ["--output", "-o", "FOLDER"],
    "gc": ["--dry-run", "--older-than", "--output", "-o"],
    "erase": ["--output", "--reason", "-o", "RUN|ASSET|user:NAME"],
    "serve": [
        *("--advertise", "--behind-proxy", "--host", "--log-format", "--log-level", "--no-token"),
        *("--port", "--tls-certificate", "--tls-key"),
    ],
    "serve-model": [
        *("--adapter", "--behind-proxy", "--concurrency", "--context", "--device", "--drain", "--dtype", "--host"),
        *("--keys", "--kv-cache", "--log-format", "--log-level", "--name", "--port", "--queue", "--threads"),
        *("--tls-certificate", "--tls-key", "MODEL"),
    ],
    "chat": [
        *("--compare", "--device", "--dtype", "--max-new-tokens", "--output", "--seed", "--system", "--temperature"),
        *("--threads", "--url", "-o", "[MESSAGE]...", "[MODEL]"),
    ],
    "login": ["--project", "URL"],
    "logout": ["--project", "[URL]"],
    "whoami": ["--output", "-o"],
    "project add": ["NAME"],
    "project allow-image": ["IMAGE"],
    "project images": ["--output", "-o"],
    "project ls": ["--output", "-o"],
    "project remove-image": ["IMAGE"],
    "member ls": ["--output", "-o"],
    "member set": ["PRINCIPAL", "ROLE"],
    "member remove": ["PRINCIPAL"],
    "token issue": ["--channel", "--days", "--output", "--role", "-o", "PRINCIPAL"],
    "token rotate": ["--days", "--output", "-o", "ID"],
    "token revoke": ["ID"],
    "token ls": ["--output", "-o"],
    "executor add": ["--output", "-o", "FILE"],
    "executor doctor": ["--output", "--wait", "-o", "[NAME]"],
    "executor ls": ["--output", "-o"],
    "doctor": ["--accept-loss", "--end-orphans", "--output", "--probe", "--ray", "-o"],
}
EXIT_CODES = {
    "ApiVersionError": 2,
    "CursorError": 2,
    "LedgerUnavailableError": 10,
    "BusyError": 6,
    "LimitError": 6,
    "LostOperationError": 2,
    "PartSizeError": 2,
    "SlowError": 12,
    "UploadError": 8,
    "PosttrainError": 1,
    "InputError": 2,
    "NotFoundError": 2,
    "GateRejectedError": 3,
    "GateInconclusiveError": 4,
    "JobFailedError": 5,
    "InfrastructureError": 6,
    "CapacityError": 6,
    "UnavailableError": 6,
    "TrackerError": 6,
    "SinkError": 6,
    "BudgetExceededError": 7,
    "IntegrityError": 8,
    "ConflictError": 9,
    "QuarantinedError": 9,
    "ChannelClosedError": 9,
    "RecalledError": 9,
    "PolicyError": 9,
    "ApprovalError": 9,
    "StaleWriteError": 9,
    "WorkspaceError": 10,
    "StoppedError": 11,
    "DeadlineError": 12,
    "AccessError": 13,
    "AuthenticationError": 13,
}


def command_options(command: Any, prefix: str = "") -> dict[str, list[str]]:
    """Command → its options and arguments, as a person writes them."""
    found: dict[str, list[str]] = {}
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            found |= command_options(child, f"{prefix}{name} ")
            continue
        words: list[str] = []
        for parameter in child.params:
            options = parameter.param_type_name == "option"
            words += [*parameter.opts, *parameter.secondary_opts] if options else [parameter.metavar or parameter.name]
        found[prefix + name] = sorted(words)
    return found


def test_verbs_and_options_are_frozen() -> None:
    found = command_options(typer.main.get_command(app))
    assert {name: sorted(words) for name, words in COMMANDS.items()} == found


def test_help_lists_the_verbs_in_the_order_of_a_days_work() -> None:
    group = typer.main.get_command(app)
    context = group.make_context("posttrain", [], resilient_parsing=True)
    verbs = "demo examples init plan lock run sweep attach stop retry signal dead"
    verbs += " ls get logs why diff compare trace note sample eval"
    verbs += " export promote approve reject rollback channel gate lineage verify"
    verbs += " serve-model chat"
    verbs += " serve login logout whoami project member token sink track"
    verbs += " asset harness import gc backup restore erase doctor executor"
    assert group.list_commands(context) == verbs.split()  # type: ignore[attr-defined]


def test_every_reading_command_speaks_json() -> None:
    reading = {
        *("approve", "reject", "promote", "rollback", "run", "attach", "retry", "note"),
        "examples",
        "plan",
        "lock",
        "ls",
        "get",
        "logs",
        "why",
        "diff",
        "dead",
        "compare",
        "sweep",
        "sample",
        "eval",
        "export",
        "channel policy",
        "gate check",
        "lineage",
        "verify",
        "trace",
        "track",
        "import mlflow",
        "import trl-output",
        "import wandb-export",
        "asset ls",
        "asset get",
        "harness fetch",
        "sink ls",
        "gc",
        "backup",
        "restore",
        "erase",
        "doctor",
        "executor add",
        "executor doctor",
        "executor ls",
        "whoami",
        *("project ls", "project images", "member ls", "token ls", "token issue", "token rotate", "chat"),
    }
    assert {name for name, words in COMMANDS.items() if "-o" in words} == reading


def test_exported_names_are_frozen() -> None:
    names = ["Channel", "PosttrainError", "Run", "Workspace", "__version__", "channel", "connect", "init_workspace"]
    assert sorted(posttrain.__all__) == sorted([*names, "open_workspace", "plan", "run", "submit"])
    for name in posttrain.__all__:
        assert getattr(posttrain, name) is not None


def test_the_python_api_asks_control_and_looks_behind_no_wall() -> None:
    """The import contracts are about packages below `posttrain`, not about its own file."""
    used = {
        node.module
        for node in ast.walk(ast.parse(Path(posttrain.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("posttrain.")
    }
    assert used | set(posttrain._ROOMS.values()) == {
        "posttrain._version",
        *(f"posttrain.api.{name}" for name in ("control", "handles", "values")),
        *(f"posttrain.app.{name}" for name in ("control", "workspace")),
        "posttrain.client.logins",
        *(f"posttrain.domain.{name}" for name in ("errors", "overrides")),
    }


def test_exit_codes_are_frozen_and_documented() -> None:
    kinds = {
        name: kind.exit_code
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.PosttrainError)
    }
    assert kinds == EXIT_CODES
    epilog = str(app.info.epilog)
    for code in {0, 130, *EXIT_CODES.values()}:
        assert f"\n  {code:3d}  " in epilog
