"""Descriptions of how evaluations sample responses, from parameters alone, so showing a run loads no tables."""

from collections.abc import Mapping
from typing import Any


def sampling_words(suite: Mapping[str, Any]) -> str:
    """Return how a suite's responses were sampled, from the suite's parameters or, if missing, their defaults."""
    words = ["1 greedy response to each item"] if suite else []
    if samples := suite.get("samples"):
        drawn = [f"temperature {suite.get('temperature', 1.0):g}"]
        drawn += [f"{name} {suite[name]:g}" for name in ("top_k", "top_p", "min_p") if name in suite]
        sampled = f"{samples} sampled response{'s' if samples != 1 else ''} ({', '.join(drawn)})"
        words = [f"1 greedy response and {sampled} to each item"]
    if suite.get("stop"):
        words.append("each ends at the stop string " + " or ".join(repr(one) for one in suite["stop"]))
    return ", ".join(words)


def drawn_words(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line for each of a stage's suites that is sampled or has stop strings."""
    suites = params.get("suites")  # in a stage of another kind, this parameter may have any type
    asked = (
        {name: one for name, one in suites.items() if isinstance(one, Mapping)} if isinstance(suites, Mapping) else {}
    )
    chosen = {name: one for name, one in asked.items() if one.get("samples") or one.get("stop")}
    return tuple(f"{name}: {sampling_words(one)}" for name, one in chosen.items())
