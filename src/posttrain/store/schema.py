"""The ledger's tables.

Plain SQL types only, so that SQLite and PostgreSQL hold the same thing: times are doubles (seconds since the epoch),
mappings are JSON text. `generation` is the compare-and-set counter of a row; leases live in columns of their own and
do not touch it.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)

SCHEMA_VERSION = "0001"  # the newest revision in migrations/versions; revisions are counted, so they compare as text
VERSION_TABLE = "schema_version"


class JsonText(TypeDecorator[Any]):
    """A JSON value as text.

    Not the databases' own JSON types: those differ from each other, and PostgreSQL's refuses the NaN that a diverged
    stage reports.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


_Counter = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts only in a column declared INTEGER
metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("manifest_digest", String(71), nullable=False),
    Column("state", String(32), nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("next_action", Text, nullable=False),
    Column("lease_owner", Text),
    Column("lease_expires", Float(53)),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("desired", String(32), nullable=False),
    Index("runs_by_manifest", "manifest_digest"),
    Index("runs_by_name", "name"),
    Index("runs_by_state", "state"),
)

stages = Table(
    "stages",
    metadata,
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(32), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("next_action", Text, nullable=False),
    Column("cache_key", String(71)),
    Column("cached_from", Text),
    Column("inputs", JsonText, nullable=False),
    Column("outputs", JsonText, nullable=False),
    Column("metrics", JsonText, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("not_before", Float(53)),
    Column("retried_after", Integer, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("stage", String(128), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("folder", Text, nullable=False),
    Column("state", String(32), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("executor", String(32), nullable=False),
    Column("handle", Text),
    Column("resume", String(71)),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("failure_signature", Text),
    Column("stop_requested_at", Float(53)),
    Column("tokens", BigInteger, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("launched_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("seconds", Float(53), nullable=False),
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
)

assets = Table(
    "assets",
    metadata,
    Column("kind", String(32), primary_key=True),
    Column("name", String(256), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("digest", String(71), nullable=False),
    Column("form", String(16), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("created_by", Text, nullable=False),
    Column("meta", JsonText, nullable=False),
    Column("parents", JsonText, nullable=False),
    CheckConstraint("version >= 1", name="asset_versions_start_at_1"),
    Index("assets_by_digest", "digest"),
)

releases = Table(
    "releases",
    metadata,
    Column("channel", String(128), primary_key=True),
    Column("sequence", Integer, primary_key=True),  # 1, 2, … within the channel: two writers cannot both be the next
    Column("model_digest", String(71), nullable=False),
    Column("run_id", String(64)),
    Column("action", String(32), nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("report_digest", String(71)),
)

stage_cache = Table(
    "stage_cache",
    metadata,
    Column("cache_key", String(71), primary_key=True),
    Column("run_id", String(64), nullable=False),
    Column("stage", String(128), nullable=False),
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
)

events = Table(
    "events",
    metadata,
    Column("id", _Counter, primary_key=True, autoincrement=True),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("payload", JsonText, nullable=False),
    Column("sequence", BigInteger, unique=True),
    Column("previous_hash", String(71)),
    Column("hash", String(71)),
    Index("events_by_subject", "subject"),
    sqlite_autoincrement=True,  # an id is never used twice
)

chain_head = Table(
    "chain_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("sequence", BigInteger, nullable=False),
    Column("hash", String(71), nullable=False),
    CheckConstraint("id = 1", name="one_chain_head"),
)
