"""The state machines as diagrams, from the tables that the control plane refuses other transitions by."""

from __future__ import annotations

from posttrain.domain.lifecycle import INITIAL, TABLES


def diagrams() -> str:
    """A heading and a diagram of every machine."""
    return "\n\n".join(f"### {machine}\n\n```mermaid\n{mermaid(machine)}\n```" for machine in TABLES)


def mermaid(machine: str) -> str:
    """One machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL[machine]}"]
    for source, targets in TABLES[machine].items():
        lines += [f"    {source} --> {target}" for target in sorted(targets)]
        if not targets:
            lines.append(f"    {source} --> [*]")
    return "\n".join(lines)
