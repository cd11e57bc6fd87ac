"""The ledger's tables.

Plain SQL types only, so that SQLite and PostgreSQL hold the same thing: times are doubles (seconds since the epoch),
mappings are JSON text. `generation` is the compare-and-set counter of a row; leases live in columns of their own and
do not touch it.

A release works beside the one before it. So a revision adds only: tables, and columns that may be NULL or whose default
is the empty value of their type. It writes into `schema_version.usable_since` which revision's code may still use the
ledger; one that does more than add writes itself, and its upgrade refuses while an older driver lives.
"""

from __future__ import annotations

from posttrain.store.schema.access import principals, projects, roles, sinks, tokens
from posttrain.store.schema.assets import artifacts, asset_status, assets, edges, holds
from posttrain.store.schema.channels import (
    approval_requests,
    approvals,
    channels,
    deployments,
    looks,
    quarantine,
    releases,
)
from posttrain.store.schema.columns import JsonText, UnreadableColumnError, metadata
from posttrain.store.schema.log import chain_head, events, events_before, leaves, payloads, tiles, tree_head, unsealed
from posttrain.store.schema.runs import attempts, runs, signals, stage_cache, stages
from posttrain.store.schema.upkeep import (
    cursors,
    grants,
    hosts,
    operations,
    parts,
    requests,
    sessions,
    uploads,
    watches,
    work,
)

SCHEMA_VERSION = "0004"  # the newest revision in migrations/versions; revisions are counted, so they compare as text
VERSION_TABLE = "schema_version"

__all__ = [
    "SCHEMA_VERSION",
    "VERSION_TABLE",
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
