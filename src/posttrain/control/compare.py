"""What differs between two runs: their manifests, field by field, with the story of each changed asset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from posttrain.domain.manifest import InputRef, Manifest
from posttrain.store.ledger import Ledger

_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not the same: `stages.grpo.inputs.reward`, before, after, and lines that explain it."""

    path: str
    before: str
    after: str
    notes: tuple[str, ...] = ()


def compare(ledger: Ledger, first: Manifest, second: Manifest) -> list[Difference]:
    """Differences that decide results or release; what the runs are called and who owns them is not compared.

    An asset that several stages use is told once.
    """
    found: dict[tuple[str, str], Difference] = {}
    for path, before, after in _walk("", _plain(first), _plain(second)):
        difference = _asset_difference(ledger, path, before, after) or Difference(path, _show(before), _show(after))
        found.setdefault((difference.before, difference.after) if difference.notes else (path, ""), difference)
    return list(found.values())


def _plain(manifest: Manifest) -> dict[str, Any]:
    value = manifest.model_dump(mode="json", exclude={"manifest", "name", "owner", "stages"})
    value["gates"] = {gate["name"]: gate for gate in value["gates"]}
    value["stages"] = {}
    for stage in manifest.stages:
        row = stage.model_dump(mode="json", exclude={"name", "inputs"})
        value["stages"][stage.name] = {**row, "inputs": dict(stage.inputs)}
    return value


def _walk(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _walk(f"{path}.{key}" if path else key, before.get(key, _ABSENT), after.get(key, _ABSENT))
    elif before != after:
        yield path, before, after


def _show(value: Any) -> str:
    """As one would write it in a run file; of a whole stage its kind: what it says in full stands in its manifest."""
    if isinstance(value, InputRef):
        return value.name
    if isinstance(value, dict):
        if {"kind", "inputs", "params"} <= value.keys():
            return f"({value['kind']} stage)"
        said = (f"{key}: {_show(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(said) + "}"
    return "none" if value is None else str(value)


def _asset_difference(ledger: Ledger, path: str, before: Any, after: Any) -> Difference | None:
    if not (isinstance(before, InputRef) and isinstance(after, InputRef) and before.digest and after.digest):
        return None
    notes = [f"digest: {before.digest} → {after.digest}"] if before.digest != after.digest else []
    for key in sorted(before.meta.keys() | after.meta.keys()):
        if before.meta.get(key) != after.meta.get(key):
            notes.append(f"{key}: {_meant(before, key)} → {_meant(after, key)}")
    old, new = (_described(ledger, ref) for ref in (before, after))
    for key in sorted(old.keys() | new.keys()):
        if key not in before.meta and old.get(key) != new.get(key):
            notes.append(f"{key}: {old.get(key, _ABSENT)} → {new.get(key, _ABSENT)}")
    if before.name == after.name:
        return Difference(path, _called(before), _called(after), tuple(notes))
    return Difference(path, before.name, after.name, tuple(notes))


def _meant(ref: InputRef, key: str) -> str:
    return _show(ref.meta[key]) if key in ref.meta else _ABSENT


def _called(ref: InputRef) -> str:
    """A reward with its function, where its name alone would not tell it from another."""
    return f"{ref.name} ({ref.meta['entry']})" if "entry" in ref.meta else ref.name


def _described(ledger: Ledger, ref: InputRef) -> dict[str, Any]:
    """What the registry knows of an asset; empty for a path that was never registered."""
    for asset in ledger.assets_by_digest(ref.digest or ""):
        if asset.ref == ref.name:
            at = datetime.fromtimestamp(asset.created_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            return {"registered by": asset.created_by, "registered at": at, **_flat(dict(asset.meta))}
    return {}


def _flat(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if isinstance(value, str | int | float)}
