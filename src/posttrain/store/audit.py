"""The rows of the ledger against its event log.

Rows are what everybody reads; only events are chained. Whoever edits a row of the database leaves a chain that holds,
so a proof compares the two: every release, and what a lineage is read from, must be what an event said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Text, or_, select, type_coerce

from posttrain.domain.errors import IntegrityError
from posttrain.store.ledger import Ledger
from posttrain.store.schema import events, releases, runs, stages
from posttrain.store.snapshot import Snapshot

_LINEAGE: Mapping[str, Any] = {
    "inputs": {},
    "outputs": {},
    "cached_from": None,
}  # columns of a stage → their value before any event
_BATCH = 1000
_Facts = dict[str, Mapping[str, Any]]  # what a row is about → the fields compared


def verify_releases(ledger: Ledger) -> int:
    """Compare releases, runs' manifests, stages' inputs and outputs, and assets with the event log.

    Seal first and verify the chain: an event that is not sealed yet is believed.

    Returns:
        How many rows were compared.

    Raises:
        IntegrityError: a row that no event tells of, or tells otherwise, or that is gone; names it and the field.
    """
    with ledger.database.read() as connection:
        told: _Facts = {}
        payload = type_coerce(events.c.payload, Text)
        query = select(events.c.kind, events.c.subject, events.c.actor, payload).order_by(events.c.id)
        kinds = [events.c.kind.startswith(f"{family}.") for family in ("channel", "run", "stage", "asset")]
        for kind, subject, actor, text in connection.execute(
            query.where(or_(*kinds)).execution_options(yield_per=_BATCH)
        ):
            _take(told, kind, subject, actor, text)
        found = dict(_rows(connection))
    for name in sorted(told.keys() | found.keys()):
        _compare(name, told.get(name), found.get(name))
    return len(found)


def _take(told: _Facts, kind: str, subject: str, actor: str, text: str) -> None:
    """What one event says of a row. Most say nothing of a lineage, so their payload need not be parsed."""
    family, _, what = kind.partition(".")
    if family == "stage":
        if what == "cached":
            return
        name = f"stage {subject}"
        told.setdefault(name, dict(_LINEAGE))
        if any(f'"{key}"' in text for key in _LINEAGE):
            changed = json.loads(text).get("changes", {})
            told[name] = {**told[name], **{key: value for key, value in changed.items() if key in _LINEAGE}}
        return
    payload = json.loads(text)
    if family == "channel":
        name = f"release {payload['sequence']} of channel {subject}"
        told[name] = {"action": what, "actor": actor, **{key: payload[key] for key in ("model", "run", "report", "at")}}
    elif family == "run" and "manifest" in payload:
        told[f"run {subject}"] = {"manifest": payload["manifest"]}
    elif kind == "asset.registered":
        told[f"asset {subject}"] = {"digest": payload["digest"], "parents": payload["parents"]}


def _rows(connection: Connection) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the rows say, in the events' words. One statement for each table, however many runs there are."""
    for entry in connection.execute(select(releases)):
        fields: dict[str, Any] = {"action": entry.action, "actor": entry.actor, "model": entry.model_digest}
        fields |= {"run": entry.run_id, "report": entry.report_digest, "at": entry.at}
        yield f"release {entry.sequence} of channel {entry.channel}", fields
    for run_id, manifest in connection.execute(select(runs.c.id, runs.c.manifest_digest)):
        yield f"run {run_id}", {"manifest": manifest}
    columns = (stages.c[key] for key in _LINEAGE)
    for run_id, name, *values in connection.execute(select(stages.c.run_id, stages.c.name, *columns)):
        yield f"stage {run_id}/{name}", dict(zip(_LINEAGE, values, strict=True))
    for asset in Snapshot(connection).assets():
        yield f"asset {asset.ref}", {"digest": asset.digest, "parents": list(asset.parents)}


def _compare(name: str, told: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> None:
    remedy = "restore the ledger from a copy"
    if told is None:
        raise IntegrityError(f"{name}: stands in the ledger, but no event tells of it; {remedy}")
    if found is None:
        raise IntegrityError(f"{name}: an event tells of it, but it is gone from the ledger; {remedy}")
    wrong = next((key for key in told if told[key] != found[key]), None)
    if wrong is not None:
        raise IntegrityError(
            f"{name}: {wrong} must be {told[wrong]!r} as the event log says, got {found[wrong]!r}; {remedy}"
        )
