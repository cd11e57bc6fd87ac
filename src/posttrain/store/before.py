"""The rows of a ledger of schema 0001 against its events, once, when it is upgraded.

Its events told less than ours: of runs their manifests, of stages and attempts what changed but for words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, text

from posttrain.domain.errors import IntegrityError
from posttrain.store.journal import auditable

_STAGE: Mapping[str, Any] = {  # columns before any event
    "inputs": {}, "outputs": {}, "metrics": {}, "cached_from": None, "cache_key": None, "tokens": 0,
    "started_at": None, "finished_at": None, "retried_after": 0,
}  # fmt: skip
_ATTEMPT: Mapping[str, Any] = {"tokens": 0, "seconds": 0.0, "launched_at": None, "finished_at": None}
_JSON = ("inputs", "outputs", "metrics")
_Facts = dict[str, Mapping[str, Any]]  # what a row is about → the fields compared
_REMEDY = "restore the ledger from a copy"


def verify_rows_before(connection: Connection) -> None:
    """Compare what the events told with the rows.

    Raises:
        IntegrityError: a row that no event tells of, or tells otherwise, or that is gone, or that cannot be read.
    """
    told: _Facts = {}
    for kind, subject, actor, payload in connection.execute(
        text("SELECT kind, subject, actor, payload FROM events ORDER BY id")
    ):
        _take(told, kind, subject, actor, json.loads(payload))
    found = dict(_rows(connection))
    for name in sorted(told.keys() | found.keys()):
        _compare(name, told.get(name), found.get(name))


def _take(told: _Facts, kind: str, subject: str, actor: str, payload: Mapping[str, Any]) -> None:
    family, _, what = kind.partition(".")
    first = {"stage": _STAGE, "attempt": _ATTEMPT}.get(family)
    if first is not None and what != "cached":
        name = f"{family} {subject}"
        changed = {key: value for key, value in payload.get("changes", {}).items() if key in first}
        told[name] = {**told.get(name, first), **changed}
    elif family == "channel":
        name = f"release {payload['sequence']} of channel {subject}"
        told[name] = {"action": what, "actor": actor, **{key: payload[key] for key in ("model", "run", "report", "at")}}
    elif family == "run" and "manifest" in payload:
        told[f"run {subject}"] = {"manifest": payload["manifest"]}
    elif kind == "asset.registered":
        told[f"asset {subject}"] = {"digest": payload["digest"], "parents": payload["parents"]}


def _rows(connection: Connection) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the rows say, in the events' words."""
    names = "channel, sequence, action, actor, model_digest, run_id, report_digest, at"
    for channel, sequence, action, actor, model, run, report, at in connection.execute(
        text(f"SELECT {names} FROM releases")
    ):
        fields = {"action": action, "actor": actor, "model": model, "run": run, "report": report, "at": at}
        yield f"release {sequence} of channel {channel}", fields
    for run, manifest in connection.execute(text("SELECT id, manifest_digest FROM runs")):
        yield f"run {run}", {"manifest": manifest}
    for run, stage, *values in connection.execute(text(f"SELECT run_id, name, {', '.join(_STAGE)} FROM stages")):
        name = f"stage {run}/{stage}"
        row = zip(_STAGE, values, strict=True)
        yield name, {key: _read(value, name) if key in _JSON else value for key, value in row}
    attempts = f"SELECT run_id, stage, number, {', '.join(_ATTEMPT)} FROM attempts"
    for run, stage, number, *values in connection.execute(text(attempts)):
        yield f"attempt {run}/{stage}/{number}", dict(zip(_ATTEMPT, values, strict=True))
    for kind, asset, version, digest, parents, meta in connection.execute(
        text("SELECT kind, name, version, digest, parents, meta FROM assets")
    ):
        name = f"asset {kind}:{asset}@{version}"
        _read(meta, name)
        yield name, {"digest": digest, "parents": _read(parents, name)}


def _read(value: str, name: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{name}: cannot be read; {_REMEDY}") from error


def _compare(name: str, told: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> None:
    if told is None:
        raise IntegrityError(f"{name}: stands in the ledger, but no event tells of it; {_REMEDY}")
    if found is None:
        raise IntegrityError(f"{name}: an event tells of it, but it is gone from the ledger; {_REMEDY}")
    wrong = next((key for key in told if told[key] != auditable(found[key])), None)
    if wrong is not None:
        raise IntegrityError(
            f"{name}: {wrong} must be {told[wrong]!r} as the event log says, got {found[wrong]!r}; {_REMEDY}"
        )
