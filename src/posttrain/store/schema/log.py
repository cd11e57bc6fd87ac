"""The event log and its Merkle tree."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from posttrain.store.schema.columns import Counter, JsonText, metadata

events = Table(
    "events",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("project", String(63), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("principal", String(32), nullable=False),
    Column("auth", String(16), nullable=False),  # how the principal was known: os | token | …
    Column("request", String(32), nullable=False),  # of the transaction that wrote it
    Column("at", Float(53), nullable=False),
    Column("audited", JsonText, nullable=False),  # values of audited columns, and other states, numbers, digests
    Column("words", String(71)),  # salted digest of its row in `payloads`; NULL: it has none
    Column("leaf", LargeBinary(32), nullable=False),
    Index("events_by_place", "subject", "at"),
    Index("events_by_request", "request"),
    sqlite_autoincrement=True,  # an id is never used twice
)

payloads = Table(
    "payloads",
    metadata,
    Column("event", Counter, ForeignKey("events.id"), primary_key=True, autoincrement=False),
    Column("retention", String(16), nullable=False),
    Column("salt", LargeBinary(16), nullable=False),
    Column("body", JsonText, nullable=False),
)

unsealed = Table(
    "unsealed",
    metadata,
    Column("event", Counter, ForeignKey("events.id"), primary_key=True, autoincrement=False),
)

leaves = Table(
    "leaves",
    metadata,
    Column("sequence", Counter, primary_key=True, autoincrement=False),  # 1, 2, … without a gap
    Column("event", Counter, ForeignKey("events.id"), nullable=False, unique=True),
    Column("leaf", LargeBinary(32), nullable=False),
)

tiles = Table(
    "tiles",
    metadata,
    Column("level", Integer, primary_key=True),
    Column("position", Counter, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary(32), nullable=False),  # root over 256^(level + 1) leaves
)

tree_head = Table(
    "tree_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    Column("root", LargeBinary(32), nullable=False),
    Column("peaks", LargeBinary, nullable=False),  # roots of the perfect subtrees, the largest first
    CheckConstraint("id = 1", name="one_tree_head"),
)

# --- empty in every ledger: they stand in those of this schema, until the next one takes them away --------------------

events_before = Table(
    "events_before",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("payload", JsonText, nullable=False),
    Column("sequence", BigInteger, unique=True),
    Column("previous_hash", String(71)),
    Column("hash", String(71)),
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
