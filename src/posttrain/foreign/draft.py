"""A run file in the making, and what must be said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from posttrain.domain.rendering import stop_fault
from posttrain.foreign.settings import Settings

_WIDTH = 118
# what asks for the whole distribution, as training samples here
_WHOLE = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}


@dataclass(slots=True)
class Draft:
    """What a run file will say, and what of the other trainer's file it does not."""

    source: str
    trainer: str  # TRL | verl
    run: dict[str, Any]
    carried: list[str] = field(default_factory=list)  # "num_generations: 8 → group_size: 8"
    changed: list[str] = field(default_factory=list)  # what is carried over and means something else, or is missing
    fill_in: list[str] = field(default_factory=list)  # what a person must do before the first run
    dropped: list[str] = field(default_factory=list)  # what has no counterpart, with its value
    inert: list[str] = field(default_factory=list)  # names that decide no result: where to compute, what to print

    def carry(self, theirs: str, value: Any, ours: str, result: Any) -> None:
        """Note a setting that was carried over."""
        self.carried.append(f"{theirs}: {_short(value)} → {ours}: {_short(result)}")

    def stops(self, settings: Settings, stage: dict[str, Any], *names: str) -> None:
        """Carry the strings that end a response over, from the first of these settings that is there."""
        name = next((name for name in names if settings.given(name)), None)
        given = settings.take(*names)
        found = tuple([given] if isinstance(given, str) else given if isinstance(given, list | tuple) else [given])
        if name is None or not found:
            return
        odd = [one for one in found if not isinstance(one, str)]
        fault = f"must be text, got {odd[0]!r}" if odd else stop_fault(found)
        if fault:
            self.changed.append(f"{name}: {_short(given)}: is not carried over: stop {fault}")
            return
        stage["stop"] = list(found)
        self.carry(name, list(found), "stop", list(found))

    def close(self, settings: Settings, told: dict[str, str], harmless: frozenset[str]) -> Draft:
        """Say of everything that nobody took why it is not there.

        Args:
            told: setting → why it has no place here; it changes the result or what a person sees.
            harmless: settings that say where and how to compute, or what to print: they decide no result.
        """
        self.changed += settings.notes
        for name, text in settings.unknown.items():
            if name in harmless:
                self.inert.append(name)
                continue
            reason = told.get(name) or "the file does not say what this stands for; it is as by default"
            self.changed.append(f"{name}: {_short(text)}: {reason}")
        for name, value in settings.left().items():
            last = name.rpartition(".")[2]
            parts = name.split(".")
            why = next((told[end] for at in range(len(parts)) if (end := ".".join(parts[at:])) in told), None)
            if value in (False, [], {}, "") or (last in _WHOLE and value in _WHOLE[last]):
                continue
            if why:
                self.changed.append(f"{name}: {_short(value)}: {why}")
            elif name in harmless or last in harmless:
                self.inert.append(last)
            else:
                self.dropped.append(f"{name}: {_short(value)}")
        return self

    def text(self) -> str:
        """The run file, with what a person should know as comments before it."""
        lines = [f"# From {self.source} ({self.trainer}) by `posttrain init --from`; check it with `posttrain plan`."]
        for title, items in (
            ("To do before the first run", self.fill_in),
            ("Not as it was there", self.changed),
            ("Left out, without a counterpart here", self.dropped),
            ("Without a meaning for the result", [", ".join(self.inert)] if self.inert else []),
        ):
            if items:
                lines += [f"# {title}:", *(f"#   - {' '.join(item.split())}"[:300] for item in items)]
        body = yaml.dump(self.run, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=_WIDTH)
        return "\n".join([*lines, "", body])


def plainly(number: float) -> float:
    """2 for 2.0, as people write it."""
    return int(number) if number.is_integer() else number


def share_of_steps(draft: Draft, theirs: str, share: float, steps: int | None) -> int:
    """A share of a stage's steps as steps; where nobody knows how many there are, a number to be replaced."""
    if share and steps is None:
        draft.fill_in.append(
            f"warmup_steps: {theirs} is {share:g} of the steps, which posttrain plan tells; "
            f"{round(share * 100)} stands there now"
        )
    return round(share * (steps or 100))


class _Plain(yaml.SafeDumper):
    """Numbers as people write them."""


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    mantissa, mark, exponent = f"{value:.10g}".partition("e")
    text = mantissa + (f"e{int(exponent)}" if mark else "")
    if mark and "." not in mantissa:
        text = f"{mantissa}.0e{int(exponent)}"  # YAML reads 1e-6 as text
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if "." in text or mark else f"{text}.0")


_Plain.add_representer(float, _number)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
