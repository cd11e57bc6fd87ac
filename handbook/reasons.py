"""The reason codes as a table, from the enum that they are."""

from __future__ import annotations

from posttrain.domain.lifecycle import Reason, StopCause


def table() -> str:
    """Code, what it is a reason of, meaning, what a person does next."""
    lines = ["| reason | of | meaning | what to do next |", "|---|---|---|---|"]
    for one in Reason:
        lines.append(f"| `{one.value}` | {', '.join(one.of)} | {one.meaning} | {one.action} |")
    lines += ["", "An attempt whose job was stopped names the cause (`stop_cause`):", ""]
    lines += ["| cause | the job was stopped because |", "|---|---|"]
    lines += [f"| `{one.value}` | {one.meaning} |" for one in StopCause]
    return "\n".join(lines)
