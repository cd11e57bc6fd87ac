"""Sections of the symptoms, from their registry."""

from __future__ import annotations

from posttrain.telemetry.symptoms import SYMPTOMS, Symptom


def sections() -> str:
    """Return a section with a table for each symptom; its heading is the anchor that `posttrain why` prints."""
    return "\n\n".join(_section(one) for one in SYMPTOMS)


def _section(one: Symptom) -> str:
    rows = (("metric", one.metric), ("threshold", one.threshold), ("cause", one.cause), ("remedy", one.remedy))
    return "\n".join([f"## {one.title}", "", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])
