"""A table of the reason codes, from their enum."""

from __future__ import annotations

from posttrain.domain.lifecycle import Reason, StopCause


def table() -> str:
    """Return the table: code, objects that have it, meaning, next action."""
    lines = ["| reason | object | meaning | what to do next |", "|---|---|---|---|"]
    for one in Reason:
        lines.append(f"| `{one.value}` | {', '.join(one.of)} | {one.meaning} | {one.action} |")
    lines += ["", "An attempt whose job was stopped names the cause (`stop_cause`):", ""]
    lines += ["| cause | the job was stopped because |", "|---|---|"]
    lines += [f"| `{one.value}` | {one.meaning} |" for one in StopCause]
    return "\n".join(lines)
