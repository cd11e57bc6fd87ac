"""Which columns the event log tells, for every table whose rows it can rebuild.

A change of rows is told as `[sign, table, key, values]`: `+` a new row (columns that hold their empty value are left
out), `~` changed columns, `-` a row that is gone. Columns of free text are told in the event's words instead, in the
same order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Table

from posttrain.store import schema
from posttrain.store.envelopes import auditable

ADDED, CHANGED, REMOVED = "+", "~", "-"


@dataclass(frozen=True)
class Audited:
    """How one table is told."""

    table: Table
    title: str  # of a row, by its columns
    words: frozenset[str] = frozenset()  # free text and personal data
    since: str = "0002"  # the revision that made it
    later: Mapping[str, str] = field(default_factory=dict)  # column → the later revision that added it

    @functools.cached_property
    def key(self) -> tuple[str, ...]:
        """The columns that tell a row from others."""
        return tuple(column.name for column in self.table.primary_key)

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """Every column: all are told."""
        return tuple(column.name for column in self.table.columns)

    def columns_of(self, schema: str) -> tuple[str, ...]:
        """The columns that a ledger of this schema has."""
        return tuple(name for name in self.columns if self.later.get(name, self.since) <= schema)

    def name(self, row: Mapping[str, Any]) -> str:
        """A row as a person calls it."""
        return self.title.format(**row)

    @functools.cached_property
    def empty(self) -> Mapping[str, Any]:
        """The value of every column that a new row's event need not tell."""
        return {name: _empty(self.table, name) for name in self.columns}


def _empty(table: Table, name: str) -> Any:
    column = table.c[name]
    if column.nullable:
        return None
    if isinstance(column.type, schema.JsonText):
        return {}
    return "" if column.type.python_type is str else 0


_SAID = frozenset({"message", "next_action"})
TABLES: Mapping[str, Audited] = {
    str(one.table.name): one
    for one in (
        Audited(schema.projects, "project {id}", later={"images": "0003"}),
        Audited(schema.principals, "principal {id}", frozenset({"name"})),
        Audited(schema.roles, "role of {principal} in {project}"),
        Audited(schema.tokens, "token {id}"),
        Audited(schema.runs, "run {id}", _SAID | {"owner"}),
        Audited(schema.stages, "stage {run_id}/{name}", _SAID),
        Audited(
            schema.attempts,
            "attempt {run_id}/{stage}/{number}",
            frozenset({"message", "failure_signature", "folder", "handle"}),
            later=dict.fromkeys(("host", "channel", "resumed_from", "resumed_step", "resumed_tokens"), "0003")
            | dict.fromkeys(("reserved_tokens", "reserved_seconds", "stop_cause"), "0004"),
        ),
        Audited(schema.signals, "signal {name} of run {run_id}", frozenset({"reason"})),
        Audited(schema.assets, "asset {kind}:{name}@{version}", frozenset({"meta"})),
        Audited(schema.asset_status, "status of asset {kind}:{name}@{version}", frozenset({"reason"})),
        Audited(schema.releases, "release {sequence} of channel {channel}"),
        Audited(schema.channels, "channel {name}"),
        Audited(schema.deployments, "{role} deployment of channel {channel}"),
        Audited(schema.quarantine, "quarantine of {model_digest} on channel {channel}", frozenset({"reason"})),
        Audited(schema.approval_requests, "approval request {digest}"),
        Audited(schema.approvals, "approval of {request} by {principal}", frozenset({"reason"})),
        Audited(schema.looks, "look {number} of channel {channel}", frozenset({"owner"})),
        Audited(schema.stage_cache, "cache entry {cache_key}"),
        Audited(schema.artifacts, "artifact {digest}"),
        Audited(schema.edges, "edge {producer} → {consumer} {slot}"),
        Audited(schema.holds, "hold of {holder} on {digest}", frozenset({"reason"})),
        Audited(schema.sinks, "sink {name}", frozenset({"settings", "rules"}), since="0003"),
    )
}


@dataclass(frozen=True, slots=True)
class Change:
    """One row that an event tells of."""

    sign: str
    table: str
    key: Mapping[str, Any]
    values: Mapping[str, Any]  # of a new row all, of a changed one what changed, of a removed one none

    def told(self) -> tuple[list[Any], dict[str, Any]]:
        """What stands in the envelope, and what in the words."""
        spec = TABLES[self.table]
        empty = spec.empty if self.sign == ADDED else {}
        kept = {
            name: auditable(value)
            for name, value in self.values.items()
            if name not in spec.key and not (name in empty and value == empty[name])
        }
        words = {name: kept.pop(name) for name in sorted(spec.words & kept.keys())}
        return [self.sign, f"{self.table}", [self.key[name] for name in spec.key], kept], words
