"""Sessions of browsers: which token stands behind the secret that one shows, of which the digest alone is kept."""

from __future__ import annotations

from sqlalchemy import delete, insert

from posttrain.store.ledger import Ledger
from posttrain.store.schema import sessions


def begin_session(ledger: Ledger, digest: str, token_id: str, expires_at: float) -> None:
    """Keep a session; those that are over are forgotten."""
    with ledger.database.write() as connection:
        connection.execute(delete(sessions).where(sessions.c.expires_at <= ledger.clock.now()))
        connection.execute(insert(sessions).values(digest=digest, token=token_id, expires_at=expires_at))


def end_session(ledger: Ledger, digest: str) -> None:
    """Forget one; it need not be known."""
    with ledger.database.write() as connection:
        connection.execute(delete(sessions).where(sessions.c.digest == digest))
