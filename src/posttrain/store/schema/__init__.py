"""The ledger's tables.

Plain SQL types only, so that SQLite and PostgreSQL hold the same thing: times are doubles (seconds since the epoch),
mappings are JSON text. `generation` is the compare-and-set counter of a row; leases live in columns of their own and
do not touch it.

A release works beside the one before it. So a revision adds only: tables, and columns that may be NULL or whose default
is the empty value of their type. `schema_version.usable_since` says which revision's code may still use the ledger; one
that does more than add writes itself.
"""

from __future__ import annotations

from posttrain.store.schema.assets import artifacts, asset_status, assets, edges, holds
from posttrain.store.schema.columns import JsonText, UnreadableColumnError, metadata
from posttrain.store.schema.log import (
    chain_head,
    cursors,
    events,
    events_before,
    grants,
    hosts,
    leaves,
    operations,
    parts,
    payloads,
    principals,
    projects,
    requests,
    roles,
    schema_versions,
    sessions,
    sinks,
    tiles,
    tokens,
    tree_head,
    unsealed,
    uploads,
    watches,
    work,
)
from posttrain.store.schema.runs import (
    approval_requests,
    approvals,
    attempts,
    channels,
    deployments,
    looks,
    notes,
    quarantine,
    releases,
    runs,
    signals,
    stage_cache,
    stages,
)

SCHEMA_VERSION = "0005"  # revisions are counted, so they compare as text
USABLE_SINCE = "0002"  # the oldest revision whose code may use a ledger of this one

__all__ = [
    "SCHEMA_VERSION",
    "USABLE_SINCE",
    "JsonText",
    "UnreadableColumnError",
    "approval_requests",
    "approvals",
    "artifacts",
    "asset_status",
    "assets",
    "attempts",
    "chain_head",
    "channels",
    "cursors",
    "deployments",
    "edges",
    "events",
    "events_before",
    "grants",
    "holds",
    "hosts",
    "leaves",
    "looks",
    "metadata",
    "notes",
    "operations",
    "parts",
    "payloads",
    "principals",
    "projects",
    "quarantine",
    "releases",
    "requests",
    "roles",
    "runs",
    "schema_versions",
    "sessions",
    "signals",
    "sinks",
    "stage_cache",
    "stages",
    "tiles",
    "tokens",
    "tree_head",
    "unsealed",
    "uploads",
    "watches",
    "work",
]
