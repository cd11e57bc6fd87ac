"""The first ledger: runs, stages, attempts, assets, releases, stage cache, events.

The column types are spelled out instead of imported: a revision stays what it was when `store.schema` moves on.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_DIGEST = sa.String(71)
_TIME = sa.Float(53)
_JSON = sa.Text()


def upgrade() -> None:
    """Create everything."""
    _create_runs()
    _create_stages()
    _create_attempts()
    _create_assets()
    _create_releases_and_cache()
    _create_events()


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("manifest_digest", _DIGEST, nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("next_action", sa.Text(), nullable=False),
        sa.Column("lease_owner", sa.Text()),
        sa.Column("lease_expires", _TIME),
        sa.Column("started_at", _TIME),
        sa.Column("finished_at", _TIME),
        sa.Column("desired", sa.String(32), nullable=False),
    )
    op.create_index("runs_by_manifest", "runs", ["manifest_digest"])
    op.create_index("runs_by_name", "runs", ["name"])
    op.create_index("runs_by_state", "runs", ["state"])


def _create_stages() -> None:
    op.create_table(
        "stages",
        sa.Column("run_id", sa.String(64), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("next_action", sa.Text(), nullable=False),
        sa.Column("cache_key", _DIGEST),
        sa.Column("cached_from", sa.Text()),
        sa.Column("inputs", _JSON, nullable=False),
        sa.Column("outputs", _JSON, nullable=False),
        sa.Column("metrics", _JSON, nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("started_at", _TIME),
        sa.Column("finished_at", _TIME),
        sa.Column("not_before", _TIME),
        sa.Column("retried_after", sa.Integer(), nullable=False),
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("stage", sa.String(128), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False, unique=True),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("executor", sa.String(32), nullable=False),
        sa.Column("handle", sa.Text()),
        sa.Column("resume", _DIGEST),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("failure_signature", sa.Text()),
        sa.Column("stop_requested_at", sa.Float(53)),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("launched_at", sa.Float(53)),
        sa.Column("finished_at", _TIME),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
    )


def _create_assets() -> None:
    op.create_table(
        "assets",
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(256), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True),
        sa.Column("digest", _DIGEST, nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("meta", _JSON, nullable=False),
        sa.Column("parents", _JSON, nullable=False),
        sa.CheckConstraint("version >= 1", name="asset_versions_start_at_1"),
    )
    op.create_index("assets_by_digest", "assets", ["digest"])


def _create_releases_and_cache() -> None:
    op.create_table(
        "releases",
        sa.Column("channel", sa.String(128), primary_key=True),
        sa.Column("sequence", sa.Integer(), primary_key=True),
        sa.Column("model_digest", _DIGEST, nullable=False),
        sa.Column("run_id", sa.String(64)),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("report_digest", _DIGEST),
    )
    op.create_table(
        "stage_cache",
        sa.Column("cache_key", _DIGEST, primary_key=True),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("stage", sa.String(128), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
    )


def _create_events() -> None:
    counter = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "events",
        sa.Column("id", counter, primary_key=True, autoincrement=True),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("payload", _JSON, nullable=False),
        sa.Column("sequence", sa.BigInteger(), unique=True),
        sa.Column("previous_hash", _DIGEST),
        sa.Column("hash", _DIGEST),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_subject", "events", ["subject"])
    op.create_table(
        "chain_head",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("hash", _DIGEST, nullable=False),
        sa.CheckConstraint("id = 1", name="one_chain_head"),
    )
