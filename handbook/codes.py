"""A page with exit codes, failure classes, verdicts and states, from the classes that define them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from handbook.comments import comment
from posttrain.cli.main import EPILOG
from posttrain.domain.errors import FailureClass, PosttrainError
from posttrain.domain.gates import Outcome
from posttrain.domain.lifecycle import TABLES, AttemptState, ReleaseState, RunState, StageState

_STATES: dict[str, type[Enum]] = {
    "run": RunState,
    "stage": StageState,
    "attempt": AttemptState,
    "release": ReleaseState,
}


def page() -> str:
    """Return the whole reference in Markdown."""
    return "\n\n".join([_exit_codes(), _failures(), _outcomes(), *_states()])


def exit_codes() -> dict[int, str]:
    """Return code → meaning, as `posttrain --help` prints them."""
    return {int(code): told for code, told in re.findall(r"^ +(\d+)  (.+)$", EPILOG, re.MULTILINE)}


def _errors(kind: type[PosttrainError] = PosttrainError) -> Iterator[type[PosttrainError]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("posttrain.domain"):
            yield child
            yield from _errors(child)


def _exit_codes() -> str:
    classes: dict[int, list[str]] = {}
    retried = set()
    for kind in _errors():
        classes.setdefault(kind.exit_code, []).append(f"`{kind.__name__}`")
        retried |= {kind.exit_code} if kind.retryable else set()
    lines = ["## Exit codes", "", "| code | meaning | a repeat may help | error in Python |", "|---|---|---|---|"]
    for code, told in exit_codes().items():
        helps = "yes" if code in retried else ""
        lines.append(f"| {code} | {told} | {helps} | {', '.join(classes.get(code, []))} |")
    return "\n".join(lines)


def _failures() -> str:
    lines = ["## Why an attempt failed", ""]
    lines += ["| class | exit code | retried automatically | meaning |", "|---|---|---|---|"]
    for kind in FailureClass:
        retried = "yes" if kind.retried else ""
        meaning = comment(FailureClass, kind.name) or exit_codes()[kind.error.exit_code]
        lines.append(f"| `{kind.value}` | {kind.error.exit_code} | {retried} | {meaning} |")
    return "\n".join(lines)


def _outcomes() -> str:
    lines = [
        "## Verdicts of a gate",
        "",
        "A model is released only if every gate returns `PASS`.",
        "",
        "| verdict | meaning |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| `{kind.name}` | {comment(Outcome, kind.name)} |" for kind in Outcome)])


def _states() -> Iterator[str]:
    for machine, states in _STATES.items():
        lines = [
            f"## States of {'an' if machine == 'attempt' else 'a'} {machine}",
            "",
            "| state | next states | meaning |",
            "|---|---|---|",
        ]
        for state in states:
            onward = ", ".join(f"`{name}`" for name in sorted(TABLES[machine][str(state.value)])) or "nothing: final"
            lines.append(f"| `{state.value}` | {onward} | {comment(states, state.name)} |")
        yield "\n".join(lines)
