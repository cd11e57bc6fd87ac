"""Who there is, in which project, with which role; and where events are sent on to."""

from __future__ import annotations

from sqlalchemy import Column, Float, ForeignKey, Index, String, Table, Text

from posttrain.store.schema.columns import JsonText, metadata

projects = Table(
    "projects",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("created_at", Float(53), nullable=False),
    Column("images", JsonText),  # that its runs may name; null: nobody said
)

principals = Table(
    "principals",
    metadata,
    Column("id", String(32), primary_key=True),  # random: what events and rows name, so that a name can be erased
    Column("kind", String(16), nullable=False),  # user | service
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", Float(53), nullable=False),
)

roles = Table(
    "roles",
    metadata,
    Column("project", String(63), ForeignKey("projects.id"), primary_key=True),
    Column("principal", String(32), ForeignKey("principals.id"), primary_key=True),
    Column("role", String(16), nullable=False),  # viewer | submitter | approver | admin
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("principal", String(32), ForeignKey("principals.id"), nullable=False),
    Column("secret_digest", String(71), nullable=False, unique=True),
    Column("scopes", JsonText, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("revoked_at", Float(53)),
    Column("replaces", String(32)),  # the token that this one was rotated from
    Index("tokens_by_principal", "principal"),
)

sinks = Table(  # where events are sent on to
    "sinks",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("kind", String(16), nullable=False),  # webhook | jsonl | email
    Column("settings", JsonText, nullable=False),  # of a secret only where it is: an environment variable, a file
    Column("rules", JsonText, nullable=False),  # which events
    Column("created_at", Float(53), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("paused", String(16), nullable=False),  # why nothing is sent: empty: it is | person | failing
)
