"""What servers need: answers to repeated requests, sessions, where events are sent on to, which host has which job;
which images a project's runs may name.

The ledger says from here on which revision's code may still use it, so that two releases can work side by side.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_PROJECT, _PRINCIPAL, _TIME = sa.String(63), sa.String(32), sa.Float(53)


def upgrade() -> None:
    """Create what is new."""
    op.create_table(
        "requests",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("principal", _PRINCIPAL, primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("verb", sa.String(64), nullable=False),
        sa.Column("body", sa.String(71), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("answer", sa.Text()),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("requests_by_time", "requests", ["at"])
    op.create_table(
        "grants",
        sa.Column("digest", sa.String(71), primary_key=True),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("stage", sa.String(128), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("put_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_index("grants_by_attempt", "grants", ["run_id", "stage", "number"])
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(71), primary_key=True),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
    )
    op.create_index("sessions_by_time", "sessions", ["expires_at"])
    op.create_table(
        "sinks",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("rules", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("paused", sa.String(16), nullable=False),
    )
    op.create_table(
        "cursors",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("sink", sa.String(63), primary_key=True),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("failed_since", _TIME),
        sa.Column("not_before", _TIME),
        sa.Column("at", _TIME),
        sa.Column("lease_owner", sa.Text()),
        sa.Column("lease_until", _TIME),
    )
    op.create_table(
        "hosts",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("seen_at", _TIME, nullable=False),
    )
    _create_what_servers_share()
    for column in (sa.Column("host", sa.String(32)), sa.Column("channel", sa.Text())):
        op.add_column("attempts", column)
    resumed = (("from", sa.Text()), ("step", sa.Integer()), ("tokens", sa.BigInteger()))
    for name, kind in resumed:
        op.add_column("attempts", sa.Column(f"resumed_{name}", kind))
    op.add_column("projects", sa.Column("images", sa.Text()))
    op.create_index("runs_by_time", "runs", ["project", "created_at", "repeat", "id"])
    op.add_column("schema_version", sa.Column("usable_since", sa.String(32)))
    op.execute("UPDATE schema_version SET usable_since = '0002'")


def _create_what_servers_share() -> None:
    """Uploads and operations, which every server of the ledger answers for."""
    op.create_table(
        "operations",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("project", _PROJECT, nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("verb", sa.String(64), nullable=False),
        sa.Column("body", sa.String(71), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("over", sa.Integer(), nullable=False),
        sa.Column("ending", sa.Integer(), nullable=False),
        sa.Column("told_at", _TIME, nullable=False),
        sa.Column("looked_at", _TIME, nullable=False),
    )
    op.create_index("operations_by_time", "operations", ["looked_at"])
    op.create_table(
        "uploads",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("digest", sa.String(71), primary_key=True),
        sa.Column("shown", sa.Integer(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("uploads_by_time", "uploads", ["at"])
    op.create_table(
        "parts",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("digest", sa.String(71), primary_key=True),
        sa.Column("total", sa.BigInteger(), primary_key=True),
        sa.Column("start", sa.BigInteger(), primary_key=True),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("parts_by_time", "parts", ["at"])
