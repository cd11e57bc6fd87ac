"""What an attempt reserves of its run's budget, and why its job was stopped."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns; attempts of before reserve nothing and name no cause."""
    op.add_column("attempts", sa.Column("reserved_tokens", sa.BigInteger()))
    op.add_column("attempts", sa.Column("reserved_seconds", sa.Float(53)))
    op.add_column("attempts", sa.Column("stop_cause", sa.String(16)))
    op.create_index("attempts_by_state", "attempts", ["state"])
