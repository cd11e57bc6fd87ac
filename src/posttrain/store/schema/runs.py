"""Runs, their stages and attempts, what they wait for, and what a stage need not compute again."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, ForeignKeyConstraint, Index, Integer, String, Table, Text

from posttrain.store.schema.columns import JsonText, metadata

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
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("desired", String(32), nullable=False),
    Column("project", String(63), nullable=False, server_default="default"),
    Column("repeat", Integer, nullable=False, server_default="1"),  # 1, 2, …: runs of one manifest
    Index("runs_by_manifest", "project", "manifest_digest", "repeat", unique=True),
    Index("runs_by_name", "name"),
    Index("runs_by_state", "state"),
    Index("runs_by_time", "project", "created_at", "repeat", "id"),
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
    Index("stages_by_key", "cache_key"),
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
    Column("host", String(32)),  # whose drivers alone can reach its job; NULL: the ledger has one
    Column("channel", Text),  # URL of its channel; empty: its folder; NULL: a release of before, whose order says it
    Column("resumed_from", Text),  # RUN/STAGE that wrote the checkpoint `resume`; NULL: none, or as above
    Column("resumed_step", Integer),
    Column("resumed_tokens", BigInteger),
    Column("reserved_tokens", BigInteger),  # of the run's budget while it lives; NULL: no such limit
    Column("reserved_seconds", Float(53)),
    Column("stop_cause", String(16)),  # why its job was stopped; NULL: it was not
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
    Index("attempts_by_state", "state"),
)

signals = Table(
    "signals",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("principal", String(32), nullable=False),  # who sent it
    Column("at", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
)

notes = Table(
    "notes",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("principal", String(32), nullable=False),  # who wrote it
    Column("at", Float(53), nullable=False),
    Column("text", Text, nullable=False),  # empty: it is a tag
    Column("tag", String(24), nullable=False),
    Index("notes_by_tag", "project", "tag", "run_id"),
)

stage_cache = Table(
    "stage_cache",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("cache_key", String(71), primary_key=True),
    Column("run_id", String(64), nullable=False),
    Column("stage", String(128), nullable=False),
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
)
