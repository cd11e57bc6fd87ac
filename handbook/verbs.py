"""A page with every command, from the command line's own definitions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

from handbook.tables import stacked
from posttrain.cli.main import app
from posttrain.cli.usage import GROUPS

_KINDS: dict[Any, str] = {str: "text", int: "whole number", float: "number", Path: "path"}


def commands() -> dict[str, Any]:
    """Return "asset add" → its command, in the order of `posttrain --help`."""
    return dict(_commands(typer.main.get_command(app)))


def page() -> str:
    """Return the whole reference in Markdown."""
    return "\n\n".join(_section(name, command) for name, command in commands().items())


def overview() -> str:
    """Return a table for each group of `posttrain --help`: command, purpose."""
    told = {name: summary(command.help) for name, command in commands().items()}
    return "\n\n".join(
        "\n".join(
            [
                f"## {group}\n\n| command | purpose |\n|---|---|",
                *(f"| `{name}` | {text} |" for name, text in told.items() if name.split()[0] in words),
            ]
        )
        for group, words in GROUPS.items()
    )


def summary(text: str | None) -> str:
    """Return the first sentence of a help text, as `posttrain --help` shows it."""
    return re.split(r"(?<=[.]) ", " ".join((text or "").split("\n\n")[0].split()), maxsplit=1)[0].replace("|", "\\|")


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        child = group.commands[name]
        if hasattr(child, "commands"):
            yield from _commands(child, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", child


def _section(name: str, command: Any) -> str:
    told = " ".join((command.help or "").split())
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["posttrain", name, *(_placeholder(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
    table = ["| argument or option | value | default | meaning |", "|---|---|---|---|"]
    table += [_row(parameter) for parameter in (*arguments, *options)]
    head = f"(verb-{name.replace(' ', '-')})=\n\n## posttrain {name}\n\n{told}\n\n```text\n{usage}\n```\n"
    return f"{head}\n{stacked(table)}"


def _placeholder(argument: Any) -> str:
    word = _metavar(argument)
    return word if argument.required or word.startswith("[") else f"[{word}]"


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("{}")


def _row(parameter: Any) -> str:
    named = parameter.param_type_name == "option"
    switches = [*parameter.opts, *parameter.secondary_opts]
    words = ", ".join(f"`{word}`" for word in (switches if named else [_metavar(parameter)])).replace("|", "\\|")
    return f"| {words} | {_value(parameter)} | {_default(parameter)} | {_told(parameter)} |"


def _told(parameter: Any) -> str:
    return " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")


def _value(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return "a switch"
    annotation = parameter.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " · ".join(f"`{member.value}`" for member in annotation)
    if get_origin(annotation) is Literal:
        return " · ".join(f"`{value}`" for value in get_args(annotation))
    if parameter.param_type_name == "option" and parameter.metavar:
        return f"`{parameter.metavar}`".replace("|", "\\|")
    several = get_origin(annotation) is list
    kind = _KINDS[get_args(annotation)[0] if several else annotation]
    least = "" if parameter.min is None else f", ≥ {parameter.min}"
    return f"{kind}{least}" + (", several" if several else "")


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value in (None, False, "", ()):
        return ""
    return f"`{getattr(value, 'value', value)}`"
