"""Versions of assets, what is thought of them, and what was made from what."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Float, Index, Integer, String, Table, Text

from posttrain.store.schema.columns import JsonText, metadata

assets = Table(
    "assets",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("name", String(256), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("digest", String(71), nullable=False),
    Column("form", String(16), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("meta", JsonText, nullable=False),
    Column("parents", JsonText, nullable=False),
    CheckConstraint("version >= 1", name="asset_versions_start_at_1"),
    Index("assets_by_digest", "digest"),
)

asset_status = Table(  # what people think of a version, which itself never changes
    "asset_status",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("name", String(256), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("status", String(16), nullable=False),  # approved | recalled | nothing
    Column("principal", String(32), nullable=False),  # who said so
    Column("at", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),
    Column("form", String(16), nullable=False),
    Column("bytes", BigInteger),  # NULL: noted by a ledger of before
    Column("class", String(16), nullable=False),  # as what it came first
    Column("created_at", Float(53), nullable=False),
)

edges = Table(  # its ends are named as in domain/records.py
    "edges",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("consumer", Text, primary_key=True),
    Column("slot", Text, primary_key=True),
    Column("producer", Text, primary_key=True),
    Column("output", Text, primary_key=True),
    Column("digest", String(71), primary_key=True),
    Index("edges_by_producer", "project", "producer"),
    Index("edges_by_digest", "project", "digest"),
)

holds = Table(
    "holds",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),
    Column("holder", String(256), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("released_at", Float(53)),  # NULL: it may not be deleted
)
