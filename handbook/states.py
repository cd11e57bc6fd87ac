"""Diagrams of the state machines, from the tables of transitions that the control plane allows."""

from __future__ import annotations

from posttrain.domain.lifecycle import INITIAL, TABLES


def diagrams() -> str:
    """Return a heading and a diagram for every state machine."""
    return "\n\n".join(f"### {machine}\n\n```mermaid\n{mermaid(machine)}\n```" for machine in TABLES)


def mermaid(machine: str) -> str:
    """Return one state machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL[machine]}"]
    for source, targets in TABLES[machine].items():
        lines += [f"    {source} --> {target}" for target in sorted(targets)]
        if not targets:
            lines.append(f"    {source} --> [*]")
    return "\n".join(lines)
