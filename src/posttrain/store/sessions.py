"""Sessions of browsers: which token stands behind the secret that one shows, of which the digest alone is kept."""

from __future__ import annotations

from sqlalchemy import delete, insert, select

from posttrain.store.ledger import Ledger
from posttrain.store.schema import sessions, tokens

MOST = 20  # of one token


def begin_session(ledger: Ledger, digest: str, token_id: str, expires_at: float) -> None:
    """Keep a session; those that are over are forgotten, and the oldest of a token that has too many."""
    column = sessions.c
    newest = select(column.digest).where(column.token == token_id)
    newest = newest.order_by(column.expires_at.desc(), column.digest).limit(MOST - 1)
    with ledger.database.write() as connection:
        connection.execute(select(tokens.c.id).where(tokens.c.id == token_id).with_for_update())  # one at a time
        connection.execute(delete(sessions).where(column.expires_at <= ledger.clock.now()))
        kept = connection.execute(newest).scalars().all()
        connection.execute(delete(sessions).where(column.token == token_id, column.digest.not_in(kept)))
        connection.execute(insert(sessions).values(digest=digest, token=token_id, expires_at=expires_at))


def end_session(ledger: Ledger, digest: str) -> None:
    """Forget one; it need not be known."""
    with ledger.database.write() as connection:
        connection.execute(delete(sessions).where(sessions.c.digest == digest))
