"""Browser sessions: 256 random bits in a cookie that represent a token. A session ends with its token.

The ledger stores only the SHA-256 of the bits, so it reveals no cookie. No cookie contains the token.
"""

import base64
import re

from posttrain.access.ports import Identity, identity_of
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AccessError
from posttrain.store.grants import begin_session, end_session
from posttrain.store.ledger import Ledger

SESSION = "session"
SECONDS = 12 * 3600.0  # the maximum validity of a session
_BYTES = 32
_FORM = re.compile(r"[A-Za-z0-9_-]{43}")


class SessionAuthenticator:
    """Identifies principals by sessions that have not ended and whose tokens are neither expired nor revoked."""

    auth = SESSION

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def authenticate(self, proof: str) -> Identity:
        """See `Authenticator.authenticate`."""
        if not _FORM.fullmatch(proof):
            raise AccessError("a session must be 43 letters, digits, - or _; got something else; log in again")
        now = self._ledger.clock.now()
        with self._ledger.snapshot() as ledger:
            token = ledger.token_behind(digest_bytes(proof.encode()), now)
        return identity_of(token, now, self.auth, "the session is over; log in again")


def begin(ledger: Ledger, proof: str) -> str:
    """Begin a session for a token and return the session's secret, which is stored nowhere.

    Args:
        proof: a valid token.
    """
    secret = base64.urlsafe_b64encode(ledger.entropy(_BYTES)).decode().rstrip("=")
    token = ledger.token_of(digest_bytes(proof.encode()))
    if token is None:  # revoked tokens stay in the ledger, so this token never existed
        raise AccessError("the token is unknown; ask an admin for a new one")
    until = min(token.expires_at, ledger.clock.now() + SECONDS)
    begin_session(ledger, digest_bytes(secret.encode()), token.id, until)
    return secret


def end(ledger: Ledger, secret: str) -> None:
    """End a session."""
    end_session(ledger, digest_bytes(secret.encode()))
